"""Our training loader beside another: each row once a pass, a new order each epoch, and the exact rest on resuming."""

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_models import Recorder, SaveOnException, index_of, quiet_trainer, together
from processes import run_ranks, values
from torch.utils.data import DataLoader, TensorDataset

from lightning_h5 import H5ResumeError, LazyH5DataModule

ROWS, BATCH, STEPS, EPOCHS = 60, 8, 8, 3
ALL = list(range(ROWS))
MODES = ["min_size", "max_size", "max_size_cycle"]
SHORTER, LONGER = 5, 19  # batches of the other loader: ours is cycled twice and a bit beside the longer one


def other_loader(n_batches):
    return DataLoader(TensorDataset(torch.arange(n_batches * 2)), batch_size=2)


class Beside(LazyH5DataModule):
    """As a user writes it: our loader, and one that is not ours, combined in a mode or as Lightning does by itself."""

    def __init__(self, *paths, n_other, mode=None, **options):
        super().__init__(*paths, batch_size=BATCH, with_index=True, **options)
        self.n_other, self.mode = n_other, mode

    def train_dataloader(self):
        loaders = {"h5": super().train_dataloader(), "other": other_loader(self.n_other)}
        return loaders if self.mode is None else CombinedLoader(loaders, self.mode)


class Both(Recorder):
    """Of our loader the rows of each epoch, of the other the number of batches."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.n_other = {}

    def training_step(self, batch, batch_idx):
        ours, other = batch["h5"], batch["other"]
        if other is not None:
            self.n_other[self.current_epoch] = self.n_other.get(self.current_epoch, 0) + 1
        return super().training_step({"index": torch.empty(0) if ours is None else ours[-1]}, batch_idx)


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.arange(ROWS)})


def n_steps(mode, n_other):
    return min(STEPS, n_other) if mode == "min_size" else max(STEPS, n_other)


def n_rows(mode, n_other):
    """Rows of ours in an epoch."""
    batches = [8] * 6 + [6] * 2
    if mode == "max_size":
        return ROWS
    return sum((batches * 3)[: n_steps(mode, n_other)])


def check_passes(rows, mode, n_other):
    """Each pass over our loader has every row once; epochs have orders of their own."""
    assert [len(epoch) for epoch in rows.values()] == [n_rows(mode, n_other)] * EPOCHS
    for epoch in rows.values():
        passes = [epoch[at : at + ROWS] for at in range(0, len(epoch), ROWS)]
        assert all(sorted(one) == ALL for one in passes if len(one) == ROWS)
        assert all(len(set(one)) == len(one) for one in passes)
    assert len({tuple(epoch[:ROWS]) for epoch in rows.values()}) == EPOCHS


BESIDE = pytest.mark.parametrize("n_other", [SHORTER, STEPS, LONGER], ids=["a shorter", "as long", "a longer"])
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


@pytest.mark.wide
@BESIDE
@WORKERS
@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_data_module_may_add_a_loader_to_ours(file, mode, n_other, num_workers):
    model = Both()
    datamodule = Beside(file, n_other=n_other, mode=mode, num_workers=num_workers)
    quiet_trainer(max_epochs=EPOCHS).fit(model, datamodule=datamodule)
    check_passes(model.train_rows, mode, n_other)
    assert set(model.n_other.values()) == {n_other if mode == "max_size" else n_steps(mode, n_other)}


def test_the_first_pass_is_that_of_our_loader_alone(file):
    both, alone = Both(), Recorder()
    quiet_trainer(max_epochs=EPOCHS).fit(both, datamodule=Beside(file, n_other=LONGER))
    quiet_trainer(max_epochs=EPOCHS).fit(alone, datamodule=LazyH5DataModule(file, batch_size=BATCH, with_index=True))
    assert {epoch: rows[:ROWS] for epoch, rows in both.train_rows.items()} == alone.train_rows


@pytest.mark.wide
@BESIDE
@WORKERS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")  # so it is
def test_our_loader_without_its_data_module_may_be_combined(file, mode, n_other, num_workers):
    datamodule, model = LazyH5DataModule(file, batch_size=BATCH, with_index=True, num_workers=num_workers), Both()
    datamodule.setup("fit")
    loaders = {"h5": datamodule.train_dataloader(), "other": other_loader(n_other)}
    quiet_trainer(max_epochs=EPOCHS).fit(model, train_dataloaders=CombinedLoader(loaders, mode))
    check_passes(model.train_rows, mode, n_other)


def combined_on_a_rank(rank, file, mode, n_other):
    model = Both()
    trainer = quiet_trainer(max_epochs=EPOCHS, devices=2, strategy="ddp")
    trainer.fit(model, datamodule=Beside(file, n_other=n_other, mode=mode))
    return model.train_rows


@pytest.mark.wide
@pytest.mark.parametrize("mode", MODES)
def test_combined_over_two_ranks_each_row_comes_once_a_pass(file, tmp_path, mode):
    n_other = 12  # shared by Lightning: 6 batches on each rank, and ours has 4
    ranks = values(run_ranks(combined_on_a_rank, 2, tmp_path, file, mode, n_other))
    for epoch in range(EPOCHS):
        first, second = (rank[epoch] for rank in ranks)
        assert sorted(first[:30] + second[:30]) == ALL
        assert len(first) == len(second) == {"min_size": 30, "max_size": 30, "max_size_cycle": 46}[mode]
        assert len(set(first[30:] + second[30:])) == {"max_size_cycle": 32}.get(mode, 0)
    assert len({tuple(rank[epoch][:30]) for rank in ranks for epoch in range(EPOCHS)}) == 2 * EPOCHS


STOPS = [(0, 3), (1, 0), (1, 4), (1, 7), (1, 8), (1, 13), (2, 18)]


CASES = [
    pytest.param(mode, n_other, stop, id=f"{mode}-{n_other}-{stop}")
    for mode in MODES
    for n_other in (SHORTER, LONGER)
    for stop in STOPS
    if stop[1] < n_steps(mode, n_other)
]


@pytest.mark.wide
@pytest.mark.parametrize(("mode", "n_other", "stop"), CASES)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # torch's loader is not ours
def test_a_run_broken_off_goes_on_with_exactly_the_rest(file, tmp_path, mode, n_other, stop):
    make = lambda: Beside(file, n_other=n_other, mode=mode)  # noqa: E731
    whole, broken, resumed = Both(), Both(fail_at=stop), Both()
    quiet_trainer(max_epochs=EPOCHS).fit(whole, datamodule=make())
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=EPOCHS, callbacks=[SaveOnException(tmp_path)]).fit(broken, datamodule=make())
    saved = tmp_path / "exception.ckpt"
    quiet_trainer(max_epochs=EPOCHS).fit(resumed, datamodule=make(), ckpt_path=saved)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows


def test_other_batches_beside_another_loader_are_refused_in_mid_epoch(file, tmp_path):
    broken = Both(fail_at=(1, 4))
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=EPOCHS, callbacks=[SaveOnException(tmp_path)]).fit(
            broken, datamodule=Beside(file, n_other=LONGER)
        )
    smaller = Beside(file, n_other=LONGER)
    smaller.batch_size = 4
    with pytest.raises(
        H5ResumeError, match=r"batches of 8 rows on 1 ranks.*batches of 4 on 1 ranks and a second loader"
    ):
        quiet_trainer(max_epochs=EPOCHS).fit(Both(), datamodule=smaller, ckpt_path=tmp_path / "exception.ckpt")


# Lists and dicts of loaders to validate on ---------------------------------------------------------------------------


class SeveralVal(Recorder):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if not self.trainer.sanity_checking:
            self.rows.setdefault(dataloader_idx, []).extend(index_of(batch))


def several(make):
    class Several(LazyH5DataModule):
        def val_dataloader(self):
            return make(super().val_dataloader(), DataLoader(TensorDataset(torch.arange(5)), batch_size=2))

    return Several


SEVERAL = {
    "list": lambda ours, other: [ours, other],
    "dict": lambda ours, other: {"ours": ours, "other": other},
    "combined": lambda ours, other: CombinedLoader([ours, other], "sequential"),
}


@WORKERS
@pytest.mark.parametrize("case", SEVERAL)
def test_our_validation_loader_may_be_one_of_several(file, case, num_workers):
    datamodule = several(SEVERAL[case])(file, file, batch_size=BATCH, with_index=True, num_workers=num_workers)
    model, trainer = SeveralVal(), quiet_trainer()
    trainer.fit(model, datamodule=datamodule)
    trainer.validate(model, datamodule=datamodule, verbose=False)
    assert (model.rows[0], model.rows[1]) == (ALL * 3, [0, 1, 2, 3, 4] * 3)
    assert [sorted(rows) for rows in model.train_rows.values()] == [ALL, ALL]


def several_on_a_rank(rank, file):
    model = SeveralVal()
    datamodule = several(SEVERAL["list"])(file, file, batch_size=BATCH, with_index=True)
    quiet_trainer(devices=2, strategy="ddp").fit(model, datamodule=datamodule)
    return model.rows[0]


@pytest.mark.wide
def test_our_validation_loader_beside_another_over_two_ranks_has_each_row_once(file, tmp_path):
    ranks = values(run_ranks(several_on_a_rank, 2, tmp_path, file))
    assert ranks == [ALL[:30] * 2, ALL[30:] * 2]

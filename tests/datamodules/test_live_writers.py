"""Files that another process writes to meanwhile: read up to the rows that were there in setup, and no further."""

import multiprocessing
import time

import h5py
import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from arguments import nested
from guards import HANG
from processes import run_ranks

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5DataChangedError,
    H5FileError,
    LazyH5DataModule,
    RankCachedH5DataModule,
)

CONTEXT = multiprocessing.get_context("fork")


def write(path, has_begun, is_over):
    """Appends rows, whose values are their numbers, until it is told to stop."""
    with h5py.File(path, "w", libver="latest") as file:
        options = {"maxshape": (None,), "compression": "gzip"}
        x = file.create_dataset("x", data=np.arange(64.0), chunks=(16,), **options)
        y = file.create_dataset("y", data=np.arange(64), chunks=(1000,), **options)
        file.swmr_mode = True
        has_begun.set()
        while not is_over.is_set():
            n = len(x)
            for array in (x, y):  # x is longer for a moment
                array.resize((n + 8,))
                array[n:] = np.arange(n, n + 8)
                array.flush()
                time.sleep(0.001)


@pytest.fixture
def live(tmp_path):
    path, has_begun, is_over = str(tmp_path / "live.h5"), CONTEXT.Event(), CONTEXT.Event()
    writer = CONTEXT.Process(target=write, args=(path, has_begun, is_over), daemon=True)
    writer.start()
    assert has_begun.wait(HANG)
    yield path
    is_over.set()
    writer.join(HANG)
    assert writer.exitcode == 0


MODULES = {
    "lazy": lambda path, **more: LazyH5DataModule(path, **nested(x_key="x", **more)),
    "cached": lambda path, **more: RankCachedH5DataModule(path, **nested(x_key="x", **more)),
    "combined": lambda path, **more: CombinedHDF5DataModule(path, **nested(fields=["x"], x_dtype=None, **more)),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", MODULES)
def test_rows_of_setup_are_read_while_the_file_grows(live, kind, num_workers):
    module = MODULES[kind](live, swmr=True, with_index=True, batch_size=8, num_workers=num_workers)
    module.setup("fit")
    loader = module.train_dataloader()
    n_rows = []
    for _ in range(2):
        seen = []
        for batch in loader:
            x, index = (batch["x"], batch["index"]) if isinstance(batch, dict) else batch
            assert x.tolist() == index.tolist()
            seen += index.tolist()
        assert sorted(seen) == list(range(len(seen)))
        n_rows.append(len(seen))
    assert n_rows[0] == n_rows[1] >= 64
    with h5py.File(live, swmr=True) as file:
        assert len(file["x"]) > n_rows[0], "the writer went on meanwhile"
    module.teardown("fit")


@pytest.mark.parametrize("kind", MODULES)
def test_without_swmr_the_file_is_refused_and_the_cause_named(live, kind):
    with pytest.raises(H5FileError, match=r"live\.h5.*(write|lock)"):
        MODULES[kind](live).setup("fit")


def test_another_file_in_its_place_is_a_change_all_the_same(live, tmp_path):
    module = LazyH5DataModule(live, x_key="x", files={"swmr": True}, batch_size=8)
    module.setup("fit")
    loader = module.train_dataloader()
    assert len(list(loader)) >= 8
    with h5py.File(tmp_path / "other.h5", "w", libver="latest") as file:
        file["x"] = np.zeros(200)
    (tmp_path / "other.h5").rename(live)
    with pytest.raises(H5DataChangedError, match="replaced by another file"):
        list(loader)
    module.teardown("fit")


def passes(columns):
    """All rows that there are in ``setup``."""
    return columns["y"] >= 0


PAIRS = {
    "lazy": lambda path, **more: LazyH5DataModule(
        path, **nested(x_key="x", y_key="y", group_key="y", where=passes, **more)
    ),
    "cached": lambda path, **more: RankCachedH5DataModule(
        path, **nested(x_key="x", y_key="y", group_key="y", where=passes, **more)
    ),
    "combined": lambda path, **more: CombinedHDF5DataModule(
        path, **nested(fields=["x"], x_dtype=None, group_key="y", where=passes, **more)
    ),
}


def pairs_of(kind, path):
    """Rows of both splits, of each of some set-ups while the file grows."""
    module = PAIRS[kind](path, swmr=True, with_index=True, batch_size=8, split=0.2)
    found = []
    for _ in range(3):
        module.setup("fit")
        rows = []
        for loader in (module.train_dataloader(), module.val_dataloader()):
            for batch in loader:
                x, *y, _ = batch.values() if isinstance(batch, dict) else batch
                assert not y or x.tolist() == y[0].tolist()
                rows += x.tolist()
        module.teardown("fit")
        assert sorted(rows) == list(range(len(rows)))
        found.append(len(rows))
    return found


@pytest.mark.parametrize("kind", PAIRS)
def test_arrays_that_are_appended_one_after_the_other_have_equally_many_rows_in_all_looks(live, kind):
    found = pairs_of(kind, live)
    assert 64 <= found[0] <= found[-1]
    assert all(n_rows % 8 == 0 for n_rows in found)


def rank_of(rank, path):
    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch):
            assert batch[0].tolist() == batch[1].tolist() == batch[2].tolist()
            seen.extend(batch[2].tolist())
            return self.layer(batch[0][:, None].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    time.sleep(0.05 * rank)  # the file is longer by then
    module = LazyH5DataModule(path, x_key="x", y_key="y", files={"swmr": True}, with_index=True, batch_size=8)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet).fit(Model(), module)
    return seen


@pytest.mark.wide
def test_ranks_that_look_at_different_times_train_on_the_same_rows(live, tmp_path):
    outcomes = run_ranks(rank_of, 2, tmp_path, live)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].output
    rows = sorted(row for outcome in outcomes for row in outcome.value)
    assert len(rows) >= 64
    assert rows == list(range(len(rows)))

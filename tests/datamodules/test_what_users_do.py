"""What users do with a Trainer and a data module besides one fit: before it, after it, again, and in its middle."""

import os

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning_models import Recorder, index_of, quiet_trainer
from processes import run_ranks, values
from sixty_rows import ALL, ROWS, VAL, VAL_ROWS, WORKERS, module

from lightning_h5 import H5ValueError


def fit(datamodule, model=None, **options):
    model = Recorder() if model is None else model
    quiet_trainer(**({"num_sanity_val_steps": 0} | options)).fit(model, datamodule=datamodule)
    return model


@pytest.fixture
def whole(files):
    """The rows of five epochs of one undisturbed fit."""
    return fit(module(files), max_epochs=5).train_rows


def head(whole, n):
    return {epoch: whole[epoch] for epoch in range(n)}


# Other stages, before and after ----------------------------------------------------------------------------------


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("same", [True, False], ids=["the same trainer", "a trainer each"])
@pytest.mark.parametrize("fresh", [True, False], ids=["a data module each", "the same data module"])
def test_other_stages_before_and_after_a_fit_see_their_rows_and_move_none_of_it(files, whole, num_workers, same, fresh):
    model, shared = Recorder(), quiet_trainer(num_sanity_val_steps=0)
    kept = module(files, num_workers=num_workers)
    for stage in ("predict", "validate", "test", "fit", "validate", "predict", "test"):
        model.rows = {"val": [], "test": [], "predict": []}
        trainer = shared if same else quiet_trainer(num_sanity_val_steps=0)
        datamodule = module(files, num_workers=num_workers) if fresh else kept
        getattr(trainer, stage)(model, datamodule=datamodule)
        expected = {"fit": ("val", VAL * 2), "validate": ("val", VAL)}.get(stage, (stage, VAL))
        assert model.rows == {"val": [], "test": [], "predict": []} | dict([expected])
    assert model.train_rows == head(whole, 2)


class ValidateInside(Callback):
    """Validates in the middle of an epoch with a trainer of its own, as one does with a copy of the weights."""

    def __init__(self, datamodule):
        self.datamodule, self.model = datamodule, Recorder()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3:
            quiet_trainer().validate(self.model, datamodule=self.datamodule, verbose=False)


@WORKERS
def test_a_second_trainer_may_validate_with_another_data_module_in_mid_epoch(files, whole, num_workers):
    inside = ValidateInside(module(files))
    assert fit(module(files, num_workers=num_workers), callbacks=[inside]).train_rows == head(whole, 2)
    assert inside.model.rows["val"] == VAL * 2


class LookInside(Callback):
    """Iterates over loaders of the running fit in the middle of an epoch and between epochs, as one who plots does."""

    def __init__(self, n_batches):
        self.n_batches, self.seen = n_batches, {"train": [], "val": []}

    def look(self, trainer):
        loaders = {"train": trainer.train_dataloader, "val": trainer.val_dataloaders}
        for name, loader in loaders.items():
            batches = zip(range(self.n_batches), loader, strict=False)
            self.seen[name].append([row for _, batch in batches for row in index_of(batch)])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.look(trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.look(trainer)


@pytest.mark.parametrize(
    ("n_batches", "options"),
    [(1, {}), (100, {}), (1, {"num_workers": 1, "persistent_workers": False})],
    ids=["a batch", "all", "a batch, with a worker"],
)
def test_a_callback_that_iterates_the_loaders_of_a_fit_does_not_disturb_it(files, whole, options, n_batches):
    look = LookInside(n_batches)
    model = fit(module(files, **options), callbacks=[look])
    assert model.train_rows == head(whole, 2)
    assert model.rows["val"] == VAL * 2
    n, n_val = (8, 8) if n_batches == 1 else (ROWS, VAL_ROWS)
    assert look.seen["val"] == [VAL[:n_val]] * 4
    assert look.seen["train"] == [whole[epoch][:n] for epoch in (0, 0, 1, 1)]


def test_a_callback_may_iterate_a_loader_of_its_own_from_the_same_data_module(files, whole):
    class AnotherLoader(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx in (0, 5):
                assert sum(len(index_of(batch)) for batch in trainer.datamodule.val_dataloader()) == VAL_ROWS

    model = fit(module(files), callbacks=[AnotherLoader()])
    assert model.train_rows == head(whole, 2)


# Before the fit --------------------------------------------------------------------------------------------------


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("stage", [None, "fit"])
@pytest.mark.parametrize("n_batches", [0, 1, 100])
def test_setup_and_iteration_by_hand_before_a_fit_move_nothing(files, whole, num_workers, stage, n_batches):
    datamodule = module(files, num_workers=num_workers)
    datamodule.setup(stage)
    loaders = [datamodule.train_dataloader(), datamodule.val_dataloader()]
    for loader in loaders:
        for _ in zip(range(n_batches), loader, strict=False):
            pass
    model = fit(datamodule)
    assert model.train_rows == head(whole, 2)
    assert model.rows["val"] == VAL * 2


def test_a_loader_taken_by_hand_before_the_fit_still_works_after_it(files, whole):
    datamodule = module(files)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    assert fit(datamodule).train_rows == head(whole, 2)
    loader.sampler.set_epoch(3)
    assert [row for batch in loader for row in index_of(batch)] == whole[3]


# Fit after fit ---------------------------------------------------------------------------------------------------


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("same", [True, False], ids=["the same data module", "a data module each"])
def test_a_second_fit_of_a_new_trainer_is_like_the_first(files, whole, num_workers, same):
    datamodule = module(files, num_workers=num_workers)
    for _ in range(2):
        assert fit(datamodule if same else module(files, num_workers=num_workers)).train_rows == head(whole, 2)


@WORKERS
def test_raising_max_epochs_goes_on_with_the_next_epoch(files, whole, num_workers):
    model, trainer, datamodule = Recorder(), quiet_trainer(max_epochs=2), module(files, num_workers=num_workers)
    for n in (2, 3, 5):
        trainer.fit_loop.max_epochs = n
        trainer.fit(model, datamodule=datamodule)
        assert model.train_rows == head(whole, n)


def test_raising_max_epochs_with_a_validation_between(files, whole):
    model, trainer, datamodule = Recorder(), quiet_trainer(max_epochs=1), module(files)
    for n in (1, 2, 3):
        trainer.fit_loop.max_epochs = n
        trainer.fit(model, datamodule=datamodule)
        trainer.validate(model, datamodule=datamodule, verbose=False)
    assert model.train_rows == head(whole, 3)


def test_a_finished_run_is_resumed_without_training(files, tmp_path):
    trainer, again = quiet_trainer(max_epochs=2), Recorder()
    trainer.fit(Recorder(), datamodule=module(files))
    trainer.save_checkpoint(tmp_path / "done.ckpt")
    quiet_trainer(max_epochs=2).fit(again, datamodule=module(files), ckpt_path=tmp_path / "done.ckpt")
    assert again.train_rows == {}


def test_a_finished_run_goes_on_when_more_epochs_are_asked_for(files, whole, tmp_path):
    trainer, again = quiet_trainer(max_epochs=2), Recorder()
    trainer.fit(Recorder(), datamodule=module(files))
    trainer.save_checkpoint(tmp_path / "done.ckpt")
    quiet_trainer(max_epochs=5).fit(again, datamodule=module(files), ckpt_path=tmp_path / "done.ckpt")
    assert again.train_rows == {epoch: whole[epoch] for epoch in (2, 3, 4)}


def test_no_epochs_are_no_training_and_no_obstacle_to_a_later_fit(files, whole):
    datamodule = module(files)
    assert fit(datamodule, max_epochs=0).train_rows == {}
    assert fit(datamodule).train_rows == head(whole, 2)


def test_a_fit_after_one_that_failed_starts_over(files, whole):
    datamodule = module(files)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(datamodule, Recorder(fail_at=(1, 3)))
    assert fit(datamodule).train_rows == head(whole, 2)


def test_data_modules_of_a_k_fold_loop_train_on_what_they_do_not_validate(files):
    """One model after the other, a data module for each fold, then all of them once more."""
    for _ in range(2):
        validated = []
        for fold in range(3):
            datamodule = module(files, val_path=None, split={"num_folds": 3, "fold": fold}, with_index=False)
            model = fit(datamodule, RowValues(), max_epochs=2)
            assert [sorted(rows) for rows in model.train_rows.values()] == [sorted({*ALL} - {*model.rows["val"]})] * 2
            assert model.rows["val"][:20] == model.rows["val"][20:]
            validated += model.rows["val"][:20]
        assert sorted(validated) == ALL


class RowValues(Recorder):
    """x of a row is its place in the file, whatever its index in the split."""

    def training_step(self, batch, batch_idx):
        return super().training_step([batch], batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step([batch], batch_idx)


# Processes that Lightning starts itself --------------------------------------------------------------------------


def launched_by_lightning(rank, files, strategy, num_workers, folder):
    model = WritesRows(folder)
    trainer = quiet_trainer(devices=2, strategy=strategy, num_sanity_val_steps=0)
    trainer.fit(model, datamodule=module(files, num_workers=num_workers))
    if strategy == "ddp_fork":
        trainer.predict(model, datamodule=module(files, num_workers=num_workers), return_predictions=False)
    return trainer.global_step


class WritesRows(Recorder):
    """What a spawned process remembers is lost with it, so each writes its rows to a file."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_end(self):
        torch.save((self.train_rows, self.rows["val"]), f"{self.folder}/{self.global_rank}.pt")

    def on_predict_end(self):
        torch.save(self.rows["predict"], f"{self.folder}/predicted{self.global_rank}.pt")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "num_workers"), [pytest.param("ddp_spawn", 0, marks=pytest.mark.slow), ("ddp_fork", 1)]
)
def test_ranks_that_lightning_forks_or_spawns_share_each_epoch(files, tmp_path, strategy, num_workers):
    values(run_ranks(launched_by_lightning, 1, tmp_path, files, strategy, num_workers, str(tmp_path)))
    (first, first_val), (second, second_val) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert [len(first[epoch]) for epoch in (0, 1)] == [30, 30]
    assert [sorted(first[epoch] + second[epoch]) for epoch in (0, 1)] == [ALL, ALL]
    assert first[0] != first[1]
    assert (first_val, second_val) == (VAL[:10] * 2, VAL[10:] * 2)
    if strategy == "ddp_fork":
        predicted = [torch.load(tmp_path / f"predicted{rank}.pt") for rank in (0, 1)]
        assert predicted == [VAL[:10], VAL[10:]]


# Splits that are missing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_without_data_is_refused_with_what_to_pass(files, stage):
    split = {"validate": "val"}.get(stage, stage)
    with pytest.raises(H5ValueError, match=f"there is no data for '{split}'. Pass {split}_path"):
        getattr(quiet_trainer(), stage)(Recorder(), datamodule=module(files, **{f"{split}_path": None}))


def test_training_data_alone_are_enough_to_train(files, whole):
    model = fit(module(files, val_path=None, test_path=None, predict_path=None))
    assert model.train_rows == head(whole, 2)
    assert model.rows["val"] == []


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_data_of_one_stage_alone_are_enough_for_it(files, stage):
    model, split = Recorder(), {"validate": "val"}.get(stage, stage)
    none = dict.fromkeys(("train_path", "val_path", "test_path", "predict_path"))
    datamodule = module(files, **(none | {f"{split}_path": files[0]}))
    getattr(quiet_trainer(), stage)(model, datamodule=datamodule)
    assert model.rows[split] == ALL
    with pytest.raises(H5ValueError, match="there is no data for 'train'"):
        fit(datamodule)


# Workers ---------------------------------------------------------------------------------------------------------


class Pids(LightningModule):
    """Which processes made the batches of each epoch; x of a row is the process that transformed it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.train_pids, self.val_pids = [], []

    def on_train_epoch_start(self):
        self.train_pids.append(set())

    def on_validation_epoch_start(self):
        self.val_pids.append(set())

    def training_step(self, batch, batch_idx):
        self.train_pids[-1] |= {*batch[0].tolist()}
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        self.val_pids[-1] |= {*batch[0].tolist()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pid(x):
    return torch.tensor(os.getpid())


def test_persistent_workers_live_through_all_epochs_and_validations(files):
    model = fit(module(files, num_workers=2, transform=pid), Pids(), max_epochs=3, num_sanity_val_steps=2)
    assert len(model.train_pids) == 3
    assert len(model.val_pids) == 4
    assert [len(set.union(*pids)) for pids in (model.train_pids, model.val_pids)] == [2, 2]
    assert os.getpid() not in {*model.train_pids[0], *model.val_pids[0]}


def test_workers_that_are_not_to_persist_are_others_each_epoch(files):
    options = {"num_workers": 2, "persistent_workers": False, "transform": pid}
    model = fit(module(files, **options), Pids(), max_epochs=3)
    assert [len(set.union(*pids)) for pids in (model.train_pids, model.val_pids)] == [6, 6]


def test_without_workers_transforms_run_in_this_process(files):
    model = fit(module(files, transform=pid), Pids())
    assert model.train_pids == model.val_pids == [{os.getpid()}] * 2


# Loaders of the user's own, after a fit with a data module ----------------------------------------------------------


@pytest.mark.parametrize("stage", ["predict", "test", "validate", "fit"])
@pytest.mark.parametrize("same", [True, False], ids=["the same trainer", "another trainer"])
def test_loaders_of_ones_own_are_used_after_a_fit_with_the_data_module(files, tmp_path, stage, same):
    datamodule = module(files, split=0.25, val_path=None, test_path=None, predict_path=None)
    trainer = quiet_trainer(num_sanity_val_steps=0)
    trainer.fit(Recorder(), datamodule=datamodule)
    before = datamodule.state_dict()
    other, model = trainer if same else quiet_trainer(num_sanity_val_steps=0), Recorder()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(100, 108)), batch_size=4)
    if stage == "fit":
        other.fit_loop.max_epochs += 1
    getattr(other, stage)(model, *([loader, loader] if stage == "fit" else [loader]))
    seen = list(model.train_rows.values())[-1] if stage == "fit" else model.rows[{"validate": "val"}.get(stage, stage)]
    assert seen == list(range(100, 108))
    if stage != "fit":
        assert datamodule.state_dict() == before

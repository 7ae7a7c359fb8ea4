"""Lightning's tuners try batches before the training: it then begins at the first row of epoch 0 all the same."""

import numpy as np
import pytest
from arguments import nested
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning_models import Recorder, index_of, quiet_trainer
from lightning_utilities.core.imports import RequirementCache

from lightning_h5 import H5ResumeError, LazyH5DataModule

ROWS, VAL_ROWS, FITS = 60, 20, 11  # a step of more than 11 rows does not fit into memory


class Tunable(Recorder):
    """Has a learning rate to find, and a memory that is full at some batch size; remembers what was tried."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.lr = 0.1
        self.tried = set()

    def training_step(self, batch, batch_idx):
        self.tried.add(len(index_of(batch)))
        if len(index_of(batch)) > FITS:
            raise RuntimeError("CUDA error: out of memory")
        return super().training_step(batch, batch_idx)


class ForgetTrials(Callback):
    """Tuners leave the callbacks out of their trials, so that this one hears of the training alone."""

    def on_train_start(self, trainer, pl_module):
        pl_module.train_rows.clear()
        pl_module.rows["val"].clear()


@pytest.fixture(autouse=True)
def collector_rests(monkeypatch):
    """Tuners call it for each size they try, and it takes as long as all the rest."""
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)


@pytest.fixture
def make(make_h5):
    train, val = make_h5({"x": np.arange(ROWS)}), make_h5({"x": np.arange(VAL_ROWS)})
    options = {"batch_size": 4, "with_index": True, "seed": 3}
    return lambda val_path=val, **more: LazyH5DataModule(train, **nested(**(options | {"val_path": val_path} | more)))


def trainer_in(folder, callbacks=(), **options):
    callbacks = [*callbacks, ForgetTrials()]
    return quiet_trainer(default_root_dir=folder, callbacks=callbacks, num_sanity_val_steps=0, **options)


def rows_of_a_fresh_run(datamodule, max_epochs=2):
    model = Recorder()
    quiet_trainer(max_epochs=max_epochs).fit(model, datamodule=datamodule)
    assert all(sorted(rows) == list(range(ROWS)) for rows in model.train_rows.values())
    return model.train_rows


SEARCHES = {
    "power": ({"mode": "power", "init_val": 4}, {8}),
    "binsearch": ({"mode": "binsearch", "init_val": 8}, {FITS, FITS - 1}),  # newer Lightning takes 5 % off
}
OLD = pytest.mark.skipif(
    RequirementCache("lightning<2.6"), reason="older Lightning keeps counts of the trials, and leaves batches out"
)
BOTH = pytest.mark.parametrize("has_val", [False, True], ids=["without val", "with val"])


def tune_batch_size(how, options, trainer, model, datamodule):
    if how == "tuner":
        found = Tuner(trainer).scale_batch_size(model, datamodule=datamodule, steps_per_trial=2, **options)
        assert datamodule.batch_size == found
    trainer.fit(model, datamodule=datamodule)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("search", "has_val", "num_workers"),
    [("power", True, 0), ("power", False, 1), ("binsearch", True, 1), ("binsearch", False, 0)],
)
@pytest.mark.parametrize("how", ["tuner", "callback"])
def test_after_the_batch_size_was_found_a_run_is_one_with_that_size(make, tmp_path, how, search, has_val, num_workers):
    (options, right), extra = SEARCHES[search], {} if has_val else {"val_path": None}
    datamodule, model = make(num_workers=num_workers, **extra), Tunable()
    callbacks = [BatchSizeFinder(steps_per_trial=2, **options)] if how == "callback" else []
    tune_batch_size(how, options, trainer_in(tmp_path, callbacks), model, datamodule)
    assert max(model.tried) > FITS
    assert datamodule.batch_size <= FITS
    assert model.train_rows == rows_of_a_fresh_run(make(batch_size=datamodule.batch_size))
    assert model.rows["val"] == (list(range(VAL_ROWS)) * 2 if has_val else [])
    assert datamodule.batch_size in right


def tune_learning_rate(how, trainer, model, datamodule):
    if how == "tuner":
        Tuner(trainer).lr_find(model, datamodule=datamodule, num_training=20)
    trainer.fit(model, datamodule=datamodule)


@pytest.mark.parametrize(("has_val", "num_workers"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("how", ["tuner", pytest.param("callback", marks=OLD)])
def test_after_the_learning_rate_was_found_training_starts_at_the_first_row(make, tmp_path, how, has_val, num_workers):
    datamodule, model = make(num_workers=num_workers, **({} if has_val else {"val_path": None})), Tunable()
    callbacks = [LearningRateFinder(num_training_steps=20)] if how == "callback" else []
    tune_learning_rate(how, trainer_in(tmp_path, callbacks), model, datamodule)
    assert model.train_rows == rows_of_a_fresh_run(make())
    assert model.rows["val"] == (list(range(VAL_ROWS)) * 2 if has_val else [])


def test_both_tuners_one_after_the_other_then_two_fits(make, tmp_path):
    datamodule, model = make(), Tunable()
    tuner = Tuner(trainer_in(tmp_path))
    tuner.scale_batch_size(model, datamodule=datamodule, init_val=1, max_trials=3, steps_per_trial=1)
    tuner.lr_find(model, datamodule=datamodule, num_training=9)
    for _ in range(2):
        trainer_in(tmp_path).fit(model, datamodule=datamodule)
        assert model.train_rows == rows_of_a_fresh_run(make(batch_size=datamodule.batch_size))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_finder_for_another_stage_leaves_every_row_to_it(make, tmp_path, stage):
    path = make()._paths["train"]
    datamodule, model = make(val_path=path, test_path=path, predict_path=path), Tunable()
    finder = BatchSizeFinder(init_val=2, max_trials=2, steps_per_trial=1)
    trainer = quiet_trainer(default_root_dir=tmp_path, callbacks=[finder])
    getattr(trainer, stage)(model, datamodule=datamodule)
    rows = model.rows["val" if stage == "validate" else stage]
    assert rows[-ROWS:] == list(range(ROWS))
    assert finder.optimal_batch_size == datamodule.batch_size > 2
    model = Tunable()
    trainer_in(tmp_path).fit(model, datamodule=datamodule)
    assert model.train_rows == rows_of_a_fresh_run(make(batch_size=datamodule.batch_size))


FINDERS = {
    "batch size": lambda: BatchSizeFinder(init_val=1, max_trials=3, steps_per_trial=1),
    "learning rate": lambda: LearningRateFinder(num_training_steps=9),
}


@pytest.mark.parametrize("finder", FINDERS)
def test_a_finder_in_a_resumed_fit_is_refused(make, tmp_path, finder):
    """Lightning runs it before it restores the loops, forgets the checkpoint over it, and would begin at epoch 0."""
    keep = ModelCheckpoint(tmp_path, filename="kept", every_n_train_steps=1, save_top_k=1)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer_in(tmp_path, [keep], enable_checkpointing=True).fit(Tunable(fail_at=(1, 3)), datamodule=make())
    resumed = Tunable()
    with pytest.raises(H5ResumeError, match="before its position was applied"):
        trainer_in(tmp_path, [FINDERS[finder]()]).fit(resumed, datamodule=make(), ckpt_path=tmp_path / "kept.ckpt")
    assert resumed.train_rows == {}


@pytest.mark.parametrize("finder", ["batch size", pytest.param("learning rate", marks=OLD)])
def test_a_run_that_began_with_a_finder_is_resumed_exactly(make, tmp_path, finder):
    keep = ModelCheckpoint(tmp_path, filename="kept", every_n_train_steps=1, save_top_k=1)
    broken, resumed = Tunable(fail_at=(1, 3)), Tunable()
    with pytest.raises(RuntimeError, match="stop here"):
        trainer_in(tmp_path, [FINDERS[finder](), keep], enable_checkpointing=True).fit(broken, datamodule=make())
    trainer_in(tmp_path).fit(resumed, datamodule=make(), ckpt_path=tmp_path / "kept.ckpt")
    whole = rows_of_a_fresh_run(make())
    assert broken.train_rows[0] == whole[0]
    assert broken.train_rows[1] + resumed.train_rows[1] == whole[1]


class TuneAtFirstEpoch:
    """As Lightning's documentation shows both finders: called when an epoch starts, not when the fit does."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            (self.scale_batch_size if isinstance(self, BatchSizeFinder) else self.lr_find)(trainer, pl_module)
            pl_module.train_rows.clear()


class BatchSizeAtFirstEpoch(TuneAtFirstEpoch, BatchSizeFinder):
    pass


class LearningRateAtFirstEpoch(TuneAtFirstEpoch, LearningRateFinder):
    pass


AT_FIRST_EPOCH = {
    "batch size": lambda: BatchSizeAtFirstEpoch(init_val=1, max_trials=3, steps_per_trial=1),
    "learning rate": lambda: LearningRateAtFirstEpoch(num_training_steps=9),
}


@OLD
@BOTH
@pytest.mark.parametrize("finder", FINDERS)
def test_a_finder_that_is_called_when_the_first_epoch_starts_leaves_every_row_to_it(make, tmp_path, finder, has_val):
    datamodule, model = make(**({} if has_val else {"val_path": None})), Tunable()
    trainer = quiet_trainer(default_root_dir=tmp_path, callbacks=[AT_FIRST_EPOCH[finder]()], num_sanity_val_steps=0)
    trainer.fit(model, datamodule=datamodule)
    assert model.tried >= ({2, 4} if finder == "batch size" else {4})
    assert model.train_rows == rows_of_a_fresh_run(make(batch_size=datamodule.batch_size))


@OLD
@pytest.mark.parametrize("finder", FINDERS)
def test_a_run_with_a_finder_called_when_the_first_epoch_starts_is_resumed_exactly(make, tmp_path, finder):
    keep = ModelCheckpoint(tmp_path, filename="kept", every_n_train_steps=1, save_top_k=1)
    broken, resumed, callbacks = Tunable(fail_at=(1, 3)), Tunable(), [AT_FIRST_EPOCH[finder](), keep]
    trainer = quiet_trainer(default_root_dir=tmp_path, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(broken, datamodule=make(val_path=None))
    quiet_trainer().fit(resumed, datamodule=make(val_path=None), ckpt_path=tmp_path / "kept.ckpt")
    whole = rows_of_a_fresh_run(make())
    assert broken.train_rows[0] == whole[0]
    assert broken.train_rows[1] + resumed.train_rows[1] == whole[1]

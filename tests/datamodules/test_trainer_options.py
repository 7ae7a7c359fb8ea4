"""Options of the Trainer that decide which batches are seen, and how often: always those rows, in the plan's order."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning_models import Recorder, SaveOnException, quiet_trainer
from processes import run_ranks, values
from sixty_rows import ALL, VAL, WORKERS, module

from lightning_h5 import LazyH5DataModule
from lightning_h5._lightning import set_batch_size_of_strategy

STEPS = 8


@pytest.fixture
def whole(files):
    """The rows of three epochs with no option at all."""
    return fit(files, max_epochs=3).train_rows


class When(Callback):
    """After how many optimizer steps each validation of a fit began."""

    def __init__(self):
        self.steps = []

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.steps.append(trainer.global_step)


def fit(files, model=None, options=None, **trainer_options):
    model = Recorder() if model is None else model
    trainer_options = {"num_sanity_val_steps": 0} | trainer_options
    quiet_trainer(**trainer_options).fit(model, datamodule=module(files, **(options or {})))
    return model


# The Trainer's choice of batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "n", "n_val"),
    [(1, 8, 8), (3, 24, 20), (0.34, 16, 8), (1.0, 60, 20)],
    ids=["one", "three", "a third", "all"],
)
@pytest.mark.parametrize("has_val", [False, True], ids=["without val", "with val"])
def test_overfit_batches_repeats_the_first_batches_unshuffled(files, share, n, n_val, has_val):
    model = fit(files, options={} if has_val else {"val_path": None}, overfit_batches=share, max_epochs=3)
    assert model.train_rows == dict.fromkeys(range(3), ALL[:n])
    assert model.rows["val"] == (VAL[:n_val] * 3 if has_val else [])


def overfit_on_a_rank(rank, files, n_batches, num_workers):
    options = {"num_workers": num_workers}
    model = fit(files, options=options, devices=2, strategy="ddp", overfit_batches=n_batches, max_epochs=2)
    return model.train_rows, model.rows["val"]


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 1])
def test_overfit_batches_over_two_ranks_has_each_row_once(files, tmp_path, num_workers):
    ranks = values(run_ranks(overfit_on_a_rank, 2, tmp_path, files, 2, num_workers))
    first, second = (rows for rows, _ in ranks)
    assert first[0] == first[1] == [*ALL[:8], *ALL[16:24]]
    assert second[0] == second[1] == [*ALL[8:16], *ALL[24:32]]
    assert sorted(ranks[0][1] + ranks[1][1]) == sorted(VAL * 2)


@pytest.mark.parametrize(("n", "rows", "val_rows"), [(True, 8, 8), (3, 24, 20), (100, 60, 20)])
def test_fast_dev_run_sees_the_first_batches_of_one_epoch(files, whole, n, rows, val_rows):
    model, trainer = Recorder(), quiet_trainer(fast_dev_run=n)
    datamodule = module(files, test_path=files[1], predict_path=files[1])
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)
    trainer.predict(model, datamodule=datamodule)
    assert model.train_rows == {0: whole[0][:rows]}
    assert model.rows == dict.fromkeys(("val", "test", "predict"), VAL[:val_rows])


@pytest.mark.parametrize(("limit", "n"), [(3, 24), (7, 54), (8, 60), (100, 60), (0.25, 16), (0.99, 54), (1.0, 60)])
def test_limit_train_batches_takes_the_head_of_each_epochs_order(files, whole, limit, n):
    assert fit(files, limit_train_batches=limit).train_rows == {0: whole[0][:n], 1: whole[1][:n]}


def test_no_training_batches_are_no_training(files):
    assert fit(files, limit_train_batches=0).train_rows == {}


@pytest.mark.parametrize(("limit", "n"), [(0, 0), (1, 8), (2, 14), (100, 20), (0.0, 0), (0.4, 8), (1.0, 20)])
def test_limits_of_the_other_stages_take_the_head_of_the_file(files, limit, n):
    model = Recorder()
    trainer = quiet_trainer(**{f"limit_{stage}_batches": limit for stage in ("val", "test", "predict")})
    datamodule = module(files, test_path=files[1], predict_path=files[1])
    trainer.validate(model, datamodule=datamodule, verbose=False)
    trainer.test(model, datamodule=datamodule, verbose=False)
    trainer.predict(model, datamodule=datamodule)
    assert model.rows == dict.fromkeys(("val", "test", "predict"), VAL[:n])


def limited_on_a_rank(rank, files):
    model = fit(files, devices=2, strategy="ddp", limit_train_batches=2, limit_val_batches=1)
    return model.train_rows, model.rows["val"]


@pytest.mark.wide
def test_limits_over_two_ranks_take_that_many_batches_on_each(files, tmp_path, whole):
    (first, first_val), (second, second_val) = values(run_ranks(limited_on_a_rank, 2, tmp_path, files))
    for epoch in (0, 1):
        assert [*first[epoch][:8], *second[epoch][:8]] == whole[epoch][:16]
        assert [*first[epoch][8:], *second[epoch][8:]] == whole[epoch][16:32]
    assert [first_val, second_val] == [VAL[:5] * 2, VAL[10:15] * 2]


# When it validates, and when it stops ----------------------------------------------------------------------------

VALIDATIONS = {
    "each epoch": ({}, [8, 16, 24]),
    "each second epoch": ({"check_val_every_n_epoch": 2}, [16]),
    "each third batch": ({"val_check_interval": 3}, [3, 6, 11, 14, 19, 22]),
    "each quarter": ({"val_check_interval": 0.25}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]),
    "across epochs": ({"val_check_interval": 11, "check_val_every_n_epoch": None}, [11, 22]),
    "never": ({"limit_val_batches": 0}, []),
}


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("case", VALIDATIONS)
def test_validation_sees_every_row_whenever_it_comes_and_moves_no_training_row(files, whole, case, num_workers):
    options, steps = VALIDATIONS[case]
    when = When()
    model = fit(files, options={"num_workers": num_workers}, max_epochs=3, callbacks=[when], **options)
    assert when.steps == steps
    assert model.rows["val"] == VAL * len(steps)
    assert model.train_rows == whole


def test_the_sanity_check_sees_all_of_the_val_split_or_as_much_as_it_is_told(files, whole):
    for n, rows in ((-1, VAL), (2, VAL[:14])):
        model = fit(files, num_sanity_val_steps=n, max_epochs=1)
        assert model.rows["val"] == rows + VAL
        assert model.train_rows == {0: whole[0]}


class StopAt(Callback):
    """Asks the trainer to stop after a batch, as early stopping in mid-epoch does."""

    def __init__(self, epoch, batch):
        self.at = (epoch, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            trainer.should_stop = True


class OutOfTime(Callback):
    """Takes longer over a batch than there is time."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            time.sleep(0.5)


STOPS = {  # options, and the number of rows seen before the end
    "by max_time": (lambda: {"max_time": {"seconds": 0.5}, "callbacks": [OutOfTime()]}, range(25)),
    "in an epoch": (lambda: {"callbacks": [StopAt(1, 2)]}, [84]),
    "before the last batch": (lambda: {"callbacks": [StopAt(0, STEPS - 2)]}, [54]),
    "after the last batch": (lambda: {"callbacks": [StopAt(0, STEPS - 1)]}, [60]),
}


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("case", STOPS)
def test_a_run_that_was_told_to_stop_goes_on_with_exactly_the_rest(files, whole, tmp_path, case, num_workers):
    (make, n_rows), saved = STOPS[case], tmp_path / "stopped.ckpt"
    first, second = Recorder(), Recorder()
    trainer = quiet_trainer(max_epochs=3, **make())
    trainer.fit(first, datamodule=module(files, num_workers=num_workers))
    trainer.save_checkpoint(saved)
    quiet_trainer(max_epochs=3).fit(second, datamodule=module(files, num_workers=num_workers), ckpt_path=saved)
    assert sum(map(len, first.train_rows.values())) in n_rows
    assert {e: first.train_rows.get(e, []) + second.train_rows.get(e, []) for e in range(3)} == whole


def test_min_epochs_keeps_a_run_that_was_told_to_stop_for_whole_epochs(files, whole):
    model = fit(files, max_epochs=3, min_epochs=2, callbacks=[StopAt(0, 2)])
    assert model.train_rows == {0: whole[0], 1: whole[1]}


# Trainers of all kinds -------------------------------------------------------------------------------------------

TRAINERS = {
    "reloading loaders": {"reload_dataloaders_every_n_epochs": 1},
    "reloading each second epoch": {"reload_dataloaders_every_n_epochs": 2},
    "without inference mode": {"inference_mode": False},
    "bf16": {"precision": "bf16-mixed"},
    "simple profiler": {"profiler": "simple"},
    "checkpoints": {"enable_checkpointing": True},
    "one rank of ddp": {"strategy": "ddp", "devices": 1},
    "no injection of samplers": {"use_distributed_sampler": False},
    "deterministic": {"deterministic": True},
    "accumulation": {"accumulate_grad_batches": 3},
    "barebones": {"barebones": True},
}


def trainer_of(case, folder):
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, "default_root_dir": folder} | TRAINERS[case]
    if case != "barebones":
        return quiet_trainer(**options)
    del options["num_sanity_val_steps"]
    return Trainer(accelerator="cpu", **options)


def train_on_a_rank(rank, case, files, folder, num_workers):
    model = Recorder()
    trainer_of(case, folder).fit(model, datamodule=module(files, num_workers=num_workers))
    return model.train_rows, model.rows["val"]


@pytest.mark.wide
@WORKERS
@pytest.mark.parametrize("case", TRAINERS)
def test_the_kind_of_trainer_changes_no_row(files, whole, tmp_path, case, num_workers):
    if case == "one rank of ddp":  # a group of processes, if one alone, is not for the process of the tests
        ((train, val),) = values(run_ranks(train_on_a_rank, 1, tmp_path, case, files, str(tmp_path), num_workers))
    else:
        train, val = train_on_a_rank(0, case, files, str(tmp_path), num_workers)
    assert train == whole
    assert val == VAL * 3


def two_ranks(rank, files, options):
    model = Recorder()
    trainer = quiet_trainer(devices=2, strategy="ddp", num_sanity_val_steps=0, **options)
    datamodule = module(files, test_path=files[1], predict_path=files[1])
    trainer.fit(model, datamodule=datamodule)
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(model, datamodule=datamodule)
    return model.train_rows, model.rows


@pytest.mark.wide
def test_injection_of_samplers_changes_no_row_on_two_ranks(files, tmp_path):
    left, right = (
        values(run_ranks(two_ranks, 2, tmp_path, files, {"use_distributed_sampler": choice}))
        for choice in (True, False)
    )
    assert left == right
    assert [sorted(left[0][0][epoch] + left[1][0][epoch]) for epoch in (0, 1)] == [ALL, ALL]
    assert left[0][1] == {"val": VAL[:10] * 3, "test": VAL[:10], "predict": VAL[:10]}


class ManualOptimization(Recorder):
    """Steps twice a batch, as adversarial training does: optimizer steps are not batches."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for loss in (super().training_step(batch, batch_idx), self.layer(torch.ones(1, 1)).sum()):
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


def test_manual_optimization_with_two_steps_a_batch_is_resumed_exactly(files, whole, tmp_path):
    broken, resumed, keep = ManualOptimization(fail_at=(1, 3)), ManualOptimization(), SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(files, broken, callbacks=[keep])
    quiet_trainer(max_epochs=3).fit(resumed, datamodule=module(files), ckpt_path=keep.path)
    assert {e: broken.train_rows.get(e, []) + resumed.train_rows.get(e, []) for e in range(3)} == whole


def test_deepspeed_takes_the_batch_size_of_the_data_module(make_h5):
    """Its strategy runs on GPUs alone; here it is asked for the configuration that it would start with."""
    strategy = object.__new__(DeepSpeedStrategy)
    datamodule = LazyH5DataModule(make_h5({"x": np.arange(40.0)}), x_key="x", batch_size=8)
    trainer = SimpleNamespace(
        strategy=strategy,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        fit_loop=SimpleNamespace(
            _data_source=SimpleNamespace(is_defined=lambda: True, dataloader=datamodule.train_dataloader)
        ),
    )
    strategy._lightning_module = SimpleNamespace(trainer=trainer)
    for given, expected in (({}, 8), ({"train_micro_batch_size_per_gpu": 3}, 3)):
        strategy.config = dict(given)
        set_batch_size_of_strategy(trainer, datamodule.batch_size)
        strategy._format_batch_size_and_grad_accum_config()
        assert strategy.config["train_micro_batch_size_per_gpu"] == expected

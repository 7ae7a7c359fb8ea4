"""Figures of ``H5StatsMonitor`` are logged at Lightning's steps, in the rows that the model's own values are in."""

import csv
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import H5StatsMonitor, LazyH5DataModule
from lightning_h5.counters import WaitTimes

BATCH = 4


class Logs(Recorder):
    """Logs in training and validation, by step and by epoch; may ask to stop after all callbacks of a batch."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after = stop_after

    def training_step(self, batch, batch_idx):
        self.log("loss", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        if self.stop_after is not None and self.trainer.fit_loop.total_batch_idx == self.stop_after:
            self.trainer.should_stop = True

    def validation_step(self, batch, batch_idx):
        self.log("val", float(batch_idx), on_step=True, on_epoch=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    import h5py

    path = str(tmp_path_factory.mktemp("rows") / "rows.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((12 * BATCH, 2), "f4")
    return path


def rows_of(folder, path, monitor, *, stop_after=None, ckpt_path=None, **options):
    """Lines of ``metrics.csv`` of a fit, as dicts without the empty cells; and its trainer."""
    trainer = quiet_trainer(logger=CSVLogger(folder), callbacks=[monitor], num_sanity_val_steps=0, **options)
    data = LazyH5DataModule(path, path, x_key="x", batch_size=BATCH, with_index=True)
    trainer.fit(Logs(stop_after), datamodule=data, ckpt_path=ckpt_path)
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(text)]
    return lines, trainer


def is_of_step(line):
    return "h5/wait_ms" in line


def check(lines, every, every_of_monitor, first, last, stopped=False):
    """The claims; ``first`` and ``last`` are steps of this fit, ``last`` the one after its end."""
    at = defaultdict(list)
    for line in lines:
        at[line["step"]].append(line)
    with_figures = [line for line in lines if is_of_step(line)]
    due = [step for step in range(first, last) if (step + 1) % (every_of_monitor or every) == 0]
    steps = [line["step"] for line in with_figures]
    # Lightning also logs the step after which it is asked to stop, with figures if they are due.
    assert steps in (due, [*due, last - 1] if last - 1 in due else due)
    for line in with_figures:
        assert len([name for name in line if name.startswith("h5/")]) == 7
        of_lightning = [other for other in at[line["step"]] if "loss_step" in other]
        assert not of_lightning or any(map(is_of_step, of_lightning))
    if every_of_monitor is None:
        with_loss = [line["step"] for line in lines if "loss_step" in line]
        assert with_loss in (steps, [*steps, last - 1])
    for line in lines:
        assert ("h5/wait_ms_epoch" in line) == ("loss_epoch" in line)
        if "h5/wait_ms_epoch" in line and not stopped:  # else Lightning's own values are at two steps
            assert any("val_epoch" in other for other in at[line["step"]])


@pytest.mark.wide
@given(
    every=st.integers(1, 7),
    every_of_monitor=st.none() | st.integers(1, 7),
    n_batches=st.integers(1, 12),
    n_epochs=st.integers(1, 3),
    accumulate=st.integers(1, 5),
    stop_after=st.none() | st.integers(0, 20),
    more_epochs=st.integers(0, 2),
)
def test_figures_are_in_the_rows_that_lightning_logs(
    path, tmp_path, every, every_of_monitor, n_batches, n_epochs, accumulate, stop_after, more_epochs
):
    options = {
        "log_every_n_steps": every,
        "limit_train_batches": n_batches,
        "limit_val_batches": 2,
        "accumulate_grad_batches": accumulate,
    }
    lines, trainer = rows_of(
        tmp_path, path, H5StatsMonitor(every_of_monitor, print_summary=False), max_epochs=n_epochs,
        stop_after=stop_after, **options,
    )  # fmt: skip
    check(lines, every, every_of_monitor, 0, trainer.global_step, stopped=stop_after is not None)
    if more_epochs:
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        first = trainer.global_step
        lines, trainer = rows_of(
            tmp_path, path, H5StatsMonitor(every_of_monitor, print_summary=False),
            max_epochs=trainer.current_epoch + more_epochs, ckpt_path=tmp_path / "saved.ckpt", **options,
        )  # fmt: skip
        check(lines, every, every_of_monitor, first, trainer.global_step)


def test_steps_of_a_model_with_two_optimizers_are_batches(path, tmp_path):
    class Two(Logs):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)], []

    trainer = quiet_trainer(logger=CSVLogger(tmp_path), max_epochs=1, log_every_n_steps=5)
    trainer.fit(Two(), datamodule=LazyH5DataModule(path, x_key="x", batch_size=BATCH, with_index=True))
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        lines = [line for line in csv.DictReader(text) if line["h5/wait_ms"]]
    assert trainer.global_step == 24
    assert [(line["step"], line["loss_step"]) for line in lines] == [("4", "4.0"), ("9", "9.0")]


def test_a_slow_batch_is_reported_with_the_step_that_is_logged(path, caplog, monkeypatch):
    monkeypatch.setattr(WaitTimes, "add", lambda waits, seconds: setattr(waits, "last", 1.0))
    trainer = quiet_trainer(
        max_epochs=1, accumulate_grad_batches=5, callbacks=[H5StatsMonitor(slow_batch_seconds=0.5, print_summary=False)]
    )
    trainer.fit(Recorder(), datamodule=LazyH5DataModule(path, x_key="x", batch_size=BATCH, with_index=True))
    steps = [record.args[4] for record in caplog.records if "slow_batch_seconds" in record.message]
    assert steps == [0] * 5 + [1] * 5 + [2] * 2

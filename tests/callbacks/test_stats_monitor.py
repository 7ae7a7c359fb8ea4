"""``H5StatsMonitor``: the keys it logs, and the table."""

import csv
import time

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import H5StatsMonitor, H5ValueError, LazyH5DataModule

KEYS = {"samples_per_second", "read_mib_per_second", "decoded_mib_per_second", "wait_fraction", "wait_ms"}


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.zeros((64, 2), "f4"), "y": np.arange(64)})


def module(file, **options):
    return LazyH5DataModule(file, file, x_key="x", y_key="y", batch_size=8, with_index=True, **options)


class SlowStep(Recorder):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def slow(x):
    time.sleep(0.003)
    return x


def logged(file, tmp_path, model, monitor, **options):
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), callbacks=[monitor], log_every_n_steps=4)
    trainer.fit(model, datamodule=module(file, **options))
    with open(trainer.logger.log_dir + "/metrics.csv") as text:
        return trainer, list(csv.DictReader(text))


def column(lines, name):
    return [float(line[name]) for line in lines if line.get(name)]


def test_every_key_is_logged_by_steps_and_by_epochs(file, tmp_path):
    trainer, lines = logged(file, tmp_path, Recorder(), H5StatsMonitor(print_summary=False))
    for key in KEYS:
        assert len(column(lines, f"h5/{key}")) == 4  # two epochs of eight steps, each four
        assert len(column(lines, f"h5/{key}_epoch")) == 2
    assert {f"h5/{key}_epoch" for key in KEYS} <= set(trainer.callback_metrics)


def test_waiting_is_told_from_training(file, tmp_path):
    monitors = [H5StatsMonitor(print_summary=False) for _ in range(2)]
    _, busy = logged(file, tmp_path / "a", SlowStep(), monitors[0])
    _, starved = logged(file, tmp_path / "b", Recorder(), monitors[1], transform=slow, eval_transform=abs)
    assert max(column(busy, "h5/wait_fraction")[1:]) < 0.5 < min(column(starved, "h5/wait_fraction"))
    assert min(column(starved, "h5/wait_ms")) >= 8 * 3
    assert all(0 <= share <= 1 for lines in (busy, starved) for share in column(lines, "h5/wait_fraction"))


def test_it_needs_no_logger_and_prints_a_line_a_stage(file, capsys):
    quiet_trainer(num_sanity_val_steps=0).fit(Recorder(), datamodule=module(file))
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["train"][1:3] == ["16", "128"]
    assert lines["validate"][1:3] == ["16", "128"]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_of_its_own_has_a_table_of_its_own(file, capsys, stage):
    datamodule = LazyH5DataModule(None, file, file, file, x_key="x", batch_size=8, with_index=True)
    getattr(quiet_trainer(), stage)(Recorder(), datamodule=datamodule)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(stage)]
    assert [line[1:3] for line in lines] == [["8", "64"]]


def test_the_table_can_be_left_out_and_the_prefix_chosen(file, tmp_path, capsys):
    _, lines = logged(file, tmp_path, Recorder(), H5StatsMonitor(2, print_summary=False, prefix="data/"))
    assert len(column(lines, "data/wait_ms")) == 8
    assert "lightning_h5" not in capsys.readouterr().out


def test_a_second_fit_begins_anew(file, capsys):
    datamodule = module(file)
    for _ in range(2):
        quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(Recorder(), datamodule=datamodule)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("train")]
    assert [line[1:3] for line in lines] == [["8", "64"]] * 2


def test_a_senseless_interval_is_refused():
    with pytest.raises(H5ValueError, match="log_every_n_steps=0"):
        H5StatsMonitor(0)

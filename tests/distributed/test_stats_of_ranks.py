"""Statistics over two real ranks: exact sums, each rank's own waiting, no collective but where figures are logged."""

import re
import time

import h5py
import numpy as np
import pytest
import torch.distributed
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import H5StatsMonitor, LazyH5DataModule
from lightning_h5._lightning import logged_step

ROWS, BATCH = 120, 5


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5["x"] = np.zeros((ROWS, 3), "f4")
    return str(path)


class SlowOnOneRank:
    def __init__(self, rank):
        self.seconds = 0.004 if rank == 1 else 0

    def __call__(self, x):
        time.sleep(self.seconds)
        return x


class Kept(H5StatsMonitor):
    """Keeps what it logs, and counts collectives between."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.collectives, self.history = [], []

    def on_train_batch_end(self, trainer, *others):
        found, gather = [], torch.distributed.all_gather
        torch.distributed.all_gather = lambda *a, **k: (found.append(1), gather(*a, **k))[1]
        try:
            super().on_train_batch_end(trainer, *others)
        finally:
            torch.distributed.all_gather = gather
        self.collectives.append(len(found))
        if self._logged:
            figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.history.append((logged_step(trainer), figures))


def fit(rank, file):
    monitor = Kept(log_every_n_steps=4)
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy="ddp", callbacks=[monitor], num_sanity_val_steps=0)
    data = LazyH5DataModule(file, x_key="x", batch_size=BATCH, transform=SlowOnOneRank(rank), with_index=True)
    trainer.fit(Recorder(), datamodule=data)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return logged, monitor.history, monitor.collectives


def test_sums_are_exact_and_each_rank_has_its_own_waiting(file, tmp_path):
    outcomes = run_ranks(fit, 2, tmp_path, file)
    (logged, history, collectives), (other, other_history, _) = values(outcomes)
    assert logged == other
    assert history == other_history
    assert [step for step, _ in history] == [3, 7, 11]
    # The first log of a run takes what a tensor's shape is asked for on top; none comes between the logs.
    assert [number > 0 for number in collectives] == [False, False, False, True] * 3
    table = next(outcome.output for outcome in outcomes if "rows from HDF5, over all ranks" in outcome.output)
    cells = dict(re.findall(r"^(\S.*?)  +(\S.*)$", table, re.MULTILINE))
    assert (cells["batches"], cells["rows"]) == (str(ROWS // BATCH), str(ROWS))
    worst = cells["waiting, worst rank"]
    assert worst.endswith("% (rank 1)")
    assert float(worst.split("%")[0]) > float(cells["waiting for data"].rstrip("%"))


def evaluate_few_segments(rank, path):
    segments = {"groups": "ep_*", "keep_together": True}
    data = LazyH5DataModule(
        path, path, path, x_key="x", segments=segments, window={"length": 3, "stride": 1}, batch_size=2, with_index=True
    )
    options = {"devices": 3, "strategy": "ddp", "callbacks": [H5StatsMonitor()], "num_sanity_val_steps": 0}
    trainer = quiet_trainer(max_epochs=2, **options)
    trainer.fit(Recorder(), datamodule=data)
    trainer.validate(Recorder(), datamodule=data)
    return len(trainer.validate_loop._combined_loader.flattened[0])


@pytest.mark.wide
def test_a_rank_without_batches_to_evaluate_is_not_waited_for(tmp_path):
    with h5py.File(tmp_path / "two.h5", "w") as file:
        for number in range(2):
            file[f"ep_{number}/x"] = np.arange(9, dtype="f4").reshape(9, 1)
    outcomes = run_ranks(evaluate_few_segments, 3, tmp_path, str(tmp_path / "two.h5"))
    assert 0 in values(outcomes)  # a rank has no segment
    tables = "".join(outcome.output for outcome in outcomes)
    assert "'validate': on rank 0 alone, since another rank has no batches." in tables
    assert "rows from HDF5, on rank 0" in tables

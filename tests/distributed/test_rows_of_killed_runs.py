"""``rows_of_step`` after real kills of real ranks: each answer is what the model's own history has for that step."""

import h5py
import numpy as np
import pytest
from killing import Job, newest, train
from processes import run_ranks, values

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule

ROWS = 61

# Starts of the program: how each one stops, after how many batches of its own, on how many ranks, their batch size.
CHAINS = {
    "elastic": [
        ("killed after a save", 5, 2, 4),
        ("one rank killed", 3, 1, 3),
        ("failed in a step", 4, 3, 2),
        (None, 0, 3, 2),
    ],
    "torn checkpoints": [
        ("killed while writing", 9, 1, 4),
        ("SIGTERM", 7, 2, 4),
        ("max_steps", 5, 2, 5),
        (None, 0, 2, 5),
    ],
    "at epochs' ends": [
        ("saved at an epoch's end and killed", 8, 2, 4),
        ("failed at a batch's end", 3, 2, 4),
        (None, 0, 2, 4),
    ],
}
KINDS = {"lazy": LazyH5DataModule, "cached": RankCachedH5DataModule, "combined": CombinedHDF5DataModule}


def wrong_steps(kind, checkpoint, history):
    """Steps whose named rows are others than those of the model's history."""
    datamodule = kind.load_from_checkpoint(checkpoint)
    wrong = []
    for step, (epoch, rows) in enumerate(history):
        report = datamodule.rows_of_step(step)
        ranks = [datamodule.rows_of_step(step, rank).samples for rank in range(report.world_size)]
        if (report.epoch, [sample.row for sample in report]) != (epoch, rows) or sum(ranks, ()) != report.samples:
            wrong.append((step, epoch, rows, report))
    return wrong


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chain", CHAINS)
def test_rows_of_each_step_of_a_run_that_was_killed(kind, chain, tmp_path):
    file = str(tmp_path / "rows.h5")
    with h5py.File(file, "w") as h5:
        h5["x"] = np.arange(ROWS, dtype="f4")[:, None] / 64
    checkpoint, n_steps = None, 0
    for way, at, world_size, batch_size in CHAINS[chain]:
        job = Job(
            file=file,
            folder=str(tmp_path / "saved"),
            world_size=world_size,
            batch_size=batch_size,
            kind=KINDS[kind],
            data={"x_key": "x"},
            trainer={"max_epochs": 4},
            way=way,
            at=at,
            resume=checkpoint,
        )
        job.folder_path.mkdir(exist_ok=True)
        outcomes = run_ranks(train, world_size, job.folder, job, patience=5)
        if way is not None:
            checkpoint, history = newest(job.folder)
            assert len(history) > n_steps
            n_steps = len(history)
            assert wrong_steps(KINDS[kind], checkpoint, history) == []
    history, _ = values(outcomes)[0]  # the last start comes to the end: steps that the last checkpoint did not know
    assert len(history) > n_steps
    assert wrong_steps(KINDS[kind], checkpoint, history) == []

"""The Trainer of Hugging Face, as on the page about clusters: right rows on each rank, and a resume that is exact."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from processes import run_ranks, values

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]
CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
ROWS, STEPS = 1800, 113


def train(rank, folder, world_size, checkpoint):
    warnings.simplefilter("ignore")
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    sys.path.insert(0, str(CLUSTER))
    import hf_trainer

    model = hf_trainer.train(folder, None if checkpoint is None else f"{folder}/checkpoints/checkpoint-{checkpoint}")
    return model.rows, model.layer.weight.tolist()


@pytest.fixture
def folder(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        x = np.random.default_rng(0).normal(size=(2000, 8)).astype("f4")
        file.create_dataset("x", data=x, chunks=(50, 8))
    return tmp_path


def test_a_run_that_resumes_has_the_rows_and_weights_of_the_whole_one(folder):
    ((rows, weights),) = values(run_ranks(train, 1, folder / "whole", folder, 1, None))
    first, second = rows[:ROWS], rows[ROWS:]
    assert len(set(first)) == len(first) == ROWS
    assert sorted(second) == sorted(first)
    assert second != first
    for step in (50, 150):
        ((rest, resumed),) = values(run_ranks(train, 1, folder / str(step), folder, 1, step))
        n_before = step * 16 if step < STEPS else ROWS + (step - STEPS) * 16
        assert rest == rows[n_before:]
        assert resumed == weights


def test_two_ranks_share_each_epoch(folder):
    ranks = values(run_ranks(train, 2, folder / "ranks", folder, 2, None))
    n = ROWS // 2
    for epoch in range(2):
        rows = [row for rank, _ in ranks for row in rank[epoch * n : (epoch + 1) * n]]
        assert len(set(rows)) == len(rows) == ROWS
    assert ranks[0][1] == ranks[1][1]

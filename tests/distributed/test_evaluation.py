"""Evaluation over two ranks gives the value of one process: no row is padded, repeated or left out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

SCRIPT = Path(__file__).with_name("evaluate.py")
LENGTHS = {"one": 1, "five": 5, "seven": 7, "many": 101}


def evaluate(out, files, devices):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PL_", "MASTER_", "LOCAL_"))
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(out), ",".join(files), str(devices)],
        env=environment | {"PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(devices)]


def test_two_ranks_give_exactly_the_values_of_one_process(tmp_path):
    files, right = [], {}
    for name, n_rows in LENGTHS.items():
        y = np.random.default_rng(n_rows).integers(0, 2, n_rows)
        x = np.where(np.arange(n_rows) % 3 > 0, y, 1 - y)
        files.append(str(tmp_path / f"{name}.h5"))
        right[files[-1]] = float((x == y).mean())
        with h5py.File(files[-1], "w") as file:
            file["x"], file["y"] = x, y
    ranks = evaluate(tmp_path, files, 2)
    for file, n_rows in zip(files, LENGTHS.values(), strict=True):
        rows = [row for rank in ranks for row in rank[file]["predicted"]]
        assert rows == list(range(n_rows)), "predictions come once a row, in order, also where a rank has none"
        if n_rows > 1:
            assert all(rank[file][stage] == np.float32(right[file]) for rank in ranks for stage in ("test", "val"))
            assert ranks[0][file]["n_batches"] == ranks[1][file]["n_batches"]

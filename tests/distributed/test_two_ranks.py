"""Two real processes under the Trainer, with none of its flags set."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")
ROWS = 101


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5["x"] = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 3, axis=1)
        h5["y"] = np.arange(ROWS)
    return path


def run(out, arguments, timeout=150):
    """Runs the script; gives its exit code, and what each rank saw or the error it ended with."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PL_", "MASTER_", "LOCAL_"))
    }
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(out), json.dumps(arguments)],
        env=environment,
        cwd=out,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    seen = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2) if (out / f"{rank}.json").exists()]
    errors = [(out / f"{rank}.error").read_text() for rank in range(2) if (out / f"{rank}.error").exists()]
    return done, seen, errors


def epochs_of(seen, stage):
    """The rows of each epoch over both ranks, after looking that both took equally many steps."""
    epochs = sorted({epoch for rank in seen for epoch, _, _ in rank[stage]})
    for epoch in epochs:
        steps = [sum(e == epoch for e, _, _ in rank[stage]) for rank in seen]
        assert steps[0] == steps[1] > 0
    return [[y for rank in seen for e, ys, _ in rank[stage] if e == epoch for y in ys] for epoch in epochs]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_row_comes_once_an_epoch_over_both_ranks_in_all_four_stages(file, tmp_path, num_workers):
    arguments = {"train_path": str(file), "predict_path": str(file), "val_fraction": 0.2, "test_fraction": 0.1}
    done, seen, _ = run(tmp_path, {**arguments, "batch_size": 8, "num_workers": num_workers})
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(seen) == 2
    rows = {stage: epochs_of(seen, stage) for stage in seen[0]}
    assert [len(epochs) for epochs in rows.values()] == [2, 2, 1, 1, 1]
    for epochs in rows.values():
        assert all(len(epoch) == len(set(epoch)) for epoch in epochs), "no row comes twice in an epoch"
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs), "every epoch has the same rows"
    assert sorted(rows["predict"][0]) == list(range(ROWS))
    assert sorted(rows["validate"][0]) == sorted(rows["val"][0])
    assert sorted(rows["train"][0] + rows["val"][0] + rows["test"][0]) == list(range(ROWS))
    orders = [[ys for e, ys, _ in seen[0]["train"] if e == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1], "each epoch has an order of its own"


def test_ranks_that_see_different_files_all_stop_with_the_values_of_each(file, tmp_path):
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as h5:
        h5["x"] = np.zeros((7, 3), dtype="f4")
        h5["y"] = np.zeros(7, dtype="i8")
    done, seen, errors = run(tmp_path, {"train_path": str(file), "trouble": {"train_path": str(other)}})
    assert done.returncode != 0
    assert not seen
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("H5ValueError: the ranks do not see the same data")
        assert "rank 0 has 101, rank 1 has 7" in error


def test_a_rank_that_fails_in_setup_stops_all_ranks_with_its_words(file, tmp_path):
    done, seen, errors = run(tmp_path, {"train_path": str(file), "trouble": {"train_path": "missing.h5"}})
    assert done.returncode != 0
    assert not seen
    assert len(errors) == 2
    assert all("rank 1: H5FileError" in error and "'missing.h5' does not exist" in error for error in errors)


def test_fewer_rows_than_ranks_are_refused_with_the_numbers(tmp_path):
    few = tmp_path / "few.h5"
    with h5py.File(few, "w") as h5:
        h5["x"] = np.zeros((1, 3), dtype="f4")
        h5["y"] = np.zeros(1, dtype="i8")
    done, seen, errors = run(tmp_path, {"train_path": str(few)})
    assert done.returncode != 0
    assert not seen
    assert all("'train' has 1 rows and there are 2 ranks" in error for error in errors)
    assert len(errors) == 2


def test_ranks_with_other_splits_all_stop(file, tmp_path):
    """The rank that looks at less must hear of it too."""
    done, seen, errors = run(tmp_path, {"train_path": str(file), "trouble": {"val_path": str(file)}})
    assert done.returncode != 0
    assert not seen
    assert len(errors) == 2
    assert all("rows of 'val': rank 0 has None, rank 1 has 101" in error for error in errors)


@pytest.mark.parametrize(("before", "after", "batch_size"), [(2, 1, 8), (1, 2, 5), (2, 2, 8)])
def test_killed_in_mid_epoch_it_goes_on_with_the_rest_on_any_number_of_ranks(file, tmp_path, before, after, batch_size):
    arguments = {"train_path": str(file), "val_fraction": 0.1, "test_fraction": 0.1, "predict_path": str(file)}
    folders = [tmp_path / name for name in ("whole", "killed", "resumed")]
    for folder in folders:
        folder.mkdir()
    done, _, _ = run(folders[0], {**arguments, "batch_size": 8, "devices": 1})
    assert done.returncode == 0, done.stderr[-2000:]
    done, killed, _ = run(
        folders[1], {**arguments, "batch_size": 8, "devices": before, "kill": [1, 2], "num_workers": 2}
    )
    assert done.returncode == -signal.SIGKILL
    saved = str(folders[1] / "killed.ckpt")
    done, resumed, _ = run(folders[2], {**arguments, "batch_size": batch_size, "devices": after, "resume": saved})
    assert done.returncode == 0, done.stderr[-2000:]
    whole = in_order([json.loads((folders[0] / "0.json").read_text())], 1)
    assert in_order(killed, 1) == whole[: len(in_order(killed, 1))]
    assert in_order(killed, 1) + in_order(resumed, 1) == whole


def in_order(seen, epoch):
    """The rows of a training epoch in the order of the plan: step by step, rank by rank."""
    steps = [[rows for e, rows, _ in rank["train"] if e == epoch] for rank in seen]
    return [row for step in zip(*steps, strict=True) for rows in step for row in rows]

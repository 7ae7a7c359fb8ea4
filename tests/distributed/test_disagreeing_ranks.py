"""Ranks that disagree, fail or hang: all of them stop soon, with the same words, and leave no process behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from arguments import nested
from guards import HANG
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import LazyH5DataModule

ROWS = 40


def write(path, x):
    with h5py.File(path, "w") as h5:
        h5["x"] = x
        h5["group"] = np.arange(len(x)) // 4
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rows.h5", np.arange(ROWS))


class Troubled(LazyH5DataModule):
    """Hangs, is slow or dies while it builds its datasets."""

    trouble = None

    def build_dataset(self, split):
        if self.trouble is not None:
            self.trouble()
        return super().build_dataset(split)


def fit(rank, file, options, of_rank, world_size=2, trouble=None, ckpt_path=None):
    """Trains; ``of_rank`` gives some ranks other options, ``trouble`` something to do in ``setup``."""
    datamodule = Troubled(
        **nested(**({"train_path": file, "x_key": "x", "with_index": True} | options | of_rank.get(rank, {})))
    )
    datamodule.trouble = (trouble or {}).get(rank)
    trainer = quiet_trainer(devices=world_size, strategy="ddp", max_epochs=1)
    model = Recorder()
    path = ckpt_path.get(rank) if isinstance(ckpt_path, dict) else ckpt_path
    trainer.fit(model, datamodule=datamodule, ckpt_path=path)
    return model.train_rows


def same_error(outcomes):
    """The one error that all ranks ended with, by themselves."""
    assert [outcome.exitcode for outcome in outcomes] == [1] * len(outcomes), [o.output[-800:] for o in outcomes]
    assert len({outcome.error for outcome in outcomes}) == 1, [outcome.error for outcome in outcomes]
    return outcomes[0].error


DISAGREEMENTS = {
    "another length": ({"train_path": "short.h5"}, "rows of 'train': rank 0 has 32, rank 1 has 14"),
    "other content": ({"train_path": "other.h5"}, "content of 'train': rank 0 has '"),
    "another seed": ({"seed": 5}, "seed: rank 0 has 0, rank 1 has 5"),
    "another batch size": ({"batch_size": 5}, "batch_size: rank 0 has 8, rank 1 has 5"),
    "drop_last on one": ({"drop_last": True}, "drop_last: rank 0 has False, rank 1 has True"),
    "no shuffling on one": ({"shuffle": False}, "shuffle: rank 0 has 'auto', rank 1 has 'none'"),
    "other rows kept": ({"val_fraction": 0.3}, "rows of 'val': rank 0 has 8, rank 1 has 12"),
    "other groups kept together": ({"group_key": "group"}, "content of 'train': rank 0 has '"),
    "another split seed": ({"split_seed": 8}, "content of 'train': rank 0 has '"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_see_other_data_all_stop_with_the_values_of_each(file, tmp_path, monkeypatch, name):
    write(tmp_path / "short.h5", np.arange(17))
    write(tmp_path / "other.h5", np.arange(ROWS) + 1)
    options, told = DISAGREEMENTS[name]
    if "train_path" in options:
        options = {"train_path": str(tmp_path / options["train_path"])}
    error = same_error(run_ranks(fit, 2, tmp_path, file, {"val_fraction": 0.2, "batch_size": 8}, {1: options}))
    assert error.startswith("H5ValueError: the ranks do not see the same data")
    assert told in error


@pytest.mark.wide
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_stops_all_ranks_with_its_words(file, tmp_path, failing):
    error = same_error(run_ranks(fit, 3, tmp_path, file, {}, {failing: {"train_path": "missing.h5"}}, 3))
    assert error.startswith("H5FileError: setting up the data (fit) failed on 1 of 3 ranks")
    assert f"rank {failing}: H5FileError" in error
    assert "'missing.h5' does not exist" in error


@pytest.mark.wide
def test_all_ranks_that_fail_are_named(file, tmp_path):
    error = same_error(run_ranks(fit, 2, tmp_path, file, {}, {0: {"x_key": "xx"}, 1: {"train_path": "missing.h5"}}))
    assert "failed on 2 of 2 ranks" in error
    assert "rank 0: H5KeyError" in error
    assert "rank 1: H5FileError" in error


def fail_otherwise():
    raise ZeroDivisionError("no error of ours")


@pytest.mark.wide
def test_an_error_that_is_not_ours_is_told_as_well(file, tmp_path):
    error = same_error(run_ranks(fit, 2, tmp_path, file, {}, {}, 2, {1: fail_otherwise}))
    assert "rank 1: ZeroDivisionError: no error of ours" in error


def hang():
    time.sleep(1000)


def hang_in_a_library():
    ctypes.PyDLL(None).sleep(1000)


def be_slow():
    time.sleep(1.5)


def be_very_slow():
    time.sleep(60)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.wide
@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_a_rank_that_hangs_is_named_by_the_others_and_ends_too(file, tmp_path, hanging):
    outcomes = run_ranks(fit, 3, tmp_path, file, {"setup_timeout": 10}, {}, 3, {hanging: hang})
    told = f"setting up the data (fit) did not finish on rank {hanging} of 3 ranks within 10 s"
    assert [outcome.exitcode for outcome in outcomes] == [1, 1, 1]
    assert all(told in outcome.output for outcome in outcomes)
    assert all(told in outcome.error for rank, outcome in enumerate(outcomes) if rank != hanging)


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell processes apart")
@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_a_rank_that_hangs_inside_a_library_is_ended_by_the_others(file, tmp_path, hanging):
    """As in an HDF5 call on storage that does not answer: no thread of Python runs meanwhile."""
    outcomes = run_ranks(fit, 3, tmp_path, file, {"setup_timeout": 10}, {}, 3, {hanging: hang_in_a_library})
    told = f"setting up the data (fit) did not finish on rank {hanging} of 3 ranks within 10 s"
    for rank, outcome in enumerate(outcomes):
        assert outcome.exitcode == (-signal.SIGKILL if rank == hanging else 1)
        assert rank == hanging or told in outcome.error


@pytest.mark.wide
def test_a_rank_that_is_slow_is_waited_for(file, tmp_path):
    ranks = values(run_ranks(fit, 2, tmp_path, file, {"setup_timeout": HANG}, {}, 2, {1: be_slow}))
    assert sorted(row for rank in ranks for row in rank[0]) == list(range(ROWS))


@pytest.mark.wide
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_too_late_stops_with_the_same_words(file, tmp_path, late):
    outcomes = run_ranks(fit, 2, tmp_path, file, {"setup_timeout": 3}, {}, 2, {late: be_very_slow})
    told = f"setting up the data (fit) did not finish on rank {late} of 2 ranks within 3 s"
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert all(told in outcome.output for outcome in outcomes)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_is_not_waited_for_longer_than_asked(file, tmp_path, dying):
    outcomes = run_ranks(fit, 2, tmp_path, file, {"setup_timeout": 2}, {}, 2, {dying: die})
    assert outcomes[dying].exitcode == -signal.SIGKILL
    other = outcomes[1 - dying]
    assert other.exitcode == 1
    assert "H5Error" in other.output
    assert f"rank {dying}" in other.output or "the other ranks ended" in other.output


def save(rank, file, folder):
    for n_batches in (1, 2):
        trainer = quiet_trainer(max_steps=n_batches, max_epochs=-1)
        trainer.fit(Recorder(), datamodule=LazyH5DataModule(file, x_key="x", batch_size=4, with_index=True))
        trainer.save_checkpoint(f"{folder}/{n_batches}.ckpt")


@pytest.mark.wide
def test_ranks_that_resume_from_other_checkpoints_all_stop(file, tmp_path):
    """As where one node still sees an older copy of a file on shared storage."""
    values(run_ranks(save, 1, tmp_path, file, str(tmp_path)))
    paths = {0: f"{tmp_path}/1.ckpt", 1: f"{tmp_path}/2.ckpt"}
    error = same_error(run_ranks(fit, 2, tmp_path, file, {"batch_size": 4}, {}, 2, None, paths))
    assert "saved position: rank 0 has '" in error


def test_a_refused_resume_has_the_same_words_on_all_ranks(file, tmp_path):
    values(run_ranks(save, 1, tmp_path, file, str(tmp_path)))
    error = same_error(run_ranks(fit, 2, tmp_path, file, {"seed": 1}, {}, 2, None, f"{tmp_path}/1.ckpt"))
    assert error.startswith("H5ResumeError: resuming failed on 2 of 2 ranks")
    assert "seed: saved 0, present 1" in error


@pytest.mark.wide
@pytest.mark.parametrize("hanging", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_lightnings_own_launcher_leaves_no_process_behind(file, tmp_path, hanging):
    script = tmp_path / "hanging.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:3]]!r}\n"
        "from test_disagreeing_ranks import fit, hang\n"
        "rank = int(os.environ.get('LOCAL_RANK', '0'))\n"
        f"fit(rank, {file!r}, {{'setup_timeout': 10}}, {{}}, 2, {{{hanging}: hang}})\n"
    )
    names = ("PL_", "MASTER_", "LOCAL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode != 0
    assert f"did not finish on rank {hanging} of 2 ranks" in done.stderr
    deadline = time.monotonic() + HANG
    while left := list(processes_of(script)):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.1)


def processes_of(script):
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(script) in (folder / "cmdline").read_text():
                yield folder.name
        except OSError:
            continue

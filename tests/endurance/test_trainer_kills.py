"""Training programs that are killed with SIGKILL at any moment: nothing of them is left, and the next one trains."""

import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import h5py
import killed
import numpy as np
import pytest
import spaces
from guards import HANG
from killed import KINDS, Program

ROWS, WIDTH = 150, 1024
WORKERS_END = 10  # seconds after their trainer, at most
CASES = [
    ("lazy", 1, 12),
    ("rank cached, shared", 2, 40),
    ("combined, filtered, split kept", 1, 40),
    ("rank cached", 1, 12),
    ("combined", 1, 12),
    ("lazy", 2, 40),
    ("rank cached, shared", 1, 12),
    ("lazy, spawned", 1, 12),
]
"""Kind, ranks, batch size."""


pytestmark = pytest.mark.skipif(not spaces.can_leave(), reason="needs a /dev/shm of its own")


class Running(NamedTuple):
    """A program, its ranks, and their own /dev/shm."""

    number: int
    program: Program
    ranks: list
    shared: list


@pytest.fixture
def programs(tmp_path):
    running = []

    def start(number):
        kind, world_size, batch_size = CASES[number % len(CASES)]
        folder = tmp_path / str(number)
        folder.mkdir()
        with h5py.File(folder / "rows.h5", "w") as file:
            rows = np.arange(ROWS)
            x = np.repeat(rows[:, None], WIDTH, axis=1).astype("f4")
            file.create_dataset("x", data=x, chunks=(10, WIDTH), compression="gzip")
            file["index"] = rows
        program = Program(kind, str(folder / "rows.h5"), str(folder / "run"), world_size, batch_size)
        ranks = killed.start(program)
        running.append(Running(number, program, ranks, killed.own_shared(ranks)))
        return running[-1]

    yield start
    killed.end_all({rank.pid for one in running for rank in one.ranks})
    for fd in (fd for one in running for fd in one.shared):
        os.close(fd)


def wait_and_kill(one):
    """Kills a program some time after its start, or some steps after its first; says when that was."""
    chosen = random.Random(one.number)
    by_steps, seconds, steps = chosen.random() < 0.6, chosen.uniform(0, 3), chosen.randrange(1, 60)
    journal = one.program.journal
    if not by_steps:
        time.sleep(seconds)
    end = time.monotonic() + HANG
    while by_steps and not (journal.exists() and journal.stat().st_size >= steps):
        assert time.monotonic() < end, Path(one.program.folder, "0.log").read_text()[-3000:]
        time.sleep(0.002)
    killed.kill(one.ranks)
    return f"after {steps} steps" if by_steps else f"{seconds:.2f} s after the start"


def seconds_until(is_so):
    began = time.monotonic()
    while not is_so() and time.monotonic() < began + HANG:
        time.sleep(0.05)
    return time.monotonic() - began


def judge(one, case):
    """Nothing of a killed program is left after a while. How long that took, in seconds."""
    leaders = {rank.pid for rank in one.ranks}
    seconds = seconds_until(lambda: not killed.of_sessions(leaders))
    assert killed.of_sessions(leaders) == {}, case
    seconds_until(lambda: not killed.shared(one.shared))
    assert killed.shared(one.shared) == set(), case
    left = [str(path) for path in Path(one.program.folder).parent.rglob("*") if is_stale(path)]
    assert left == [], case
    return seconds


def is_stale(path):
    """Whether a file is a temporary one."""
    return path.is_file() and ("tmp" in path.parts[-2:] or path.name[0] == "." or path.suffix in (".partial", ".tmp"))


def start_again(one):
    program = replace(one.program, folder=one.program.folder + "again", epochs=1)
    return program, killed.start(program)


def trains(program, ranks):
    """Whether a program came to its end."""
    for rank in ranks:
        rank.join(HANG)
    killed.end_all({rank.pid for rank in ranks})
    codes = [rank.exitcode for rank in ranks]
    return codes == [0] * len(ranks) or (codes, Path(program.folder, "0.log").read_text()[-3000:])


def play(programs, numbers):
    """Programs that run side by side are killed, looked after, and started again."""
    started = [programs(number) for number in numbers]
    cases = []
    for one in started:
        kind, world_size, batch_size = CASES[one.number % len(CASES)]
        cases.append(f"{kind}, {world_size} ranks, batches of {batch_size}, killed {wait_and_kill(one)}")
    told = [judge(one, case) for one, case in zip(started, cases, strict=True)]
    again = [start_again(one) for one in started]
    for case, (program, ranks) in zip(cases, again, strict=True):
        assert trains(program, ranks) is True, case
    return told


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param([range(4)], marks=pytest.mark.wide),
        pytest.param([[n] for n in range(4, 29)], marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
    ids=["4 kills", "25 kills"],
)
def test_nothing_is_left_of_a_killed_trainer_and_the_next_one_trains(programs, rounds):
    told = [seconds for numbers in rounds for seconds in play(programs, numbers)]
    print(
        f"killed trainers: {len(told)}; the last process ended after {statistics.median(told):.1f} s (median), "
        f"{max(told):.1f} s (most); nothing left, all trained again"
    )
    assert {kind for kind, _, _ in CASES} == set(KINDS)

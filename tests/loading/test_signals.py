"""Signals that a launcher sends to all processes of a job are for the trainer: workers go on."""

import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arguments import nested
from guards import HANG

from lightning_h5 import LazyH5DataModule
from lightning_h5.loading.worker_process import signals_for_trainer

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, signal, sys
from lightning_h5 import LazyH5DataModule

def slowly(x):
    import time
    time.sleep(0.002)
    return x

def main():
    seen = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda number, frame: seen.append(number))
    path, method, persistent = sys.argv[1:]
    workers = {"start_method": method, "persistent": bool(int(persistent))}
    module = LazyH5DataModule(path, x_key="x", num_workers=2, batch_size=8, workers=workers, transform=slowly)
    module.setup("fit")
    loader = module.train_dataloader()
    os.write(1, b"begun\\n")
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        rows = [int(row) for batch in loader for row in batch]
        assert sorted(rows) == list(range(400)), rows
        os.write(1, b"epoch\\n")
    assert seen
    os.write(1, b"over\\n")  # with workers that wait, or with some that are left behind
    if int(persistent):
        global left
        left = iter(loader)
        next(left)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def path(make_h5: Any) -> str:
    return str(make_h5({"x": np.arange(400)}))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", True), ("fork", False), ("forkserver", True), ("spawn", True)]
)
def test_workers_go_on_whatever_the_job_is_sent(path: str, tmp_path: Path, method: str, persistent: bool) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), path, method, str(int(persistent))]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert program.stdout is not None
        assert os.read(program.stdout.fileno(), 6) == b"begun\n"
        draws, sent = random.Random(0), [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
        if method != "forkserver":  # whose processes have to end at SIGTERM before they are workers
            sent.append(signal.SIGTERM)
        for _ in range(2):
            while not select.select([program.stdout], [], [], draws.random() * 0.04)[0]:
                os.killpg(program.pid, draws.choice(sent))
            assert os.read(program.stdout.fileno(), 6) == b"epoch\n"
        output, _ = program.communicate(timeout=HANG)
        assert program.returncode == 0
        assert output.split() == [b"epoch", b"over"]
        with suppress(ProcessLookupError):  # no process is left in the end
            while True:
                os.killpg(program.pid, 0)
                time.sleep(0.1)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def ends_a_program(x: Any) -> Any:
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    assert program.wait(timeout=HANG) == -signal.SIGTERM
    return x


def test_a_program_that_a_worker_starts_can_be_ended(path: str) -> None:
    module = LazyH5DataModule(path, **nested(x_key="x", num_workers=1, batch_size=400, transform=ends_once))
    module.setup("fit")
    assert len(next(iter(module.train_dataloader()))) == 400


def ends_once(x: Any) -> Any:
    return ends_a_program(x) if int(x) == 7 else x


def leave_workers(path: str) -> None:
    global left
    module = LazyH5DataModule(path, **nested(x_key="x", num_workers=2, batch_size=8))
    module.setup("fit")
    left = iter(module.train_dataloader())
    next(left)


def test_a_forked_process_ends_with_workers_that_are_left(path: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=leave_workers, args=(path,))
    process.start()
    process.join(HANG)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()


def test_workers_still_end_at_their_own_faults() -> None:
    before = signal.signal(signal.SIGSEGV, lambda number, frame: None)
    try:
        assert {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} <= {*signals_for_trainer()}
        assert signal.SIGSEGV not in signals_for_trainer()
    finally:
        signal.signal(signal.SIGSEGV, before)

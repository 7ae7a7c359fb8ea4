"""Workers that are killed, crash, leave or hang: an error that names cause, file and rows; then on again."""

import ctypes
import gc
import os
import re
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from factories import Stored

from lightning_h5 import H5Error, H5WorkerError, LazyH5DataModule

ROWS, BATCH = 96, 8
BAD = 41  # the row at which a worker meets its end


class Fate:
    """A transform that ends its worker at a row, once: a file says that it was done."""

    def __init__(self, how, done):
        self.how, self.done = how, str(done)

    def __call__(self, x):
        if int(x[0]) == BAD and not os.path.exists(self.done):
            with open(self.done, "w"):
                pass
            FATES[self.how]()
        return x


def hang():
    time.sleep(3600)


def crash():
    ctypes.string_at(0)


FATES = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": crash,
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "SIGABRT": os.abort,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit code 3": lambda: os._exit(3),
    "exit code 0": lambda: os._exit(0),
}


@pytest.fixture
def path(make_h5):
    values = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 3, axis=1)
    return make_h5(x=Stored(values, "chunked", (16, 3), options={"compression": "gzip"}))


def loader_of(path, transform, **options):
    options = {"num_workers": 2, "persistent_workers": True} | options
    module = LazyH5DataModule(path, x_key="x", batch_size=BATCH, transform=transform, rank=0, world_size=1, **options)
    module.setup("fit")
    return module.train_dataloader()


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def threads():
    """Those of this process, but for tqdm's one that watches all bars there ever are."""
    return [thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"]


def shared():
    """Pieces of shared memory that this process has open or mapped; others on this machine have theirs."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as file:
        found |= {line.split(maxsplit=5)[-1].strip() for line in file}
    return {name for name in found if ("/dev/shm" in name or "memfd" in name) and "/sem." not in name}


@pytest.fixture
def leaves_nothing():
    """No process, thread or piece of shared memory is left."""
    before = children(), len(threads()), shared()
    yield
    end = time.monotonic() + 10
    while time.monotonic() < end and (children() - before[0] or len(threads()) > before[1]):
        time.sleep(0.05)
    gc.collect()  # errors hold what they passed through
    left = [pid for pid in children() - before[0] if "resource_tracker" not in command_of(pid)]
    assert [pid for pid in left if "forkserver" not in command_of(pid)] == []
    assert len(threads()) <= before[1], threads()
    assert shared() <= before[2]


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except FileNotFoundError:
        return "resource_tracker"


def fates():
    """Whether workers persist has nothing to do with how they end: two ways in the short suite, all in the long one."""
    for how in FATES:
        yield pytest.param(how, True, id=f"{how}-persistent")
        marks = [] if how in ("SIGKILL", "exit code 0") else [pytest.mark.slow]
        yield pytest.param(how, False, id=f"{how}-new each epoch", marks=marks)


@pytest.mark.parametrize(("how", "persistent"), [*fates()])
def test_a_worker_that_ends_is_named_with_cause_file_and_rows(path, tmp_path, how, persistent, leaves_nothing):
    loader = loader_of(path, Fate(how, tmp_path / "done"), persistent_workers=persistent)
    with pytest.raises(H5WorkerError) as caught:
        list(loader)
    text = str(caught.value)
    assert how in text
    assert re.match(r"worker [01] ", text)
    assert repr(path) in text
    named = re.search(r"rows ([\d, ]+)", text)[1]
    assert len(named.split(",")) >= 1
    # The next iteration has new workers, and every row.
    assert sorted(int(row) for batch in loader for row in batch[:, 0]) == list(range(ROWS))
    loader.close()


@pytest.mark.parametrize(("method", "timeout"), [("fork", 1.5), pytest.param("forkserver", 25, marks=pytest.mark.slow)])
def test_a_worker_that_hangs_is_ended_at_the_limit(path, tmp_path, method, timeout, leaves_nothing):
    loader = loader_of(path, Hang(tmp_path / "done"), multiprocessing_context=method, timeout=timeout)
    with pytest.raises(
        H5WorkerError, match=rf"gave nothing for {timeout} s \(timeout\) and was ended; it was to give step"
    ):
        list(loader)
    assert sorted(int(row) for batch in loader for row in batch[:, 0]) == list(range(ROWS))
    loader.close()


class Hang:
    def __init__(self, done):
        self.done = str(done)

    def __call__(self, x):
        if int(x[0]) == BAD and not os.path.exists(self.done):
            with open(self.done, "w"):
                pass
            hang()
        return x


def test_the_training_process_is_not_interrupted_where_it_runs(path, tmp_path, leaves_nothing):
    """Torch's own handler would raise inside the loop that trains."""
    loader = loader_of(path, Fate("SIGKILL", tmp_path / "done"), prefetch_factor=4)
    got, batches = 0, iter(loader)

    def train():
        nonlocal got
        for _ in batches:
            got += 1
            end = time.monotonic() + 0.2
            while time.monotonic() < end:  # a worker ends meanwhile: the loop goes on
                sum(range(1000))

    with pytest.raises(H5WorkerError) as caught:
        train()
    assert got >= 1
    assert [entry.name for entry in caught.traceback][1] == "train"
    assert "__next__" in [entry.name for entry in caught.traceback]  # where the next batch was asked for


def test_a_worker_killed_from_outside_while_idle_is_told_at_the_next_batch(path, leaves_nothing):
    loader = loader_of(path, None)
    batches = iter(loader)
    next(batches)
    os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
    os.kill(loader._iterator._workers[1].pid, signal.SIGKILL)
    with pytest.raises(H5WorkerError, match=r"SIGKILL: by somebody, or by the system for want of memory"):
        list(batches)


def test_an_error_in_a_worker_is_that_error(path, leaves_nothing):
    loader = loader_of(path, Broken())
    with pytest.raises(H5Error, match="of my own"):
        list(loader)
    loader.close()


class Broken:
    def __call__(self, x):
        raise H5Error("of my own")

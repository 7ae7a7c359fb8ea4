"""Workers that are killed, crash, leave or hang: an error that names cause, file and rows; then on again."""

import ctypes
import errno
import gc
import os
import re
import resource
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from arguments import nested
from factories import Stored
from guards import HANG
from torch.utils.data import DataLoader

from lightning_h5 import H5Error, H5ValueError, H5WorkerError, LazyH5DataModule
from lightning_h5.loading import workers

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
    "exit code 3": lambda: os._exit(3),
    "exit code 0": lambda: os._exit(0),
}


@pytest.fixture
def path(make_h5):
    values = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 3, axis=1)
    return make_h5(x=Stored(values, "chunked", (16, 3), options={"compression": "gzip"}))


def loader_of(path, transform, **options):
    options = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True} | options
    module = LazyH5DataModule(path, **nested(x_key="x", transform=transform, rank=0, world_size=1, **options))
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
    end = time.monotonic() + HANG
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


@pytest.mark.wide
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
        H5WorkerError, match=rf"returned no batch for {timeout} s \(timeout\) and was killed; it was loading step"
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


@pytest.mark.wide
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
    os.kill(loader._iterator.processes[0].pid, signal.SIGKILL)
    os.kill(loader._iterator.processes[1].pid, signal.SIGKILL)
    with pytest.raises(H5WorkerError, match=r"SIGKILL: by a user, or by the system for lack of memory"):
        list(batches)


def test_an_error_in_a_worker_is_that_error(path, leaves_nothing):
    loader = loader_of(path, Broken())
    with pytest.raises(H5Error, match="of my own"):
        list(loader)
    loader.close()


class Broken:
    def __call__(self, x):
        raise H5Error("of my own")


# Messages that the socket does not hold -------------------------------------------------------------------------------

WIDE = 1024  # a batch of 8 rows is 32 KiB and goes with its message


@pytest.fixture
def wide(make_h5, monkeypatch):
    """A file of wide rows; sockets hold 64 KiB."""
    make_pair = socket.socketpair

    def small():
        pair = make_pair()
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)  # the system doubles it
        return pair

    monkeypatch.setattr(socket, "socketpair", small)
    values = np.repeat(np.arange(ROWS, dtype="f4")[:, None], WIDE, axis=1)
    return make_h5(x=Stored(values, "chunked", (16, WIDE), options={"compression": "lzf"}))


@pytest.mark.wide
@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("batch", [8, 12, 16, 96], ids=["32 KiB", "48 KiB", "64 KiB", "in shared memory"])
def test_a_worker_killed_with_half_of_a_message_in_the_socket_is_named(wide, n_workers, batch, leaves_nothing):
    loader = loader_of(
        wide, None, num_workers=n_workers, batch_size=min(batch, ROWS), prefetch_factor=4, drop_last=False
    )
    batches = iter(loader)
    next(batches)
    time.sleep(0.3)  # the consumer trains: the socket is full
    for worker in loader._iterator.processes:
        os.kill(worker.pid, signal.SIGKILL)
    if batch < ROWS:
        with pytest.raises(H5WorkerError, match="was ended by SIGKILL"):
            list(batches)
    else:
        list(batches)  # a single batch, which is here
    assert sorted(int(row) for batch in loader for row in batch[:, 0]) == list(range(ROWS))
    loader.close()


class Talkative:
    """A batch of a user's own objects, which no shared memory takes."""

    def __call__(self, batch):
        return {"x": batch, "text": ["." * 100_000], "array": np.zeros((40, 1000))}


@pytest.mark.wide
@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("pause", [0.0, 0.05, 0.3])
def test_a_killed_worker_is_found_whatever_it_sends(wide, n_workers, pause, leaves_nothing):
    loader = loader_of(wide, None, batch_transform=Talkative(), num_workers=n_workers, prefetch_factor=3)
    batches = iter(loader)
    assert len(next(batches)["text"][0]) == 100_000
    time.sleep(pause)
    os.kill(loader._iterator.processes[0].pid, signal.SIGKILL)
    with pytest.raises(H5WorkerError, match="worker 0 was ended by SIGKILL"):
        list(batches)


def test_a_worker_that_stands_still_in_the_middle_of_a_message_is_ended_at_the_limit(wide, leaves_nothing):
    loader = loader_of(wide, None, batch_size=16, num_workers=1, prefetch_factor=4, timeout=1)
    batches = iter(loader)
    next(batches)
    time.sleep(0.3)
    os.kill(loader._iterator.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(H5WorkerError, match="returned no batch for 1 s"):
        list(batches)


def test_large_messages_come_as_they_were_sent(wide):
    loader = loader_of(wide, None, batch_transform=Talkative(), num_workers=2)
    rows = []
    for batch in loader:
        assert (batch["x"] == batch["x"][:, :1]).all()
        assert batch["text"] == ["." * 100_000]
        assert batch["array"].shape == (40, 1000)
        rows += batch["x"][:, 0].tolist()
    assert sorted(rows) == list(range(ROWS))
    loader.close()


@pytest.fixture
def pinning(monkeypatch):
    """As if there were an accelerator: a thread takes batches from workers, and pins nothing."""
    for name, value in {
        "is_available": True,
        "current_accelerator": torch.device("cpu"),
        "current_device_index": 0,
        "set_device_index": None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr("lightning_h5.loading.workers.pin", lambda batch: batch)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_killed_worker_is_found_behind_the_thread_that_pins(wide, pinning, persistent, leaves_nothing):
    loader = loader_of(
        wide, None, batch_transform=Talkative(), num_workers=1, persistent_workers=persistent, pin_memory=True
    )
    batches = iter(loader)
    next(batches)
    time.sleep(0.1)
    os.kill(children_that_work(), signal.SIGKILL)
    with pytest.raises(H5WorkerError, match="worker 0 was ended by SIGKILL"):
        list(batches)
    for _ in range(2):
        assert sum(len(batch["x"]) for batch in loader) == ROWS
    loader.close()


def children_that_work():
    (worker,) = active_children()
    return worker.pid


# Between two iterations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_workers_that_end_between_two_epochs_are_started_again(path, number, leaves_nothing):
    loader = loader_of(path, None)
    assert sum(map(len, loader)) == ROWS
    for worker in loader._iterator.processes:
        os.kill(worker.pid, number)
        worker.join()
    assert sum(map(len, loader)) == ROWS
    loader.close()


def test_workers_that_end_while_an_epoch_starts_are_started_again(path, leaves_nothing):
    loader = loader_of(path, None)
    assert sum(map(len, loader)) == ROWS
    os.kill(loader._iterator.processes[0].pid, signal.SIGKILL)
    assert sum(map(len, loader)) == ROWS
    loader.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_an_interrupt_while_a_batch_is_awaited_leaves_a_loader_that_works(
    path, monkeypatch, persistent, leaves_nothing
):
    loader = loader_of(path, None, persistent_workers=persistent)
    batches = iter(loader)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(workers.WorkerPool, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(batches)
    with pytest.raises(H5Error, match="has failed"):
        next(batches)
    assert sum(map(len, loader)) == ROWS
    loader.close()


def interrupt(*_):
    raise KeyboardInterrupt


# After an error -----------------------------------------------------------------------------------------------------


class BadRow:
    def __call__(self, x):
        if int(x[0]) == BAD:
            raise H5Error("of my own")
        return x


@pytest.mark.parametrize("n_workers", [0, 2])
def test_after_an_error_an_iteration_gives_errors_and_never_an_end(path, n_workers, leaves_nothing):
    loader = loader_of(path, BadRow(), num_workers=n_workers, persistent_workers=n_workers > 0, shuffle=False)
    batches = iter(loader)
    assert [len(next(batches)) for _ in range(BAD // BATCH)] == [BATCH] * (BAD // BATCH)
    state = loader.state_dict()
    with pytest.raises(H5Error, match="of my own"):
        next(batches)
    for _ in range(3):
        with pytest.raises(H5Error, match=r"has failed \(H5Error: .*of my own.*Start a new iteration"):
            next(batches)
    assert loader.state_dict() == state
    assert len(next(iter(loader))) == BATCH
    loader.close()


# While workers start ------------------------------------------------------------------------------------------------


def test_a_worker_that_ends_while_it_starts_is_said_to(path, leaves_nothing):
    loader = loader_of(path, None, worker_init_fn=leave)
    with pytest.raises(H5WorkerError, match=r"ended with exit code 1 while it started; .* See its output"):
        list(loader)


def test_a_worker_that_ends_while_others_are_started_is_said_to(path, monkeypatch, leaves_nothing):
    """Torch's signal handler would raise in the middle of that."""
    list(DataLoader(range(4), num_workers=1))  # torch has set its handler
    start = workers.WorkerPool._start

    def late(pool, *arguments):
        if pool.processes:
            pool.processes[0].join(HANG)
        return start(pool, *arguments)

    monkeypatch.setattr(workers.WorkerPool, "_start", late)
    loader = loader_of(path, None, worker_init_fn=leave)
    with pytest.raises(H5WorkerError, match=r"worker 0 .*ended with exit code 1 while it started; it was loading"):
        list(loader)


def leave(_):
    os._exit(1)


def test_where_the_script_is_imported_its_guard_is_named(path, monkeypatch, leaves_nothing):
    loader = loader_of(path, None, worker_init_fn=leave)
    monkeypatch.setattr(workers.WorkerPool, "_why_it_ended", as_if_spawned(workers.WorkerPool._why_it_ended))
    with pytest.raises(H5WorkerError, match=r'put the code that trains under `if __name__ == "__main__":` there'):
        list(loader)


def as_if_spawned(why_it_ended):
    def of_spawn(pool, worker):
        pool.method = "spawn"
        return why_it_ended(pool, worker)

    return of_spawn


@pytest.mark.parametrize("name", ["transform", "batch_transform"])
def test_a_lambda_that_cannot_travel_is_named(path, name):
    loader = loader_of(path, **{"transform": None} | {name: lambda x: x}, multiprocessing_context="spawn")
    for _ in range(2):
        with pytest.raises(
            H5ValueError, match=rf"start by spawn receive their arguments pickled, and {name} cannot be"
        ):
            list(loader)
    loader.close()


def refuse_the_second(number):
    real, calls = os.fork, []

    def fork():
        calls.append(None)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return real()

    return fork


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EAGAIN, "limit of processes is reached"), (errno.ENOMEM, "no memory left")],
    ids=["EAGAIN", "ENOMEM"],
)
def test_workers_that_cannot_be_started_leave_nothing_and_say_what_ran_out(
    path, monkeypatch, number, said, leaves_nothing
):
    loader = loader_of(path, None)
    loader.dataset.counters.share(2)
    gc.collect()  # of what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refuse_the_second(number))
        with pytest.raises(H5Error, match=f"2 workers could not be started: .*{said}.*Use fewer workers"):
            list(loader)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert sum(map(len, loader)) == ROWS
    loader.close()


@contextmanager
def descriptors_left(n):
    """Meanwhile this process can open so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(1))
        for _ in range(n):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.wide
@pytest.mark.parametrize("n", [1, 3, 5, 7, 9])
def test_without_descriptors_for_workers_the_error_names_them(path, n, leaves_nothing):
    loader = loader_of(path, None)
    loader.dataset.counters.share(2)
    gc.collect()  # of what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    with (
        descriptors_left(n),
        pytest.raises(H5Error, match="2 workers could not be started: this process has no desc"),
    ):
        list(loader)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert sum(map(len, loader)) == ROWS
    loader.close()


def slow_start(_):
    time.sleep(2)


@pytest.mark.wide
def test_the_time_that_a_worker_takes_to_start_is_not_that_of_its_batches(path, leaves_nothing):
    loader = loader_of(path, None, worker_init_fn=slow_start, timeout=1)
    assert sum(map(len, loader)) == ROWS
    loader.close()


@pytest.mark.wide
def test_a_worker_that_never_starts_is_said_to(path, monkeypatch, leaves_nothing):
    monkeypatch.setattr(workers, "START_SECONDS", 2.0)
    loader = loader_of(path, None, worker_init_fn=lambda _: hang(), timeout=1)
    with pytest.raises(H5WorkerError, match="worker 0 has not started after 2 s and was killed"):
        list(loader)

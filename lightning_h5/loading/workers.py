"""Batches from worker processes, each of which talks to the main process through a socket of its own.

torch has one pipe for all workers, and a lock for writing to it. A worker that is killed while it writes leaves the
lock taken and half of a message behind, and the main process would wait for the other half for ever. Here messages are
sent and taken a piece at a time, and the end of a worker is the end of its socket, which is seen at once. The main
process's end is the end of its sockets as well: workers never outlive it, however it ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from queue import Empty, Queue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch.distributed

from ..datasets import (
    WorkerFailure,
    naming_shared_memory,
    starting_workers,
    worker_memory,
)
from ..errors import H5Error, H5ValueError, H5WorkerError
from ..types import BatchToken
from .collate import pin
from .prefetch import CLOSED
from .worker_errors import close_pipes_of_fork, how_it_ended, what_it_did, what_ran_out, which_cannot_be_pickled
from .worker_process import HEADER, WorkerJob, serve

if TYPE_CHECKING:
    from .loader import H5DataLoader

__all__ = ["PinnedBatches", "WorkerBatches", "WorkerPool"]

POLL_SECONDS = 0.2
"""How often a wait for a batch looks whether time is over or the loader was closed."""

GRACE_SECONDS = 1.0
"""A socket may close before the system says how the process at its other end ended."""

START_SECONDS = 300.0
"""How long a worker may take to start, at least: on a busy machine that has nothing to do with how long it reads."""

END_SECONDS = 5.0
"""How long workers may take to finish their batch when they are to end; then they are killed."""

MIN_SHARED = 16 << 20  # bytes of memory for a worker's batches, taken when they are used
N_SHARED = 8  # times the batches that are read ahead: the consumer has some, transforms may make them larger

_log = logging.getLogger(__name__)
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # the main process's ends


def _close_inherited() -> None:
    for each in list(_sockets):
        each.close()


# A forked child that kept these open would keep workers from seeing the end of the main process.
os.register_at_fork(after_in_child=_close_inherited)


@dataclass(eq=False)
class _Task:
    """A batch that a worker is to make.

    Attributes:
        worker: its number.
        token: which batch; None asks the worker for a sign of life.
        answer: what came.
        is_done: whether it came.
    """

    worker: int
    token: BatchToken | None
    answer: Any = None
    is_done: bool = False


class _Worker:
    """A worker process as the main process sees it: what goes to it, and what has come of its next message."""

    def __init__(self, process: BaseProcess, connection: socket.socket) -> None:
        self.process, self.connection = process, connection
        connection.setblocking(False)
        self.has_answered = False
        self.is_gone = False
        self._out = bytearray()
        self._expect(HEADER.size)

    def _expect(self, n_bytes: int, number: int | None = None) -> None:
        self._number, self._buffer = number, bytearray(n_bytes)
        self._left = memoryview(self._buffer)

    def send(self, number: int, message: bytes) -> None:
        """Sends a message, as much of it as the socket takes now."""
        self._out += HEADER.pack(len(message), number) + message
        self.flush()

    def flush(self) -> bool:
        """Sends what was left; returns whether something still is."""
        try:
            while self._out:
                del self._out[: self.connection.send(self._out)]
        except BlockingIOError:
            return True
        except OSError:  # the worker has ended, which is found when its answer is read
            self._out.clear()
        return False

    def read(self) -> tuple[int, bytearray] | None:
        """Returns the next message and its number if all of it has come; sets ``is_gone`` at the worker's end."""
        while True:
            try:
                n_bytes = self.connection.recv_into(self._left)
            except BlockingIOError:
                return None
            except OSError:
                n_bytes = 0
            if not n_bytes:
                self.is_gone = True
                return None
            self._left = self._left[n_bytes:]
            if self._left:
                continue
            if self._number is None:
                self._expect(*HEADER.unpack(self._buffer))
            else:
                number, message = self._number, self._buffer
                self._expect(HEADER.size)
                self.has_answered = True
                return number, message


class WorkerPool:
    """Worker processes of a loader, for one pass at a time.

    Args:
        loader: whose workers to start.

    Attributes:
        persists: whether they wait for another pass when one has ended.

    Raises:
        H5Error: workers cannot be started: the system has no shared memory, descriptors or processes left.
        H5ValueError: a function of the user's cannot be pickled for workers.
    """

    def __init__(self, loader: H5DataLoader) -> None:
        context: Any = loader.multiprocessing_context or multiprocessing.get_context()
        self.method: str = context.get_start_method()
        self.persists, self.timeout = loader.persistent_workers, loader.timeout
        self.dataset = loader.dataset
        self.is_ended, self._pid = False, os.getpid()
        self._workers: list[_Worker] = []
        self._tasks: dict[int, _Task] = {}  # on their way, by number
        self._n_sent = 0
        self._pass: weakref.ref[WorkerBatches] | None = None
        depth = loader.prefetch_factor or 2
        # This raises if a file cannot be read any more; `__del__` ends nothing until `_lock` exists.
        n_bytes = max(MIN_SHARED, loader.sampler.batch_size * self.dataset.cost.row_bytes * N_SHARED * depth)
        self._memory = worker_memory(loader.num_workers, n_bytes)
        self._lock = threading.RLock()  # the thread that pins and the main thread may both use it
        self._poll = select.poll()
        job = WorkerJob(
            self.dataset,
            loader.collate_fn,
            loader.worker_init_fn,
            loader.sampler.replica.rank,
            int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator)),
            loader.num_workers,
            self._memory,
        )
        try:
            if self.method == "fork":
                self.dataset.prepare_workers(loader.num_workers)
            with naming_shared_memory(), starting_workers():
                self.dataset.counters.share(loader.num_workers)
                _let_threads_leave_python()
                for worker in range(loader.num_workers):
                    self._start(context, job, worker)
        except BaseException as error:
            self.end(at_once=True)
            close_pipes_of_fork(error)
            if (cannot := which_cannot_be_pickled(loader, self.method, error)) is not None:
                raise H5ValueError(cannot) from error
            if (ran_out := what_ran_out(error, loader.num_workers)) is not None:
                raise H5Error(ran_out) from error
            raise

    def _start(self, context: Any, job: WorkerJob, worker: int) -> None:
        ours, theirs = socket.socketpair()
        _sockets.add(ours)  # before the worker is forked: it must not keep this end open
        with theirs:
            try:
                process = context.Process(target=serve, args=(job, theirs, worker), daemon=True)
                process.start()
            except BaseException:
                ours.close()
                raise
        self._workers.append(_Worker(process, ours))
        self._poll.register(ours, select.POLLIN)

    @property
    def processes(self) -> list[BaseProcess]:
        """The workers' processes."""
        return [worker.process for worker in self._workers]

    # Passes --------------------------------------------------------------------------------------------------

    def can_begin(self) -> bool:
        """Whether these workers are ready for another pass; ends those that are not, or leaves them to their pass."""
        current = None if self._pass is None else self._pass()
        if self.is_ended:
            return False
        if current is not None and current.is_running:
            self.persists = False  # its batches would be lost
            return False
        if self._are_well():
            try:
                with self._lock:
                    self._tasks.clear()  # of a pass that was left
                    for task in [self.ask(worker, None) for worker in range(len(self._workers))]:
                        self.wait_for(task)
                return True
            except H5WorkerError as error:  # they were ending, as by an interrupt that all processes got
                _log.warning("persistent workers are started again: %s", str(error))
        self.end(at_once=True)
        return False

    def begin(self, tokens: Iterator[BatchToken], depth: int) -> WorkerBatches:
        """Begins a pass.

        Args:
            tokens: which batches.
            depth: batches that each worker makes ahead.
        """
        batches = WorkerBatches(self, tokens, depth * len(self._workers))
        self._pass = weakref.ref(batches)
        return batches

    def _are_well(self) -> bool:
        gone = [(at, process.exitcode) for at, process in enumerate(self.processes) if not process.is_alive()]
        for worker, code in gone:
            if code is not None and code < 0 and code != -signal.SIGINT:
                _log.warning("between two iterations worker %d %s others are started.", worker, how_it_ended(code))
        return not gone

    # Tasks ---------------------------------------------------------------------------------------------------

    def ask(self, worker: int, token: BatchToken | None) -> _Task:
        """Has a worker make a batch."""
        with self._lock:
            task = self._tasks[self._n_sent] = _Task(worker, token)
            if not self.is_ended:
                self._workers[worker].send(self._n_sent, pickle.dumps(token, pickle.HIGHEST_PROTOCOL))
            self._n_sent += 1
        return task

    def wait_for(self, task: _Task, is_closed: Callable[[], bool] = lambda: False) -> None:
        """Waits until a task is done, and takes what else comes meanwhile.

        Args:
            task: which one.
            is_closed: whether to stop waiting.

        Raises:
            H5WorkerError: its worker has ended, or takes longer than allowed.
            H5Error: the workers were ended meanwhile.
        """
        with self._lock:
            since, has_begun, worker = monotonic(), False, self._workers[task.worker]
            while not task.is_done:
                if self.is_ended or is_closed():
                    raise H5Error(CLOSED)
                if worker.is_gone:
                    raise H5WorkerError(self._how_it_went(task.worker))
                if self._take_in() or not self.timeout:
                    continue
                if not has_begun and self._has_begun(task.worker):
                    since, has_begun = monotonic(), True
                if monotonic() - since >= (self.timeout if has_begun else max(self.timeout, START_SECONDS)):
                    raise H5WorkerError(self._how_it_hangs(task.worker, has_begun))

    def _take_in(self) -> bool:
        """Waits a moment for answers; returns whether any came."""
        some = False
        for worker in self._workers:
            if not worker.is_gone:
                wanted = select.POLLIN | select.POLLOUT if worker.flush() else select.POLLIN
                self._poll.modify(worker.connection, wanted)
        ready = {descriptor for descriptor, _ in self._poll.poll(POLL_SECONDS * 1000)}
        for worker in self._workers:
            if worker.connection.fileno() in ready and (came := worker.read()) is not None:
                answer = pickle.loads(came[1])  # also of a pass that was left: its memory goes back
                if (task := self._tasks.pop(came[0], None)) is not None:
                    task.answer, task.is_done = answer, True
                some = True
            if worker.is_gone and worker.connection.fileno() in ready:
                self._poll.unregister(worker.connection)
        return some

    # What is said --------------------------------------------------------------------------------------------

    def _has_begun(self, worker: int) -> bool:
        return self._workers[worker].has_answered or self.dataset.counters.begun_by(worker) is not None

    def _how_it_went(self, worker: int) -> str:
        process = self.processes[worker]
        process.join(GRACE_SECONDS)
        n_more = sum(not one.is_alive() for one in self.processes) - 1
        name = f"worker {worker}" + (f" ({n_more} more ended, too)" if n_more > 0 else "")
        code, doing = process.exitcode, self._doing(worker)
        if self._has_begun(worker) or code is None or code < 0:
            return f"{name} {how_it_ended(code)} {doing} The files are closed; start again to go on."
        look_at = "Look at what it wrote above, and at worker_init_fn."
        if self.method != "fork":
            look_at = (
                f"Look at what it wrote above. Workers that start by {self.method} import the script: what trains has "
                'to stand under `if __name__ == "__main__":` there.'
            )
        return f"{name} ended with exit code {code} while it started; {doing} {look_at}"

    def _how_it_hangs(self, worker: int, has_begun: bool) -> str:
        doing = self._doing(worker)
        if not has_begun:
            return (
                f"worker {worker} has not started after {max(self.timeout, START_SECONDS):g} s and was ended; {doing} "
                "worker_init_fn hangs, or what a worker imports, or the machine does too much: look at these, or take "
                "fewer workers."
            )
        return (
            f"worker {worker} gave nothing for {self.timeout:g} s (timeout) and was ended; {doing} The storage or a "
            "transform hangs: look at both, or raise timeout."
        )

    def _doing(self, worker: int) -> str:
        tokens = [task.token for task in self._tasks.values() if task.worker == worker and task.token is not None]
        return what_it_did(tokens, self.dataset, self.dataset.counters.begun_by(worker))

    # The end -------------------------------------------------------------------------------------------------

    def end(self, *, at_once: bool = False) -> None:
        """Ends the workers; calling it again has no effect.

        Args:
            at_once: kill them, instead of letting each finish its batch.
        """
        if self.is_ended or self._pid != os.getpid():  # in a forked child they are not its own
            return
        self.is_ended = True  # a thread that waits for a batch sees it
        with self._lock:
            for worker in self._workers:
                if at_once:
                    worker.process.kill()
                else:
                    with suppress(OSError):
                        worker.connection.shutdown(socket.SHUT_WR)
            end = monotonic() + END_SECONDS
            for worker in self._workers:
                worker.process.join(max(0.0, end - monotonic()))
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()
                worker.connection.close()
            if self._memory is not None:
                self._memory.close()

    def __del__(self) -> None:
        # While Python shuts down, ``multiprocessing`` ends daemons itself.
        if hasattr(self, "_lock") and not sys.is_finalizing():
            self.end()


class WorkerBatches:
    """One pass: the batches of some tokens, in their order, made by workers in turn.

    Args:
        pool: the workers.
        tokens: which batches.
        n_ahead: batches that are asked for before the first one is taken.
    """

    def __init__(self, pool: WorkerPool, tokens: Iterator[BatchToken], n_ahead: int) -> None:
        self._pool, self._tokens, self._n_workers = pool, tokens, len(pool.processes)
        self._tasks: deque[_Task] = deque()
        self._n_asked, self._is_closed = 0, False
        for _ in range(n_ahead):
            self._ask()

    def _ask(self) -> None:
        if (token := next(self._tokens, None)) is not None:
            self._tasks.append(self._pool.ask(self._n_asked % self._n_workers, token))
            self._n_asked += 1

    @property
    def is_running(self) -> bool:
        """Whether batches are to come."""
        return bool(self._tasks) and not self._is_closed

    def __iter__(self) -> WorkerBatches:
        return self

    def __next__(self) -> Any:
        if not self._tasks:
            self._leave()
            raise StopIteration
        if self._is_closed or self._pool.is_ended:
            raise H5Error(CLOSED)
        try:
            self._pool.wait_for(self._tasks[0], lambda: self._is_closed)
            answer = self._tasks.popleft().answer
            self._ask()
            if isinstance(answer, WorkerFailure):
                answer.raise_again()
        except BaseException as error:
            # Workers that persist end, too: some may have failed to start as their user wants.
            self._is_closed = True
            self._pool.end(at_once=isinstance(error, H5WorkerError) or not isinstance(error, Exception))
            raise
        return answer

    def _leave(self) -> None:
        if not self._pool.persists:
            self._pool.end()

    def close(self) -> None:
        """Ends the pass."""
        self._is_closed = True
        self._leave()

    def __del__(self) -> None:
        if hasattr(self, "_is_closed") and not sys.is_finalizing():
            self.close()


class PinnedBatches:
    """Batches in page-locked memory: a thread takes them from others ahead of use, and copies them there.

    Args:
        batches: the others.
    """

    def __init__(self, batches: WorkerBatches) -> None:
        self._batches = batches
        self._pinned: Queue[tuple[Any, BaseException | None]] = Queue(1)
        self._is_over = threading.Event()
        device = torch.accelerator.current_device_index()
        arguments = (batches, self._pinned, self._is_over, device)  # not this object, or it would never be forgotten
        self._thread = threading.Thread(target=_pin_all, args=arguments, name="lightning_h5-pin", daemon=True)
        self._thread.start()

    def __iter__(self) -> PinnedBatches:
        return self

    def __next__(self) -> Any:
        if self._is_over.is_set():
            raise H5Error(CLOSED)
        batch, error = self._pinned.get()
        if error is not None:
            self.close()
            raise error
        return batch

    def close(self) -> None:
        """Ends the thread and the pass."""
        self._dismiss()
        self._thread.join()

    def _dismiss(self) -> None:
        self._is_over.set()
        self._batches.close()
        with suppress(Empty):
            self._pinned.get_nowait()  # room for what the thread has

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self._dismiss()


def _pin_all(
    batches: WorkerBatches, pinned: Queue[tuple[Any, BaseException | None]], is_over: threading.Event, device: int
) -> None:
    torch.accelerator.set_device_index(device)
    error: BaseException | None = None
    while error is None and not is_over.is_set():
        batch = None
        try:
            batch = pin(next(batches))
        except BaseException as raised:  # it belongs to the one who takes this batch
            error = raised
        pinned.put((batch, error))


def _let_threads_leave_python() -> None:
    """Waits a moment before workers are forked if a thread of torch's may be inside the interpreter.

    Before Python 3.11.10 a fork at the instant when another thread enters or leaves the interpreter gives a child
    that hangs for ever (https://github.com/python/cpython/issues/112275; seen here with gloo, whose thread cleans up
    after the collective of the step before). There is nothing to wait for but time.
    """
    if sys.version_info < (3, 11, 10) and torch.distributed.is_available() and torch.distributed.is_initialized():
        sleep(0.05)

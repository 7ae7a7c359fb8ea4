"""The worker processes of a loader: start them, request batches from them in turn, and end them.

A thread may receive their batches ahead of use, and copy them to page-locked memory.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import select
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.process import BaseProcess
from queue import Empty, Queue
from time import monotonic, sleep
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader

from ..datasets import RowDataset, WorkerFailure
from ..errors import H5Error, H5ValueError, H5WorkerError
from ..order import PlanSampler
from ..staging import network_address
from ..threads import EndingThread
from ..types import BatchToken
from .pass_tokens import PassTokens
from .prefetch import CLOSED
from .worker_buffers import naming_shared_memory, starting_workers, worker_memory
from .worker_failures import (
    close_pipes_of_fork,
    resource_that_ran_out,
    unpicklable_arguments,
    what_it_was_loading,
    why_it_ended,
    why_it_was_killed,
)
from .worker_process import LessBatch, WorkerJob, WorkerQueue, holding, serve, signals_for_trainer

__all__ = ["PinnedBatches", "WorkerBatches", "WorkerPool", "pin"]

POLL_SECONDS = 0.2
"""Seconds between checks for a timeout or a closed loader while waiting for a batch."""

GRACE_SECONDS = 1.0
"""Seconds to wait for an exit code: a socket may close before the system reports the end of its process."""

START_SECONDS = 300.0
"""Minimum seconds that a worker may take to start; on a busy machine, starting may take longer than reading."""

END_SECONDS = 5.0
"""Seconds that workers may take to finish their batch at shutdown; then they are killed."""

MIN_SHARED = 16 << 20  # minimum bytes of shared memory per worker; the system allocates pages on first use
N_SHARED = 8  # times the batches read ahead: the consumer holds some, and transforms may enlarge them

NO_TASK = (1 << 64) - 1
"""Number of a message that a worker does not answer."""

_log = logging.getLogger(__name__)
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # the main process's ends


def _close_inherited() -> None:
    for connection in list(_sockets):
        connection.close()


# If a forked child kept these open, workers would not notice the end of the main process.
os.register_at_fork(after_in_child=_close_inherited)


@dataclass(eq=False)
class _Task:
    """A request for a batch to a worker.

    Attributes:
        worker: number of the worker.
        token: token of the batch; None only checks that the worker responds.
        answer: the worker's answer.
        is_done: whether the answer has arrived.
    """

    worker: int
    token: BatchToken | None
    answer: Any = None
    is_done: bool = False


class WorkerPool:
    """Worker processes of a loader, for one pass at a time.

    Args:
        loader: the loader, with the settings of workers and the user's functions.
        dataset: the loader's dataset.
        sampler: the loader's sampler.

    Attributes:
        persists: whether the workers wait for another pass at the end of a pass.
        n_passes: number of passes of these workers.
        processes: the processes of the workers.

    Raises:
        H5Error: the system refuses to start workers.
        H5ValueError: a user function cannot be pickled for workers.
    """

    def __init__(self, loader: DataLoader[Any], dataset: RowDataset, sampler: PlanSampler) -> None:
        context: Any = loader.multiprocessing_context or multiprocessing.get_context()
        self.method: str = context.get_start_method()
        self.persists, self.timeout = loader.persistent_workers, loader.timeout
        self.dataset = dataset
        self.is_ended, self._pid = False, os.getpid()
        self.processes: list[BaseProcess] = []
        self._queues: list[WorkerQueue] = []
        self._tasks: dict[int, _Task] = {}  # unanswered tasks by number
        self._n_sent = 0
        self._pass: weakref.ref[WorkerBatches] | None = None
        self.n_passes = 0
        depth = loader.prefetch_factor or 2
        # This raises if a file can no longer be read; without a lock, `__del__` does nothing.
        n_bytes = max(MIN_SHARED, sampler.mean_rows * dataset.cost.row_bytes * N_SHARED * depth)
        self._memory = worker_memory(loader.num_workers, n_bytes)
        self._lock = threading.RLock()  # shared by the pinning thread and the main thread
        self._poll = select.poll()
        job = WorkerJob(
            dataset,
            loader.collate_fn,
            loader.worker_init_fn,
            sampler.replica.rank,
            int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator)),
            loader.num_workers,
            self._memory,
            tuple(signals_for_trainer()),
            network_address(),
        )
        _end_at_exit(self)
        try:
            if self.method == "fork":
                self.dataset.prepare_workers(loader.num_workers)
            with naming_shared_memory(), starting_workers(), holding(job.ignored, self.method):
                self.dataset.counters.share(loader.num_workers)
                _let_threads_leave_python()
                for worker in range(loader.num_workers):
                    self._start(context, job, worker)
        except BaseException as error:
            self.end(at_once=True)
            close_pipes_of_fork(error)
            if (text := unpicklable_arguments(loader, self.method, error)) is not None:
                raise H5ValueError(text) from error
            if (text := resource_that_ran_out(error, loader.num_workers)) is not None:
                raise H5Error(text) from error
            raise

    def _start(self, context: Any, job: WorkerJob, worker: int) -> None:
        ours, theirs = socket.socketpair()
        _sockets.add(ours)  # before the fork: the worker must not keep this end open
        with theirs:
            try:
                process = context.Process(target=serve, args=(job, theirs, worker), daemon=True)
                process.start()
            except BaseException:
                ours.close()
                raise
        self.processes.append(process)
        self._queues.append(WorkerQueue(ours))
        self._poll.register(ours, select.POLLIN)

    # Passes --------------------------------------------------------------------------------------------------

    def can_begin(self) -> bool:
        """Return whether the workers are ready for another pass; end them if not."""
        current = None if self._pass is None else self._pass()
        if self.is_ended:
            return False
        if current is not None and current.is_running:
            self.persists = False  # they stay with their pass, or its batches would be lost
            return False
        try:
            with self._lock:
                self._tasks.clear()  # of an abandoned pass
                for task in [self.ask(worker, None) for worker in range(len(self.processes))]:
                    self.wait_for(task)
        except H5WorkerError as error:  # they have ended, for example by Ctrl-C
            _log.warning("restarting persistent workers: %s", str(error))
            self.end(at_once=True)
            return False
        return True

    def begin(self, tokens: PassTokens, depth: int, n_announced: int) -> WorkerBatches:
        """Begin a pass.

        Args:
            tokens: tokens of the batches.
            depth: number of batches that each worker makes ahead.
            n_announced: number of further batches that workers decode ahead at the start of the next pass.
        """
        self.n_passes += 1
        batches = WorkerBatches(self, tokens, depth * len(self.processes), n_announced)
        self._pass = weakref.ref(batches)
        return batches

    # Tasks ---------------------------------------------------------------------------------------------------

    def ask(self, worker: int, token: BatchToken | None) -> _Task:
        """Request a batch from a worker."""
        with self._lock:
            task = self._tasks[self._n_sent] = _Task(worker, token)
            if not self.is_ended:
                self._queues[worker].send(self._n_sent, pickle.dumps(token, pickle.HIGHEST_PROTOCOL))
            self._n_sent += 1
        return task

    def announce(self, worker: int, tokens: Sequence[BatchToken]) -> None:
        """Announce future batches to a worker, so that it can decode ahead for them."""
        with self._lock:
            if not self.is_ended:
                self._queues[worker].send(NO_TASK, pickle.dumps(tokens, pickle.HIGHEST_PROTOCOL))

    def wait_for(self, task: _Task, is_closed: Callable[[], bool] = lambda: False) -> None:
        """Wait until a task is done, and receive other answers in the meantime.

        Args:
            task: the task.
            is_closed: returns whether to stop waiting.

        Raises:
            H5WorkerError: the worker has ended, or exceeds the timeout.
            H5Error: the workers were shut down in the meantime.
        """
        with self._lock:
            since, has_begun, worker = monotonic(), False, task.worker
            while not task.is_done:
                if self.is_ended or is_closed():
                    raise H5Error(CLOSED)
                if self._queues[worker].is_closed:
                    raise H5WorkerError(self._why_it_ended(worker))
                if self._take_answers() or not self.timeout:
                    continue
                if not has_begun and self._has_begun(worker):
                    since, has_begun = monotonic(), True
                seconds = self.timeout if has_begun else max(self.timeout, START_SECONDS)
                if monotonic() - since >= seconds:
                    name, loading = f"worker {worker}", self._what_it_was_loading(worker)
                    raise H5WorkerError(why_it_was_killed(name, seconds, loading, has_begun=has_begun))

    def has_answer(self, task: _Task) -> bool:
        """Return whether a task is done, after receiving what has arrived."""
        with self._lock:
            while not (task.is_done or self.is_ended) and self._take_answers(seconds=0):
                pass
        return task.is_done

    def _take_answers(self, seconds: float = POLL_SECONDS) -> bool:
        """Wait a moment for answers; return whether any arrived."""
        has_answers = False
        for queue in self._queues:
            if not queue.is_closed:
                events = select.POLLIN | select.POLLOUT if queue.flush() else select.POLLIN
                self._poll.modify(queue.connection, events)
        ready = {descriptor for descriptor, _ in self._poll.poll(seconds * 1000)}
        for queue in self._queues:
            if queue.connection.fileno() not in ready:
                continue
            if (numbered_message := queue.read()) is not None:
                number, message = numbered_message
                answer = pickle.loads(message)  # also for an abandoned pass, to release its memory
                if (task := self._tasks.pop(number, None)) is not None:
                    task.answer, task.is_done = answer, True
                has_answers = True
            if queue.is_closed:
                self._poll.unregister(queue.connection)
        return has_answers

    def is_whole(self) -> bool:
        """Return whether no worker has ended."""
        return not self.is_ended and all(process.is_alive() for process in self.processes)

    def _has_begun(self, worker: int) -> bool:
        return self._queues[worker].has_answered or self.dataset.counters.begun_by(worker) is not None

    def _what_it_was_loading(self, worker: int) -> str:
        tokens = [task.token for task in self._tasks.values() if task.worker == worker and task.token is not None]
        return what_it_was_loading(tokens, self.dataset, self.dataset.counters.begun_by(worker))

    def _why_it_ended(self, worker: int) -> str:
        process = self.processes[worker]
        process.join(GRACE_SECONDS)
        n_more = sum(not worker_process.is_alive() for worker_process in self.processes) - 1
        return why_it_ended(
            f"worker {worker}" + (f" ({n_more} more ended, too)" if n_more > 0 else ""),
            process.exitcode,
            self._what_it_was_loading(worker),
            has_begun=self._has_begun(worker),
            method=self.method,
        )

    # Shutdown ------------------------------------------------------------------------------------------------

    def end(self, *, at_once: bool = False) -> None:
        """End the workers; calling it again has no effect.

        Args:
            at_once: kill them, instead of letting each finish its batch.
        """
        if self.is_ended or self._pid != os.getpid():  # a forked child does not own the workers
            return
        self.is_ended = True  # a thread that waits for a batch checks it
        with self._lock:
            for process, queue in zip(self.processes, self._queues, strict=True):
                if at_once:
                    process.kill()
                else:
                    with suppress(OSError):
                        queue.connection.shutdown(socket.SHUT_WR)
            end = monotonic() + END_SECONDS
            for process, queue in zip(self.processes, self._queues, strict=True):
                process.join(max(0.0, end - monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
                queue.connection.close()
            if self._memory is not None:
                self._memory.close()

    def __del__(self) -> None:
        # At interpreter shutdown ``_end_workers`` has ended them.
        if hasattr(self, "_lock") and not sys.is_finalizing():
            self.end()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_exits: set[int] = set()  # processes whose exit ends their workers; a child of a fork has to register again


def _end_at_exit(pool: WorkerPool) -> None:
    """End workers when this process exits: ``multiprocessing`` would send them SIGTERM, and wait for ever."""
    _pools.add(pool)
    if os.getpid() not in _exits:
        _exits.add(os.getpid())
        multiprocessing.util.Finalize(None, _end_workers, exitpriority=10)  # before it ends daemons


def _end_workers() -> None:
    for pool in list(_pools):
        pool.end(at_once=True)


class WorkerBatches:
    """The batches of tokens, in order, made by workers in turn: for one pass, or for several without a break.

    Tokens are read before their batches are requested. Tokens of the next pass are announced to the workers, which
    decode ahead when they are idle: the start of a pass needs many new blocks, and the end of the previous one few.

    Args:
        pool: the workers.
        tokens: tokens of the batches.
        n_ahead: number of batches to request before the first one is consumed.
        n_announced: number of further batches to announce.
    """

    def __init__(self, pool: WorkerPool, tokens: PassTokens, n_ahead: int, n_announced: int) -> None:
        self._pool, self._tokens, self._n_workers = pool, tokens, len(pool.processes)
        self._number, self._n_announced = pool.n_passes, n_announced
        self._n_ahead = n_ahead
        self._tasks: deque[_Task] = deque()
        self._coming: deque[tuple[int, BatchToken]] = deque()  # tokens to request, and their workers
        self._n_known = 0  # number of these tokens, from the first on, that were announced
        self._n_taken = 0  # in the pass
        self._is_closed = False
        self._ask()

    def _ask(self, *, waits: bool = False) -> None:
        """Request batches, as far as they may be made ahead; optionally wait for the plan of the next pass."""
        while len(self._tasks) < self._n_ahead and (self._coming or self._take(1, waits=waits)):
            self._tasks.append(self._pool.ask(*self._coming.popleft()))
            self._n_known = max(0, self._n_known - 1)
        self._take(min(2, self._n_announced - len(self._coming)))  # so that no step waits for many at a time
        if self._tokens.are_ahead:
            self._announce()

    def _take(self, n: int, *, waits: bool = False) -> bool:
        """Read up to ``n`` tokens; return False if there are no more, or none are planned yet."""
        tokens = [*islice(self._tokens, n)]
        if not tokens and n and self._tokens.begin_next(waits=waits):
            self._n_taken, tokens = 0, [*islice(self._tokens, n)]
        for token in tokens:
            self._coming.append((self._n_taken % self._n_workers, token))
            self._n_taken += 1
        return bool(tokens)

    def _announce(self) -> None:
        """Announce tokens to the workers that will make their batches."""
        unknown = [*islice(self._coming, self._n_known, None)]
        for worker in {worker for worker, _ in unknown}:
            self._pool.announce(worker, [token for owner, token in unknown if owner == worker])
        self._n_known = len(self._coming)

    @property
    def is_running(self) -> bool:
        """Whether further batches exist."""
        return bool(self._tasks) and not self._is_closed

    def __iter__(self) -> WorkerBatches:
        return self

    def __next__(self) -> Any:
        if not self._tasks and not self._is_closed:
            self._ask(waits=True)
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
            if isinstance(answer, LessBatch):
                self._pool.dataset.bad_rows.record(self._pool.dataset, answer.bad)
                answer = answer.batch
        except BaseException as error:
            # End persistent workers, too: some may have failed in workers.init_fn.
            self._is_closed = True
            self._pool.end(at_once=isinstance(error, H5WorkerError) or not isinstance(error, Exception))
            raise
        return answer

    @property
    def is_ready(self) -> bool:
        """See ``Batches.is_ready``."""
        return bool(self._tasks) and self._pool.has_answer(self._tasks[0])

    @property
    def can_go_on(self) -> bool:
        """See ``Batches.can_go_on``. Workers that do not persist end with a pass."""
        return self._pool.persists and not self._is_closed and self._pool.is_whole()

    def end_pass(self) -> None:
        """See ``Batches.end_pass``: nothing is left."""

    def _leave(self) -> None:
        # A complete pass no longer needs the workers, and another one may already use them.
        if not self._pool.persists and self._number == self._pool.n_passes:
            self._pool.end()

    def close(self) -> None:
        """End the pass."""
        self._is_closed = True
        self._tokens.close()
        self._leave()

    def __del__(self) -> None:
        if hasattr(self, "_is_closed") and not sys.is_finalizing():
            self._is_closed = True
            self._leave()


class PinnedBatches:
    """Batches of workers in page-locked memory: a thread receives them ahead of use, and copies them.

    Args:
        batches: the workers' batches.
    """

    def __init__(self, batches: WorkerBatches) -> None:
        self._pinned: Queue[tuple[Any, BaseException | None]] = Queue(1)
        self._is_over, self._at_end = threading.Event(), threading.Event()
        self._batches = batches
        device = torch.accelerator.current_device_index()
        # Neither the thread nor its finalizer references `self`, or it would never be collected.
        self._end = partial(_end_pinning, batches, self._pinned, self._is_over)
        arguments = (batches, self._pinned, self._is_over, self._at_end, device)
        self._thread = EndingThread(_pin_all, arguments, name="lightning_h5-pin", end=self._end)
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

    @property
    def is_ready(self) -> bool:
        """See ``Batches.is_ready``."""
        return not self._pinned.empty()

    @property
    def can_go_on(self) -> bool:
        """See ``Batches.can_go_on``. The thread ends at the end of a pass that the consumer has not begun."""
        return not self._at_end.is_set() and self._batches.can_go_on

    def end_pass(self) -> None:
        """See ``Batches.end_pass``: nothing is left."""

    def close(self) -> None:
        """End the thread and the pass."""
        self._end()
        self._thread.join()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self._end()


def _end_pinning(
    batches: WorkerBatches, pinned: Queue[tuple[Any, BaseException | None]], is_over: threading.Event
) -> None:
    is_over.set()
    batches.close()
    with suppress(Empty):
        pinned.get_nowait()  # room for the thread's batch


def _pin_all(
    batches: WorkerBatches,
    pinned: Queue[tuple[Any, BaseException | None]],
    is_over: threading.Event,
    at_end: threading.Event,
    device: int,
) -> None:
    torch.accelerator.set_device_index(device)
    error: BaseException | None = None
    while error is None and not is_over.is_set():
        batch = None
        try:
            batch = pin(next(batches))
        except BaseException as raised:  # raised when this batch is consumed
            error = raised
            at_end.set()
        pinned.put((batch, error))


def pin(batch: Any) -> Any:
    """Return the same batch with its tensors in page-locked memory; other values stay as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if isinstance(batch, dict):
        return {key: pin(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(pin(value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(pin(value) for value in batch)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else batch


def _let_threads_leave_python() -> None:
    """Wait a moment before workers are forked if a thread of torch's may be inside the interpreter.

    Before Python 3.11.10 a fork at the instant when another thread enters or leaves the interpreter gives a child
    that hangs forever (https://github.com/python/cpython/issues/112275; seen with gloo, whose thread cleans up late).
    """
    if sys.version_info < (3, 11, 10) and torch.distributed.is_available() and torch.distributed.is_initialized():
        sleep(0.05)

"""The code of a worker process, and the messages between it and the main process.

Each worker has its own socket. torch has one pipe for all workers, and a lock for writing to it: a worker that is
killed during a write leaves a locked lock and half of a message, and the main process waits for the other half forever.
Here, the main process sends and receives messages in pieces. A worker that ends closes its socket, which the main
process sees at once. The end of the main process also closes the sockets, so workers never outlive it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torch_worker

from ..datasets import BadSample, RowDataset, WorkerFailure, start_worker
from ..errors import H5Error, stop_iteration
from ..staging import Address, use_network
from ..threads import naming_task_limits
from ..types import BatchToken
from .worker_buffers import WorkerMemory, naming_shared_memory, open_worker_buffers

__all__ = [
    "HEADER",
    "LessBatch",
    "WorkerJob",
    "WorkerQueue",
    "holding",
    "serve",
    "signals_for_trainer",
]

HEADER = struct.Struct("!QQ")  # header of each message: its size in bytes, and the number of its task


class WorkerQueue:
    """The main process's end of a worker's socket; never waits.

    Args:
        connection: the socket.

    Attributes:
        has_answered: whether a message has arrived.
        is_closed: whether the worker has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self.has_answered = self.is_closed = False
        self._out = bytearray()
        self._expect(HEADER.size)

    def _expect(self, n_bytes: int, number: int | None = None) -> None:
        self._number, self._buffer = number, bytearray(n_bytes)
        self._left = memoryview(self._buffer)

    def send(self, number: int, message: bytes) -> None:
        """Send a message, as far as the socket accepts it now."""
        self._out += HEADER.pack(len(message), number) + message
        self.flush()

    def flush(self) -> bool:
        """Send the rest of earlier messages; return whether bytes are left."""
        try:
            while self._out:
                del self._out[: self.connection.send(self._out)]
        except BlockingIOError:
            return True
        except OSError:  # the worker has ended, which is noticed when its answer is read
            self._out.clear()
        return False

    def read(self) -> tuple[int, bytearray] | None:
        """Return the next complete message and its number, if any; set ``is_closed`` if the worker has ended."""
        while True:
            try:
                n_bytes = self.connection.recv_into(self._left)
            except BlockingIOError:
                return None
            except OSError:
                n_bytes = 0
            if not n_bytes:
                self.is_closed = True
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


FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}  # of this process itself; a handler that returns would meet the fault again


def signals_for_trainer() -> list[int]:
    """Return the signals that workers ignore: launchers send them to all processes, but for the trainer.

    These are SIGTERM, SIGUSR1 and SIGUSR2, with which clusters announce the end of a job, and all other signals with a
    Python handler in this process.
    """
    others = signal.valid_signals() - {signal.SIGINT, signal.SIGCHLD} - FAULTS
    handled = [number for number in others if callable(signal.getsignal(number))]
    return sorted({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *handled})


@contextmanager
def holding(signals: Sequence[int], method: str) -> Iterator[None]:
    """Block signals in this thread; new processes inherit the mask until they ignore the signals.

    The server of ``forkserver`` keeps the mask from its start, and so do all processes that it starts, including the
    user's own. SIGTERM must end these, so it is not blocked for the server.

    Args:
        signals: the signals to block.
        method: start method of processes.
    """
    signals = [number for number in signals if method != "forkserver" or number != signal.SIGTERM]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # a process that others need; once it is started, SIGTERM is let through
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore(signals: Sequence[int]) -> None:
    """Ignore signals from now on, including blocked ones; programs that this process starts do not ignore them."""
    for number in signals:
        signal.signal(number, _ignore_signal)  # SIG_IGN would be inherited by programs
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    pass


@dataclass(frozen=True)
class WorkerJob:
    """The start arguments of all workers of a loader."""

    dataset: RowDataset
    collate: Callable[[Any], Any]
    init: Callable[[int], None] | None
    rank: int
    seed: int
    n_workers: int
    memory: WorkerMemory | None
    ignored: tuple[int, ...]
    network: Address | None


class LessBatch(NamedTuple):
    """A batch with some samples left out.

    Attributes:
        batch: the batch.
        bad: the samples that were left out.
    """

    batch: Any
    bad: tuple[BadSample, ...]


def serve(job: WorkerJob, connection: socket.socket, worker: int) -> None:
    """Run a worker: make the requested batches until the main process closes the socket."""
    # Ctrl-C reaches all processes; workers end without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _ignore(job.ignored)
    answers: SimpleQueue[bytes] = SimpleQueue()  # sent by a thread, so that a full socket does not delay the next batch
    try:
        for target, arguments in ((_exit_with_trainer, (connection,)), (_send_all, (connection, answers))):
            thread = threading.Thread(target=target, args=arguments, daemon=True, name=f"h5{target.__name__}")
            with naming_task_limits(thread.name):
                thread.start()
    except H5Error as error:
        _refuse(connection, pickle.dumps(WorkerFailure(error)))
        return
    answer, coming = _prepare(job, worker), ComingBatches(job.dataset)
    while (numbered_request := _receive(connection, coming)) is not None:
        number, request = numbered_request
        if isinstance(request, list):
            coming.add(request)
            continue
        coming.drop_until(request)
        message = answer(request)
        answers.put(HEADER.pack(len(message), number) + message)


class ComingBatches:
    """The announced batches of this worker, in order: it decodes for them while it is idle.

    Blocks are loaded into the cache one task at a time, so that a request waits for one task at most. Batches are not
    made before they are requested.

    Args:
        dataset: the worker's dataset.
    """

    def __init__(self, dataset: RowDataset) -> None:
        self._dataset = dataset
        self._tokens: deque[BatchToken] = deque()
        self._has_begun = False

    def add(self, tokens: Sequence[BatchToken]) -> None:
        """Append announced batches."""
        self._tokens.extend(tokens)

    def drop_until(self, token: BatchToken | None) -> None:
        """Drop batches up to a requested one, or all batches at the start of another pass."""
        while self._tokens and (token is None or self._tokens[0][:2] <= token[:2]):
            self._tokens.popleft()

    def decode(self) -> bool:
        """Load a block, or list the blocks of a batch; return False if there is nothing to do, or no memory."""
        if self._has_begun and self._dataset.work.help():
            return True
        if not self._tokens:
            return False
        token, self._has_begun = self._tokens[0], True
        try:
            if self._dataset.prefetch(token.rows, token.epoch):
                self._tokens.popleft()
                return True
        except Exception:  # raised when the batch is requested
            self._tokens.clear()
        return self._dataset.work.help()


def _receive(connection: socket.socket, coming: ComingBatches) -> tuple[int, Any] | None:
    """Return the next message and its number; None when the main process closed the socket."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(0) and coming.decode():
        pass
    if len(header := connection.recv(HEADER.size, socket.MSG_WAITALL)) < HEADER.size:
        return None
    n_bytes, number = HEADER.unpack(header)
    return number, pickle.loads(connection.recv(n_bytes, socket.MSG_WAITALL))


def _refuse(connection: socket.socket, answer: bytes) -> None:
    """Answer each task with the same failure."""
    while len(header := connection.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
        n_bytes, number = HEADER.unpack(header)
        connection.recv(n_bytes, socket.MSG_WAITALL)
        connection.sendall(HEADER.pack(len(answer), number) + answer)


def _prepare(job: WorkerJob, worker: int) -> Callable[[BatchToken | None], bytes]:
    """Prepare this process; return the function that answers a token."""
    torch.set_num_threads(1)
    torch_worker._worker_info = torch_worker.WorkerInfo(  # what `get_worker_info` returns
        id=worker, num_workers=job.n_workers, seed=job.seed + worker, dataset=job.dataset
    )
    torch.manual_seed(job.seed + worker)
    start_worker(job.rank)
    use_network(job.network)
    buffers = None if job.memory is None else open_worker_buffers(job.memory, worker)
    job.dataset.bad_rows.report()
    failure: WorkerFailure | None = None
    try:
        if job.init is not None:
            try:
                job.init(worker)
            except StopIteration as error:
                raise stop_iteration("workers.init_fn", job.init) from error
    except Exception as error:
        failure = WorkerFailure(error)

    def answer(token: BatchToken | None) -> bytes:
        try:
            batch = failure if failure is not None or token is None else job.collate(job.dataset[token])
            if bad := job.dataset.bad_rows.reported():
                batch = LessBatch(batch, bad)
            if buffers is not None:
                return buffers.packed(batch)
            with naming_shared_memory():
                return bytes(ForkingPickler.dumps(batch))
        except Exception as error:
            return pickle.dumps(WorkerFailure(error))

    return answer


def _send_all(connection: socket.socket, answers: SimpleQueue[bytes]) -> None:
    with suppress(OSError):  # the main process closed its end
        while True:
            connection.sendall(answers.get())


def _exit_with_trainer(connection: socket.socket) -> None:
    """End this process when the main process has ended: a transform may hang, threads may wait forever."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP only
    poll.poll()
    os._exit(1)

"""What a worker process does: it makes the batches that it is asked for, and ends when the main process does."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from ..datasets import RowDataset, WorkerFailure, WorkerMemory, naming_shared_memory, open_worker_buffers, start_worker
from ..errors import stop_iteration
from ..types import BatchToken

__all__ = ["HEADER", "WorkerJob", "serve"]

HEADER = struct.Struct("!QQ")  # before each message: its bytes, and the number of its task


@dataclass(frozen=True)
class WorkerJob:
    """What all workers of a loader are given when they start."""

    dataset: RowDataset
    collate: Callable[[Any], Any]
    init: Callable[[int], None] | None
    rank: int
    seed: int
    n_workers: int
    memory: WorkerMemory | None


def serve(job: WorkerJob, connection: socket.socket, worker: int) -> None:
    """What a worker runs: makes the batches that it is asked for, until the main process closes the socket."""
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # an interrupt that all processes get ends this one without a traceback
    threading.Thread(target=_exit_with_trainer, args=(connection,), daemon=True, name="h5_exit_with_trainer").start()
    answers: SimpleQueue[bytes] = SimpleQueue()  # sent by a thread: the next batch does not wait for a full socket
    threading.Thread(target=_send_all, args=(connection, answers), daemon=True, name="h5_send").start()
    pack = _prepare(job, worker)
    while len(header := connection.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
        n_bytes, number = HEADER.unpack(header)
        message = pack(pickle.loads(connection.recv(n_bytes, socket.MSG_WAITALL)))
        answers.put(HEADER.pack(len(message), number) + message)


def _prepare(job: WorkerJob, worker: int) -> Callable[[BatchToken | None], bytes]:
    """Prepares this process; returns what makes the answer to a token."""
    torch.set_num_threads(1)
    torch_worker._worker_info = torch_worker.WorkerInfo(  # what `get_worker_info` returns
        id=worker, num_workers=job.n_workers, seed=job.seed + worker, dataset=job.dataset
    )
    torch.manual_seed(job.seed + worker)
    start_worker(job.rank)
    buffers = None if job.memory is None else open_worker_buffers(job.memory, worker)
    failure: WorkerFailure | None = None
    try:
        if job.init is not None:
            try:
                job.init(worker)
            except StopIteration as error:
                raise stop_iteration("worker_init_fn", job.init) from error
    except Exception as error:
        failure = WorkerFailure(error)

    def answer(token: BatchToken | None) -> bytes:
        try:
            batch = failure if failure is not None or token is None else job.collate(job.dataset[token])
            if buffers is not None:
                return buffers.packed(batch)
            with naming_shared_memory():
                return bytes(ForkingPickler.dumps(batch))
        except Exception as error:
            return pickle.dumps(WorkerFailure(error))

    return answer


def _send_all(connection: socket.socket, answers: SimpleQueue[bytes]) -> None:
    with suppress(OSError):  # the main process has closed its end
        while True:
            connection.sendall(answers.get())


def _exit_with_trainer(connection: socket.socket) -> None:
    """Ends this process when the main process has ended: a transform may hang, threads wait for what never comes."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP alone
    poll.poll()
    os._exit(1)

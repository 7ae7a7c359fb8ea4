"""Memory through which workers give batches to the process that started them: written once, where it will be read.

Torch sends each tensor through memory of its own, which the worker makes, the system clears, and the receiver maps.
Here a worker's batches lie in one block that both sides have mapped from the start, and whose parts are used again once
the receiver has forgotten their tensors. (Measured on two cores, batches of 64 rows of 300 KB, rows a second: torch
5,000 with four workers, read 3,500.) A part that is in use is never written to, however long a batch is kept.
"""

from __future__ import annotations

import bisect
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5Error
from .shard_memory import PAGE, ShardMemory

__all__ = ["Outbox", "WorkerMemory", "open_outbox", "this_outbox", "worker_memory"]

SMALL = 64 << 10  # bytes: such tensors are copied out at once; one that is kept must not keep a block
TICKETS = PAGE  # tensors on their way, or in use by the receiver, of one worker at a time
OUT, RETURNED = 0, 1  # of a ticket; the worker writes the one, then the receiver the other: never both at a time
ALIGNMENT = 64

_numbers = count()  # of this process's memories


class WorkerMemory:
    """A block of memory for each worker; made by the process that starts them, and sent to them with the start.

    It is not bounded by the size of ``/dev/shm``, and takes what was ever in use at a time, not its size.

    Args:
        n_workers: workers.
        n_bytes: bytes of each block.

    Raises:
        H5Error: the system does not give so much.
    """

    def __init__(self, n_workers: int, n_bytes: int) -> None:
        self._block_bytes = TICKETS + -(-n_bytes // PAGE) * PAGE
        self._memory = ShardMemory([(n_workers, self._block_bytes)], shared=True, name="h5_batches")
        self._pid = os.getpid()
        self._key = f"{self._pid}/{next(_numbers)}"
        self._in_use: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8], _Sent]] = {}
        _memories[self._key] = self

    def outbox(self, worker: int) -> Outbox:
        """A worker's side."""
        return Outbox(self._key, worker, self._memory.columns[0][worker])

    def receive(self, sent: _Sent) -> torch.Tensor:
        """The tensor that a worker sent. Its memory goes back when the last tensor that looks at it is freed."""
        block = self._memory.columns[0][sent.worker]
        lease = block[TICKETS + sent.start : TICKETS + sent.start + sent.n_bytes]
        if sent.n_bytes <= SMALL:
            lease = lease.copy()
            block[sent.ticket] = RETURNED
        else:
            reference = weakref.ref(lease, self._give_back)
            self._in_use[id(reference)] = reference, block, sent
        storage = torch.from_numpy(lease).untyped_storage()
        return torch.empty(0, dtype=sent.dtype).set_(storage, sent.offset, sent.shape, sent.stride)

    def close(self) -> None:
        """Gives the memory back, but for what tensors look at. Nothing is sent or received any more."""
        if self._pid == os.getpid() and self._memory.columns:
            for worker in range(len(self._memory.columns[0])):
                first, end = worker * self._block_bytes, (worker + 1) * self._block_bytes
                for start, stop in sorted(self._used(worker)):
                    self._memory.discard(first, start)
                    first = stop
                self._memory.discard(first, end)
        self._memory.close()

    def _used(self, worker: int) -> Iterator[tuple[int, int]]:
        for _, _, sent in list(self._in_use.values()):
            if sent.worker == worker:
                start = worker * self._block_bytes + TICKETS + sent.start
                yield start, start + sent.n_bytes

    def __del__(self) -> None:
        if hasattr(self, "_in_use"):
            self.close()

    def _give_back(self, reference: weakref.ref[Any]) -> None:
        _, block, sent = self._in_use.pop(id(reference))
        if self._pid == os.getpid():  # a forked child forgets its copy, and the tensor is in use all the same
            block[sent.ticket] = RETURNED

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": self._memory, "_key": self._key}  # for a worker that is being started


_memories: weakref.WeakValueDictionary[str, WorkerMemory] = weakref.WeakValueDictionary()


class _Sent(NamedTuple):
    """Where a tensor lies that was sent, in elements of its dtype from the start of its part."""

    worker: int
    ticket: int
    start: int
    n_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _receive(key: str, sent: _Sent) -> torch.Tensor:
    return _memories[key].receive(sent)


class _Letter:
    """Takes a tensor's place in a batch on its way; unpickles to the tensor."""

    def __init__(self, key: str, sent: _Sent) -> None:
        self._what = key, sent

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _receive, self._what


class _Part:
    """A piece of a block that a lease, or the receiver of a tensor, has."""

    def __init__(self, start: int, n_bytes: int) -> None:
        self.start, self.stop, self.n_bytes = start, start + max(1, n_bytes), n_bytes
        self.lease: weakref.ref[Any] | None = None
        self.tickets: list[int] = []


class Outbox:
    """A worker's side of its block. Safe to use from threads.

    Args:
        key: of the memory, in the process that made it.
        worker: the worker's number.
        block: its memory.
    """

    def __init__(self, key: str, worker: int, block: npt.NDArray[np.uint8]) -> None:
        self.pid = os.getpid()
        self._key, self._worker, self._block = key, worker, block
        self._parts: list[_Part] = []  # by where they begin
        self._leased: dict[int, _Part] = {}  # by address
        self._address = block.__array_interface__["data"][0] + TICKETS
        self._tickets = list(range(TICKETS))
        self._lock = threading.Lock()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """An array with arbitrary content, to be wrapped in one tensor and then forgotten; None where no room is."""
        part = None if dtype.hasobject else self._new_part(math.prod(shape) * dtype.itemsize)
        if part is None:
            return None
        lease: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=self._block.data, offset=TICKETS + part.start)
        part.lease = weakref.ref(lease)
        return lease

    def sent(self, tensor: torch.Tensor) -> Any:
        """What to send for a tensor: where it lies; itself where it is none of plain memory, or no room is left."""
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and type(tensor) is torch.Tensor
        if not is_plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor
        part = self._leased.get(tensor.untyped_storage().data_ptr())
        if part is None:
            part, tensor = self._copied(tensor)
        with self._lock:
            if part is None or not self._tickets:
                return tensor
            ticket = self._tickets.pop()
            self._block[ticket] = OUT
            part.tickets.append(ticket)
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _Letter(
            self._key, _Sent(self._worker, ticket, part.start, part.n_bytes, tensor.dtype, shape, stride, offset)
        )

    def _copied(self, tensor: torch.Tensor) -> tuple[_Part | None, torch.Tensor]:
        n_bytes = tensor.numel() * tensor.element_size()
        # An expanded tensor is larger than what it looks at.
        is_worth_it = 0 < n_bytes <= tensor.untyped_storage().nbytes()
        lease = self.array((n_bytes,), np.dtype(np.uint8)) if is_worth_it else None
        if lease is None:
            return None, tensor
        copy = torch.from_numpy(lease).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return self._leased[copy.untyped_storage().data_ptr()], copy

    def _new_part(self, n_bytes: int) -> _Part | None:
        with self._lock:
            self._sweep()
            part = _Part(0, n_bytes)
            for other in self._parts:  # into the first gap: what was in use before is warm
                if part.stop <= other.start:
                    break
                part = _Part(-(-other.stop // ALIGNMENT) * ALIGNMENT, n_bytes)
            if TICKETS + part.stop > len(self._block):
                return None
            bisect.insort(self._parts, part, key=lambda one: one.start)
            self._leased[self._address + part.start] = part
            return part

    def _sweep(self) -> None:
        """Forgets parts that nobody has any more, here or there."""
        kept = []
        for part in self._parts:
            # A part that is being handed out has no lease yet.
            if part.lease is None or part.lease() is not None or any(self._block[one] == OUT for one in part.tickets):
                kept.append(part)
            else:
                self._tickets += part.tickets
                del self._leased[self._address + part.start]
        self._parts = kept


_outbox: Outbox | None = None


def open_outbox(memory: WorkerMemory, worker: int) -> None:
    """Has this process, a worker, take memory for batches from its block."""
    global _outbox  # a worker process serves one loader for as long as it lives
    _outbox = memory.outbox(worker)


def this_outbox() -> Outbox | None:
    """That of this process, where it is a worker with one."""
    return _outbox if _outbox is not None and _outbox.pid == os.getpid() else None


def worker_memory(n_workers: int, n_bytes: int) -> WorkerMemory | None:
    """Memory for workers; None where the system has no such thing, or not so much: torch's way is left."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return WorkerMemory(n_workers, n_bytes)
    except H5Error:
        return None

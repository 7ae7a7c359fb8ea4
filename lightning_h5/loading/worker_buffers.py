"""Shared memory through which workers hand batches to the main process without a copy.

torch sends each tensor through memory of its own, which the worker allocates, the system clears, and the receiver maps.
Here a worker's batches lie in one block that both sides have mapped from the start, and its parts are reused once
the receiver has freed their tensors. A part that is in use is never written to, however long a batch is kept.
"""

from __future__ import annotations

import bisect
import io
import math
import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..datasets.shard_memory import PAGE, ShardMemory
from ..errors import H5Error
from ..readers.buffers import use_shared_buffers

__all__ = [
    "WorkerBuffers",
    "WorkerMemory",
    "naming_shared_memory",
    "open_worker_buffers",
    "starting_workers",
    "worker_memory",
]

SMALL = 64 << 10  # bytes: smaller tensors are sent inside the message, so that keeping one does not keep a block
TICKETS = PAGE  # tensors of one worker that are in transit or in use at a time
OUT, RETURNED = 0, 1  # of a ticket: written by the worker, then by the receiver, never both at a time
ALIGNMENT = 64

_numbers = count()  # of the memories of this process


class WorkerMemory:
    """A block of memory for each worker, allocated by the process that starts them.

    The size of ``/dev/shm`` does not limit the blocks. A block occupies only the memory that was ever used in it.

    Args:
        n_workers: number of workers.
        n_bytes: bytes of each block.

    Raises:
        H5Error: the system has not so much.
    """

    def __init__(self, n_workers: int, n_bytes: int) -> None:
        self._block_bytes = TICKETS + -(-n_bytes // PAGE) * PAGE
        self._memory = ShardMemory([(n_workers, self._block_bytes)], shared=True, name="h5_batches")
        self._pid = os.getpid()
        self._key = f"{self._pid}/{next(_numbers)}"
        self._in_use: _InUse = {}
        self._retired: list[_Sent] = []  # a forked child may still read them
        _memories[self._key] = self

    def buffers(self, worker: int) -> WorkerBuffers:
        """Return a worker's side."""
        return WorkerBuffers(self._key, worker, self._memory.columns[0][worker])

    def receive(self, sent: _Sent) -> torch.Tensor:
        """Return the tensor that a worker sent. Its memory goes back when the last tensor that uses it is freed."""
        block = self._memory.columns[0][sent.worker]
        lease = block[TICKETS + sent.start : TICKETS + sent.start + sent.n_bytes]
        reference = weakref.ref(lease, _finalizer(self._in_use, self._pid))
        self._in_use[id(reference)] = reference, block, sent
        storage = torch.from_numpy(lease).untyped_storage()
        return torch.empty(0, dtype=sent.dtype).set_(storage, sent.offset, sent.shape, sent.stride)

    def keep(self) -> None:
        """Never reuse memory that is in use now."""
        in_use = list(self._in_use.values())
        self._in_use.clear()
        self._retired += [sent for _, _, sent in in_use]

    def close(self) -> None:
        """Free the memory, except what tensors use. Nothing is sent or received any more."""
        if self._pid == os.getpid() and self._memory.columns:
            for worker in range(len(self._memory.columns[0])):
                first, end = worker * self._block_bytes, (worker + 1) * self._block_bytes
                for start, stop in sorted(self._used(worker)):
                    self._memory.discard(first, start)
                    first = stop
                self._memory.discard(first, end)
        self._memory.close()

    def _used(self, worker: int) -> Iterator[tuple[int, int]]:
        for sent in [*(sent for _, _, sent in list(self._in_use.values())), *self._retired]:
            if sent.worker == worker:
                start = worker * self._block_bytes + TICKETS + sent.start
                yield start, start + sent.n_bytes

    def __del__(self) -> None:
        if hasattr(self, "_in_use"):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": self._memory, "_key": self._key}  # for a worker process at its start


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


_InUse: TypeAlias = dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8], _Sent]]
"""The lease, its block and the sent tensor, by the identity of the reference to the lease."""


def _finalizer(in_use: _InUse, pid: int) -> Callable[[weakref.ref[Any]], None]:
    """Return the finalizer of leases. It must not reference the memory, which only the collector would free then."""

    def give_back(reference: weakref.ref[Any]) -> None:
        entry = in_use.pop(id(reference), None)
        if entry is not None and pid == os.getpid():  # not in a forked child: the parent still uses the tensor
            _, block, sent = entry
            block[sent.ticket] = RETURNED

    return give_back


@contextmanager
def naming_shared_memory() -> Iterator[None]:
    """Name ``/dev/shm`` in the error if torch finds no space there, and remove the file that torch leaves in it.

    Raises:
        H5Error: there is no space.
    """
    try:
        yield
    except RuntimeError as error:
        match = re.search(r"shared memory\(shm\) for file <(/torch_(\d+)_\w+)>: (.+)", str(error))
        if match is None:
            raise
        name, pid, reason = match.groups()
        if int(pid) == os.getpid():
            with suppress(OSError):
                os.unlink(f"/dev/shm{name}")
        raise H5Error(
            f"workers hand over batches through shared memory, and the system has none left: {reason}. Make /dev/shm "
            "larger (docker run --shm-size), use smaller batches or fewer workers, or num_workers=0."
        ) from error


_is_starting_workers = False


@contextmanager
def starting_workers() -> Iterator[None]:
    """Mark forked children as a loader's workers, which use no batch of this process."""
    global _is_starting_workers
    _is_starting_workers = True
    try:
        yield
    finally:
        _is_starting_workers = False


def _keep_all() -> None:
    """Memory in use at a fork may be in use by the child: never write to it again."""
    for memory in [] if _is_starting_workers else list(_memories.values()):
        memory.keep()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_all)


def _receive(key: str, sent: _Sent) -> torch.Tensor:
    return _memories[key].receive(sent)


def _from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).as_strided(shape, stride)


class _Pickler(ForkingPickler):
    """Pickles all as torch's loader does, except tensors that have a place in the buffers, or are small."""

    def __init__(self, file: io.BytesIO, buffers: WorkerBuffers) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._buffers = buffers

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is pickled; NotImplemented leaves it to torch."""
        return self._buffers.reduced(value) if type(value) is torch.Tensor else NotImplemented


class _Part:
    """A piece of a block that a lease, or the receiver of a tensor, uses."""

    def __init__(self, start: int, n_bytes: int) -> None:
        self.start, self.stop, self.n_bytes = start, start + n_bytes, n_bytes
        self.lease: weakref.ref[Any] | None = None
        self.tickets: list[int] = []


class WorkerBuffers:
    """A worker's side of its block. Safe to use from threads.

    Args:
        key: of the memory, in the process that made it.
        worker: the worker's number.
        block: its memory.
    """

    def __init__(self, key: str, worker: int, block: npt.NDArray[np.uint8]) -> None:
        self.pid = os.getpid()
        self._key, self._worker, self._block = key, worker, block
        self._parts: list[_Part] = []  # sorted by start
        self._leased: dict[int, _Part] = {}  # by address
        self._address = block.__array_interface__["data"][0] + TICKETS
        self._tickets = list(range(TICKETS))
        self._lock = threading.Lock()
        self._batch_tickets: list[int] = []  # tickets of the batch being packed

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Return an uninitialized array, to be wrapped in one tensor; None if it is small, or no space is left.

        The caller must not keep the array.
        """
        n_bytes = math.prod(shape) * dtype.itemsize
        part = None if dtype.hasobject or n_bytes <= SMALL else self._new_part(n_bytes)
        if part is None:
            return None
        lease: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=self._block.data, offset=TICKETS + part.start)
        part.lease = weakref.ref(lease)
        return lease

    def packed(self, batch: Any) -> bytes:
        """Return a batch as bytes, in which tensors are references to this memory.

        Raises:
            H5Error: a tensor has no place here, and ``/dev/shm`` has no space for it.
            Exception: something in the batch cannot be pickled.
        """
        file = io.BytesIO()
        self._batch_tickets = []
        try:
            with naming_shared_memory():
                _Pickler(file, self).dump(batch)
        except BaseException:
            self._block[self._batch_tickets] = RETURNED
            raise
        return file.getvalue()

    def reduced(self, tensor: torch.Tensor) -> Any:
        """Return how a tensor is pickled; NotImplemented if it is not in plain memory, or no space is left."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
            return NotImplemented
        if tensor.requires_grad or tensor.is_quantized or not tensor.numel():
            return NotImplemented
        tensor = tensor.resolve_conj().resolve_neg()  # torch's reduction loses these flags
        part = self._leased.get(tensor.untyped_storage().data_ptr())
        if part is None or tensor.numel() * tensor.element_size() <= SMALL:
            return self._copied(tensor)
        return self._sent(part, tensor)

    def _sent(self, part: _Part, tensor: torch.Tensor) -> Any:
        with self._lock:
            if not self._tickets:
                return NotImplemented
            ticket = self._tickets.pop()
            self._block[ticket] = OUT
            part.tickets.append(ticket)
        self._batch_tickets.append(ticket)
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        sent = _Sent(self._worker, ticket, part.start, part.n_bytes, tensor.dtype, shape, stride, offset)
        return _receive, (self._key, sent)

    def _copied(self, tensor: torch.Tensor) -> Any:
        """Return how a tensor that lies elsewhere, or is small, is pickled: in a new part, or with the message."""
        n_bytes = tensor.numel() * tensor.element_size()
        if n_bytes > tensor.untyped_storage().nbytes():  # an expanded tensor is larger than its storage
            return NotImplemented
        shape, stride = tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride()  # keeps channels_last
        if n_bytes <= SMALL:
            copy = np.empty(n_bytes, np.uint8)
            torch.from_numpy(copy).view(tensor.dtype).as_strided(shape, stride).copy_(tensor)
            return _from_bytes, (copy.tobytes(), tensor.dtype, shape, stride)
        lease = self.array((n_bytes,), np.dtype(np.uint8))
        if lease is None:
            return NotImplemented
        placed = torch.from_numpy(lease).view(tensor.dtype).as_strided(shape, stride).copy_(tensor)
        return self._sent(self._leased[placed.untyped_storage().data_ptr()], placed)

    def _new_part(self, n_bytes: int) -> _Part | None:
        with self._lock:
            self._sweep()
            part = _Part(0, n_bytes)
            for neighbor in self._parts:  # first fit: recently used memory is still in the cache
                if part.stop <= neighbor.start:
                    break
                part = _Part(-(-neighbor.stop // ALIGNMENT) * ALIGNMENT, n_bytes)
            if TICKETS + part.stop > len(self._block):
                return None
            bisect.insort(self._parts, part, key=lambda p: p.start)
            self._leased[self._address + part.start] = part
            return part

    def _sweep(self) -> None:
        """Drop parts that neither side uses any more."""
        parts_in_use = []
        for part in self._parts:
            is_leased = part.lease is None or part.lease() is not None  # a part being handed out has no lease yet
            if is_leased or (self._block[part.tickets] == OUT).any():
                parts_in_use.append(part)
            else:
                self._tickets += part.tickets
                del self._leased[self._address + part.start]
        self._parts = parts_in_use


def open_worker_buffers(memory: WorkerMemory, worker: int) -> WorkerBuffers:
    """Make this process, a worker, take memory for batches from its block."""
    buffers = memory.buffers(worker)
    use_shared_buffers(buffers)
    return buffers


def worker_memory(n_workers: int, n_bytes: int) -> WorkerMemory | None:
    """Return memory for workers; None if the system has none, or not so much: torch's way is left."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return WorkerMemory(n_workers, n_bytes)
    except H5Error:
        return None

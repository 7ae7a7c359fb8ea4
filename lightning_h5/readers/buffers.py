"""Memory for batches that is used again once a batch is freed, and copies of rows between batches.

A fresh batch of a megabyte costs as much in page faults as in copying. Here a batch's memory returns to its
pool when the last tensor that looks at it is freed, and not before: a batch that the user keeps is never touched.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import H5MemoryError
from ..lazy_torch import torch
from ..sizes import bytes_text
from ..types import IntArray

__all__ = [
    "BufferPool",
    "Column",
    "SharedBuffers",
    "batch_bytes",
    "copied_alone",
    "copy_rows",
    "put_rows",
    "stacked",
    "tensor_of",
    "use_shared_buffers",
]

SMALLEST = 128 << 10  # the C library already reuses smaller blocks
FREE_BYTES = 64 << 20  # of free blocks to keep for the next batches
MIN_FREE = 4
SERIAL = 32_767  # numbers that torch copies without OpenMP's threads
LARGE_ROW = 1024  # bytes: copying such a row takes as long as a Python call


Column: TypeAlias = "torch.Tensor | Sequence[Any]"
"""One field of a batch: a tensor, nested lists of str, a list of tensors, or rows of a sparse matrix."""


class SharedBuffers(Protocol):
    """Memory for batches that a worker shares with the process which started it (see ``WorkerBuffers``)."""

    pid: int

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Return an uninitialized array; None if it is small, or no space is left."""
        ...


_shared: SharedBuffers | None = None


def use_shared_buffers(buffers: SharedBuffers) -> None:
    """Make this process, a worker, take memory for batches from here first."""
    global _shared  # a worker process serves one loader all its life
    _shared = buffers


class BufferPool:
    """Gives out memory for batches; safe to use from threads, empty when unpickled.

    Args:
        min_free: number of free blocks to keep, of any size.

    Attributes:
        pins: allocate page-locked memory through torch, which tracks the copies to a GPU that still read it.
    """

    def __init__(self, min_free: int = MIN_FREE) -> None:
        self.pins = False
        self._min_free = min_free
        self._free: deque[npt.NDArray[np.uint8]] = deque()
        self._leases: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}  # by id of the weak reference

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array with arbitrary content, to be wrapped in one tensor by ``tensor_of`` and then forgotten.

        The tensor references the array, whose finalizer returns the memory. In a worker, the memory is shared with the
        process that started it.

        Raises:
            H5MemoryError: the system has no memory for it.
        """
        if _shared is not None and _shared.pid == os.getpid() and (shared := _shared.array(shape, dtype)) is not None:
            return shared
        n_bytes = math.prod(shape) * dtype.itemsize
        try:
            if n_bytes < SMALLEST or dtype.hasobject:
                return np.empty(shape, dtype)
            if self.pins:
                with suppress(RuntimeError):  # the system locks no more pages
                    pinned = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
                    return pinned.numpy().view(dtype).reshape(shape)
            block = self._block(n_bytes)
        except MemoryError as error:
            raise _no_memory(shape, n_bytes) from error
        lease: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=block)
        # `weakref.finalize` takes four times as long.
        reference = weakref.ref(lease, self._give_back)
        self._leases[id(reference)] = reference, block
        return lease

    def _block(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of so many bytes or more: some that was used before, if it is large enough."""
        try:
            block = self._free.pop()
        except IndexError:
            return np.empty(n_bytes, np.uint8)
        return block if len(block) >= n_bytes else np.empty(n_bytes, np.uint8)

    def _give_back(self, reference: weakref.ref[Any]) -> None:
        _, block = self._leases.pop(id(reference))
        if len(self._free) < max(self._min_free, FREE_BYTES // len(block)):
            self._free.append(block)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with arbitrary content, of any dtype of torch's.

        Raises:
            H5MemoryError: the system has no memory for it.
        """
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        memory = self.array((shape[0], n_bytes // shape[0]), np.dtype(np.uint8))
        return tensor_of(memory).view(-1).view(dtype).view(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {"min_free": self._min_free}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # an unpickled pool is a new one


def tensor_of(rows: npt.NDArray[Any]) -> torch.Tensor:
    """Return rows as a tensor on the same memory.

    Of page-locked memory it is a view of the tensor that was allocated: torch uses the memory again only once all
    copies of *that* have reached the GPU, and does not know of others.
    """
    pinned = getattr(rows.base, "base", None)
    if not isinstance(pinned, torch.Tensor):
        return torch.from_numpy(rows)
    if not rows.flags.c_contiguous:
        return torch.from_numpy(rows.copy())
    start = rows.ctypes.data - pinned.data_ptr()
    return pinned[start : start + rows.nbytes].view(torch.from_numpy(rows).dtype).view(rows.shape)


def copied_alone(out: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy and cast values as ``out.copy_(values)`` does, in this thread alone, and return ``out``.

    Torch copies more than ``SERIAL`` numbers with a team of OpenMP's threads, one for each thread that calls it.
    As soon as the teams of a process have more threads than there are cores, OpenMP's threads no longer wait actively
    for each other, and the steps of small models take longer.

    Args:
        out: a tensor of the same shape.
        values: the values.
    """
    if out.dtype == values.dtype:
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(out.dtype.itemsize, out.dtype)
        np.copyto(out.view(word).numpy(), values.view(word).numpy())
        return out
    if values.numel() <= SERIAL:
        return out.copy_(values)
    axis = next(axis for axis, size in enumerate(values.shape) if size > 1)
    size = values.shape[axis]
    step = max(1, SERIAL * size // values.numel())
    for start in range(0, size, step):
        n = min(step, size - start)
        copied_alone(out.narrow(axis, start, n), values.narrow(axis, start, n))
    return out


def _no_memory(shape: tuple[int, ...], n_bytes: int) -> H5MemoryError:
    n_rows = shape[0] if shape else 1
    return H5MemoryError(
        f"a batch of {n_rows:,} rows needs an array of {n_bytes:,} bytes ({bytes_text(n_bytes)}), and the system has "
        "not enough memory left. Pass a smaller batch_size, a smaller cache_bytes, or a smaller num_workers: each "
        "worker holds its own batches."
    )


# Copies of rows ----------------------------------------------------------------------------------------------------


def put_rows(column: Column, to: IntArray, rows: Column, places: IntArray | None = None) -> None:
    """Copy rows of one batch into another, as ``column[to] = rows[places]`` does.

    Args:
        column: a field of a batch.
        to: places in it, shape ``(n_rows,)``.
        rows: the same field of another batch.
        places: places in that, shape ``(n_rows,)``; None for all rows.

    Raises:
        ValueError: one of them is a tensor, and the other one has no such rows.
    """
    places = np.arange(len(rows)) if places is None else places
    if isinstance(column, torch.Tensor):
        if not isinstance(rows, torch.Tensor) or (column.dtype, column.shape[1:]) != (rows.dtype, rows.shape[1:]):
            raise ValueError("rows of one dtype and shape were copied to rows of another")
        copy_rows(batch_bytes(column), to, batch_bytes(rows.contiguous()), places)
    elif isinstance(column, list):
        for place, row in zip(to.tolist(), places.tolist(), strict=True):
            column[place] = rows[row]


def copy_rows(into: npt.NDArray[np.uint8], to: IntArray, source: npt.NDArray[np.uint8], places: IntArray) -> None:
    """Copy rows to other places, as ``into[to] = source[places]`` does, without the memory between for large ones.

    Args:
        into: shape ``(n, row_bytes)``.
        to: places they are copied to, shape ``(n_rows,)``.
        source: shape ``(m, row_bytes)``.
        places: places they are copied from, shape ``(n_rows,)``.
    """
    if (run := _run(places)) is not None:
        into[to] = source[run]
    elif (run := _run(to)) is not None:
        np.take(source, places, axis=0, out=into[run], mode="clip")  # other modes allocate a buffer
    elif source.shape[1] < LARGE_ROW:
        into[to] = source[places]
    else:
        for a, b in zip(to.tolist(), places.tolist(), strict=True):
            into[a] = source[b]


def _run(places: IntArray) -> slice | None:
    """Return places as a slice if each is the one after the last."""
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) and (np.diff(places) == 1).all() else None


def batch_bytes(column: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a batch's memory, shape ``(batch, row_bytes)``."""
    if not column.numel():
        return np.empty((len(column), 0), dtype=np.uint8)
    flat: npt.NDArray[np.uint8] = column.view(len(column), -1).view(torch.uint8).numpy()
    return flat


def stacked(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of one shape as one; images with their channels last in memory as a batch of such."""
    if values[0].ndim == 3 and not values[0].is_contiguous():
        moved = [value.movedim(0, -1) for value in values]
        if all(value.is_contiguous() for value in moved):
            return torch.stack(moved).movedim(-1, 1)
    return torch.stack(list(values))

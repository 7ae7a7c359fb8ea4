"""Memory for batches that is used again once a batch is gone.

A fresh batch of a megabyte costs as much in page faults as in copying. Here a batch's memory returns to its
pool when the last tensor that looks at it is freed, and not before: a batch that the user keeps is never touched.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5MemoryError
from ..sizes import bytes_text
from .worker_buffers import this_worker_buffers

__all__ = ["BufferPool"]

SMALLEST = 128 << 10  # the C library keeps smaller pieces warm itself
FREE_BYTES = 64 << 20  # kept for the next batches: as many as are read ahead at a time
MIN_FREE = 4


class BufferPool:
    """Gives out memory for batches; safe to use from threads, empty when unpickled."""

    def __init__(self) -> None:
        self._free: deque[npt.NDArray[np.uint8]] = deque()
        self._leases: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}  # by the reference's identity

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array with arbitrary content, to be wrapped in one tensor and then forgotten.

        The tensor keeps the array, and the array's end gives the memory back. In a worker it is memory that the
        process which started it has too.

        Raises:
            H5MemoryError: there is no memory for it.
        """
        if (buffers := this_worker_buffers()) is not None and (shared := buffers.array(shape, dtype)) is not None:
            return shared
        n_bytes = math.prod(shape) * dtype.itemsize
        try:
            if n_bytes < SMALLEST or dtype.hasobject:
                return np.empty(shape, dtype)
            slab = self._slab(n_bytes)
        except MemoryError as error:
            raise _no_memory(shape, n_bytes) from error
        lease: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=slab)
        # Not `weakref.finalize`, which takes four times as long.
        reference = weakref.ref(lease, self._give_back)
        self._leases[id(reference)] = reference, slab
        return lease

    def _slab(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory of so many bytes or more: some that was used before, where it is large enough."""
        try:
            slab = self._free.pop()
        except IndexError:
            return np.empty(n_bytes, np.uint8)
        return slab if len(slab) >= n_bytes else np.empty(n_bytes, np.uint8)

    def _give_back(self, reference: weakref.ref[Any]) -> None:
        _, slab = self._leases.pop(id(reference))
        if len(self._free) < max(MIN_FREE, FREE_BYTES // len(slab)):
            self._free.append(slab)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with arbitrary content, of any dtype, those that NumPy lacks among them.

        Raises:
            H5MemoryError: there is no memory for it.
        """
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        memory = self.array((shape[0], n_bytes // shape[0]), np.dtype(np.uint8))
        return torch.from_numpy(memory).view(-1).view(dtype).view(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # an unpickled pool is a new one


def _no_memory(shape: tuple[int, ...], n_bytes: int) -> H5MemoryError:
    n_rows = shape[0] if shape else 1
    return H5MemoryError(
        f"a batch of {n_rows:,} rows was asked for, and an array of it takes {n_bytes:,} bytes of memory "
        f"({bytes_text(n_bytes)}), which are not there. Pass a smaller batch_size, a smaller cache_bytes, or a smaller "
        "num_workers: each worker holds batches of its own."
    )

"""The memory for loaded blocks, and scratch memory of each thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import worker_number
from ..jit import c_call, compiled
from ..types import IntArray

__all__ = ["BlockMemory", "compile_copies", "copy_runs", "scratch"]

Bytes = npt.NDArray[np.uint8]


class BlockMemory(Sequence[npt.NDArray[Any]]):
    """The memory of blocks: a sequence of arrays of shape ``(n_rows, *row_shape)``, or bytes.

    Args:
        rows: memory of all blocks.
        firsts: the first row of each block in it.
        n_rows: rows of each block.
    """

    def __init__(self, rows: npt.NDArray[Any], firsts: IntArray, n_rows: int) -> None:
        self._rows, self._firsts, self._n_rows = rows, firsts, n_rows

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, at: Any) -> Any:
        first = int(self._firsts[at])
        return self._rows[first : first + self._n_rows]

    def octets(self) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Return the whole memory as bytes, and the start of each block in it."""
        return self._rows.reshape(-1).view(np.uint8), self._firsts * self._rows.strides[0]


_scratch = threading.local()  # per thread, shared by all readers, which take turns


def scratch(use: str, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of this thread, which the next call for the same use overwrites."""
    memory_of_use: npt.NDArray[np.uint8] | None = getattr(_scratch, use, None)
    if memory_of_use is None or len(memory_of_use) < n_bytes:
        memory_of_use = np.empty(n_bytes, dtype=np.uint8)
        setattr(_scratch, use, memory_of_use)
    return memory_of_use[:n_bytes]


def copy_runs(memory: Bytes, firsts: IntArray, out: Bytes, starts: IntArray, sizes: IntArray) -> None:
    """Copy runs of bytes.

    Args:
        memory: contiguous bytes.
        firsts: where each run begins there, shape ``(n_runs,)``.
        out: contiguous bytes to copy to.
        starts: where each run begins in ``out``.
        sizes: bytes of each.
    """
    firsts, starts, sizes = (np.ascontiguousarray(numbers) for numbers in (firsts, starts, sizes))
    if len(sizes):  # the loop does not check bounds
        lowest, beyond = (
            min(firsts.min(), starts.min()),
            max((firsts + sizes).max() - len(memory), (starts + sizes).max() - len(out)),
        )
        if lowest < 0 or beyond > 0:
            raise IndexError(f"runs reach {max(-lowest, beyond):,} bytes beyond their memory")
    if _copy_loops and (loop := _copy_loops[0]) is not None:
        loop(_memcpy(), memory, firsts, out, starts, sizes)
        return
    for first, start, n_bytes in zip(firsts.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        out[start : start + n_bytes] = memory[first : first + n_bytes]


_copy_loops: list[Callable[..., None] | None] = []  # one entry once it was tried


def compile_copies() -> None:
    """Compile ``copy_runs``, if that is possible. Forked worker processes inherit it; other workers have none."""
    if _copy_loops or worker_number() is not None:
        return
    loop, nothing, none = compiled(_copy_loop()), np.empty(0, np.int64), np.empty(0, np.uint8)
    if loop is not None:
        loop(_memcpy(), none, nothing, none, nothing, nothing)
    _copy_loops.append(loop)


@cache
def _memcpy() -> int:
    """Return the address of the C function: compiled slices take 15 times as long (4,000 bytes each, 2026-11-29)."""
    return ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value or 0


def _copy_loop() -> Callable[..., None]:
    call = c_call()

    def loop(memcpy: int, memory: Bytes, firsts: IntArray, out: Bytes, starts: IntArray, sizes: IntArray) -> None:
        source, target = memory.ctypes.data, out.ctypes.data
        for run in range(len(sizes)):
            call(memcpy, (target + starts[run], source + firsts[run], sizes[run]))

    return loop

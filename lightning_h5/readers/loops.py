"""Chunks out of the file into memory in one call of compiled code: read, decoded, and their bytes put in order.

Python between these steps costs little by itself, but each step of one thread takes the interpreter's lock anew, while
another thread may have it; and a chunk that is decoded right after it was read is still in the core's own cache.
Measured on two cores, rows of shuffled epochs a second, over those without: gzip of images 1.04, with one row a chunk
1.2, of shuffled signals 1.1; LZF, which has a decoder of its own here, 1.5, with one row a chunk 1.8.

There are such loops where Numba is installed, for the decoders that are C functions of addresses. They take a second or
two to compile, once in a process.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..compiled import compiled
from ..stats import worker_number
from ..types import IntArray
from .base import scratch
from .decoders import NativeDecoder

__all__ = ["SORTED", "ChunkLoop", "loop_of"]

_Octets: TypeAlias = npt.NDArray[np.uint8]

NANOSECOND = 1e-9


class ChunkLoop:
    """Reads and decodes chunks, one after the other.

    Args:
        decoder: what they were compressed with.
        loop: compiled.
        is_sorted: whether bytes are put in order after it.
    """

    def __init__(self, decoder: NativeDecoder, loop: Callable[..., bool], *, is_sorted: bool) -> None:
        self._decoder, self._loop, self._is_sorted = decoder, loop, is_sorted

    def __call__(
        self, fd: int, offsets: IntArray, sizes: IntArray, n_bytes: int, out: _Octets, firsts: IntArray
    ) -> float | None:
        """Reads and decodes.

        Args:
            fd: the file.
            offsets: where in it each chunk begins, shape ``(n_chunks,)``.
            sizes: its bytes there.
            n_bytes: what each decodes to.
            out: memory to decode into.
            firsts: where in it each chunk begins.

        Returns:
            Seconds that reading took. None where a chunk is not there, or does not decode to so many bytes: then
            anything may be in the memory of all of them.
        """
        is_inside = not len(firsts) or 0 <= firsts.min() <= firsts.max() <= len(out) - n_bytes
        if not (len(firsts) == len(offsets) == len(sizes) and is_inside):  # the loop does not look
            raise IndexError(f"{len(offsets)} chunks do not fit into {len(out):,} bytes at {firsts}")
        stored = scratch("stored", int(sizes.max(initial=0)))
        unsorted = scratch("unsorted", n_bytes if self._is_sorted else 0)
        clock = np.zeros(5, np.int64)
        with self._decoder.lend() as state:
            is_done = self._loop(fd, state, offsets, sizes, n_bytes, stored, unsorted, out, firsts, clock)
        return int(clock[4]) * NANOSECOND if is_done else None


_made: dict[tuple[NativeDecoder, int], ChunkLoop | None] = {}


def loop_of(decoder: NativeDecoder, size: int) -> ChunkLoop | None:
    """The loop for a decoder, compiled when it is first asked for.

    None where there is no compiler, or no system that it knows; and in a worker process that was not forked from one
    that had it compiled: there are many of these, and some live for an epoch.

    Args:
        decoder: what chunks were compressed with.
        size: bytes of the numbers whose bytes were shuffled before; 1 where they were not.
    """
    if (decoder, size) not in _made and worker_number() is None:
        _made[decoder, size] = _compile(decoder, size)
    return _made.get((decoder, size))


def _compile(decoder: NativeDecoder, size: int) -> ChunkLoop | None:
    if sys.platform == "win32":
        return None
    sort = compiled(_SORTS[size])
    if sort is None:
        return None
    decode = compiled(decoder.one(compiled))
    assert decode is not None, "the same compiler"
    loop = compiled(_loop(decode, sort, size))
    assert loop is not None, "the same compiler"
    nothing, none = np.empty(0, np.int64), np.empty(0, np.uint8)
    found = ChunkLoop(decoder, loop, is_sorted=size > 1)
    found(0, nothing, nothing, 0, none, nothing)
    return found


def _loop(decode: Callable[..., bool], sort: Callable[[_Octets, _Octets], None], size: int) -> Callable[..., bool]:
    library = ctypes.CDLL(None)
    pread, now, monotonic = library["pread"], library["clock_gettime"], time.CLOCK_MONOTONIC
    pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    pread.restype = ctypes.c_ssize_t
    now.argtypes, now.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_int

    def loop(
        fd: int,
        state: int,
        offsets: IntArray,
        sizes: IntArray,
        n_bytes: int,
        stored: _Octets,
        unsorted: _Octets,
        out: _Octets,
        firsts: IntArray,
        clock: IntArray,
    ) -> bool:
        before, after = clock[0:2], clock[2:4]  # seconds and nanoseconds
        for at in range(len(offsets)):
            now(monotonic, before.ctypes.data)
            n_read = pread(fd, stored.ctypes.data, sizes[at], offsets[at])
            now(monotonic, after.ctypes.data)
            clock[4] += (after[0] - before[0]) * 1_000_000_000 + after[1] - before[1]
            if n_read != sizes[at]:
                return False
            place = out[firsts[at] : firsts[at] + n_bytes]
            decoded = unsorted if size > 1 else place
            if not decode(state, stored, n_read, decoded):
                return False
            if size > 1:
                sort(unsorted, place)
        return True

    return loop


# The filter `shuffle` puts the first bytes of all numbers before the second bytes of all. Put together in a register,
# and from slices, which the compiler sees to be apart from each other, numbers are made many at a time.


def _sort_nothing(planes: _Octets, out: _Octets) -> None:
    pass


def _sort_2(planes: _Octets, out: _Octets) -> None:
    numbers = out.view(np.uint16)
    n = len(numbers)
    a, b = planes[:n], planes[n : 2 * n]
    for i in range(n):
        numbers[i] = np.uint16(a[i]) | np.uint16(b[i]) << np.uint16(8)


def _sort_4(planes: _Octets, out: _Octets) -> None:
    numbers = out.view(np.uint32)
    n = len(numbers)
    a, b, c, d = planes[:n], planes[n : 2 * n], planes[2 * n : 3 * n], planes[3 * n : 4 * n]
    for i in range(n):
        low = np.uint32(a[i]) | np.uint32(b[i]) << np.uint32(8)
        numbers[i] = low | np.uint32(c[i]) << np.uint32(16) | np.uint32(d[i]) << np.uint32(24)


def _sort_8(planes: _Octets, out: _Octets) -> None:
    numbers = out.view(np.uint64)
    n = len(numbers)
    a, b, c, d = planes[:n], planes[n : 2 * n], planes[2 * n : 3 * n], planes[3 * n : 4 * n]
    e, f, g, h = planes[4 * n : 5 * n], planes[5 * n : 6 * n], planes[6 * n : 7 * n], planes[7 * n : 8 * n]
    for i in range(n):
        low = np.uint64(a[i]) | np.uint64(b[i]) << np.uint64(8)
        low = low | np.uint64(c[i]) << np.uint64(16) | np.uint64(d[i]) << np.uint64(24)
        high = np.uint64(e[i]) | np.uint64(f[i]) << np.uint64(8)
        high = high | np.uint64(g[i]) << np.uint64(16) | np.uint64(h[i]) << np.uint64(24)
        numbers[i] = low | high << np.uint64(32)


_SORTS: dict[int, Callable[[_Octets, _Octets], None]] = {1: _sort_nothing, 2: _sort_2, 4: _sort_4, 8: _sort_8}

SORTED = frozenset(size for size in _SORTS if size > 1)
"""Bytes of the numbers whose bytes a loop puts in order."""

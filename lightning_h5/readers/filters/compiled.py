"""Read chunks, decode them and undo their shuffle in one call of compiled code.

Python between these steps is cheap, but each step of a thread needs the interpreter's lock, which another thread may
hold; and a chunk that is decoded right after reading is still in the core's own cache. Speed of shuffled epochs on two
cores, relative to that without: gzip of images 1.04, with one row a chunk 1.2, of shuffled signals 1.1; LZF, which has
its own decoder here, 1.5, with one row a chunk 1.8; bitshuffle and LZ4, whose blocks have 8 KiB, 2.6 and 3.0.

Such loops need Numba, and a decoder that is a C function of addresses. They take a second or two to compile, once on a
machine: `compiled` keeps them on disk.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from ...counters import worker_number
from ...hdf5 import Filter
from ...jit import c_call, compiled
from ...types import IntArray
from ..block_memory import scratch
from .decoders import shuffled
from .native import HEADER, LONGEST_BLOCK
from .pipeline import SHUFFLE, Bytes, Checksum, ChunksRead, Decoder, NativeDecoder, register_loop

__all__ = ["SORTED", "ChunkLoop", "loop_of", "lzf_loop"]

NANOSECOND = 1e-9


class ChunkLoop:
    """Reads and decodes chunks, one after the other.

    Args:
        decoder: decoder of the compressor.
        loop: the compiled loop.
        is_sorted: whether it undoes a shuffle.
    """

    def __init__(self, decoder: NativeDecoder, loop: Callable[..., bool], *, is_sorted: bool) -> None:
        self._decoder, self._loop, self._is_sorted = decoder, loop, is_sorted

    def __call__(
        self, fd: int, offsets: IntArray, sizes: IntArray, n_bytes: int, out: Bytes, firsts: IntArray
    ) -> ChunksRead | None:
        """See ``ChunkLoop`` of the pipeline."""
        is_inside = not len(firsts) or 0 <= firsts.min() <= firsts.max() <= len(out) - n_bytes
        if not (len(firsts) == len(offsets) == len(sizes) and is_inside):  # the loop does not check bounds
            raise IndexError(f"{len(offsets)} chunks do not fit into {len(out):,} bytes at {firsts}")
        stored = scratch("stored", int(sizes.max(initial=0)))
        unsorted = scratch("unsorted", n_bytes if self._is_sorted else 0)
        clock = np.zeros(6, np.int64)
        functions = (*_read_functions(), *self._decoder.functions)
        idle = self._decoder.idle
        try:
            state = idle.pop()
        except IndexError:
            state = self._decoder.new_state()
        try:
            is_done = self._loop(functions, fd, state, offsets, sizes, n_bytes, stored, unsorted, out, firsts, clock)
        finally:
            idle.append(state)
        return ChunksRead(int(clock[4]) * NANOSECOND, bool(clock[5])) if is_done else None


@register_loop
def loop_of_filters(filters: Sequence[Filter], steps: Sequence[Decoder | Checksum], itemsize: int) -> ChunkLoop | None:
    """Return the loop for a compressor that is a C function, with or without a shuffle; None for other pipelines."""
    first = steps[0] if steps else None
    sizes = [shuffled(step, itemsize) for step in filters if step.id == SHUFFLE]
    if not isinstance(first, NativeDecoder) or len(steps) != 1 + len(sizes):
        return None
    sizes = [size for size in sizes if size != 1]
    if len(sizes) > 1 or not SORTED.issuperset(sizes) or any(itemsize % size for size in sizes):
        return None
    return loop_of(first, sizes[0] if sizes else 1)


_made: dict[tuple[NativeDecoder, int], ChunkLoop | None] = {}


def loop_of(decoder: NativeDecoder, size: int) -> ChunkLoop | None:
    """Return the loop for a decoder, compiled at the first call.

    None without a compiler, or on an unsupported system; and in a worker process that was not forked from one with the
    compiled loop: these are many, and some live only for an epoch.

    Args:
        decoder: decoder of the compressor.
        size: bytes of the numbers that were shuffled; 1 without a shuffle.
    """
    if (decoder, size) not in _made and worker_number() is None:
        _made[decoder, size] = _compile_decoder(decoder, size)
    return _made.get((decoder, size))


def _compile_decoder(decoder: NativeDecoder, size: int) -> ChunkLoop | None:
    if sys.platform == "win32":
        return None
    if (sort := compiled(_SORTS[size])) is None:
        return None
    if (decode := compiled(_DECODERS[decoder.name](*decoder.options))) is None:
        return None
    if (loop := compiled(_loop(decode, sort, size))) is None:
        return None
    nothing, none = np.empty(0, np.int64), np.empty(0, np.uint8)
    chunk_loop = ChunkLoop(decoder, loop, is_sorted=size > 1)
    chunk_loop(0, nothing, nothing, 0, none, nothing)
    return chunk_loop


@cache
def _read_functions() -> tuple[int, int, int]:
    """Return the addresses of the system functions that a loop calls; 0 if the system lacks one that is optional."""
    library = ctypes.CDLL(None)
    pread, now = (ctypes.cast(library[name], ctypes.c_void_p).value for name in ("pread", "clock_gettime"))
    with suppress(AttributeError):
        return pread or 0, now or 0, ctypes.cast(library["preadv2"], ctypes.c_void_p).value or 0
    return pread or 0, now or 0, 0


def _loop(decode: Callable[..., bool], sort: Callable[[Bytes, Bytes], None], size: int) -> Callable[..., bool]:
    call, monotonic, nowait = c_call(), time.CLOCK_MONOTONIC, getattr(os, "RWF_NOWAIT", 0)

    def loop(
        functions: tuple[int, ...],
        fd: int,
        state: int,
        offsets: IntArray,
        sizes: IntArray,
        n_bytes: int,
        stored: Bytes,
        unsorted: Bytes,
        out: Bytes,
        firsts: IntArray,
        clock: IntArray,
    ) -> bool:
        pread, now = functions[0], functions[1]
        if nowait and functions[2] and len(offsets):
            # Asked here, since each call from Python would give up the interpreter's lock.
            probe = np.zeros(3, np.int64)  # where a byte goes, and their number, as preadv2 takes them; the byte
            probe[0], probe[1], clock[5] = probe.ctypes.data + 16, 1, 1
            for place in (offsets[0], offsets[-1] + sizes[-1] - 1):
                if call(functions[2], (np.int32(fd), probe.ctypes.data, np.int32(1), place, np.int32(nowait))) != 1:
                    clock[5] = 0
        before, after = clock[0:2], clock[2:4]  # seconds and nanoseconds
        for at in range(len(offsets)):
            call(now, (np.int32(monotonic), before.ctypes.data))
            n_read = call(pread, (np.int32(fd), stored.ctypes.data, sizes[at], offsets[at]))
            call(now, (np.int32(monotonic), after.ctypes.data))
            clock[4] += (after[0] - before[0]) * 1_000_000_000 + after[1] - before[1]
            if n_read != sizes[at]:
                return False
            place = out[firsts[at] : firsts[at] + n_bytes]
            decoded = unsorted if size > 1 else place
            if not decode(functions, state, stored, n_read, decoded):
                return False
            if size > 1:
                sort(unsorted, place)
        return True

    return loop


# The filter `shuffle` stores the first bytes of all numbers, then the second bytes, and so on. Numbers are assembled in
# a register, from slices that the compiler knows not to overlap, so that it vectorizes the loop.


def _sort_nothing(planes: Bytes, out: Bytes) -> None:
    pass


def _sort_2(planes: Bytes, out: Bytes) -> None:
    numbers = out.view(np.uint16)
    n = len(numbers)
    a, b = planes[:n], planes[n : 2 * n]
    for i in range(n):
        numbers[i] = np.uint16(a[i]) | np.uint16(b[i]) << np.uint16(8)


def _sort_4(planes: Bytes, out: Bytes) -> None:
    numbers = out.view(np.uint32)
    n = len(numbers)
    a, b, c, d = planes[:n], planes[n : 2 * n], planes[2 * n : 3 * n], planes[3 * n : 4 * n]
    for i in range(n):
        low = np.uint32(a[i]) | np.uint32(b[i]) << np.uint32(8)
        numbers[i] = low | np.uint32(c[i]) << np.uint32(16) | np.uint32(d[i]) << np.uint32(24)


def _sort_8(planes: Bytes, out: Bytes) -> None:
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


_SORTS: dict[int, Callable[[Bytes, Bytes], None]] = {1: _sort_nothing, 2: _sort_2, 4: _sort_4, 8: _sort_8}

SORTED = frozenset(size for size in _SORTS if size > 1)
"""Bytes of the numbers for which a loop can undo a shuffle."""


# Decoders of one chunk: from the addresses of C functions (after three of the loop), a state, stored bytes and their
# number, into memory. They return whether the chunk fills the memory.

FIRST = 3  # in a loop's functions, the first of a decoder


def _compiled_libdeflate() -> Callable[..., bool]:
    call = c_call()

    def decode(functions: tuple[int, ...], own: int, data: Bytes, n_data: int, out: Bytes) -> bool:
        failed = call(functions[FIRST], (own, data.ctypes.data, n_data, out.ctypes.data, out.size, 0))
        return bool(np.int32(failed) == 0)

    return decode


def _compiled_zstd() -> Callable[..., bool]:
    call = c_call()

    def decode(functions: tuple[int, ...], own: int, data: Bytes, n_data: int, out: Bytes) -> bool:
        return bool(call(functions[FIRST], (own, out.ctypes.data, out.size, data.ctypes.data, n_data)) == out.size)

    return decode


def _compiled_blocks(unit: int, decode: Callable[..., bool]) -> Callable[..., bool]:
    """Return a decoder of blocks with their sizes, of multiples of a unit; a remainder is stored as it is.

    ``decode`` gets the functions, the state, a block, memory for it, and memory of the same size for anything else.
    """
    number: Any = compiled(_big_endian)
    block_decoder: Any = compiled(decode)

    def decode_all(functions: tuple[int, ...], own: int, data: Bytes, n_data: int, out: Bytes) -> bool:
        if n_data < HEADER or number(data, 0, 8) != out.size:
            return False
        block = number(data, 8, 4)
        whole = out.size - out.size % unit
        if block < unit or block % unit or block > LONGEST_BLOCK:
            return False
        at, scratch = HEADER, np.empty(min(block, whole), np.uint8)
        for start in range(0, whole, block):
            if at + 4 > n_data:
                return False
            n = number(data, at, 4)
            at += 4
            if n > n_data - at:
                return False
            place = out[start : min(start + block, whole)]
            if not block_decoder(functions, own, data[at : at + n], place, scratch):
                return False
            at += n
        if out.size - whole > n_data - at:
            return False
        for i in range(out.size - whole):
            out[whole + i] = data[at + i]
        return True

    return decode_all


def _big_endian(data: Bytes, at: int, n_bytes: int) -> int:
    value = np.int64(0)
    for i in range(n_bytes):
        value = value << 8 | np.int64(data[at + i])
    return int(value)


def _compiled_lz4() -> Callable[..., bool]:
    call = c_call()

    def decode(functions: tuple[int, ...], nothing: int, data: Bytes, out: Bytes, scratch: Bytes) -> bool:
        if data.size == out.size:
            out[:] = data
            return True
        sizes = np.int32(data.size), np.int32(out.size)
        return bool(np.int32(call(functions[FIRST], (data.ctypes.data, out.ctypes.data, *sizes))) == out.size)

    return _compiled_blocks(1, decode)


def _compiled_bitshuffle(size: int, is_zstd: int) -> Callable[..., bool]:
    call = c_call()

    def decode(functions: tuple[int, ...], own: int, data: Bytes, out: Bytes, scratch: Bytes) -> bool:
        n_out, stored, bits = out.size, data.ctypes.data, scratch.ctypes.data
        if is_zstd:
            n = call(functions[FIRST], (own, bits, n_out, stored, data.size))
        else:
            n = np.int64(np.int32(call(functions[FIRST], (stored, bits, np.int32(data.size), np.int32(n_out)))))
        numbers = n_out // size
        return bool(n == n_out and call(functions[FIRST + 1], (bits, out.ctypes.data, numbers, size, numbers)) == n_out)

    return _compiled_blocks(8 * size, decode)


# LZF, h5py's fast compressor. The library's loop copies a byte at a time. Here sixteen are copied at once, and excess
# bytes are overwritten by the next copy, as in LZ4 (https://github.com/lz4/lz4, "wild copies"). Measured in one thread,
# MiB/s: noisy images 760, for 430 with imagecodecs and 370 with h5py's own; shuffled signals 2,270, 1,340 and 680; text
# 1,520, 500 and 290; numbers that repeat sixteen times 2,600, 2,800 and 1,100.
#
# The format (https://oldhome.schmorp.de/marc/liblzf.html): a byte below 32 is followed by one literal byte more than it
# says. Otherwise its three high bits say how many bytes, less two, are repeated, or 7, if the next byte has how many
# more; its other bits and the byte after say how far back they are, less one.

LZF_REPEAT = 264  # maximum bytes of a repeat
LZF_LITERAL = 32  # maximum bytes of a literal run
LZF_WIDTH = 16  # bytes copied at once


def _compiled_lzf() -> Callable[..., bool]:
    loop: Any = compiled(lzf_loop(compiled))

    def decode(functions: tuple[int, ...], nothing: int, data: Bytes, n_data: int, out: Bytes) -> bool:
        return bool(loop(data, n_data, out))

    return decode


def lzf_loop(compiled: Callable[..., Any]) -> Callable[[Bytes, int, Bytes], bool]:
    """Return the loop: it decodes a number of stored bytes into memory, and returns whether they fill it exactly.

    Args:
        compiled: compiles the functions that the loop calls.
    """
    copy = compiled(_copy_16)

    def decode(data: Bytes, n_data: int, out: Bytes) -> bool:
        n_out = len(out)
        at: Any = 0  # in the stored bytes
        end: Any = 0  # of the decoded bytes
        # Up to here excess bytes can be copied.
        last_at, last_end = n_data - LZF_LITERAL, n_out - LZF_REPEAT - LZF_WIDTH
        while at < n_data:
            control = np.int64(data[at])
            at += 1
            if control < LZF_LITERAL:
                n = control + 1
                if at <= last_at and end <= last_end:
                    copy(out, end, data, at)
                    if n > LZF_WIDTH:
                        copy(out, end + LZF_WIDTH, data, at + LZF_WIDTH)
                elif at + n <= n_data and end + n <= n_out:
                    for i in range(n):
                        out[end + i] = data[at + i]
                else:
                    return False
                at += n
                end += n
                continue
            n = (control >> 5) + 2
            if n == 9:
                if at >= n_data:
                    return False
                n += np.int64(data[at])
                at += 1
            if at >= n_data:
                return False
            back = ((control & 31) << 8) + np.int64(data[at]) + 1
            at += 1
            if back > end:
                return False
            if back >= LZF_WIDTH and end <= last_end:
                for i in range(0, n, LZF_WIDTH):
                    copy(out, end + i, out, end - back + i)
            elif end + n <= n_out:
                for i in range(end, end + n):  # source and target can overlap
                    out[i] = out[i - back]
            else:
                return False
            end += n
        return bool(end == n_out)

    return decode


def _copy_16(target: Bytes, to: int, source: Bytes, start: int) -> None:
    """Load all bytes before storing one: the compiler makes a single load and a single store of that."""
    i, j = np.uint64(start), np.uint64(to)  # unsigned: an index cannot count from an array's end
    u = np.uint64
    a, b, c, d = source[i], source[i + u(1)], source[i + u(2)], source[i + u(3)]
    e, f, g, h = source[i + u(4)], source[i + u(5)], source[i + u(6)], source[i + u(7)]
    k, m, n, o = source[i + u(8)], source[i + u(9)], source[i + u(10)], source[i + u(11)]
    p, q, r, s = source[i + u(12)], source[i + u(13)], source[i + u(14)], source[i + u(15)]
    target[j], target[j + u(1)], target[j + u(2)], target[j + u(3)] = a, b, c, d
    target[j + u(4)], target[j + u(5)], target[j + u(6)], target[j + u(7)] = e, f, g, h
    target[j + u(8)], target[j + u(9)], target[j + u(10)], target[j + u(11)] = k, m, n, o
    target[j + u(12)], target[j + u(13)], target[j + u(14)], target[j + u(15)] = p, q, r, s


_DECODERS: dict[str, Callable[..., Callable[..., bool]]] = {
    "libdeflate": _compiled_libdeflate,
    "liblzf": _compiled_lzf,
    "zstd": _compiled_zstd,
    "lz4": _compiled_lz4,
    "bitshuffle": _compiled_bitshuffle,
}

"""Checksums (CRC-32) of pieces of memory, and writes and reads of pieces: in one call of compiled code, if possible.

Threads that decode compete for the interpreter's lock with those that copy rows: one that releases it, for a write or a
checksum, waits for it for 50 to 100 microseconds afterwards (two cores, 2026-11-29).
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from deflate import crc32

from ..counters import worker_number
from ..jit import c_call, compiled
from ..types import IntArray

__all__ = [
    "ABSENT",
    "DAMAGED",
    "MARK",
    "RIGHT",
    "SUM",
    "UNREAD",
    "WRITE_BYTES",
    "compile_sums",
    "n_sums",
    "read_loop",
    "sums_of_pieces",
    "write_loop",
]

SUM = np.dtype("<u4")
"""A checksum in a file."""

MARK = np.dtype("<u2")
"""How often a piece came and went: an odd number if the mirror has it. So a piece that went and came again while it was
read is noticed, too."""

WRITE_BYTES = 256 << 10
"""Bytes of a write: one of 768 KiB takes 1.5 to 2 times as long (Linux 6.18, ext4, pages that the file lacks)."""

ABSENT, RIGHT, DAMAGED, UNREAD = range(4)
"""States of a piece after a compiled read: it is missing, it was read, it differs from its checksums, or the page cache
lacks some of it."""

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)

Bytes = npt.NDArray[np.uint8]


def n_sums(sizes: IntArray, sum_bytes: int) -> IntArray:
    """Return how many checksums pieces of these sizes have."""
    return -(-sizes // sum_bytes)


def sums_of_pieces(memory: Bytes, starts: IntArray, stops: IntArray, sum_bytes: int) -> npt.NDArray[np.uint32]:
    """Return the checksums of pieces of memory, one piece after the other.

    Args:
        memory: contiguous bytes.
        starts: where each piece begins, shape ``(n_pieces,)``.
        stops: where it ends.
        sum_bytes: bytes of a checksum; the last one of a piece may have fewer.
    """
    if len(starts) and (starts.min() < 0 or stops.max() > len(memory)):  # the loop does not check bounds
        raise IndexError(f"pieces end at byte {stops.max():,} of {len(memory):,}")
    sums = np.empty(int(n_sums(stops - starts, sum_bytes).sum()), SUM)
    if _loops and _loops[0] is not None:
        _loops[0].sum(_functions(), memory, np.ascontiguousarray(starts), np.ascontiguousarray(stops), sum_bytes, sums)
        return sums
    view, number = memory.data, 0
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        for at in range(start, stop, sum_bytes):
            sums[number] = crc32(view[at : min(at + sum_bytes, stop)])
            number += 1
    return sums


class _Loops(NamedTuple):
    """Compiled loops.

    Attributes:
        sum: computes the checksums of pieces of memory.
        write: writes runs of pieces, their checksums and marks.
        read: reads parts of pieces that the page cache has, and compares them; None if the system cannot tell.
    """

    sum: Callable[..., None]
    write: Callable[..., bool]
    read: Callable[..., int] | None


_loops: list[_Loops | None] = []  # one entry once it was tried


def compile_sums() -> None:
    """Compile the loops, if that is possible. Forked worker processes inherit them; other workers have none."""
    if not _loops and worker_number() is None:
        _loops.append(_compile_loops())


def write_loop() -> Callable[..., bool] | None:
    """Return the compiled loop that writes pieces; None if there is none.

    Its arguments are descriptor, memory, a row ``(start in memory, bytes, place in the file)`` for each run, new marks
    of all pieces, room for their checksums, bytes of a piece and of a checksum, places of marks and checksums in the
    file, and bytes of a run from which on space is allocated. It returns False if a write failed.
    """
    return None if not _loops or _loops[0] is None else partial(_loops[0].write, _functions())


def read_loop() -> Callable[..., int] | None:
    """Return the loop that reads parts of pieces if the page cache has them, and compares them with their checksums.

    Checksums that were compared before are not computed again, unless a whole piece is read. If all checksums of a part
    were compared, the part alone is read; otherwise all that these are of.

    Its arguments are descriptor, marks and checksums of all pieces, and which checksums were compared (to be noted in);
    the piece of each part, where the part begins in it, and its bytes; memory to read into, and where each part begins
    there; memory for a part with what else its checksums are of; the state of each part (to be filled in); bytes of a
    piece and of a checksum. It returns the number of parts that are right.
    """
    if not _loops or _loops[0] is None or _loops[0].read is None:
        return None
    return partial(_loops[0].read, _functions())


def _compile_loops() -> _Loops | None:
    functions = _functions()
    if not all(functions) or (sums := compiled(_sum_loop())) is None:
        return None
    if (write := compiled(_write_loop(sums))) is None:
        return None
    nothing, none, no_runs = np.empty(0, np.int64), np.empty(0, np.uint8), np.empty((0, 3), np.int64)
    marks, no_sums = np.empty(0, MARK), np.empty(0, SUM)
    sums(functions, none, nothing, nothing, 1, no_sums)
    write(functions, 0, none, no_runs, marks, no_sums, 1, 1, 0, 0, 0)
    read = compiled(_read_loop()) if _NOWAIT else None
    if read is not None:
        marks.flags.writeable = no_sums.flags.writeable = False  # as mapped ones
        parts, states = (nothing, nothing, nothing, none, nothing, none), np.empty(0, np.int8)
        read(functions, 0, marks, no_sums, np.empty(0, np.bool_), *parts, states, 1, 1)
    return _Loops(sums, write, read)


_SYSTEM = ("pwrite", "fallocate", "preadv2", "memcpy")


@cache
def _functions() -> tuple[int, ...]:
    """Return the addresses of the C functions that the loops call; a single 0 if one is missing."""
    with suppress(OSError, AttributeError):
        library, system = ctypes.CDLL(importlib.import_module("deflate")._deflate.__file__), ctypes.CDLL(None)
        functions = library["libdeflate_crc32"], *(system[name] for name in _SYSTEM)
        return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return (0,)


def _sum_loop() -> Callable[..., None]:
    call = c_call()

    def loop(
        functions: tuple[int, ...],
        memory: Bytes,
        starts: IntArray,
        stops: IntArray,
        sum_bytes: int,
        sums: npt.NDArray[np.uint32],
    ) -> None:
        number, address = 0, memory.ctypes.data
        for piece in range(len(starts)):
            at, stop = starts[piece], stops[piece]
            while at < stop:
                n_bytes = min(sum_bytes, stop - at)
                sums[number] = call(functions[0], (np.int32(0), address + at, n_bytes))
                number += 1
                at += sum_bytes

    return loop


def _write_loop(sum_pieces: Any) -> Callable[..., bool]:
    call, write_bytes = c_call(), WRITE_BYTES

    def loop(
        functions: tuple[int, ...],
        fd: int,
        memory: Bytes,
        runs: IntArray,
        marks: npt.NDArray[np.uint16],
        sums: npt.NDArray[np.uint32],
        piece_bytes: int,
        sum_bytes: int,
        marks_at: int,
        sums_at: int,
        allocated_bytes: int,
    ) -> bool:
        n_sums, piece = (piece_bytes + sum_bytes - 1) // sum_bytes, 0
        for run in range(len(runs)):
            start, n_bytes, place = runs[run]
            if n_bytes >= allocated_bytes:
                call(functions[2], (np.int32(fd), np.int32(0), place, n_bytes))  # a write tells of a full disk
            at = 0
            while at < n_bytes:
                n = min(write_bytes, n_bytes - at)
                n_written = call(functions[1], (np.int32(fd), memory.ctypes.data + start + at, n, place + at))
                if n_written <= 0:
                    return False
                at += n_written
            starts = np.arange(start, start + n_bytes, piece_bytes)
            last, first = piece + len(starts), place // piece_bytes
            run_sums, run_marks = sums[piece * n_sums : last * n_sums], marks[piece:last]
            sum_pieces(functions, memory, starts, starts + piece_bytes, sum_bytes, run_sums)
            n, at = run_sums.size * 4, sums_at + first * n_sums * 4
            if call(functions[1], (np.int32(fd), run_sums.ctypes.data, n, at)) != n:
                return False
            n, at = run_marks.size * 2, marks_at + first * 2
            if call(functions[1], (np.int32(fd), run_marks.ctypes.data, n, at)) != n:
                return False
            piece = last
        return True

    return loop


def _read_loop() -> Callable[..., int]:
    call, nowait = c_call(), _NOWAIT
    absent, right, damaged, unread = ABSENT, RIGHT, DAMAGED, UNREAD

    def loop(
        functions: tuple[int, ...],
        fd: int,
        marks: npt.NDArray[np.uint16],
        sums: npt.NDArray[np.uint32],
        compared: npt.NDArray[np.bool_],
        pieces: IntArray,
        within: IntArray,
        sizes: IntArray,
        out: Bytes,
        starts: IntArray,
        room: Bytes,
        states: npt.NDArray[np.int8],
        piece_bytes: int,
        sum_bytes: int,
    ) -> int:
        n_sums, n_right = (piece_bytes + sum_bytes - 1) // sum_bytes, 0
        targets = np.int64(out.ctypes.data), np.int64(room.ctypes.data)
        vector = np.empty(2, np.int64)  # as preadv2 takes it: address and bytes
        for part in range(len(pieces)):
            piece, low, n_bytes, start = pieces[part], within[part], sizes[part], starts[part]
            high = low + n_bytes
            states[part] = unread
            if piece < 0 or piece >= len(marks) or n_bytes <= 0 or low < 0 or high > piece_bytes:
                continue
            if start < 0 or start + n_bytes > len(out):
                continue
            mark = marks[piece]
            if mark % 2 == 0:
                states[part] = absent
                continue
            first, stop, before = low // sum_bytes, (high + sum_bytes - 1) // sum_bytes, piece * n_sums
            is_known = n_bytes < piece_bytes
            for number in range(before + first, before + stop):
                is_known = is_known and compared[number]
            if not is_known:
                low, high = first * sum_bytes, min(stop * sum_bytes, piece_bytes)
            is_direct, n_read = high - low == n_bytes, high - low
            if not is_direct and n_read > len(room):
                continue
            address = targets[0] + start if is_direct else targets[1]
            vector[0], vector[1] = address, n_read
            place = piece * piece_bytes + low
            if call(functions[3], (np.int32(fd), vector.ctypes.data, np.int32(1), place, np.int32(nowait))) != n_read:
                continue
            is_right = True
            if not is_known:
                for number in range(first, stop):
                    at = number * sum_bytes
                    n = min(sum_bytes, piece_bytes - at)
                    sum_of_memory = np.uint32(call(functions[0], (np.int32(0), address + at - low, n)))
                    compared[before + number] = sum_of_memory == sums[before + number]
                    is_right = is_right and compared[before + number]
            if marks[piece] != mark:
                states[part] = absent
            elif not is_right:
                states[part] = damaged
            else:
                if not is_direct:
                    call(functions[4], (targets[0] + start, address + within[part] - low, n_bytes))
                states[part] = right
                n_right += 1
        return n_right

    return loop

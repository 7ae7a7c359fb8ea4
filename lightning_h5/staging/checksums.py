"""Checksums (CRC-32) of pieces of memory, and writes of pieces, in one call of compiled code if there is some.

Threads that decode compete for the interpreter's lock with those that copy rows: one that releases it, for a write or a
checksum, waits for it for 50 to 100 microseconds afterwards (two cores, 2026-11-29).
"""

from __future__ import annotations

import ctypes
import importlib
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

__all__ = ["MARK", "SUM", "WRITE_BYTES", "compile_sums", "n_sums", "sums_of_pieces", "write_loop"]

SUM = np.dtype("<u4")
"""A checksum in a file."""

MARK = np.dtype("<u2")
"""How often a piece came and went: an odd number if the mirror has it. So a piece that went and came again while it was
read is noticed, too."""

WRITE_BYTES = 256 << 10
"""Bytes of a write: one of 768 KiB takes 1.5 to 2 times as long (Linux 6.18, ext4, pages that the file lacks)."""

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
    """

    sum: Callable[..., None]
    write: Callable[..., bool]


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


def _compile_loops() -> _Loops | None:
    functions = _functions()
    if not all(functions) or (sums := compiled(_sum_loop())) is None:
        return None
    if (write := compiled(_write_loop(sums))) is None:
        return None
    nothing, none, no_runs = np.empty(0, np.int64), np.empty(0, np.uint8), np.empty((0, 3), np.int64)
    sums(functions, none, nothing, nothing, 1, np.empty(0, SUM))
    write(functions, 0, none, no_runs, np.empty(0, MARK), np.empty(0, SUM), 1, 1, 0, 0, 0)
    return _Loops(sums, write)


_SYSTEM = ("pwrite", "fallocate")


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

"""What all readers share: checking rows, making the array to read into, and copying rows out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import ArrayLayout
from ..types import IntArray

__all__ = ["LayoutReader", "address", "blocks", "check_bounds", "take_rows"]

BLOCK_BYTES = 512 << 10  # what a core's own cache holds


class LayoutReader:
    """A reader of one array; subclasses say how ``_fill`` gets rows into memory.

    Args:
        layout: the array.
        counters: where bytes read and decoded are counted.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        self.layout = layout
        self.dtype = layout.dtype
        self.row_shape = layout.row_shape
        self._counters = counters or Counters()

    def __len__(self) -> int:
        return self.layout.n_rows

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Rows in the order asked (see ``RowReader.read``).

        Raises:
            IndexError: a row lies outside the array.
            H5CorruptError: stored bytes are missing or do not decode.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if out is None:
            out = np.empty((len(rows), *self.row_shape), dtype=self.dtype)
        if len(rows):
            check_bounds(rows, len(self), f"{self.layout.key!r} in {self.layout.path!r}")
            self._fill(rows, out)
        return out

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to give back: files belong to the handle pool."""


def check_bounds(rows: IntArray, n_rows: int, name: str) -> None:
    """Refuses rows that are not there.

    Args:
        rows: at least one.
        n_rows: rows that there are.
        name: of what they are asked.

    Raises:
        IndexError: a row lies outside.
    """
    # As unsigned numbers negative rows are huge, so that one reduction finds both.
    if rows.view(np.uint64).max() < n_rows:
        return
    wrong = int(rows.min()) if rows.min() < 0 else int(rows.max())
    raise IndexError(f"row {wrong} was asked of {name}, which has {n_rows} rows. Ask for rows from 0 to {n_rows - 1}.")


def address(data: npt.NDArray[Any]) -> int:
    """Where an array's memory begins."""
    return int(data.__array_interface__["data"][0])


def blocks(n_rows: int, row_bytes: int) -> Iterator[slice]:
    """Pieces of rows that a core's own cache still holds when a second pass goes through them."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    return (slice(start, start + step) for start in range(0, n_rows, step))


# Copies rows out of memory, by torch's threads or by one thread, whichever is faster on this machine now.
#
# Torch's threads wait for each other at the end of each copy. On idle cores they copy twice as fast as one thread. If
# other programs use the cores, all of them wait for the one that was interrupted, and a copy takes 5 to 30 times as
# long as in one thread. Measured on two cores on 2026-11-23, 4 MiB of 4 KiB rows at a time, in rows per second:
# 5,100,000 with threads and 2,700,000 without on an idle machine; 110,000 and 880,000 next to two busy processes;
# 50,000 and 230,000 next to four.

MIN_SHARED_BYTES = 256 << 10  # one thread copies less before the others are awake

TRIAL_SHARE = 20
"""The slower way is tried again for at most one part in so many of the time spent on copying."""

WEIGHT = 0.25  # of the last copy, in the mean time that a byte takes


class FasterWay:
    """Chooses the faster of two ways to do the same, from the time that each took.

    The slower way is tried again now and then, so that the choice follows the load of the machine.
    """

    def __init__(self) -> None:
        self._seconds_per_byte: list[float | None] = [None, None]
        self._last_trial = [0.0, 0.0]  # seconds that the last use of each way took
        self._since_trial = 0.0  # seconds spent on the faster way since the slower one was tried

    def next(self) -> int:
        """Return the way to use now, 0 or 1."""
        first, second = self._seconds_per_byte
        if first is None or second is None:
            return 0 if first is None else 1
        faster = int(second < first)
        is_trial_due = self._since_trial >= TRIAL_SHARE * self._last_trial[1 - faster]
        return 1 - faster if is_trial_due else faster

    def note(self, way: int, n_bytes: int, seconds: float) -> None:
        """Record how long a copy took.

        Args:
            way: the way that was used.
            n_bytes: bytes copied, at least 1.
            seconds: time that the copy took.
        """
        pace, old = seconds / n_bytes, self._seconds_per_byte[way]
        other = self._seconds_per_byte[1 - way]
        is_trial = old is None or (other is not None and other <= old)
        # A trial counts alone: what it replaces is long ago, or was the first use, which started threads.
        self._seconds_per_byte[way] = pace if old is None or is_trial else old + WEIGHT * (pace - old)
        self._last_trial[way] = seconds
        self._since_trial = 0.0 if is_trial else self._since_trial + seconds


_ways = FasterWay()  # of this process: the load of the machine is the same for all arrays


def take_rows(
    source: npt.NDArray[Any], places: IntArray, out: npt.NDArray[Any], *, all_cores: bool = False
) -> npt.NDArray[Any]:
    """Copy rows, as ``np.take(source, places, axis=0, out=out)`` does.

    Args:
        source: rows in memory, writable if ``all_cores`` (torch warns of other arrays).
        places: rows to copy, each inside of ``source``.
        out: memory to copy to, C-contiguous, of the same dtype.
        all_cores: allow torch's threads. Only in a thread of the caller's own: in a thread of this package torch would
            start further threads.

    Returns:
        ``out``.
    """
    # Torch selects rows of any dtype that it has, single numbers only of some.
    if not all_cores or source.ndim < 2 or out.nbytes < MIN_SHARED_BYTES:
        return np.take(source, places, axis=0, out=out, mode="clip")  # any other mode takes memory between
    import torch  # a program that only inspects files does not need it

    way, began = _ways.next(), perf_counter()
    if way == 0:
        np.take(source, places, axis=0, out=out, mode="clip")
    else:
        torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(places), out=torch.from_numpy(out))
    _ways.note(way, out.nbytes, perf_counter() - began)
    return out

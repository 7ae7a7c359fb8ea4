"""Streaming mean and standard deviation, in float64, of rows that threads read in any order.

The result does not depend on the number of threads: sums are merged in the order of the rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..datasets.row_table import RowTable
from ..hdf5 import ArrayLayout, OpenOptions
from ..order.shards import Rows
from ..readers import BlockMap, BlockSource, BulkTask, bulk_tasks, first_places, open_source
from ..types import IntArray

__all__ = [
    "MAX_BYTES",
    "InOrder",
    "RunningStats",
    "empty_stats",
    "merge_stats",
    "rows_by_part",
    "stats_of",
    "tasks_of",
]

BLOCK_VALUES = 1 << 17  # processed at a time: 1 MiB as float64, which fits a core's cache
MIN_BLOCK = 16  # minimum rows of a block, unless these have more than 16 times BLOCK_VALUES values
RUN_BYTES = 1 << 20  # bytes read together in arrays without chunks
MAX_BYTES = 1 << 30  # bytes for which tasks are created at a time; rows that share chunks are split at this size

Floats = npt.NDArray[np.float64]


class RunningStats(NamedTuple):
    """Statistics of the values so far, for each channel: all have the shape ``(n_channels,)``.

    Mean and squares are those of the deviations from ``shift``, a number near the first values that a float64 holds
    exactly. So a large mean leaves small deviations all their digits.

    Attributes:
        n: finite values; all that follows but the next two is of these.
        n_nan: values that are no number.
        n_infinite: values that are infinite.
        least: in the dtype of the values (float32 for those of 16 bits); the dtype's largest if there are none.
        largest: in the same way.
        shift: what is subtracted from values before they are summed.
        offset: the mean of the values minus ``shift``.
        squares: sum of squared deviations from the mean.
    """

    n: IntArray
    n_nan: IntArray
    n_infinite: IntArray
    least: npt.NDArray[Any]
    largest: npt.NDArray[Any]
    shift: Floats
    offset: Floats
    squares: Floats

    @property
    def mean(self) -> Floats:
        """The mean; 0 if there are no values."""
        return self.shift + self.offset

    @property
    def std(self) -> Floats:
        """The standard deviation (of the values themselves: divided by ``n``); NaN if there are no values."""
        with np.errstate(all="ignore"):
            deviation: Floats = np.sqrt(self.squares / self.n)
        return deviation


def empty_stats(n_channels: int, dtype: np.dtype[Any]) -> RunningStats:
    """Return the statistics of no values.

    Args:
        n_channels: channels.
        dtype: of the values to come: bool, an integer, or a float of 16, 32 or 64 bits.
    """
    kept = _kept(dtype)
    ends = (np.iinfo(kept).max, np.iinfo(kept).min) if kept.kind in "iu" else (np.inf, -np.inf)
    counts, zeros = np.zeros(n_channels, dtype=np.int64), np.zeros(n_channels)
    least, largest = (np.full(n_channels, end, dtype=kept) for end in ends)
    return RunningStats(counts, counts, counts, least, largest, zeros, zeros, zeros)


def stats_of(values: npt.NDArray[Any]) -> RunningStats:
    """Return the statistics of some values; about 10 passes over memory, so that what fits a core's cache is best.

    Args:
        values: shape ``(n_before, n_channels, n_after)``.
    """
    n_channels = values.shape[1]
    if not values.size:
        return empty_stats(n_channels, values.dtype)
    lines = np.ascontiguousarray(np.moveaxis(values, 1, 0)).reshape(n_channels, -1)
    lines = lines.astype(_kept(values.dtype), copy=False)
    n, n_nan = np.full(n_channels, lines.shape[1]), np.zeros(n_channels, dtype=np.int64)
    where: Any = True
    with np.errstate(all="ignore"):  # stored values may be anything
        least, largest = lines.min(axis=1), lines.max(axis=1)
        if not (np.isfinite(least) & np.isfinite(largest)).all():  # NaN propagates to both
            where = np.isfinite(lines)
            n, n_nan = where.sum(axis=1), np.isnan(lines).sum(axis=1)
            least = lines.min(axis=1, where=where, initial=np.inf)
            largest = lines.max(axis=1, where=where, initial=-np.inf)
        if lines.dtype.kind in "iu" and lines.dtype.itemsize == 8:
            # float64 cannot represent all int64, but a multiple of 2048 exactly; unsigned distances from it never
            # overflow.
            below = least >> 11 << 11
            shift = below.astype(np.float64)
            deviations = (lines.view(np.uint64) - below.view(np.uint64)[:, None]).astype(np.float64)
        else:
            shift = np.where(n > 0, least.astype(np.float64) / 2 + largest.astype(np.float64) / 2, 0.0)
            deviations = np.subtract(lines, shift[:, None], dtype=np.float64)
        offset = deviations.sum(axis=1, where=where) / np.maximum(n, 1)
        deviations -= offset[:, None]
        squares = np.square(deviations, out=deviations).sum(axis=1, where=where)
    return RunningStats(n, n_nan, lines.shape[1] - n - n_nan, least, largest, shift, offset, squares)


def merge_stats(a: RunningStats, b: RunningStats) -> RunningStats:
    """Return the statistics of two sets of values together (T. Chan, G. Golub, R. LeVeque, 1979)."""
    is_first, is_last = a.n == 0, b.n == 0
    with np.errstate(all="ignore"):
        n = a.n + b.n
        share = b.n / np.maximum(n, 1)
        apart = (b.shift - a.shift) + (b.offset - a.offset)
        between = np.where(is_first | is_last, 0.0, apart * apart * a.n * share)
        return RunningStats(
            n,
            a.n_nan + b.n_nan,
            a.n_infinite + b.n_infinite,
            np.minimum(a.least, b.least),
            np.maximum(a.largest, b.largest),
            np.where(is_first, b.shift, a.shift),
            np.where(is_first, b.offset, a.offset + apart * share),
            a.squares + b.squares + between,
        )


def _kept(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to compute in: NumPy has no least of bool that is a number, and is slow in 16 bits."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if dtype.kind == "f" and dtype.itemsize < 4 else dtype


class InOrder:
    """A ``BulkTarget`` that sums up rows, and merges the sums in the order of the rows, whenever they come.

    Which rows make a block follows from how they are stored alone, not from the number of threads.

    Args:
        axis: of the channels; None takes all values together.
        nothing: the sums of no rows.
        check: raises an error for rows that have no values.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, axis: int | None, nothing: RunningStats, check: Callable[[npt.NDArray[Any]], None]) -> None:
        self._axis, self.result, self._check = axis, nothing, check
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[int, RunningStats]] = {}  # results of rows after others that are still in progress

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        self._check(rows)
        n_channels = len(self.result.n)
        n_after = 1 if self._axis is None else max(1, math.prod(rows.shape[self._axis + 2 :]))
        values = rows.reshape(rows.size // (n_channels * n_after), n_channels, n_after)
        n_each = max(1, values.shape[1] * values.shape[2])
        # Merging takes as long as a few rows: a block has enough of them if they are not too large.
        step = max(1, BLOCK_VALUES // n_each, min(MIN_BLOCK, MIN_BLOCK * BLOCK_VALUES // n_each))
        done = stats_of(values[:step])
        for at in range(step, len(values), step):
            done = merge_stats(done, stats_of(values[at : at + step]))
        with self._lock:
            self._early[start] = start + len(rows), done
            while self._next in self._early:
                self._next, ready = self._early.pop(self._next)
                self.result = merge_stats(self.result, ready)


def rows_by_part(table: RowTable, wanted: Rows | list[IntArray] | None) -> list[Rows]:
    """Return the rows of each part that are read, as its array numbers them."""
    if isinstance(wanted, list):
        return [*wanted]
    if wanted is None:
        return [range(array.n_rows) for (array,) in table.layouts]
    found: list[Rows] = []
    for low, high in pairwise(table.starts.tolist()):
        first, stop = first_places(wanted, np.array([low, high])).tolist()
        some = wanted[first:stop]
        found.append(range(some.start - low, some.stop - low, some.step) if isinstance(some, range) else some - low)
    return found


def tasks_of(table: RowTable, options: OpenOptions, rows: Sequence[Rows], target: InOrder) -> Iterator[list[BulkTask]]:
    """Yield tasks for some rows at a time: those of a terabyte would take memory themselves."""
    counters = Counters()
    first = 0
    for own, (layout,) in zip(rows, table.layouts, strict=True):
        row_bytes = max(1, layout.row_bytes)
        if layout.value is not None or not layout.row_bytes:
            value = np.empty(0, layout.dtype) if layout.value is None else np.asarray(layout.value, layout.dtype)
            if len(own):
                target.put(first, value.reshape(len(own), *layout.row_shape))
        elif layout.view is not None:
            source = open_source(layout, options, 1, counters)
            yield from _tasks_of_view(source, layout, own, target, first)
        else:
            source = open_source(layout, options, max(1, RUN_BYTES // row_bytes), counters)
            step = max(1, MAX_BYTES // row_bytes)
            if step > source.rows_per_block:  # otherwise rows that share chunks do not fit, and are read repeatedly
                step = step // source.rows_per_block * source.rows_per_block
            places = first_places(own, np.arange(0, layout.n_rows + step, step)).tolist()
            for start, end in pairwise(places):
                yield bulk_tasks(source, layout, own[start:end], target, first + start)
        first += len(own)


def _tasks_of_view(
    source: BlockSource, layout: ArrayLayout, own: Rows, target: InOrder, first: int
) -> Iterator[list[BulkTask]]:
    """Yield a task for each block of an array with other axes of rows, whose rows need not follow each other."""
    grid = source.grid
    blocks, within = BlockMap([grid._replace(period=grid.size)]).locate(np.asarray(own, dtype=np.int64))
    order = np.argsort(blocks, kind="stable")
    blocks, within = blocks[order], within[order]
    cuts = np.flatnonzero(np.diff(blocks, prepend=-1, append=-1))
    for low, high in pairwise(cuts.tolist()):

        def run(block: int = int(blocks[low]), here: IntArray = within[low:high], start: int = first + low) -> None:
            values = np.empty((len(here), *layout.row_shape), layout.dtype)
            source.pick(block, here, values)
            target.put(start, values)

        n_decoded = source.rows_per_block * layout.row_bytes
        yield [BulkTask((high - low) * layout.row_bytes, n_decoded, run)]

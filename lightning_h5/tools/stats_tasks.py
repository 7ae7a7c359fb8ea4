"""The reading of rows for statistics: tasks for threads, whose results are put together in the order of the rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..datasets.row_table import RowTable
from ..hdf5 import ArrayLayout, OpenOptions
from ..order.shards import Rows
from ..readers import BlockMap, BlockSource, BulkTask, RowGrid, bulk_tasks, first_places, open_source
from ..types import IntArray
from .running_stats import RunningStats, merge_stats, stats_of

__all__ = ["MAX_BYTES", "InOrder", "rows_by_part", "tasks_of"]

BLOCK_VALUES = 1 << 17  # processed at a time: 1 MiB as float64, which fits a core's cache
MIN_BLOCK = 16  # minimum rows of a block, unless these have more than 16 times BLOCK_VALUES values
RUN_BYTES = 1 << 20  # bytes read together in arrays without chunks
MAX_BYTES = 1 << 30  # bytes for which tasks are created at a time; rows that share chunks are split at this size


class InOrder:
    """A ``BulkTarget`` that sums up rows, and merges the sums in the order of the rows, whenever they come.

    Which rows make a block follows from how they are stored alone, not from the number of threads.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, axis: int | None, nothing: RunningStats) -> None:
        self._axis, self.result = axis, nothing
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[int, RunningStats]] = {}  # results of rows after others that are still in progress

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
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
    grid = RowGrid.of(layout, source.rows_per_block)
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

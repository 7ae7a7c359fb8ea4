"""A pass over the rows of an array: pieces are worked on in threads, and put together in the order of the rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ...datasets.table import FileTable, scan_files
from ...errors import H5ValueError
from ...files import ArrayLayout, OpenOptions
from ...readers import BulkTask, bulk_tasks, do_tasks, first_places, open_source, usable_cores
from ...sampling.rows import Rows
from ...stats import Counters
from ...types import IntArray
from ..progress import progress_bar

__all__ = ["FoundFiles", "RowsLike", "find_files", "fold"]

RowsLike: TypeAlias = Any
"""Numbers of rows, or a mask, as whatever NumPy makes an array of; None for all rows."""

BLOCK_VALUES = 1 << 17  # worked on at a time: a megabyte as float64, which fits a core's cache
LEAST_BLOCK = 16  # rows of a block, if these are no more than 16 times as many values
RUN_BYTES = 1 << 20  # rows that are read together where there are no chunks
STRETCH_BYTES = 1 << 30  # of rows for which tasks are made at a time; rows that share their chunks are cut apart here
MOST_FILES = 64  # likewise

T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class FoundFiles:
    """One array of all files.

    Attributes:
        table: the files.
        options: how they are opened.
        rows: rows to look at, in ascending order; None for all.
    """

    table: FileTable
    options: OpenOptions
    rows: Rows | None

    @property
    def layout(self) -> ArrayLayout:
        """The array in the first file; its dtype and the shape of its rows are the same in all."""
        return self.table.layouts[0][0]

    @property
    def n_rows(self) -> int:
        """Rows to look at."""
        return self.table.n_rows if self.rows is None else len(self.rows)


def find_files(paths: tuple[str, ...], key: str, options: OpenOptions, rows: RowsLike) -> FoundFiles:
    """Looks for an array in all files. Reads metadata only.

    Args:
        paths: the files.
        key: the array.
        options: how they are opened.
        rows: of all files, one after the other.

    Raises:
        H5Error: see ``scan_files``.
        H5ValueError: rows are no rows of these files.
    """
    table = scan_files(paths, [key], options, text_ok=[True])
    return FoundFiles(table=table, options=options, rows=_ascending(rows, table.n_rows, key))


def fold(
    found: FoundFiles,
    view: tuple[int, int, int],
    work: Callable[[npt.NDArray[Any]], T],
    join: Callable[[T, T], T],
    start: T,
    what: str,
    *,
    shows_progress: bool,
) -> T:
    """Works on all rows, a block at a time, and joins what comes out from the first row to the last.

    Which rows make a block follows from how they are stored alone, not from the number of threads.

    Args:
        found: where the rows are.
        view: the shape that some rows are looked at in, its first axis -1.
        work: is called in threads, with a block of values in that shape.
        join: joins the results of neighbours.
        start: the result of no rows.
        what: the pass is called by the bar.
        shows_progress: show a bar, where the standard error is a terminal.

    Raises:
        H5CorruptError: something does not decode.
        H5DataChangedError: a file was written to meanwhile.
    """
    target = _InOrder(view, work, join, start)
    with closing(
        progress_bar(
            found.n_rows * found.layout.row_bytes,
            f"{what} of {found.layout.key!r}",
            shows_progress=shows_progress,
        )
    ) as bar:

        def told(n_bytes: int) -> None:
            bar.update(n_bytes)

        tasks: list[BulkTask] = []
        n_files = 0
        for stretch in _stretches(found, target):
            tasks += stretch
            n_files += 1
            if n_files >= MOST_FILES or sum(task.n_decoded for task in tasks) >= STRETCH_BYTES:
                do_tasks(tasks, usable_cores(), told)
                tasks, n_files = [], 0
        do_tasks(tasks, usable_cores(), told)
    for guard in found.table.guards:
        guard.check()
    return target.result()


class _InOrder(Generic[T]):
    """A ``BulkTarget`` that works on rows, and joins the results in the order of the rows, whenever they come."""

    array: npt.NDArray[Any] | None = None

    def __init__(
        self,
        view: tuple[int, int, int],
        work: Callable[[npt.NDArray[Any]], T],
        join: Callable[[T, T], T],
        start: T,
    ) -> None:
        self._view, self._work, self._join, self._result = view, work, join, start
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[int, T]] = {}  # results of rows behind some that are still worked on

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        values = rows.reshape(self._view)
        n_each = max(1, values.shape[1] * values.shape[2])
        # To join results takes as long as a few rows: there are enough in a block, if they are not too large.
        step = max(1, BLOCK_VALUES // n_each, min(LEAST_BLOCK, LEAST_BLOCK * BLOCK_VALUES // n_each))
        done = self._work(values[:step])
        for at in range(step, len(values), step):
            done = self._join(done, self._work(values[at : at + step]))
        with self._lock:
            self._early[start] = start + len(rows), done
            while self._next in self._early:
                self._next, ready = self._early.pop(self._next)
                self._result = self._join(self._result, ready)

    def result(self) -> T:
        """What all rows together gave."""
        return self._result


def _stretches(found: FoundFiles, target: _InOrder[Any]) -> Iterator[list[BulkTask]]:
    """Tasks, a stretch of rows at a time: those of a terabyte would take memory themselves."""
    counters = Counters()
    for at, (layout,) in enumerate(found.table.layouts):
        low, high = found.table.starts[at : at + 2].tolist()
        if found.rows is None:
            rows: range | IntArray = range(layout.n_rows)
            first = low
        else:
            first, stop = first_places(found.rows, np.array([low, high])).tolist()
            some = found.rows[first:stop]
            rows = range(some.start - low, some.stop - low, some.step) if isinstance(some, range) else some - low
        row_bytes = max(1, layout.row_bytes)
        source = open_source(layout, found.options, max(1, RUN_BYTES // row_bytes), counters)
        step = max(1, STRETCH_BYTES // row_bytes)
        if step > source.rows_per_slab:  # else rows that share their chunks do not fit, and these are read repeatedly
            step = step // source.rows_per_slab * source.rows_per_slab
        places = first_places(rows, np.arange(0, layout.n_rows + step, step)).tolist()
        for start, stop in pairwise(places):
            yield bulk_tasks(source, layout, rows[start:stop], target, first + start)


def _ascending(rows: RowsLike, n_rows: int, key: str) -> Rows | None:
    """Numbers of rows in ascending order."""
    if rows is None:
        return None
    if isinstance(rows, range) and rows and rows.step > 0 and rows[0] >= 0 and rows[-1] < n_rows:
        return rows
    given = np.asarray(rows)
    if given.dtype == np.bool_ and given.shape == (n_rows,):
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise H5ValueError(
            f"rows has the shape {given.shape} and the dtype {given.dtype}, and {key!r} has {n_rows} rows. Pass "
            f"numbers of rows, or a mask of the shape ({n_rows},)."
        )
    ordered: IntArray = np.sort(given).astype(np.int64)
    if len(ordered) and not (ordered[0] >= 0 and ordered[-1] < n_rows):
        wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
        raise H5ValueError(f"row {wrong} was asked of {key!r}, which has {n_rows} rows. Pass rows of these files.")
    if (np.diff(ordered) == 0).any():
        raise H5ValueError(f"rows has {len(ordered)} rows of {key!r}, some of them twice. Pass each once.")
    return ordered

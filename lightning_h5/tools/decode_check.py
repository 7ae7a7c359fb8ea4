"""Reading all rows of an array, to see whether every chunk decodes, and whether its numbers are finite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, OpenOptions, kind_of
from ..readers import BulkTask, SlabSource, bulk_tasks, open_reader, open_source
from .file_checks import Problem, error, is_of_memory

__all__ = ["ArrayDecoder"]

OPTIONS = OpenOptions()
STEP_BYTES = 4 << 20  # decoded bytes of a task
MAX_ROWS_BYTES = 1 << 30  # of rows that share their chunks and are put together
MAX_PROBLEMS = 10  # of an array that are reported one by one


class ArrayDecoder:
    """Reads all rows of one array, in tasks for any number of threads, and notes what is wrong with them.

    Chunks that were never written are skipped. Virtual arrays are read as others are: even if the arrays that they are
    made of can be read, they may lie elsewhere, or be something else, than the virtual one declares.

    Args:
        layout: the array.
        finite: count numbers that are NaN or infinite.

    Attributes:
        n_decoded: bytes that were decoded.
    """

    def __init__(self, layout: ArrayLayout, *, finite: bool) -> None:
        self.n_decoded = 0
        self._layout = layout
        self._finite = finite
        self._lock = threading.Lock()
        self._broken: dict[int, Exception] = {}  # by the first row that was read
        self._unreadable: Exception | None = None
        self._found = _NotFinite(layout.n_rows, counts=finite)

    def tasks(self) -> Iterator[BulkTask]:
        """Yield what has to be read."""
        layout = self._layout
        is_stored = layout.n_stored_bytes or layout.storage == "virtual"
        if not is_stored or not layout.row_bytes or not layout.n_rows:
            return
        source: SlabSource | None = None
        if kind_of(layout.dtype) in ("number", "compound"):
            source = open_source(layout, OPTIONS, max(1, STEP_BYTES // layout.row_bytes), Counters())
        size = layout.rows_per_chunk if layout.chunks else max(1, STEP_BYTES // layout.row_bytes)
        step = max(1, STEP_BYTES // (size * layout.row_bytes)) * size
        starts = np.arange(0, layout.n_rows, step)
        if layout.table is not None and not (self._finite and _fill_is_infinite(layout)):
            written = np.flatnonzero(layout.table.offsets >= 0) // layout.table.per_row * size
            starts = np.unique(written // step) * step
        share = layout.n_stored_bytes / layout.n_rows
        for start in starts.tolist():
            rows = range(start, min(start + step, layout.n_rows))
            n_decoded = -(-len(rows) // size) * size * layout.row_bytes
            yield BulkTask(round(len(rows) * share), n_decoded, partial(self._read, source, rows, size))

    def problems(self) -> Iterator[Problem]:
        """Yield what was found, once all tasks are done."""
        path, key, found = self._layout.path, self._layout.key, self._found
        if self._unreadable is not None:
            yield error(path, key, "decode", self._unreadable)
        for first, why in sorted(self._broken.items())[:MAX_PROBLEMS]:
            if is_of_memory(why):
                text = f"no memory is left to read it from row {first:,} on: {f'{why}' or type(why).__name__}"
                yield error(path, key, "memory", text)
            elif self._layout.storage == "virtual":
                text = (
                    f"it is virtual, and cannot be read from row {first:,} on: {why.__cause__ or why}. Look at what it "
                    "is made of: arrays of that size, not members of tables, whose values can be made what it holds"
                )
                yield error(path, key, "virtual", text)
            else:
                yield error(path, key, "decode", why)
        if (more := len(self._broken) - MAX_PROBLEMS) > 0:
            yield error(path, key, "decode", f"{more:,} more pieces of it cannot be read")
        if found.n_nan or found.n_infinite:
            text = f"{found.n_nan:,} NaN and {found.n_infinite:,} infinite values, the first in row {found.first}"
            yield error(path, key, "not finite", text)

    def _read(self, source: SlabSource | None, rows: range, size: int) -> None:
        """Read rows; if that fails, those of each chunk by themselves, so that each damaged one is named."""
        if self._unreadable is not None:
            return
        try:
            found = self._read_once(source, rows)
            with self._lock:
                self.n_decoded += len(rows) * self._layout.row_bytes
                self._found.add(found)
        except Exception as why:  # of any kind: all that is wrong with a file belongs into the report
            if len(rows) > size:
                for start in range(rows.start, rows.stop, size):
                    self._read(source, range(start, min(start + size, rows.stop)), size)
                return
            with self._lock:
                if isinstance(why, OSError) and not isinstance(why, H5CorruptError):
                    self._unreadable = why  # the file, or its disk: the same for every chunk
                else:
                    self._broken[rows.start] = why

    def _read_once(self, source: SlabSource | None, rows: range) -> _NotFinite:
        layout, found = self._layout, _NotFinite(self._layout.n_rows, counts=self._finite)
        if source is None:
            open_reader(layout, OPTIONS).read(np.arange(rows.start, rows.stop))
            return found
        step = max(1, MAX_ROWS_BYTES // layout.row_bytes)
        for start in range(rows.start, rows.stop, step):
            for task in bulk_tasks(source, layout, range(start, min(start + step, rows.stop)), found, start):
                task.run()
        return found


class _NotFinite:
    """A ``BulkTarget`` that counts what is not finite, and keeps no row.

    Args:
        n_rows: of the array.
        counts: whether it counts at all.

    Attributes:
        n_nan: values that are no number.
        n_infinite: infinite values.
        first: first row that has one of them.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, n_rows: int, *, counts: bool) -> None:
        self.n_nan, self.n_infinite, self.first = 0, 0, n_rows
        self._counts = counts

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        for numbers in _numbers(rows) if self._counts else ():
            is_finite = np.isfinite(numbers)
            if not is_finite.all():
                n_nan = int(np.isnan(numbers).sum())
                self.n_nan += n_nan
                self.n_infinite += int(is_finite.size - is_finite.sum()) - n_nan
                rows_with = np.flatnonzero(~is_finite.reshape(len(numbers), -1).all(axis=1))
                self.first = min(self.first, start + int(rows_with[0]))

    def add(self, other: _NotFinite) -> None:
        """Add what was counted in other rows."""
        self.n_nan += other.n_nan
        self.n_infinite += other.n_infinite
        self.first = min(self.first, other.first)


def _numbers(rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield what of rows may be infinite: they themselves, or members of a table."""
    for name in rows.dtype.names or ():
        yield from _numbers(rows[name])
    if rows.dtype.kind in "fc":
        yield rows


def _fill_is_infinite(layout: ArrayLayout) -> bool:
    if len(layout.fill) != layout.stored.itemsize:
        return False
    fill = np.frombuffer(layout.fill, layout.stored).reshape(1, *layout.stored.shape)
    return any(not np.isfinite(numbers).all() for numbers in _numbers(fill))

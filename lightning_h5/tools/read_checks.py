"""Reading all rows of an array, to see whether every chunk decodes, and whether its numbers are finite."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, OpenOptions, kind_of
from ..readers import BlockSource, BulkTask, ChunkLoader, bulk_tasks, open_reader, open_source
from .file_checks import Problem, error, is_of_memory

__all__ = ["ArrayReading"]

OPTIONS = OpenOptions()
STEP_BYTES = 4 << 20  # decoded bytes of a task
LARGE_BLOCK = 64 << 20  # a block above is decoded a chunk at a time, and its rows are not put together
STRETCH_BYTES = 1 << 30  # of such a block where its rows are wanted
MOST = 10  # problems of an array that are told one by one


class ArrayReading:
    """Reads all rows of one array, in tasks for any number of threads, and notes what is wrong with them.

    Chunks that were never written are passed over. Virtual arrays are read as others are: that the arrays that they are
    made of can be read says nothing of whether they lie where, and are what, the virtual one says.

    Args:
        layout: the array.
        finite: count numbers that are NaN or infinite.

    Attributes:
        n_decoded: bytes that were decoded.
    """

    def __init__(self, layout: ArrayLayout, *, finite: bool) -> None:
        self.n_decoded = 0
        self._layout = layout
        self._finite = finite and _may_be_infinite(layout.dtype)
        self._lock = threading.Lock()
        self._broken: dict[int, Exception] = {}  # by the first row that was read
        self._gone: Exception | None = None
        self._found = _NotFinite(layout.n_rows)

    def tasks(self) -> Iterator[BulkTask]:
        """What has to be read."""
        layout = self._layout
        is_stored = layout.n_stored_bytes or layout.storage == "virtual"
        if not is_stored or not layout.row_bytes or not layout.n_rows:
            return
        if layout.offset is not None and _ends_behind_the_file(layout):  # its metadata said so already
            return
        source: BlockSource | None = None
        if kind_of(layout.dtype) in ("number", "compound"):
            try:
                source = open_source(layout, OPTIONS, max(1, STEP_BYTES // layout.row_bytes), Counters())
            except H5CorruptError:  # likewise, of a chunk
                return
        size = layout.rows_per_chunk if layout.chunks else max(1, STEP_BYTES // layout.row_bytes)
        step = max(1, STEP_BYTES // (size * layout.row_bytes)) * size
        if layout.table is None or (self._finite and _fill_is_infinite(layout)):
            starts = np.arange(0, layout.n_rows, step)
        else:
            written = np.flatnonzero(layout.table.offsets >= 0) // layout.table.per_row * size
            starts = np.unique(written // step) * step
        share = layout.n_stored_bytes / layout.n_rows
        for start in starts.tolist():
            rows = range(start, min(start + step, layout.n_rows))
            n_decoded = -(-len(rows) // size) * size * layout.row_bytes
            yield BulkTask(round(len(rows) * share), n_decoded, partial(self._read, source, rows, size))

    def problems(self) -> Iterator[Problem]:
        """What was found; once all tasks are done."""
        layout, found = self._layout, self._found
        if self._gone is not None:
            yield error(layout.path, layout.key, "decode", self._gone)
        for first, why in sorted(self._broken.items())[:MOST]:
            if is_of_memory(why):
                text = f"there is no memory to read it from row {first:,} on: {f'{why}' or type(why).__name__}"
                yield error(layout.path, layout.key, "memory", text)
            elif layout.storage == "virtual":
                text = (
                    f"it is virtual, and cannot be read from row {first:,} on: {why.__cause__ or why}. Look at what it "
                    "is made of: arrays of that size, not members of tables, whose values can be made what it holds"
                )
                yield error(layout.path, layout.key, "virtual", text)
            else:
                yield error(layout.path, layout.key, "decode", why)
        if (more := len(self._broken) - MOST) > 0:
            yield error(layout.path, layout.key, "decode", f"{more:,} more pieces of it cannot be read")
        if found.n_nan or found.n_infinite:
            text = f"{found.n_nan:,} NaN and {found.n_infinite:,} infinite values, the first in row {found.first}"
            yield error(layout.path, layout.key, "not finite", text)

    def _read(self, source: BlockSource | None, rows: range, size: int) -> None:
        """Reads rows; where they cannot be, block by block, so that each block that is damaged is named."""
        if self._gone is not None:
            return
        try:
            found = self._read_once(source, rows, size)
            with self._lock:
                self.n_decoded += len(rows) * self._layout.row_bytes
                self._found.add(found)
        except Exception as why:  # of any kind: who checks a file wants to hear of it, and of all others
            if len(rows) > size:
                for start in range(rows.start, rows.stop, size):
                    self._read(source, range(start, min(start + size, rows.stop)), size)
                return
            with self._lock:
                if isinstance(why, OSError) and not isinstance(why, H5CorruptError):
                    self._gone = why  # the file, or its disk: the same for every chunk
                else:
                    self._broken[rows.start] = why

    def _read_once(self, source: BlockSource | None, rows: range, size: int) -> _NotFinite:
        layout, found = self._layout, _NotFinite(self._layout.n_rows, looks=self._finite)
        block_bytes = size * layout.row_bytes
        if source is None:
            open_reader(layout, OPTIONS).read(np.arange(rows.start, rows.stop))
        elif isinstance(source, ChunkLoader) and block_bytes > LARGE_BLOCK and not self._finite:
            # Any row of a block takes the decoding of all its chunks, of which one is held at a time.
            one_row = np.empty((1, *layout.row_shape), layout.dtype)
            for block in range(rows.start // size, -(-rows.stop // size)):
                source.pick(block, np.zeros(1, dtype=np.int64), one_row)
        else:
            step = len(rows) if block_bytes <= STRETCH_BYTES else max(1, STRETCH_BYTES // layout.row_bytes)
            for start in range(rows.start, rows.stop, step):
                for task in bulk_tasks(source, layout, range(start, min(start + step, rows.stop)), found, start):
                    task.run()
        return found


class _NotFinite:
    """A ``BulkTarget`` that counts what is not finite, and keeps no row.

    Args:
        n_rows: of the array.
        looks: whether it counts at all.

    Attributes:
        n_nan: values that are no number.
        n_infinite: infinite values.
        first: first row that has one of them.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, n_rows: int, *, looks: bool = True) -> None:
        self.n_nan, self.n_infinite, self.first = 0, 0, n_rows
        self._looks = looks

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        for numbers in _numbers(rows) if self._looks else ():
            is_there = np.isfinite(numbers)
            if not is_there.all():
                n_nan = int(np.isnan(numbers).sum())
                self.n_nan += n_nan
                self.n_infinite += int(is_there.size - is_there.sum()) - n_nan
                rows_with = np.flatnonzero(~is_there.reshape(len(numbers), -1).all(axis=1))
                self.first = min(self.first, start + int(rows_with[0]))

    def add(self, other: _NotFinite) -> None:
        """Adds what was counted in other rows."""
        self.n_nan += other.n_nan
        self.n_infinite += other.n_infinite
        self.first = min(self.first, other.first)


def _ends_behind_the_file(layout: ArrayLayout) -> bool:
    try:
        return (layout.offset or 0) + layout.n_rows * layout.stored_row_bytes > os.path.getsize(layout.path)
    except OSError:
        return False  # said with more words when it is opened


def _may_be_infinite(dtype: np.dtype[Any]) -> bool:
    base = dtype.base
    if base.names is not None:
        return any(_may_be_infinite(base[name]) for name in base.names)
    return base.kind in "fc"


def _numbers(rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """What of rows may be infinite: they themselves, or members of a table."""
    if rows.dtype.names is None:
        if rows.dtype.kind in "fc":
            yield rows
        return
    for name in rows.dtype.names:
        yield from _numbers(rows[name])


def _fill_is_infinite(layout: ArrayLayout) -> bool:
    if len(layout.fill) != layout.stored.itemsize:
        return False
    fill = np.frombuffer(layout.fill, layout.stored).reshape(1, *layout.stored.shape)
    return any(not np.isfinite(numbers).all() for numbers in _numbers(fill))

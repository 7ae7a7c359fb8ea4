"""Problems, and the check of rows: reading and decoding each chunk of an array."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...counters import Counters
from ...errors import H5CorruptError
from ...hdf5 import ArrayLayout, OpenOptions, kind_of
from ...readers import BlockSource, BulkTask, bulk_tasks, open_reader, open_source

__all__ = ["ArrayDecoder", "Problem", "error", "is_of_memory", "warning"]

STEP_BYTES = 4 << 20  # decoded bytes per task
MAX_ROWS_BYTES = 1 << 30  # decoded bytes of rows that share chunks and are assembled together
MAX_PROBLEMS = 10  # reported one by one for each array


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error or possible problem of a file.

    Attributes:
        file: the file.
        array: the array, or another name in the file; None for the whole file.
        kind: one or two words, the same for all problems of this kind.
        text: a description in one or two sentences.
        severity: "error" if rows cannot be read as they were written, otherwise "warning".
    """

    file: str
    array: str | None
    kind: str
    text: str
    severity: Literal["error", "warning"] = "error"


def error(file: str, array: str | None, kind: str, text: object) -> Problem:
    """Return an error: rows cannot be read as they were written."""
    return Problem(file=file, array=array, kind=kind, text=f"{text}")


def warning(file: str, array: str | None, kind: str, text: object) -> Problem:
    """Return a warning."""
    return Problem(file=file, array=array, kind=kind, text=f"{text}", severity="warning")


def is_of_memory(why: BaseException | None) -> bool:
    """Return whether an error came from a lack of memory, which can happen with an intact file."""
    while why is not None:
        if isinstance(why, MemoryError):
            return True
        why = why.__cause__
    return False


class ArrayDecoder:
    """Reads all rows of one array, in tasks for any number of threads, and collects problems.

    Chunks that were never written are skipped. Virtual arrays are read like others: even if their sources can be read,
    the sources may have moved, or differ from the declaration of the virtual array.

    Args:
        layout: the array.

    Attributes:
        n_decoded: bytes that were decoded.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self.n_decoded = 0
        self._layout = layout
        self._lock = threading.Lock()
        self._broken: dict[int, Exception] = {}  # by first row
        self._unreadable: Exception | None = None

    def tasks(self) -> Iterator[BulkTask]:
        """Yield tasks that read all rows."""
        layout = self._layout
        is_stored = layout.n_stored_bytes or layout.storage == "virtual"
        if not is_stored or not layout.row_bytes or not layout.n_rows:
            return
        run = max(1, STEP_BYTES // layout.row_bytes)
        source: BlockSource | None = None
        if kind_of(layout.dtype) in ("number", "compound"):
            source = open_source(layout, OpenOptions(), run, Counters())
        size = layout.rows_per_chunk if layout.chunks else run
        step = max(1, STEP_BYTES // (size * layout.row_bytes)) * size
        starts = np.arange(0, layout.n_rows, step)
        if layout.table is not None:
            written = np.flatnonzero(layout.table.offsets >= 0) // layout.table.per_row * size
            starts = np.unique(written // step) * step
        share = layout.n_stored_bytes / layout.n_rows
        for start in starts.tolist():
            rows = range(start, min(start + step, layout.n_rows))
            n_decoded = -(-len(rows) // size) * size * layout.row_bytes
            yield BulkTask(round(len(rows) * share), n_decoded, partial(self._read, source, rows, size))

    def problems(self) -> Iterator[Problem]:
        """Yield the problems found, once all tasks are done."""
        path, key = self._layout.path, self._layout.key
        if self._unreadable is not None:
            yield error(path, key, "decode", self._unreadable)
        for first, why in sorted(self._broken.items())[:MAX_PROBLEMS]:
            if is_of_memory(why):
                text = f"no memory is left to read it from row {first:,} on: {f'{why}' or type(why).__name__}"
                yield error(path, key, "memory", text)
            elif isinstance(why.__cause__, UnicodeDecodeError):  # an older encoding, which is no damage
                yield warning(path, key, "text", why)
            elif self._layout.storage == "virtual":
                text = (
                    f"it is virtual, and cannot be read from row {first:,} on: {why.__cause__ or why}. Check its "
                    "sources: they must be arrays of that size, not members of tables, with values that convert to "
                    "its dtype"
                )
                yield error(path, key, "virtual", text)
            else:
                yield error(path, key, "decode", why)
        if (n_more := len(self._broken) - MAX_PROBLEMS) > 0:
            yield error(path, key, "decode", f"{n_more:,} more pieces of it cannot be read")

    def _read(self, source: BlockSource | None, rows: range, size: int) -> None:
        """Read rows; after an error, read chunk by chunk, so that each damaged chunk is named."""
        if self._unreadable is not None:
            return
        try:
            self._read_once(source, rows)
            with self._lock:
                self.n_decoded += len(rows) * self._layout.row_bytes
        except Exception as why:  # any exception belongs in the report
            if len(rows) > size:
                for start in range(rows.start, rows.stop, size):
                    self._read(source, range(start, min(start + size, rows.stop)), size)
                return
            with self._lock:
                if isinstance(why, OSError) and not isinstance(why, H5CorruptError):
                    self._unreadable = why  # the file or the disk fails: the same for every chunk
                else:
                    self._broken[rows.start] = why

    def _read_once(self, source: BlockSource | None, rows: range) -> None:
        layout = self._layout
        if source is None:
            open_reader(layout, OpenOptions()).read(np.arange(rows.start, rows.stop))
            return
        step = max(1, MAX_ROWS_BYTES // layout.row_bytes)
        for start in range(rows.start, rows.stop, step):
            for task in bulk_tasks(source, layout, range(start, min(start + step, rows.stop)), _Nowhere(), start):
                task.run()


class _Nowhere:
    """A ``BulkTarget`` that keeps no row."""

    array: npt.NDArray[Any] | None = None

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""

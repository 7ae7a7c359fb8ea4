"""Rows of an array as bytes, piece by piece, in bounded memory: what they mean does not matter for a copy."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ...files import ArrayLayout, OpenOptions
from ...files.chunks import ChunkTable
from ...readers import SlotMemory, open_source, why_plain
from ...stats import Counters
from .raw_array import Bytes, RawArray, chunks_of, raw_layout, read_region, written_anywhere

__all__ = ["PIECE_BYTES", "read_pieces"]

PIECE_BYTES = 32 << 20  # read at a time, twice: the next piece is read while one is written
MOST_IN_MEMORY = 64 << 20  # rows that have to be decoded together and take more are put together in a temporary file,
MOST_IN_FILE = 1 << 30  # up to here; of more, a part at a time, and all is decoded for each part
TASK_BYTES = 1 << 20
MOST_INDICES = 1 << 16  # of rows that a reader is asked for: each thread holds some words for each

Task: TypeAlias = Callable[[], None]


class _Source(Protocol):
    """Where rows come from: ``step`` of them are decoded together."""

    step: int

    def tasks(self, start: int, stop: int, out: Bytes) -> list[Task]:
        """What reads rows into memory, of which there is enough for whole steps."""
        ...

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Which of these rows were ever written: the first of each run, and the one after its last."""
        ...


def read_pieces(
    array: RawArray, pool: Executor, folder: str, *, with_unwritten: bool = False
) -> Iterator[tuple[int, Bytes]]:
    """Rows in storage order, as ``(first row, rows)`` with rows of shape ``(n, row_bytes)``.

    Rows that were never written, whole chunks of them, are left out. Memory is used again: what was given is valid
    until the next is asked for. Decodes each chunk once, unless rows that share chunks take more than a GiB.

    Args:
        array: with rows of at least a byte.
        pool: threads that decode.
        folder: for a temporary file, where rows that share chunks do not fit in memory.
        with_unwritten: give these, too, as they read, if any row was written.

    Raises:
        H5CorruptError: a chunk cannot be decoded, or its index is damaged.
        H5FileError: a filter is not installed, or the file cannot be read.
    """
    source = _source_of(array)
    n_rows = _rows_per_piece(array, source.step)
    spans = [(start, min(start + n_rows, array.n_rows)) for start in range(0, array.n_rows, n_rows)]
    written = [span for span in spans if next(source.runs(*span), None)]
    if not written:
        return
    spans = spans if with_unwritten else written
    whole = -(-min(n_rows, array.n_rows) // source.step) * source.step  # also the last rows' memory is of whole steps
    n_bytes = max(n_rows if n_rows < source.step else whole, 1) * array.row_bytes
    in_memory = n_bytes <= MOST_IN_MEMORY
    free = deque(_memory(n_bytes, folder, in_memory) for _ in range(min(len(spans), 2 if in_memory else 1)))
    todo, ahead = deque(spans), deque[tuple[int, int, Bytes, list[Future[None]]]]()
    try:
        while todo or ahead:
            while todo and free:
                (start, stop), memory = todo.popleft(), free.popleft()
                tasks = source.tasks(start, stop, memory)
                ahead.append((start, stop, memory, [pool.submit(task) for task in tasks]))
            start, stop, memory, futures = ahead.popleft()
            for future in futures:
                future.result()
            rows = memory[: (stop - start) * array.row_bytes].reshape(stop - start, -1)
            for first, last in [(start, stop)] if with_unwritten else source.runs(start, stop):
                yield first, rows[first - start : last - start]
            free.append(memory)
    finally:
        left = [future for *_, futures in ahead for future in futures]
        for future in left:
            future.cancel()
        wait(left)  # they write to memory that is about to go


def _rows_per_piece(array: RawArray, step: int) -> int:
    step_bytes = step * array.row_bytes
    if step_bytes <= PIECE_BYTES:
        return PIECE_BYTES // step_bytes * step
    return step if step_bytes <= MOST_IN_FILE else max(1, MOST_IN_FILE // array.row_bytes)


def _memory(n_bytes: int, folder: str, in_memory: bool) -> Bytes:
    if in_memory:
        return np.empty(n_bytes, dtype=np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)  # no room is an error now, and a SIGBUS later
        return np.frombuffer(mmap.mmap(file.fileno(), n_bytes), dtype=np.uint8)


def _source_of(array: RawArray) -> _Source:
    layout = raw_layout(array)
    if layout is None or why_plain(layout) is not None:
        return _LibrarySource(array)
    return _DecodedSource(array, layout)


class _DecodedSource:
    """Rows by the package's own readers, without the HDF5 library's lock."""

    def __init__(self, array: RawArray, layout: ArrayLayout) -> None:
        n_together = max(1, min(MOST_INDICES, TASK_BYTES // array.row_bytes))
        self._source = open_source(layout, OpenOptions(), n_together, Counters())
        self._shape, self._dtype, self._row_bytes = layout.axes, layout.dtype, array.row_bytes
        self.step = self._source.rows_per_slab
        self._has_rows = None if layout.table is None else _written_slabs(layout.table)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """See ``_Source.runs``."""
        if self._has_rows is None:
            yield start, stop
            return
        first, step = start // self.step, self.step
        written = self._has_rows[first : -(-stop // step)]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], written, [False]]))) + first
        for low, high in edges.reshape(-1, 2).tolist():
            yield max(start, low * step), min(stop, high * step)

    def tasks(self, start: int, stop: int, out: Bytes) -> list[Task]:
        """See ``_Source.tasks``; tasks of about a MiB, that parts of large slabs are shared among threads, too."""
        source, size = self._source, self.step
        rows = out[: len(out) // self._row_bytes * self._row_bytes].view(self._dtype).reshape(-1, *self._shape)
        if start % size or (stop % size and stop < source.n_rows):
            return [partial(self._pick, start, stop, rows)]
        slabs = range(start // size, -(-stop // size))
        together = max(1, TASK_BYTES // (size * self._row_bytes))
        tasks: list[Task] = []
        for at in range(0, len(slabs), together):
            some = slabs[at : at + together]
            memory = SlotMemory(rows, (np.arange(len(some)) + at) * size, size)
            step = source.n_parts if together > 1 else max(1, source.parts_together)
            for part in range(0, source.n_parts, step):
                parts = range(part, min(part + step, source.n_parts))
                tasks.append(partial(source.load, list(some), parts, memory))
        return tasks

    def _pick(self, start: int, stop: int, rows: npt.NDArray[Any]) -> None:
        at = start
        while at < stop:
            slab = at // self.step
            end = min(stop, (slab + 1) * self.step)
            within = np.arange(at, end) - slab * self.step
            self._source.pick(slab, within, rows[at - start : end - start])
            at = end


def _written_slabs(table: ChunkTable) -> npt.NDArray[np.bool_]:
    written: npt.NDArray[np.bool_] = np.any((table.offsets >= 0).reshape(table.grid[0], -1), axis=1)
    return written


class _LibrarySource:
    """Rows by the HDF5 library, which knows all filters and all storage, on one core."""

    def __init__(self, array: RawArray) -> None:
        self._array = array
        chunks = chunks_of(array.id)
        step_bytes = (chunks[0] if chunks else 1) * array.row_bytes
        self.step = chunks[0] if chunks and step_bytes <= MOST_IN_MEMORY else max(1, TASK_BYTES // array.row_bytes)
        self._has_rows = written_anywhere(array.id)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """See ``_Source.runs``."""
        if self._has_rows:
            yield start, stop

    def tasks(self, start: int, stop: int, out: Bytes) -> list[Task]:
        """See ``_Source.tasks``."""
        array = self._array
        shape = (stop - start, *array.shape[1:])
        return [partial(read_region, array, (start, *(0,) * (len(shape) - 1)), shape, out)]

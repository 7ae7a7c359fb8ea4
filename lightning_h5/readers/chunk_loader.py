"""Where the rows of a slab come from: chunks that are read and decoded here, or another reader.

A slab is what is decoded together: the rows of one array that share their chunks, or a run of rows where there are no
chunks. All sources of a field write the same memory layout: rows one after the other, in native byte order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, process_pool
from ..types import IntArray
from .base import LayoutReader
from .chunk_cache import SlotMemory, scratch
from .filters import ChunkLoop, Pipeline
from .raw_io import read_stored

__all__ = ["Change", "ChunkLoader", "PreparedSource", "ReaderSource", "SlabSource"]

TASK_BYTES = 1 << 20  # decoded bytes of a task, a millisecond's work: less costs more in taking turns
MAX_LINE_BYTES = 2 << 20


class Change(Protocol):
    """What is done to rows, each by itself, as they are read.

    Attributes:
        takes_at_once: copying costs little more with the change than without.
    """

    @property
    def takes_at_once(self) -> bool:
        """See the class."""
        ...

    def __call__(self, rows: npt.NDArray[Any]) -> None:
        """Changes rows in place; they lie in one piece."""
        ...

    def take(self, rows: npt.NDArray[Any], places: IntArray | None, out: npt.NDArray[Any]) -> None:
        """Copies rows, and changes the copies.

        Args:
            rows: shape ``(n_rows, *row_shape)``.
            places: which of them, shape ``(n,)``; None for all, in their order.
            out: shape ``(n, *row_shape)``, in one piece; of the same dtype or another.
        """
        ...


class SlabSource(Protocol):
    """Rows of one array, a slab at a time.

    Attributes:
        n_rows: rows of the array.
        rows_per_slab: rows of a slab; the last one may have fewer.
        n_parts: parts that a slab is loaded in, by as many threads.
        parts_together: parts that are best loaded by the same thread.
        picks_rows: rows of a slab can be read without the others.
    """

    n_rows: int
    rows_per_slab: int
    n_parts: int
    parts_together: int
    picks_rows: bool

    def load(self, slabs: Sequence[int], parts: range, memory: SlotMemory) -> None:
        """Loads the same parts of some slabs.

        Args:
            slabs: the slabs.
            parts: numbers of the parts, from 0 to ``n_parts - 1``.
            memory: for each slab its rows.

        Raises:
            H5CorruptError: bytes are missing, or do not decode.
            H5FileError: the file cannot be read.
        """
        ...

    def pick(self, slab: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """Reads rows of a slab that is too large to be kept; ``rows`` are counted inside it."""
        ...


class ReaderSource:
    """Slabs that another reader reads.

    Args:
        reader: reads the array.
        rows_per_slab: rows of a slab.
    """

    n_parts = 1

    def __init__(self, reader: LayoutReader, rows_per_slab: int) -> None:
        self._reader = reader
        self.n_rows, self.rows_per_slab = len(reader), rows_per_slab
        self.picks_rows = reader.layout.is_placed
        self.parts_together = max(1, TASK_BYTES // max(1, rows_per_slab * reader.layout.row_bytes))

    def load(self, slabs: Sequence[int], parts: range, memory: SlotMemory) -> None:
        """See ``SlabSource.load``."""
        for slab, rows in zip(slabs, memory, strict=True):
            first = slab * self.rows_per_slab
            last = min(first + self.rows_per_slab, self.n_rows)
            self._reader.read(np.arange(first, last), rows[: last - first])

    def pick(self, slab: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``SlabSource.pick``."""
        out[...] = self._reader.read(slab * self.rows_per_slab + rows)


class PreparedSource:
    """Slabs of another source, with something done to their rows as soon as they are there.

    Args:
        source: loads slabs in one part each.
        prepare: changes rows in place.
    """

    n_parts = 1

    def __init__(self, source: SlabSource, prepare: Change) -> None:
        if source.n_parts != 1:
            raise ValueError(f"slabs of {source.n_parts} parts are never there as a whole")
        self._source, self._prepare = source, prepare
        self.n_rows, self.rows_per_slab = source.n_rows, source.rows_per_slab
        self.parts_together, self.picks_rows = source.parts_together, source.picks_rows

    def load(self, slabs: Sequence[int], parts: range, memory: SlotMemory) -> None:
        """See ``SlabSource.load``."""
        self._source.load(slabs, parts, memory)
        for slab, rows in zip(slabs, memory, strict=True):
            self._prepare(rows[: self.n_rows - slab * self.rows_per_slab])

    def pick(self, slab: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``SlabSource.pick``."""
        self._source.pick(slab, rows, out)
        self._prepare(out)


class ChunkLoader:
    """Slabs whose chunks are read by position and decoded here, without the HDF5 library's lock.

    Args:
        layout: a chunked array that a ``Pipeline`` can decode.
        counters: where bytes read and decoded are counted.

    Raises:
        H5CorruptError: the chunk index names bytes that the file does not have.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters) -> None:
        if layout.table is None or layout.chunks is None:
            raise ValueError(f"{layout.key!r} has no chunk table: {layout.plain_reason}")
        self._layout, self._table, self._counters = layout, layout.table, counters
        self._chunks, self._pipeline = layout.chunks, Pipeline(layout)
        self.n_rows, self.rows_per_slab = layout.n_rows, layout.chunks[0]
        self.n_parts = layout.table.per_row
        self.picks_rows = False
        self._chunk_bytes = layout.chunk_bytes
        self._per_line = max(1, layout.table.grid[-1]) if len(layout.chunks) > 1 else 1
        self.parts_together = _parts_together(self._chunk_bytes, self._per_line)
        # A chunk of numbers that holds whole rows is decoded straight into the slab.
        self._is_direct = layout.chunks[1:] == layout.axes and not layout.members and layout.stored.base.isnative
        self._fill = np.ndarray((1,), layout.stored, layout.fill)[0]
        self._word = _widest_word(layout)
        self._loop: ChunkLoop | None = None
        self._check_places()

    def compile(self) -> None:
        """Has compiled what reads and decodes, where it can be (see ``Pipeline.compile``)."""
        if self._layout.digests is None:  # these want to see the bytes as they are stored
            self._loop = self._pipeline.compile()

    def load(self, slabs: Sequence[int], parts: range, memory: SlotMemory) -> None:
        """See ``SlabSource.load``."""
        began = perf_counter()
        if self._is_direct:
            self._decode(slabs, *memory.octets())
        else:
            self._load_parts(slabs, parts, memory)
        self._counters.add(decode_seconds=perf_counter() - began)

    def _load_parts(self, slabs: Sequence[int], parts: range, memory: SlotMemory) -> None:
        """Slabs of chunks that hold parts of rows."""
        lines = [
            (slab * self.n_parts, line, rows)
            for slab, rows in zip(slabs, memory, strict=True)
            for line in _lines(parts, self._per_line)
        ]
        # A slab may have many chunks: those that are decoded together are as few as a task of the pool has.
        n = max(1, TASK_BYTES // max(1, self._per_line * self._chunk_bytes))
        for some in (lines[start : start + n] for start in range(0, len(lines), n)):
            values, at = self._values([first + part for first, line, _ in some for part in line]), 0
            for _, line, rows in some:
                self._load_line(values[at : at + len(line)], line[0], rows)
                at += len(line)

    def pick(self, slab: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``SlabSource.pick``; holds one chunk at a time."""
        began = perf_counter()
        for part in range(self.n_parts):
            (values,) = self._values([slab * self.n_parts + part])
            region = self._region(part)
            inside: tuple[Any, ...] = tuple(slice(0, s.stop - s.start) for s in region)
            out[(slice(None), *region)] = values[(rows, *inside)]
        self._counters.add(decode_seconds=perf_counter() - began)

    def _load_at_once(self, chunks: Sequence[int], out: npt.NDArray[np.uint8], firsts: IntArray) -> bool:
        """Reads and decodes chunks to places in memory in one call of compiled code.

        False where there is none, or where it did not go well: the other way then says what is wrong.
        """
        if self._loop is None or not self._is_plain(chunks):
            return False
        layout, sizes = self._layout, self._table.sizes[chunks]
        with process_pool().descriptor(layout.path, layout.guard) as fd:
            took = self._loop(fd, self._table.offsets[chunks], sizes, self._chunk_bytes, out, firsts)
        if took is None:
            return False
        self._count(int(sizes.sum()), len(chunks), len(chunks), took)
        return True

    def _count(self, n_bytes: int, n_chunks: int, n_there: int, took: float) -> None:
        """Counts chunks that were read, in so many seconds, and are decoded; those that are not there are filled."""
        self._counters.add(
            bytes_read=n_bytes,
            bytes_decoded=n_chunks * self._chunk_bytes,
            chunks_decoded=n_there,
            read_seconds=took,
            decode_seconds=-took,  # who decodes these counts the whole
        )

    def _decode(self, chunks: Sequence[int], out: npt.NDArray[np.uint8], firsts: IntArray) -> None:
        """Reads and decodes chunks to places in memory; those that were never written are filled."""
        if self._load_at_once(chunks, out, firsts):
            return
        layout, table, n_bytes = self._layout, self._table, self._chunk_bytes
        offsets, sizes, masks = table.offsets[chunks], table.sizes[chunks], table.masks[chunks]
        missing = offsets < 0
        if missing.any():
            for first in firsts[missing].tolist():
                piece = out[first : first + n_bytes]
                np.ndarray((n_bytes // layout.stored.itemsize,), layout.stored, piece)[...] = self._fill
            there = np.flatnonzero(~missing)
            offsets, sizes, masks, firsts = offsets[there], sizes[there], masks[there], firsts[there]
            n_chunks, chunks = len(chunks), np.asarray(chunks)[there].tolist()
        else:
            n_chunks = len(chunks)
        stops = sizes.cumsum()
        starts = stops - sizes
        data = scratch("stored", int(stops[-1]) if len(stops) else 0)
        began = perf_counter()
        if len(chunks):
            read_stored(layout, data, starts, stops, offsets, lambda i, at: self._name(chunks[i]))
        took = perf_counter() - began
        if layout.digests is not None:
            pieces = zip(chunks, starts.tolist(), stops.tolist(), masks.tolist(), strict=True)
            for chunk, start, stop, mask in pieces:
                layout.digests.check(int(chunk), data[start:stop], layout, mask=mask)
        self._count(len(data), n_chunks, len(chunks), took)
        failed = self._pipeline.decode_each(data, starts, stops, masks, out, firsts, n_bytes)
        if failed is not None:
            at, why = failed
            raise self._broken(chunks[at], int(sizes[at]), why) from (why if isinstance(why, Exception) else None)

    def _load_line(self, values: npt.NDArray[Any], part: int, rows: npt.NDArray[Any]) -> None:
        """Chunks that are neighbours along the last axis: short runs are then written a line at a time."""
        region = self._region(part)
        if not region:
            rows[: self._chunks[0]] = values[0]
            return
        *lead, last = region
        inside = (slice(None), slice(None), *(slice(0, s.stop - s.start) for s in lead))
        step, size, axis = self._chunks[-1], self._layout.axes[-1], len(self._chunks) - 1
        n_whole = min(len(values), (size - last.start) // step)  # the last one may hang over the edge
        middle = last.start + n_whole * step
        if n_whole:
            target, source = rows[(slice(self._chunks[0]), *lead, slice(last.start, middle))], values[:n_whole][inside]
            if self._word is not None:
                target, source = target.view(self._word), source.view(self._word)
            shape = (*target.shape[:axis], n_whole, -1, *target.shape[axis + 1 :])
            target.reshape(shape)[...] = np.moveaxis(source, 0, axis)  # an axis that is split is a view
        if n_whole < len(values):
            rest = (*inside[1:], slice(0, size - middle))
            rows[(slice(self._chunks[0]), *lead, slice(middle, size))] = values[n_whole][rest]

    def _values(self, chunks: Sequence[int]) -> npt.NDArray[Any]:
        """Values of chunks, members picked; in memory that the next call of this thread writes over."""
        layout, n_bytes = self._layout, self._chunk_bytes
        decoded, firsts = scratch("decoded", len(chunks) * n_bytes), np.arange(len(chunks)) * n_bytes
        self._decode(chunks, decoded, firsts)
        values: npt.NDArray[Any] = np.ndarray((len(chunks), *self._chunks), layout.stored, decoded)
        for member in layout.members:
            values = values[member]
        return values

    def _is_plain(self, chunks: Sequence[int]) -> bool:
        """Whether these chunks were all written, with all filters."""
        return not self._table.masks[chunks].any() and bool((self._table.offsets[chunks] >= 0).all())

    def _broken(self, chunk: int, n_bytes: int, why: object) -> H5CorruptError:
        return H5CorruptError(
            f"{self._name(chunk)} of {self._layout.key!r} in {self._layout.path!r} (byte "
            f"{self._table.offsets[chunk]:,}, {n_bytes:,} bytes) does not decode: {why}. "
            "The file is damaged there; copy it again, or write it again without these rows."
        )

    def _region(self, part: int) -> tuple[slice, ...]:
        """Where a part lies along the axes of a row."""
        region: list[slice] = []
        for n, step, size in zip(
            *(reversed(each) for each in (self._table.grid[1:], self._chunks[1:], self._layout.axes)), strict=True
        ):
            part, at = divmod(part, n)
            region.append(slice(at * step, min((at + 1) * step, size)))
        return tuple(reversed(region))

    def _name(self, chunk: int) -> str:
        first = int(chunk) // self.n_parts * self.rows_per_slab
        return f"chunk {int(chunk)} (rows {first} to {min(first + self.rows_per_slab, self.n_rows) - 1})"

    def _check_places(self) -> None:
        try:
            n_bytes = os.path.getsize(self._layout.path)
        except OSError:
            return  # said with more words when it is opened
        table = self._table
        wrong = np.flatnonzero((table.sizes > n_bytes) | (table.offsets > n_bytes - table.sizes))
        if len(wrong):
            chunk = int(wrong[0])
            raise H5CorruptError(
                f"{self._name(chunk)} of {self._layout.key!r} lies at byte {table.offsets[chunk]:,} with "
                f"{table.sizes[chunk]:,} bytes, and {self._layout.path!r} has {n_bytes:,}. It was truncated or "
                "damaged; copy it again."
            )


def _parts_together(part_bytes: int, per_line: int) -> int:
    """Chunks for one task: whole lines along the last axis, where that is not too much at a time."""
    n = max(1, TASK_BYTES // max(1, part_bytes))
    if n >= per_line:
        return n // per_line * per_line
    return per_line if per_line * part_bytes <= MAX_LINE_BYTES else n


def _lines(parts: range, per_line: int) -> Iterator[range]:
    """Parts that are neighbours along the last axis."""
    start = parts.start
    while start < parts.stop:
        stop = min(parts.stop, start // per_line * per_line + per_line)
        yield range(start, stop)
        start = stop


def _widest_word(layout: ArrayLayout) -> np.dtype[Any] | None:
    """An integer as wide as a chunk's rows along the last axis allow: short runs are copied a word at a time."""
    if layout.chunks is None or len(layout.chunks) < 2 or layout.members or not layout.stored.base.isnative:
        return None
    if layout.stored.shape or layout.stored.itemsize == 8:
        return None
    for n_bytes in (8, 4, 2):
        if n_bytes > layout.stored.itemsize and not any(
            size * layout.stored.itemsize % n_bytes for size in (layout.chunks[-1], layout.axes[-1])
        ):
            return np.dtype(f"u{n_bytes}")
    return None

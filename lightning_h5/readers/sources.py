"""Where the rows of a slab come from: chunks that are read and decoded here, or another reader.

A slab is what is decoded together: the rows of one array that share their chunks, or a run of rows where there are no
chunks. All sources of a field write the same memory layout: rows one after the other, in native byte order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import repeat
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError
from ..files import ArrayLayout
from ..stats import Counters
from ..types import IntArray
from .base import LayoutReader, address
from .codecs import Pipeline
from .decoders import NativeDecoder
from .slabs import SlotMemory
from .stored import read_stored

__all__ = ["Change", "ChunkSource", "PreparedSource", "ReaderSource", "SlabSource"]

TASK_BYTES = 1 << 20  # decoded bytes of a task, a millisecond's work: less costs more in taking turns
MOST_LINE_BYTES = 2 << 20


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


class _Stored(NamedTuple):
    """Some chunks as they are stored, one after the other in one piece of memory.

    Attributes:
        chunks: their numbers.
        data: their bytes.
        starts: where in ``data`` each begins; the same place as its end for one that was never written.
        stops: where it ends.
    """

    chunks: Sequence[int]
    data: npt.NDArray[np.uint8]
    starts: IntArray
    stops: IntArray

    def some(self, start: int, stop: int) -> _Stored:
        """Those from one place in the list to another."""
        return _Stored(self.chunks[start:stop], self.data, self.starts[start:stop], self.stops[start:stop])

    def pieces(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Each one's number and bytes."""
        for chunk, start, stop in zip(self.chunks, self.starts.tolist(), self.stops.tolist(), strict=True):
            yield chunk, self.data[start:stop]


_scratch = threading.local()  # memory of each thread; of all sources, since those of many files are read in turn


class ChunkSource:
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
        self._per_line = max(1, layout.table.grid[-1]) if len(layout.chunks) > 1 else 1
        self.parts_together = _parts_together(layout.chunk_bytes, self._per_line)
        # A chunk of numbers that holds whole rows is decoded straight into the slab.
        self._is_direct = layout.chunks[1:] == layout.axes and not layout.members and layout.stored.base.isnative
        self._fill = np.ndarray((1,), layout.stored, layout.fill)[0]
        self._word = _widest_word(layout)
        self._check_places()

    def load(self, slabs: Sequence[int], parts: range, memory: SlotMemory) -> None:
        """See ``SlabSource.load``."""
        began = perf_counter()
        if self._is_direct:
            self._load_direct(slabs, memory)
        else:
            self._load_parts(slabs, parts, memory)
        self._counters.add(decode_seconds=perf_counter() - began)

    def _load_parts(self, slabs: Sequence[int], parts: range, memory: SlotMemory) -> None:
        """Slabs of chunks that hold parts of rows."""
        stored = self._fetch([slab * self.n_parts + part for slab in slabs for part in parts])
        at = 0
        for rows in memory:
            for line in _lines(parts, self._per_line):
                self._load_line(stored.some(at, at + len(line)), line[0], rows)
                at += len(line)

    def _load_direct(self, slabs: Sequence[int], memory: SlotMemory) -> None:
        """Slabs of one chunk each, decoded where they belong."""
        stored = self._fetch(slabs)
        if (native := self._native(slabs)) is not None:
            self._decode_each(native, stored, memory.addresses())
            return
        for (slab, data), rows in zip(stored.pieces(), memory, strict=True):
            if self._table.offsets[slab] < 0:
                rows[...] = self._fill
            else:
                self._undo(slab, data, rows.reshape(-1).view(np.uint8))

    def pick(self, slab: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``SlabSource.pick``; holds one chunk at a time."""
        began = perf_counter()
        for part in range(self.n_parts):
            (values,) = self._values(self._fetch([slab * self.n_parts + part]))
            region = self._region(part)
            inside: tuple[Any, ...] = tuple(slice(0, s.stop - s.start) for s in region)
            out[(slice(None), *region)] = values[(rows, *inside)]
        self._counters.add(decode_seconds=perf_counter() - began)

    def _fetch(self, chunks: Sequence[int]) -> _Stored:
        """Chunks as they are stored, in memory that the next call of this thread writes over."""
        offsets, sizes = self._table.offsets[chunks], self._table.sizes[chunks]
        stops = sizes.cumsum()  # a chunk that was never written has no size
        starts = stops - sizes
        data = self._memory("stored", int(stops[-1]))
        there = (offsets >= 0).nonzero()[0]
        began = perf_counter()
        if len(there):
            pieces = starts[there], stops[there], offsets[there]
            read_stored(self._layout, data, *pieces, lambda i, at: self._name(chunks[there[i]]))
        took = perf_counter() - began
        if (digests := self._layout.digests) is not None:
            for at in there.tolist():
                chunk = int(chunks[at])
                piece, mask = data[starts[at] : stops[at]], int(self._table.masks[chunk])
                digests.check(chunk, piece, self._layout, mask=mask)
        self._counters.add(
            bytes_read=len(data),
            bytes_decoded=len(chunks) * self._layout.chunk_bytes,
            chunks_decoded=len(there),
            read_seconds=took,
            decode_seconds=-took,  # who decodes these counts the whole
        )
        return _Stored(chunks, data, starts, stops)

    def _load_line(self, stored: _Stored, part: int, rows: npt.NDArray[Any]) -> None:
        """Chunks that are neighbours along the last axis: short runs are then written a line at a time."""
        values, region = self._values(stored), self._region(part)
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

    def _values(self, stored: _Stored) -> npt.NDArray[Any]:
        """Values of chunks, members picked; in memory that the next call of this thread writes over."""
        layout, n_bytes, n = self._layout, self._layout.chunk_bytes, len(stored.chunks)
        decoded = self._memory("decoded", n * n_bytes)
        values: npt.NDArray[Any] = np.ndarray((n, *self._chunks), layout.stored, decoded)
        if (native := self._native(stored.chunks)) is not None:
            first = address(decoded)
            self._decode_each(native, stored, range(first, first + len(decoded), n_bytes))
        else:
            for at, (chunk, data) in enumerate(stored.pieces()):
                if self._table.offsets[chunk] < 0:
                    values[at] = self._fill
                else:
                    self._undo(chunk, data, decoded[at * n_bytes : (at + 1) * n_bytes])
        for member in layout.members:
            values = values[member]
        return values

    def _native(self, chunks: Sequence[int]) -> NativeDecoder | None:
        """The C function that decodes these chunks, where one does."""
        table, native = self._table, self._pipeline.native
        is_plain = native is not None and not table.masks[chunks].any() and (table.offsets[chunks] >= 0).all()
        return native if is_plain else None

    def _decode_each(self, native: NativeDecoder, stored: _Stored, targets: Sequence[int]) -> None:
        """Decodes chunks to addresses."""
        sources, sizes = address(stored.data) + stored.starts, stored.stops - stored.starts
        n_bytes = repeat(self._layout.chunk_bytes, len(targets))
        failed = native.each(list(zip(sources.tolist(), sizes.tolist(), targets, n_bytes, strict=True)))
        if failed is not None:
            raise self._broken(stored.chunks[failed[0]], int(sizes[failed[0]]), failed[1])

    def _undo(self, chunk: int, data: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        try:
            self._pipeline.decode(data, int(self._table.masks[chunk]), out)
        except Exception as error:
            raise self._broken(chunk, len(data), error) from error

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

    def _memory(self, name: str, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory of this thread, written over by the next call for the same use."""
        held: npt.NDArray[np.uint8] | None = getattr(_scratch, name, None)
        if held is None or len(held) < n_bytes:
            held = np.empty(n_bytes, dtype=np.uint8)
            setattr(_scratch, name, held)
        return held[:n_bytes]

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
    return per_line if per_line * part_bytes <= MOST_LINE_BYTES else n


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

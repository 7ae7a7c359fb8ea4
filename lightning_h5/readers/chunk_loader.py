"""The source of blocks of chunks that are read by position and decoded here, without the HDF5 library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5MemoryError
from ..hdf5 import ArrayLayout, check_piece, size_of
from ..sizes import bytes_text
from ..types import IntArray, cached_property
from .block_map import RowGrid
from .block_memory import BlockMemory, scratch
from .block_sources import TASK_BYTES
from .filters.pipeline import ChunkLoop, Pipeline
from .kept_chunks import KeptChunks, keeps_decoded
from .raw_io import forget_stored, give_back, prefetch_stored, read_stored, read_with

__all__ = ["ChunkLoader"]

MAX_LINE_BYTES = 2 << 20


class ChunkLoader:
    """Loads blocks from chunks that are read by position and decoded here, without the HDF5 library's lock.

    Args:
        layout: a chunked array that a ``Pipeline`` can decode.
        counters: counts bytes read and decoded.
        gives_back: chunks leave the system's page cache once they are decoded.

    Attributes:
        layout: the array.
        chunks: shape of a chunk.
        table: the positions of the chunks.

    Raises:
        H5CorruptError: the chunk index names bytes that the file does not have.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters, *, gives_back: bool = False) -> None:
        if layout.table is None or layout.chunks is None:
            raise ValueError(f"{layout.key!r} has no chunk table: {layout.plain_reason}")
        self.layout, self.table, self._counters = layout, layout.table, counters
        self._gives_back = gives_back
        self.chunks, self._pipeline = layout.chunks, Pipeline(layout)
        self.n_rows, self.rows_per_block = layout.n_rows, layout.chunks[0]
        self.grid = RowGrid.of(layout, self.rows_per_block)
        self.n_parts = layout.table.per_row
        self.picks_rows = False
        self._chunk_bytes = layout.chunk_bytes
        self._per_line = max(1, layout.table.grid[-1]) if len(layout.chunks) > 1 else 1
        self.parts_together = _parts_together(self._chunk_bytes, self._per_line)
        # A chunk of numbers that contains whole rows is decoded directly into the block.
        self.kept: KeptChunks | None = None
        self._is_direct = layout.chunks[1:] == layout.axes and not layout.members and layout.stored.base.isnative
        self._kept = KeptChunks(layout, counters) if keeps_decoded(layout) else None
        if self._is_direct and layout.view is None and not gives_back:
            self.kept = self._kept
        self._fill = np.ndarray((1,), layout.stored, layout.fill)[0]
        self._word = _widest_word(layout)
        self._loop: ChunkLoop | None = None
        self._check_places()

    def compile(self) -> None:
        """Compile reading and decoding, if that is possible (see ``Pipeline.compile``)."""
        if self.layout.digests is None:  # digests need the stored bytes
            self._loop = self._pipeline.compile()
        if self._kept is not None:
            self._kept.compile()

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        first = blocks * self.n_parts
        self.will_need_chunks((first[:, np.newaxis] + np.arange(self.n_parts)).reshape(-1))

    def will_need_chunks(self, chunks: IntArray) -> None:
        """Begin to fetch chunks by their numbers (see ``BlockSource.will_need``)."""
        if self._kept is not None:
            chunks = self._kept.lacking(chunks)
        prefetch_stored(self.layout, *self._stored_pieces(chunks), self._counters)

    def _stored_pieces(self, chunks: Sequence[int] | IntArray) -> tuple[IntArray, IntArray]:
        """Return the position in the file, and the stored bytes, of each written chunk."""
        offsets, sizes = self.table.offsets[chunks], self.table.sizes[chunks]
        is_written = offsets >= 0
        return offsets[is_written], sizes[is_written]

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        began = perf_counter()
        if self._is_direct:
            self.decode(blocks, *memory.octets())
        else:
            self._load_parts(blocks, parts, memory)
        self._counters.add(decode_seconds=perf_counter() - began)

    def _load_parts(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """Load blocks of chunks that contain parts of rows."""
        lines = [
            (block * self.n_parts, line, rows)
            for block, rows in zip(blocks, memory, strict=True)
            for line in _part_lines(parts, self._per_line)
        ]
        # A block can have many chunks: decode at most one task's worth together.
        n = max(1, TASK_BYTES // max(1, self._per_line * self._chunk_bytes))
        for task_lines in (lines[start : start + n] for start in range(0, len(lines), n)):
            values, at = self.values([first + part for first, line, _ in task_lines for part in line]), 0
            for _, line, rows in task_lines:
                self._load_line(values[at : at + len(line)], line[0], rows)
                at += len(line)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``; keeps one chunk at a time."""
        began = perf_counter()
        for part in range(self.n_parts):
            (values,) = self.values([block * self.n_parts + part])
            region = self.region(part)
            inside: tuple[Any, ...] = tuple(slice(0, s.stop - s.start) for s in region)
            out[(slice(None), *region)] = values[(rows, *inside)]
        self._counters.add(decode_seconds=perf_counter() - began)

    def _load_at_once(self, chunks: Sequence[int], out: npt.NDArray[np.uint8], firsts: IntArray) -> bool:
        """Read and decode chunks to places in memory in one call of compiled code.

        Returns False if there is none, or if it failed: ``_decode`` then finds out why.
        """
        numbers = np.asarray(chunks, np.int64)
        if self._loop is None or not (self._are_all_plain or self._is_plain(numbers)):
            return False
        loop, layout, n_bytes = self._loop, self.layout, self._chunk_bytes
        offsets, sizes = self.table.offsets[numbers], self.table.sizes[numbers]
        began = perf_counter()
        took = read_with(
            layout, offsets, sizes, lambda fd: loop(fd, offsets, sizes, n_bytes, out, firsts), self._counters
        )
        if took is None:
            self._count(0, 0, 0, perf_counter() - began)  # of waiting for bytes that the mirror lacks
            return False
        self._count(int(sizes.sum()), len(chunks), len(chunks), took)
        return True

    def _count(self, n_bytes: int, n_chunks: int, n_written: int, took: float) -> None:
        """Count chunks that were read and decoded, and the seconds of reading; missing chunks count as decoded."""
        self._counters.add(
            bytes_read=n_bytes,
            bytes_decoded=n_chunks * self._chunk_bytes,
            chunks_decoded=n_written,
            read_seconds=took,
            decode_seconds=-took,  # callers count the time of both
        )

    def decode(self, chunks: Sequence[int], out: npt.NDArray[np.uint8], firsts: IntArray) -> None:
        """Read and decode chunks to positions in memory; chunks that were never written get the fill value.

        Raises:
            H5CorruptError: one does not decode.
            H5MemoryError: there is not enough memory.
        """
        try:
            if self._kept is None:
                self._decode_all(chunks, out, firsts)
            else:
                self._decode_lacking(self._kept, np.asarray(chunks, np.int64), out, firsts)
        except MemoryError as error:
            raise H5MemoryError(
                f"there is not enough memory to decode {self.name(chunks[0])} of {self.layout.key!r} in "
                f"{self.layout.path!r}: a chunk has {bytes_text(self._chunk_bytes, digits=2)}. Pass a smaller "
                "batch_size, a smaller cache_bytes, or a smaller num_workers."
            ) from error
        if self._gives_back:
            give_back(self.layout, *self._stored_pieces(chunks))
            if self._kept is not None:
                self._kept.give_back(np.asarray(chunks, np.int64))

    def _decode_all(self, chunks: Sequence[int], out: npt.NDArray[np.uint8], firsts: IntArray) -> None:
        if not self._load_at_once(chunks, out, firsts):
            self._decode_again(chunks, out, firsts)

    def _decode_lacking(self, kept: KeptChunks, chunks: IntArray, out: npt.NDArray[np.uint8], firsts: IntArray) -> None:
        """Read chunks that were decoded before, decode the others, and keep them."""
        began = perf_counter()
        numbers = np.flatnonzero(~kept.read(chunks, out, firsts))
        if len(numbers) < len(chunks):
            self._counters.add(decode_seconds=began - perf_counter())  # callers count the time of both
        if len(numbers):
            began = perf_counter()
            self._decode_all(chunks[numbers].tolist(), out, firsts[numbers])
            took = perf_counter() - began
            written_numbers = numbers[self.table.offsets[chunks[numbers]] >= 0]
            kept.keep(chunks[written_numbers], out, firsts[written_numbers], took)

    def _decode_again(self, chunks: Sequence[int], out: npt.NDArray[np.uint8], firsts: IntArray) -> None:
        """Decode chunks; once more if their mirror was damaged."""
        try:
            self._decode(chunks, out, firsts)
        except H5CorruptError:
            if not forget_stored(self.layout, *self._stored_pieces(chunks)):
                raise
            self._decode(chunks, out, firsts)  # the mirror may be damaged, and the file right

    def _decode(self, chunks: Sequence[int], out: npt.NDArray[np.uint8], firsts: IntArray) -> None:
        layout, table, n_bytes = self.layout, self.table, self._chunk_bytes
        offsets, sizes, masks = table.offsets[chunks], table.sizes[chunks], table.masks[chunks]
        is_unwritten = offsets < 0
        if is_unwritten.any():
            for first in firsts[is_unwritten].tolist():
                piece = out[first : first + n_bytes]
                np.ndarray((n_bytes // layout.stored.itemsize,), layout.stored, piece)[...] = self._fill
            numbers = np.flatnonzero(~is_unwritten)
            offsets, sizes, masks, firsts = offsets[numbers], sizes[numbers], masks[numbers], firsts[numbers]
            n_chunks, chunks = len(chunks), np.asarray(chunks)[numbers].tolist()
        else:
            n_chunks = len(chunks)
        stops = sizes.cumsum()
        starts = stops - sizes
        data = scratch("stored", int(stops[-1]) if len(stops) else 0)
        began = perf_counter()
        if len(chunks):
            read_stored(layout, data, starts, stops, offsets, lambda i, at: self.name(chunks[i]), self._counters)
        took = perf_counter() - began
        if layout.digests is not None:
            pieces = zip(chunks, starts.tolist(), stops.tolist(), masks.tolist(), strict=True)
            for chunk, start, stop, mask in pieces:
                check_piece(layout.digests, int(chunk), data[start:stop], layout, mask=mask)
        self._count(len(data), n_chunks, len(chunks), took)
        failed = self._pipeline.decode_each(data, starts, stops, masks, out, firsts, n_bytes)
        if failed is not None:
            at, why = failed
            raise self._broken(chunks[at], int(sizes[at]), why) from (why if isinstance(why, Exception) else None)

    def _load_line(self, values: npt.NDArray[Any], part: int, rows: npt.NDArray[Any]) -> None:
        """Copy chunks that are neighbors along the last axis: short runs are then written a line at a time."""
        region = self.region(part)
        if not region:
            rows[: self.chunks[0]] = values[0]
            return
        *lead, last = region
        inside = (slice(None), slice(None), *(slice(0, s.stop - s.start) for s in lead))
        step, size, axis = self.chunks[-1], self.layout.axes[-1], len(self.chunks) - 1
        n_whole = min(len(values), (size - last.start) // step)  # the last chunk can reach beyond the edge
        middle = last.start + n_whole * step
        if n_whole:
            target, source = rows[(slice(self.chunks[0]), *lead, slice(last.start, middle))], values[:n_whole][inside]
            if self._word is not None:
                target, source = target.view(self._word), source.view(self._word)
            shape = (*target.shape[:axis], n_whole, -1, *target.shape[axis + 1 :])
            target.reshape(shape)[...] = np.moveaxis(source, 0, axis)  # an axis that is split is a view
        if n_whole < len(values):
            rest = (*inside[1:], slice(0, size - middle))
            rows[(slice(self.chunks[0]), *lead, slice(middle, size))] = values[n_whole][rest]

    def values(self, chunks: Sequence[int]) -> npt.NDArray[Any]:
        """Return values of chunks, of one member, in memory that the next call of this thread overwrites."""
        layout, n_bytes = self.layout, self._chunk_bytes
        decoded, firsts = scratch("decoded", len(chunks) * n_bytes), np.arange(len(chunks)) * n_bytes
        self.decode(chunks, decoded, firsts)
        values: npt.NDArray[Any] = np.ndarray((len(chunks), *self.chunks), layout.stored, decoded)
        return layout.member_of(values)

    @cached_property
    def _are_all_plain(self) -> bool:
        """Whether all chunks were written, with all filters."""
        return not self.table.masks.any() and bool((self.table.offsets >= 0).all())

    def _is_plain(self, chunks: IntArray) -> bool:
        """Return whether these chunks were all written, with all filters."""
        return not self.table.masks[chunks].any() and bool((self.table.offsets[chunks] >= 0).all())

    def _broken(self, chunk: int, n_bytes: int, why: object) -> H5CorruptError:
        return H5CorruptError(
            f"{self.name(chunk)} of {self.layout.key!r} in {self.layout.path!r} (byte "
            f"{self.table.offsets[chunk]:,}, {n_bytes:,} bytes) does not decode: {why}. "
            "The file is damaged there; copy it again, or write it again without these rows."
        )

    def region(self, part: int) -> tuple[slice, ...]:
        """Return the slices of a part along the axes of a row."""
        region: list[slice] = []
        axes = list(zip(self.table.grid[1:], self.chunks[1:], self.layout.axes, strict=True))
        for n, step, size in reversed(axes):
            part, at = divmod(part, n)
            region.append(slice(at * step, min((at + 1) * step, size)))
        return tuple(reversed(region))

    def name(self, chunk: int) -> str:
        """Return the name of a chunk, for messages."""
        first = int(chunk) // self.n_parts * self.rows_per_block
        return f"chunk {int(chunk)} (rows {first} to {min(first + self.rows_per_block, self.n_rows) - 1})"

    def _check_places(self) -> None:
        guard = self.layout.guard
        try:
            n_bytes = size_of(self.layout.path) if guard.staging is None else guard.n_bytes
        except OSError:
            return  # open raises a better error
        table = self.table
        wrong = np.flatnonzero((table.sizes > n_bytes) | (table.offsets > n_bytes - table.sizes))
        if len(wrong):
            chunk = int(wrong[0])
            raise H5CorruptError(
                f"{self.name(chunk)} of {self.layout.key!r} lies at byte {table.offsets[chunk]:,} with "
                f"{table.sizes[chunk]:,} bytes, and {self.layout.path!r} has {n_bytes:,}. It was truncated or "
                "damaged; copy it again."
            )


def _parts_together(part_bytes: int, per_line: int) -> int:
    """Return the number of chunks of a task: whole lines along the last axis, unless these are too large."""
    n = max(1, TASK_BYTES // max(1, part_bytes))
    if n >= per_line:
        return n // per_line * per_line
    return per_line if per_line * part_bytes <= MAX_LINE_BYTES else n


def _part_lines(parts: range, per_line: int) -> Iterator[range]:
    """Yield ranges of parts that are neighbors along the last axis."""
    start = parts.start
    while start < parts.stop:
        stop = min(parts.stop, start // per_line * per_line + per_line)
        yield range(start, stop)
        start = stop


def _widest_word(layout: ArrayLayout) -> np.dtype[Any] | None:
    """Return the widest integer that divides a chunk's rows along the last axis, to copy short runs faster."""
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

"""Read rows through the HDF5 library: correct for every array that it can read, slow for compressed ones."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5FileError, H5MemoryError
from ..hdf5 import ArrayLayout, OpenOptions, check_decoding_memory, is_list, kind_of, process_pool
from ..types import IntArray, RowReader
from .base import InMemoryReader, LayoutReader
from .block_memory import BlockMemory
from .block_sources import BlockSource, ReaderSource
from .chunk_loader import ChunkLoader
from .contiguous import ContiguousReader
from .filters.pipeline import why_not_decodable
from .view_source import BlockReader

__all__ = ["H5pyReader", "check_readable_text", "spans"]

PIECE_BYTES = 8 << 20  # maximum per read call, unless a single chunk is larger
PIECE_CHUNKS = 4096  # also: the library takes about 3 KiB for each chunk of a call, written or not
REFERENCES = 4096  # references to text read together if they are not in chunks
UNDEFINED = 2**64 - 1  # address


class H5pyReader(LayoutReader):
    """Reads a piece for each chunk, or for each run of rows without chunks, and gathers rows from it.

    It never uses one call a row if chunks contain many rows (each call would decode the chunk), and never h5py's fancy
    indexing (6 times slower than single reads if chunks contain one row).

    Args:
        layout: the array.
        options: how its file is opened.
        counters: counts bytes; the bytes that HDF5 reads are estimated from the array's mean stored size.
    """

    def __init__(self, layout: ArrayLayout, options: OpenOptions, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self._options = options
        self._is_text = kind_of(layout.dtype) == "text"
        if self._is_text:
            self.dtype = np.dtype(object)
        self._heaps: _TextHeaps | None = None
        self._lists: _ListHeaps | None = None
        if layout.references is not None and not options.swmr:  # a live writer moves the chunk that it writes to
            if h5py.check_vlen_dtype(layout.stored) == np.uint8 and not layout.axes and not layout.members:
                self._lists = _ListHeaps.of(layout, layout.references)
            if self._lists is None:
                self._heaps = _TextHeaps(layout, layout.references)
        if self._lists is None and not (self._heaps is not None and self._heaps.decodes_first):
            check_decoding_memory(layout.filters, layout.chunk_bytes, layout.path, layout.key, options.files)
        self._szip = _SzipSizes(layout) if any(step.id == SZIP for step in layout.filters) else None
        self._stored_row_bytes = layout.n_stored_bytes / max(1, layout.n_rows)
        self._max_rows = max(1, PIECE_BYTES // max(1, layout.stored_row_bytes))
        if layout.chunks is not None:
            by_chunks = PIECE_CHUNKS * layout.chunks[0] // max(1, layout.chunks_per_row)
            self._max_rows = max(1, min(self._max_rows, by_chunks))

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        began = perf_counter()
        if self._lists is not None:
            n_bytes = self._lists.read(rows, out)
            self._counters.add(bytes_read=n_bytes, bytes_decoded=n_bytes, read_seconds=perf_counter() - began)
            return
        if self._heaps is not None:
            self._heaps.check(rows)
        if self._szip is not None:
            self._szip.check(rows)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        with process_pool().h5(self.layout.path, self._options, self.layout.guard) as handle:
            array = handle.array(self.layout)
            # Lists are stored elsewhere in the file, one by one: lists between the rows are not read.
            per_chunk = 1 if is_list(self.layout.stored) else self.layout.rows_per_chunk
            for start, stop in spans(ordered, per_chunk, self._max_rows):
                low, high = int(ordered[start]), int(ordered[stop - 1]) + 1
                piece = self._piece(array, low, high)
                out[order[start:stop]] = piece[ordered[start:stop] - low]
                self._count(low, high)
        self._counters.add(library_seconds=perf_counter() - began)

    def _piece(self, array: Any, low: int, high: int) -> npt.NDArray[Any]:
        members = self.layout.members
        try:
            piece = (array.fields(members[0]) if members else array)[low:high]
        except (OSError, RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or "memory allocation failed" in str(error):
                raise H5MemoryError(
                    f"there is not enough memory to decode rows {low} to {high - 1} of {self.layout.key!r} in "
                    f"{self.layout.path!r} ({error}). Pass a smaller batch_size or a smaller num_workers."
                ) from error
            # The errno is in HDF5's text; h5py's errno belongs to the last failing call.
            if getattr(error, "errno", None) == errno.EIO or f"errno = {errno.EIO}," in str(error):
                raise H5FileError(
                    f"reading {self.layout.key!r} from {self.layout.path!r} failed: {os.strerror(errno.EIO)}. Check "
                    "the disk or the network file system, then resume."
                ) from error
            raise H5CorruptError(
                f"rows {low} to {high - 1} of {self.layout.key!r} in {self.layout.path!r} cannot be read: {error}. "
                "The file is damaged there; copy it again, or write it again without these rows."
            ) from error
        for member in members[1:]:
            piece = piece[member]
        return self._text(piece, low) if self._is_text else piece

    def _text(self, piece: npt.NDArray[Any], low: int) -> npt.NDArray[Any]:
        if self.layout.joins_characters:
            piece = np.ascontiguousarray(piece).view(self.layout.dtype)[..., 0]
        text = np.empty(piece.size, dtype=object)
        try:
            text[:] = [item.decode() if isinstance(item, bytes) else item for item in piece.flat]
        except UnicodeDecodeError as error:
            row = low + next(at for at, texts in enumerate(piece) if error.object in np.ravel(texts).tolist())
            raise H5CorruptError(
                f"text in row {row} of {self.layout.key!r} in {self.layout.path!r} is not UTF-8 ({error}). Write it "
                "again as UTF-8."
            ) from error
        return text.reshape(piece.shape)

    def _count(self, low: int, high: int) -> None:
        # HDF5 does not report the bytes that it read: estimate whole chunks of the array's mean stored size.
        step = self.layout.rows_per_chunk
        n_rows = min((high - 1) // step * step + step, len(self)) - low // step * step
        self._counters.add(
            bytes_read=round(n_rows * self._stored_row_bytes), bytes_decoded=n_rows * self.layout.stored_row_bytes
        )


def spans(ordered: IntArray, rows_per_chunk: int, max_rows: int) -> Iterator[tuple[int, int]]:
    """Cut sorted rows into pieces, each to be read by one call.

    Args:
        ordered: rows in ascending order, repeats allowed, at least one.
        rows_per_chunk: rows that share a chunk; if 1, a piece is a run of rows without gaps.
        max_rows: maximum number of rows of a piece, unless chunks are larger.

    Yields:
        Positions in ``ordered`` at which a piece starts and stops (exclusive).
    """
    if rows_per_chunk > 1:
        cut = np.diff(ordered // rows_per_chunk) > 0
    else:
        cut = (np.diff(ordered) > 1) | (np.diff((ordered - ordered[0]) // max_rows) > 0)
    bounds = np.concatenate([[0], np.flatnonzero(cut) + 1, [len(ordered)]]).tolist()
    yield from pairwise(bounds)


# Text of variable length is stored in heaps elsewhere in the file. A lost disk block leaves zeros there, which mean an
# object of size zero: the HDF5 library loops over it forever while holding its lock. So each heap is checked before the
# library reads it.

SZIP, SZIP_SIZE = 4, 4  # number of the filter; bytes before a chunk's stream, with its decoded size
HEAP_HEADER = struct.Struct("<4sB3xQ")  # signature, version, bytes
HEAP_OBJECT = struct.Struct("<HHIQ")  # number, users, nothing, bytes

_uncounted = Counters()  # of references, which are no rows


def check_readable_text(layout: ArrayLayout) -> None:
    """Check that the HDF5 library can read the text of an array: see ``H5pyReader``, which checks it by itself.

    Raises:
        H5CorruptError: the text of a row cannot be read.
    """
    if layout.references is not None:
        _TextHeaps(layout, layout.references).check(np.arange(layout.n_rows))


class _TextHeaps:
    """Checks once each heap that rows of text refer to.

    Args:
        layout: the array.
        references: the same array as it is stored.
    """

    def __init__(self, layout: ArrayLayout, references: ArrayLayout) -> None:
        self._layout, self._references = layout, references
        self._source: BlockSource | None = None
        if references.is_contiguous:
            self._source = ReaderSource(ContiguousReader(references, _uncounted), REFERENCES)
        elif why_not_decodable(references) is None:
            self._source = ChunkLoader(references, _uncounted)
        self._blocks: set[int] = set()
        self._heaps: set[int] = {0, UNDEFINED}  # of empty text
        self._lock = threading.Lock()

    @property
    def decodes_first(self) -> bool:
        """Whether each chunk is decoded here, to its own size, before the library reads it."""
        return self._source is not None

    def check(self, rows: IntArray) -> None:
        """Check the heaps of rows.

        Raises:
            H5CorruptError: a heap is damaged, or missing.
        """
        if self._source is None:
            return
        with self._lock:
            for block in np.unique(rows // self._source.rows_per_block).tolist():
                if block not in self._blocks:
                    self._check_block(self._source, block)
                    self._blocks.add(block)

    def _check_block(self, source: BlockSource, block: int) -> None:
        size, layout = source.rows_per_block, self._layout
        references = np.zeros((size, *layout.axes), dtype=self._references.stored)
        source.load([block], range(source.n_parts), BlockMemory(references, np.zeros(1, dtype=np.int64), size))
        heaps = set(references["address"][references["length"] > 0].tolist()) - self._heaps
        with process_pool().reading(layout.path, layout.guard) as pread:
            for address in sorted(heaps):
                if (why := _heap_damage(pread, layout.guard.n_bytes, address + layout.user_block)) is not None:
                    raise H5CorruptError(
                        f"text in rows of {layout.key!r} in {layout.path!r} (from row {block * size} on) cannot be "
                        f"read: {why}. The file is damaged there; copy it again."
                    )
        self._heaps |= heaps


class _SzipSizes:
    """Checks once each decoded size that a chunk states: the library allocates as much.

    Args:
        layout: an array that was compressed with szip.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self._layout = layout
        self._at = next(at for at, step in enumerate(layout.filters) if step.id == SZIP)
        self._checked: set[int] = set()

    def check(self, rows: IntArray) -> None:
        """Check the chunks of rows.

        Raises:
            H5CorruptError: one states more than a chunk has.
        """
        layout, table = self._layout, self._layout.table
        if table is None:
            return
        for block in sorted(set((rows // layout.rows_per_chunk).tolist()) - self._checked):
            with process_pool().reading(layout.path, layout.guard) as pread:
                for chunk in range(block * table.per_row, (block + 1) * table.per_row):
                    if table.offsets[chunk] < 0 or int(table.masks[chunk]) >> self._at & 1:
                        continue
                    head = pread(min(SZIP_SIZE, int(table.sizes[chunk])), int(table.offsets[chunk]))
                    if (stated := int.from_bytes(head, "little")) > layout.chunk_bytes:
                        raise H5CorruptError(
                            f"chunk {chunk} of {layout.key!r} in {layout.path!r} states that it decodes to {stated:,} "
                            f"bytes, and a chunk has {layout.chunk_bytes:,}. The file is damaged there; copy it again, "
                            "or write it again without these rows."
                        )
            self._checked.add(block)


class _ListHeaps:
    """Reads lists of bytes by their position in the file, without the HDF5 library and its lock.

    Args:
        layout: the array.
        references: reads where the list of each row is.
    """

    def __init__(self, layout: ArrayLayout, references: RowReader) -> None:
        self._layout, self._references = layout, references

    @classmethod
    def of(cls, layout: ArrayLayout, references: ArrayLayout) -> _ListHeaps | None:
        """Return the reader of an array's lists; None if only the HDF5 library can locate them."""
        if references.is_contiguous:
            return cls(layout, ContiguousReader(references, _uncounted))
        if why_not_decodable(references) is not None:
            return None
        rows = BlockReader(references, ChunkLoader(references, _uncounted))
        return cls(layout, InMemoryReader(rows, 0))

    def read(self, rows: IntArray, out: npt.NDArray[Any]) -> int:
        """Read the lists of rows, and return their bytes.

        Raises:
            H5CorruptError: a list is damaged, or missing.
        """
        references, layout, n_bytes = self._references.read(rows), self._layout, 0
        heaps: dict[int, bytes] = {}
        order = np.argsort(references["address"], kind="stable").tolist()
        with process_pool().reading(layout.path, layout.guard) as pread:
            for at in order:
                length, address, number = references[at].tolist()
                data: bytes | None = b""
                if length:
                    if address not in heaps:
                        heaps = {address: _heap_at(pread, layout.guard.n_bytes, address + layout.user_block)}
                    data = _object_in(heaps[address], number, length)
                if data is None:
                    raise H5CorruptError(
                        f"row {int(rows[at])} of {layout.key!r} in {layout.path!r} cannot be read: its {length} bytes "
                        f"are not in the heap at byte {address:,}. The file is damaged there; copy it again."
                    )
                out[at] = np.frombuffer(data, np.uint8)
                n_bytes += length
        return n_bytes


def _heap_at(pread: Callable[[int, int], bytes], n_file: int, address: int) -> bytes:
    """Return the heap at an address of a file; nothing if there is none."""
    head = pread(HEAP_HEADER.size, address) if address < n_file else b""
    signature, version, n_bytes = HEAP_HEADER.unpack(head) if len(head) == HEAP_HEADER.size else (b"", 0, 0)
    if (signature, version) != (b"GCOL", 1) or not HEAP_HEADER.size < n_bytes <= n_file - address:
        return b""
    return pread(n_bytes, address)


def _object_in(heap: bytes, number: int, length: int) -> bytes | None:
    """Return the bytes of an object in a heap; None if it is not there, or shorter."""
    at = HEAP_HEADER.size
    while at + HEAP_OBJECT.size <= len(heap):
        key, _, _, size = HEAP_OBJECT.unpack_from(heap, at)
        step = HEAP_OBJECT.size + (size + 7) // 8 * 8 if key else size  # the size of free space includes the header
        if not HEAP_OBJECT.size <= step <= len(heap) - at:
            return None
        if key == number:
            first = at + HEAP_OBJECT.size
            return heap[first : first + length] if length <= size else None
        at += step
    return None


def _heap_damage(pread: Callable[[int, int], bytes], n_file: int, address: int) -> str | None:
    """Return the error in the heap at an address of a file; None if it can be read."""
    heap, at = _heap_at(pread, n_file, address), HEAP_HEADER.size
    if not heap:
        return f"at byte {address:,} a heap of text is missing"
    while at + HEAP_OBJECT.size <= len(heap):
        number, _, _, size = HEAP_OBJECT.unpack_from(heap, at)
        step = HEAP_OBJECT.size + (size + 7) // 8 * 8 if number else size  # the size of free space includes the header
        if not HEAP_OBJECT.size <= step <= len(heap) - at:
            return f"the heap of text at byte {address:,} is damaged at its byte {at:,}"
        at += step
    return None

"""Compare chunks and rows with their digests before they are read; make and check the digests of whole arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import (
    ArrayDigests,
    ArrayLayout,
    ChunkTable,
    OpenOptions,
    blank_digests,
    check_piece,
    digest_of,
    kind_of,
    native,
)
from ..types import IntArray
from .base import LayoutReader
from .bulk import BulkTask
from .h5py_reader import H5pyReader
from .raw_io import read_stored

__all__ = ["DigestReader", "digest_tasks", "empty_digests", "verify_tasks"]

RUN_BYTES = 1 << 18
"""Bytes of a run of rows: digests then take less than a ten-thousandth of the data."""

TASK_BYTES = 4 << 20


class DigestReader(LayoutReader):
    """Compares each chunk or run of rows with its digest before its first row is read, once in a process.

    For all readers but ``ChunkLoader``, which compares each chunk that it decodes.

    Args:
        reader: reads the rows.
        digests: digests of the array.
        options: how the file is opened if the HDF5 library reads.
    """

    def __init__(self, reader: LayoutReader, digests: ArrayDigests, options: OpenOptions) -> None:
        super().__init__(reader.layout, reader._counters)
        self.dtype = reader.dtype
        self._reader, self._digests, self._options = reader, digests, options
        self._per_block = reader.layout.table.per_row if digests.kind == "chunks" and reader.layout.table else 1
        n_blocks = -(-len(reader) // digests.rows_per_piece)  # rows without bytes have blocks of no pieces
        self._is_compared = np.zeros(n_blocks, dtype=np.bool_)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        blocks = np.unique(rows // self._digests.rows_per_piece)
        for block in blocks[~self._is_compared[blocks]].tolist():
            pieces = range(block * self._per_block, (block + 1) * self._per_block)
            for piece, data, mask in _pieces(self.layout, self._options, self._digests, pieces, self._counters):
                check_piece(self._digests, piece, data, self.layout, mask=mask)
            self._is_compared[block] = True
        self._reader.read(rows, out)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


def empty_digests(layout: ArrayLayout) -> ArrayDigests | None:
    """Return digests of an array that are still to be filled in; None for lists, references and the like."""
    if kind_of(layout.dtype) == "object" or (layout.stored.hasobject and kind_of(layout.dtype) != "text"):
        return None
    step = layout.rows_per_chunk  # the HDF5 library decodes whole chunks
    return blank_digests(layout, -(-max(1, RUN_BYTES // max(1, layout.stored_row_bytes)) // step) * step)


def digest_tasks(layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests) -> list[BulkTask]:
    """Return tasks that compute the digests of an array, and fill them in.

    Args:
        layout: the array.
        options: how its file is opened if the HDF5 library reads.
        digests: an array of ``empty_digests``.
    """

    def note(piece: int, data: Any, mask: int) -> None:
        digests.pieces[piece] = np.frombuffer(digest_of(data, mask), dtype=np.uint8)

    return _tasks_of_array(layout, options, digests, note)


def verify_tasks(layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests) -> list[BulkTask]:
    """Return tasks that compare a whole array with its digests; each raises ``H5CorruptError`` if a piece differs."""

    def compare(piece: int, data: Any, mask: int) -> None:
        check_piece(digests, piece, data, layout, mask=mask)

    return _tasks_of_array(layout, options, digests, compare)


def _tasks_of_array(
    layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests, visit: Callable[[int, Any, int], None]
) -> list[BulkTask]:
    size = layout.chunk_bytes if digests.kind == "chunks" else digests.rows_per_piece * layout.stored_row_bytes
    step, counters = max(1, TASK_BYTES // max(1, size)), Counters()

    def run(pieces: range) -> None:
        for piece, data, mask in _pieces(layout, options, digests, pieces, counters):
            visit(piece, data, mask)

    n = len(digests.pieces)
    return [
        BulkTask(len(pieces) * size, len(pieces) * size, partial(run, pieces))
        for pieces in (range(start, min(start + step, n)) for start in range(0, n, step))
    ]


def _pieces(
    layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests, numbers: range, counters: Counters
) -> Iterator[tuple[int, Any, int]]:
    """Yield number, bytes, and filter mask of each piece that was written."""
    if digests.kind == "chunks" and layout.table is not None:
        yield from _chunks(layout, layout.table, numbers, counters)
        return
    reader = H5pyReader(_with_all_members(layout), options)
    for piece in numbers:
        first = piece * digests.rows_per_piece
        stop = min(first + digests.rows_per_piece, layout.n_rows)
        if layout.offset is not None:
            place = np.array([layout.offset + first * layout.stored_row_bytes])
            size = np.array([(stop - first) * layout.stored_row_bytes])
            yield piece, _stored(layout, place, size, [f"rows {first} to {stop - 1}"], counters), 0
        else:
            yield piece, _bytes_of_rows(reader.read(np.arange(first, stop)), layout), 0


def _chunks(
    layout: ArrayLayout, table: ChunkTable, numbers: range, counters: Counters
) -> Iterator[tuple[int, Any, int]]:
    written_chunks = np.array([number for number in numbers if table.offsets[number] >= 0], dtype=np.int64)
    offsets, sizes = table.offsets[written_chunks], table.sizes[written_chunks]
    data, stop = _stored(layout, offsets, sizes, [f"chunk {number}" for number in written_chunks], counters), 0
    for number, size in zip(written_chunks.tolist(), sizes.tolist(), strict=True):
        start, stop = stop, stop + size
        yield number, data[start:stop], int(table.masks[number])


def _stored(
    layout: ArrayLayout, offsets: IntArray, sizes: IntArray, names: Sequence[str], counters: Counters
) -> npt.NDArray[np.uint8]:
    """Return stored bytes of an array's file, one piece after the other."""
    data, stops = np.empty(int(sizes.sum()), dtype=np.uint8), sizes.cumsum()
    if len(sizes):
        read_stored(layout, data, stops - sizes, stops, offsets, lambda piece, _: names[piece], counters)
    return data


def _with_all_members(layout: ArrayLayout) -> ArrayLayout:
    """Return the array with all members of its rows."""
    if not layout.members:
        return layout
    inner = layout.stored.subdtype[1] if layout.stored.subdtype else ()
    dtype = native(layout.stored.base)
    return replace(layout, key=layout.name, members=(), row_shape=(*layout.axes, *inner), dtype=dtype)


def _bytes_of_rows(rows: npt.NDArray[Any], layout: ArrayLayout) -> Any:
    """Return the bytes of rows, or a digest of their text."""
    if not rows.dtype.hasobject:
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    joined = hashlib.sha256()
    for value in rows.reshape(-1).tolist():
        if not isinstance(value, str):
            raise H5ValueError(
                f"{layout.key!r} in {layout.path!r} has the dtype {layout.stored}, which digests do not support. Leave "
                "it out: name the arrays that you train from with --key."
            )
        text = value.encode(errors="surrogateescape")
        joined.update(len(text).to_bytes(8, "little"))
        joined.update(text)
    return joined.digest()

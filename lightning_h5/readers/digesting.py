"""Rows that are compared with digests as they are read, and the tasks that make or compare digests of whole arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..hdf5 import ArrayDigests, ArrayLayout, OpenOptions, digest_of, kind_of, native
from ..types import IntArray
from .base import LayoutReader
from .bulk import BulkTask
from .chunk_loader import ChunkLoader
from .filters import why_not_decodable
from .h5py_reader import H5pyReader
from .heaps import heap_guard
from .raw_io import read_stored

__all__ = ["compared", "digest_tasks", "empty_digests", "verify_tasks"]

PIECE_BYTES = 1 << 18
"""A run of rows is about as long: digests then take less than a ten-thousandth of the data."""

TASK_BYTES = 4 << 20


def empty_digests(layout: ArrayLayout) -> ArrayDigests | None:
    """Return digests of an array that are still to be filled in; None for lists, references and the like."""
    if kind_of(layout.dtype) == "object" or (layout.stored.hasobject and kind_of(layout.dtype) != "text"):
        return None
    if layout.table is not None and (layout.is_placed or why_not_decodable(layout) is None):
        return ArrayDigests.empty(layout, "chunks", layout.rows_per_chunk)
    # The HDF5 library decodes whole chunks.
    step = layout.rows_per_chunk
    rows = -(-max(1, PIECE_BYTES // max(1, layout.stored_row_bytes)) // step) * step
    return ArrayDigests.empty(layout, "rows" if layout.offset is not None else "values", rows)


def digest_tasks(layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests) -> list[BulkTask]:
    """Return tasks that make the digests of an array, and fill them in.

    Args:
        layout: the array.
        options: how its file is opened if the HDF5 library reads.
        digests: of ``empty_digests``.
    """

    def note(piece: int, data: Any, mask: int) -> None:
        digests.pieces[piece] = np.frombuffer(digest_of(data, mask), dtype=np.uint8)

    return _tasks(layout, options, digests, note)


def verify_tasks(layout: ArrayLayout, options: OpenOptions) -> list[BulkTask]:
    """Return tasks that compare a whole array with its digests; each raises ``H5CorruptError`` if a piece differs."""
    digests = _digests_of(layout)

    def compare(piece: int, data: Any, mask: int) -> None:
        digests.check(piece, data, layout, mask=mask)

    return _tasks(layout, options, digests, compare)


def compared(reader: LayoutReader, layout: ArrayLayout, options: OpenOptions) -> LayoutReader:
    """Return a reader whose rows are compared with the array's digests, if it has any.

    Args:
        reader: of the array.
        layout: the array.
        options: how its file is opened if the HDF5 library reads.
    """
    if layout.digests is None:
        return reader
    digests = _digests_of(layout)
    if digests.kind == "chunks" and not layout.is_placed:
        return _ChunkReader(layout)
    return _DigestReader(reader, digests, options)


class _DigestReader(LayoutReader):
    """Reads rows after each piece that they lie in was compared with its digest, once in this process."""

    def __init__(self, reader: LayoutReader, digests: ArrayDigests, options: OpenOptions) -> None:
        super().__init__(reader.layout)
        self.dtype = reader.dtype
        self._reader, self._digests, self._options = reader, digests, options
        self._is_compared = np.zeros(len(digests.pieces), dtype=np.bool_)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        pieces = np.unique(rows // self._digests.rows_per_piece)
        for number in pieces[~self._is_compared[pieces]].tolist():
            for piece, data, mask in _pieces(self.layout, self._options, self._digests, range(number, number + 1)):
                self._digests.check(piece, data, self.layout, mask=mask)
            self._is_compared[number] = True
        self._reader.read(rows, out)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


class _ChunkReader(LayoutReader):
    """Decodes chunks and never lets the HDF5 library look for them: ``ChunkLoader`` compares each that it reads."""

    def __init__(self, layout: ArrayLayout) -> None:
        super().__init__(layout)
        self._source = ChunkLoader(layout, self._counters)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        slabs, within = np.divmod(rows, self._source.rows_per_slab)
        for slab in np.unique(slabs).tolist():
            picked = np.empty((int((slabs == slab).sum()), *out.shape[1:]), dtype=out.dtype)
            self._source.pick(slab, within[slabs == slab], picked)
            out[slabs == slab] = picked


def _digests_of(layout: ArrayLayout) -> ArrayDigests:
    if layout.digests is None:
        raise ValueError(f"{layout.key!r} has no digests")
    if layout.digests.kind == "chunks" and not layout.is_placed and (why := why_not_decodable(layout)) is not None:
        raise H5ValueError(
            f"verify='digest' was asked, and the digests of {layout.key!r} in {layout.path!r} are of chunks that "
            f"cannot be decoded here: {why}. Run `pip install 'lightning-h5[filters]'`, or write them again on this "
            "machine: `lightning-h5 check --write-digests`."
        )
    return layout.digests


def _tasks(
    layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests, visit: Callable[[int, Any, int], None]
) -> list[BulkTask]:
    size = layout.chunk_bytes if digests.kind == "chunks" else digests.rows_per_piece * layout.stored_row_bytes
    step = max(1, TASK_BYTES // max(1, size))

    def run(some: range) -> None:
        for piece, data, mask in _pieces(layout, options, digests, some):
            visit(piece, data, mask)

    n = len(digests.pieces)
    return [
        BulkTask(len(some) * size, len(some) * size, partial(run, some))
        for some in (range(start, min(start + step, n)) for start in range(0, n, step))
    ]


def _pieces(
    layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests, pieces: range
) -> Iterator[tuple[int, Any, int]]:
    """Number, bytes, and filter mask of each piece that was written."""
    if digests.kind == "chunks":
        yield from _chunks(layout, pieces)
        return
    size = digests.rows_per_piece
    reader = H5pyReader(whole := _whole(layout), options, guard=heap_guard(whole, options))
    for piece in pieces:
        first, stop = piece * size, min((piece + 1) * size, layout.n_rows)
        if digests.kind == "rows":
            yield piece, _stored_rows(layout, first, stop), 0
        else:
            yield piece, _bytes_of(reader.read(np.arange(first, stop)), layout), 0


def _chunks(layout: ArrayLayout, pieces: range) -> Iterator[tuple[int, Any, int]]:
    table = layout.table
    assert table is not None, "an array in chunks"
    numbers = np.arange(pieces.start, pieces.stop)[table.offsets[pieces.start : pieces.stop] >= 0]
    if not len(numbers):
        return
    stops = table.sizes[numbers].cumsum()
    starts = stops - table.sizes[numbers]
    data = np.empty(int(stops[-1]), dtype=np.uint8)
    read_stored(layout, data, starts, stops, table.offsets[numbers], lambda i, _: f"chunk {numbers[i]}")
    for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
        yield number, data[start:stop], int(table.masks[number])


def _stored_rows(layout: ArrayLayout, first: int, stop: int) -> npt.NDArray[np.uint8]:
    assert layout.offset is not None, "an array that lies in one piece"
    n_bytes = layout.stored_row_bytes
    data = np.empty((stop - first) * n_bytes, dtype=np.uint8)
    one, place = np.zeros(1, dtype=np.int64), np.array([layout.offset + first * n_bytes])
    read_stored(layout, data, one, one + len(data), place, lambda _, at: f"row {first + at // max(1, n_bytes)}")
    return data


def _whole(layout: ArrayLayout) -> ArrayLayout:
    """The array with all members of its rows."""
    if not layout.members:
        return layout
    inner = layout.stored.subdtype[1] if layout.stored.subdtype else ()
    dtype = native(layout.stored.base)
    return replace(layout, key=layout.name, members=(), row_shape=(*layout.axes, *inner), dtype=dtype)


def _bytes_of(rows: npt.NDArray[Any], layout: ArrayLayout) -> Any:
    """What stands for values: their bytes, or those of their text."""
    if not rows.dtype.hasobject:
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    joined = hashlib.sha256()
    for value in rows.reshape(-1).tolist():
        if not isinstance(value, str):
            raise H5ValueError(
                f"{layout.key!r} in {layout.path!r} has the dtype {layout.stored}, of which no digests are made. Leave "
                "it out: name the arrays that you train from by --key."
            )
        text = value.encode(errors="surrogateescape")
        joined.update(len(text).to_bytes(8, "little"))
        joined.update(text)
    return joined.digest()

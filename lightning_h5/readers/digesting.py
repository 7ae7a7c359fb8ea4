"""Pieces of arrays and their digests: read to make them, or to compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5ValueError
from ..files import (
    ArrayDigests,
    ArrayLayout,
    OpenOptions,
    digest_of,
    kind_of,
    native,
    process_pool,
    skipped_bytes,
)
from ..stats import Counters
from ..types import IntArray
from .bulk import BulkTask
from .codecs import why_not_decodable
from .heaps import heap_guard
from .placed import PlacedReader
from .plain import PlainReader
from .slabs import SlotMemory
from .sources import ReaderSource
from .stored import read_stored

__all__ = ["CheckedRowSource", "can_digest", "digest_tasks", "verify_tasks"]

TASK_BYTES = 4 << 20


class _Pieces(Protocol):
    """Reads pieces of an array."""

    def __call__(self, pieces: range) -> Iterable[tuple[int, Any, int]]:
        """Number, bytes, and filter mask of each piece that is there."""
        ...


def digest_tasks(layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests) -> list[BulkTask]:
    """Tasks that make the digests of an array, and fill them in.

    Args:
        layout: the array.
        options: how its file is opened where the HDF5 library reads.
        digests: memory for them (see ``no_digests``).
    """

    def note(piece: int, data: Any, mask: int) -> None:
        digests.pieces[piece] = np.frombuffer(digest_of(data, mask), dtype=np.uint8)

    return _tasks(layout, options, digests, range(len(digests.pieces)), note)


def verify_tasks(layout: ArrayLayout, options: OpenOptions, place: int = 0, n_places: int = 1) -> list[BulkTask]:
    """Tasks that compare an array with its digests; each raises ``H5CorruptError`` where a piece is another one.

    Args:
        layout: an array with digests.
        options: how its file is opened where the HDF5 library reads.
        place: the part that is compared, of ``n_places`` parts.
        n_places: number of parts.
    """
    digests = layout.digests
    if digests is None:
        raise ValueError(f"{layout.key!r} has no digests")

    def compare(piece: int, data: Any, mask: int) -> None:
        digests.check(piece, data, layout, mask=mask)

    n = len(digests.pieces)
    return _tasks(layout, options, digests, range(n * place // n_places, n * (place + 1) // n_places), compare)


def can_digest(layout: ArrayLayout) -> bool:
    """Whether digests can be made of an array: of numbers and text, not of lists, references and the like."""
    return kind_of(layout.dtype) != "object" and (kind_of(layout.dtype) == "text" or not layout.stored.hasobject)


class CheckedRowSource(ReaderSource):
    """Rows that lie in the file as they are, a piece at a time, each compared with its digest.

    Args:
        layout: an unchunked array with digests.
        counters: where bytes read are counted.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters) -> None:
        if layout.digests is None:
            raise ValueError(f"{layout.key!r} has no digests")
        super().__init__(_CheckedReader(layout, layout.digests, counters), layout.digests.rows_per_piece)
        self.picks_rows = False  # a part of a piece says nothing of its digest

    def pick(self, slab: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``SlabSource.pick``."""
        piece = np.empty((self.rows_per_slab, *out.shape[1:]), dtype=out.dtype)
        self.load([slab], range(1), SlotMemory(piece, np.zeros(1, dtype=np.int64), self.rows_per_slab))
        out[...] = piece[rows]


class _CheckedReader(PlacedReader):
    """Reads one whole piece a call, and compares it."""

    def __init__(self, layout: ArrayLayout, digests: ArrayDigests, counters: Counters) -> None:
        super().__init__(layout, counters)
        self._digests = digests

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        super()._fetch(rows, out)
        self._digests.check(int(rows[0]) // self._digests.rows_per_piece, out.data, self.layout)


def _tasks(
    layout: ArrayLayout,
    options: OpenOptions,
    digests: ArrayDigests,
    pieces: range,
    visit: Callable[[int, Any, int], None],
) -> list[BulkTask]:
    read: _Pieces
    if layout.table is not None:
        size, read = layout.chunk_bytes, partial(_chunks, layout, options)
    else:
        size = digests.rows_per_piece * layout.stored_row_bytes
        read = partial(_rows, layout, digests) if digests.kind == "rows" else partial(_values, layout, options, digests)
    step = max(1, TASK_BYTES // max(1, size))
    return [
        BulkTask(len(some) * size, len(some) * size, partial(_run, read, some, visit))
        for start in range(pieces.start, pieces.stop, step)
        if (some := range(start, min(start + step, pieces.stop)))
    ]


def _run(read: _Pieces, pieces: range, visit: Callable[[int, Any, int], None]) -> None:
    for piece, data, mask in read(pieces):
        visit(piece, data, mask)


def _chunks(layout: ArrayLayout, options: OpenOptions, pieces: range) -> Iterable[tuple[int, Any, int]]:
    """Chunks as stored."""
    table = layout.table
    assert table is not None, "an array in chunks"
    if why_not_decodable(layout) is not None:
        _ensure_found(layout, options, pieces)
    numbers = np.arange(pieces.start, pieces.stop)[table.offsets[pieces.start : pieces.stop] >= 0]
    if not len(numbers):
        return
    stops = table.sizes[numbers].cumsum()
    starts = stops - table.sizes[numbers]
    data = np.empty(int(stops[-1]), dtype=np.uint8)
    read_stored(layout, data, starts, stops, table.offsets[numbers], lambda i, _: f"chunk {numbers[i]}")
    for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
        yield number, data[start:stop], int(table.masks[number])


def _ensure_found(layout: ArrayLayout, options: OpenOptions, pieces: range) -> None:
    """Makes sure that the HDF5 library, which reads these chunks, finds each where the table has it.

    It goes down a tree whose other nodes the table does not come from, and takes a chunk that it does not find for one
    that was never written.
    """
    table, chunks = layout.table, layout.chunks or ()
    assert table is not None, "an array in chunks"
    with process_pool().h5(layout.path, options, layout.guard) as handle:
        array = handle.array(layout).id
        skipped = skipped_bytes(array)
        for piece in pieces:
            corner = tuple(int(i) * n for i, n in zip(np.unravel_index(piece, table.grid), chunks, strict=True))
            found = array.get_chunk_info_by_coord(corner)
            place = -1 if found.byte_offset is None else found.byte_offset + skipped
            if place != table.offsets[piece] or (place >= 0 and found.size != table.sizes[piece]):
                raise H5CorruptError(
                    f"chunk {piece} of {layout.key!r} in {layout.path!r} is not found where the file's own list of "
                    "chunks has it. The file is damaged; copy it again."
                )


def _rows(layout: ArrayLayout, digests: ArrayDigests, pieces: range) -> Iterable[tuple[int, Any, int]]:
    """Runs of rows as stored."""
    assert layout.offset is not None, "an array that lies in one piece"
    n_bytes, size = layout.stored_row_bytes, digests.rows_per_piece
    first, last = pieces.start * size, min(pieces.stop * size, layout.n_rows)
    data = np.empty((last - first) * n_bytes, dtype=np.uint8)
    one = np.zeros(1, dtype=np.int64)
    place = np.array([layout.offset + first * n_bytes])
    read_stored(layout, data, one, one + len(data), place, lambda _, at: f"row {first + at // max(1, n_bytes)}")
    for piece in pieces:
        start = (piece - pieces.start) * size * n_bytes
        yield piece, data[start : start + size * n_bytes], 0


def _values(
    layout: ArrayLayout, options: OpenOptions, digests: ArrayDigests, pieces: range
) -> Iterable[tuple[int, Any, int]]:
    """Runs of rows as the HDF5 library reads them."""
    whole = _whole(layout)
    reader, size = PlainReader(whole, options, guard=heap_guard(whole, options)), digests.rows_per_piece
    for piece in pieces:
        rows = reader.read(np.arange(piece * size, min((piece + 1) * size, layout.n_rows)))
        yield piece, _bytes_of(rows, layout), 0


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

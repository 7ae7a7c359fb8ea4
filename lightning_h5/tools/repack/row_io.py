"""Rows of an array as bytes, a piece at a time: read and decoded in threads, permuted, and written in other chunks."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeAlias

import h5py
import numpy as np

from ...counters import Counters
from ...errors import H5CorruptError
from ...hdf5 import ArrayHandle, ArrayLayout, OpenOptions, layout_of, numpy_dtype
from ...hdf5.chunk_index import leaves_edges_plain
from ...readers import ArrayTarget, bulk_tasks, do_tasks, fallback_reason, open_source, usable_cores
from ...types import IntArray
from .compression import Bytes, encoder_of

PIECE_BYTES = 32 << 20  # bytes read, permuted or written at a time
MAX_IN_MEMORY = 64 << 20  # larger sets of rows go to a temporary file
MAX_ROWS = 1 << 18  # permuted at a time: row numbers take more memory than small rows
ENCODE_BYTES = 256 << 10  # per encoding task
MAX_CHUNKS = 1024  # per task, since each chunk is an object until it is written
MAX_TASKS = 64  # encoding at a time
MAX_WRITTEN = 1 << 14  # chunks written by the HDF5 library at a time: it needs 6 KiB for each

Order: TypeAlias = Callable[[int, int], IntArray]
"""The new places of the rows ``[start, stop)`` of the source."""
Pieces: TypeAlias = Iterator[tuple[int, Bytes]]
"""The first row of a piece, and its rows, shape ``(n, row_bytes)``."""
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First element of a part of an array, and its shape."""


def chunks_of(array_id: Any) -> tuple[int, ...] | None:
    """Return the shape of an array's chunks; None if it is not chunked."""
    plist = array_id.get_create_plist()
    return plist.get_chunk() if plist.get_layout() == h5py.h5d.CHUNKED else None


def row_bytes_of(array_id: Any) -> int:
    """Return the decoded bytes of a row."""
    return int(math.prod(array_id.shape[1:]) * array_id.get_type().get_size())


def rows_box(shape: tuple[int, ...], first: int, n_rows: int) -> Box:
    """Return the part of an array with some of its rows."""
    return (first, *[0] * (len(shape) - 1)), (n_rows, *shape[1:])


def _selection(array_id: Any, box: Box) -> tuple[Any, Any]:
    """Return the dataspaces of a part of an array, in memory and in the file."""
    space = array_id.get_space()
    space.select_hyperslab(*box)
    return h5py.h5s.create_simple(box[1]), space


def read_box(array_id: Any, name: str, box: Box, out: Bytes | None = None) -> Bytes:
    """Read a part of an array of any type through the HDF5 library, as bytes.

    Args:
        array_id: h5py's low-level dataset.
        name: name of the array, for messages.
        box: the part.
        out: memory to read into; None allocates it.

    Raises:
        H5CorruptError: the part cannot be read.
    """
    stored = array_id.get_type()
    out = np.empty(math.prod(box[1]) * stored.get_size(), dtype=np.uint8) if out is None else out.reshape(-1)
    values = out.view(f"V{stored.get_size()}").reshape(box[1])
    try:
        array_id.read(*_selection(array_id, box), values, stored)
    except (OSError, RuntimeError) as error:
        raise H5CorruptError(
            f"rows {box[0][0]} to {box[0][0] + box[1][0] - 1} of {name!r} cannot be read: {error}. The file is damaged "
            "there; copy it again, or write it again without these rows."
        ) from error
    return out


def raw_layout(array_id: Any, path: str, name: str) -> ArrayLayout | None:
    """Return an array of bytes for an array that can be decoded without the HDF5 library; otherwise None.

    The library has to read chunks that may have skipped filters without a record.
    """
    dataset, plist = h5py.Dataset(array_id), array_id.get_create_plist()
    if chunks_of(array_id) is None or not plist.get_nfilters() or numpy_dtype(dataset) is None:
        return None
    layout = layout_of(ArrayHandle(dataset), path, name)
    if layout.table is None or leaves_edges_plain(plist) is not False or fallback_reason(layout) is not None:
        return None
    raw = np.dtype(f"V{layout.stored.itemsize}")
    return layout.with_changes(stored=raw, dtype=raw, row_shape=layout.axes)


def read_rows(array_id: Any, name: str, raw: ArrayLayout | None, folder: str) -> Pieces:
    """Yield all rows in storage order, in pieces of up to 32 MiB.

    Args:
        array_id: h5py's low-level dataset, with rows of at least a byte.
        name: of the array.
        raw: the array as an array of bytes, to decode its chunks on all cores; None reads through the HDF5 library.
        folder: folder for temporary files.

    Raises:
        H5CorruptError: a chunk cannot be decoded.
    """
    n_rows, row_bytes = array_id.shape[0], row_bytes_of(array_id)
    step = (chunks_of(array_id) or (1,))[0]
    n_read = max(1, PIECE_BYTES // (step * row_bytes)) * step  # rows per read
    n_piece = max(1, PIECE_BYTES // row_bytes)
    source = None if raw is None else open_source(raw, OpenOptions(), 1, Counters())
    for start in range(0, n_rows, n_read):
        n_some = min(n_read, n_rows - start)
        rows = make_buffer(n_some * row_bytes, folder).reshape(n_some, row_bytes)
        if raw is None or source is None:
            read_box(array_id, name, rows_box(array_id.shape, start, n_some), rows)
        else:
            target = ArrayTarget(rows.reshape(-1).view(raw.dtype).reshape(n_some, *raw.axes))
            do_tasks(bulk_tasks(source, raw, range(start, start + n_some), target, 0), usable_cores(), lambda n: None)
        for at in range(0, n_some, n_piece):
            yield start + at, rows[at : at + n_piece]


def make_buffer(n_bytes: int, folder: str) -> Bytes:
    """Return memory; large amounts are in a temporary file without a name."""
    if n_bytes <= MAX_IN_MEMORY:
        return np.empty(n_bytes, dtype=np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)  # a full disk raises now, instead of SIGBUS later
        return np.frombuffer(mmap.mmap(file.fileno(), n_bytes), dtype=np.uint8)


def shuffle_pieces(pieces: Pieces, order: Order, n_rows: int, row_bytes: int, folder: str) -> Pieces:
    """Yield rows in another order; all rows are held, in a temporary file if they have more than 64 MiB.

    Args:
        pieces: all rows, in storage order.
        order: new places of the rows.
        n_rows: number of rows.
        row_bytes: bytes of a row.
        folder: folder for the temporary file.
    """
    held = make_buffer(n_rows * row_bytes, folder)
    rows_held = held.view(f"V{row_bytes}")
    for first, rows in pieces:
        for at in range(0, len(rows), MAX_ROWS):
            values = rows[at : at + MAX_ROWS].view(rows_held.dtype).reshape(-1)
            rows_held[order(first + at, first + at + len(values))] = values
    step = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, n_rows, step):
        yield first, held[first * row_bytes : (first + step) * row_bytes].reshape(-1, row_bytes)


def write_rows(copied: Any, pieces: Pieces, pool: Executor, report: Callable[[int], object]) -> None:
    """Write rows to a new array. Whole chunks are encoded in threads, if ``encoder_of`` supports their filters.

    Args:
        copied: h5py's low-level dataset with chunks of whole rows.
        pieces: all rows, in their order.
        pool: threads that encode.
        report: called with the bytes of rows that were written.
    """
    chunks, shape, itemsize = chunks_of(copied), copied.shape, copied.get_type().get_size()
    size, row_bytes = (chunks or (1,))[0], row_bytes_of(copied)
    encode = encoder_of(copied.get_create_plist(), itemsize) if chunks else None

    def encode_all(rows: Bytes) -> list[Bytes]:
        assert encode is not None
        return [encode(chunk) for chunk in rows.reshape(-1, size * row_bytes)]

    step = max(1, min(MAX_CHUNKS, ENCODE_BYTES // (size * row_bytes))) * size  # rows per task
    for first, rows in _in_whole_chunks(pieces, size):
        n_whole = 0 if encode is None else len(rows) // size * size
        for begin in range(0, n_whole, step * MAX_TASKS):
            starts = range(begin, min(n_whole, begin + step * MAX_TASKS), step)
            tasks = [rows[at : min(at + step, n_whole)] for at in starts]
            for start, encoded in zip(starts, pool.map(encode_all, tasks), strict=True):
                for number, data in enumerate(encoded):
                    copied.write_direct_chunk(rows_box(shape, first + start + number * size, size)[0], data)
        n_written = MAX_WRITTEN * size if chunks else len(rows)
        for at in range(n_whole, len(rows), n_written):  # the library pads the last chunk
            rows_to_write = rows[at : at + n_written]
            box = rows_box(shape, first + at, len(rows_to_write))
            values = rows_to_write.reshape(-1).view(f"V{itemsize}").reshape(box[1])
            copied.write(*_selection(copied, box), values, copied.get_type())
        report(rows.nbytes)


def _in_whole_chunks(pieces: Pieces, size: int) -> Pieces:
    """Yield rows in multiples of a chunk, except for the last rows."""
    first, rest = 0, None
    for start, rows in pieces:
        first, rows = (start, rows) if rest is None else (first, np.concatenate([rest, rows]))
        n_whole = len(rows) // size * size
        if n_whole:
            yield first, rows[:n_whole]
        first, rest = first + n_whole, rows[n_whole:].copy()
    if rest is not None and len(rest):
        yield first, rest

"""Rows of an array as bytes, a piece at a time: read and decoded in threads, permuted, and written in other chunks."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeAlias

import h5py
import numpy as np

from ..errors import H5CorruptError
from ..hdf5 import ArrayHandle, layout_of, numpy_dtype
from ..hdf5.chunk_index import leaves_edges_plain
from ..readers import fallback_reason
from ..readers.filters.pipeline import Pipeline
from ..types import IntArray
from .compression import Bytes, encoder_of

PIECE_BYTES = 32 << 20  # rows that are read, permuted or written at a time
MAX_IN_MEMORY = 64 << 20  # rows that are held together and take more go to a temporary file
MAX_SHARED = 1 << 30  # rows that share chunks and take more are read in parts, their chunks decoded repeatedly
MAX_ROWS = 1 << 18  # permuted at a time: the numbers of small rows take more memory than the rows
DECODE_BYTES = 1 << 20  # of a task that decodes,
ENCODE_BYTES = 256 << 10  # and of one that encodes,
MAX_CHUNKS = 1024  # each of whose chunks is an object until it is written
MAX_TASKS = 64  # that encode at a time

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


def boxes_of(shape: tuple[int, ...], itemsize: int, n_bytes: int, step: int = 1) -> Iterator[Box]:
    """Yield parts that make up an array, each of at most so many bytes, or of one element.

    Args:
        shape: of the array, with at least one axis and one element.
        itemsize: bytes of an element.
        n_bytes: of a part.
        step: rows of a part are a multiple of this, if that many fit.
    """
    box = list(shape)
    for axis in range(len(shape)):
        each = math.prod(shape[axis + 1 :]) * itemsize
        box[axis] = max(1, min(shape[axis], n_bytes // each))
        if n_bytes >= each:
            break
    box[0] = box[0] // step * step or box[0]
    for corner in itertools.product(*(range(0, n, at) for n, at in zip(shape, box, strict=True))):
        yield corner, tuple(min(n, size - at) for at, n, size in zip(corner, box, shape, strict=True))


def rows_box(shape: tuple[int, ...], first: int, n_rows: int) -> Box:
    """Return the part of an array that is made of some rows."""
    return (first, *[0] * (len(shape) - 1)), (n_rows, *shape[1:])


def read_box(array_id: Any, name: str, box: Box, out: Bytes | None = None) -> Bytes:
    """Read a part of an array through the HDF5 library, as bytes.

    Args:
        array_id: h5py's low-level dataset.
        name: of it, for messages.
        box: the part.
        out: memory to read into; None makes some.

    Raises:
        H5CorruptError: it cannot be read.
    """
    stored = array_id.get_type()
    out = np.empty(math.prod(box[1]) * stored.get_size(), dtype=np.uint8) if out is None else out.reshape(-1)
    space = array_id.get_space()
    space.select_hyperslab(*box)
    values = out.view(f"V{stored.get_size()}").reshape(box[1])
    try:
        array_id.read(h5py.h5s.create_simple(box[1]), space, values, stored)
    except (OSError, RuntimeError) as error:
        raise H5CorruptError(
            f"rows {box[0][0]} to {box[0][0] + box[1][0] - 1} of {name!r} cannot be read: {error}. The file is damaged "
            "there; copy it again, or write it again without these rows."
        ) from error
    return out


def pipeline_of(array_id: Any, path: str, name: str) -> Pipeline | None:
    """Return what decodes an array's chunks outside the HDF5 library's lock; None if the library has to read it.

    The library reads chunks that may have left out filters without a record of it.
    """
    dataset, plist = h5py.Dataset(array_id), array_id.get_create_plist()
    chunks = chunks_of(array_id)
    if chunks is None or not plist.get_nfilters() or numpy_dtype(dataset) is None:
        return None
    if chunks[0] * row_bytes_of(array_id) > MAX_SHARED:
        return None
    layout = layout_of(ArrayHandle(dataset), path, name)
    if layout.table is None or leaves_edges_plain(plist) is not False or fallback_reason(layout) is not None:
        return None
    return Pipeline(layout)


def read_rows(array_id: Any, name: str, pipeline: Pipeline | None, *, pool: Executor, folder: str) -> Pieces:
    """Yield all rows in storage order, in pieces of up to 32 MiB; the next ones are decoded meanwhile.

    Args:
        array_id: h5py's low-level dataset, with rows of at least a byte.
        name: of the array.
        pipeline: decodes its chunks; None to read through the HDF5 library alone.
        pool: threads that decode.
        folder: for temporary files.

    Raises:
        H5CorruptError: a chunk cannot be decoded.
    """
    n_rows, row_bytes = array_id.shape[0], row_bytes_of(array_id)
    step = min((chunks_of(array_id) or (1,))[0], max(1, MAX_SHARED // row_bytes))
    n_read = min(max(1, PIECE_BYTES // (step * row_bytes)) * step, n_rows)  # rows that are read at a time
    n_piece = max(1, PIECE_BYTES // row_bytes)
    n_ahead = 2 if n_read * row_bytes <= MAX_IN_MEMORY else 1
    todo, running = deque(range(0, n_rows, n_read)), deque[Any]()
    while todo or running:
        while todo and len(running) < n_ahead:
            start = todo.popleft()
            n_some = min(n_read, n_rows - start)
            rows = _buffer(n_some * row_bytes, folder).reshape(n_some, row_bytes)
            if pipeline is None:
                box = rows_box(array_id.shape, start, n_some)
                tasks: list[Callable[[], object]] = [partial(read_box, array_id, name, box, rows)]
            else:
                tasks = list(_decoding_tasks(array_id, name, pipeline, start, rows))
            running.append((start, rows, [pool.submit(task) for task in tasks]))
        start, rows, futures = running.popleft()
        for future in futures:
            future.result()
        for at in range(0, len(rows), n_piece):
            yield start + at, rows[at : at + n_piece]


def _buffer(n_bytes: int, folder: str) -> Bytes:
    """Return memory, in a temporary file without a name if it is much."""
    if n_bytes <= MAX_IN_MEMORY:
        return np.empty(n_bytes, dtype=np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)  # no room is an error now, and a SIGBUS later
        return np.frombuffer(mmap.mmap(file.fileno(), n_bytes), dtype=np.uint8)


def _decoding_tasks(
    array_id: Any, name: str, pipeline: Pipeline, start: int, rows: Bytes
) -> Iterator[Callable[[], object]]:
    """Yield tasks that decode the chunks of some rows, the first of which begins a chunk."""
    chunks, itemsize, shape = chunks_of(array_id) or (), array_id.get_type().get_size(), array_id.shape
    values = rows.reshape(-1).view(f"V{itemsize}").reshape(-1, *shape[1:])
    starts, ends = rows_box(shape, start, len(rows))[0], (start + len(rows), *shape[1:])
    corners = list(itertools.product(*map(range, starts, ends, chunks)))

    def decode(some: list[tuple[int, ...]]) -> None:
        decoded = np.empty(math.prod(chunks) * itemsize, dtype=np.uint8)
        for corner in some:
            size = tuple(min(n, end - at) for at, n, end in zip(corner, chunks, ends, strict=True))
            first = (corner[0] - start, *corner[1:])
            target = values[tuple(slice(at, at + n) for at, n in zip(first, size, strict=True))]
            try:
                mask, stored = array_id.read_direct_chunk(corner)
            except (OSError, RuntimeError):
                # Mostly a chunk that was never written. `get_chunk_info_by_coord` cannot tell: it compares the
                # coordinates that the library reports, which are wrong for some arrays (see `hdf5.chunk_index`).
                target[...] = read_box(array_id, name, (corner, size)).view(values.dtype).reshape(size)
                continue
            try:
                pipeline.decode(np.frombuffer(stored, dtype=np.uint8), mask, decoded)
            except Exception as error:  # of whatever type the decoder's error is
                raise H5CorruptError(
                    f"the chunk at {corner} of {name!r} does not decode: {error}. The file is damaged there; copy it "
                    "again, or write it again without these rows."
                ) from error
            target[...] = decoded.view(values.dtype).reshape(chunks)[tuple(map(slice, size))]

    step = max(1, DECODE_BYTES // (math.prod(chunks) * itemsize))
    return (partial(decode, corners[at : at + step]) for at in range(0, len(corners), step))


def shuffle_pieces(pieces: Pieces, order: Order, n_rows: int, row_bytes: int, folder: str) -> Pieces:
    """Yield rows in another order; all of them are held, in a temporary file if they take more than 64 MiB.

    Args:
        pieces: all rows, in storage order.
        order: their new places.
        n_rows: how many there are.
        row_bytes: of each.
        folder: for the temporary file.
    """
    held = _buffer(n_rows * row_bytes, folder)
    rows_held = held.view(f"V{row_bytes}")
    for first, rows in pieces:
        for at in range(0, len(rows), MAX_ROWS):
            some = rows[at : at + MAX_ROWS].view(rows_held.dtype).reshape(-1)
            rows_held[order(first + at, first + at + len(some))] = some
    step = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, n_rows, step):
        yield first, held[first * row_bytes : (first + step) * row_bytes].reshape(-1, row_bytes)


def write_rows(copied: Any, pieces: Pieces, pool: Executor, done: Callable[[int], object]) -> None:
    """Write rows to a new array. Whole chunks are encoded in threads, if ``encoder_of`` can.

    Args:
        copied: h5py's low-level dataset, whose chunks hold whole rows.
        pieces: all rows, in their order.
        pool: threads that encode.
        done: called with the bytes of rows that were written.
    """
    chunks, shape, itemsize = chunks_of(copied), copied.shape, copied.get_type().get_size()
    size, row_bytes = (chunks or (1,))[0], row_bytes_of(copied)
    encode = encoder_of(copied.get_create_plist(), itemsize) if chunks else None

    def encode_all(rows: Bytes) -> list[Bytes]:
        assert encode is not None
        return [encode(chunk) for chunk in rows.reshape(-1, size * row_bytes)]

    step = max(1, min(MAX_CHUNKS, ENCODE_BYTES // (size * row_bytes))) * size  # rows of a task
    for first, rows in _in_whole_chunks(pieces, size):
        n_whole = 0 if encode is None else len(rows) // size * size
        for begin in range(0, n_whole, step * MAX_TASKS):
            starts = range(begin, min(n_whole, begin + step * MAX_TASKS), step)
            tasks = [rows[at : min(at + step, n_whole)] for at in starts]
            for start, encoded in zip(starts, pool.map(encode_all, tasks), strict=True):
                for number, data in enumerate(encoded):
                    copied.write_direct_chunk(rows_box(shape, first + start + number * size, size)[0], data)
        if n_whole < len(rows):  # the library fills up the last chunk
            corner, extent = rows_box(shape, first + n_whole, len(rows) - n_whole)
            space = copied.get_space()
            space.select_hyperslab(corner, extent)
            values = rows[n_whole:].reshape(-1).view(f"V{itemsize}").reshape(extent)
            copied.write(h5py.h5s.create_simple(extent), space, values, copied.get_type())
        done(rows.nbytes)


def _in_whole_chunks(pieces: Pieces, size: int) -> Pieces:
    """Yield rows in multiples of a chunk's, but for the last ones."""
    first, rest = 0, None
    for start, rows in pieces:
        first, rows = (start, rows) if rest is None else (first, np.concatenate([rest, rows]))
        n_whole = len(rows) // size * size
        if n_whole:
            yield first, rows[:n_whole]
        first, rest = first + n_whole, rows[n_whole:].copy()
    if rest is not None and len(rest):
        yield first, rest

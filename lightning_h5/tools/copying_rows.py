"""Rows of an array as bytes, a piece at a time: read, permuted, and written in the chunks of another layout."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
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

__all__ = [
    "PIECE_BYTES",
    "Box",
    "Order",
    "Pieces",
    "boxes_of",
    "chunks_of",
    "in_order",
    "pipeline_of",
    "read_box",
    "read_rows",
    "row_bytes_of",
    "shuffle_bytes_needed",
    "write_rows",
]

PIECE_BYTES = 32 << 20  # rows that are read, permuted or written at a time
MAX_IN_MEMORY = 64 << 20  # rows that are decoded together and take more go to a temporary file,
MAX_IN_FILE = 1 << 30  # up to here; chunks that span more rows than that are decoded several times
MAX_ROWS = 1 << 18  # permuted at a time: each takes some words, which is more than a label does
DECODE_BYTES = 1 << 20  # of a task that decodes,
ENCODE_BYTES = 256 << 10  # and of one that encodes: small chunks are encoded many to a task,
ENCODE_CHUNKS = 1024  # of which each is an object until it is written
ENCODE_TASKS = 64
PLACE_BYTES = 8

Order: TypeAlias = Callable[[int, int], IntArray]
"""Where the rows ``[start, stop)`` of the source go."""
Pieces: TypeAlias = Iterator[tuple[int, Bytes]]
"""The first row of a piece, and its rows, shape ``(n, row_bytes)``; memory is reused for the next piece."""
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First element of a part of an array, and its shape."""


def chunks_of(array_id: Any) -> tuple[int, ...] | None:
    """Return the shape of an array's chunks; None if it has none."""
    plist = array_id.get_create_plist()
    return plist.get_chunk() if plist.get_layout() == h5py.h5d.CHUNKED else None


def row_bytes_of(array_id: Any) -> int:
    """Return the decoded bytes of a row."""
    return int(math.prod(array_id.shape[1:]) * array_id.get_type().get_size())


def boxes_of(shape: tuple[int, ...], itemsize: int, n_bytes: int, step: int = 1) -> Iterator[Box]:
    """Yield parts that an array falls into, each of at most so many bytes, or of one element.

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
    (start, *_), (n_rows, *_) = box
    stored = array_id.get_type()
    out = np.empty(math.prod(box[1]) * stored.get_size(), dtype=np.uint8) if out is None else out.reshape(-1)
    space = array_id.get_space()
    space.select_hyperslab(*box)
    values = out.view(f"V{stored.get_size()}").reshape(box[1])
    try:
        array_id.read(h5py.h5s.create_simple(box[1]), space, values, stored)
    except (OSError, RuntimeError) as error:
        raise H5CorruptError(
            f"rows {start} to {start + n_rows - 1} of {name!r} cannot be read: {error}. The file is damaged there; "
            "copy it again, or write it again without these rows."
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
    if chunks[0] * row_bytes_of(array_id) > MAX_IN_FILE:
        return None
    layout = layout_of(ArrayHandle(dataset), path, name)
    if layout.table is None or leaves_edges_plain(plist) is not False or fallback_reason(layout) is not None:
        return None
    return Pipeline(layout)


def _scratch(n_bytes: int, folder: str) -> Bytes:
    """Return memory, in a temporary file without a name if it is much."""
    if n_bytes <= MAX_IN_MEMORY:
        return np.empty(n_bytes, dtype=np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)  # no room is an error now, and a SIGBUS later
        return np.frombuffer(mmap.mmap(file.fileno(), n_bytes), dtype=np.uint8)


class _Reading:
    """Reads rows of one array into memory, by tasks for threads.

    Args:
        array_id: h5py's low-level dataset.
        name: of the array.
        pipeline: decodes its chunks; None to read through the HDF5 library.
    """

    def __init__(self, array_id: Any, name: str, pipeline: Pipeline | None) -> None:
        self._id, self._name, self._pipeline = array_id, name, pipeline
        self._shape, self._itemsize = array_id.shape, array_id.get_type().get_size()
        self._chunks = chunks_of(array_id) or ()
        self._grid = [-(-size // step) for size, step in zip(self._shape, self._chunks, strict=False)]
        dataset = h5py.Dataset(array_id)
        self._fill = None if pipeline is None else np.asarray(dataset.fillvalue, dataset.dtype)

    def tasks(self, start: int, rows: Bytes) -> list[Callable[[], object]]:
        """Return tasks that read the rows from ``start`` on, which begin with a chunk if there is a pipeline."""
        if self._pipeline is None:
            box = (start, *[0] * (len(self._shape) - 1)), (len(rows), *self._shape[1:])
            return [partial(read_box, self._id, self._name, box, rows)]
        values = rows.reshape(-1).view(f"V{self._itemsize}").reshape(-1, *self._shape[1:])
        n_rows, per_row = self._chunks[0], math.prod(self._grid[1:])
        numbers = range(start // n_rows * per_row, -(-(start + len(rows)) // n_rows) * per_row)
        step = max(1, DECODE_BYTES // (math.prod(self._chunks) * self._itemsize))
        return [partial(self._decode, numbers[at : at + step], start, values) for at in range(0, len(numbers), step)]

    def _decode(self, numbers: range, start: int, values: Any) -> None:
        """Decode chunks, which the library finds by their coordinates."""
        assert self._pipeline is not None
        assert self._fill is not None
        decoded = np.empty(math.prod(self._chunks) * self._itemsize, dtype=np.uint8)
        for number in numbers:
            place = np.unravel_index(number, self._grid)
            corner = tuple(int(at) * step for at, step in zip(place, self._chunks, strict=True))
            target = values[
                tuple(slice(at, at + n) for at, n in zip((corner[0] - start, *corner[1:]), self._chunks, strict=True))
            ]
            if self._id.get_chunk_info_by_coord(corner).byte_offset is None:  # never written
                target[...] = self._fill.view(values.dtype)
                continue
            try:
                mask, stored = self._id.read_direct_chunk(corner)
                self._pipeline.decode(np.frombuffer(stored, dtype=np.uint8), mask, decoded)
            except Exception as error:  # of whatever type the decoder's error is
                raise H5CorruptError(
                    f"the chunk at {corner} of {self._name!r} does not decode: {error}. The file is damaged there; "
                    "copy it again, or write it again without these rows."
                ) from error
            chunk = decoded.view(values.dtype).reshape(self._chunks)
            target[...] = chunk[tuple(map(slice, target.shape))]


def read_rows(array_id: Any, name: str, pipeline: Pipeline | None, *, pool: Executor, folder: str) -> Pieces:
    """Yield all rows in storage order, in pieces of up to 32 MiB; the next ones are decoded meanwhile.

    Each chunk is decoded once, unless the rows that share chunks take more than a GiB.

    Args:
        array_id: h5py's low-level dataset, with rows of at least a byte.
        name: of the array.
        pipeline: see ``pipeline_of``; None to read through the HDF5 library alone.
        pool: threads that decode.
        folder: for temporary files.

    Raises:
        H5CorruptError: a chunk cannot be decoded.
    """
    n_rows, row_bytes = array_id.shape[0], row_bytes_of(array_id)
    step = min((chunks_of(array_id) or (1,))[0], max(1, MAX_IN_FILE // row_bytes))
    n_slab = min(max(1, PIECE_BYTES // (step * row_bytes)) * step, n_rows)
    n_piece = max(1, PIECE_BYTES // row_bytes)
    reading = _Reading(array_id, name, pipeline)
    n_bytes = n_slab * row_bytes
    free = deque(_scratch(n_bytes, folder) for _ in range(2 if n_bytes <= MAX_IN_MEMORY else 1))
    todo, ahead = deque(range(0, n_rows, n_slab)), deque[tuple[int, Bytes, Bytes, list[Future[object]]]]()
    while todo or ahead:
        while todo and free:
            start, memory = todo.popleft(), free.popleft()
            rows = memory[: min(n_slab, n_rows - start) * row_bytes].reshape(-1, row_bytes)
            ahead.append((start, rows, memory, [pool.submit(task) for task in reading.tasks(start, rows)]))
        start, rows, memory, futures = ahead.popleft()
        for future in futures:
            future.result()
        for at in range(0, len(rows), n_piece):
            yield start + at, rows[at : at + n_piece]
        free.append(memory)


def in_order(pieces: Pieces, order: Order, n_rows: int, row_bytes: int, folder: str) -> Pieces:
    """Yield rows in another order, in bounded memory.

    Rows are scattered to buckets, each a range of the new order that fits in memory, with the places they belong to.
    The buckets lie in a temporary file of the rows' size, unless all of them take less than 64 MiB.

    Args:
        pieces: all rows, in storage order.
        order: where they go.
        n_rows: how many there are.
        row_bytes: of each.
        folder: for the temporary file.
    """
    record = np.dtype([("place", "<i8"), ("row", f"V{row_bytes}")])
    size = max(1, PIECE_BYTES // record.itemsize)  # rows of a bucket
    records = _scratch(n_rows * record.itemsize, folder).view(record)
    filled = np.arange(0, n_rows, size)  # where the next row of each bucket goes
    for first, rows in pieces:
        for at in range(0, len(rows), MAX_ROWS):
            some = rows[at : at + MAX_ROWS].view(record["row"]).reshape(-1)
            places = order(first + at, first + at + len(some))
            buckets = places // size
            by_bucket = np.argsort(buckets, kind="stable")
            counts = np.bincount(buckets, minlength=len(filled))
            slots = np.repeat(filled - (np.cumsum(counts) - counts), counts) + np.arange(len(some))
            records["place"][slots] = places[by_bucket]
            records["row"][slots] = some[by_bucket]
            filled = filled + counts
    out = np.empty(min(size, n_rows), dtype=record["row"])
    for first in range(0, n_rows, size):
        bucket = records[first : first + size]
        out[bucket["place"] - first] = bucket["row"]
        yield first, out[: len(bucket)].view(np.uint8).reshape(len(bucket), row_bytes)


def shuffle_bytes_needed(n_rows: int, row_bytes: int) -> int:
    """Return the bytes of the temporary file in which rows are put in another order."""
    n_bytes = n_rows * (row_bytes + PLACE_BYTES)
    return n_bytes if n_bytes > MAX_IN_MEMORY else 0


def write_rows(copied: Any, pieces: Pieces, pool: Executor, done: Callable[[int], object]) -> None:
    """Write rows to a new array. Whole chunks are encoded in threads, if ``encoder_of`` can.

    Args:
        copied: h5py's low-level dataset, whose chunks hold whole rows.
        pieces: all rows, in their order.
        pool: threads that encode.
        done: called with the bytes of rows that were written.
    """
    chunks, itemsize, row_bytes = chunks_of(copied), copied.get_type().get_size(), row_bytes_of(copied)
    size, across = (chunks or (1,))[0], copied.shape[1:]
    encode = encoder_of(copied.get_create_plist(), itemsize) if chunks else None
    step = max(1, min(ENCODE_CHUNKS, ENCODE_BYTES // (size * row_bytes))) * size
    for first, rows in _in_multiples(pieces, size):
        n_whole = 0 if encode is None else len(rows) // size * size
        for begin in range(0, n_whole, step * ENCODE_TASKS):
            starts = range(begin, min(n_whole, begin + step * ENCODE_TASKS), step)
            some = [rows[at : min(at + step, n_whole)].reshape(-1, size * row_bytes) for at in starts]
            each = partial(_each, encode)  # type: ignore[arg-type]  # there are no whole chunks without an encoder
            for start, encoded in zip(starts, pool.map(each, some), strict=True):
                for number, data in enumerate(encoded):
                    copied.write_direct_chunk((first + start + number * size, *[0] * len(across)), data)
        if n_whole < len(rows):  # the library fills up the last chunk
            rest = rows[n_whole:]
            space, shape = copied.get_space(), (len(rest), *across)
            space.select_hyperslab((first + n_whole, *[0] * len(across)), shape)
            values = rest.reshape(-1).view(f"V{itemsize}").reshape(shape)
            copied.write(h5py.h5s.create_simple(shape), space, values, copied.get_type())
        done(rows.nbytes)


def _each(encode: Callable[[Bytes], Bytes], chunks: Iterable[Bytes]) -> list[Bytes]:
    return [encode(chunk) for chunk in chunks]


def _in_multiples(pieces: Pieces, size: int) -> Pieces:
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

"""Where rows of bytes are written to: into chunks that are encoded in threads, or through the HDF5 library."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import h5py
import numpy as np

from ...files.chunks import leaves_edges_plain
from .compression import steps_of
from .encoders import ChunkEncoder, chunk_encoder
from .raw_array import Bytes, RawArray, write_region
from .raw_rows import PIECE_BYTES

__all__ = ["RowTarget"]

TASK_BYTES = 256 << 10  # small chunks are encoded many to a task: a task costs about as much as encoding 4 KiB
TASK_CHUNKS = 1024  # each is some objects until it is written, however small
AHEAD_BYTES = 64 << 20  # decoded bytes of chunks that are encoded and not yet written
MOST_TASKS = 64


class RowTarget:
    """An array that rows are put into, in ascending order, a piece at a time.

    Chunks of which no row is put stay unwritten; rows that are missing in others, or in an array without chunks, get
    the fill value. Chunks are written in their order, so that the same input gives the same file.

    Args:
        array: what is written to; its chunks, if any, hold whole rows.
        pool: threads that encode.
        done: called with the bytes of rows that were written.
    """

    def __init__(self, array: RawArray, pool: Executor, done: Callable[[int], None]) -> None:
        self._array, self._pool, self._done = array, pool, done
        plist = array.id.get_create_plist()
        self._is_chunked = plist.get_layout() == h5py.h5d.CHUNKED
        self.rows_per_chunk: int = plist.get_chunk()[0] if self._is_chunked else 1
        self._encoder = _encoder_of(array, plist) if self._is_chunked else None
        self._rest: Bytes = np.empty((0, array.row_bytes), dtype=np.uint8)  # rows of a chunk that is not complete yet
        self._next = 0  # the row after those that were put
        # Where only the library knows the fill value, it reads, and then all rows are put.
        self._fill = np.frombuffer(array.fill or bytes(array.itemsize), dtype=np.uint8)

    def put(self, first: int, rows: Bytes) -> None:
        """Writes rows; what is given may be written over once this returns.

        Args:
            first: number of the first.
            rows: shape ``(n, row_bytes)``, C-contiguous.
        """
        size = self.rows_per_chunk
        if first > self._next:
            self._skip_to(first)
        self._next = first + len(rows)
        if len(self._rest):
            n_more = min(size - len(self._rest), len(rows))
            self._rest = np.concatenate([self._rest, rows[:n_more]])
            first, rows = first + n_more, rows[n_more:]
            if len(self._rest) == size:
                whole, self._rest = self._rest, self._rest[:0]
                self._write(first - size, whole)
        n_whole = len(rows) // size * size
        if n_whole:
            self._write(first, rows[:n_whole])
        if n_whole < len(rows):
            self._rest = rows[n_whole:].copy()

    def finish(self) -> None:
        """Writes the rows of the last chunk."""
        if self._next and not self._is_chunked:
            self._skip_to(self._array.n_rows)
        if len(self._rest):
            self._write(self._next - len(self._rest), self._rest)

    def _skip_to(self, first: int) -> None:
        """Rows that were never written: missing ones of a chunk that has others get the fill value."""
        size = self.rows_per_chunk
        if not self._is_chunked:
            step = max(1, PIECE_BYTES // self._array.row_bytes)
            for at in range(self._next, first, step):
                self.put(at, self._filled(min(step, first - at)))
            return
        if len(self._rest):
            stop = min(first, -(-self._next // size) * size)
            self.put(self._next, self._filled(stop - self._next))
        missing = first - max(first // size * size, self._next)
        if missing:
            self._rest = self._filled(missing)

    def _filled(self, n_rows: int) -> Bytes:
        rows: Bytes = np.empty((n_rows, self._array.row_bytes), dtype=np.uint8)
        rows.reshape(-1, self._array.itemsize)[...] = self._fill
        return rows

    def _write(self, first: int, rows: Bytes) -> None:
        """Writes whole chunks, or the last one."""
        if self._encoder is None:
            write_region(self._array, self._corner(first), (len(rows), *self._array.shape[1:]), rows)
            self._done(rows.nbytes)
            return
        size = self.rows_per_chunk
        step = max(1, min(TASK_CHUNKS, TASK_BYTES // (size * self._array.row_bytes))) * size
        todo = deque((at, rows[at : at + step]) for at in range(0, len(rows), step))
        most = max(1, min(MOST_TASKS, AHEAD_BYTES // (step * self._array.row_bytes)))
        ahead: deque[tuple[int, Bytes, Future[list[tuple[int, Bytes]]]]] = deque()
        try:
            while todo or ahead:
                while todo and len(ahead) < most:
                    at, some = todo.popleft()
                    ahead.append((first + at, some, self._pool.submit(self._encode, self._encoder, some)))
                at, some, future = ahead.popleft()
                for number, (mask, data) in enumerate(future.result()):
                    self._array.id.write_direct_chunk(self._corner(at + number * size), data, mask)
                self._done(some.nbytes)
        finally:
            for *_, future in ahead:
                future.cancel()

    def _corner(self, first: int) -> tuple[int, ...]:
        return (first, *(0,) * (len(self._array.shape) - 1))

    def _encode(self, encoder: ChunkEncoder, rows: Bytes) -> list[tuple[int, Bytes]]:
        size = self.rows_per_chunk
        if missing := -len(rows) % size:  # what hangs over the edge shows when the array is made longer
            rows = np.concatenate([rows, self._filled(missing)])
        return [encoder.encode(rows[at : at + size].reshape(-1)) for at in range(0, len(rows), size)]


def _encoder_of(array: RawArray, plist: Any) -> ChunkEncoder | None:
    filters, are_optional = steps_of(plist)
    if array.fill is None or (filters and leaves_edges_plain(plist) is not False):
        return None
    return chunk_encoder(filters, are_optional, array.itemsize)

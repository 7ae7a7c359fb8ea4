"""Read rows at known places in the file, by position or from a memory map, without HDF5's lock."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, Runs, process_pool
from ..types import IntArray
from .base import LayoutReader, address, check_bounds, take_rows
from .many_reads import is_cached
from .raw_io import give_back, prefetch_stored, read_stored

__all__ = ["ContiguousReader", "MappedReader", "RunsReader"]

N_LOOKS = 3  # rows of a batch to look up in the page cache
LOOK_EVERY = 8  # reads per lookup, as long as lookups find cached rows
N_PROBES = 32  # places per array: files enter and leave the page cache in long pieces


class _StoredRows(LayoutReader):
    """Reads contiguous rows, and converts them if necessary."""

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        if not layout.is_contiguous:
            raise ValueError(f"rows of {layout.key!r} have no fixed place in their file: {layout.plain_reason}")
        self._offset = layout.offset or 0
        self._row_bytes = layout.stored_row_bytes
        # Numbers in native byte order can be read directly into the batch.
        self._as_stored = not layout.members and layout.stored.base.isnative

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        if self._row_bytes == 0:
            return
        began = perf_counter()
        if self._as_stored and out.flags.c_contiguous:
            self._fetch(rows, out.reshape(-1).view(np.uint8))
        else:
            stored = np.empty((len(rows), *self.layout.axes), dtype=self.layout.stored)
            self._fetch(rows, stored.reshape(-1).view(np.uint8))
            out[...] = self.layout.member_of(stored)
        n_bytes = len(rows) * self._row_bytes
        self._counters.add(bytes_read=n_bytes, bytes_decoded=n_bytes, read_seconds=perf_counter() - began)

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        """Copy stored rows, one after the other, into bytes."""
        raise NotImplementedError

    def _places(self, rows: IntArray) -> IntArray:
        """Return the positions of rows in the file."""
        table = self.layout.table
        if table is None:
            return self._offset + rows * self._row_bytes
        chunks, within = np.divmod(rows, self.layout.rows_per_chunk)
        places: IntArray = table.offsets[chunks] + within * self._row_bytes
        return places

    def will_need(self, rows: range) -> None:
        """See ``LayoutReader.will_need``; in large pieces."""
        if rows and self._row_bytes:
            prefetch_stored(self.layout, *self._pieces(rows), self._counters)

    def give_back(self, rows: range) -> None:
        """See ``LayoutReader.give_back``."""
        if rows and self._row_bytes:
            give_back(self.layout, *self._pieces(rows))

    def _pieces(self, rows: range) -> tuple[IntArray, IntArray]:
        """Return where pieces of neighboring rows begin in the file, and their bytes."""
        cuts = [rows.start, rows.stop]
        if self.layout.table is not None:  # each chunk has its own place
            step = self.layout.rows_per_chunk
            cuts[1:1] = range((rows.start // step + 1) * step, rows.stop, step)
        return self._places(np.array(cuts[:-1])), np.diff(cuts) * self._row_bytes


class ContiguousReader(_StoredRows):
    """Reads rows by position: neighbors in the file as one piece, a batch in one call (see ``raw_io``).

    For contiguous arrays, and for unfiltered chunks of whole rows. Takes about 3 microseconds a row in the page cache,
    without the interpreter's lock.
    """

    def _joined(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the first of rows that are neighbors in the file, where they begin there, and the bytes of all."""
        n_bytes, offsets = self._row_bytes, self._places(rows)
        follows = offsets[1:] - offsets[:-1] == n_bytes
        if not follows.any():
            return np.arange(len(rows)), offsets, np.full(len(rows), n_bytes)
        first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
        return first, offsets[first], np.diff(first, append=len(rows)) * n_bytes

    def will_need_each(self, rows: IntArray) -> None:
        """Begin to fetch single rows. Does not wait, and never raises."""
        if len(rows) and self._row_bytes:
            prefetch_stored(self.layout, *self._joined(rows)[1:], self._counters)

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        first, offsets, sizes = self._joined(rows)
        starts = first * self._row_bytes

        def name(piece: int, at: int) -> str:
            return f"row {rows[first[piece] + at // self._row_bytes]}"

        read_stored(self.layout, out, starts, starts + sizes, offsets, name, self._counters)


class RunsReader(_StoredRows):
    """Reads a part of each row of an array without chunks: its pieces by position, a batch in one call.

    Args:
        layout: the array.
        runs: the array's ``runs``.
        counters: counts bytes.
    """

    def __init__(self, layout: ArrayLayout, runs: Runs, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self._runs, self._row_bytes = runs, len(runs.begins) * runs.n_bytes

    def _places(self, rows: IntArray) -> IntArray:
        runs = self._runs
        return (runs.offset + rows[:, np.newaxis] * runs.stride + runs.begins).reshape(-1)

    def _pieces(self, rows: range) -> tuple[IntArray, IntArray]:
        places = self._places(np.array(rows))
        return places, np.full(len(places), self._runs.n_bytes)

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        runs = self._runs
        offsets = self._places(rows)
        starts = np.arange(len(offsets)) * runs.n_bytes

        def name(piece: int, at: int) -> str:
            return f"row {rows[piece // len(runs.begins)]}"

        read_stored(self.layout, out, starts, starts + runs.n_bytes, offsets, name, self._counters)


class MappedReader(_StoredRows):
    """Copies rows from a memory map of the file, a batch in one call without the interpreter's lock.

    Two to three times as fast as ``ContiguousReader``. Do not use it for files that can be truncated: reading a missing
    page ends the process with SIGBUS, and no exception can be raised.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        if layout.offset is None:
            raise ValueError(f"{layout.key!r} is chunked, and each chunk has its own place")
        self._by_position = ContiguousReader(layout, counters)
        self._lock = threading.Lock()
        self._rows: npt.NDArray[np.uint8] | None = None
        self._n_unseen = 0  # reads since the last lookup, which found cached rows

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        if self._are_cached(rows):
            take_rows(self._map(), rows, out.reshape(len(rows), self._row_bytes))
        else:  # a map would read one after the other, and 128 KiB around each
            self._by_position._fetch(rows, out)

    def read_on_all_cores(self, rows: IntArray, out: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Do the same as ``read``, with torch's threads if these are faster. Only in a thread of the caller.

        Args:
            rows: see ``RowReader.read``.
            out: see ``RowReader.read``.
        """
        if not (self._as_stored and self._row_bytes and len(rows) and out.flags.c_contiguous):
            return self.read(rows, out)
        if not self._are_cached(rows):
            return self.read(rows, out)
        check_bounds(rows, len(self), f"{self.layout.key!r} in {self.layout.path!r}")
        began = perf_counter()
        mapped = self._map()  # referenced until the rows are copied: another thread may close this reader
        # Torch warns about read-only arrays, although nothing is written.
        memory = (ctypes.c_uint8 * mapped.nbytes).from_address(address(mapped))
        source = np.frombuffer(memoryview(memory), np.uint8).reshape(mapped.shape)
        take_rows(source, rows, out.reshape(-1).view(np.uint8).reshape(len(rows), self._row_bytes), all_cores=True)
        self._counters.add(bytes_read=out.nbytes, bytes_decoded=out.nbytes, read_seconds=perf_counter() - began)
        return out

    def is_cached(self) -> bool:
        """Return whether the page cache has the rows, judged by some of them (50 microseconds)."""
        if not len(self) or not self._row_bytes:
            return True
        return self._look(np.linspace(0, len(self) - 1, N_PROBES, dtype=np.int64)) is True

    def _are_cached(self, rows: IntArray) -> bool:
        """Return whether the page cache may have rows, judged by a few of them (5 microseconds) or of earlier reads."""
        if self._n_unseen > 0:  # threads may count wrong, at no harm
            self._n_unseen -= 1
            return True
        are_cached = self._look(rows[:: max(1, len(rows) // N_LOOKS)]) is not False
        self._n_unseen = LOOK_EVERY - 1 if are_cached else 0
        return are_cached

    def _look(self, rows: IntArray) -> bool | None:
        """Return whether the page cache has all of some rows; None if the file system does not say."""
        places = self._places(rows).tolist()
        try:
            with process_pool().descriptor(self.layout.path, self.layout.guard) as fd:
                answers = {is_cached(fd, place) for place in places}
        except OSError:  # reading it raises the error
            return False
        return False if False in answers else None if None in answers else True

    def _map(self) -> npt.NDArray[np.uint8]:
        with self._lock:
            if self._rows is None:
                n_rows, path = self.layout.n_rows, self.layout.path
                n_needed = self._offset + n_rows * self._row_bytes
                with process_pool().descriptor(path, self.layout.guard) as fd:
                    if (n_bytes := os.fstat(fd).st_size) < n_needed:
                        raise H5CorruptError(
                            f"{path!r} has {n_bytes:,} bytes and {self.layout.key!r} needs {n_needed:,}. "
                            "It was truncated; copy it again."
                        )
                    mapped = mmap.mmap(fd, n_needed, access=mmap.ACCESS_READ)
                shape = (n_rows, self._row_bytes)
                self._rows = np.frombuffer(mapped, np.uint8, math.prod(shape), self._offset).reshape(shape)
            return self._rows

    def close(self) -> None:
        """Unmap the file."""
        with self._lock:
            self._rows = None

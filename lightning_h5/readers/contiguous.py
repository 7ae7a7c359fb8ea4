"""Rows of contiguous arrays: their place in the file is known, so they are read there, without HDF5's lock."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5FileError
from ..files import ArrayLayout, process_pool
from ..stats import Counters
from ..types import IntArray
from .base import LayoutReader
from .runs import runs
from .scatter import read_pieces

__all__ = ["ContiguousReader", "MappedReader"]


class _StoredRows(LayoutReader):
    """Gets rows as they are stored, and turns them into what was asked where that differs."""

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        if layout.offset is None:
            raise ValueError(f"{layout.key!r} has no fixed place in its file: {layout.plain_reason}")
        self._offset = layout.offset
        self._row_bytes = layout.stored_row_bytes
        # Numbers in this machine's byte order can be read straight into the batch.
        self._as_stored = not layout.members and layout.stored.base.isnative

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        if self._row_bytes == 0:
            return
        if self._as_stored and out.flags.c_contiguous:
            self._fetch(rows, out.reshape(-1).view(np.uint8))
        else:
            stored = np.empty((len(rows), *self.layout.axes), dtype=self.layout.stored)
            self._fetch(rows, stored.reshape(-1).view(np.uint8))
            for member in self.layout.members:
                stored = stored[member]
            out[...] = stored
        n_bytes = len(rows) * self._row_bytes
        self._counters.add(bytes_read=n_bytes, bytes_decoded=n_bytes)

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        """Copies stored rows, one after the other, into bytes."""
        raise NotImplementedError


class ContiguousReader(_StoredRows):
    """Reads rows by position, neighbouring rows in one piece, a batch in one call (see ``scatter``).

    About 3 microseconds a row in the page cache, the interpreter's lock left free meanwhile.
    """

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        n_bytes = self._row_bytes
        if (rows[1:] - rows[:-1] == 1).any():
            first, last = runs(rows)
            starts, stops, offsets = first * n_bytes, last * n_bytes, self._offset + rows[first] * n_bytes
        else:
            starts = np.arange(0, len(out), n_bytes)
            stops, offsets = starts + n_bytes, self._offset + rows * n_bytes
        with process_pool().descriptor(self.layout.path) as fd:
            try:
                # No piece takes more than it holds: the sum is right only if all are full.
                if read_pieces(fd, out, starts, stops, offsets) != len(out):
                    self._fetch_slowly(fd, out, starts, stops, offsets)
            except H5CorruptError:  # an OSError too, and it has said what is wrong
                raise
            except OSError as error:
                raise H5FileError(
                    f"reading {self.layout.key!r} from {self.layout.path!r} failed: {error.strerror}. "
                    "Check the disk or the network file system, then resume."
                ) from error

    def _fetch_slowly(
        self, fd: int, out: npt.NDArray[np.uint8], starts: IntArray, stops: IntArray, offsets: IntArray
    ) -> None:
        """The same where a piece came back short: the kernel stops at 2 GiB, at a signal, or at the file's end."""
        memory = out.data
        for start, stop, offset in zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=True):
            at = start
            while at < stop:
                position = offset + at - start
                n = os.preadv(fd, [memory[at:stop]], position)
                if n == 0:
                    row = (position - self._offset) // self._row_bytes
                    raise H5CorruptError(
                        f"{self.layout.path!r} ends inside row {row} of {self.layout.key!r}: byte {position:,} "
                        f"was asked and the file has {os.fstat(fd).st_size:,}. It was truncated; copy it again."
                    )
                at += n


class MappedReader(_StoredRows):
    """Gathers rows from a memory map of the file, a batch in one call that leaves the interpreter's lock free.

    Two to three times as fast as ``ContiguousReader``, for files whose user vouches that nobody truncates
    them: touching a page that is gone ends the process with SIGBUS, and no exception can be raised.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self._lock = threading.Lock()
        self._rows: npt.NDArray[np.uint8] | None = None

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        # Not torch's index_select: in a thread of ours it would start a team of threads of its own.
        np.take(self._map(), rows, axis=0, out=out.reshape(len(rows), self._row_bytes), mode="clip")

    def _map(self) -> npt.NDArray[np.uint8]:
        with self._lock:
            if self._rows is None:
                n_rows, path = self.layout.n_rows, self.layout.path
                n_needed = self._offset + n_rows * self._row_bytes
                if (n_bytes := os.path.getsize(path)) < n_needed:
                    raise H5CorruptError(
                        f"{path!r} has {n_bytes:,} bytes and {self.layout.key!r} needs {n_needed:,}. "
                        "It was truncated; copy it again."
                    )
                shape = (n_rows, self._row_bytes)
                # As a plain array: indexing a memmap makes memmaps, which costs microseconds each.
                self._rows = np.asarray(np.memmap(path, np.uint8, mode="r", offset=self._offset, shape=shape))
            return self._rows

    def close(self) -> None:
        """Unmaps the file."""
        with self._lock:
            self._rows = None

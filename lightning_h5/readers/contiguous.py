"""Rows of contiguous arrays: their place in the file is known, so they are read there, without HDF5's lock."""

from __future__ import annotations

import os
import threading
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5CorruptError, H5FileError
from ..files import ArrayLayout, process_pool
from ..stats import Counters
from ..types import IntArray
from .base import LayoutReader
from .runs import runs

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
    """Reads rows by position with ``preadv``, neighbouring rows in one call.

    One system call a run of rows, 3 to 4 microseconds each for rows in the page cache; the interpreter's
    lock is free while the kernel copies. A second thread does not help: measured on two cores, rows of
    12 KiB came at 220,000 to 265,000 a second from one thread and slower from two.
    """

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        starts, stops = runs(rows)
        offsets = (self._offset + rows[starts] * self._row_bytes).tolist()
        memory = out.data
        cuts = zip((starts * self._row_bytes).tolist(), (stops * self._row_bytes).tolist(), strict=True)
        pieces = [[memory[start:stop]] for start, stop in cuts]
        with process_pool().descriptor(self.layout.path) as fd:
            try:
                # One C-level loop. No call gives more than its piece holds: the sum is right only if all are full.
                if sum(map(os.preadv, repeat(fd), pieces, offsets)) != len(memory):
                    self._fetch_slowly(fd, pieces, offsets)
            except H5CorruptError:  # an OSError too, and it has said what is wrong
                raise
            except OSError as error:
                raise H5FileError(
                    f"reading {self.layout.key!r} from {self.layout.path!r} failed: {error.strerror}. "
                    "Check the disk or the network file system, then resume."
                ) from error

    def _fetch_slowly(self, fd: int, pieces: list[list[memoryview]], offsets: list[int]) -> None:
        """The same where a call came back short: the kernel stops at 2 GiB, at a signal, or at the file's end."""
        for (piece,), offset in zip(pieces, offsets, strict=True):
            done = 0
            while done < len(piece):
                n = os.preadv(fd, [piece[done:]], offset + done)
                if n == 0:
                    row = (offset + done - self._offset) // self._row_bytes
                    raise H5CorruptError(
                        f"{self.layout.path!r} ends inside row {row} of {self.layout.key!r}: byte {offset + done:,} "
                        f"was asked and the file has {os.fstat(fd).st_size:,}. It was truncated; copy it again."
                    )
                done += n


class MappedReader(_StoredRows):
    """Gathers rows from a memory map of the file, with all of torch's threads.

    Two to three times as fast as ``ContiguousReader``, for files whose user vouches that nobody truncates
    them: touching a page that is gone ends the process with SIGBUS, and no exception can be raised.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self._lock = threading.Lock()
        self._rows: torch.Tensor | None = None

    def _fetch(self, rows: IntArray, out: npt.NDArray[np.uint8]) -> None:
        target = torch.from_numpy(out).view(len(rows), self._row_bytes)
        torch.index_select(self._map(), 0, torch.from_numpy(rows), out=target)

    def _map(self) -> torch.Tensor:
        with self._lock:
            if self._rows is None:
                n_rows, path = self.layout.n_rows, self.layout.path
                n_needed = self._offset + n_rows * self._row_bytes
                if (n_bytes := os.path.getsize(path)) < n_needed:
                    raise H5CorruptError(
                        f"{path!r} has {n_bytes:,} bytes and {self.layout.key!r} needs {n_needed:,}. "
                        "It was truncated; copy it again."
                    )
                # Mode "c" (private, copy on write): torch wants writable memory, the file must not change.
                shape = (n_rows, self._row_bytes)
                mapped = np.memmap(path, np.uint8, mode="c", offset=self._offset, shape=shape)
                self._rows = torch.from_numpy(mapped)
            return self._rows

    def close(self) -> None:
        """Unmaps the file."""
        with self._lock:
            self._rows = None

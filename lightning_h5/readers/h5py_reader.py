"""Rows through the HDF5 library: right for every array that it can read, fast for none that is compressed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError, H5FileError
from ..hdf5 import ArrayLayout, OpenOptions, kind_of, process_pool
from ..types import IntArray
from .base import LayoutReader
from .heaps import HeapGuard

__all__ = ["H5pyReader", "spans"]

PIECE_BYTES = 8 << 20  # most that one call reads, unless a single chunk is larger


class H5pyReader(LayoutReader):
    """Reads one piece a chunk, or a run of rows where there are no chunks to share, and gathers from it.

    Never one call a row where chunks hold many rows (each call would decode the chunk), and never h5py's
    fancy indexing (6 times slower than single reads where chunks hold one row).

    Args:
        layout: the array.
        options: how its file is opened.
        counters: where bytes are counted; what HDF5 reads is estimated from the array's mean stored size.
        guard: looks at what rows of text refer to before they are read.
    """

    def __init__(
        self,
        layout: ArrayLayout,
        options: OpenOptions,
        counters: Counters | None = None,
        guard: HeapGuard | None = None,
    ) -> None:
        super().__init__(layout, counters)
        self._options = options
        self._is_text = kind_of(layout.dtype) == "text"
        if self._is_text:
            self.dtype = np.dtype(object)
        self._guard = guard
        self._stored_row_bytes = layout.n_stored_bytes / max(1, layout.n_rows)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        began = perf_counter()
        if self._guard is not None:
            self._guard.check(rows)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        most = max(1, PIECE_BYTES // max(1, self.layout.stored_row_bytes))
        with process_pool().h5(self.layout.path, self._options, self.layout.guard) as handle:
            array = handle.array(self.layout)
            for start, stop in spans(ordered, self.layout.rows_per_chunk, most):
                low, high = int(ordered[start]), int(ordered[stop - 1]) + 1
                piece = self._piece(array, low, high)
                out[order[start:stop]] = piece[ordered[start:stop] - low]
                self._count(low, high)
        self._counters.add(library_seconds=perf_counter() - began)

    def _piece(self, array: Any, low: int, high: int) -> npt.NDArray[Any]:
        members = self.layout.members
        try:
            piece = (array.fields(members[0]) if members else array)[low:high]
        except (OSError, RuntimeError) as error:
            # HDF5 says it in words; h5py's own number is of the last thing that failed.
            if getattr(error, "errno", None) == errno.EIO or f"errno = {errno.EIO}," in str(error):
                raise H5FileError(
                    f"reading {self.layout.key!r} from {self.layout.path!r} failed: {os.strerror(errno.EIO)}. Check "
                    "the disk or the network file system, then resume."
                ) from error
            raise H5CorruptError(
                f"rows {low} to {high - 1} of {self.layout.key!r} in {self.layout.path!r} cannot be read: {error}. "
                "The file is damaged there; copy it again, or write it again without these rows."
            ) from error
        for member in members[1:]:
            piece = piece[member]
        return self._text(piece, low) if self._is_text else piece

    def _text(self, piece: npt.NDArray[Any], low: int) -> npt.NDArray[Any]:
        text = np.empty(piece.size, dtype=object)
        try:
            text[:] = [item.decode() if isinstance(item, bytes) else item for item in piece.flat]
        except UnicodeDecodeError as error:
            raise H5CorruptError(
                f"text of {self.layout.key!r} in {self.layout.path!r} is not UTF-8 (rows from {low} on: {error}). "
                "Write it again as UTF-8."
            ) from error
        return text.reshape(piece.shape)

    def _count(self, low: int, high: int) -> None:
        # HDF5 does not say what it read: whole chunks of the array's mean stored size.
        step = self.layout.rows_per_chunk
        n_rows = min((high - 1) // step * step + step, len(self)) - low // step * step
        self._counters.add(
            bytes_read=round(n_rows * self._stored_row_bytes), bytes_decoded=n_rows * self.layout.stored_row_bytes
        )


def spans(ordered: IntArray, rows_per_chunk: int, most: int) -> Iterator[tuple[int, int]]:
    """Cuts sorted rows into pieces that one call each should read.

    Args:
        ordered: rows in ascending order, repeats allowed, at least one.
        rows_per_chunk: rows that share a chunk; with 1, a piece is a run of rows without a gap.
        most: most rows from a piece's first to its last, where chunks are not larger.

    Yields:
        Positions in ``ordered`` at which a piece starts and stops (exclusive).
    """
    if rows_per_chunk > 1:
        cut = np.diff(ordered // rows_per_chunk) > 0
    else:
        cut = (np.diff(ordered) > 1) | (np.diff((ordered - ordered[0]) // most) > 0)
    bounds = np.concatenate([[0], np.flatnonzero(cut) + 1, [len(ordered)]]).tolist()
    yield from pairwise(bounds)

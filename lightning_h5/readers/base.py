"""What all readers share: checking rows, and making the array to read into."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import ArrayLayout
from ..stats import Counters
from ..types import IntArray

__all__ = ["LayoutReader", "address", "blocks", "check_bounds", "scratch"]

BLOCK_BYTES = 512 << 10  # what a core's own cache holds


class LayoutReader:
    """A reader of one array; subclasses say how ``_fill`` gets rows into memory.

    Args:
        layout: the array.
        counters: where bytes read and decoded are counted.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        self.layout = layout
        self.dtype = layout.dtype
        self.row_shape = layout.row_shape
        self._counters = counters or Counters()

    def __len__(self) -> int:
        return self.layout.n_rows

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Rows in the order asked (see ``RowReader.read``).

        Raises:
            IndexError: a row lies outside the array.
            H5CorruptError: stored bytes are missing or do not decode.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if out is None:
            out = np.empty((len(rows), *self.row_shape), dtype=self.dtype)
        if len(rows):
            check_bounds(rows, len(self), f"{self.layout.key!r} in {self.layout.path!r}")
            self._fill(rows, out)
        return out

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to give back: files belong to the handle pool."""


def check_bounds(rows: IntArray, n_rows: int, name: str) -> None:
    """Refuses rows that are not there.

    Args:
        rows: at least one.
        n_rows: rows that there are.
        name: of what they are asked.

    Raises:
        IndexError: a row lies outside.
    """
    # As unsigned numbers negative rows are huge, so that one reduction finds both.
    if rows.view(np.uint64).max() < n_rows:
        return
    wrong = int(rows.min()) if rows.min() < 0 else int(rows.max())
    raise IndexError(f"row {wrong} was asked of {name}, which has {n_rows} rows. Ask for rows from 0 to {n_rows - 1}.")


_scratch = threading.local()  # memory of each thread; of all readers, since those of many files are used in turn


def scratch(use: str, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of this thread, written over after the next call for the same use."""
    held: npt.NDArray[np.uint8] | None = getattr(_scratch, use, None)
    if held is None or len(held) < n_bytes:
        held = np.empty(n_bytes, dtype=np.uint8)
        setattr(_scratch, use, held)
    return held[:n_bytes]


def address(data: npt.NDArray[Any]) -> int:
    """Where an array's memory begins."""
    return int(data.__array_interface__["data"][0])


def blocks(n_rows: int, row_bytes: int) -> Iterator[slice]:
    """Pieces of rows that a core's own cache still holds when a second pass goes through them."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    return (slice(start, start + step) for start in range(0, n_rows, step))

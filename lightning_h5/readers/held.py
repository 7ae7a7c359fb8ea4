"""Small arrays, such as labels and ids, are read whole, once, and served from memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import IntArray, RowReader

__all__ = ["HeldReader"]


class HeldReader:
    """Serves rows from memory; reads the array at the first call, in this process.

    Args:
        reader: where the rows come from.
    """

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self.dtype = reader.dtype
        self.row_shape = reader.row_shape
        self._lock = threading.Lock()
        self._values: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Rows in the order asked (see ``RowReader.read``)."""
        rows = np.asarray(rows, dtype=np.int64)
        values = self._values
        if values is None:
            values = self._load()
        if out is None:
            out = np.empty((len(rows), *self.row_shape), dtype=self.dtype)
        if len(rows):
            if rows.view(np.uint64).max() >= len(values):  # negative rows are huge as unsigned numbers
                self._reader.read(rows)  # raises, with the words of the reader
            np.take(values, rows, axis=0, out=out, mode="clip")
        return out

    def _load(self) -> npt.NDArray[Any]:
        with self._lock:
            if self._values is None:
                self._values = self._reader.read(np.arange(len(self._reader)))
            return self._values

    def close(self) -> None:
        """Gives the memory back; the next read loads again."""
        with self._lock:
            self._values = None
        self._reader.close()

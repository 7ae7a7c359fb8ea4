"""Small arrays, such as labels and ids, are read whole, once, and served from memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import IntArray, RowReader

__all__ = ["HeldReader"]


TEXT_ROWS = 1024  # rows of text that are read before their length is looked at


class HeldReader:
    """Serves rows from memory; reads the array at the first call, in this process.

    Args:
        reader: where the rows come from.
        text_bytes: text is held up to this length in all. It is not known before it is read; an array that turns
            out to be longer is read where it is asked.
        read_all: reads all rows, where there is a faster way than the reader.
        n_bytes_of: at least how long the text of rows is, where that can be told before it is read.
    """

    def __init__(
        self,
        reader: RowReader,
        text_bytes: int,
        read_all: Callable[[], npt.NDArray[Any]] | None = None,
        n_bytes_of: Callable[[IntArray], int] | None = None,
    ) -> None:
        self._read_all, self._n_bytes_of = read_all, n_bytes_of
        self._text_bytes = text_bytes
        self._is_too_long = False
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
        if values is None:
            return self._reader.read(rows, out)
        if out is None:
            out = np.empty((len(rows), *self.row_shape), dtype=self.dtype)
        if len(rows):
            if rows.view(np.uint64).max() >= len(values):  # negative rows are huge as unsigned numbers
                self._reader.read(rows)  # raises, with the words of the reader
            np.take(values, rows, axis=0, out=out, mode="clip")
        return out

    def _load(self) -> npt.NDArray[Any] | None:
        with self._lock:
            if self._values is None and not self._is_too_long:
                self._values = self._read_whole()
                self._is_too_long = self._values is None
            return self._values

    def _read_whole(self) -> npt.NDArray[Any] | None:
        if self._read_all is not None:
            return self._read_all()
        n_rows = len(self._reader)
        if self.dtype.kind != "O":
            return self._reader.read(np.arange(n_rows))
        values = np.empty((n_rows, *self.row_shape), dtype=self.dtype)
        n_bytes = 0
        for start in range(0, n_rows, TEXT_ROWS):
            piece = values[start : start + TEXT_ROWS]
            rows = np.arange(start, start + len(piece))
            if self._n_bytes_of is not None and n_bytes + self._n_bytes_of(rows) > self._text_bytes:
                return None
            self._reader.read(rows, piece)
            n_bytes += sum(map(len, piece.flat))
            if n_bytes > self._text_bytes:
                return None
        return values

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows in memory now; text counts as a pointer each."""
        return 0 if self._values is None else self._values.nbytes

    def close(self) -> None:
        """Gives the memory back; the next read loads again."""
        with self._lock:
            self._values, self._is_too_long = None, False
        self._reader.close()

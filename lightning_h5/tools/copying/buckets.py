"""Rows in another order, in bounded memory: scattered to buckets, each of which fits in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ...types import IntArray

__all__ = ["BUCKET_BYTES", "RowBuckets", "bytes_beside"]

BUCKET_BYTES = 32 << 20
PLACE_BYTES = 8


def bytes_beside(n_rows: int, row_bytes: int) -> int:
    """Bytes of the temporary file that an array takes while its rows are put in order; 0 where they fit in memory."""
    return 0 if n_rows * row_bytes <= BUCKET_BYTES else n_rows * (row_bytes + PLACE_BYTES)


class RowBuckets:
    """Takes rows in any order, with the places that they belong to, and gives them back in the order of the places.

    A bucket is a range of places. Its rows lie in a temporary file without a name, in the order in which they came,
    with their places; each is written once and read once. Where all rows fit in one bucket, no file is made.

    Args:
        n_rows: rows that will be put, each place once.
        row_bytes: bytes of each.
        multiple: rows of a bucket are a multiple of this, where they fit.
        folder: for the temporary file.
    """

    def __init__(self, n_rows: int, row_bytes: int, *, multiple: int, folder: str) -> None:
        self._n_rows, self._row_bytes = n_rows, row_bytes
        self._record = np.dtype([("place", "<i8"), ("row", np.uint8, (row_bytes,))])
        fits = max(1, BUCKET_BYTES // self._record.itemsize)
        # A chunk of very short rows takes less than their places do, and goes over several buckets.
        self._size = fits // multiple * multiple or (multiple if row_bytes > PLACE_BYTES else fits)
        n_buckets = -(-n_rows // self._size) if bytes_beside(n_rows, row_bytes) else 1
        self._filled = np.zeros(n_buckets, dtype=np.int64)
        self._file: Any = None
        self._rows: npt.NDArray[np.uint8] | None = None
        if n_buckets > 1:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # closed in __exit__
        else:
            self._rows = np.empty((n_rows, row_bytes), dtype=np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def put(self, rows: npt.NDArray[np.uint8], places: IntArray) -> None:
        """Takes rows.

        Args:
            rows: shape ``(n, row_bytes)``.
            places: where each belongs, shape ``(n,)``.
        """
        if self._rows is not None:
            self._rows[places] = rows
            return
        step = max(1, BUCKET_BYTES // (2 * self._record.itemsize))
        for at in range(0, len(rows), step):
            self._scatter(rows[at : at + step], places[at : at + step])

    def _scatter(self, rows: npt.NDArray[np.uint8], places: IntArray) -> None:
        buckets = places // self._size
        order = np.argsort(buckets, kind="stable")
        records = np.empty(len(rows), dtype=self._record)
        records["place"], records["row"] = places[order], rows[order]
        numbers, firsts = np.unique(buckets[order], return_index=True)
        for bucket, part in zip(numbers.tolist(), np.split(records, firsts[1:]), strict=True):
            offset = (bucket * self._size + int(self._filled[bucket])) * self._record.itemsize
            _write_all(self._file.fileno(), part.view(np.uint8), offset)
            self._filled[bucket] += len(part)

    def __iter__(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """All rows in the order of their places, as ``(first place, rows)``; memory is used again."""
        if self._rows is not None:
            yield 0, self._rows
            return
        out = np.empty((self._size, self._row_bytes), dtype=np.uint8)
        records = np.empty(self._size, dtype=self._record)
        for first in range(0, self._n_rows, self._size):
            some = records[: min(self._size, self._n_rows - first)]
            _read_all(self._file.fileno(), some.view(np.uint8), first * self._record.itemsize)
            out[some["place"] - first] = some["row"]
            yield first, out[: len(some)]


def _write_all(descriptor: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    view = data.data
    while len(view):
        n_bytes = os.pwrite(descriptor, view, offset)
        view, offset = view[n_bytes:], offset + n_bytes


def _read_all(descriptor: int, out: npt.NDArray[np.uint8], offset: int) -> None:
    view = out.data
    while len(view):
        n_bytes = os.preadv(descriptor, [view], offset)
        if not n_bytes:
            raise OSError("a temporary file is shorter than what was written to it")
        view, offset = view[n_bytes:], offset + n_bytes

"""The rows that were used last, kept as they were read: a cache that counts, and never gives out its own memory."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..readers import take_rows
from ..types import IntArray
from .buffers import BufferPool
from .sample_layout import Column

__all__ = ["CachedColumn", "SampleCache", "bytes_of", "copied", "copy_rows"]

LARGE_ROW = 1024  # bytes: copying it takes as long as asking Python for it


class CachedColumn:
    """One field's slots.

    Args:
        n_slots: rows that have a place.
        row_shape: shape of a row.
        dtype: what is kept; None for text.
    """

    def __init__(self, n_slots: int, row_shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        self._row_shape, self._dtype = row_shape, dtype
        self._text = np.empty(n_slots if dtype is None else 0, dtype=object)
        # Bytes: NumPy and torch lack each other's dtypes. The system gives memory where it is first written to.
        row_bytes = 0 if dtype is None else math.prod(row_shape) * dtype.itemsize
        self._bytes = np.empty((n_slots, row_bytes), dtype=np.uint8)

    def put(self, slots: IntArray, column: Column, places: IntArray) -> None:
        """Copies some rows of a batch into slots."""
        if isinstance(column, torch.Tensor):
            copy_rows(self._bytes, slots, bytes_of(column), places)
        else:
            for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
                self._text[slot] = copied(column[place])

    def take(self, slots: IntArray, places: IntArray, n_rows: int, buffers: BufferPool, *, all_cores: bool) -> Column:
        """A batch of memory of its own, with rows of slots at some places."""
        if self._dtype is None:
            text: list[Any] = [None] * n_rows
            for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
                text[place] = copied(self._text[slot])
            return text
        column = buffers.tensor((n_rows, *self._row_shape), self._dtype)
        into = bytes_of(column)
        if len(places) < n_rows:
            copy_rows(into, places, self._bytes, slots)
        else:
            take_rows(self._bytes, slots, into, all_cores=all_cores)
        return column


def copied(text: Any) -> Any:
    """Text of a row is a list where it has several values: whoever changes it must not change what is kept."""
    return [copied(one) for one in text] if isinstance(text, list) else text


def copy_rows(into: npt.NDArray[np.uint8], to: IntArray, source: npt.NDArray[np.uint8], places: IntArray) -> None:
    """Copies rows to other places, as ``into[to] = source[places]`` does, without the memory between for large ones.

    Args:
        into: shape ``(n, row_bytes)``.
        to: where rows go, shape ``(n_rows,)``.
        source: shape ``(m, row_bytes)``.
        places: where they are, shape ``(n_rows,)``.
    """
    if (run := _run(places)) is not None:
        into[to] = source[run]
    elif (run := _run(to)) is not None:
        np.take(source, places, axis=0, out=into[run], mode="clip")  # any other mode takes memory between
    elif source.shape[1] < LARGE_ROW:
        into[to] = source[places]
    else:
        for a, b in zip(to.tolist(), places.tolist(), strict=True):
            into[a] = source[b]


def _run(places: IntArray) -> slice | None:
    """Places as a slice, where each is the one after the last."""
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) and (np.diff(places) == 1).all() else None


def bytes_of(column: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A batch's memory, shape ``(batch, row_bytes)``."""
    if not column.numel():
        return np.empty((len(column), 0), dtype=np.uint8)
    flat: npt.NDArray[np.uint8] = column.view(len(column), -1).view(torch.uint8).numpy()
    return flat


class SampleCache:
    """Rows by their number, at most so many and so many bytes; who was not used for longest leaves first.

    Safe to use from threads. Belongs to one process.

    Args:
        n_rows: rows that have a place, at most.
        n_bytes: bytes that they take, at most; text is not counted.
        columns: of each field the shape of a row, and its dtype (None for text).
    """

    def __init__(
        self, n_rows: int, n_bytes: int, columns: Sequence[tuple[tuple[int, ...], torch.dtype | None]]
    ) -> None:
        row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in columns if dtype is not None)
        self._row_bytes = row_bytes
        self.n_slots = min(n_rows, n_bytes // max(1, row_bytes))
        self._slots: OrderedDict[int, int] = OrderedDict()  # of each row; the one used last at the end
        self._columns = [CachedColumn(self.n_slots, *column) for column in columns]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the rows that are here; text is not counted."""
        return len(self) * self._row_bytes

    def has(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Which rows are here; they may leave before they are taken."""
        slots = self._slots
        return np.fromiter((row in slots for row in rows.tolist()), dtype=np.bool_, count=len(rows))

    def take(
        self, rows: IntArray, buffers: BufferPool, *, all_cores: bool = False
    ) -> tuple[IntArray, tuple[Column, ...]]:
        """Copies of the rows that are here.

        Args:
            rows: a batch, in any order, with repeats.
            buffers: where memory for batches comes from.
            all_cores: copy with torch's threads if these are faster.

        Returns:
            The places in the batch of the rows that are here; and for all fields batches in which these are filled.
        """
        with self._lock:
            found = np.fromiter((self._slots.get(row, -1) for row in rows.tolist()), dtype=np.int64, count=len(rows))
            places = np.flatnonzero(found >= 0)
            if not len(places):
                return places, ()
            for row in rows[places].tolist():
                self._slots.move_to_end(row)
            slots = found[places]
            return places, tuple(
                column.take(slots, places, len(rows), buffers, all_cores=all_cores) for column in self._columns
            )

    def put(self, rows: IntArray, columns: Sequence[Column]) -> None:
        """Keeps copies of rows, those of a batch that come last where there is no place for all."""
        if not self.n_slots or not len(rows):
            return
        last: dict[int, int] = {}  # a row that comes twice is kept once, as one that came last
        for place, row in zip(range(len(rows) - 1, -1, -1), rows[::-1].tolist(), strict=True):
            last.setdefault(row, place)
            if len(last) == self.n_slots:
                break
        new = list(last.items())[::-1]
        with self._lock:
            slots = []
            for row, _ in new:
                slot = self._slots.pop(row, None)
                if slot is None:
                    is_full = len(self._slots) == self.n_slots
                    slot = self._slots.popitem(last=False)[1] if is_full else len(self._slots)
                self._slots[row] = slot
                slots.append(slot)
            where = np.array([place for _, place in new], dtype=np.int64)
            for kept, column in zip(self._columns, columns, strict=True):
                kept.put(np.array(slots, dtype=np.int64), column, where)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._slots.clear()

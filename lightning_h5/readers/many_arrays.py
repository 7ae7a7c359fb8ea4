"""Rows of a field of many small arrays: read without a reader of each, and kept together in memory.

A reader of its own takes a hundred microseconds to open and ten to use, whatever it reads. A batch can have rows of as
many arrays as it has samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout
from ..types import IntArray, RowReader
from .block_map import Boxes, by_number
from .raw_io import prefetch_stored, read_stored

__all__ = ["HeldArrays", "ManyArrays"]


class ManyArrays:
    """Reads rows of a field. Rows at known places are read by position, all rows of a file in one call.

    Args:
        example: an array that all with known places are like.
        places: where the first row of each array begins in its file; -1 if it is not known, or if rows do not follow
            each other there.
        n_rows: rows of each array, of the same shape.
        files: number of each array's file, of the same shape.
        layout_of: describes an array.
        counters: counts bytes.
    """

    def __init__(
        self,
        example: ArrayLayout,
        places: IntArray,
        n_rows: IntArray,
        files: IntArray,
        *,
        layout_of: Callable[[int], ArrayLayout],
        counters: Counters,
    ) -> None:
        self.dtype, self.row_shape = example.dtype, example.row_shape
        self.n_rows = n_rows
        self._example, self._places, self._files = example, places, files
        self._layout_of, self._counters = layout_of, counters
        self._row_bytes = example.stored_row_bytes
        self._as_stored = not example.members and example.stored.base.isnative

    def read(self, boxes: Boxes, out: npt.NDArray[Any], reader_of: Callable[[int], RowReader]) -> None:
        """Read rows.

        Args:
            boxes: the rows.
            out: memory for them, C-contiguous.
            reader_of: returns a reader of an array, for those without a known place, and for errors.

        Raises:
            IndexError: a row lies outside of its array.
            H5CorruptError: stored bytes are missing or do not decode.
        """
        parts, rows = self.checked(boxes, reader_of), boxes.rows
        is_placed = self._places[parts] >= 0
        which = None if is_placed.all() else np.flatnonzero(is_placed)
        self._read_placed(parts, rows, out, which, reader_of)
        others = np.flatnonzero(~is_placed)
        for part, at in by_number(parts[others]):
            out[others[at]] = reader_of(part).read(rows[others[at]])

    def checked(self, boxes: Boxes, reader_of: Callable[[int], RowReader]) -> IntArray:
        """Return the array of each row, after a check that it has the row."""
        parts: IntArray = np.broadcast_to(boxes.part_of_rows, boxes.rows.shape)
        is_outside = boxes.rows.view(np.uint64) >= self.n_rows[parts].view(np.uint64)  # negative rows are huge as such
        for row in np.flatnonzero(is_outside)[:1].tolist():
            reader_of(int(parts[row])).read(boxes.rows[row : row + 1])  # raises, with the array's name
        return parts

    def is_placed(self, parts: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether arrays are read by position."""
        return self._places[parts] >= 0

    def read_whole(self, parts: IntArray, out: npt.NDArray[Any], firsts: IntArray) -> None:
        """Read all rows of arrays that are read by position.

        Args:
            parts: the arrays.
            out: memory for rows of all arrays of the field, C-contiguous.
            firsts: where in ``out`` the first row of each goes.

        Raises:
            H5CorruptError: stored bytes of one of the arrays are missing.
        """
        sizes = self.n_rows[parts]
        if self._as_stored:
            self._fetch(parts, self._places[parts], firsts, sizes, out)
            return
        stored, ends = self._stored(int(sizes.sum())), np.cumsum(sizes)
        self._fetch(parts, self._places[parts], ends - sizes, sizes, stored)
        for low, n, first in zip((ends - sizes).tolist(), sizes.tolist(), firsts.tolist(), strict=True):
            out[first : first + n] = self._example.member_of(stored[low : low + n])

    def will_need(self, boxes: Boxes) -> None:
        """Begin to fetch rows at known places. Does not wait, and never raises."""
        parts = np.broadcast_to(boxes.part_of_rows, boxes.rows.shape)
        which = np.flatnonzero(self._places[parts] >= 0)
        if not len(which) or not self._row_bytes:
            return
        parts, rows = parts[which], boxes.rows[which]
        pieces = self._joined(parts, self._places[parts] + rows * self._row_bytes, which)
        sizes = pieces.n_rows * self._row_bytes
        for part, of_file in pieces.by_file(self._files):
            prefetch_stored(self._layout_of(part), pieces.places[of_file], sizes[of_file], self._counters)

    def close(self) -> None:
        """Release nothing: files belong to the handle pool."""

    def _read_placed(
        self,
        parts: IntArray,
        rows: IntArray,
        out: npt.NDArray[Any],
        which: IntArray | None,
        reader_of: Callable[[int], RowReader],
    ) -> None:
        """Read those rows that are read by position; None for all."""
        positions = np.arange(len(rows)) if which is None else which
        if not len(positions) or not self._row_bytes:
            return
        parts, rows = (parts, rows) if which is None else (parts[which], rows[which])
        stored = out if self._as_stored else self._stored(len(rows))
        targets = positions if self._as_stored else np.arange(len(rows))
        pieces = self._joined(parts, self._places[parts] + rows * self._row_bytes, targets)
        try:
            self._fetch(pieces.parts, pieces.places, pieces.targets, pieces.n_rows, stored)
        except H5CorruptError:  # a reader of the damaged array raises, with the name of the row
            for part, at in by_number(parts):
                out[positions[at]] = reader_of(part).read(rows[at])
            return
        if not self._as_stored:
            out[positions] = self._example.member_of(stored)

    def _stored(self, n_rows: int) -> npt.NDArray[Any]:
        return np.empty((n_rows, *self._example.axes), self._example.stored)

    def _joined(self, parts: IntArray, places: IntArray, targets: IntArray) -> _Pieces:
        """Return rows as pieces: rows that are neighbors in a file and in memory are one."""
        files = self._files[parts]
        if (files[1:] < files[:-1]).any():
            order = np.argsort(files, kind="stable")
            files, parts, places, targets = files[order], parts[order], places[order], targets[order]
        follows = (np.diff(places) == self._row_bytes) & (np.diff(targets) == 1) & (np.diff(files) == 0)
        if not follows.any():
            return _Pieces(parts, places, targets, np.ones_like(places))
        first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
        return _Pieces(parts[first], places[first], targets[first], np.diff(first, append=len(places)))

    def _fetch(
        self, parts: IntArray, places: IntArray, targets: IntArray, n_rows: IntArray, out: npt.NDArray[Any]
    ) -> None:
        """Read pieces of rows; arguments are attributes of ``_Pieces``."""
        if not out.nbytes:
            return
        began, memory, row_bytes = perf_counter(), out.reshape(-1).view(np.uint8), self._row_bytes
        starts, sizes = targets * row_bytes, n_rows * row_bytes
        for part, of_file in _Pieces(parts, places, targets, n_rows).by_file(self._files):
            layout, low, high = self._layout_of(part), starts[of_file], (starts + sizes)[of_file]
            read_stored(layout, memory, low, high, places[of_file], _name, self._counters)
        n_bytes = int(sizes.sum())
        self._counters.add(bytes_read=n_bytes, bytes_decoded=n_bytes, read_seconds=perf_counter() - began)


def _name(piece: int, at: int) -> str:
    return "a row"  # a reader of the array reads it again, and names it


class HeldArrays:
    """Keeps all rows of a field in memory. Each array is read as a whole when one of its rows is needed first.

    Args:
        arrays: reads them.
    """

    def __init__(self, arrays: ManyArrays) -> None:
        self.dtype, self.row_shape = arrays.dtype, arrays.row_shape
        self._arrays = arrays
        self._firsts = np.concatenate([[0], np.cumsum(arrays.n_rows)])
        self._lock = threading.Lock()
        self._held = self._nothing()

    def _nothing(self) -> _Held:
        arrays = self._arrays
        values = np.zeros(
            (int(self._firsts[-1]), *arrays.row_shape), arrays.dtype
        )  # takes memory once it is written to
        return _Held(values, np.zeros(len(arrays.n_rows), np.bool_), {})

    def read(self, boxes: Boxes, out: npt.NDArray[Any], reader_of: Callable[[int], RowReader]) -> None:
        """Read rows (see ``ManyArrays.read``)."""
        held, parts, rows = self._held, self._arrays.checked(boxes, reader_of), boxes.rows
        is_there = held.is_there[parts]
        if not is_there.all():
            self._load(held, parts[~is_there], reader_of)
            is_there = held.is_there[parts]
        np.take(held.values, self._firsts[parts] + rows, axis=0, out=out, mode="clip")  # other modes allocate a buffer
        if not is_there.all():
            apart = np.flatnonzero(~is_there)
            for part, which in by_number(parts[apart]):
                out[apart[which]] = held.damaged[part].read(rows[apart[which]])

    def _load(self, held: _Held, parts: IntArray, reader_of: Callable[[int], RowReader]) -> None:
        """Read arrays that are not there yet. One that is damaged is read by a reader of its own."""
        with self._lock:
            missing = np.array([part for part in np.unique(parts).tolist() if part not in held.damaged], np.int64)
            missing = missing[~held.is_there[missing]]
            is_placed = self._arrays.is_placed(missing)
            if (placed := missing[is_placed]).size:
                try:
                    self._arrays.read_whole(placed, held.values, self._firsts[placed])
                    held.is_there[placed] = True
                except H5CorruptError:
                    is_placed[:] = False
            for part in missing[~is_placed].tolist():
                reader, n_rows, first = (
                    reader_of(part),
                    int(self._arrays.n_rows[part]),
                    self._firsts[part],
                )
                try:
                    reader.read(np.arange(n_rows), held.values[first : first + n_rows])
                except H5CorruptError:
                    held.damaged[part] = reader
                else:
                    held.is_there[part] = True
                    reader.close()

    def will_need(self, boxes: Boxes) -> None:
        """Do nothing: arrays are read as a whole."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows in memory now."""
        held = self._held
        n_rows = int(self._arrays.n_rows[held.is_there].sum())
        return n_rows * held.values[:1].nbytes

    def close(self) -> None:
        """Release the memory; the next read loads again."""
        for reader in self._held.damaged.values():
            reader.close()
        self._held = self._nothing()


class _Held(NamedTuple):
    """Arrays in memory.

    Attributes:
        values: rows of all arrays.
        is_there: whether an array was read.
        damaged: readers of arrays with rows that cannot be read.
    """

    values: npt.NDArray[Any]
    is_there: npt.NDArray[np.bool_]
    damaged: dict[int, RowReader]


class _Pieces(NamedTuple):
    """Pieces of files, in the order of the files.

    Attributes:
        parts: array of each.
        places: where it begins in its file.
        targets: number of its first row in memory.
        n_rows: its rows.
    """

    parts: IntArray
    places: IntArray
    targets: IntArray
    n_rows: IntArray

    def by_file(self, files: IntArray) -> list[tuple[int, slice]]:
        """Return for each file one of its arrays, and its pieces."""
        cuts = [0, *(np.flatnonzero(np.diff(files[self.parts])) + 1).tolist(), len(self.parts)]
        firsts: list[int] = self.parts[cuts[:-1]].tolist()
        return [(part, slice(low, high)) for part, low, high in zip(firsts, cuts[:-1], cuts[1:], strict=True)]

"""What all readers share: checking rows, allocating output, and rows in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout
from ..types import IntArray, RowReader
from .salvage import salvaged

__all__ = [
    "BegunRead",
    "InMemoryReader",
    "LayoutReader",
    "ValueReader",
    "address",
    "check_bounds",
    "row_slices",
    "take_rows",
]

MAX_DAMAGED = 64  # maximum number of damaged blocks of a small array to locate
SLICE_BYTES = 512 << 10  # fits into a core's own cache
TEXT_ROWS = 1024  # rows of text read at a time to measure its length
ROWS_AT_A_TIME = 1 << 20  # of an array that is read whole: their numbers take more memory than small rows


class BegunRead(Protocol):
    """Rows that a reader has begun to read. Each is finished or cancelled once."""

    def finish(self) -> None:
        """Read the rows.

        Raises:
            H5CorruptError: stored bytes are missing or do not decode.
            H5FileError: the file cannot be read.
        """
        ...

    def cancel(self) -> None:
        """Return leases without reading; no effect once it is finished."""
        ...


class LayoutReader:
    """A reader of one array; subclasses implement ``_fill``.

    Args:
        layout: the array.
        counters: counts bytes read and decoded.
    """

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        self.layout = layout
        self.dtype = layout.dtype
        self.row_shape = layout.row_shape
        self._counters = counters or Counters()

    def __len__(self) -> int:
        return self.layout.n_rows

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return rows in the order requested (see ``RowReader.read``).

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

    def will_need(self, rows: range) -> None:
        """Begin to fetch rows, if they have a place in the file. Does not wait, and never raises."""

    def give_back(self, rows: range) -> None:
        """Have rows leave the page cache, if they have a place in the file. Never raises."""

    def close(self) -> None:
        """Release nothing: files belong to the handle pool."""


class ValueReader(LayoutReader):
    """Reads an attribute, or a column of a table: their values were read with the description."""

    def __init__(self, layout: ArrayLayout, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self.dtype = layout.value.dtype

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        out[...] = self.layout.value[rows]


class InMemoryReader:
    """Serves rows of a small array, such as labels, from memory; reads it at the first call, in this process.

    Args:
        reader: reads the array.
        max_text_bytes: maximum length of text to keep in memory. The length is unknown before text is read; longer text
            is read again when it is requested.
        read_all: reads all rows, if that can be done faster than by the reader.
        open_blocks: opens a reader in place of ``reader`` if ``read_all`` fails since the array is damaged; only rows
            that it cannot read raise then.
        rows_per_block: rows that fail together.
    """

    def __init__(
        self,
        reader: RowReader,
        max_text_bytes: int,
        read_all: Callable[[], npt.NDArray[Any]] | None = None,
        open_blocks: Callable[[], RowReader] | None = None,
        rows_per_block: int = 1,
    ) -> None:
        self._reader, self._max_text_bytes, self._read_all = reader, max_text_bytes, read_all
        self._open_blocks, self._rows_per_block = open_blocks, rows_per_block
        self._is_damaged: npt.NDArray[np.bool_] | None = None  # by row; None without damage
        self.dtype = reader.dtype
        self.row_shape = reader.row_shape
        self._lock = threading.Lock()
        self._values: npt.NDArray[Any] | None = None
        self._is_too_long = False

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return rows in the order requested (see ``RowReader.read``)."""
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
                self._reader.read(rows)  # raises, with the array's name
            if self._is_damaged is not None and (is_damaged := self._is_damaged[rows]).any():
                values[rows[is_damaged]] = self._reader.read(rows[is_damaged])  # raises, unless it was repaired
                self._is_damaged[rows[is_damaged]] = False
            np.take(values, rows, axis=0, out=out, mode="clip")
        return out

    def _load(self) -> npt.NDArray[Any] | None:
        with self._lock:
            if self._values is None and not self._is_too_long:
                try:
                    self._values = self._read_whole()
                except H5CorruptError:
                    self._values = self._read_in_pieces()
                self._is_too_long = self._values is None
            return self._values

    def _read_whole(self) -> npt.NDArray[Any] | None:
        if self._read_all is not None:
            return self._read_all()
        n_rows, is_text, n_bytes = len(self._reader), self.dtype.kind == "O", 0
        values = np.empty((n_rows, *self.row_shape), dtype=self.dtype)
        at_a_time = TEXT_ROWS if is_text else ROWS_AT_A_TIME
        for start in range(0, n_rows, at_a_time):
            piece = values[start : start + at_a_time]
            self._reader.read(np.arange(start, start + len(piece)), piece)
            n_bytes += sum(map(len, piece.flat)) if is_text else 0
            if n_bytes > self._max_text_bytes:
                return None
        return values

    def _read_in_pieces(self) -> npt.NDArray[Any] | None:
        """Return the rows of a damaged array; None for text, of any length.

        Rows that cannot be read, or were not tried since many cannot, are noted, and read when they are requested.
        """
        if self.dtype.kind == "O":
            return None
        if self._open_blocks is not None:
            self._reader = self._open_blocks()
        values = np.zeros((len(self._reader), *self.row_shape), dtype=self.dtype)

        def read(rows: IntArray) -> None:
            values[rows] = self._reader.read(rows)

        rows = np.arange(len(values))
        self._is_damaged = np.zeros(len(values), dtype=np.bool_)
        for damaged, _ in salvaged(read, rows, blocks=rows // self._rows_per_block, most=MAX_DAMAGED):
            self._is_damaged[damaged] = True
        return values

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows in memory now; each text counts as a pointer."""
        return 0 if self._values is None else self._values.nbytes

    def close(self) -> None:
        """Release the memory; the next read loads again."""
        with self._lock:
            self._values, self._is_too_long, self._is_damaged = None, False, None
        self._reader.close()


def check_bounds(rows: IntArray, n_rows: int, name: str) -> None:
    """Check that rows exist.

    Args:
        rows: at least one.
        n_rows: number of rows that exist.
        name: the array, for the message.

    Raises:
        IndexError: a row lies outside.
    """
    # Negative rows are huge as unsigned numbers: one reduction finds both.
    if rows.view(np.uint64).max() < n_rows:
        return
    wrong = int(rows.min()) if rows.min() < 0 else int(rows.max())
    raise IndexError(
        f"row {wrong} is out of range for {name}, which has {n_rows} rows. Pass rows from 0 to {n_rows - 1}."
    )


def address(data: npt.NDArray[Any]) -> int:
    """Return the address of an array's memory."""
    return int(data.__array_interface__["data"][0])


def checked_places(places: IntArray | None, n: int, n_rows: int) -> IntArray:
    """Return places of rows as compiled loops take them, which do not check bounds.

    Args:
        places: numbers of rows, shape ``(n,)``; None for all, in order.
        n: how many there have to be.
        n_rows: rows that there are.

    Raises:
        IndexError: there are more or fewer places, or one is outside of the rows.
    """
    places = np.arange(n_rows) if places is None else np.ascontiguousarray(places, dtype=np.int64)
    if len(places) != n or (n and places.view(np.uint64).max() >= n_rows):
        raise IndexError(
            f"{len(places)} places from {places.min(initial=0)} to {places.max(initial=-1)} were given, not {n} places "
            f"below {n_rows}"
        )
    return places


def row_slices(n_rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of rows that fit into a core's own cache, for more than one pass over them."""
    step = max(1, SLICE_BYTES // max(1, row_bytes))
    return (slice(start, start + step) for start in range(0, n_rows, step))


# Rows are copied by torch's threads or by one thread, whichever is faster on this machine now.
#
# Torch's threads wait for each other at the end of each copy. On idle cores they copy twice as fast as one thread. If
# other programs use the cores, all of them wait for the one that was interrupted, and a copy takes 5 to 30 times as
# long as in one thread. Measured on two cores on 2026-11-23, 4 MiB of 4 KiB rows at a time, in rows per second:
# 5,100,000 with threads and 2,700,000 without on an idle machine; 110,000 and 880,000 next to two busy processes;
# 50,000 and 230,000 next to four.

MIN_SHARED_BYTES = 256 << 10  # one thread copies fewer bytes before the others wake up

TRIAL_SHARE = 20
"""The slower way is tried again for at most this fraction (one in so many) of the time spent on copying."""

RECENT = 4  # uses of which the fastest counts, since the system may interrupt a copy

TRIAL_USES = 3
"""Uses in a trial. The first one does not count, since it may start threads or wake them: for a megabyte, that takes
longer than the copy."""


class FasterWay:
    """Chooses the faster of two ways to do the same, from the time that each took.

    The slower way is tried again now and then, so that the choice follows the load of the machine.
    """

    def __init__(self) -> None:
        self._way = self._faster = 0
        self._n_uses = 0  # of the present way, one after the other
        self._paces: tuple[deque[float], deque[float]] = deque(maxlen=RECENT), deque(maxlen=RECENT)  # seconds a byte
        self._trial_seconds = 0.0  # duration of the last trial
        self._since_trial = 0.0  # seconds spent on the faster way since then

    def next(self) -> int:
        """Return the way to use now, 0 or 1."""
        return self._way

    def note(self, way: int, n_bytes: int, seconds: float) -> None:
        """Record how long a copy took.

        Args:
            way: the way that was used.
            n_bytes: bytes copied, at least 1.
            seconds: time that the copy took.
        """
        if way != self._way:  # another thread began a trial, or ended it
            return
        self._n_uses += 1
        if self._n_uses > 1:
            self._paces[way].append(seconds / n_bytes)
        if way != self._faster:
            self._trial_seconds += seconds
            if self._n_uses >= TRIAL_USES:
                first, second = (min(paces, default=inf) for paces in self._paces)  # another thread may clear one
                self._faster = int(second < first)
                self._use(self._faster)
                self._since_trial = 0.0
        else:
            self._since_trial += seconds
            if self._n_uses >= TRIAL_USES and self._since_trial >= TRIAL_SHARE * self._trial_seconds:
                self._trial_seconds = 0.0
                self._use(1 - way)

    def _use(self, way: int) -> None:
        self._way, self._n_uses = way, 0
        if way != self._faster:
            self._paces[way].clear()  # outdated


_ways = FasterWay()  # one per process: the load of the machine affects all arrays alike


def take_rows(
    source: npt.NDArray[Any], places: IntArray, out: npt.NDArray[Any], *, all_cores: bool = False
) -> npt.NDArray[Any]:
    """Copy rows, as ``np.take(source, places, axis=0, out=out)`` does.

    Args:
        source: rows in memory, writable if ``all_cores`` (torch warns of other arrays).
        places: rows to copy, each inside of ``source``.
        out: memory to copy to, C-contiguous, of the same dtype.
        all_cores: allow torch's threads. Only in a thread of the caller: in a thread of this package torch would start
            further threads.

    Returns:
        ``out``.
    """
    # Torch selects rows of any of its dtypes, but single numbers only of some.
    if not all_cores or source.ndim < 2 or out.nbytes < MIN_SHARED_BYTES:
        return np.take(source, places, axis=0, out=out, mode="clip")  # other modes allocate a buffer
    import torch  # not needed to inspect files

    way, began = _ways.next(), perf_counter()
    if way == 0:
        np.take(source, places, axis=0, out=out, mode="clip")
    else:
        torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(places), out=torch.from_numpy(out))
    _ways.note(way, out.nbytes, perf_counter() - began)
    return out

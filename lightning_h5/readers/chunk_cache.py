"""Rows that are kept in memory: decoded slabs in a bounded cache, and small arrays whole.

The cache is a fixed, reused memory. It knows which slab is where, not how one is decoded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import IntArray, RowReader

__all__ = ["ChunkCache", "InMemoryReader", "Lease", "SlotMemory", "scratch"]

NOWHERE = -1
TEXT_ROWS = 1024  # rows of text that are read before their length is looked at

_scratch = threading.local()  # memory of each thread; of all readers, since those of many files are used in turn


def scratch(use: str, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of this thread, written over after the next call for the same use."""
    held: npt.NDArray[np.uint8] | None = getattr(_scratch, use, None)
    if held is None or len(held) < n_bytes:
        held = np.empty(n_bytes, dtype=np.uint8)
        setattr(_scratch, use, held)
    return held[:n_bytes]


class Lease(NamedTuple):
    """Slabs that stay where they are until the lease is given back.

    Attributes:
        slots: slot of each slab that was asked, or -1 where there was no place, shape ``(n,)``.
        is_new: which of them were not there and have to be loaded, shape ``(n,)``.
        held: the slots that are one.
    """

    slots: IntArray
    is_new: npt.NDArray[np.bool_]
    held: IntArray


class SlotMemory(Sequence[npt.NDArray[Any]]):
    """The memory of slots, one after the other: as arrays of shape ``(n_rows, *row_shape)``, or as bare bytes.

    Args:
        rows: the pool's rows.
        firsts: the first row of each slot.
        n_rows: rows of each.
    """

    def __init__(self, rows: npt.NDArray[Any], firsts: IntArray, n_rows: int) -> None:
        self._rows, self._firsts, self._n_rows = rows, firsts, n_rows

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, at: Any) -> Any:
        first = int(self._firsts[at])
        return self._rows[first : first + self._n_rows]

    def octets(self) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """The bytes of all slots that there are, and where among them each of these begins."""
        return self._rows.reshape(-1).view(np.uint8), self._firsts * self._rows.strides[0]


class ChunkCache:
    """Slots for slabs. Safe to use from threads; belongs to one process.

    A slab whose last planned row is out gives its slot back at once, and stays readable until the slot is needed.
    Where no slot is free, the least recently used slab goes, but never while somebody else is about to give slots back:
    under a plan that would throw out what is needed again.

    Args:
        n_slabs: slabs there are.
        n_slots: slabs that have a place, at least one.
        slot_rows: rows of a slot.
        row_shape: shape of a row.
        dtype: of its numbers.
    """

    def __init__(
        self, n_slabs: int, n_slots: int, slot_rows: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.slot_rows = slot_rows
        # The system gives memory when it is first written to; slots are used again before new ones are touched.
        self.rows: npt.NDArray[Any] = np.empty((n_slots * slot_rows, *row_shape), dtype)
        self._changed = threading.Condition()
        self._slot_of = np.full(n_slabs, NOWHERE, dtype=np.int32)
        self._slab_of = np.full(n_slots, NOWHERE, dtype=np.int64)
        self._n_tasks = np.zeros(n_slots, dtype=np.int32)  # that have still to load a part of it
        self._n_leases = np.zeros(n_slots, dtype=np.int32)
        self._used = np.zeros(n_slots, dtype=np.int64)
        self._is_done = np.zeros(n_slots, dtype=np.bool_)  # nobody will ask for its slab again in this epoch
        self._free = _Stack(n_slots)  # slots: last in, first out, so that few of them are ever touched
        self._errors: dict[int, Exception] = {}
        self._is_complete = False
        self._clock = 0
        self._n_holders = 0  # of leases
        self._n_touched = 0  # slots

    def __len__(self) -> int:
        return len(self._slab_of)

    def is_complete(self) -> bool:
        """Whether all slabs there are have been loaded; then none ever leaves."""
        if not self._is_complete and not len(self._free) and len(self) >= len(self._slot_of):
            with self._changed:
                self._is_complete = not (self._n_tasks.any() or self._errors or (self._slot_of < 0).any())
        return self._is_complete

    @property
    def kept_bytes(self) -> int:
        """Bytes of slots that were ever written to."""
        return self._n_touched * self.slot_rows * math.prod(self.rows.shape[1:]) * self.rows.itemsize

    def places(self, slabs: IntArray) -> IntArray:
        """The slot of each slab, of a pool that is complete."""
        return self._slot_of[slabs].astype(np.int64)

    def memory(self, slots: IntArray, n_rows: int) -> SlotMemory:
        """The first rows of some slots."""
        return SlotMemory(self.rows, slots * self.slot_rows, n_rows)

    def lease(self, slabs: IntArray, n_tasks: IntArray) -> Lease:
        """Holds as many slabs as have a place; none where others have to give places back first (``wait_for_room``).

        Who holds a lease must not ask for another: then two could wait for each other. An empty lease holds nothing
        and is not given back.

        Args:
            slabs: different slabs.
            n_tasks: for each, the tasks that load it where it is not there.
        """
        with self._changed:
            if not self._n_holders and not len(self._free) and (self._slot_of[slabs] < 0).all():
                self._evict(len(slabs))
            lease = self._place(slabs, n_tasks)
            if len(lease.held):
                self._is_done[lease.held] = False
                self._n_leases[lease.held] += 1
                self._n_holders += 1
                self._touch(lease.held)
            return lease

    def wait_for_room(self) -> None:
        """Waits until a lease of at least one slab can be had."""
        with self._changed:
            while not len(self._free) and (self._n_holders or not len(self._idle())):
                self._changed.wait()

    def reserve(self, slabs: IntArray, n_tasks: IntArray) -> Lease:
        """Gives free places to slabs that are not there; holds nothing, waits for nothing, throws nothing out."""
        with self._changed:
            lease = self._place(slabs, n_tasks)
            self._touch(lease.slots[lease.is_new])
            return lease

    def give_back(self, lease: Lease, is_done: npt.NDArray[np.bool_]) -> None:
        """Ends a lease.

        Args:
            lease: what ``lease`` gave.
            is_done: which slabs nobody will ask for again in this epoch.
        """
        with self._changed:
            self._n_leases[lease.held] -= 1
            self._n_holders -= 1
            self._is_done[lease.held] |= is_done[lease.slots >= 0]
            self._release(lease.held)
            self._changed.notify_all()

    def let_go(self, slabs: IntArray) -> None:
        """Nobody will ask for these again in this epoch."""
        with self._changed:
            slots = self._slot_of[slabs].astype(np.int64)
            slots = slots[slots >= 0]
            self._is_done[slots] = True
            self._release(slots)
            self._changed.notify_all()

    def finish_task(self, slots: IntArray, error: Exception | None = None) -> None:
        """A task that loads parts of these slots is done, or failed.

        What failed is told to those who have a lease on it, and forgotten: who asks later tries again.
        """
        with self._changed:
            self._n_tasks[slots] -= 1
            if error is not None:
                self._forget(slots)
                self._errors |= dict.fromkeys(slots.tolist(), error)
                self._is_done[slots] = True
            if self._errors:
                self._release(slots)
            self._changed.notify_all()

    def is_loaded(self, lease: Lease) -> bool:
        """Whether all slabs of a lease are there, or failed."""
        return not self._n_tasks[lease.held].any()

    def wait(self, lease: Lease) -> None:
        """Waits until all slabs of a lease are there, or failed."""
        with self._changed:
            while not self.is_loaded(lease):
                self._changed.wait()

    def error(self, lease: Lease) -> Exception | None:
        """What went wrong while a slab of the lease was loaded, if anything."""
        if not self._errors:
            return None
        with self._changed:
            return next((self._errors[slot] for slot in lease.slots.tolist() if slot in self._errors), None)

    def _place(self, slabs: IntArray, n_tasks: IntArray) -> Lease:
        slots = self._slot_of[slabs].astype(np.int64)
        missing = np.flatnonzero(slots < 0)
        if len(missing) < len(slabs):
            self._free.remove(slots if not len(missing) else slots[slots >= 0])  # those that are needed again
        is_new = np.zeros(len(slabs), dtype=np.bool_)
        if len(missing):
            found = self._free.pop(len(missing))
            self._is_done[found] = False
            self._n_touched = max(self._n_touched, int(found.max(initial=-1)) + 1)
            self._forget(found)
            placed = missing[: len(found)]
            slots[placed] = found
            is_new[placed] = True
            self._slot_of[slabs[placed]] = found
            self._slab_of[found] = slabs[placed]
            self._n_tasks[found] = n_tasks[placed]
        return Lease(slots, is_new, slots if len(missing) == is_new.sum() else slots[slots >= 0])

    def _forget(self, slots: IntArray) -> None:
        """No slab is found in these slots any more, and nothing went wrong in them."""
        slabs = self._slab_of[slots]
        self._slot_of[slabs[slabs != NOWHERE]] = NOWHERE
        self._slab_of[slots] = NOWHERE
        if self._errors:
            for slot in slots.tolist():
                self._errors.pop(slot, None)

    def _release(self, slots: IntArray) -> None:
        """Frees those slots that nobody needs, holds or writes to."""
        idle = self._is_done[slots] & (self._n_leases[slots] == 0) & (self._n_tasks[slots] == 0)
        self._free.push(slots[idle & ~self._free.has[slots]])

    def _evict(self, n: int) -> None:
        """Frees the slots that were not used for longest."""
        idle = self._idle()
        n = min(len(idle), max(n, len(self) // 64))  # some more, as looking for them takes its time
        if n:
            oldest = idle[np.argpartition(self._used[idle], n - 1)[:n]]
            self._is_done[oldest] = True
            self._release(oldest[np.argsort(-self._used[oldest])])

    def _idle(self) -> IntArray:
        return np.flatnonzero((self._n_leases == 0) & (self._n_tasks == 0) & ~self._free.has)

    def _touch(self, slots: IntArray) -> None:
        self._clock += 1
        self._used[slots] = self._clock


class _Stack:
    """Numbers below ``n``, last in, first out, of which any can be removed; many at a time. Full at first: 0 on top."""

    def __init__(self, n: int) -> None:
        self.has = np.ones(n, dtype=np.bool_)
        self._n = n
        # Entries; one whose number was removed stays behind, and counts no more: its number's place is another.
        self._entries = np.concatenate([np.arange(n - 1, -1, -1), np.zeros(n, dtype=np.int64)])
        self._place = np.arange(n - 1, -1, -1)
        self._top = n

    def __len__(self) -> int:
        return self._n

    def push(self, numbers: IntArray) -> None:
        """Adds numbers that are not there, the last one on top."""
        if self._top + len(numbers) > len(self._entries):
            kept = self._entries[: self._top][self._counts(0, self._top)]
            self._entries[: len(kept)] = kept
            self._place[kept] = np.arange(len(kept))
            self._top = len(kept)
        places = np.arange(self._top, self._top + len(numbers))
        self._entries[places] = numbers
        self._place[numbers] = places
        self.has[numbers] = True
        self._top += len(numbers)
        self._n += len(numbers)

    def pop(self, n: int) -> IntArray:
        """Takes as many as there are, at most ``n``; the topmost first."""
        n = min(n, self._n)
        parts = [np.empty(0, dtype=np.int64)]
        while n:
            bottom = max(0, self._top - n)
            found = self._entries[bottom : self._top][self._counts(bottom, self._top)][::-1]
            self.has[found] = False
            self._top = bottom
            self._n -= len(found)
            n -= len(found)
            parts.append(found)
        return np.concatenate(parts)

    def remove(self, numbers: IntArray) -> None:
        """Takes those of some different numbers that are there."""
        there = numbers[self.has[numbers]]
        self.has[there] = False
        self._n -= len(there)

    def _counts(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        entries = self._entries[start:stop]
        counts: npt.NDArray[np.bool_] = self.has[entries] & (self._place[entries] == np.arange(start, stop))
        return counts


class InMemoryReader:
    """Serves rows of a small array, such as labels or ids, from memory; reads it at the first call, in this process.

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

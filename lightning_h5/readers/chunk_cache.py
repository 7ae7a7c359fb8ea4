"""A bounded cache of decoded chunks: a fixed, reused memory of slots.

A *block* is what is decoded together: the rows of one array that share their chunks, or a run of rows without chunks.
The cache knows which block is in which slot, not how a block is decoded.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import H5Error
from ..types import IntArray
from .block_memory import BlockMemory
from .block_sources import BlockSource

__all__ = ["MOST_TOGETHER", "ROOM_AHEAD", "ChunkCache", "Lease", "load_tasks"]

NOWHERE = -1

MOST_TOGETHER = 4
"""Tasks of small blocks that are made one for a large team, at most. Each task costs a turn of the interpreter's lock,
for which all threads wait: with 16 simulated cores, tasks of 4 MiB gave 1.4 times the rows of tasks of 1 MiB, and tasks
of 8 MiB 1.3 times (2026-11-30)."""

ROOM_AHEAD = 4
"""One in this number of the blocks that fit ``shuffle.buffer``, and at least one, is reserved for decoding ahead."""


class Lease(NamedTuple):
    """Blocks that stay in their slots until the lease is returned.

    Attributes:
        slots: slot of each requested block, or -1 if no slot was free, shape ``(n,)``.
        is_new: which blocks were not cached and have to be loaded, shape ``(n,)``.
        held: the slots that are not -1.
    """

    slots: IntArray
    is_new: npt.NDArray[np.bool_]
    held: IntArray


class _Waiting(NamedTuple):
    """A read that waits until blocks are loaded.

    Attributes:
        slots: their slots.
        is_over: a lock that is released once no task loads a part of them.
    """

    slots: IntArray
    is_over: threading.Lock


class ChunkCache:
    """A bounded cache of blocks. Safe to use from threads; belongs to one process.

    A block whose last planned row was read frees its slot at once, and stays readable until the slot is reused.
    If no slot is free, the least recently used block is evicted, but never while another lease is about to return
    slots: with planned reads that would evict a block that is needed again.

    Args:
        n_blocks: number of blocks.
        n_slots: number of blocks that fit into the cache, at least one.
        slot_rows: rows of a slot.
        row_shape: shape of a row.
        dtype: of its numbers.
        rows: memory of the slots, shape ``(n_slots * slot_rows, ...)``; None allocates it in this machine's memory.
    """

    def __init__(
        self,
        n_blocks: int,
        n_slots: int,
        slot_rows: int,
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        rows: Any = None,
    ) -> None:
        self.slot_rows = slot_rows
        # The system provides memory when it is first written to; slots are reused before new ones are touched.
        self.rows: Any = np.empty((n_slots * slot_rows, *row_shape), dtype) if rows is None else rows
        self._changed = threading.Condition()
        self._slot_of = np.full(n_blocks, NOWHERE, dtype=np.int32)
        self._block_of = np.full(n_slots, NOWHERE, dtype=np.int64)
        self._n_tasks = np.zeros(n_slots, dtype=np.int32)  # tasks that still load a part of the slot
        self._n_leases = np.zeros(n_slots, dtype=np.int32)
        self._used = np.zeros(n_slots, dtype=np.int64)
        self._is_done = np.zeros(n_slots, dtype=np.bool_)  # the block is not needed again in this epoch
        self._free = _Stack(n_slots)  # slots: last in, first out, so that few of them are ever touched
        self._errors: dict[int, Exception] = {}
        self._waiting: list[_Waiting] = []
        self._is_complete = False
        self._clock = 0
        self._n_holders = 0  # number of leases
        self._n_touched = 0  # slots used so far

    def __len__(self) -> int:
        return len(self._block_of)

    def is_complete(self) -> bool:
        """Return whether all blocks have been loaded; then none is ever evicted."""
        if not self._is_complete and not len(self._free) and len(self) >= len(self._slot_of):
            with self._changed:
                self._is_complete = not (self._n_tasks.any() or self._errors or (self._slot_of < 0).any())
        return self._is_complete

    @property
    def kept_bytes(self) -> int:
        """Bytes of slots that were ever written to."""
        row_bytes: int = math.prod(self.rows.shape[1:]) * self.rows.itemsize
        return self._n_touched * self.slot_rows * row_bytes

    def places(self, blocks: IntArray) -> IntArray:
        """Return the slot of each block of a complete cache."""
        return self._slot_of[blocks].astype(np.int64)

    def holds(self, blocks: IntArray) -> npt.NDArray[np.bool_]:
        """Return which blocks have a slot that is not free."""
        slots = self._slot_of[blocks]
        holds: npt.NDArray[np.bool_] = (slots >= 0) & ~self._free.has[slots]
        return holds

    def memory(self, slots: IntArray, n_rows: int) -> BlockMemory:
        """Return the memory of the first rows of some slots."""
        return BlockMemory(self.rows, slots * self.slot_rows, n_rows)

    def lease(self, blocks: IntArray, n_tasks: IntArray) -> Lease:
        """Lease slots for as many blocks as possible; none if others have to be returned first (``wait_for_room``).

        The holder of a lease must not request another, or two could wait for each other. An empty lease is not
        returned.

        Args:
            blocks: different blocks.
            n_tasks: for each block, the number of tasks that load it.
        """
        with self._changed:
            if not self._n_holders and not len(self._free) and (self._slot_of[blocks] < 0).all():
                self._free_oldest(max(len(blocks), len(self) // 64))  # more than needed, as the search is slow
            lease = self._place(blocks, n_tasks)
            if len(lease.held):
                self._is_done[lease.held] = False
                self._n_leases[lease.held] += 1
                self._n_holders += 1
                self._touch(lease.held)
            return lease

    def wait_for_room(self) -> None:
        """Wait until at least one block can be leased."""
        with self._changed:
            while not len(self._free) and (self._n_holders or not len(self._idle())):
                self._changed.wait()

    def reserve(self, blocks: IntArray, n_tasks: IntArray) -> Lease:
        """Assign free slots to blocks that are not cached; neither leases, waits, nor evicts."""
        with self._changed:
            lease = self._place(blocks, n_tasks)
            self._touch(lease.slots[lease.is_new])
            return lease

    def give_back(self, lease: Lease, is_done: npt.NDArray[np.bool_]) -> None:
        """Return a lease.

        Args:
            lease: a lease of ``lease``.
            is_done: which blocks are not needed again in this epoch.
        """
        with self._changed:
            self._n_leases[lease.held] -= 1
            self._n_holders -= 1
            self._is_done[lease.held] |= is_done[lease.slots >= 0]
            self._release(lease.held)
            self._changed.notify_all()

    def let_go(self, blocks: IntArray) -> None:
        """Free the slots of blocks that are not needed again in this epoch."""
        with self._changed:
            slots = self._slot_of[blocks].astype(np.int64)
            slots = slots[slots >= 0]
            self._is_done[slots] = True
            self._release(slots)
            self._changed.notify_all()

    def let_go_of_rest(self, are_needed: npt.NDArray[np.bool_] | None = None) -> None:
        """Free the slots of all unused blocks, which an epoch that ended early did not read.

        Args:
            are_needed: blocks that stay, shape ``(n_blocks,)``; None for none.
        """
        with self._changed:
            idle = self._idle()
            self._free_these(idle if are_needed is None else idle[~are_needed[self._block_of[idle]]])
            self._changed.notify_all()

    def finish_task(self, slots: IntArray, error: Exception | None = None) -> None:
        """Note that a task that loads parts of these slots is done, or failed.

        An error is raised by the reads that have a lease on the block, and then forgotten: later reads try again.
        """
        with self._changed:
            if error is not None:
                self._forget(slots)
                self._errors |= dict.fromkeys(slots.tolist(), error)
                self._is_done[slots] = True
            self._n_tasks[slots] -= 1  # after the error is noted: reads look at both without the lock
            if self._errors:
                self._release(slots)
            if self._waiting:
                self._wake()
            self._changed.notify_all()

    def _wake(self) -> None:
        """Wake the reads whose blocks are all loaded: one that woke after each task would take time from the others."""
        waiting, self._waiting = self._waiting, []
        for read in waiting:
            if self._n_tasks[read.slots].any():
                self._waiting.append(read)
            else:
                read.is_over.release()

    def is_loaded(self, lease: Lease) -> bool:
        """Return whether all blocks of a lease are loaded, or failed."""
        return not self._n_tasks[lease.held].any()

    def wait(self, lease: Lease, seconds: float = -1) -> None:
        """Wait until all blocks of a lease are loaded, or failed.

        Args:
            lease: the lease.
            seconds: time limit; -1 for none.
        """
        read = _Waiting(lease.held, threading.Lock())
        read.is_over.acquire()
        with self._changed:
            if self.is_loaded(lease):
                return
            self._waiting.append(read)
        is_over = False
        try:
            is_over = read.is_over.acquire(timeout=seconds)
        finally:
            if not is_over:  # the time is over, or there was an interrupt
                with self._changed:
                    self._waiting = [other for other in self._waiting if other is not read]

    def errors(self, lease: Lease) -> dict[int, Exception]:
        """Return the errors that were raised while blocks of the lease were loaded, by their slots."""
        if not self._errors:
            return {}
        with self._changed:
            return {slot: self._errors[slot] for slot in lease.slots.tolist() if slot in self._errors}

    def _place(self, blocks: IntArray, n_tasks: IntArray) -> Lease:
        slots = self._slot_of[blocks].astype(np.int64)
        absent_blocks = np.flatnonzero(slots < 0)
        if len(absent_blocks) < len(blocks):
            self._free.remove(slots if not len(absent_blocks) else slots[slots >= 0])  # cached blocks needed again
        is_new = np.zeros(len(blocks), dtype=np.bool_)
        if len(absent_blocks):
            new_slots = self._free.pop(len(absent_blocks))
            self._is_done[new_slots] = False
            self._n_touched = max(self._n_touched, int(new_slots.max(initial=-1)) + 1)
            self._forget(new_slots)
            placed = absent_blocks[: len(new_slots)]
            slots[placed] = new_slots
            is_new[placed] = True
            self._slot_of[blocks[placed]] = new_slots
            self._block_of[new_slots] = blocks[placed]
            self._n_tasks[new_slots] = n_tasks[placed]
        return Lease(slots, is_new, slots if len(absent_blocks) == is_new.sum() else slots[slots >= 0])

    def _forget(self, slots: IntArray) -> None:
        """Clear the blocks and errors of slots."""
        blocks = self._block_of[slots]
        self._slot_of[blocks[blocks != NOWHERE]] = NOWHERE
        self._block_of[slots] = NOWHERE
        if self._errors:
            for slot in slots.tolist():
                self._errors.pop(slot, None)

    def _release(self, slots: IntArray) -> None:
        """Free slots that are done, not leased and not being loaded."""
        idle = self._is_done[slots] & (self._n_leases[slots] == 0) & (self._n_tasks[slots] == 0)
        self._free.push(slots[idle & ~self._free.has[slots]])

    def _free_oldest(self, n: int) -> None:
        """Free up to so many slots, the least recently used first."""
        idle = self._idle()
        if n := min(len(idle), n):
            self._free_these(idle[np.argpartition(self._used[idle], n - 1)[:n]])

    def _free_these(self, slots: IntArray) -> None:
        """Free slots, so that the least recently used are reused first."""
        self._is_done[slots] = True
        self._release(slots[np.argsort(-self._used[slots])])

    def _idle(self) -> IntArray:
        return np.flatnonzero((self._n_leases == 0) & (self._n_tasks == 0) & ~self._free.has)

    def _touch(self, slots: IntArray) -> None:
        self._clock += 1
        self._used[slots] = self._clock


def load_tasks(
    cache: ChunkCache, source: BlockSource, blocks: IntArray, slots: IntArray, n_sharing: int = 0
) -> list[partial[None]]:
    """Return tasks that load blocks of one file: several small blocks each, or some parts of a large one.

    Args:
        cache: the cache.
        source: loads blocks.
        blocks: numbers of the blocks in the file.
        slots: their slots in the cache.
        n_sharing: threads that have a task each; if the cache has room for it, these are of more small blocks. 0 for
            small tasks.
    """
    n_parts, step = source.n_parts, source.parts_together
    n_blocks = max(1, step // n_parts)
    if n_blocks > 1 and n_sharing:
        n_blocks = max(n_blocks, min(MOST_TOGETHER * n_blocks, len(cache) // ROOM_AHEAD // n_sharing))
    shares = [range(start, min(start + step, n_parts)) for start in range(0, n_parts, step)]
    cuts = [slice(start, start + n_blocks) for start in range(0, len(blocks), n_blocks)]
    return [partial(_load, cache, source, blocks[cut].tolist(), slots[cut], parts) for cut in cuts for parts in shares]


def _load(cache: ChunkCache, source: BlockSource, blocks: list[int], slots: IntArray, parts: range) -> None:
    """Load the same parts of some blocks."""
    try:
        source.load(blocks, parts, cache.memory(slots, source.rows_per_block))
    except Exception as error:
        if len(blocks) == 1:
            cache.finish_task(slots, error)
        else:  # only reads of the damaged block raise
            for at in range(len(blocks)):
                try:
                    _load(cache, source, blocks[at : at + 1], slots[at : at + 1], parts)
                except BaseException as interrupt:  # the other blocks will not be loaded
                    if len(rest := slots[at + 1 :]):
                        cache.finish_task(rest, _interrupted(interrupt))
                    raise
    except BaseException as interrupt:
        cache.finish_task(slots, _interrupted(interrupt))
        raise
    else:
        cache.finish_task(slots)


def _interrupted(interrupt: BaseException) -> H5Error:
    return H5Error(f"loading was interrupted ({type(interrupt).__name__}). Read again.")


class _Stack:
    """A stack of numbers below ``n``, of which any can be removed; works on many at a time. Full at first, 0 on top."""

    def __init__(self, n: int) -> None:
        self.has = np.ones(n, dtype=np.bool_)
        self._n = n
        # The entry of a removed number stays on the stack and is ignored, since the number has no place.
        self._entries = np.concatenate([np.arange(n - 1, -1, -1), np.zeros(n, dtype=np.int64)])
        self._place = np.arange(n - 1, -1, -1)
        self._top = n

    def __len__(self) -> int:
        return self._n

    def push(self, numbers: IntArray) -> None:
        """Add numbers that are not on the stack, the last one on top."""
        if self._top + len(numbers) > len(self._entries):
            entries = self._entries[: self._top][self._counts(0, self._top)]
            self._entries[: len(entries)] = entries
            self._place[entries] = np.arange(len(entries))
            self._top = len(entries)
        places = np.arange(self._top, self._top + len(numbers))
        self._entries[places] = numbers
        self._place[numbers] = places
        self.has[numbers] = True
        self._top += len(numbers)
        self._n += len(numbers)

    def pop(self, n: int) -> IntArray:
        """Remove and return up to ``n`` numbers, the topmost first."""
        n = min(n, self._n)
        parts = [np.empty(0, dtype=np.int64)]
        while n:
            bottom = max(0, self._top - n)
            popped = self._entries[bottom : self._top][self._counts(bottom, self._top)][::-1]
            self.has[popped] = False
            self._top = bottom
            self._n -= len(popped)
            n -= len(popped)
            parts.append(popped)
        return np.concatenate(parts)

    def remove(self, numbers: IntArray) -> None:
        """Remove distinct numbers from the stack; numbers that are not on it are ignored."""
        entries = numbers[self.has[numbers]]
        self.has[entries] = False
        self._n -= len(entries)

    def _counts(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        entries = self._entries[start:stop]
        counts: npt.NDArray[np.bool_] = self.has[entries] & (self._place[entries] == np.arange(start, stop))
        return counts

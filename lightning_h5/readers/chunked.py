"""Read rows of chunked arrays: blocks are decoded in parallel into a cache, and batches copied from it.

A read begins with leases of the blocks in the cache; rows are copied out once these are decoded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..types import IntArray
from .base import BegunRead
from .block_map import BlockMap, Boxes, Pieces
from .block_sources import BlockSources, Change, CopyChange, FieldLayouts
from .chunk_cache import NOWHERE, ChunkCache, Lease, load_tasks
from .copies import Copy, CopyRows, copy_on_all_cores, copy_pieces
from .kept_rows import KeptRead, KeptRows
from .thread_pool import TaskQueue

__all__ = ["Changes", "ChunkedReader", "CountReads"]

CountReads = Callable[[BlockMap], IntArray]
"""Returns how often an epoch reads rows of each block."""

MAX_READS = 2**31 - 1
PATIENCE = 1.0  # seconds that a read leaves decoding to a large team, before it decodes too: the team may have ended


class Changes(NamedTuple):
    """What rows are changed by when they are copied out of blocks.

    Attributes:
        kinds: the different changes; empty if there are none.
        of_array: for several changes, the number of each array's change.
        in_place: the change of all rows if it can be made in place too.
    """

    kinds: tuple[CopyChange, ...] = ()
    of_array: IntArray | None = None
    in_place: Change | None = None

    @classmethod
    def all_by(cls, change: Change | None) -> Changes:
        """Return one change of all rows; None leaves them as they are."""
        return cls() if change is None else cls((change,), in_place=change)


class _BlocksAhead(NamedTuple):
    """Blocks that an epoch needs which has not begun.

    Attributes:
        epoch: the epoch.
        are_needed: which blocks were prefetched for it, shape ``(n_blocks,)``.
    """

    epoch: int
    are_needed: npt.NDArray[np.bool_]


class ChunkedReader:
    """One field of all files of a dataset.

    Args:
        layouts: the array of each file, or of each part of one, of one row shape and dtype.
        sources: for each of them, the source of its blocks.
        n_bytes: memory for decoded blocks. Blocks larger than that are read without a cache.
        work: shares loading among threads.
        counters: counts blocks used and loaded.
        rows: rows that this dataset has, numbered over all files, in any order; None for all. A block is done when all
            of them were read.
        retain: keep blocks after their last row of an epoch, for the next. None keeps them if all fit.
        changes: change rows when they are copied out of a block.
        reads: returns how often an epoch reads rows of each block, if that is not once each of ``rows``.
    """

    def __init__(
        self,
        layouts: FieldLayouts,
        sources: BlockSources,
        *,
        n_bytes: int,
        work: TaskQueue,
        counters: Counters,
        rows: IntArray | None = None,
        retain: bool | None = None,
        changes: Changes = Changes(),  # noqa: B008  # immutable
        reads: CountReads | None = None,
    ) -> None:
        first = layouts.examples[0]
        self.dtype, self.row_shape = first.dtype, first.row_shape
        more = f" and {len(layouts) - 1} more arrays" if len(layouts) > 1 else ""
        self._name = f"{first.key!r} in {first.path!r}{more}"
        self._sources, self._work, self._counters = sources.each, work, counters
        self._is_staged = any(layout.guard.staging is not None for layout in layouts.examples)
        self.map = BlockMap(sources.grids)
        self._n_tasks = sources.of_kinds(lambda source: -(-source.n_parts // source.parts_together))
        slot_rows = max(source.rows_per_block for source in sources.examples)
        self._slot_bytes = slot_rows * math.prod(self.row_shape) * self.dtype.itemsize
        self._n_bytes, self.rows_per_block = n_bytes, slot_rows
        self._rows, self._reads, self._retain, self._changes = rows, reads, retain, changes
        row_bytes = math.prod(self.row_shape) * self.dtype.itemsize
        fits = self._slot_bytes and n_bytes // self._slot_bytes >= self.map.n_blocks  # memory is faster yet
        self._kept = None if fits else KeptRows.of(self._sources, self.map, row_bytes)
        self._is_all_kept = False  # as it was found last: reads need not look for each block
        self._lock = threading.Lock()
        self._cache: ChunkCache | None = None
        self._all: npt.NDArray[np.int32] | None = None  # rows of this dataset in each block, and how many are left
        self._left: dict[int, npt.NDArray[np.int32]] = {}  # by epoch: the next one begins before all was read
        self._epoch: int | None = None  # that was begun last
        self._ahead = _BlocksAhead(-1, np.empty(0, dtype=np.bool_))

    def __len__(self) -> int:
        return self.map.n_rows

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None, epoch: int | None = None) -> npt.NDArray[Any]:
        """Return rows in the order requested (see ``RowReader.read``).

        Args:
            rows: any rows, numbered over all files.
            out: memory of any dtype to read into; numbers are cast as by ``astype``.
            epoch: the epoch, in which each row is read at most once; None without a plan.
        """
        if out is None:
            out = np.empty((len(rows), *self.row_shape), dtype=self.dtype)
        self.begin(self.map.boxes(np.asarray(rows, dtype=np.int64)), out, epoch).finish()
        return out

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded rows in memory now."""
        return 0 if self._cache is None else self._cache.kept_bytes

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are in memory, and stay there."""
        return self._cache is not None and self._cache.is_complete()

    def is_kept(self, n_rows: int) -> bool:
        """Return whether a local disk has all blocks with rows of this dataset, and rows are read by position.

        Args:
            n_rows: rows of a sample, about.
        """
        if self._kept is None:
            return False
        with self._lock:
            if self._all is None:
                self._all = self._rows_of_blocks()
            blocks = np.flatnonzero(self._all)
        sizes = np.full_like(blocks, min(n_rows, self.rows_per_block))
        pieces = Pieces(blocks, np.zeros_like(blocks), sizes)
        self._is_all_kept = self._kept.are_long(pieces) and bool(self._kept.has(pieces).all())
        return self._is_all_kept

    def begin(
        self, boxes: Boxes, out: npt.NDArray[Any] | CopyRows, epoch: int | None = None, *, all_cores: bool = False
    ) -> BegunRead:
        """Begin to read: lease slots for blocks, and start to load blocks that are not cached.

        Waits only if the cache has too few slots: then all but the last part is read here. Reads of a plan should begin
        one after the other, so that a later one does not take the slots that an earlier one waits for.

        Args:
            boxes: any rows.
            out: memory to read into, or a function that copies stored rows to their destination.
            epoch: see ``read``.
            all_cores: allow torch's threads for copies, if this is a thread of the caller.
        """
        self.map.check(boxes, self._name)
        pieces = self.map.pieces(boxes)
        copy: CopyRows = out if callable(out) else self._copy_to(out, pieces)
        if (complete := self._cache) is not None and complete.is_complete():
            self._counters.add(blocks_used=_n_different(pieces.blocks))
            firsts = complete.places(pieces.blocks) * complete.slot_rows + pieces.within
            changes = self._changes
            is_whole = not changes.kinds or changes.in_place is not None
            if all_cores and is_whole and not callable(out) and out.dtype == self.dtype and out.flags.c_contiguous:
                copy = partial(copy_on_all_cores, out=out, change=changes.in_place)
            return _CompleteRead(complete, firsts, pieces, copy)
        by_rows = self._by_rows(pieces)
        if by_rows is None:
            return self._begin_blocks(pieces, copy, epoch)
        return self._begin_rows(pieces, out, copy, by_rows, epoch)

    def _begin_blocks(
        self, pieces: Pieces, copy: CopyRows, epoch: int | None, are_asked: npt.NDArray[np.bool_] | None = None
    ) -> BegunRead:
        """Begin to read rows by their blocks: all, or some pieces of them."""
        needed, pieces = self._numbered(pieces, are_asked)
        self._counters.add(blocks_used=len(needed))
        cache = self._ready_cache()
        if cache is None or not len(needed):
            return _PickedRead(self, needed, pieces, copy)
        self._begin_epoch(cache, epoch)
        cached_read = _CachedRead(self, cache, needed, pieces, copy, epoch)
        n_tasks = self._tasks_of(needed)
        while not cached_read.take(self._lease(cache, needed[cached_read.left], n_tasks[cached_read.left])):
            cached_read.finish()
        return cached_read

    def _begin_rows(
        self,
        pieces: Pieces,
        out: npt.NDArray[Any] | CopyRows,
        copy: CopyRows,
        by_rows: npt.NDArray[np.bool_],
        epoch: int | None,
    ) -> KeptRead:
        """Return a read of some pieces by position; of their blocks if that fails."""
        assert self._kept is not None, "pieces are read by position"

        def pick() -> None:
            self._is_all_kept = False
            _PickedRead(self, *self._numbered(pieces, by_rows), copy).finish()

        is_plain = not callable(out) and out.dtype == self.dtype and out.flags.c_contiguous and not self._changes.kinds
        memory = out if is_plain and not callable(out) else None
        rest, kept, starts = None, pieces, pieces.starts
        if not by_rows.all():
            rest = self._begin_blocks(pieces, copy, epoch, ~by_rows)
            kept, starts = pieces.some(by_rows), starts[by_rows]
        self._counters.add(blocks_used=len(self.map.different(kept.blocks)))
        return KeptRead(self._kept, kept, starts, memory, (self.row_shape, self.dtype), copy, pick, rest)

    def _by_rows(self, pieces: Pieces) -> npt.NDArray[np.bool_] | None:
        """Return which pieces are best read by position: those of blocks that a local disk has.

        Of some blocks, the cache may have rows already. If the disk has all, reading them is as fast.
        """
        kept, cache = self._kept, self._cache
        if kept is None:
            return None
        if not kept.are_long(pieces):
            self._is_all_kept = False
            return None
        if self._is_all_kept:
            return np.ones(len(pieces.blocks), np.bool_)
        by_rows = kept.has(pieces)
        if cache is not None:
            by_rows &= ~cache.holds(pieces.blocks)
        return by_rows if by_rows.any() else None

    def _numbered(self, pieces: Pieces, are_asked: npt.NDArray[np.bool_] | None) -> tuple[IntArray, Pieces]:
        """Return the distinct blocks of pieces, and the pieces by block number; a number beyond if not requested."""
        if are_asked is None:
            needed, which = self.map.numbered(pieces.blocks)
            return needed, pieces._replace(blocks=which)
        needed, which = self.map.numbered(pieces.blocks[are_asked])
        numbers = np.full(len(pieces.blocks), len(needed))
        numbers[are_asked] = which
        return needed, pieces._replace(blocks=numbers)

    def _copy_to(self, out: npt.NDArray[Any], pieces: Pieces) -> CopyRows:
        """Return the function that copies and converts rows, which depends on the arrays of the rows."""
        changes, of_array = self._changes.kinds, self._changes.of_array
        if of_array is None or len(changes) == 1:
            return Copy(out, next(iter(changes), None))
        numbers = pieces.repeated(of_array[self._file_of(pieces.blocks)])

        def copy(rows: npt.NDArray[Any], places: IntArray, out_places: IntArray | None) -> None:
            out_places = np.arange(len(numbers)) if out_places is None else out_places
            for number in np.unique(numbers[out_places]).tolist():
                is_changed = numbers[out_places] == number
                Copy(out, changes[number])(rows, places[is_changed], out_places[is_changed])

        return copy

    def prefetch(self, boxes: Boxes, epoch: int | None = None) -> bool:
        """Start to load the blocks of rows, as far as slots are free; return False if there were too few.

        The rows may be of the next epoch, once all rows of the present epoch were prefetched.
        """
        cache = self._ready_cache()
        if cache is None or cache.is_complete() or self._is_all_kept:
            return True
        pieces = self.map.pieces(boxes)
        blocks = pieces.blocks
        if (by_rows := self._by_rows(pieces)) is not None:
            blocks = blocks[~by_rows]
            if not len(blocks):
                return True
        needed = self.map.different(blocks)
        self._note_ahead(needed, epoch)
        lease = cache.reserve(needed, self._tasks_of(needed))
        self.load(cache, needed, lease)
        return bool((lease.slots >= 0).all())

    def skip(self, boxes: Boxes, epoch: int) -> None:
        """Note rows that an epoch gets from elsewhere: blocks without any other row left free their slots."""
        cache = self._ready_cache()
        if cache is None or cache.is_complete():
            return
        self._begin_epoch(cache, epoch)
        blocks, counts = np.unique(self.map.locate(boxes)[0], return_counts=True)
        cache.let_go(blocks[self.note_read(cache, blocks, counts, epoch)])

    def close(self) -> None:
        """Release the memory."""
        with self._lock:
            self._cache = self._epoch = None
            self._left = {}

    def _ready_cache(self) -> ChunkCache | None:
        """Return the cache; None if not even one block fits into it."""
        with self._lock:
            if self._cache is None and self._slot_bytes and (n_slots := self._n_bytes // self._slot_bytes):
                self._cache = self._new_cache(min(n_slots, self.map.n_blocks))
            return self._cache

    def _new_cache(self, n_slots: int) -> ChunkCache:
        return ChunkCache(self.map.n_blocks, n_slots, self.rows_per_block, self.row_shape, self.dtype)

    def _file_of(self, blocks: IntArray) -> IntArray:
        return self.map.array_of(blocks)

    def _lease(self, cache: ChunkCache, blocks: IntArray, n_tasks: IntArray) -> Lease:
        while not ((lease := cache.lease(blocks, n_tasks)).slots >= 0).any():
            if not self._work.help():
                cache.wait_for_room()
        return lease

    def _note_ahead(self, blocks: IntArray, epoch: int | None) -> None:
        """Note that an epoch needs blocks, if it has not begun."""
        with self._lock:
            if epoch is None or self._epoch is None or epoch <= self._epoch or self._retain:
                return
            if self._ahead.epoch != epoch:
                self._ahead = _BlocksAhead(epoch, np.zeros(self.map.n_blocks, dtype=np.bool_))
            self._ahead.are_needed[blocks] = True

    def _begin_epoch(self, cache: ChunkCache, epoch: int | None) -> None:
        """Free the slots of blocks that the last epoch did not read, if it was left early, and another one begins."""
        if epoch is None or epoch == self._epoch:
            return
        with self._lock:
            last, self._epoch = self._epoch, epoch
            self._left.pop(epoch, None)  # it is read again
            if last is None or epoch <= last or self._retain:
                return
            are_needed = self._ahead.are_needed if self._ahead.epoch == epoch else None
        cache.let_go_of_rest(are_needed)

    def _tasks_of(self, blocks: IntArray) -> IntArray:
        """Return the number of tasks that load each block: one for several parts, and one for several small blocks."""
        if len(self._sources) == 1:
            return np.full(len(blocks), self._n_tasks[0])
        return self._n_tasks[self._file_of(blocks)]

    def load(self, cache: ChunkCache, blocks: IntArray, lease: Lease) -> None:
        """Queue tasks for the new blocks of a lease."""
        new = np.flatnonzero(lease.is_new)
        if len(new):
            if self._is_staged or self._work.pace.may_be_slow:
                self._begin_to_fetch(blocks[new])
            for task in self._make_tasks(cache, blocks[new], lease.slots[new]):
                self._work.put(task)
            self._counters.add(blocks_loaded=len(new))

    def _begin_to_fetch(self, blocks: IntArray) -> None:
        """Begin to fetch blocks: more at a time than there are threads that decode."""
        files = self._file_of(blocks)
        for file in np.unique(files).tolist():
            self._sources[file].will_need(blocks[files == file] - self.map.first_block[file])

    def wait(self, cache: ChunkCache, lease: Lease) -> list[int]:
        """Execute tasks until all blocks of a lease are loaded; return the slots of damaged ones, which are not.

        Raises:
            H5Error: a block could not be loaded for another reason.
        """
        self._work.pace.look(self._counters)
        if not cache.is_loaded(lease):
            with self._work.helpers():
                if self._work.has_large_team:
                    cache.wait(lease, PATIENCE)
                while not cache.is_loaded(lease):
                    if not self._work.help():
                        cache.wait(lease)
        errors = cache.errors(lease)
        for error in errors.values():
            if not isinstance(error, H5CorruptError):
                raise error
        return [*errors]

    def _make_tasks(self, cache: ChunkCache, blocks: IntArray, slots: IntArray) -> list[partial[None]]:
        tasks: list[partial[None]] = []
        n_sharing = self._work.n_sharing
        if len(self._sources) == 1:
            return load_tasks(cache, self._sources[0], blocks, slots, n_sharing)
        files = self._file_of(blocks)
        for file in np.unique(files).tolist():
            is_in_file = files == file
            numbers = blocks[is_in_file] - self.map.first_block[file]
            tasks += load_tasks(cache, self._sources[file], numbers, slots[is_in_file], n_sharing)
        return tasks

    def note_read(self, cache: ChunkCache, blocks: IntArray, counts: IntArray, epoch: int) -> npt.NDArray[np.bool_]:
        """Note rows that were read; return which blocks have none left in this epoch."""
        with self._lock:
            if self._retain is None:
                n_rows = self._rows_of_blocks()
                self._retain = len(cache) >= int(np.count_nonzero(n_rows))
                self._all = None if self._retain else n_rows
            if self._retain:
                return np.zeros(len(blocks), dtype=np.bool_)
            if self._all is None:
                self._all = self._rows_of_blocks()
            if epoch not in self._left:
                self._left = {last: self._left[last] for last in sorted(self._left)[-1:]}
                self._left[epoch] = self._all.copy()
            n_left = self._left[epoch][blocks] - counts
            is_done = n_left <= 0
            if self._epoch is not None and epoch < self._epoch:  # it ended early, and reads no more rows
                is_done[:] = True
            self._left[epoch][blocks] = np.where(is_done, self._all[blocks], n_left)  # for another read of the epoch
            return is_done & ~self._ahead.are_needed[blocks] if self._ahead.epoch > epoch else is_done

    def _rows_of_blocks(self) -> npt.NDArray[np.int32]:
        """Return how many rows of each block an epoch reads."""
        if self._reads is not None:
            return np.minimum(self._reads(self.map), MAX_READS).astype(np.int32)
        if self._rows is not None:
            blocks, _ = self.map.locate(self.map.boxes(self._rows))
            return np.bincount(blocks, minlength=self.map.n_blocks).astype(np.int32)
        return self.map.rows_of_blocks().astype(np.int32)

    def pick(self, block: int, within: IntArray) -> npt.NDArray[Any]:
        """Read rows of a block that has no place in the cache."""
        file = int(self._file_of(np.array([block]))[0])
        rows = np.empty((len(within), *self.row_shape), dtype=self.dtype)
        self._sources[file].pick(block - int(self.map.first_block[file]), within, rows)
        return rows


class _CompleteRead:
    """Rows of a complete cache: nothing to wait for, and no lease."""

    def __init__(self, cache: ChunkCache, firsts: IntArray, pieces: Pieces, copy: CopyRows) -> None:
        self._cache, self._firsts, self._pieces, self._copy = cache, firsts, pieces, copy

    def finish(self) -> None:
        """Copy the rows."""
        copy_pieces(self._copy, self._cache.rows, self._firsts, self._pieces)

    def cancel(self) -> None:
        """Do nothing: there is no lease."""


class _PickedRead:
    """Rows of blocks that have no place in the cache, which are read one after the other.

    Args:
        reader: reads them.
        blocks: different blocks.
        pieces: the rows, with numbers among these blocks.
        copy: copies rows to where they belong.
        numbers: reads the rows of these blocks alone; None of all.
    """

    def __init__(
        self, reader: ChunkedReader, blocks: IntArray, pieces: Pieces, copy: CopyRows, numbers: IntArray | None = None
    ) -> None:
        self._reader, self._blocks, self._copy = reader, blocks, copy
        self._numbers = np.arange(len(blocks)) if numbers is None else numbers
        self._block_of_rows, self._within = pieces.repeated(pieces.blocks), pieces.of_rows(pieces.within)

    def finish(self) -> None:
        """Read and decode the rows."""
        for number, block in zip(self._numbers.tolist(), self._blocks[self._numbers].tolist(), strict=True):
            out_places = np.flatnonzero(self._block_of_rows == number)
            within, places = np.unique(self._within[out_places], return_inverse=True)
            self._copy(self._reader.pick(block, within), places, out_places)

    def cancel(self) -> None:
        """Do nothing: there is no lease."""


class _CachedRead:
    """A read of rows whose blocks have slots in the cache, or still need one."""

    def __init__(
        self,
        reader: ChunkedReader,
        cache: ChunkCache,
        blocks: IntArray,
        pieces: Pieces,
        copy: CopyRows,
        epoch: int | None,
    ) -> None:
        self._reader, self._cache, self._blocks, self._epoch = reader, cache, blocks, epoch
        self._pieces, self._copy_rows = pieces, copy
        self._lease: Lease | None = None
        self._part = self.left = np.arange(len(blocks))  # blocks of this lease, and blocks without a slot

    def take(self, lease: Lease) -> bool:
        """Take a lease for blocks that are left, and start to load them; return whether all have slots now."""
        self._lease, self._part = lease, self.left
        self.left = self.left[lease.slots < 0]
        self._reader.load(self._cache, self._blocks[self._part], lease)
        return not len(self.left)

    def finish(self) -> None:
        """Wait for the leased blocks, copy their rows, and return the lease."""
        lease, self._lease = self._lease, None
        assert lease is not None, "it was finished before"
        is_done = np.zeros(len(self._part), dtype=np.bool_)
        try:
            slots = lease.slots
            if damaged := self._reader.wait(self._cache, lease):
                is_damaged = np.isin(slots, damaged)
                self._pick(self._part[is_damaged])
                slots = np.where(is_damaged, NOWHERE, slots)
            self._copy(slots)
            if self._epoch is not None:
                is_done = self._note(lease, self._epoch)
        finally:
            self._cache.give_back(lease, is_done)

    def cancel(self) -> None:
        """Return the lease without reading."""
        if self._lease is not None:
            self._cache.give_back(self._lease, np.zeros(len(self._part), dtype=np.bool_))
            self._lease = None

    def _pick(self, numbers: IntArray) -> None:
        """Read rows of damaged blocks without the others: a block may have several chunks, and theirs may be sound."""
        _PickedRead(self._reader, self._blocks, self._pieces, self._copy_rows, numbers).finish()

    def _copy(self, slots_of_part: IntArray) -> None:
        """Copy the rows of these blocks out of the cache."""
        slot_of = np.full(len(self._blocks) + 1, NOWHERE, dtype=np.int64)  # and of pieces that are read elsewhere
        slot_of[self._part] = slots_of_part
        pieces, slots = self._pieces, slot_of[self._pieces.blocks]
        firsts = slots * self._cache.slot_rows + pieces.within
        are_there = None if (slots >= 0).all() else slots >= 0
        copy_pieces(self._copy_rows, self._cache.rows, firsts, pieces, are_there)

    def _note(self, lease: Lease, epoch: int) -> npt.NDArray[np.bool_]:
        all_counts = np.bincount(self._pieces.blocks, self._pieces.sizes, len(self._blocks))
        counts = all_counts[self._part].astype(np.int64)
        has_slot = lease.slots >= 0
        counts = np.where(has_slot, counts, 0)
        return has_slot & self._reader.note_read(self._cache, self._blocks[self._part], counts, epoch)


def _n_different(numbers: IntArray) -> int:
    """Return how many different numbers there are, in a fifth to a third of the time of ``unique``."""
    ordered = np.sort(numbers)
    return min(1, len(ordered)) + int(np.count_nonzero(ordered[1:] != ordered[:-1]))

"""Rows of arrays that are decoded a slab at a time: loaded in parallel into a pool, gathered in one copy a batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5Error
from ..hdf5 import ArrayLayout
from ..types import IntArray
from .base import blocks, check_bounds, take_rows
from .chunk_cache import ChunkCache, Lease
from .chunk_loader import Change, SlabSource
from .thread_pool import TaskQueue

__all__ = ["BegunRead", "ChunkedReader"]


class ChunkedReader:
    """One field of all files of a dataset; reads rows by their number over all files.

    Args:
        layouts: the array of each file, of one row shape and dtype.
        sources: for each file, where its slabs come from.
        n_bytes: memory for decoded slabs. What does not hold a single slab is read without being kept.
        work: where loading is shared among threads.
        counters: where slabs used and loaded are counted.
        rows: rows that this dataset has, in any order; None for all. A slab is done when all of its rows are out.
        keeps: keep slabs after their last row of an epoch, for the next. None: where all of them have a place.
        change: changes rows as they are copied out of a slab.
    """

    def __init__(
        self,
        layouts: Sequence[ArrayLayout],
        sources: Sequence[SlabSource],
        *,
        n_bytes: int,
        work: TaskQueue,
        counters: Counters,
        rows: IntArray | None = None,
        keeps: bool | None = None,
        change: Change | None = None,
    ) -> None:
        self.dtype, self.row_shape = layouts[0].dtype, layouts[0].row_shape
        more = f" and {len(layouts) - 1} more files" if len(layouts) > 1 else ""
        self._name = f"{layouts[0].key!r} in {layouts[0].path!r}{more}"
        self._sources, self._work, self._counters = sources, work, counters
        self._slab_rows = np.array([source.rows_per_slab for source in sources], dtype=np.int64)
        self._n_tasks = np.array([-(-source.n_parts // source.parts_together) for source in sources], dtype=np.int64)
        n_rows = np.array([source.n_rows for source in sources], dtype=np.int64)
        self._n_rows = int(n_rows.sum())
        self._first_row = np.concatenate([[0], np.cumsum(n_rows)])
        self._first_slab = np.concatenate([[0], np.cumsum(-(-n_rows // self._slab_rows))])
        slot_rows = int(self._slab_rows.max())
        self._slot_bytes = slot_rows * math.prod(self.row_shape) * self.dtype.itemsize
        self._n_bytes, self.rows_per_slab = n_bytes, slot_rows
        self._rows, self._keeps, self.change = rows, keeps, change
        self._lock = threading.Lock()
        self._pool: ChunkCache | None = None
        self._all: npt.NDArray[np.int32] | None = None  # rows of this dataset in each slab, and what is left of them
        self._left: npt.NDArray[np.int32] | None = None
        self._epoch: int | None = None

    def __len__(self) -> int:
        return self._n_rows

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None, epoch: int | None = None) -> npt.NDArray[Any]:
        """Rows in the order asked (see ``RowReader.read``).

        Args:
            rows: any rows.
            out: memory of any dtype to read into; numbers are cast as ``astype`` does.
            epoch: the epoch in which each row is asked for at most once; None where nothing is planned.
        """
        if out is None:
            out = np.empty((len(rows), *self.row_shape), dtype=self.dtype)
        self.begin(np.asarray(rows, dtype=np.int64), out, epoch).finish()
        return out

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded rows in memory now."""
        return 0 if self._pool is None else self._pool.kept_bytes

    @property
    def is_complete(self) -> bool:
        """Whether all slabs are in memory, and stay there."""
        return self._pool is not None and self._pool.is_complete()

    def begin(
        self, rows: IntArray, out: npt.NDArray[Any], epoch: int | None = None, *, all_cores: bool = False
    ) -> BegunRead:
        """Begins to read: gives slabs their places, and has those loaded that are not there.

        Waits only where they need more places than there are: then all but the last part is read here. Reads of a plan
        should begin one after the other, so that a later one does not take the places that an earlier one waits for.

        Args:
            rows: any rows.
            out: memory to read into.
            epoch: see ``read``.
            all_cores: rows that are in memory may be copied by torch's threads, as in a thread of the caller's own.
        """
        if len(rows) and rows.view(np.uint64).max() >= self._n_rows:  # negative rows are huge as unsigned numbers
            check_bounds(rows, self._n_rows, self._name)  # raises
        slabs, within = self._locate(rows)
        if (complete := self._pool) is not None and complete.is_complete():
            self._counters.add(slabs_used=_n_different(slabs))
            places = complete.places(slabs) * complete.slot_rows + within
            return CompleteRead(complete, places, out, self.change, all_cores)
        needed, which = np.unique(slabs, return_inverse=True)
        self._counters.add(slabs_used=len(needed))
        pool = self._ready_pool()
        if pool is None or not len(needed):
            return PickedRead(self, needed, which, within, out)
        read = PooledRead(self, pool, needed, which, within, out, epoch)
        n_tasks = self._tasks_of(needed)
        while not read.take(self._lease(pool, needed[read.left], n_tasks[read.left])):
            read.finish()
        return read

    def prefetch(self, rows: IntArray) -> bool:
        """Has slabs of these rows loaded, as far as there are free places; False where there were too few."""
        pool = self._ready_pool()
        if pool is None or pool.is_complete():
            return True
        needed = np.unique(self._locate(np.asarray(rows, dtype=np.int64))[0])
        lease = pool.reserve(needed, self._tasks_of(needed))
        self.load(pool, needed, lease)
        return bool((lease.slots >= 0).all())

    def skip(self, rows: IntArray, epoch: int) -> None:
        """Counts rows that an epoch has from elsewhere: slabs of which nothing else is left give their places back."""
        pool = self._ready_pool()
        if pool is None or pool.is_complete():
            return
        slabs, counts = np.unique(self._locate(rows)[0], return_counts=True)
        pool.let_go(slabs[self.note_read(pool, slabs, counts, epoch)])

    def close(self) -> None:
        """Gives the memory back."""
        with self._lock:
            self._pool = self._epoch = None

    def _ready_pool(self) -> ChunkCache | None:
        """The pool, made when it is first needed; None where it would not hold a single slab."""
        with self._lock:
            if self._pool is None and self._slot_bytes and (n_slots := self._n_bytes // self._slot_bytes):
                n_slabs = int(self._first_slab[-1])
                self._pool = ChunkCache(n_slabs, min(n_slots, n_slabs), self.rows_per_slab, self.row_shape, self.dtype)
            return self._pool

    def _locate(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Slab, and row inside the slab, of each row."""
        if len(self._sources) == 1:
            return np.divmod(rows, self._slab_rows[0])
        files = np.searchsorted(self._first_row, rows, side="right") - 1
        slabs, within = np.divmod(rows - self._first_row[files], self._slab_rows[files])
        return slabs + self._first_slab[files], within

    def _file_of(self, slabs: IntArray) -> IntArray:
        return np.searchsorted(self._first_slab, slabs, side="right") - 1

    def _lease(self, pool: ChunkCache, slabs: IntArray, n_tasks: IntArray) -> Lease:
        while not ((lease := pool.lease(slabs, n_tasks)).slots >= 0).any():
            if not self._work.help():
                pool.wait_for_room()
        return lease

    def _tasks_of(self, slabs: IntArray) -> IntArray:
        """Tasks that load each slab: one for several parts, and for small slabs a share of one."""
        if len(self._sources) == 1:
            return np.full(len(slabs), self._n_tasks[0])
        return self._n_tasks[self._file_of(slabs)]

    def load(self, pool: ChunkCache, slabs: IntArray, lease: Lease) -> None:
        """Puts tasks for the new slabs of a lease."""
        new = np.flatnonzero(lease.is_new)
        if len(new):
            for task in self._make_tasks(pool, slabs[new], lease.slots[new]):
                self._work.put(task)
            self._counters.add(slabs_loaded=len(new))

    def wait(self, pool: ChunkCache, lease: Lease) -> None:
        """Does tasks until all slabs of a lease are there.

        Raises:
            H5Error: one could not be loaded.
        """
        if not pool.is_loaded(lease):
            with self._work.helpers():
                while not pool.is_loaded(lease):
                    if not self._work.help():
                        pool.wait(lease)
        if (error := pool.error(lease)) is not None:
            raise error

    def _make_tasks(self, pool: ChunkCache, slabs: IntArray, slots: IntArray) -> list[partial[None]]:
        tasks: list[partial[None]] = []
        if len(self._sources) == 1:
            return _tasks(pool, self._sources[0], slabs, slots)
        files = self._file_of(slabs)
        for file in np.unique(files).tolist():
            here = np.flatnonzero(files == file)
            tasks += _tasks(pool, self._sources[file], slabs[here] - self._first_slab[file], slots[here])
        return tasks

    def note_read(self, pool: ChunkCache, slabs: IntArray, counts: IntArray, epoch: int) -> npt.NDArray[np.bool_]:
        """Counts rows that are out; says which slabs have none left in this epoch."""
        with self._lock:
            if self._keeps is None:
                self._keeps = len(pool) >= int(np.count_nonzero(self._rows_of_slabs()))
            if self._keeps:
                return np.zeros(len(slabs), dtype=np.bool_)
            if self._all is None:
                self._all = self._rows_of_slabs()
            if self._left is None or self._epoch != epoch:
                self._left, self._epoch = self._all.copy(), epoch
            left = self._left[slabs] - counts
            is_done = left <= 0
            self._left[slabs] = np.where(is_done, self._all[slabs], left)  # should the epoch be read once more
            return is_done

    def _rows_of_slabs(self) -> npt.NDArray[np.int32]:
        """Rows of this dataset in each slab."""
        if self._rows is not None:
            return np.bincount(self._locate(self._rows)[0], minlength=int(self._first_slab[-1])).astype(np.int32)
        rows = np.repeat(self._slab_rows, np.diff(self._first_slab))
        last = self._first_slab[1:] - 1
        n_rows = np.diff(self._first_row)
        some = n_rows > 0
        rows[last[some]] = ((n_rows - 1) % self._slab_rows + 1)[some]
        return rows.astype(np.int32)

    def pick(self, slab: int, within: IntArray) -> npt.NDArray[Any]:
        """Rows of a slab that is too large to be kept."""
        file = int(self._file_of(np.array([slab]))[0])
        rows = np.empty((len(within), *self.row_shape), dtype=self.dtype)
        self._sources[file].pick(slab - int(self._first_slab[file]), within, rows)
        return rows


class BegunRead(Protocol):
    """Rows that a reader has begun to read. What was begun is finished or cancelled, once."""

    def finish(self) -> None:
        """Reads them.

        Raises:
            H5CorruptError: stored bytes are missing or do not decode.
            H5FileError: the file cannot be read.
        """
        ...

    def cancel(self) -> None:
        """Gives back what is held, without reading; without effect on what is finished."""
        ...


class CompleteRead:
    """Rows of a pool that holds all slabs: nothing to wait for, and nothing to give back."""

    def __init__(
        self, pool: ChunkCache, places: IntArray, out: npt.NDArray[Any], change: Change | None, all_cores: bool
    ) -> None:
        self._pool, self._places, self._out, self._change, self._all_cores = pool, places, out, change, all_cores

    def finish(self) -> None:
        """Copies the rows."""
        rows, out = self._pool.rows, self._out
        if self._all_cores and out.dtype == rows.dtype and out.flags.c_contiguous:
            take_rows(rows, self._places, out, all_cores=True)
            if self._change is not None:
                self._change(out)
        else:
            _copy_rows(rows, self._places, None, out, self._change)

    def cancel(self) -> None:
        """Nothing is held."""


class PickedRead:
    """Rows of slabs that are too large to be kept, which are read one after the other."""

    def __init__(
        self, reader: ChunkedReader, slabs: IntArray, which: IntArray, within: IntArray, out: npt.NDArray[Any]
    ) -> None:
        self._reader, self._slabs, self._which, self._within, self._out = reader, slabs, which, within, out

    def finish(self) -> None:
        """Reads and decodes."""
        for number, slab in enumerate(self._slabs.tolist()):
            here = np.flatnonzero(self._which == number)
            rows = self._reader.pick(slab, self._within[here])
            _copy_rows(rows, np.arange(len(rows)), here, self._out, self._reader.change)

    def cancel(self) -> None:
        """Nothing is held."""


class PooledRead:
    """Rows of slabs that have places in the pool, and of those that are still to get one."""

    def __init__(
        self,
        reader: ChunkedReader,
        pool: ChunkCache,
        slabs: IntArray,
        which: IntArray,
        within: IntArray,
        out: npt.NDArray[Any],
        epoch: int | None,
    ) -> None:
        self._reader, self._pool, self._slabs, self._epoch = reader, pool, slabs, epoch
        self._which, self._within, self._out = which, within, out
        self._lease: Lease | None = None
        self._part = self.left = np.arange(len(slabs))  # numbers of the slabs of this lease, and of those without one

    def take(self, lease: Lease) -> bool:
        """Takes places for slabs that are left, and has them loaded; says whether all have one now."""
        self._lease, self._part = lease, self.left
        self.left = self.left[lease.slots < 0]
        self._reader.load(self._pool, self._slabs[self._part], lease)
        return not len(self.left)

    def finish(self) -> None:
        """Waits for the slabs that have places, copies their rows, and gives the places back."""
        lease, self._lease = self._lease, None
        assert lease is not None, "it was finished before"
        is_done = np.zeros(len(self._part), dtype=np.bool_)
        try:
            self._reader.wait(self._pool, lease)
            self._copy(lease)
            if self._epoch is not None:
                is_done = self._note(lease, self._epoch)
        finally:
            self._pool.give_back(lease, is_done)

    def cancel(self) -> None:
        """Gives the places back without reading."""
        if self._lease is not None:
            self._pool.give_back(self._lease, np.zeros(len(self._part), dtype=np.bool_))
            self._lease = None

    def _copy(self, lease: Lease) -> None:
        """One copy of rows of the pool; rows of slabs that are left, or were read before, stay out."""
        slot_of = np.full(len(self._slabs), -1, dtype=np.int64)
        slot_of[self._part] = lease.slots
        slots = slot_of[self._which]
        places = slots * self._pool.slot_rows + self._within
        is_all = len(self._part) == len(self._slabs) and not len(self.left)
        here = None if is_all else np.flatnonzero(slots >= 0)
        _copy_rows(self._pool.rows, places if here is None else places[here], here, self._out, self._reader.change)

    def _note(self, lease: Lease, epoch: int) -> npt.NDArray[np.bool_]:
        counts = np.bincount(self._which, minlength=len(self._slabs))[self._part]
        is_placed = lease.slots >= 0
        counts = np.where(is_placed, counts, 0)
        return is_placed & self._reader.note_read(self._pool, self._slabs[self._part], counts, epoch)


def _n_different(numbers: IntArray) -> int:
    """How many different numbers there are, in a fifth to a third of the time that ``unique`` takes."""
    ordered = np.sort(numbers)
    return min(1, len(ordered)) + int(np.count_nonzero(ordered[1:] != ordered[:-1]))


def _copy_rows(
    rows: npt.NDArray[Any], places: IntArray, here: IntArray | None, out: npt.NDArray[Any], change: Change | None
) -> None:
    """Copies rows to where they belong (``here``; None is all of ``out``), and changes them."""
    is_whole = here is None and out.flags.c_contiguous
    if is_whole and change is not None:
        change.take(rows, places, out)
    elif is_whole and out.dtype == rows.dtype:
        np.take(rows, places, axis=0, out=out, mode="clip")  # any other mode takes memory between
    else:
        for some in blocks(len(places), max(rows[:1].nbytes, out[:1].nbytes)):
            with np.errstate(all="ignore"):  # numbers too large for another dtype become infinite, as torch has it
                out[some if here is None else here[some]] = _taken(rows, places[some], out.dtype, change)


def _taken(rows: npt.NDArray[Any], places: IntArray, dtype: np.dtype[Any], change: Change | None) -> npt.NDArray[Any]:
    if change is None:
        return np.take(rows, places, axis=0, mode="clip")
    taken = np.empty((len(places), *rows.shape[1:]), dtype)
    change.take(rows, places, taken)
    return taken


def _tasks(pool: ChunkCache, source: SlabSource, slabs: IntArray, slots: IntArray) -> list[partial[None]]:
    """Tasks that load slabs of one file: several small slabs each, or some parts of a large one."""
    n_parts, step = source.n_parts, source.parts_together
    n_slabs = max(1, step // n_parts)
    shares = [range(start, min(start + step, n_parts)) for start in range(0, n_parts, step)]
    cuts = [slice(start, start + n_slabs) for start in range(0, len(slabs), n_slabs)]
    return [partial(_load, pool, source, slabs[cut].tolist(), slots[cut], parts) for cut in cuts for parts in shares]


def _load(pool: ChunkCache, source: SlabSource, slabs: list[int], slots: IntArray, parts: range) -> None:
    """A task: loads the same parts of some slabs."""
    try:
        source.load(slabs, parts, pool.memory(slots, source.rows_per_slab))
    except Exception as error:
        if len(slabs) == 1:
            pool.finish_task(slots, error)
        else:  # only who needs the slab that cannot be loaded should hear of it
            for at in range(len(slabs)):
                try:
                    _load(pool, source, slabs[at : at + 1], slots[at : at + 1], parts)
                except BaseException as interrupt:  # nobody will load the others
                    if len(rest := slots[at + 1 :]):
                        pool.finish_task(rest, _interrupted(interrupt))
                    raise
    except BaseException as interrupt:
        pool.finish_task(slots, _interrupted(interrupt))
        raise
    else:
        pool.finish_task(slots)


def _interrupted(interrupt: BaseException) -> H5Error:
    return H5Error(f"loading was interrupted ({type(interrupt).__name__}). Read again.")

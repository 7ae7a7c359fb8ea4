"""A cache of recently used rows, and a dataset that reads through it and counts hits."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from ..cores import is_forked
from ..counters import Counters
from ..hdf5 import OpenOptions
from ..readers import TaskQueue, take_rows
from ..readers.buffers import BufferPool, Column, batch_bytes, copy_rows, put_rows
from ..samples import ReadCost, RowTable
from ..types import IntArray
from .fields import Fields
from .file_dataset import FileDataset
from .raw_batch import RawBatch
from .sample_layout import FieldPlan, Transform

__all__ = ["CachingDataset", "SampleCache"]


class CachedColumn:
    """The slots of one field.

    Args:
        n_slots: number of rows that fit.
        plan: how the field is converted.
    """

    def __init__(self, n_slots: int, plan: FieldPlan) -> None:
        self._plan = plan
        self._text = np.empty(n_slots if plan.dtype is None else 0, dtype=object)
        # Bytes, since NumPy and torch lack each other's dtypes. The system provides memory on the first write.
        self._bytes = np.empty((n_slots, plan.row_bytes), dtype=np.uint8)

    def put(self, slots: IntArray, column: Column, places: IntArray) -> None:
        """Copy some rows of a batch into slots."""
        if self._plan.dtype is not None and isinstance(column, torch.Tensor):
            copy_rows(self._bytes, slots, batch_bytes(column), places)
        else:
            for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
                self._text[slot] = _copied(column[place])

    def take(self, slots: IntArray, places: IntArray, n_rows: int, buffers: BufferPool, *, all_cores: bool) -> Column:
        """Return a new batch with rows of slots at some places; its other places are not filled."""
        if self._plan.dtype is None:
            text: list[Any] = [None] * n_rows
            for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
                text[place] = _copied(self._text[slot])
            return text
        column = buffers.tensor((n_rows, *self._plan.row_shape), self._plan.dtype)
        into = batch_bytes(column)
        if len(places) < n_rows:
            copy_rows(into, places, self._bytes, slots)
        else:
            take_rows(self._bytes, slots, into, all_cores=all_cores)
        return column


def _copied(text: Any) -> Any:
    """Return a copy of a row's text, which may be a list: changes of a batch must not reach the cache."""
    if isinstance(text, torch.Tensor):
        return text.clone()
    return [_copied(value) for value in text] if isinstance(text, list) else text


class SampleCache:
    """A cache of rows by number, with limits of rows and bytes. The least recently used row is dropped first.

    Threads may share it; processes may not.

    Args:
        n_rows: largest number of rows.
        n_bytes: largest number of bytes; text is not counted.
        plans: how each field is converted.
    """

    def __init__(self, n_rows: int, n_bytes: int, plans: Sequence[FieldPlan]) -> None:
        self._row_bytes = sum(plan.row_bytes for plan in plans)
        self.n_slots = min(n_rows, n_bytes // max(1, self._row_bytes))
        self._slots: OrderedDict[int, int] = OrderedDict()  # slot of each row, least recently used first
        self._columns = [CachedColumn(self.n_slots, plan) for plan in plans]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the cached rows; text is not counted."""
        return len(self) * self._row_bytes

    def has(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Return a mask of the cached rows. They may be dropped before they are read."""
        slots = self._slots
        return np.fromiter((row in slots for row in rows.tolist()), dtype=np.bool_, count=len(rows))

    def take(
        self, rows: IntArray, buffers: BufferPool, *, all_cores: bool = False
    ) -> tuple[IntArray, tuple[Column, ...]]:
        """Return copies of the cached rows of a batch.

        Args:
            rows: the batch, in any order, with repeats.
            buffers: allocates batches.
            all_cores: copy with torch's threads if these are faster.

        Returns:
            The places of cached rows in the batch; and a batch of each field, filled at these places.
        """
        with self._lock:
            slots = np.fromiter((self._slots.get(row, -1) for row in rows.tolist()), dtype=np.int64, count=len(rows))
            places = np.flatnonzero(slots >= 0)
            if not len(places):
                return places, ()
            for row in rows[places].tolist():
                self._slots.move_to_end(row)
            return places, tuple(
                column.take(slots[places], places, len(rows), buffers, all_cores=all_cores) for column in self._columns
            )

    def put(self, rows: IntArray, columns: Sequence[Column]) -> None:
        """Cache copies of rows; of a batch that exceeds the cache, its last rows."""
        if not self.n_slots or not len(rows):
            return
        last: dict[int, int] = {}  # keep a repeated row once, at its last place
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
            places = np.array([place for _, place in new], dtype=np.int64)
            for cached, column in zip(self._columns, columns, strict=True):
                cached.put(np.array(slots, dtype=np.int64), column, places)

    def clear(self) -> None:
        """Drop all rows."""
        with self._lock:
            self._slots.clear()


class CachingDataset(FileDataset):
    """Rows of files, read through a cache of recently used rows.

    Args:
        table: see ``FileDataset``, as the five that follow.
        fields: see above.
        batch_transform: see above.
        options: see above.
        mmap: see above.
        cache_bytes: see above.
        cache_size: number of rows to cache in each process; 0 caches none.
        max_cache_bytes: largest size of cached rows in bytes, divided among worker processes.
    """

    _of_process = (*FileDataset._of_process, "_samples")

    def __init__(
        self,
        table: RowTable,
        fields: Fields,
        *,
        batch_transform: Transform | None,
        options: OpenOptions,
        mmap: bool,
        cache_bytes: int,
        cache_size: int,
        max_cache_bytes: int,
    ) -> None:
        self._cache_size, self._max_cache_bytes = cache_size, max_cache_bytes
        super().__init__(
            table,
            fields,
            batch_transform=batch_transform,
            indices=None,
            options=options,
            mmap=mmap,
            cache_bytes=cache_bytes,
        )
        self.retain = self._retains(None)

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        self._samples: SampleCache | None = None

    def read_with(
        self, cache_bytes: int, *, retain: bool | None = None, in_runs: bool = False, gives_back: bool = False
    ) -> None:
        """See ``RowDataset.read_with``."""
        super().read_with(cache_bytes, retain=self._retains(retain), in_runs=in_runs, gives_back=gives_back)

    def _retains(self, retain: bool | None) -> bool | None:
        """Return whether readers keep decoded rows: not if they decode single rows, which this cache holds."""
        cost = self._cost_of_files
        has_cache = self._cache_size and cost.row_bytes <= self._max_cache_bytes
        return False if has_cache and cost.has_cheap_random_access else retain

    @property
    def _cache(self) -> SampleCache:
        """The cache of this process."""
        self._check_process()
        with self._lock:
            if self._samples is None:
                worker = get_worker_info()
                n_bytes = self._max_cache_bytes // (worker.num_workers if worker else 1)
                self._samples = SampleCache(self._cache_size, n_bytes, self.plans)
            return self._samples

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process holds in memory now, including cached rows."""
        return super().kept_bytes + (0 if self._samples is None else self._samples.kept_bytes)

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``. Cached rows are in memory, too."""
        cost, samples = super().cost, self._samples
        has_all = samples is not None and len(samples) == len(self)
        return replace(cost, is_in_memory=True) if has_all else cost

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``. Reads rows that are not in the cache."""
        cache = self._cache
        if not cache.n_slots:
            self.counters.add(cache_misses=len(rows))
            return super().begin(rows, epoch, at_once=at_once)
        located = self.located(rows)
        hits, columns = cache.take(located, self._buffers, all_cores=at_once and not is_forked())
        self.counters.add(cache_hits=len(hits), cache_misses=len(rows) - len(hits))
        if epoch is not None and len(hits):
            boxes = self.table.boxes(self.table.indexer.rows_of(located[hits]).fields)
            for field, reader in self._chunked_readers().items():
                reader.skip(boxes[field], epoch)
        if len(hits) and len(hits) == len(rows):
            return lambda: RawBatch(rows, columns)
        is_missing = np.ones(len(rows), dtype=np.bool_)
        is_missing[hits] = False
        misses = np.flatnonzero(is_missing)
        read = super().begin(rows[misses], epoch, at_once=at_once)

        def complete() -> RawBatch:
            raw = read()
            cache.put(located[misses], raw.columns)
            if not len(hits):
                return raw
            for column, missing in zip(columns, raw.columns, strict=True):
                put_rows(column, misses, missing)
            return RawBatch(rows, columns)

        return complete

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``. Skips cached rows."""
        is_missing = ~self._cache.has(self.located(rows))
        return not is_missing.any() or super().prefetch(rows[is_missing], epoch)

    def clear_cache(self) -> None:
        """Drop the cached rows of this process; the counts stay."""
        self._cache.clear()

    def close(self) -> None:
        """See ``RowDataset.close``."""
        super().close()
        with self._lock:
            self._samples = None

"""Rows that are read from the files when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from ..cores import is_forked
from ..counters import Counters
from ..errors import H5DataChangedError
from ..hdf5 import MAX_H5, OpenOptions, process_pool
from ..options import FileOptions
from ..order import BlockTable
from ..readers import (
    BegunRead,
    ChunkedReader,
    ContiguousReader,
    InMemoryReader,
    MappedReader,
    TaskQueue,
    is_pooled,
    open_chunked,
    open_reader,
)
from ..types import IntArray, RowReader
from .base import RawBatch, ReadCost
from .buffers import Column
from .fields import Fields
from .row_table import HELD_BYTES, RowTable, TableDataset
from .sample_layout import Transform

__all__ = ["CACHE_BYTES", "FileDataset", "ReadaheadHints", "chunk_cache"]

CACHE_BYTES = 64 << 20
"""Memory for decoded rows unless the user asks for another amount."""


class FileDataset(TableDataset):
    """Rows that are read from the files when they are asked for.

    Args:
        table: see ``TableDataset``, as the four that follow.
        fields: see above.
        batch_transform: see above.
        indices: see above.
        options: see above.
        mmap: map contiguous arrays into memory.
        cache_bytes: memory for decoded rows; worker processes share it.
    """

    _of_process = (*TableDataset._of_process, "_readers", "_chunked", "_hints", "_n_prepared", "_lock")

    def __init__(
        self,
        table: RowTable,
        fields: Fields,
        *,
        batch_transform: Transform | None,
        indices: npt.ArrayLike | None,
        options: OpenOptions,
        mmap: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._mmap = mmap
        self.cache_bytes, self.in_runs = cache_bytes, False
        self.retain: bool | None = None
        super().__init__(table, fields, batch_transform=batch_transform, indices=indices, options=options)

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        self._readers: dict[tuple[int, int], RowReader] = {}
        self._chunked: dict[int, ChunkedReader] | None = None
        self._hints: ReadaheadHints | None = None
        self._n_prepared = 0  # number of workers prepared for
        self._lock = threading.Lock()

    # Reading -------------------------------------------------------------------------------------------------

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``: has decoded what is not decoded yet."""
        located = self.located(rows)
        if at_once:
            self._hint(located, epoch)
        all_cores = at_once and not is_forked()
        reads: dict[int, tuple[BegunRead, npt.NDArray[Any]]] = {}
        with ExitStack() as undo, self._blames_changes(located):
            for field, reader in self._chunked_readers().items():
                plan = self.plans[field]
                memory = self._buffers.array((len(rows), *plan.row_shape), plan.gathered)
                reads[field] = reader.begin(located, memory, epoch, all_cores=all_cores), memory
                undo.callback(reads[field][0].cancel)
            undo.pop_all()
        return partial(self._complete, rows, located, reads, all_cores=all_cores)

    def _complete(
        self,
        rows: IntArray,
        located: IntArray,
        reads: dict[int, tuple[BegunRead, npt.NDArray[Any]]],
        *,
        all_cores: bool,
    ) -> RawBatch:
        columns: list[Column] = []
        with ExitStack() as undo, self._blames_changes(located):
            for read, _ in reads.values():
                undo.callback(read.cancel)  # no effect once it is finished
            by_file = self._by_file(located) if len(reads) < len(self.plans) else {}
            for field, plan in enumerate(self.plans):
                if field in reads:  # already normalized during decoding
                    read, memory = reads[field]
                    read.finish()
                    columns.append(plan.cast(memory, self._buffers))
                else:
                    stored = self._read(field, len(rows), by_file, all_cores=all_cores)
                    columns.append(plan.finished(stored, self._buffers))
        self._check_unchanged(self._touched(located))
        return RawBatch(rows, tuple(columns))

    def _touched(self, located: IntArray) -> list[int]:
        """Return the numbers of the files that rows are in."""
        if len(self.table.paths) == 1:
            return [0]
        touched: list[int] = np.unique(self.table.locate(located)[0]).tolist()
        return touched

    def _by_file(self, located: IntArray) -> dict[int, tuple[IntArray | None, IntArray]]:
        """Return, for each file that rows are in, their places in the batch (None for all) and their rows there."""
        if len(self.table.paths) == 1:
            return {0: (None, located)}
        files, local = self.table.locate(located)
        places = {file: np.flatnonzero(files == file) for file in np.unique(files).tolist() or [0]}
        return {file: (here, local[here]) for file, here in places.items()}

    def _read(
        self, field: int, n_rows: int, by_file: dict[int, tuple[IntArray | None, IntArray]], *, all_cores: bool
    ) -> npt.NDArray[Any]:
        """Return rows of a field as they are stored, in memory of their own."""
        first = self._reader(next(iter(by_file)), field)
        memory = self._buffers.array((n_rows, *first.row_shape), first.dtype)
        for file, (here, local) in by_file.items():
            reader = self._reader(file, field)
            if here is not None:  # rows of several files are read file by file, then scattered to their places
                memory[here] = reader.read(local)
            elif all_cores and isinstance(reader, MappedReader):
                reader.read_on_all_cores(local, memory)
            elif first.dtype.kind == "O":
                memory = reader.read(local)
            else:
                reader.read(local, memory)
        return memory

    @contextmanager
    def _blames_changes(self, located: IntArray) -> Iterator[None]:
        """Raise the error of a file that changed instead of any error that followed from it."""
        try:
            yield
        except OSError:
            self._check_unchanged(self._touched(located))
            raise

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``."""
        located = self.located(rows)
        self._hint(located, epoch)
        with self._blames_changes(located):
            had_room = [reader.prefetch(located) for reader in self._chunked_readers().values()]
        return all(had_room)

    def _hint(self, located: IntArray, epoch: int | None) -> None:
        """Have the system read ahead the runs of rows that the order mixes, in arrays without chunks."""
        if not self.in_runs or epoch is None:
            return
        chunked = self._chunked_readers()  # resets the state in a forked child
        placed = [field for field in self._read_on_demand if field not in chunked]
        if not placed:
            return
        hints = self._hints
        if hints is None:
            hints = ReadaheadHints(self.table.rows_per_block, np.diff(self.table.starts).tolist())
            self._hints = hints
        for file, (_, local) in self._by_file(located).items():
            for run in hints.new(file, local, epoch):
                for field in placed:
                    reader = self._reader(file, field)
                    if isinstance(reader, ContiguousReader | MappedReader):
                        reader.will_need(run)

    # Costs ---------------------------------------------------------------------------------------------------

    def blocks(self) -> BlockTable:
        """See ``RowDataset.blocks``."""
        return self.table.blocks(self.indices)

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``."""
        chunked = self._chunked_readers()
        is_in_memory = bool(self._read_on_demand) and all(
            chunked[field].is_complete if field in chunked else self._is_cached(field) for field in self._read_on_demand
        )
        return replace(
            self._cost_of_files,
            rows_per_chunk=max((reader.rows_per_block for reader in chunked.values()), default=0),
            rows_per_run=max(self.table.rows_per_block) if self.in_runs else 0,
            is_in_memory=is_in_memory,
        )

    @cached_property
    def _cost_of_files(self) -> ReadCost:
        """What follows from the files alone."""
        layouts, loose = self.table.layouts, self._read_on_demand
        loose_bytes = [sum(arrays[field].row_bytes for field in loose) for arrays in layouts]
        n_rows = np.diff(self.table.starts).tolist()
        return ReadCost(
            row_bytes=sum(layout.row_bytes for layout in layouts[0]),
            has_cheap_random_access=all(
                arrays[field].is_contiguous or arrays[field].rows_per_chunk == 1
                for arrays in layouts
                for field in loose
            ),
            block_bytes=max(1, *(n * size for n, size in zip(self.table.rows_per_block, loose_bytes, strict=True))),
            decoded_bytes=sum(n * size for n, size in zip(n_rows, loose_bytes, strict=True)),
        )

    def _is_cached(self, field: int) -> bool:
        """Return whether the page cache has all rows of a field of a mapped file."""
        if not self._mmap or len(self.table.paths) > 1:  # rows of several files are gathered in a second copy
            return False
        reader = self._reader(0, field)
        return isinstance(reader, MappedReader) and reader.is_cached()

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded and of held rows that this process keeps in memory now."""
        held = [reader.kept_bytes for reader in list(self._readers.values()) if isinstance(reader, InMemoryReader)]
        return sum(held) + sum(reader.kept_bytes for reader in list((self._chunked or {}).values()))

    # Readers -------------------------------------------------------------------------------------------------

    @cached_property
    def _read_on_demand(self) -> list[int]:
        """The fields that are not held whole."""
        return [field for field, is_held in enumerate(self.table.held) if not is_held]

    def _chunked_readers(self) -> dict[int, ChunkedReader]:
        """Return the readers of the fields that are decoded, each for all files."""
        self._check_process()
        with self._lock:
            if self._chunked is None:
                try:
                    worker = get_worker_info()
                    self._chunked = self._open_chunked(worker.num_workers if worker else 1)
                except OSError:  # a changed file no longer matches its table
                    self._check_unchanged(range(len(self.table.paths)))
                    raise
            return self._chunked

    def _open_chunked(self, n_consumers: int) -> dict[int, ChunkedReader]:
        layouts = list(zip(*self.table.layouts, strict=True))
        fields = [f for f in self._read_on_demand if any(is_pooled(array, self.options) for array in layouts[f])]
        budget = self.cache_bytes // n_consumers
        total = sum(layouts[field][0].row_bytes for field in fields)
        return {
            field: open_chunked(
                layouts[field],
                self.options,
                rows_per_run=self.table.rows_per_block,
                n_bytes=budget * layouts[field][0].row_bytes // total,
                work=self.work,
                counters=self.counters,
                rows=None if self.has_all_rows else self.located(np.arange(len(self))),
                retain=self.retain,
                prepare=self.plans[field].affine,
                dtype=self.plans[field].gathered,
            )
            for field in fields
        }

    def read_with(self, cache_bytes: int, *, retain: bool | None = None, in_runs: bool = False) -> None:
        """See ``RowDataset.read_with``."""
        if (cache_bytes, retain, in_runs) != (self.cache_bytes, self.retain, self.in_runs):
            self.cache_bytes, self.retain, self.in_runs = cache_bytes, retain, in_runs
            self.close()
            self._chunked, self._n_prepared = None, 0

    def prepare_workers(self, num_workers: int) -> None:
        """See ``RowDataset.prepare_workers``."""
        if num_workers != self._n_prepared:
            self._n_prepared = num_workers
            with suppress(OSError):  # reading the file raises the error
                self._open_chunked(num_workers)  # the readers are dropped, compiled code stays

    def _reader(self, file: int, field: int) -> RowReader:
        reader = self._readers.get((file, field))
        if reader is None:
            layout, held_bytes = self.table.layouts[file][field], HELD_BYTES if self.table.held[field] else 0
            made = open_reader(layout, self.options, mmap=self._mmap, held_bytes=held_bytes, counters=self.counters)
            reader = self._readers.setdefault((file, field), made)  # one of two threads wins; opening is cheap
        return reader

    def _check_unchanged(self, files: Iterable[int]) -> None:
        try:
            for file in files:
                self.table.guards[file].check()
        except H5DataChangedError:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drop cached data of the files, which may have been read during a write. Reads in progress continue."""
        for reader in [*(self._chunked or {}).values(), *list(self._readers.values())]:
            reader.close()
        for path in self.table.paths:
            process_pool().close(path)

    def close(self) -> None:
        """Close this process's files and release its memory; the next read opens them again."""
        self._forget()
        self._readers.clear()
        self._hints = None
        self.work.clear()


def chunk_cache(table: RowTable, budget: int, *, swmr: bool) -> int:
    """Return the bytes of HDF5's chunk cache of an array: room for the chunks of one row, as far as the budget goes.

    HDF5 keeps a cache for each open array, so the budget is shared among the arrays of the files that may be open.
    Arrays that are decoded in this package are read whole chunks at a time, and need none.
    """
    plain = OpenOptions(files=FileOptions(swmr=swmr))
    spans = [
        array.chunk_span_bytes
        for arrays in table.layouts
        for array, is_held in zip(arrays, table.held, strict=True)
        if not is_held and not is_pooled(array, plain)
    ]
    n_open = max(1, min(len(table.paths), MAX_H5) * sum(not is_held for is_held in table.held))
    return max(64 << 10, min(budget // n_open, max([1 << 20, *spans])))


class ReadaheadHints:
    """Yields each run of rows once per epoch, on the first access to one of its rows.

    Args:
        rows_per_run: for each file, rows of a run; the last one may have fewer.
        n_rows: for each file, its rows.
    """

    def __init__(self, rows_per_run: Sequence[int], n_rows: Sequence[int]) -> None:
        self._rows_per_run, self._n_rows = rows_per_run, n_rows
        self._is_named = [np.zeros(-(-n // step), np.bool_) for n, step in zip(n_rows, rows_per_run, strict=True)]
        self._epoch: int | None = None

    def new(self, file: int, rows: IntArray, epoch: int) -> list[range]:
        """Return the runs that these rows are in and that this epoch has not named; two threads may both get one.

        Args:
            file: number of the file.
            rows: inside the file.
            epoch: of the plan that asks.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            for is_named in self._is_named:
                is_named[:] = False
        step, is_named = self._rows_per_run[file], self._is_named[file]
        runs = np.unique(rows // step)
        runs = runs[~is_named[runs]]
        is_named[runs] = True
        return [range(run * step, min(run * step + step, self._n_rows[file])) for run in runs.tolist()]

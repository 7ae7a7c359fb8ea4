"""Rows that are read from the files when they are asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from ..cores import is_forked
from ..errors import H5DataChangedError
from ..hdf5 import MAX_H5, ArrayLayout, OpenOptions, close_when_collected, kind_of, process_pool
from ..order import BlockTable
from ..readers import (
    BegunRead,
    ChunkedReader,
    ContiguousReader,
    InMemoryReader,
    MappedReader,
    is_pooled,
    open_chunked,
    open_reader,
)
from ..types import IntArray, RowReader
from .base import RawBatch, ReadCost, RowDataset
from .buffers import BufferPool
from .catalog import HELD_BYTES, FileCatalog, digest_of_rows, held_fields
from .fields import Fields, checked_rows, numpy_dtype_like
from .normalize import Normalization
from .sample_layout import Column, Transform, summary_of_fields, summary_of_files, summary_of_rows

__all__ = ["CACHE_BYTES", "FileDataset", "RunsAhead", "chunk_cache"]

CACHE_BYTES = 64 << 20
"""Memory for decoded rows where nobody says otherwise."""

_PooledField: TypeAlias = tuple[BegunRead, npt.NDArray[Any]]
"""One field of some rows that is being read, and the memory it is read into."""


class FileDataset(RowDataset):
    """A dataset over the rows of a file table, which are read when they are asked for.

    Args:
        table: the files.
        fields: what is read of each row, and what a sample looks like; in the order of the table's arrays.
        batch_transform: runs once on each collated batch.
        indices: rows of the table that this dataset has, in its order; None for all.
        options: how files are opened where the HDF5 library reads.
        mmap: map contiguous arrays into memory.
        cache_bytes: memory for decoded rows; worker processes share it.
        keeps: keep decoded rows after they were read in an epoch, for the next; None where all of them have a place.
        in_runs: the order mixes runs of rows: have the system read those of arrays without chunks in one piece each.
        normalization: of fields; their dtypes are those that they become by it.
    """

    def __init__(
        self,
        table: FileCatalog,
        fields: Fields,
        *,
        batch_transform: Transform | None,
        indices: IntArray | None,
        options: OpenOptions,
        mmap: bool = False,
        cache_bytes: int = 64 << 20,
        keeps: bool | None = None,
        in_runs: bool = False,
        normalization: Normalization | None = None,
    ) -> None:
        self.table = table
        self._affines = {} if normalization is None else normalization.affines
        self.indices = checked_rows(indices, table.n_rows)
        self._dtypes = fields.dtypes
        self._options = options
        self._mmap = mmap
        self.cache_bytes, self.keeps, self.in_runs = cache_bytes, keeps, in_runs
        self._held = held_fields(table)
        super().__init__(fields.structure, batch_transform)

    def _reset(self) -> None:
        super()._reset()
        self._pid = os.getpid()
        close_when_collected(self, self.table.paths)
        self._readers: dict[tuple[int, int], RowReader] = {}
        self._pooled: dict[int, ChunkedReader] | None = None
        self._runs: RunsAhead | None = None
        self._n_prepared = 0  # workers
        self._lock = threading.Lock()
        self._buffers = BufferPool()

    def __len__(self) -> int:
        return self.table.n_rows if self.indices is None else len(self.indices)

    def gather(self, rows: IntArray, epoch: int | None = None) -> RawBatch:
        """See ``RowDataset.gather``.

        Raises:
            H5DataChangedError: a file is no longer as it was when the dataset was made.
            H5CorruptError: stored bytes cannot be read back.
        """
        self._name_runs(rows, epoch)
        return self._begin(rows, epoch, all_cores=not is_forked())()

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``: has decoded what is not decoded yet."""
        return self._begin(rows, epoch)

    def _begin(self, rows: IntArray, epoch: int | None, *, all_cores: bool = False) -> Callable[[], RawBatch]:
        located = rows if self.indices is None else self.indices[rows]
        reads: dict[int, _PooledField] = {}
        with ExitStack() as undo, self._blames_changes(located):
            for field, reader in self._pooled_fields().items():
                dtype = self._memory_dtype(field, reader.dtype)
                memory = self._buffers.array((len(rows), *reader.row_shape), dtype)
                reads[field] = reader.begin(located, memory, epoch, all_cores=all_cores), memory
                undo.callback(reads[field][0].cancel)
            undo.pop_all()
        return partial(self._read_begun, rows, located, reads, all_cores=all_cores)

    def _read_begun(
        self, rows: IntArray, located: IntArray, reads: dict[int, _PooledField], *, all_cores: bool
    ) -> RawBatch:
        columns: list[Column] = []
        with ExitStack() as undo, self._blames_changes(located):
            for read, _ in reads.values():
                undo.callback(read.cancel)  # without effect once it is finished
            files, local = (None, located) if len(self.table.paths) == 1 else self.table.locate(located)
            touched = [0] if files is None else np.unique(files).tolist()
            for field, dtype in enumerate(self._dtypes):
                column: torch.Tensor | npt.NDArray[Any]
                if field in reads:
                    read, memory = reads[field]
                    read.finish()
                    column = torch.from_numpy(memory)
                elif files is None:
                    column = self._read(0, field, local, all_cores=all_cores)
                else:
                    column = self._read_files(field, files, local, touched)
                columns.append(self._finished(field, column, dtype))
        self._check_unchanged(touched)
        return RawBatch(rows, tuple(columns))

    def _finished(self, field: int, column: torch.Tensor | npt.NDArray[Any], dtype: torch.dtype | None) -> Column:
        """Rows of a field, normalized and cast."""
        affine = self._affines.get(field)
        if affine is not None and field not in self._pooled_fields():  # those are normalized as they are decoded
            assert isinstance(column, torch.Tensor), "text is not normalized"
            rows = column.numpy()
            if rows.dtype == affine.work:
                affine(rows)
            else:
                out = self._buffers.array(rows.shape, affine.work)
                affine.take(rows, None, out)
                column = torch.from_numpy(out)
        return self._cast(column, dtype)

    @contextmanager
    def _blames_changes(self, located: IntArray) -> Iterator[None]:
        """Where a file was changed, that is what the user must hear, whatever else went wrong because of it."""
        try:
            yield
        except OSError:
            self._check_unchanged([0] if len(self.table.paths) == 1 else np.unique(self.table.locate(located)[0]))
            raise

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``."""
        located = rows if self.indices is None else self.indices[rows]
        self._name_runs(rows, epoch)
        with self._blames_changes(located):
            had_room = [reader.prefetch(located) for reader in self._pooled_fields().values()]
        return all(had_room)

    def _name_runs(self, rows: IntArray, epoch: int | None) -> None:
        """Tells the system which runs of rows will be read, where the order mixes them."""
        if not self.in_runs or epoch is None:
            return
        pooled = self._pooled_fields()  # where a forked child begins anew
        placed = [field for field, is_held in enumerate(self._held) if not is_held and field not in pooled]
        if not placed:
            return
        located = rows if self.indices is None else self.indices[rows]
        runs = self._runs
        if runs is None:
            runs = RunsAhead(self.table.rows_per_block(self._held), np.diff(self.table.starts).tolist())
            self._runs = runs
        files, local = (None, located) if len(self.table.paths) == 1 else self.table.locate(located)
        for file in [0] if files is None else np.unique(files).tolist():
            for run in runs.new(file, local if files is None else local[files == file], epoch):
                for field in placed:
                    reader = self._reader(file, field)
                    if isinstance(reader, ContiguousReader | MappedReader):
                        reader.will_need(run)

    @property
    def is_in_memory(self) -> bool:
        """Whether all rows were decoded into memory, and stay there; or the page cache has those of a mapped file."""
        pooled = self._pooled_fields()
        loose = [field for field, is_held in enumerate(self._held) if not is_held]
        return bool(loose) and all(
            pooled[field].is_complete if field in pooled else self._is_cached(field) for field in loose
        )

    def _is_cached(self, field: int) -> bool:
        if not self._mmap or len(self.table.paths) > 1:  # rows of many files are put together in a second copy
            return False
        reader = self._reader(0, field)
        return isinstance(reader, MappedReader) and reader.is_cached()

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``."""
        found = self._table_cost
        if self.in_runs:
            found = replace(found, rows_per_run=max(self.table.rows_per_block(self._held)))
        blocks = [reader.rows_per_block for reader in self._pooled_fields().values()]
        return replace(found, rows_per_chunk=max(blocks)) if blocks else found

    @cached_property
    def _table_cost(self) -> ReadCost:
        """What the files say of it."""
        layouts, n_rows = self.table.layouts, np.diff(self.table.starts).tolist()
        loose = [field for field, whole in enumerate(self._held) if not whole]
        loose_bytes = [sum(arrays[field].row_bytes for field in loose) for arrays in layouts]
        return ReadCost(
            sum(layout.row_bytes for layout in layouts[0]) if layouts else 0,
            all(
                arrays[field].is_contiguous or arrays[field].rows_per_chunk == 1
                for arrays in layouts
                for field in loose
            ),
            max(1, *(n * size for n, size in zip(self.table.rows_per_block(self._held), loose_bytes, strict=True))),
            sum(n * size for n, size in zip(n_rows, loose_bytes, strict=True)),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each field of a row is, as text."""
        return tuple(f"{dtype} of shape {shape}".removeprefix("torch.") for dtype, shape in self._dtypes_and_shapes())

    def _dtypes_and_shapes(self) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """What each field of a row is in a batch."""
        for array, dtype in zip(self.table.layouts[0], self._dtypes, strict=True):
            # However text is stored, it comes as str.
            stored = array.dtype if kind_of(array.dtype) == "number" else kind_of(array.dtype)
            yield dtype or stored, array.row_shape

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        return [
            summary_of_files(self.table.paths),
            summary_of_rows(len(self), self.table.n_rows),
            *summary_of_fields(self.structure, self._dtypes_and_shapes()),
        ]

    def layouts(self) -> Iterator[ArrayLayout]:
        """The arrays that rows are read from, of all files."""
        return chain.from_iterable(self.table.layouts)

    def identity(self) -> str:
        """A digest of these rows: what the files hold, and which of their rows this dataset has, in its order."""
        return digest_of_rows(self.table, self.indices)

    def blocks(self) -> BlockTable:
        """Which of this dataset's rows lie together on disk."""
        return self.table.blocks(self.indices, self._held)

    def files_of(self, rows: IntArray) -> list[str]:
        """The files that rows are read from."""
        files, _ = self.table.locate(rows if self.indices is None else self.indices[rows])
        return [self.table.paths[file] for file in np.unique(files).tolist()]

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``."""
        return self.table.places_of(numbers if self.indices is None else self.indices[numbers])

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded and of held rows that this process keeps in memory now."""
        held = [reader.kept_bytes for reader in list(self._readers.values()) if isinstance(reader, InMemoryReader)]
        return sum(held) + sum(reader.kept_bytes for reader in list((self._pooled or {}).values()))

    def close(self) -> None:
        """Closes this process's files and gives back what is held in memory; the next read opens them again."""
        self._forget()
        self._readers.clear()
        self._runs = None
        self.work.clear()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_readers", "_pooled", "_runs", "_n_prepared", "_lock", "_buffers"):
            del state[name]
        return state

    def _pooled_fields(self) -> dict[int, ChunkedReader]:
        """The fields that are decoded in company, with their readers."""
        if self._pid != os.getpid():  # a forked child has neither our threads nor what they were about to do
            self._reset()
        with self._lock:
            if self._pooled is None:
                try:
                    worker = get_worker_info()
                    self._pooled = self._open_pooled(worker.num_workers if worker else 1)
                except OSError:  # a file that was changed is no longer what its table says
                    self._check_unchanged(range(len(self.table.paths)))
                    raise
            return self._pooled

    def read_with(self, cache_bytes: int, *, keeps: bool | None = None, in_runs: bool = False) -> None:
        """Says how much memory decoded rows may take, and how they will be asked for (see the class's arguments)."""
        if (cache_bytes, keeps, in_runs) != (self.cache_bytes, self.keeps, self.in_runs):
            self.cache_bytes, self.keeps, self.in_runs = cache_bytes, keeps, in_runs
            self.close()
            self._pooled, self._n_prepared = None, 0

    def _memory_dtype(self, field: int, stored: np.dtype[Any]) -> np.dtype[Any]:
        """What rows of a field are read as, where they are decoded here."""
        affine = self._affines.get(field)
        return numpy_dtype_like(self._dtypes[field], stored) if affine is None else affine.work

    def prepare_workers(self, num_workers: int) -> None:
        """See ``RowDataset.prepare_workers``."""
        if num_workers != self._n_prepared:
            self._n_prepared = num_workers
            with suppress(OSError):  # who reads the file hears what is wrong with it
                self._open_pooled(num_workers)  # and forgets it: what was compiled stays

    def _open_pooled(self, n_consumers: int) -> dict[int, ChunkedReader]:
        layouts = list(zip(*self.table.layouts, strict=True))
        loose = [field for field in range(len(layouts)) if not self._held[field]]
        fields = [field for field in loose if any(is_pooled(array, self._options) for array in layouts[field])]
        budget = self.cache_bytes // n_consumers
        total = sum(layouts[field][0].row_bytes for field in fields)
        dtypes = {field: self._memory_dtype(field, layouts[field][0].dtype) for field in fields}
        return {
            field: open_chunked(
                layouts[field],
                self._options,
                rows_per_run=self.table.rows_per_block(self._held),
                n_bytes=budget * layouts[field][0].row_bytes // total,
                work=self.work,
                counters=self.counters,
                rows=self.indices,
                retain=self.keeps,
                prepare=self._affines.get(field),
                dtype=dtype,
            )
            for field, dtype in dtypes.items()
        }

    def _reader(self, file: int, field: int) -> RowReader:
        reader = self._readers.get((file, field))
        if reader is None:
            layout, held_bytes = self.table.layouts[file][field], HELD_BYTES if self._held[field] else 0
            made = open_reader(layout, self._options, mmap=self._mmap, held_bytes=held_bytes, counters=self.counters)
            reader = self._readers.setdefault((file, field), made)  # one of two threads wins; opening costs nothing
        return reader

    def _read(self, file: int, field: int, rows: IntArray, *, all_cores: bool) -> torch.Tensor | npt.NDArray[Any]:
        reader = self._reader(file, field)
        if reader.dtype.kind == "O":
            return reader.read(rows)
        memory = self._buffers.array((len(rows), *reader.row_shape), reader.dtype)
        if all_cores and isinstance(reader, MappedReader):
            return torch.from_numpy(reader.read_on_all_cores(rows, memory))
        return torch.from_numpy(reader.read(rows, memory))

    def _read_files(
        self, field: int, files: IntArray, local: IntArray, touched: list[int]
    ) -> torch.Tensor | npt.NDArray[Any]:
        """Rows of several files: file by file, then put where they were asked."""
        first = self._reader(touched[0] if touched else 0, field)
        column = self._buffers.array((len(local), *first.row_shape), first.dtype)
        for file in touched:
            here = np.flatnonzero(files == file)
            column[here] = self._reader(file, field).read(local[here])
        return column if first.dtype.kind == "O" else torch.from_numpy(column)

    def _check_unchanged(self, files: Iterable[int]) -> None:
        try:
            for file in files:
                self.table.guards[file].check()
        except H5DataChangedError:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drops what is kept of the files: it may have been read while they were written to. What is begun goes on."""
        for reader in [*(self._pooled or {}).values(), *list(self._readers.values())]:
            reader.close()
        for path in self.table.paths:
            process_pool().close(path)

    def _cast(self, column: torch.Tensor | npt.NDArray[Any], dtype: torch.dtype | None) -> Column:
        if isinstance(column, np.ndarray):
            text: list[Any] = column.tolist()
            return text
        if dtype is None or column.dtype == dtype:
            return column
        return self._buffers.tensor(tuple(column.shape), dtype).copy_(column)


def chunk_cache(table: FileCatalog, budget: int, *, swmr: bool) -> int:
    """Bytes of HDF5's chunk cache an array: room for the chunks of one row, where the budget has it.

    HDF5 keeps a cache for each open array, so the budget is shared among the arrays of the files that may be open.
    Those that are decoded in company are read whole chunks at a time, and need none.
    """
    held, plain = held_fields(table), OpenOptions(swmr=swmr)
    spans = [
        array.chunk_span_bytes
        for arrays in table.layouts
        for array, whole in zip(arrays, held, strict=True)
        if not whole and not is_pooled(array, plain)
    ]
    n_open = max(1, min(len(table.paths), MAX_H5) * sum(not whole for whole in held))
    return max(64 << 10, min(budget // n_open, max([1 << 20, *spans])))


class RunsAhead:
    """Names each run of rows once an epoch, when the first of its rows is asked for.

    Args:
        rows_per_run: for each file, rows of a run; the last one may have fewer.
        n_rows: for each file, its rows.
    """

    def __init__(self, rows_per_run: Sequence[int], n_rows: Sequence[int]) -> None:
        self._rows_per_run, self._n_rows = rows_per_run, n_rows
        self._is_named = [np.zeros(-(-n // step), np.bool_) for n, step in zip(n_rows, rows_per_run, strict=True)]
        self._epoch: int | None = None

    def new(self, file: int, rows: IntArray, epoch: int) -> list[range]:
        """Runs of a file that these rows are in, and none before them in this epoch; two threads may both hear of one.

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

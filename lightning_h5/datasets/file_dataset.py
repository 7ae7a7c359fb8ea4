"""Rows that are read from the files on demand."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from ..cores import is_forked
from ..counters import Counters
from ..errors import H5DataChangedError, H5ValueError
from ..hdf5 import OpenOptions, kind_of, process_pool
from ..order import BlockTable
from ..readers import (
    MIN_COMPILED,
    BegunRead,
    Boxes,
    ChunkedReader,
    ContiguousReader,
    HeldArrays,
    InMemoryReader,
    ManyArrays,
    MappedReader,
    TaskQueue,
    compile_reads,
    open_reader,
)
from ..readers.buffers import Column
from ..readers.on_device import DecodingDevice, DeviceReader, open_device
from ..samples import HELD_BYTES, BatchRows, ReadCost, RowTable, blocks_of, cost_of_files
from ..types import IntArray, RowReader, cached_property
from .field_readers import EncodedRows, RowsByPart, open_chunked_fields, read_each, why_decoded_on_cpu
from .fields import Fields
from .raw_batch import RawBatch
from .sample_layout import FieldPlan, Transform
from .table_dataset import TableDataset

__all__ = ["CACHE_BYTES", "FileDataset"]

CACHE_BYTES = 64 << 20
"""Default of the memory for decoded rows."""

FEW_ARRAYS, SMALL_BYTES = 8, 64 << 10
"""If a batch has rows of more arrays, and fewer bytes of each, one thread at a time reads them."""

MAX_READERS = 1 << 15
"""Maximum number of cached readers of single arrays: each needs one or two KiB, and the rows of a small array."""


class FileDataset(TableDataset):
    """Rows that are read from the files on demand.

    Args:
        table: see ``TableDataset``.
        fields: see ``TableDataset``.
        batch_transform: see ``TableDataset``.
        indices: see ``TableDataset``.
        options: see ``TableDataset``.
        mmap: map contiguous arrays into memory.
        cache_bytes: memory for decoded rows; worker processes share it.
        holds_all: keep whole arrays of any size in memory after the first read.
    """

    _of_process = (
        *TableDataset._of_process,
        "_readers",
        "_many",
        "_chunked",
        "_n_prepared",
        "_lock",
        "_turn",
        "_device",
    )

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
        holds_all: bool = False,
    ) -> None:
        self._mmap, self._holds_all = mmap, holds_all
        self.cache_bytes, self.in_runs = cache_bytes, False
        self.retain: bool | None = None
        super().__init__(table, fields, batch_transform=batch_transform, indices=indices, options=options)
        self._encoded = [EncodedRows() for _ in self.plans]

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        self._readers: dict[tuple[int, int], RowReader] = {}
        self._many: dict[int, ManyArrays | HeldArrays | None] = {}  # by field
        self._chunked: dict[int, ChunkedReader] | None = None
        self._n_prepared = 0  # number of workers prepared for
        self._device: DecodingDevice | None = None
        self._lock, self._turn = threading.Lock(), threading.Lock()

    # Reading -------------------------------------------------------------------------------------------------

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``; starts decoding in the threads of ``work``."""
        batch = self.table.indexer.rows_of(self.located(rows), epoch)
        return partial(self.assembled, rows, batch, self.begin_rows(len(rows), batch, epoch, at_once=at_once))

    def begin_rows(
        self, n_samples: int, batch: BatchRows, epoch: int | None, *, at_once: bool
    ) -> Callable[[], list[Column]]:
        """Begin to read the rows of samples (see ``RowDataset.begin``); the function returns the rows of each field."""
        all_cores, boxes = at_once and not is_forked(), self.table.boxes(batch.fields)
        reads: dict[int, tuple[BegunRead, npt.NDArray[Any] | torch.Tensor]] = {}
        with ExitStack() as undo, self._blames_changes(boxes):
            for field, reader in self._chunked_readers().items():
                plan, patches = self.plans[field], batch.fields[field].patches
                if isinstance(reader, DeviceReader):
                    reads[field] = self._begin_on_device(reader, plan, boxes[field], epoch)
                    undo.callback(reads[field][0].cancel)
                    continue
                shape = (len(boxes[field].rows), *plan.row_shape) if patches is None else patches.shape
                memory = self._buffers.array(shape, plan.gathered)
                out = memory if patches is None else partial(patches.copy_to, memory)
                reads[field] = reader.begin(boxes[field], out, epoch, all_cores=all_cores), memory
                undo.callback(reads[field][0].cancel)
            undo.pop_all()
        return partial(self._complete, n_samples, batch, boxes, reads, all_cores=all_cores)

    @staticmethod
    def _begin_on_device(
        reader: DeviceReader, plan: FieldPlan, boxes: Boxes, epoch: int | None
    ) -> tuple[BegunRead, torch.Tensor]:
        """Begin to read rows to memory of a device, normalized and cast there."""
        assert plan.dtype is not None, "devices decode numbers"
        memory = reader.memory((len(boxes.rows), *plan.row_shape), plan.dtype)
        change = None if plan.affine is None else plan.affine.of_tensor
        return reader.begin(boxes, reader.copy_to(memory, change), epoch), memory

    def _complete(
        self,
        n_samples: int,
        batch: BatchRows,
        boxes: Sequence[Boxes],
        reads: dict[int, tuple[BegunRead, npt.NDArray[Any] | torch.Tensor]],
        *,
        all_cores: bool,
    ) -> list[Column]:
        columns: list[Column] = []
        found: dict[int, RowsByPart] = {}  # fields with the same rows share them

        def by_part(field: int) -> RowsByPart:
            key = id(boxes[field])
            if key not in found:
                found[key] = boxes[field].by_part()
            return found[key]

        turn = nullcontext() if reads else self._turn_of(boxes)  # a read of chunks may wait for other threads
        with turn, ExitStack() as undo, self._blames_changes(boxes):
            for read, _ in reads.values():
                undo.callback(read.cancel)  # without effect once it is finished
            for field, (plan, rows) in enumerate(zip(self.plans, batch.fields, strict=True)):
                reader_of = partial(self._reader, field=field)
                if field in reads:  # rows are already normalized, patches are not
                    read, memory = reads[field]
                    read.finish()
                    if rows.patches is None and not plan.guards:
                        columns.append(plan.cast(memory, self._buffers))
                    else:
                        columns.append(plan.finished(memory, self._buffers, rows.patches))
                elif self.table.is_ragged[field]:
                    n_values = n_samples if self.table.has_steps[field] else None
                    arrays = read_each(boxes[field], rows.lengths, n_values, reader_of)
                    columns.append([plan.finished(array, self._buffers) for array in arrays])
                elif plan.is_encoded:
                    decoded = self._encoded[field].read(len(rows.rows), by_part(field), reader_of, self._buffers)
                    columns.append(plan.finished(decoded, self._buffers))
                else:
                    stored = self._read(field, boxes[field], by_part, all_cores=all_cores)
                    columns.append(plan.finished(stored, self._buffers))
        self._check_unchanged(self.table.files_touched(boxes))
        return columns

    def _turn_of(self, boxes: Sequence[Boxes]) -> AbstractContextManager[object]:
        """Return a lock for reading rows of many small arrays, held by one thread at a time, unless reads are slow.

        Each small read releases the interpreter's lock, and another thread may then hold it for up to 5 ms: two threads
        would read at a fifth of the speed of one.
        """
        parts = next((box.parts for box in boxes if not isinstance(box.parts, int)), None)
        if parts is None or self.work.pace.is_slow or any(plan.is_encoded for plan in self.plans):
            return nullcontext()  # samples that are decoded one by one need no lock
        n_arrays = len(np.unique(parts)) * len(boxes)
        sizes = (math.prod(plan.row_shape) * plan.gathered.itemsize for plan in self.plans)
        n_bytes = sum(size * len(box.rows) for size, box in zip(sizes, boxes, strict=True))
        return self._turn if n_arrays > FEW_ARRAYS and n_bytes <= n_arrays * SMALL_BYTES else nullcontext()

    def _read(
        self, field: int, boxes: Boxes, by_part: Callable[[int], RowsByPart], *, all_cores: bool
    ) -> npt.NDArray[Any]:
        """Return stored rows of a field, as a new array."""
        n_rows = len(boxes.rows)
        if (arrays := self._many_arrays(field)) is not None:
            memory = self._buffers.array((n_rows, *arrays.row_shape), arrays.dtype)
            open_reader = self._open_reader if isinstance(arrays, HeldArrays) else self._reader
            arrays.read(boxes, memory, partial(open_reader, field=field))
            return memory
        parts = by_part(field)
        first = self._reader(next(iter(parts)), field)
        memory = self._buffers.array((n_rows, *first.row_shape), first.dtype)
        for part, (positions, rows) in parts.items():
            reader = self._reader(part, field)
            if positions is not None:  # rows of several files are read file by file, and then copied to their positions
                memory[positions] = reader.read(rows)
            elif all_cores and isinstance(reader, MappedReader):
                reader.read_on_all_cores(rows, memory)
            elif first.dtype.kind == "O":
                memory = reader.read(rows)
            else:
                reader.read(rows, memory)
        return memory

    @contextmanager
    def _blames_changes(self, boxes: Sequence[Boxes]) -> Iterator[None]:
        """Raise the error of a changed file instead of any other error that the change has caused."""
        try:
            yield
        except OSError:
            self._check_unchanged(self.table.files_touched(boxes))
            raise

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """See ``RowDataset.prefetch``."""
        boxes = self.table.boxes(self.table.indexer.rows_of(self.located(rows), epoch).fields)
        with self._blames_changes(boxes):
            chunked = self._chunked_readers()
            had_room = [reader.prefetch(boxes[field], epoch) for field, reader in chunked.items()]
            self.work.pace.look(self.counters)
            if self.work.pace.is_slow:
                self._will_need_each(boxes, {*self._read_on_demand} - {*chunked})
        return all(had_room)

    def _will_need_each(self, boxes: Sequence[Boxes], fields: Iterable[int]) -> None:
        """Begin to fetch rows of arrays without chunks."""
        for field in fields:
            if self.table.is_ragged[field] or not self.table.has_steps[field]:
                continue
            if (many := self._many_arrays(field)) is not None:
                many.will_need(boxes[field])
                continue
            for part, (_, local) in boxes[field].by_part().items():
                reader = self._reader(part, field)
                if isinstance(reader, ContiguousReader):
                    reader.will_need_each(local)

    # Costs ---------------------------------------------------------------------------------------------------

    def blocks(self) -> BlockTable:
        """See ``RowDataset.blocks``."""
        return blocks_of(self.table, self.indices)

    @cached_property
    def _encoded_bytes(self) -> list[int]:
        """The bytes of each field's first row, if rows are decoded one by one; 0 for other fields."""
        sizes = [0] * len(self.plans)
        for field, plan in enumerate(self.plans):
            if plan.is_encoded and self.table.n_rows:
                with suppress(OSError):  # reading the row raises it again
                    row = self._reader(0, field).read(np.zeros(1, np.int64))[0]
                    sizes[field] = getattr(row, "nbytes", 0)
        return sizes

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``."""
        chunked = self._chunked_readers()
        is_in_memory = bool(self._read_on_demand) and all(
            chunked[field].is_complete if field in chunked else self._is_cached(field) for field in self._read_on_demand
        )
        return replace(
            self._cost_of_files,
            rows_per_chunk=self._samples_of(max((reader.rows_per_block for reader in chunked.values()), default=0)),
            is_in_memory=is_in_memory,
            is_kept=bool(chunked) and all(reader.is_kept(self._rows_per_sample) for reader in chunked.values()),
        )

    def _samples_of(self, n_rows: int) -> int:
        """Return the approximate number of samples with the given number of rows."""
        return n_rows and max(1, n_rows * self.table.n_samples // max(1, self.table.n_rows))

    @cached_property
    def _rows_per_sample(self) -> int:
        """Approximate number of rows of a sample that no other sample has."""
        return max(1, self.table.n_rows // max(1, self.table.n_samples))

    @cached_property
    def _cost_of_files(self) -> ReadCost:
        """The part of the cost that depends only on the files."""
        return cost_of_files(
            self.table,
            self._read_on_demand,
            encoded_bytes=self._encoded_bytes,
            dense_bytes=self.dense_bytes,
        )

    def _is_cached(self, field: int) -> bool:
        """Return whether the page cache has all rows of a field of a mapped file."""
        if not self._mmap or self.table.n_parts > 1:  # rows of several files are gathered in a second copy
            return False
        reader = self._reader(0, field)
        return isinstance(reader, MappedReader) and reader.is_cached()

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded and held rows in the memory of this process."""
        readers = [*list(self._readers.values()), *list(self._many.values())]
        held = [reader.kept_bytes for reader in readers if isinstance(reader, InMemoryReader | HeldArrays)]
        return sum(held) + sum(reader.kept_bytes for reader in list((self._chunked or {}).values()))

    # Readers -------------------------------------------------------------------------------------------------

    @cached_property
    def _read_on_demand(self) -> list[int]:
        """The fields that are not held in memory as a whole."""
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
        return open_chunked_fields(
            self.table,
            self.plans,
            self._read_on_demand,
            self.options,
            n_bytes=self.cache_bytes // n_consumers,
            samples=self.indices,
            located=lambda: self.located(np.arange(len(self))),
            retain=self.retain,
            in_runs=self.in_runs,
            work=self.work,
            counters=self.counters,
            device=self.decoding_device,
        )

    @property
    def decoding_device(self) -> DecodingDevice | None:
        """See ``RowDataset.decoding_device``.

        Raises:
            H5ValueError: there is no such device, or this is a worker process.
            H5FileError: the library that decodes there is not installed.
        """
        decode_on = self.options.files.decode_on
        if decode_on == "cpu":
            return None
        self._check_process()
        if get_worker_info() is not None:
            raise H5ValueError(
                f"files.decode_on={decode_on!r} was given, but a worker process reads the rows. Pass num_workers=0: a "
                "GPU's memory is not shared with workers."
            )
        if self._device is None:
            self._device = open_device(decode_on)
        return self._device

    def decoded_on_cpu(self) -> dict[str, str]:
        """Return the fields that are read on demand and not decoded on the device, by name, with the reason."""
        device = self.decoding_device
        if device is None:
            return {}
        reasons = {
            self.fields.names[field]: why_decoded_on_cpu(self.table, self.plans, field, self.options, device)
            for field in self._read_on_demand
            if field < len(self.fields.names)
        }
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def read_with(
        self, cache_bytes: int, *, retain: bool | None = None, in_runs: bool = False, gives_back: bool = False
    ) -> None:
        """See ``RowDataset.read_with``."""
        now = self.cache_bytes, self.retain, self.in_runs, self.options.gives_back
        if (cache_bytes, retain, in_runs, gives_back) != now:
            self.cache_bytes, self.retain, self.in_runs = cache_bytes, retain, in_runs
            self.options = replace(self.options, gives_back=gives_back)
            self.close()
            self._chunked, self._n_prepared = None, 0

    def prepare_workers(self, num_workers: int) -> None:
        """See ``RowDataset.prepare_workers``."""
        if num_workers != self._n_prepared:
            self._n_prepared = num_workers
            with suppress(OSError):  # reading the file raises the error
                chunked = self._open_chunked(num_workers)  # the readers are dropped, compiled code stays
                placed = {*self._read_on_demand} - {*chunked}
                for field in placed:
                    self._reader(0, field)
                if placed and len(self) > MIN_COMPILED:
                    compile_reads()

    def _reader(self, part: int, field: int) -> RowReader:
        reader = self._readers.get((part, field))
        if reader is None:
            opened = self._open_reader(part, field)
            with self._lock:
                while len(self._readers) >= MAX_READERS:
                    del self._readers[next(iter(self._readers))]
                reader = self._readers.setdefault(
                    (part, field), opened
                )  # two threads may both create a reader; opening is cheap
        return reader

    def _open_reader(self, part: int, field: int) -> RowReader:
        layout, held_bytes = self.table.layouts.one(part, field), HELD_BYTES if self.table.held[field] else 0
        return open_reader(
            layout,
            self.options,
            mmap=self._mmap,
            held_bytes=max(held_bytes, layout.n_bytes) if self._holds_all else held_bytes,
            in_blocks=self.table.is_ragged[field],
            counters=self.counters,
            work=self.work,
        )

    def _many_arrays(self, field: int) -> ManyArrays | HeldArrays | None:
        """Return what reads numbers of a field of several arrays; None if each has a reader of its own."""
        try:
            return self._many[field]
        except KeyError:  # two threads may both open it, which is cheap
            return self._many.setdefault(field, self._open_many(field))

    def _open_many(self, field: int) -> ManyArrays | HeldArrays | None:
        table, layouts = self.table, self.table.layouts
        is_held = table.held[field]
        first = layouts.one(0, field) if table.n_parts > 1 else None
        if first is None or kind_of(first.dtype) != "number":
            return None
        if not is_held and (self._mmap or self._holds_all):  # arrays of any size are mapped, or held, one by one
            return None
        places = layouts.places(field)
        if not is_held and (places < 0).all():
            return None
        arrays = ManyArrays(
            layouts.one(int((places >= 0).argmax()), field),
            places,
            layouts.n_rows(field),
            table.files_of(np.arange(table.n_parts)),
            layout_of=partial(layouts.one, field=field),
            counters=self.counters,
        )
        return HeldArrays(arrays) if is_held else arrays

    def _check_unchanged(self, files: Iterable[int]) -> None:
        try:
            for file in files:
                self.table.guards[file].check()
        except H5DataChangedError:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drop cached data of the files, which may have been read during a write. Reads in progress continue."""
        for reader in [*(self._chunked or {}).values(), *list(self._readers.values()), *list(self._many.values())]:
            if reader is not None:
                reader.close()
        for path in self.table.paths:
            process_pool().close(path)

    def close(self) -> None:
        """Close this process's files and release its memory; the next read opens them again."""
        self._forget()
        self._readers.clear()
        self._many.clear()
        self.work.clear()
        for reader in (self._chunked or {}).values():
            if isinstance(reader, DeviceReader):
                reader.forget_tasks()

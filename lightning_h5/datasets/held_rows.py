"""The rows that a rank holds, in this machine's memory or a GPU's: loaded into columns, copied out of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions
from ..order import Rows, as_array, places_in
from ..readers import BulkTask, bulk_tasks, first_places, open_reader, open_source, take_rows
from ..types import IntArray, RowReader
from .buffers import BufferPool
from .catalog import RUN_BYTES, FileCatalog
from .fields import numpy_dtype_like, torch_dtype_of
from .multiply_add import Affine
from .row_cache import copied
from .sample_layout import Column
from .shard_loading import NodeGroup, my_part
from .shard_memory import ShardMemory

__all__ = ["ColumnShape", "HeldRows"]

TEXT_ROWS = 65_536  # of a task


@dataclass(frozen=True)
class ColumnShape:
    """What a field takes in memory.

    Attributes:
        row_shape: shape of a row.
        dtype: what is held.
        given: what rows are before they are cast: as stored, or normalized.
        affine: normalizes rows as they are loaded; None if they are at most cast.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    given: np.dtype[Any]
    affine: Affine | None = None

    @classmethod
    def of(cls, layout: ArrayLayout, dtype: torch.dtype | None, affine: Affine | None) -> ColumnShape:
        """A field of an array of numbers."""
        given = layout.dtype if affine is None else affine.work
        return cls(layout.row_shape, dtype or torch_dtype_of(layout.dtype), given, affine)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.row_shape) * self.dtype.itemsize


class HeldColumn(Protocol):
    """A field whose rows are held. Takes them as a ``BulkTarget``, and gives copies of them."""

    array: npt.NDArray[Any] | None

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        ...

    def close(self) -> None:
        """Lets go of the memory, also where somebody keeps the column itself, as the traceback of an error does."""
        ...

    def take(self, places: IntArray, buffers: BufferPool, *, pinned: bool, all_cores: bool) -> torch.Tensor:
        """A copy of rows.

        Args:
            places: where they are, shape ``(batch,)``.
            buffers: where memory comes from.
            pinned: into page-locked memory.
            all_cores: with torch's threads if these are faster, in a thread of the caller's own.
        """
        ...


class HostColumn:
    """Rows in this machine's memory.

    Args:
        memory: bytes, shape ``(n_rows, row_bytes)``.
        shape: what they are.
        write: puts C-contiguous rows to a place; None writes to the memory itself.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        shape: ColumnShape,
        write: Callable[[int, npt.NDArray[Any]], None] | None = None,
    ) -> None:
        self._bytes, self._shape, self._write = memory, shape, write
        gathered = numpy_dtype_like(shape.dtype, shape.given)
        # Torch casts to what NumPy has not, or casts otherwise.
        self._cast_by_torch = torch_dtype_of(gathered) != shape.dtype
        self._rows = None if self._cast_by_torch else memory.view(gathered).reshape(len(memory), *shape.row_shape)
        as_given = gathered == shape.given and shape.affine is None
        self.array = self._rows if as_given and write is None else None

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        rows = rows if self._shape.affine is None else self._shape.affine.applied(rows)
        if self._write is None and self._rows is not None:
            with np.errstate(all="ignore"):  # numbers too large for another dtype become infinite, as torch has it
                np.copyto(self._rows[start : start + len(rows)], rows, casting="unsafe")
        elif self._write is None:
            self._bytes[start : start + len(rows)] = self._as_held(rows)
        else:
            self._write(start, self._as_held(rows))

    def _as_held(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows as they are held, C-contiguous; bytes where NumPy has no dtype for that."""
        if self._rows is None:
            # Not `to`: what has one element is contiguous to torch, whatever its strides, and viewed it cannot be.
            cast = torch.empty(rows.shape, dtype=self._shape.dtype).copy_(torch.from_numpy(rows))
            return cast.view(len(rows), -1).view(torch.uint8).numpy()
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(rows, dtype=self._rows.dtype)

    def close(self) -> None:
        """See ``HeldColumn.close``."""
        self._bytes, self._rows, self.array, self._write = np.empty((0, 0), np.uint8), None, None, None

    def take(self, places: IntArray, buffers: BufferPool, *, pinned: bool, all_cores: bool) -> torch.Tensor:
        """See ``HeldColumn.take``."""
        if not len(places) or not self._shape.row_bytes:
            return torch.empty((len(places), *self._shape.row_shape), dtype=self._shape.dtype)
        held = self._bytes if self._rows is None else self._rows
        shape = (len(places), *held.shape[1:])
        if pinned:
            out = torch.empty(shape, dtype=torch_dtype_of(held.dtype), pin_memory=True)
            memory = out.numpy()
        else:
            memory = buffers.array(shape, held.dtype)
            out = torch.from_numpy(memory)
        take_rows(held, places, memory, all_cores=all_cores)
        return out if self._rows is not None else out.view(self._shape.dtype).view(len(places), *self._shape.row_shape)


class DeviceColumn:
    """Rows in a GPU's memory; batches come from there and never cross the bus. Nobody else writes to it (``array``).

    Args:
        n_rows: rows.
        shape: what they are.
        device: whose memory.
    """

    def __init__(self, n_rows: int, shape: ColumnShape, device: torch.device) -> None:
        self.array: npt.NDArray[Any] | None = None
        self._rows = torch.empty((n_rows, *shape.row_shape), dtype=shape.dtype, device=device)
        self._affine = shape.affine

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        rows = rows if self._affine is None else self._affine.applied(rows)
        self._rows[start : start + len(rows)].copy_(torch.from_numpy(rows))

    def close(self) -> None:
        """See ``HeldColumn.close``."""
        self._rows = self._rows[:0].clone()

    def take(self, places: IntArray, buffers: BufferPool, *, pinned: bool, all_cores: bool) -> torch.Tensor:
        """See ``HeldColumn.take``."""
        return self._rows.index_select(0, torch.from_numpy(places).to(self._rows.device))


class HeldRows:
    """Rows of this rank, and of those that it shares memory with.

    Args:
        rows: rows of the file table that are held, in ascending order.
        mine: this rank's, in its order; all of them are held.
        numbers: of this rank's rows among all that are sharded.
        shapes: of the fields; None for text, which each process holds for itself.
        device: whose memory.
        shared: whether other processes may have it.
        descriptor: of memory that another process made.
    """

    def __init__(
        self,
        rows: Rows,
        mine: Rows,
        numbers: Rows,
        shapes: Sequence[ColumnShape | None],
        *,
        device: torch.device,
        shared: bool,
        descriptor: int | None = None,
    ) -> None:
        self._rows, self._numbers, self._shapes = rows, numbers, list(shapes)
        self._places = places = places_in(rows, mine)
        self._memory: ShardMemory | None = None
        self._texts: list[npt.NDArray[Any] | None] = [
            np.empty(len(places), dtype=object) if shape is None else None for shape in shapes
        ]
        kept = [shape for shape in shapes if shape is not None]
        self.n_bytes = len(places) * sum(shape.row_bytes for shape in kept)
        if device.type == "cpu":
            sizes = [(len(rows), shape.row_bytes) for shape in kept]
            self._memory = ShardMemory(sizes, shared=shared, descriptor=descriptor)
            self._columns: list[HeldColumn] = list(self._host_columns(self._memory))
        else:
            _check_device_room(device, self.n_bytes)
            self._columns = [DeviceColumn(len(rows), shape, device) for shape in kept]

    def _host_columns(self, memory: ShardMemory) -> Iterator[HostColumn]:
        kept = (shape for shape in self._shapes if shape is not None)
        for at, (column, shape) in enumerate(zip(memory.columns, kept, strict=True)):
            yield HostColumn(column, shape, None if memory.descriptor is None else partial(memory.write, at))

    @property
    def has_no_text(self) -> bool:
        """Whether all fields are numbers."""
        return all(text is None for text in self._texts)

    def regroup(self, mine: Rows, numbers: Rows) -> None:
        """Takes other rows for this rank's, of those that are held (see the class)."""
        self._places, self._numbers = places_in(self._rows, mine), numbers

    @property
    def descriptor(self) -> int | None:
        """Of memory that other processes may have."""
        return None if self._memory is None else self._memory.descriptor

    def tasks(self, table: FileCatalog, options: OpenOptions, group: NodeGroup, counters: Counters) -> list[BulkTask]:
        """What this process has to load.

        Args:
            table: the files.
            options: how they are opened where the HDF5 library reads.
            group: who loads these rows.
            counters: where bytes are counted.
        """
        shared: list[BulkTask] = []
        own: list[BulkTask] = []
        n_columns = 0
        for field, shape in enumerate(self._shapes):
            if shape is None:
                own += self._text_tasks(field, table, options, counters)
            else:
                shared += self._column_tasks(field, n_columns, table, options, counters)
                n_columns += 1
        return [*my_part(shared, group), *own]

    def _column_tasks(
        self, field: int, column: int, table: FileCatalog, options: OpenOptions, counters: Counters
    ) -> Iterator[BulkTask]:
        for file, first, rows in _by_file(self._rows, table.starts):
            layout = table.layouts[file][field]
            if not layout.row_bytes:
                continue
            source = open_source(layout, options, max(1, RUN_BYTES // max(1, layout.row_bytes)), counters)
            yield from bulk_tasks(source, layout, rows, self._columns[column], first)

    def _text_tasks(
        self, field: int, table: FileCatalog, options: OpenOptions, counters: Counters
    ) -> Iterator[BulkTask]:
        """Text is read a piece at a time, in the order of the file, and put to where each row of this rank is."""
        held = as_array(self._rows)[as_array(self._places)]
        order = np.argsort(held, kind="stable")
        for file, first, rows in _by_file(held[order], table.starts):
            reader = open_reader(table.layouts[file][field], options, counters=counters)
            for start in range(0, len(rows), TEXT_ROWS):
                some = np.asarray(rows[start : start + TEXT_ROWS])
                places = order[first + start : first + start + len(some)]
                n_bytes = len(some) * table.layouts[file][field].row_bytes
                run = partial(_read_text, reader, some, self._texts[field], places)
                yield BulkTask(n_bytes, n_bytes, run)

    def numbers(self, rows: IntArray) -> IntArray:
        """The numbers of rows of this rank among all that are sharded."""
        return _look_up(self._numbers, rows)

    def take(
        self, rows: IntArray, buffers: BufferPool, *, pinned: bool = False, all_cores: bool = False
    ) -> tuple[Column, ...]:
        """Copies of rows.

        Args:
            rows: counted in this rank's shard.
            buffers: where memory for batches comes from.
            pinned: into page-locked memory.
            all_cores: see ``HeldColumn.take``.
        """
        places = _look_up(self._places, rows)
        columns = iter(self._columns)
        return tuple(
            next(columns).take(places, buffers, pinned=pinned, all_cores=all_cores)
            if text is None
            else copied(text[rows].tolist())
            for text in self._texts
        )

    def pin(self) -> str | None:
        """Locks the memory's pages; says why not where it cannot."""
        return None if self._memory is None else self._memory.pin()

    def close(self) -> None:
        """Gives the memory back."""
        for column in self._columns:
            column.close()
        self._columns = []
        if self._memory is not None:
            self._memory.close()

    @property
    def is_on_its_way(self) -> bool:
        """Whether a process is being started that can be given these rows."""
        return self._memory is not None and self._memory.is_on_its_way

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert self._memory is not None, "only shared memory travels"
        self._columns = list(self._host_columns(self._memory))


def _by_file(rows: Rows, starts: IntArray) -> Iterator[tuple[int, int, Rows]]:
    """For each file the place of its first row, and its rows as counted in it."""
    if not len(rows):
        return
    for file, (low, high) in enumerate(pairwise(first_places(rows, starts).tolist())):
        if high > low:
            some, start = rows[low:high], int(starts[file])
            if isinstance(some, range):
                yield file, low, range(some.start - start, some.stop - start, some.step)
            else:
                yield file, low, some - start


def _look_up(table: Rows, rows: IntArray) -> IntArray:
    if isinstance(table, range):
        return rows if (table.start, table.step) == (0, 1) else table.start + rows * table.step
    return table[rows]


def _read_text(reader: RowReader, rows: IntArray, out: npt.NDArray[Any] | None, places: IntArray) -> None:
    assert out is not None, "a field of text"
    text = reader.read(rows)
    for place, value in zip(places.tolist(), text, strict=True):
        out[place] = value.tolist() if isinstance(value, np.ndarray) else value


def _check_device_room(device: torch.device, n_bytes: int) -> None:
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if n_bytes > free:
        raise H5ValueError(
            f"the shard takes {n_bytes / 2**30:,.2f} GiB, and {free / 2**30:,.2f} of the {total / 2**30:,.2f} GiB of "
            f"{str(device)!r} are free. Hold less (a smaller dtype, fewer fields, more ranks), or pass "
            "cache_device='cpu'."
        )

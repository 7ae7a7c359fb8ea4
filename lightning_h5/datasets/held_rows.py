"""The rows that a rank holds, in this machine's memory or a GPU's: loaded into columns, copied out of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from deflate import crc32

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import OpenOptions
from ..order import Rows, as_array, condensed, find_places, places_in, rows_at
from ..readers import BulkTask, do_tasks, first_places, take_rows, usable_cores
from ..readers.buffers import BufferPool, Column, tensor_of
from ..samples import BatchRows, FieldRows, HeldSamples, RowTable, row_tasks, text_tasks
from ..types import IntArray
from .fields import torch_dtype_of
from .held_damage import HeldDamage, LoadedRows
from .sample_layout import FieldPlan, numpy_dtype_like
from .shard_memory import ShardMemory

__all__ = ["HeldField", "HeldRows", "RankRows", "checked_device"]

DIGEST_BYTES = 1 << 20
"""Bytes of rows that have a checksum together."""


class HostColumn:
    """A field's rows in this machine's memory; a ``BulkTarget``.

    Args:
        memory: bytes, shape ``(n_rows, row_bytes)``.
        dtype: of rows in a batch, and so in memory.
        plan: what else rows are in a batch.
        write: puts C-contiguous rows to a place; None writes to the memory itself.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        dtype: torch.dtype,
        plan: FieldPlan,
        write: Callable[[int, npt.NDArray[Any]], None] | None = None,
    ) -> None:
        self._bytes, self._plan, self._dtype, self._write = memory, plan, dtype, write
        by_numpy = numpy_dtype_like(dtype, plan.normalized)
        # Torch casts to dtypes that NumPy lacks or casts to differently.
        is_numpy = torch_dtype_of(by_numpy) == dtype
        self._rows = memory.view(by_numpy).reshape(len(memory), *plan.row_shape) if is_numpy else None
        is_as_stored = by_numpy == plan.stored and plan.affine is None and not plan.guards
        self.array = self._rows if is_as_stored and write is None else None

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        self._plan.check(rows)
        rows = rows if self._plan.affine is None else self._plan.affine.applied(rows)
        if self._write is not None:
            self._write(start, self._as_held(rows))
        elif self._rows is None:
            self._bytes[start : start + len(rows)] = self._as_held(rows)
        else:
            with np.errstate(all="ignore"):  # numbers too large for the dtype become infinite, as in torch
                np.copyto(self._rows[start : start + len(rows)], rows, casting="unsafe")

    def _as_held(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rows as they are held, C-contiguous; bytes if NumPy has no dtype for that."""
        if self._rows is None:
            # Not `to`: to torch, one element is contiguous whatever its strides, and such a tensor cannot be viewed.
            cast = torch.empty(rows.shape, dtype=self._dtype).copy_(torch.from_numpy(rows))
            return cast.view(len(rows), -1).view(torch.uint8).numpy()
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(rows, dtype=self._rows.dtype)

    def read(self, rows: FieldRows, buffers: BufferPool, *, all_cores: bool) -> Column:
        """Return a copy of rows.

        Args:
            rows: places in memory of rows, shape ``(n_rows,)``.
            buffers: gives memory.
            all_cores: copy with torch's threads if these are faster, in a thread of the caller's own.
        """
        row_shape, places = self._plan.row_shape, rows.rows
        if not len(places) or not self._plan.row_bytes:
            return torch.empty((len(places), *row_shape), dtype=self._dtype)
        held = self._bytes if self._rows is None else self._rows
        shape = (len(places), *held.shape[1:])
        memory = buffers.array(shape, held.dtype)
        take_rows(held, places, memory, all_cores=all_cores)
        out = tensor_of(memory)
        return out if self._rows is not None else out.view(self._dtype).view(len(places), *row_shape)

    def checksums(self, places: Rows) -> tuple[npt.NDArray[np.uint32], list[BulkTask]]:
        """Return memory for the checksums of runs of rows, and the tasks that compute them.

        Args:
            places: the rows.
        """
        step = max(1, DIGEST_BYTES // max(1, self._plan.row_bytes))
        starts = range(0, len(places), step)
        checksums = np.zeros(len(starts), dtype=np.uint32)

        def run(number: int) -> None:
            part = places[starts[number] : starts[number] + step]
            rows = self._bytes[slice(part.start, part.stop, part.step) if isinstance(part, range) else part]
            checksums[number] = crc32(np.ascontiguousarray(rows).data)

        return checksums, [BulkTask(DIGEST_BYTES, DIGEST_BYTES, partial(run, number)) for number in range(len(starts))]

    def close(self) -> None:
        """Give up the memory, also if the column itself is kept, as by the traceback of an error."""
        self._bytes, self._rows, self.array, self._write = np.empty((0, 0), np.uint8), None, None, None


class CellColumn(HostColumn):
    """A field's cells in this machine's memory, as they are stored, out of which patches are cut.

    Args:
        memory: see ``HostColumn``, as the three that follow.
        dtype: see above.
        plan: see above.
        write: see above.
        patch_plan: how patches are converted once they are cut.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        dtype: torch.dtype,
        plan: FieldPlan,
        write: Callable[[int, npt.NDArray[Any]], None] | None,
        patch_plan: FieldPlan,
    ) -> None:
        super().__init__(memory, dtype, plan, write)
        self._cells = memory.view(plan.stored).reshape(len(memory), *plan.row_shape)
        self._patch_plan = patch_plan

    def read(self, rows: FieldRows, buffers: BufferPool, *, all_cores: bool) -> Column:
        """See ``HostColumn.read``: return the patches that are parts of the rows."""
        assert rows.patches is not None, "samples are patches"
        patches = buffers.array(rows.patches.shape, self._patch_plan.gathered)
        rows.patches.copy_to(patches, self._cells, rows.rows)
        return self._patch_plan.finished(patches, buffers, rows.patches)

    def close(self) -> None:
        """See ``HostColumn.close``."""
        super().close()
        self._cells = self._cells[:0].copy()


class DeviceColumn:
    """A field's rows in a GPU's memory, so that batches never cross the bus; a ``BulkTarget``.

    Args:
        n_rows: rows.
        plan: what they are in a batch.
        device: the GPU.
    """

    array: npt.NDArray[Any] | None = None  # nothing else writes to it

    def __init__(self, n_rows: int, plan: FieldPlan, device: torch.device) -> None:
        self._rows = torch.empty((n_rows, *plan.row_shape), dtype=plan.dtype, device=device)
        self._plan = plan

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        self._plan.check(rows)
        rows = rows if self._plan.affine is None else self._plan.affine.applied(rows)
        self._rows[start : start + len(rows)].copy_(torch.from_numpy(rows))

    def read(self, rows: FieldRows, buffers: BufferPool, *, all_cores: bool) -> Column:
        """See ``HostColumn.read``."""
        return self._rows.index_select(0, torch.from_numpy(rows.rows).to(self._rows.device))

    def close(self) -> None:
        """See ``HostColumn.close``."""
        self._rows = self._rows[:0].clone()


class ObjectColumn:
    """A field's rows that are objects, such as text: each process has those of its own rank.

    Args:
        places: places in memory of this rank's rows, in ascending order.
        plan: how rows are converted.
    """

    def __init__(self, places: Rows, plan: FieldPlan) -> None:
        self._places, self._plan = places, plan
        self.values = np.empty((len(places), *plan.row_shape), dtype=object)

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """Take rows for consecutive places among this rank's."""
        self.values[start : start + len(rows)] = rows

    def read(self, rows: FieldRows, buffers: BufferPool, *, all_cores: bool) -> Column:
        """See ``HostColumn.read``."""
        values: list[Any] = self.values[find_places(self._places, rows.rows)].tolist()
        as_element = self._plan.as_element
        return [as_element(value.copy() if isinstance(value, np.ndarray) else value) for value in values]

    def close(self) -> None:
        """See ``HostColumn.close``."""
        self.values = self.values[:0].copy()


_NumberColumn: TypeAlias = HostColumn | DeviceColumn


class HeldField(NamedTuple):
    """A field that is held in memory row by row.

    Attributes:
        plan: how rows are converted when they are loaded.
        patch_plan: how patches that are cut out of the rows are converted; None if samples have whole rows.
    """

    plan: FieldPlan
    patch_plan: FieldPlan | None = None

    def in_memory(
        self,
        memory: npt.NDArray[np.uint8],
        dtype: torch.dtype,
        write: Callable[[int, npt.NDArray[Any]], None] | None,
    ) -> HostColumn:
        """Return the field's rows in memory (see ``HostColumn``)."""
        if self.patch_plan is None:
            return HostColumn(memory, dtype, self.plan, write)
        return CellColumn(memory, dtype, self.plan, write, self.patch_plan)


class RankRows(NamedTuple):
    """What a rank has of the rows in memory.

    Attributes:
        samples: its samples, over the rows in memory.
        rows: the rows of the files that its samples have of each field in memory, in ascending order.
        numbers: numbers of its samples among those of all ranks.
    """

    samples: HeldSamples
    rows: Sequence[Rows]
    numbers: Rows


class HeldRows:
    """Rows in memory: those of this rank, and of the ranks that it shares memory with.

    Args:
        rows: rows of the files that are in memory, for each field, in ascending order; fields may share them.
        of_rank: this rank's samples; all of their rows are in memory.
        fields: the fields. Each process holds objects for itself.
        device: that has the memory.
        shared: whether other processes may map it.
        owner: the process that made the memory, and the memory's descriptor there; None makes it here.

    Attributes:
        rows: see above.
        damage: rows that could not be read.

    Raises:
        H5Error: the system or the GPU has not so much memory, or the owner's cannot be had.
        OSError: the owner's memory cannot be had.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        of_rank: RankRows,
        fields: Sequence[HeldField],
        *,
        device: torch.device,
        shared: bool,
        owner: tuple[int, int] | None = None,
    ) -> None:
        self.rows, self._fields, self.damage = rows, fields, HeldDamage()
        self.regroup(of_rank)
        self._object_columns = {
            number: ObjectColumn(self._places[number], field.plan)
            for number, field in enumerate(fields)
            if field.plan.dtype is None
        }
        self._memory: ShardMemory | None = None
        if device.type == "cpu":
            sizes = [(len(rows[number]), fields[number].plan.row_bytes) for number in self._dtypes]
            memory = ShardMemory(sizes, shared=shared) if owner is None else ShardMemory.of_process(*owner, sizes)
            self._memory, self._number_columns = memory, self._host_columns(memory)
        else:
            _check_device_memory(device, self.n_bytes)
            self._number_columns = {
                number: DeviceColumn(len(rows[number]), fields[number].plan, device) for number in self._dtypes
            }

    def regroup(self, of_rank: RankRows) -> None:
        """Make other samples this rank's; their rows are in memory already (see the class)."""
        self._samples, self._sample_numbers = of_rank.samples, of_rank.numbers
        places: dict[int, Rows] = {}  # by identity of the rows in memory, which fields share
        for rows, own in zip(self.rows, of_rank.rows, strict=True):
            if id(rows) not in places:
                places[id(rows)] = range(len(rows)) if own is rows else condensed(places_in(rows, own))
        self._places = [places[id(rows)] for rows in self.rows]

    @property
    def _dtypes(self) -> dict[int, torch.dtype]:
        """The dtype of each field of numbers; other fields are objects."""
        dtypes = ((number, field.plan.dtype) for number, field in enumerate(self._fields))
        return {number: dtype for number, dtype in dtypes if dtype is not None}

    def _host_columns(self, memory: ShardMemory) -> dict[int, _NumberColumn]:
        is_shared = memory.descriptor is not None
        return {
            number: self._fields[number].in_memory(column, dtype, partial(memory.write, at) if is_shared else None)
            for at, ((number, dtype), column) in enumerate(zip(self._dtypes.items(), memory.columns, strict=True))
        }

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's rows; objects are not counted."""
        return sum(len(places) * field.plan.row_bytes for places, field in zip(self._places, self._fields, strict=True))

    @property
    def has_text(self) -> bool:
        """Whether a field is text."""
        return bool(self._object_columns)

    @property
    def descriptor(self) -> int | None:
        """Of memory that other processes may have."""
        return None if self._memory is None else self._memory.descriptor

    @property
    def can_be_sent(self) -> bool:
        """Whether a process is being started, and these rows can be sent to it."""
        return self._memory is not None and self._memory.can_be_sent

    def tasks(
        self, table: RowTable, options: OpenOptions, counters: Counters, *, notes_damage: bool = False
    ) -> tuple[list[BulkTask], list[BulkTask]]:
        """Return what is to be loaded: for all processes that have this memory together, and objects for this one.

        Args:
            table: the files, with the fields in memory.
            options: how the HDF5 library opens them, if it reads.
            counters: counts what is read.
            notes_damage: note rows that cannot be read, in ``damage``, instead of raising.
        """

        def noting(tasks: list[BulkTask], *loaded: Any) -> list[BulkTask]:
            return self.damage.noting(tasks, LoadedRows(*loaded), options, counters) if notes_damage else tasks

        shared: list[BulkTask] = []
        own: list[BulkTask] = []
        for field, rows in enumerate(self.rows):
            if (column := self._number_columns.get(field)) is not None:
                for file, first, local in _by_file(rows, table.starts):
                    n_rows = int(table.starts[file + 1] - table.starts[file])
                    layout, places = table.layouts.one(file, field), range(first, first + len(local))
                    tasks = row_tasks(layout, local, column, first, options, counters, n_rows)
                    shared += noting(tasks, layout, local, column, places, field)
                continue
            own_places = as_array(self._places[field])
            for file, first, local in _by_file(rows_at(rows, own_places), table.starts):
                of_file = np.arange(first, first + len(local))
                layout, objects = table.layouts.one(file, field), self._object_columns[field]
                tasks = text_tasks(layout, as_array(local), objects.values, of_file, options, counters)
                own += noting(tasks, layout, local, objects, of_file, field, own_places[of_file])
        return shared, own

    def numbers(self, indices: IntArray) -> IntArray:
        """Return the numbers of this rank's samples among those of all ranks."""
        return rows_at(self._sample_numbers, indices)

    def rows_of(self, indices: IntArray, epoch: int | None) -> BatchRows:
        """Return the rows of this rank's samples, as places in memory (see ``HeldSamples.rows_of``)."""
        return self._samples.rows_of(indices, epoch)

    def read(self, field: int, rows: FieldRows, buffers: BufferPool, *, all_cores: bool) -> Column:
        """Return a copy of a field's rows, or of the patches that are parts of them (see ``HostColumn.read``)."""
        if self.damage:
            self.damage.check(field, rows.rows)
        column = self._number_columns.get(field) or self._object_columns[field]
        return column.read(rows, buffers, all_cores=all_cores)

    def digest(self, fields: Sequence[int]) -> str | None:
        """Return a digest of this rank's rows of some fields, as they are held; None if a GPU has them.

        Checksums find a value that was changed, and take a fraction of the time of loading.

        Args:
            fields: fields of numbers, of which all ranks that have this memory hold the same rows.
        """
        checksums: list[npt.NDArray[np.uint32]] = []
        tasks: list[BulkTask] = []
        for field in fields:
            if not isinstance(column := self._number_columns[field], HostColumn):
                return None
            checksums_of_field, tasks_of_field = column.checksums(self._places[field])
            checksums.append(checksums_of_field)
            tasks += tasks_of_field
        do_tasks(tasks, usable_cores(), lambda _: None)
        return hashlib.sha256(b"".join([numbers.astype("<u4").tobytes() for numbers in checksums])).hexdigest()[:32]

    def pin(self) -> str | None:
        """Lock the memory's pages; return why not if that fails."""
        return None if self._memory is None else self._memory.pin()

    def close(self) -> None:
        """Release the memory."""
        for column in (*self._number_columns.values(), *self._object_columns.values()):
            column.close()
        self._number_columns, self._object_columns = {}, {}
        if self._memory is not None:
            self._memory.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_number_columns": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._number_columns = {} if self._memory is None else self._host_columns(self._memory)


def _by_file(rows: Rows, starts: IntArray) -> Iterator[tuple[int, int, Rows]]:
    """Yield for each file the place of its first row, and its rows as counted in it."""
    if not len(rows):
        return
    for file, (low, high) in enumerate(pairwise(first_places(rows, starts).tolist())):
        if high > low:
            rows_of_file, start = rows[low:high], int(starts[file])
            if isinstance(rows_of_file, range):
                yield file, low, range(rows_of_file.start - start, rows_of_file.stop - start, rows_of_file.step)
            else:
                yield file, low, rows_of_file - start


def _check_device_memory(device: torch.device, n_bytes: int) -> None:
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if n_bytes > free:
        raise H5ValueError(
            f"the shard takes {n_bytes / 2**30:,.2f} GiB, and {free / 2**30:,.2f} of the {total / 2**30:,.2f} GiB of "
            f"{str(device)!r} are free. Hold less (a smaller dtype, fewer fields, more ranks), or pass "
            "cache_device='cpu'."
        )


def checked_device(name: str | torch.device, *, share_memory: bool) -> torch.device:
    """Return the device that a user wants rows to be held on.

    Raises:
        H5ValueError: it is missing, or its memory is to be shared.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise H5ValueError(f"cache_device={name!r} was given. Pass 'cpu', 'cuda' or 'cuda:1'.") from error
    if device.type != "cpu" and share_memory:
        raise H5ValueError(
            f"share_memory=True and cache_device={name!r} were given: a GPU's memory is not shared. Pass one."
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise H5ValueError(
            f"cache_device={name!r} was given, and this machine has no such device"
            f"{'' if accelerator is None else f', but {accelerator.type!r}'}. Pass 'cpu', or what it has."
        )
    return device

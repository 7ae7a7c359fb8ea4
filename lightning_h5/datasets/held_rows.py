"""The rows that a rank holds, in this machine's memory or a GPU's: loaded into columns, copied out of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from deflate import crc32

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import OpenOptions
from ..order import Rows, as_array, places_in
from ..readers import BulkTask, do_tasks, first_places, take_rows, usable_cores
from ..readers.buffers import BufferPool, Column, tensor_of
from ..samples import FieldRows, RowTable, row_tasks, text_tasks
from ..types import IntArray
from .fields import torch_dtype_of
from .sample_layout import FieldPlan, as_tensor, numpy_dtype_like
from .shard_memory import ShardMemory

__all__ = ["HeldRows", "checked_device"]

DIGEST_BYTES = 1 << 20
"""Bytes of rows that have a checksum together."""


class HostColumn:
    """A field's rows in this machine's memory; a ``BulkTarget``.

    Args:
        memory: bytes, shape ``(n_rows, row_bytes)``.
        plan: what rows are in a batch, and so in memory.
        write: puts C-contiguous rows to a place; None writes to the memory itself.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        plan: FieldPlan,
        write: Callable[[int, npt.NDArray[Any]], None] | None = None,
    ) -> None:
        assert plan.dtype is not None, "text is held elsewhere"
        self._bytes, self._plan, self._dtype, self._write = memory, plan, plan.dtype, write
        by_numpy = numpy_dtype_like(plan.dtype, plan.normalized)
        # Torch casts to dtypes that NumPy lacks or casts to differently.
        is_numpy = torch_dtype_of(by_numpy) == plan.dtype
        self._rows = memory.view(by_numpy).reshape(len(memory), *plan.row_shape) if is_numpy else None
        is_as_stored = by_numpy == plan.stored and plan.affine is None and plan.guard is None
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

    def take(self, places: IntArray, buffers: BufferPool, *, all_cores: bool) -> torch.Tensor:
        """Return a copy of rows.

        Args:
            places: which ones, shape ``(batch,)``.
            buffers: gives memory.
            all_cores: copy with torch's threads if these are faster, in a thread of the caller's own.
        """
        row_shape = self._plan.row_shape
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
        found = np.zeros(len(starts), dtype=np.uint32)

        def run(number: int) -> None:
            some = places[starts[number] : starts[number] + step]
            rows = self._bytes[slice(some.start, some.stop, some.step) if isinstance(some, range) else some]
            found[number] = crc32(np.ascontiguousarray(rows).data)

        return found, [BulkTask(DIGEST_BYTES, DIGEST_BYTES, partial(run, number)) for number in range(len(starts))]

    @property
    def held(self) -> npt.NDArray[Any]:
        """The rows as they are held."""
        assert self._rows is not None, "NumPy has no such dtype"
        return self._rows

    def close(self) -> None:
        """Give up the memory, also if the column itself is kept, as by the traceback of an error."""
        self._bytes, self._rows, self.array, self._write = np.empty((0, 0), np.uint8), None, None, None


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

    def take(self, places: IntArray, buffers: BufferPool, *, all_cores: bool) -> torch.Tensor:
        """See ``HostColumn.take``."""
        return self._rows.index_select(0, torch.from_numpy(places).to(self._rows.device))

    def close(self) -> None:
        """See ``HostColumn.close``."""
        self._rows = self._rows[:0].clone()


_Columns: TypeAlias = "list[HostColumn | DeviceColumn]"


class HeldRows:
    """Rows of this rank, and of those that it shares memory with.

    Args:
        rows: rows of the table that are held, in ascending order; of all fields, or for each field its own.
        mine: this rank's, in its order; all of them are held.
        numbers: of this rank's rows among all that are sharded.
        plans: what rows of each field are. Each process holds text for itself.
        device: that has the memory.
        shared: whether other processes may map it.
        owner: the process that made the memory, and the memory's descriptor there; None makes it here.

    Raises:
        H5Error: the system or the GPU has not so much memory, or the owner's cannot be had.
        OSError: the owner's memory cannot be had.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        mine: Rows,
        numbers: Rows,
        plans: Sequence[FieldPlan],
        *,
        device: torch.device,
        shared: bool,
        owner: tuple[int, int] | None = None,
    ) -> None:
        self._rows, self._plans = rows, plans
        self.regroup(mine, numbers)
        n_mine = len(self._places)
        self._texts = {
            field: np.empty((n_mine, *plan.row_shape), dtype=object)
            for field, plan in enumerate(plans)
            if plan.dtype is None
        }
        kept = self._plans_of_numbers
        rows_of = [self._rows_of(field) for field, plan in enumerate(plans) if plan.dtype is not None]
        # Cells belong to all ranks that have this memory.
        self.n_bytes = sum((n_mine or len(some)) * plan.row_bytes for some, plan in zip(rows_of, kept, strict=True))
        self._memory: ShardMemory | None = None
        if device.type == "cpu":
            sizes = [(len(some), plan.row_bytes) for some, plan in zip(rows_of, kept, strict=True)]
            made = ShardMemory(sizes, shared=shared) if owner is None else ShardMemory.of_process(*owner, sizes)
            self._memory, self._columns = made, self._host_columns(made)
        else:
            _check_device_memory(device, self.n_bytes)
            self._columns = [DeviceColumn(len(some), plan, device) for some, plan in zip(rows_of, kept, strict=True)]

    def _rows_of(self, field: int) -> Rows:
        """Return the rows of a field that are held."""
        return self._rows[field % len(self._rows)]

    @property
    def _plans_of_numbers(self) -> list[FieldPlan]:
        return [plan for plan in self._plans if plan.dtype is not None]

    def _host_columns(self, memory: ShardMemory) -> _Columns:
        is_shared = memory.descriptor is not None
        return [
            HostColumn(column, plan, partial(memory.write, number) if is_shared else None)
            for number, (column, plan) in enumerate(zip(memory.columns, self._plans_of_numbers, strict=True))
        ]

    @property
    def has_text(self) -> bool:
        """Whether a field is text."""
        return bool(self._texts)

    def regroup(self, mine: Rows, numbers: Rows) -> None:
        """Make other rows this rank's, of those that are held (see the class)."""
        self._places, self._numbers = places_in(self._rows[0], mine), numbers

    @property
    def descriptor(self) -> int | None:
        """Of memory that other processes may have."""
        return None if self._memory is None else self._memory.descriptor

    @property
    def can_be_sent(self) -> bool:
        """Whether a process is being started, and these rows can be sent to it."""
        return self._memory is not None and self._memory.can_be_sent

    def tasks(self, table: RowTable, options: OpenOptions, counters: Counters) -> tuple[list[BulkTask], list[BulkTask]]:
        """Return what is to be loaded: for all processes that have this memory together, and text for this one.

        Args:
            table: the files.
            options: how the HDF5 library opens them, if it reads.
            counters: counts what is read.
        """
        shared: list[BulkTask] = []
        own: list[BulkTask] = []
        columns = iter(self._columns)
        for field, plan in enumerate(self._plans):
            if plan.dtype is not None:
                column = next(columns)
                for file, first, rows in _by_file(self._rows_of(field), table.starts):
                    shared += row_tasks(table.layouts.one(file, field), rows, column, first, options, counters)
                continue
            mine = as_array(self._rows[0])[as_array(self._places)]
            order = np.argsort(mine, kind="stable")
            for file, first, rows in _by_file(mine[order], table.starts):
                some, places = as_array(rows), order[first : first + len(rows)]
                own += text_tasks(table.layouts.one(file, field), some, self._texts[field], places, options, counters)
        return shared, own

    def numbers(self, rows: IntArray) -> IntArray:
        """Return the numbers of rows of this rank among all that are sharded."""
        return _look_up(self._numbers, rows)

    def take(self, rows: IntArray, buffers: BufferPool, *, all_cores: bool = False) -> tuple[Column, ...]:
        """Return copies of rows.

        Args:
            rows: counted in this rank's shard.
            buffers: gives memory for batches.
            all_cores: see ``HostColumn.take``.
        """
        places, columns = _look_up(self._places, rows), iter(self._columns)
        return tuple(
            self._objects(field, rows)
            if plan.dtype is None
            else next(columns).take(places, buffers, all_cores=all_cores)
            for field, plan in enumerate(self._plans)
        )

    def _objects(self, field: int, rows: IntArray) -> list[Any]:
        """Return text, or copies of arrays of several shapes."""
        values = self._texts[field][rows].tolist()
        dtype = self._plans[field].element
        return [as_tensor(one.copy(), dtype) if isinstance(one, np.ndarray) else one for one in values]

    def take_of(self, field: int, rows: IntArray, buffers: BufferPool, *, all_cores: bool = False) -> Column:
        """Return copies of rows of one field (see ``take``)."""
        if self._plans[field].dtype is None:
            return self._objects(field, rows)
        number = sum(plan.dtype is not None for plan in self._plans[:field])
        return self._columns[number].take(_look_up(self._places, rows), buffers, all_cores=all_cores)

    def patches(self, field: int, found: FieldRows, plan: FieldPlan, buffers: BufferPool) -> Column:
        """Return patches that are cut out of the cells of a field.

        Args:
            field: number of the field.
            found: its cells that the patches have.
            plan: what becomes of a patch.
            buffers: gives memory for batches.
        """
        assert found.patches is not None, "rows are cells"
        places = np.searchsorted(as_array(self._rows_of(field)), found.rows)
        memory = buffers.array(found.patches.shape, plan.gathered)
        column = self._columns[field]
        assert isinstance(column, HostColumn), "patches are cut on the CPU"
        found.patches.copy_to(memory, column.held, places)
        return plan.finished(memory, buffers)

    def digest(self, fields: Sequence[int]) -> str | None:
        """Return a digest of this rank's rows of some fields, as they are held; None if a GPU has them.

        Checksums find a value that was changed, and take a fraction of the time of loading.

        Args:
            fields: fields of numbers, of which all ranks that have this memory hold the same rows.
        """
        of_numbers = [at for at, plan in enumerate(self._plans) if plan.dtype is not None]
        columns = dict(zip(of_numbers, self._columns, strict=True))
        checksums: list[npt.NDArray[np.uint32]] = []
        tasks: list[BulkTask] = []
        for field in fields:
            if not isinstance(column := columns[field], HostColumn):
                return None
            found, more = column.checksums(self._places)
            checksums.append(found)
            tasks += more
        do_tasks(tasks, usable_cores(), lambda _: None)
        return hashlib.sha256(b"".join([one.astype("<u4").tobytes() for one in checksums])).hexdigest()[:32]

    def pin(self) -> str | None:
        """Lock the memory's pages; return why not if that fails."""
        return None if self._memory is None else self._memory.pin()

    def close(self) -> None:
        """Release the memory."""
        for column in self._columns:
            column.close()
        self._columns = []
        if self._memory is not None:
            self._memory.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert self._memory is not None, "only shared memory travels"
        self._columns = self._host_columns(self._memory)


def _by_file(rows: Rows, starts: IntArray) -> Iterator[tuple[int, int, Rows]]:
    """Yield for each file the place of its first row, and its rows as counted in it."""
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


def checked_device(given: str | torch.device, *, share_memory: bool) -> torch.device:
    """Return the device that a user wants rows to be held on.

    Raises:
        H5ValueError: it is missing, or its memory is to be shared.
    """
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise H5ValueError(f"cache_device={given!r} was given. Pass 'cpu', 'cuda' or 'cuda:1'.") from error
    if device.type != "cpu" and share_memory:
        raise H5ValueError(
            f"share_memory=True and cache_device={given!r} were given: a GPU's memory is not shared. Pass one."
        )
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type != "cpu" and (there is None or there.type != device.type):
        raise H5ValueError(
            f"cache_device={given!r} was given, and this machine has no such device"
            f"{'' if there is None else f', but {there.type!r}'}. Pass 'cpu', or what it has."
        )
    return device

"""Fields whose rows are held: in this machine's memory, or in a GPU's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..files import ArrayLayout
from ..types import IntArray
from .buffers import BufferPool
from .fields import numpy_dtype_like, torch_dtype_of
from .preparation import Preparation

__all__ = ["ColumnShape", "DeviceColumn", "HeldColumn", "HostColumn"]


@dataclass(frozen=True)
class ColumnShape:
    """What a field takes in memory.

    Attributes:
        row_shape: shape of a row.
        dtype: what is held.
        stored: what readers give; what ``prepare`` makes of it, where there is that.
        prepare: makes what is held of rows that readers give; None where they are at most cast.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    stored: np.dtype[Any]
    prepare: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None

    @classmethod
    def of(cls, layout: ArrayLayout, dtype: torch.dtype | None) -> ColumnShape:
        """A field of an array of numbers, as it is stored or cast."""
        return cls(layout.row_shape, dtype or torch_dtype_of(layout.dtype), layout.dtype)

    @classmethod
    def prepared(cls, layout: ArrayLayout, preparation: Preparation, field: int) -> ColumnShape:
        """A field of an array of numbers that is held as it is prepared."""
        shape = preparation.shape_of(field, layout.row_shape)
        given = preparation.rows(field, np.empty((0, *layout.row_shape), layout.dtype)).dtype
        return cls(shape, preparation.dtype_of(field), given, partial(preparation.rows, field))

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
            all_cores: with torch's threads, as in the thread of the caller's own operations.
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
        gathered = numpy_dtype_like(shape.dtype, shape.stored)
        # Torch casts to what NumPy has not, or casts otherwise.
        self._cast_by_torch = torch_dtype_of(gathered) != shape.dtype
        self._rows = None if self._cast_by_torch else memory.view(gathered).reshape(len(memory), *shape.row_shape)
        as_given = gathered == shape.stored and shape.prepare is None
        self.array = self._rows if as_given and write is None else None

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        rows = rows if self._shape.prepare is None else self._shape.prepare(rows)
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
        if all_cores and held.ndim > 1:
            torch.index_select(torch.from_numpy(held), 0, torch.from_numpy(places), out=out)
        else:  # in a thread of ours torch would start a team of its own. No place has to be clipped: they were checked
            np.take(held, places, axis=0, out=memory, mode="clip")
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
        self._prepare = shape.prepare

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        rows = rows if self._prepare is None else self._prepare(rows)
        self._rows[start : start + len(rows)].copy_(torch.from_numpy(rows))

    def close(self) -> None:
        """See ``HeldColumn.close``."""
        self._rows = self._rows[:0].clone()

    def take(self, places: IntArray, buffers: BufferPool, *, pinned: bool, all_cores: bool) -> torch.Tensor:
        """See ``HeldColumn.take``."""
        return self._rows.index_select(0, torch.from_numpy(places).to(self._rows.device))

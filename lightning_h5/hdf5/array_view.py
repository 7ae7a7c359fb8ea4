"""Other ways to see an array: rows along other axes, a part of each row, or cells as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..types import IntArray, cached_property

if TYPE_CHECKING:
    from .layout import ArrayLayout

__all__ = ["ArrayView", "Runs", "taken_of"]

MIN_RUN = 16 << 10
"""Bytes of a row's pieces from which on they are read by position, without the HDF5 library."""


class Runs(NamedTuple):
    """Pieces of rows that are a part of each row of an array without chunks.

    Attributes:
        offset: where the array begins in its file.
        stride: bytes from a row of the array to the next.
        begins: where each piece of a row begins in it, shape ``(n_pieces,)``.
        n_bytes: of a piece.
    """

    offset: int
    stride: int
    begins: IntArray
    n_bytes: int


@dataclass(frozen=True)
class ArrayView:
    """Another way to see an array: its rows counted along other axes than the first, a part of it alone, or its cells.

    Attributes:
        array: the array as it is stored.
        row_axes: the axes that number the rows, the slowest first; none if the whole array is one row.
        taken: for each other axis what is taken of it: an index (a row has no such axis then), a slice, or indices.
        block: along each of ``row_axes``, how much is read together.
        period: length of the last of ``row_axes`` as rows are numbered; at least its own.
        cell: shape of the cells that are the rows (see ``ArrayLayout.in_cells``); None if rows are counted along axes.
    """

    array: ArrayLayout
    row_axes: tuple[int, ...]
    taken: tuple[int | slice | tuple[int, ...], ...]
    block: tuple[int, ...]
    period: int
    cell: tuple[int, ...] | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array as it is stored."""
        return (self.array.n_rows, *self.array.axes)

    @property
    def other_axes(self) -> list[int]:
        """The axes that do not number the rows."""
        return [axis for axis in range(len(self.shape)) if axis not in self.row_axes]

    @cached_property
    def row_grid(self) -> tuple[int, ...]:
        """Number of blocks along each of ``row_axes``."""
        return tuple(-(-self.shape[axis] // step) for axis, step in zip(self.row_axes, self.block, strict=True))

    def is_chunked(self, chunks: tuple[int, ...] | None) -> bool:
        """Return whether what is read together are chunks of this shape."""
        if chunks is None or self.cell is not None:
            return self.cell == chunks
        return self.block == tuple(chunks[axis] for axis in self.row_axes)

    @cached_property
    def runs(self) -> Runs | None:
        """Where rows lie if each is a few long pieces of an array without chunks; None otherwise."""
        if self.row_axes != (0,) or self.cell is not None:
            return None
        array, sizes = self.array, self.shape[1:]
        if array.offset is None or array.digests is not None or array.dtype.hasobject:
            return None
        taken = [slice(one, one + 1) if isinstance(one, int) else one for one in self.taken]
        if not all(isinstance(one, slice) and one.step == 1 for one in taken):
            return None
        ranges = [range(size)[one] for one, size in zip(taken, sizes, strict=True) if isinstance(one, slice)]
        # The last axis of which a part is taken, and those after it, lie in one piece.
        axis = max((at for at, (one, size) in enumerate(zip(ranges, sizes, strict=True)) if len(one) < size), default=0)
        steps = [math.prod(sizes[at + 1 :]) * array.stored.itemsize for at in range(len(sizes))]
        n_bytes = len(ranges[axis]) * steps[axis]
        if n_bytes < MIN_RUN:
            return None
        begins = np.zeros(1, dtype=np.int64)
        for at in range(axis):
            begins = (begins[:, np.newaxis] + np.array(ranges[at], dtype=np.int64) * steps[at]).reshape(-1)
        begins = begins + ranges[axis].start * steps[axis]
        return Runs(array.offset, math.prod(sizes) * array.stored.itemsize, begins, n_bytes)


def taken_of(taken: int | slice | Sequence[int], n: int) -> int | slice | tuple[int, ...]:
    """Return what is taken of an axis, counted from its start; a slice that ascends as one.

    Args:
        taken: an index, a slice, or indices; negative ones count from the end.
        n: length of the axis.

    Raises:
        IndexError: the axis has no such index, or the slice is empty; the text names it.
    """
    if isinstance(taken, slice):
        numbers = range(n)[taken]
        for name, limit in (("start", taken.start), ("stop", taken.stop)):
            if limit is not None and not -n <= limit <= n:
                raise IndexError(f"a slice with the {name} {limit}")
        if n and not numbers:
            raise IndexError(f"an empty slice from {taken.start} to {taken.stop}")
        return slice(numbers.start, numbers.stop, numbers.step) if numbers.step > 0 else tuple(numbers)
    for index in [taken] if isinstance(taken, int) else taken:
        if not -n <= index < n:
            raise IndexError(f"index {index}")
    return range(n)[taken] if isinstance(taken, int) else tuple(range(n)[index] for index in taken)

"""Rows of arrays that are seen another way: along other axes than the first, a part of the array alone, or as cells.

The cells of an array are its chunks, or parts of an array without chunks, each a row (``ArrayLayout.in_cells``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5CorruptError
from ..hdf5 import ArrayLayout, ArrayView, OpenOptions, kind_of, process_pool
from ..types import IntArray
from .base import LayoutReader
from .block_map import BlockMap, RowGrid
from .block_memory import BlockMemory
from .block_sources import TASK_BYTES, BlockSource
from .chunk_loader import ChunkLoader

__all__ = ["BlockReader", "CellSource", "ViewSource", "read_slab"]


Part = int | slice | npt.NDArray[np.int64]
"""What is taken of an axis."""


class _AxisPiece(NamedTuple):
    """What a chunk, or a slab, has of one axis of rows.

    Attributes:
        number: of the chunk along the axis.
        source: what is taken of it.
        target: where that belongs in a row; None if rows have no such axis.
    """

    number: int
    source: Part
    target: slice | npt.NDArray[np.int64] | None


class ViewSource:
    """Loads blocks of an array that is seen another way.

    Chunks are decoded here, if this package can decode them and need not know more than their bytes; the HDF5 library
    reads everything else, a slab for each block.

    Args:
        layout: an array with a view.
        options: how its file is opened if the HDF5 library reads.
        counters: counts bytes read and decoded.
        loader: decodes the array's chunks; None if the library reads.
        reader: reads rows of the array as it is stored, if these have to be read whole; None otherwise.
    """

    picks_rows = False

    def __init__(
        self,
        layout: ArrayLayout,
        options: OpenOptions,
        counters: Counters,
        loader: ChunkLoader | None,
        reader: LayoutReader | None,
    ) -> None:
        assert layout.view is not None, "it is seen as it is stored"
        self.layout, self.view, self._options, self._counters = layout, layout.view, options, counters
        self._loader, self._reader = loader, reader
        self.n_rows, self.rows_per_block = layout.n_rows, math.prod(layout.view.block)
        self.grid = RowGrid.of(layout, self.rows_per_block)
        self._block_shape = (*layout.view.block, *layout.row_shape)
        self._parts = [()] if loader is None else list(product(*_pieces_of(layout.view)))
        self.n_parts = max(1, len(self._parts))
        self._chunk_bytes = max(1, layout.chunk_bytes)
        part_bytes = self._chunk_bytes if loader is not None else self.rows_per_block * layout.row_bytes
        self.parts_together = max(1, TASK_BYTES // max(1, part_bytes))
        is_in_order = layout.view.row_axes == tuple(range(len(layout.view.row_axes)))
        # A chunk that has the rows of a block as they are kept is decoded directly into it.
        self._is_direct = (
            loader is not None
            and is_in_order
            and len(self._parts) == 1
            and self._block_shape == (layout.chunks or ())
            and not layout.members
            and layout.stored.base.isnative
            and all(isinstance(one, slice) for one in layout.view.selections)
        )
        self._order = (*layout.view.row_axes, *layout.view.other_axes)

    def compile(self) -> None:
        """See ``ChunkLoader.compile``."""
        if self._loader is not None:
            self._loader.compile()

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        if self._loader is not None:
            self._loader.will_need_chunks(self._chunks(blocks, self._parts))

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        began = perf_counter()
        if self._loader is None:
            for block, rows in zip(blocks, memory, strict=True):
                self._load_slab(block, rows)
            self._counters.add(library_seconds=perf_counter() - began)
            return
        numbers = self._chunks(np.asarray(blocks), self._parts[parts.start : parts.stop]).tolist()
        if self._is_direct:
            self._loader.decode(numbers, *memory.octets())
        else:
            step = max(1, TASK_BYTES // self._chunk_bytes)
            places = [(rows, self._parts[part]) for rows in memory for part in parts]
            for start in range(0, len(numbers), step):
                values = self._loader.values(numbers[start : start + step])
                for (rows, part), chunk in zip(places[start : start + step], values, strict=True):
                    self._copy(chunk, part, rows)
        self._counters.add(decode_seconds=perf_counter() - began)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        memory = np.empty((self.rows_per_block, *self.layout.row_shape), self.layout.dtype)
        self.load([block], range(self.n_parts), BlockMemory(memory, np.zeros(1, np.int64), len(memory)))
        out[...] = memory[rows]

    # Chunks --------------------------------------------------------------------------------------------------

    def _chunks(self, blocks: IntArray, parts: Sequence[Sequence[_AxisPiece]]) -> IntArray:
        """Return the numbers of the chunks of some parts of blocks in the array's chunk table."""
        assert self.layout.table is not None, "it has chunks"
        grid = self.layout.table.grid
        steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
        found = np.zeros((len(blocks), 1), dtype=np.int64)
        places = np.unravel_index(blocks, self.view.row_grid) if self.view.row_axes else ()
        for axis, at in zip(self.view.row_axes, places, strict=True):
            found[:, 0] += at * steps[axis]
        of_parts = [
            sum(piece.number * steps[axis] for axis, piece in zip(self.view.other_axes, part, strict=True))
            for part in parts
        ]
        return (found + np.array(of_parts, dtype=np.int64)).reshape(-1)

    def _copy(self, values: npt.NDArray[Any], part: Sequence[_AxisPiece], rows: npt.NDArray[Any]) -> None:
        """Copy what a chunk, or a slab, has of a block's rows."""
        values = values.transpose(*self._order, *range(len(self._order), values.ndim))
        axis = len(self.view.row_axes)
        all_rows = [slice(n) for n in values.shape[:axis]]
        target: list[slice | npt.NDArray[np.int64]] = [*all_rows, *(p.target for p in part if p.target is not None)]
        if any(isinstance(piece.source, np.ndarray) for piece in part):  # of several, NumPy would take pairs
            for piece in part:
                if isinstance(piece.source, np.ndarray):
                    values = np.take(values, piece.source, axis=axis)
                else:
                    values = values[(slice(None),) * axis + (piece.source,)]
                axis += piece.target is not None
        else:
            values = values[(*all_rows, *(piece.source for piece in part))]
        block = rows.reshape(self._block_shape)
        if sum(isinstance(one, np.ndarray) for one in target) > 1:
            block[np.ix_(*(np.arange(n)[one] for one, n in zip(target, block.shape, strict=False)))] = values
        else:
            block[tuple(target)] = values

    # Slabs ---------------------------------------------------------------------------------------------------

    def _load_slab(self, block: int, rows: npt.NDArray[Any]) -> None:
        view, layout = self.view, self.layout
        slab = [slice(0, n) for n in view.shape]
        places = np.unravel_index(block, view.row_grid) if view.row_axes else ()
        for axis, at, step in zip(view.row_axes, places, view.block, strict=True):
            slab[axis] = slice(int(at) * step, min((int(at) + 1) * step, view.shape[axis]))
        pieces = []
        for axis, taken in zip(view.other_axes, view.selections, strict=True):
            low, high = _hull(taken)
            slab[axis] = slice(low, high)
            source: Part
            if isinstance(taken, int):
                source = 0
            elif isinstance(taken, slice):
                source = slice(0, high - low, taken.step)
            else:
                source = np.array(taken, np.int64) - low
            pieces.append(_AxisPiece(0, source, None if isinstance(taken, int) else slice(None)))
        self._copy(read_slab(layout, slab, self._options, self._reader, self._counters), pieces, rows)


class CellSource:
    """Loads the cells of an array, a row each (see ``ArrayLayout.in_cells``). What is beyond the array is undefined.

    Args:
        layout: an array that is seen as cells.
        options: how its file is opened if the HDF5 library reads.
        counters: counts bytes read and decoded.
        loader: decodes the array's chunks; None if the library reads.
        reader: reads rows of the array as it is stored, if these have to be read whole; None otherwise.
    """

    picks_rows = False
    n_parts = 1
    rows_per_block = 1

    def __init__(
        self,
        layout: ArrayLayout,
        options: OpenOptions,
        counters: Counters,
        loader: ChunkLoader | None,
        reader: LayoutReader | None,
    ) -> None:
        assert layout.view is not None, "it is seen as cells"
        assert layout.view.cell is not None, "it is seen as cells"
        self._layout, self._options, self._counters = layout, options, counters
        self._loader, self._reader = loader, reader
        self._cell, self._shape = layout.view.cell, layout.view.shape
        self._grid = tuple(-(-size // step) for size, step in zip(self._shape, self._cell, strict=True))
        self._inner = layout.row_shape[1:]  # axes of an array-valued element
        self._n_values = math.prod(self._cell)
        self.n_rows, self.grid = layout.n_rows, RowGrid.of(layout, 1)
        cell_bytes = max(1, self._n_values * layout.stored.itemsize)
        self.parts_together = self._together = max(1, TASK_BYTES // cell_bytes)
        self._is_direct = loader is not None and not layout.members and layout.stored.base.isnative

    def compile(self) -> None:
        """See ``ChunkLoader.compile``."""
        if self._loader is not None:
            self._loader.compile()

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        if self._loader is not None:
            self._loader.will_need_chunks(blocks)

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        began = perf_counter()
        if self._loader is None:
            for cell, rows in zip(blocks, memory, strict=True):
                self._load_slab(cell, self._values_in(rows))
            self._counters.add(library_seconds=perf_counter() - began)
            return
        if self._is_direct:
            self._loader.decode(blocks, *memory.octets())
        else:
            for start in range(0, len(blocks), self._together):
                some = blocks[start : start + self._together]
                for at, values in enumerate(self._loader.values(some), start):
                    self._values_in(memory[at])[...] = values
        self._counters.add(decode_seconds=perf_counter() - began)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        memory = np.empty((1, *self._layout.row_shape), self._layout.dtype)
        self.load([block], range(1), BlockMemory(memory, np.zeros(1, np.int64), 1))
        out[...] = memory

    def _values_in(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the memory of a row as a cell."""
        return rows[0, : self._n_values].reshape(*self._cell, *self._inner)

    def _load_slab(self, cell: int, values: npt.NDArray[Any]) -> None:
        slab = [
            slice(int(at) * step, min((int(at) + 1) * step, size))
            for at, step, size in zip(np.unravel_index(cell, self._grid), self._cell, self._shape, strict=True)
        ]
        found = read_slab(self._layout, slab, self._options, self._reader, self._counters)
        values[tuple(slice(one.stop - one.start) for one in slab)] = found


class BlockReader(LayoutReader):
    """Reads rows by whole blocks that are decoded here, and keeps none.

    Rows are numbered one after the other, whatever the period of a view is.

    Args:
        layout: the array.
        source: loads its blocks.
        counters: counts bytes.
    """

    def __init__(self, layout: ArrayLayout, source: BlockSource, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self._source = source
        self._map = BlockMap([source.grid._replace(period=max(1, source.grid.size))])
        if kind_of(layout.dtype) == "text":
            self.dtype = np.dtype(object)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        source = self._source
        blocks, within = self._map.locate(rows)
        memory = np.empty((source.rows_per_block, *self.row_shape), self.dtype)
        for block in np.unique(blocks).tolist():
            source.load([block], range(source.n_parts), BlockMemory(memory, np.zeros(1, np.int64), len(memory)))
            here = np.flatnonzero(blocks == block)
            out[here] = memory[within[here]]


def read_slab(
    layout: ArrayLayout, slab: Sequence[slice], options: OpenOptions, reader: LayoutReader | None, counters: Counters
) -> npt.NDArray[Any]:
    """Return a part of an array that is seen another way, through the HDF5 library.

    Args:
        layout: the array.
        slab: the part, along the axes as they are stored.
        options: how its file is opened.
        reader: reads whole rows of the array as it is stored; None if a part of a row can be read.
        counters: counts bytes.

    Raises:
        H5CorruptError: it cannot be read.
    """
    assert layout.view is not None, "it is seen as it is stored"
    n_bytes = math.prod(one.stop - one.start for one in slab) * layout.stored.itemsize
    share = n_bytes / max(1, math.prod(layout.view.shape) * layout.stored.itemsize)
    counters.add(bytes_read=round(share * layout.n_stored_bytes), bytes_decoded=n_bytes)
    if reader is not None:
        return reader.read(np.arange(slab[0].start, slab[0].stop))[(slice(None), *slab[1:])]
    with process_pool().h5(layout.path, options, layout.guard) as handle:
        stored = handle.array(layout.view.array)
        try:
            values = (stored.fields(layout.members[0]) if layout.members else stored)[tuple(slab)]
        except (OSError, RuntimeError) as error:
            raise H5CorruptError(
                f"the part {_slab_text(slab)} of {layout.key!r} in {layout.path!r} cannot be read: {error}. "
                "The file is damaged there; copy it again, or write it again without this part."
            ) from error
    for member in layout.members[1:]:
        values = values[member]
    return np.asarray(values)


def _pieces_of(view: ArrayView) -> list[list[_AxisPiece]]:
    """Return, for each axis of rows, what the chunks along it have of what is taken."""
    assert view.array.chunks is not None, "it has chunks"
    return [
        _pieces_along(taken, view.array.chunks[axis], view.shape[axis])
        for axis, taken in zip(view.other_axes, view.selections, strict=True)
    ]


def _pieces_along(taken: int | slice | tuple[int, ...], step: int, size: int) -> list[_AxisPiece]:
    if isinstance(taken, int):
        return [_AxisPiece(taken // step, taken % step, None)]
    if isinstance(taken, slice) and taken.step == 1:
        low, high = taken.start, taken.stop
        return [
            _AxisPiece(
                number,
                slice(max(low - number * step, 0), min(high, number * step + step) - number * step),
                slice(max(number * step, low) - low, min(high, number * step + step) - low),
            )
            for number in range(low // step, -(-high // step) if high > low else 0)
        ]
    indices = np.arange(size)[taken] if isinstance(taken, slice) else np.array(taken, np.int64)
    numbers = indices // step
    return [
        _AxisPiece(number, indices[numbers == number] - number * step, np.flatnonzero(numbers == number))
        for number in np.unique(numbers).tolist()
    ]


def _hull(taken: int | slice | tuple[int, ...]) -> tuple[int, int]:
    """Return the first index that is taken, and the one after the last."""
    if isinstance(taken, int):
        return taken, taken + 1
    if isinstance(taken, slice):
        return taken.start, taken.stop
    return (min(taken), max(taken) + 1) if taken else (0, 0)


def _slab_text(slab: Sequence[slice]) -> str:
    return "[" + ", ".join(f"{one.start}:{one.stop}" for one in slab) + "]"

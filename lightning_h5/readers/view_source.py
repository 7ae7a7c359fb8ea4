"""Read views of arrays: rows along other axes than the first, a part of each row, or cells.

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
from ..hdf5 import ArrayLayout, ArrayView, ChunkTable, OpenOptions, kind_of, process_pool
from ..types import IntArray
from .base import LayoutReader
from .block_map import BlockMap, Boxes, RowGrid
from .block_memory import BlockMemory
from .block_sources import TASK_BYTES, BlockSource
from .chunk_loader import ChunkLoader
from .kept_chunks import KeptChunks

__all__ = ["BlockReader", "ViewSource"]


Part = int | slice | npt.NDArray[np.int64]
"""A selection along one axis."""


class _AxisPiece(NamedTuple):
    """The overlap of one chunk, or of a slab, with the selection along one axis of the rows.

    Attributes:
        number: number of the chunk along the axis.
        source: the selected indices in the chunk.
        target: their positions in a row; None if rows have no such axis.
    """

    number: int
    source: Part
    target: slice | npt.NDArray[np.int64] | None


class ViewSource:
    """Loads the blocks of a view. The contents of a block beyond the end of the array are undefined.

    Chunks are decoded here if this package supports their filters. The HDF5 library reads all other arrays, a slab for
    each block.

    Args:
        layout: the array.
        view: the view of it.
        options: options for opening its file, if the HDF5 library reads it.
        counters: counts bytes read and decoded.
        loader: decodes the array's chunks; None if the HDF5 library reads them.
        reader: reads whole rows of the stored array; None if parts of rows can be read.
    """

    picks_rows = False
    kept: KeptChunks | None = None

    def __init__(
        self,
        layout: ArrayLayout,
        view: ArrayView,
        options: OpenOptions,
        counters: Counters,
        loader: ChunkLoader | None,
        reader: LayoutReader | None,
    ) -> None:
        self.layout, self.view, self._options, self._counters = layout, view, options, counters
        self._loader, self._reader = loader, reader
        inner = layout.row_shape[1:] if view.is_in_cells else layout.row_shape
        self.n_rows, self.rows_per_block = layout.n_rows, 1 if view.is_in_cells else math.prod(view.block)
        self.grid = RowGrid.of(layout, self.rows_per_block)
        self._block_shape = (*view.block, *inner)
        self._n_values = math.prod(self._block_shape)
        self._parts = [()] if loader is None else list(product(*_pieces_of(view, loader.chunks)))
        self.n_parts = max(1, len(self._parts))
        self._chunk_bytes = max(1, layout.chunk_bytes)
        part_bytes = self._chunk_bytes if loader is not None else self._n_values * layout.dtype.itemsize
        self.parts_together = max(1, TASK_BYTES // max(1, part_bytes))
        is_in_order = view.row_axes == tuple(range(len(view.row_axes)))
        # A chunk with the layout of a block in memory is decoded directly into the block.
        self._is_direct = (
            loader is not None
            and is_in_order
            and len(self._parts) == 1
            and self._block_shape[: len(view.shape)] == (layout.chunks or ())
            and not layout.members
            and layout.stored.base.isnative
            and all(isinstance(selection, slice) for selection in view.selections)
        )
        self._order = (*view.row_axes, *view.other_axes)

    def compile(self) -> None:
        """See ``ChunkLoader.compile``."""
        if self._loader is not None:
            self._loader.compile()

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        if self._loader is not None:
            self._loader.will_need_chunks(self._chunks(self._loader.table, blocks, self._parts))

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        began = perf_counter()
        if self._loader is None:
            for block, rows in zip(blocks, memory, strict=True):
                self._load_slab(block, rows)
            self._counters.add(library_seconds=perf_counter() - began)
            return
        selected_parts = self._parts[parts.start : parts.stop]
        numbers = self._chunks(self._loader.table, np.asarray(blocks), selected_parts).tolist()
        if self._is_direct:
            self._loader.decode(numbers, *memory.octets())
        else:
            step = max(1, TASK_BYTES // self._chunk_bytes)
            places = [(rows, part) for rows in memory for part in selected_parts]
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

    def _chunks(self, table: ChunkTable, blocks: IntArray, parts: Sequence[Sequence[_AxisPiece]]) -> IntArray:
        """Return the numbers of the chunks of some parts of blocks in the array's chunk table."""
        grid = table.grid
        steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
        firsts = np.zeros((len(blocks), 1), dtype=np.int64)  # of each block
        indices = np.unravel_index(blocks, self.view.row_grid) if self.view.row_axes else ()
        for axis, index in zip(self.view.row_axes, indices, strict=True):
            firsts[:, 0] += index * steps[axis]
        offsets = [
            sum(piece.number * steps[axis] for axis, piece in zip(self.view.other_axes, part, strict=True))
            for part in parts
        ]
        return (firsts + np.array(offsets, dtype=np.int64)).reshape(-1)

    def _copy(self, values: npt.NDArray[Any], part: Sequence[_AxisPiece], rows: npt.NDArray[Any]) -> None:
        """Copy the overlap of a chunk, or of a slab, with the selection into a block."""
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
        block = rows.reshape(-1)[: self._n_values].reshape(self._block_shape)
        if sum(isinstance(indices, np.ndarray) for indices in target) > 1:
            block[np.ix_(*(np.arange(n)[indices] for indices, n in zip(target, block.shape, strict=False)))] = values
        else:
            block[tuple(target)] = values

    # Slabs ---------------------------------------------------------------------------------------------------

    def _load_slab(self, block: int, rows: npt.NDArray[Any]) -> None:
        view, layout = self.view, self.layout
        slab = [slice(0, n) for n in view.shape]
        indices = np.unravel_index(block, view.row_grid) if view.row_axes else ()
        for axis, index, step in zip(view.row_axes, indices, view.block, strict=True):
            slab[axis] = slice(int(index) * step, min((int(index) + 1) * step, view.shape[axis]))
        pieces = []
        for axis, selection in zip(view.other_axes, view.selections, strict=True):
            low, high = _hull(selection)
            slab[axis] = slice(low, high)
            source: Part
            if isinstance(selection, int):
                source = 0
            elif isinstance(selection, slice):
                source = slice(0, high - low, selection.step)
            else:
                source = np.array(selection, np.int64) - low
            pieces.append(_AxisPiece(0, source, None if isinstance(selection, int) else slice(None)))
        self._copy(_read_slab(layout, view, slab, self._options, self._reader, self._counters), pieces, rows)


class BlockReader(LayoutReader):
    """Reads rows by decoding whole blocks, without a cache.

    Args:
        layout: the array.
        source: loads the array's blocks.
        counters: counts bytes.
    """

    def __init__(self, layout: ArrayLayout, source: BlockSource, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self._source = source
        self._map = BlockMap([source.grid])
        if kind_of(layout.dtype) == "text":
            self.dtype = np.dtype(object)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        source = self._source
        blocks, within = self._map.locate(Boxes(0, rows))
        memory = np.empty((source.rows_per_block, *self.row_shape), self.dtype)
        for block in np.unique(blocks).tolist():
            source.load([block], range(source.n_parts), BlockMemory(memory, np.zeros(1, np.int64), len(memory)))
            is_in_block = blocks == block
            out[is_in_block] = memory[within[is_in_block]]


def _read_slab(
    layout: ArrayLayout,
    view: ArrayView,
    slab: Sequence[slice],
    options: OpenOptions,
    reader: LayoutReader | None,
    counters: Counters,
) -> npt.NDArray[Any]:
    """Read a part of a view through the HDF5 library.

    Args:
        layout: the array.
        view: the view of it.
        slab: the part, as a slice of each stored axis.
        options: options for opening the file.
        reader: reads whole rows of the stored array; None if parts of rows can be read.
        counters: counts bytes.

    Raises:
        H5CorruptError: the part cannot be read.
    """
    n_bytes = math.prod(part.stop - part.start for part in slab) * layout.stored.itemsize
    share = n_bytes / max(1, math.prod(view.shape) * layout.stored.itemsize)
    counters.add(bytes_read=round(share * layout.n_stored_bytes), bytes_decoded=n_bytes)
    if reader is not None:
        return reader.read(np.arange(slab[0].start, slab[0].stop))[(slice(None), *slab[1:])]
    with process_pool().h5(layout.path, options, layout.guard) as handle:
        stored = handle.array(view.array)
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


def _pieces_of(view: ArrayView, chunks: tuple[int, ...]) -> list[list[_AxisPiece]]:
    """Return, per row axis, the overlap of each chunk with the selection."""
    return [
        _pieces_along(selection, chunks[axis], view.shape[axis])
        for axis, selection in zip(view.other_axes, view.selections, strict=True)
    ]


def _pieces_along(selection: int | slice | tuple[int, ...], step: int, size: int) -> list[_AxisPiece]:
    if isinstance(selection, int):
        return [_AxisPiece(selection // step, selection % step, None)]
    if isinstance(selection, slice) and selection.step == 1:
        low, high = selection.start, selection.stop
        return [
            _AxisPiece(
                number,
                slice(max(low - number * step, 0), min(high, number * step + step) - number * step),
                slice(max(number * step, low) - low, min(high, number * step + step) - low),
            )
            for number in range(low // step, -(-high // step) if high > low else 0)
        ]
    indices = np.arange(size)[selection] if isinstance(selection, slice) else np.array(selection, np.int64)
    numbers = indices // step
    return [
        _AxisPiece(number, indices[numbers == number] - number * step, np.flatnonzero(numbers == number))
        for number in np.unique(numbers).tolist()
    ]


def _hull(selection: int | slice | tuple[int, ...]) -> tuple[int, int]:
    """Return the first selected index, and the index after the last one."""
    if isinstance(selection, int):
        return selection, selection + 1
    if isinstance(selection, slice):
        return selection.start, selection.stop
    return (min(selection), max(selection) + 1) if selection else (0, 0)


def _slab_text(slab: Sequence[slice]) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in slab) + "]"

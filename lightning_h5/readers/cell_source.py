"""Cells of arrays: chunks that are decoded here, or parts of arrays without chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import ArrayLayout, OpenOptions
from ..types import IntArray
from .base import LayoutReader
from .block_map import RowGrid
from .chunk_cache import BlockMemory
from .chunk_loader import TASK_BYTES, ChunkLoader
from .view_source import read_slab

__all__ = ["CellSource"]


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

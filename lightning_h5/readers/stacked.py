"""Rows of several arrays that are stacked on a new last axis: each array is read by its own reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import ArrayLayout
from ..types import IntArray, RowReader
from .base import LayoutReader, row_slices
from .block_memory import BlockMemory, scratch
from .block_sources import TASK_BYTES, BlockSource
from .kept_chunks import KeptChunks

__all__ = ["StackReader", "StackSource"]


class StackReader(LayoutReader):
    """Reads rows of each array, and stacks them.

    Args:
        layout: the arrays as one.
        readers: of each array.
        counters: counts bytes.
    """

    def __init__(self, layout: ArrayLayout, readers: Sequence[RowReader], counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        self._readers = tuple(readers)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        for cut in row_slices(len(rows), max(1, self.layout.row_bytes)):
            for at, reader in enumerate(self._readers):
                memory = _stack_memory(len(rows[cut]), reader.row_shape, reader.dtype)
                out[cut][..., at] = reader.read(rows[cut], memory)

    def close(self) -> None:
        """Close the readers."""
        for reader in self._readers:
            reader.close()


class StackSource:
    """Loads blocks of each array, and stacks them. A part of a block is one array's share of it.

    Args:
        layout: the arrays as one.
        sources: of each array, all with the same blocks.
    """

    kept: KeptChunks | None = None

    def __init__(self, layout: ArrayLayout, sources: Sequence[BlockSource]) -> None:
        self.sources, first = tuple(sources), sources[0]
        self._layout, self.n_parts = layout, len(sources)
        self.n_rows, self.rows_per_block, self.grid = first.n_rows, first.rows_per_block, first.grid
        self.picks_rows = all(source.picks_rows for source in sources)
        self._block_bytes = max(1, self.rows_per_block * layout.row_bytes // self.n_parts)
        self.parts_together = max(1, TASK_BYTES // self._block_bytes)

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        for source in self.sources:
            source.will_need(blocks)

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        size, step = self.rows_per_block, max(1, TASK_BYTES // self._block_bytes)
        for start in range(0, len(blocks), step):
            task_blocks = blocks[start : start + step]
            for part in parts:
                source, array = self.sources[part], self._layout.stacked[part]
                rows = _stack_memory(len(task_blocks) * size, array.row_shape, array.dtype)
                firsts = np.arange(len(task_blocks)) * size
                source.load(task_blocks, range(source.n_parts), BlockMemory(rows, firsts, size))
                with np.errstate(all="ignore"):  # rows beyond the end of the array are undefined
                    for at, first in enumerate(firsts.tolist(), start):
                        out = memory[at]
                        out[..., part] = rows[first : first + len(out)]

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        for part, (source, array) in enumerate(zip(self.sources, self._layout.stacked, strict=True)):
            picked: npt.NDArray[Any] = np.empty((len(rows), *array.row_shape), array.dtype)
            source.pick(block, rows, picked)
            out[..., part] = picked


def _stack_memory(n_rows: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return this thread's memory for rows of one array."""
    shape = (n_rows, *row_shape)
    return np.ndarray(shape, dtype, scratch("before stacking", math.prod(shape) * dtype.itemsize))

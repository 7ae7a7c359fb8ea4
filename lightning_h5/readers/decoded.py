"""Rows that are decoded after they were read: a reader of rows, and a source of blocks."""

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
from .chunk_cache import BlockMemory, scratch
from .chunk_loader import BlockSource

__all__ = ["DecodedReader", "DecodedSource"]


class DecodedReader(LayoutReader):
    """Reads rows, and decodes them.

    Args:
        layout: the array with decoded rows.
        reader: reads rows as they are stored.
        counters: counts bytes.
    """

    def __init__(self, layout: ArrayLayout, reader: RowReader, counters: Counters | None = None) -> None:
        super().__init__(layout, counters)
        assert layout.decoding is not None, "rows are as stored"
        self._reader, self._codec = reader, layout.decoding.codec

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        for some in row_slices(len(rows), max(1, self.layout.row_bytes)):
            self._codec.decode(self._reader.read(rows[some]), out[some])

    def close(self) -> None:
        """Close the reader of stored rows."""
        self._reader.close()


class DecodedSource:
    """Loads blocks from another source, and decodes their rows.

    Args:
        layout: the array with decoded rows.
        source: loads its rows as they are stored.
    """

    n_parts = 1

    def __init__(self, layout: ArrayLayout, source: BlockSource) -> None:
        assert layout.decoding is not None, "rows are as stored"
        self.stored, self._codec = source, layout.decoding.codec
        self._row_shape, self._dtype = layout.decoding.array.row_shape, layout.decoding.array.dtype
        self._decoded = layout.row_shape, layout.dtype
        self.n_rows, self.rows_per_block, self.grid = source.n_rows, source.rows_per_block, source.grid
        self.parts_together, self.picks_rows = max(1, source.parts_together // source.n_parts), source.picks_rows

    def compile(self) -> None:
        """Compile what decodes rows, if that is possible."""
        self._codec = self._codec.compiled()
        self._codec.decode(
            np.empty((0, *self._row_shape), self._dtype), np.empty((0, *self._decoded[0]), self._decoded[1])
        )

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        shape = (self.rows_per_block, *self._row_shape)
        n_bytes = math.prod(shape) * self._dtype.itemsize
        rows: npt.NDArray[Any] = np.ndarray(shape, self._dtype, scratch("before decoding", n_bytes))
        stored = BlockMemory(rows, np.zeros(1, np.int64), self.rows_per_block)
        for block, out in zip(blocks, memory, strict=True):
            self.stored.load([block], range(self.stored.n_parts), stored)
            self._codec.decode(rows[: len(out)], out)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        stored: npt.NDArray[Any] = np.empty((len(rows), *self._row_shape), self._dtype)
        self.stored.pick(block, rows, stored)
        self._codec.decode(stored, out)

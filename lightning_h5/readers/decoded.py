"""Rows that are decoded after they were read: a reader of rows, and a source of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import ArrayLayout, Codec, Unpack
from ..types import IntArray, RowReader
from .base import LayoutReader, checked_places, row_slices
from .chunk_cache import BlockMemory, scratch
from .chunk_loader import BlockSource, Change

__all__ = ["DecodedCopies", "DecodedReader", "DecodedSource"]


NOWHERE = np.empty(0, np.int64)


def compiled_codec(layout: ArrayLayout) -> Codec:
    """Return what decodes rows of an array, compiled for them if that is possible."""
    assert layout.decoding is not None, "rows are as stored"
    stored, codec = layout.decoding.array, layout.decoding.codec
    if stored.dtype == np.float16:  # Numba has none
        return codec
    codec = codec.compiled()
    codec.decode(np.empty((0, *stored.row_shape), stored.dtype), np.empty((0, *layout.row_shape), layout.dtype))
    return codec


def _scratch(n_rows: int, of: ArrayLayout | RowReader) -> npt.NDArray[Any]:
    """Return this thread's memory for rows as they are stored."""
    shape = (n_rows, *of.row_shape)
    return np.ndarray(shape, of.dtype, scratch("before decoding", math.prod(shape) * of.dtype.itemsize))


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

    def compile(self) -> None:
        """Compile what decodes rows, if that is possible."""
        self._codec = compiled_codec(self.layout)

    def _fill(self, rows: IntArray, out: npt.NDArray[Any]) -> None:
        for some in row_slices(len(rows), max(1, self.layout.row_bytes)):
            stored = None if self._reader.dtype.hasobject else _scratch(len(rows[some]), self._reader)
            self._codec.decode(self._reader.read(rows[some], stored), out[some])

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
        self._layout, self._array = layout, layout.decoding.array
        self.n_rows, self.rows_per_block, self.grid = source.n_rows, source.rows_per_block, source.grid
        self.parts_together, self.picks_rows = max(1, source.parts_together // source.n_parts), source.picks_rows

    def compile(self) -> None:
        """Compile what decodes rows, if that is possible."""
        self._codec = compiled_codec(self._layout)

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        rows = _scratch(self.rows_per_block, self._array)
        stored = BlockMemory(rows, np.zeros(1, np.int64), self.rows_per_block)
        for block, out in zip(blocks, memory, strict=True):
            self.stored.load([block], range(self.stored.n_parts), stored)
            self._codec.decode(rows[: len(out)], out)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        stored: npt.NDArray[Any] = np.empty((len(rows), *self._array.row_shape), self._array.dtype)
        self.stored.pick(block, rows, stored)
        self._codec.decode(stored, out)


class DecodedCopies:
    """Decodes packed numbers as rows are copied out of blocks; a ``Change``.

    Blocks then stay as they are stored, which takes half the memory or less, and numbers are written once, to a batch.

    Args:
        codec: decodes, compiled.
        dtype: of decoded rows.
    """

    takes_at_once = True

    def __init__(self, codec: Unpack, dtype: np.dtype[Any]) -> None:
        self._codec, self._dtype = codec, dtype

    def compile(self, stored: np.dtype[Any]) -> None:
        """See ``Change``."""
        self._codec.take(np.empty((1, 1), stored), NOWHERE, np.empty((1, 1), self._dtype), NOWHERE)

    def after(self, codec: Unpack) -> Change:
        """See ``Change``."""
        raise TypeError("rows are decoded once")

    def __call__(self, rows: npt.NDArray[Any]) -> None:
        """See ``Change``."""
        raise TypeError("decoded rows are of another dtype")

    def take(
        self, rows: npt.NDArray[Any], places: IntArray | None, out: npt.NDArray[Any], here: IntArray | None = None
    ) -> None:
        """See ``Change``; ``out`` is of the dtype of decoded rows."""
        if not out.size:
            return
        n_rows = len(out if here is None else here)
        self._codec.take(rows, checked_places(places, n_rows, len(rows)), out, checked_places(here, n_rows, len(out)))

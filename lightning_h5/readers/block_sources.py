"""The sources of blocks of one field: one for each array, opened when it is used if arrays are alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayLayout
from ..types import IntArray
from .block_map import RowGrid
from .chunk_cache import BlockMemory
from .chunk_loader import BlockSource

__all__ = ["BlockSources", "FieldLayouts"]

MAX_OPEN = 4096
"""Sources that are kept open, beside one of each kind: each takes one or two KiB."""


@dataclass(frozen=True, eq=False)
class FieldLayouts(Sequence[ArrayLayout]):
    """The arrays of one field, of one dtype and row shape.

    Attributes:
        kinds: kind of each array: those of a kind differ in their names, places and numbers of rows alone.
        firsts: first array of each kind.
        n_rows: rows of each.
        get: returns an array by its number.
    """

    kinds: npt.NDArray[np.int32]
    firsts: IntArray
    n_rows: IntArray
    get: Callable[[int], ArrayLayout]

    @classmethod
    def of(cls, layouts: Sequence[ArrayLayout]) -> FieldLayouts:
        """Return arrays that are described one by one, each as a kind of its own."""
        if isinstance(layouts, FieldLayouts):
            return layouts
        numbers, n_rows = np.arange(len(layouts)), np.array([one.n_rows for one in layouts], dtype=np.int64)
        return cls(numbers.astype(np.int32), numbers, n_rows, layouts.__getitem__)

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self.get(at) for at in range(len(self))[number]]
        return self.get(range(len(self))[number])

    @cached_property
    def examples(self) -> list[ArrayLayout]:
        """The first array of each kind."""
        return [self.get(first) for first in self.firsts.tolist()]

    def as_stored(self) -> FieldLayouts:
        """Return arrays that are decoded as they are before that."""

        def stored(number: int) -> ArrayLayout:
            decoding = self.get(number).decoding
            assert decoding is not None, "rows are as stored"
            return decoding.array

        return replace(self, get=stored)

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows as they are read."""
        n_rows: list[int] = self.n_rows.tolist()
        return sum(n_rows) * self.examples[0].row_bytes


class BlockSources(Sequence[BlockSource]):
    """The source of each array of a field.

    Args:
        layouts: the arrays.
        open_source: opens the source of an array, by its number and description.
    """

    def __init__(self, layouts: FieldLayouts, open_source: Callable[[int, ArrayLayout], BlockSource]) -> None:
        self._layouts, self._open = layouts, open_source
        self.examples = [open_source(*one) for one in zip(layouts.firsts.tolist(), layouts.examples, strict=True)]
        self._are_examples = len(self.examples) == len(layouts)
        self._opened: dict[int, BlockSource] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._layouts)

    def __getitem__(self, number: Any) -> Any:
        if self._are_examples:
            return self.examples[number]
        return _LaterSource(self, int(number), self.examples[self._layouts.kinds[number]])

    def of_kinds(self, value: Callable[[BlockSource], int]) -> IntArray:
        """Return a number for each array that follows from its kind."""
        return np.array([value(source) for source in self.examples], dtype=np.int64)[self._layouts.kinds]

    @property
    def grids(self) -> npt.NDArray[np.int64]:
        """How the rows of each array are cut into blocks (``RowGrid``), shape ``(n_arrays, 5)``."""
        found = np.array([source.grid for source in self.examples], dtype=np.int64).reshape(-1, 5)[self._layouts.kinds]
        is_own = np.array([array.view is None for array in self._layouts.examples])[self._layouts.kinds]
        for name in ("size", "period"):
            at = RowGrid._fields.index(name)
            found[:, at] = np.where(is_own, self._layouts.n_rows, found[:, at])
        return found

    def opened(self, number: int) -> BlockSource:
        """Return the source of an array, opened now or kept open."""
        source = self._opened.get(number)
        if source is None:
            source = self._open(number, self._layouts[number])
            with self._lock:
                while len(self._opened) >= MAX_OPEN:
                    del self._opened[next(iter(self._opened))]
                self._opened[number] = source
        return source


class _LaterSource:
    """A source that is opened when a block is loaded: if that fails, the error belongs to the block.

    Args:
        sources: opens it.
        number: of its array.
        example: a source of the same kind.
    """

    def __init__(self, sources: BlockSources, number: int, example: BlockSource) -> None:
        self._sources, self._number = sources, number
        self.n_rows, self.grid = example.n_rows, example.grid
        self.rows_per_block, self.n_parts = example.rows_per_block, example.n_parts
        self.parts_together, self.picks_rows = example.parts_together, example.picks_rows

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        with suppress(OSError, ValueError, KeyError):  # loading the blocks raises it
            self._sources.opened(self._number).will_need(blocks)

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        self._sources.opened(self._number).load(blocks, parts, memory)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        self._sources.opened(self._number).pick(block, rows, out)

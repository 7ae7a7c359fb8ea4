"""Block sources: their interface, sources on top of a reader, and the sources of all arrays of a field.

A block is the unit of decoding: the rows of one array that share chunks, or a run of rows without chunks. All
sources of a field write the same memory layout: rows one after the other, in native byte order. Sources of arrays that
are alike are opened when they are used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayLayout
from ..types import IntArray, cached_property
from .base import LayoutReader
from .block_map import RowGrid
from .block_memory import BlockMemory
from .codecs import Unpack
from .kept_chunks import KeptChunks

__all__ = [
    "TASK_BYTES",
    "BlockSource",
    "BlockSources",
    "Change",
    "CopyChange",
    "FieldLayouts",
    "LaterSource",
    "PreparedSource",
    "ReaderSource",
]

TASK_BYTES = 1 << 20  # decoded bytes per task, about a millisecond of work: smaller tasks cost more in switching

MAX_OPEN = 4096
"""Maximum number of open sources, besides one of each kind; a source needs one or two KiB."""


class CopyChange(Protocol):
    """A change of single rows, applied while they are copied."""

    def compile(self, stored: np.dtype[Any]) -> None:
        """Compile the conversion of rows of a dtype, if possible: before processes fork, and not during reads."""
        ...

    def take(
        self, rows: npt.NDArray[Any], places: IntArray | None, out: npt.NDArray[Any], out_places: IntArray | None = None
    ) -> None:
        """Copy rows, and change the copies.

        Args:
            rows: shape ``(n_rows, *row_shape)``.
            places: which rows to copy, shape ``(n,)``; None for all.
            out: memory for rows, in one piece, of any dtype.
            out_places: where in ``out`` they go, shape ``(n,)``; None for all of it, in order.
        """
        ...


class Change(CopyChange, Protocol):
    """A change of single rows that can also be applied in place.

    Attributes:
        takes_at_once: whether copying costs little more with the change than without.
    """

    @property
    def takes_at_once(self) -> bool:
        """See the class."""
        ...

    def after(self, codec: Unpack) -> CopyChange:
        """Return a change that decodes packed numbers first, in the same pass; only if this one takes at once."""
        ...

    def __call__(self, rows: npt.NDArray[Any]) -> None:
        """Change rows in place; they lie in one piece."""
        ...


class BlockSource(Protocol):
    """Loads blocks of one array.

    Attributes:
        n_rows: rows of the array.
        rows_per_block: rows of a block; the last one can have fewer.
        n_parts: parts of a block that can be loaded by different threads.
        parts_together: parts that are best loaded by the same thread.
        picks_rows: whether rows of a block can be read without the others.
        grid: how rows are cut into blocks.
        kept: decoded blocks on a local disk, one chunk of whole rows each; None if there are none.
    """

    n_rows: int
    rows_per_block: int
    n_parts: int
    parts_together: int
    picks_rows: bool
    grid: RowGrid
    kept: KeptChunks | None

    def will_need(self, blocks: IntArray) -> None:
        """Begin to fetch the chunks of blocks, to the page cache or a mirror. Does not wait, and never raises."""
        ...

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """Load the same parts of some blocks.

        Args:
            blocks: the blocks.
            parts: numbers of the parts, from 0 to ``n_parts - 1``.
            memory: memory for the rows of each block.

        Raises:
            H5CorruptError: bytes are missing, or do not decode.
            H5FileError: the file cannot be read.
        """
        ...

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """Read rows of a block that has no place in the cache; ``rows`` are counted inside it."""
        ...


class ReaderSource:
    """Loads blocks through another reader.

    Args:
        reader: reads the array.
        rows_per_block: rows of a block, unless the array is a view, which has blocks of its own.
        grid: how rows are cut into blocks, if it is not as the array has them.
        gives_back: blocks leave the system's page cache once they are read.
    """

    n_parts = 1
    kept: KeptChunks | None = None

    def __init__(
        self, reader: LayoutReader, rows_per_block: int, grid: RowGrid | None = None, *, gives_back: bool = False
    ) -> None:
        self._reader, self._gives_back = reader, gives_back
        self.grid = RowGrid.of(reader.layout, rows_per_block) if grid is None else grid
        self.n_rows, self.rows_per_block = len(reader), self.grid.across * self.grid.along
        self.picks_rows = reader.layout.is_contiguous
        self.parts_together = max(1, TASK_BYTES // max(1, self.rows_per_block * reader.layout.row_bytes))

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        for block in blocks.tolist():
            first = block * self.rows_per_block
            self._reader.will_need(range(first, min(first + self.rows_per_block, self.n_rows)))

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        for block, rows in zip(blocks, memory, strict=True):
            first = block * self.rows_per_block
            last = min(first + self.rows_per_block, self.n_rows)
            self._reader.read(np.arange(first, last), rows[: last - first])
            if self._gives_back:
                self._reader.give_back(range(first, last))

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        out[...] = self._reader.read(block * self.rows_per_block + rows)


class PreparedSource:
    """Loads blocks from another source, and changes their rows.

    Args:
        source: loads blocks in one part each.
        prepare: changes rows in place.
    """

    n_parts = 1
    kept: KeptChunks | None = None

    def __init__(self, source: BlockSource, prepare: Change) -> None:
        if source.n_parts != 1:
            raise ValueError(f"blocks of {source.n_parts} parts are never loaded as a whole")
        self._source, self._prepare = source, prepare
        self.n_rows, self.rows_per_block = source.n_rows, source.rows_per_block
        self.parts_together, self.picks_rows, self.grid = source.parts_together, source.picks_rows, source.grid

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        self._source.will_need(blocks)

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        self._source.load(blocks, parts, memory)
        for block, rows in zip(blocks, memory, strict=True):
            self._prepare(rows[: self.n_rows - block * self.rows_per_block])

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        self._source.pick(block, rows, out)
        self._prepare(out)


@dataclass(frozen=True, eq=False)
class FieldLayouts(Sequence[ArrayLayout]):
    """The arrays of one field, of one dtype and row shape.

    Attributes:
        kinds: kind of each array. Arrays of one kind differ only in name, position and number of rows.
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
        numbers, n_rows = np.arange(len(layouts)), np.array([array.n_rows for array in layouts], dtype=np.int64)
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
        """Return the arrays as they are before rows are decoded."""

        def stored(number: int) -> ArrayLayout:
            array = self.get(number)
            return array if array.decoding is None else array.decoding.array

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
        self.examples = [open_source(*array) for array in zip(layouts.firsts.tolist(), layouts.examples, strict=True)]
        self._are_examples = len(self.examples) == len(layouts)
        self._opened: dict[int, BlockSource] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._layouts)

    def __getitem__(self, number: Any) -> Any:
        return LaterSource(self, int(number), self.examples[self._layouts.kinds[number]])

    @property
    def each(self) -> Sequence[BlockSource]:
        """The source of each array: a list if all are open, otherwise opened on access."""
        return self.examples if self._are_examples else self

    def of_kinds(self, value: Callable[[BlockSource], int]) -> IntArray:
        """Return a number for each array that follows from its kind."""
        return np.array([value(source) for source in self.examples], dtype=np.int64)[self._layouts.kinds]

    @property
    def grids(self) -> npt.NDArray[np.int64]:
        """How the rows of each array are cut into blocks (``RowGrid``), shape ``(n_arrays, 4)``."""
        grids = np.array([source.grid for source in self.examples], dtype=np.int64).reshape(-1, 4)[self._layouts.kinds]
        is_own = np.array([array.view is None for array in self._layouts.examples])[self._layouts.kinds]
        size = RowGrid._fields.index("size")
        grids[:, size] = np.where(is_own, self._layouts.n_rows, grids[:, size])
        return grids

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


class LaterSource:
    """A source that is opened when a block is loaded: if that fails, the error belongs to the block.

    Args:
        sources: opens it.
        number: of its array.
        example: a source of the same kind.
    """

    kept: KeptChunks | None = None

    def __init__(self, sources: BlockSources, number: int, example: BlockSource) -> None:
        self._sources, self._number = sources, number
        self.n_rows, self.grid = example.n_rows, example.grid
        self.rows_per_block, self.n_parts = example.rows_per_block, example.n_parts
        self.parts_together, self.picks_rows = example.parts_together, example.picks_rows

    def opened(self) -> BlockSource:
        """Return the source, opened now or kept open."""
        return self._sources.opened(self._number)

    def will_need(self, blocks: IntArray) -> None:
        """See ``BlockSource.will_need``."""
        with suppress(OSError, ValueError, KeyError):  # loading the blocks raises it
            self.opened().will_need(blocks)

    def load(self, blocks: Sequence[int], parts: range, memory: BlockMemory) -> None:
        """See ``BlockSource.load``."""
        self.opened().load(blocks, parts, memory)

    def pick(self, block: int, rows: IntArray, out: npt.NDArray[Any]) -> None:
        """See ``BlockSource.pick``."""
        self.opened().pick(block, rows, out)

"""How rows are cut into blocks: which block each row is in, over the arrays of several parts of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayLayout
from ..types import IntArray
from .base import check_bounds

__all__ = ["BlockMap", "Boxes", "Pieces", "RowGrid", "by_number"]

MIN_RUN = 16  # rows: finding runs costs more than it saves if they are shorter, on average
MARKED_PER_ROW = 16  # blocks, marked in a table: with more of them for each row, sorting is as fast


class Boxes(NamedTuple):
    """Rows of one field: the part of each, and its number in the part's own array.

    Attributes:
        parts: the part of each run of rows, or of each row without runs; one number if all rows are of one part.
        rows: the rows, as their arrays count them.
        sizes: rows of each run of rows that follow each other in one part, which may be none; one number if all runs
            are of one size, and None without runs.
    """

    parts: IntArray | int
    rows: IntArray
    sizes: IntArray | int | None = None

    @property
    def firsts(self) -> IntArray:
        """The first row of each run, if none is empty."""
        if self.sizes is None:
            return self.rows
        if isinstance(self.sizes, int):
            return self.rows[:: self.sizes]
        firsts: IntArray = self.rows[np.cumsum(self.sizes) - self.sizes]
        return firsts

    @property
    def part_of_rows(self) -> IntArray | int:
        """The part of each row; one number if all rows are of one part."""
        return self.parts if isinstance(self.parts, int) or self.sizes is None else np.repeat(self.parts, self.sizes)

    def by_part(self) -> dict[int, tuple[IntArray | None, IntArray]]:
        """Return, for each part, the positions of its rows among all (None for all), and these rows."""
        parts = self.part_of_rows
        if isinstance(parts, int):
            return {parts: (None, self.rows)}
        positions = by_number(parts) or [(0, np.empty(0, np.int64))]
        return {part: (which, self.rows[which]) for part, which in positions}

    def without_empty_runs(self) -> Boxes:
        """Return the same rows in runs that are not empty."""
        if not isinstance(self.sizes, np.ndarray) or self.sizes.all():
            return self
        is_full = self.sizes > 0
        parts = self.parts if isinstance(self.parts, int) else self.parts[is_full]
        return Boxes(parts, self.rows, self.sizes[is_full])

    def in_runs(self) -> Boxes:
        """Return the same rows as runs, none of them empty, if rows that follow each other are many."""
        if self.sizes is not None:
            return self.without_empty_runs()
        is_end = np.diff(self.rows) != 1
        if len(self.rows) < MIN_RUN * (np.count_nonzero(is_end) + 1):
            return self
        if not isinstance(self.parts, int):
            is_end |= np.diff(self.parts) != 0
        ends = np.append(np.flatnonzero(is_end) + 1, len(self.rows))
        parts = self.parts if isinstance(self.parts, int) else self.parts[ends - 1]
        return Boxes(parts, self.rows, np.diff(ends, prepend=0))


def by_number(numbers: IntArray) -> list[tuple[int, IntArray]]:
    """Return the different ones of some numbers, ascending, and where each of them is, ascending."""
    order = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    return [(int(numbers[which[0]]), which) for which in np.split(order, cuts)] if len(numbers) else []


class RowGrid(NamedTuple):
    """How the rows of an array are cut into blocks. They are numbered along one axis, or along two.

    Attributes:
        lines: length of the slower axis; 1 if there is none.
        size: length of the axis along which rows are next to each other.
        across: how much of the slower axis a block has.
        along: how much of the other axis a block has.
    """

    lines: int
    size: int
    across: int
    along: int

    @classmethod
    def of(cls, layout: ArrayLayout, rows_per_block: int) -> RowGrid:
        """Return the grid of an array. A view defines its own grid and ignores ``rows_per_block``."""
        if layout.view is None:
            return cls(1, layout.n_rows, 1, rows_per_block)
        view = layout.view
        if view.is_in_cells:
            return cls(1, layout.n_rows, 1, 1)
        lines, size = (1, 1, *(view.shape[axis] for axis in view.row_axes))[-2:]
        across, along = (1, 1, *view.block)[-2:]
        return cls(lines, size, across, along)

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.lines // self.across) * -(-self.size // self.along)

    def rows_of_blocks(self) -> IntArray:
        """Return the number of rows of each block."""
        sizes = []
        for size, step in ((self.lines, self.across), (self.size, self.along)):
            lengths = np.full(-(-size // step), step, dtype=np.int64)
            lengths[-1:] = size - (len(lengths) - 1) * step
            sizes.append(lengths)
        return np.multiply.outer(*sizes).reshape(-1)


class Pieces(NamedTuple):
    """Rows as runs, each of rows that follow each other in one block.

    Attributes:
        blocks: the block of each run.
        within: its first row inside the block.
        sizes: rows of each run; None if each is a single row.
    """

    blocks: IntArray
    within: IntArray
    sizes: IntArray | None = None

    def repeated(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value of its run for each row."""
        return values if self.sizes is None else np.repeat(values, self.sizes)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.blocks) if self.sizes is None else int(self.sizes.sum())

    @property
    def starts(self) -> IntArray:
        """The number of the first row of each run among all rows."""
        return np.arange(len(self.blocks)) if self.sizes is None else np.cumsum(self.sizes) - self.sizes

    def some(self, which: npt.NDArray[np.bool_]) -> Pieces:
        """Return some of the runs."""
        return Pieces(self.blocks[which], self.within[which], None if self.sizes is None else self.sizes[which])

    def of_rows(self, firsts: IntArray) -> IntArray:
        """Return a number for each row: numbers inside a run ascend by 1 from the number of its first row."""
        if self.sizes is None:
            return firsts
        return np.repeat(firsts - self.starts, self.sizes) + np.arange(self.sizes.sum())


class BlockMap:
    """Which block each row of several arrays is in; blocks are numbered over all of them.

    Args:
        grids: of the array of each part; ``RowGrid``, or their numbers, shape ``(n_arrays, 4)``.
    """

    def __init__(self, grids: Sequence[RowGrid] | npt.NDArray[np.int64]) -> None:
        lines, self._size, self._across, self._along = self._grids = np.asarray(grids, np.int64).reshape(-1, 4).T
        self._per_line = -(-self._size // self._along)
        self._ends = np.append(lines * self._size, 0)  # rows of each array; none of an array that is not there
        self.first_row = np.concatenate([[0], np.cumsum(self._ends[:-1])])
        self.first_block = np.concatenate([[0], np.cumsum(-(-lines // self._across) * self._per_line)])
        self._has_one_axis = bool((lines == 1).all())

    @property
    def n_rows(self) -> int:
        """Rows of all arrays."""
        return int(self.first_row[-1])

    @property
    def n_blocks(self) -> int:
        """Blocks of all arrays."""
        return int(self.first_block[-1])

    def boxes(self, rows: IntArray) -> Boxes:
        """Return rows that are numbered over all arrays."""
        if len(self._size) == 1:
            return Boxes(0, rows)
        arrays = np.searchsorted(self.first_row, rows, side="right") - 1
        return Boxes(arrays, rows - self.first_row[arrays])

    def check(self, boxes: Boxes, name: str) -> None:
        """Check that rows exist (see ``check_bounds``)."""
        parts, rows = boxes.parts, boxes.rows
        if isinstance(parts, int):
            if len(rows):
                check_bounds(rows, int(self._ends[parts]), name)
            return
        firsts, ends = boxes.firsts, self._ends[parts]
        lasts = firsts if boxes.sizes is None else firsts + boxes.sizes - 1
        for run in np.flatnonzero((firsts < 0) | (lasts >= ends))[:1].tolist():
            check_bounds(np.array([firsts[run], lasts[run]]), int(ends[run]), name)

    def locate(self, boxes: Boxes) -> tuple[IntArray, IntArray]:
        """Return the block of each row, and the row inside it."""
        return self._located(boxes.part_of_rows, boxes.rows)

    def _located(self, arrays: IntArray | int, rows: IntArray) -> tuple[IntArray, IntArray]:
        if len(self._size) == 1 and self._has_one_axis:
            return np.divmod(rows, self._along[0])
        along = self._along[arrays]
        if self._has_one_axis:
            blocks, within = np.divmod(rows, along)
            return blocks + self.first_block[arrays], within
        lines, rows = np.divmod(rows, np.maximum(self._size[arrays], 1))
        blocks, within = np.divmod(rows, along)
        line_blocks, line = np.divmod(lines, self._across[arrays])
        return blocks + line_blocks * self._per_line[arrays] + self.first_block[arrays], within + line * along

    def pieces(self, boxes: Boxes) -> Pieces:
        """Return rows as runs inside of blocks. Windows are such runs: less work than to locate each row."""
        boxes = boxes.in_runs()
        if boxes.sizes is None:
            return Pieces(*self.locate(boxes))
        firsts = boxes.firsts
        arrays, lengths = boxes.parts, boxes.sizes
        along, inside = self._along[arrays], firsts
        if not self._has_one_axis:
            sizes = self._size[arrays]
            inside = inside % np.maximum(sizes, 1)
            if (inside + lengths > sizes).any():  # a run continues in another line
                return Pieces(*self.locate(boxes))
        blocks, within = self._located(arrays, firsts)
        before = inside % along  # rows of the first block before the run
        n_blocks = -(-(before + lengths) // along)
        which = np.repeat(np.arange(len(firsts)), n_blocks)
        number = np.arange(len(which)) - (np.cumsum(n_blocks) - n_blocks)[which]  # of a block in its run
        before = before[which]
        along = along if isinstance(arrays, int) else along[which]
        lengths = lengths if isinstance(lengths, int) else lengths[which]
        low = np.maximum(number * along - before, 0)
        high = np.minimum((number + 1) * along - before, lengths)
        return Pieces(blocks[which] + number, within[which] - np.where(number > 0, before, 0), high - low)

    def array_of(self, blocks: IntArray) -> IntArray:
        """Return the array that each block is of."""
        arrays: IntArray = np.searchsorted(self.first_block, blocks, side="right") - 1
        return arrays

    def different(self, blocks: IntArray) -> IntArray:
        """Return the different ones of some blocks, ascending.

        As ``numpy.unique``, which sorts: four times as slow for 4,096 rows of as many blocks.
        """
        if self.n_blocks > MARKED_PER_ROW * len(blocks):
            return np.unique(blocks)
        is_needed = np.zeros(self.n_blocks, np.bool_)
        is_needed[blocks] = True
        return np.flatnonzero(is_needed)

    def numbered(self, blocks: IntArray) -> tuple[IntArray, IntArray]:
        """Return the different ones of some blocks, ascending, and which of them each is."""
        if self.n_blocks > MARKED_PER_ROW * len(blocks):
            return np.unique(blocks, return_inverse=True)
        needed = self.different(blocks)
        numbers = np.empty(self.n_blocks, np.int64)
        numbers[needed] = np.arange(len(needed))
        return needed, numbers[blocks]

    def ranges(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return ranges of rows that a block has: the block, the array, the first row, and the row after the last."""
        if self._has_one_axis:
            return self._simple_ranges()
        numbers, arrays, low, high = [], [], [], []
        for array, grid in enumerate(map(RowGrid._make, self._grids.T.tolist())):
            steps = np.arange(0, grid.size, grid.along)
            lines = np.arange(grid.lines)
            firsts = lines[:, None] * grid.size
            per_line = len(steps)
            numbers.append(
                (self.first_block[array] + (lines // grid.across)[:, None] * per_line + np.arange(per_line)).ravel()
            )
            arrays.append(np.full(grid.lines * per_line, array))
            low.append((firsts + steps).ravel())
            high.append((firsts + np.minimum(steps + grid.along, grid.size)).ravel())
        return np.concatenate(numbers), np.concatenate(arrays), np.concatenate(low), np.concatenate(high)

    def _simple_ranges(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return all blocks of arrays with one axis of rows, the array of each, and the rows that it has."""
        numbers, per_array = np.arange(self.n_blocks), np.diff(self.first_block)
        arrays = np.repeat(np.arange(len(per_array)), per_array)
        low = (numbers - self.first_block[arrays]) * self._along[arrays]
        high = np.minimum(low + self._along[arrays], self._size[arrays])
        return numbers, arrays, low, high

    def rows_of_blocks(self) -> IntArray:
        """Return the number of rows of each block."""
        if self._has_one_axis:
            _, _, low, high = self._simple_ranges()
            return high - low
        grids = map(RowGrid._make, self._grids.T.tolist())
        return np.concatenate([np.empty(0, np.int64), *(grid.rows_of_blocks() for grid in grids)])

"""How rows are cut into blocks: which block each row is in, over the arrays of several files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayLayout
from ..types import IntArray

__all__ = ["BlockMap", "Pieces", "RowGrid"]

MIN_RUN = 16  # rows: finding runs costs more than it saves if they are shorter, on average


class RowGrid(NamedTuple):
    """How the rows of an array are cut into blocks. They are numbered along one axis, or along two.

    Attributes:
        lines: length of the slower axis; 1 if there is none.
        size: length of the axis along which rows are next to each other.
        across: how much of the slower axis a block has.
        along: how much of the other axis a block has.
        period: length of the other axis as rows are numbered; at least ``size``.
    """

    lines: int
    size: int
    across: int
    along: int
    period: int

    @classmethod
    def of(cls, layout: ArrayLayout, rows_per_block: int) -> RowGrid:
        """Return the grid of an array; of a view, its own, whatever ``rows_per_block`` is."""
        if layout.view is None:
            return cls(1, layout.n_rows, 1, rows_per_block, layout.n_rows)
        view = layout.view
        if view.cell is not None:
            return cls(1, layout.n_rows, 1, 1, layout.n_rows)
        lines, size = (1, 1, *(view.shape[axis] for axis in view.row_axes))[-2:]
        across, along = (1, 1, *view.block)[-2:]
        return cls(lines, size, across, along, view.period)

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.lines // self.across) * -(-self.size // self.along)

    def rows_of_blocks(self) -> IntArray:
        """Return the number of rows of each block."""
        sizes = []
        for size, step in ((self.lines, self.across), (self.size, self.along)):
            each = np.full(-(-size // step), step, dtype=np.int64)
            each[-1:] = size - (len(each) - 1) * step
            sizes.append(each)
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

    def of_rows(self, firsts: IntArray) -> IntArray:
        """Return a number for each row: those of a run count up from that of its first row."""
        if self.sizes is None:
            return firsts
        before = np.cumsum(self.sizes) - self.sizes
        return np.repeat(firsts - before, self.sizes) + np.arange(self.sizes.sum())


class BlockMap:
    """Which block each row of several arrays is in; rows and blocks are numbered over all of them.

    Args:
        grids: of the arrays, one after the other; ``RowGrid``, or their numbers, shape ``(n_arrays, 5)``.
        first_row: number of each array's first row, and of all rows at the end; None if arrays follow each other.
    """

    def __init__(self, grids: Sequence[RowGrid] | npt.NDArray[np.int64], first_row: IntArray | None = None) -> None:
        self._grids = np.asarray(grids, dtype=np.int64).reshape(-1, 5)
        lines, size, self._across, self._along, self._period = self._grids.T
        self._per_line = -(-size // self._along)
        self.first_row = np.concatenate([[0], np.cumsum(lines * self._period)]) if first_row is None else first_row
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

    def locate(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the block of each row, and the row inside it."""
        if len(self._period) == 1 and self._has_one_axis:
            return np.divmod(rows, self._along[0])
        arrays = np.searchsorted(self.first_row, rows, side="right") - 1
        rows = rows - self.first_row[arrays]
        along = self._along[arrays]
        if self._has_one_axis:
            blocks, within = np.divmod(rows, along)
            return blocks + self.first_block[arrays], within
        lines, rows = np.divmod(rows, np.maximum(self._period[arrays], 1))
        blocks, within = np.divmod(rows, along)
        line_blocks, line = np.divmod(lines, self._across[arrays])
        return blocks + line_blocks * self._per_line[arrays] + self.first_block[arrays], within + line * along

    def pieces(self, rows: IntArray) -> Pieces:
        """Return rows as runs inside of blocks. Windows are such runs: less work than to locate each row."""
        ends = np.append(np.flatnonzero(np.diff(rows) != 1) + 1, len(rows))
        if len(rows) < MIN_RUN * len(ends):
            return Pieces(*self.locate(rows))
        lengths = np.diff(ends, prepend=0)
        firsts = rows[ends - lengths]
        arrays = np.searchsorted(self.first_row, firsts, side="right") - 1
        along, inside = self._along[arrays], firsts - self.first_row[arrays]
        if not self._has_one_axis:
            inside %= np.maximum(self._period[arrays], 1)
        if (inside + lengths > self._grids[arrays, 1]).any():  # a run goes on in another array or line
            return Pieces(*self.locate(rows))
        blocks, within = self.locate(firsts)
        before = inside % along  # rows of the first block before the run
        n_blocks = -(-(before + lengths) // along)
        which = np.repeat(np.arange(len(firsts)), n_blocks)
        number = np.arange(len(which)) - (np.cumsum(n_blocks) - n_blocks)[which]  # of a block in its run
        before, along = before[which], along[which]
        low = np.maximum(number * along - before, 0)
        high = np.minimum((number + 1) * along - before, lengths[which])
        return Pieces(blocks[which] + number, within[which] - np.where(number > 0, before, 0), high - low)

    def ranges(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return ranges of rows that a block has: the block, the first row, and the row after the last."""
        if self._has_one_axis:
            blocks, of_arrays, begins, ends = self._simple_ranges()
            return blocks, of_arrays + begins, of_arrays + ends
        numbers, low, high = [], [], []
        for array, grid in enumerate(map(RowGrid._make, self._grids.tolist())):
            steps = np.arange(0, grid.size, grid.along)
            lines = np.arange(grid.lines)
            firsts = self.first_row[array] + lines[:, None] * grid.period
            per_line = len(steps)
            numbers.append(
                (self.first_block[array] + (lines // grid.across)[:, None] * per_line + np.arange(per_line)).ravel()
            )
            low.append((firsts + steps).ravel())
            high.append((firsts + np.minimum(steps + grid.along, grid.size)).ravel())
        return np.concatenate(numbers), np.concatenate(low), np.concatenate(high)

    def _simple_ranges(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return all blocks, the first row of each one's array, and the rows of that array that it has."""
        numbers, per_array = np.arange(self.n_blocks), np.diff(self.first_block)
        arrays = np.repeat(np.arange(len(per_array)), per_array)
        low = (numbers - self.first_block[arrays]) * self._along[arrays]
        high = np.minimum(low + self._along[arrays], self._grids[arrays, 1])
        return numbers, self.first_row[arrays], low, high

    def rows_of_blocks(self) -> IntArray:
        """Return the number of rows of each block."""
        if self._has_one_axis:
            _, _, low, high = self._simple_ranges()
            return high - low
        grids = map(RowGrid._make, self._grids.tolist())
        return np.concatenate([np.empty(0, np.int64), *(grid.rows_of_blocks() for grid in grids)])

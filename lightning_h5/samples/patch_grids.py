"""The cells of arrays along the axes of volumes: the cells of a box, and the overlap with each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayLayout
from ..lazy_torch import torch
from ..types import IntArray, cached_property

__all__ = ["CellAxis", "CellGrid", "CellPieces", "PatchRows", "cell_of"]

CELL_BYTES = 256 << 10
"""Bytes of a cell, at most, of an array without chunks."""


@dataclass(frozen=True, eq=False)
class CellAxis:
    """A stored axis of an array, with the selected indices that patches are cut from.

    Its indices are divided into runs of evenly spaced indices inside one cell.

    Attributes:
        starts: first index of each run, counted among the selected ones, and their number; shape ``(n_runs + 1,)``.
        cells: the cell of each run along the axis.
        sources: place in its cell of the first index of each run.
        steps: distance of the indices of each run in the cell.
        n_cells: number of cells along the axis.
        cut: number of this axis among the axes of patches; None if patches are not cut along it.
        is_line: each index is a separate segment; patches do not have this axis.
        is_single: one index is selected; patches do not have this axis.
    """

    starts: IntArray
    cells: IntArray
    sources: IntArray
    steps: IntArray
    n_cells: int
    cut: int | None = None
    is_line: bool = False
    is_single: bool = False

    @classmethod
    def of(cls, selection: int | IntArray, size: int, step: int, *, cut: int | None, is_line: bool) -> CellAxis:
        """Return an axis.

        Args:
            selection: the selected index, or indices, in order.
            size: length of the axis.
            step: length of a cell.
            cut: see the class, as the one that follows.
            is_line: see above.
        """
        indices = np.atleast_1d(np.asarray(selection, dtype=np.int64))
        cells, apart = indices // step, np.diff(indices)
        ends = (np.diff(cells) != 0) | (apart <= 0) | (np.diff(apart, prepend=apart[:1]) != 0)
        firsts = np.concatenate([[0], np.flatnonzero(ends) + 1]) if len(indices) else np.zeros(0, dtype=np.int64)
        starts = np.append(firsts, len(indices))
        steps = np.append(apart, 1)[firsts] if len(firsts) else firsts
        steps = np.where(np.diff(starts) > 1, steps, 1)
        return cls(
            starts.astype(np.int64),
            cells[firsts],
            indices[firsts] % step,
            steps,
            -(-size // step),
            cut,
            is_line,
            isinstance(selection, int),
        )

    @property
    def length(self) -> int:
        """Number of selected indices."""
        return int(self.starts[-1])

    @property
    def is_in_patch(self) -> bool:
        """Whether a patch has this axis."""
        return not (self.is_line or self.is_single)

    def runs(self, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
        """Return the first of the runs that have indices from ``low`` to below ``high``, and the one after the last."""
        first = np.searchsorted(self.starts, low, side="right") - 1
        return first, np.searchsorted(self.starts, high, side="left")

    def n_reads(self, low: IntArray, high: IntArray) -> IntArray:
        """Return for each cell along the axis how many of its runs intervals have."""
        first, after = self.runs(low, high)
        n_runs = len(self.cells)
        changes = np.bincount(first, minlength=n_runs + 1) - np.bincount(after, minlength=n_runs + 1)
        weights = np.cumsum(changes)[:n_runs]
        return np.bincount(self.cells, weights=weights, minlength=self.n_cells).astype(np.int64)


@dataclass(frozen=True, eq=False)
class CellGrid:
    """The cells of an array, and the axes that patches are cut along.

    Attributes:
        cell: shape of a cell.
        axes: the array's axes as they are stored.
        inner: axes of an array-valued element.
    """

    cell: tuple[int, ...]
    axes: tuple[CellAxis, ...]
    inner: tuple[int, ...] = ()

    @cached_property
    def n_cells(self) -> int:
        """Number of cells."""
        return math.prod(axis.n_cells for axis in self.axes)

    @property
    def cut_axes(self) -> list[CellAxis]:
        """The axes that are cut, in the order of the sizes of a patch."""
        return [axis for axis in self.axes if axis.cut is not None]

    @property
    def cut_lengths(self) -> tuple[int, ...]:
        """Length of each axis that is cut."""
        return tuple(axis.length for axis in self.cut_axes)

    def shape_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a patch, with these sizes along the axes that are cut."""
        axes = [axis for axis in self.axes if axis.is_in_patch]
        return (*(axis.length if axis.cut is None else sizes[axis.cut] for axis in axes), *self.inner)

    def intervals(self, starts: IntArray, sizes: Sequence[int], lines: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield for each axis the first index that patches have, and the one after their last.

        Args:
            starts: where patches start along the axes that are cut, shape ``(n, n_cut)``.
            sizes: their size along these.
            lines: number of each patch's segment along the axis of segments.
        """
        for axis in self.axes:
            if axis.cut is not None:
                low = starts[:, axis.cut]
                yield low, np.minimum(low + sizes[axis.cut], axis.length)
            elif axis.is_line:
                yield lines, lines + 1
            else:
                yield np.zeros_like(lines), np.full_like(lines, axis.length)

    def pieces(self, starts: IntArray, sizes: Sequence[int], lines: IntArray, samples: IntArray) -> CellPieces:
        """Return the cells that patches have; ``samples`` are their numbers, see ``intervals`` for the others."""
        bounds = list(self.intervals(starts, sizes, lines))
        runs = [axis.runs(low, high) for axis, (low, high) in zip(self.axes, bounds, strict=True)]
        counts = np.stack([after - first for first, after in runs])
        n_pieces = counts.prod(axis=0)
        owners = np.repeat(np.arange(len(lines)), n_pieces)  # the patch of each piece
        rest = np.arange(len(owners)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
        cells, stride = np.zeros(len(owners), dtype=np.int64), 1
        piece_runs: list[IntArray] = []
        for number in reversed(range(len(self.axes))):
            rest, at = np.divmod(rest, counts[number][owners])
            piece_runs.insert(0, runs[number][0][owners] + at)
            cells += self.axes[number].cells[piece_runs[0]] * stride
            stride *= self.axes[number].n_cells
        piece_bounds = tuple((low[owners], high[owners]) for low, high in bounds)
        return CellPieces(self, cells, samples[owners], tuple(piece_runs), piece_bounds)

    def n_reads(self, starts: Sequence[IntArray], sizes: Sequence[int], lines: IntArray) -> IntArray:
        """Return how often all patches of a grid read each cell.

        Args:
            starts: where patches start along each axis that is cut.
            sizes: their size along these.
            lines: segments that have such patches.
        """
        n_reads = np.ones(1, dtype=np.int64)
        for axis in self.axes:
            if axis.cut is not None:
                low = starts[axis.cut]
                high = np.minimum(low + sizes[axis.cut], axis.length)
            else:
                low, high = (lines, lines + 1) if axis.is_line else (np.zeros(1, np.int64), np.array([axis.length]))
            n_reads = np.multiply.outer(n_reads, axis.n_reads(low, high)).reshape(-1)
        n_lines = 1 if any(axis.is_line for axis in self.axes) else len(lines)
        cuts = {axis.cut for axis in self.axes}
        return n_reads * n_lines * math.prod(len(low) for cut, low in enumerate(starts) if cut not in cuts)

    def digest(self) -> bytes:
        """Return bytes that identify this grid among others of the same array."""
        axes = [(axis.cut, axis.is_line, axis.starts.tobytes(), axis.sources.tobytes()) for axis in self.axes]
        return repr((self.cell, axes)).encode()


class CellPieces(NamedTuple):
    """Parts of cells that patches are made of.

    Attributes:
        grid: of the cells.
        cells: the cell of each piece.
        samples: the sample that it belongs to.
        runs: its run along each axis.
        bounds: along each axis, first index of the patch, and the one after its last.
    """

    grid: CellGrid
    cells: IntArray
    samples: IntArray
    runs: tuple[IntArray, ...]
    bounds: tuple[tuple[IntArray, IntArray], ...]

    def copy(self, rows: npt.NDArray[Any], places: IntArray, out: npt.NDArray[Any], numbers: IntArray) -> None:
        """Copy pieces to where they belong.

        Args:
            rows: cells, as flat values, shape ``(n_rows, n_values)``.
            places: among these, of the cell of each piece that is copied.
            out: the patches.
            numbers: of these pieces.
        """
        grid = self.grid
        cells = rows[:, : math.prod(grid.cell)].reshape(len(rows), *grid.cell, *grid.inner)
        sources: list[list[Any]] = [places.tolist()]
        targets: list[list[Any]] = [self.samples[numbers].tolist()]
        for axis, runs, (low, high) in zip(grid.axes, self.runs, self.bounds, strict=True):
            run, low, high = runs[numbers], low[numbers], high[numbers]
            first = np.maximum(low, axis.starts[run])
            n, steps = np.minimum(high, axis.starts[run + 1]) - first, axis.steps[run]
            source = axis.sources[run] + (first - axis.starts[run]) * steps
            if not axis.is_in_patch:
                sources.append(source.tolist())
                continue
            ends = source + (n - 1) * steps + 1
            sources.append(list(map(slice, source.tolist(), ends.tolist(), steps.tolist())))
            targets.append(list(map(slice, (first - low).tolist(), (first - low + n).tolist())))
        for target, part in zip(zip(*targets, strict=True), zip(*sources, strict=True), strict=True):
            out[target] = cells[part]

    def clear_beyond(self, column: torch.Tensor) -> None:
        """Set patches to zero beyond the edges of their volume."""
        bounds = [bounds for axis, bounds in zip(self.grid.axes, self.bounds, strict=True) if axis.is_in_patch]
        for axis, (low, high) in enumerate(bounds, 1):
            short = np.flatnonzero(high - low < column.shape[axis])
            for sample, n in dict(zip(self.samples[short].tolist(), (high - low)[short].tolist(), strict=True)).items():
                column[(sample, *[slice(None)] * (axis - 1), slice(n, None))] = 0


@dataclass(frozen=True, eq=False)
class PatchRows:
    """What the patches of a field have of its cells.

    Attributes:
        pieces: for each kind of volume.
        shape: of all patches together.
        is_padded: whether patches may reach beyond their volumes.
    """

    pieces: Sequence[CellPieces]
    shape: tuple[int, ...]
    is_padded: bool

    def copy_to(
        self, out: npt.NDArray[Any], rows: npt.NDArray[Any], places: IntArray, positions: IntArray | None = None
    ) -> None:
        """Copy cells to patches (see ``readers.CopyRows``)."""
        start = 0
        with np.errstate(all="ignore"):  # numbers too large for another dtype become infinite, as in torch
            for pieces in self.pieces:
                end = start + len(pieces.cells)
                if positions is None:
                    pieces.copy(rows, places[start:end], out, np.arange(end - start))
                else:
                    of_kind = slice(*np.searchsorted(positions, [start, end]))
                    pieces.copy(rows, places[of_kind], out, positions[of_kind] - start)
                start = end

    def finished(self, column: torch.Tensor) -> torch.Tensor:
        """Return patches with zeros beyond the edges of their volumes."""
        for pieces in self.pieces if self.is_padded else ():
            pieces.clear_beyond(column)
        return column


def cell_of(array: ArrayLayout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of an array's cells: its chunk shape, or about the shape of a patch without chunks.

    Args:
        array: the array as it is stored.
        sizes: size of a patch along each axis.
    """
    if array.chunks is not None:
        return array.chunks
    shape = (array.n_rows, *array.axes)
    cell = [max(1, min(size, n)) for size, n in zip(sizes, shape, strict=True)]
    while math.prod(cell) * array.stored.itemsize > CELL_BYTES and max(cell) > 1:
        axis = next(axis for axis, n in enumerate(cell) if n > 1)  # neighbors in the file stay in one cell
        cell[axis] = -(-cell[axis] // 2)
    return tuple(cell)

"""From the arrays of volumes to their cells, and to the patches that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, kind_of
from ..options import PatchOptions
from ..types import IntArray
from .patch_grids import CellAxis, CellGrid, cell_of
from .patches import Patches, Volume
from .segment_fields import SegmentField
from .segments import Segments, Steps

__all__ = ["VolumeTable"]


class VolumeTable:
    """Collects volumes, a part of a file with one or several each.

    Args:
        fields: how arrays are to be seen.
        options: how patches are cut.
    """

    def __init__(self, fields: Sequence[SegmentField], options: PatchOptions) -> None:
        if not any(size is not None for field in fields for size in field.patch or ()):
            raise H5ValueError(f"patch.shape={options.shape!r} cuts none of the fields. Name one with sizes.")
        self._fields, self._options = fields, options
        self._grids: dict[bytes, tuple[CellGrid | None, ...]] = {}  # of volumes of one shape, with the same cells
        self._of_parts: list[bytes] = []
        self._first: tuple[ArrayLayout, ...] = ()
        self._n_values: list[int] = [0] * len(fields)

    def add(self, arrays: Sequence[ArrayLayout]) -> None:
        """Add the arrays of a part.

        Raises:
            H5ValueError: patches cannot be cut out of them.
        """
        grids = tuple(
            None if field.patch is None else self._grid(field, array, field.patch)
            for field, array in zip(self._fields, arrays, strict=True)
        )
        key = b"".join(b"-" if grid is None else grid.digest() for grid in grids)
        if key not in self._grids:
            self._check_lengths(grids, arrays)
            self._first = self._first or tuple(arrays)
            self._check_shapes(grids, arrays)
            self._grids[key] = grids
        self._of_parts.append(key)
        for at, grid in enumerate(grids):
            if grid is not None:
                self._n_values[at] = max(self._n_values[at], math.prod(grid.cell))

    def _grid(self, field: SegmentField, array: ArrayLayout, patch: tuple[int | None, ...]) -> CellGrid:
        """Return the cells of an array."""
        if kind_of(array.dtype) != "number":
            raise H5ValueError(f"{array.key!r} in {array.path!r} holds text, and patches are cut out of numbers.")
        shape = (array.n_rows, *array.axes)
        line = None if field.axis is None else field.axis % len(shape)
        indices = field.indices(array)
        volume_axes = {
            axis: len(index) for axis, index in enumerate(indices) if axis != line and not isinstance(index, int)
        }
        if len(volume_axes) != len(patch):
            lengths = tuple(volume_axes.values())
            raise H5ValueError(
                f"patch.shape has {len(patch)} axes for {field.name!r}, and a volume of {array.key!r} in "
                f"{array.path!r} has the shape {lengths}. Pass a size for each of its axes, and None for axes that are "
                "not cut; a mapping from fields to shapes if these differ."
            )
        sizes = dict(zip(volume_axes, patch, strict=True))
        cell = cell_of(
            array, [shape[axis] if (size := sizes.get(axis, 1)) is None else size for axis in range(len(shape))]
        )
        cuts = {axis: cut for cut, axis in enumerate(axis for axis, size in sizes.items() if size is not None)}
        axes = tuple(
            CellAxis.of(index, shape[axis], cell[axis], cut=cuts.get(axis), is_line=axis == line)
            for axis, index in enumerate(indices)
        )
        return CellGrid(cell, axes, array.row_shape[len(array.axes) :])

    def _check_lengths(self, grids: Sequence[CellGrid | None], arrays: Sequence[ArrayLayout]) -> None:
        lengths_by_key = {
            array.key: grid.cut_lengths
            for grid, array in zip(grids, arrays, strict=True)
            if grid is not None and grid.cut_axes
        }
        if len(set(lengths_by_key.values())) > 1:
            text = ", ".join(f"{key!r} has {lengths}" for key, lengths in lengths_by_key.items())
            raise H5ValueError(
                f"the fields of a sample are cut at the same place, and volumes of {arrays[0].path!r} differ along the "
                f"axes that patches are cut along: {text}. Load fields of one size, or select a part of the larger."
            )

    def _check_shapes(self, grids: Sequence[CellGrid | None], arrays: Sequence[ArrayLayout]) -> None:
        """Check that all patches of a field have one shape."""
        first = next(iter(self._grids.values()), tuple(grids))
        for before, grid, a, b in zip(first, grids, self._first, arrays, strict=True):
            if before is None or grid is None:
                continue
            left, right = before.shape_of(self._options.sizes), grid.shape_of(self._options.sizes)
            if left != right:
                raise H5ValueError(
                    f"patches of {a.key!r} have the shape {left} in {a.path!r}, but {b.key!r} has patches of {right} "
                    f"in {b.path!r}, since patch.shape leaves an axis whole. Pass a size for it."
                )

    def in_cells(self, arrays: Sequence[tuple[ArrayLayout, ...]]) -> tuple[tuple[ArrayLayout, ...], ...]:
        """Return the arrays of all parts with cells as rows; arrays without patches are unchanged."""
        return tuple(
            tuple(
                array if grid is None else array.in_cells(grid.cell, n_values)
                for array, grid, n_values in zip(of_part, self._grids[key], self._n_values, strict=True)
            )
            for of_part, key in zip(arrays, self._of_parts, strict=True)
        )

    def indexer(self, starts: IntArray, n_lines: IntArray, arrays: Sequence[ArrayLayout], seed: int) -> Patches:
        """Return the patches of all volumes.

        Args:
            starts: first row of each part, and the number of rows at the end.
            n_lines: segments of each part.
            arrays: of the first part, as cells.
            seed: of random patches.

        Raises:
            H5ValueError: there is none.
        """
        numbers = {key: number for number, key in enumerate(self._grids)}
        row_bytes = tuple(array.row_bytes for array in arrays)
        volumes = []
        for grids in self._grids.values():
            lengths = next(grid.cut_lengths for grid in grids if grid is not None and grid.cut_axes)
            volumes.append(Volume(lengths, grids, row_bytes, self._options))
        firsts, n_cells = np.repeat(starts[:-1], n_lines), np.repeat(np.diff(starts), n_lines)
        before = np.repeat(np.cumsum(n_lines) - n_lines, n_lines)
        segments = Segments(
            (Steps(firsts, n_cells),), tuple(None if field.patch is None else 0 for field in self._fields)
        )
        kinds = np.repeat(np.array([numbers[key] for key in self._of_parts], dtype=np.int64), n_lines)
        patches = Patches(segments, tuple(volumes), kinds, np.arange(len(firsts)) - before, seed)
        if not len(patches):
            largest = max(volume.lengths for volume in volumes)
            raise H5ValueError(
                f"no volume is as large as a patch: patches have the size {self._options.sizes}, and the largest of "
                f"{len(segments):,} volumes {largest}. Cut smaller patches, or pad them (patch.border='pad')."
            )
        return patches

"""How fields are seen once their arrays are described: which are scalars, and which values columns have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..catalog import PartNames, StoredParts
from ..errors import H5ValueError, listing
from ..hdf5 import ArrayLayout
from ..readers import Image
from .cut_values import CutValues
from .part_steps import n_segments_of
from .segment_fields import SegmentField

__all__ = ["SeenFields", "arrays_along_axis"]


@dataclass(frozen=True, eq=False)
class SeenFields:
    """Fields of parts with described arrays.

    Attributes:
        fields: as the user says.
        stored: the parts.
        names: of parts and arrays.
        side_columns: the columns of ``stored`` that a side table has.
        values: cut parts into segments.
    """

    fields: Sequence[SegmentField]
    stored: StoredParts
    names: PartNames
    side_columns: Collection[int]
    values: CutValues

    @property
    def has_axis(self) -> bool:
        """Whether segments are indices of an axis."""
        return any(field.axis is not None for field in self.fields)

    @property
    def has_patches(self) -> bool:
        """Whether samples are patches."""
        return any(field.patch is not None for field in self.fields)

    def seen(self) -> list[SegmentField]:
        """Return how the arrays are seen.

        Raises:
            H5ValueError: a column has neither a value for each segment nor for each step, or no field has steps.
        """
        arrays = [self.stored.one(0, column) for column in range(len(self.fields))]
        fields = [
            _as_described(field, array) if array.value is None else self._with_values(column)
            for column, (field, array) in enumerate(zip(self.fields, arrays, strict=True))
        ]
        cells = self.names.cells
        if cells and all(field.step_axis is None for field in fields):  # cells of one value each
            fields = [
                replace(field, step_axis=0) if field.request.key in cells and array.dtype.kind != "O" else field
                for field, array in zip(fields, arrays, strict=True)
            ]
        if any(field.axis is not None or field.step_axis is not None or field.patch is not None for field in fields):
            return fields
        return self._of_one_step(fields, arrays)

    def _of_one_step(self, fields: Sequence[SegmentField], arrays: Sequence[ArrayLayout]) -> list[SegmentField]:
        """Return the fields if no array has steps: a segment is then one step, and a sample has its values."""
        is_single = [array.value is not None or field.is_whole for field, array in zip(fields, arrays, strict=True)]
        if self.names.pattern is None or not any(is_single):
            raise H5ValueError(
                f"none of the fields {listing(field.name for field in fields)} has steps: they are scalars or "
                "attributes. Add one."
            )
        return [
            replace(field, step_axis=0, is_single=True) if single else field
            for field, single in zip(fields, is_single, strict=True)
        ]

    def _with_values(self, column: int) -> SegmentField:
        """Return how a scalar, an attribute or a column is seen: with a value for each part, segment or step."""
        field = replace(self.fields[column], axis=None, step_axis=None)
        if column not in self.side_columns:
            return field
        field = replace(field, request=replace(field.request, codec=None))
        sizes = self.stored.table.n_rows[:, column]
        if (sizes == 1).all():
            return field
        if self.has_axis:
            columns = {at: at for at in range(len(self.fields)) if at not in self.side_columns}
            axis_field, axis, arrays = arrays_along_axis(self.fields, columns, self.stored)
            if sizes.tolist() == [axis_field.length(array, axis) for array in arrays]:
                return replace(field, axis=0)
        if self.values.options.are_ranges and np.array_equal(
            sizes, n_segments_of(self.stored, self.fields, self.values)
        ):
            return field
        if self.has_patches:
            part = int(np.argmax(sizes != 1))
            raise H5ValueError(
                f"{field.request.key!r} has {sizes[part]} values in {self.values.paths[part]!r}, as the array "
                "that table.on names, and patches are of volumes. Name an array with one value for each volume."
            )
        return replace(field, step_axis=0)


def arrays_along_axis(
    fields: Sequence[SegmentField], columns: Mapping[int, int], stored: StoredParts
) -> tuple[SegmentField, int, list[ArrayLayout]]:
    """Return the first field with segments along an axis, this axis, and the array that each part has of the field.

    Args:
        fields: how arrays are seen.
        columns: for the number of each field with arrays its column in ``stored``.
        stored: the parts.

    Raises:
        H5ValueError: there is no such field.
    """
    for at, column in columns.items():
        field = fields[at]
        if field.axis is not None and field.step_axis is not None:
            arrays = [stored.one(part, column) for part in range(len(stored.files))]
            for array in arrays:
                field.check_axes(array)
            return field, field.axis, arrays
    raise H5ValueError(
        "table.on names a column of slices, such as 'bucket0$3,:3,:600', but no field has segments along an "
        "axis. Pass segments={'axis': 0, 'step_axis': 2}, with the axis of the index and the axis of the steps."
    )


def _as_described(field: SegmentField, array: ArrayLayout) -> SegmentField:
    """Return how a field is seen. A row is all of an array that is a scalar with bytes, or the bytes of one image."""
    is_image = isinstance(field.request.codec, Image) and array.dtype == np.uint8 and not array.axes
    if array.is_scalar or (is_image and field.axis is None):
        return replace(field, axis=None, step_axis=None, is_whole=True)
    return field

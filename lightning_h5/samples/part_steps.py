"""The steps that parts of files have of each field, and the segments of parts that no values cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..catalog import Compatibility, ListedParts, PartLayouts, StoredParts
from ..errors import H5ValueError, listing
from ..hdf5 import ArrayLayout, check_no_overlap
from ..types import IntArray, cached_property
from .cut_values import CutValues
from .patch_tables import VolumeTable
from .row_table import starts_of
from .seen_parts import DescribedParts
from .segment_cuts import steps_of
from .segment_fields import SegmentField
from .segments import Segments, Steps

__all__ = ["PartSteps", "cells_of_parts", "n_segments_of", "steps_of_parts"]


@dataclass(frozen=True, eq=False)
class PartSteps:
    """The steps that parts have of each field, as rows of arrays.

    Attributes:
        fields: how arrays are seen.
        layouts: the arrays of all parts, with steps as rows.
        n_lines: segments of each part along an axis; 1 if there is none.
        lengths: steps of each segment of a part, for each field, shape ``(n_parts, n_fields)``; of volumes without
            fields.
        step_places: for each field the axis of a sample that its steps are along.
        is_shared: for each field whether all segments of a part have the same steps of it; empty if none is.
    """

    fields: tuple[SegmentField, ...]
    layouts: PartLayouts
    n_lines: IntArray
    lengths: IntArray
    step_places: tuple[int, ...]
    is_shared: tuple[bool, ...] = ()

    @property
    def has_steps(self) -> tuple[bool, ...]:
        """For each field whether it has steps."""
        return tuple(field.step_axis is not None for field in self.fields)

    @cached_property
    def starts(self) -> IntArray:
        """First row of each part, and the number of rows at the end."""
        return starts_of(self.layouts, self.has_steps, self.n_lines * self.lengths.max(axis=1, initial=0))

    @property
    def first_segments(self) -> IntArray | None:
        """The number of each part's first segment, and of all segments at the end; None if each part is one."""
        before = np.concatenate([[0], np.cumsum(self.n_lines)]).astype(np.int64)
        return before if before[-1] > len(self.n_lines) else None

    def segments(self, spans: IntArray | None, name_of_part: Callable[[int], str]) -> Segments:
        """Return the segments: parts, or indices of an axis.

        Args:
            spans: first step of each segment, and the step after its last; None for all steps.
            name_of_part: returns the name of a part from its number.

        Raises:
            H5ValueError: there are spans, and fields differ in their steps.
        """
        lines = self.n_lines
        inside: IntArray = np.arange(int(lines.sum())) - np.repeat(np.cumsum(lines) - lines, lines)
        periods = np.repeat(np.diff(self.starts) // lines, lines)
        firsts = np.repeat(self.starts[:-1], lines) + inside * periods
        if spans is not None:
            firsts = firsts + spans[:, 0]
            n_steps = self.lengths[:, np.flatnonzero(self.has_steps)]
            if (differs := n_steps.min(axis=1) < n_steps.max(axis=1)).any():
                part = int(differs.argmax())
                raise H5ValueError(
                    f"fields have {listing(n_steps[part].tolist())} steps in {name_of_part(part)!r}, and slices "
                    "of a table name the steps of all. Load fields with equally many."
                )
        numbers, steps, kinds = dict[tuple[int, bytes], int](), list[Steps](), list[int | None]()
        for number, field in enumerate(self.fields):
            if field.step_axis is None:
                kinds.append(None)
                continue
            lengths = np.repeat(self.lengths[:, number], lines) if spans is None else spans[:, 1] - spans[:, 0]
            kind = numbers.setdefault((field.rate, lengths.tobytes()), len(steps))
            if kind == len(steps):
                steps.append(replace(steps_of(firsts, lengths, self.starts), rate=field.rate))
            kinds.append(kind)
        return Segments(tuple(steps), tuple(kinds))


def steps_of_parts(
    stored: StoredParts, fields: Sequence[SegmentField], values: CutValues, *, has_axis: bool
) -> PartSteps:
    """Return the steps of all parts, from one part of each kind.

    Args:
        stored: the parts.
        fields: how arrays are seen.
        values: cut parts into segments.
        has_axis: segments are indices of an axis.

    Raises:
        H5ValueError: arrays do not belong together.
    """
    n_fields, is_cut = len(fields), bool(values.options.cut_keys)
    fixed = [at for at, field in enumerate(fields) if has_axis or is_cut or not field.is_as_stored]
    n_segments = n_segments_of(stored, fields, values) if values.options.are_ranges else None
    kinds, firsts = stored.kinds(n_fields, fixed, n_segments)
    compatibility = Compatibility([field.request for field in fields], of_one_row=False)
    periods, n_lines, n_steps = list[int](), list[int](), list[list[int]]()
    for part in firsts.tolist():
        arrays = tuple(stored.one(part, field) for field in range(n_fields))
        compatibility.check(_decoded(fields, arrays))
        lines, steps = _axis_lengths(fields, arrays)
        _check_steps(fields, arrays, steps, is_cut=is_cut)
        periods.append(_longest(steps))
        n_lines.append(lines)
        n_steps.append([n or 0 for n in steps])
    lengths = np.array(n_steps)[kinds]
    for at, field in enumerate(fields):
        if field.is_as_stored:
            lengths[:, at] = stored.table.n_rows[:, at]
    n_values = [None if n_segments is None else n_segments[part] for part in firsts.tolist()]
    layouts = DescribedParts(stored, tuple(range(n_fields)), tuple(fields), kinds, firsts, periods, n_values)
    layouts.check_places()
    return PartSteps(
        tuple(fields),
        layouts,
        np.array(n_lines)[kinds],
        lengths,
        tuple(field.step_place(stored.one(0, at)) for at, field in enumerate(fields)),
        tuple(has_axis and field.axis is None and field.step_axis is not None for field in fields),
    )


def cells_of_parts(stored: StoredParts, fields: Sequence[SegmentField], volumes: VolumeTable) -> PartSteps:
    """Return the cells of the volumes of all parts, as their steps.

    Args:
        stored: the parts.
        fields: how arrays are seen.
        volumes: gets the arrays of each part.

    Raises:
        H5ValueError: arrays do not belong together.
    """
    compatibility = Compatibility([field.request for field in fields], of_one_row=False)
    parts, n_lines = list[tuple[ArrayLayout, ...]](), list[int]()
    for part in range(len(stored.files)):
        arrays = tuple(stored.one(part, field) for field in range(len(fields)))
        compatibility.check(_decoded(fields, arrays))
        check_no_overlap(arrays)
        lines, steps = _axis_lengths(fields, arrays)
        volumes.add(arrays)
        n_lines.append(lines)
        parts.append(
            tuple(
                field.seen(array, _longest(steps), None) if field.patch is None else field.request.decoded(array)
                for field, array in zip(fields, arrays, strict=True)
            )
        )
    no_lengths = np.zeros((len(parts), 0), dtype=np.int64)
    layouts = ListedParts(volumes.in_cells(parts))
    return PartSteps(tuple(fields), layouts, np.array(n_lines, dtype=np.int64), no_lengths, (0,) * len(fields))


def n_segments_of(stored: StoredParts, fields: Sequence[SegmentField], values: CutValues) -> list[int]:
    """Return into how many segments values cut the steps of each part.

    Args:
        stored: the parts.
        fields: how arrays are seen; steps are counted in the first field that has some.
        values: cut parts into segments.
    """
    column, axis = next((at, field.step_axis) for at, field in enumerate(fields) if field.step_axis is not None)
    n_segments = []
    for part in range(len(stored.files)):
        array = stored.one(part, column)
        fields[column].check_axes(array)
        n_segments.append(len(values.ranges(part, fields[column].length(array, axis))[0]))
    return n_segments


def _decoded(fields: Sequence[SegmentField], arrays: Sequence[ArrayLayout]) -> tuple[ArrayLayout, ...]:
    return tuple(field.request.decoded(array) for field, array in zip(fields, arrays, strict=True))


def _axis_lengths(fields: Sequence[SegmentField], arrays: Sequence[ArrayLayout]) -> tuple[int, list[int | None]]:
    """Return the segments of a part along an axis (1 without an axis), and the steps of each array (None without).

    Raises:
        H5ValueError: an axis is missing, or arrays differ in their segments.
    """
    pairs = list(zip(fields, arrays, strict=True))
    for field, array in pairs:
        field.check_axes(array)
    lines = [None if field.axis is None else field.length(array, field.axis) for field, array in pairs]
    n_lines = {n for n in lines if n is not None} or {1}
    if len(n_lines) > 1:
        raise H5ValueError(
            f"segments.axis counts the segments of {arrays[0].path!r}, and arrays differ: {_counts(arrays, lines)}. "
            "Name the axis of each field (a mapping), or None for a field without it."
        )
    steps = [None if field.step_axis is None else field.length(array, field.step_axis) for field, array in pairs]
    return n_lines.pop(), steps


def _longest(steps: Sequence[int | None]) -> int:
    """Return the steps of the longest array of a part."""
    return max(n for n in steps if n is not None)


def _check_steps(
    fields: Sequence[SegmentField], arrays: Sequence[ArrayLayout], steps: Sequence[int | None], *, is_cut: bool
) -> None:
    """Check that arrays of a part have steps for the same segments.

    Args:
        fields: how arrays are seen.
        arrays: of a part.
        steps: of each array.
        is_cut: values cut the steps into segments.
    """
    if any(field.axis is not None for field in fields):
        period = _longest(steps)
        for field, array, n in zip(fields, arrays, steps, strict=True):
            if field.axis is None and n not in (None, period):
                raise H5ValueError(
                    f"{array.key!r} has {n} steps for all segments of {array.path!r}, and these have {period}. Load "
                    "fields with as many steps, or with an axis of segments."
                )
    elif is_cut and len({n for n in steps if n is not None}) > 1:
        raise H5ValueError(
            f"rows of {arrays[0].path!r} are cut into segments, and arrays differ: {_counts(arrays, steps)} steps. "
            "Load fields with one value a step."
        )


def _counts(arrays: Sequence[ArrayLayout], counts: Sequence[int | None]) -> str:
    return ", ".join(f"{array.key!r} has {n}" for array, n in zip(arrays, counts, strict=True) if n is not None)

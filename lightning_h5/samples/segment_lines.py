"""Join lines of a side table with segments: by the name of a part, by an array, or by slices that lines name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..catalog import OR_DROP, PartNames, SideTable, StoredParts, values_of
from ..errors import H5ValueError, listing
from ..hdf5 import ArrayLayout, OpenOptions
from ..types import IntArray
from .segment_fields import SegmentField

__all__ = ["SegmentLines", "lines_of_parts", "lines_of_slices"]

SPAN = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True, eq=False)
class SegmentLines:
    """The lines of a side table that belong to segments; -1 for none.

    Attributes:
        of_parts: for each part one line, or one for each of its segments or steps.
        spans: first step of each segment, and the step after its last, shape ``(n_segments, 2)``; None for all steps.
    """

    of_parts: Sequence[IntArray]
    spans: IntArray | None = None


def lines_of_parts(
    side: SideTable,
    stored: StoredParts,
    names: PartNames,
    options: OpenOptions,
    aliases: Mapping[tuple[int, str], str],
) -> SegmentLines:
    """Return the lines of parts, by the names of parts, or by the values of an array or attribute.

    Args:
        side: the table.
        stored: the arrays of all parts. If lines are compared with an array, it is the last one.
        names: of parts and arrays.
        options: how files are opened.
        aliases: names of parts by their other names (see ``Parts``).

    Raises:
        H5ValueError: a part has no line, or the values to compare are text in some files and numbers in others.
    """
    n_parts = len(stored.files)
    if side.compared_with is None:
        raise H5ValueError(
            f"table={side.path!r} was given without table.on, and samples are made of segments, which are not numbered "
            "like lines. Name a column, and what it is compared with: {column: '@name'} (of a group or array), "
            "{column: '@stem'} (of a file), {column: '@attribute'}, or an array."
        )

    def part_name(part: int) -> str:
        path = stored.paths[stored.files[part]]
        name = names.part(stored.stars[part])
        return f"{name!r} in {path!r}" if name else repr(path)

    if side.field is None:
        alias_with_line = dict[tuple[int, str], str]()  # the first, by the name of a part
        for (file, alias), name in aliases.items():
            if side.has_line(side.key_of(stored.paths[file], alias)):
                alias_with_line.setdefault((file, name), alias)
        of_parts = []
        for file, star in zip(stored.files.tolist(), stored.stars, strict=True):
            name = names.part(star) or stored.paths[file]
            key = side.key_of(stored.paths[file], name)
            if (file, name) in alias_with_line and not side.has_line(key):
                key = side.key_of(stored.paths[file], alias_with_line[file, name])
            of_parts.append(key)
        keys, sizes = np.array([*of_parts, None], dtype=object)[:-1], np.ones(n_parts, dtype=np.int64)
    else:
        at = len(stored.names.keys) - 1
        values = [values_of(stored.one(part, at), options) for part in range(n_parts)]
        if len(kinds := {array.dtype.kind == "O" for array in values}) > 1:
            raise H5ValueError(f"{side.field!r}, which table.on names, is text in some files and numbers in others.")
        keys, sizes = np.concatenate(values), np.array([len(array) for array in values], dtype=np.int64)
        keys = keys.astype(object) if True in kinds else keys
    ends = np.cumsum(sizes)
    lines = side.lines_of(
        keys, lambda at: f"{side.compared_with} of {part_name(int(np.searchsorted(ends, at, side='right')))}"
    )
    return SegmentLines(np.split(lines, ends[:-1]))


def lines_of_slices(
    side: SideTable, stored: StoredParts, names: PartNames, field: SegmentField, arrays: Sequence[ArrayLayout]
) -> SegmentLines:
    """Return the lines of segments along an axis, from slices that lines name, such as ``bucket0$3,:3,:600``.

    The index ``3`` is the segment's number in the array ``bucket0``. The slice of the step axis, ``:600``, has the
    steps that are not padding.

    Args:
        side: the table.
        stored: the parts.
        names: of parts and arrays.
        field: the axes of arrays.
        arrays: one of each part, with segments along an axis.

    Raises:
        H5ValueError: a slice exceeds its array, names a segment again, or cuts another axis; or a segment has no line.
    """
    slices = _Slices(side)
    of_parts, spans = [], []
    for part, array in enumerate(arrays):
        name = names.part(stored.stars[part]).rpartition("/")[2]
        lines, span = slices.of_array(name, array, field)
        of_parts.append(lines)
        spans.append(span)
    side.note_used(np.concatenate(of_parts))
    return SegmentLines(of_parts, np.concatenate(spans))


class _Slices:
    """Lines of a table that name slices of arrays.

    Args:
        side: the table.
    """

    def __init__(self, side: SideTable) -> None:
        self._side = side
        self._by_array: dict[str, list[tuple[int, list[str]]]] = {}
        for line, text in enumerate(side.slices):
            name, _, inside = text.partition("$")
            self._by_array.setdefault(name, []).append((line, inside.replace(" ", "").split(",")))

    def of_array(self, name: str, array: ArrayLayout, field: SegmentField) -> tuple[IntArray, IntArray]:
        """Return the line, and the first and last step, of each segment of an array."""
        shape = (array.n_rows, *array.axes)
        axis, step_axis = (axis % len(shape) for axis in (field.axis or 0, field.step_axis or 0))
        n_segments = shape[axis]
        lines = np.full(n_segments, -1, dtype=np.int64)
        spans = np.tile(np.array([0, shape[step_axis]], dtype=np.int64), (n_segments, 1))
        for line, parts in self._by_array.get(name, []):
            text = f"{name}${','.join(parts)}"
            if len(parts) > len(shape) or len(parts) <= axis or not parts[axis].isdigit():
                raise self._error(text, array, f"has the shape {shape}; its axis {axis} needs an index")
            if (index := int(parts[axis])) >= n_segments:
                raise self._error(text, array, f"has {n_segments} segments along axis {axis}")
            if lines[index] >= 0:
                raise self._error(text, array, f"is named twice at index {index}; leave one line for each")
            for at, part in enumerate(parts):
                if at == axis:
                    continue
                if (match := SPAN.fullmatch(part)) is None:
                    raise self._error(text, array, f"needs a slice such as ':{shape[at]}' of axis {at}")
                first, stop = int(match[1] or 0), int(match[2] or shape[at])
                if not 0 <= first < stop <= shape[at]:
                    raise self._error(text, array, f"has the shape {shape}")
                if at == step_axis:
                    spans[index] = first, stop
                elif (first, stop) != (0, shape[at]):
                    raise self._error(text, array, f"is taken whole along axis {at}; pass select for a part of it")
            lines[index] = line
        if self._side.options.missing == "error" and (lines < 0).any():
            indices = np.flatnonzero(lines < 0).tolist()
            raise H5ValueError(
                f"{self._side.path!r} has no line for {len(indices):,} of {n_segments:,} segments of {array.key!r} in "
                f"{array.path!r}, such as index {listing(map(str, indices), 3)}. {OR_DROP}"
            )
        return lines, spans

    def _error(self, text: str, array: ArrayLayout, problem: str) -> H5ValueError:
        return H5ValueError(
            f"{self._side.path!r} names {text!r} in {self._side.column_on!r}, and {array.key!r} in {array.path!r} "
            f"{problem}."
        )

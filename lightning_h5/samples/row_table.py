"""The rows of files as one table: the arrays of each field, and the rows of each sample."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import PartLayouts, PartNames
from ..hdf5 import ArrayLayout, ChangeGuard, kind_of
from ..readers import Boxes
from ..types import IntArray, cached_property
from .assemblers import Assembler
from .indexer import Indexer
from .sample_rows import FieldRows

__all__ = ["HELD_BYTES", "RUN_BYTES", "Parts", "RowTable", "lines_of", "starts_of"]

HELD_BYTES = 16 << 20
"""Bytes over all files up to which each process reads an array as a whole, once."""

RUN_BYTES = 1 << 20
"""Bytes of a block of an array without chunks: long enough for sequential reads, and short enough to shuffle."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of files with separate arrays: groups, or arrays that are one segment each.

    Attributes:
        files: number of each part's file, shape ``(n_parts,)``.
        names: names of the parts.
        stars: for each part the text that ``*`` in its name matches.
        aliases: names of parts by the number of their file and their other name.
    """

    files: npt.NDArray[np.int32]
    names: PartNames
    stars: Sequence[str]
    aliases: Mapping[tuple[int, str], str] = field(default_factory=dict)

    def name(self, part: int) -> str:
        """Return the name of a part's group or array."""
        return self.names.part(self.stars[part])


@dataclass(frozen=True, eq=False)
class RowTable:
    """Arrays of several files with consecutive row numbers: a view of the catalog.

    Rows are numbered over all parts, the same for all fields. A part has as many rows as its longest array.

    Attributes:
        paths: the files.
        layouts: arrays of each part, in the order of the dataset's fields.
        guards: change guard of each file, from the time it was described.
        starts: first row of each part, and the number of rows at the end; shape ``(n_parts + 1,)``.
        indexer: maps samples to rows.
        parts: the parts; None if each file is one part.
        has_steps: for each field whether its rows are steps; the others have a row for each segment, or for each part.
            Empty if all are.
        is_shared: for each field whether all segments of a part have the same steps of it; empty if none is.
        step_places: axis of the steps in a sample of each field; empty if it is the first axis of all fields.
        columns: values of other arrays, one per segment.
        first_segments: number of each part's first segment, and of all segments at the end, shape ``(n_parts + 1,)``;
            None if each part is one.
        lacks: mask of rows without a matching line in the side table; None if all rows have one.
        n_missing: segments that lack an array and are left out (``segments.missing``).
    """

    paths: tuple[str, ...]
    layouts: PartLayouts
    guards: tuple[ChangeGuard, ...]
    starts: IntArray
    indexer: Indexer
    parts: Parts | None = None
    has_steps: tuple[bool, ...] = ()
    is_shared: tuple[bool, ...] = ()
    step_places: tuple[int, ...] = ()
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    first_segments: IntArray | None = None
    lacks: npt.NDArray[np.bool_] | None = None
    n_missing: int = 0

    def __post_init__(self) -> None:
        n_fields = self.layouts.n_fields
        for name, default in (("has_steps", True), ("is_shared", False), ("step_places", 0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * n_fields)

    @cached_property
    def as_read(self) -> tuple[ArrayLayout, ...]:
        """The arrays of the first part, with the shape of one read: a row, or a patch."""
        arrays: tuple[ArrayLayout, ...] = self.layouts[0]
        shapes = [self.indexer.shape_read(field, array.row_shape) for field, array in enumerate(arrays)]
        return tuple(
            array if shape == array.row_shape else array.with_changes(row_shape=shape)
            for array, shape in zip(arrays, shapes, strict=True)
        )

    @property
    def n_segments(self) -> int:
        """Number of segments that samples are made of."""
        return len(self.indexer.segments)

    @cached_property
    def n_parts(self) -> int:
        """Number of parts."""
        return len(self.layouts)

    @cached_property
    def n_fields(self) -> int:
        """Number of fields."""
        return self.layouts.n_fields

    @cached_property
    def step_fields(self) -> list[int]:
        """Numbers of the fields whose rows are steps."""
        return [field for field in range(self.n_fields) if self.has_steps[field]]

    @property
    def n_rows(self) -> int:
        """Number of rows of all parts."""
        return int(self.starts[-1])

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return len(self.indexer)

    def assembler(self, field: int) -> Assembler:
        """Return the assembler of a field's batches: one entry per sample."""
        if not self.has_steps[field]:
            return Assembler()
        return self.indexer.assembler(field, is_ragged=self.is_ragged[field], place=self.step_places[field])

    def boxes(self, fields: Sequence[FieldRows]) -> list[Boxes]:
        """Return the rows of each field as row numbers of its arrays; fields with the same rows share an object."""
        boxes: list[Boxes] = []
        shared: dict[tuple[int, int], Boxes] = {}
        for number, (rows, group) in enumerate(zip(fields, self._alike, strict=True)):
            key = id(rows), group
            if key not in shared:
                shared[key] = self._boxes(number, rows)
            boxes.append(shared[key])
        return boxes

    @cached_property
    def _alike(self) -> list[int]:
        """For each field its number, or -1 if its steps have the row numbers of the table."""
        return [-1 if self.has_steps[at] and self._own_sizes[at] is None else at for at in range(self.n_fields)]

    def _boxes(self, field: int, rows: FieldRows) -> Boxes:
        if not self.has_steps[field]:
            return Boxes(*self._locate_values(field, rows.rows))
        sizes, boxes = self._own_sizes[field], Boxes(0, rows.rows, rows.runs)
        if self.n_parts == 1 and sizes is None:
            return boxes
        boxes = boxes.without_empty_runs()
        firsts, runs = boxes.firsts, boxes.sizes
        parts, local = self.locate(firsts)
        if runs is not None and (firsts + runs > self.starts[parts + 1]).any():  # segments go on in the next part
            runs, firsts = None, rows.rows
            parts, local = self.locate(firsts)
        own = local if sizes is None else _own_rows(local, *(size[parts] for size in sizes))
        return Boxes(parts, own if runs is None else rows.rows + np.repeat(own - firsts, runs), runs)

    def files_touched(self, boxes: Sequence[Boxes]) -> list[int]:
        """Return the numbers of the files with rows of a batch."""
        if len(self.paths) == 1:
            return [0]
        parts = boxes[next(iter(self.step_fields), 0)].parts
        files: list[int] = np.unique(self.files_of(np.atleast_1d(parts))).tolist()
        return files

    def files_of(self, parts: IntArray) -> IntArray:
        """Return the file of each part."""
        return parts if self.parts is None else self.parts.files[parts].astype(np.int64)

    def parts_of_segments(self, numbers: IntArray) -> IntArray:
        """Return the part in which each segment begins."""
        if self.first_segments is None:
            return numbers
        return np.searchsorted(self.first_segments, numbers, side="right") - 1

    def parts_and_numbers(self, segments: IntArray) -> tuple[IntArray, IntArray]:
        """Return the part in which each segment begins, and the segment's number in the part."""
        parts = self.parts_of_segments(segments)
        return parts, np.zeros_like(segments) if self.first_segments is None else segments - self.first_segments[parts]

    def part_of_segment(self, number: int) -> tuple[int, int]:
        """Return the part in which a segment begins, and the segment's number in the part."""
        (part,), (inside,) = self.parts_and_numbers(np.array([number]))
        return int(part), int(inside)

    def file_of_segment(self, number: int) -> int:
        """Return the number of the file in which a segment begins."""
        part, _ = self.part_of_segment(number)
        return part if self.parts is None else int(self.parts.files[part])

    def values_of_samples(self, key: str) -> npt.NDArray[Any]:
        """Return a column with one value per sample: the value of its segment."""
        return np.asarray(self.columns[key][self.indexer.places(np.arange(self.n_samples)).segments])

    def n_segments_of(self, part: int) -> int:
        """Return the number of segments of a part, before any filter."""
        return 1 if self.first_segments is None else int(self.first_segments[part + 1] - self.first_segments[part])

    def name_of_part(self, part: int) -> str:
        """Return the name of a part: the path of a file, or the name of a group or array."""
        return self.paths[part] if self.parts is None else self.parts.name(part)

    def segment_name(self, number: int) -> str:
        """Return the name of a segment: its group, array or file, with a number if that has several segments."""
        part, inside = self.part_of_segment(number)
        name = os.path.basename(self.name_of_part(part)) if self.parts is None else self.name_of_part(part)
        return f"{name}[{inside}]" if self.n_segments_of(part) > 1 else name

    def _locate_values(self, field: int, segments: IntArray) -> tuple[IntArray, IntArray]:
        """Return the part, and the row inside the part, of each segment's value of a field."""
        if self.first_segments is None:
            return segments, np.zeros(len(segments), dtype=np.int64)
        parts = self.parts_of_segments(segments)
        is_of_part = self.layouts.n_rows(field)[parts] == 1
        return parts, np.where(is_of_part, 0, segments - self.first_segments[parts])

    def with_fields(self, fields: range | Sequence[int]) -> RowTable:
        """Return the same files with some of their arrays."""
        return replace(
            self,
            layouts=self.layouts.with_fields(fields),
            indexer=self.indexer.of_fields(fields),
            has_steps=tuple(self.has_steps[at] for at in fields),
            is_shared=tuple(self.is_shared[at] for at in fields),
            step_places=tuple(self.step_places[at] for at in fields),
        )

    @cached_property
    def fields_of_rows(self) -> list[int]:
        """The fields that are read by the numbers of their rows: numbers of one shape; all if samples are rows."""
        if self.indexer.numbers_are_rows:
            return list(range(self.n_fields))
        own = [field for field in self.step_fields if not (self.is_ragged[field] or self.is_shared[field])]
        fields = [field for field in own if self.indexer.segments.rate_of(field) == 1]
        return [field for field in fields if kind_of(self.layouts[0][field].dtype) == "number"]

    @cached_property
    def fields_of_segments(self) -> list[int]:
        """The fields that have a row of numbers for each segment, of one shape, if samples are whole segments."""
        if not self.indexer.is_whole or self.first_segments is None:
            return []
        n_segments = np.diff(self.first_segments)
        return [
            field
            for field in range(self.n_fields)
            if not (self.has_steps[field] or self.is_ragged[field])
            and kind_of(self.layouts[0][field].dtype) == "number"
            and (self.layouts.n_rows(field) == n_segments).all()
        ]

    @cached_property
    def fields_cut(self) -> list[int]:
        """The fields of which samples have parts of rows: cells of volumes, out of which patches are cut."""
        return [field for field in range(self.n_fields) if self.indexer.cuts(field)]

    def locate(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the part, and the row inside the part, of each row."""
        parts = np.searchsorted(self.starts[:-1], rows, side="right") - 1
        return parts, rows - self.starts[parts]

    def rows_of_own(self, field: int, parts: IntArray, own: IntArray) -> IntArray:
        """Return the numbers of rows that a field's arrays count, over all parts; not of steps that segments share."""
        if (sizes := self._own_sizes[field]) is None:
            return self.starts[parts] + own
        n_steps, n_own = (size[parts] for size in sizes)
        lines, steps = np.divmod(own, np.maximum(n_own, 1))
        return self.starts[parts] + np.where(n_steps > 0, lines * n_steps + steps, own)

    @cached_property
    def _own_sizes(self) -> list[tuple[IntArray, IntArray] | None]:
        """For each field and part, the steps per segment in the table, and in the array.

        Row numbers are the same for all fields, so segments along an axis have as many steps as the longest array of a
        part. None if the array has as many.
        """
        return [self._own_sizes_of(field) for field in range(self.n_fields)]

    def _own_sizes_of(self, field: int) -> tuple[IntArray, IntArray] | None:
        if not self.has_steps[field]:
            return None
        if self.is_shared[field]:
            sizes = self.layouts.n_rows(field)
            return sizes, np.zeros(len(sizes), dtype=np.int64)
        n_lines, sizes = self.layouts.of_kinds(lambda arrays: lines_of(arrays[field])).T
        n_steps = np.where(n_lines > 0, np.diff(self.starts) // np.maximum(n_lines, 1), 0)
        return (n_steps, sizes) if (n_steps != sizes).any() else None

    @property
    def identity(self) -> str:
        """A digest of the contents of the files (see ``file_identity``), in their order."""
        return self.layouts.identity(self.paths, self.guards, self.files_of(np.arange(self.n_parts)))

    def digest_of(self, samples: IntArray | None) -> str:
        """Return a digest of the contents of the files, and of some samples (None: all), in their order."""
        digest = hashlib.sha256(self.identity.encode())
        digest.update(self.indexer.digest())
        if samples is not None:
            digest.update(samples.tobytes())
        return digest.hexdigest()[:32]

    @cached_property
    def held(self) -> list[bool]:
        """For each field, whether the array is small enough to be read as a whole.

        The same on all ranks and in all workers, since blocks and the training order depend on it.
        """
        return [not self._is_cells(field) and self._n_bytes(field) <= HELD_BYTES for field in range(self.n_fields)]

    def _is_cells(self, field: int) -> bool:
        """Return whether rows of a field are cells."""
        views = [arrays[field].view for arrays in self.layouts.examples]
        return any(view is not None and view.is_in_cells for view in views)

    def _n_bytes(self, field: int) -> float:
        """Return the bytes of all rows of a field."""
        row_bytes = self.layouts.of_kinds(lambda arrays: arrays[field].row_bytes, np.float64)
        return float(row_bytes @ self.layouts.n_rows(field))

    @cached_property
    def is_ragged(self) -> list[bool]:
        """For each field, whether its rows have several shapes."""
        fields = range(self.n_fields)
        return [len({arrays[field].row_shape for arrays in self.layouts.examples}) > 1 for field in fields]


def _own_rows(local: IntArray, n_steps: IntArray, n_own: IntArray) -> IntArray:
    """Return row numbers of arrays for row numbers inside parts (see ``_own_sizes``)."""
    lines, steps = np.divmod(local, np.maximum(n_steps, 1))
    return np.where(n_steps > 0, lines * n_own + steps, local)


def lines_of(array: ArrayLayout) -> tuple[int, int]:
    """Return the number of lines of an array's rows, and their length; zeros if rows are along one axis."""
    view = array.view
    if view is None or not view.has_lines:
        return 0, 0
    *slow, fast = (view.shape[axis] for axis in view.row_axes)
    return math.prod(slow), fast


def starts_of(layouts: PartLayouts, has_steps: Sequence[bool], least: IntArray | int = 0) -> IntArray:
    """Return the first row of each part, and the number of rows at the end; shape ``(n_parts + 1,)``.

    Args:
        layouts: the arrays of each part.
        has_steps: for each field whether its rows are steps.
        least: minimum number of rows of each part, for segments along an axis of arrays with fewer steps.
    """
    sizes = np.zeros(len(layouts), dtype=np.int64) + least
    for at in np.flatnonzero(has_steps).tolist():
        sizes = np.maximum(sizes, layouts.n_rows(at))
    return np.concatenate([[0], np.cumsum(sizes)])

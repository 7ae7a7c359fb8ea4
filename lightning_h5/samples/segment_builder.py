"""Collects the parts of files that segments are made of, and finds where segments begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import (
    ArrayRequest,
    Catalog,
    Compatibility,
    ListedParts,
    PackedText,
    PartLayouts,
    PartNames,
    PartsOfFile,
    StoredParts,
    pairs_of,
    parts_in,
    values_of,
)
from ..errors import H5KeyError, H5ValueError, listing
from ..hdf5 import ArrayLayout, ChangeGuard, LayoutTable, OpenOptions, check_no_overlap, column_layout
from ..readers import Image
from ..types import IntArray
from .indexer import Indexer
from .patch_tables import VolumeTable
from .row_table import Parts, RowTable, starts_of
from .rows import Rows
from .seen_parts import DescribedParts
from .segment_choice import samples_with_lines
from .segment_cuts import TimeUnit, by_coordinate, by_value, on_one_scale, ranges_in, steps_of, unit_of
from .segment_fields import SampleOptions, SegmentField
from .segment_lines import SegmentLines, lines_of_parts, lines_of_slices
from .segments import Segments, Steps
from .table_builder import TableBuilder
from .windows import samples_of

__all__ = ["SegmentTableBuilder"]


class SegmentTableBuilder(TableBuilder):
    """Collects the parts of files that segments are made of.

    Args:
        catalog: opens the files.
        options: how files are opened.
        fields: how arrays are to be seen.
        samples: what a sample is.
        columns: further arrays with a value for each segment or each step.

    Raises:
        H5ValueError: files are still written, or patches cut none of the fields.
    """

    def __init__(
        self,
        catalog: Catalog,
        options: OpenOptions,
        fields: Sequence[SegmentField],
        samples: SampleOptions,
        columns: Sequence[str],
    ) -> None:
        if options.swmr:
            raise H5ValueError(
                "files.swmr was given with segments, windows or patches, and where segments end is not known while a "
                "file is written. Wait until it is closed."
            )
        segments = samples.segments
        self._volumes = None if samples.patch is None else VolumeTable(fields, samples.patch)
        self._value_keys = [*segments.cut_keys, *columns]
        self._catalog, self._options, self._segments, self._samples = catalog, options, segments, samples
        self._fields = list(fields)  # how arrays are seen; once they are known
        joins, keys = catalog.joins, [*(field.asked.keys[0] for field in fields), *self._value_keys]
        self._columns = {at: key for at, key in enumerate(keys) if joins.is_column(key)}  # of a side table
        self._stacks = dict[int, tuple[int, ...]]()  # fields of several arrays, by the numbers of these
        for at, field in enumerate(fields):
            if field.asked.is_stack:
                self._stacks[at] = (at, *range(len(keys), len(keys) + len(field.asked.keys) - 1))
                keys += field.asked.keys[1:]
        own = [key for at, key in enumerate(keys) if at not in self._columns]
        drops = segments.missing == "drop"
        own += joins.join_keys(self._columns, attributes=True)
        self._own = PartNames.of(own, segments.groups, drops=drops)
        self._names = PartNames.of(keys, segments.groups, self._columns.values(), drops=drops)
        self._n_missing = 0  # segments that lack an array and are left out
        self._lines: SegmentLines | None = None  # of the table; once parts are known
        self._paths: list[str] = []
        self._guards: list[ChangeGuard] = []
        self._found: list[PartsOfFile] = []
        self._cuts: list[dict[str, npt.NDArray[Any]]] = []  # of each part the values that cut it, or are of segments
        self._units: list[TimeUnit] = []  # of each part, of the coordinate by which parts are joined
        self._has_axis = any(field.axis is not None for field in fields)
        self._files = np.empty(0, dtype=np.int32)  # of each part its file
        # Of each part its segments along an axis, and the steps of its fields.
        self._n_lines = self._lengths = np.empty(0, dtype=np.int64)

    # Looking at files ----------------------------------------------------------------------------------------

    def look(self, path: str) -> tuple[ChangeGuard, PartsOfFile]:
        """See ``TableBuilder.look``: the parts of a file."""
        search = partial(parts_in, path, self._own, self._options)
        guard, found = self._catalog.look(path, self._options, self._own, search)
        return replace(guard, others=found.others) if found.others else guard, found

    def add(self, path: str, contents: tuple[ChangeGuard, PartsOfFile]) -> None:
        """See ``TableBuilder.add``."""
        guard, found = contents
        self._n_missing += found.n_missing
        if not len(found.stars):
            return
        if self._found and found.names != self._found[0].names:
            raise H5ValueError(
                f"{listing(found.names.cells or self._found[0].names.cells)} holds references in only one of "
                f"{self._paths[0]!r} and {path!r}. Pass files of one kind."
            )
        self._paths.append(path)
        self._guards.append(guard)
        self._found.append(found)

    @property
    def _aliases(self) -> dict[tuple[int, str], str]:
        """See ``Parts.aliases``."""
        part = self._names.part
        files = enumerate(self._found)
        return {(at, part(other)): part(star) for at, found in files for other, star in found.aliases.items()}

    # The table -----------------------------------------------------------------------------------------------

    def table(self) -> RowTable:
        """See ``TableBuilder.table``."""
        table, samples = self._steps(), self._samples
        if self._names.cells and samples.sample is None and samples.window is None:
            samples = replace(samples, sample="segment")  # what a reference leads to
        indexer: Indexer
        if self._volumes is None:
            segments, first_segments = self._segments_of(table)
            name_of = replace(table, first_segments=first_segments).segment_name
            indexer = samples_of(segments, self._fields, samples, name_of)
        else:
            first_segments = self._first_lines
            indexer = self._volumes.indexer(table.starts, self._n_lines, table.layouts[0], samples.seed)
        table = replace(table, indexer=indexer, first_segments=first_segments)
        return table if self._lines is None else replace(table, indexer=samples_with_lines(table, self._lines))

    def _steps(self) -> RowTable:
        """Return the steps of all parts, as rows."""
        if not self._found:
            raise H5KeyError(
                f"segments.missing='drop' leaves nothing: each of {self._n_missing:,} segments lacks one of "
                f"{listing(self._own.keys)}. Name arrays that some have."
            )
        stored, n_fields = self._stored(), len(self._fields)
        self._files = stored.files
        coded = [array.key for array in (stored.one(0, at) for at in range(n_fields)) if array.categories is not None]
        if coded and len(self._paths) > 1:
            raise H5ValueError(
                f"{listing(coded)} is categorical, and codes are not compared between files whose samples are of "
                f"segments. Name '{coded[0]}/codes' if they mean the same in all files."
            )
        self._read_values(stored)
        if self._segments.join is not None and self._sort_files(self._segments.join):
            return self._steps()
        arrays = [stored.one(0, at) for at in range(n_fields)]
        self._fields = [
            self._of_values(one, stored, at) if array.value is not None else _as_seen(one, array)
            for at, (one, array) in enumerate(zip(self._fields, arrays, strict=True))
        ]
        if self._names.cells and all(one.step_axis is None for one in self._fields):  # of one value each
            is_number = [stored.one(0, at).dtype.kind != "O" for at in range(n_fields)]
            self._fields = [
                replace(one, step_axis=0) if is_one and one.asked.key in self._names.cells else one
                for one, is_one in zip(self._fields, is_number, strict=True)
            ]
        if all(one.axis is None and one.step_axis is None and one.patch is None for one in self._fields):
            self._fields = self._of_one_step(arrays)
        names = None
        if self._names.pattern is not None:
            names = Parts(stored.files, self._names, stored.stars, self._aliases)
        parts, step_places = self._volumes_of(stored) if self._volumes is not None else self._steps_of(stored)
        has_steps = tuple(field.step_axis is not None for field in self._fields)
        n_steps = 0 if self._volumes is not None else self._n_lines * self._lengths.max(axis=1, initial=0)
        starts = starts_of(parts, has_steps, n_steps)
        return RowTable(
            tuple(self._paths),
            parts,
            tuple(self._guards),
            starts,
            Rows.of(starts, n_fields),
            parts=names,
            has_steps=has_steps,
            is_shared=tuple(
                self._volumes is None and self._has_axis and field.axis is None and field.step_axis is not None
                for field in self._fields
            ),
            step_places=step_places,
            n_missing=self._n_missing,
        )

    def _of_one_step(self, arrays: Sequence[ArrayLayout]) -> list[SegmentField]:
        """Return the fields if no array has steps: a segment is then one step, and a sample has its values."""
        pairs = zip(self._fields, arrays, strict=True)
        is_single = [array.value is not None or field.is_whole for field, array in pairs]
        if self._names.pattern is None or not any(is_single):
            raise H5ValueError(
                f"none of the fields {listing(one.name for one in self._fields)} has steps: they are scalars or "
                "attributes. Add one."
            )
        return [
            replace(field, step_axis=0, is_single=True) if is_one else field
            for field, is_one in zip(self._fields, is_single, strict=True)
        ]

    def _read_values(self, stored: StoredParts) -> None:
        """Read the arrays that cut parts into segments, or have a value for each segment."""
        self._cuts, self._units = [], []
        n_fields = len(self._fields)
        for part in range(len(stored.files)) if self._value_keys else ():
            arrays = [stored.one(part, n_fields + at) for at in range(len(self._value_keys))]
            values = [
                pairs_of(array, self._options)
                if key == self._segments.spans or (key == self._segments.offsets and array.row_shape == (2,))
                else values_of(array, self._options)
                for key, array in zip(self._value_keys, arrays, strict=True)
            ]
            self._cuts.append(dict(zip(self._value_keys, values, strict=True)))
            if self._segments.join is not None:
                at = self._value_keys.index(self._segments.join)
                self._units.append(unit_of(stored.one(part, n_fields + at), self._options))

    def _sort_files(self, join: str) -> bool:
        """Sort the files by the coordinate that joins them; return whether they had another order."""
        values = self.values_of(join)
        if any(part.dtype.kind not in "iuf" for part in values):
            return False  # an error, once segments are cut
        firsts = np.full(len(self._paths), np.inf)
        for part, file in zip(self._times(join), self._files.tolist(), strict=True):
            firsts[file] = min([float(firsts[file]), *part[:1].tolist()])
        order = np.argsort(firsts, kind="stable").tolist()
        self._paths, self._guards, self._found = (
            [files[at] for at in order] for files in (self._paths, self._guards, self._found)
        )
        return bool(order != list(range(len(order))))

    def _times(self, join: str) -> list[npt.NDArray[Any]]:
        """Return the coordinate of each part, on one scale."""
        paths = [self._paths[file] for file in self._files.tolist()]
        return on_one_scale(self.values_of(join), self._units, paths, join)

    def _volumes_of(self, stored: StoredParts) -> tuple[PartLayouts, tuple[int, ...]]:
        """Return the arrays of all parts with cells as rows."""
        assert self._volumes is not None, "samples are patches"
        compatibility = Compatibility([field.asked for field in self._fields], of_one_row=False)
        parts, lines = list[tuple[ArrayLayout, ...]](), list[int]()
        for part in range(len(stored.files)):
            arrays = tuple(stored.one(part, field) for field in range(len(self._fields)))
            compatibility.check(self._decoded(arrays))
            check_no_overlap(arrays)
            period, n_lines, _ = self._checked_axes(arrays)
            self._volumes.add(arrays)
            lines.append(n_lines)
            pairs = zip(self._fields, arrays, strict=True)
            parts.append(
                tuple(one.asked.decoded(a) if one.patch is not None else one.seen(a, period, None) for one, a in pairs)
            )
        self._n_lines = np.array(lines, dtype=np.int64)
        return ListedParts(self._volumes.in_cells(parts)), (0,) * len(self._fields)

    def _steps_of(self, stored: StoredParts) -> tuple[PartLayouts, tuple[int, ...]]:
        """Return the arrays of all parts with steps as rows, and the axes that steps are along."""
        n_fields = len(self._fields)
        follows_from_rows = self._has_axis or bool(self._segments.cut_keys)
        fixed = [at for at, field in enumerate(self._fields) if follows_from_rows or not field.is_as_stored]
        cut = self._segments
        n_values: list[int] | None = None  # of a field with a value for each segment
        if cut.are_ranges:
            n_values = [self._n_segments(stored, part) for part in range(len(stored.files))]
        kinds, firsts = stored.kinds(n_fields, fixed, n_values)
        compatibility = Compatibility([field.asked for field in self._fields], of_one_row=False)
        periods, lines, lengths = list[int](), list[int](), list[list[int]]()
        for part in firsts.tolist():
            arrays = tuple(stored.one(part, field) for field in range(n_fields))
            compatibility.check(self._decoded(arrays))
            period, n_lines, each = self._checked_axes(arrays)
            periods.append(period)
            lines.append(n_lines)
            lengths.append(each)
        self._n_lines, self._lengths = np.array(lines)[kinds], np.array(lengths)[kinds]
        for field, one in enumerate(self._fields):
            if one.is_as_stored:
                self._lengths[:, field] = stored.table.n_rows[:, field]
        n_of_kinds = [None if n_values is None else n_values[part] for part in firsts.tolist()]
        parts = DescribedParts(stored, tuple(range(n_fields)), tuple(self._fields), kinds, firsts, periods, n_of_kinds)
        parts.check_places()
        arrays = tuple(stored.one(0, field) for field in range(n_fields))
        return parts, tuple(field.step_place(array) for field, array in zip(self._fields, arrays, strict=True))

    def _decoded(self, arrays: Sequence[ArrayLayout]) -> tuple[ArrayLayout, ...]:
        return tuple(field.asked.decoded(array) for field, array in zip(self._fields, arrays, strict=True))

    def _of_values(self, field: SegmentField, stored: StoredParts, at: int) -> SegmentField:
        """Return how a scalar, an attribute or a column is seen: with a value for each part, segment or step."""
        own = replace(field, axis=None, step_axis=None, asked=replace(field.asked, codec=None))
        if at not in self._columns:
            return replace(own, asked=field.asked)
        sizes = stored.table.n_rows[:, at]
        if (sizes == 1).all():
            return own
        if self._has_axis:
            along, arrays = self._along_axis(stored)
            if sizes.tolist() == [along.length(array, along.axis or 0) for array in arrays]:
                return replace(own, axis=0)
        cut = self._segments
        if cut.are_ranges:
            n_segments = [self._n_segments(stored, part) for part in range(len(stored.files))]
            if np.array_equal(sizes, n_segments):
                return own
        if self._volumes is not None:
            part = int(np.argmax(sizes != 1))
            raise H5ValueError(
                f"{field.asked.key!r} has {sizes[part]} values in {stored.paths[stored.files[part]]!r}, as the array "
                "that table.on names, and patches are of volumes. Name an array with one value for each volume."
            )
        return replace(own, step_axis=0)

    def _along_axis(self, stored: StoredParts) -> tuple[SegmentField, list[ArrayLayout]]:
        """Return a field with segments along an axis, and its array of each part."""
        of_file = [at for at in range(len(self._fields)) if at not in self._columns]
        along = [at for at in of_file if self._fields[at].axis is not None and self._fields[at].step_axis is not None]
        if not along:
            raise H5ValueError(
                "table.on names a column of slices, such as 'bucket0$3,:3,:600', and no field has segments along an "
                "axis. Pass segments={'axis': 0, 'step_axis': 2}, with the axis of the index and that of the steps."
            )
        at = along[0]
        column = at if stored.names is self._names else of_file.index(at)
        arrays = [stored.one(part, column) for part in range(len(stored.files))]
        for array in arrays:
            self._fields[at].check_axes(array)
        return self._fields[at], arrays

    def _n_segments(self, stored: StoredParts, part: int) -> int:
        """Return how many segments the rows of a part are cut into."""
        at, field = next((at, field) for at, field in enumerate(self._fields) if field.step_axis is not None)
        array = stored.one(part, at)
        field.check_axes(array)
        n_steps = field.length(array, field.step_axis or 0)
        return len(ranges_in(self._segments, self._cuts[part], n_steps, array.path)[0])

    def _stored(self) -> StoredParts:
        """Return the arrays of all parts."""
        arrays = [found.arrays for found in self._found]
        names = self._found[0].names
        self._names = self._names.of_cells(names.cells)
        table = LayoutTable.of(arrays, len(names.keys), self._catalog.templates)
        stars = PackedText.joined([found.stars for found in self._found])
        files = np.repeat(np.arange(len(self._found), dtype=np.int32), [len(found.stars) for found in self._found])
        own = StoredParts(table, names, stars, files, tuple(self._paths), tuple(self._guards))
        stored = self._with_columns(own) if self._columns else own
        stored = replace(
            stored, stacks=self._stacks, stacked_as={at: self._fields[at].asked.key for at in self._stacks}
        )
        stored.check_stacks()
        return stored

    def _with_columns(self, own: StoredParts) -> StoredParts:
        """Return the arrays of all parts with columns of a side table among them."""
        side = self._catalog.joins.side
        assert side is not None, "columns are asked for"
        if side.slices:
            self._lines = lines_of_slices(side, own, self._names, *self._along_axis(own))
        else:
            self._lines = lines_of_parts(side, own, self._names, self._options, self._aliases)
        table = own.table
        for at, key in self._columns.items():
            asked = self._fields[at].asked if at < len(self._fields) else ArrayRequest(key=key)
            values = side.values(asked, np.concatenate(self._lines.of_parts))
            ends = np.cumsum([len(lines) for lines in self._lines.of_parts])[:-1]
            describe = partial(column_layout, path=self._paths[0], key=key, guard=self._guards[0])
            table = table.with_column(at, np.split(values, ends), describe)
        return replace(own, table=table, names=self._names)

    def _checked_axes(self, arrays: Sequence[ArrayLayout]) -> tuple[int, int, list[int]]:
        """Return the steps of the longest array of a part, its segments along an axis, and the steps of each array."""
        pairs = list(zip(self._fields, arrays, strict=True))
        for field, array in pairs:
            field.check_axes(array)
        lines = [None if field.axis is None else field.length(array, field.axis) for field, array in pairs]
        lengths = [None if field.step_axis is None else field.length(array, field.step_axis) for field, array in pairs]
        n_lines, n_steps = (sorted({n for n in each if n is not None}) for each in (lines, lengths))
        period = n_steps[-1]
        if len(n_lines) > 1:
            each = _each(arrays, lines)
            raise H5ValueError(
                f"segments.axis counts the segments of {arrays[0].path!r}, and arrays differ: {each}. Name the axis of "
                "each field (a mapping), or None for a field without it."
            )
        if self._volumes is not None:
            return period, n_lines[0] if n_lines else 1, []
        if n_lines:
            for (field, array), n in zip(pairs, lengths, strict=True):
                if field.axis is None and n not in (None, period):
                    raise H5ValueError(
                        f"{array.key!r} has {n} steps for all segments of {array.path!r}, and these have {period}. "
                        "Load fields with as many steps, or with an axis of segments."
                    )
        elif self._segments.cut_keys and len(n_steps) > 1:
            raise H5ValueError(
                f"rows of {arrays[0].path!r} are cut into segments, and arrays differ: {_each(arrays, lengths)} steps. "
                "Load fields with one value a step."
            )
        return period, n_lines[0] if n_lines else 1, [n or 0 for n in lengths]

    # Segments ------------------------------------------------------------------------------------------------

    def _segments_of(self, table: RowTable) -> tuple[Segments, IntArray | None]:
        """Return the segments of a table's rows, and the number of each part's first one."""
        if self._segments.cut_keys:
            firsts, lengths, order, first_segments = self._cut(table)
            kinds = [0 if has_steps else None for has_steps in table.has_steps]
            segments = Segments((steps_of(firsts, lengths, table.starts),), tuple(kinds), order=order)
            return segments, first_segments
        lines = self._n_lines
        inside: IntArray = np.arange(int(lines.sum())) - np.repeat(np.cumsum(lines) - lines, lines)
        periods = np.repeat(np.diff(table.starts) // lines, lines)
        firsts = np.repeat(table.starts[:-1], lines) + inside * periods
        spans = None if self._lines is None else self._lines.spans
        if spans is not None:  # steps that slices name
            firsts = firsts + spans[:, 0]
            n_steps = self._lengths[:, table.step_fields]
            if (differs := n_steps.min(axis=1) < n_steps.max(axis=1)).any():
                part = int(differs.argmax())
                raise H5ValueError(
                    f"fields have {listing(n_steps[part].tolist())} steps in {table.name_of_part(part)!r}, and slices "
                    "of a table name the steps of all. Load fields with equally many."
                )
        made: dict[tuple[int, bytes], Steps] = {}
        which: list[tuple[int, bytes] | None] = []
        for field, has_steps in enumerate(table.has_steps):
            lengths = np.repeat(self._lengths[:, field], lines) if spans is None else spans[:, 1] - spans[:, 0]
            which.append(key := (self._fields[field].rate, lengths.tobytes()) if has_steps else None)
            if key is not None and key not in made:
                made[key] = replace(steps_of(firsts, lengths, table.starts), rate=key[0])
        numbers = {each: number for number, each in enumerate(made)}
        segments = Segments(tuple(made.values()), tuple(None if each is None else numbers[each] for each in which))
        return segments, self._first_lines

    @property
    def _first_lines(self) -> IntArray | None:
        """The number of each part's first segment, and of all segments at the end; None if each part is one."""
        before = np.concatenate([[0], np.cumsum(self._n_lines)]).astype(np.int64)
        return before if before[-1] > len(self._n_lines) else None

    def _cut(self, table: RowTable) -> tuple[IntArray, IntArray, IntArray | None, IntArray]:
        """Return the segments that values mark.

        Returns:
            Their first rows; their lengths; the order of rows if it is another one; the number of each part's first
            segment, and of all segments at the end.
        """
        segments = self._segments
        if segments.key is not None:
            by = None if segments.sort_key is None else self._column(segments.sort_key, table)
            firsts, lengths, order = by_value(self._column(segments.key, table), by, segments)
            first_rows = firsts if order is None else np.minimum.reduceat(order, firsts)
            return firsts, lengths, order, np.searchsorted(first_rows, table.starts)
        if segments.join is not None:
            self._column(segments.join, table)  # has a value for each step
            firsts = by_coordinate(np.concatenate(self._times(segments.join)), segments.join)
            return firsts, np.diff(np.append(firsts, table.n_rows)), None, np.searchsorted(firsts, table.starts)
        of_parts = [
            ranges_in(segments, cuts, end - start, self._paths[file])
            for cuts, file, start, end in zip(
                self._cuts, self._files.tolist(), table.starts[:-1].tolist(), table.starts[1:].tolist(), strict=True
            )
        ]
        n_each = [len(firsts) for firsts, _ in of_parts]
        firsts = np.concatenate([firsts for firsts, _ in of_parts]) + np.repeat(table.starts[:-1], n_each)
        # Not by their first rows: an empty last segment begins where the next part does.
        first_segments = np.cumsum([0, *n_each], dtype=np.int64)
        return firsts, np.concatenate([lengths for _, lengths in of_parts]), None, first_segments

    @property
    def cut_by(self) -> list[str]:
        """See ``TableBuilder.cut_by``."""
        return [key for key in (self._segments.key, self._segments.sort_key) if key is not None]

    def _column(self, key: str, table: RowTable) -> npt.NDArray[Any]:
        values = np.concatenate([cuts[key] for cuts in self._cuts])
        if len(values) != table.n_rows:
            raise H5ValueError(
                f"{key!r} has {len(values)} values and the data has {table.n_rows} steps. Name an array with one "
                "value a step."
            )
        return values

    def values_of(self, key: str) -> list[npt.NDArray[Any]]:
        """See ``TableBuilder.values_of``."""
        return [cuts[key] for cuts in self._cuts]


def _as_seen(field: SegmentField, array: ArrayLayout) -> SegmentField:
    """Return how a field is seen. A row is all of an array that is a scalar with bytes, or the bytes of one image."""
    is_image = isinstance(field.asked.codec, Image) and array.dtype == np.uint8 and not array.axes
    if array.is_scalar or (is_image and field.axis is None):
        return replace(field, axis=None, step_axis=None, is_whole=True)
    return field


def _each(arrays: Sequence[ArrayLayout], sizes: Sequence[int | None]) -> str:
    return ", ".join(f"{array.key!r} has {n}" for array, n in zip(arrays, sizes, strict=True) if n is not None)

"""From what a user says of segments to a table of their steps, and of the samples that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5Error, H5ValueError, listing
from ..hdf5 import ArrayLayout, ChangeGuard, OpenOptions
from ..options import SegmentOptions
from ..readers import open_reader
from ..types import IntArray, Paths
from .catalog import Catalog
from .collate import Collate
from .compatibility import Asked, Compatibility
from .fields import Fields
from .normalize import Normalize, normalized
from .patch_tables import VolumeTable
from .readable_files import WITHOUT_THEM, each_readable
from .row_table import Parts, RowTable
from .segment_cuts import by_coordinate, by_value, firsts_in, steps_of
from .segment_fields import SampleOptions, SegmentField, fields_of, sampling_of
from .segment_parts import parts_in
from .segment_splits import SegmentSubset
from .segments import Sampling, Segments, Steps

__all__ = ["segment_table", "table_of_samples"]


@dataclass(frozen=True)
class _Found:
    """The parts of a file, as they were described.

    Attributes:
        names: of the parts; None if the file is the only one.
        arrays: for each part the arrays of its fields.
        cuts: for each part the values that tell where segments begin or end, by array.
    """

    names: list[str] | None
    arrays: list[list[ArrayLayout]]
    cuts: list[dict[str, npt.NDArray[Any]]]


def segment_table(
    catalog: Catalog,
    paths: Sequence[str],
    asked: Sequence[Asked],
    names: Sequence[str],
    options: OpenOptions,
    given: SampleOptions,
    *,
    seed: int = 0,
    subset: SegmentSubset | None = None,
    columns: Sequence[str] = (),
) -> RowTable:
    """Return the steps of the segments of files, with the samples that they make. Reads metadata, and what cuts rows.

    Args:
        catalog: opens the files.
        paths: the files.
        asked: the arrays, relative to their group if segments are groups.
        names: what a sample calls them.
        options: how files are opened.
        given: what a sample is.
        seed: of random windows.
        subset: the segments to keep; None for all.
        columns: further arrays with a value for each segment, or with the same one for all its steps.

    Raises:
        H5FileError: a file is missing or broken.
        H5KeyError: an array is missing, or no group or array matches the pattern.
        H5ValueError: arrays do not belong together, or no segment has a sample.
    """
    if options.swmr:
        raise H5ValueError(
            "files.swmr was given with segments, windows or patches, and where segments end is not known while a "
            "file is written. Wait until it is closed."
        )
    fields = fields_of(asked, names, given)
    volumes = None if given.patch is None else VolumeTable(fields, given.patch)
    table = _Builder(catalog, options, fields, given.segments, columns, volumes)
    for path, (guard, found) in each_readable(paths, table.look, None, WITHOUT_THEM):
        table.add(path, guard, found)
    made = table.made()
    sampling: Sampling
    if volumes is None:
        segments_of_rows, first_segments = table.segments_of(made)
        sampling = sampling_of(segments_of_rows, fields, given, seed)
    else:
        sampling, first_segments = (
            volumes.sampling(made.starts, table.n_lines, made.layouts[0], seed),
            table.first_lines,
        )
    sampling = sampling if subset is None else subset.of(sampling)
    made = replace(made, sampling=sampling, first_segments=first_segments)
    return replace(made, columns={key: table.values_of(key, made) for key in columns})


def table_of_samples(
    catalog: Catalog,
    path: Paths,
    fields: Fields,
    options: OpenOptions,
    given: SampleOptions,
    *,
    takes_packed: bool,
    normalize: Normalize | None,
    collate: Collate | None,
    seed: int,
    subset: SegmentSubset | None,
    columns: Sequence[str],
) -> tuple[RowTable, Fields]:
    """Return the files of a dataset, with its samples, and its fields as samples have them.

    Args:
        catalog: opens the files.
        path: the files, as the user names them.
        fields: the fields.
        options: how files are opened.
        given: what a sample is.
        takes_packed: accept packed integers as they are stored.
        normalize: statistics of fields; None for none.
        collate: how samples of several shapes become a batch.
        seed: see ``segment_table``, as for the two that follow.
        subset: see above.
        columns: see above.

    Raises:
        H5Error: see ``segment_table`` and ``Catalog.table``.
    """
    asked, paths = [replace(one, takes_packed=takes_packed) for one in fields.asked], catalog.files(path)
    if given.needs_segments(fields.keys):
        table = segment_table(
            catalog, paths, asked, fields.names, options, given, seed=seed, subset=subset, columns=columns
        )
    else:
        table = catalog.table(paths, asked, options, sample=given.sample)
    fields = fields.of_samples(table, mask=given.has_mask, collate=collate)
    return table, normalized(fields, normalize, table, catalog, options)


class _Builder:
    """Collects parts of files."""

    def __init__(
        self,
        catalog: Catalog,
        options: OpenOptions,
        fields: Sequence[SegmentField],
        segments: SegmentOptions,
        columns: Sequence[str],
        volumes: VolumeTable | None,
    ) -> None:
        self._volumes = volumes
        self._value_keys = [*segments.cut_keys, *columns]
        self._catalog, self._options, self._fields, self._segments = catalog, options, fields, segments
        self._compatibility = Compatibility([field.asked for field in fields], of_one_row=False)
        self._paths: list[str] = []
        self._guards: list[ChangeGuard] = []
        self._files: list[int] = []
        self._names: list[str] = []
        self._layouts: list[tuple[ArrayLayout, ...]] = []
        self._cuts: list[dict[str, npt.NDArray[Any]]] = []
        self._has_names = False
        self._has_axis = any(field.axis is not None for field in fields)
        self._step_places: tuple[int, ...] = ()
        self._lines: list[int] = []  # segments of each part, along an axis
        self._lengths: list[list[int | None]] = []  # of the fields of each part

    # Looking at files ----------------------------------------------------------------------------------------

    def look(self, path: str) -> tuple[ChangeGuard, _Found]:
        """Return the parts of a file."""
        keys = [*(field.asked.key for field in self._fields), *self._value_keys]
        search = partial(parts_in, path, keys, self._segments.groups)
        name = f"segments {self._segments.groups} {keys}"
        guard, parts, arrays = self._catalog.look(path, self._options, name, search)
        found = _Found(None if parts[0][0] is None else [str(part) for part, _ in parts], [], [])
        for _, names in parts:
            described = []
            for key in names:
                array = key if isinstance(key, ArrayLayout) else arrays[key]
                if isinstance(array, H5Error):
                    raise array
                described.append(array)
            n_fields = len(self._fields)
            found.arrays.append(described[:n_fields])
            found.cuts.append(
                {cut: self._values(array) for cut, array in zip(self._value_keys, described[n_fields:], strict=True)}
            )
        return guard, found

    def _values(self, array: ArrayLayout) -> npt.NDArray[Any]:
        if array.row_shape not in ((), (1,)):
            raise H5ValueError(
                f"{array.key!r} in {array.path!r} has rows of the shape {array.row_shape}. Name an array with one "
                "value a row."
            )
        values = open_reader(array, self._options, counters=Counters()).read(np.arange(array.n_rows))
        return values.reshape(len(values))

    # Parts ---------------------------------------------------------------------------------------------------

    def add(self, path: str, guard: ChangeGuard, found: _Found) -> None:
        """Add the parts of a file."""
        self._paths.append(path)
        self._guards.append(guard)
        self._has_names = self._has_names or found.names is not None
        for part, (arrays, cuts) in enumerate(zip(found.arrays, found.cuts, strict=True)):
            self._compatibility.check(tuple(arrays))
            self._files.append(len(self._paths) - 1)
            self._names.append(path if found.names is None else found.names[part])
            self._layouts.append(self._seen(arrays, cuts))
            self._cuts.append(cuts)

    def _seen(self, arrays: Sequence[ArrayLayout], cuts: Mapping[str, npt.NDArray[Any]]) -> tuple[ArrayLayout, ...]:
        """Return the arrays of a part with their steps as rows."""
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
            self._volumes.add(arrays)
            self._lines.append(n_lines[0] if n_lines else 1)
            return tuple(a if one.patch is not None else one.seen(a, period, None) for one, a in pairs)
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
        if not self._step_places:
            self._step_places = tuple(field.step_place(array) for field, array in pairs)
        n_values = len(cuts[self._segments.lengths]) if self._segments.lengths is not None else None
        self._lines.append(n_lines[0] if n_lines else 1)
        self._lengths.append(lengths)
        return tuple(field.seen(array, period, n_values) for field, array in pairs)

    # The table -----------------------------------------------------------------------------------------------

    def made(self) -> RowTable:
        """Return the table, and the segments of its rows."""
        parts = Parts(np.array(self._files, dtype=np.int64), tuple(self._names)) if self._has_names else None
        layouts = tuple(self._layouts) if self._volumes is None else self._volumes.in_cells(self._layouts)
        return RowTable(
            tuple(self._paths),
            layouts,
            tuple(self._guards),
            parts=parts,
            has_steps=tuple(field.step_axis is not None for field in self._fields),
            is_shared=tuple(
                self._volumes is None and self._has_axis and field.axis is None and field.step_axis is not None
                for field in self._fields
            ),
            step_places=self._step_places or (0,) * len(self._fields),
        )

    @property
    def n_lines(self) -> IntArray:
        """Segments of each part."""
        return np.array(self._lines, dtype=np.int64)

    @property
    def first_lines(self) -> IntArray | None:
        """The number of each part's first segment, and of all segments at the end; None if each part is one."""
        before = np.concatenate([[0], np.cumsum(self.n_lines)]).astype(np.int64)
        return before if before[-1] > len(self._lines) else None

    def segments_of(self, table: RowTable) -> tuple[Segments, IntArray | None]:
        """Return the segments of a table's rows, and the number of each part's first one."""
        if self._segments.cut_keys:
            firsts, lengths, order = self._cut(table)
            kinds = [0 if has_steps else None for has_steps in table.has_steps]
            first_rows = firsts if order is None else np.minimum.reduceat(order, firsts)
            segments = Segments((steps_of(firsts, lengths, table.n_rows),), tuple(kinds), order=order)
            return segments, np.searchsorted(first_rows, table.starts)
        lines = self.n_lines
        inside: IntArray = np.arange(int(lines.sum())) - np.repeat(np.cumsum(lines) - lines, lines)
        periods = np.repeat(np.diff(table.starts) // lines, lines)
        firsts = np.repeat(table.starts[:-1], lines) + inside * periods
        made: dict[bytes, Steps] = {}
        which: list[bytes | None] = []
        for field, has_steps in enumerate(table.has_steps):
            lengths = np.repeat(np.array([each[field] or 0 for each in self._lengths], dtype=np.int64), lines)
            which.append(lengths.tobytes() if has_steps else None)
            if has_steps and lengths.tobytes() not in made:
                made[lengths.tobytes()] = steps_of(firsts, lengths, table.n_rows)
        numbers = {each: number for number, each in enumerate(made)}
        segments = Segments(tuple(made.values()), tuple(None if each is None else numbers[each] for each in which))
        return segments, self.first_lines

    def _cut(self, table: RowTable) -> tuple[IntArray, IntArray, IntArray | None]:
        """Return first row and length of the segments that values tell, and the order of rows if it is another one."""
        segments = self._segments
        if segments.key is not None:
            return by_value(self._column(segments.key, table), self._column(segments.sort_key, table), segments)
        if segments.join is not None:
            firsts = by_coordinate(self._column(segments.join, table), segments.join)
        else:
            firsts = np.concatenate(
                [
                    start + firsts_in(segments, cuts, end - start, self._paths[file])
                    for cuts, file, start, end in zip(
                        self._cuts, self._files, table.starts[:-1].tolist(), table.starts[1:].tolist(), strict=True
                    )
                ]
            )
        return firsts, np.diff(np.append(firsts, table.n_rows)), None

    def _column(self, key: str | None, table: RowTable) -> npt.NDArray[Any] | None:
        if key is None:
            return None
        values = np.concatenate([cuts[key] for cuts in self._cuts])
        if len(values) != table.n_rows:
            raise H5ValueError(
                f"{key!r} has {len(values)} values and the data has {table.n_rows} steps. Name an array with one "
                "value a step."
            )
        return values

    def values_of(self, key: str, table: RowTable) -> npt.NDArray[Any]:
        """Return the value of a column for each segment.

        Raises:
            H5ValueError: a segment has several.
        """
        assert table.sampling is not None, "samples are rows"
        segments, found = table.sampling.segments, []
        numbers = segments.numbers_of(np.arange(len(segments)))
        firsts, lengths = segments.steps[0].firsts_of(), segments.lengths
        for number, first, length in zip(numbers.tolist(), firsts.tolist(), lengths.tolist(), strict=True):
            part, inside = table.part_of_segment(number)
            values = self._cuts[part][key]
            n_here = 1 if table.first_segments is None else int(np.diff(table.first_segments)[part])
            if len(values) == n_here:
                found.append(values[inside])
                continue
            rows = segments.rows_at(np.arange(first, first + length)) - int(table.starts[part])
            if len(values) != int(np.diff(table.starts)[part]) or self._volumes is not None:
                raise H5ValueError(
                    f"{key!r} has {len(values)} values in {self._paths[self._files[part]]!r}, and there are {n_here} "
                    "segments. Name an array with a value for each segment, or each step of one."
                )
            if len(each := np.unique(values[rows])) > 1:
                raise H5ValueError(
                    f"{key!r} has several values in the segment {table.segment_name(number)!r}: "
                    f"{listing(map(str, each))}. Name an array with one value for a segment."
                )
            found.append(values[rows[0]])
        return np.array([one.decode() if isinstance(one, bytes) else one for one in found])


def _each(arrays: Sequence[ArrayLayout], sizes: Sequence[int | None]) -> str:
    return ", ".join(f"{array.key!r} has {n}" for array, n in zip(arrays, sizes, strict=True) if n is not None)

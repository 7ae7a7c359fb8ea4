"""Collects the parts of files that segments are made of, and builds the table of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..catalog import (
    ArrayRequest,
    Catalog,
    PackedText,
    PartNames,
    PartsOfFile,
    SideTable,
    StoredParts,
    check_same,
    parts_in,
    texts_of,
)
from ..errors import H5KeyError, H5ValueError, listing
from ..hdf5 import (
    AlikeArrays,
    Annotations,
    ChangeGuard,
    LayoutTable,
    OpenFile,
    OpenOptions,
    annotations_of,
    column_layout,
    is_attribute_key,
)
from ..readers import ClassNumbers
from .cut_values import CutValues
from .indexer import Indexer
from .part_steps import PartSteps, cells_of_parts, steps_of_parts
from .patch_tables import VolumeTable
from .row_table import Parts, RowTable
from .rows import Rows
from .seen_fields import SeenFields, arrays_along_axis
from .segment_choice import samples_with_lines
from .segment_fields import SampleOptions, SegmentField
from .segment_lines import SegmentLines, lines_of_parts, lines_of_slices
from .table_builder import TableBuilder, collected
from .windows import samples_of

__all__ = ["SegmentTableBuilder"]


class _FileParts(NamedTuple):
    """A file that has parts."""

    path: str
    guard: ChangeGuard
    parts: PartsOfFile
    annotations: dict[str, Annotations | None]


class SegmentTableBuilder(TableBuilder):
    """Collects the parts of files that segments are made of.

    Args:
        catalog: opens the files.
        options: how files are opened.
        fields: the fields with the meaning of their axes.
        samples: the options that define a sample.
        columns: other arrays with one value per segment or step.

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
                "files.swmr cannot be combined with segments, windows or patches: the ends of segments are unknown "
                "while a file is written. Wait until it is closed."
            )
        segments = samples.segments
        self._volumes = None if samples.patch is None else VolumeTable(fields, samples.patch)
        self._catalog, self._options, self._fields, self._samples = catalog, options, fields, samples
        value_keys = [*segments.cut_keys, *columns]
        self._value_columns = {key: len(fields) + at for at, key in enumerate(value_keys)}
        keys = [*(field.request.keys[0] for field in fields), *value_keys]
        self._side_columns = {at: key for at, key in enumerate(keys) if catalog.joins.is_column(key)}
        self._stacks = dict[int, tuple[int, ...]]()  # fields of several arrays, by the numbers of these
        for at, field in enumerate(fields):
            if field.request.is_stack:
                self._stacks[at] = (at, *range(len(keys), len(keys) + len(field.request.keys) - 1))
                keys += field.request.keys[1:]
        own = [key for at, key in enumerate(keys) if at not in self._side_columns]
        self._of_files = [field for at, field in enumerate(fields) if at not in self._side_columns]
        own += catalog.joins.join_keys(self._side_columns, attributes=True)
        drops = segments.missing == "drop"
        self._own = PartNames.of(own, segments.groups, drops=drops)
        self._names = PartNames.of(keys, segments.groups, self._side_columns.values(), drops=drops)
        self._n_missing = 0  # segments that lack an array and are left out
        self._files: list[_FileParts] = []
        self._values = CutValues(segments)

    # Looking at files ----------------------------------------------------------------------------------------

    def look(self, path: str) -> tuple[ChangeGuard, PartsOfFile, dict[str, Annotations | None]]:
        """See ``TableBuilder.look``: the parts of a file, and what it says about the arrays of the first one."""

        def search(
            file: OpenFile, guard: ChangeGuard, alike: AlikeArrays
        ) -> tuple[PartsOfFile, dict[str, Annotations | None]]:
            parts = parts_in(path, self._own, self._options, file, guard, alike)
            names = parts.names
            annotations = dict[str, Annotations | None]()
            for at, key in enumerate(names.keys if len(parts.stars) and not names.cells else ()):
                if not is_attribute_key(key):
                    is_annotated = parts.arrays.template(at, self._catalog.templates).is_annotated
                    annotations[key] = annotations_of(
                        file,
                        names.key(at, parts.stars[0]),
                        may_have_attributes=is_annotated,
                        with_scales=is_annotated and alike.takes_scales(path),
                    )
            return parts, annotations

        guard, (parts, annotations) = self._catalog.look(path, self._options, self._own, search)
        return replace(guard, others=parts.others) if parts.others else guard, parts, annotations

    def add(self, path: str, contents: tuple[ChangeGuard, PartsOfFile, dict[str, Annotations | None]]) -> None:
        """See ``TableBuilder.add``."""
        file = _FileParts(path, *contents)
        self._n_missing += file.parts.n_missing
        if not len(file.parts.stars):
            return
        first = self._files[0] if self._files else file
        if file.parts.names != first.parts.names:
            raise H5ValueError(
                f"{listing(file.parts.names.cells or first.parts.names.cells)} holds references in only one of "
                f"{first.path!r} and {path!r}. Pass files of one kind."
            )
        for field in self._of_files:
            rows = [axis for axis in (field.axis, field.step_axis) if axis is not None]
            self._catalog.check_agreement(
                path, field.request, self._options, rows=rows, selection=field.selection, found=file.annotations
            )
        self._files.append(file)

    # The table -----------------------------------------------------------------------------------------------

    def table(self) -> RowTable:
        """See ``TableBuilder.table``."""
        if not self._files:
            raise H5KeyError(
                f"segments.missing='drop' leaves nothing: each of {self._n_missing:,} segments lacks one of "
                f"{listing(self._own.keys)}. Name arrays that some have."
            )
        names = self._names.of_cells(self._files[0].parts.names.cells)
        stored, lines = self._stored(names)
        self._check_categories(stored)
        stored, numbered = self._with_class_numbers(stored)
        segments = self._samples.segments
        self._values = CutValues.read(stored, self._value_columns, segments, self._options)
        order = self._values.order_of_files(stored.files)
        if order != list(range(len(order))):
            self._files = [self._files[at] for at in order]
            return self.table()
        seen_fields = SeenFields(self._fields, stored, names, {*self._side_columns, *numbered}, self._values)
        fields = seen_fields.seen()
        if self._volumes is None:
            steps = steps_of_parts(stored, fields, self._values, has_axis=seen_fields.has_axis)
        else:
            steps = cells_of_parts(stored, fields, self._volumes)
        table = RowTable(
            stored.paths,
            steps.layouts,
            stored.guards,
            steps.starts,
            Rows.of(steps.starts, len(fields)),
            parts=None if names.pattern is None else self._named_parts(stored, names),
            has_steps=steps.has_steps,
            is_shared=steps.is_shared,
            step_places=steps.step_places,
            first_segments=steps.first_segments,
            n_missing=self._n_missing,
        )
        table = self._with_samples(table, steps, lines, are_cells=bool(names.cells))
        return table if lines is None else replace(table, indexer=samples_with_lines(table, lines))

    def _with_samples(
        self, table: RowTable, steps: PartSteps, lines: SegmentLines | None, *, are_cells: bool
    ) -> RowTable:
        """Return a table of steps with their samples.

        Args:
            table: the table.
            steps: steps of the parts.
            lines: lines of the side table; None without one.
            are_cells: parts are arrays that references point to.
        """
        samples = self._samples
        indexer: Indexer
        if self._volumes is not None:
            indexer = self._volumes.indexer(steps.starts, steps.n_lines, table.layouts[0], samples.seed)
            return replace(table, indexer=indexer)
        if are_cells and samples.sample is None and samples.window is None:
            samples = replace(samples, sample="segment")
        if samples.segments.cut_keys:
            kinds = tuple(0 if has_steps else None for has_steps in steps.has_steps)
            segments, first_segments = self._values.segments(steps.starts, kinds)
            table = replace(table, first_segments=first_segments)
        else:
            segments = steps.segments(None if lines is None else lines.spans, table.name_of_part)
        indexer = samples_of(segments, steps.fields, samples, table.segment_name)
        return replace(table, indexer=indexer)

    def _check_categories(self, stored: StoredParts) -> None:
        """Raise an ``H5ValueError`` if codes of categories mean something else in another file, of any split."""
        for at in range(len(self._fields)):
            array = stored.one(0, at)
            if array.categories is None:
                continue
            parts = np.unique(stored.files, return_index=True)[1].tolist()  # the first of each file
            arrays = [stored.one(part, at).categories for part in parts]
            first = self._catalog.once(("first categories", array.key), partial(stored.one, 0, at)).categories
            if first is not arrays[0] or len(arrays) > 1:
                advice = "Segments have codes as they are stored: write files with the same categories."
                check_same(array.key, [first, *arrays], self._options, advice)

    def _named_parts(self, stored: StoredParts, names: PartNames) -> Parts:
        return Parts(stored.files, names, stored.stars, self._aliases(names))

    def _aliases(self, names: PartNames) -> dict[tuple[int, str], str]:
        """Return names of parts by their other names (see ``Parts.aliases``)."""
        return {
            (at, names.part(alias)): names.part(star)
            for at, file in enumerate(self._files)
            for alias, star in file.parts.aliases.items()
        }

    # Arrays --------------------------------------------------------------------------------------------------

    def _stored(self, names: PartNames) -> tuple[StoredParts, SegmentLines | None]:
        """Return the arrays of all parts, and the lines of a side table that belong to them.

        Args:
            names: names of parts and arrays, with the columns of the side table.
        """
        files = self._files
        own_names, n_parts = files[0].parts.names, [len(file.parts.stars) for file in files]
        stored = StoredParts(
            LayoutTable.of([file.parts.arrays for file in files], len(own_names.keys), self._catalog.templates),
            own_names,
            PackedText.joined([file.parts.stars for file in files]),
            np.repeat(np.arange(len(files), dtype=np.int32), n_parts),
            tuple(file.path for file in files),
            tuple(file.guard for file in files),
        )
        lines, side = None, self._catalog.joins.side
        if side is not None and self._side_columns:
            lines = self._lines_of(side, stored, names)
            stored = self._with_columns(stored, side, lines, names)
        stacked_as = {at: self._fields[at].request.key for at in self._stacks}
        stored = replace(stored, stacks=self._stacks, stacked_as=stacked_as)
        stored.check_stacks()
        return stored, lines

    def _lines_of(self, side: SideTable, own: StoredParts, names: PartNames) -> SegmentLines:
        """Return the lines of a side table that belong to parts, or to their segments."""
        if not side.slices:
            return lines_of_parts(side, own, names, self._options, self._aliases(names))
        of_files = [at for at in range(len(self._fields)) if at not in self._side_columns]
        columns = {at: column for column, at in enumerate(of_files)}
        field, _, arrays = arrays_along_axis(self._fields, columns, own)
        return lines_of_slices(side, own, names, field, arrays)

    def _with_columns(self, own: StoredParts, side: SideTable, lines: SegmentLines, names: PartNames) -> StoredParts:
        """Return the arrays of all parts with columns of a side table among them."""
        table, all_lines = own.table, np.concatenate(lines.of_parts)
        ends = np.cumsum([len(of_part) for of_part in lines.of_parts])[:-1]
        for at, key in self._side_columns.items():
            request = self._fields[at].request if at < len(self._fields) else ArrayRequest(key=key)
            values = np.split(side.values(request, all_lines), ends)
            describe = partial(column_layout, path=own.paths[0], key=key, guard=own.guards[0])
            table = table.with_column(at, values, describe)
        return replace(own, table=table, names=names)

    def _with_class_numbers(self, stored: StoredParts) -> tuple[StoredParts, list[int]]:
        """Return the arrays with class numbers in place of text that is decoded as a category, and their columns."""
        numbered = []
        for at, field in enumerate(self._fields):
            if not isinstance(field.request.codec, ClassNumbers) or stored.one(0, at).categories is not None:
                continue
            arrays = [stored.one(part, at) for part in range(len(stored.files))]
            if field.axis is None and field.step_axis is None and arrays[0].value is None:
                raise H5ValueError(
                    f"decode='category' was given for {field.name!r}, which has no steps (segments.constants), but "
                    "it decodes one text for each segment or step. Leave it out of decode."
                )
            numbers = self._catalog.class_numbers(
                field.request, arrays, self._options, partial(self._texts_of_field, field)
            )
            describe = partial(column_layout, path=stored.paths[0], key=field.request.key, guard=stored.guards[0])
            stored = replace(stored, table=stored.table.without_column(at).with_column(at, numbers, describe))
            numbered.append(at)
        return stored, numbered

    def _texts_of_field(self, field: SegmentField, files: Sequence[str], key: str) -> list[npt.NDArray[Any]]:
        """Return the text of a field in all parts of other files.

        Args:
            field: the field.
            files: the files.
            key: its array there.
        """
        other = replace(field, request=replace(field.request, key=key, codec=None))

        def make(_: Sequence[ArrayRequest]) -> SegmentTableBuilder:
            return SegmentTableBuilder(self._catalog, self._options, [other], self._samples, ())

        builder = collected(make, [other.request], files)
        if not builder._files:
            return []
        stored, _ = builder._stored(builder._names.of_cells(builder._files[0].parts.names.cells))
        return [texts_of(stored.one(part, 0), self._options) for part in range(len(stored.files))]

    # Values --------------------------------------------------------------------------------------------------

    @property
    def cut_by(self) -> list[str]:
        """See ``TableBuilder.cut_by``."""
        segments = self._samples.segments
        return [key for key in (segments.key, segments.sort_key) if key is not None]

    def values_of(self, key: str) -> list[npt.NDArray[Any]]:
        """See ``TableBuilder.values_of``."""
        return self._values.of_key(key)

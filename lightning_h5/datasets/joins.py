"""Arrays that are not of the data's own files: columns of a side table, and arrays of other files.

Lines of a side table are joined with rows, or with segments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, listing
from ..hdf5 import AlikeArrays, ArrayLayout, ChangeGuard, OpenOptions, is_attribute_key
from ..options import TableOptions
from ..order import resolve_replica
from ..types import IntArray
from .column_values import values_of
from .compatibility import Asked
from .part_layouts import StoredParts
from .segment_fields import SegmentField
from .segment_parts import PartNames, attribute_of
from .side_table import OR_DROP, SideTable, is_of_table

if TYPE_CHECKING:
    from .catalog import Catalog

__all__ = ["Joins", "SegmentLines", "lines_of_parts", "lines_of_slices", "with_others"]


class Joins:
    """Joins rows of files with columns of a side table, and with rows of other files.

    Args:
        matched: what was matched by its order, with the rows that it belongs to; kept by the caller if these have to
            agree with those of earlier files.

    Attributes:
        side: the side table; None without one.
        rows_of: rows of files that a table was made of.
        split: what ``{split}`` in paths of tables and other files stands for.
        group: the same for keys, if the rows of a split are told apart by these; empty if files alone tell.
    """

    def __init__(self, matched: dict[Any, Any] | None = None) -> None:
        self.side: SideTable | None = None
        self.rows_of: dict[str, int] = {}
        self.split, self.group = "train", ""
        self._sides: dict[str, SideTable] = {}
        self._matched = {} if matched is None else matched

    def use(self, table: Any) -> None:
        """Take columns from a side table, which is read once for all that ask for it.

        Args:
            table: see ``TableOptions``; None for none.
        """
        if table is None:
            return
        options = TableOptions.parse(table, "table")
        path = os.fspath(options.path).replace("{split}", self.split)
        if path not in self._sides:
            self._sides[path] = SideTable(replace(options, path=path))
        self.side = self._sides[path]

    def sources(self, asked: Sequence[Asked]) -> tuple[str | None, str | None]:
        """Return how joins of equal arguments differ: by the side table, and the split if its name is in paths."""
        names_files = any(one.paths is not None for one in asked)
        return None if self.side is None else self.side.path, self.split if names_files else None

    def log_unused(self) -> None:
        """Log how many lines of side tables are of no sample that was asked for."""
        for side in self._sides.values() if resolve_replica().rank == 0 else ():
            side.log_unused()

    def match(self, what: Any, name: str, paths: Sequence[str]) -> None:
        """Note that something belongs to the rows of files by its order, which no other rows can have.

        Args:
            what: which table, or which files.
            name: for an error.
            paths: the files with the rows.

        Raises:
            H5ValueError: it belongs to other rows.
        """
        rows = (self.group, tuple(paths))
        of, known = self._matched.setdefault(what, (self.split, rows))
        if known != rows:
            raise H5ValueError(
                f"{name} is matched with rows by its order: it belongs to those of {of} ({listing(known[1], 2)}), and "
                f"was asked for {self.split} ({listing(paths, 2)}). Name one for each split, with {{split}} in its "
                "path, or join lines by a key (table.on)."
            )

    def check_place(self, n_rows: int, paths: Sequence[str]) -> None:
        """Check that lines of a side table that are joined by their place belong to the rows of files.

        Args:
            n_rows: rows of all files.
            paths: the files.

        Raises:
            H5ValueError: they are more or fewer than rows, or belong to other rows.
        """
        if self.side is not None and self.side.compared_with is None:
            self.match(self.side.path, f"table={self.side.path!r}", paths)
            self.side.check_number(n_rows)

    def is_column(self, key: str) -> bool:
        """Return whether a name is that of a column of the side table; without one it is that of an array."""
        return self.side is not None and is_of_table(key)

    def join_keys(self, columns: Collection[int], *, attributes: bool = False) -> list[str]:
        """Return the array, or also the attribute, that a side table is joined on if its columns are asked for."""
        field = None if self.side is None else self.side.field
        return [] if not columns or field is None or (is_attribute_key(field) and not attributes) else [field]

    def describe_with_columns(
        self,
        catalog: Catalog,
        path: str,
        asked: Sequence[Asked],
        own: Sequence[str],
        n_rows: int,
        first: int,
        options: OpenOptions,
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        """Return the guard of a file, and its arrays with columns of a side table among them.

        Args:
            catalog: describes arrays.
            path: the file.
            asked: all arrays.
            own: names of those of the file.
            n_rows: rows that columns have.
            first: rows of the files before it.
            options: how it is opened.

        Raises:
            H5ValueError: a row has no line.
        """
        join = self.join_keys([0])
        guard, found = catalog.describe(path, [*own, *join], options)
        self.rows_of[path] = n_rows
        columns = [one for one in asked if self.is_column(one.key)]
        made, lacks = self.with_columns(catalog, columns, path, guard, (), options, found[len(own) :], first)
        if lacks.any():
            raise H5ValueError(
                f"table.missing='drop' was given, and {int(lacks.sum())} rows of {path!r} have no line: rows of sparse "
                "matrices are not left out by it. Complete the table, or leave them out with a filter (where)."
            )
        of_file, of_table = iter(found), iter(made)
        return guard, tuple(next(of_table) if self.is_column(one.key) else next(of_file) for one in asked)

    def with_columns(
        self,
        catalog: Catalog,
        asked: Sequence[Asked],
        path: str,
        guard: ChangeGuard,
        own: Sequence[ArrayLayout],
        options: OpenOptions,
        join: Sequence[ArrayLayout],
        first: int,
    ) -> tuple[tuple[ArrayLayout, ...], npt.NDArray[np.bool_]]:
        """Return the arrays of a file with columns of the side table among them, and which rows have no line.

        Args:
            catalog: opens the file.
            asked: all arrays, those of the table among them.
            path: the file.
            guard: of the file.
            own: its own arrays among them.
            options: how it is opened.
            join: the array that lines are compared with; none if they are joined otherwise.
            first: rows of the files before it.
        """
        side, keys = self.side, [values_of(array, options) for array in join]
        assert side is not None, "columns are asked for"
        n_rows = own[0].n_rows if own else len(keys[0]) if keys else self.rows_of.get(path)
        if (field := side.field) is not None and is_attribute_key(field) and n_rows is not None:

            def look(file: Any, guard: ChangeGuard, _: AlikeArrays) -> ArrayLayout:
                return attribute_of(file, path, "", field, guard, allow_external=options.files.allow_external)

            _, attribute = catalog.look(path, options, ("attribute", field), look)
            keys = [np.repeat(values_of(attribute, options), n_rows)]
        if n_rows is None:
            raise H5ValueError(f"only columns of {side.path!r} were named for {path!r}. Name an array of the file too.")
        lines = side.lines_of_rows(path, n_rows, first, keys[0] if keys else None)
        if side.compared_with is None:
            lines = np.minimum(lines, max(side.n_lines - 1, 0))  # their number is checked once all files are known
        of_file = iter(own)
        found = [side.layout(o, path, guard, lines) if self.is_column(o.key) else next(of_file) for o in asked]
        return tuple(found), lines < 0

    def of_others(
        self, catalog: Catalog, asked: Asked, paths: Sequence[str], options: OpenOptions
    ) -> dict[str, tuple[ChangeGuard, ArrayLayout]]:
        """Return for each file of the data the array of another file with the same rows, and that file's guard."""
        assert asked.paths is not None, "the data has it"
        named = [asked.paths] if isinstance(asked.paths, str | os.PathLike) else asked.paths
        others = catalog.files([os.fspath(one).replace("{split}", self.split) for one in named], "path")
        self.match((others, asked.key), f"{asked.key!r} of {listing(others, 2)}", paths)
        if len(others) != len(paths):
            raise H5ValueError(
                f"{asked.key!r} was named in {len(others)} other files ({listing(others)}), and the data has "
                f"{len(paths)} files. Pass as many, in the order of the data's."
            )
        found = {}
        for path, other in zip(paths, others, strict=True):
            guard, (array,) = catalog.describe(other, [asked.key], options)
            found[path] = guard, asked.decoded(array)
        return found


def with_others(
    guard: ChangeGuard, found: Sequence[ArrayLayout], others: Mapping[int, tuple[ChangeGuard, ArrayLayout]]
) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
    """Return a file's guard with those of other files, and its arrays with theirs at their places."""
    arrays = list(found)
    for at in sorted(others):
        arrays.insert(at, others[at][1])
    more = {each.path: each for each, _ in others.values()}
    return replace(guard, others=(*guard.others, *more.values())), tuple(arrays)


SPAN = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True, eq=False)
class SegmentLines:
    """The lines of a side table that segments have; -1 for none.

    Attributes:
        of_parts: of each part one line, or one for each of its segments or steps.
        spans: first step, and the one after the last, of each segment, shape ``(n_segments, 2)``; None for all steps.
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
    """Return the lines of parts, by what a part is called, or by the values of an array or attribute.

    Args:
        side: the table.
        stored: the arrays of all parts; the last one is what lines are compared with, if that is an array.
        names: how parts are called.
        options: how files are opened.
        aliases: names of parts by their other names (see ``Parts``).

    Raises:
        H5ValueError: a part has no line, or what lines are compared with has several types.
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
        others = dict[tuple[int, str], str]()  # for names without a line, other names that have one
        for (file, other), name in aliases.items():
            if side.has_line(side.key_of(stored.paths[file], other)):
                others.setdefault((file, name), other)
        of_parts = []
        for file, star in zip(stored.files.tolist(), stored.stars, strict=True):
            name = names.part(star) or stored.paths[file]
            key = side.key_of(stored.paths[file], name)
            if (file, name) in others and not side.has_line(key):
                key = side.key_of(stored.paths[file], others[file, name])
            of_parts.append(key)
        keys, sizes = np.array([*of_parts, None], dtype=object)[:-1], np.ones(n_parts, dtype=np.int64)
    else:
        at = len(stored.names.keys) - 1
        values = [values_of(stored.one(part, at), options) for part in range(n_parts)]
        if len(kinds := {one.dtype.kind == "O" for one in values}) > 1:
            raise H5ValueError(f"{side.field!r}, which table.on names, is text in some files and numbers in others.")
        keys, sizes = np.concatenate(values), np.array([len(one) for one in values], dtype=np.int64)
        keys = keys.astype(object) if True in kinds else keys
    ends = np.cumsum(sizes)
    lines = side.lines_of(
        keys, lambda at: f"{side.compared_with} of {part_name(int(np.searchsorted(ends, at, side='right')))}"
    )
    return SegmentLines(np.split(lines, ends[:-1]))


def lines_of_slices(
    side: SideTable, stored: StoredParts, names: PartNames, field: SegmentField, arrays: Sequence[ArrayLayout]
) -> SegmentLines:
    """Return the lines of segments along an axis that slices name, such as ``bucket0$3,:3,:600``.

    The index, ``3``, is that of the segment in the array ``bucket0``; the span of the step axis, ``:600``, says which
    steps are no padding.

    Args:
        side: the table.
        stored: the parts.
        names: how parts are called.
        field: how arrays are seen.
        arrays: one of each part, with segments along an axis.

    Raises:
        H5ValueError: a slice names what its array has not, a row twice, or a part of another axis; or a segment has no
            line.
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
        self._of: dict[str, list[tuple[int, list[str]]]] = {}
        assert side.column_on is not None, "it names slices"
        for line, text in enumerate(side.column(side.column_on).values.tolist()):
            name, _, inside = text.partition("$")
            self._of.setdefault(name, []).append((line, inside.replace(" ", "").split(",")))

    def of_array(self, name: str, array: ArrayLayout, field: SegmentField) -> tuple[IntArray, IntArray]:
        """Return the line, and the first and last step, of each segment of an array."""
        shape = (array.n_rows, *array.axes)
        axis, step_axis = (one % len(shape) for one in (field.axis or 0, field.step_axis or 0))
        n_segments = shape[axis]
        lines = np.full(n_segments, -1, dtype=np.int64)
        spans = np.tile(np.array([0, shape[step_axis]], dtype=np.int64), (n_segments, 1))
        for line, parts in self._of.get(name, []):
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
            lacking = np.flatnonzero(lines < 0).tolist()
            raise H5ValueError(
                f"{self._side.path!r} has no line for {len(lacking):,} of {n_segments:,} segments of {array.key!r} in "
                f"{array.path!r}, such as index {listing(map(str, lacking), 3)}. {OR_DROP}"
            )
        return lines, spans

    def _error(self, text: str, array: ArrayLayout, what: str) -> H5ValueError:
        return H5ValueError(
            f"{self._side.path!r} names {text!r} in {self._side.column_on!r}, and {array.key!r} in {array.path!r} "
            f"{what}."
        )

"""Arrays that are not of the data's own files: columns of a side table, and arrays of other files.

Lines of a side table are joined with rows, or with segments.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, listing
from ..hdf5 import AlikeArrays, ArrayLayout, ChangeGuard, OpenOptions, is_attribute_key
from ..options import TableOptions
from ..order import resolve_replica
from .column_values import values_of
from .compatibility import ArrayRequest, joined_arrays
from .segment_parts import attribute_of
from .side_table import SideTable, is_of_table

if TYPE_CHECKING:
    from .catalog import Catalog

__all__ = ["Joins", "with_others"]


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

    def sources(self, asked: Sequence[ArrayRequest]) -> tuple[str | None, str | None]:
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
        asked: Sequence[ArrayRequest],
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
        of_file = iter(joined_arrays([one for one in asked if not self.is_column(one.key)], found[: len(own)]))
        of_table = iter(made)
        return guard, tuple(next(of_table) if self.is_column(one.key) else next(of_file) for one in asked)

    def with_columns(
        self,
        catalog: Catalog,
        asked: Sequence[ArrayRequest],
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
        self, catalog: Catalog, asked: ArrayRequest, paths: Sequence[str], options: OpenOptions
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

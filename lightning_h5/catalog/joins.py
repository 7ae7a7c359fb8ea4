"""Join the rows of the data's files with columns of a side table, and with arrays of other files.

Lines of a side table belong to rows, or to segments.
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
        matched: for each table or array that is matched by its order, the rows that it belongs to. The caller passes
            it again if these have to agree with the rows of earlier files.

    Attributes:
        side: the side table; None without one.
        rows_of: number of rows of each file that was described.
        split: the name that replaces ``{split}`` in paths of tables and other files.
        group: the same for keys, if keys distinguish the rows of a split; empty if files do.
    """

    def __init__(self, matched: dict[Any, Any] | None = None) -> None:
        self.side: SideTable | None = None
        self.rows_of: dict[str, int] = {}
        self.split, self.group = "train", ""
        self._sides: dict[str, SideTable] = {}
        self._matched = {} if matched is None else matched

    def use(self, table: Any) -> None:
        """Use the columns of a side table, which is read only once.

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

    def sources(self, requests: Sequence[ArrayRequest]) -> tuple[str | None, str | None]:
        """Return the side table, and the split if paths depend on it: joins of equal arguments differ by these."""
        names_files = any(request.paths is not None for request in requests)
        return None if self.side is None else self.side.path, self.split if names_files else None

    def log_unused(self) -> None:
        """Log how many lines of side tables belong to no sample."""
        for side in self._sides.values() if resolve_replica().rank == 0 else ():
            side.log_unused()

    def match(self, source: Any, name: str, paths: Sequence[str]) -> None:
        """Match a table or array with the rows of files by its order; it cannot belong to other rows, too.

        Args:
            source: the path of the table, or the files and key of the array.
            name: for an error.
            paths: the files with the rows.

        Raises:
            H5ValueError: it belongs to other rows.
        """
        rows = (self.group, tuple(paths))
        split, matched = self._matched.setdefault(source, (self.split, rows))
        if matched != rows:
            raise H5ValueError(
                f"{name} is matched with rows by its order: it belongs to those of {split} ({listing(matched[1], 2)}), "
                f"and was asked for {self.split} ({listing(paths, 2)}). Name one for each split, with {{split}} in its "
                "path, or join lines by a key (table.on)."
            )

    def check_place(self, n_rows: int, paths: Sequence[str]) -> None:
        """Check that lines of a side table that are joined by their number belong to the rows of files.

        Args:
            n_rows: rows of all files.
            paths: the files.

        Raises:
            H5ValueError: there are more or fewer lines than rows, or they belong to other rows.
        """
        if self.side is not None and self.side.compared_with is None:
            self.match(self.side.path, f"table={self.side.path!r}", paths)
            self.side.check_number(n_rows)

    def is_column(self, key: str) -> bool:
        """Return whether a name is a column of the side table. Without a side table all names are arrays."""
        return self.side is not None and is_of_table(key)

    def join_keys(self, columns: Collection[int], *, attributes: bool = False) -> list[str]:
        """Return the array, or also attribute, that a side table is joined on; none if no column is requested."""
        field = None if self.side is None else self.side.field
        return [] if not columns or field is None or (is_attribute_key(field) and not attributes) else [field]

    def describe_with_columns(
        self,
        catalog: Catalog,
        path: str,
        requests: Sequence[ArrayRequest],
        own: Sequence[str],
        n_rows: int,
        first: int,
        options: OpenOptions,
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        """Return the guard of a file, and its arrays with columns of a side table among them.

        Args:
            catalog: describes arrays.
            path: the file.
            requests: all arrays.
            own: names of the file's own arrays among them.
            n_rows: length of the columns.
            first: rows of the files before it.
            options: how it is opened.

        Raises:
            H5ValueError: a row has no line.
        """
        join = self.join_keys([0])
        guard, layouts = catalog.describe(path, [*own, *join], options)
        self.rows_of[path] = n_rows
        column_requests = [request for request in requests if self.is_column(request.key)]
        keys = layouts[len(own) :]
        columns, lacks = self.with_columns(catalog, column_requests, path, guard, (), options, keys, first)
        if lacks.any():
            raise H5ValueError(
                f"table.missing='drop' was given, and {int(lacks.sum())} rows of {path!r} have no line: rows of sparse "
                "matrices are not left out by it. Complete the table, or leave them out with a filter (where)."
            )
        own_requests = [request for request in requests if not self.is_column(request.key)]
        of_file, of_table = iter(joined_arrays(own_requests, layouts[: len(own)])), iter(columns)
        return guard, tuple(next(of_table if self.is_column(request.key) else of_file) for request in requests)

    def with_columns(
        self,
        catalog: Catalog,
        requests: Sequence[ArrayRequest],
        path: str,
        guard: ChangeGuard,
        own: Sequence[ArrayLayout],
        options: OpenOptions,
        join: Sequence[ArrayLayout],
        first: int,
    ) -> tuple[tuple[ArrayLayout, ...], npt.NDArray[np.bool_]]:
        """Return the arrays of a file with columns of the side table among them, and a mask of rows without a line.

        Args:
            catalog: opens the file.
            requests: all arrays, including columns of the table.
            path: the file.
            guard: of the file.
            own: its own arrays among them.
            options: how it is opened.
            join: the array that lines are compared with; none if lines are joined by names or by number.
            first: rows of the files before it.
        """
        side, keys = self.side, [values_of(array, options) for array in join]
        assert side is not None, "columns are requested"
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
            lines = np.minimum(lines, max(side.n_lines - 1, 0))  # check_place compares the numbers of lines and rows
        of_file = iter(own)
        layouts = [
            side.layout(request, path, guard, lines) if self.is_column(request.key) else next(of_file)
            for request in requests
        ]
        return tuple(layouts), lines < 0

    def of_others(
        self, catalog: Catalog, request: ArrayRequest, paths: Sequence[str], options: OpenOptions
    ) -> dict[str, tuple[ChangeGuard, ArrayLayout]]:
        """Return for each file of the data the array of another file with the same rows, and that file's guard."""
        assert request.paths is not None, "the array is of other files"
        key, named = request.key, request.paths
        patterns = [named] if isinstance(named, str | os.PathLike) else named
        others = catalog.files([os.fspath(pattern).replace("{split}", self.split) for pattern in patterns], "path")
        self.match((others, key), f"{key!r} of {listing(others, 2)}", paths)
        if len(others) != len(paths):
            raise H5ValueError(
                f"{key!r} was named in {len(others)} other files ({listing(others)}), and the data has "
                f"{len(paths)} files. Pass as many, in the order of the data's."
            )
        arrays = {}
        for path, other in zip(paths, others, strict=True):
            guard, (array,) = catalog.describe(other, [key], options)
            arrays[path] = guard, request.decoded(array)
        return arrays


def with_others(
    guard: ChangeGuard, own: Sequence[ArrayLayout], others: Mapping[int, tuple[ChangeGuard, ArrayLayout]]
) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
    """Return a file's guard with the guards of other files, and its own arrays with theirs inserted.

    Args:
        guard: of the file.
        own: its arrays.
        others: guard and array of another file, by the index of the array in the result.
    """
    arrays = list(own)
    for at in sorted(others):
        arrays.insert(at, others[at][1])
    guards = {other.path: other for other, _ in others.values()}
    return replace(guard, others=(*guard.others, *guards.values())), tuple(arrays)

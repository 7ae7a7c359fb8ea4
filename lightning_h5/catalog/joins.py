"""The side table and the other files that are joined with the rows of the data, and the rows that they belong to.

Lines of a side table belong to rows, or to segments.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from ..errors import H5ValueError, listing
from ..hdf5 import is_attribute_key
from ..options import TableOptions
from ..order import resolve_replica
from .compatibility import ArrayRequest
from .side_table import SideTable, is_of_table

__all__ = ["Joins"]


class Joins:
    """The sources that rows of files are joined with: a side table, and other files with the same rows.

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
        self._table: TableOptions | None = None
        self._matched = {} if matched is None else matched

    def use(self, table: Any) -> None:
        """Use the columns of a side table, which is read only once.

        Args:
            table: see ``TableOptions``; None for none.
        """
        if table is None:
            return
        self._table = TableOptions.parse(table, "table")
        self.side = self._side_of(self.split)

    def texts_of_training(self, key: str) -> npt.NDArray[Any]:
        """Return the text in a column of the training split's side table, without missing values.

        Raises:
            H5ValueError: the column has numbers.
        """
        side = self._side_of("train")
        column = side.column(key)
        if column.values.dtype.kind != "O":
            raise H5ValueError(
                f"decode='category' was given for {key!r}, and this column of {side.path!r} has numbers, not text. "
                "Leave it out of decode."
            )
        return column.values if column.is_missing is None else column.values[~column.is_missing]

    def _side_of(self, split: str) -> SideTable:
        options = TableOptions.parse(self._table, "table")
        path = os.fspath(options.path).replace("{split}", split)
        if path not in self._sides:
            self._sides[path] = SideTable(replace(options, path=path))
        return self._sides[path]

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
                f"{name} is matched with rows by its order: it belongs to the rows of {split} "
                f"({listing(matched[1], 2)}), but was requested for {self.split} ({listing(paths, 2)}). Name one "
                "for each split, with {split} in its path, or join lines by a key (table.on)."
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

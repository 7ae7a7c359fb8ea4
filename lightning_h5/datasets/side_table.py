"""Side tables: labels and other values of samples in a CSV, TSV or Parquet file, joined with the rows of HDF5 files."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5FileError, H5KeyError, H5ValueError, listing, near
from ..hdf5 import ArrayLayout, ChangeGuard, Stack, column_layout, expand_user
from ..options import TableOptions
from ..types import IntArray
from .compatibility import Asked

__all__ = ["PREFIX", "SideTable", "is_of_table"]

PREFIX = "table/"
"""Names of columns begin with it."""

SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}

_log = logging.getLogger(__name__)


def is_of_table(key: str) -> bool:
    """Return whether a name is that of a column of a side table, or of several that are stacked."""
    return key.startswith(PREFIX) or key == PREFIX.rstrip("/")


class SideTable:
    """A table with a line for each sample, or for each value of a field.

    Args:
        options: which file, and how it is joined.

    Raises:
        H5FileError: it cannot be read.
        H5ValueError: it has no column to join on, or a key twice.
    """

    def __init__(self, options: TableOptions) -> None:
        self.options = options
        self.path = expand_user(options.path)
        self.column_on, self.compared_with = options.join
        self._columns = _read(self.path, self.column_on)
        self._lines: dict[bool, dict[Any, int]] = {}  # by whether keys are numbers
        self._used: set[int] = set()
        self.n_lines = len(next(iter(self._columns.values()))) if self._columns else 0

    @property
    def field(self) -> str | None:
        """The array that lines are compared with; None if they belong to files, segments or rows by their place."""
        return None if self.compared_with is None or self.compared_with.startswith("@") else self.compared_with

    def column(self, key: str) -> npt.NDArray[Any]:
        """Return all values of a column: numbers, or text as objects.

        Raises:
            H5KeyError: there is none.
            H5ValueError: integers or text of some lines are missing.
        """
        name = key.removeprefix(PREFIX)
        if name not in self._columns:
            raise H5KeyError(
                f"{key!r} was asked for, and {self.path!r} has no column {name!r}; it has {listing(self._columns)}."
                f"{near(name, self._columns)} Name one of these, after 'table/'."
            )
        return self._columns[name]

    def lines_of(self, keys: npt.NDArray[Any], where: str) -> IntArray:
        """Return the line of each key; -1 if there is none and these may be left out.

        Args:
            keys: numbers or text.
            where: what has these keys, for errors.

        Raises:
            H5ValueError: the table has no line for a key, or several.
        """
        is_number = keys.dtype.kind in "biuf"
        if is_number not in self._lines:
            self._lines[is_number] = self._index(is_number=is_number)
        index = self._lines[is_number]
        each = (
            keys.tolist() if is_number else [one.decode() if isinstance(one, bytes) else one for one in keys.tolist()]
        )
        lines = np.array([index.get(one, -1) for one in each], dtype=np.int64)
        if (lines < 0).any() and self.options.missing == "error":
            absent = list(dict.fromkeys(each[at] for at in np.flatnonzero(lines < 0).tolist()))
            raise H5ValueError(
                f"{self.path!r} has no line in which {self.column_on!r} is {listing(map(str, absent))}, which {where} "
                f"{'has' if len(absent) == 1 else 'have'}: {len(absent):,} of {len(set(each)):,} keys. Complete the "
                "table, or pass table={..., 'missing': 'drop'} to leave out what has no line."
            )
        self._used.update(lines[lines >= 0].tolist())
        return lines

    def _index(self, *, is_number: bool) -> dict[Any, int]:
        """Return the line of each key."""
        assert self.column_on is not None, "lines are joined by their place"
        texts = self.column(self.column_on).tolist()
        keys: list[Any] = texts
        if is_number:
            try:
                keys = [int(text) if text.lstrip("+-").isdigit() else float(text) for text in map(str, texts)]
            except ValueError:
                raise H5ValueError(
                    f"{self.column_on!r} of {self.path!r} has text such as {listing(texts, 3)}, and "
                    f"{self.compared_with!r} has numbers. Name columns of one kind (table.on)."
                ) from None
        index: dict[Any, int] = {}
        twice = []
        for line, key in enumerate(keys):
            if index.setdefault(key, line) != line:
                twice.append(key)
        if twice:
            keys_of_several = listing(dict.fromkeys(map(str, twice)))
            raise H5ValueError(
                f"{self.path!r} has several lines in which {self.column_on!r} is {keys_of_several}. Leave one line for "
                "each key."
            )
        return index

    def lines_of_rows(self, path: str, n_rows: int, first: int, keys: npt.NDArray[Any] | None) -> IntArray:
        """Return the line of each row of a file.

        Args:
            path: the file.
            n_rows: its rows.
            first: rows of the files before it.
            keys: values of ``field``; None if lines are joined otherwise.

        Raises:
            H5ValueError: rows have no line, or keys belong to others.
        """
        if self.compared_with is None:
            return np.arange(first, first + n_rows)
        if keys is not None:
            if len(keys) != n_rows:
                raise H5ValueError(
                    f"table.on compares with {self.field!r}, which has {len(keys)} values in {path!r}, and the data "
                    f"has {n_rows} rows there. Name an array with one value a row."
                )
            return self.lines_of(keys, f"{self.field!r} of {path!r}")
        return np.repeat(self.line_of_part(path, os.path.basename(path)), n_rows)

    def line_of_part(self, path: str, name: str) -> IntArray:
        """Return the line of a file, or of a segment of it, as an array of one.

        Raises:
            H5ValueError: there is none, or lines are joined otherwise.
        """
        if self.compared_with not in ("@stem", "@name"):
            raise H5ValueError(
                f"table.on={self.options.on!r} was given, and samples are made of segments. Pass {{column: '@stem'}} "
                "(a line for each file) or {column: '@name'} (a line for each group or array)."
            )
        key = stem_of(path) if self.compared_with == "@stem" else name.rpartition("/")[2]
        return self.lines_of(np.array([key], dtype=object), f"{self.compared_with} of {name!r} in {path!r}")

    def check_number(self, n_rows: int) -> None:
        """Raise an ``H5ValueError`` if lines are joined by their place, and are more or fewer than rows."""
        if self.compared_with is None and self.n_lines != n_rows:
            raise H5ValueError(
                f"{self.path!r} has {self.n_lines} lines and the data has {n_rows} rows; without table.on line i "
                "belongs to row i. Name what to join on (table.on), or complete the table."
            )

    def layout(self, asked: Asked, path: str, guard: ChangeGuard, lines: IntArray) -> ArrayLayout:
        """Return a column as an array of a file.

        Args:
            asked: the column.
            path: the file that the rows are of.
            guard: of the file.
            lines: line of each row; rows without one have zeros, or empty text.
        """
        return column_layout(self._values(asked, lines), path, asked.key, guard)

    def _values(self, asked: Asked, lines: IntArray) -> npt.NDArray[Any]:
        if isinstance(asked.codec, Stack):
            columns = [self.taken(PREFIX + member, lines) for member in asked.codec.members]
            if text := [m for m, c in zip(asked.codec.members, columns, strict=True) if c.dtype.kind == "O"]:
                raise H5ValueError(
                    f"{listing(text)} of {self.path!r} are text, and numbers are stacked. Leave them out."
                )
            return np.stack([column.astype(np.float32) for column in columns], axis=-1)
        return self.taken(asked.key, lines)

    def taken(self, key: str, lines: IntArray) -> npt.NDArray[Any]:
        """Return the values of a column in some lines; zero, or empty text, for -1."""
        column = self.column(key)
        values = column[np.maximum(lines, 0)] if len(column) else np.zeros(len(lines), column.dtype)
        if column.dtype.kind == "O":
            absent = np.array([one is None for one in values], dtype=np.bool_) & (lines >= 0)
            if absent.any():
                raise H5ValueError(
                    f"{key!r} has no value in line {int(lines[absent.argmax()]) + 2} of {self.path!r}. Fill it in, or "
                    "leave the line out."
                )
            if all(isinstance(one, int) for one in column if one is not None):  # some of other lines are missing
                return np.where(lines < 0, 0, values).astype(np.int64)
        if (lines < 0).any():
            values = values.copy()
            values[lines < 0] = "" if column.dtype.kind == "O" else 0
        return values

    def log_unused(self) -> None:
        """Log how many lines are of no sample, once they are all joined."""
        if self.column_on is not None and (n := self.n_lines - len(self._used)):
            _log.info("%s: %d of %d lines are of no sample", self.path, n, self.n_lines)


def stem_of(path: str) -> str:
    """Return the name of a file without its suffix."""
    return Path(os.path.basename(path)).stem


def _read(path: str, key: str | None) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a table: numbers, or objects with None for missing values."""
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
    except ImportError as error:
        raise H5ValueError(
            f"table={path!r} was given, and pyarrow, which reads tables, is not installed. Run "
            "`pip install 'lightning-h5[tables]'`."
        ) from error
    suffix = Path(path).suffix.lower()
    try:
        if suffix in (".parquet", ".pq"):
            table = parquet.read_table(path)
        elif suffix in SEPARATORS:
            types = {} if key is None else {key: pa.string()}  # "007" is a name, not a number
            parsing = csv.ParseOptions(delimiter=SEPARATORS[suffix])
            converting = csv.ConvertOptions(column_types=types, strings_can_be_null=True)
            table = csv.read_csv(path, parse_options=parsing, convert_options=converting)
        else:
            raise H5ValueError(
                f"table={path!r} was given. Pass a file that ends in {listing([*SEPARATORS, '.parquet'])}."
            )
    except (OSError, pa.ArrowException) as error:
        raise H5FileError(f"the table {path!r} cannot be read: {error}. Check its path and its format.") from error
    names = table.column_names
    if key is not None and key not in names:
        raise H5ValueError(
            f"table.on names the column {key!r}; {path!r} has {listing(names)}.{near(key, names)} Name one of these."
        )
    if twice := [name for name in names if names.count(name) > 1]:
        several = listing(dict.fromkeys(twice))
        raise H5ValueError(f"{path!r} has several columns {several}. Give each a name of its own.")
    return {name: _column(table[name], is_key=name == key) for name in names}


def _column(column: Any, *, is_key: bool) -> npt.NDArray[Any]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    is_float, is_whole = pa.types.is_floating(column.type), pa.types.is_integer(column.type)
    is_number = is_float or ((is_whole or pa.types.is_boolean(column.type)) and not column.null_count)
    if is_number and not is_key:
        return np.asarray(column.to_numpy())
    values = column.to_pylist()
    if not is_whole or is_key:
        values = [None if one is None else str(one) for one in values]
    return np.array([*values, None], dtype=object)[:-1]

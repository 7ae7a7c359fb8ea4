"""Side tables: labels and other values of samples in a CSV, TSV or Parquet file, joined with the rows of HDF5 files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5FileError, H5KeyError, H5ValueError, listing, near
from ..hdf5 import ArrayLayout, ChangeGuard, column_layout, expand_user
from ..options import TableOptions
from ..readers import Stack
from ..regular_files import open_regular
from ..types import IntArray
from .compatibility import ArrayRequest

__all__ = ["OR_DROP", "PREFIX", "SideTable", "is_of_table"]

PREFIX = "table/"
"""Names of columns begin with it."""

NAMES = ("@stem", "@file", "@name")
"""Names of files and segments that lines may be compared with."""

OR_DROP = "Complete the table, or pass table={..., 'missing': 'drop'} to leave out samples without a line."

SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}

_log = logging.getLogger(__name__)


def is_of_table(key: str) -> bool:
    """Return whether a name is a column of a side table, or several stacked columns."""
    return key.startswith(PREFIX) or key == PREFIX.rstrip("/")


@dataclass(frozen=True, eq=False)
class Column:
    """The values of a column.

    Attributes:
        values: numbers, or text as objects; missing values are zero, or empty text.
        is_missing: mask of lines without a value; None if all have one. Missing floats are NaN instead.
    """

    values: npt.NDArray[Any]
    is_missing: npt.NDArray[np.bool_] | None = None


class SideTable:
    """A table with a line for each sample, or for each value of a field.

    Args:
        options: the file, and how it is joined.

    Raises:
        H5FileError: it cannot be read.
        H5ValueError: the column to join on does not exist, or has a key twice.
    """

    def __init__(self, options: TableOptions) -> None:
        self.options = options
        self.path = expand_user(options.path)
        self.column_on, self.compared_with = options.join
        self._table = _read(self.path, self.column_on)
        self._columns: dict[str, Column] = {}
        self._lines: dict[bool, dict[Any, int]] = {}  # by whether keys are numbers
        self._used: set[int] = set()
        self.n_lines = int(self._table.num_rows)

    @property
    def field(self) -> str | None:
        """The array or attribute that lines are compared with; None if they are joined by names or by number."""
        return None if self.compared_with in (None, *NAMES) else self.compared_with

    @property
    def names(self) -> list[str]:
        """The names of columns."""
        names: list[str] = self._table.column_names
        return names

    def column(self, key: str) -> Column:
        """Return the values of a column.

        Raises:
            H5KeyError: there is none.
            H5ValueError: its values are neither numbers nor text, for example lists.
        """
        name, names = key.removeprefix(PREFIX), self._table.column_names
        if name not in names:
            raise H5KeyError(
                f"{key!r} was requested, but {self.path!r} has no column {name!r}; it has {listing(names)}."
                f"{near(name, names)} Name one of these, after 'table/'."
            )
        if name not in self._columns:
            self._columns[name] = _column_values(
                self._table[name], f"{key!r} of {self.path!r}", as_text=name == self.column_on
            )
        return self._columns[name]

    def lines_of(self, keys: npt.NDArray[Any], where: Callable[[int], str]) -> IntArray:
        """Return the line of each key; -1 if there is none and the table may lack lines.

        Args:
            keys: numbers or text.
            where: returns a description of the array or segment that has a key, by the key's index, for errors.

        Raises:
            H5ValueError: the table has no line for a key, or several.
        """
        is_number = keys.dtype.kind in "biuf"
        index = self._lines_by_key(is_number=is_number)
        values = [key.decode() if isinstance(key, bytes) else key for key in keys.tolist()]
        lines = np.array([index.get(value, -1) for value in values], dtype=np.int64)
        if (lines < 0).any() and self.options.missing == "error":
            positions = np.flatnonzero(lines < 0).tolist()
            absent = list(dict.fromkeys(values[at] for at in positions))
            raise H5ValueError(
                f"{self.path!r} has no line in which {self.column_on!r} is {listing(map(str, absent))}, which "
                f"{where(positions[0])} has: {len(absent):,} of {len(set(values)):,} keys have no line."
                f"{self._other_spelling(index, absent[0], where(positions[0]))} {OR_DROP}"
            )
        self.note_used(lines)
        return lines

    def _other_spelling(self, index: Mapping[Any, int], absent: Any, place: str) -> str:
        """Return a sentence on the keys of the table that resemble one without a line, with a leading blank.

        Args:
            index: the line of each key.
            absent: a key without one.
            place: the file or segment that has it, as text.
        """
        keys = [key for key in index if isinstance(key, str)]
        if not isinstance(absent, str) or not keys:
            return ""
        with_suffix = next((key for key in keys if stem_of(key) == absent), None)
        if self.compared_with != "@stem" or with_suffix is None:
            return f" The table has {listing(keys, most=3)}.{near(absent, keys)}"
        is_file = place.rstrip("'").endswith(with_suffix)
        cure = f"Pass on={{{self.column_on!r}: '@file'}}." if is_file else "Remove the suffixes in the table."
        return f" The table has {with_suffix!r}, with a suffix, and '@stem' is a file's name without it. {cure}"

    def has_line(self, key: str) -> bool:
        """Return whether a line has this key."""
        return key in self._lines_by_key(is_number=False)

    def _lines_by_key(self, *, is_number: bool) -> dict[Any, int]:
        if is_number not in self._lines:
            self._lines[is_number] = self._index(is_number=is_number)
        return self._lines[is_number]

    def note_used(self, lines: IntArray) -> None:
        """Note that lines belong to samples."""
        self._used.update(lines[lines >= 0].tolist())

    @property
    def slices(self) -> list[str]:
        """The slice of an array that each line names, such as ``bucket0$3,:3,:600``; empty if lines name no slices."""
        if self.compared_with != "@name" or self.column_on is None:
            return []
        texts: list[str] = self.column(self.column_on).values.tolist()
        return texts if any("$" in text for text in texts[:1]) else []

    def _index(self, *, is_number: bool) -> dict[Any, int]:
        """Return the line of each key."""
        assert self.column_on is not None, "lines are joined by a key"
        column = self.column(self.column_on)
        lines = np.arange(self.n_lines) if column.is_missing is None else np.flatnonzero(~column.is_missing)
        texts = column.values[lines].tolist()
        keys: list[Any] = texts
        if is_number:
            try:
                keys = [int(text) if text.lstrip("+-").isdigit() else float(text) for text in texts]
            except ValueError:
                raise H5ValueError(
                    f"{self.column_on!r} of {self.path!r} has text such as {listing(texts, 3)}, and "
                    f"{self.compared_with!r} has numbers. Name columns of one kind (table.on)."
                ) from None
        index: dict[Any, int] = {}
        twice = []
        for line, key in zip(lines.tolist(), keys, strict=True):
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
            keys: values of ``field``; None if lines are joined by names or by number.

        Raises:
            H5ValueError: rows have no line, or there are more or fewer keys than rows.
        """
        if self.compared_with is None:
            return np.arange(first, first + n_rows)
        if keys is not None:
            if len(keys) != n_rows:
                raise H5ValueError(
                    f"table.on compares with {self.field!r}, which has {len(keys)} values in {path!r}, and the data "
                    f"has {n_rows} rows there. Name an array with one value a row."
                )
            return self.lines_of(keys, lambda _: f"{self.field!r} of {path!r}")
        key = np.array([self.key_of(path, os.path.basename(path))], dtype=object)
        return np.repeat(self.lines_of(key, lambda _: f"{self.compared_with} of {path!r}"), n_rows)

    def key_of(self, path: str, name: str) -> str:
        """Return the key of a file, or of a group or array in it, which lines are compared with."""
        if self.compared_with == "@file":
            return os.path.basename(path)
        return stem_of(path) if self.compared_with == "@stem" else name.rpartition("/")[2]

    def check_number(self, n_rows: int) -> None:
        """Raise an ``H5ValueError`` if there are more or fewer lines than rows, which are joined by number."""
        if self.n_lines != n_rows:
            raise H5ValueError(
                f"{self.path!r} has {self.n_lines} lines and the data has {n_rows} rows; without table.on line i "
                "belongs to row i. Pass the column to join on (table.on), or complete the table."
            )

    def layout(self, request: ArrayRequest, path: str, guard: ChangeGuard, lines: IntArray) -> ArrayLayout:
        """Return a column as an array of a file.

        Args:
            request: the column.
            path: the file with the rows.
            guard: of the file.
            lines: line of each row; rows without one have zeros, or empty text.
        """
        return column_layout(self.values(request, lines), path, request.key, guard)

    def values(self, request: ArrayRequest, lines: IntArray) -> npt.NDArray[Any]:
        """Return the values of a column, or of several stacked columns, in some lines (see ``column_at``)."""
        if isinstance(request.codec, Stack):
            columns = [self.column_at(PREFIX + member, lines) for member in request.codec.members]
            if text := [m for m, c in zip(request.codec.members, columns, strict=True) if c.dtype.kind == "O"]:
                raise H5ValueError(
                    f"{listing(text)} of {self.path!r} are text, and numbers are stacked. Leave them out."
                )
            return np.stack([column.astype(np.float32) for column in columns], axis=-1)
        return self.column_at(request.key, lines)

    def column_at(self, key: str, lines: IntArray) -> npt.NDArray[Any]:
        """Return the values of a column in some lines; zero, or empty text, for line -1.

        Raises:
            H5ValueError: whole numbers, booleans or text are missing in some of these lines.
        """
        column = self.column(key)
        if not len(column.values):
            return np.full(len(lines), "" if column.values.dtype.kind == "O" else 0, column.values.dtype)
        values = column.values[np.maximum(lines, 0)]
        if column.is_missing is not None and (absent := column.is_missing[np.maximum(lines, 0)] & (lines >= 0)).any():
            of_lines = np.unique(lines[absent])
            raise H5ValueError(
                f"{key!r} has no value in {len(of_lines):,} of the lines of {self.path!r} that have a sample, the "
                f"first for {self._name_of(int(of_lines[0]))}. Fill them in, or leave these lines out."
            )
        values[lines < 0] = "" if values.dtype.kind == "O" else 0
        return values

    def _name_of(self, line: int) -> str:
        """Return the text by which a user finds a line."""
        if self.column_on is None:
            return f"line {line + 2}"
        return f"{self.column_on}={self.column(self.column_on).values[line]!r}"

    def log_unused(self) -> None:
        """Log how many lines belong to no sample. Call it after all lines are joined."""
        if self.column_on is not None and (n := self.n_lines - len(self._used)):
            _log.info("%s: %d of %d lines are of no sample", self.path, n, self.n_lines)


def stem_of(path: str) -> str:
    """Return the name of a file without its suffix."""
    return Path(os.path.basename(path)).stem


def _read(path: str, key: str | None) -> Any:
    """Return a table as a ``pyarrow.Table``."""
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
    except ImportError as error:
        raise H5ValueError(
            f"table={path!r} was given, and pyarrow, which reads tables, is not installed. Run "
            "`pip install 'lightning-h5[tables]'`."
        ) from error
    suffix = Path(path.removesuffix(".gz")).suffix.lower()
    if suffix not in (".parquet", ".pq", *SEPARATORS):
        raise H5ValueError(
            f"table={path!r} was given. Pass a file that ends in {listing([*SEPARATORS, '.csv.gz', '.parquet'])}; an "
            "array of another HDF5 file is a field: y_key={'path': 'labels.h5', 'key': 'y'}."
        )
    try:
        with ExitStack() as stack:
            is_file = not ("://" in path or os.path.isdir(path))  # pyarrow finds the files of these itself
            source: Any = stack.enter_context(open_regular(path)) if is_file else path
            if suffix in (".parquet", ".pq"):
                table = parquet.read_table(source)
            else:
                if is_file and path.endswith(".gz"):
                    source = pa.CompressedInputStream(source, "gzip")
                types = {} if key is None else {key: pa.string()}  # "007" is a name, not a number
                parsing = csv.ParseOptions(delimiter=SEPARATORS[suffix])
                converting = csv.ConvertOptions(column_types=types, strings_can_be_null=True)
                table = csv.read_csv(source, parse_options=parsing, convert_options=converting)
    except (OSError, pa.ArrowException) as error:
        folder = os.path.dirname(path) or "."
        guess = near(os.path.basename(path), os.listdir(folder)) if os.path.isdir(folder) else ""
        raise H5FileError(
            f"the table {path!r} cannot be read: {error}.{guess if not os.path.exists(path) else ''} Check its path "
            "and its format."
        ) from error
    names = table.column_names
    if key is not None and key not in names:
        raise H5ValueError(
            f"table.on names the column {key!r}; {path!r} has {listing(names)}.{near(key, names)} Name one of these."
        )
    if twice := dict.fromkeys(name for name in names if names.count(name) > 1):
        raise H5ValueError(f"{path!r} has several columns {listing(twice)}. Give each a name of its own.")
    return table


def _column_values(column: Any, name: str, *, as_text: bool) -> Column:
    """Return the values of a column of a ``pyarrow`` table.

    Args:
        column: the column.
        name: for errors.
        as_text: also return numbers as text.

    Raises:
        H5ValueError: its values are nested, such as lists, or bytes.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    of = pa.types
    if of.is_nested(column.type) or of.is_binary(column.type) or of.is_large_binary(column.type):
        raise H5ValueError(f"{name} has values of the type {column.type}. Name a column of numbers or of text.")
    if of.is_decimal(column.type) and not as_text:
        column = column.cast(pa.float64())
    if of.is_floating(column.type) and not as_text:
        return Column(np.array(column.to_numpy()))
    is_missing = np.array(column.is_null().to_numpy(), dtype=np.bool_) if column.null_count else None
    if (of.is_integer(column.type) or of.is_boolean(column.type)) and not as_text:
        filled = column if is_missing is None else column.fill_null(False if of.is_boolean(column.type) else 0)
        return Column(np.array(filled.to_numpy()), is_missing)
    texts = ["" if value is None else str(value) for value in column.to_pylist()]
    return Column(np.array([*texts, None], dtype=object)[:-1], is_missing)

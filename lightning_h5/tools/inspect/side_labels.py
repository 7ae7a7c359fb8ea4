"""Labels beside files: a table with a line for each file or segment."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import numpy as np

from ...errors import listing
from ...hdf5 import GROUP_WORDS, words_in
from ...staging import is_url
from .advice import suggest_split
from .dates import are_dates
from .recognize_parts import TARGETS, Settings

__all__ = ["labels_beside", "tables_beside"]

PARQUET = (".parquet", ".pq")
MAX_TABLES, MAX_TABLE_BYTES = 8, 16 << 20


class _Column(NamedTuple):
    """The column of a table that names files or segments, and the values of the columns that may be targets."""

    name: str
    others: dict[str, list[str]]


def tables_beside(files: Sequence[str]) -> list[str]:
    """Return the CSV, TSV and Parquet files in the folder of the files, and in the folder above.

    None are returned if the files are in several folders or in a store, or if tables cannot be read.
    """
    folders = {os.path.dirname(os.path.abspath(file)) for file in files}
    if len(folders) != 1 or any(map(is_url, files)) or find_spec("pyarrow") is None:
        return []
    (folder,) = folders
    return [path for parent in (folder, os.path.dirname(folder)) for path in _tables_in(parent)]


def labels_beside(
    tables: Sequence[str], files: Sequence[str], segments: Sequence[str] = (), split: object = None
) -> tuple[Settings, str] | None:
    """Return settings that join a table with a line for each file or segment, and the reason; None if none has these.

    Args:
        tables: the tables beside the files.
        files: the files.
        segments: the names of the groups or arrays that are segments.
        split: the suggested split without the table. A fraction is applied to groups, if a column names groups.
    """
    keys = {"@stem": {os.path.splitext(os.path.basename(file))[0] for file in files}, "@name": set(segments)}
    keys = {attribute: names for attribute, names in keys.items() if len(names) > 1}
    for path, (attribute, names) in product(tables, keys.items()):
        column = _column_of(path, names)
        if column is None:
            continue
        relative = os.path.relpath(path)
        table_path = path if relative.startswith("..") else relative
        settings: Settings = {"table": {"path": table_path, "on": {column.name: attribute}}}
        named = [name for name in column.others if words_in(name) & TARGETS]
        targets = named or (list(column.others) if len(column.others) == 1 else [])
        unit = "file" if attribute == "@stem" else "segment"
        why = f"{table_path!r} has a line for each {unit}, by its column {column.name!r}"
        if len(targets) == 1:
            settings["y_key"] = f"table/{targets[0]}"
            why += f", and {targets[0]!r} is {'a target by its name' if named else 'the only other column'}."
        else:
            why += ": y_key='table/COLUMN' reads a target, with decode={'table/COLUMN': 'category'} if it is text."
        others = [name for name in column.others if name not in targets[:1]]
        why += f" Other columns: {listing(others, 6)}." if others else ""
        group = next((name for name in others if words_in(name) & GROUP_WORDS), None)
        if group is not None and isinstance(split, float):
            values = np.array(column.others[group])
            by_group, reasons = suggest_split(len(values), None, None, f"table/{group}", values)
            if "group_key" in by_group:
                settings["split"] = by_group
                why = " ".join([why, *reasons])
        return settings, why
    return None


def _tables_in(folder: str) -> list[str]:
    with suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith((".csv", ".tsv", *PARQUET)))
        paths = [os.path.join(folder, name) for name in names[:MAX_TABLES]]
        return [path for path in paths if os.path.isfile(path) and os.path.getsize(path) <= MAX_TABLE_BYTES]
    return []


def _column_of(path: str, names: set[str]) -> _Column | None:
    """Return the column of a table that contains each name once."""
    columns = _columns_in(path)
    for key, values in columns.items():
        if key and names <= set(values) and len(set(values)) == len(values):
            others = {name: column for name, column in columns.items() if name not in ("", key)}
            return _Column(key, {name: column for name, column in others.items() if not are_dates(column)})
    return None


def _columns_in(path: str) -> dict[str, list[str]]:
    """Return the columns of a table as text; none if it cannot be read, or has two columns of one name."""
    if path.lower().endswith(PARQUET):
        import pyarrow as pa
        from pyarrow import parquet

        with suppress(OSError, pa.ArrowException):
            table = parquet.read_table(path)
            if len(set(table.column_names)) == table.num_columns:
                return {name: [str(value) for value in table[name].to_pylist()] for name in table.column_names}
        return {}
    with suppress(OSError, ValueError, csv.Error), open(path, newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ","))
        if header and len(set(header)) == len(header) and all(len(line) == len(header) for line in lines):
            return {name: [line[at] for line in lines] for at, name in enumerate(header)}
    return {}

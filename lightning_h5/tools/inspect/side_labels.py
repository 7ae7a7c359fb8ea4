"""Labels beside files: a table with a line for each file or segment."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from ...errors import listing
from ...hdf5 import GROUP_WORDS, words_in
from ...staging import is_url
from .advice import suggest_split
from .dates import are_dates
from .recognize_parts import TARGETS, Settings

__all__ = ["labels_beside"]

MAX_TABLES, MAX_TABLE_BYTES = 8, 16 << 20


class _Column(NamedTuple):
    """The column of a table that names files, and the values of the columns that may be targets."""

    name: str
    others: dict[str, list[str]]


def labels_beside(files: Sequence[str], split: object = None) -> tuple[Settings, str] | None:
    """Return settings that join a table with a line for each file, and the reason; None if there is no table.

    Looks for CSV and TSV files in the folder of the files, and in the folder above.

    Args:
        files: the files.
        split: the suggested split without the table. A fraction is applied to groups, if a column names groups.
    """
    folders = {os.path.dirname(os.path.abspath(file)) for file in files}
    if len(files) < 2 or len(folders) != 1 or any(map(is_url, files)) or find_spec("pyarrow") is None:
        return None
    (folder,) = folders
    stems = {os.path.splitext(os.path.basename(file))[0] for file in files}
    for path in [path for parent in (folder, os.path.dirname(folder)) for path in _tables_in(parent)]:
        column = _column_of_files(path, stems)
        if column is None:
            continue
        shown = os.path.relpath(path)
        shown = path if shown.startswith("..") else shown
        settings: Settings = {"table": {"path": shown, "on": {column.name: "@stem"}}}
        named = [name for name in column.others if words_in(name) & TARGETS]
        targets = named or (list(column.others) if len(column.others) == 1 else [])
        why = f"{shown!r} has a line for each file, by its column {column.name!r}"
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
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith((".csv", ".tsv")))
        paths = [os.path.join(folder, name) for name in names[:MAX_TABLES]]
        return [path for path in paths if os.path.isfile(path) and os.path.getsize(path) <= MAX_TABLE_BYTES]
    return []


def _column_of_files(path: str, stems: set[str]) -> _Column | None:
    """Return the column of a table that contains the name of each file once."""
    with suppress(OSError, ValueError, csv.Error), open(path, newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ","))
        if not header or len(set(header)) < len(header) or any(len(line) != len(header) for line in lines):
            return None
        for at, name in enumerate(header):
            values = [line[at] for line in lines]
            if name and stems <= set(values) and len(set(values)) == len(values):
                columns = {other: [line[place] for line in lines] for place, other in enumerate(header)}
                return _Column(
                    name,
                    {
                        other: column
                        for other, column in columns.items()
                        if other not in ("", name) and not are_dates(column)
                    },
                )
    return None

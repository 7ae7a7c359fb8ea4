"""The rows, or segments, of each split: cut by fractions, folds and groups, by time or lists, or read from a JSON file.

The file may be written by hand.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..catalog import Catalog
from ..errors import H5FileError, H5KeyError, H5ValueError, listing, near
from ..hdf5 import OpenOptions, expand_user, file_number, is_attribute_key, list_data
from ..options import SplitOptions
from ..order import group_split, k_fold, time_split
from ..readers import open_reader
from ..regular_files import read_json
from ..samples import RowTable, SegmentSubset, groups_by_pattern, segments_by_time, segments_in_lists
from ..types import IntArray, PathLike, Paths
from .arguments import SPLITS, Split

__all__ = ["Cut", "check_split_of_rows", "cut_rows", "cut_rows_in_time", "cut_segments", "read_splits"]


FORMAT = "lightning_h5 splits"
NAMES: tuple[Split, ...] = ("train", "val", "test")

_Part = TypeVar("_Part")


class Cut(NamedTuple, Generic[_Part]):
    """The rows or segments of each split."""

    parts: dict[Split, _Part]
    """For each split its rows, or its rows or segments in each source."""
    n_groups: int | None = None
    """Number of groups that were divided; None without groups, and if all splits have rows."""


SYNONYMS = {"valid": "val", "validation": "val", "dev": "val", "training": "train", "testing": "test"}
"""Other names for splits in columns."""


def by_names(names: npt.NDArray[Any], key: str) -> dict[Split, IntArray]:
    """Return the rows, or segments, of each split in a column.

    Args:
        names: the split's name for each row.
        key: the column.

    Raises:
        H5ValueError: a name is not a split.
    """
    splits = np.array([SYNONYMS.get(str(name).lower(), str(name).lower()) for name in names.tolist()])
    if unknown := sorted(set(splits.tolist()) - {*SPLITS}):
        raise H5ValueError(
            f"split.key={key!r} has {listing(unknown)}. Write one of {listing(SPLITS)} in each line, or list the "
            f"values of each split in a JSON file: {_file_of_splits(key)}."
        )
    return {split: np.flatnonzero(splits == split) for split in SPLITS if (splits == split).any()}


def _file_of_splits(key: str) -> str:
    """Return the argument that assigns the values of an array to splits, for a message."""
    return f"split={{'file': 'splits.json', 'group_key': {key!r}}}"


def _text_of_file(group_key: str | None) -> str:
    """Return the format of a file of splits, for a message."""
    key = {} if group_key is None else {"group_key": group_key}
    form = {"format": FORMAT, **key, "splits": {"train": [...], "val": [...], "test": [...]}}
    values = "ranges [start, stop] of row numbers" if group_key is None else f"values of {group_key!r}"
    return f"{str(form).replace('Ellipsis', '...')}, with {values} in each list"


def check_split_of_rows(options: SplitOptions) -> None:
    """Raise an ``H5ValueError`` for options that divide segments, if samples are rows."""
    if options.key is not None and options.column is None:
        key = options.key if isinstance(options.key, str) and "{split}" not in options.key else "KEY"
        array = "an array" if key == "KEY" else repr(key)
        raise H5ValueError(
            f"split.key={options.key!r} names arrays that list segments, but samples are rows. If {array} has the name "
            f"or number of each row's split, list its values for each split in a JSON file: {_file_of_splits(key)}. "
            "For a file that lists row numbers, pass split={'file': 'splits.json'}."
        )
    if options.group_pattern is not None or options.by == "segment":
        raise H5ValueError(
            "split.group_pattern and split.by='segment' divide segments, but samples are rows. Pass segments or a "
            "window, or split rows by fractions, group_key or by='time'."
        )


def cut_rows(
    n_rows: int,
    options: SplitOptions,
    *,
    paths: Mapping[Split, Paths | None],
    groups: npt.NDArray[Any] | None,
    labels: npt.NDArray[Any] | None,
    names: npt.NDArray[Any] | None = None,
    lacks: npt.NDArray[np.bool_] | None = None,
) -> Cut[IntArray]:
    """Cut the rows of the training files into splits, the same in every process; or read them from a file.

    Args:
        n_rows: rows of the training files.
        options: shares and folds.
        paths: the paths of each split in the arguments.
        names: the split's name for each row, from a column; None without a column.
        groups: each row's group, if any.
        labels: each row's class, to stratify by.
        lacks: mask of rows without a matching line in the side table. They are in no split and do not count, except in
            a file of splits, which lists all rows. None if all rows have a line.

    Returns:
        For each split its rows in ascending order.
    """
    if lacks is not None and options.file is None:
        with_line = np.flatnonzero(~lacks)
        groups, labels, names = (None if column is None else column[with_line] for column in (groups, labels, names))
        cut = cut_rows(len(with_line), options, paths=paths, groups=groups, labels=labels, names=names)
        return Cut({split: with_line[of_split] for split, of_split in cut.parts.items()}, cut.n_groups)
    if names is not None:
        return Cut(by_names(names, options.column or ""))
    path, settings = options.file, options.recipe()
    splits = None if path is None else read_splits(path, n_rows, options.group_key, groups, settings)
    if splits is not None:
        for split, rows in splits.items():
            if split != "train" and len(rows) and paths[split] is not None:
                raise H5ValueError(
                    f"split.file={str(path)!r} assigns {len(rows)} rows to {split!r}, which has its own files, so "
                    f"these rows would be in no split. Remove {split}_path, or move the rows to another split."
                )
        return Cut(splits)
    if not options.has_fractions:
        raise H5FileError(
            f"split.file={str(path)!r} does not exist, and no setting describes how to create it. Pass val_fraction, "
            "test_fraction or num_folds and fold, or the path of an existing file, such as "
            f"{_text_of_file(options.group_key)}."
        )
    splits = _cut_numbers(n_rows if groups is None else groups, labels, options)
    if path is not None:
        write_splits(path, splits, options.group_key, groups, settings)
    lacks_rows = any(not len(rows) for split, rows in splits.items() if split == "train" or options.fills(split))
    return Cut(splits, len(np.unique(groups)) if lacks_rows and groups is not None else None)


def cut_rows_in_time(
    n_rows: Sequence[int], options: SplitOptions, lacks: npt.NDArray[np.bool_] | None = None
) -> dict[Split, IntArray]:
    """Divide the rows of each file in time, in the order of the file: each file is a segment.

    Args:
        n_rows: rows of each training file.
        options: fractions, and the gap between parts (no gap by default, since rows do not overlap).
        lacks: mask of rows without a matching line in the side table. They are in no split and do not count.

    Returns:
        For each split its rows in ascending order.

    Raises:
        H5ValueError: a split has no row.
    """
    bounds = np.cumsum([0, *n_rows])
    rows = np.arange(bounds[-1]) if lacks is None else np.flatnonzero(~lacks)
    bounds = np.searchsorted(rows, bounds)
    place = np.arange(len(rows)) - np.repeat(bounds[:-1], np.diff(bounds))
    parts = time_split(np.diff(bounds), options.val_fraction, options.test_fraction, gap=options.gap or 0)
    cut: dict[Split, IntArray] = {}
    for name, part in parts.items():
        low, high = (np.repeat(steps, np.diff(bounds)) for steps in part)
        cut[cast("Split", name)] = rows[(low <= place) & (place < high)]
        if not len(cut[cast("Split", name)]):
            raise H5ValueError(
                f"split.by='time' leaves no row for {name!r}: it divides the rows of each file, and the longest of "
                f"{len(n_rows):,} files has {int(np.diff(bounds).max(initial=0)):,}. Pass other fractions, a smaller "
                f"gap, or {'val' if name == 'train' else name}_path with files of their own."
            )
    return cut


def _cut_numbers(n_or_groups: Any, labels: Any, options: SplitOptions) -> dict[Split, IntArray]:
    fractions = [1 - options.val_fraction - options.test_fraction, options.val_fraction, options.test_fraction]
    train, val, test = group_split(n_or_groups, fractions, options.seed, labels=labels)
    if options.num_folds is not None and options.fold is not None:
        within = len(train) if isinstance(n_or_groups, int) else n_or_groups[train]
        of_them = None if labels is None else labels[train]
        rest, held_out = k_fold(within, options.num_folds, options.fold, options.seed, labels=of_them)
        train, val = train[rest], train[held_out]
    return {"train": train, "val": val, "test": test}


def write_splits(
    path: PathLike,
    splits: Mapping[Split, IntArray],
    group_key: str | None,
    groups: npt.NDArray[Any] | None,
    settings: Mapping[str, Any],
) -> None:
    """Write the assignment of rows to splits atomically, unless the file exists.

    Args:
        path: the file.
        splits: the rows of each split; together, all rows.
        group_key: the array with each row's group, or None.
        groups: each row's group, shape ``(n_rows,)``; None writes row numbers.
        settings: the settings that define the splits.

    Raises:
        H5FileError: the file cannot be written.
    """
    n_rows = sum(map(len, splits.values()))
    written = {
        name: _ranges(rows) if groups is None else np.unique(groups[rows]).tolist() for name, rows in splits.items()
    }
    text = {"format": FORMAT, "version": 1, "group_key": group_key, "n_rows": n_rows, "settings": dict(settings)}
    target = Path(expand_user(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, suffix=".tmp", encoding="utf-8") as file:
            json.dump(text | {"splits": written}, file, indent=1, ensure_ascii=False)
            file.flush()
            with suppress(FileExistsError):  # another rank was faster and wrote the same content
                os.link(file.name, target)
    except OSError as error:
        raise H5FileError(f"split.file={str(target)!r} cannot be written: {error.strerror}.") from error


def read_splits(
    path: PathLike, n_rows: int, group_key: str | None, groups: npt.NDArray[Any] | None, settings: Mapping[str, Any]
) -> dict[Split, IntArray] | None:
    """Return the rows of each split in a file; None if the file does not exist.

    Args:
        path: the file.
        n_rows: number of rows of the data.
        group_key: the array with each row's group, or None.
        groups: each row's group, or None if the file has row numbers.
        settings: the present settings.

    Raises:
        H5ValueError: the file has another format, was written with other settings, or lacks some rows.
    """
    path = expand_user(path)
    name = f"split.file={path!r}"
    try:
        text = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise H5ValueError(f"{name} cannot be read as JSON: {error}. Write it again, or name another file.") from error
    splits: Any = text.get("splits") if isinstance(text, dict) and text.get("format") == FORMAT else None
    is_splits = isinstance(splits, dict) and all(isinstance(rows, list) for rows in splits.values())
    if not is_splits or set(splits) - set(NAMES):
        raise H5ValueError(f"{name} is not a file of splits. Its format is {_text_of_file(group_key)}.")
    if text.get("group_key") != group_key:
        raise H5ValueError(
            f"{name} was made with group_key={text.get('group_key')!r}, but group_key={group_key!r} was given. Pass "
            "the same."
        )
    saved = text.get("settings") or {}
    if changes := [key for key in settings if key in saved and saved[key] != settings[key]]:
        were, now = (", ".join(f"{key}={values[key]!r}" for key in changes) for values in (saved, settings))
        raise H5ValueError(f"{name} was made with {were}, and {now} was given. Name another file, or pass the same.")
    return _rows_of_ranges(splits, n_rows, name) if groups is None else _rows_of_groups(splits, groups, name)


def _rows_of_groups(splits: Mapping[str, list[Any]], groups: npt.NDArray[Any], name: str) -> dict[Split, IntArray]:
    values, codes = np.unique(groups, return_inverse=True)
    code_of = {value: code for code, value in enumerate(values.tolist())}
    split_of = np.full(len(values), -1, dtype=np.int64)
    for number, split in enumerate(NAMES):
        listed = splits.get(split, [])
        if wrong := [group for group in listed if isinstance(group, list | dict)]:
            raise H5ValueError(f"{name}: {split!r} has {wrong[0]!r}, which is no group. List values of group_key.")
        members = [code_of[group] for group in listed if group in code_of]
        if twice := [values[code] for code in members if split_of[code] not in (-1, number)]:
            raise H5ValueError(f"{name} has {listing(map(str, twice))} in several splits. Leave each in one.")
        split_of[members] = number
    if (split_of < 0).any():
        unknown = values[split_of < 0]
        raise H5ValueError(
            f"{name} lacks {len(unknown)} of {len(values)} groups: {listing(map(str, unknown[:6]))}. Add them to a "
            "split, or name a new file, which is then created."
        )
    return {split: np.flatnonzero(split_of[codes] == number) for number, split in enumerate(NAMES)}


def _rows_of_ranges(splits: Mapping[str, list[Any]], n_rows: int, name: str) -> dict[Split, IntArray]:
    rows: dict[Split, IntArray] = {}
    named = np.zeros(n_rows, dtype=np.int64)
    for split in NAMES:
        ranges = splits.get(split, [])
        for pair in ranges:
            is_pair = isinstance(pair, list) and [type(bound) for bound in pair] == [int, int]
            if not is_pair or not 0 <= pair[0] <= pair[1] <= n_rows:
                raise H5ValueError(
                    f"{name}: {split!r} is not a list of ranges [start, stop] of the {n_rows} rows that the files "
                    f"have: it has {str(pair)[:80]}. Write ranges of row numbers, or name a new file, which is then "
                    "created."
                )
        bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        changes = np.bincount(bounds[:, 0], minlength=n_rows + 1) - np.bincount(bounds[:, 1], minlength=n_rows + 1)
        times = np.cumsum(changes[:-1])
        rows[split] = np.flatnonzero(times)
        named += times
    if (named != 1).any():
        raise H5ValueError(
            f"{name} has {int(named.sum())} rows, of which {np.count_nonzero(named)} differ, but the files have "
            f"{n_rows}. Each row must be in one split; name a new file, which is then created."
        )
    return rows


def _ranges(rows: IntArray) -> list[list[int]]:
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    starts, stops = rows[np.append(0, cuts)], rows[np.append(cuts - 1, -1)] + 1
    return [[int(start), int(stop)] for start, stop in zip(starts, stops, strict=True)]


def cut_segments(
    tables: Sequence[RowTable],
    options: SplitOptions,
    catalog: Catalog,
    opened: OpenOptions,
    paths: Mapping[Split, Paths | None],
) -> Cut[list[SegmentSubset]]:
    """Return the segments of each split.

    Args:
        tables: all segments of each source of the training files, with the columns of groups and classes.
        options: how segments are divided; fractions, folds and groups apply to all sources together.
        catalog: opens the files.
        opened: how files are opened.
        paths: the paths of each split in the arguments.

    Returns:
        For each split the segments of each source. A split without a list is missing.

    Raises:
        H5ValueError: a list names an unknown segment, a split is empty, or sources share only some of their files.
    """
    if options.by == "row":
        raise H5ValueError(
            "split.by='row' was given, but samples are made of segments, which splits do not divide. Pass 'segment' or "
            "'time'."
        )
    _check_files(tables)
    if options.by == "time" or options.key is not None:
        cuts = [_cut_source(table, options, catalog, opened) for table in tables]
        none = SegmentSubset(np.empty(0, dtype=np.int64))
        of_sources = {
            split: [of_source.get(split, none) for of_source in cuts]
            for split in SPLITS
            if any(split in of_source for of_source in cuts)
        }
        return Cut(of_sources)
    places = {tuple(table.paths): at for at, table in reversed(list(enumerate(tables)))}  # files count once
    first = sorted(places.values())
    columns: list[npt.NDArray[Any] | None] = [None, None]
    for at, key in enumerate((options.group_key, options.stratify_key)):
        if key is not None:
            columns[at] = np.concatenate([tables[number].columns[key] for number in first])
    if options.group_pattern is not None:
        columns[0] = np.concatenate([groups_by_pattern(tables[number], options.group_pattern) for number in first])
    bounds = np.concatenate([[0], np.cumsum([tables[number].n_segments for number in first])])
    cut = cut_rows(int(bounds[-1]), options, paths=paths, groups=columns[0], labels=columns[1])
    subsets: dict[Split, list[SegmentSubset]] = {}
    for split, segments in cut.parts.items():
        ends = np.searchsorted(segments, bounds)
        parts = {
            number: segments[low:high] - start
            for number, start, low, high in zip(first, bounds[:-1], ends[:-1], ends[1:], strict=True)
        }
        subsets[split] = [SegmentSubset(parts[places[tuple(table.paths)]]) for table in tables]
    return Cut(subsets, cut.n_groups)


def _check_files(tables: Sequence[RowTable]) -> None:
    """Raise an ``H5ValueError`` if a segment of two sources could be in two splits."""
    files = [{file_number(path) for path in table.paths} for table in tables]
    for number, table in enumerate(tables):
        for earlier, earlier_files in zip(tables[:number], files[:number], strict=True):
            is_same = table.paths == earlier.paths and table.n_segments == earlier.n_segments
            if files[number] & earlier_files and not is_same:
                raise H5ValueError(
                    f"two sources share only some of their files, such as {table.paths[0]!r}, so one segment could be "
                    "in two splits. Pass both sources the same files in the same order, or separate files."
                )


def _cut_source(
    table: RowTable, options: SplitOptions, catalog: Catalog, opened: OpenOptions
) -> Mapping[Split, SegmentSubset]:
    """Return the segments of each split of one source, by a column, by time or by lists in the files."""
    if (column := options.column) is not None:
        return {split: SegmentSubset(segments) for split, segments in by_names(table.columns[column], column).items()}
    if options.by == "time":
        return cast("Mapping[Split, SegmentSubset]", segments_by_time(table, options))
    lists = {split: key for split in SPLITS if (key := options.list_of(split)) is not None}
    is_shared = len(set(lists.values())) < len(lists)
    names = {
        split: [
            (file, _names_in_array(path, key, catalog, opened))
            for file, path in enumerate(table.paths)
            if catalog.has(path, [key], opened)
        ]
        for split, key in lists.items()
    }
    absent = list(dict.fromkeys(key for split, key in lists.items() if not names[split]))
    if is_shared and (not absent or all(map(is_attribute_key, absent))):
        key = next(iter(lists.values()))
        is_of_each_segment = table.parts is None or is_attribute_key(key)
        key, owner = (key, repr(key)) if is_of_each_segment else ("@split", "an attribute")
        raise H5ValueError(
            f"split.key={options.key!r} is the same for several splits. If {owner} has the name or number of each "
            f"segment's split, list its values for each split in a JSON file: {_file_of_splits(key)}. If arrays list "
            "segments, name one for each split, as split={'key': {'train': ..., 'val': ...}}."
        )
    if absent and (isinstance(options.key, dict) or not names.get("train")):
        path = table.paths[0]

        def search(file: Any) -> tuple[list[str], list[str]]:
            return list_data(file)[0], []

        arrays = catalog.search(path, opened, "arrays", search)
        group = absent[0].strip("/").rpartition("/")[0]
        siblings = [array for array in arrays if group and array.startswith(f"{group}/")]
        hint = near(absent[0], siblings or arrays)
        raise H5KeyError(
            f"split.key={options.key!r} names {listing(absent)}, but no training file has it; {path!r} has the arrays "
            f"{listing(siblings or arrays)}{f' in {group!r}' if siblings else ''}.{hint} "
            "Name arrays with names of segments, as split={'key': {'train': ..., 'val': ...}}, or pass a fraction such "
            "as split=0.1."
        )
    listed = segments_in_lists(table, {split: of_files for split, of_files in names.items() if of_files})
    return {split: SegmentSubset(segments) for split, segments in listed.items()}


def _names_in_array(path: str, key: str, catalog: Catalog, opened: OpenOptions) -> npt.NDArray[np.str_]:
    """Return the names that an array of a file holds."""
    _, (array,) = catalog.describe(path, [key], opened)
    values = open_reader(array, opened).read(np.arange(array.n_rows)).ravel()
    return np.array([name.decode() if isinstance(name, bytes) else str(name) for name in values.tolist()], dtype=str)

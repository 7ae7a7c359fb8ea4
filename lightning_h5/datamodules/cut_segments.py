"""The segments of each split of the training files: by time, lists in the files, fractions, folds and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..datasets import Catalog, RowTable, SegmentSubset, groups_by_pattern, segments_by_time, segments_in_lists
from ..errors import H5KeyError, H5ValueError, listing
from ..hdf5 import OpenOptions, file_number
from ..options import SplitOptions
from ..readers import open_reader
from ..types import Paths
from .arguments import SPLITS, Split
from .split_file import by_names, cut_rows

__all__ = ["cut_segments"]


def cut_segments(
    tables: Sequence[RowTable],
    options: SplitOptions,
    catalog: Catalog,
    opened: OpenOptions,
    paths: Mapping[Split, Paths | None],
) -> dict[Split, list[SegmentSubset]]:
    """Return the segments of each split.

    Args:
        tables: all segments of each source of the training files, with the columns of groups and classes.
        options: how they are divided: those of all sources together, by fractions, folds and groups.
        catalog: of the files.
        opened: how files are opened.
        paths: what the user gave for each split.

    Returns:
        For each split those of each source. A split that no list names is missing.

    Raises:
        H5ValueError: a list has names of no segment, nothing is left of a split, or sources share some of their files.
    """
    if options.by == "row":
        raise H5ValueError(
            "split.by='row' was given, and samples are made of segments, which splits do not divide. Pass 'segment' or "
            "'time'."
        )
    _check_files(tables)
    if options.column is not None:
        named = [by_names(table.columns[options.column], options.column) for table in tables]
        given: list[Split] = [split for split in SPLITS if any(split in found for found in named)]
        nothing = np.empty(0, dtype=np.int64)
        return {split: [SegmentSubset(found.get(split, nothing)) for found in named] for split in given}
    if options.by == "time" or options.key is not None:
        each = [_of_table(table, options, catalog, opened) for table in tables]
        splits = [split for split in SPLITS if any(split in found for found in each)]
        none = SegmentSubset(np.empty(0, dtype=np.int64))
        return {split: [found.get(split, none) for found in each] for split in splits}
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
    found: dict[Split, list[SegmentSubset]] = {}
    for split, segments in cut.items():
        ends = np.searchsorted(segments, bounds)
        parts = {
            number: segments[low:high] - start
            for number, start, low, high in zip(first, bounds[:-1], ends[:-1], ends[1:], strict=True)
        }
        found[split] = [SegmentSubset(parts[places[tuple(table.paths)]]) for table in tables]
    return found


def _check_files(tables: Sequence[RowTable]) -> None:
    """Raise an ``H5ValueError`` if a segment of two sources could be in two splits."""
    each = [{file_number(path) for path in table.paths} for table in tables]
    for at, (one, table) in enumerate(zip(each, tables, strict=True)):
        for other, another in zip(each[:at], tables[:at], strict=True):
            is_same = table.paths == another.paths and table.n_segments == another.n_segments
            if one & other and not is_same:
                raise H5ValueError(
                    f"two sources have some of their files in common, such as {table.paths[0]!r}, and a split would "
                    "not keep their segments apart. Give them the same files in the same order, or separate ones."
                )


def _of_table(
    table: RowTable, options: SplitOptions, catalog: Catalog, opened: OpenOptions
) -> Mapping[Split, SegmentSubset]:
    """Return the segments of each split of one source, by time or by lists in the files."""
    if options.by == "time":
        return cast("Mapping[Split, SegmentSubset]", segments_by_time(table, options))
    lists = {split: key for split in SPLITS if (key := options.list_of(split)) is not None}
    names = {
        split: [
            (file, _names_in(path, key, catalog, opened))
            for file, path in enumerate(table.paths)
            if catalog.has(path, [key], opened)
        ]
        for split, key in lists.items()
    }
    if absent := [key for split, key in lists.items() if not names[split] and isinstance(options.key, dict)]:
        raise H5KeyError(f"split.key names {listing(absent)}, which no training file has. Name arrays with names.")
    listed = segments_in_lists(table, {split: of_files for split, of_files in names.items() if of_files})
    return {split: SegmentSubset(segments) for split, segments in listed.items()}


def _names_in(path: str, key: str, catalog: Catalog, opened: OpenOptions) -> npt.NDArray[np.str_]:
    """Return the names in an array of a file."""
    _, (array,) = catalog.describe(path, [key], opened)
    values = open_reader(array, opened).read(np.arange(array.n_rows)).ravel()
    return np.array([one.decode() if isinstance(one, bytes) else str(one) for one in values.tolist()], dtype=str)

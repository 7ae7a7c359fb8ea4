"""The segments of each split of the training files: by time, lists in the files, fractions, folds and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..datasets import Catalog, RowTable, SegmentSubset, groups_by_pattern, segments_by_time, segments_in_lists
from ..errors import H5KeyError, listing
from ..hdf5 import OpenOptions
from ..options import SplitOptions
from ..readers import open_reader
from ..types import Paths
from .arguments import SPLITS, Split
from .split_file import cut_rows

__all__ = ["cut_segments"]


def cut_segments(
    table: RowTable,
    options: SplitOptions,
    catalog: Catalog,
    opened: OpenOptions,
    paths: Mapping[Split, Paths | None],
) -> Mapping[Split, SegmentSubset]:
    """Return the segments of each split.

    Args:
        table: all segments of the training files, with the columns of groups and classes.
        options: how they are divided.
        catalog: of the files.
        opened: how files are opened.
        paths: what the user gave for each split.

    Raises:
        H5ValueError: a list has names of no segment, or nothing is left of a split.
    """
    if options.by == "time":
        return cast("Mapping[Split, SegmentSubset]", segments_by_time(table, options))
    if options.key is not None:
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
    groups: npt.NDArray[Any] | None = None
    if options.group_pattern is not None:
        groups = groups_by_pattern(table, options.group_pattern)
    elif options.group_key is not None:
        groups = table.columns[options.group_key]
    labels = None if options.stratify_key is None else table.columns[options.stratify_key]
    cut = cut_rows(table.n_segments, options, paths=paths, groups=groups, labels=labels)
    return {split: SegmentSubset(segments) for split, segments in cut.items()}


def _names_in(path: str, key: str, catalog: Catalog, opened: OpenOptions) -> npt.NDArray[np.str_]:
    """Return the names in an array of a file."""
    _, (array,) = catalog.describe(path, [key], opened)
    values = open_reader(array, opened).read(np.arange(array.n_rows)).ravel()
    return np.array([one.decode() if isinstance(one, bytes) else str(one) for one in values.tolist()], dtype=str)

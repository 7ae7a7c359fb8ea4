"""The files of several sources: divided into splits, with joined columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import refuse_images
from ..datasets import FileSamples
from ..errors import H5ValueError, listing
from ..hdf5 import file_number
from ..options import SplitOptions
from ..samples import RowTable, SegmentChoice, SegmentSubset, rows_without_line
from ..types import IntArray, Paths
from .arguments import SPLITS, Split
from .cut_splits import Cut, check_split_of_rows, cut_rows, cut_rows_in_time, cut_segments
from .source_files import SourceFiles

__all__ = ["check_kinds", "columns_of_sources", "cut_sources", "refuse_images_of_sources"]


def check_kinds(sources: Sequence[SourceFiles]) -> bool:
    """Return whether samples are segments, or cut from segments, in all sources.

    Raises:
        H5ValueError: they are in some sources, and rows in others.
    """
    kinds = {source.has_segments for source in sources}
    if len(kinds) > 1:
        raise H5ValueError(
            "samples are segments in some sources, which name attributes ('@'), patterns ('*'), sparse matrices or "
            "arrays of references, and rows in others. Name the same kind of array in every source."
        )
    return True in kinds


def refuse_images_of_sources(opened: Sequence[FileSamples]) -> None:
    """Raise an error for files that may each be one image or volume, with its lines as rows.

    Args:
        opened: the samples of each source.

    Raises:
        H5ValueError: each file may be one image or volume.
    """
    tables = [samples.scanned for samples in opened if samples.scanned.indexer.numbers_are_rows]
    sizes = {file_number(path): size for t in tables for path, size in zip(t.paths, np.diff(t.starts), strict=True)}
    if len({tuple(array.axes for array in table.layouts[0]) for table in tables}) == 1:
        refuse_images(tables[0].layouts[0], sizes.values(), len(sizes))


def columns_of_sources(
    opened: Sequence[tuple[SourceFiles, RowTable, IntArray | None]], name: str, argument: str
) -> npt.NDArray[Any]:
    """Return an array with one value per sample, joined over the sources.

    Args:
        opened: each source, the table of its samples, and the numbers of the used samples (None for all).
        name: the array.
        argument: the argument that names the array, for errors.
    """
    parts = []
    for source, table, indices in opened:
        if (key := source.key(name)) in table.columns:
            parts.append(table.values_of_samples(key))
            continue
        values = source.column(table, table.paths, name, table.n_rows, argument)
        parts.append(values if indices is None else values[indices])
    return _joined_columns(parts, argument)


def cut_sources(
    sources: Sequence[SourceFiles], options: SplitOptions, paths: Mapping[Split, Paths | None]
) -> Cut[list[IntArray | SegmentSubset]]:
    """Return the rows, or the segments, of each source by split, before any filter.

    Args:
        sources: the sources of the training rows.
        options: shares and folds.
        paths: the paths of each split in the arguments.
    """
    return (_cut_segments if check_kinds(sources) else _cut_rows)(sources, options, paths)


def _cut_rows(
    sources: Sequence[SourceFiles], options: SplitOptions, paths: Mapping[Split, Paths | None]
) -> Cut[list[IntArray | SegmentSubset]]:
    """Divide the rows of all files; a file that two sources share counts once, so its rows stay in one split."""
    check_split_of_rows(options)
    tables = {source: source.unfiltered(SegmentChoice(), as_rows=True) for source in sources}
    columns: dict[str, list[npt.NDArray[Any]]] = {"group_key": [], "stratify_key": [], "column": []}
    lacks: list[npt.NDArray[np.bool_]] = []
    sizes: list[dict[Any, int]] = []  # by device and inode, since sources may name one file by different links
    starts: dict[Any, int] = {}
    n_rows = 0
    for source, table in tables.items():
        numbers = [file_number(path) for path in table.paths]
        sizes.append(dict(zip(numbers, np.diff(table.starts).tolist(), strict=True)))
        new = {file: path for file, path in zip(numbers, table.paths, strict=True) if file not in starts}
        begin, paths_of_new = n_rows, list(new.values())
        for file in new:
            starts[file] = n_rows
            n_rows += sizes[-1][file]
        for argument, parts in columns.items():
            if new and (key := getattr(options, argument)) is not None:
                shown = "split.key" if argument == "column" else argument
                parts.append(source.column(table, paths_of_new, key, n_rows - begin, shown))
        if new:
            every = [*source.arrays, *map(source.key, options.columns), *map(source.key, source.reading.of_segments)]
            reading = source.reading
            lacking_here = rows_without_line(paths_of_new, every, reading.files, reading.catalog)
            lacks.append(np.zeros(n_rows - begin, np.bool_) if lacking_here is None else lacking_here)
    groups, labels, names = (_joined_columns(parts, argument) if parts else None for argument, parts in columns.items())
    lacking = np.concatenate(lacks) if any(map(np.any, lacks)) else None
    if options.by == "time":
        cut = Cut(cut_rows_in_time(np.diff([*starts.values(), n_rows]).tolist(), options, lacking))
    else:
        cut = cut_rows(n_rows, options, paths=paths, groups=groups, labels=labels, names=names, lacks=lacking)
    split_of = np.full(n_rows, -1)
    for split, rows in cut.parts.items():
        split_of[rows] = SPLITS.index(split)
    own = [
        np.concatenate([split_of[starts[file] : starts[file] + size] for file, size in of_source.items()])
        for of_source in sizes
    ]
    rows_of_sources: dict[Split, list[IntArray | SegmentSubset]] = {
        split: [np.flatnonzero(rows == SPLITS.index(split)) for rows in own] for split in cut.parts
    }
    return Cut(rows_of_sources, cut.n_groups)


def _cut_segments(
    sources: Sequence[SourceFiles], options: SplitOptions, paths: Mapping[Split, Paths | None]
) -> Cut[list[IntArray | SegmentSubset]]:
    """Divide the segments of all files."""
    tables, reading = [], sources[0].reading
    for source in sources:
        columns = {name: source.key(name) for name in options.columns}
        filtered = [test.column for test in source.filters.criteria if test.column is not None]
        other_columns = list(map(source.key, [*reading.of_segments, *filtered]))
        choice = SegmentChoice(columns=list(columns.values()), other_columns=other_columns)
        table = source.unfiltered(choice)
        tables.append(replace(table, columns={name: table.columns[key] for name, key in columns.items()}))
    cut = cut_segments(tables, options, reading.catalog, reading.options, paths)
    return Cut({split: [*subsets] for split, subsets in cut.parts.items()}, cut.n_groups)


def _joined_columns(parts: Sequence[npt.NDArray[Any]], argument: str) -> npt.NDArray[Any]:
    """Return columns of several sources as one."""
    if len({part.dtype.kind for part in parts}) > 1:
        raise H5ValueError(
            f"{argument} has the dtypes {listing(part.dtype for part in parts)} in the sources. Name an array with the "
            "same dtype in all sources."
        )
    return np.concatenate(parts)

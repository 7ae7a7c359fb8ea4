"""The files of sources: opened with their filters, and cut into splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import (
    TARGET,
    Catalog,
    bad_files,
    checked_names,
    expand_those_there,
    files_to_read,
    keys_of,
    paths_of,
    refuse_images,
)
from ..datasets import CombinedHDF5Dataset
from ..datasets.collate import Collate
from ..datasets.named_fields import NamedFields
from ..errors import H5ValueError, listing
from ..hdf5 import OpenOptions, file_number
from ..options import FileOptions, RowCacheOptions, SplitOptions
from ..samples import (
    KindOfSamples,
    NoRowPassesError,
    RowTable,
    SampleOptions,
    SegmentChoice,
    SegmentSubset,
    column_of,
    criteria_of,
    rows_without_line,
    sample_kind,
)
from ..types import IntArray, Paths
from .arguments import SPLITS, Split
from .cut_splits import check_split_of_rows, cut_rows, cut_segments
from .training_rows import OF_A_SOURCE, Source

__all__ = ["SourceFiles", "SplitDataset"]

_OF_SAMPLES = ("sample", "segments", "window", "select", "patch")
"""Arguments on what a sample is."""

_OF_ALL_SOURCES = (
    *OF_A_SOURCE,
    "dtype",
    "on_bad_file",
    "normalize",
    "table",
    "decode",
    *_OF_SAMPLES,
)
"""Arguments of the data module that its datasets take as they are."""


class SplitDataset(CombinedHDF5Dataset):
    """The dataset of a split; the data module sees to it that all ranks have the same rows."""

    agrees_by_itself = False
    public_name = CombinedHDF5Dataset.__name__


class SourceFiles:
    """Opens the files of sources.

    Args:
        given: the data module's arguments by name, for all sources that do not set them.
        opened: how files are opened.
        collate: how samples of several shapes become a batch.
        kind: what a sample is.
        of_segments: arrays with values of segments that splits and weights ask for, by their names here.

    Attributes:
        catalog: known contents of the files.
        seed: of random windows and patches.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        opened: FileOptions,
        collate: Collate | None,
        kind: SampleOptions,
        of_segments: Sequence[str],
    ) -> None:
        row_cache = RowCacheOptions.parse(given["row_cache"], "row_cache")
        self._arguments = {name: given[name] for name in _OF_ALL_SOURCES}
        self._arguments |= {"cache_size": row_cache, "files": opened, "collate_fn": collate}
        self._arguments |= {"segments": kind.segments, "window": kind.window, "patch": kind.patch}
        self.catalog, self.seed, self._of_segments = Catalog(staging=opened.staged), 0, of_segments
        self._kind, self._opened = kind, opened

    def have_segments(self, sources: Sequence[Source]) -> bool:
        """Whether samples are of segments, in all sources.

        Raises:
            H5ValueError: they are in some.
        """
        found = [self._kind.needs_segments(self._keys_of(source)) for source in sources]
        if len(set(found)) > 1:
            raise H5ValueError(
                "load_fields or field_map of some sources name attributes ('@') or patterns ('*'), so that samples are "
                "segments there and rows in others. Name alike fields in all."
            )
        return found[0]

    def hold_segments(self, sources: Sequence[Source]) -> bool:
        """Whether samples are of segments, in all sources: also rows of sparse matrices, and what references lead to.

        Raises:
            H5ValueError: they are in some.
        """
        opened, found = OpenOptions(files=self._opened), set()
        for source in sources:
            files = expand_those_there(source.paths, lambda *_: None, source.argument, self.catalog.staging)
            samples = replace(self._kind, seed=self.seed)
            found.add(sample_kind(self.catalog, files, self._keys_of(source), opened, samples).has_segments)
        if len(found) > 1:
            raise H5ValueError(
                "load_fields names sparse matrices or arrays of references in some sources, and other arrays in "
                "others. Name alike fields in all."
            )
        return True in found

    def _keys_of(self, source: Source) -> list[str]:
        """The arrays that a source names."""
        names = self._of(source)["load_fields"]
        return [] if names is None else [self._key(source, name) for name in checked_names(names)]

    def open(
        self,
        source: Source,
        rows: IntArray | SegmentSubset | None,
        *,
        n_sources: int = 1,
        columns: Sequence[str] = (),
        **of_samples: Any,
    ) -> SplitDataset:
        """A source's rows, or segments, that pass the filters.

        Args:
            source: which one.
            rows: rows of its files to choose among, or segments; None are all.
            n_sources: that share the memory for rows that were used last.
            columns: further arrays with a value for each segment, by their names here.
            of_samples: what is done to samples and batches.
        """
        arguments = self._of(source)
        if isinstance(rows, SegmentSubset) and not len(rows):
            raise NoRowPassesError("the split has no segment of it. Pass other fractions, or leave the source out.")
        subset, indices = (rows, None) if isinstance(rows, SegmentSubset) else (None, rows)
        others_ask = [self._key(source, name) for name in self._of_segments] if subset is not None else []
        keys = [self._key(source, name) for name in columns]
        choice = SegmentChoice(subset=subset, columns=keys, others_ask=others_ask)
        row_cache: RowCacheOptions = arguments["cache_size"]
        arguments["cache_size"] = replace(row_cache, max_bytes=row_cache.n_bytes // n_sources)
        paths, catalog = self._paths(source), self.catalog
        return SplitDataset(paths, **arguments, **of_samples, indices=indices, choice=choice, catalog=catalog)

    def expected_arrays(self, sources: Sequence[Source], names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Arrays that sources need, and those of them with values that decide about rows, as the files call them.

        Args:
            sources: of the training rows.
            names: of further arrays that decide about rows.
        """
        fields: list[str] = []
        columns: list[str] = []
        for arguments in (self._arguments, *map(self._of, sources)):
            with suppress(H5ValueError):  # raised again when the dataset is created
                filters = criteria_of(where=arguments["where"])
                keys, _ = keys_of(arguments["field_map"])
                more = [] if arguments["label"] is None else [TARGET, *filter(None, [arguments["valid_mask"]])]
                fields += [keys.get(name, name) for name in (*(arguments["load_fields"] or ()), *more)]
                asked = [*names, *(one.column for one in filters if one.column is not None)]
                columns += [keys.get(name, name) for name in asked]
        return fields, columns

    def refuse_images(self, opened: Mapping[Source, SplitDataset]) -> None:
        """Refuse sources of files that may each be one image or volume, with its lines as rows.

        Args:
            opened: their rows.

        Raises:
            H5ValueError: they may be.
        """
        tables = [each.scanned for source, each in opened.items() if self._of(source)["sample"] is None]
        found = [table for table in tables if table is not None and table.indexer.numbers_are_rows]
        sizes = {file_number(path): size for t in found for path, size in zip(t.paths, np.diff(t.starts), strict=True)}
        if len({tuple(array.axes for array in table.layouts[0]) for table in found}) == 1:
            refuse_images(found[0].layouts[0], sizes.values(), len(sizes))

    def column(self, opened: Mapping[Source, SplitDataset], name: str, argument: str) -> npt.NDArray[Any]:
        """One value of each row of some sources, one source after the other.

        Args:
            opened: their rows.
            name: the array.
            argument: what it was given as, for errors.
        """
        parts = []
        for source, dataset in opened.items():
            table = dataset.table
            if (key := self._key(source, name)) in table.columns:
                parts.append(table.values_of_samples(key))
                continue
            values = self._column(source, table, table.paths, name, table.n_rows, argument)
            parts.append(values if dataset.indices is None else values[dataset.indices])
        return _joined_columns(parts, argument)

    def cut_rows(
        self, sources: Sequence[Source], options: SplitOptions, paths: Mapping[Split, Paths | None]
    ) -> dict[Split, list[IntArray]]:
        """Cuts the rows of all files, each once: a row that two sources have is on one side.

        Args:
            sources: of the training rows.
            options: shares and folds.
            paths: what the user gave for each split.

        Returns:
            The rows of each source by split, counted in its files.
        """
        check_split_of_rows(options)
        as_rows = KindOfSamples(replace(self._kind, sample="row"))  # what files may be is checked when they are opened
        tables = {source: self._unfiltered(source, SegmentChoice(), as_rows) for source in sources}
        columns: dict[str, list[npt.NDArray[Any]]] = {"group_key": [], "stratify_key": [], "column": []}
        lacks: list[npt.NDArray[np.bool_]] = []
        sizes: list[dict[Any, int]] = []  # by device and inode, since sources may name one file by different links
        starts: dict[Any, int] = {}
        n_rows = 0
        for source, table in tables.items():
            numbers = [file_number(path) for path in table.paths]
            sizes.append(dict(zip(numbers, np.diff(table.starts).tolist(), strict=True)))
            new = {file: path for file, path in zip(numbers, table.paths, strict=True) if file not in starts}
            begin = n_rows
            for file in new:
                starts[file] = n_rows
                n_rows += sizes[-1][file]
            for argument, parts in columns.items():
                if new and (key := getattr(options, argument)) is not None:
                    paths_of_new = list(new.values())
                    parts.append(self._column(source, table, paths_of_new, key, n_rows - begin, argument))
            if new:
                every = [*(layout.key for layout in table.layouts[0]), *options.columns]
                here = rows_without_line(list(new.values()), every, self._opened, self.catalog)
                lacks.append(np.zeros(n_rows - begin, np.bool_) if here is None else here)
        groups, labels, names = (
            _joined_columns(parts, argument) if parts else None for argument, parts in columns.items()
        )
        lacking = np.concatenate(lacks) if any(map(np.any, lacks)) else None
        cut = cut_rows(n_rows, options, paths=paths, groups=groups, labels=labels, names=names, lacks=lacking)
        split_of = np.full(n_rows, -1)
        for split, rows in cut.items():
            split_of[rows] = SPLITS.index(split)
        own = [
            np.concatenate([split_of[starts[file] : starts[file] + size] for file, size in of_source.items()])
            for of_source in sizes
        ]
        return {split: [np.flatnonzero(rows == SPLITS.index(split)) for rows in own] for split in cut}

    def cut_segments(
        self, sources: Sequence[Source], options: SplitOptions, paths: Mapping[Split, Paths | None]
    ) -> dict[Split, list[SegmentSubset]]:
        """Cuts the segments of all files, before any filter.

        Args:
            sources: of the training rows.
            options: shares and folds.
            paths: what the user gave for each split.

        Returns:
            The segments of each source by split.
        """
        names = options.columns
        tables = []
        for source in sources:
            columns = {name: self._key(source, name) for name in names}
            filters = criteria_of(where=self._of(source)["where"])
            every = [*self._of_segments, *(one.column for one in filters if one.column is not None)]
            others_ask = [self._key(source, name) for name in every]
            choice = SegmentChoice(columns=list(columns.values()), others_ask=others_ask)
            table = self._unfiltered(source, choice)
            tables.append(replace(table, columns={name: table.columns[key] for name, key in columns.items()}))
        opened = OpenOptions(files=self._opened)
        return cut_segments(tables, options, self.catalog, opened, paths)

    def _key(self, source: Source, name: str) -> str:
        """What the files of a source call an array."""
        keys, _ = keys_of(self._of(source)["field_map"])
        return keys.get(name, name)

    def _unfiltered(self, source: Source, choice: SegmentChoice, kind: KindOfSamples | None = None) -> RowTable:
        """The samples of a source before any filter."""
        arguments, options = self._of(source), OpenOptions(files=self._opened)
        self.catalog.joins.use(arguments["table"])
        samples = replace(self._kind, seed=self.seed)
        fields = NamedFields(arguments["load_fields"], arguments["field_map"], samples)
        bad = bad_files(arguments["on_bad_file"])
        paths = files_to_read(self.catalog, self._paths(source), bad)
        kind = kind or sample_kind(self.catalog, paths, fields.arrays, options, samples)
        return fields.look(self.catalog, paths, options, kind, choice, bad=bad, takes_packed=True).table

    def _column(
        self, source: Source, table: RowTable, paths: Sequence[str], name: str, n_rows: int, argument: str
    ) -> npt.NDArray[Any]:
        key = self._key(source, name)
        opened: FileOptions = self._opened
        first, catalog = table.layouts[0][0].key if opened.swmr else None, self.catalog
        (others,) = paths_of(self._of(source)["field_map"], [name])
        if others is not None and len(paths) < len(table.paths):
            raise H5ValueError(
                f"{argument}={name!r} is of another file, and several sources have a file in common. Name it once."
            )
        return column_of(
            paths, key, n_rows, argument=argument, files=opened, same_rows_as=first, catalog=catalog, others=others
        )

    def _of(self, source: Source) -> dict[str, Any]:
        return self._arguments | dict(source.own) | {"seed": self.seed}

    def _paths(self, source: Source) -> Any:
        if self._arguments["on_bad_file"] != "skip":
            return self.catalog.files(source.paths, source.argument)
        expand_those_there(
            source.paths, lambda *_: None, source.argument, self.catalog.staging
        )  # errors name the argument
        return source.paths  # the dataset logs and counts skipped files


def _joined_columns(parts: Sequence[npt.NDArray[Any]], argument: str) -> npt.NDArray[Any]:
    """Columns of several sources as one."""
    if len({part.dtype.kind for part in parts}) > 1:
        raise H5ValueError(
            f"{argument} is of {listing(part.dtype for part in parts)} in the sources. Name an array with the same "
            "dtype in all sources."
        )
    return np.concatenate(parts)

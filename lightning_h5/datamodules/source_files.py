"""The files of sources: opened with their filters, their columns, and how their rows are cut into splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..datasets import Catalog, CombinedHDF5Dataset, RowTable, column_of, expand_those_there, refuse_images
from ..datasets.fields import TARGET, keys_of
from ..datasets.row_filters import criteria_of
from ..errors import H5ValueError, listing
from ..hdf5 import expand_paths, file_number
from ..options import FileOptions, RowCacheOptions, SplitOptions
from ..types import IntArray, Paths
from .arguments import SPLITS, Split
from .mixtures import Source
from .sources import cut_rows

__all__ = ["SourceFiles", "SplitDataset"]

_UNFILTERED = ("load_fields", "field_map", "files", "on_bad_file")
"""Arguments that count rows before any filter."""


class SplitDataset(CombinedHDF5Dataset):
    """The dataset of a split; the data module sees to it that all ranks have the same rows."""

    agrees_by_itself = False
    public_name = CombinedHDF5Dataset.__name__


class _CountedDataset(SplitDataset):
    """Rows that are only counted."""

    takes_packed = True


class SourceFiles:
    """Opens the files of sources.

    Args:
        arguments: of ``CombinedHDF5Dataset``, for all sources that have none of their own.

    Attributes:
        catalog: what is in the files, as far as it is known.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self.catalog = Catalog()

    def open(self, source: Source, rows: IntArray | None, *, n_sources: int = 1, **of_samples: Any) -> SplitDataset:
        """A source's rows that pass the filters.

        Args:
            source: which one.
            rows: rows of its files to choose among; None are all.
            n_sources: that share the memory for rows that were used last.
            of_samples: what is done to samples and batches.
        """
        arguments = self._of(source)
        row_cache: RowCacheOptions = arguments["cache_size"]
        arguments["cache_size"] = replace(row_cache, max_bytes=row_cache.n_bytes // n_sources)
        return SplitDataset(self._paths(source), **arguments, **of_samples, indices=rows, catalog=self.catalog)

    def expected_arrays(self, sources: Sequence[Source], names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Arrays that sources need, and those of them with values that decide about rows, as the files call them.

        Args:
            sources: of the training rows.
            names: of further arrays that decide about rows.
        """
        fields: list[str] = []
        columns: list[str] = []
        for arguments in (self._arguments, *map(self._of, sources)):
            with suppress(H5ValueError):  # is raised when the dataset is made
                filters = criteria_of(where=arguments["where"])
                keys, _ = keys_of(arguments["field_map"])
                more = [] if arguments["label"] is None else [TARGET, *filter(None, [arguments["valid_mask"]])]
                fields += [keys.get(name, name) for name in (*(arguments["load_fields"] or ()), *more)]
                asked = [*names, *(one.column for one in filters if one.column is not None)]
                columns += [keys.get(name, name) for name in asked]
        return fields, columns

    def refuse_images(self, opened: Mapping[Source, SplitDataset]) -> None:
        """Refuses sources of which each file may be one image or volume, and its rows lines of it.

        Args:
            opened: their rows.

        Raises:
            H5ValueError: they may be.
        """
        tables = [each.scanned for source, each in opened.items() if self._of(source)["sample"] is None]
        found = [table for table in tables if table is not None]
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
            values = self._column(source, table, table.paths, name, table.n_rows, argument)
            parts.append(values if dataset.indices is None else values[dataset.indices])
        return _joined(parts, argument)

    def cut(
        self, sources: Sequence[Source], options: SplitOptions, paths: Mapping[Split, Paths | None]
    ) -> dict[Split, list[IntArray]]:
        """Cuts the rows of all files, each once: a row that two sources have is on one side.

        Args:
            sources: of the training rows.
            options: shares and folds.
            paths: what the user gave for each split.

        Returns:
            For each split the rows of each source, counted in its files.
        """
        tables = [self._unfiltered(source).table for source in sources]
        # By number, since sources may name one file by different links.
        sizes = [dict(zip(map(file_number, t.paths), np.diff(t.starts).tolist(), strict=True)) for t in tables]
        names = {file_number(path): path for table in tables for path in table.paths}
        starts: dict[Any, int] = {}
        groups: list[npt.NDArray[Any]] = []
        labels: list[npt.NDArray[Any]] = []
        n_rows = 0
        for source, table, of_source in zip(sources, tables, sizes, strict=True):
            new = [file for file in of_source if file not in starts]
            n_new = sum(of_source[file] for file in new)
            starts |= zip(new, np.cumsum([n_rows, *(of_source[file] for file in new)]).tolist(), strict=False)
            paths_of_new = [names[file] for file in new]
            n_rows += n_new
            if new and options.group_key is not None:
                groups.append(self._column(source, table, paths_of_new, options.group_key, n_new, "group_key"))
            if new and options.stratify_key is not None:
                labels.append(self._column(source, table, paths_of_new, options.stratify_key, n_new, "stratify_key"))
        cut = cut_rows(
            n_rows,
            options,
            paths=paths,
            groups=_joined(groups, "group_key") if groups else None,
            labels=_joined(labels, "stratify_key") if labels else None,
        )
        split_of = np.full(n_rows, -1)
        for split, rows in cut.items():
            split_of[rows] = SPLITS.index(split)
        own = [
            np.concatenate([split_of[starts[file] : starts[file] + size] for file, size in of_source.items()])
            for of_source in sizes
        ]
        return {split: [np.flatnonzero(rows == SPLITS.index(split)) for rows in own] for split in cut}

    def _unfiltered(self, source: Source) -> SplitDataset:
        arguments = {name: value for name, value in self._of(source).items() if name in _UNFILTERED}
        paths, catalog = self._paths(source), self.catalog
        return _CountedDataset(paths, **arguments, sample="row", catalog=catalog)  # looked at when they are opened

    def _column(
        self, source: Source, table: RowTable, paths: Sequence[str], name: str, n_rows: int, argument: str
    ) -> npt.NDArray[Any]:
        field_map = self._of(source)["field_map"] or {}
        given = field_map.get(name, name)
        key = given.get("key", name) if isinstance(given, Mapping) else given  # what it is called in the files
        opened: FileOptions = self._arguments["files"]
        first, catalog = table.layouts[0][0].key if opened.swmr else None, self.catalog
        return column_of(paths, key, n_rows, argument=argument, files=opened, same_rows_as=first, catalog=catalog)

    def _of(self, source: Source) -> dict[str, Any]:
        return self._arguments | dict(source.own)

    def _paths(self, source: Source) -> Any:
        if self._arguments["on_bad_file"] != "skip":
            return expand_paths(source.paths, source.argument)
        expand_those_there(source.paths, lambda *_: None, source.argument)  # an error has the argument's name
        return source.paths  # the dataset logs what it leaves out, and counts it


def _joined(parts: Sequence[npt.NDArray[Any]], argument: str) -> npt.NDArray[Any]:
    """Columns of several sources as one."""
    if len({part.dtype.kind for part in parts}) > 1:
        raise H5ValueError(
            f"{argument} is of {listing(part.dtype for part in parts)} in the sources. Name an array that is alike in "
            "all of them."
        )
    return np.concatenate(parts)

"""Find samples that training and an evaluation share: files, groups and arrays in two splits, under any name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from ..datasets import RowDataset, TableDataset
from ..errors import listing
from ..hdf5 import ChangeGuard, file_number
from ..types import IntArray

__all__ = ["overlap_of_files", "overlap_of_samples"]


def overlap_of_files(training: Sequence[str], others: Sequence[str], split: str) -> str | None:
    """Return a warning about files that training and another split share; None without any.

    Args:
        training: paths of the training files.
        others: paths of the split's files.
        split: the split.
    """
    known = {file_number(path): path for path in training}
    pairs = [(path, known[number]) for path in others if (number := file_number(path)) in known]
    return _overlap_text([_twice(path, same) for path, same in pairs], split)


def overlap_of_samples(training: RowDataset, other: RowDataset, split: str) -> str | None:
    """Return a warning about samples that training and another split share; None without any.

    Objects are compared by file and by the address of their bytes in the file. Files of only one split are skipped.

    Args:
        training: the training samples.
        other: the samples of the split.
        split: the split.
    """
    names: list[str] = []
    for mine in map(_SampledArrays, _with_tables(training)):
        for theirs in map(_SampledArrays, _with_tables(other)):
            names += theirs.names_in(mine)
    return _overlap_text(list(dict.fromkeys(names)), split)


def _overlap_text(names: Sequence[str], split: str) -> str | None:
    if not names:
        return None
    n = f"{len(names):,} files or arrays" if len(names) > 1 else "data"
    return (
        f"training and {split!r} have {n} in common: {_first_names(names)}. The model is evaluated on samples "
        "that it is trained on. Leave them out of one of the two, or divide the training files by split."
    )


def _first_names(names: Sequence[str], most: int = 6) -> str:
    """Join the first ``most`` quoted names, and add the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _twice(name: str, same: str) -> str:
    """Return a name, and its name in training if that differs."""
    return listing([name]) if name == same else f"{listing([name])} (in training as {listing([same])})"


def _with_tables(dataset: RowDataset) -> Iterator[TableDataset]:
    if isinstance(dataset, TableDataset):
        yield dataset
    for source in dataset.sources:
        yield from _with_tables(source)


def _number_of(guard: ChangeGuard) -> Hashable:
    return (guard.device, guard.inode) if guard.inode else guard.path


class _SampledArrays:
    """The arrays that the samples of a dataset consist of.

    Args:
        dataset: a dataset over a table of files.
    """

    def __init__(self, dataset: TableDataset) -> None:
        self._dataset, self._table = dataset, dataset.table
        self._files = {_number_of(guard): at for at, guard in enumerate(self._table.guards)}
        self._rows: IntArray | None = None

    def names_in(self, training: _SampledArrays) -> list[str]:
        """Return names of the arrays or files that the training samples also have."""
        common = self._files.keys() & training._files.keys()
        if not common:
            return []
        parts, training_parts = self._parts_in(common), training._parts_in(common)
        if not (len(parts) and len(training_parts)):
            return []
        layouts, training_layouts = self._table.layouts, training._table.layouts
        # Columns and attributes belong to the arrays beside them.
        fields = [
            field
            for field in range(min(layouts.n_fields, training_layouts.n_fields))
            if layouts.one(int(parts[0]), field).value is None
            and training_layouts.one(int(training_parts[0]), field).value is None
        ]
        own = [field for field in fields if layouts.name_pattern(field) != training_layouts.name_pattern(field)]
        # Splits may share arrays that both request by the same name, such as coordinates, but not all arrays.
        same: dict[int, int] = {}
        for selection in [[field] for field in own] or [fields]:
            training_places = training._places(training_parts, selection)
            n_times = Counter(training_places)
            part_at = dict(zip(training_places, training_parts.tolist(), strict=True))
            for part, place in zip(parts.tolist(), self._places(parts, selection), strict=True):
                if n_times[place] == 1:  # an array that several training segments share is not a sample
                    same.setdefault(part, part_at[place])
        pairs = [pair for pair in same.items() if self._has_rows_of(pair[0], training, pair[1])]
        return [_twice(self._name(part), training._name(training_part)) for part, training_part in pairs]

    def _parts_in(self, files: set[Hashable]) -> IntArray:
        """Return the parts of some files."""
        of_parts = self._table.files_of(np.arange(self._table.n_parts))
        return np.flatnonzero(np.isin(of_parts, [self._files[number] for number in files]))

    def _places(self, parts: IntArray, fields: Sequence[int]) -> list[Hashable]:
        """Return a key for the arrays of each part; keys are equal only for the same bytes."""
        table = self._table
        numbers = {at: number for number, at in self._files.items()}
        files = [numbers[at] for at in table.files_of(parts).tolist()]
        columns = [table.layouts.first_bytes(parts, field) for field in fields]
        return list(zip(files, *columns, strict=True))

    def _has_rows_of(self, part: int, training: _SampledArrays, same: int) -> bool:
        """Return whether samples of a part share rows, or segments, with the training samples."""
        return bool(len(np.intersect1d(self._numbers_in(part), training._numbers_in(same))))

    def _numbers_in(self, part: int) -> IntArray:
        """Return the rows, or segments, of a part that samples use, counted from the part's first."""
        table = self._table
        if table.indexer.numbers_are_rows:
            bounds, numbers = table.starts, self._dataset.indices
        else:
            segments = table.indexer.segments
            numbers = segments.numbers_of(np.arange(len(segments)))
            bounds = np.arange(table.n_parts + 1) if table.first_segments is None else table.first_segments
        low, high = bounds[part : part + 2].tolist()
        if numbers is None:
            return np.arange(high - low)
        if self._rows is None:
            self._rows = np.sort(numbers)
        first, end = np.searchsorted(self._rows, [low, high])
        rows: IntArray = self._rows[first:end] - low
        return rows

    def _name(self, part: int) -> str:
        """Return the name of a part in messages."""
        table = self._table
        path = table.paths[int(table.files_of(np.array([part]))[0])]
        if table.parts is not None:
            return f"{path}:{table.name_of_part(part)}"
        return path

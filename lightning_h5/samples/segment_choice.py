"""Choose the segments of a dataset: the segments of its split that pass the filters.

Splits are defined by fractions, folds and groups of segments, by lists in the files, or by time. Splits and filters
both read arrays with one value per segment.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import PREFIX, is_of_table
from ..counters import Counters
from ..errors import H5ValueError, listing
from ..hdf5 import OpenOptions, is_attribute_key
from ..options import SplitOptions
from ..order import time_split
from ..readers import run_with_progress
from ..types import IntArray
from .indexer import Indexer
from .labels import LabelCriterion, classes_of, search_label
from .row_filters import Criterion, Mask, NoRowPassesError, values_text
from .row_table import RowTable
from .segment_lines import SegmentLines

__all__ = [
    "SegmentChoice",
    "SegmentSubset",
    "groups_by_pattern",
    "samples_that_pass",
    "samples_with_lines",
    "segments_by_time",
    "segments_in_lists",
    "values_of_segments",
    "with_label",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SegmentSubset:
    """Some segments of a table, or a part of each.

    Attributes:
        segments: numbers of the segments, ascending; None for all.
        low: first step of each segment's part; None for whole segments.
        high: the step after the last of each part.
    """

    segments: IntArray | None = None
    low: IntArray | None = None
    high: IntArray | None = None

    def __len__(self) -> int:
        return next((len(array) for array in (self.segments, self.low) if array is not None), 0)

    def of(self, indexer: Indexer) -> Indexer:
        """Return the samples of these segments."""
        if self.low is not None and self.high is not None:
            indexer = indexer.in_parts(self.low, self.high)
        return indexer if self.segments is None else indexer.among(self.segments)


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentChoice:
    """The segments of a dataset, and the columns to read.

    Attributes:
        subset: the segments of a split; None for all.
        columns: other arrays with one value per segment, possibly repeated for each step.
        criteria: conditions on arrays with a value for each segment or each step.
        keys: arrays by the name in a criterion, if names differ from the files.
        other_columns: arrays that other splits need. They are read now, so that files are opened once.
    """

    subset: SegmentSubset | None = None
    columns: Sequence[str] = ()
    criteria: Sequence[Criterion] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    other_columns: Sequence[str] = ()

    @property
    def all_columns(self) -> list[str]:
        """The arrays with values to read."""
        filtered = [criterion.column for criterion in self.criteria if criterion.column is not None]
        return sorted({*self.columns, *(self.keys.get(name, name) for name in filtered), *self.other_columns})


def groups_by_pattern(table: RowTable, pattern: str) -> npt.NDArray[np.str_]:
    """Return the group of each segment: the match of a regular expression's first group in its name, or its file's.

    Raises:
        H5ValueError: the pattern is invalid, or does not match some names.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise H5ValueError(f"split.group_pattern={pattern!r} is not a regular expression: {error}.") from error
    if expression.groups < 1:
        raise H5ValueError(
            f"split.group_pattern={pattern!r} has no group in parentheses. Put parentheses around the group's name, "
            r"such as r'(patient\d+)_'."
        )
    groups = []
    for _, name, file in _named_segments(table):
        path = table.paths[file]
        match = expression.search(name) or expression.search(path)
        if match is None:
            raise H5ValueError(
                f"split.group_pattern={pattern!r} finds nothing in the segment {name!r} of {path!r}. Pass a pattern "
                "that fits all names of segments or files."
            )
        groups.append(match.group(1))
    return np.array(groups)


def segments_in_lists(
    table: RowTable, lists: Mapping[Any, Sequence[tuple[int, npt.NDArray[np.str_]]]]
) -> dict[Any, IntArray]:
    """Return the listed segments of each split.

    Args:
        table: the files.
        lists: for each split, pairs of a file's number and the listed names (or numbers) of segments in it.

    Raises:
        H5ValueError: a list has an unknown name, or a segment is in several splits.
    """
    numbers: dict[tuple[int, str], int] = {}
    for number, name, file in _named_segments(table):
        short = file, name.rpartition("/")[2]
        numbers[short] = number if short not in numbers else -1  # a short name of several segments names none of them
        numbers[file, name] = number
    for (file, alias), name in ({} if table.parts is None else table.parts.aliases).items():
        for form in (alias, alias.rpartition("/")[2]):
            numbers.setdefault((file, form), numbers.get((file, name), -1))
    segments: dict[str, IntArray] = {}
    split_of: dict[int, str] = {}
    for split, of_files in lists.items():
        listed_numbers = []
        for file, names in of_files:
            for name in names.tolist():
                number = numbers.get((file, name.strip("/")), -1)
                if number < 0:
                    names_in_file = [text for number_of_file, text in numbers if number_of_file == file]
                    raise H5ValueError(
                        f"split.key lists {name!r} for {split!r} in {table.paths[file]!r}, which has no such segment; "
                        f"it has {listing(names_in_file)}. Name arrays that list some of these."
                    )
                if split_of.setdefault(number, split) != split:
                    raise H5ValueError(
                        f"split.key lists {name!r} for {split_of[number]!r} and {split!r} in {table.paths[file]!r}. "
                        "Each segment is in one split; name other lists."
                    )
                listed_numbers.append(number)
        segments[split] = np.unique(np.array(listed_numbers, dtype=np.int64))
    return segments


def segments_by_time(table: RowTable, options: SplitOptions) -> dict[str, SegmentSubset]:
    """Return the part of each segment in each split: training first, then validation, then test, with gaps between.

    Raises:
        H5ValueError: a split has no sample.
    """
    indexer = table.indexer
    gap = indexer.reach - 1 if options.gap is None else options.gap
    n = indexer.segments.lengths
    parts = time_split(n, options.val_fraction, options.test_fraction, gap=gap, beat=indexer.segments.beat)
    subsets = {}
    for name, (low, high) in parts.items():
        subsets[name] = SegmentSubset(low=low, high=high)
        if not len(subsets[name].of(indexer)):
            raise H5ValueError(
                f"split.by='time' leaves no sample for {name!r}: the longest of {len(n):,} segments has "
                f"{int(n.max(initial=0)):,} steps, a sample takes {indexer.reach}, and parts are {gap} steps apart. "
                "Pass other fractions, or a smaller gap."
            )
    return subsets


def _named_segments(table: RowTable) -> Iterator[tuple[int, str, int]]:
    """Yield each segment that has samples: its position among them, its name, and the number of its file."""
    segments = table.indexer.segments
    for place, number in enumerate(segments.numbers_of(np.arange(len(segments))).tolist()):
        yield place, table.segment_name(number), table.file_of_segment(number)


def values_of_segments(table: RowTable, key: str, values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the value of an array for each segment.

    Args:
        table: the files, with segments.
        key: the array.
        values: values of the array, part by part: one per segment, or one per step.

    Raises:
        H5ValueError: a segment has several values.
    """
    segments = table.indexer.segments
    numbers = segments.numbers_of(np.arange(len(segments)))
    n_parts = len(values)
    is_of_segments = [_has_value_a_segment(table, key, part, column) for part, column in enumerate(values)]
    sizes = [(table.n_segments_of(part), int(table.starts[part + 1] - table.starts[part])) for part in range(n_parts)]
    parts = list(zip(values, is_of_segments, sizes, strict=True))
    # Values of the other kind are placeholders of the same length.
    of_parts = [np.broadcast_to(x, n) if is_of_segment else x[:1].repeat(n) for x, is_of_segment, (n, _) in parts]
    by_segment = np.concatenate(of_parts)[numbers]
    if all(is_of_segments):
        return by_segment
    by_step = np.concatenate([x[:1].repeat(n) if is_of_segment else x for x, is_of_segment, (_, n) in parts])
    firsts, lengths = segments.steps[0].firsts_of(), segments.lengths
    ends = np.cumsum(lengths)
    steps = by_step[segments.rows_at(segments.places_of(slice(None), lengths))]
    is_by_step = ~np.array(is_of_segments)[table.parts_of_segments(numbers)]
    own = by_step[segments.rows_at(np.where(lengths > 0, firsts, 0))]
    differs = (steps != np.repeat(own, lengths)) & np.repeat(is_by_step, lengths)
    if differs.any():
        at = int(np.searchsorted(ends, int(differs.argmax()), side="right"))
        different = np.unique(steps[ends[at] - lengths[at] : ends[at]])
        raise H5ValueError(
            f"{key!r} has several values in the segment {table.segment_name(int(numbers[at]))!r}: "
            f"{listing(map(str, different))}. Name an array with one value per segment."
        )
    return np.where(is_by_step, own, by_segment)


def samples_that_pass(
    table: RowTable, criteria: Sequence[Criterion], keys: Mapping[str, str], values: Mapping[str, Sequence[Any]]
) -> tuple[Indexer, Mask | None]:
    """Return the samples that pass criteria, and a mask of the rows that do.

    The mask is None for volumes and rows of sparse matrices, which pass as a whole.

    Args:
        table: the files, with segments.
        criteria: conditions on columns.
        keys: the arrays of columns, if the files have other names for them.
        values: values of each array, part by part: one per segment, or one per step.

    Raises:
        H5ValueError: a condition has no column, or cannot be checked; or no row passes.
    """
    is_kept = np.ones(sum(map(table.n_segments_of, range(len(table.layouts)))), dtype=np.bool_)
    passes = np.ones(table.n_rows, dtype=np.bool_)
    counts = []
    for criterion in criteria:
        if criterion.column is None:
            raise H5ValueError(
                f"{criterion.text} is a function of all columns, but samples are of segments. Pass a mapping from "
                "arrays to conditions, such as where={'site': ['A', 'B']}; a condition may be a function of its column."
            )
        key = keys.get(criterion.column, criterion.column)
        of_parts = values[key]
        column = np.concatenate(of_parts)
        mask = criterion.mask({criterion.column: column}, len(column))
        existing = "" if mask.any() else f" (which are {values_text(column)})"
        counts.append(f"{criterion.text} keeps {int(mask.sum()):,} of {len(column):,} values{existing}")
        if absent := sorted(criterion.expected - set(column[mask].tolist())):  # a typo would silently drop segments
            warnings.warn(f"filters name {listing(absent)}, which no segment has.", stacklevel=4)
        ends = np.cumsum([len(part_values) for part_values in of_parts])
        _combine(table, key, np.split(mask, ends[:-1]), is_kept, passes)
    return _keeping(table, is_kept, passes, f"no segment passes all filters: {'; '.join(counts)}. Loosen one of them.")


def samples_with_lines(table: RowTable, lines: SegmentLines) -> Indexer:
    """Return the samples of the segments and steps with a line in a side table; log the number without one.

    Raises:
        H5ValueError: no segment has a line.
    """
    indexer, masks = table.indexer, [of_part >= 0 for of_part in lines.of_parts]
    if all(map(np.all, masks)):
        return indexer
    is_kept = np.ones(sum(map(table.n_segments_of, range(len(table.layouts)))), dtype=np.bool_)
    passes = np.ones(table.n_rows, dtype=np.bool_)
    _combine(table, PREFIX, masks, is_kept, passes)
    for noun, mask in (("segments", is_kept), ("steps", passes)):
        if n := int((~mask).sum()):
            _log.info("%s of %s %s have no line in the table, and are left out", f"{n:,}", f"{len(mask):,}", noun)
    return _keeping(
        table,
        is_kept,
        passes,
        "no segment has a line in the table. Pass a column of the table that names segments as table.on.",
    )[0]


def _keeping(table: RowTable, is_kept: Mask, passes: Mask, error: str) -> tuple[Indexer, Mask | None]:
    """Return the samples of some segments and steps, and a mask of their rows (see ``samples_that_pass``)."""
    indexer = table.indexer
    segments = indexer.segments
    stays = is_kept[segments.numbers_of(np.arange(len(segments)))]
    are_whole = indexer.passes_whole
    of_steps = passes.copy()  # a row of a segment that is left out may also be in another segment
    if not are_whole:
        left_out = np.flatnonzero(~stays)
        lengths = np.maximum.reduce([steps.lengths_of(left_out) for steps in segments.steps])
        passes[segments.rows_at(segments.places_of(left_out, lengths))] = False
        left_in = np.flatnonzero(stays)
        lengths = np.maximum.reduce([steps.lengths_of(left_in) for steps in segments.steps])
        rows = segments.rows_at(segments.places_of(left_in, lengths))
        passes[rows] = of_steps[rows]
    if not stays.any() or not (are_whole or passes.any()):
        raise NoRowPassesError(error)
    indexer = indexer.among(np.flatnonzero(stays))
    return (indexer, None) if are_whole else (indexer.keeping(of_steps), passes)


def with_label(table: RowTable, criterion: LabelCriterion, options: OpenOptions) -> RowTable:
    """Return a table of segments without the steps that lack a label.

    Raises:
        H5ValueError: rows of the target are no steps; or no step has the label.
    """
    label, field = criterion.label, criterion.target
    if any(arrays[field].view is not None for arrays in table.layouts):
        raise H5ValueError(
            f"label={label} was given, but steps are not axis 0 of {table.layouts[0][field].key!r}. Use where."
        )
    run = partial(run_with_progress, shows_bar=False, report=lambda _: None)
    passes = search_label(table, criterion, np.arange(table.n_rows), options, Counters(), run)
    if not passes.any():
        classes = classes_of(table, criterion, np.arange(min(table.n_rows, 10_000)), options, Counters(), run)
        raise NoRowPassesError(f"no step of {table.n_rows:,} has label={label}. Pass a label that is there: {classes}.")
    return replace(table, indexer=table.indexer.keeping(passes))


def _combine(table: RowTable, key: str, of_parts: Sequence[Mask], segments: Mask, steps: Mask) -> None:
    """Combine the mask of each part's values with the mask of all segments, or of all steps."""
    first = 0
    for part, mask in enumerate(of_parts):
        n_segments = table.n_segments_of(part)
        if _has_value_a_segment(table, key, part, mask):
            segments[first : first + n_segments] &= mask
        else:
            steps[table.starts[part] : table.starts[part + 1]] &= mask
        first += n_segments


def _has_value_a_segment(table: RowTable, key: str, part: int, values: npt.NDArray[Any]) -> bool:
    """Return whether a part has a value for each segment, or one for all; if not, it has one for each step."""
    n_segments, n_steps = table.n_segments_of(part), int(table.starts[part + 1] - table.starts[part])
    if len(values) == n_segments or (len(values) == 1 and (is_attribute_key(key) or is_of_table(key))):
        return True
    if table.indexer.passes_whole:
        raise H5ValueError(
            f"{key!r} has {len(values)} values in {table.name_of_part(part)!r}, and there are {n_segments} samples. "
            f"Name an array with a value for each {table.indexer.segment_noun}, or an attribute."
        )
    if len(values) != n_steps:
        raise H5ValueError(
            f"{key!r} has {len(values)} values in {table.name_of_part(part)!r}, which has {n_segments} segments and "
            f"{n_steps} steps. Name an array with a value for each segment, or each step."
        )
    return False

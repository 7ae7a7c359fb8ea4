"""Which segments a split has: by fractions, folds and groups of segments, by lists in the files, or by time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, listing
from ..options import SplitOptions
from ..types import IntArray
from .row_filters import Criterion
from .row_table import RowTable
from .segments import Sampling

__all__ = ["SegmentChoice", "SegmentSubset", "groups_by_pattern", "segments_by_time", "segments_in_lists"]


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
        return next((len(each) for each in (self.segments, self.low) if each is not None), 0)

    def of(self, sampling: Sampling) -> Sampling:
        """Return the samples of these segments."""
        if self.low is not None and self.high is not None:
            sampling = sampling.in_parts(self.low, self.high)
        return sampling if self.segments is None else sampling.among(self.segments)


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentChoice:
    """Which of the segments of files a dataset has, and what else is asked of them.

    Attributes:
        subset: those of a split; None for all.
        columns: further arrays with a value for each segment, or with the same one for all its steps.
        criteria: conditions on arrays with a value for each segment or each step.
        keys: the arrays that columns of criteria stand for, if these are called otherwise in the files.
        others_ask: arrays that other splits of the files ask for, so that files are opened once for all.
    """

    subset: SegmentSubset | None = None
    columns: Sequence[str] = ()
    criteria: Sequence[Criterion] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    others_ask: Sequence[str] = ()

    @property
    def all_columns(self) -> list[str]:
        """The arrays whose values are read."""
        filtered = [one.column for one in self.criteria if one.column is not None]
        return sorted({*self.columns, *(self.keys.get(name, name) for name in filtered), *self.others_ask})


def groups_by_pattern(table: RowTable, pattern: str) -> npt.NDArray[np.str_]:
    """Return the group of each segment: what the first group of a regular expression finds in its name, or its file's.

    Raises:
        H5ValueError: the pattern is none, or finds nothing in some names.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise H5ValueError(f"split.group_pattern={pattern!r} is no regular expression: {error}.") from error
    if expression.groups < 1:
        raise H5ValueError(
            f"split.group_pattern={pattern!r} has no group in parentheses. Put what names the group into some, such as "
            r"r'(patient\d+)_'."
        )
    found = []
    for _, name, file in _named(table):
        path = table.paths[file]
        match = expression.search(name) or expression.search(path)
        if match is None:
            raise H5ValueError(
                f"split.group_pattern={pattern!r} finds nothing in the segment {name!r} of {path!r}. Pass a pattern "
                "that fits all names of segments or files."
            )
        found.append(match.group(1))
    return np.array(found)


def segments_in_lists(
    table: RowTable, lists: Mapping[Any, Sequence[tuple[int, npt.NDArray[np.str_]]]]
) -> dict[Any, IntArray]:
    """Return the segments that files list for each split.

    Args:
        table: the files.
        lists: for each split the number of a file, and the names, or numbers, of its segments there.

    Raises:
        H5ValueError: a name is of no segment, or in several splits.
    """
    numbers: dict[tuple[int, str], int] = {}
    for number, name, file in _named(table):
        short = file, name.rpartition("/")[2]
        numbers[short] = number if short not in numbers else -1  # a name of several groups is of none
        numbers[file, name] = number
    found: dict[str, IntArray] = {}
    taken: dict[int, str] = {}
    for split, of_files in lists.items():
        mine = []
        for file, names in of_files:
            for name in names.tolist():
                number = numbers.get((file, name.strip("/")), -1)
                if number < 0:
                    there = [each for where, each in numbers if where == file]
                    raise H5ValueError(
                        f"split.key lists {name!r} for {split!r} in {table.paths[file]!r}, which has no such segment; "
                        f"it has {listing(there)}."
                    )
                if taken.setdefault(number, split) != split:
                    raise H5ValueError(
                        f"split.key lists {name!r} for {taken[number]!r} and {split!r} in {table.paths[file]!r}. Each "
                        "segment is in one split; name other lists."
                    )
                mine.append(number)
        found[split] = np.unique(np.array(mine, dtype=np.int64))
    return found


def segments_by_time(table: RowTable, options: SplitOptions) -> dict[str, SegmentSubset]:
    """Return the part of each segment that a split has: training first, then validation, then test, with gaps.

    Raises:
        H5ValueError: nothing is left of a split.
    """
    sampling = table.sampling
    assert sampling is not None, "samples are rows"
    gap = sampling.reach - 1 if options.gap is None else options.gap
    n = sampling.segments.lengths
    shares = {"val": options.val_fraction, "test": options.test_fraction}
    cuts = [name for name, share in shares.items() if share]
    room = np.maximum(n - gap * len(cuts), 0)
    sizes = {name: np.round(room * share).astype(np.int64) for name, share in shares.items() if share}
    low = {"train": np.zeros(len(n), dtype=np.int64)}
    high = {"train": np.maximum(room - sum(sizes.values()), 0)}
    end = high["train"]
    for name in cuts:
        low[name] = np.minimum(end + gap, n)
        high[name] = end = np.minimum(low[name] + sizes[name], n)
    found = {}
    for name in low:
        found[name] = SegmentSubset(low=low[name], high=high[name])
        if not len(found[name].of(sampling)):
            raise H5ValueError(
                f"split.by='time' leaves no sample for {name!r}: the longest of {len(n):,} segments has "
                f"{int(n.max(initial=0)):,} steps, a sample takes {sampling.reach}, and parts are {gap} steps apart. "
                "Pass other fractions, or a smaller gap."
            )
    return found


def _named(table: RowTable) -> Iterator[tuple[int, str, int]]:
    """Yield the place of each segment among those that samples are made of, its name and its file."""
    assert table.sampling is not None, "samples are rows"
    segments = table.sampling.segments
    for place, number in enumerate(segments.numbers_of(np.arange(len(segments))).tolist()):
        yield place, table.segment_name(number), table.file_of_segment(number)

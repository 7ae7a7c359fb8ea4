"""Values of further arrays for each segment, for splits; and filters by values of segments or of steps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5ValueError, listing
from ..hdf5 import OpenOptions
from ..readers import run_with_progress
from .labels import LabelCriterion, search_label
from .patches import Patches
from .row_filters import Criterion, Mask, NoRowPassesError
from .row_table import RowTable
from .segment_joins import SegmentLines
from .segments import Sampling
from .side_table import PREFIX, is_of_table
from .windows import WholeSegments

__all__ = ["samples_that_pass", "samples_with_lines", "values_of_segments", "with_label"]

_log = logging.getLogger(__name__)


def values_of_segments(table: RowTable, key: str, values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the value of an array for each segment.

    Args:
        table: the files, with segments.
        key: the array.
        values: of the array, part by part: one for each segment, or one for each step.

    Raises:
        H5ValueError: a segment has several values.
    """
    assert table.sampling is not None, "samples are rows"
    segments = table.sampling.segments
    numbers = segments.numbers_of(np.arange(len(segments)))
    n_parts = len(values)
    is_of_segments = [_has_value_a_segment(table, key, part, here) for part, here in enumerate(values)]
    sizes = [(table.n_segments_of(part), int(table.starts[part + 1] - table.starts[part])) for part in range(n_parts)]
    each = list(zip(values, is_of_segments, sizes, strict=True))
    of_parts = [np.broadcast_to(here, n) if is_one else here[:1].repeat(n) for here, is_one, (n, _) in each]
    by_segment = np.concatenate(of_parts)[numbers]
    if all(is_of_segments):
        return by_segment
    by_step = np.concatenate([here[:1].repeat(n) if is_one else here for here, is_one, (_, n) in each])
    firsts, lengths = segments.steps[0].firsts_of(), segments.lengths
    ends = np.cumsum(lengths)
    steps = by_step[segments.rows_at(segments.places_of(slice(None), lengths))]
    is_by_step = ~np.array(is_of_segments)[table.parts_of_segments(numbers)]
    own = by_step[segments.rows_at(np.where(lengths > 0, firsts, 0))]
    differs = (steps != np.repeat(own, lengths)) & np.repeat(is_by_step, lengths)
    if differs.any():
        at = int(np.searchsorted(ends, int(differs.argmax()), side="right"))
        several = np.unique(steps[ends[at] - lengths[at] : ends[at]])
        raise H5ValueError(
            f"{key!r} has several values in the segment {table.segment_name(int(numbers[at]))!r}: "
            f"{listing(map(str, several))}. Name an array with one value for a segment."
        )
    return np.where(is_by_step, own, by_segment)


def samples_that_pass(
    table: RowTable, criteria: Sequence[Criterion], keys: Mapping[str, str], values: Mapping[str, Sequence[Any]]
) -> tuple[Sampling, Mask | None]:
    """Return the samples that pass criteria, and which rows of files do.

    These are None for volumes and rows of sparse matrices, which pass as a whole.

    Args:
        table: the files, with segments.
        criteria: conditions on columns.
        keys: the arrays that columns stand for, if these are called otherwise.
        values: of each array, part by part: one for each segment, or one for each step.

    Raises:
        H5ValueError: a condition is of no column, or cannot be checked; or no row passes.
    """
    sampling = table.sampling
    assert sampling is not None, "samples are rows"
    is_kept = np.ones(sum(map(table.n_segments_of, range(len(table.layouts)))), dtype=np.bool_)
    passes = np.ones(table.n_rows, dtype=np.bool_)
    counts = []
    for one in criteria:
        if one.column is None:
            raise H5ValueError(
                f"{one.text} is a function of all columns, and samples are of segments. Pass a mapping from arrays to "
                "conditions, such as where={'site': ['A', 'B']}; a condition may be a function of its column."
            )
        key = keys.get(one.column, one.column)
        of_parts = values[key]
        column = np.concatenate(of_parts)
        mask = one.mask({one.column: column}, len(column))
        counts.append(f"{one.text} keeps {int(mask.sum()):,} of {len(column):,} values")
        if absent := sorted(one.expected - set(column[mask].tolist())):  # a typo would drop segments in silence
            warnings.warn(f"filters name {listing(absent)}, which no segment has.", stacklevel=4)
        _combine(table, key, np.split(mask, np.cumsum([len(each) for each in of_parts])[:-1]), is_kept, passes)
    return _keeping(table, is_kept, passes, f"no segment passes all filters: {'; '.join(counts)}. Loosen one of them.")


def samples_with_lines(table: RowTable, lines: SegmentLines) -> Sampling:
    """Return the samples of segments, and of steps, that have a line in a side table; log how many have none.

    Raises:
        H5ValueError: none has.
    """
    sampling, masks = table.sampling, [of_part >= 0 for of_part in lines.of_parts]
    assert sampling is not None, "samples are rows"
    if all(map(np.all, masks)):
        return sampling
    is_kept = np.ones(sum(map(table.n_segments_of, range(len(table.layouts)))), dtype=np.bool_)
    passes = np.ones(table.n_rows, dtype=np.bool_)
    _combine(table, PREFIX, masks, is_kept, passes)
    for what, mask in (("segments", is_kept), ("steps", passes)):
        if n := int((~mask).sum()):
            _log.info("%s of %s %s have no line in the table, and are left out", f"{n:,}", f"{len(mask):,}", what)
    return _keeping(table, is_kept, passes, "no segment has a line in the table. Name what they have in common.")[0]


def _keeping(table: RowTable, is_kept: Mask, passes: Mask, error: str) -> tuple[Sampling, Mask | None]:
    """Return the samples of some segments and some steps, and which rows these are (see ``samples_that_pass``)."""
    sampling = table.sampling
    assert sampling is not None, "samples are rows"
    segments = sampling.segments
    stays = is_kept[segments.numbers_of(np.arange(len(segments)))]
    are_whole = isinstance(sampling, Patches) or (isinstance(sampling, WholeSegments) and sampling.are_sparse)
    if not are_whole:
        left_out = np.flatnonzero(~stays)
        lengths = np.maximum.reduce([steps.lengths_of(left_out) for steps in segments.steps])
        passes[segments.rows_at(segments.places_of(left_out, lengths))] = False
    if not (stays.any() and passes.any()):
        raise NoRowPassesError(error)
    return (sampling.among(np.flatnonzero(stays)), None) if are_whole else (sampling.keeping(passes), passes)


def with_label(table: RowTable, wanted: LabelCriterion, options: OpenOptions) -> RowTable:
    """Return a table of segments without the steps that lack a label.

    Raises:
        H5ValueError: rows of the target are no steps; or no step has the label.
    """
    assert table.sampling is not None, "samples are rows"
    if any(arrays[wanted.target].view is not None for arrays in table.layouts):
        raise H5ValueError(
            f"label={wanted.label} was given, and steps are not axis 0 of {table.layouts[0][wanted.target].key!r}. Use "
            "where."
        )
    run = partial(run_with_progress, shows_bar=False, report=lambda _: None)
    passes = search_label(table, wanted, np.arange(table.n_rows), options, Counters(), run)
    if not passes.any():
        raise NoRowPassesError(f"no step of {table.n_rows:,} has label={wanted.label}. Pass a label that is there.")
    return replace(table, sampling=table.sampling.keeping(passes))


def _combine(table: RowTable, key: str, of_parts: Sequence[Mask], segments: Mask, steps: Mask) -> None:
    """Combine a mask of values of each part with that of all segments, or with that of all steps."""
    first = 0
    for part, mask in enumerate(of_parts):
        n_segments = table.n_segments_of(part)
        if _has_value_a_segment(table, key, part, mask):
            segments[first : first + n_segments] &= mask
        else:
            steps[table.starts[part] : table.starts[part + 1]] &= mask
        first += n_segments


def _has_value_a_segment(table: RowTable, key: str, part: int, values: npt.NDArray[Any]) -> bool:
    """Return whether a part has a value for each segment, or one for all; or else one for each step."""
    n_segments, n_steps = table.n_segments_of(part), int(table.starts[part + 1] - table.starts[part])
    if len(values) == n_segments or (len(values) == 1 and ("@" in key or is_of_table(key))):
        return True
    if isinstance(table.sampling, Patches):
        raise H5ValueError(
            f"{key!r} has {len(values)} values in {table.name_of_part(part)!r}, which has {n_segments} volumes. Name "
            "an array with a value for each volume, or an attribute."
        )
    if len(values) != n_steps:
        raise H5ValueError(
            f"{key!r} has {len(values)} values in {table.name_of_part(part)!r}, which has {n_segments} segments and "
            f"{n_steps} steps. Name an array with a value for each segment, or each step."
        )
    return False

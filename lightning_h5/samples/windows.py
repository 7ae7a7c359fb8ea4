"""Windows and whole segments: the steps of each sample, computed from its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from ..errors import H5ValueError
from ..options import StepRange, WindowOptions
from ..order import uniform
from ..types import IntArray, cached_property
from .assemblers import Assembler, SegmentAssembler, WindowAssembler
from .indexer import Indexer, PartsOfSegments
from .sample_rows import FieldRows, Places
from .segment_fields import SampleOptions, SegmentField
from .segments import BoolArray, Segments, Steps

__all__ = ["WholeSegments", "Windows", "samples_of"]

STARTS = 11  # purpose of the random stream that starts are drawn from
NUMBER = 32  # bits of a window's number in its segment, below the segment's


@dataclass(frozen=True, eq=False)
class Windows(PartsOfSegments):
    """Samples that are windows of steps inside a segment.

    Attributes:
        segments: the segments.
        ranges: steps of each field in a window; None for a field with one value per segment.
        stride: number of steps from one window to the next.
        pad: allow windows beyond the ends of their segment, which repeat its first or last step; with "zeros", these
            steps are masked and set to zero.
        is_random: draw the windows at random, as many as with ``stride``, and evenly over the segment.
        seed: seed of the random windows.
    """

    ranges: tuple[StepRange | None, ...]
    stride: int = 1
    pad: Literal["edge", "zeros"] | None = None
    is_random: bool = False
    seed: int = 0

    noun = "windows"

    @cached_property
    def low(self) -> int:
        """The first step of a segment with a window."""
        return 0 if self.pad else max(0, *(-step_range.start * steps.rate for steps, step_range in self._step_ranges))

    @property
    def _step_ranges(self) -> list[tuple[Steps, StepRange]]:
        """The steps of each field with steps, and its range in a window."""
        pairs = zip(self.segments.kinds, self.ranges, strict=True)
        return [
            (self.segments.steps[kind], step_range)
            for kind, step_range in pairs
            if kind is not None and step_range is not None
        ]

    def _n_starts(self, segments: IntArray | slice = slice(None)) -> IntArray:
        """Return the number of steps with a window, per segment."""
        ends = [
            steps.spans_of(segments) if self.pad else steps.spans_of(segments) - max(0, step_range.last) * steps.rate
            for steps, step_range in self._step_ranges
        ]
        return np.asarray(np.maximum(np.minimum.reduce(ends) - self.low, 0), dtype=np.int64)

    def counts(self) -> IntArray:
        """See ``PartsOfSegments.counts``."""
        return -(-self._n_starts() // self.stride)

    @property
    def shortage(self) -> str:
        """See ``PartsOfSegments.shortage``."""
        return f"are shorter than a window ({self.reach} steps)" if self.reach > 1 else "have no steps"

    @property
    def ends_of_segments(self) -> IntArray:
        """See ``Indexer.ends_of_segments``."""
        return self.ends

    def assembler(self, field: int, *, is_ragged: bool, place: int) -> Assembler:
        """See ``Indexer.assembler``."""
        step_range = self.ranges[field]
        if step_range is None:
            return Assembler()
        n_steps = None if step_range.is_single else len(step_range.offsets)
        return WindowAssembler(n_steps, self.pad == "zeros", is_ragged, place)

    def places(self, samples: IntArray, epoch: int | None = None) -> Places:
        """See ``Indexer.places``."""
        segments = np.searchsorted(self.ends, samples, side="right")
        before = self.before(segments)
        numbers = samples - before
        if not self.is_random:
            return Places(segments, self.low + numbers * self.stride)
        windows = (self.segments.numbers_of(segments) << NUMBER) + numbers
        offsets = uniform(self.seed, 0 if epoch is None else epoch, STARTS, windows)
        n_starts = self._n_starts(segments)
        n_windows = self.ends[segments] - before
        steps = ((numbers + offsets) * (n_starts / n_windows)).astype(np.int64)
        return Places(segments, self.low + np.minimum(steps, n_starts - 1))

    def rows(self, places: Places) -> tuple[FieldRows, ...]:
        """See ``Indexer.rows``; fields with the same steps have the same object."""
        fields = list(zip(self.segments.kinds, self.ranges, strict=True))
        rows = {field: self._rows(places, *field) for field in dict.fromkeys(fields)}
        return tuple(rows[field] for field in fields)

    def _rows(self, places: Places, kind: int | None, step_range: StepRange | None) -> FieldRows:
        if kind is None or step_range is None:
            return FieldRows(self.segments.numbers_of(places.segments))
        steps = self.segments.steps[kind]
        centers = places.steps if steps.rate == 1 else places.steps // steps.rate
        firsts, within = steps.firsts_of(places.segments), centers[:, None] + step_range.offsets
        if self.pad is None:
            is_run = step_range.step == 1 and len(step_range.offsets) > 1 and self.segments.order is None
            runs = len(step_range.offsets) if is_run else None
            return FieldRows(self.segments.rows_at((firsts[:, None] + within).reshape(-1)), runs=runs)
        last = steps.lengths_of(places.segments)[:, None] - 1
        is_valid = (within >= 0) & (within <= last)
        rows = firsts[:, None] + np.clip(within, 0, last)
        return FieldRows(self.segments.rows_at(rows.reshape(-1)), None, is_valid)

    def rows_of_any_epoch(self, samples: IntArray) -> Iterator[IntArray]:
        """See ``Indexer.rows_of_any_epoch``."""
        if not self.is_random:
            return super().rows_of_any_epoch(samples)
        return WholeSegments(self.segments).rows_of_any_epoch(np.unique(self.places(samples).segments))

    def of_fields(self, fields: Sequence[int]) -> Windows:
        """See ``Indexer.of_fields``."""
        ranges = tuple(self.ranges[at] for at in fields)
        windows = replace(self, segments=self.segments.of_fields(fields), ranges=ranges)
        windows.__dict__.update(low=self.low, ends=self.ends)  # the samples are the same as with all fields
        return windows

    def mean_bytes(self, sizes: Sequence[int]) -> int:
        """See ``Indexer.mean_bytes``."""
        n_steps = [1 if step_range is None else len(step_range.offsets) for step_range in self.ranges]
        return sum(n * size for n, size in zip(n_steps, sizes, strict=True))

    def digest(self) -> bytes:
        """See ``Indexer.digest``."""
        seed = self.seed if self.is_random else None
        return repr((self.ranges, self.stride, self.pad, seed)).encode() + self.segments.digest()

    # How often rows are read ---------------------------------------------------------------------------------

    @property
    def reach(self) -> int:
        """See ``Indexer.reach``."""
        end = max((step_range.last + 1) * steps.rate for steps, step_range in self._step_ranges)
        return end - min(step_range.start * steps.rate for steps, step_range in self._step_ranges)

    def n_before(self, rows: IntArray) -> IntArray:
        """See ``Indexer.n_before``. Segments have to follow each other; there may be gaps."""
        segments, inside = self.segments.inside(rows)
        before = self.before(segments)
        n_windows = self.ends[np.minimum(segments, len(self.ends) - 1)] - before
        n = np.clip(-(-(inside - self.low) // self.stride), 0, n_windows)
        return before + np.where(segments < len(self.ends), n, 0)

    def n_reads_before(self, rows: IntArray, field: int) -> IntArray | None:
        """See ``Indexer.n_reads_before``: segments as in ``n_before``."""
        kind, step_range = self.segments.kinds[field], self.ranges[field]
        if self.is_random or kind is None or step_range is None:
            return None
        segments, inside = self.segments.inside(rows)
        is_in = segments < len(self.ends)
        at = np.minimum(segments, len(self.ends) - 1)
        before = self.before(segments)
        n_windows = self.ends[at] - before
        lengths, rate = self.segments.steps[kind].lengths_of(at), self.segments.steps[kind].rate
        n_steps = len(step_range.offsets)
        reads = self._reads_inside(inside, n_windows, step_range, rate)
        reads = np.where(inside >= lengths, n_windows * n_steps, np.where(inside <= 0, 0, reads))
        return np.asarray(before * n_steps + np.where(is_in, reads, 0), dtype=np.int64)

    def _reads_inside(self, rows: IntArray, n_windows: IntArray, step_range: StepRange, rate: int) -> IntArray:
        """Return the number of steps of a segment's windows before rows, which count from the segment's first row."""
        if step_range.step != 1 or rate != 1:
            firsts = ((rows - step) * rate - self.low for step in step_range.offsets.tolist())
            n_before = [np.clip(-(-first // self.stride), 0, n_windows) for first in firsts]
            return np.asarray(np.sum(n_before, axis=0), dtype=np.int64)
        rows, length = rows - self.low - step_range.start, step_range.stop - step_range.start
        n_whole = np.clip((rows - length) // self.stride + 1, 0, n_windows)
        n_begun = np.clip(-(-rows // self.stride), n_whole, n_windows)
        sum_of_numbers = (n_begun * (n_begun - 1) - n_whole * (n_whole - 1)) // 2  # of windows that are not whole
        of_begun = (n_begun - n_whole) * rows - sum_of_numbers * self.stride
        return np.asarray(n_whole * length + of_begun, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class WholeSegments(Indexer):
    """Samples that are whole segments.

    Attributes:
        segments: the segments.
        max_length: maximum number of steps of a sample, from the first one; None for all steps.
        is_single: for each field whether a sample has only the first step, as all steps are equal; empty if none is.
        n_left_out: number of segments that are left out because a field has no steps there.
    """

    max_length: int | None = None
    is_single: tuple[bool, ...] = ()
    n_left_out: int = 0

    noun = "segments"
    is_whole = True

    def __len__(self) -> int:
        return len(self.segments)

    def keeping(self, is_kept: BoolArray) -> WholeSegments:
        """See ``Indexer.keeping``: the remaining rows are one sample."""
        return replace(self, segments=self.segments.keeping(is_kept, in_runs=False))

    def has_all_steps(self, field: int) -> bool:
        """Whether a sample has a field's value at each step, and no single one."""
        return self.segments.kinds[field] is not None and not (self.is_single and self.is_single[field])

    def places(self, samples: IntArray, epoch: int | None = None) -> Places:
        """See ``Indexer.places``."""
        return Places(samples, np.zeros(len(samples), dtype=np.int64))

    def assembler(self, field: int, *, is_ragged: bool, place: int) -> Assembler:
        """See ``Indexer.assembler``."""
        return SegmentAssembler(is_ragged, place) if self.has_all_steps(field) else Assembler()

    def group_of_steps(self, field: int) -> int | None:
        """See ``Indexer.group_of_steps``."""
        return self.segments.kinds[field] if self.has_all_steps(field) else None

    def counted_field(self, fields: Sequence[int]) -> int | None:
        """See ``Indexer.counted_field``."""
        return next((field for field in fields if self.has_all_steps(field)), fields[0])

    def n_before(self, rows: IntArray) -> IntArray:
        """See ``Indexer.n_before``."""
        return np.searchsorted(self.segments.steps[0].firsts_of(), rows)

    def n_reads_before(self, rows: IntArray, field: int) -> IntArray | None:
        """See ``Indexer.n_reads_before``."""
        kind = self.segments.kinds[field]
        if kind is None:
            return None
        if not self.has_all_steps(field):
            return self.n_before(rows)
        segments, inside = self.segments.inside(rows, kind)
        lengths = self._cropped(self.segments.steps[kind])
        before = np.concatenate([[0], np.cumsum(lengths)])[segments]
        return before + np.clip(inside, 0, lengths[segments])

    def rows(self, places: Places) -> tuple[FieldRows, ...]:
        """See ``Indexer.rows``; fields with equally many steps have the same object."""
        fields = [(kind, self.has_all_steps(field)) for field, kind in enumerate(self.segments.kinds)]
        rows = {field: self._rows(places, *field) for field in dict.fromkeys(fields)}
        return tuple(rows[field] for field in fields)

    def of_fields(self, fields: Sequence[int]) -> WholeSegments:
        """See ``Indexer.of_fields``."""
        is_single = tuple(self.is_single[at] for at in fields) if self.is_single else ()
        return replace(self, segments=self.segments.of_fields(fields), is_single=is_single)

    def is_cheap(self, *, by_rows: bool, by_steps: bool, n_parts: int) -> bool:
        """See ``Indexer.is_cheap``: a part is read as a whole, if it is one segment."""
        return len(self.segments) == n_parts or super().is_cheap(by_rows=by_rows, by_steps=by_steps, n_parts=n_parts)

    def summary(self, n_samples: int) -> str:
        """See ``Indexer.summary``."""
        return f"{len(self.segments):,} segments"

    def warning(self) -> str | None:
        """See ``Indexer.warning``."""
        n = self.n_left_out
        if not n:
            return None
        return (
            f"{n:,} segment{' has' if n == 1 else 's have'} no steps in at least one field, and so no sample, in "
            "evaluation either. If they matter, let your metrics count them."
        )

    @property
    def lengths(self) -> IntArray:
        """See ``Indexer.lengths``."""
        return self.segments.lengths

    @property
    def step_counts(self) -> IntArray:
        """See ``Indexer.step_counts``."""
        kinds = {kind for field, kind in enumerate(self.segments.kinds) if self.has_all_steps(field)}
        of_kinds = [self._cropped(self.segments.steps[kind]) for kind in kinds if kind is not None]
        return np.asarray(np.maximum.reduce(of_kinds or [np.ones(len(self), dtype=np.int64)]), dtype=np.int64)

    def mean_bytes(self, sizes: Sequence[int]) -> int:
        """See ``Indexer.mean_bytes``."""
        lengths = self.segments.lengths
        lengths = lengths if self.max_length is None else np.minimum(lengths, self.max_length)
        n_steps = -(-int(lengths.sum()) // max(1, len(self)))
        n_of_fields = [
            -(-n_steps // self.segments.rate_of(field)) if self.has_all_steps(field) else 1
            for field in range(len(sizes))
        ]
        return sum(size * n for size, n in zip(sizes, n_of_fields, strict=True))

    def digest(self) -> bytes:
        """See ``Indexer.digest``."""
        return f"whole segments, {self.max_length}".encode() + self.segments.digest()

    def _rows(self, places: Places, kind: int | None, has_all_steps: bool) -> FieldRows:
        if kind is None:
            return FieldRows(self.segments.numbers_of(places.segments))
        steps = self.segments.steps[kind]
        if not has_all_steps:
            return FieldRows(self.segments.rows_at(steps.firsts_of(places.segments)))
        lengths = self._cropped(steps, places.segments)
        rows = self.segments.rows_at(self.segments.places_of(places.segments, lengths, kind))
        return FieldRows(rows, lengths, runs=lengths if self.segments.order is None else None)

    def _cropped(self, steps: Steps, segments: IntArray | slice = slice(None)) -> IntArray:
        """Return the steps of an array in samples of some segments, or of all."""
        lengths = steps.lengths_of(segments)
        return lengths if self.max_length is None else np.minimum(lengths, -(-self.max_length // steps.rate))


def _check_step_counts(
    windows: Windows, fields: Sequence[SegmentField], name_of: Callable[[int], str], *, are_rows: bool
) -> None:
    """Check that fields with steps that are paired by number have about equally many in each segment.

    A field may have as many steps more as windows reach further into it, or one more, as observations have one more
    than actions. If each step is a sample, fields have equally many.

    Args:
        windows: the samples.
        fields: the fields.
        name_of: returns the name of a segment from its number.
        are_rows: whether each step is a sample.

    Raises:
        H5ValueError: two fields of a segment differ by more.
    """
    all_steps = windows.segments.steps
    kinds = dict[tuple[int, int], SegmentField]()  # fields with as many steps and the same reach have one entry
    for field, kind, step_range in zip(fields, windows.segments.kinds, windows.ranges, strict=True):
        if kind is not None and step_range is not None:
            kinds.setdefault((kind, (max(0, step_range.last) + 1) * all_steps[kind].rate), field)
    for ((kind_a, reach_a), field_a), ((kind_b, reach_b), field_b) in combinations(kinds.items(), 2):
        steps_a, steps_b = all_steps[kind_a], all_steps[kind_b]
        further, slack = reach_a - reach_b, max(steps_a.rate, steps_b.rate) - are_rows
        surplus = steps_a.spans_of() - steps_b.spans_of()
        differs = (surplus < min(further, -slack)) | (surplus > max(further, slack))
        if differs.any():
            segment = np.array([int(differs.argmax())])
            counts = [
                (field, steps.rate, int(steps.lengths_of(segment)[0]))
                for field, steps in ((field_a, steps_a), (field_b, steps_b))
            ]
            name = name_of(int(windows.segments.numbers_of(segment)[0]))
            raise H5ValueError(_rate_error(counts, name, are_rows=are_rows))


def _rate_error(counts: Sequence[tuple[SegmentField, int, int]], segment: str, *, are_rows: bool) -> str:
    """Return the message for two fields (each with its rate and number of steps) with steps that cannot be paired."""
    titles = []
    for field, rate, n in counts:
        key = field.request.key
        title = repr(key) if key == field.name else f"{key!r} (field {field.name!r})"
        titles.append(f"{title} has {n:,} step{'s' * (n != 1)}{f' of {rate:,} each' if rate > 1 else ''}")
    (slow, slow_rate, n_slow), (_, _, n_fast) = sorted(counts, key=lambda count: count[2])
    rate = round(n_fast / n_slow) if n_slow else 0
    advice = "If a step of one spans several of the other, pass segments.steps_per"
    if rate > 1 and slow_rate == 1 and n_fast // rate <= n_slow <= -(-n_fast // rate):
        advice = (
            f"If a step of {slow.name!r} spans {rate:,} of the other, pass segments.steps_per={{{slow.name!r}: {rate}}}"
        )
    if are_rows:
        return (
            f"{' and '.join(titles)} in the segment {segment!r}. Rows pair steps by number, so fields need equally "
            f"many. {advice}; if all of it belongs to each sample, pass segments.constants=[{slow.request.key!r}]; if "
            "further steps are to be left out, such as an observation after the last action, pass window={'*': 0}."
        )
    return (
        f"{' and '.join(titles)} in the segment {segment!r}. Windows pair steps by number, and neither their reach nor "
        f"one further observation explains the difference. {advice}; otherwise correct the file, or load one field."
    )


def _checked_indexer(indexer: Indexer, segments: Segments) -> Indexer:
    """Return samples of a kind of a user's own.

    Raises:
        H5ValueError: there is none.
    """
    if not len(indexer):
        raise H5ValueError(
            f"{len(segments):,} segments make no {indexer.noun}: the longest has {segments.lengths.max(initial=0):,} "
            "steps. Pass another sample."
        )
    return indexer


def samples_of(
    segments: Segments, fields: Sequence[SegmentField], options: SampleOptions, name_of: Callable[[int], str]
) -> Indexer:
    """Return the samples that segments make.

    Args:
        segments: the segments.
        fields: how the arrays are seen.
        options: what a sample is.
        name_of: returns the name of a segment from its number.

    Raises:
        H5ValueError: there is none, or steps of fields cannot be paired.
    """
    if options.maker is not None:
        return _checked_indexer(options.maker.indexer(segments, fields), segments)
    kind, max_length = options.kind([field.request.key for field in fields]), options.segments.max_length
    is_whole = options.segments.bucket or max_length is not None or options.segments.max_tokens is not None
    if kind != "segment" and is_whole:
        raise H5ValueError(
            "segments.bucket, segments.max_length and segments.max_tokens are of whole segments, and samples are "
            f"{kind}s. Leave them out, or pass sample='segment' without window."
        )
    if kind == "segment":
        n_left_out = int(np.count_nonzero(segments.lengths == 0))
        if n_left_out:
            segments = segments.among(np.flatnonzero(segments.lengths))
        is_single = tuple(field.is_single for field in fields)
        return WholeSegments(segments, max_length, is_single, n_left_out)
    window = options.window
    ranges = tuple(None if field.step_axis is None else _step_range(field, window) for field in fields)
    if window is None:
        windows = Windows(segments, ranges)
    else:
        windows = Windows(segments, ranges, window.n_between, window.pad, window.random, options.seed)
        if not len(windows):
            raise H5ValueError(
                f"no segment is as long as a window: windows reach over {windows.reach} steps, and the longest of "
                f"{len(segments):,} segments has {segments.lengths.max(initial=0):,}. Take fewer steps, or pad windows "
                "(window.pad)."
            )
    _check_step_counts(windows, fields, name_of, are_rows=window is None)
    return windows


def _step_range(field: SegmentField, window: WindowOptions | None) -> StepRange:
    """Return the steps of a field in a sample; without windows each sample is a step."""
    if window is None or field.is_single:
        return StepRange(0, 1, is_single=True)
    return window.range_of(field.name, field.request.key, field.rate)

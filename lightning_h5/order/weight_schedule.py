"""Weights of sources that change over a run: the share of each source, and the order of its units.

Between two steps of a schedule, shares are constant or change linearly. So the expected number of a source's units
before any unit (the integral of its share) is an exact fraction.

Unit ``j`` of a source is allowed once the integral exceeds ``j - 1``, and due before it exceeds ``j``. The source with
the earliest deadline is next, which keeps all sources less than a unit from their integrals (Baruah et al.,
"Proportionate Progress", Algorithmica 15, 1996). This rule alone would have to start at the first unit. So units are
scheduled in pieces, and the counts at the borders of pieces are decided first, from the coarsest to the finest: the
count at unit 3 x 2^n depends on the counts at 2 x 2^n and 4 x 2^n.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil, floor, gcd, inf, lcm
from typing import Literal, NamedTuple

import numpy as np

from ..types import IntArray

__all__ = ["ScheduledCounts", "ShareIntegral", "WeightSchedule"]

MAX_NUMBER = 1 << 62
"""Numbers of smaller magnitude are computed as NumPy integers."""

CLOSE = 1e-6
"""A float that is nearer to a whole number may be on the wrong side. Errors within a piece are below 1e-10."""

MAX_TEXT = 200
"""Maximum letters of a schedule in the text of a recipe; longer ones become a digest, since positions save the text."""


@dataclass(frozen=True)
class WeightSchedule:
    """Weights of sources at some steps of a run.

    Attributes:
        steps: batches of all ranks since the start of the run; ascending, the first one is 0.
        weights: weights of the sources at each step; only their ratios matter.
        between: ``step`` keeps the shares until the next step, ``linear`` interpolates them linearly. After the last
            step they are constant.
    """

    steps: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    between: Literal["step", "linear"] = "step"

    @property
    def text(self) -> str:
        """The schedule in words; different schedules have different texts."""
        text = str({step: list(weights) for step, weights in zip(self.steps, self.weights, strict=True)})
        if len(text) > MAX_TEXT:
            text = f"{len(self.steps)} steps to {self.steps[-1]}, {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return f"{text}, {self.between}"


class _Stretch(NamedTuple):
    """The units between two steps of a schedule.

    After ``n`` units of the stretch, the expected count of a source is
    ``before + (slope * n + bend * n ** 2) / divisor``.

    Attributes:
        first: the first unit.
        n_units: number of units; None for the last stretch, which never ends.
        before: expected count of each source before the first unit.
        slopes: slope of each source.
        bends: bend of each source; all 0 in the last stretch.
        divisor: see above.
    """

    first: int
    n_units: int | None
    before: list[Fraction]
    slopes: list[int]
    bends: list[int]
    divisor: int


class ShareIntegral:
    """The expected count of each source before any unit.

    Args:
        schedule: the weights.
        units_per_step: number of units in a step of the schedule.
    """

    def __init__(self, schedule: WeightSchedule, units_per_step: int) -> None:
        self.n_sources = len(schedule.weights[0])
        self._firsts = [step * units_per_step for step in schedule.steps]
        weights = [_whole_ratios(numbers) for numbers in schedule.weights]
        before = [Fraction(0)] * self.n_sources
        self._stretches: list[_Stretch] = []
        for number, (first, start) in enumerate(zip(self._firsts, weights, strict=True)):
            is_last = number + 1 == len(weights)
            n_units = None if is_last else self._firsts[number + 1] - first
            stop = start if is_last or schedule.between == "step" else weights[number + 1]
            self._stretches.append(_stretch(first, n_units, before, start, stop))
            if n_units is not None:
                before = [self.before(source, first + n_units) for source in range(self.n_sources)]
        # By source: the integral at the start of each stretch.
        self._first_amounts = [
            [stretch.before[source] for stretch in self._stretches] for source in range(self.n_sources)
        ]

    def before(self, source: int, unit: int) -> Fraction:
        """Return the expected count of a source before a unit."""
        stretch = self._stretches[bisect_right(self._firsts, unit, hi=len(self._stretches)) - 1]
        n = unit - stretch.first
        amount = n * (stretch.slopes[source] + stretch.bends[source] * n)
        return stretch.before[source] + Fraction(amount, stretch.divisor)

    def shares(self, start: int, stop: int) -> list[float]:
        """Return the mean share of each source in the units ``[start, stop)``."""
        return [
            float(self.before(source, stop) - self.before(source, start)) / (stop - start)
            for source in range(self.n_sources)
        ]

    def n_until(self, source: int, amount: int) -> float:
        """Return the first unit at which the expected count of a source reaches an amount; infinite if never."""
        number = max(0, bisect_left(self._first_amounts[source], amount) - 1)
        return self._n_until(source, number, ceil(self._above(source, number, amount)))

    def n_until_above(self, source: int, amount: int) -> float:
        """Return the first unit at which the expected count of a source exceeds an amount; infinite if never."""
        number = bisect_right(self._first_amounts[source], amount) - 1
        return self._n_until(source, number, floor(self._above(source, number, amount)) + 1)

    def _above(self, source: int, number: int, amount: int) -> Fraction:
        """Return an amount minus the count at the start of a stretch, times the divisor of the stretch."""
        stretch = self._stretches[number]
        return (amount - stretch.before[source]) * stretch.divisor

    def _n_until(self, source: int, number: int, target: int) -> float:
        stretch = self._stretches[number]
        slope, bend = stretch.slopes[source], stretch.bends[source]
        if stretch.n_units is None or not bend:
            return stretch.first - (-target // slope) if slope else inf
        units = range(stretch.n_units + 1)
        return stretch.first + bisect_left(units, target, key=lambda n: n * (slope + bend * n))

    def bounds(self, source: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return the expected count of a source, rounded down and up, after each unit in ``[start, stop)``."""
        bounds = [np.empty((2, 0), dtype=np.int64)]
        number = bisect_right(self._firsts, start) - 1
        while start < stop:
            stretch = self._stretches[number]
            end = stop if stretch.n_units is None else min(stop, stretch.first + stretch.n_units)
            bounds.append(_rounded(stretch, source, start, end))
            start, number = end, number + 1
        floors, ceilings = np.concatenate(bounds, axis=1)
        return floors, ceilings


def _rounded(stretch: _Stretch, source: int, start: int, stop: int) -> IntArray:
    """Return the expected count of a source, rounded down and up, after some units of a stretch.

    The result is exact. Numbers of more than 62 bits are computed as floats; results next to a whole number are then
    computed again as integers.

    Args:
        stretch: the stretch.
        source: number of the source.
        start: the first unit.
        stop: the unit after the last.

    Returns:
        Shape ``(2, stop - start)``.
    """
    n, before = start - stretch.first, stretch.before[source]
    # After `k` more units: (amount + k * (slope + bend * k)) / divisor.
    divisor, bend = stretch.divisor * before.denominator, stretch.bends[source] * before.denominator
    slope = stretch.slopes[source] * before.denominator
    amount, slope = before.numerator * stretch.divisor + n * (slope + bend * n), slope + 2 * bend * n
    common = gcd(amount, slope, bend, divisor)
    amount, slope, bend, divisor = (number // common for number in (amount, slope, bend, divisor))
    whole, amount = divmod(amount, divisor)
    n_units = stop - start
    k = np.arange(1, n_units + 1)
    if max(divisor, amount + n_units * (abs(slope) + abs(bend) * n_units)) < MAX_NUMBER:
        amounts = amount + k * (slope + bend * k)
        return whole + np.stack([amounts // divisor, -(-amounts // divisor)])
    values = amount / divisor + k * (slope / divisor + bend / divisor * k)
    rounded: IntArray = np.stack([np.floor(values), np.ceil(values)]).astype(np.int64)
    for at in np.flatnonzero(np.abs(values - np.rint(values)) < CLOSE).tolist():
        exact = amount + (at + 1) * (slope + bend * (at + 1))
        rounded[:, at] = exact // divisor, -(-exact // divisor)
    return whole + rounded


def _whole_ratios(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratios of weights, taken as decimals."""
    decimals = [Fraction(repr(weight)) for weight in weights]
    total = sum(decimals)
    shares = [decimal / total for decimal in decimals]
    divisor = lcm(*(share.denominator for share in shares))
    return [int(share * divisor) for share in shares]


def _stretch(
    first: int, n_units: int | None, before: list[Fraction], start: Sequence[int], stop: Sequence[int]
) -> _Stretch:
    """Return the stretch in which integer weights change from ``start`` to ``stop``.

    Args:
        first: the first unit.
        n_units: number of units, or None.
        before: the integral of each source before the first unit.
        start: weights at the first unit.
        stop: weights after the last unit.
    """
    if n_units is None or start == stop:
        return _Stretch(first, n_units, before, list(start), [0] * len(start), sum(start))
    n_start, n_stop = sum(start), sum(stop)
    slopes = [2 * n_units * n_stop * weight for weight in start]
    bends = [n_start * last - n_stop * weight for weight, last in zip(start, stop, strict=True)]
    return _Stretch(first, n_units, before, slopes, bends, 2 * n_units * n_start * n_stop)


class _Straddler(NamedTuple):
    """A source with a unit that may be placed before or after a border.

    Attributes:
        source: number of the source.
        release: number of units after which this unit may be the last one.
        deadline: number of units after which this unit must have been placed.
        share: expected part of this unit before the border, above 0 and below 1.
    """

    source: int
    release: float
    deadline: float
    share: Fraction


class ScheduledCounts:
    """The counts and the order of the sources under a schedule: a pure function of the unit.

    The time to compute the source of a unit grows with the logarithm of the unit's number.

    Args:
        integral: the expected counts of the sources.
        piece_units: number of units that are scheduled together, on first use.
    """

    def __init__(self, integral: ShareIntegral, piece_units: int) -> None:
        self._integral, self._piece_units = integral, piece_units
        self.before = lru_cache(maxsize=1024)(self._count_before)

    def deal(self, piece: int) -> IntArray:
        """Return the source of each unit of a piece."""
        n_units, n_sources = self._piece_units, self._integral.n_sources
        counts = zip(self.before(piece), self.before(piece + 1), strict=True)
        entries = []  # a number for each unit, made of its release, deadline and source
        for source, (low, high) in enumerate(counts):
            if low == high:
                continue
            floors, ceilings = self._integral.bounds(source, piece * n_units, (piece + 1) * n_units)
            numbers = np.arange(low, high) + 1
            releases = np.minimum(np.searchsorted(ceilings, numbers), n_units - 1)
            entries.append((releases * (n_units + 1) + np.searchsorted(floors, numbers)) * n_sources + source)
        releases, by_deadline = np.divmod(np.sort(np.concatenate(entries)), (n_units + 1) * n_sources)
        return _earliest_first(releases.tolist(), by_deadline.tolist()) % n_sources

    def _count_before(self, piece: int) -> tuple[int, ...]:
        """Return the count of each source before a piece."""
        if not piece:
            return (0,) * self._integral.n_sources
        width = piece & -piece  # the largest power of 2 that divides it
        is_power = piece == width
        earlier = piece // 2 if is_power else piece - width
        fewest = self.before(earlier)
        most = None if is_power else self.before(piece + width)
        border = piece * self._piece_units
        counts, straddlers, free = list(fewest), [], []
        for source in range(len(counts)):
            amount = self._integral.before(source, border)
            whole = floor(amount)
            counts[source] = max(counts[source], whole)
            if amount == whole:
                continue
            straddler = _Straddler(
                source,
                self._integral.n_until_above(source, whole),
                self._integral.n_until(source, whole + 1),
                amount - whole,
            )
            straddlers.append(straddler)
            if fewest[source] <= whole and (most is None or most[source] > whole):
                free.append(straddler)
        for source in _to_come_first(straddlers, free, border - sum(counts), earlier * self._piece_units):
            counts[source] += 1
        return tuple(counts)


def _earliest_first(releases: Sequence[int], deadlines: Sequence[int]) -> IntArray:
    """Return the deadlines of units in their places: each place has the earliest deadline of the released units.

    Args:
        releases: the first place that each unit may have, ascending.
        deadlines: deadlines of the units.
    """
    released: list[int] = []
    dealt: list[int] = []
    at, n_units = 0, len(releases)
    for place in range(n_units):
        while at < n_units and releases[at] <= place:
            heappush(released, deadlines[at])
            at += 1
        dealt.append(heappop(released))
    return np.array(dealt, dtype=np.int64)


def _to_come_first(straddlers: Sequence[_Straddler], free: Sequence[_Straddler], n: int, earlier: int) -> list[int]:
    """Return the sources with a unit before a border, so that units can be scheduled on both sides of the border.

    Units with the earliest deadlines are before the border, as far as there is room after their releases.

    Args:
        straddlers: all sources with a unit that may be on either side.
        free: sources that earlier decisions leave open.
        n: number of the free sources with a unit before the border.
        earlier: an earlier border, with fixed counts.
    """
    rooms: dict[float, int] = {}  # by release: number of units with this or a later release before the border
    shares = Fraction(0)
    for straddler in sorted(straddlers, key=lambda straddler: -straddler.release):
        shares += straddler.share
        if straddler.release > earlier:
            rooms[straddler.release] = ceil(shares)
    sources: list[int] = []
    for straddler in sorted(free, key=lambda straddler: (straddler.deadline, straddler.source)):
        releases = [release for release in rooms if release <= straddler.release]
        if len(sources) < n and all(rooms[release] for release in releases):
            sources.append(straddler.source)
            for release in releases:
                rooms[release] -= 1
    return sources

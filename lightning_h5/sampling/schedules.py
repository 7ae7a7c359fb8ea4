"""Schedules: which source each unit of a mixture comes from, as pure functions that reach any unit at once.

A unit is a batch, or a row. Shares that are to be exact are kept at every unit: no source is ever a whole unit ahead of
its share or behind it (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Protocol

import numpy as np

from ..types import IntArray
from .permutation import GAMMA, mix, stream

__all__ = [
    "DrawnSchedule",
    "EvenSchedule",
    "LaterSchedule",
    "PatternSchedule",
    "RunsSchedule",
    "Schedule",
    "largest_remainder",
]

DRAWS = 10  # purpose of the random stream

MOST_UNITS = 1 << 17
"""Units that are dealt as one pattern, once: 0.2 s for three sources. Longer epochs are dealt piece by piece."""

PIECE_UNITS = 1 << 14
"""Units of such a piece: 25 ms."""

COUNTED_TOGETHER = 1 << 10
"""Units of a pattern whose counts are kept: none is reached by counting more than these."""

DRAWN_TOGETHER = 1 << 13
"""Draws that are counted together: what an epoch holds of them is a number for each source and so many units."""


class Schedule(Protocol):
    """The sources of an epoch's units."""

    n_units: int
    """Units of the epoch."""

    def sources(self, start: int, stop: int) -> IntArray:
        """The source of each unit in ``[start, stop)``."""
        ...

    def counts(self, unit: int) -> IntArray:
        """How many of the units before this one each source has, shape ``(n_sources,)``."""
        ...


def largest_remainder(shares: Sequence[Fraction], n: int) -> list[int]:
    """Whole numbers that add up to ``n`` and are next to the exact shares of it (Hamilton's method).

    Args:
        shares: of each source, adding up to 1.
        n: what to share out.
    """
    exact = [share * n for share in shares]
    quotas = [int(number) for number in exact]
    by_remainder = sorted(range(len(shares)), key=lambda source: (quotas[source] - exact[source], source))
    for source in by_remainder[: n - sum(quotas)]:
        quotas[source] += 1
    return quotas


class _Pattern:
    """Sources of some units, and how many of those before a unit each source has."""

    def __init__(self, sources: IntArray, n_sources: int) -> None:
        self.sources, self._n_sources = sources, n_sources
        cuts = range(0, len(sources), COUNTED_TOGETHER)
        each = [np.bincount(sources[cut : cut + COUNTED_TOGETHER], minlength=n_sources) for cut in cuts]
        self._counted: IntArray = np.cumsum([np.zeros(n_sources, dtype=np.int64), *each], axis=0)

    def __len__(self) -> int:
        return len(self.sources)

    def counts(self, unit: int) -> IntArray:
        """How many of the units before this one each source has."""
        whole, rest = divmod(unit, COUNTED_TOGETHER)
        after = np.bincount(self.sources[unit - rest : unit], minlength=self._n_sources)
        counts: IntArray = self._counted[whole] + after
        return counts


class PatternSchedule:
    """A pattern of sources, again and again.

    Args:
        pattern: sources in their order.
        n_sources: number of sources.
        n_units: units of the epoch.
    """

    def __init__(self, pattern: Sequence[int] | IntArray, n_sources: int, n_units: int) -> None:
        self._pattern = _Pattern(np.asarray(pattern, dtype=np.int64), n_sources)
        self.n_units = n_units

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        return self._pattern.sources[np.arange(start, stop) % len(self._pattern)]

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        times, rest = divmod(unit, len(self._pattern))
        counts: IntArray = self._pattern.counts(rest) + times * self._pattern.counts(len(self._pattern))
        return counts


class RunsSchedule:
    """One source after the other.

    Args:
        quotas: units of each source.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._ends: IntArray = np.cumsum(np.asarray(quotas, dtype=np.int64))
        self._quotas: IntArray = np.asarray(quotas, dtype=np.int64)
        self.n_units = int(self._ends[-1])

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        return np.searchsorted(self._ends, np.arange(start, stop), side="right").astype(np.int64)

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        counts: IntArray = np.clip(unit - self._ends + self._quotas, 0, self._quotas)
        return counts


class EvenSchedule:
    """Exact quotas, spread as evenly as can be.

    Where the quotas are a multiple of numbers that add up to less than ``MOST_UNITS``, these are dealt as one pattern,
    again and again, and no source is ever a whole unit off its share. Longer ones are cut into pieces, each with quotas
    of its own; a source may then be up to two units off, or some more where many sources are rare.

    Args:
        quotas: units of each source; after the last of them all begins again.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self.n_units = sum(quotas)
        self._quotas = list(quotas)
        self._length = max(1, self.n_units // max(1, gcd(*quotas)))
        self._is_cut = self._length > MOST_UNITS
        if self._is_cut:
            self._length = PIECE_UNITS
        self._before = lru_cache(maxsize=256)(self._count_before)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            piece, inside = divmod(start % self.n_units, self._length)
            parts.append(self._pattern(piece).sources[inside : inside + stop - start])
            start += len(parts[-1])
        sources: IntArray = np.concatenate(parts)
        return sources

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        times, unit = divmod(unit, max(1, self.n_units))
        piece, inside = divmod(unit, self._length)
        before = zip(self._quotas, self._before(piece), strict=True)
        counts = np.array([times * quota + count for quota, count in before] if times else self._before(piece))
        return counts + self._pattern(piece).counts(inside) if inside else counts

    def _count_before(self, piece: int) -> tuple[int, ...]:
        unit, n = min(piece * self._length, self.n_units), max(1, self.n_units)
        if unit in (0, n) or not self._is_cut:
            return tuple(quota * unit // n for quota in self._quotas)
        # Who has less than two units in a piece has them in the middle of its turns; the others share the rest. So what
        # they add up to only grows.
        largest = max(self._quotas)
        is_rare = [quota * self._length < 2 * n and quota < largest for quota in self._quotas]
        rare = [
            (2 * unit * quota + n) // (2 * n) if few else 0 for quota, few in zip(self._quotas, is_rare, strict=True)
        ]
        often = [0 if few else quota for quota, few in zip(self._quotas, is_rare, strict=True)]
        shared = largest_remainder([Fraction(quota, sum(often)) for quota in often], unit - sum(rare))
        return tuple(a + b for a, b in zip(rare, shared, strict=True))

    def _pattern(self, piece: int) -> _Pattern:
        before, after = self._before(piece), self._before(piece + 1)
        return _even_pattern(tuple(b - a for a, b in zip(before, after, strict=True)))


@lru_cache(maxsize=16)
def _even_pattern(quotas: tuple[int, ...]) -> _Pattern:
    """Quotas dealt evenly: each unit goes to who would first be a unit behind, of those that are far enough behind."""
    n, slack = sum(quotas), 2 * max(1, len(quotas) - 1)
    sources = np.empty(n, dtype=np.int64)
    dealt = [0] * len(quotas)
    for unit in range(n):
        best, first = -1, 0.0
        for source, quota in enumerate(quotas):
            behind = (quota * (unit + 1) - n * dealt[source]) * slack
            if behind >= n and quota:
                deadline = ((slack - 1) * n - behind) / quota
                if best < 0 or deadline < first:
                    best, first = source, deadline
        sources[unit] = best
        dealt[best] += 1
    return _Pattern(sources, len(quotas))


class LaterSchedule:
    """A schedule from a unit on.

    Args:
        schedule: the schedule.
        first: its unit that is the first here.
        n_units: units of the epoch.
    """

    def __init__(self, schedule: Schedule, first: int, n_units: int) -> None:
        self._schedule, self._first, self.n_units = schedule, first, n_units
        self.before = schedule.counts(first)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        return self._schedule.sources(self._first + start, self._first + stop)

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        return self._schedule.counts(self._first + unit) - self.before


class DrawnSchedule:
    """Each unit's source is drawn, whatever the others are.

    The draws of all units before one are counted when it is asked for, some 20 ns each, once an epoch.

    Args:
        shares: of each source, adding up to 1.
        n_units: units of the epoch.
        seed: seed of the run.
        epoch: from 0.
    """

    def __init__(self, shares: Sequence[Fraction], n_units: int, seed: int, epoch: int) -> None:
        self.n_units = n_units
        self._n_sources = len(shares)
        ends = [int(sum(shares[: source + 1]) * 2**53) for source in range(len(shares))]
        self._ends = np.asarray(ends[:-1], dtype=np.uint64)
        self._word = np.asarray(stream(seed, epoch, DRAWS).random_raw(1), dtype=np.uint64)[0]
        self._counted = [np.zeros(self._n_sources, dtype=np.int64)]

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        words = mix(self._word + np.arange(start, stop, dtype=np.uint64) * GAMMA) >> np.uint64(11)
        return np.searchsorted(self._ends, words, side="right").astype(np.int64)

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        whole = unit // DRAWN_TOGETHER
        while len(self._counted) <= whole:
            start = (len(self._counted) - 1) * DRAWN_TOGETHER
            self._counted.append(self._counted[-1] + self._count(start, start + DRAWN_TOGETHER))
        return self._counted[whole] + self._count(whole * DRAWN_TOGETHER, unit)

    def _count(self, start: int, stop: int) -> IntArray:
        counts: IntArray = np.bincount(self.sources(start, stop), minlength=self._n_sources)
        return counts

"""Schedules of a mixture: the source of each unit (a batch or a row). Each reaches any unit at once.

Exact shares are kept at every unit: no source is ever a whole unit ahead of its share or behind it (Tijdeman, "The
chairman assignment problem", Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..types import IntArray

__all__ = ["EpochSchedule", "EvenPieces", "Pattern", "Runs", "Schedule", "even_schedule", "largest_remainder"]

MAX_UNITS = 1 << 17
"""Units that are dealt as one pattern, once: 0.2 s for three sources. Longer epochs are dealt piece by piece."""

PIECE_UNITS = 1 << 14
"""Units of such a piece: 25 ms."""

COUNTED_TOGETHER = 1 << 10
"""Units of a pattern whose counts are kept: no unit is reached by counting more than these."""


class Schedule(Protocol):
    """The sources of units, from 0 on without end."""

    def sources(self, start: int, stop: int) -> IntArray:
        """Return the source of each unit in ``[start, stop)``."""
        ...

    def counts(self, unit: int) -> IntArray:
        """Return how many of the units before this one each source has, shape ``(n_sources,)``."""
        ...


@dataclass(frozen=True, eq=False)
class EpochSchedule:
    """The part of a schedule that is one epoch.

    Attributes:
        schedule: the schedule.
        n_units: units of the epoch.
        first: unit of the schedule at which the epoch begins.
        taken: units of each source that earlier epochs took, apart from those before ``first``.
    """

    schedule: Schedule
    n_units: int
    first: int
    taken: IntArray

    def sources(self, start: int, stop: int) -> IntArray:
        """Return the source of each unit in ``[start, stop)`` of the epoch."""
        return self.schedule.sources(self.first + start, self.first + stop)

    def counts(self, unit: int) -> IntArray:
        """Return how many units each source has had before this one, since the run began."""
        return self.taken + self.schedule.counts(self.first + unit)


class Pattern:
    """A pattern of sources, repeated.

    Args:
        sources: of the pattern's units.
        n_sources: number of sources.
    """

    def __init__(self, sources: npt.ArrayLike, n_sources: int) -> None:
        self._sources = np.asarray(sources, dtype=np.int64)
        self._n_sources = n_sources
        cuts = range(0, len(self._sources), COUNTED_TOGETHER)
        each = [self._count(cut, cut + COUNTED_TOGETHER) for cut in cuts]
        self._counted: IntArray = np.cumsum([np.zeros(n_sources, dtype=np.int64), *each], axis=0)

    def _count(self, start: int, stop: int) -> IntArray:
        return np.bincount(self._sources[start:stop], minlength=self._n_sources)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        return self._sources[np.arange(start, stop) % len(self._sources)]

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        times, unit = divmod(unit, len(self._sources))
        whole, rest = divmod(unit, COUNTED_TOGETHER)
        counts: IntArray = times * self._counted[-1] + self._counted[whole] + self._count(unit - rest, unit)
        return counts


class Runs:
    """All units of one source, then all of the next; once.

    Args:
        quotas: units of each source.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = np.asarray(quotas, dtype=np.int64)
        self._ends: IntArray = np.cumsum(self._quotas)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        return np.searchsorted(self._ends, np.arange(start, stop), side="right").astype(np.int64)

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        counts: IntArray = np.clip(unit - self._ends + self._quotas, 0, self._quotas)
        return counts


def even_schedule(quotas: Sequence[int]) -> Schedule:
    """Return exact quotas, spread as evenly as can be and repeated.

    If the quotas are a multiple of numbers that add up to at most ``MAX_UNITS``, these are dealt as one pattern, and no
    source is ever a whole unit off its share. Longer ones are cut into pieces (see ``EvenPieces``).

    Args:
        quotas: units of each source.
    """
    divisor = max(1, gcd(*quotas))
    if sum(quotas) // divisor > MAX_UNITS:
        return EvenPieces(quotas)
    return _even_pattern(tuple(quota // divisor for quota in quotas)) if any(quotas) else Runs(quotas)


class EvenPieces:
    """Quotas dealt in pieces of ``PIECE_UNITS`` units, each with even quotas of its own; repeated after the last unit.

    A source may be up to two units off its share, or some more if many sources are rare.

    Args:
        quotas: units of each source.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas, self._n_units = list(quotas), sum(quotas)
        self._before = lru_cache(maxsize=256)(self._count_before)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Schedule``."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            unit = start % self._n_units
            piece, inside = divmod(unit, PIECE_UNITS)
            end = min(PIECE_UNITS, self._n_units - piece * PIECE_UNITS, inside + stop - start)
            parts.append(self._pattern(piece).sources(inside, end))
            start += len(parts[-1])
        sources: IntArray = np.concatenate(parts)
        return sources

    def counts(self, unit: int) -> IntArray:
        """See ``Schedule``."""
        times, unit = divmod(unit, self._n_units)
        piece, inside = divmod(unit, PIECE_UNITS)
        counts = np.array([times * n + before for n, before in zip(self._quotas, self._before(piece), strict=True)])
        return counts + self._pattern(piece).counts(inside) if inside else counts

    def _count_before(self, piece: int) -> tuple[int, ...]:
        unit, n = min(piece * PIECE_UNITS, self._n_units), self._n_units
        if unit == n:
            return tuple(self._quotas)
        # Sources that have less than two units in a piece get them in the middle of their turns; the others share the
        # rest. So what they add up to only grows.
        largest = max(self._quotas)
        is_rare = [quota * PIECE_UNITS < 2 * n and quota < largest for quota in self._quotas]
        both = list(zip(self._quotas, is_rare, strict=True))
        rare = [(2 * unit * quota + n) // (2 * n) if few else 0 for quota, few in both]
        often = [0 if few else quota for quota, few in both]
        shared = largest_remainder([Fraction(quota, sum(often)) for quota in often], unit - sum(rare))
        return tuple(a + b for a, b in zip(rare, shared, strict=True))

    def _pattern(self, piece: int) -> Pattern:
        before, after = self._before(piece), self._before(piece + 1)
        return _even_pattern(tuple(b - a for a, b in zip(before, after, strict=True)))


@lru_cache(maxsize=16)
def _even_pattern(quotas: tuple[int, ...]) -> Pattern:
    """Deal quotas evenly: each unit goes to the source that would first be a unit behind, if far enough behind."""
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
    return Pattern(sources, len(quotas))


def largest_remainder(shares: Sequence[Fraction], n: int) -> list[int]:
    """Return whole numbers that add up to ``n`` and are next to the exact shares of it (Hamilton's method).

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

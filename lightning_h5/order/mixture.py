"""Mixtures of sources: shares, the length of an epoch, and the order of sources.

A source is an endless stream: all its rows in one order, then in another, and so on. An epoch of the mixture continues
each stream at the end of the previous epoch, so that epochs of a thousand steps read all rows of a source before any
row is repeated. Epochs that are as long as the longest source, or the shortest, begin a new order.

A schedule names the source of each unit (a batch or a row), with access to any unit. Exact shares are kept at
every unit: no source is ever a whole unit ahead of its share or behind it (Tijdeman, "The chairman assignment problem",
Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, gcd, lcm
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..types import IntArray
from .weight_schedule import ScheduledCounts, ShareIntegral, WeightSchedule

__all__ = ["EpochLength", "EpochSchedule", "Mixture", "Strategy", "check_mixture"]

MAX_UNITS = 1 << 17
"""Maximum units of one pattern: 0.2 s for three sources. Longer epochs are scheduled in pieces."""

PIECE_UNITS = 1 << 14
"""Units of a piece: 25 ms."""

SCHEDULED_UNITS = 1 << 12
"""Units of a piece if weights change over the run: 1 ms for three sources."""

COUNTED_TOGETHER = 1 << 10
"""Interval of stored counts in a pattern: reaching a unit counts at most this number of units."""

Strategy = Literal["concat", "weighted", "round_robin", "alternating", "sequential"]
EpochLength = Literal["sum", "max", "min"] | int


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How sources are mixed.

    Attributes:
        names: names of the sources.
        n_rows: number of rows of each source.
        strategy: ``concat`` (all rows joined), ``weighted`` (shares by weight), ``round_robin`` (cycle through the
            sources), ``alternating`` (repeat a pattern) or ``sequential`` (one source after the other).
        unit: the unit of mixing: batches, or rows within batches.
        weights: weights of the sources (``weighted``), or a schedule of weights; None uses the sizes of the sources.
        pattern: numbers of sources (``alternating``).
        epoch_length: ``sum`` (the rows of all sources), ``max`` (until every source was exhausted once), ``min`` (until
            the first source is exhausted, or a unit less if shares are rounded), or a number of steps.
    """

    names: tuple[str, ...]
    n_rows: tuple[int, ...]
    strategy: Strategy = "concat"
    unit: Literal["batches", "rows"] = "batches"
    weights: tuple[float, ...] | WeightSchedule | None = None
    pattern: tuple[int, ...] = ()
    epoch_length: EpochLength = "sum"

    @property
    def in_batches(self) -> bool:
        """Whether each batch has rows of one source."""
        return self.unit == "batches" and self.strategy != "concat"

    @property
    def _turns(self) -> IntArray | None:
        """The sources in the order of their turns, if the turns repeat."""
        if self.strategy == "round_robin":
            return np.arange(len(self.names))
        return np.asarray(self.pattern, dtype=np.int64) if self.strategy == "alternating" else None

    @property
    def text(self) -> str:
        """The mixture in words, for comparison with saved positions; without the length of an epoch."""
        weights = self.weights.text if isinstance(self.weights, WeightSchedule) else list(self.weights or ())
        detail = {
            "concat": "",
            "weighted": f" (exact, {weights or 'by size'})",
            "alternating": f" {list(self.pattern)}",
        }.get(self.strategy, "")
        unit = "batches" if self.in_batches else "rows"
        sources = ", ".join(f"{name!r}: {n}" for name, n in zip(self.names, self.n_rows, strict=True))
        return f"{self.strategy}{detail} of {unit} of {{{sources}}}"

    def n_cycle(self, batch_size: int, drop_last: bool) -> list[int]:
        """Return the units in all of each source's rows: in one cycle of its stream."""
        if not self.in_batches:
            return list(self.n_rows)
        return [n // batch_size if drop_last else -(-n // batch_size) for n in self.n_rows]

    def shares(self, n_cycle: Sequence[int]) -> list[Fraction]:
        """Return the expected share of each source, if it is constant over the run.

        Args:
            n_cycle: units in all of each source's rows.
        """
        n = len(n_cycle)
        if self.strategy == "weighted" and isinstance(self.weights, tuple):
            amounts = [Fraction(repr(weight)) for weight in self.weights]  # exact decimals as written
        elif self.strategy == "alternating":
            amounts = [Fraction(self.pattern.count(source)) for source in range(n)]
        elif self.strategy == "round_robin" or (self.strategy == "sequential" and self.epoch_length in ("max", "min")):
            amounts = [Fraction(1)] * n
        else:
            amounts = [Fraction(units) for units in n_cycle]
        total = sum(amounts)
        return [amount / total for amount in amounts]

    def n_units(self, n_cycle: Sequence[int], units_per_step: int) -> int:
        """Return the units of an epoch.

        Args:
            n_cycle: units in all of each source's rows.
            units_per_step: of all ranks.
        """
        if isinstance(self.epoch_length, int):
            return self.epoch_length * units_per_step
        if self.epoch_length == "sum":
            return sum(n_cycle)
        if (turns := self._turns) is not None:
            ends = [_end_of(np.flatnonzero(turns == source), len(turns), n) for source, n in enumerate(n_cycle)]
            used_ends = [end for end in ends if end]
            return max(used_ends) if self.epoch_length == "max" else min(used_ends)
        units_to_end = [
            units / share for units, share in zip(n_cycle, self.shares(n_cycle), strict=True) if share
        ]  # units of the mixture until all rows of a source were seen
        return ceil(max(units_to_end)) if self.epoch_length == "max" else floor(min(units_to_end))

    @property
    def weight_schedule(self) -> WeightSchedule | None:
        """The weights over the run; None if they do not change."""
        return self.weights if isinstance(self.weights, WeightSchedule) else None

    def units_per_step(self, batch_size: int) -> int:
        """Return the units of a batch, which is a step of a schedule of weights.

        Args:
            batch_size: rows of a batch on one rank.
        """
        return 1 if self.in_batches else batch_size

    def schedule(
        self, n_cycle: Sequence[int], n_units: int, epoch: int, *, batch_size: int = 1, first_unit: int | None = None
    ) -> EpochSchedule:
        """Return the schedule of an epoch: the source of each unit.

        Args:
            n_cycle: units in all of each source's rows.
            n_units: units of the epoch.
            epoch: from 0.
            batch_size: rows of a batch on one rank.
            first_unit: units of all earlier epochs, if weights change; None if they had as many units as this one.
        """
        if self.weight_schedule is not None:
            pieces = ScheduledPieces.of(self.weight_schedule, self.units_per_step(batch_size))
            first = epoch * n_units if first_unit is None else first_unit
            return EpochSchedule(pieces, n_units, first, np.zeros(len(n_cycle), dtype=np.int64))
        shares = self.shares(n_cycle)
        schedule: Schedule
        if self.strategy == "concat":
            n_cycle, schedule = [sum(n_cycle)], Runs([n_units])
        elif (turns := self._turns) is not None:
            schedule = Pattern(turns, len(self.names))
        elif self.strategy == "sequential":
            schedule = Runs(largest_remainder(shares, n_units))
        elif isinstance(self.epoch_length, int):
            # One endless sequence of turns, which each epoch continues.
            denominator = lcm(*(share.denominator for share in shares))
            endless_schedule = even_schedule([int(share * denominator) for share in shares])
            return EpochSchedule(endless_schedule, n_units, epoch * n_units, np.zeros(len(shares), dtype=np.int64))
        else:
            schedule = even_schedule(largest_remainder(shares, n_units))
        if self.epoch_length in ("max", "min"):
            cycle_units = np.array([-(-n_units // n) * n for n in n_cycle])  # rounded up to whole cycles
        else:
            cycle_units = schedule.counts(n_units)
        return EpochSchedule(schedule, n_units, 0, epoch * cycle_units)


def _end_of(turns: IntArray, n_turns: int, n_units: int) -> int:
    """Return the number of units after which a source is exhausted; 0 if it has no turn.

    Args:
        turns: turns of the source in the pattern.
        n_turns: number of units of the pattern.
        n_units: number of units in all rows of the source.
    """
    if not len(turns):
        return 0
    times, at = divmod(n_units - 1, len(turns))
    return times * n_turns + int(turns[at]) + 1


def check_mixture(mixture: Mixture, batch_size: int, drop_last: bool) -> None:
    """Raise an error if the sources cannot be mixed.

    Args:
        mixture: how sources are mixed.
        batch_size: rows of a batch on one rank.
        drop_last: drop rows that do not fill a batch.

    Raises:
        H5ValueError: a source has no rows, or no full batch with ``drop_last``.
    """
    for name, n_rows in zip(mixture.names, mixture.n_rows, strict=True):
        if not n_rows:
            raise H5ValueError(f"the source {name!r} has no rows that pass its filters. Change them, or leave it out.")
        if drop_last and mixture.in_batches and n_rows < batch_size:
            raise H5ValueError(
                f"the source {name!r} has {n_rows} rows, and batch_size is {batch_size}: drop_last leaves no batch of "
                "it. Make batch_size smaller, leave drop_last out, or mix rows (mix='rows')."
            )


@dataclass(frozen=True, eq=False)
class EpochSchedule:
    """The part of a schedule for one epoch.

    Attributes:
        schedule: the schedule.
        n_units: number of units of the epoch.
        first: first unit of the epoch in the schedule.
        offsets: number of units of each source in earlier epochs, not counting the units before ``first``.
    """

    schedule: Schedule
    n_units: int
    first: int
    offsets: IntArray

    def sources(self, start: int, stop: int) -> IntArray:
        """Return the source of each unit in ``[start, stop)`` of the epoch."""
        return self.schedule.sources(self.first + start, self.first + stop)

    def counts(self, unit: int) -> IntArray:
        """Return the number of units of each source before this unit, since the start of the run."""
        return self.offsets + self.schedule.counts(self.first + unit)


class Pattern:
    """A pattern of sources, repeated.

    Args:
        sources: source of each unit in the pattern.
        n_sources: number of sources.
    """

    def __init__(self, sources: npt.ArrayLike, n_sources: int) -> None:
        self._sources = np.asarray(sources, dtype=np.int64)
        self._n_sources = n_sources
        cuts = range(0, len(self._sources), COUNTED_TOGETHER)
        piece_counts = [self._count(cut, cut + COUNTED_TOGETHER) for cut in cuts]
        self._counted: IntArray = np.cumsum([np.zeros(n_sources, dtype=np.int64), *piece_counts], axis=0)

    def _count(self, start: int, stop: int) -> IntArray:
        return np.bincount(self._sources[start:stop], minlength=self._n_sources)

    def sources(self, start: int, stop: int) -> IntArray:
        """Return the source of each unit in ``[start, stop)``."""
        return self._sources[np.arange(start, stop) % len(self._sources)]

    def counts(self, unit: int) -> IntArray:
        """Return the number of units of each source before this unit, shape ``(n_sources,)``."""
        times, unit = divmod(unit, len(self._sources))
        piece, place = divmod(unit, COUNTED_TOGETHER)
        counts: IntArray = times * self._counted[-1] + self._counted[piece] + self._count(unit - place, unit)
        return counts


class Runs:
    """All units of one source, then all units of the next; not repeated.

    Args:
        quotas: units of each source.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = np.asarray(quotas, dtype=np.int64)
        self._ends: IntArray = np.cumsum(self._quotas)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Pattern``."""
        return np.searchsorted(self._ends, np.arange(start, stop), side="right").astype(np.int64)

    def counts(self, unit: int) -> IntArray:
        """See ``Pattern``."""
        counts: IntArray = np.clip(unit - self._ends + self._quotas, 0, self._quotas)
        return counts


class ScheduledPieces:
    """Units of sources with weights that change, scheduled in pieces of ``SCHEDULED_UNITS`` units.

    The count of a source differs from the integral of its share by less than one unit.

    Args:
        weights: weights of the sources.
        units_per_step: number of units in a step of the schedule.
    """

    def __init__(self, weights: WeightSchedule, units_per_step: int) -> None:
        integral = ShareIntegral(weights, units_per_step)
        self._counts = ScheduledCounts(integral, SCHEDULED_UNITS)
        self._pattern = lru_cache(maxsize=16)(lambda piece: Pattern(self._counts.deal(piece), integral.n_sources))

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, weights: WeightSchedule, units_per_step: int) -> ScheduledPieces:
        """Return the pieces of a schedule, including pieces cached from earlier epochs."""
        return cls(weights, units_per_step)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Pattern``."""
        parts = [np.empty(0, dtype=np.int64)]
        for piece in range(start // SCHEDULED_UNITS, -(-stop // SCHEDULED_UNITS)):
            first = piece * SCHEDULED_UNITS
            parts.append(self._pattern(piece).sources(max(start - first, 0), min(stop - first, SCHEDULED_UNITS)))
        sources: IntArray = np.concatenate(parts)
        return sources

    def counts(self, unit: int) -> IntArray:
        """See ``Pattern``."""
        piece, place = divmod(unit, SCHEDULED_UNITS)
        counts = np.array(self._counts.before(piece), dtype=np.int64)
        return counts + self._pattern(piece).counts(place) if place else counts


Schedule: TypeAlias = "Pattern | Runs | EvenPieces | ScheduledPieces"
"""The sources of units, from 0 on without end, and the counts of the sources before a unit."""


def even_schedule(quotas: Sequence[int]) -> Schedule:
    """Return a schedule with exact quotas, spread as evenly as possible and repeated.

    If the quotas are a multiple of numbers that add up to at most ``MAX_UNITS``, these numbers are spread in one
    pattern, and the count of a source differs from its share by less than one unit. Longer patterns are divided into
    pieces (see ``EvenPieces``).

    Args:
        quotas: units of each source.
    """
    divisor = max(1, gcd(*quotas))
    if sum(quotas) // divisor > MAX_UNITS:
        return EvenPieces(quotas)
    return _even_pattern(tuple(quota // divisor for quota in quotas)) if any(quotas) else Runs(quotas)


class EvenPieces:
    """Quotas in pieces of ``PIECE_UNITS`` units, each with its own even quotas; repeated after the last unit.

    The count of a source may differ from its share by up to two units, or slightly more if many sources are rare.

    Args:
        quotas: units of each source.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas, self._n_units = list(quotas), sum(quotas)
        self._before = lru_cache(maxsize=256)(self._count_before)

    def sources(self, start: int, stop: int) -> IntArray:
        """See ``Pattern``."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            unit = start % self._n_units
            piece, place = divmod(unit, PIECE_UNITS)
            end = min(PIECE_UNITS, self._n_units - piece * PIECE_UNITS, place + stop - start)
            parts.append(self._pattern(piece).sources(place, end))
            start += len(parts[-1])
        sources: IntArray = np.concatenate(parts)
        return sources

    def counts(self, unit: int) -> IntArray:
        """See ``Pattern``."""
        times, unit = divmod(unit, self._n_units)
        piece, place = divmod(unit, PIECE_UNITS)
        counts = np.array([times * n + n_before for n, n_before in zip(self._quotas, self._before(piece), strict=True)])
        return counts + self._pattern(piece).counts(place) if place else counts

    def _count_before(self, piece: int) -> tuple[int, ...]:
        unit, n = min(piece * PIECE_UNITS, self._n_units), self._n_units
        if unit == n:
            return tuple(self._quotas)
        # Sources with less than two units in a piece have them in the middle of their turns; the others share the rest.
        # So the sum never decreases.
        largest = max(self._quotas)
        is_rare = [quota * PIECE_UNITS < 2 * n and quota < largest for quota in self._quotas]
        pairs = list(zip(self._quotas, is_rare, strict=True))
        rare_counts = [(2 * unit * quota + n) // (2 * n) if flag else 0 for quota, flag in pairs]
        common_quotas = [0 if flag else quota for quota, flag in pairs]
        common_counts = largest_remainder(
            [Fraction(quota, sum(common_quotas)) for quota in common_quotas], unit - sum(rare_counts)
        )
        return tuple(a + b for a, b in zip(rare_counts, common_counts, strict=True))

    def _pattern(self, piece: int) -> Pattern:
        starts, stops = self._before(piece), self._before(piece + 1)
        return _even_pattern(tuple(b - a for a, b in zip(starts, stops, strict=True)))


@lru_cache(maxsize=16)
def _even_pattern(quotas: tuple[int, ...]) -> Pattern:
    """Spread quotas evenly: each unit is assigned to the source that would first be a unit behind."""
    n, slack = sum(quotas), 2 * max(1, len(quotas) - 1)
    sources = np.empty(n, dtype=np.int64)
    counts = [0] * len(quotas)
    for unit in range(n):
        best, earliest = -1, 0.0
        for source, quota in enumerate(quotas):
            behind = (quota * (unit + 1) - n * counts[source]) * slack
            if behind >= n and quota:
                deadline = ((slack - 1) * n - behind) / quota
                if best < 0 or deadline < earliest:
                    best, earliest = source, deadline
        sources[unit] = best
        counts[best] += 1
    return Pattern(sources, len(quotas))


def largest_remainder(shares: Sequence[Fraction], n: int) -> list[int]:
    """Return whole numbers that add up to ``n`` and are the exact shares of ``n``, rounded (Hamilton's method).

    Args:
        shares: share of each source, adding up to 1.
        n: the number to distribute.
    """
    exact_quotas = [share * n for share in shares]
    quotas = [int(number) for number in exact_quotas]
    by_remainder = sorted(range(len(shares)), key=lambda source: (quotas[source] - exact_quotas[source], source))
    for source in by_remainder[: n - sum(quotas)]:
        quotas[source] += 1
    return quotas

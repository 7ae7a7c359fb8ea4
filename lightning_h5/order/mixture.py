"""Several sources in one sequence: which of them comes when, and each one's rows in an order of its own.

A source is a stream that never ends: all its rows in an order, then all of them in another, and so on. An epoch of the
mixture takes up each stream where the epoch before it stopped, so that epochs of a thousand steps go through all rows
of a source before any comes again. Epochs that are as long as the longest source, or the shortest, begin a new order.

Where a row comes again, a transform should draw anew, and a reader should not take it for the one it had. So the row
numbers of a mixture carry the cycle: number ``cycle * n_rows + row`` is ``row`` of the dataset.

Which source comes when is a schedule. Shares that are to be exact are kept at every unit (a batch or a row): no source
is ever a whole unit ahead of its share or behind it (Tijdeman, "The chairman assignment problem", Discrete Mathematics
32, 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, floor, gcd, lcm
from typing import Literal, Protocol

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray
from .epoch import BatchSequence, EpochSequence, RowSequence
from .permutation import stream
from .plan import EvaluationCut, Order, OrderParameters, SourceOrder, order_rows
from .window import BlockTable

__all__ = ["EpochLength", "Mixture", "MixtureRecipe", "Strategy", "check_mixture"]

SEEDS = 11  # purpose of the random stream

MAX_UNITS = 1 << 17
"""Units that are dealt as one pattern, once: 0.2 s for three sources. Longer epochs are dealt piece by piece."""

PIECE_UNITS = 1 << 14
"""Units of such a piece: 25 ms."""

COUNTED_TOGETHER = 1 << 10
"""Units of a pattern whose counts are kept: none is reached by counting more than these."""

Strategy = Literal["concat", "weighted", "round_robin", "alternating", "sequential"]
EpochLength = Literal["sum", "max", "min"] | int


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How sources are mixed.

    Attributes:
        names: of the sources.
        n_rows: of each source.
        strategy: ``concat`` (all rows as one), ``weighted`` (shares by weight), ``round_robin`` (one after the other,
            again and again), ``alternating`` (a pattern, again and again) or ``sequential`` (one source whole, then
            the next).
        unit: what comes from one source: whole batches, or single rows of a batch.
        weights: of the sources (``weighted``); None goes by their size.
        pattern: numbers of sources (``alternating``).
        epoch_length: ``sum`` (as much as all sources have), ``max`` (until each was seen whole), ``min`` (until the
            first one is used up, or a unit before that where shares are rounded), or a number of steps.
    """

    names: tuple[str, ...]
    n_rows: tuple[int, ...]
    strategy: Strategy = "concat"
    unit: Literal["batches", "rows"] = "batches"
    weights: tuple[float, ...] | None = None
    pattern: tuple[int, ...] = ()
    epoch_length: EpochLength = "sum"

    @property
    def in_batches(self) -> bool:
        """Whether each batch is of one source."""
        return self.unit == "batches" and self.strategy != "concat"

    @property
    def _turns(self) -> IntArray | None:
        """The sources in their turn, where that is the same again and again."""
        if self.strategy == "round_robin":
            return np.arange(len(self.names))
        return np.asarray(self.pattern, dtype=np.int64) if self.strategy == "alternating" else None

    @property
    def text(self) -> str:
        """What a saved position depends on; the lengths of an epoch apart."""
        by = {
            "concat": "",
            "weighted": f" (exact, {'by size' if self.weights is None else list(self.weights)})",
            "alternating": f" {list(self.pattern)}",
        }.get(self.strategy, "")
        unit = "batches" if self.in_batches else "rows"
        sources = ", ".join(f"{name!r}: {n}" for name, n in zip(self.names, self.n_rows, strict=True))
        return f"{self.strategy}{by} of {unit} of {{{sources}}}"

    def n_cycle(self, batch_size: int, drop_last: bool) -> list[int]:
        """Units in all of each source's rows: in one cycle of its stream."""
        if not self.in_batches:
            return list(self.n_rows)
        return [n // batch_size if drop_last else -(-n // batch_size) for n in self.n_rows]

    def shares(self, n_cycle: Sequence[int]) -> list[Fraction]:
        """The share of units that each source is to have.

        Args:
            n_cycle: units in all of each source's rows.
        """
        n = len(n_cycle)
        if self.strategy == "weighted" and self.weights is not None:
            amounts = [Fraction(repr(weight)) for weight in self.weights]  # the decimals that were written
        elif self.strategy == "alternating":
            amounts = [Fraction(self.pattern.count(source)) for source in range(n)]
        elif self.strategy == "round_robin" or (self.strategy == "sequential" and self.epoch_length in ("max", "min")):
            amounts = [Fraction(1)] * n
        else:
            amounts = [Fraction(units) for units in n_cycle]
        total = sum(amounts)
        return [amount / total for amount in amounts]

    def n_units(self, n_cycle: Sequence[int], units_per_step: int) -> int:
        """Units of an epoch.

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
            there = [end for end in ends if end]
            return max(there) if self.epoch_length == "max" else min(there)
        whole = [
            units / share for units, share in zip(n_cycle, self.shares(n_cycle), strict=True) if share
        ]  # units of the mixture after which a source was seen whole
        return ceil(max(whole)) if self.epoch_length == "max" else floor(min(whole))

    def schedule(self, n_cycle: Sequence[int], n_units: int, epoch: int) -> tuple[Schedule, list[int]]:
        """Which source each unit of an epoch comes from, and how many of each source the epochs before took."""
        shares = tuple(self.shares(n_cycle))
        schedule: Schedule
        if self.strategy == "concat":
            n_cycle, schedule = [sum(n_cycle)], RunsSchedule([n_units])
        elif (turns := self._turns) is not None:
            schedule = PatternSchedule(turns, len(self.names), n_units)
        elif self.strategy == "sequential":
            schedule = RunsSchedule(largest_remainder(shares, n_units))
        elif isinstance(self.epoch_length, int):
            # The same turns whatever an epoch is, which goes on in them where the last one stopped.
            whole = lcm(*(share.denominator for share in shares))
            later = LaterSchedule(EvenSchedule([int(share * whole) for share in shares]), epoch * n_units, n_units)
            return later, later.before.tolist()
        else:
            schedule = EvenSchedule(largest_remainder(shares, n_units))
        if self.epoch_length in ("max", "min"):
            return schedule, [epoch * -(-n_units // n) * n for n in n_cycle]
        return schedule, [epoch * quota for quota in schedule.counts(n_units).tolist()]


def _end_of(turns: IntArray, n_turns: int, n_units: int) -> int:
    """Units of a mixture with the last of which a source was seen whole; 0 where it has no turn.

    Args:
        turns: its turns among all that are taken again and again.
        n_turns: how many these are.
        n_units: in all of its rows.
    """
    if not len(turns):
        return 0
    times, at = divmod(n_units - 1, len(turns))
    return times * n_turns + int(turns[at]) + 1


@dataclass(frozen=True, eq=False)
class MixtureRecipe:
    """Epochs of a mixture.

    Attributes:
        mixture: how sources are mixed.
        blocks: of each source; of all rows together for ``concat``.
    """

    mixture: Mixture
    blocks: Sequence[BlockTable]

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return self.mixture.text

    def n_units(self, batch_size: int, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``."""
        n_cycle = self.mixture.n_cycle(batch_size, drop_last)
        return self.mixture.n_units(n_cycle, world_size * (1 if self.mixture.in_batches else batch_size))

    def expected_shares(self, batch_size: int, *, drop_last: bool) -> dict[str, float]:
        """The share of units (batches, or rows) that each source is to have, by name."""
        shares = self.mixture.shares(self.mixture.n_cycle(batch_size, drop_last))
        return dict(zip(self.mixture.names, map(float, shares), strict=True))

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> EpochSequence:
        """See ``EpochRecipe``."""
        mixture, n_units = self.mixture, order.n_units
        schedule, before = mixture.schedule(mixture.n_cycle(order.batch_size, drop_last), n_units, epoch)
        n_rows = [table.n_rows for table in self.blocks]
        firsts = np.cumsum([0, *n_rows[:-1]]).tolist()
        sources = zip(self.blocks, firsts, order.sources, before, strict=True)
        streams = [
            _Stream(table, first, sum(n_rows), _parameters(order, own, number), skipped, drop_last)
            for number, (table, first, own, skipped) in enumerate(sources)
        ]
        if mixture.in_batches:
            return BatchSequence(_MixedBatches(schedule, streams), order.batch_size)
        return RowSequence(_MixedRows(schedule, streams), n_units, epoch)


def _parameters(parameters: OrderParameters, order: SourceOrder, number: int) -> OrderParameters:
    """Those of one source. Sources of the same size should not be in step with each other."""
    seed = int(stream(parameters.seed, 0, SEEDS, number).random_raw())
    return OrderParameters(
        mode=order.mode,
        seed=seed,
        batch_size=parameters.batch_size,
        streams=order.streams,
        window=order.window,
        version=parameters.version,
    )


class _Stream:
    """A source's rows, in one order after the other.

    Args:
        blocks: the source's rows.
        first: the row of the mixture that is its first.
        n_all: rows of the mixture.
        parameters: what decides its order.
        skipped: units that earlier epochs took.
        drop_last: each cycle has full batches alone, where units are batches.
    """

    def __init__(
        self, blocks: BlockTable, first: int, n_all: int, parameters: OrderParameters, skipped: int, drop_last: bool
    ) -> None:
        self._first, self._n_all, self._skipped = first, n_all, skipped
        self._cut = EvaluationCut(blocks.n_rows, parameters.batch_size, 1, 0)
        self._n_full = blocks.n_rows // parameters.batch_size if drop_last else None
        self._n_rows = blocks.n_rows
        self._order = lru_cache(maxsize=2)(lambda cycle: order_rows(blocks, parameters, cycle))

    def rows(self, start: int, stop: int) -> IntArray:
        """Rows at these places, counted from where the epoch began."""
        parts = [np.empty(0, dtype=np.int64)]
        start, stop = start + self._skipped, stop + self._skipped
        while start < stop:
            cycle, low = divmod(start, self._n_rows)
            high = min(self._n_rows, low + stop - start)
            parts.append(self._of_cycle(cycle, low, high))
            start += high - low
        return parts[-1] if len(parts) <= 2 else np.concatenate(parts)

    def batch(self, number: int) -> IntArray:
        """A batch, counted from where the epoch began."""
        cycle, inside = divmod(number + self._skipped, self._n_batches)
        return self._of_cycle(cycle, *self._bounds(inside))

    def n_rows_before(self, number: int) -> int:
        """Rows of the batches from where the epoch began to this one."""
        return self._position(number + self._skipped) - self._position(self._skipped)

    @property
    def _n_batches(self) -> int:
        """Of a cycle."""
        return self._cut.n_steps if self._n_full is None else self._n_full

    def _bounds(self, inside: int) -> tuple[int, int]:
        if self._n_full is None:
            return self._cut.bounds(inside)
        return inside * self._cut.batch_size, (inside + 1) * self._cut.batch_size

    def _position(self, number: int) -> int:
        """Rows of all batches before one, since the stream began."""
        cycle, inside = divmod(number, self._n_batches)
        n_cycle = self._n_rows if self._n_full is None else self._n_full * self._cut.batch_size
        return cycle * n_cycle + (self._bounds(inside)[0] if inside else 0)

    def _of_cycle(self, cycle: int, low: int, high: int) -> IntArray:
        order: Order = self._order(cycle)
        return order(low, high) + (cycle * self._n_all + self._first)


class _MixedRows:
    """An order of rows in which each place is of the source that the schedule says."""

    def __init__(self, schedule: Schedule, streams: Sequence[_Stream]) -> None:
        self._schedule, self._streams = schedule, streams

    def __call__(self, start: int, stop: int) -> IntArray:
        if len(self._streams) == 1:
            return self._streams[0].rows(start, stop)
        sources, before = self._schedule.sources(start, stop), self._schedule.counts(start)
        rows = np.empty(stop - start, dtype=np.int64)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            first = int(before[source])
            rows[here] = self._streams[source].rows(first, first + len(here))
        return rows


class _MixedBatches:
    """Batches of one source each."""

    def __init__(self, schedule: Schedule, streams: Sequence[_Stream]) -> None:
        self._schedule, self._streams = schedule, streams
        self.start = lru_cache(maxsize=64)(self._start)  # asked for several times for each batch

    @cached_property
    def n_batches(self) -> int:
        """See ``MadeBatches``."""
        return self._schedule.n_units

    def _start(self, batch: int) -> int:
        counts = self._schedule.counts(batch).tolist()
        return sum(each.n_rows_before(count) for each, count in zip(self._streams, counts, strict=True))

    def rows(self, batch: int) -> IntArray:
        """See ``MadeBatches``."""
        source = int(self._schedule.sources(batch, batch + 1)[0])
        return self._streams[source].batch(int(self._schedule.counts(batch)[source]))


def check_mixture(mixture: Mixture, batch_size: int, drop_last: bool) -> None:
    """Refuses what cannot be mixed.

    Args:
        mixture: how sources are mixed.
        batch_size: rows of a batch on one rank.
        drop_last: drop ragged ends.

    Raises:
        H5ValueError: a source has no rows, or no full batch where nothing else is kept.
    """
    for name, n_rows in zip(mixture.names, mixture.n_rows, strict=True):
        if not n_rows:
            raise H5ValueError(f"the source {name!r} has no rows that pass its filters. Change them, or leave it out.")
        if drop_last and mixture.in_batches and n_rows < batch_size:
            raise H5ValueError(
                f"the source {name!r} has {n_rows} rows, and batch_size is {batch_size}: drop_last leaves no batch of "
                "it. Make batch_size smaller, leave drop_last out, or mix rows (mix='rows')."
            )


# Schedules: which source each unit of an epoch comes from. Each reaches any unit at once.


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

    Where the quotas are a multiple of numbers that add up to less than ``MAX_UNITS``, these are dealt as one pattern,
    again and again, and no source is ever a whole unit off its share. Longer ones are cut into pieces, each with quotas
    of its own; a source may then be up to two units off, or some more where many sources are rare.

    Args:
        quotas: units of each source; after the last of them all begins again.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self.n_units = sum(quotas)
        self._quotas = list(quotas)
        self._length = max(1, self.n_units // max(1, gcd(*quotas)))
        self._is_cut = self._length > MAX_UNITS
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

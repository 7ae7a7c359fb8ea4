"""Recipes of epochs: each row once, rows by their weights, several sources.

``LengthRecipe`` (batches of similar length) is in ``batches``, ``ShardRows`` (rows of one rank) in ``shard_rows``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..types import IntArray, cached_property
from .batches import BatchSequence
from .mixture import EpochSchedule, Mixture
from .nodes import epoch_order
from .permutation import GAMMA, mix, stream
from .plan import (
    EpochRecipe,
    EpochSequence,
    OrderParameters,
    RowOrder,
    RowSequence,
    Segment,
    SourceOrder,
    order_rows,
)
from .shards import EvaluationBatches
from .weight_schedule import ShareIntegral
from .window import BlockTable

__all__ = [
    "BatchStream",
    "EachRowOnce",
    "MixedBatches",
    "MixtureRecipe",
    "RowWeights",
    "WeightedRecipe",
    "weighted_order",
]

SEEDS, PLACES = 11, 12  # purposes of the random streams

LISTED_TOGETHER = 1 << 8
"""Batches of a mixture whose sources are listed when one of them is needed: 0.1 ms."""


@dataclass(frozen=True, eq=False)
class EachRowOnce(EpochRecipe):
    """Epochs of each row once.

    Attributes:
        blocks: the rows.
    """

    blocks: BlockTable

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> RowSequence:
        """See ``EpochRecipe``."""
        rows = epoch_order(self.blocks, order, epoch, drop_last=drop_last)
        return RowSequence(rows, self.blocks.n_rows, epoch)


@dataclass(frozen=True, eq=False)
class RowWeights:
    """The expected frequency of each row.

    Attributes:
        weights: weight of each row, 0 or more, shape ``(n_rows,)``; only ratios matter.
        text: a description, for messages.

    Raises:
        H5ValueError: a weight is negative or not a number, or all weights are 0.
    """

    weights: npt.NDArray[np.float64]
    text: str

    def __post_init__(self) -> None:
        bad_rows = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)))
        if len(bad_rows):
            raise H5ValueError(
                f"rows weighted {self.text}: row {bad_rows[0]} has the weight {self.weights[bad_rows[0]]}, and "
                f"{len(bad_rows)} of {len(self.weights)} rows have an invalid weight. Write weights of 0 or more."
            )
        if not self.weights.any():
            raise H5ValueError(f"rows weighted {self.text}: all {len(self.weights)} weights are 0, so no row is drawn.")

    @property
    def recipe(self) -> str:
        """A short description of an epoch; different weights have different descriptions."""
        digest = hashlib.sha256(self.weights.tobytes()).hexdigest()[:16]
        return f"rows weighted {self.text} ({digest})"

    def of_rows(self, rows: IntArray) -> RowWeights:
        """Return the weights of some rows.

        Raises:
            H5ValueError: all of them are 0.
        """
        return RowWeights(self.weights[rows], self.text)

    @cached_property
    def ends(self) -> npt.NDArray[np.float64]:
        """Cumulative expected draws of the rows, in an epoch with one draw per row on average."""
        sums = np.cumsum(self.weights / self.weights.max())
        ends: npt.NDArray[np.float64] = sums * (len(sums) / sums[-1])
        ends[self.weights.nonzero()[0][-1] :] = len(sums)  # regardless of rounding
        return ends


class _Draws:
    """The draws of an epoch, in storage order: draw ``k`` falls somewhere in ``[k, k + 1)`` of the rows' ends.

    Args:
        weights: weights of the rows.
        word: a random word, which determines the draws.
    """

    def __init__(self, weights: RowWeights, word: np.uint64) -> None:
        self._ends, self._word = weights.ends, word
        self._n_bits = 52 - len(weights.ends).bit_length()  # so that rounding never reaches the next draw

    def before(self, rows: IntArray) -> IntArray:
        """Return the number of draws of all rows before the given rows."""
        starts = np.where(rows > 0, self._ends[rows - 1], 0.0)
        draws = starts.astype(np.int64)
        return draws + (self._places(draws) < starts)

    def rows(self, draws: IntArray) -> IntArray:
        """Return the row of each draw."""
        return np.searchsorted(self._ends, self._places(draws), side="right").astype(np.int64)

    def _places(self, draws: IntArray) -> npt.NDArray[np.float64]:
        words = mix(self._word + draws.astype(np.uint64) * GAMMA)
        places: npt.NDArray[np.float64] = (
            draws + (words >> np.uint64(64 - self._n_bits)).astype(np.float64) / 2**self._n_bits
        )
        return places


def weighted_order(
    blocks: BlockTable, weights: RowWeights, parameters: OrderParameters, epoch: int, place: int = 0
) -> RowOrder:
    """Return the sequence of an epoch's draws. Each repetition of a row adds ``n_rows`` to its number.

    Args:
        blocks: the rows.
        weights: weights of the rows.
        parameters: the settings of the order.
        epoch: from 0.
        place: distinguishes draws with the same parameters (``global`` alone).
    """
    word = np.asarray(stream(parameters.seed, epoch, PLACES, place).random_raw(1), dtype=np.uint64)[0]
    draws = _Draws(weights, word)
    order = order_rows(BlockTable.of_sizes(np.diff(draws.before(blocks.starts))), parameters, epoch, place)

    def numbers(start: int, stop: int) -> IntArray:
        draw_numbers = order(start, stop)
        rows = draws.rows(draw_numbers)
        return rows + (draw_numbers - draws.before(rows)) * blocks.n_rows

    return numbers


@dataclass(frozen=True, eq=False)
class WeightedRecipe(EpochRecipe):
    """Epochs of rows drawn by their weights.

    Attributes:
        weights: of the rows.
        blocks: the rows.
    """

    weights: RowWeights
    blocks: BlockTable

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return self.weights.recipe

    def n_units(self, order: OrderParameters, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``: draws, as many as there are rows."""
        return self.blocks.n_rows

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> RowSequence:
        """See ``EpochRecipe``."""
        return RowSequence(weighted_order(self.blocks, self.weights, order, epoch), order.n_units, epoch)


@dataclass(frozen=True, eq=False)
class MixtureRecipe(EpochRecipe):
    """Epochs of a mixture.

    If a row is repeated, a transform must draw new numbers, and a cache must not serve the earlier sample. So the row
    numbers of a mixture include the cycle: number ``cycle * n_rows + row`` is ``row`` of the dataset.

    Attributes:
        mixture: how sources are mixed.
        blocks: block table of each source, or of all rows for ``concat``.
    """

    mixture: Mixture
    blocks: Sequence[BlockTable]

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return self.mixture.text

    def n_units(self, order: OrderParameters, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``."""
        n_cycle = self.n_cycle(order, drop_last=drop_last)
        return self.mixture.n_units(n_cycle, world_size * (1 if self.in_batches else order.batch_size))

    @property
    def in_batches(self) -> bool:
        """Whether units are batches."""
        return self.mixture.in_batches

    def n_cycle(self, order: OrderParameters, *, drop_last: bool) -> list[int]:
        """Return the units in all of each source's rows: in one cycle of its stream.

        Args:
            order: the settings of the order.
            drop_last: drop ragged ends.
        """
        return self.mixture.n_cycle(order.batch_size, drop_last)

    @property
    def continues(self) -> bool:
        """See ``EpochRecipe``."""
        return self.mixture.weight_schedule is not None

    def n_units_of(self, segments: Sequence[Segment]) -> int:
        """See ``EpochRecipe``."""
        return sum(segment.n_batches * (1 if self.in_batches else segment.batch_size) for segment in segments)

    def expected_shares(
        self, order: OrderParameters, *, drop_last: bool, units: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """See ``EpochRecipe``."""
        shares = self.unit_shares(order, self.mixture.n_cycle(order.batch_size, drop_last), units)
        return dict(zip(self.mixture.names, shares, strict=True))

    def unit_shares(self, order: OrderParameters, n_cycle: Sequence[int], units: tuple[int, int]) -> list[float]:
        """Return the expected share of each source; see ``n_cycle`` and ``expected_shares``."""
        mixture = self.mixture
        if mixture.weight_schedule is None:
            return [float(share) for share in mixture.shares(n_cycle)]
        return ShareIntegral(mixture.weight_schedule, mixture.units_per_step(order.batch_size)).shares(*units)

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> EpochSequence:
        """See ``EpochRecipe``."""
        schedule = self.schedule(order, epoch, drop_last=drop_last)
        n_all = sum(table.n_rows for table in self.blocks)
        streams = [
            _Stream(table, first, n_all, parameters, drop_last)
            for table, (first, parameters) in zip(self.blocks, self.of_sources(order), strict=True)
        ]
        if self.in_batches:
            return BatchSequence(MixedBatches(schedule, streams), order.batch_size)
        return RowSequence(_MixedRows(schedule, streams), order.n_units, epoch)

    def schedule(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> EpochSchedule:
        """Return the source of each unit of an epoch; see ``sequence`` for the arguments."""
        return self.mixture.schedule(
            self.n_cycle(order, drop_last=drop_last),
            order.n_units,
            epoch,
            batch_size=order.batch_size,
            first_unit=order.first_unit,
        )

    def of_sources(self, order: OrderParameters) -> Iterator[tuple[int, OrderParameters]]:
        """Yield the first row of each source, and the settings of its order."""
        first = 0
        for number, (table, source_order) in enumerate(zip(self.blocks, order.sources, strict=True)):
            yield first, _parameters(order, source_order, number)
            first += table.n_rows


def _parameters(parameters: OrderParameters, order: SourceOrder, number: int) -> OrderParameters:
    """Return the parameters of one source. Sources of the same size must have different orders."""
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
    """A source's rows, in one order after the other; places and batches are counted since the start of the run.

    Args:
        blocks: the source's rows.
        first: number of its first row in the mixture.
        n_all: number of rows of the mixture.
        parameters: the settings of its order.
        drop_last: each cycle has only full batches, if units are batches.
    """

    def __init__(
        self, blocks: BlockTable, first: int, n_all: int, parameters: OrderParameters, drop_last: bool
    ) -> None:
        self._first, self._n_all, self._n_rows = first, n_all, blocks.n_rows
        n_batched = blocks.n_rows // parameters.batch_size * parameters.batch_size if drop_last else blocks.n_rows
        self._batches = EvaluationBatches(n_batched, parameters.batch_size, 1, 0)  # of a cycle
        self._order = lru_cache(maxsize=2)(lambda cycle: order_rows(blocks, parameters, cycle))

    def rows(self, start: int, stop: int) -> IntArray:
        """Return the rows at the given places."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            cycle, low = divmod(start, self._n_rows)
            high = min(self._n_rows, low + stop - start)
            parts.append(self._rows_of_cycle(cycle, low, high))
            start += high - low
        return parts[-1] if len(parts) <= 2 else np.concatenate(parts)

    def batch(self, number: int) -> IntArray:
        """See ``BatchStream``."""
        cycle, batch = divmod(number, self._batches.n_steps)
        return self._rows_of_cycle(cycle, *self._batches.bounds(batch))

    def n_rows_before(self, number: int) -> int:
        """See ``BatchStream``."""
        cycle, batch = divmod(number, self._batches.n_steps)
        return cycle * self._batches.n_rows + (self._batches.bounds(batch)[0] if batch else 0)

    def _rows_of_cycle(self, cycle: int, low: int, high: int) -> IntArray:
        order: RowOrder = self._order(cycle)
        return order(low, high) + (cycle * self._n_all + self._first)


class _MixedRows:
    """An order of rows with the source of each place from a schedule."""

    def __init__(self, schedule: EpochSchedule, streams: Sequence[_Stream]) -> None:
        self._schedule, self._streams = schedule, streams

    def __call__(self, start: int, stop: int) -> IntArray:
        counts = self._schedule.counts(start)
        if len(self._streams) == 1:
            return self._streams[0].rows(int(counts[0]), int(counts[0]) + stop - start)
        sources = self._schedule.sources(start, stop)
        rows = np.empty(stop - start, dtype=np.int64)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            first = int(counts[source])
            rows[places] = self._streams[source].rows(first, first + len(places))
        return rows


class BatchStream(Protocol):
    """A source's endless batches, counted since the start of the run."""

    def batch(self, number: int) -> IntArray:
        """Return the rows of a batch."""
        ...

    def n_rows_before(self, number: int) -> int:
        """Return the number of rows in all batches before one."""
        ...


class MixedBatches:
    """Batches of one source each.

    Args:
        schedule: the source of each batch.
        streams: the batches of each source.
    """

    def __init__(self, schedule: EpochSchedule, streams: Sequence[BatchStream]) -> None:
        self._schedule, self._streams = schedule, streams
        self.n_batches = schedule.n_units
        self._turns = lru_cache(maxsize=4)(self._list_turns)
        self._n_rows_before = lru_cache(maxsize=64)(self._count_rows_before)  # called several times per batch

    def start(self, batch: int) -> int:
        """See ``MadeBatches``."""
        return self._n_rows_before(batch) - self._n_rows_before(0)

    def rows(self, batch: int) -> IntArray:
        """See ``MadeBatches``."""
        part, place = divmod(batch, LISTED_TOGETHER)
        turns = self._turns(part)
        source = turns.sources[place]
        return self._streams[source].batch(turns.counts[place][source])

    def _count_rows_before(self, batch: int) -> int:
        part, place = divmod(batch, LISTED_TOGETHER)
        counts = self._turns(part).counts[place]
        return sum(stream_.n_rows_before(count) for stream_, count in zip(self._streams, counts, strict=True))

    def _list_turns(self, part: int) -> _Turns:
        start = part * LISTED_TOGETHER
        sources = self._schedule.sources(start, min(start + LISTED_TOGETHER, self.n_batches))
        n_had = np.zeros((len(sources) + 1, len(self._streams)), dtype=np.int64)
        n_had[np.arange(1, len(sources) + 1), sources] = 1
        return _Turns(sources.tolist(), (self._schedule.counts(start) + np.cumsum(n_had, axis=0)).tolist())


class _Turns(NamedTuple):
    """The sources of consecutive batches.

    Attributes:
        sources: source of each batch.
        counts: number of batches of each source before each batch, and after the last one.
    """

    sources: list[int]
    counts: list[list[int]]

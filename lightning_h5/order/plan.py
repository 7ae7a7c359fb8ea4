"""The batches of an epoch: one sequence, the same on every rank, as a pure function of a few numbers.

Rank ``r`` of ``W`` gets batch ``t * W + r`` at step ``t``. The consumed batches are therefore always a prefix
of the sequence, and the position of a run is a list of segments ``(batch_size, world_size, batches)``.

An ``EpochRecipe`` makes the sequence of each epoch: rows to be cut into batches (``RowSequence``), or complete
batches (``batches.BatchSequence``). Samplers and loaders treat both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count, repeat
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from ..errors import H5ValueError
from ..types import BatchToken, IntArray, cached_property
from .permutation import permutation
from .shards import EvaluationBatches, RankShard, balanced_contiguous_shard
from .window import BlockTable, WindowOrder

__all__ = [
    "PLAN_VERSION",
    "EpochPlan",
    "EpochRecipe",
    "EpochSequence",
    "Mode",
    "OrderParameters",
    "RowOrder",
    "RowSequence",
    "Segment",
    "SourceOrder",
    "TrainBatches",
    "evaluation_plan",
    "order_rows",
]

STEPS_TOGETHER = 64
"""Maximum number of steps whose rows are looked up together, to share the time of Python among them."""

PLAN_VERSION = 1
"""Part of every saved state: raised when the order of any mode changes."""

Mode = Literal["global", "chunks", "none"]
RowOrder: TypeAlias = Callable[[int, int], IntArray]


class SourceOrder(NamedTuple):
    """The order of a source's rows; see ``OrderParameters``."""

    mode: Mode
    streams: int = 1
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class OrderParameters:
    """The settings that, with the epoch and the block table, decide the order of rows.

    Attributes:
        mode: ``global`` (one permutation of all rows), ``chunks`` (blocks mixed a window at a time) or
            ``none`` (storage order).
        seed: seed of the run.
        batch_size: rows of a batch when the epoch began; streams take turns by batches.
        streams: independent streams of blocks (``chunks``).
        window: blocks of a stream that are mixed at a time (``chunks``).
        version: of the orders' definition.
        recipe: how an epoch visits rows (see ``EpochRecipe``); "" for each row once.
        n_units: batches or rows of the epoch when it began; 0 for each row once.
        first_unit: batches or rows of all earlier epochs, for a recipe that ``continues``; None if each earlier epoch
            had the same number.
        sources: the order of each source of a mixture.
        nodes: nodes that blocks are dealt to once per run (see ``nodes.NodeOrder``); 0 deals none.
        world_size: number of ranks when the epoch began, if blocks are dealt to nodes; otherwise 0.
    """

    mode: Mode
    seed: int = 0
    batch_size: int = 1
    streams: int = 1
    window: int = 0
    version: int = PLAN_VERSION
    recipe: str = ""
    n_units: int = 0
    first_unit: int | None = None
    sources: tuple[SourceOrder, ...] = ()
    nodes: int = 0
    world_size: int = 0


class Segment(NamedTuple):
    """A stretch of an epoch that was consumed under the same settings.

    Attributes:
        batch_size: rows of a batch on one rank.
        world_size: number of ranks.
        n_batches: batches consumed, over all ranks.
    """

    batch_size: int
    world_size: int
    n_batches: int


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The batches of one rank in the rest of an epoch.

    Attributes:
        n_steps: batches that are left for this rank.
        bounds: first position in the epoch's sequence, and the one after the last, of a step's rows; steps count from
            0 at the first that is left.
        rows: indices into the dataset for a step, shape ``(batch,)``.
        order: from positions to rows, if the rows of each step are those at its bounds; None otherwise.
    """

    n_steps: int
    bounds: Callable[[int], tuple[int, int]]
    rows: Callable[[int], IntArray]
    order: RowOrder | None = None

    def tokens(
        self, epoch: int, first_step: int, *, first_position: int, samples: bool, seed: int
    ) -> Iterator[BatchToken]:
        """Return the tokens of all steps, which the dataset reads.

        Args:
            epoch: from 0.
            first_step: steps of the epoch that are done.
            first_position: where the sequence begins in the sequence of all ranks.
            samples: ask for samples instead of a batch.
            seed: of random draws.
        """
        return chain.from_iterable(self._tokens(epoch, first_step, first_position, samples, seed))

    def _tokens(
        self, epoch: int, first_step: int, first_position: int, samples: bool, seed: int
    ) -> Iterator[Iterator[BatchToken]]:
        """Yield tokens of several steps: rows that follow each other are looked up together.

        The tokens themselves are made without Python's bytecode.
        """
        step, n_together = 0, 1
        while step < self.n_steps:
            bounds = [self.bounds(at) for at in range(step, min(step + n_together, self.n_steps))]
            starts, stops = zip(*bounds, strict=True)
            first, last = starts[0], stops[-1]
            rows: Iterable[IntArray]
            if self.order is None or starts[1:] != stops[:-1]:
                rows = map(self.rows, range(step, step + len(bounds)))
            else:
                run = self.order(first, last)
                rows = [run[start - first : stop - first] for start, stop in bounds]
            positions = [first_position + start for start in starts]
            values = repeat(epoch), count(first_step + step), rows, repeat(samples), repeat(seed), positions
            yield map(_new_token, zip(*values, strict=False))
            step += len(bounds)
            n_together = min(STEPS_TOGETHER, 2 * n_together)


_new_token: Callable[[Iterable[Any]], BatchToken] = partial(tuple.__new__, BatchToken)
"""Like ``BatchToken._make``, without bytecode."""


def order_rows(blocks: BlockTable, parameters: OrderParameters, epoch: int, place: int = 0) -> RowOrder:
    """Return the sequence of an epoch's rows, as a function from positions ``[start, stop)`` to row indices.

    Args:
        blocks: the rows.
        parameters: the settings of the order.
        epoch: which epoch.
        place: distinguishes orders with the same parameters (``global`` alone).

    Raises:
        H5ValueError: the order belongs to another version of this package, or ``window`` has a number below 1.
    """
    if parameters.version != PLAN_VERSION:
        raise H5ValueError(
            f"an order of version {parameters.version} was requested; this package has version {PLAN_VERSION}. Install "
            "the version of lightning_h5 that began the run, or start a new run."
        )
    if parameters.mode == "none":
        return lambda start, stop: np.arange(start, stop, dtype=np.int64)
    if parameters.mode == "global":
        # Drawn on first access to rows: counting steps or rows needs no permutation.
        lazy_permutation = cache(lambda: permutation(blocks.n_rows, parameters.seed, epoch, place=place))
        return lambda start, stop: lazy_permutation()(start, stop)
    return WindowOrder(
        blocks=blocks,
        seed=parameters.seed,
        epoch=epoch,
        batch_size=parameters.batch_size,
        streams=parameters.streams,
        window=parameters.window,
    )


@dataclass(frozen=True)
class TrainBatches:
    """One sequence of rows cut into rounds of ``world_size`` batches; rank ``r`` gets batch ``t * world_size + r``.

    Whole rounds come first. A ragged end is dropped with ``drop_last``. Otherwise the last two rounds are cut again
    into batches whose sizes differ by at most one row, so that no row is dropped or repeated and no batch is tiny.
    If that is impossible (``batch_size`` 1 and a remainder), the remainder is left out: the sequence's end in
    epoch 0, the rows before this end in epoch 1, and so on to the sequence's start, and again from its end.

    Attributes:
        n_rows: length of the sequence.
        batch_size: rows of a batch on one rank.
        world_size: number of ranks.
        drop_last: drop the ragged end.
        epoch: decides which rows are left out.
        consumed: rows of the epoch that came before this sequence, so that a resumed run leaves out the same rows.
    """

    n_rows: int
    batch_size: int
    world_size: int
    drop_last: bool = False
    epoch: int = 0
    consumed: int = 0

    @cached_property
    def n_steps(self) -> int:
        """Number of steps of every rank."""
        full, rest = divmod(self.n_rows, self.batch_size * self.world_size)
        if not rest or self.drop_last or (self.batch_size == 1 and full):
            return full
        if not full:
            return 1 if self.n_rows >= self.world_size else 0
        return full + 1

    @property
    def n_left_out(self) -> int:
        """Rows of the sequence that are in no batch."""
        full, rest = divmod(self.n_rows, self.batch_size * self.world_size)
        return rest if self.n_steps == full else 0

    @property
    def left_out(self) -> tuple[int, int]:
        """Position in the sequence of the first row that is in no batch, and the one after the last."""
        first = min(self._first_left_out, self.n_rows - self.n_left_out)
        return first, first + self.n_left_out

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the position in the sequence of the first row of a batch, and of the one after the last."""
        if batch < self._n_plain:
            return batch * self.batch_size, (batch + 1) * self.batch_size
        return self.start(batch), self.stop(batch)

    def start(self, batch: int) -> int:
        """Return the position in the sequence of the first row of a batch (0 to ``n_steps * world_size``)."""
        return self._skip_left_out(self.n_before(batch))

    def stop(self, batch: int) -> int:
        """Return the position after the last row of a batch; 0 for batch -1."""
        return self._skip_left_out(self.n_before(batch + 1) - 1) + 1 if batch >= 0 else 0

    @cached_property
    def n_even_rounds(self) -> int:
        """Rounds of full batches, before the ragged end."""
        full, rest = divmod(self.n_rows, self.batch_size * self.world_size)
        return self.n_steps if not rest or self.n_steps == full else max(0, full - 1)

    @cached_property
    def _n_plain(self) -> int:
        """Full batches at the sequence's start, before any row that is left out."""
        return min(self.n_even_rounds * self.world_size, self._first_left_out // self.batch_size)

    @cached_property
    def _first_left_out(self) -> int:
        if self.drop_last or not self.n_left_out:
            return self.n_rows
        last_place = self.consumed + self.n_rows - self.n_left_out
        return max(0, (last_place - self.epoch * self.n_left_out) % (last_place + 1) - self.consumed)

    def n_before(self, batch: int) -> int:
        """Return the rows in the batches before a batch (0 to ``n_steps * world_size``)."""
        n_even = self.n_even_rounds * self.world_size
        if batch <= n_even:
            return batch * self.batch_size
        n_batches = self.n_steps * self.world_size - n_even
        n_rows = self.n_rows - n_even * self.batch_size
        return (
            n_even * self.batch_size
            + balanced_contiguous_shard(n_rows, n_batches, min(batch - n_even, n_batches) - 1)[1]
        )

    def _skip_left_out(self, position: int) -> int:
        """Return the position in the sequence of a position among the rows in batches."""
        return position + self.n_left_out if position >= self._first_left_out else position


def evaluation_plan(batches: EvaluationBatches, first: int = 0) -> EpochPlan:
    """Return the plan of a rank's shard in an evaluation.

    Args:
        batches: of the shard.
        first: row that is index 0 of the dataset.
    """

    def rows(step: int) -> IntArray:
        start, stop = batches.bounds(step)
        return np.arange(start - first, stop - first, dtype=np.int64)

    return EpochPlan(batches.n_steps, batches.bounds, rows)


class EpochSequence(Protocol):
    """An epoch's sequence."""

    @property
    def n_rows(self) -> int:
        """Number of rows in the sequence, including repetitions."""
        ...

    def n_consumed(self, segments: Sequence[Segment], *, drop_last: bool) -> int:
        """Return the number of rows that the segments have consumed.

        Raises:
            H5ValueError: a segment has more batches than were left.
        """
        ...

    def plan(
        self, segments: Sequence[Segment], *, batch_size: int, world_size: int, rank: int, drop_last: bool
    ) -> EpochPlan:
        """Return a rank's share of the rows that the segments have left."""
        ...


class EpochRecipe:
    """How epochs visit rows: each once, by their weights, in batches of similar length, or from several sources."""

    @property
    def text(self) -> str:
        """The recipe in words, which a saved position depends on; "" for each row once."""
        return ""

    def n_units(self, order: OrderParameters, world_size: int, *, drop_last: bool) -> int:
        """Return the batches, or rows, of an epoch that begins now; 0 if the number of rows decides it.

        Args:
            order: the settings of the order.
            world_size: number of ranks.
            drop_last: drop ragged ends.
        """
        return 0

    @property
    def continues(self) -> bool:
        """Whether an epoch depends on the units, and therefore the settings, of all earlier epochs."""
        return False

    def n_units_of(self, segments: Sequence[Segment]) -> int:
        """Return the batches, or rows, that segments of an epoch have consumed; 0 if nothing depends on it."""
        return 0

    def expected_shares(
        self, order: OrderParameters, *, drop_last: bool, units: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Return the intended share of rows of each source, by name; empty without sources.

        Args:
            order: the settings of the order.
            drop_last: drop ragged ends.
            units: the first unit of the run in which the shares apply, and the unit after the last.
        """
        return {}

    def n_batches(self, order: OrderParameters, world_size: int) -> tuple[int, int]:
        """Return the batches of an epoch, and how many of them are left out, if batches have a limited cost."""
        return 0, 0

    def mean_rows(self, batch_size: int) -> int:
        """Return the number of rows of a batch on average, about."""
        return batch_size

    def evaluation(
        self, n_rows: int, batch_size: int, world_size: int, rank: int, ends: IntArray | None
    ) -> EvaluationBatches:
        """Return the batches of a rank in an evaluation; see ``EvaluationBatches`` for the arguments."""
        return EvaluationBatches(n_rows, batch_size, world_size, rank, ends)

    @property
    def held_shard(self) -> RankShard | None:
        """The rows that the rank holds, if epochs have its batches alone."""
        return None

    @property
    def first_position(self) -> int:
        """Place in the epoch's sequence, over all ranks, that a plan counts from."""
        return 0

    def numbers(self, rows: IntArray, epoch: int) -> IntArray:
        """Return the numbers, among the rows of all ranks, of rows as a plan of an epoch counts them."""
        return rows

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> EpochSequence:
        """Return the sequence of an epoch.

        Args:
            order: the settings of the order.
            epoch: from 0.
            drop_last: drop ragged ends.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RowSequence:
    """Rows in an order, cut into batches from wherever the consumed part ends.

    Attributes:
        order: from positions to rows.
        n_rows: length of the sequence.
        epoch: which epoch it is.
    """

    order: RowOrder
    n_rows: int
    epoch: int

    def n_consumed(self, segments: Sequence[Segment], *, drop_last: bool) -> int:
        """See ``EpochSequence``. Each segment is a part of the rows that earlier ones left."""
        n_done = 0
        for segment in segments:
            batches = self._batches(segment.batch_size, segment.world_size, drop_last, n_done)
            if segment.n_batches > batches.n_steps * batches.world_size:
                raise H5ValueError(
                    f"{segment} was requested, but {self.n_rows - n_done} rows are left of {self.n_rows}. Request "
                    "fewer batches."
                )
            n_done += batches.stop(segment.n_batches - 1)
        return n_done

    def plan(
        self, segments: Sequence[Segment], *, batch_size: int, world_size: int, rank: int, drop_last: bool
    ) -> EpochPlan:
        """See ``EpochSequence``."""
        n_done = self.n_consumed(segments, drop_last=drop_last)
        batches = self._batches(batch_size, world_size, drop_last, n_done)

        def bounds(step: int) -> tuple[int, int]:
            start, stop = batches.bounds(step * world_size + rank)
            return n_done + start, n_done + stop

        return EpochPlan(batches.n_steps, bounds, lambda step: self.order(*bounds(step)), self.order)

    def _batches(self, batch_size: int, world_size: int, drop_last: bool, n_done: int) -> TrainBatches:
        return TrainBatches(self.n_rows - n_done, batch_size, world_size, drop_last, self.epoch, n_done)

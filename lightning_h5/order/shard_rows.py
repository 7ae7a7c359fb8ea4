"""Epochs of rows that ranks hold: each rank reads its own rows, in the same number of steps.

The epoch is divided like one sequence over all ranks: into rounds with a batch for each rank; the last two rounds share
the rest. A rank's rows in a round depend on the remaining rows of all ranks, since shards differ by at most one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray
from .plan import EpochPlan, EpochRecipe, OrderParameters, RowOrder, Segment, TrainBatches, order_rows
from .recipes import RowWeights, weighted_order
from .shards import RankShard, as_array, balanced_contiguous_shard, rows_at
from .window import BlockTable

__all__ = ["ShardRows", "ShardSequence"]


@dataclass(frozen=True, eq=False)
class ShardRows(EpochRecipe):
    """Epochs of the rows of one rank's shard, in the rank's own order.

    Attributes:
        shard: the rows that the rank holds.
        weights: weights of the rows of all ranks; each rank draws from its own rows. None for each row once.
    """

    shard: RankShard
    weights: RowWeights | None = None

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return "" if self.weights is None else self.weights.recipe

    def n_units(self, order: OrderParameters, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``: draws of all ranks; 0 without weights."""
        return 0 if self.weights is None else self.shard.n_rows

    @property
    def held_shard(self) -> RankShard:
        """See ``EpochRecipe``."""
        return self.shard

    @property
    def first_position(self) -> int:
        """See ``EpochRecipe``: places count over all ranks, one after the other."""
        return balanced_contiguous_shard(self.shard.n_rows, self.shard.world_size, self.shard.rank)[0]

    def numbers(self, rows: IntArray, epoch: int) -> IntArray:
        """See ``EpochRecipe``. A row that is drawn again has a number larger by the rows of all ranks."""
        times, held = np.divmod(rows, self.shard.n_held)
        numbers: IntArray = rows_at(self.shard.rows(self.shard.draw(epoch)), held) + times * self.shard.n_rows
        return numbers

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> ShardSequence:
        """See ``EpochRecipe``."""
        shard, place = self.shard, 1 + self.shard.rank
        blocks = BlockTable.of_sizes([shard.n_held])
        if self.weights is None:
            return ShardSequence(order_rows(blocks, order, epoch, place), shard, epoch)
        weights = self.weights.of_rows(as_array(shard.rows(shard.draw(epoch))))
        return ShardSequence(weighted_order(blocks, weights, order, epoch, place), shard, epoch)


@dataclass(frozen=True, eq=False)
class ShardSequence:
    """The rows of a rank's shard in an order, cut so that all ranks take equally many steps.

    Positions count rows over all ranks. With ``batch_size`` 1 and a remainder each larger shard leaves out one row: the
    sequence's end in epoch 0, the row before that in epoch 1, and so on.

    Attributes:
        order: from positions to rows of the shard.
        shard: the rows that the rank holds.
        epoch: which epoch it is.
    """

    order: RowOrder
    shard: RankShard
    epoch: int

    @property
    def n_rows(self) -> int:
        """See ``EpochSequence``: rows of all ranks."""
        return self.shard.n_rows

    def n_consumed(self, segments: Sequence[Segment], *, drop_last: bool) -> int:
        """See ``EpochSequence``: rows of all ranks.

        A segment of one rank counts the batches of each rank, one of all ranks single rows (``ShardSampler.merged``).
        """
        n_done = 0
        for segment in segments:
            batches = self._batches(segment.batch_size, drop_last, n_done)
            n_steps = segment.n_batches
            if segment.world_size > 1:
                n_done += segment.n_batches
                n_steps = 0
            if n_steps > batches.n_steps or n_done > self.n_rows:
                raise H5ValueError(
                    f"{segment} was requested, but {max(0, self.n_rows - n_done)} rows are left of {self.n_rows}. "
                    "Request fewer batches."
                )
            n_done = self._n_after(batches, n_done, n_steps)
        return n_done

    def plan(
        self, segments: Sequence[Segment], *, batch_size: int, world_size: int, rank: int, drop_last: bool
    ) -> EpochPlan:
        """See ``EpochSequence``; the ranks are the holders of the shards."""
        n_done = self.n_consumed(segments, drop_last=drop_last)
        batches = self._batches(batch_size, drop_last, n_done)
        first = self._n_own(n_done)
        # Rounds of full batches, before any row that is left out: most of an epoch.
        n_plain = batches.n_even_rounds
        if batches.n_left_out and not batches.drop_last:
            n_plain = min(n_plain, self._left_out(n_done))

        def bounds(step: int) -> tuple[int, int]:
            if step < n_plain:
                return first + step * batch_size, first + (step + 1) * batch_size
            stop = self._n_own(self._n_after(batches, n_done, step + 1))
            # A row that is left out lies before the batch.
            return max(self._n_own(self._n_after(batches, n_done, step)), stop - batch_size), stop

        return EpochPlan(batches.n_steps, bounds, lambda step: self.order(*bounds(step)), self.order)

    def _batches(self, batch_size: int, drop_last: bool, n_done: int) -> TrainBatches:
        """Return how the rows that are left over all ranks are cut into batches."""
        return TrainBatches(self.n_rows - n_done, batch_size, self.shard.world_size, drop_last)

    def _n_after(self, batches: TrainBatches, n_done: int, n_steps: int) -> int:
        """Return the number of rows of all ranks that are consumed, or left out, after some steps."""
        n_consumed = n_done + batches.n_before(n_steps * self.shard.world_size)
        if batches.n_left_out and not batches.drop_last and n_steps > self._left_out(n_done):
            n_consumed += batches.n_left_out
        return n_consumed

    def _left_out(self, n_done: int) -> int:
        """Return the step, from a position, before which the larger shards leave out a row."""
        largest = balanced_contiguous_shard(self.n_rows, self.shard.world_size, 0)[1]
        return max(0, (largest - 1 - self.epoch) % largest - (largest - self._n_left(n_done, 0)))

    def _n_own(self, n_done: int) -> int:
        """Return this rank's share of the consumed rows."""
        return self.shard.n_held - self._n_left(n_done, self.shard.rank)

    def _n_left(self, n_done: int, rank: int) -> int:
        start, stop = balanced_contiguous_shard(self.n_rows - n_done, self.shard.world_size, rank)
        return stop - start

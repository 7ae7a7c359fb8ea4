"""The batches of an evaluation: a contiguous shard for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..types import IntArray
from .plan import EpochPlan
from .shards import balanced_contiguous_shard, contiguous_shard

__all__ = ["EvaluationBatches"]


@dataclass(frozen=True)
class EvaluationBatches:
    """A contiguous shard for each rank, cut into the same number of batches on every rank; every row exactly once.

    With ``batch_size`` 1 and a remainder some ranks get one batch more: there is no row left to make one of. A rank has
    fewer batches if shards end where segments do, and its own has fewer rows than another one has batches.

    Attributes:
        n_rows: rows of all ranks.
        batch_size: most rows of a batch.
        world_size: number of ranks.
        rank: this rank.
        ends: rows at which shards may end (see ``contiguous_shard``); None for all.
    """

    n_rows: int
    batch_size: int
    world_size: int
    rank: int
    ends: IntArray | None = None

    @property
    def shard(self) -> tuple[int, int]:
        """First row, and the row after the last, of this rank."""
        return contiguous_shard(self.n_rows, self.world_size, self.rank, self.ends)

    @cached_property
    def n_steps(self) -> int:
        """Batches of this rank."""
        first, last = self.shard
        largest = -(-self.n_rows // self.world_size)
        if self.ends is not None:
            each = (contiguous_shard(self.n_rows, self.world_size, rank, self.ends) for rank in range(self.world_size))
            largest = max(stop - start for start, stop in each)
        return min(-(-largest // self.batch_size), last - first)

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first row of a batch, and the row after the last: full ones first, the last two share the rest.

        There are fewer full ones if otherwise some would be empty.
        """
        first, last = self.shard
        full = max(0, min(self.n_steps - 2, (last - first - self.n_steps) // max(1, self.batch_size - 1)))
        if step < full:
            return first + step * self.batch_size, first + (step + 1) * self.batch_size
        start = first + full * self.batch_size
        low, high = balanced_contiguous_shard(last - start, self.n_steps - full, step - full)
        return start + low, start + high

    def plan(self, first: int = 0) -> EpochPlan:
        """Return this rank's plan: its shard in storage order.

        Args:
            first: row that is index 0 of the dataset.
        """

        def rows(step: int) -> IntArray:
            start, stop = self.bounds(step)
            return np.arange(start - first, stop - first, dtype=np.int64)

        return EpochPlan(self.n_steps, self.bounds, rows)

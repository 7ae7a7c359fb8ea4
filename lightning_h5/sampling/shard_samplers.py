"""Torch samplers of ranks that hold a shard of the rows each, and take batches from it alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from ..errors import H5ValueError
from ..types import IntArray
from .blocks import BlockTable
from .cuts import EvaluationCut
from .permutation import permutation
from .plan import EvaluationPlan, OrderParameters, order_rows
from .replica import Replica, resolve_replica
from .samplers import EpochKeeper, PlanSampler
from .sequences import RowSequence
from .shards import RankShard

__all__ = ["EpochShuffleSampler", "ShardSampler"]

EPOCH_SHUFFLE = 9  # purpose of the random stream


class ShardSampler(PlanSampler):
    """Yields one ``BatchToken`` a step of rows that this rank holds, counted from 0 in its shard.

    All ranks take equally many steps. A position is one within each rank's own order, so it holds for the same number
    of ranks alone.

    Args:
        shard: what this rank holds.
        parameters: what decides the order: the seed, and whether rows are shuffled.
        batch_size: rows of a batch on one rank.
        drop_last: drop the ragged end of an epoch (training only).
        evaluation: all rows of the shard in storage order, instead of the training plan.
        samples: ask for lists of samples instead of collated batches.
        keeper: who keeps the epoch, if anybody.
        rotates: other rows sit out each epoch; else all epochs have the same.
        is_given: somebody said which replica this is. Else it is looked at when iteration starts: rows that are held
            cannot become another rank's.

    Raises:
        H5ValueError: when iteration starts, where the shard is not this rank's.
    """

    def __init__(
        self,
        shard: RankShard,
        parameters: OrderParameters,
        *,
        batch_size: int,
        drop_last: bool = False,
        evaluation: bool = False,
        samples: bool = False,
        keeper: EpochKeeper | None = None,
        rotates: bool = True,
        is_given: bool = True,
    ) -> None:
        self.shard, self._rotates, self._is_given = shard, rotates, is_given
        super().__init__(
            BlockTable.of_sizes([shard.n_trained]),
            parameters,
            batch_size=batch_size,
            drop_last=drop_last,
            evaluation=evaluation,
            rank=0,  # of one: what others hold is none of its business
            world_size=1,
            samples=samples,
            keeper=keeper,
        )

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.shard.n_rows

    @property
    def shards(self) -> dict[str, Any]:
        """What a position in a shard depends on besides, as plain values."""
        shard = self.shard
        return {"mode": shard.mode, "world_size": shard.world_size, "reshard_every": shard.reshard_every}

    def starting_epoch(self) -> int:
        """See ``PlanSampler.starting_epoch``."""
        now, held = resolve_replica(), Replica(self.shard.rank, self.shard.world_size)
        if not self._is_given and now != held:
            raise H5ValueError(
                f"batches were asked for by rank {now.rank} of {now.world_size}, and the rows were loaded for rank "
                f"{held.rank} of {held.world_size}. Pass the data module to the Trainer (datamodule=), which sets it "
                "up once there are ranks; or pass rank and world_size to it."
            )
        return super().starting_epoch()

    @property
    def first_position(self) -> int:
        """Places in the epoch's sequence count over all ranks, one after the other."""
        return 0 if self.evaluation else self.shard.rank * self.blocks.n_rows

    def evaluation_plan(self) -> EvaluationPlan:
        """This rank's plan of every evaluation: of all rows that it holds."""
        shard = self.shard
        cut = EvaluationCut(shard.n_rows, self.batch_size, shard.world_size, shard.rank)
        return EvaluationPlan(cut, first=cut.shard[0])

    def sequence(self, epoch: int, order: OrderParameters) -> RowSequence:
        """The rows of this shard, in an order of this rank's own."""
        rows = order_rows(self.blocks, order, epoch, place=1 + self.shard.rank)
        absent = self.shard.sits_out(epoch if self._rotates else 0)
        return RowSequence(
            rows if absent is None else lambda start, stop: _pass_over(rows(start, stop), absent),
            self.blocks.n_rows,
            epoch,
        )


class EpochShuffleSampler(DistributedSampler[Any]):
    """Indices of a dataset that holds one rank's rows, in an order of their own for each epoch and rank.

    For ``DataLoader(dataset, sampler=...)``; the data modules of this package have a sampler of theirs. By type it is a
    ``DistributedSampler``, so that Lightning does not shard the rank's rows once more, and calls ``set_epoch``.

    Args:
        data_len: rows of this rank, ``len(dataset)``.
        seed: of the order. Neighbouring seeds, epochs and ranks have orders that have nothing in common.
        shuffle: False gives the rows in storage order.
        num_samples: rows that an epoch takes, where ranks hold different numbers of them and must make equally many
            steps: pass ``dataset.rows_on_each_rank``. Those that sit out are others each epoch. None takes all.

    Raises:
        H5ValueError: a number makes no sense.
    """

    # The parent's constructor wants a sized dataset, and a rank at once.
    def __init__(  # pylint: disable=super-init-not-called
        self, data_len: int, seed: int = 0, shuffle: bool = True, *, num_samples: int | None = None
    ) -> None:
        if data_len < 0 or not 0 <= (data_len if num_samples is None else num_samples) <= data_len:
            raise H5ValueError(
                f"EpochShuffleSampler(data_len={data_len}, num_samples={num_samples}) was asked for. Pass the number "
                "of rows of this rank, and at most as many for an epoch."
            )
        self.data_len, self.seed, self.shuffle = data_len, seed, shuffle
        self.num_samples = data_len if num_samples is None else num_samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch for the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        n_absent = self.data_len - self.num_samples
        rows = np.arange(self.data_len)
        if n_absent:
            rows = np.sort(np.roll(rows, -self.epoch * n_absent)[n_absent:])
        if self.shuffle:
            place = 1 + resolve_replica().rank
            rows = rows[permutation(len(rows), self.seed, self.epoch, EPOCH_SHUFFLE, place)(0, len(rows))]
        return iter(rows.tolist())

    def __len__(self) -> int:
        return self.num_samples


def _pass_over(rows: IntArray, absent: int) -> IntArray:
    """From numbers among the others to numbers among all."""
    return rows + (rows >= absent)

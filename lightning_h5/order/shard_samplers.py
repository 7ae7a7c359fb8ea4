"""Samplers over the rows that one rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from ..errors import H5ValueError
from .epoch import ShardRows
from .permutation import permutation
from .plan import EpochPlan, EvaluationBatches, OrderParameters
from .samplers import EpochSource, PlanSampler, Replica, resolve_replica
from .shards import RankShard
from .window import BlockTable

__all__ = ["EpochShuffleSampler", "ShardSampler"]

EPOCH_SHUFFLE = 9  # purpose of the random stream


class ShardSampler(PlanSampler):
    """Yields one ``BatchToken`` per step of rows that this rank holds, counted from 0 in its shard.

    All ranks take equally many steps. A position is one within each rank's own order, so it holds for the same number
    of ranks alone.

    Args:
        shard: what this rank holds.
        parameters: what decides the order: the seed, and whether rows are shuffled.
        batch_size: rows of a batch on one rank.
        drop_last: drop the ragged end of an epoch (training only).
        evaluation: all rows of the shard in storage order, instead of the training plan.
        samples: ask for lists of samples instead of collated batches.
        epoch_source: see ``PlanSampler``.
        rotates: other rows are left out each epoch. If False, all epochs have the same.
        is_given: the caller named the replica. If False, it is checked when iteration starts: rows that are held
            cannot become another rank's.

    Raises:
        H5ValueError: when iteration starts, if the shard is not this rank's.
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
        epoch_source: EpochSource | None = None,
        rotates: bool = True,
        is_given: bool = True,
    ) -> None:
        self.shard, self._is_given = shard, is_given
        blocks = BlockTable.of_sizes([shard.n_trained])
        super().__init__(
            blocks,
            parameters,
            batch_size=batch_size,
            drop_last=drop_last,
            evaluation=evaluation,
            rank=0,  # of one: other ranks' rows do not matter to it
            world_size=1,
            samples=samples,
            epoch_source=epoch_source,
            recipe=ShardRows(blocks, shard, rotates),
        )

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.shard.n_rows

    @property
    def rank(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of the replica that holds these rows, from 0."""
        return self.shard.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of replicas that hold a shard each."""
        return self.shard.world_size

    @property
    def shards(self) -> dict[str, Any]:
        """What else a position in a shard depends on, as plain values."""
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

    def _evaluation_plan(self) -> EpochPlan:
        shard = self.shard
        batches = EvaluationBatches(shard.n_rows, self.batch_size, shard.world_size, shard.rank)
        return batches.plan(first=batches.shard[0])


class EpochShuffleSampler(DistributedSampler[Any]):
    """Yields indices of a dataset that holds one rank's rows, in another order for each epoch and rank.

    For ``DataLoader(dataset, sampler=...)``; the data modules of this package have their own sampler. By type it is a
    ``DistributedSampler``, so that Lightning does not shard the rank's rows again, and calls ``set_epoch``.

    Args:
        data_len: rows of this rank, ``len(dataset)``.
        seed: of the order. Orders of neighboring seeds, epochs and ranks are unrelated.
        shuffle: if False, rows come in storage order.
        num_samples: rows of an epoch. If ranks hold different numbers of rows and must make equally many steps, pass
            ``dataset.rows_on_each_rank``. Other rows are left out each epoch. None takes all.

    Raises:
        H5ValueError: a number is out of range.
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

    # The rank is looked at when it is needed: a sampler may be made before the process group is.

    @property
    def rank(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Rank of this process in the process group; 0 without one. The order depends on it."""
        return resolve_replica().rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # of torch, an attribute
        """Number of ranks in the process group; 1 without one."""
        return resolve_replica().world_size

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}, epoch {self.epoch}" if self.shuffle else "in storage order"
        return (
            f"{type(self).__name__}({self.num_samples:,} of {self.data_len:,} rows, rank {self.rank} of "
            f"{self.num_replicas}, {order})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        n_absent = self.data_len - self.num_samples
        rows = np.arange(self.data_len)
        if n_absent:
            rows = np.sort(np.roll(rows, -self.epoch * n_absent)[n_absent:])
        if self.shuffle:
            rows = rows[permutation(len(rows), self.seed, self.epoch, EPOCH_SHUFFLE, 1 + self.rank)(0, len(rows))]
        return iter(rows.tolist())

    def __len__(self) -> int:
        return self.num_samples

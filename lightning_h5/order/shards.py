"""The rows that each rank holds: shards, the recipe and the samplers over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from torch.utils.data import DistributedSampler

from ..errors import H5ValueError
from ..types import IntArray
from .epoch import (
    EachRowOnce,
    EpochPlan,
    EvaluationBatches,
    OrderParameters,
    RowSequence,
    balanced_contiguous_shard,
    order_rows,
)
from .permutation import permutation
from .samplers import EpochSource, PlanSampler, Replica, resolve_replica
from .window import BlockTable

__all__ = [
    "EpochShuffleSampler",
    "RankShard",
    "Rows",
    "ShardMode",
    "ShardRows",
    "ShardSampler",
    "as_array",
    "places_in",
    "union",
]


Rows: TypeAlias = range | IntArray
"""Numbers of rows, in ascending order."""


def union(each: Sequence[Rows]) -> Rows:
    """Return all rows of some disjoint sets, in ascending order; a range if they are one.

    Args:
        each: the sets.
    """
    if len(each) == 1:
        return each[0]
    ranges = sorted((rows for rows in each if isinstance(rows, range)), key=lambda rows: (rows.step, rows.start))
    if len(ranges) == len(each) and len({rows.step for rows in ranges}) == 1:
        if all(rows.step == 1 for rows in ranges) and all(a.stop == b.start for a, b in pairwise(ranges)):
            return range(ranges[0].start, ranges[-1].stop)
        if [rows.start for rows in ranges] == list(range(ranges[0].step)):
            return range(max((rows[-1] + 1 for rows in ranges if rows), default=0))
    merged: IntArray = np.sort(np.concatenate([as_array(rows) for rows in each]))
    return merged


def as_array(rows: Rows) -> IntArray:
    """Return rows as an array."""
    return np.asarray(rows, dtype=np.int64)


def places_in(held: Rows, rows: Rows) -> Rows:
    """Return the places of rows among those that are held.

    Args:
        held: in ascending order.
        rows: some of them.
    """
    if isinstance(held, range) and isinstance(rows, range):
        if not rows:
            return range(0)
        first, step = held.index(rows[0]), max(1, rows.step // held.step)
        return range(first, first + len(rows) * step, step)
    places: IntArray = np.searchsorted(held, rows).astype(np.int64)
    return places


ShardMode = Literal["contiguous", "interleave"]

RESHARD = 8  # purpose of the random stream


@dataclass(frozen=True, eq=False)
class RankShard:
    """The rows that one rank holds, and which of them it trains on in an epoch.

    Shards differ by one row if the rows do not divide by the ranks. Training takes equally many of each, so one row
    of each larger shard is left out, another one each epoch.

    Attributes:
        blocks: all rows, cut into blocks.
        world_size: number of ranks.
        rank: this rank.
        mode: ``contiguous`` (neighbours in storage order) or ``interleave`` (every ``world_size``-th row).
        reshard_every: draw new shards every so many epochs; 0 keeps them.
        seed: decides the new shards.
    """

    blocks: BlockTable
    world_size: int
    rank: int
    mode: ShardMode = "contiguous"
    reshard_every: int = 0
    seed: int = 0

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.blocks.n_rows

    @cached_property
    def n_held(self) -> int:
        """Rows that this rank holds."""
        start, stop = balanced_contiguous_shard(self.n_rows, self.world_size, self.rank)
        return stop - start

    @property
    def n_trained(self) -> int:
        """Rows that each rank trains on in an epoch."""
        return self.n_rows // self.world_size

    def is_like(self, other: RankShard) -> bool:
        """Return whether another rank, or this one in another run, holds and draws the same."""
        pairs = [
            (getattr(self, name), getattr(other, name)) for name in ("world_size", "rank", "mode", "reshard_every")
        ]
        if self.reshard_every:
            pairs.append((self.seed, other.seed))
        return all(a == b for a, b in pairs) and np.array_equal(self.blocks.starts, other.blocks.starts)

    def draw(self, epoch: int) -> int:
        """Return how often new shards were drawn before an epoch."""
        return epoch // self.reshard_every if self.reshard_every and self.world_size > 1 else 0

    def rows(self, draw: int = 0, rank: int | None = None) -> Rows:
        """Return the rows that a rank holds, in ascending order.

        Args:
            draw: how often new shards were drawn. The first, 0, follows from the mode. Later ones take whole blocks at
                random (``contiguous``, so that each is still decoded on one rank, except those at the borders), or
                single rows (``interleave``).
            rank: another rank than this one.
        """
        rank = self.rank if rank is None else rank
        if self.mode == "interleave":
            if not draw:
                return range(rank, self.n_rows, self.world_size)
            return np.sort(permutation(self.n_rows, self.seed, draw, RESHARD)(0, self.n_rows)[rank :: self.world_size])
        start, stop = balanced_contiguous_shard(self.n_rows, self.world_size, rank)
        return self._rows_of_drawn_blocks(draw, start, stop) if draw else range(start, stop)

    def _rows_of_drawn_blocks(self, draw: int, start: int, stop: int) -> IntArray:
        """Return the rows at places ``start`` to ``stop - 1`` of all blocks, in a drawn order."""
        n_blocks, starts = self.blocks.n_blocks, self.blocks.starts
        order = permutation(n_blocks, self.seed, draw, RESHARD)(0, n_blocks)
        firsts, sizes = starts[order], np.diff(starts)[order]
        stops = np.cumsum(sizes)
        low, high = np.maximum(stops - sizes, start), np.minimum(stops, stop)  # of each block, the places in this shard
        mine = np.flatnonzero(high > low)
        mine = mine[np.argsort(firsts[mine])]
        counts = (high - low)[mine]
        offsets = firsts[mine] + (low - stops + sizes)[mine]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: IntArray = np.repeat(offsets, counts) + within
        return rows

    def left_out(self, epoch: int) -> int | None:
        """Return which of this rank's rows, from 0, is left out of an epoch of training; None if none is."""
        return epoch % self.n_held if self.n_held > self.n_trained else None


EPOCH_SHUFFLE = 9  # purpose of the random stream


@dataclass(frozen=True, eq=False)
class ShardRows(EachRowOnce):
    """Epochs of the rows of one rank's shard, in an order of its own; equally many on each rank.

    Attributes:
        shard: the rows that the rank holds.
        rotates: another row of a larger shard is left out each epoch.
    """

    shard: RankShard
    rotates: bool

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> RowSequence:
        """See ``EpochRecipe``."""
        rows = order_rows(self.blocks, order, epoch, place=1 + self.shard.rank)
        absent = self.shard.left_out(epoch if self.rotates else 0)
        if absent is None:
            return RowSequence(rows, self.blocks.n_rows, epoch)

        def without_absent(start: int, stop: int) -> IntArray:
            found = rows(start, stop)
            return found + (found >= absent)

        return RowSequence(without_absent, self.blocks.n_rows, epoch)


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

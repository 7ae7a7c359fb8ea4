"""Which rows a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray
from .blocks import BlockTable
from .permutation import permutation
from .rows import Rows

__all__ = ["RankShard", "ShardMode", "balanced_contiguous_shard", "interleaved_indices"]

ShardMode = Literal["contiguous", "interleave"]

DRAWN_ANEW = 8  # purpose of the random stream


def balanced_contiguous_shard(total: int, world_size: int, rank: int) -> tuple[int, int]:
    """A rank's contiguous piece of ``total`` rows; the pieces of two ranks differ by at most one row.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.

    Returns:
        First row, and the row after the last. The first ``total % world_size`` ranks have one row more.

    Raises:
        H5ValueError: the numbers make no sense.
    """
    _check(total, world_size, rank)
    size, rest = divmod(total, world_size)
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest)


def interleaved_indices(total: int, world_size: int, rank: int) -> IntArray:
    """Every ``world_size``-th of ``total`` rows, starting at ``rank``; shape ``(n,)``.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.

    Raises:
        H5ValueError: the numbers make no sense.
    """
    _check(total, world_size, rank)
    return np.arange(rank, total, world_size, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RankShard:
    """The rows that one rank holds, and which of them it trains on in an epoch.

    Shards differ by one row where the rows do not divide by the ranks. Training takes equally many of each, so one row
    of each larger shard sits out, another one each epoch.

    Attributes:
        blocks: all rows, cut into blocks.
        world_size: number of ranks.
        rank: this rank.
        mode: ``contiguous`` (neighbours in storage order) or ``interleave`` (every ``world_size``-th row).
        reshard_every: draw the shards anew every so many epochs; 0 keeps them.
        seed: decides the shards that are drawn anew.
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
        """Whether another rank, or this one in another run, holds and draws the same."""
        pairs = [
            (getattr(self, name), getattr(other, name)) for name in ("world_size", "rank", "mode", "reshard_every")
        ]
        if self.reshard_every:
            pairs.append((self.seed, other.seed))
        return all(a == b for a, b in pairs) and np.array_equal(self.blocks.starts, other.blocks.starts)

    def draw(self, epoch: int) -> int:
        """How often the shards were drawn anew before an epoch."""
        return epoch // self.reshard_every if self.reshard_every and self.world_size > 1 else 0

    def rows(self, draw: int = 0, rank: int | None = None) -> Rows:
        """The rows that a rank holds, in ascending order.

        Args:
            draw: how often the shards were drawn anew. The first, 0, is as the mode says. Later ones take whole blocks
                at random (``contiguous``, so that each is still decoded on one rank, but for those at the cuts), or
                single rows (``interleave``).
            rank: another rank than this one.
        """
        rank = self.rank if rank is None else rank
        if self.mode == "interleave":
            if not draw:
                return range(rank, self.n_rows, self.world_size)
            return np.sort(
                permutation(self.n_rows, self.seed, draw, DRAWN_ANEW)(0, self.n_rows)[rank :: self.world_size]
            )
        start, stop = balanced_contiguous_shard(self.n_rows, self.world_size, rank)
        return self._rows_of_drawn_blocks(draw, start, stop) if draw else range(start, stop)

    def _rows_of_drawn_blocks(self, draw: int, start: int, stop: int) -> IntArray:
        """Rows at places ``start`` to ``stop - 1`` of all blocks, one after the other in a drawn order."""
        n_blocks, starts = self.blocks.n_blocks, self.blocks.starts
        order = permutation(n_blocks, self.seed, draw, DRAWN_ANEW)(0, n_blocks)
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

    def sits_out(self, epoch: int) -> int | None:
        """Which of this rank's rows, counted from 0, sits out an epoch of training; None where none does."""
        return epoch % self.n_held if self.n_held > self.n_trained else None


def _check(total: int, world_size: int, rank: int) -> None:
    if total < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise H5ValueError(
            f"a shard of total={total} rows was asked for rank={rank} of world_size={world_size}. "
            "Pass total >= 0, world_size >= 1 and a rank from 0 to world_size - 1."
        )

"""The replica of this process; shards, contiguous or interleaved, and the batches of an evaluation."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ..cores import launched_local_ranks
from ..errors import H5ValueError
from ..lazy_torch import has_process_group, torch
from ..types import IntArray, cached_property
from .permutation import permutation
from .window import BlockTable

__all__ = [
    "EvaluationBatches",
    "RankShard",
    "Replica",
    "Rows",
    "ShardMode",
    "as_array",
    "balanced_contiguous_shard",
    "check_nodes",
    "condensed",
    "contiguous_shard",
    "equal_rows",
    "find_places",
    "interleaved_indices",
    "launched_nodes",
    "launched_replica",
    "note_length",
    "places_in",
    "present_replica",
    "resolve_replica",
    "rows_at",
    "union",
]


class Replica(NamedTuple):
    """One data-parallel copy of the model.

    Attributes:
        rank: this copy, from 0.
        world_size: number of copies.
    """

    rank: int
    world_size: int


def resolve_replica(rank: int | None = None, world_size: int | None = None) -> Replica:
    """Return the replica from the arguments, from an initialized ``torch.distributed``, or rank 0 of 1.

    Args:
        rank: rank of the replica; not needed for one process.
        world_size: number of replicas. 0 means one process, since ``torch.cuda.device_count()`` is 0 without a GPU.

    Raises:
        H5ValueError: only one argument is passed, or the rank is out of range.
    """
    if world_size == 0:
        world_size = 1
    if rank is None and world_size == 1:
        rank = 0
    if (rank is None) != (world_size is None):
        raise H5ValueError(f"rank={rank} and world_size={world_size} were given. Pass both, or neither.")
    if rank is not None and world_size is not None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise H5ValueError(
                f"rank={rank} of world_size={world_size} was given. Pass a rank from 0 to world_size - 1."
            )
        return Replica(rank, world_size)
    if has_process_group():
        return Replica(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Replica(0, 1)


def launched_replica() -> Replica | None:
    """Return the replica in the environment variables ``RANK`` and ``WORLD_SIZE``, as ``torchrun`` sets them.

    Returns:
        The replica; None without these variables, or if ``torch.distributed`` is initialized, which takes precedence.

    Raises:
        H5ValueError: the variables are invalid.
    """
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank and world_size) or has_process_group():
        return None
    if not (rank.isdecimal() and world_size.isdecimal()):
        raise H5ValueError(
            f"the environment has RANK={rank!r} and WORLD_SIZE={world_size!r}. Set both to numbers, as torchrun does, "
            "or neither; or pass rank and world_size."
        )
    return resolve_replica(int(rank), int(world_size))


def present_replica() -> Replica:
    """Return the replica from an initialized ``torch.distributed``, else from the environment, else rank 0 of 1.

    Raises:
        H5ValueError: variables of the environment are invalid.
    """
    return launched_replica() or resolve_replica()


def launched_nodes(n_replicas: int) -> int:
    """Return the number of nodes from the environment; 1 if it has no such variable.

    ``torchrun`` sets ``GROUP_WORLD_SIZE``. Other launchers set the number of ranks of a node, such as
    ``LOCAL_WORLD_SIZE``.

    Args:
        n_replicas: number of replicas, used as the number of ranks if the environment has no ``WORLD_SIZE``.

    Raises:
        H5ValueError: nodes would have different numbers of ranks.
    """
    groups, world = os.environ.get("GROUP_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "")
    if groups.isdecimal() and int(groups):
        return int(groups)
    if (n_local := launched_local_ranks()) is None:
        return 1
    n_ranks = int(world) if world.isdecimal() else n_replicas
    if n_ranks > n_local and n_ranks % n_local:
        raise H5ValueError(
            f"shuffle.scope='node' was requested, but the environment has {n_local} ranks on this node and {n_ranks} "
            "in all: nodes have different numbers of ranks. Start the same number on each node, or pass "
            "shuffle.scope='global'."
        )
    return max(1, n_ranks // n_local)


def check_nodes(nodes: int, world_size: int) -> None:
    """Raise an ``H5ValueError`` if nodes do not have the same number of replicas."""
    if world_size % nodes:
        raise H5ValueError(
            f"shuffle.scope='node' was requested for {world_size} replicas of the model on {nodes} nodes; each node "
            "needs the same number of them. Use the same number of devices on each node (initialize torch.distributed "
            "before setup, if no Trainer does), or pass shuffle.scope='global'."
        )


Rows: TypeAlias = range | IntArray
"""Numbers of rows, in ascending order."""


def union(sets: Sequence[Rows]) -> Rows:
    """Return the union of disjoint sets of rows in ascending order, as a range if possible.

    Args:
        sets: sets of rows, each in ascending order.
    """
    if len(sets) == 1:
        return sets[0]
    ranges = sorted((rows for rows in sets if isinstance(rows, range)), key=lambda rows: (rows.step, rows.start))
    if len(ranges) == len(sets) and len({rows.step for rows in ranges}) == 1:
        if all(rows.step == 1 for rows in ranges) and all(a.stop == b.start for a, b in pairwise(ranges)):
            return range(ranges[0].start, ranges[-1].stop)
        if [rows.start for rows in ranges] == list(range(ranges[0].step)):
            return range(max((rows[-1] + 1 for rows in ranges if rows), default=0))
    all_rows: IntArray = np.sort(np.concatenate([as_array(rows) for rows in sets]))
    return all_rows


def as_array(rows: Rows) -> IntArray:
    """Return rows as an array."""
    return np.asarray(rows, dtype=np.int64)


def condensed(rows: Rows) -> Rows:
    """Return consecutive rows as a range, which needs no memory; other rows unchanged."""
    if isinstance(rows, range):
        return rows
    if not len(rows):
        return range(0)
    first, last = int(rows[0]), int(rows[-1])
    is_run = last - first == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return range(first, last + 1) if is_run else rows


def rows_at(rows: Rows, places: IntArray) -> IntArray:
    """Return the rows at some places."""
    if isinstance(rows, range):
        return places if (rows.start, rows.step) == (0, 1) else rows.start + places * rows.step
    return rows[places]


def find_places(held: Rows, rows: IntArray) -> IntArray:
    """Return the places of rows, in any order, among the held rows (see ``places_in``)."""
    if isinstance(held, range):
        return rows if (held.start, held.step) == (0, 1) else (rows - held.start) // held.step
    return np.searchsorted(held, rows).astype(np.int64, copy=False)


def places_in(held: Rows, rows: Rows) -> Rows:
    """Return the places of rows among the held rows.

    Args:
        held: held rows, in ascending order.
        rows: some of the held rows.
    """
    if isinstance(held, range) and isinstance(rows, range):
        if not rows:
            return range(0)
        first, step = held.index(rows[0]), max(1, rows.step // held.step)
        return range(first, first + len(rows) * step, step)
    return find_places(held, as_array(rows))


ShardMode = Literal["contiguous", "interleave"]

RESHARD = 8  # purpose of the random stream


def balanced_contiguous_shard(total: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return a rank's contiguous piece of ``total`` rows; the pieces of two ranks differ by at most one row.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.

    Returns:
        First row, and the row after the last. The first ``total % world_size`` ranks have one row more.

    Raises:
        H5ValueError: a number is out of range.
    """
    _check_replica(total, world_size, rank)
    size, n_larger = divmod(total, world_size)
    start = rank * size + min(rank, n_larger)
    return start, start + size + (rank < n_larger)


def contiguous_shard(total: int, world_size: int, rank: int, ends: IntArray | None = None) -> tuple[int, int]:
    """Return a rank's contiguous piece of ``total`` rows.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.
        ends: ascending row numbers at which pieces may end, the last is ``total``; each piece ends at the nearest of
            them. None allows all.
    """
    start, stop = balanced_contiguous_shard(total, world_size, rank)
    return (start, stop) if ends is None or not total else (_nearest(ends, start), _nearest(ends, stop))


def _nearest(ends: IntArray, place: int) -> int:
    index = int(np.searchsorted(ends, place))
    low, high = int(ends[index - 1]) if index else 0, int(ends[min(index, len(ends) - 1)])
    return low if place - low < high - place else high


@dataclass(frozen=True)
class EvaluationBatches:
    """A contiguous shard for each rank, divided into the same number of batches on every rank; every row exactly once.

    The number of batches differs in two cases: with ``batch_size`` 1 and a remainder, some ranks have one batch more;
    and if shards end at ends of segments, a shard may have fewer rows than another one has batches.

    Attributes:
        n_rows: rows of all ranks.
        batch_size: maximum number of rows of a batch.
        world_size: number of ranks.
        rank: this rank.
        ends: rows at which shards may end (see ``contiguous_shard``); None for all.
    """

    n_rows: int
    batch_size: int
    world_size: int
    rank: int
    ends: IntArray | None = None

    @cached_property
    def shard(self) -> tuple[int, int]:
        """First row, and the row after the last, of this rank."""
        return contiguous_shard(self.n_rows, self.world_size, self.rank, self.ends)

    @property
    def has_idle_rank(self) -> bool:
        """Whether some rank has no batch; all ranks return the same."""
        if self.ends is None:
            return self.n_rows < self.world_size
        shards = (contiguous_shard(self.n_rows, self.world_size, rank, self.ends) for rank in range(self.world_size))
        return any(start == stop for start, stop in shards)

    @cached_property
    def n_steps(self) -> int:
        """Batches of this rank."""
        first, last = self.shard
        largest = -(-self.n_rows // self.world_size)
        if self.ends is not None:
            shards = (
                contiguous_shard(self.n_rows, self.world_size, rank, self.ends) for rank in range(self.world_size)
            )
            largest = max(stop - start for start, stop in shards)
        return min(-(-largest // self.batch_size), last - first)

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first row of a batch, and the row after its last. The last two batches share the rest of the rows.

        There are fewer full batches if some would be empty otherwise.
        """
        first, last = self.shard
        full = max(0, min(self.n_steps - 2, (last - first - self.n_steps) // max(1, self.batch_size - 1)))
        if step < full:
            return first + step * self.batch_size, first + (step + 1) * self.batch_size
        start = first + full * self.batch_size
        low, high = balanced_contiguous_shard(last - start, self.n_steps - full, step - full)
        return start + low, start + high


def interleaved_indices(total: int, world_size: int, rank: int) -> IntArray:
    """Return every ``world_size``-th of ``total`` rows, starting at ``rank``; shape ``(n,)``.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.

    Raises:
        H5ValueError: a number is out of range.
    """
    _check_replica(total, world_size, rank)
    return np.arange(rank, total, world_size, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RankShard:
    """The rows that one rank holds. The sizes of shards differ by at most one row.

    Attributes:
        blocks: all rows, divided into blocks.
        world_size: number of ranks.
        rank: this rank.
        mode: ``contiguous`` (neighbors in storage order) or ``interleave`` (every ``world_size``-th row).
        reshard_every: number of epochs after which new shards are drawn; 0 keeps the first shards.
        seed: seed of new shards.
        ends: rows at which contiguous shards may end (see ``contiguous_shard``), for evaluation.
    """

    blocks: BlockTable
    world_size: int
    rank: int
    mode: ShardMode = "contiguous"
    reshard_every: int = 0
    seed: int = 0
    ends: IntArray | None = None

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.blocks.n_rows

    @cached_property
    def n_held(self) -> int:
        """Rows that this rank holds."""
        start, stop = contiguous_shard(self.n_rows, self.world_size, self.rank, self.ends)
        return stop - start

    @property
    def n_least(self) -> int:
        """Minimum number of rows of a rank."""
        return self.n_rows // self.world_size

    def is_like(self, other: RankShard) -> bool:
        """Return whether two shards hold the same rows and redraw them identically."""
        pairs = [
            (getattr(self, name), getattr(other, name)) for name in ("world_size", "rank", "mode", "reshard_every")
        ]
        if self.reshard_every:
            pairs.append((self.seed, other.seed))
        if (self.ends is None) != (other.ends is None):
            return False
        arrays = [(self.blocks.starts, other.blocks.starts)]
        if self.ends is not None and other.ends is not None:
            arrays.append((self.ends, other.ends))
        return all(a == b for a, b in pairs) and all(np.array_equal(a, b) for a, b in arrays)

    def draw(self, epoch: int) -> int:
        """Return the number of times that new shards were drawn before an epoch."""
        return epoch // self.reshard_every if self.reshard_every and self.world_size > 1 else 0

    def rows(self, draw: int = 0, rank: int | None = None) -> Rows:
        """Return the rows that a rank holds, in ascending order.

        Args:
            draw: number of times that new shards were drawn. The first shards, 0, depend only on the mode. Later shards
                consist of random blocks (``contiguous``, so that each block is still decoded on one rank, except at the
                borders), or of random rows (``interleave``).
            rank: another rank; None for this one.
        """
        rank = self.rank if rank is None else rank
        if self.mode == "interleave":
            if not draw:
                return range(rank, self.n_rows, self.world_size)
            return np.sort(permutation(self.n_rows, self.seed, draw, RESHARD)(0, self.n_rows)[rank :: self.world_size])
        start, stop = contiguous_shard(self.n_rows, self.world_size, rank, self.ends)
        return self._rows_of_drawn_blocks(draw, start, stop) if draw else range(start, stop)

    def _rows_of_drawn_blocks(self, draw: int, start: int, stop: int) -> IntArray:
        """Return the rows at places ``start`` to ``stop - 1`` of all blocks, in a drawn order."""
        n_blocks, starts = self.blocks.n_blocks, self.blocks.starts
        order = permutation(n_blocks, self.seed, draw, RESHARD)(0, n_blocks)
        firsts, sizes = starts[order], np.diff(starts)[order]
        stops = np.cumsum(sizes)
        low, high = np.maximum(stops - sizes, start), np.minimum(stops, stop)  # places of each block in this shard
        blocks = np.flatnonzero(high > low)
        blocks = blocks[np.argsort(firsts[blocks])]
        counts = (high - low)[blocks]
        offsets = firsts[blocks] + (low - stops + sizes)[blocks]
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: IntArray = np.repeat(offsets, counts) + places
        return rows


_noted_length = threading.local()  # rows of the last shard with a requested length, and of the smallest shard


def note_length(shard: RankShard) -> int:
    """Return the number of rows of a shard, and remember the size of the smallest shard."""
    _noted_length.sizes = shard.n_held, shard.n_least
    return shard.n_held


def equal_rows(n_rows: int) -> int:
    """Return the size of the smallest shard, if the length of a shard was requested last.

    A sampler receives only ``len(dataset)`` from a shard. Without this, ranks with one more row would run more steps.

    Args:
        n_rows: the length.
    """
    n_held, n_least = getattr(_noted_length, "sizes", (-1, -1))
    return n_least if n_rows == n_held else n_rows


def _check_replica(total: int, world_size: int, rank: int) -> None:
    if total < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise H5ValueError(
            f"a shard of total={total} rows was requested for rank={rank} of world_size={world_size}. Pass total >= 0, "
            "world_size >= 1 and a rank from 0 to world_size - 1."
        )

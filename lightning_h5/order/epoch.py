"""What an epoch goes through on all ranks together: rows to be cut into batches, or batches that are made already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from ..errors import H5ValueError
from ..types import IntArray
from .plan import (
    EpochPlan,
    Order,
    OrderParameters,
    Segment,
    TrainBatches,
    TrainingPlan,
    consumed_rows,
    order_rows,
)
from .shards import RankShard, balanced_contiguous_shard
from .window import BlockTable

__all__ = [
    "BatchCut",
    "BatchSequence",
    "BatchesPlan",
    "EachRowOnce",
    "EpochRecipe",
    "EpochSequence",
    "FirstSteps",
    "MadeBatches",
    "RowSequence",
    "ShardRows",
]


class EpochSequence(Protocol):
    """An epoch's sequence."""

    @property
    def n_rows(self) -> int:
        """Rows that it goes through; some may come more than once."""
        ...

    def n_consumed(self, segments: Sequence[Segment], *, drop_last: bool) -> int:
        """Rows that the segments have used up.

        Raises:
            H5ValueError: a segment has more batches than were left.
        """
        ...

    def plan(
        self, segments: Sequence[Segment], *, batch_size: int, world_size: int, rank: int, drop_last: bool
    ) -> EpochPlan:
        """A rank's share of what the segments have left."""
        ...


class EpochRecipe(Protocol):
    """What an epoch visits: each row once, rows by their weights, batches of about one length, or several sources."""

    @property
    def text(self) -> str:
        """What a saved position depends on; "" for each row once."""
        ...

    def n_units(self, batch_size: int, world_size: int, *, drop_last: bool) -> int:
        """Batches, or rows, of an epoch that begins now; 0 if the number of rows says it."""
        ...

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> EpochSequence:
        """What an epoch goes through.

        Args:
            order: what decides the order.
            epoch: from 0.
            drop_last: drop ragged ends.
        """
        ...


@dataclass(frozen=True, eq=False)
class RowSequence:
    """Rows in an order, cut into batches wherever those before them ended.

    Attributes:
        order: from positions to rows.
        n_rows: length of the sequence.
        epoch: which epoch it is.
    """

    order: Order
    n_rows: int
    epoch: int

    def n_consumed(self, segments: Sequence[Segment], *, drop_last: bool) -> int:
        """See ``EpochSequence``."""
        return consumed_rows(self.n_rows, segments, drop_last, self.epoch)

    def plan(
        self, segments: Sequence[Segment], *, batch_size: int, world_size: int, rank: int, drop_last: bool
    ) -> TrainingPlan:
        """See ``EpochSequence``."""
        done = self.n_consumed(segments, drop_last=drop_last)
        cut = TrainBatches(self.n_rows - done, batch_size, world_size, drop_last, self.epoch, done)
        return TrainingPlan(self.order, cut, rank, done)


@dataclass(frozen=True, eq=False)
class EachRowOnce:
    """Epochs of each row once.

    Attributes:
        blocks: the rows.
    """

    blocks: BlockTable
    text = ""

    def n_units(self, batch_size: int, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``."""
        return 0

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> RowSequence:
        """See ``EpochRecipe``."""
        return RowSequence(order_rows(self.blocks, order, epoch), self.blocks.n_rows, epoch)


@dataclass(frozen=True, eq=False)
class ShardRows(EachRowOnce):
    """Epochs of the rows of one rank's shard, in an order of this rank's own; as many on each rank.

    Attributes:
        shard: what the rank holds.
        rotates: another row of a larger shard sits out each epoch.
    """

    shard: RankShard
    rotates: bool

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> RowSequence:
        """See ``EpochRecipe``."""
        rows = order_rows(self.blocks, order, epoch, place=1 + self.shard.rank)
        absent = self.shard.sits_out(epoch if self.rotates else 0)
        if absent is None:
            return RowSequence(rows, self.blocks.n_rows, epoch)

        def others(start: int, stop: int) -> IntArray:
            found = rows(start, stop)
            return found + (found >= absent)

        return RowSequence(others, self.blocks.n_rows, epoch)


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of a plan.

    Attributes:
        plan: the whole plan.
        n_steps: how many of its steps.
    """

    plan: EpochPlan
    n_steps: int

    def rows(self, step: int) -> IntArray:
        """See ``EpochPlan``."""
        return self.plan.rows(step)

    def bounds(self, step: int) -> tuple[int, int]:
        """See ``EpochPlan``."""
        return self.plan.bounds(step)


class MadeBatches(Protocol):
    """Batches that belong together as they are: of one source, or of one length."""

    @property
    def n_batches(self) -> int:
        """How many there are."""
        ...

    def start(self, batch: int) -> int:
        """Rows in the batches before this one; of all where it is ``n_batches``."""
        ...

    def rows(self, batch: int) -> IntArray:
        """A batch's rows."""
        ...


class _Piece(NamedTuple):
    """Rows ``[low, high)`` of a batch."""

    batch: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class BatchCut:
    """What is left of some batches, in rounds of ``world_size``; rank ``r`` takes piece ``t * world_size + r``.

    Where they are no multiple of the ranks, some of the last ones are halved, so that nothing is dropped, nothing is
    repeated, and no piece is of two batches. Where there is nothing to halve (single rows), the last ones sit out.

    Attributes:
        batches: all of them.
        world_size: number of ranks.
        drop_last: leave out those that make no whole round, instead.
        first: the batch that comes first.
        offset: rows of it that came already.
    """

    batches: MadeBatches
    world_size: int
    drop_last: bool = False
    first: int = 0
    offset: int = 0

    @cached_property
    def n_steps(self) -> int:
        """Steps that every rank takes."""
        return (self._n_whole + len(self._last)) // self.world_size

    def piece(self, place: int) -> _Piece:
        """The piece at a place of what is left."""
        if place >= self._n_whole:
            return self._last[place - self._n_whole]
        batch = self.first + place
        low = self.offset if place == 0 else 0
        return _Piece(batch, low, self.batches.start(batch + 1) - self.batches.start(batch))

    def after(self, n_pieces: int) -> tuple[int, int]:
        """The batch that comes first once so many pieces are used up, and how many rows of it came already."""
        if n_pieces == 0:
            return self.first, self.offset
        batch, _, high = self.piece(n_pieces - 1)
        is_whole = high == self.batches.start(batch + 1) - self.batches.start(batch)
        return (batch + 1, 0) if is_whole else (batch, high)

    @property
    def _n_left(self) -> int:
        return self.batches.n_batches - self.first

    def _n_rows(self, n_batches: int) -> int:
        """Rows of the last so many batches, but for those that came already."""
        end, batch = self.batches.n_batches, self.batches.n_batches - n_batches
        offset = self.offset if batch == self.first else 0
        return self.batches.start(end) - self.batches.start(batch) - offset

    @cached_property
    def _n_whole(self) -> int:
        """Batches before those that are halved, or left out."""
        full, rest = divmod(self._n_left, self.world_size)
        if not rest or self.drop_last or self._n_rows(self._n_left) < (full + 1) * self.world_size:
            return full * self.world_size
        rounds = min(1, full)
        while self._n_rows(rest + rounds * self.world_size) < (rounds + 1) * self.world_size:
            rounds = min(2 * rounds, full)  # single rows, which cannot be halved
        return (full - rounds) * self.world_size

    @cached_property
    def _last(self) -> list[_Piece]:
        """Pieces that make whole rounds of the batches after those."""
        pieces = [self._piece_of(batch) for batch in range(self.first + self._n_whole, self.batches.n_batches)]
        n_wanted = -(-len(pieces) // self.world_size) * self.world_size
        n_rows = [piece.high - piece.low for piece in pieces]
        if self.drop_last or sum(n_rows) < n_wanted:
            return []
        parts = [1] * len(pieces)
        while sum(parts) < n_wanted:
            largest = max(range(len(pieces)), key=lambda at: (n_rows[at] / parts[at], at))
            parts[largest] += 1
        return [
            _Piece(piece.batch, piece.low + low, piece.low + high)
            for piece, n, size in zip(pieces, parts, n_rows, strict=True)
            for low, high in (balanced_contiguous_shard(size, n, part) for part in range(n))
        ]

    def _piece_of(self, batch: int) -> _Piece:
        low = self.offset if batch == self.first else 0
        return _Piece(batch, low, self.batches.start(batch + 1) - self.batches.start(batch))


@dataclass(frozen=True, eq=False)
class BatchesPlan:
    """A rank's share of batches that are made already.

    Attributes:
        cut: how they are dealt.
        rank: this rank.
    """

    cut: BatchCut
    rank: int

    @property
    def n_steps(self) -> int:
        """Steps that are left, equal on all ranks."""
        return self.cut.n_steps

    def rows(self, step: int) -> IntArray:
        """Indices into the dataset for a step, shape ``(batch,)``."""
        batch, low, high = self._piece(step)
        return self.cut.batches.rows(batch)[low:high]

    def bounds(self, step: int) -> tuple[int, int]:
        """First position in the epoch's sequence, and the one after the last, of a step's rows."""
        batch, low, high = self._piece(step)
        start = self.cut.batches.start(batch)
        return start + low, start + high

    def _piece(self, step: int) -> _Piece:
        return self.cut.piece(step * self.cut.world_size + self.rank)


@dataclass(frozen=True, eq=False)
class BatchSequence:
    """Batches that are made already, in their order.

    Attributes:
        batches: what they are.
        batch_size: rows of most of them.
    """

    batches: MadeBatches
    batch_size: int

    @property
    def n_rows(self) -> int:
        """Rows of all batches."""
        return self.batches.start(self.batches.n_batches)

    def n_consumed(self, segments: Sequence[Segment], *, drop_last: bool) -> int:
        """See ``EpochSequence``."""
        batch, offset = self._after(segments, drop_last)
        return self.batches.start(batch) + offset

    def plan(
        self, segments: Sequence[Segment], *, batch_size: int, world_size: int, rank: int, drop_last: bool
    ) -> BatchesPlan:
        """See ``EpochSequence``.

        Raises:
            H5ValueError: also where ``batch_size`` is another than that of these batches.
        """
        if segments and batch_size != self.batch_size:
            raise H5ValueError(
                f"an epoch of batches of {self.batch_size} rows was begun, and the rest of it was asked for in batches "
                f"of {batch_size}: batches of one source, or of one length, cannot be cut anew. Go on with "
                f"batch_size={self.batch_size}, and change it at the end of an epoch."
            )
        return BatchesPlan(BatchCut(self.batches, world_size, drop_last, *self._after(segments, drop_last)), rank)

    def _after(self, segments: Sequence[Segment], drop_last: bool) -> tuple[int, int]:
        batch, offset = 0, 0
        for segment in segments:
            if segment[:2] == (1, 1) and self.batch_size != 1:  # rows of many segments, told in one
                batch, offset = self._locate(self.batches.start(batch) + offset + segment.n_batches)
                continue
            cut = BatchCut(self.batches, segment.world_size, drop_last, batch, offset)
            if segment.n_batches > cut.n_steps * cut.world_size:
                raise H5ValueError(
                    f"{segment} was asked for, and {self.batches.n_batches - batch} batches are left of "
                    f"{self.batches.n_batches}. Ask for fewer batches."
                )
            batch, offset = cut.after(segment.n_batches)
        return batch, offset

    def _locate(self, row: int) -> tuple[int, int]:
        if row > self.n_rows:
            raise H5ValueError(f"{row} rows were said to be consumed, and there are {self.n_rows}. Ask for fewer.")
        low, high = 0, self.batches.n_batches
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.batches.start(middle) <= row else (low, middle - 1)
        return low, row - self.batches.start(low)

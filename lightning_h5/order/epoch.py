"""What an epoch visits on all ranks together: rows to be cut into batches, or batches that are made already.

An ``EpochRecipe`` makes the ``EpochSequence`` of each epoch. The recipes here visit each row once, of the dataset or of
a rank's shard; ``weights``, ``buckets`` and ``mixture`` have the others. Samplers and loaders never ask which it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from ..errors import H5ValueError
from ..types import IntArray
from .plan import EpochPlan, OrderParameters, RowOrder, Segment, TrainBatches, consumed_rows, order_rows
from .shards import RankShard, balanced_contiguous_shard
from .window import BlockTable

__all__ = [
    "BatchSequence",
    "DealtBatches",
    "EachRowOnce",
    "EpochRecipe",
    "EpochSequence",
    "MadeBatches",
    "RowSequence",
    "ShardRows",
]


class EpochSequence(Protocol):
    """An epoch's sequence."""

    @property
    def n_rows(self) -> int:
        """Number of rows in the sequence; some may come more than once."""
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
        """Return a rank's share of what the segments have left."""
        ...


class EpochRecipe:
    """What epochs visit: each row once, rows by their weights, batches of similar length, or several sources."""

    @property
    def text(self) -> str:
        """What a saved position depends on; "" for each row once."""
        return ""

    def n_units(self, batch_size: int, world_size: int, *, drop_last: bool) -> int:
        """Return the batches, or rows, of an epoch that begins now; 0 if the number of rows decides it."""
        return 0

    def expected_shares(self, batch_size: int, *, drop_last: bool) -> dict[str, float]:
        """Return the share of units (batches, or rows) that each source is to have, by name; empty without sources."""
        return {}

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> EpochSequence:
        """Return the sequence of an epoch.

        Args:
            order: what decides the order.
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
        """See ``EpochSequence``."""
        return consumed_rows(self.n_rows, segments, drop_last, self.epoch)

    def plan(
        self, segments: Sequence[Segment], *, batch_size: int, world_size: int, rank: int, drop_last: bool
    ) -> EpochPlan:
        """See ``EpochSequence``."""
        done = self.n_consumed(segments, drop_last=drop_last)
        batches = TrainBatches(self.n_rows - done, batch_size, world_size, drop_last, self.epoch, done)

        def bounds(step: int) -> tuple[int, int]:
            start, stop = batches.bounds(step * world_size + rank)
            return done + start, done + stop

        return EpochPlan(batches.n_steps, bounds, lambda step: self.order(*bounds(step)))


@dataclass(frozen=True, eq=False)
class EachRowOnce(EpochRecipe):
    """Epochs of each row once.

    Attributes:
        blocks: the rows.
    """

    blocks: BlockTable

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> RowSequence:
        """See ``EpochRecipe``."""
        return RowSequence(order_rows(self.blocks, order, epoch), self.blocks.n_rows, epoch)


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


class MadeBatches(Protocol):
    """Batches whose rows belong together: of one source, or of similar length."""

    @property
    def n_batches(self) -> int:
        """Number of batches."""
        ...

    def start(self, batch: int) -> int:
        """Return the number of rows in the batches before this one; of all rows for ``n_batches``."""
        ...

    def rows(self, batch: int) -> IntArray:
        """Return a batch's rows."""
        ...


class _Piece(NamedTuple):
    """Rows ``[low, high)`` of a batch."""

    batch: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class DealtBatches:
    """The rest of some batches, dealt in rounds of ``world_size``; rank ``r`` takes piece ``t * world_size + r``.

    If their number is no multiple of the ranks, some of the last ones are halved, so that nothing is dropped, nothing
    is repeated, and no piece is of two batches. If there is nothing to halve (single rows), the last ones are left out.

    Attributes:
        batches: all of them.
        world_size: number of ranks.
        drop_last: leave out the batches that make no whole round, instead.
        first: the batch that comes first.
        offset: rows of it that are consumed.
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
        """Return the piece at a place of what is left."""
        return self._last[place - self._n_whole] if place >= self._n_whole else self._rest_of(self.first + place)

    def after(self, n_pieces: int) -> tuple[int, int]:
        """Return the batch that comes first after so many pieces, and how many rows of it are consumed."""
        if n_pieces == 0:
            return self.first, self.offset
        batch, _, high = self.piece(n_pieces - 1)
        return (batch + 1, 0) if high == self._rest_of(batch).high else (batch, high)

    def _rest_of(self, batch: int) -> _Piece:
        low = self.offset if batch == self.first else 0
        return _Piece(batch, low, self.batches.start(batch + 1) - self.batches.start(batch))

    def _n_rows(self, n_batches: int) -> int:
        """Return the rows of the last so many batches that are not consumed."""
        end, batch = self.batches.n_batches, self.batches.n_batches - n_batches
        return self.batches.start(end) - self.batches.start(batch) - (self.offset if batch == self.first else 0)

    @cached_property
    def _n_whole(self) -> int:
        """Batches before those that are halved, or left out."""
        n_left = self.batches.n_batches - self.first
        full, rest = divmod(n_left, self.world_size)
        if not rest or self.drop_last or self._n_rows(n_left) < (full + 1) * self.world_size:
            return full * self.world_size
        rounds = min(1, full)
        while self._n_rows(rest + rounds * self.world_size) < (rounds + 1) * self.world_size:
            rounds = min(2 * rounds, full)  # single rows, which cannot be halved
        return (full - rounds) * self.world_size

    @cached_property
    def _last(self) -> list[_Piece]:
        """The pieces of the other batches: whole rounds of them."""
        pieces = [self._rest_of(batch) for batch in range(self.first + self._n_whole, self.batches.n_batches)]
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
    ) -> EpochPlan:
        """See ``EpochSequence``.

        Raises:
            H5ValueError: also if a part is consumed and ``batch_size`` is not that of these batches.
        """
        if segments and batch_size != self.batch_size:
            raise H5ValueError(
                f"an epoch of batches of {self.batch_size} rows was begun, and the rest of it was asked for in batches "
                f"of {batch_size}: batches of one source, or of one length, cannot be cut again. Continue with "
                f"batch_size={self.batch_size}, and change it at the end of an epoch."
            )
        batches = self.batches
        dealt = DealtBatches(batches, world_size, drop_last, *self._after(segments, drop_last))

        def bounds(step: int) -> tuple[int, int]:
            batch, low, high = dealt.piece(step * world_size + rank)
            start = batches.start(batch)
            return start + low, start + high

        def rows(step: int) -> IntArray:
            batch, low, high = dealt.piece(step * world_size + rank)
            return batches.rows(batch)[low:high]

        return EpochPlan(dealt.n_steps, bounds, rows)

    def _after(self, segments: Sequence[Segment], drop_last: bool) -> tuple[int, int]:
        batch, offset = 0, 0
        for segment in segments:
            if segment[:2] == (1, 1) and self.batch_size != 1:  # rows of many segments, saved as one
                batch, offset = self._locate(self.batches.start(batch) + offset + segment.n_batches)
                continue
            dealt = DealtBatches(self.batches, segment.world_size, drop_last, batch, offset)
            if segment.n_batches > dealt.n_steps * dealt.world_size:
                raise H5ValueError(
                    f"{segment} was asked for, and {self.batches.n_batches - batch} batches are left of "
                    f"{self.batches.n_batches}. Ask for fewer batches."
                )
            batch, offset = dealt.after(segment.n_batches)
        return batch, offset

    def _locate(self, row: int) -> tuple[int, int]:
        if row > self.n_rows:
            raise H5ValueError(f"{row} consumed rows were given, and there are {self.n_rows}. Ask for fewer.")
        batch = bisect_right(range(self.batches.n_batches + 1), row, key=self.batches.start) - 1
        return batch, row - self.batches.start(batch)

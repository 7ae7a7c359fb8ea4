"""What an epoch visits, and its batches: one sequence, the same on every rank, as a pure function of a few numbers.

Rank ``r`` of ``W`` takes batch ``t * W + r`` at step ``t``. What has been consumed is therefore always a prefix
of the sequence, and the position of a run is a list of segments ``(batch_size, world_size, batches)``.

An ``EpochRecipe`` makes the ``EpochSequence`` of each epoch. The recipes here visit each row once, of the dataset or of
a rank's shard; ``weights``, ``buckets`` and ``mixture`` have the others. Samplers and loaders never ask which it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray
from .permutation import permutation
from .window import BlockTable, WindowOrder

__all__ = [
    "PLAN_VERSION",
    "BatchSequence",
    "DealtBatches",
    "EachRowOnce",
    "EpochPlan",
    "EpochRecipe",
    "EpochSequence",
    "EvaluationBatches",
    "MadeBatches",
    "Mode",
    "OrderParameters",
    "RowOrder",
    "RowSequence",
    "Segment",
    "SourceOrder",
    "TrainBatches",
    "balanced_contiguous_shard",
    "consumed_rows",
    "interleaved_indices",
    "order_rows",
]


PLAN_VERSION = 1
"""Part of every saved state: raised when the order of any mode changes."""

Mode = Literal["global", "window", "none"]
RowOrder: TypeAlias = Callable[[int, int], IntArray]


class SourceOrder(NamedTuple):
    """The order of a source's rows; see ``OrderParameters``."""

    mode: Mode
    streams: int = 1
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class OrderParameters:
    """What decides the order of rows, together with the epoch and the block table.

    Attributes:
        mode: ``global`` (one permutation of all rows), ``window`` (blocks mixed a window at a time) or
            ``none`` (storage order).
        seed: seed of the run.
        batch_size: rows of a batch when the epoch began; streams take turns by batches.
        streams: independent streams of blocks (``window``).
        window: blocks of a stream that are mixed at a time (``window``).
        version: of the orders' definition.
        recipe: what an epoch visits (see ``EpochRecipe``); "" for each row once.
        n_units: batches or rows of the epoch when it began; 0 for each row once.
        sources: the order of each source of a mixture.
    """

    mode: Mode
    seed: int = 0
    batch_size: int = 1
    streams: int = 1
    window: int = 0
    version: int = PLAN_VERSION
    recipe: str = ""
    n_units: int = 0
    sources: tuple[SourceOrder, ...] = ()


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
    """What one rank does in the rest of an epoch.

    Attributes:
        n_steps: batches that are left for this rank.
        bounds: first position in the epoch's sequence, and the one after the last, of a step's rows; steps count from
            0 at the first that is left.
        rows: indices into the dataset for a step, shape ``(batch,)``.
    """

    n_steps: int
    bounds: Callable[[int], tuple[int, int]]
    rows: Callable[[int], IntArray]


def order_rows(blocks: BlockTable, parameters: OrderParameters, epoch: int, place: int = 0) -> RowOrder:
    """Return the sequence of an epoch's rows, as a function from positions ``[start, stop)`` to row indices.

    Args:
        blocks: the rows.
        parameters: what decides the order.
        epoch: which epoch.
        place: sets orders apart that have the same parameters (``global`` alone).

    Raises:
        H5ValueError: the order belongs to another version of this package, or ``window`` has a number below 1.
    """
    if parameters.version != PLAN_VERSION:
        raise H5ValueError(
            f"an order of version {parameters.version} was asked for; this package has version {PLAN_VERSION}. "
            "Install the version of lightning_h5 that began the run, or start a new run."
        )
    if parameters.mode == "none":
        return lambda start, stop: np.arange(start, stop, dtype=np.int64)
    if parameters.mode == "global":
        # Drawn when the first rows are asked for: counting steps or rows of batches costs no permutation.
        drawn = cache(lambda: permutation(blocks.n_rows, parameters.seed, epoch, place=place))
        return lambda start, stop: drawn()(start, stop)
    return WindowOrder(
        blocks=blocks,
        seed=parameters.seed,
        epoch=epoch,
        batch_size=parameters.batch_size,
        streams=parameters.streams,
        window=parameters.window,
    )


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
    _check(total, world_size, rank)
    size, rest = divmod(total, world_size)
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest)


def interleaved_indices(total: int, world_size: int, rank: int) -> IntArray:
    """Return every ``world_size``-th of ``total`` rows, starting at ``rank``; shape ``(n,)``.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.

    Raises:
        H5ValueError: a number is out of range.
    """
    _check(total, world_size, rank)
    return np.arange(rank, total, world_size, dtype=np.int64)


def _check(total: int, world_size: int, rank: int) -> None:
    if total < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise H5ValueError(
            f"a shard of total={total} rows was asked for rank={rank} of world_size={world_size}. "
            "Pass total >= 0, world_size >= 1 and a rank from 0 to world_size - 1."
        )


@dataclass(frozen=True)
class TrainBatches:
    """One sequence of rows cut into rounds of ``world_size`` batches; rank ``r`` takes batch ``t * world_size + r``.

    Whole rounds come first. A ragged end is dropped with ``drop_last``. Otherwise the last two rounds are cut again
    into batches whose sizes differ by one row, so that nothing is dropped, nothing repeated and none is tiny.
    If that is impossible (``batch_size`` 1 and a remainder), the remainder is left out: the sequence's end in
    epoch 0, the rows before those in epoch 1, and so on to the sequence's start, and again from its end.

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
        """Steps that every rank takes."""
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

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the position in the sequence of the first row of a batch, and of the one after the last."""
        if batch < self._n_plain:
            return batch * self.batch_size, (batch + 1) * self.batch_size
        return self.start(batch), self.stop(batch)

    def start(self, batch: int) -> int:
        """Return the position in the sequence of the first row of a batch (0 to ``n_steps * world_size``)."""
        return self._skip_left_out(self._before(batch))

    def stop(self, batch: int) -> int:
        """Return the position after the last row of a batch; 0 for batch -1."""
        return self._skip_left_out(self._before(batch + 1) - 1) + 1 if batch >= 0 else 0

    @cached_property
    def _n_even_rounds(self) -> int:
        """Rounds of full batches, before the ragged end."""
        full, rest = divmod(self.n_rows, self.batch_size * self.world_size)
        return self.n_steps if not rest or self.n_steps == full else max(0, full - 1)

    @cached_property
    def _n_plain(self) -> int:
        """Full batches at the sequence's start, before any row that is left out."""
        return min(self._n_even_rounds * self.world_size, self._first_left_out // self.batch_size)

    @cached_property
    def _first_left_out(self) -> int:
        if self.drop_last or not self.n_left_out:
            return self.n_rows
        last_place = self.consumed + self.n_rows - self.n_left_out
        return max(0, (last_place - self.epoch * self.n_left_out) % (last_place + 1) - self.consumed)

    def _before(self, batch: int) -> int:
        """Return the rows in the batches before a batch."""
        even = self._n_even_rounds * self.world_size
        if batch <= even:
            return batch * self.batch_size
        n_batches = self.n_steps * self.world_size - even
        n_rows = self.n_rows - even * self.batch_size
        return (
            even * self.batch_size + balanced_contiguous_shard(n_rows, n_batches, min(batch - even, n_batches) - 1)[1]
        )

    def _skip_left_out(self, position: int) -> int:
        """Return the position in the sequence of a position among the rows in batches."""
        return position + self.n_left_out if position >= self._first_left_out else position


@dataclass(frozen=True)
class EvaluationBatches:
    """A contiguous shard for each rank, cut into the same number of batches on every rank; every row exactly once.

    With ``batch_size`` 1 and a remainder some ranks get one batch more: there is no row left to make one of.

    Attributes:
        n_rows: rows of all ranks.
        batch_size: most rows of a batch.
        world_size: number of ranks.
        rank: this rank.
    """

    n_rows: int
    batch_size: int
    world_size: int
    rank: int

    @property
    def shard(self) -> tuple[int, int]:
        """First row, and the row after the last, of this rank."""
        return balanced_contiguous_shard(self.n_rows, self.world_size, self.rank)

    @property
    def n_steps(self) -> int:
        """Batches of this rank."""
        first, last = self.shard
        largest = -(-self.n_rows // self.world_size)
        return min(-(-largest // self.batch_size), last - first)

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first row of a batch, and the row after the last: full ones first, the last two share the rest."""
        first, last = self.shard
        full = max(0, self.n_steps - 2)
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


def consumed_rows(n_rows: int, segments: Sequence[Segment], drop_last: bool, epoch: int = 0) -> int:
    """Return the rows of the sequence that the segments have consumed.

    Args:
        n_rows: rows of the epoch.
        segments: what was consumed, in the order of time; each is a part of what the ones before it left.
        drop_last: whether a ragged end is dropped.
        epoch: which epoch.

    Raises:
        H5ValueError: a segment has more batches than were left.
    """
    done = 0
    for segment in segments:
        batches = TrainBatches(n_rows - done, segment.batch_size, segment.world_size, drop_last, epoch, done)
        if segment.n_batches > batches.n_steps * batches.world_size:
            raise H5ValueError(
                f"{segment} was asked for, and {n_rows - done} rows are left of {n_rows}. Ask for fewer batches."
            )
        done += batches.stop(segment.n_batches - 1)
    return done


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

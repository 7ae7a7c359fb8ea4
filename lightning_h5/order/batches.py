"""Batches of rows that belong together: their division among ranks, and batches of sequences of similar length.

Sequences of similar length share a batch, so that batches have little padding. In the order ``global`` all sequences
are sorted by length and divided into batches, which are shuffled. In the order ``chunks`` each stretch of the order is
sorted separately, so that rows that are decoded together stay together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray, cached_property
from .permutation import GAMMA, mix, stream
from .plan import EpochPlan, EpochRecipe, OrderParameters, RowOrder, Segment, order_rows
from .shards import balanced_contiguous_shard
from .window import BlockTable

__all__ = ["BatchSequence", "LengthRecipe", "MadeBatches"]

LENGTHS, BATCHES = 13, 14  # purposes of the random streams

JITTER = 0.02
"""Relative noise added to lengths before sorting, so that other sequences share a batch in each epoch."""

MAX_PADDING = 0.05
"""Maximum share of padding; batches of the longest sequences, which differ most, are made smaller to keep it."""

MIN_SHARE = 8
"""A batch is never smaller than ``batch_size`` divided by this."""

STRETCH_BATCHES = 1024
"""Maximum batches of a stretch in the order ``chunks``: for log-normal lengths (sigma 1), 4 to 7 % of batches of 32 are
padding."""


class MadeBatches(Protocol):
    """Batches of rows that belong together: of one source, or of similar length."""

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


class _RowRange(NamedTuple):
    """Rows ``[low, high)`` of a batch."""

    batch: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class DealtBatches:
    """The remaining batches, in rounds of ``world_size``; rank ``r`` gets piece ``t * world_size + r``.

    If their number is not a multiple of the number of ranks, some of the last batches are halved, so that no row is
    dropped or repeated, and no piece has rows of two batches. If batches are single rows, the last ones are left out.

    Attributes:
        batches: all batches.
        world_size: number of ranks.
        drop_last: leave out the batches of an incomplete round, instead of halving some.
        first: number of the first remaining batch.
        offset: number of consumed rows of this batch.
    """

    batches: MadeBatches
    world_size: int
    drop_last: bool = False
    first: int = 0
    offset: int = 0

    @cached_property
    def n_steps(self) -> int:
        """Number of steps of every rank."""
        return (self.batches.n_batches - self.first) // self.world_size + self._has_halves

    def piece(self, place: int) -> _RowRange:
        """Return a piece, by its place among the remaining pieces."""
        return self._last[place - self._n_whole] if place >= self._n_whole else self._rest_of(self.first + place)

    def after(self, n_pieces: int) -> tuple[int, int]:
        """Return the first remaining batch after a number of pieces, and the number of its consumed rows."""
        if n_pieces == 0:
            return self.first, self.offset
        batch, _, high = self.piece(n_pieces - 1)
        return (batch + 1, 0) if high == self._rest_of(batch).high else (batch, high)

    def _rest_of(self, batch: int) -> _RowRange:
        low = self.offset if batch == self.first else 0
        return _RowRange(batch, low, self.batches.start(batch + 1) - self.batches.start(batch))

    def _n_rows(self, n_batches: int) -> int:
        """Return the number of unconsumed rows in the last batches."""
        end, batch = self.batches.n_batches, self.batches.n_batches - n_batches
        return self.batches.start(end) - self.batches.start(batch) - (self.offset if batch == self.first else 0)

    @cached_property
    def _has_halves(self) -> bool:
        """Whether some batches are halved to complete the last round."""
        n_left = self.batches.n_batches - self.first
        n_full, n_rest = divmod(n_left, self.world_size)
        return n_rest > 0 and not self.drop_last and self._n_rows(n_left) >= (n_full + 1) * self.world_size

    @cached_property
    def _n_whole(self) -> int:
        """Number of batches before the halved, or left-out, batches."""
        n_full, n_rest = divmod(self.batches.n_batches - self.first, self.world_size)
        if not self._has_halves:
            return n_full * self.world_size
        rounds = min(1, n_full)
        while self._n_rows(n_rest + rounds * self.world_size) < (rounds + 1) * self.world_size:
            rounds = min(2 * rounds, n_full)  # single rows cannot be halved
        return (n_full - rounds) * self.world_size

    @cached_property
    def _last(self) -> list[_RowRange]:
        """The pieces of the other batches, in whole rounds."""
        pieces = [self._rest_of(batch) for batch in range(self.first + self._n_whole, self.batches.n_batches)]
        n_wanted = -(-len(pieces) // self.world_size) * self.world_size
        n_rows = [piece.high - piece.low for piece in pieces]
        if not self._has_halves:
            return []
        parts = [1] * len(pieces)
        while sum(parts) < n_wanted:
            largest = max(range(len(pieces)), key=lambda at: (n_rows[at] / parts[at], at))
            parts[largest] += 1
        return [
            _RowRange(piece.batch, piece.low + low, piece.low + high)
            for piece, n, size in zip(pieces, parts, n_rows, strict=True)
            for low, high in (balanced_contiguous_shard(size, n, part) for part in range(n))
        ]


@dataclass(frozen=True, eq=False)
class BatchSequence:
    """Batches of rows that belong together, in their order.

    Attributes:
        batches: the batches.
        batch_size: rows of most batches.
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
            H5ValueError: also if a part is consumed and ``batch_size`` differs.
        """
        if segments and batch_size != self.batch_size:
            raise H5ValueError(
                f"the epoch was begun with batches of {self.batch_size} rows, and the rest of it was requested in "
                f"batches of {batch_size}: batches of one source, or of one length, cannot be split differently. "
                f"Continue with batch_size={self.batch_size}, and change it at the end of an epoch."
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
            if segment[:2] == (1, 1) and self.batch_size != 1:  # many segments saved as single rows
                batch, offset = self._locate(self.batches.start(batch) + offset + segment.n_batches)
                continue
            dealt = DealtBatches(self.batches, segment.world_size, drop_last, batch, offset)
            if segment.n_batches > dealt.n_steps * dealt.world_size:
                raise H5ValueError(
                    f"{segment} was requested, but {self.batches.n_batches - batch} batches are left of "
                    f"{self.batches.n_batches}. Request fewer batches."
                )
            batch, offset = dealt.after(segment.n_batches)
        return batch, offset

    def _locate(self, row: int) -> tuple[int, int]:
        if row > self.n_rows:
            raise H5ValueError(f"{row} consumed rows were given, but there are {self.n_rows}. Pass fewer.")
        batch = bisect_right(range(self.batches.n_batches + 1), row, key=self.batches.start) - 1
        return batch, row - self.batches.start(batch)


def alike_sizes(lengths: IntArray, batch_size: int) -> IntArray:
    """Return the number of sequences of each batch, from the longest sequences to the shortest.

    Args:
        lengths: of all sequences, in any order.
        batch_size: the largest batch.
    """
    longest_first = np.sort(lengths)[::-1]
    sums = np.concatenate([[0], np.cumsum(longest_first)])
    min_size = max(1, batch_size // MIN_SHARE)
    sizes, start = [], 0
    while start < len(lengths):
        counts = np.arange(1, min(batch_size, len(lengths) - start) + 1)
        fill = (sums[start + counts] - sums[start]) / (longest_first[start] * counts)
        candidates = np.flatnonzero(fill >= 1 - MAX_PADDING)
        sizes.append(int(max(counts[candidates[-1]], min(min_size, counts[-1]))))
        start += sizes[-1]
    if 2 * len(sizes) > len(lengths) + 1:  # ranks could not have the same number of batches
        n_full, n_rest = divmod(len(lengths), batch_size)
        sizes = [batch_size] * n_full + [n_rest] * (n_rest > 0)
    return np.asarray(sizes, dtype=np.int64)


class _AlikeBatches:
    """All sequences of an epoch, in batches of similar length, in a random order.

    Args:
        lengths: of each sequence, shape ``(n_sequences,)``.
        sizes: number of sequences of each batch, from the longest to the shortest (see ``alike_sizes``).
        seed: seed of the run.
        epoch: from 0.
    """

    def __init__(self, lengths: IntArray, sizes: IntArray, seed: int, epoch: int) -> None:
        self._lengths, self._seed, self._epoch = lengths, seed, epoch
        self.n_batches = len(sizes)
        order = _shuffled_batches(self.n_batches, seed, epoch)
        self._sizes, self._firsts = sizes[order], (np.cumsum(sizes) - sizes)[order]
        self._starts: IntArray = np.concatenate([[0], np.cumsum(self._sizes)])

    def start(self, batch: int) -> int:
        """See ``MadeBatches``."""
        return int(self._starts[batch])

    def rows(self, batch: int) -> IntArray:
        """See ``MadeBatches``."""
        first = int(self._firsts[batch])
        return self._longest_first[first : first + int(self._sizes[batch])]

    @cached_property
    def _longest_first(self) -> IntArray:
        return _longest_first(np.arange(len(self._lengths)), self._lengths, self._seed, self._epoch)


class _AlikeInStretches:
    """Stretches of an order, each in batches of similar length, in a random order.

    Args:
        order: the epoch's sequence, independent of lengths.
        lengths: length of each sequence, shape ``(n_sequences,)``.
        batch_size: sequences of a batch; the last batch, with the shortest sequences of the last stretch, may have
            fewer.
        seed: seed of the run.
        epoch: from 0.
    """

    def __init__(self, order: RowOrder, lengths: IntArray, batch_size: int, seed: int, epoch: int) -> None:
        self._order, self._lengths, self._batch_size = order, lengths, batch_size
        self._seed, self._epoch = seed, epoch
        self.n_batches = -(-len(lengths) // batch_size)
        # The first batch of each stretch, and their number: a short last stretch would have too few batches to sort.
        n_stretches = -(-self.n_batches // STRETCH_BATCHES)
        self._cuts = np.arange(n_stretches + 1) * self.n_batches // n_stretches
        self._stretch = lru_cache(maxsize=2)(self._make)

    def start(self, batch: int) -> int:
        """See ``MadeBatches``."""
        return min(batch * self._batch_size, len(self._lengths))

    def rows(self, batch: int) -> IntArray:
        """See ``MadeBatches``."""
        stretch = int(np.searchsorted(self._cuts, batch, side="right")) - 1
        place = batch - int(self._cuts[stretch])
        return self._stretch(stretch)[place * self._batch_size : (place + 1) * self._batch_size]

    def _make(self, stretch: int) -> IntArray:
        low, high = self._cuts[stretch : stretch + 2].tolist()
        rows = self._order(self.start(low), self.start(high))
        rows = _longest_first(rows, self._lengths[rows], self._seed, self._epoch)
        n_whole = len(rows) // self._batch_size
        batches = rows[: n_whole * self._batch_size].reshape(-1, self._batch_size)
        order = _shuffled_batches(n_whole, self._seed, self._epoch, stretch)
        sorted_rows: IntArray = np.concatenate([batches[order].ravel(), rows[n_whole * self._batch_size :]])
        return sorted_rows


def _shuffled_batches(n_batches: int, seed: int, epoch: int, stretch: int = 0) -> IntArray:
    keys = np.asarray(stream(seed, epoch, BATCHES, stretch).random_raw(n_batches), dtype=np.uint64)
    return np.argsort(keys, kind="stable")


def _longest_first(rows: IntArray, lengths: IntArray, seed: int, epoch: int) -> IntArray:
    """Return rows by descending lengths, apart from the jitter."""
    word = np.asarray(stream(seed, epoch, LENGTHS).random_raw(1), dtype=np.uint64)[0]
    # Integers, so that every machine sorts the same way.
    noise = (mix(word + rows.astype(np.uint64) * GAMMA) >> np.uint64(44)).astype(np.int64)
    unit, spread = 1 << 20, int(2 * JITTER * (1 << 20))
    return rows[np.argsort(-(lengths * (unit - spread // 2) + (lengths * noise >> 20) * spread), kind="stable")]


@dataclass(frozen=True, eq=False)
class LengthRecipe(EpochRecipe):
    """Epochs of batches of sequences of similar length.

    Attributes:
        lengths: of each sequence, shape ``(n_sequences,)``.
        blocks: the sequences.
        description: the sequences in words.
    """

    lengths: IntArray
    blocks: BlockTable
    description: str
    _sizes: dict[int, IntArray] = field(default_factory=dict, init=False, repr=False)  # by ``batch_size``

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return self.description

    def n_units(self, order: OrderParameters, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``: sequences."""
        return len(self.lengths)

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> BatchSequence:
        """See ``EpochRecipe``."""
        lengths, size = self.lengths, order.batch_size
        if order.mode == "chunks" and len(lengths) > STRETCH_BATCHES * size:  # otherwise a single stretch has all rows
            rows = order_rows(self.blocks, order, epoch)
            return BatchSequence(_AlikeInStretches(rows, lengths, size, order.seed, epoch), size)
        if size not in self._sizes:
            self._sizes[size] = alike_sizes(lengths, size)
        return BatchSequence(_AlikeBatches(lengths, self._sizes[size], order.seed, epoch), size)

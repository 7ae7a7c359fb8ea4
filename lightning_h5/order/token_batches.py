"""Batches with a maximum number of steps: sequences of similar length, padded, or packed by best fit.

An epoch's order is divided into pools of about ``STRETCH_BATCHES`` batches. In a pool the sequences are sorted by
length, the longest first. Padded batches are cut from them one after the other. Packed batches are filled by best fit:
each sequence goes to the fullest batch that has room for it. The batches of a pool are then shuffled, so that lengths
do not drift over an epoch.

All epochs need the same number of batches, and pools of another order can need a few more or fewer. The number is fixed
by some reference orders, which depend on lengths alone. An epoch that needs fewer batches halves some, and one that
needs more uses the sequences in the order of a reference.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..types import IntArray, cached_property
from .batches import BATCHES, JITTER, STRETCH_BATCHES, BatchSequence
from .permutation import GAMMA, mix, permutation, stream
from .plan import EpochRecipe, OrderParameters, order_rows
from .shards import EvaluationBatches, RankShard, as_array, balanced_contiguous_shard, contiguous_shard
from .window import BlockTable

__all__ = ["TokenRecipe"]

NOISE, REFERENCES = 22, 23  # purposes of the random streams

REFERENCE_ROWS = 1 << 18
"""Number of sequences in all reference orders together. There are 1 to ``MAX_REFERENCES`` orders."""

MAX_REFERENCES = 8

BATCH_BITS = 40
"""Bits of the number of a batch in a pool."""

PACKED_JITTER = 0.1
"""``JITTER`` for packed sequences: their batches need no similar lengths."""

MAX_RECENT = 2
"""Epochs whose batches are kept: an epoch of a mixture begins in one cycle of a source, and ends in another."""

SPARE_SHARE = 1024
"""An epoch has one spare batch per ``SPARE_SHARE`` batches of the references: orders of many pools differ by less."""


@dataclass(frozen=True)
class TokenLimit:
    """The most steps of a batch.

    Attributes:
        max_tokens: number of steps.
        packs: sequences are joined; otherwise each counts as many steps as the longest of its batch.
        max_samples: number of sequences.
    """

    max_tokens: int
    packs: bool
    max_samples: int

    def batches_in(self, lengths: IntArray) -> float:
        """Return about how many batches sequences make."""
        return max(int(lengths.sum()) / self.max_tokens, len(lengths) / self.max_samples)

    def cut(self, lengths: IntArray) -> IntArray:
        """Return the number of sequences in each batch of consecutive ones."""
        sizes = list[int]()
        count = total = longest = 0
        for length in lengths.tolist():
            n_steps = total + length if self.packs else max(longest, length) * (count + 1)
            if count and (count == self.max_samples or n_steps > self.max_tokens):
                sizes.append(count)
                count = total = longest = 0
            count, total, longest = count + 1, total + length, max(longest, length)
        return np.array([*sizes, *[count] * (count > 0)], dtype=np.int64)

    def best_fit(self, lengths: IntArray) -> IntArray:
        """Return the batch of each sequence: the fullest that has room for it."""
        batches, counts = list[int](), list[int]()
        rooms = list[int]()  # ascending: the steps that a batch has room for, and in the lower bits its number
        least, number = int(lengths.min(initial=self.max_tokens)), (1 << BATCH_BITS) - 1
        for length in lengths.tolist():
            at = bisect_left(rooms, length << BATCH_BITS)
            if at < len(rooms):
                room = rooms.pop(at)
                batch = room & number
                counts[batch] += 1
            else:
                batch = len(counts)
                room = self.max_tokens << BATCH_BITS | batch
                counts.append(1)
            batches.append(batch)
            room -= length << BATCH_BITS
            if room >> BATCH_BITS >= least and counts[batch] < self.max_samples:
                insort(rooms, room)
        return np.array(batches, dtype=np.int64)


class Cut(NamedTuple):
    """Sequences in batches.

    Attributes:
        rows: the sequences of the first batch, of the second, and so on.
        sizes: the number of sequences in each batch.
    """

    rows: IntArray
    sizes: IntArray

    def in_order(self, batches: IntArray) -> Cut:
        """Return the batches in another order."""
        sizes = self.sizes[batches]
        shifts = (np.cumsum(self.sizes) - self.sizes)[batches] - (np.cumsum(sizes) - sizes)
        return Cut(self.rows[np.arange(len(self.rows)) + np.repeat(shifts, sizes)], sizes)


def halved(sizes: IntArray, n_batches: int) -> IntArray:
    """Return the sizes of ``n_batches`` batches: the largest are halved. Needs at least one row for each batch."""
    while (n_more := n_batches - len(sizes)) > 0:
        largest = np.argsort(-sizes, kind="stable")[:n_more]
        is_halved = np.zeros(len(sizes), dtype=np.bool_)
        is_halved[largest] = sizes[largest] > 1
        halves = np.stack([sizes - sizes // 2 * is_halved, sizes // 2], axis=1)
        sizes = halves[np.stack([np.ones(len(sizes), dtype=np.bool_), is_halved], axis=1)]
    return sizes


def cut_pools(rows: IntArray, lengths: IntArray, limit: TokenLimit, noise_key: np.uint64) -> list[Cut]:
    """Return the batches of each pool, batches with the longest sequences first.

    Args:
        rows: the sequences, in the order of the epoch.
        lengths: of all sequences, shape ``(n_sequences,)``.
        limit: of batches.
        noise_key: a random word, which decides the noise of lengths.
    """
    n_pools = max(1, round(limit.batches_in(lengths[rows]) / STRETCH_BATCHES))
    jitter = PACKED_JITTER if limit.packs else JITTER
    pools = []
    for pool in range(n_pools):
        low, high = balanced_contiguous_shard(len(rows), n_pools, pool)
        sorted_rows = _longest_first(rows[low:high], lengths, jitter / n_pools, noise_key)
        if limit.packs:
            batches = limit.best_fit(lengths[sorted_rows])
            pools.append(Cut(sorted_rows[np.argsort(batches, kind="stable")], np.bincount(batches)))
        else:
            pools.append(Cut(sorted_rows, limit.cut(lengths[sorted_rows])))
    return pools


def _longest_first(rows: IntArray, lengths: IntArray, jitter: float, key: np.uint64) -> IntArray:
    """Return rows by falling lengths, each with up to ``jitter`` of relative noise; equal ones in their order."""
    # Integers, so that every machine sorts the same way. Lengths have up to 31 bits.
    noise = (mix(key + rows.astype(np.uint64) * GAMMA) >> np.uint64(48)).astype(np.int64)
    return rows[np.argsort(-lengths[rows] * ((1 << 31) + (noise - (1 << 15)) * int(jitter * (1 << 16))), kind="stable")]


def _word(seed: int, epoch: int, purpose: int) -> np.uint64:
    return np.uint64(np.asarray(stream(seed, epoch, purpose).random_raw(1))[0])


class LimitedBatches:
    """All sequences of an epoch in ``n_batches`` batches, which are computed at the first request.

    Args:
        n_rows: number of sequences.
        n_batches: number of batches.
        cut: returns the batches.
    """

    def __init__(self, n_rows: int, n_batches: int, cut: Callable[[], Cut]) -> None:
        self.n_batches = n_batches
        self._n_rows, self._cut = n_rows, cut

    def start(self, batch: int) -> int:
        """See ``MadeBatches``."""
        if batch in (0, self.n_batches):
            return self._n_rows if batch else 0
        return int(self._starts[batch])

    def rows(self, batch: int) -> IntArray:
        """See ``MadeBatches``."""
        return self._cut().rows[self.start(batch) : self.start(batch + 1)]

    @cached_property
    def _starts(self) -> IntArray:
        sizes = self._cut().sizes
        return np.cumsum(sizes) - sizes


@dataclass(frozen=True, eq=False)
class TokenRecipe(EpochRecipe):
    """Epochs of batches with a maximum number of steps.

    Without shuffling, batches are cut from the sequences in storage order.

    Attributes:
        lengths: steps of each sequence, shape ``(n_sequences,)``.
        blocks: the sequences.
        max_tokens: most steps of a batch.
        packs: sequences are joined; otherwise each counts as many steps as the longest of its batch.
        shard: the sequences that the rank holds; None if ranks share the batches of all.
    """

    lengths: IntArray
    blocks: BlockTable
    max_tokens: int
    packs: bool
    shard: RankShard | None = None
    _cached: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # numbers of batches, evaluations
    _recent: dict[tuple[OrderParameters, int], BatchSequence] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cached": {}, "_recent": {}}

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return f"{len(self.lengths):,} segments, {self.limit_text}"

    @property
    def limit_text(self) -> str:
        """The limit of batches in words."""
        return f"in {'packed' if self.packs else 'padded'} batches of at most {self.max_tokens:,} steps"

    @property
    def held_shard(self) -> RankShard | None:
        """See ``EpochRecipe``."""
        return self.shard

    @property
    def first_position(self) -> int:
        """See ``EpochRecipe``: places count over all ranks, one after the other."""
        shard = self.shard
        return 0 if shard is None else balanced_contiguous_shard(shard.n_rows, shard.world_size, shard.rank)[0]

    def numbers(self, rows: IntArray, epoch: int) -> IntArray:
        """See ``EpochRecipe``."""
        return rows if self.shard is None else as_array(self.shard.rows())[rows]

    def n_units(self, order: OrderParameters, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``: sequences."""
        return len(self.lengths)

    def mean_rows(self, batch_size: int) -> int:
        """See ``EpochRecipe``."""
        return max(1, int(len(self.lengths) / max(1, self._limit(batch_size).batches_in(self.lengths))))

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> BatchSequence:
        """See ``EpochRecipe``."""
        sequence = self._recent.pop((order, epoch), None) or self._sequence(order, epoch)
        self._recent[order, epoch] = sequence
        for key in [*self._recent][:-MAX_RECENT]:  # another thread, which plans the next epoch, may drop it first
            self._recent.pop(key, None)
        return sequence

    def n_batches(self, order: OrderParameters, world_size: int) -> tuple[int, int]:
        """See ``EpochRecipe``; the batches of all ranks."""
        n_needed, n_each = self._counts(order)
        if self.shard is not None:
            return sum(n_needed), sum(n_needed) - min(n_each, max(n_needed)) * len(n_needed)
        n_full, n_rest = divmod(n_each, world_size)
        return n_each, n_rest if len(self.lengths) < (n_full + 1) * world_size else 0

    def _counts(self, order: OrderParameters) -> tuple[list[int], int]:
        """Return the batches that each shard needs, or all sequences; and those of a sequence of batches."""
        key = (order.batch_size, order.mode)
        if key not in self._cached:
            limit = self._limit(order.batch_size)
            parts = [self.lengths]
            if self.shard is not None:
                ranks = range(self.shard.world_size)
                parts = [self.lengths[as_array(self.shard.rows(rank=rank))] for rank in ranks]
            n_needed = [_n_batches(lengths, limit, order) for lengths in parts]
            self._cached[key] = n_needed, min(max(n_needed), *map(len, parts))
        counts: tuple[list[int], int] = self._cached[key]
        return counts

    def evaluation(
        self, n_rows: int, batch_size: int, world_size: int, rank: int, ends: IntArray | None
    ) -> TokenEvaluation:
        """See ``EpochRecipe``."""
        key = (batch_size, world_size, rank)
        if key not in self._cached:
            limit = self._limit(batch_size)
            self._cached[key] = TokenEvaluation(
                n_rows, batch_size, world_size, rank, ends, lengths=self.lengths, limit=limit
            )
        evaluation: TokenEvaluation = self._cached[key]
        return evaluation

    def _limit(self, max_samples: int) -> TokenLimit:
        return TokenLimit(self.max_tokens, self.packs, max_samples)

    def _sequence(self, order: OrderParameters, epoch: int) -> BatchSequence:
        lengths = self.lengths if self.shard is None else self.lengths[as_array(self.shard.rows())]
        n_rows, n_batches = len(lengths), self._counts(order)[1]
        cut = cache(lambda: self._cut(lengths, n_batches, order, epoch))
        if self.shard is not None:
            n_rows = len(cut().rows)
        return BatchSequence(LimitedBatches(n_rows, n_batches, cut), order.batch_size)

    def _cut(self, lengths: IntArray, n_batches: int, order: OrderParameters, epoch: int) -> Cut:
        """Return the batches of an epoch."""
        limit, n_rows = self._limit(order.batch_size), len(lengths)
        if order.mode == "none":
            cut = Cut(np.arange(n_rows, dtype=np.int64), limit.cut(lengths))
        else:
            place = 0 if self.shard is None else 1 + self.shard.rank
            blocks = self.blocks if self.shard is None else BlockTable.of_sizes([n_rows])
            rows = order_rows(blocks, replace(order, batch_size=self.mean_rows(order.batch_size)), epoch, place)
            pools = cut_pools(rows(0, n_rows), lengths, limit, _word(order.seed, epoch, NOISE))
            if sum(len(pool.sizes) for pool in pools) > n_batches:
                pools = _reference(lengths, limit, epoch % _n_references(n_rows))
            shuffled = [
                pool.in_order(permutation(len(pool.sizes), order.seed, epoch, BATCHES, number)(0, len(pool.sizes)))
                for number, pool in enumerate(pools)
            ]
            cut = Cut(*map(np.concatenate, zip(*shuffled, strict=True)))
        if len(cut.sizes) > n_batches:  # another rank's shard has fewer sequences
            sizes = cut.sizes[:n_batches]
            return Cut(cut.rows[: int(sizes.sum())], sizes)
        return Cut(cut.rows, halved(cut.sizes, n_batches))


def _n_references(n_rows: int) -> int:
    return min(MAX_REFERENCES, max(1, REFERENCE_ROWS // max(1, n_rows)))


def _reference(lengths: IntArray, limit: TokenLimit, number: int) -> list[Cut]:
    """Return the batches of sequences in an order that depends on their number alone."""
    rows = permutation(len(lengths), 0, number, REFERENCES)(0, len(lengths))
    return cut_pools(rows, lengths, limit, _word(0, number, REFERENCES))


def _n_batches(lengths: IntArray, limit: TokenLimit, order: OrderParameters) -> int:
    """Return the number of batches that suffice for sequences in almost any order of a mode."""
    if order.mode == "none":
        return len(limit.cut(lengths))
    orders = [_reference(lengths, limit, number) for number in range(_n_references(len(lengths)))]
    if order.mode == "chunks":  # neighbors can be of other lengths than a random choice
        orders.append(cut_pools(np.arange(len(lengths)), lengths, limit, _word(0, 0, REFERENCES)))
    n_batches = max(sum(len(pool.sizes) for pool in pools) for pools in orders)
    return min(len(lengths), n_batches + n_batches // SPARE_SHARE)


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenEvaluation(EvaluationBatches):
    """A contiguous shard for each rank, cut into batches with a maximum number of steps; each sequence exactly once.

    All ranks have the same number of batches: ranks that need fewer halve some. A rank has fewer batches if its shard
    has fewer sequences than another shard has batches.

    Attributes:
        lengths: steps of each sequence, shape ``(n_sequences,)``.
        limit: of batches.
    """

    lengths: IntArray
    limit: TokenLimit

    @cached_property
    def n_steps(self) -> int:
        """Batches of this rank."""
        first, last = self.shard
        return min(last - first, max(len(self._sizes(rank)) for rank in range(self.world_size)))

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first row of a batch, and the row after the last."""
        first = self.shard[0]
        return first + int(self._ends[step]), first + int(self._ends[step + 1])

    def _sizes(self, rank: int) -> IntArray:
        start, stop = contiguous_shard(self.n_rows, self.world_size, rank, self.ends)
        return self.limit.cut(self.lengths[start:stop])

    @cached_property
    def _ends(self) -> IntArray:
        return np.concatenate([[0], np.cumsum(halved(self._sizes(self.rank), self.n_steps))])

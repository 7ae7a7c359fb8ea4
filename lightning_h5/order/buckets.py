"""Batches of sequences of similar length, so that little of a batch is padding.

In the order ``global`` all sequences are sorted by length, cut into batches, and these are shuffled. In the order
``window`` that is done to one stretch of the order after another, so that what is decoded together stays together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import IntArray
from .epoch import BatchSequence, EpochRecipe, OrderParameters, RowOrder, order_rows
from .permutation import GAMMA, mix, stream
from .window import BlockTable

__all__ = ["AlikeBatches", "LengthBuckets", "LengthRecipe", "alike_sizes"]

LENGTHS, BATCHES = 13, 14  # purposes of the random streams

JITTER = 0.02
"""Relative noise added to lengths before they are sorted, so that other sequences share a batch each epoch."""

MAX_PADDING = 0.05
"""A batch is made smaller before more of it than this is padding: the longest few, which differ most."""

MIN_SHARE = 8
"""But not smaller than this part of ``batch_size``."""

STRETCH_BATCHES = 1024
"""Batches of a stretch in the order ``window``, at most: of log-normal lengths (sigma 1) 4 to 7 % of batches of 32 are
padding."""


def alike_sizes(lengths: IntArray, batch_size: int) -> IntArray:
    """Return how many sequences each batch has, from the longest ones to the shortest.

    Args:
        lengths: of all sequences, in any order.
        batch_size: the largest batch.
    """
    longest_first = np.sort(lengths)[::-1]
    sums = np.concatenate([[0], np.cumsum(longest_first)])
    least = max(1, batch_size // MIN_SHARE)
    sizes, start = [], 0
    while start < len(lengths):
        counts = np.arange(1, min(batch_size, len(lengths) - start) + 1)
        used = (sums[start + counts] - sums[start]) / (longest_first[start] * counts)
        enough = np.flatnonzero(used >= 1 - MAX_PADDING)
        sizes.append(int(max(counts[enough[-1]], min(least, counts[-1]))))
        start += sizes[-1]
    if 2 * len(sizes) > len(lengths) + 1:  # ranks could not make equally many batches of single sequences
        full, rest = divmod(len(lengths), batch_size)
        sizes = [batch_size] * full + [rest] * (rest > 0)
    return np.asarray(sizes, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class AlikeBatches:
    """All sequences of an epoch, in batches of similar length, in a random order.

    Attributes:
        lengths: of each sequence, shape ``(n_sequences,)``.
        sizes: how many each batch has, from the longest ones to the shortest (see ``alike_sizes``).
        seed: seed of the run.
        epoch: from 0.
    """

    lengths: IntArray
    sizes: IntArray
    seed: int
    epoch: int

    @property
    def n_batches(self) -> int:
        """See ``MadeBatches``."""
        return len(self.sizes)

    def start(self, batch: int) -> int:
        """See ``MadeBatches``."""
        return int(self._starts[batch])

    def rows(self, batch: int) -> IntArray:
        """See ``MadeBatches``."""
        first = int(self._firsts[self._order[batch]])
        return self._sorted[first : first + int(self.sizes[self._order[batch]])]

    @cached_property
    def _order(self) -> IntArray:
        keys = np.asarray(stream(self.seed, self.epoch, BATCHES).random_raw(len(self.sizes)), dtype=np.uint64)
        return np.argsort(keys, kind="stable")

    @cached_property
    def _starts(self) -> IntArray:
        return np.concatenate([[0], np.cumsum(self.sizes[self._order])])

    @cached_property
    def _firsts(self) -> IntArray:
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def _sorted(self) -> IntArray:
        rows = np.arange(len(self.lengths), dtype=np.int64)
        return rows[_longest_first(rows, self.lengths, self.seed, self.epoch)]


@dataclass(frozen=True, eq=False)
class LengthBuckets:
    """Stretches of an order, each in batches of similar length, in a random order.

    Attributes:
        order: the epoch's sequence, whatever the lengths are.
        lengths: of each sequence, shape ``(n_sequences,)``.
        batch_size: sequences of a batch; the shortest of the last stretch may be fewer, and come last.
        seed: seed of the run.
        epoch: from 0.
    """

    order: RowOrder
    lengths: IntArray
    batch_size: int
    seed: int
    epoch: int

    @property
    def n_batches(self) -> int:
        """See ``MadeBatches``."""
        return -(-len(self.lengths) // self.batch_size)

    def start(self, batch: int) -> int:
        """See ``MadeBatches``."""
        return min(batch * self.batch_size, len(self.lengths))

    def rows(self, batch: int) -> IntArray:
        """See ``MadeBatches``."""
        stretch = int(np.searchsorted(self._cuts, batch, side="right")) - 1
        inside = batch - int(self._cuts[stretch])
        return self._stretch(stretch)[inside * self.batch_size : (inside + 1) * self.batch_size]

    @cached_property
    def _cuts(self) -> IntArray:
        """The first batch of each stretch, and their number: a short one at the end would hold too few to sort."""
        n_stretches = -(-self.n_batches // STRETCH_BATCHES)
        return np.arange(n_stretches + 1) * self.n_batches // n_stretches

    @cached_property
    def _stretch(self) -> Callable[[int], IntArray]:
        return lru_cache(maxsize=2)(self._make)

    def _make(self, stretch: int) -> IntArray:
        low, high = self._cuts[stretch : stretch + 2].tolist()
        rows = self.order(self.start(low), self.start(high))
        rows = rows[_longest_first(rows, self.lengths[rows], self.seed, self.epoch)]
        n_whole = len(rows) // self.batch_size
        batches = rows[: n_whole * self.batch_size].reshape(-1, self.batch_size)
        keys = np.asarray(stream(self.seed, self.epoch, BATCHES, stretch).random_raw(n_whole), dtype=np.uint64)
        made: IntArray = np.concatenate(
            [batches[np.argsort(keys, kind="stable")].ravel(), rows[n_whole * self.batch_size :]]
        )
        return made


def _longest_first(rows: IntArray, lengths: IntArray, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return an order of falling lengths, except for the jitter."""
    word = np.asarray(stream(seed, epoch, LENGTHS).random_raw(1), dtype=np.uint64)[0]
    # Whole numbers, so that every machine sorts the same.
    noise = (mix(word + rows.astype(np.uint64) * GAMMA) >> np.uint64(44)).astype(np.int64)
    one, spread = 1 << 20, int(2 * JITTER * (1 << 20))
    return np.argsort(-(lengths * (one - spread // 2) + (lengths * noise >> 20) * spread), kind="stable")


@dataclass(frozen=True, eq=False)
class LengthRecipe(EpochRecipe):
    """Epochs of batches of sequences of similar length.

    Attributes:
        lengths: of each sequence, shape ``(n_sequences,)``.
        blocks: the sequences.
        description: what they are.
    """

    lengths: IntArray
    blocks: BlockTable
    description: str

    @property
    def text(self) -> str:
        """See ``EpochRecipe``."""
        return self.description

    def n_units(self, batch_size: int, world_size: int, *, drop_last: bool) -> int:
        """See ``EpochRecipe``: sequences."""
        return len(self.lengths)

    def sequence(self, order: OrderParameters, epoch: int, *, drop_last: bool) -> BatchSequence:
        """See ``EpochRecipe``."""
        lengths, size = self.lengths, order.batch_size
        if order.mode == "window" and len(lengths) > STRETCH_BATCHES * size:  # else there is one stretch, of all
            rows = order_rows(self.blocks, order, epoch)
            return BatchSequence(LengthBuckets(rows, lengths, size, order.seed, epoch), size)
        return BatchSequence(AlikeBatches(lengths, self._sizes(size), order.seed, epoch), size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_sizes"}

    @cached_property
    def _sizes(self) -> Callable[[int], IntArray]:
        return lru_cache(maxsize=4)(partial(alike_sizes, self.lengths))

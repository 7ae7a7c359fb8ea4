"""The order ``chunks``, which mixes blocks (rows that lie together on disk) a window at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..types import IntArray, cached_property
from .permutation import (
    GAMMA,
    PLACE_ROUNDS,
    KeyedPermutation,
    TablePermutation,
    mix,
    permutation,
    shuffled_places,
    stream,
)

__all__ = ["MAX_BLOCK_ROWS", "BlockTable", "WindowOrder"]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Rows of a dataset cut into blocks, in storage order, over all its files.

    Attributes:
        starts: first row of each block, and the number of rows at the end; ascending, shape ``(n_blocks + 1,)``.
    """

    starts: npt.NDArray[np.int64]

    @classmethod
    def of_sizes(cls, sizes: Sequence[int] | npt.NDArray[Any]) -> BlockTable:
        """Return consecutive blocks with the given numbers of rows, without empty blocks."""
        lengths = np.asarray(sizes, dtype=np.int64)
        lengths = lengths[lengths > 0]
        return cls(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    @classmethod
    def of_runs(cls, *numbers: IntArray) -> BlockTable:
        """Return blocks of rows that follow each other and have the same numbers."""
        is_new = np.logical_or.reduce([np.diff(column) != 0 for column in numbers])
        return cls.of_sizes(np.diff(np.concatenate([[0], np.flatnonzero(is_new) + 1, [len(numbers[0])]])))

    @property
    def n_rows(self) -> int:
        """Rows in all blocks."""
        return int(self.starts[-1])

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.starts) - 1


BLOCKS, KEYS, REST = 6, 7, 8  # purposes of the random streams

FRACTION = 32
"""Bits of a key below the point. Above it are places in a stream, in halves of a block: enough for 2^30 blocks."""

MAX_BLOCK_ROWS = 1 << FRACTION
"""Rows of the largest block: the narrowest window, half a block, has a key for each row."""

AHEAD = 16_384
"""Maximum number of rows that a sequential read computes at a time. With blocks of 8,192 rows and 384 mixed at a time,
a row takes 65 ns, and the slowest batch of 256 rows 1.1 ms. (4,096 at a time: 111 ns and 0.8 ms; 32,768: 86 ns.)"""

MIN_AHEAD = 1024
"""Number of rows that the first read computes, for which an epoch's first batch waits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowOrder:
    """The sequence of an epoch's rows, with blocks mixed a window at a time.

    With several streams, stream ``q % streams`` has batch ``q``, for all rounds of full batches except the last.
    The rest, one to two rounds, is shuffled together and ends the epoch. It has rows of few blocks, so that its
    readers read few blocks besides the blocks of their streams.

    Time and memory of the first call are proportional to the number of blocks. The time of a batch then depends only on
    ``window`` and its number of rows. Several threads may call this object.

    Attributes:
        blocks: blocks of rows that lie together.
        seed: seed of the run.
        epoch: from 0.
        batch_size: rows of a batch; streams take turns by batches.
        streams: streams that share no block but one at each boundary, and the epoch's end.
        window: blocks of a stream that are mixed at a time; 1 mixes within each block only.

    Raises:
        H5ValueError: a number below 1; at the first call, a block of more than ``MAX_BLOCK_ROWS`` rows.
    """

    blocks: BlockTable
    seed: int
    epoch: int
    batch_size: int
    streams: int
    window: int
    _block_streams: dict[int, _BlockStream] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.batch_size, self.streams, self.window) < 1:
            raise H5ValueError(
                f"shuffle='chunks' was requested with window={self.window}, streams={self.streams} and "
                f"batch_size={self.batch_size}; each is at least 1. Pass a window of 32 blocks or more."
            )

    def __call__(self, start: int, stop: int) -> IntArray:
        """Return the rows at the positions ``[start, stop)`` of the sequence, shape ``(stop - start,)``."""
        parts, end = [np.empty(0, dtype=np.int64)], min(stop, self._end)
        while start < end:
            round_, offset = divmod(start, self.streams * self.batch_size)
            number, offset = divmod(offset, self.batch_size)
            n_rows = end - start if self.streams == 1 else min(end - start, self.batch_size - offset)
            place = round_ * self.batch_size + offset
            parts.append(self._block_stream(number)(place, place + n_rows))
            start += n_rows
        if stop > self._end:
            positions = self._end + self._rest(start - self._end, stop - self._end)
            parts.append(self._pieces.rows_at(positions))
        return np.concatenate(parts)  # a copy: the caller may change it

    @cached_property
    def _stream_rows(self) -> int:
        n_rows = self.blocks.n_rows
        return n_rows if self.streams == 1 else max(0, n_rows // (self.streams * self.batch_size) - 1) * self.batch_size

    @cached_property
    def _end(self) -> int:
        """Position where the streams end and the rest begins."""
        return self.streams * self._stream_rows

    @cached_property
    def _pieces(self) -> _BlockPieces:
        n_blocks = self.blocks.n_blocks
        largest = int(np.diff(self.blocks.starts).max(initial=0))
        if largest > MAX_BLOCK_ROWS:
            raise H5ValueError(
                f"shuffle='chunks' was requested over blocks of up to {largest} rows; the maximum is {MAX_BLOCK_ROWS}. "
                "Pass shuffle='global', or a block table with smaller blocks."
            )
        order = permutation(n_blocks, self.seed, self.epoch, BLOCKS)(0, n_blocks)
        return _cut_blocks(self.blocks, order, self._stream_rows * np.arange(1, self.streams + 1))

    @cached_property
    def _rest(self) -> TablePermutation | KeyedPermutation:
        return permutation(self.blocks.n_rows - self._end, self.seed, self.epoch, REST)

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        return np.asarray(stream(self.seed, self.epoch, KEYS).random_raw(1 + PLACE_ROUNDS), dtype=np.uint64)

    def _block_stream(self, number: int) -> _BlockStream:
        # Two threads may create the same one; either may be kept.
        if number not in self._block_streams:
            bounds = [number * self._stream_rows, (number + 1) * self._stream_rows]
            first, last = np.searchsorted(self._pieces.begins, bounds).tolist()
            pieces = _BlockPieces(self._pieces.begins[first : last + 1], self._pieces.firsts[first:last])
            self._block_streams[number] = _BlockStream(pieces, self.window, self._words)
        return self._block_streams[number]


class _BlockPieces(NamedTuple):
    """Blocks one after the other, in two pieces or more if streams' boundaries go through them.

    Attributes:
        begins: position of each piece's first row, and the end; shape ``(n_pieces + 1,)``.
        firsts: that row's index in the dataset, by which the piece is known; shape ``(n_pieces,)``.
    """

    begins: IntArray
    firsts: IntArray

    def rows_at(self, positions: IntArray) -> IntArray:
        """Return row indices at positions of the sequence as it is before it is mixed."""
        pieces = np.searchsorted(self.begins, positions, side="right") - 1
        return self.firsts[pieces] + (positions - self.begins[pieces])


class _Strata(NamedTuple):
    """The parameters of the keys of rows: one value for each piece, or for each row the value of its piece.

    Attributes:
        firsts: the piece's first row.
        n_rows: rows of the piece.
        low: first key of its window.
        width: number of keys of a stratum; each row has one stratum.
        n_wider: the first strata that are one key wider, so that all keys of the window are in one.
        seed: of the piece's hashes.
    """

    firsts: IntArray
    n_rows: IntArray
    low: IntArray
    width: IntArray
    n_wider: IntArray
    seed: npt.NDArray[np.uint64]

    def take(self, pieces: IntArray) -> _Strata:
        """Return the values of some pieces, in any order and number."""
        return _Strata._make(values[pieces] for values in self)

    def keys(self, ranks: IntArray) -> IntArray:
        """Return keys of the rows with these ranks, from the window's first key on: one anywhere in each stratum."""
        hashes = mix(self.seed + ranks.astype(np.uint64) * GAMMA)
        widths = self.width + (ranks < self.n_wider)
        offsets = (hashes % widths.astype(np.uint64)).astype(np.int64)
        return ranks * self.width + np.minimum(ranks, self.n_wider) + offsets

    def below(self, keys: IntArray) -> IntArray:
        """Return how many rows of each piece have smaller keys, counted from the stream's first key."""
        keys = np.clip(keys - self.low, 0, self.n_rows * self.width + self.n_wider)
        n_wide_keys = self.n_wider * (self.width + 1)
        ranks = np.where(
            keys < n_wide_keys, keys // (self.width + 1), self.n_wider + (keys - n_wide_keys) // self.width
        )
        return ranks + (self.keys(ranks) < keys)


class _Stretch(NamedTuple):
    """Rows of a stream from a position on."""

    start: int
    rows: IntArray


class _BlockStream:
    """The order of the rows of some pieces. Keeps the stretch that was computed last.

    Args:
        pieces: the pieces, in their order; positions may start anywhere.
        window: pieces that are mixed at a time.
        words: random words, for the hashes and for the rounds that shuffle each piece.
    """

    def __init__(self, pieces: _BlockPieces, window: int, words: npt.NDArray[np.uint64]) -> None:
        self._pieces = pieces
        self._n_pieces = len(pieces.firsts)
        self._window = min(window, 2 * self._n_pieces)  # beyond it nothing changes
        self._words = words
        self._expected = self._expect()
        self._stretch = _Stretch(0, np.empty(0, dtype=np.int64))

    def __call__(self, start: int, stop: int) -> IntArray:
        """Return the rows at the positions ``[start, stop)`` of the stream; not to be written to."""
        stretch = self._stretch  # read once: another thread may replace it
        begin, end = stretch.start, stretch.start + len(stretch.rows)
        if start < begin or stop > end:
            n_rows = int(self._pieces.begins[-1] - self._pieces.begins[0])
            n_ahead = min(AHEAD, max(MIN_AHEAD, 2 * len(stretch.rows)))
            reads_on = begin <= start <= end + n_ahead // 4
            self._stretch = stretch = self._make(start, min(max(stop, start + n_ahead), n_rows) if reads_on else stop)
        return stretch.rows[start - stretch.start : stop - stretch.start]

    def _make(self, start: int, stop: int) -> _Stretch:
        """Return the rows between two keys that enclose the stretch, sorted."""
        # Each mixed piece is off its expected number of rows by less than one, and by half a row at most in the mean
        # square: four standard deviations.
        margin = 2 * isqrt(self._window) + 2
        while True:
            low, high = self._key_near(start - margin), self._key_near(stop + margin)
            n_before, strata = self._between(low, high)
            from_ranks, to_ranks = strata.below(np.array([[low], [high]]))
            n_below = n_before + int(from_ranks.sum())
            if n_below <= start and stop <= n_before + int(to_ranks.sum()):
                break
            margin *= 2
        n_rows = to_ranks - from_ranks
        pieces = np.repeat(np.arange(len(n_rows)), n_rows)
        ranks = np.arange(len(pieces)) + (from_ranks + n_rows - np.cumsum(n_rows))[pieces]
        row_strata = strata.take(pieces)
        order = _stable_order(row_strata.low + row_strata.keys(ranks))[start - n_below : stop - n_below]
        pieces = pieces[order]
        places = shuffled_places(ranks[order], pieces, strata.n_rows, strata.seed, self._words[1:])
        return _Stretch(start, strata.firsts[pieces] + places)

    def _between(self, low: int, high: int) -> tuple[int, _Strata]:
        """Return the pieces with windows that may reach into ``[low, high)``, and the number of rows before them."""
        first = max(0, ((low >> FRACTION) - self._window) // 2 + 1)
        last = min(self._n_pieces, ((high >> FRACTION) + self._window) // 2 + 1)
        begins, firsts = self._pieces.begins[first : last + 1], self._pieces.firsts[first:last]
        n_rows = np.diff(begins)
        low_places, high_places = self._windows(np.arange(first, last))
        width, n_wider = np.divmod((high_places - low_places) << FRACTION, n_rows)
        seed = mix(firsts.astype(np.uint64) ^ self._words[0])
        strata = _Strata(firsts, n_rows, low_places << FRACTION, width, n_wider, seed)
        return int(begins[0] - self._pieces.begins[0]), strata

    def _windows(self, pieces: IntArray) -> tuple[IntArray, IntArray]:
        """Return where the windows of pieces begin and end, in halves of a piece."""
        return np.maximum(2 * pieces - self._window, 0), np.minimum(2 * pieces + self._window, 2 * self._n_pieces)

    def _expect(self) -> npt.NDArray[np.float64]:
        """Return how many rows lie below each place, on average; shape ``(2 * n_pieces + 1,)``."""
        low, high = self._windows(np.arange(self._n_pieces))
        density = np.diff(self._pieces.begins) / (high - low)
        n_places = 2 * self._n_pieces + 1
        change = np.bincount(low, density, n_places) - np.bincount(high, density, n_places)
        # Rounding may make the sums decrease slightly, which a binary search does not allow.
        return np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(np.cumsum(change[:-1]))]))

    def _key_near(self, n_rows: int) -> int:
        """Return a key with about ``n_rows`` rows below it: an estimate, which does not affect the order."""
        last = 2 * self._n_pieces
        place = int(np.searchsorted(self._expected, n_rows, side="right")) - 1
        if not 0 <= place < last:
            return max(place, 0) << FRACTION
        low_count, high_count = self._expected[place : place + 2].tolist()
        return (place << FRACTION) + int((n_rows - low_count) / (high_count - low_count) * (1 << FRACTION))


def _stable_order(keys: IntArray) -> IntArray:
    """Return the order of keys; equal ones keep theirs. NumPy sorts numbers several times as fast as their places."""
    low, high = (int(keys.min()), int(keys.max())) if len(keys) else (0, 0)
    width = len(keys).bit_length()
    if (high - low).bit_length() + width > 63:
        return np.argsort(keys, kind="stable")
    places = (keys - low) << width | np.arange(len(keys))
    places.sort()
    return places & ((1 << width) - 1)


def _cut_blocks(blocks: BlockTable, order: IntArray, cuts: IntArray) -> _BlockPieces:
    """Return the blocks in the given order, cut at the given positions of the sequence of their rows."""
    begins = np.concatenate([[0], np.cumsum(np.diff(blocks.starts)[order])])
    firsts = blocks.starts[order]
    places = np.searchsorted(begins, cuts)
    places, cuts = places[begins[places] > cuts], cuts[begins[places] > cuts]
    firsts_of_cuts = firsts[places - 1] + (cuts - begins[places - 1])
    return _BlockPieces(np.insert(begins, places, cuts), np.insert(firsts, places, firsts_of_cuts))

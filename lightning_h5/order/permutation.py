"""Permutations as pure functions of a seed, from bit streams that NumPy promises never to change.

``Generator.permutation`` and ``torch.randperm`` may change: an update could change the order of a
resumed run. Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is counter-based,
so different keys give independent streams.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import IntArray

__all__ = [
    "GAMMA",
    "PLACE_ROUNDS",
    "TABLE_ROWS",
    "KeyedPermutation",
    "TablePermutation",
    "mix",
    "permutation",
    "shuffled_places",
    "stream",
    "uniform",
]

TABLE_ROWS = 10_000_000
"""Above this many rows nothing is sorted: an epoch of 10^7 rows takes half a second of sorting."""

PART_ROWS = 1 << 22
"""Maximum number of rows that are sorted at once, as far as random keys allow. The first batch waits for one part."""

SLICE_ROWS = 1 << 17  # keys that are drawn together: a megabyte, which stays in the processor's cache

SORTED_ROWS = 128
"""Maximum number of rows of a permutation that is computed whole, by sorting. All orders are equally likely, and 32
rows cost a seventh of a network. 500 permutations of 128 rows take 0.35 ms; longer permutations would delay a batch.
"""

PLACE_ROUNDS = 10
"""Number of words that ``shuffled_places`` needs; even."""

ROUNDS = 8
U64 = np.uint64
GAMMA = U64(0x9E3779B97F4A7C15)  # increment of SplitMix64


def stream(seed: int, epoch: int, purpose: int, place: int = 0) -> np.random.Philox:
    """Return the bit stream for one use of randomness.

    Args:
        seed: the run's seed, any integer.
        epoch: from 0.
        purpose: a small number that keeps uses apart.
        place: a row or a position that has a stream of its own, of 2^128 draws.
    """
    key = np.array([seed % 2**64, (epoch << 8 | purpose) % 2**64], dtype=U64)
    return np.random.Philox(key=key, counter=np.array([0, 0, place % 2**64, 0], dtype=U64))


def uniform(seed: int, epoch: int, purpose: int, numbers: IntArray) -> npt.NDArray[np.float64]:
    """Return a random number from 0 to below 1 for each of some numbers, whatever the other numbers are."""
    (word,) = np.asarray(stream(seed, epoch, purpose).random_raw(1), dtype=U64)
    bits = mix(word + numbers.astype(U64) * GAMMA)
    return np.asarray((bits >> U64(11)) * 2.0**-53, dtype=np.float64)


class _Part(NamedTuple):
    """Consecutive rows of an order.

    Attributes:
        start: position of the first one.
        rows: the rows.
    """

    start: int
    rows: npt.NDArray[Any]

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + len(self.rows)

    def has(self, position: int) -> bool:
        """Return whether a position is one of these rows."""
        return self.start <= position < self.stop


class TablePermutation:
    """A permutation by sorting: the order of random keys.

    A key holds the row's number in its lowest bits. So keys are never equal, all sorting algorithms give the same
    order, and NumPy can use its fastest algorithm. At 10^7 rows, 40 random bits remain.

    More than ``PART_ROWS`` rows are sorted in parts, each when its rows are requested. A part has the keys with the
    same highest bits, which are chosen among all keys; these are drawn again for each part. Two parts are kept.

    Args:
        n: number of rows. A row of a part takes 4 bytes of memory, and up to 20 more while it is sorted.
        bits: source of the keys.
    """

    def __init__(self, n: int, bits: np.random.Philox) -> None:
        self._n, self._bits = n, bits
        self._width = U64(max(1, (n - 1).bit_length()))
        n_bits = ((n - 1) // PART_ROWS).bit_length()
        self._n_parts, self._shift = 2**n_bits, U64(64 - n_bits)
        # Threads may make the same part at the same time, with the same result.
        self._starts: IntArray | None = None  # positions of the parts and the end, known once all words were drawn
        self._kept: tuple[_Part, ...] = ()
        if not n_bits:
            self._kept = (_Part(0, self._rows(self._keys(bits.random_raw(n), np.arange(n, dtype=U64)))),)

    def __call__(self, start: int, stop: int) -> IntArray:
        """Return the rows at the positions ``[start, stop)`` of the order, as far as there are any."""
        stop, pieces = min(stop, self._n), [np.empty(0, np.int64)]
        while start < stop:
            part = self._part_at(start)
            pieces.append(part.rows[start - part.start : stop - part.start])
            start = part.stop
        return np.concatenate(pieces)

    def _part_at(self, position: int) -> _Part:
        for part in self._kept:
            if part.has(position):
                return part
        if self._starts is None:  # the part where the position is expected; all parts are counted at once
            part = self._draw(position * self._n_parts // self._n)
        else:
            part = self._draw(int(np.searchsorted(self._starts, position, "right")) - 1)
        self._kept = part, *self._kept[:1]
        return part if part.has(position) else self._part_at(position)

    def _draw(self, number: int) -> _Part:
        """Return a part of the order."""
        bits, counts, n_keys = copy(self._bits), np.zeros(self._n_parts, np.int64), 0
        n_expected = self._n // self._n_parts
        keys = np.empty(n_expected + n_expected // 8 + 1024, U64)  # room for 200 standard deviations more
        for first in range(0, self._n, SLICE_ROWS):
            words = np.asarray(bits.random_raw(min(SLICE_ROWS, self._n - first)), dtype=U64)
            numbers = words >> self._shift
            if self._starts is None:
                counts += np.bincount(numbers.astype(np.int64), minlength=self._n_parts)
            places = np.flatnonzero(numbers == number)
            of_part = keys[n_keys : n_keys + len(places)]
            of_part[:] = self._keys(words[places], (first + places).astype(U64))
            n_keys += len(places)
        if self._starts is None:
            self._starts = np.concatenate([[0], counts.cumsum()])
        return _Part(int(self._starts[number]), self._rows(keys[:n_keys]))

    def _keys(self, words: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return the keys of rows, in the memory of their words."""
        words >>= self._width
        words <<= self._width
        words |= rows
        return words

    def _rows(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """Return the rows of keys, in the order of these; the keys are overwritten."""
        keys.sort()
        keys &= _bit_mask(self._width)
        return keys.astype(np.min_scalar_type(self._n))


class KeyedPermutation:
    """A permutation that is computed on demand: nothing of the size of ``n`` is held.

    A Feistel network over the next power of two, with cycle walking (Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002): values that fall outside ``[0, n)`` are encrypted again.

    Args:
        n: number of rows.
        bits: source of the round keys.
    """

    def __init__(self, n: int, bits: np.random.Philox) -> None:
        self._n = n
        width = max(2, (n - 1).bit_length())
        self._low_bits = U64(width // 2)
        self._high_bits = U64(width - width // 2)
        self._keys = np.asarray(bits.random_raw(ROUNDS), dtype=U64)

    def __call__(self, start: int, stop: int) -> IntArray:
        """Return the rows at the positions ``[start, stop)`` of the order."""
        values = self._encrypt(np.arange(start, stop, dtype=U64))
        outliers = np.flatnonzero(values >= self._n)
        while len(outliers):
            values[outliers] = self._encrypt(values[outliers])
            outliers = outliers[values[outliers] >= self._n]
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        # Halves and their widths swap in each round, so an even number of rounds restores the widths.
        a, b = self._high_bits, self._low_bits
        high, low = values >> b, values & _bit_mask(b)
        for key in self._keys:
            high, low = low, high ^ (mix(low ^ key) & _bit_mask(a))
            a, b = b, a
        return (high << b) | low


def permutation(n: int, seed: int, epoch: int, purpose: int = 0, place: int = 0) -> TablePermutation | KeyedPermutation:
    """Return the permutation of ``n`` rows for an epoch: a table for small ``n``, keyed above ``TABLE_ROWS``."""
    bits = stream(seed, epoch, purpose, place)
    return TablePermutation(n, bits) if n <= TABLE_ROWS else KeyedPermutation(n, bits)


def shuffled_places(
    ranks: IntArray,
    owners: IntArray,
    sizes: IntArray,
    keys: npt.NDArray[np.uint64],
    round_keys: npt.NDArray[np.uint64],
) -> IntArray:
    """Compute many permutations at once: each rank's place in one of ``range(size)``.

    Permutations of up to ``SORTED_ROWS`` rows are the orders of random words. In longer permutations, only the
    requested places are computed, by a Feistel network with cycle walking, as in ``KeyedPermutation``, over two digits
    of about ``sqrt(size)`` values each (the generalized Feistel of Black and Rogaway): few values fall outside for any
    size.

    Args:
        ranks: from 0 to ``size - 1``, shape ``(n,)``.
        owners: which permutation each rank belongs to, shape ``(n,)``.
        sizes: length of each permutation, from 1 to 2^52, shape ``(n_permutations,)``.
        keys: which one of that length, shape ``(n_permutations,)``.
        round_keys: ``PLACE_ROUNDS`` words, the same for all.
    """
    is_short = sizes <= SORTED_ROWS
    if is_short.all():
        return _sorted_places(sizes, keys ^ round_keys[0])[owners, ranks]
    if (sizes == sizes[0]).all():  # one divisor for all: NumPy divides three times as fast
        return _network_places(ranks, sizes[:1], keys[owners], round_keys)
    places = np.empty(len(ranks), dtype=np.int64)
    long_ranks = np.flatnonzero(~is_short[owners])
    places[long_ranks] = _network_places(
        ranks[long_ranks], sizes[owners[long_ranks]], keys[owners[long_ranks]], round_keys
    )
    if is_short.any():
        short_ranks = np.flatnonzero(is_short[owners])
        table = _sorted_places(sizes[is_short], keys[is_short] ^ round_keys[0])
        places[short_ranks] = table[(np.cumsum(is_short) - 1)[owners[short_ranks]], ranks[short_ranks]]
    return places


def _sorted_places(sizes: IntArray, keys: npt.NDArray[np.uint64]) -> IntArray:
    """Return whole permutations, one per row; values after a shorter one's end mean nothing."""
    n = int(sizes.max(initial=1))
    # The same number of bits whatever the longest is: a permutation must not depend on the others.
    ranks, width = np.arange(n, dtype=U64), U64((SORTED_ROWS - 1).bit_length())
    words = mix(keys[:, None] + ranks * GAMMA) >> width << width | ranks
    words[ranks >= sizes[:, None].astype(U64)] = ~U64(0)
    words.sort(axis=1)
    return (words & _bit_mask(width)).astype(np.int64)


def _network_places(
    ranks: IntArray, sizes: IntArray, keys: npt.NDArray[np.uint64], round_keys: npt.NDArray[np.uint64]
) -> IntArray:
    """Return places in permutations of several sizes, one for each rank, or of one size, shape ``(1,)``."""
    # IEEE 754 rounds square roots the same on every machine. One base is even: two odd ones give even permutations
    # only.
    bases = np.ceil(np.sqrt(sizes)).astype(np.int64)
    bases += bases & 1
    digits = _Digits(bases.astype(U64), (-(-sizes // bases)).astype(U64))
    limits = sizes.astype(U64)
    places = digits.encrypt(ranks.astype(U64), keys, round_keys)
    outliers = np.flatnonzero(places >= limits)
    while len(outliers):
        of_outliers = _Digits(*(_of_each(base, outliers) for base in digits))
        places[outliers] = of_outliers.encrypt(places[outliers], keys[outliers], round_keys)
        outliers = outliers[places[outliers] >= _of_each(limits, outliers)]
    return places.astype(np.int64)


def _of_each(values: npt.NDArray[np.uint64], numbers: IntArray) -> npt.NDArray[np.uint64]:
    return values if len(values) == 1 else values[numbers]


class _Digits(NamedTuple):
    """Bases of numbers of two digits: one pair for all numbers, or one for each."""

    high_base: npt.NDArray[np.uint64]
    low_base: npt.NDArray[np.uint64]

    def encrypt(
        self, values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], round_keys: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return other values, each of which has one preimage."""
        a, b = self
        high = values // b
        low = values - high * b
        for even_key, odd_key in zip(round_keys[::2], round_keys[1::2], strict=True):
            high = _remainder(high + (mix((keys ^ even_key) + low) >> U64(1)), a)  # a sum that overflowed would not be
            low = _remainder(low + (mix((keys ^ odd_key) + high) >> U64(1)), b)  # a permutation
        return high * b + low


def _remainder(values: npt.NDArray[np.uint64], divisors: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return ``values % divisors``, by division, which is fast for one divisor."""
    return values - values // divisors * divisors


def _bit_mask(bits: np.uint64) -> np.uint64:
    return U64((1 << int(bits)) - 1)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = values ^ (values >> U64(30))  # a copy, which changes in place
    values *= U64(0xBF58476D1CE4E5B9)
    values ^= values >> U64(27)
    values *= U64(0x94D049BB133111EB)
    values ^= values >> U64(31)
    return values

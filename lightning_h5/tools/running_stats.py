"""Streaming mean and standard deviation of many values, a piece at a time, in twice the digits of a float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import IntArray

Floats = npt.NDArray[np.float64]

FEW = 32
"""Fewer values of each channel are summed up all channels at a time."""


class RunningStats(NamedTuple):
    """Statistics of the values so far, for each channel: all have the shape ``(n_channels,)``.

    Mean and squares are sums of two float64: what a single one has no room for is in the second. So a large mean leaves
    small deviations what they are, and adding up millions of pieces loses nothing.

    Attributes:
        n: finite values; all that follows but the next two is of these.
        n_nan: values that are no number.
        n_infinite: values that are infinite.
        least: in the dtype of the values (float32 for those of 16 bits); the dtype's largest if there are none.
        largest: in the same way.
        mean: the mean; 0 if there are no values.
        mean_rest: what ``mean`` has no room for.
        squares: sum of squared deviations from the mean.
        squares_rest: what ``squares`` has no room for.
    """

    n: IntArray
    n_nan: IntArray
    n_infinite: IntArray
    least: npt.NDArray[Any]
    largest: npt.NDArray[Any]
    mean: Floats
    mean_rest: Floats
    squares: Floats
    squares_rest: Floats


def empty_stats(n_channels: int, dtype: np.dtype[Any]) -> RunningStats:
    """Return the statistics of no values.

    Args:
        n_channels: channels.
        dtype: of the values to come: bool, an integer, or a float of 16, 32 or 64 bits.
    """
    kept = _kept(dtype)
    ends = (np.iinfo(kept).max, np.iinfo(kept).min) if kept.kind in "iu" else (np.inf, -np.inf)
    counts, zeros = np.zeros(n_channels, dtype=np.int64), np.zeros(n_channels)
    least, largest = (np.full(n_channels, end, dtype=kept) for end in ends)
    return RunningStats(counts, counts, counts, least, largest, zeros, zeros, zeros, zeros)


def stats_of(values: npt.NDArray[Any]) -> RunningStats:
    """Return the statistics of some values; about 10 passes over memory, so that what fits a core's cache is best.

    Args:
        values: shape ``(n_before, n_channels, n_after)``.
    """
    n_channels = values.shape[1]
    if not values.size:
        return empty_stats(n_channels, values.dtype)
    n_each = values.size // n_channels
    # Sums along the last axis are fast, and pairwise; not so if they are of a few values each.
    along = 1 if n_each >= FEW else 0
    shape = (n_channels, n_each) if along else (n_each, n_channels)
    lines = np.ascontiguousarray(np.moveaxis(values, 1, 0 if along else 2)).reshape(shape)
    lines = lines.astype(_kept(values.dtype), copy=False)
    with np.errstate(all="ignore"):  # what is stored may be anything
        least, largest = lines.min(axis=along), lines.max(axis=along)
        if np.isfinite(least).all() and np.isfinite(largest).all():  # a NaN is both least and largest
            n = np.full(n_channels, n_each)
            none = np.zeros(n_channels, dtype=np.int64)
            return RunningStats(n, none, none, least, largest, *_about_mean(lines, along, n, least, largest, None))
        is_finite = np.isfinite(lines)
        n, n_nan = is_finite.sum(axis=along), np.isnan(lines).sum(axis=along)
        least = lines.min(axis=along, where=is_finite, initial=np.inf)
        largest = lines.max(axis=along, where=is_finite, initial=-np.inf)
        about = _about_mean(lines, along, n, least, largest, is_finite)
        return RunningStats(n, n_nan, n_each - n - n_nan, least, largest, *about)


def merge_stats(a: RunningStats, b: RunningStats) -> RunningStats:
    """Return the statistics of two sets of values together (T. Chan, G. Golub, R. LeVeque, 1979); 50 us."""
    with np.errstate(all="ignore"):
        n = a.n + b.n
        share = b.n / np.maximum(n, 1)
        apart = (b.mean - a.mean) + (b.mean_rest - a.mean_rest)
        mean, rest = _added(a.mean, apart * share)
        mean, mean_rest = _added(mean, rest + a.mean_rest)
        is_first = a.n == 0
        mean, mean_rest = np.where(is_first, b.mean, mean), np.where(is_first, b.mean_rest, mean_rest)
        squares, rest = _added(a.squares, b.squares)
        between = np.where(is_first | (b.n == 0), 0.0, apart * apart * a.n * share)
        squares, more = _added(squares, between)
        squares, squares_rest = _added(squares, rest + more + a.squares_rest + b.squares_rest)
    return RunningStats(
        n,
        a.n_nan + b.n_nan,
        a.n_infinite + b.n_infinite,
        np.minimum(a.least, b.least),
        np.maximum(a.largest, b.largest),
        mean,
        mean_rest,
        squares,
        squares_rest,
    )


def std_of(stats: RunningStats) -> Floats:
    """Return the standard deviation (of the values themselves: divided by ``n``); NaN if there are no values."""
    with np.errstate(all="ignore"):
        deviation: Floats = np.sqrt(np.maximum(stats.squares, 0.0) / stats.n)
    return deviation


def _kept(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to compute in: NumPy has no least of bool that is a number, and is slow in 16 bits."""
    as_other = {"b": np.dtype(np.uint8)} if dtype.kind == "b" else {"f": np.dtype(np.float32)}
    return as_other.get(dtype.kind, dtype) if dtype.itemsize < 4 and dtype.kind in "bf" else dtype


def _about_mean(
    lines: npt.NDArray[Any],
    along: int,
    n: IntArray,
    least: npt.NDArray[Any],
    largest: npt.NDArray[Any],
    is_finite: npt.NDArray[np.bool_] | None,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return mean and squares, each with its rest."""
    base, base_rest = np.zeros(len(n)), np.zeros(len(n))
    if lines.dtype.kind in "iu" and lines.dtype.itemsize == 8:
        # A float64 has no room for all their digits; as unsigned numbers the distances from the least never overflow.
        base, base_rest = _in_two(least)
        deviations = (lines.view(np.uint64) - np.expand_dims(least.view(np.uint64), along)).astype(np.float64)
        middle = deviations.sum(axis=along) / n
    else:
        found = lines if is_finite is None else np.where(is_finite, lines, 0)
        deviations = found.astype(np.float64)
        middle = deviations.sum(axis=along) / np.maximum(n, 1)
        ends = least.astype(np.float64), largest.astype(np.float64)
        middle = np.where(np.isfinite(middle) | (n == 0), middle, ends[0] / 2 + ends[1] / 2)  # the sum was too large
        # Of equal values the mean is what they are, and their deviation nothing: rounding would leave some 1e-17.
        middle = np.where(ends[0] == ends[1], ends[0], middle)
    deviations -= np.expand_dims(middle, along)
    if is_finite is not None:
        deviations[~is_finite] = 0
    residue = deviations.sum(axis=along) / np.maximum(n, 1)
    np.square(deviations, out=deviations)
    squares = deviations.sum(axis=along) - n * residue**2
    mean, rest = _added(base, middle)
    mean, mean_rest = _added(mean, rest + base_rest + residue)
    return mean, mean_rest, squares, np.zeros(len(n))


def _added(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return a sum, and what was rounded off it (D. Knuth); nothing of a sum that is infinite."""
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    return total, np.where(np.isfinite(total), rest, 0.0)


def _in_two(integers: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Return integers of 64 bits as sums of two float64."""
    high = (integers >> integers.dtype.type(32)).astype(np.float64) * 2.0**32
    low = (integers & integers.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return _added(high, low)

"""Streaming mean and standard deviation of many values, a piece at a time, in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import IntArray

Floats = npt.NDArray[np.float64]


class RunningStats(NamedTuple):
    """Statistics of the values so far, for each channel: all have the shape ``(n_channels,)``.

    Mean and squares are those of the deviations from ``shift``, a number near the first values that a float64 holds
    exactly. So a large mean leaves small deviations all their digits.

    Attributes:
        n: finite values; all that follows but the next two is of these.
        n_nan: values that are no number.
        n_infinite: values that are infinite.
        least: in the dtype of the values (float32 for those of 16 bits); the dtype's largest if there are none.
        largest: in the same way.
        shift: what is subtracted from values before they are summed.
        offset: the mean of the values minus ``shift``.
        squares: sum of squared deviations from the mean.
    """

    n: IntArray
    n_nan: IntArray
    n_infinite: IntArray
    least: npt.NDArray[Any]
    largest: npt.NDArray[Any]
    shift: Floats
    offset: Floats
    squares: Floats

    @property
    def mean(self) -> Floats:
        """The mean; 0 if there are no values."""
        return self.shift + self.offset

    @property
    def std(self) -> Floats:
        """The standard deviation (of the values themselves: divided by ``n``); NaN if there are no values."""
        with np.errstate(all="ignore"):
            deviation: Floats = np.sqrt(self.squares / self.n)
        return deviation


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
    return RunningStats(counts, counts, counts, least, largest, zeros, zeros, zeros)


def stats_of(values: npt.NDArray[Any]) -> RunningStats:
    """Return the statistics of some values; about 10 passes over memory, so that what fits a core's cache is best.

    Args:
        values: shape ``(n_before, n_channels, n_after)``.
    """
    n_channels = values.shape[1]
    if not values.size:
        return empty_stats(n_channels, values.dtype)
    lines = np.ascontiguousarray(np.moveaxis(values, 1, 0)).reshape(n_channels, -1)
    lines = lines.astype(_kept(values.dtype), copy=False)
    n, n_nan = np.full(n_channels, lines.shape[1]), np.zeros(n_channels, dtype=np.int64)
    where: Any = True
    with np.errstate(all="ignore"):  # stored values may be anything
        least, largest = lines.min(axis=1), lines.max(axis=1)
        if not (np.isfinite(least) & np.isfinite(largest)).all():  # NaN propagates to both
            where = np.isfinite(lines)
            n, n_nan = where.sum(axis=1), np.isnan(lines).sum(axis=1)
            least = lines.min(axis=1, where=where, initial=np.inf)
            largest = lines.max(axis=1, where=where, initial=-np.inf)
        if lines.dtype.kind in "iu" and lines.dtype.itemsize == 8:
            # float64 cannot represent all int64, but a multiple of 2048 exactly; unsigned distances from it never
            # overflow.
            below = least >> 11 << 11
            shift = below.astype(np.float64)
            deviations = (lines.view(np.uint64) - below.view(np.uint64)[:, None]).astype(np.float64)
        else:
            shift = np.where(n > 0, least.astype(np.float64) / 2 + largest.astype(np.float64) / 2, 0.0)
            deviations = np.subtract(lines, shift[:, None], dtype=np.float64)
        offset = deviations.sum(axis=1, where=where) / np.maximum(n, 1)
        deviations -= offset[:, None]
        squares = np.square(deviations, out=deviations).sum(axis=1, where=where)
    return RunningStats(n, n_nan, lines.shape[1] - n - n_nan, least, largest, shift, offset, squares)


def merge_stats(a: RunningStats, b: RunningStats) -> RunningStats:
    """Return the statistics of two sets of values together (T. Chan, G. Golub, R. LeVeque, 1979)."""
    is_first, is_last = a.n == 0, b.n == 0
    with np.errstate(all="ignore"):
        n = a.n + b.n
        share = b.n / np.maximum(n, 1)
        apart = (b.shift - a.shift) + (b.offset - a.offset)
        between = np.where(is_first | is_last, 0.0, apart * apart * a.n * share)
        return RunningStats(
            n,
            a.n_nan + b.n_nan,
            a.n_infinite + b.n_infinite,
            np.minimum(a.least, b.least),
            np.maximum(a.largest, b.largest),
            np.where(is_first, b.shift, a.shift),
            np.where(is_first, b.offset, a.offset + apart * share),
            a.squares + b.squares + between,
        )


def _kept(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to compute in: NumPy has no least of bool that is a number, and is slow in 16 bits."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if dtype.kind == "f" and dtype.itemsize < 4 else dtype

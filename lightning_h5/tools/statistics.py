"""``compute_stats``: mean, deviation, least and largest value of arrays, in one pass over their files, on all cores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..datasets import FieldStats
from ..errors import H5KeyError, H5ValueError, listing
from ..files import (
    ArrayLayout,
    OpenOptions,
    Trust,
    expand_paths,
    field_names,
    guess_keys,
    kind_of,
    list_arrays,
    open_h5,
)
from ..types import PathLike, Paths
from .sums.histogram import Histogram, count_values, edges_between
from .sums.moments import Moments, merged, moments_of, no_values, std_of
from .sums.output import write_report
from .sums.passes import FoundFiles, RowsLike, find_files, fold

__all__ = ["MOST_BINS", "ArrayStats", "ChannelAxis", "StatsReport", "compute_stats", "named_keys"]

MOST_BINS = 1 << 16
"""Bins of a histogram, at most."""

ChannelAxis: TypeAlias = int | Mapping[str, int | None] | None
"""The axis of a row that has the channels, or that for each array; None takes all values of a row together."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayStats:
    """What the values of one array are like, over all files.

    With channels all arrays here have the shape ``(n_channels,)``, without ``()``. NaN and infinite values are counted
    and left out of all the rest. A channel that has no other values has NaN for mean, deviation, least and largest.

    Attributes:
        key: the array.
        dtype: of its values, as read.
        row_shape: shape of a row.
        channel_axis: axis of a row that has the channels, from 0; None where all values were taken together.
        n_rows: rows that were looked at.
        n_values: finite values.
        n_nan: values that are no number.
        n_infinite: infinite values.
        mean: mean of the finite values.
        std: their standard deviation (divided by their number, as NumPy does it); exactly 0 where all are equal.
        min: the least finite value, exact: of integers an integer, also above 2**53.
        max: the largest, likewise.
        histogram: counts in bins from ``min`` to ``max``, where it was asked for.
    """

    key: str
    dtype: str
    row_shape: tuple[int, ...]
    channel_axis: int | None
    n_rows: int
    n_values: npt.NDArray[np.int64]
    n_nan: npt.NDArray[np.int64]
    n_infinite: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    min: npt.NDArray[Any]
    max: npt.NDArray[Any]
    histogram: Histogram | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class StatsReport:
    """What ``compute_stats`` found.

    Attributes:
        files: that were read, in this order.
        n_rows_of_files: rows of all files; ``ArrayStats.n_rows`` says how many were looked at.
        arrays: one entry for each array.
    """

    files: tuple[str, ...]
    n_rows_of_files: int
    arrays: tuple[ArrayStats, ...]

    def fields(self) -> dict[str, FieldStats]:
        """What ``normalize=`` of datasets takes, by array.

        Raises:
            H5ValueError: an array has a channel that nothing can be normalised with.
        """
        for array in self.arrays:
            _ensure_usable(array)
        return {a.key: FieldStats(a.mean, a.std, a.channel_axis, a.row_shape) for a in self.arrays}

    def save(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Writes the file that ``normalize=`` of data modules and datasets reads; it is there whole, or not at all.

        Args:
            path: the file, as JSON.
            overwrite: replace a file that is there.

        Raises:
            H5ValueError: an array has a channel that nothing can be normalised with.
            H5FileError: the file is there, or cannot be written.
        """
        self.fields()
        write_report(path, self.files, {array.key: _plain(array) for array in self.arrays}, overwrite=overwrite)


def compute_stats(
    path: Paths,
    keys: str | Sequence[str] | None = None,
    *,
    channel_axis: ChannelAxis = None,
    bins: int = 0,
    rows: RowsLike = None,
    allow_external: bool = False,
    shows_progress: bool = False,
) -> StatsReport:
    """Statistics of arrays, over one file or several that make one data set.

    Each chunk is decoded once, on all cores, and memory stays at a few chunks for each core, however large the files
    are (rows that share their chunks are read together, up to 1 GiB of them). What comes out does not depend on the
    number of cores, bit by bit. It is right to 1e-10 of the values' size, also for small deviations from a large mean.

    Normalise with the statistics of the training rows alone: pass their numbers as ``rows``, or their files.

    Args:
        path: a file, a glob, a directory, or a list of these.
        keys: the arrays; None takes the input, where the files leave no doubt about it.
        channel_axis: the axis of a row (without that of the rows) that has the channels, which then have statistics of
            their own; or that of each array, by key. Arrays with one value a row have none. None, the default, takes
            all values together: what an axis means cannot be seen in a file.
        bins: bins of a histogram of each channel. It takes a second pass over the rows, since the first finds where it
            begins and ends: twice the time. 0 makes none.
        rows: numbers of rows, each once in any order, or a mask; counted over all files. None takes all.
        allow_external: follow links out of the files.
        shows_progress: show a bar, where the standard error is a terminal.

    Raises:
        H5FileError: a file is missing or broken.
        H5KeyError: an array is not there, or the files leave a doubt about which is meant.
        H5ValueError: values are no real numbers, files differ, or an argument makes no sense.
        H5CorruptError: something does not decode.
        H5DataChangedError: a file was written to meanwhile.
    """
    if not 0 <= bins <= MOST_BINS:
        raise H5ValueError(f"bins={bins} was asked; a histogram has 1 to {MOST_BINS:,} bins, and 0 makes none.")
    paths = expand_paths(path)
    names = named_keys(paths, keys)
    if isinstance(channel_axis, Mapping) and (unknown := sorted(set(channel_axis) - set(names))):
        raise H5ValueError(
            f"channel_axis names {listing(unknown)}; the arrays are {listing(names)}. Name one of these."
        )
    options = OpenOptions(trust=Trust(external=allow_external))
    found = [find_files(paths, key, options, rows) for key in names]
    axes = [_axis(each.layout, channel_axis) for each in found]
    arrays = tuple(
        _stats_of(each, axis, bins, shows_progress=shows_progress) for each, axis in zip(found, axes, strict=True)
    )
    return StatsReport(files=paths, n_rows_of_files=found[0].table.n_rows, arrays=arrays)


def named_keys(paths: Sequence[str], keys: str | Sequence[str] | None) -> tuple[str, ...]:
    """The arrays that are meant.

    Args:
        paths: the files; where no array is named, the first one is looked at.
        keys: what the user named.

    Raises:
        H5KeyError: nothing was named, and the file leaves a doubt.
        H5ValueError: they are no names, or one of them comes twice.
    """
    path = paths[0]
    if keys is not None:
        names = field_names(keys, "keys").keys
        if len(set(names)) < len(names):
            raise H5ValueError(f"keys={list(names)!r} names an array twice. Name each once.")
        return names
    try:
        return (guess_keys(path)[0],)
    except H5KeyError as error:
        with open_h5(path) as file:
            arrays = list_arrays(file)
        raise H5KeyError(
            f"no array was named, and {path!r} leaves a doubt about which is meant: it has {listing(arrays)}. Name it: "
            "keys='...' (or --key)."
        ) from error


def _axis(layout: ArrayLayout, given: ChannelAxis) -> int | None:
    """The axis of a row that has the channels, from 0."""
    if kind_of(layout.dtype) != "number" or layout.dtype.kind == "c":
        what = "complex numbers" if layout.dtype.kind == "c" else kind_of(layout.dtype)
        raise H5ValueError(
            f"{layout.key!r} in {layout.path!r} holds {what} (dtype {layout.stored}), which have no least and no "
            "largest. Name an array of real numbers."
        )
    axis = given.get(layout.key) if isinstance(given, Mapping) else given
    n_axes = len(layout.row_shape)
    if axis is None or n_axes == 0:
        return None
    if not -n_axes <= axis < n_axes:
        raise H5ValueError(
            f"channel_axis={axis} was asked of {layout.key!r}, whose rows have the shape {layout.row_shape}. Pass an "
            f"axis of a row{f', 0 to {n_axes - 1}' if n_axes else ': there is none'}, or None for all values together."
        )
    return axis % n_axes


def _stats_of(found: FoundFiles, axis: int | None, bins: int, *, shows_progress: bool) -> ArrayStats:
    layout = found.layout
    shape = layout.row_shape
    n_channels = 1 if axis is None else shape[axis]
    n_after = 1 if axis is None else math.prod(shape[axis + 1 :])
    empty = no_values(n_channels, layout.dtype)
    view = (-1, n_channels, n_after)
    total: Moments = fold(found, view, moments_of, merged, empty, "statistics", shows_progress=shows_progress)

    def shaped(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[0] if axis is None else values

    is_none = total.n == 0
    least, largest = (
        np.where(is_none, np.nan, values) if is_none.any() else values for values in (total.least, total.largest)
    )
    histogram = None
    if bins:
        edges = edges_between(least.astype(np.float64), largest.astype(np.float64), bins)
        counts = fold(
            found,
            view,
            lambda values: count_values(values, edges),
            lambda a, b: a + b,
            np.zeros((n_channels, bins), dtype=np.int64),
            "histogram",
            shows_progress=shows_progress,
        )
        histogram = Histogram(edges=shaped(edges), counts=shaped(counts))
    return ArrayStats(
        key=layout.key,
        dtype=str(layout.dtype),
        row_shape=shape,
        channel_axis=axis,
        n_rows=found.n_rows,
        n_values=np.asarray(shaped(total.n)),
        n_nan=np.asarray(shaped(total.n_nan)),
        n_infinite=np.asarray(shaped(total.n_infinite)),
        mean=np.asarray(shaped(np.where(is_none, np.nan, total.mean))),
        std=np.asarray(shaped(std_of(total))),
        min=np.asarray(shaped(least)),
        max=np.asarray(shaped(largest)),
        histogram=histogram,
    )


def _ensure_usable(array: ArrayStats) -> None:
    wrong = np.flatnonzero(~(np.isfinite(array.mean) & np.isfinite(array.std)))
    if not len(wrong) and array.mean.size:
        return
    channel = f"channel {wrong[0]} of it " if len(wrong) and array.mean.ndim else "it "
    is_empty = not len(wrong) or not array.n_values.reshape(-1)[wrong[0]]
    raise H5ValueError(
        f"{array.key!r} cannot be normalised with these statistics: {channel}has "
        f"{'no finite value' if is_empty else 'values too large for a float64 to hold their squares'} "
        f"({int(array.n_nan.sum()):,} NaN and {int(array.n_infinite.sum()):,} infinite ones in all). Mend the values, "
        "or leave the array out."
    )


def _plain(array: ArrayStats) -> dict[str, Any]:
    """A field of the file."""
    histogram = array.histogram
    return {
        "mean": array.mean.tolist(),
        "std": array.std.tolist(),
        "channel_axis": array.channel_axis,
        "row_shape": list(array.row_shape),
        "min": array.min.tolist(),
        "max": array.max.tolist(),
        "n_values": array.n_values.tolist(),
        "n_nan": array.n_nan.tolist(),
        "n_infinite": array.n_infinite.tolist(),
        "n_rows": array.n_rows,
        "dtype": array.dtype,
    } | ({} if histogram is None else {"histogram": _bins(histogram)})


def _bins(histogram: Histogram) -> dict[str, Any]:
    return {"edges": histogram.edges.tolist(), "counts": histogram.counts.tolist()}

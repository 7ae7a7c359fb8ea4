"""``compute_stats``: mean, deviation, minimum and maximum of arrays, in one pass over their files, on all cores."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..datasets import FieldStats, write_stats
from ..datasets.catalog import Catalog
from ..datasets.compatibility import Asked
from ..datasets.row_table import RowTable
from ..errors import H5KeyError, H5ValueError, listing
from ..hdf5 import (
    ArrayLayout,
    OpenOptions,
    expand_paths,
    expand_user,
    field_names,
    guess_keys,
    kind_of,
    list_arrays,
    open_h5,
)
from ..options import FileOptions
from ..order.shards import Rows
from ..progress_bar import progress_bar
from ..readers import BulkTask, bulk_tasks, do_tasks, first_places, open_source, usable_cores
from ..types import IntArray, PathLike, Paths
from .repack import check_output
from .running_stats import RunningStats, empty_stats, merge_stats, stats_of

ChannelAxis: TypeAlias = int | Mapping[str, int | None] | None
"""The axis of a row that has the channels, or that for each array; None takes all values of a row together."""

RowsLike: TypeAlias = Any
"""Numbers of rows, or a mask, as whatever NumPy makes an array of; None for all rows."""

BLOCK_VALUES = 1 << 17  # processed at a time: 1 MiB as float64, which fits a core's cache
MIN_BLOCK = 16  # minimum rows of a block, unless these have more than 16 times BLOCK_VALUES values
RUN_BYTES = 1 << 20  # bytes read together in arrays without chunks
MAX_BYTES = 1 << 30  # bytes for which tasks are created at a time; rows that share chunks are split at this size
MAX_TASKS = 1 << 10  # created at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayStats:
    """Statistics of the values of one array, over all files.

    With channels all arrays here have the shape ``(n_channels,)``, without ``()``. NaN and infinite values are counted
    and left out of all the rest. A channel that has no other values has NaN for mean, deviation, minimum and maximum.

    Attributes:
        key: the array.
        dtype: of its values, as read.
        row_shape: shape of a row.
        channel_axis: axis of a row that has the channels, from 0; None if all values were taken together.
        n_rows: rows that were read.
        n_values: finite values.
        n_nan: values that are NaN.
        n_infinite: infinite values.
        mean: mean of the finite values.
        std: their standard deviation (divided by their number, as NumPy does it); exactly 0 if all are equal.
        min: the smallest finite value, exact: of integers an integer, also above 2**53.
        max: the largest, in the same way.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class StatsReport:
    """What ``compute_stats`` found.

    Attributes:
        files: that were read, in this order.
        n_rows_of_files: rows of all files; ``ArrayStats.n_rows`` has how many were read.
        arrays: one entry for each array.
    """

    files: tuple[str, ...]
    n_rows_of_files: int
    arrays: tuple[ArrayStats, ...]

    def fields(self) -> dict[str, FieldStats]:
        """Return what ``normalize=`` of datasets takes, by array.

        Raises:
            H5ValueError: an array has a channel that nothing can be normalized with.
        """
        for array in self.arrays:
            _ensure_usable(array)
        return {a.key: FieldStats(a.mean, a.std, a.channel_axis, a.row_shape) for a in self.arrays}

    def save(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write the JSON file that ``normalize=`` of data modules and datasets reads, whole or not at all.

        Args:
            path: the file.
            overwrite: replace an existing file.

        Raises:
            H5ValueError: an array has a channel that nothing can be normalized with.
            H5FileError: the file exists, or cannot be written.
        """
        self.fields()
        check_output(expand_user(path), self.files, overwrite=overwrite)
        fields = {
            array.key: {name: np.asarray(value).tolist() for name, value in vars(array).items() if name != "key"}
            for array in self.arrays
        }
        write_stats(path, {key: field | {"files": list(self.files)} for key, field in fields.items()})


def compute_stats(
    path: Paths,
    keys: str | Sequence[str] | None = None,
    *,
    channel_axis: ChannelAxis = None,
    rows: RowsLike = None,
    allow_external: bool = False,
    shows_progress: bool = False,
) -> StatsReport:
    """Compute statistics of arrays, over one file or several that make one data set.

    Each chunk is decoded once, on all cores, and memory stays at a few chunks for each core, however large the files
    are (rows that share their chunks are read together, up to 1 GiB of them). The result does not depend on the number
    of cores, bit by bit. It is exact to 1e-10 of the values' size, also for small deviations from a large mean.

    Normalize with the statistics of the training rows alone: pass their numbers as ``rows``, or their files.

    Args:
        path: a file, a glob, a directory, or a list of these.
        keys: the arrays; None infers the input if exactly one array qualifies.
        channel_axis: the axis of a row (without that of the rows) that has the channels, which then have statistics of
            their own; or that of each array, by key. Arrays with one value a row have none. None, the default, takes
            all values together: a file does not declare what an axis means.
        rows: numbers of rows, each once in any order, or a mask; counted over all files. None takes all.
        allow_external: follow links out of the files.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Raises:
        H5FileError: a file is missing or broken.
        H5KeyError: an array is missing, or none was named and several qualify.
        H5ValueError: values are no real numbers, files differ, or an argument makes no sense.
        H5CorruptError: something does not decode.
        H5DataChangedError: a file was written to meanwhile.
    """
    paths = expand_paths(path)
    names = named_keys(paths, keys)
    if isinstance(channel_axis, Mapping) and (unknown := sorted(set(channel_axis) - set(names))):
        raise H5ValueError(
            f"channel_axis names {listing(unknown)}; the arrays are {listing(names)}. Name one of these."
        )
    options = OpenOptions(files=FileOptions(allow_external=allow_external))
    catalog = Catalog(names)
    tables = [catalog.table(paths, [Asked(key=key)], options) for key in names]
    wanted = [_ascending(rows, table.n_rows, key) for key, table in zip(names, tables, strict=True)]
    axes = [_axis(table.layouts[0][0], channel_axis) for table in tables]
    arrays = tuple(
        _stats_of(table, options, some, axis, shows_progress=shows_progress)
        for table, some, axis in zip(tables, wanted, axes, strict=True)
    )
    return StatsReport(files=paths, n_rows_of_files=tables[0].n_rows, arrays=arrays)


def named_keys(paths: Sequence[str], keys: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the arrays that are meant.

    Args:
        paths: the files; if no array is named, the first one is searched.
        keys: what the user named.

    Raises:
        H5KeyError: nothing was named, and several arrays of the file qualify.
        H5ValueError: they are not names, or one of them is repeated.
    """
    if keys is not None:
        names = field_names(keys, "keys").keys
        if len(set(names)) < len(names):
            raise H5ValueError(f"keys={list(names)!r} names an array twice. Name each once.")
        return names
    try:
        return (guess_keys(paths[0])[0],)
    except H5KeyError as error:
        with open_h5(paths[0]) as file:
            arrays = list_arrays(file)
        raise H5KeyError(
            f"no array was named, and {paths[0]!r} has {listing(arrays)}. Name it: keys='...' (or --key)."
        ) from error


def _axis(layout: ArrayLayout, given: ChannelAxis) -> int | None:
    """Return the axis of a row that has the channels, from 0."""
    if kind_of(layout.dtype) != "number" or layout.dtype.kind == "c":
        what = "complex numbers" if layout.dtype.kind == "c" else kind_of(layout.dtype)
        raise H5ValueError(
            f"{layout.key!r} in {layout.path!r} holds {what} (dtype {layout.stored}), and statistics need real "
            "numbers. Name an array of real numbers."
        )
    axis = given.get(layout.key) if isinstance(given, Mapping) else given
    n_axes = len(layout.row_shape)
    if axis is None or n_axes == 0:
        return None
    if not -n_axes <= axis < n_axes:
        raise H5ValueError(
            f"channel_axis={axis} was given for {layout.key!r}, whose rows have the shape {layout.row_shape}. Pass an "
            f"axis of a row, 0 to {n_axes - 1}, or None for all values together."
        )
    return axis % n_axes


def _ascending(rows: RowsLike, n_rows: int, key: str) -> Rows:
    """Return numbers of rows in ascending order."""
    if rows is None:
        return range(n_rows)
    if isinstance(rows, range) and rows and rows.step > 0 and rows[0] >= 0 and rows[-1] < n_rows:
        return rows
    given = np.asarray(rows)
    if given.dtype == np.bool_ and given.shape == (n_rows,):
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise H5ValueError(
            f"rows has the shape {given.shape} and the dtype {given.dtype}, and {key!r} has {n_rows} rows. Pass "
            f"numbers of rows, or a mask of the shape ({n_rows},)."
        )
    ordered: IntArray = np.sort(given).astype(np.int64)
    if len(wrong := ordered[(ordered < 0) | (ordered >= n_rows)]):
        wanted = wrong[0] if wrong[0] < 0 else wrong[-1]
        raise H5ValueError(
            f"row {wanted} is out of range for {key!r}, which has {n_rows} rows. Pass rows of these files."
        )
    if (np.diff(ordered) == 0).any():
        raise H5ValueError(f"rows has {len(ordered)} rows of {key!r}, some of them twice. Pass each once.")
    return ordered


def _stats_of(
    table: RowTable, options: OpenOptions, rows: Rows, axis: int | None, *, shows_progress: bool
) -> ArrayStats:
    layout = table.layouts[0][0]  # dtype and row shape are the same in all files
    shape = layout.row_shape
    n_channels = 1 if axis is None else shape[axis]
    n_after = 1 if axis is None else math.prod(shape[axis + 1 :])
    sums = _InOrder((-1, n_channels, n_after), empty_stats(n_channels, layout.dtype))
    what = f"statistics of {layout.key!r}"
    with progress_bar(len(rows) * layout.row_bytes, what, shows_progress=shows_progress) as bar:
        tasks: list[BulkTask] = []
        for more in _tasks(table, options, rows, sums):
            tasks += more
            if len(tasks) >= MAX_TASKS or sum(task.n_decoded for task in tasks) >= MAX_BYTES:
                do_tasks(tasks, usable_cores(), bar.update)
                tasks = []
        do_tasks(tasks, usable_cores(), bar.update)
    for guard in table.guards:
        guard.check()
    total = sums.result
    is_none = total.n == 0

    def shaped(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(values[0] if axis is None else values)

    def known(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return shaped(np.where(is_none, np.nan, values) if is_none.any() else values)

    return ArrayStats(
        key=layout.key,
        dtype=str(layout.dtype),
        row_shape=shape,
        channel_axis=axis,
        n_rows=len(rows),
        n_values=shaped(total.n),
        n_nan=shaped(total.n_nan),
        n_infinite=shaped(total.n_infinite),
        mean=known(total.mean),
        std=known(total.std),
        min=known(total.least),
        max=known(total.largest),
    )


class _InOrder:
    """A ``BulkTarget`` that sums up rows, and merges the sums in the order of the rows, whenever they come.

    Which rows make a block follows from how they are stored alone, not from the number of threads.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, view: tuple[int, int, int], nothing: RunningStats) -> None:
        self._view, self.result = view, nothing
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[int, RunningStats]] = {}  # results of rows after others that are still in progress

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        values = rows.reshape(self._view)
        n_each = max(1, values.shape[1] * values.shape[2])
        # Merging takes as long as a few rows: a block has enough of them if they are not too large.
        step = max(1, BLOCK_VALUES // n_each, min(MIN_BLOCK, MIN_BLOCK * BLOCK_VALUES // n_each))
        done = stats_of(values[:step])
        for at in range(step, len(values), step):
            done = merge_stats(done, stats_of(values[at : at + step]))
        with self._lock:
            self._early[start] = start + len(rows), done
            while self._next in self._early:
                self._next, ready = self._early.pop(self._next)
                self.result = merge_stats(self.result, ready)


def _tasks(table: RowTable, options: OpenOptions, rows: Rows, target: _InOrder) -> Iterator[list[BulkTask]]:
    """Yield tasks for some rows at a time: those of a terabyte would take memory themselves."""
    counters = Counters()
    for at, (layout,) in enumerate(table.layouts):
        low, high = table.starts[at : at + 2].tolist()
        first, stop = first_places(rows, np.array([low, high])).tolist()
        some = rows[first:stop]
        own = range(some.start - low, some.stop - low, some.step) if isinstance(some, range) else some - low
        row_bytes = max(1, layout.row_bytes)
        source = open_source(layout, options, max(1, RUN_BYTES // row_bytes), counters)
        step = max(1, MAX_BYTES // row_bytes)
        if step > source.rows_per_block:  # otherwise rows that share chunks do not fit, and are read repeatedly
            step = step // source.rows_per_block * source.rows_per_block
        places = first_places(own, np.arange(0, layout.n_rows + step, step)).tolist()
        for start, end in pairwise(places):
            yield bulk_tasks(source, layout, own[start:end], target, first + start)


def _ensure_usable(array: ArrayStats) -> None:
    wrong = np.flatnonzero(~(np.isfinite(array.mean) & np.isfinite(array.std)))
    if not len(wrong) and array.mean.size:
        return
    channel = f"channel {wrong[0]} of it " if len(wrong) and array.mean.ndim else "it "
    is_empty = not len(wrong) or not array.n_values.reshape(-1)[wrong[0]]
    raise H5ValueError(
        f"{array.key!r} cannot be normalized with these statistics: {channel}has "
        f"{'no finite value' if is_empty else 'values too large for a float64 to hold their squares'} "
        f"({int(array.n_nan.sum()):,} NaN and {int(array.n_infinite.sum()):,} infinite ones in all). Fix the values, "
        "or leave the array out."
    )

"""``compute_stats``: mean, deviation, minimum and maximum of arrays, in one pass over their files, on all cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..datasets import FieldStats, SampleOptions, WholeSegments, write_stats
from ..datasets.catalog import Catalog
from ..datasets.cells import are_cells
from ..datasets.compatibility import Asked
from ..datasets.fields import Decode, codecs_of
from ..datasets.indexer import Places
from ..datasets.row_table import RowTable
from ..datasets.segment_choice import SegmentChoice
from ..datasets.segment_fields import SampleKind, Select, selected
from ..datasets.segment_tables import segment_table
from ..errors import H5KeyError, H5ValueError, listing
from ..hdf5 import (
    ArrayLayout,
    OpenOptions,
    expand_paths,
    expand_user,
    field_names,
    guess_keys,
    kind_of,
    list_data,
    open_h5,
)
from ..options import FileOptions, SegmentOptions
from ..order.shards import Rows
from ..progress_bar import progress_bar
from ..readers import (
    BulkTask,
    do_tasks,
    usable_cores,
)
from ..types import IntArray, Keys, PathLike, Paths
from .repack import check_output
from .running_stats import MAX_BYTES, InOrder, empty_stats, rows_by_part, tasks_of

ChannelAxis: TypeAlias = int | Mapping[str, int | None] | None
"""The axis of a row that has the channels, or that for each array; None takes all values of a row together."""

RowsLike: TypeAlias = Any
"""Numbers of rows, or a mask, as whatever NumPy makes an array of; None for all rows."""

MAX_TASKS = 1 << 10  # created at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayStats:
    """Statistics of the values of one array, over all files.

    With channels all arrays here have the shape ``(n_channels,)``, without ``()``. NaN and infinite values are counted
    and left out of all the rest. A channel that has no other values has NaN for mean, deviation, minimum and maximum.

    Attributes:
        key: the array.
        dtype: of its values, as read.
        row_shape: shape of a row, or of a step, without the axis of steps; None if there are several.
        channel_axis: axis of a row that has the channels, from 0; None if all values were taken together.
        n_rows: rows, or steps, that were read.
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
    row_shape: tuple[int, ...] | None
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
        n_rows_of_files: rows, or steps, of all files; ``ArrayStats.n_rows`` has how many were read.
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
    keys: Keys | None = None,
    *,
    channel_axis: ChannelAxis = None,
    rows: RowsLike = None,
    sample: SampleKind | None = None,
    segments: str | SegmentOptions | Mapping[str, Any] | None = None,
    select: Select | None = None,
    decode: Decode | None = None,
    allow_external: bool = False,
    shows_progress: bool = False,
) -> StatsReport:
    """Compute statistics of arrays, over one file or several that make one data set.

    Each chunk is decoded once, on all cores, and memory stays at a few chunks for each core, however large the files
    are (rows that share their chunks are read together, up to 1 GiB of them). The result does not depend on the number
    of cores, bit by bit. It is exact to 1e-10 of the values' size, also for small deviations from a large mean.

    Normalize with the statistics of the training rows alone: pass their numbers as ``rows``, or their files.

    Pass ``sample``, ``segments`` and ``select`` as to the data module. Each step counts once, whatever windows there
    are; an array without steps, or an attribute, counts once for each of its values.

    Args:
        path: a file, a glob, a directory, or a list of these.
        keys: the arrays, or a mapping from their names in a sample; None infers the input if exactly one array
            qualifies.
        channel_axis: the axis of a row (without that of the rows, or steps) that has the channels, which then have
            statistics of their own; or that of each array, by key. Arrays with one value a row have none. None, the
            default, takes all values together: a file does not declare what an axis means.
        rows: numbers of rows, each once in any order, or a mask; counted over all files. Of segments, if samples are
            made of these. None takes all.
        sample: what a sample is, as for data modules.
        segments: which steps belong together, as for data modules.
        select: the part of an array to read, as for data modules.
        decode: what decodes arrays, as for data modules.
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
    given = SampleOptions.parse("segment" if sample == "window" else sample, segments, None, select)
    wanted: list[Rows | list[IntArray] | None]
    of_sample = names if keys is None else field_names(keys, "keys").names
    stacks = (() if keys is None else field_names(keys, "keys").stacks) or (None,) * len(names)
    codecs = codecs_of(decode, of_sample, names, stacks)
    asked = [Asked.of(*one) for one in zip(names, codecs, stacks, strict=True)]
    catalog = Catalog(names)
    if given.needs_segments(names) or are_cells(catalog, paths, names, options):
        whole = segment_table(catalog, paths, asked, of_sample, options, given, SegmentChoice())
        tables = [whole.with_fields([at]) for at in range(len(names))]
        wanted = [None if rows is None else _rows_of_segments(rows, table, table.layouts[0][0].key) for table in tables]
    else:
        tables = [catalog.table(paths, [one], options) for one in selected(asked, of_sample, given)]
        wanted = [_ascending(rows, table.n_rows, f"{key!r}") for key, table in zip(names, tables, strict=True)]
    axes = [
        _axis([arrays[0] for arrays in table.layouts], channel_axis, key)
        for key, table in zip(names, tables, strict=True)
    ]
    arrays = tuple(
        _stats_of(key, table, options, some, axis, shows_progress=shows_progress)
        for key, table, some, axis in zip(names, tables, wanted, axes, strict=True)
    )
    n_rows = sum(array.n_rows for (array,) in tables[0].layouts)
    return StatsReport(files=paths, n_rows_of_files=n_rows, arrays=arrays)


def named_keys(paths: Sequence[str], keys: Keys | None) -> tuple[str, ...]:
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
            arrays, _ = list_data(file)
        raise H5KeyError(
            f"no array was named, and {paths[0]!r} has {listing(arrays)}. Name it: keys='...' (or --key)."
        ) from error


def _axis(layouts: Sequence[ArrayLayout], given: ChannelAxis, key: str) -> int | None:
    """Return the axis of a row that has the channels, from 0."""
    layout = layouts[0]
    if kind_of(layout.dtype) != "number" or layout.dtype.kind == "c":
        what = "complex numbers" if layout.dtype.kind == "c" else kind_of(layout.dtype)
        raise H5ValueError(
            f"{layout.key!r} in {layout.path!r} holds {what} (dtype {layout.stored}), and statistics need real "
            "numbers. Name an array of real numbers."
        )
    axis = given.get(key) if isinstance(given, Mapping) else given
    n_axes = len(layout.row_shape)
    if axis is None or n_axes == 0:
        return None
    if not -n_axes <= axis < n_axes:
        raise H5ValueError(
            f"channel_axis={axis} was given for {layout.key!r}, whose rows have the shape {layout.row_shape}. Pass an "
            f"axis of a row, 0 to {n_axes - 1}, or None for all values together."
        )
    for other in layouts:
        if len(other.row_shape) != n_axes or other.row_shape[axis] != layout.row_shape[axis]:
            raise H5ValueError(
                f"channel_axis={axis} was given for {key!r}, whose rows have the shape {layout.row_shape} in "
                f"{layout.path!r} and {other.row_shape} in {other.path!r}. Pass an axis along which all have one "
                "length, or None for all values together."
            )
    return axis % n_axes


def _rows_of_segments(rows: RowsLike, table: RowTable, key: str) -> list[IntArray]:
    """Return the rows, of each part, that some segments have."""
    segments = table.indexer.segments
    numbers = np.arange(len(segments))[_ascending(rows, len(segments), f"{key!r} (in segments)")]
    found = WholeSegments(segments).rows(Places(numbers, np.zeros(len(numbers), np.int64)))[0].rows
    has_steps = table.has_steps[0]
    parts, local = table.locate(found) if has_steps else table.locate_values(0, found)
    own = table.own_rows(0, parts, local) if has_steps else local
    return [np.unique(own[parts == part]) for part in range(len(table.layouts))]


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
            f"rows has the shape {given.shape} and the dtype {given.dtype}, and {key} has {n_rows} rows. Pass "
            f"numbers of rows, or a mask of the shape ({n_rows},)."
        )
    ordered: IntArray = np.sort(given).astype(np.int64)
    if len(wrong := ordered[(ordered < 0) | (ordered >= n_rows)]):
        wanted = wrong[0] if wrong[0] < 0 else wrong[-1]
        raise H5ValueError(
            f"row {wanted} is out of range for {key}, which has {n_rows} rows. Pass rows of these files."
        )
    if (np.diff(ordered) == 0).any():
        raise H5ValueError(f"rows has {len(ordered)} rows of {key}, some of them twice. Pass each once.")
    return ordered


def _stats_of(
    key: str,
    table: RowTable,
    options: OpenOptions,
    wanted: Rows | list[IntArray] | None,
    axis: int | None,
    *,
    shows_progress: bool,
) -> ArrayStats:
    layout = table.layouts[0][0]  # the dtype is the same in all files
    shapes = {array.row_shape for (array,) in table.layouts}
    nothing = empty_stats(1 if axis is None else layout.row_shape[axis], layout.dtype)
    sums = InOrder(axis, nothing, layout.refuse_missing)
    rows = rows_by_part(table, wanted)
    n_bytes = sum(len(some) * array.row_bytes for some, (array,) in zip(rows, table.layouts, strict=True))
    with progress_bar(n_bytes, f"statistics of {key!r}", shows_progress=shows_progress) as bar:
        tasks: list[BulkTask] = []
        for more in tasks_of(table, options, rows, sums):
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
        key=key,
        dtype=str(layout.dtype),
        row_shape=layout.row_shape if len(shapes) == 1 else None,
        channel_axis=axis,
        n_rows=sum(map(len, rows)),
        n_values=shaped(total.n),
        n_nan=shaped(total.n_nan),
        n_infinite=shaped(total.n_infinite),
        mean=known(total.mean),
        std=known(total.std),
        min=known(total.least),
        max=known(total.largest),
    )


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

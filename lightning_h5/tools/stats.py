"""``compute_stats``: mean, deviation, minimum and maximum of arrays, in one pass over their files, on all cores.

Values are summed up in float64 as threads read rows, in any order. The result does not depend on the number of threads:
sums are merged in the order of the rows.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..catalog import ArrayRequest, Catalog
from ..counters import Counters
from ..datasets import FieldStats, write_stats
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
    BlockMap,
    BlockSource,
    Boxes,
    BulkTask,
    Decode,
    bulk_tasks,
    codecs_of,
    do_tasks,
    first_places,
    open_source,
    usable_cores,
)
from ..samples import (
    KindOfSamples,
    Places,
    RowTable,
    SampleKind,
    SampleOptions,
    SegmentChoice,
    Select,
    WholeSegments,
    open_table,
    sample_kind,
    selected,
    table_of_rows,
)
from ..types import IntArray, Keys, PathLike, Paths
from .output_files import check_output

_log = logging.getLogger(__name__)

ChannelAxis: TypeAlias = int | Mapping[str, int | None] | None
"""The axis of the channels in a row, or a mapping from arrays to axes; None computes over all values of a row."""

RowsLike: TypeAlias = Any
"""Row numbers, or a mask, in any form that NumPy converts to an array; None for all rows."""

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_TASKS = 1 << 10  # created at a time
BLOCK_VALUES = 1 << 17  # processed at a time: 1 MiB as float64, which fits a core's cache
MIN_BLOCK = 16  # minimum rows of a block, unless these have more than 16 times BLOCK_VALUES values
RUN_BYTES = 1 << 20  # bytes read together in arrays without chunks
MAX_BYTES = 1 << 30  # bytes for which tasks are created at a time; rows that share chunks are split at this size


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayStats:
    """Statistics of the values of one array, over all files.

    With channels, all statistics have the shape ``(n_channels,)``, otherwise ``()``. NaN and infinite values are
    counted, and excluded from the other statistics. A channel without finite values has NaN as mean, deviation,
    minimum and maximum.

    Attributes:
        key: the array.
        dtype: dtype of the values, as read.
        row_shape: shape of a row, or of a step, without the axis of steps; None if shapes differ.
        channel_axis: axis of the channels in a row, from 0; None for statistics of all values together.
        n_rows: number of rows, or steps, that were read.
        n_values: number of finite values.
        n_nan: number of NaN values.
        n_infinite: number of infinite values.
        mean: mean of the finite values.
        std: standard deviation of the finite values (divided by ``n_values``, as in NumPy); exactly 0 if all are equal.
        min: the smallest finite value, exact: an integer for integers, also above 2**53.
        max: the largest finite value, exact as ``min``.
        is_sparse: whether it is a sparse matrix. Values that are not stored count as zeros.
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
    is_sparse: bool = False


SAVED = [field.name for field in fields(ArrayStats) if field.name not in ("key", "is_sparse")]


@dataclass(frozen=True, eq=False, kw_only=True)
class StatsReport:
    """The result of ``compute_stats``.

    Attributes:
        files: the files, in the order of reading.
        n_rows_of_files: rows, or steps, of all files; ``ArrayStats.n_rows`` is the number that was read.
        arrays: statistics of each array.
    """

    files: tuple[str, ...]
    n_rows_of_files: int
    arrays: tuple[ArrayStats, ...]

    def fields(self) -> dict[str, FieldStats]:
        """Return statistics for ``normalize=`` of datasets, by array.

        Raises:
            H5ValueError: an array has a channel without finite statistics, or is a sparse matrix.
        """
        for array in self.arrays:
            if array.is_sparse:
                raise H5ValueError(
                    f"{array.key!r} is a sparse matrix, and normalized rows would no longer be sparse. Scale its "
                    "values in a transform."
                )
            _ensure_usable(array)
        return {a.key: FieldStats(a.mean, a.std, a.channel_axis, a.row_shape) for a in self.arrays}

    def save(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write a JSON file for the argument ``normalize`` of data modules and datasets, atomically.

        Args:
            path: the file.
            overwrite: replace an existing file.

        Raises:
            H5ValueError: an array has a channel without finite statistics.
            H5FileError: the file exists, or cannot be written.
        """
        self.fields()
        check_output(expand_user(path), self.files, overwrite=overwrite)
        fields = {
            array.key: {name: np.asarray(value).tolist() for name, value in vars(array).items() if name in SAVED}
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
    """Compute statistics of arrays, over one file or several files of one data set.

    Each chunk is decoded once, on all cores. For files of any size, this needs memory for a few chunks per core (rows
    that share chunks are read together, up to 1 GiB). The result does not depend on the number of cores, bit by bit. It
    is exact to 1e-10 of the values' size, also for small deviations from a large mean.

    Normalize with the statistics of the training rows only: pass their numbers as ``rows``, or their files.

    Pass ``sample``, ``segments`` and ``select`` as to the data module. Each step counts once, in any number of windows;
    an array without steps, or an attribute, counts once for each of its values.

    Args:
        path: a file, a glob, a directory, or a list of files, globs and directories.
        keys: the arrays, or a mapping from their names in a sample; for a sparse matrix, the name of its group. None
            uses the input that ``inspect`` suggests, with its windows and segments.
        channel_axis: axis of the channels in a row (not counting the axis of rows or steps), for statistics per
            channel; or a mapping from keys to axes. Arrays with one value per row have no such axis. None, the default,
            computes over all values: a file does not declare the meaning of an axis.
        rows: row numbers, each once in any order, or a mask; counted over all files. Numbers of segments, if samples
            are made of segments. None is all rows.
        sample: the kind of sample, as for data modules.
        segments: how steps are grouped into segments, as for data modules.
        select: the part of an array to read, as for data modules.
        decode: the decoder of each array, as for data modules.
        allow_external: follow links to other files.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Raises:
        H5FileError: a file is missing or broken.
        H5KeyError: an array is missing, or ``keys`` is None and several arrays are equally likely.
        H5ValueError: values are not real numbers, files differ, or an argument is invalid.
        H5CorruptError: a chunk does not decode.
        H5DataChangedError: a file changed while it was read.
    """
    paths = expand_paths(path)
    if keys is None:
        keys, suggestion = suggested_input(paths)
        if sample is segments is select is decode is None:
            sample, segments, select, decode = suggestion
    names = named_keys(keys)
    if isinstance(channel_axis, Mapping) and (unknown := sorted(set(channel_axis) - set(names))):
        raise H5ValueError(f"channel_axis names {listing(unknown)}; the arrays are {listing(names)}. Name one of them.")
    options = OpenOptions(files=FileOptions(allow_external=allow_external))
    sample_options = SampleOptions.parse("segment" if sample == "window" else sample, segments, None, select)
    rows_of_tables: list[Rows | list[IntArray] | None]
    of_sample = field_names(keys, "keys").names
    stacks = field_names(keys, "keys").stacks or (None,) * len(names)
    codecs = codecs_of(decode, of_sample, names, stacks)
    requests = [ArrayRequest.of(*arguments) for arguments in zip(names, codecs, stacks, strict=True)]
    catalog = Catalog(names)
    kind = sample_kind(catalog, paths, names, options, sample_options)
    if kind.needs_segments or kind.are_cells:
        all_fields, _, _ = open_table(catalog, paths, requests, of_sample, options, kind, SegmentChoice())
        tables = [all_fields.with_fields([at]) for at in range(len(names))]
        rows_of_tables = [
            None if rows is None else _rows_of_segments(rows, table, table.layouts[0][0].key) for table in tables
        ]
    elif kind.matrices:
        return _stats_of_matrices(catalog, paths, requests, options, kind, rows, channel_axis, shows_progress)
    else:
        requests = selected(requests, of_sample, sample_options)
        tables = [table_of_rows(catalog, paths, [request], options) for request in requests]
        rows_of_tables = [_ascending(rows, table.n_rows, f"{key!r}") for key, table in zip(names, tables, strict=True)]
    layouts = [array for table in tables for arrays in table.layouts.examples for array in arrays]
    for text in dict.fromkeys(text for layout in layouts for text in layout.missing_as_stored):
        _log.warning("%s", text)
    axes = [
        _axis([arrays[0] for arrays in table.layouts], channel_axis, key)
        for key, table in zip(names, tables, strict=True)
    ]
    arrays = tuple(
        _stats_of_array(key, table, options, table_rows, axis, shows_progress=shows_progress)
        for key, table, table_rows, axis in zip(names, tables, rows_of_tables, axes, strict=True)
    )
    n_rows = sum(array.n_rows for (array,) in tables[0].layouts)
    return StatsReport(files=paths, n_rows_of_files=n_rows, arrays=arrays)


def suggested_input(paths: Sequence[str]) -> tuple[Keys, tuple[Any, Any, Any, Any]]:
    """Return the input as ``inspect`` suggests it, with its ``sample``, ``segments``, ``select`` and ``decode``.

    Args:
        paths: the files.

    Raises:
        H5KeyError: there is no input, or several arrays are equally likely.
    """
    from .inspect import inspect_file, inspect_folder
    from .inspect.contents import contents_of

    advice = inspect_file(paths[0]).advice if len(paths) == 1 else inspect_folder(paths).example.advice
    settings = advice.settings
    layouts = contents_of(paths[0]).layouts if advice.cost is None else {}
    if advice.datamodule is None or len(as_likely := _as_likely(layouts, advice.x_keys)) > 1:
        with suppress(H5KeyError):
            return guess_keys(paths[0])[0], (None, None, None, None)
        with open_h5(paths[0]) as file:
            arrays, _ = list_data(file)
        example = next((key for key in advice.x_keys if key in arrays), None)
        example = "keys='...' (--key ...)" if example is None else f"keys={example!r} (--key {example})"
        why = advice.reasons[0] if advice.datamodule is None else f"{listing(as_likely, 12)} are as likely."
        raise H5KeyError(
            f"no array was named, and {paths[0]!r} has {listing(arrays, 12)}. {why} Name the input: {example}."
        )
    fields = field_names(settings["x_key"], "x_key")
    of_training = [key.replace("{split}", "train") for key in fields.keys]
    keys: Keys = dict(zip(fields.names, of_training, strict=True)) if fields.kind == "dict" else of_training
    select = {key: part for key, part in settings.get("select", {}).items() if key in fields.keys}
    sample = "segment" if settings.keys() & {"window", "patch"} else settings.get("sample")
    segments = settings.get("segments")
    if isinstance(segments, Mapping):
        segments = {
            name: {field: n for field, n in option.items() if field in fields.names}
            if isinstance(option, Mapping)
            else option
            for name, option in segments.items()
        }
    decode = {
        key.replace("{split}", "train"): how for key, how in settings.get("decode", {}).items() if key in fields.names
    }
    return keys, (sample, segments, select or None, decode or None)


def _as_likely(layouts: Mapping[str, ArrayLayout], x_keys: Sequence[str]) -> list[str]:
    """Return the input and the arrays of its length with one value per row."""
    x = layouts.get(x_keys[0]) if len(x_keys) == 1 else None
    if x is None or x.row_shape or x.members:
        return []
    return [key for key, array in layouts.items() if not array.row_shape and array.n_rows == x.n_rows]


def named_keys(keys: Keys) -> tuple[str, ...]:
    """Return the names of the arrays.

    Raises:
        H5ValueError: a key is not a name, or is repeated.
    """
    names = field_names(keys, "keys").keys
    if len(set(names)) < len(names):
        raise H5ValueError(f"keys={list(names)!r} names an array twice. Name each once.")
    return names


def _stats_of_matrices(
    catalog: Catalog,
    paths: tuple[str, ...],
    requests: Sequence[ArrayRequest],
    options: OpenOptions,
    kind: KindOfSamples,
    rows: RowsLike,
    channel_axis: ChannelAxis,
    shows_progress: bool,
) -> StatsReport:
    """Return statistics of sparse matrices, including zeros, and of other arrays with the same rows."""
    names = [request.key for request in requests]
    table, _, matrices = open_table(catalog, paths, requests, names, options, kind, SegmentChoice())
    numbers = None if rows is None else np.asarray(_ascending(rows, table.n_samples, listing(names)))
    boxes = None if numbers is None else table.boxes(table.indexer.rows_of(numbers).fields)
    n_samples = table.n_samples if numbers is None else len(numbers)
    fields = [at for at in range(table.n_fields) if at - 1 not in matrices]  # without the columns of stored values
    arrays = []
    for at, key in zip(fields, names, strict=True):
        part_rows: list[IntArray] | None = None
        if boxes is not None:
            rows_by_part = {part: np.sort(rows) for part, (_, rows) in boxes[at].by_part().items()}
            part_rows = [rows_by_part.get(part, np.empty(0, np.int64)) for part in range(table.n_parts)]
        of_field = table.with_fields([at])
        axis = _axis([layouts[0] for layouts in of_field.layouts], channel_axis, key)
        array = _stats_of_array(key, of_field, options, part_rows, axis, shows_progress=shows_progress)
        arrays.append(_with_zeros(array, n_samples, matrices[at].n_columns) if at in matrices else array)
    return StatsReport(files=paths, n_rows_of_files=table.n_samples, arrays=tuple(arrays))


def _with_zeros(stored: ArrayStats, n_rows: int, n_columns: int) -> ArrayStats:
    """Return the statistics of a sparse matrix from those of its stored values."""
    n_stored = int(stored.n_values + stored.n_nan + stored.n_infinite)
    n_zeros = n_rows * n_columns - n_stored
    mean, squares = np.nan_to_num(stored.mean), np.nan_to_num(stored.std) ** 2 * stored.n_values
    n_values = stored.n_values + n_zeros
    total_mean = mean * stored.n_values / np.maximum(n_values, 1)
    between = mean**2 * stored.n_values * n_zeros / np.maximum(n_values, 1)
    least, largest = (np.where(np.isnan(end), 0, end).astype(end.dtype) for end in (stored.min, stored.max))
    return replace(
        stored,
        is_sparse=True,
        row_shape=(n_columns,),
        n_rows=n_rows,
        n_values=n_values,
        mean=total_mean,
        std=np.sqrt((squares + between) / np.maximum(n_values, 1)),
        min=np.minimum(least, 0) if n_zeros else stored.min,
        max=np.maximum(largest, 0) if n_zeros else stored.max,
    )


def _axis(layouts: Sequence[ArrayLayout], channel_axis: ChannelAxis, key: str) -> int | None:
    """Return the axis of the channels in a row, from 0."""
    layout = layouts[0]
    if kind_of(layout.dtype) != "number" or layout.dtype.kind == "c":
        content = "complex numbers" if layout.dtype.kind == "c" else kind_of(layout.dtype)
        raise H5ValueError(
            f"{layout.key!r} in {layout.path!r} holds {content} (dtype {layout.stored}), but statistics need real "
            "numbers. Name an array of real numbers."
        )
    axis = channel_axis.get(key) if isinstance(channel_axis, Mapping) else channel_axis
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
                f"{layout.path!r} and {other.row_shape} in {other.path!r}. Pass an axis of the same length in all "
                "files, or None for all values together."
            )
    return axis % n_axes


def _rows_of_segments(rows: RowsLike, table: RowTable, key: str) -> list[IntArray]:
    """Return the rows of some segments, for each part."""
    segments = table.indexer.segments
    numbers = np.arange(len(segments))[_ascending(rows, len(segments), f"{key!r} (in segments)")]
    (boxes,) = table.boxes(WholeSegments(segments).rows(Places(numbers, np.zeros(len(numbers), np.int64))))
    array_rows = {part: np.unique(rows) for part, (_, rows) in boxes.by_part().items()}
    return [array_rows.get(part, np.empty(0, np.int64)) for part in range(len(table.layouts))]


def _ascending(rows: RowsLike, n_rows: int, key: str) -> Rows:
    """Return numbers of rows in ascending order."""
    if rows is None:
        return range(n_rows)
    if isinstance(rows, range) and rows and rows.step > 0 and rows[0] >= 0 and rows[-1] < n_rows:
        return rows
    numbers = np.asarray(rows)
    if numbers.dtype == np.bool_ and numbers.shape == (n_rows,):
        return np.flatnonzero(numbers)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise H5ValueError(
            f"rows has the shape {numbers.shape} and the dtype {numbers.dtype}, but {key} has {n_rows} rows. Pass "
            f"row numbers, or a mask of the shape ({n_rows},)."
        )
    ordered: IntArray = np.sort(numbers).astype(np.int64)
    if len(invalid_rows := ordered[(ordered < 0) | (ordered >= n_rows)]):
        row = invalid_rows[0] if invalid_rows[0] < 0 else invalid_rows[-1]
        raise H5ValueError(f"row {row} is out of range for {key}, which has {n_rows} rows. Pass rows of these files.")
    if (np.diff(ordered) == 0).any():
        raise H5ValueError(f"rows names {len(ordered)} rows of {key}, some of them twice. Pass each row once.")
    return ordered


def _stats_of_array(
    key: str,
    table: RowTable,
    options: OpenOptions,
    table_rows: Rows | list[IntArray] | None,
    axis: int | None,
    *,
    shows_progress: bool,
) -> ArrayStats:
    layout = table.layouts[0][0]  # the dtype is the same in all files
    shapes = {array.row_shape for (array,) in table.layouts}
    nothing = empty_stats(1 if axis is None else layout.row_shape[axis], layout.dtype)
    sums = _InOrder(axis, nothing, layout.refuse_missing)
    rows = _rows_by_part(table, table_rows)
    n_bytes = sum(len(part_rows) * array.row_bytes for part_rows, (array,) in zip(rows, table.layouts, strict=True))
    with progress_bar(n_bytes, f"statistics of {key!r}", shows_progress=shows_progress) as bar:
        tasks: list[BulkTask] = []
        for next_tasks in _tasks_of(table, options, rows, sums):
            tasks += next_tasks
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


def _rows_by_part(table: RowTable, table_rows: Rows | list[IntArray] | None) -> list[Rows]:
    """Return the rows to read of each part, as row numbers of its array."""
    if isinstance(table_rows, list):
        return [*table_rows]
    if table_rows is None:
        return [range(array.n_rows) for (array,) in table.layouts]
    rows_of_parts: list[Rows] = []
    for low, high in pairwise(table.starts.tolist()):
        first, stop = first_places(table_rows, np.array([low, high])).tolist()
        part_rows = table_rows[first:stop]
        rows_of_parts.append(
            range(part_rows.start - low, part_rows.stop - low, part_rows.step)
            if isinstance(part_rows, range)
            else part_rows - low
        )
    return rows_of_parts


def _tasks_of(
    table: RowTable, options: OpenOptions, rows: Sequence[Rows], target: _InOrder
) -> Iterator[list[BulkTask]]:
    """Yield tasks for some rows at a time: all tasks of a terabyte would take much memory."""
    counters = Counters()
    first = 0
    for part_rows, (layout,) in zip(rows, table.layouts, strict=True):
        row_bytes = max(1, layout.row_bytes)
        if layout.value is not None or not layout.row_bytes:
            value = np.empty(0, layout.dtype) if layout.value is None else np.asarray(layout.value, layout.dtype)
            if len(part_rows):
                target.put(first, value.reshape(len(part_rows), *layout.row_shape))
        elif layout.view is not None:
            source = open_source(layout, options, 1, counters)
            yield from _tasks_of_view(source, layout, part_rows, target, first)
        else:
            source = open_source(layout, options, max(1, RUN_BYTES // row_bytes), counters)
            step = max(1, MAX_BYTES // row_bytes)
            if step > source.rows_per_block:  # otherwise rows that share chunks do not fit, and are read repeatedly
                step = step // source.rows_per_block * source.rows_per_block
            places = first_places(part_rows, np.arange(0, layout.n_rows + step, step)).tolist()
            for start, end in pairwise(places):
                yield bulk_tasks(source, layout, part_rows[start:end], target, first + start)
        first += len(part_rows)


def _tasks_of_view(
    source: BlockSource, layout: ArrayLayout, part_rows: Rows, target: _InOrder, first: int
) -> Iterator[list[BulkTask]]:
    """Yield a task for each block of an array with other axes of rows; rows of a block need not be consecutive."""
    blocks, within = BlockMap([source.grid]).locate(Boxes(0, np.asarray(part_rows, dtype=np.int64)))
    order = np.argsort(blocks, kind="stable")
    blocks, within = blocks[order], within[order]
    cuts = np.flatnonzero(np.diff(blocks, prepend=-1, append=-1))
    for low, high in pairwise(cuts.tolist()):

        def run(block: int = int(blocks[low]), rows: IntArray = within[low:high], start: int = first + low) -> None:
            values = np.empty((len(rows), *layout.row_shape), layout.dtype)
            source.pick(block, rows, values)
            target.put(start, values)

        n_decoded = source.rows_per_block * layout.row_bytes
        yield [BulkTask((high - low) * layout.row_bytes, n_decoded, run)]


class _InOrder:
    """A ``BulkTarget`` that sums up rows, and merges the sums in the order of the rows, not of their arrival.

    The rows of a block depend only on their storage, not on the number of threads.

    Args:
        axis: axis of the channels; None computes over all values.
        nothing: the sums of no rows.
        check: raises an error for rows with missing values.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, axis: int | None, nothing: RunningStats, check: Callable[[npt.NDArray[Any]], None]) -> None:
        self._axis, self.result, self._check = axis, nothing, check
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[int, RunningStats]] = {}  # results of rows after others that are still in progress

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """See ``BulkTarget.put``."""
        self._check(rows)
        n_channels = len(self.result.n)
        n_after = 1 if self._axis is None else max(1, math.prod(rows.shape[self._axis + 2 :]))
        values = rows.reshape(rows.size // (n_channels * n_after), n_channels, n_after)
        n_each = max(1, values.shape[1] * values.shape[2])
        # Merging takes as long as a few rows: a block has enough of them if they are not too large.
        step = max(1, BLOCK_VALUES // n_each, min(MIN_BLOCK, MIN_BLOCK * BLOCK_VALUES // n_each))
        sums = stats_of(values[:step])
        for at in range(step, len(values), step):
            sums = merge_stats(sums, stats_of(values[at : at + step]))
        with self._lock:
            self._early[start] = start + len(rows), sums
            while self._next in self._early:
                self._next, ready = self._early.pop(self._next)
                self.result = merge_stats(self.result, ready)


class RunningStats(NamedTuple):
    """Statistics of the values so far, for each channel: all have the shape ``(n_channels,)``.

    Mean and squares are computed from the deviations from ``shift``, a number near the first values that a float64
    holds exactly. So a large mean leaves small deviations all their digits.

    Attributes:
        n: number of finite values; the fields below, except for the next two, describe only them.
        n_nan: number of NaN values.
        n_infinite: number of infinite values.
        least: the smallest value, in the dtype of the values (float32 for 16 bits); the dtype's maximum if there are no
            values.
        largest: the largest value; the dtype's minimum if there are no values.
        shift: number subtracted from values before they are summed.
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
        n_channels: number of channels.
        dtype: dtype of the values: bool, an integer, or a float of 16, 32 or 64 bits.
    """
    computing_dtype = _computing_dtype(dtype)
    limits = np.iinfo(computing_dtype) if computing_dtype.kind in "iu" else None
    ends = (np.inf, -np.inf) if limits is None else (limits.max, limits.min)
    counts, zeros = np.zeros(n_channels, dtype=np.int64), np.zeros(n_channels)
    least, largest = (np.full(n_channels, end, dtype=computing_dtype) for end in ends)
    return RunningStats(counts, counts, counts, least, largest, zeros, zeros, zeros)


def stats_of(values: npt.NDArray[Any]) -> RunningStats:
    """Return the statistics of some values, in about 10 passes over memory: they should fit a core's cache.

    Args:
        values: shape ``(n_before, n_channels, n_after)``.
    """
    n_channels = values.shape[1]
    if not values.size:
        return empty_stats(n_channels, values.dtype)
    lines = np.ascontiguousarray(np.moveaxis(values, 1, 0)).reshape(n_channels, -1)
    lines = lines.astype(_computing_dtype(values.dtype), copy=False)
    n, n_nan = np.full(n_channels, lines.shape[1]), np.zeros(n_channels, dtype=np.int64)
    is_finite: Any = True
    with np.errstate(all="ignore"):  # stored values may be anything
        least, largest = lines.min(axis=1), lines.max(axis=1)
        if not (np.isfinite(least) & np.isfinite(largest)).all():  # NaN propagates to both
            is_finite = np.isfinite(lines)
            n, n_nan = is_finite.sum(axis=1), np.isnan(lines).sum(axis=1)
            least = lines.min(axis=1, where=is_finite, initial=np.inf)
            largest = lines.max(axis=1, where=is_finite, initial=-np.inf)
        if lines.dtype.kind in "iu" and lines.dtype.itemsize == 8:
            # float64 cannot represent all int64, but a multiple of 2048 exactly; unsigned distances from it never
            # overflow.
            base = least >> 11 << 11
            shift = base.astype(np.float64)
            deviations = (lines.view(np.uint64) - base.view(np.uint64)[:, None]).astype(np.float64)
        else:
            shift = np.where(n > 0, least.astype(np.float64) / 2 + largest.astype(np.float64) / 2, 0.0)
            deviations = np.subtract(lines, shift[:, None], dtype=np.float64)
        offset = deviations.sum(axis=1, where=is_finite) / np.maximum(n, 1)
        deviations -= offset[:, None]
        squares = np.square(deviations, out=deviations).sum(axis=1, where=is_finite)
    return RunningStats(n, n_nan, lines.shape[1] - n - n_nan, least, largest, shift, offset, squares)


def merge_stats(a: RunningStats, b: RunningStats) -> RunningStats:
    """Return the statistics of two sets of values together (T. Chan, G. Golub, R. LeVeque, 1979)."""
    is_first, is_last = a.n == 0, b.n == 0
    with np.errstate(all="ignore"):
        n = a.n + b.n
        share = b.n / np.maximum(n, 1)
        mean_difference = (b.shift - a.shift) + (b.offset - a.offset)
        between = np.where(is_first | is_last, 0.0, mean_difference * mean_difference * a.n * share)
        return RunningStats(
            n,
            a.n_nan + b.n_nan,
            a.n_infinite + b.n_infinite,
            np.minimum(a.least, b.least),
            np.maximum(a.largest, b.largest),
            np.where(is_first, b.shift, a.shift),
            np.where(is_first, b.offset, a.offset + mean_difference * share),
            a.squares + b.squares + between,
        )


def _computing_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to compute in: NumPy's minimum of bool is not a number, and 16 bits are slow."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if dtype.kind == "f" and dtype.itemsize < 4 else dtype


def _ensure_usable(array: ArrayStats) -> None:
    wrong = np.flatnonzero(~(np.isfinite(array.mean) & np.isfinite(array.std)))
    if not len(wrong) and array.mean.size:
        return
    channel = f"channel {wrong[0]} of it " if len(wrong) and array.mean.ndim else "it "
    is_empty = not len(wrong) or not array.n_values.reshape(-1)[wrong[0]]
    raise H5ValueError(
        f"{array.key!r} cannot be normalized with these statistics: {channel}has "
        f"{'no finite value' if is_empty else 'values too large for a float64 to hold their squares'} "
        f"({int(array.n_nan.sum()):,} NaN and {int(array.n_infinite.sum()):,} infinite values). Fix the values, "
        "or leave the array out."
    )

"""Values of columns: arrays with one value a row, read whole, as splits, weights and filters need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..catalog import PREFIX, ArrayRequest, Catalog, classes_of, decoded
from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions, kind_of
from ..options import FileOptions
from ..readers import (
    ArrayTarget,
    BlockSource,
    BulkTarget,
    BulkTask,
    RowGrid,
    bulk_tasks,
    first_places,
    open_reader,
    open_source,
    run_with_progress,
)
from ..types import IntArray, Paths, RowReader
from .row_table import RUN_BYTES, RowTable
from .row_tables import table_of_rows

__all__ = [
    "Run",
    "column_of",
    "column_tasks",
    "count_rows",
    "read_columns",
    "row_tasks",
    "rows_without_line",
    "source_of",
]

OF_CLASSES = ("stratify_key", "balance_key")  # arguments that take one-hot rows
TEXT_ROWS = 65_536  # of a task
VIEW_BYTES = 4 << 20  # of a task, at least the rows of a chunk

Run: TypeAlias = Callable[[list[BulkTask], str], None]
"""Runs tasks, under a name."""


def count_rows(
    paths: Sequence[str], key: str, files: FileOptions | None = None, *, catalog: Catalog | None = None
) -> int:
    """Return the number of rows of an array in some files."""
    asked = [ArrayRequest(key=key, takes_packed=True, only_counted=True)]
    return table_of_rows(catalog or Catalog(), paths, asked, OpenOptions(files=files or FileOptions())).n_rows


def rows_without_line(
    paths: Sequence[str], names: Iterable[str], files: FileOptions, catalog: Catalog
) -> npt.NDArray[np.bool_] | None:
    """Return which rows have no line in the side table and are left out; None if all rows are kept.

    Args:
        paths: the files, with known numbers of rows.
        names: all that is asked of rows: columns of the table among them, or not.
        files: how files are opened.
        catalog: of the files.
    """
    side = catalog.joins.side
    if side is None or side.column_on is None or side.options.missing == "error":
        return None
    if not any(map(catalog.joins.is_column, names)):
        return None
    return table_of_rows(catalog, paths, [ArrayRequest(key=PREFIX + side.column_on)], OpenOptions(files=files)).lacks


def column_of(
    paths: Sequence[str],
    key: str,
    n_rows: int,
    *,
    argument: str,
    files: FileOptions | None = None,
    same_rows_as: str | None = None,
    catalog: Catalog | None = None,
    others: Paths | None = None,
) -> npt.NDArray[Any]:
    """Return one value of each row.

    Args:
        paths: the files.
        key: the array.
        n_rows: rows of the files.
        argument: the user's argument that names the array, for errors.
        files: how they are opened; None for the defaults.
        same_rows_as: an array that has these rows, if the files have a live writer, which appends to one after the
            other.
        catalog: of the files; None opens them.
        others: files that have the array, one for each of ``paths``; None for these themselves.

    Raises:
        H5ValueError: the array has other rows, or rows without a value.
    """
    catalog = catalog or Catalog()
    options = OpenOptions(files=files or FileOptions())
    # Text is accepted. In a growing file both arrays end with the shorter one.
    keys = [key] if same_rows_as is None else [key, same_rows_as]
    asked = [ArrayRequest(key=one, takes_packed=True, paths=others if one == key else None) for one in keys]
    table = table_of_rows(catalog, paths, asked, options)
    if table.n_rows != n_rows:
        raise H5ValueError(
            f"{argument}={key!r} has {table.n_rows} rows and the data has {n_rows}. Name an array with one value per "
            "row."
        )
    parts = []
    read = read_columns(catalog, table, [0], options, Counters(), run_with_progress)
    for (array, *_), (values,) in zip(table.layouts, read, strict=True):
        part = decoded(array, values, options)
        part = np.array(part.tolist(), dtype=str) if part.dtype.kind == "O" else part
        if part.dtype.kind == "f" and array.packing is not None and (n_missing := int(np.isnan(part).sum())):
            raise H5ValueError(
                f"{argument}={array.key!r} has {n_missing} rows in {array.path!r} without a value ({array.packing}). "
                "Name an array with a value for each row."
            )
        parts.append(part)
    values = np.concatenate(parts)
    return classes_of(values, f"{argument}={key!r}") if argument in OF_CLASSES else values


def read_columns(
    catalog: Catalog, table: RowTable, fields: Sequence[int], options: OpenOptions, counters: Counters, run: Run
) -> list[list[npt.NDArray[Any]]]:
    """Return for each file the values of some fields, as stored; text as ``object``.

    Args:
        catalog: has the values of short columns.
        table: the files.
        fields: numbers of the fields.
        options: how files are opened if the HDF5 library reads.
        counters: counts what is read.
        run: runs the tasks.

    Raises:
        H5Error: a file was changed, or cannot be read.
    """
    tasks: list[BulkTask] = []
    read: list[list[npt.NDArray[Any]]] = []
    for layouts in table.layouts:
        read.append([])
        for layout in (layouts[field] for field in fields):
            column = None if layout.decoding is not None else catalog.values(layout.path, layout.key, options)
            if column is None or len(column) != layout.n_rows:
                more, column = column_tasks(layout, options, counters)
                tasks += more
            read[-1].append(column)
    if tasks:
        run(tasks, "reading columns")
        for guard in table.guards:
            guard.check()
    return read


def column_tasks(
    layout: ArrayLayout, options: OpenOptions, counters: Counters
) -> tuple[list[BulkTask], npt.NDArray[Any]]:
    """Return tasks that read a column, and the memory they fill."""
    is_text = kind_of(layout.dtype) != "number"
    column = np.empty((layout.n_rows, *layout.row_shape), dtype=object if is_text else layout.dtype)
    if is_text:
        rows = np.arange(layout.n_rows)
        return text_tasks(layout, rows, column, rows, options, counters), column
    return row_tasks(layout, range(layout.n_rows), ArrayTarget(column), 0, options, counters), column


def source_of(layout: ArrayLayout, options: OpenOptions, counters: Counters) -> BlockSource:
    """Return the source of an array's decoded chunks, or of runs of about a megabyte if it has none."""
    return open_source(layout, options, max(1, RUN_BYTES // max(1, layout.row_bytes)), counters)


def row_tasks(
    layout: ArrayLayout,
    rows: range | IntArray,
    target: BulkTarget,
    first: int,
    options: OpenOptions,
    counters: Counters,
) -> list[BulkTask]:
    """Return tasks that read rows of numbers, in ascending order, into a target from a place on.

    Rows that the array does not have, since another array has more in this part, are left out.
    """
    if not layout.row_bytes:
        return []
    if layout.view is not None:
        return _view_tasks(layout, np.asarray(rows), target, first, options, counters)
    n_there = first_places(rows, np.array([layout.n_rows])).item()
    return bulk_tasks(source_of(layout, options, counters), layout, rows[:n_there], target, first)


def _view_tasks(
    layout: ArrayLayout, rows: IntArray, target: BulkTarget, first: int, options: OpenOptions, counters: Counters
) -> list[BulkTask]:
    """Return tasks that read rows of an array that is seen another way, with the lines that share chunks together."""
    grid = RowGrid.of(layout, 1)
    lines, steps = np.divmod(rows, max(1, grid.period))
    there = np.flatnonzero((steps < grid.size) & (lines < grid.lines))
    lines, steps = lines[there], steps[there]
    n_together = grid.along * max(1, VIEW_BYTES // (layout.row_bytes * grid.along * grid.across))
    groups = (lines // grid.across) * -(-grid.size // n_together) + steps // n_together
    reader, tasks = open_reader(layout, options, counters=counters), []
    for group in np.unique(groups).tolist():
        here = np.flatnonzero(groups == group)
        read = partial(_read_view, reader, lines[here] * grid.size + steps[here], target, first + there[here])
        n_bytes = len(here) * layout.row_bytes
        tasks.append(BulkTask(n_bytes, n_bytes, read))
    return tasks


def _read_view(reader: RowReader, rows: IntArray, target: BulkTarget, places: IntArray) -> None:
    values = reader.read(rows)
    for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(places) != 1) + 1):
        target.put(int(places[run[0]]), values[run])


def text_tasks(
    layout: ArrayLayout,
    rows: IntArray,
    out: npt.NDArray[Any],
    places: IntArray,
    options: OpenOptions,
    counters: Counters,
) -> list[BulkTask]:
    """Return tasks that read rows of text, in ascending order, each to its place in an array of objects."""
    reader = open_reader(layout, options, counters=counters)
    tasks = []
    for start in range(0, len(rows), TEXT_ROWS):
        some, to = rows[start : start + TEXT_ROWS], places[start : start + TEXT_ROWS]
        n_bytes = len(some) * layout.row_bytes
        tasks.append(BulkTask(n_bytes, n_bytes, partial(_read_text, reader, some, out, to)))
    return tasks


def _read_text(reader: RowReader, rows: IntArray, out: npt.NDArray[Any], places: IntArray) -> None:
    out[places] = reader.read(rows)

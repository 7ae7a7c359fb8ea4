"""Values of whole columns, which are arrays with one value a row, for splits, weights and filters."""

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
"""Runs tasks. The text is the title of their progress bar."""


def count_rows(
    paths: Sequence[str], key: str, files: FileOptions | None = None, *, catalog: Catalog | None = None
) -> int:
    """Return the number of rows of an array in some files."""
    requests = [ArrayRequest(key=key, takes_packed=True, only_counted=True)]
    return table_of_rows(catalog or Catalog(), paths, requests, OpenOptions(files=files or FileOptions())).n_rows


def rows_without_line(
    paths: Sequence[str], names: Iterable[str], files: FileOptions, catalog: Catalog
) -> npt.NDArray[np.bool_] | None:
    """Return a mask of rows without a matching line in the side table; None if all rows have one.

    Args:
        paths: the files, with known numbers of rows.
        names: all requested arrays and columns.
        files: how files are opened.
        catalog: catalog of the files.
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
    """Return one value for each row.

    Args:
        paths: the files.
        key: the array.
        n_rows: rows of the files.
        argument: the user's argument that names the array, for errors.
        files: how they are opened; None for the defaults.
        same_rows_as: an array with these rows, if the files have a live writer, which appends to one array after the
            other.
        catalog: catalog of the files; None opens them.
        others: files that have the array, one for each of ``paths``; None if ``paths`` have it.

    Raises:
        H5ValueError: the array has more or fewer rows, or rows without a value.
    """
    catalog = catalog or Catalog()
    options = OpenOptions(files=files or FileOptions())
    # Text is accepted. In a growing file both arrays end with the shorter one.
    keys = [key] if same_rows_as is None else [key, same_rows_as]
    requests = [ArrayRequest(key=name, takes_packed=True, paths=others if name == key else None) for name in keys]
    table = table_of_rows(catalog, paths, requests, options)
    if table.n_rows != n_rows:
        raise H5ValueError(
            f"{argument}={key!r} has {table.n_rows} rows and the data has {n_rows}. Name an array with one value per "
            "row."
        )
    parts = []
    columns = read_columns(catalog, table, [0], options, Counters(), run_with_progress)
    for (array, *_), (values,) in zip(table.layouts, columns, strict=True):
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
        counters: count the reads.
        run: runs the tasks.

    Raises:
        H5Error: a file was changed, or cannot be read.
    """
    tasks: list[BulkTask] = []
    columns: list[list[npt.NDArray[Any]]] = []
    for layouts in table.layouts:
        columns.append([])
        for layout in (layouts[field] for field in fields):
            column = None if layout.decoding is not None else catalog.values(layout.path, layout.key, options)
            if column is None or len(column) != layout.n_rows:
                column_reads, column = column_tasks(layout, options, counters)
                tasks += column_reads
            columns[-1].append(column)
    if tasks:
        run(tasks, "reading columns")
        for guard in table.guards:
            guard.check()
    return columns


def column_tasks(
    layout: ArrayLayout, options: OpenOptions, counters: Counters
) -> tuple[list[BulkTask], npt.NDArray[Any]]:
    """Return tasks that read a column, and the array that they fill."""
    is_text = kind_of(layout.dtype) != "number"
    column = np.empty((layout.n_rows, *layout.row_shape), dtype=object if is_text else layout.dtype)
    if is_text:
        rows = np.arange(layout.n_rows)
        return text_tasks(layout, rows, column, rows, options, counters), column
    return row_tasks(layout, range(layout.n_rows), ArrayTarget(column), 0, options, counters), column


def source_of(layout: ArrayLayout, options: OpenOptions, counters: Counters) -> BlockSource:
    """Return the source of an array's decoded chunks, or of runs of about a megabyte if it has no chunks."""
    return open_source(layout, options, max(1, RUN_BYTES // max(1, layout.row_bytes)), counters)


def row_tasks(
    layout: ArrayLayout,
    rows: range | IntArray,
    target: BulkTarget,
    first: int,
    options: OpenOptions,
    counters: Counters,
    n_rows: int | None = None,
) -> list[BulkTask]:
    """Return tasks that read rows of numbers, in ascending order, into a target from position ``first`` on.

    Rows beyond the end of the array are left out: another array of this part has more rows.

    Args:
        layout: the array.
        rows: row numbers in the part.
        target: receives the rows.
        first: position of the first row in the target.
        options: how files are opened if the HDF5 library reads.
        counters: counts the reads.
        n_rows: number of rows of the part; None if the array has as many.
    """
    if not layout.row_bytes:
        return []
    if layout.view is not None:
        n_in_part = layout.n_rows if n_rows is None else n_rows
        return _view_tasks(layout, np.asarray(rows), n_in_part, target, first, options, counters)
    n_in_array = first_places(rows, np.array([layout.n_rows])).item()
    return bulk_tasks(source_of(layout, options, counters), layout, rows[:n_in_array], target, first)


def _view_tasks(
    layout: ArrayLayout,
    rows: IntArray,
    n_rows: int,
    target: BulkTarget,
    first: int,
    options: OpenOptions,
    counters: Counters,
) -> list[BulkTask]:
    """Return tasks that read rows of a view of an array. A task reads the lines that share chunks."""
    grid = RowGrid.of(layout, 1)
    lines, steps = np.divmod(rows, max(1, n_rows // max(1, grid.lines)))
    positions = np.flatnonzero((steps < grid.size) & (lines < grid.lines))  # of rows that the array has
    lines, steps = lines[positions], steps[positions]
    n_together = grid.along * max(1, VIEW_BYTES // (layout.row_bytes * grid.along * grid.across))
    groups = (lines // grid.across) * -(-grid.size // n_together) + steps // n_together
    reader, tasks = open_reader(layout, options, counters=counters), []
    for group in np.unique(groups).tolist():
        members = np.flatnonzero(groups == group)
        view_rows = lines[members] * grid.size + steps[members]
        task = partial(_read_view, reader, view_rows, target, first + positions[members])
        n_bytes = len(members) * layout.row_bytes
        tasks.append(BulkTask(n_bytes, n_bytes, task, positions[members]))
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
    """Return tasks that read rows of text, in ascending order, to positions of an array of objects."""
    reader = open_reader(layout, options, counters=counters)
    tasks = []
    for start in range(0, len(rows), TEXT_ROWS):
        piece = slice(start, start + TEXT_ROWS)
        n_bytes = len(rows[piece]) * layout.row_bytes
        task = partial(_read_text, reader, rows[piece], out, places[piece])
        tasks.append(BulkTask(n_bytes, n_bytes, task, range(start, min(len(rows), piece.stop))))
    return tasks


def _read_text(reader: RowReader, rows: IntArray, out: npt.NDArray[Any], places: IntArray) -> None:
    out[places] = reader.read(rows)

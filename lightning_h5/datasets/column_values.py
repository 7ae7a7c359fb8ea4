"""Values of columns: arrays with one value a row, read whole, as splits, weights and filters need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions, kind_of
from ..options import FileOptions
from ..readers import ArrayTarget, BulkTask, bulk_tasks, open_reader, open_source, run_with_progress
from ..types import IntArray
from .catalog import RUN_BYTES, FileCatalog, describe_files
from .compatibility import Asked
from .visits import current_visits

__all__ = ["Do", "column_of", "column_tasks", "count_rows", "decoded", "read_columns"]

TEXT_ROWS = 65_536  # of a task

Do: TypeAlias = Callable[[list[BulkTask], str], None]
"""Does tasks, under a name."""


def count_rows(paths: Sequence[str], key: str, files: FileOptions | None = None) -> int:
    """Return the number of rows of an array in some files."""
    return describe_files(paths, [Asked(key=key, takes_packed=True)], OpenOptions(trust=files or FileOptions())).n_rows


def column_of(
    paths: Sequence[str],
    key: str,
    n_rows: int,
    *,
    argument: str,
    files: FileOptions | None = None,
    beside: str | None = None,
) -> npt.NDArray[Any]:
    """Return one value of each row.

    Args:
        paths: the files.
        key: the array.
        n_rows: rows of the files.
        argument: what it was given as, for errors.
        files: how they are opened; None for the defaults.
        beside: an array that has these rows, if the files have a live writer, which appends to one after the other.

    Raises:
        H5ValueError: the array has other rows, or rows without a value.
    """
    options = OpenOptions(trust=files or FileOptions())
    # Text is accepted. Of a growing file both arrays count as long as the shorter one.
    asked = [Asked(key=one, takes_packed=True) for one in ([key] if beside is None else [key, beside])]
    catalog = describe_files(paths, asked, options).with_fields(1)
    if catalog.n_rows != n_rows:
        raise H5ValueError(
            f"{argument}={key!r} has {catalog.n_rows} rows and the data has {n_rows}. Name an array with one value a "
            "row."
        )
    parts = []
    for (array,), (values,) in zip(
        catalog.layouts, read_columns(catalog, [0], options, Counters(), run_with_progress), strict=True
    ):
        part = np.array(values.tolist(), dtype=str) if values.dtype.kind == "O" else values
        part = decoded(array, part)
        if part.dtype.kind == "f" and array.packing is not None and (n_missing := int(np.isnan(part).sum())):
            raise H5ValueError(
                f"{argument}={array.key!r} has {n_missing} rows in {array.path!r} without a value ({array.packing}). "
                "Name an array with a value for each row."
            )
        parts.append(part)
    return np.concatenate(parts)


def read_columns(
    catalog: FileCatalog, fields: Sequence[int], options: OpenOptions, counters: Counters, do: Do
) -> list[list[npt.NDArray[Any]]]:
    """Return for each file the values of some fields, as stored; text as ``object``.

    Args:
        catalog: the files.
        fields: numbers of the fields.
        options: how files are opened if the HDF5 library reads.
        counters: where bytes are counted.
        do: does the tasks.

    Raises:
        H5Error: a file was changed, or cannot be read.
    """
    visits = current_visits()
    tasks: list[BulkTask] = []
    read: list[list[npt.NDArray[Any]]] = []
    for path, layouts in zip(catalog.paths, catalog.layouts, strict=True):
        read.append([])
        for layout in (layouts[field] for field in fields):
            column = visits.values(path, layout.key, options)
            if column is None or len(column) != layout.n_rows:
                more, column = column_tasks(layout, options, counters)
                tasks += more
            read[-1].append(column)
    if tasks:
        do(tasks, "reading columns")
        for guard in catalog.guards:
            guard.check()
    return read


def decoded(layout: ArrayLayout, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column as it is compared: of packed integers the values, with NaN for missing ones."""
    return column if layout.packing is None else layout.packing.decode(column)


def column_tasks(
    layout: ArrayLayout, options: OpenOptions, counters: Counters
) -> tuple[list[BulkTask], npt.NDArray[Any]]:
    """Return tasks that read a column, and the memory they fill."""
    shape = (layout.n_rows, *layout.row_shape)
    if kind_of(layout.dtype) == "text":
        text = np.empty(shape, dtype=object)
        reader = open_reader(layout, options, counters=counters)
        cuts = [(start, min(start + TEXT_ROWS, layout.n_rows)) for start in range(0, layout.n_rows, TEXT_ROWS)]
        return [
            BulkTask((b - a) * layout.row_bytes, (b - a) * layout.row_bytes, partial(_read_text, reader, text, a, b))
            for a, b in cuts
        ], text
    column = np.empty(shape, dtype=layout.dtype)
    source = open_source(layout, options, max(1, RUN_BYTES // max(1, layout.row_bytes)), counters)
    return bulk_tasks(source, layout, range(layout.n_rows), ArrayTarget(column), 0), column


def _read_text(reader: Any, out: npt.NDArray[Any], start: int, stop: int) -> None:
    rows: IntArray = np.arange(start, stop)
    out[start:stop] = reader.read(rows)

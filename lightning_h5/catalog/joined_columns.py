"""Join the arrays of the data's files with columns of a side table, and with arrays of other files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, listing
from ..hdf5 import AlikeArrays, ArrayLayout, ChangeGuard, OpenFile, OpenOptions, is_attribute_key
from ..types import Paths
from .catalog import Catalog
from .column_values import values_of
from .compatibility import ArrayRequest, joined_arrays
from .segment_parts import attribute_of
from .side_table import SideTable

__all__ = ["arrays_of_others", "describe_with_columns", "with_columns", "with_others"]


def describe_with_columns(
    catalog: Catalog,
    side: SideTable,
    path: str,
    requests: Sequence[ArrayRequest],
    own: Sequence[str],
    n_rows: int,
    first: int,
    options: OpenOptions,
) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
    """Return the guard of a file, and its arrays with columns of a side table among them.

    Args:
        catalog: describes arrays.
        side: the table.
        path: the file.
        requests: all arrays.
        own: names of the file's own arrays among them.
        n_rows: length of the columns.
        first: rows of the files before it.
        options: how it is opened.

    Raises:
        H5ValueError: a row has no line.
    """
    joins = catalog.joins
    join = joins.join_keys([0])
    guard, layouts = catalog.describe(path, [*own, *join], options)
    joins.rows_of[path] = n_rows
    column_requests = [request for request in requests if joins.is_column(request.key)]
    keys = layouts[len(own) :]
    columns, lacks = with_columns(catalog, side, column_requests, path, guard, (), options, keys, first)
    if lacks.any():
        raise H5ValueError(
            f"table.missing='drop' was given, and {int(lacks.sum())} rows of {path!r} have no line: rows of sparse "
            "matrices are not left out by it. Complete the table, or leave them out with a filter (where)."
        )
    own_requests = [request for request in requests if not joins.is_column(request.key)]
    of_file, of_table = iter(joined_arrays(own_requests, layouts[: len(own)])), iter(columns)
    return guard, tuple(next(of_table if joins.is_column(request.key) else of_file) for request in requests)


def with_columns(
    catalog: Catalog,
    side: SideTable,
    requests: Sequence[ArrayRequest],
    path: str,
    guard: ChangeGuard,
    own: Sequence[ArrayLayout],
    options: OpenOptions,
    join: Sequence[ArrayLayout],
    first: int,
) -> tuple[tuple[ArrayLayout, ...], npt.NDArray[np.bool_]]:
    """Return the arrays of a file with columns of a side table among them, and a mask of rows without a line.

    Args:
        catalog: opens the file.
        side: the table.
        requests: all arrays, including columns of the table.
        path: the file.
        guard: of the file.
        own: its own arrays among them.
        options: how it is opened.
        join: the array that lines are compared with; none if lines are joined by names or by number.
        first: rows of the files before it.
    """
    joins, keys = catalog.joins, [values_of(array, options) for array in join]
    n_rows = own[0].n_rows if own else len(keys[0]) if keys else joins.rows_of.get(path)
    if (field := side.field) is not None and is_attribute_key(field) and n_rows is not None:

        def look(file: OpenFile, guard: ChangeGuard, _: AlikeArrays) -> ArrayLayout:
            return attribute_of(file.h5, path, "", field, guard, allow_external=options.files.allow_external)

        _, attribute = catalog.look(path, options, ("attribute", field), look)
        keys = [np.repeat(values_of(attribute, options), n_rows)]
    if n_rows is None:
        raise H5ValueError(f"only columns of {side.path!r} were named for {path!r}. Name an array of the file too.")
    lines = side.lines_of_rows(path, n_rows, first, keys[0] if keys else None)
    if side.compared_with is None:
        lines = np.minimum(lines, max(side.n_lines - 1, 0))  # check_place compares the numbers of lines and rows
    of_file = iter(own)
    layouts = [
        side.layout(request, path, guard, lines) if joins.is_column(request.key) else next(of_file)
        for request in requests
    ]
    return tuple(layouts), lines < 0


def arrays_of_others(
    catalog: Catalog, request: ArrayRequest, others: Paths, paths: Sequence[str], options: OpenOptions
) -> dict[str, tuple[ChangeGuard, ArrayLayout]]:
    """Return for each file of the data the array of another file with the same rows, and that file's guard.

    Args:
        catalog: opens the files.
        request: the array.
        others: the other files, as the user named them.
        paths: the files of the data.
        options: how files are opened.

    Raises:
        H5ValueError: there are more or fewer other files, or they belong to other rows.
    """
    joins, key = catalog.joins, request.key
    patterns = [others] if isinstance(others, str | os.PathLike) else others
    files = catalog.files([os.fspath(pattern).replace("{split}", joins.split) for pattern in patterns], "path")
    joins.match((files, key), f"{key!r} of {listing(files, 2)}", paths)
    if len(files) != len(paths):
        raise H5ValueError(
            f"{key!r} was named in {len(files)} other files ({listing(files)}), and the data has "
            f"{len(paths)} files. Pass as many, in the order of the data's."
        )
    arrays = {}
    for path, file in zip(paths, files, strict=True):
        guard, (array,) = catalog.describe(file, [key], options)
        catalog.check_agreement(file, request, options, is_of_others=True)
        arrays[path] = guard, request.decoded(array)
    return arrays


def with_others(
    guard: ChangeGuard, own: Sequence[ArrayLayout], others: Mapping[int, tuple[ChangeGuard, ArrayLayout]]
) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
    """Return a file's guard with the guards of other files, and its own arrays with theirs inserted.

    Args:
        guard: of the file.
        own: its arrays.
        others: guard and array of another file, by the index of the array in the result.
    """
    arrays = list(own)
    for at in sorted(others):
        arrays.insert(at, others[at][1])
    guards = {other.path: other for other, _ in others.values()}
    return replace(guard, others=(*guard.others, *guards.values())), tuple(arrays)

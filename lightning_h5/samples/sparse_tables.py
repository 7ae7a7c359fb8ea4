"""Tables of files with sparse matrices. Each row is a segment of the stored values, which are read in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import (
    ArrayRequest,
    Catalog,
    Compatibility,
    ListedParts,
    boundaries_in,
    describe_with_columns,
    joined_arrays,
    values_of,
)
from ..counters import Counters
from ..errors import H5CorruptError, H5FileError, H5ValueError, listing
from ..hdf5 import ArrayLayout, ChangeGuard, OpenOptions, SparseGroup, sparse_group
from ..options import value_of_field
from ..readers import Widen, open_reader
from ..types import IntArray
from .row_table import RowTable, starts_of
from .segment_fields import SampleOptions, selected
from .segments import Segments, Steps
from .sparse_rows import SparseField, SparseRows, sparse_field
from .table_builder import TableBuilder

__all__ = ["MatrixTableBuilder", "matrices_in", "with_matrices"]


def matrices_in(
    catalog: Catalog, paths: Sequence[str], keys: Sequence[str], options: OpenOptions
) -> dict[str, SparseGroup]:
    """Return the sparse matrices among some names, from the first readable file.

    Raises:
        H5ValueError: rows of a matrix cannot be read one by one.
    """
    for path in paths if keys else ():
        try:
            return _matrices_of(catalog, path, keys, options)
        except H5FileError:  # raised again, or skipped, when arrays are described
            continue
    return {}


def _matrices_of(catalog: Catalog, path: str, keys: Sequence[str], options: OpenOptions) -> dict[str, SparseGroup]:
    def search(file: Any) -> tuple[dict[str, SparseGroup], list[str]]:
        groups = {key: sparse_group(file, path, key, allow_external=options.files.allow_external) for key in keys}
        matrices = {key: group for key, group in groups.items() if group is not None}
        arrays = [name for group in matrices.values() for name in group.keys]
        return matrices, [*arrays, *(key for key in keys if key not in matrices)]

    if catalog.has_described(path, keys, options):
        return {}
    return catalog.search(path, options, f"matrices among {sorted(keys)}", search)


def with_matrices(
    requests: Sequence[ArrayRequest],
    names: Sequence[str],
    matrices: Mapping[str, SparseGroup],
    samples: SampleOptions,
) -> tuple[list[ArrayRequest], dict[int, SparseField]]:
    """Replace each sparse matrix by two arrays, its stored values and their columns.

    Args:
        requests: the arrays as the user named them.
        names: names of the fields.
        matrices: the sparse matrices among them, by the name of their group.
        samples: the user's options for samples.

    Returns:
        The arrays, and the matrices by the numbers of the arrays with their values.

    Raises:
        H5ValueError: the options are for other samples than rows.
    """
    is_passed = {
        "window": samples.window is not None,
        "patch": samples.patch is not None,
        "segments": samples.segments.is_given,
        f"sample={samples.sample!r}": samples.sample not in (None, "row"),
    }
    if passed := [name for name, is_true in is_passed.items() if is_true]:
        raise H5ValueError(
            f"{next(iter(matrices))!r} is a sparse matrix, of which each row is a sample, and {listing(passed)} was "
            "given. Leave it out."
        )
    arrays: list[ArrayRequest] = []
    fields: dict[int, SparseField] = {}
    for request, dense, name in zip(requests, selected(requests, names, samples), names, strict=True):
        if (group := matrices.get(request.key)) is None:
            arrays.append(dense)
            continue
        selection = value_of_field(samples.select, name, request.key, {})
        fields[len(arrays)] = sparse_field(group, name, selection, request.codec)
        data, columns, _ = group.keys
        arrays += [replace(request, key=data, text_ok=False, codec=None), ArrayRequest(key=columns, text_ok=False)]
    return arrays, fields


class MatrixTableBuilder(TableBuilder):
    """Collects files with sparse matrices. A sample is one matrix row, with the same row of the other arrays.

    Args:
        catalog: opens the files.
        options: how files are opened.
        requests: the arrays: of a matrix the stored values, followed by their columns.
        matrices: by the number of the array with their values.
        columns: further arrays with a value for each row.

    Raises:
        H5ValueError: files are still written.
    """

    def __init__(
        self,
        catalog: Catalog,
        options: OpenOptions,
        requests: Sequence[ArrayRequest],
        matrices: Mapping[int, SparseField],
        columns: Sequence[str],
    ) -> None:
        if options.swmr:
            raise H5ValueError(
                "files.swmr was given with a sparse matrix, whose rows are not known while a file is written. Wait "
                "until it is closed."
            )
        self._catalog, self._requests, self._matrices, self._options = catalog, requests, matrices, options
        self._columns = list(columns)
        self._has_steps = [at in matrices or at - 1 in matrices for at in range(len(requests))]
        self._compatibility = Compatibility(requests, of_one_row=False)
        self._paths: list[str] = []
        self._guards: list[ChangeGuard] = []
        self._layouts: list[tuple[ArrayLayout, ...]] = []
        self._n_rows: list[int] = []
        self._firsts: dict[int, list[IntArray]] = {at: [] for at in matrices}
        self._values: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in self._columns}

    def look(self, path: str) -> tuple[ChangeGuard, tuple[ArrayLayout, ...], Mapping[str, SparseGroup]]:
        """See ``TableBuilder.look``. Returns the requested arrays, the offsets of rows, and the columns."""
        names = [field.group.key for field in self._matrices.values()]
        groups = _matrices_of(self._catalog, path, names, self._options)
        offsets = [field.group.keys[2] for field in self._matrices.values()]
        requests = [*self._requests, *(ArrayRequest(key=key) for key in (*offsets, *self._columns))]
        of_file = [request for request in requests if not self._catalog.joins.is_column(request.key)]
        own = [key for request in of_file for key in request.keys]
        side = self._catalog.joins.side
        if side is None or len(of_file) == len(requests):
            guard, layouts = self._catalog.describe(path, own, self._options)
            return guard, tuple(joined_arrays(requests, layouts)), groups
        n_rows = next(iter(groups.values())).n_rows
        guard, layouts = describe_with_columns(
            self._catalog, side, path, requests, own, n_rows, sum(self._n_rows), self._options
        )
        return guard, layouts, groups

    def add(self, path: str, contents: tuple[ChangeGuard, tuple[ArrayLayout, ...], Mapping[str, SparseGroup]]) -> None:
        """See ``TableBuilder.add``."""
        guard, layouts, groups = contents
        n = len(self._requests)
        arrays = tuple(request.decoded(array) for request, array in zip(self._requests, layouts[:n], strict=True))
        # Files may store the columns of values in integers of different sizes.
        is_column = [at - 1 in self._matrices and array.dtype.kind in "iu" for at, array in enumerate(arrays)]
        pairs = zip(arrays, is_column, strict=True)
        self._compatibility.check(tuple(array.decoded(Widen()) if widens else array for array, widens in pairs))
        n_rows = []
        for (at, field), offsets in zip(self._matrices.items(), layouts[n:], strict=False):
            group, expected = groups.get(field.group.key), field.group
            if group is None or group.n_columns != expected.n_columns:
                difference = "has none" if group is None else f"has {group.n_columns} columns"
                raise H5ValueError(
                    f"{expected.key!r} is a sparse matrix of {expected.n_columns} columns in the first file, and "
                    f"{path!r} {difference}. Write files with the same columns."
                )
            self._firsts[at].append(_firsts(offsets, arrays[at], arrays[at + 1], self._options))
            n_rows.append(group.n_rows)
        for request in self._requests:
            self._catalog.check_agreement(path, request, self._options)
        for at, array in enumerate(arrays):
            if not self._has_steps[at] and array.n_rows != n_rows[0]:
                raise H5ValueError(
                    f"{array.key!r} has {array.n_rows} rows in {path!r}, and the sparse matrix has {n_rows[0]}. Load "
                    "arrays with as many rows."
                )
        if len(set(n_rows)) > 1:
            raise H5ValueError(f"the sparse matrices of {path!r} have {n_rows} rows. Load some with equally many.")
        for key, array in zip(self._columns, layouts[n + len(n_rows) :], strict=True):
            self._values[key].append(values_of(array, self._options))
        self._paths.append(path)
        self._guards.append(guard)
        self._layouts.append(arrays)
        self._n_rows.append(n_rows[0])

    def values_of(self, key: str) -> list[npt.NDArray[Any]]:
        """See ``TableBuilder.values_of``."""
        return self._values[key]

    def _widened(self) -> list[tuple[ArrayLayout, ...]]:
        """Return the arrays of all files. Columns of values become int64 if files store them differently."""
        by_field = [list(arrays) for arrays in zip(*self._layouts, strict=True)]
        for at in self._matrices:
            if len({array.dtype for array in by_field[at + 1]}) > 1:
                by_field[at + 1] = [array.decoded(Widen()) for array in by_field[at + 1]]
        return list(zip(*by_field, strict=True))

    def table(self) -> RowTable:
        """See ``TableBuilder.table``."""
        firsts = next(iter(self._firsts.values()))
        counts = np.array([len(first) for first in firsts])
        recoded = self._catalog.recoded(self._widened(), self._options)
        layouts = ListedParts(self._catalog.with_class_numbers(self._requests, recoded, self._options))
        starts = starts_of(layouts, self._has_steps)
        steps, kinds = list[Steps](), list[int | None]()
        for at in range(len(self._requests)):
            if at in self._matrices:
                begins = [first + start for first, start in zip(self._firsts[at], starts[:-1], strict=True)]
                n_values = [arrays[at].n_rows for arrays in self._layouts]
                lengths = [np.diff(first, append=n) for first, n in zip(self._firsts[at], n_values, strict=True)]
                steps.append(Steps(np.concatenate(begins), np.concatenate(lengths)))
            kinds.append(len(steps) - 1 if self._has_steps[at] else None)
        n_rows = sum(self._n_rows)
        if any(map(self._catalog.joins.is_column, [*(request.key for request in self._requests), *self._columns])):
            self._catalog.joins.check_place(n_rows, self._paths)
        return RowTable(
            tuple(self._paths),
            layouts,
            tuple(self._guards),
            starts,
            SparseRows(Segments(tuple(steps), tuple(kinds)), n_all=n_rows),
            has_steps=tuple(self._has_steps),
            first_segments=np.concatenate([[0], np.cumsum(counts)]),
        )


def _firsts(offsets: ArrayLayout, data: ArrayLayout, columns: ArrayLayout, options: OpenOptions) -> IntArray:
    """Return the number of the first stored value of each row of a file."""
    n_columns = f"{data.key!r} has {data.n_rows} values and {columns.key!r} {columns.n_rows} columns"
    if data.row_shape or columns.row_shape or offsets.row_shape or {columns.dtype.kind, offsets.dtype.kind} - {*"iu"}:
        raise H5CorruptError(
            f"{n_columns} in {offsets.path!r}, and {offsets.key!r} {offsets.n_rows} boundaries, of "
            f"{data.dtype}, {columns.dtype} and {offsets.dtype}, rows of the shapes {data.row_shape}, "
            f"{columns.row_shape} and {offsets.row_shape}. Columns and boundaries are single whole numbers; write the "
            "matrix again."
        )
    values = open_reader(offsets, options, counters=Counters()).read(np.arange(offsets.n_rows))
    bounds = boundaries_in(values, data.n_rows)
    if bounds is None or not bounds[-1] == data.n_rows == columns.n_rows:
        raise H5CorruptError(
            f"{offsets.key!r} in {offsets.path!r} says that rows end at {values[-1] if len(values) else 'no place'}, "
            f"and {n_columns}. Boundaries ascend from 0 to their number. The matrix is damaged; write it again."
        )
    return bounds[:-1]

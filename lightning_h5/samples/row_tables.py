"""Tables of files with rows as samples. Their arrays are checked to belong together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..catalog import (
    WITHOUT_THEM,
    ArrayRequest,
    Catalog,
    Compatibility,
    ListedParts,
    Skip,
    arrays_of_others,
    joined_arrays,
    refuse_images,
    values_of_cells,
    with_columns,
    with_others,
)
from ..errors import H5ValueError, without_frames
from ..hdf5 import ArrayLayout, ChangeGuard, OpenOptions, column_layout, is_references
from .row_table import RowTable
from .rows import Rows
from .table_builder import TableBuilder, collected

__all__ = ["RowTableBuilder", "table_of_rows"]


@without_frames
def table_of_rows(
    catalog: Catalog,
    paths: Sequence[str],
    requests: Sequence[ArrayRequest],
    options: OpenOptions,
    *,
    sample: str | None = None,
    skip: Skip | None = None,
    advice: str = WITHOUT_THEM,
    n_files: int | None = None,
) -> RowTable:
    """Return the table of files with rows as samples. Reads metadata only.

    Args:
        catalog: opens the files; tables of equal arguments are shared.
        paths: the files.
        requests: the arrays, in the order of the fields.
        options: how files are opened.
        sample: "row" if the user declared that rows are samples. Files may then look like images.
        skip: called with missing or broken files, which are left out; None raises their errors.
        advice: the way to train without broken files, for their errors.
        n_files: number of all files, if some were already skipped.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: an array is missing.
        H5ValueError: an array cannot become a tensor, or holds packed integers; arrays of a file differ in their
            rows, files differ, or each of them may be one image or volume.
    """
    if sample not in (None, "row"):
        raise H5ValueError(f"sample={sample!r} was given. Pass 'row' (an index along axis 0 is a sample), or None.")

    def make(arrays: Sequence[ArrayRequest]) -> RowTableBuilder:
        return RowTableBuilder(catalog, options, arrays, paths, (n_files or len(paths)) if sample is None else None)

    key = (tuple(paths), tuple(requests), options, sample, n_files, skip, catalog.joins.sources(requests))
    return catalog.once(("rows", key), lambda: collected(make, requests, paths, skip=skip, advice=advice).table())


class RowTableBuilder(TableBuilder):
    """Collects files with rows as samples.

    Args:
        catalog: opens the files.
        options: how they are opened.
        requests: the arrays, in the order of the fields.
        paths: the files.
        n_files: number of all files. Files are refused if each may be one image or volume; None accepts them.
    """

    def __init__(
        self,
        catalog: Catalog,
        options: OpenOptions,
        requests: Sequence[ArrayRequest],
        paths: Sequence[str],
        n_files: int | None,
    ) -> None:
        self._catalog, self._options, self._requests, self._n_files = catalog, options, requests, n_files
        joins = catalog.joins
        self._of_others = {
            at: arrays_of_others(catalog, request, request.paths, paths, options)
            for at, request in enumerate(requests)
            if request.paths is not None
        }
        others = {*self._of_others}
        columns = {at for at, request in enumerate(requests) if joins.is_column(request.key)} - others
        self._side = joins.side if columns else None
        self._own = [request for at, request in enumerate(requests) if at not in columns | others]
        self._joined = [request for at, request in enumerate(requests) if at not in others] if columns else []
        self._keys = [key for request in self._own for key in request.keys]
        self._join_keys = joins.join_keys(columns)
        self._only_columns = len(columns) == len(requests)
        self._compatibility = Compatibility(requests)
        self._paths: list[str] = []
        self._guards: list[ChangeGuard] = []
        self._layouts: list[tuple[ArrayLayout, ...]] = []
        self._lacks: list[npt.NDArray[np.bool_]] = []

    def look(self, path: str) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        """See ``TableBuilder.look``."""
        return self._catalog.describe(path, [*self._keys, *self._join_keys], self._options)

    def add(self, path: str, contents: tuple[ChangeGuard, tuple[ArrayLayout, ...]]) -> None:
        """See ``TableBuilder.add``."""
        guard, described = contents
        described = tuple(_with_values(self._catalog, array, self._options) for array in described)
        stored = joined_arrays(self._own, described)
        arrays = tuple(request.decoded(array) for request, array in zip(self._own, stored, strict=True))
        if self._side is not None:
            compared = described[len(self._keys) :]
            first = sum(map(len, self._lacks))
            arrays, is_lacking = with_columns(
                self._catalog, self._side, self._joined, path, guard, arrays, self._options, compared, first
            )
            self._lacks.append(is_lacking)
        if self._of_others:
            guard, arrays = with_others(guard, arrays, {at: of[path] for at, of in self._of_others.items()})
        self._compatibility.check(arrays)
        for request in self._own:
            self._catalog.check_agreement(path, request, self._options)
        self._paths.append(path)
        self._guards.append(guard)
        self._layouts.append(arrays)

    def table(self) -> RowTable:
        """See ``TableBuilder.table``."""
        catalog, layouts = self._catalog, self._layouts
        shared = [array.key for array in layouts[0]] if len(layouts) > 1 else ()
        catalog.check_categories(self._paths, shared, self._options)
        layouts = catalog.recoded(layouts, self._options)
        layouts = catalog.with_class_numbers(self._requests, layouts, self._options)
        n_rows = [arrays[0].n_rows for arrays in layouts]
        catalog.joins.rows_of.update(zip(self._paths, n_rows, strict=True))
        if (
            self._n_files is not None
            and not self._only_columns
            and not any(request.selection for request in self._requests)
        ):
            refuse_images(layouts[0], n_rows, self._n_files)
        if self._joined:
            catalog.joins.check_place(sum(n_rows), self._paths)
        lacks = np.concatenate(self._lacks) if any(map(np.any, self._lacks)) else None
        starts = np.concatenate([[0], np.cumsum(n_rows)])
        rows = Rows.of(starts, len(self._requests))
        return RowTable(tuple(self._paths), ListedParts(layouts), tuple(self._guards), starts, rows, lacks=lacks)


def _with_values(catalog: Catalog, array: ArrayLayout, options: OpenOptions) -> ArrayLayout:
    """Return an array of references as a column of the values in its cells, and any other array unchanged."""
    if not is_references(array) or array.value is not None or options.swmr:
        return array
    values = values_of_cells(catalog, array.path, array.key, options)
    return column_layout(values, array.path, array.key, array.guard)

"""Tables of files whose samples are rows: the arrays that were asked for, checked to belong together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..catalog import (
    WITHOUT_THEM,
    Asked,
    Catalog,
    Compatibility,
    ListedParts,
    Skip,
    collector_paused,
    each_readable,
    refuse_images,
    values_of_cells,
    with_others,
    with_stacks,
)
from ..errors import H5ValueError, without_frames
from ..hdf5 import ArrayLayout, GroupError, OpenOptions, column_layout, is_references
from ..order import resolve_replica
from ..progress_bar import with_bar
from .row_table import RowTable
from .rows import Rows

__all__ = ["table_of_rows"]


@without_frames
def table_of_rows(
    catalog: Catalog,
    paths: Sequence[str],
    asked: Sequence[Asked],
    options: OpenOptions,
    *,
    sample: str | None = None,
    skip: Skip | None = None,
    advice: str = WITHOUT_THEM,
    n_files: int | None = None,
) -> RowTable:
    """Return arrays of files with rows as samples, checked to belong together. Reads metadata only.

    Args:
        catalog: opens the files; the same are looked at once.
        paths: the files.
        asked: the arrays, in the order of the fields.
        options: how files are opened.
        sample: "row" if the user declared that rows are samples, so that no other meaning is considered.
        skip: called with files that are missing or broken, which are left out; None raises their errors.
        advice: what to do to train without broken files, for their errors.
        n_files: number of files given, if some were already skipped.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: an array is missing.
        H5ValueError: an array cannot become a tensor, or holds packed integers; arrays of a file differ in their
            rows, files differ, or each of them may be one image or volume.
    """
    if sample not in (None, "row"):
        raise H5ValueError(f"sample={sample!r} was given. Pass 'row' (an index along axis 0 is a sample), or None.")

    def look() -> RowTable:
        try:
            return _table(catalog, paths, asked, options, sample, skip, advice, n_files)
        except GroupError as error:  # a list of names that is not of members of a table is one of arrays
            if (stacks := with_stacks(asked, error)) is None:
                raise
        return table_of_rows(catalog, paths, stacks, options, sample=sample, skip=skip, advice=advice, n_files=n_files)

    which = (tuple(paths), tuple(asked), options, sample, n_files, skip, catalog.joins.sources(asked))
    return catalog.once(("rows", which), look)


def _table(
    catalog: Catalog,
    paths: Sequence[str],
    asked: Sequence[Asked],
    options: OpenOptions,
    sample: str | None,
    skip: Skip | None,
    advice: str,
    n_files: int | None,
) -> RowTable:
    joins, numbered = catalog.joins, list(enumerate(asked))
    others = {at: joins.of_others(catalog, one, paths, options) for at, one in numbered if one.paths is not None}
    columns = {at for at, one in numbered if joins.is_column(one.key) and at not in others}
    own = [one for at, one in numbered if at not in columns and at not in others]
    keys, compatibility = [key for one in own for key in one.keys], Compatibility(asked)
    join = joins.join_keys(columns)
    shows_progress = len(paths) >= 50 and resolve_replica().rank == 0  # all ranks read them
    bar = with_bar(paths, "looking at files", unit="file", shows_progress=shows_progress, delay=2)
    used, guards, layouts, lacks = [], [], [], list[npt.NDArray[np.bool_]]()
    with collector_paused():
        for path, (guard, described) in each_readable(
            paths, lambda path: catalog.describe(path, [*keys, *join], options), skip, advice, bar
        ):
            described = tuple(_with_values(catalog, array, options) for array in described)
            each = iter(described)
            found = tuple(one.decoded(one.joined(list(islice(each, len(one.keys))))) for one in own)
            if columns:
                joined = described[len(keys) :]
                first = sum(map(len, lacks))
                here = [one for at, one in enumerate(asked) if at not in others]
                found, is_lacking = joins.with_columns(catalog, here, path, guard, found, options, joined, first)
                lacks.append(is_lacking)
            if others:
                guard, found = with_others(guard, found, {at: of[path] for at, of in others.items()})
            compatibility.check(found)
            used.append(path)
            guards.append(guard)
            layouts.append(found)
    catalog.check_categories(used, [array.key for array in layouts[0]] if len(layouts) > 1 else (), options)
    layouts = catalog.recoded(layouts, options)
    n_rows = [arrays[0].n_rows for arrays in layouts]
    joins.rows_of.update(zip(used, n_rows, strict=True))
    if sample is None and len(columns) < len(asked) and not any(one.taken for one in asked):
        refuse_images(layouts[0], n_rows, n_files or len(paths))
    if columns:
        joins.check_place(sum(n_rows), paths)
    all_lacks = np.concatenate(lacks) if lacks and any(map(np.any, lacks)) else None
    starts = np.concatenate([[0], np.cumsum(n_rows)])
    rows = Rows.of(starts, len(asked))
    return RowTable(tuple(used), ListedParts(layouts), tuple(guards), starts, rows, lacks=all_lacks)


def _with_values(catalog: Catalog, array: ArrayLayout, options: OpenOptions) -> ArrayLayout:
    """Return an array of references as a column of the values in its cells; other arrays as they are."""
    if not is_references(array) or array.value is not None or options.swmr:
        return array
    values = values_of_cells(catalog, array.path, array.key, options)
    return column_layout(values, array.path, array.key, array.guard)

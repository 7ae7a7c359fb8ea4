"""The kind of samples of files, looked up once, and the one function that opens their table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ..catalog import WITHOUT_THEM, ArrayRequest, Catalog, refuse_other_files, skip_into, values_of_cells
from ..errors import H5Error, H5FileError
from ..hdf5 import OpenOptions, SparseGroup, is_references
from .row_filters import Mask, NoRowPassesError
from .row_table import RowTable
from .row_tables import table_of_rows
from .segment_builder import SegmentTableBuilder
from .segment_choice import SegmentChoice, samples_that_pass, values_of_segments
from .segment_cuts import check_present
from .segment_fields import SampleOptions, fields_of, selected
from .sparse_rows import SparseField
from .sparse_tables import MatrixTableBuilder, matrices_in, with_matrices
from .table_builder import TableBuilder, collected

__all__ = ["KindOfSamples", "open_table", "sample_kind"]


@dataclass(frozen=True, eq=False)
class KindOfSamples:
    """The kind of samples of files.

    Attributes:
        options: the user's options for samples.
        needs_segments: whether these options alone say that samples are not rows along axis 0.
        matrices: the sparse matrices among the arrays, by the names of their groups; each of their rows is a sample.
        are_cells: whether arrays of references are among the arrays; each array that they name is a segment.
    """

    options: SampleOptions
    needs_segments: bool = False
    matrices: Mapping[str, SparseGroup] = field(default_factory=dict)
    are_cells: bool = False

    @property
    def has_segments(self) -> bool:
        """Whether samples are segments, or made of them; otherwise they are rows along axis 0."""
        return self.needs_segments or bool(self.matrices) or self.are_cells


def sample_kind(
    catalog: Catalog, paths: Sequence[str], keys: Sequence[str], options: OpenOptions, samples: SampleOptions
) -> KindOfSamples:
    """Return the kind of samples of some arrays. Files are opened once for all splits and datasets of a catalog.

    Args:
        catalog: opens the files.
        paths: the files.
        keys: the arrays.
        options: how files are opened.
        samples: the user's options for samples.

    Raises:
        H5ValueError: rows of a sparse matrix cannot be read one by one.
    """

    def look() -> KindOfSamples:
        needs_segments = samples.needs_segments(keys)
        matrices = matrices_in(catalog, paths, keys, options) if samples.are_rows(keys) else {}
        has_cells = not (needs_segments or matrices) and are_cells(catalog, paths, keys, options)
        return KindOfSamples(samples, needs_segments, matrices, has_cells)

    return catalog.once(("kind", tuple(paths), tuple(keys), options, repr(samples)), look)


def open_table(
    catalog: Catalog,
    paths: Sequence[str],
    requests: Sequence[ArrayRequest],
    names: Sequence[str],
    options: OpenOptions,
    kind: KindOfSamples,
    choice: SegmentChoice,
    *,
    singles: Collection[str] = (),
    bad: dict[str, str] | None = None,
    advice: str = WITHOUT_THEM,
) -> tuple[RowTable, Sequence[ArrayRequest], dict[int, SparseField]]:
    """Return the table of the samples of files. Reads metadata, and the arrays that cut rows into segments.

    Args:
        catalog: opens the files.
        paths: the files.
        requests: the arrays, relative to their group if segments are groups.
        names: names of the fields.
        options: how files are opened.
        kind: of the samples.
        choice: the segments to keep, and the columns to read of them; ignored if samples are rows.
        singles: names of fields of which a sample has one step.
        bad: files that are left out, with their errors. Further broken files are added; None raises their errors.
        advice: the way to train without broken files, for their errors.

    Returns:
        The table; the requests for its arrays; and its sparse matrices, by their numbers (see ``with_matrices``).

    Raises:
        H5FileError: a file is missing or broken.
        H5KeyError: an array is missing, or no group or array matches the pattern.
        H5ValueError: arrays do not belong together, or there is no sample.
    """
    samples, skip = kind.options, skip_into(bad)
    files = [path for path in paths if path not in (bad or ())]
    if not kind.has_segments:
        requests = selected(requests, names, samples)
        n_files = len({*paths, *(bad or ())})
        sample = "row" if samples.sample == "row" else None
        rows = table_of_rows(
            catalog, files, requests, options, sample=sample, skip=skip, advice=advice, n_files=n_files
        )
        return rows, requests, {}
    refuse_other_files(requests)
    matrices: dict[int, SparseField] = {}
    if kind.matrices:
        requests, matrices = with_matrices(requests, names, kind.matrices, samples)
    fields = [] if matrices else fields_of(requests, names, samples, singles, catalog.joins.is_column)

    def make(arrays: Sequence[ArrayRequest]) -> TableBuilder:
        if matrices:
            return MatrixTableBuilder(catalog, options, arrays, matrices, choice.all_columns)
        of_arrays = [replace(field, request=array) for field, array in zip(fields, arrays, strict=True)]
        return SegmentTableBuilder(catalog, options, of_arrays, samples, choice.all_columns)

    def build(choice: SegmentChoice) -> RowTable:
        return _chosen(collected(make, requests, files, skip=skip, advice=advice), choice)

    if choice.columns or choice.criteria or skip is not None:
        return build(choice), requests, matrices
    joined = catalog.joins.sources(requests)
    key = ("segments", tuple(files), tuple(requests), tuple(names), options, repr(samples), tuple(singles), joined)
    table = catalog.once(key, partial(build, SegmentChoice()))
    subset = choice.subset
    return table if subset is None else replace(table, indexer=subset.of(table.indexer)), requests, matrices


def _chosen(builder: TableBuilder, choice: SegmentChoice) -> RowTable:
    """Return a table with the samples of the chosen segments."""
    table = builder.table()
    if choice.subset is not None:
        table = replace(table, indexer=choice.subset.of(table.indexer))
    passes: Mask | None = None
    if choice.criteria:
        values = {key: builder.values_of(key) for key in choice.all_columns}
        indexer, passes = samples_that_pass(table, choice.criteria, choice.keys, values)
        table = replace(table, indexer=indexer)
        if passes is not None and not table.n_samples:
            raise NoRowPassesError(
                f"filters leave {int(passes.sum()):,} of {len(passes):,} steps, and no segment has enough of them for "
                "a sample. Loosen a filter, or take fewer steps."
            )
    for key in builder.cut_by:
        check_present(np.concatenate(builder.values_of(key)), key, passes)
    columns = {key: values_of_segments(table, key, builder.values_of(key)) for key in choice.columns}
    return replace(table, columns=columns) if columns else table


def are_cells(catalog: Catalog, paths: Sequence[str], keys: Sequence[str], options: OpenOptions) -> bool:
    """Return whether arrays of references are among the arrays of the first readable file, and their cells are samples.

    Cells are no samples if each array of references has a text or a number for each row of the other arrays: it is a
    column then, and rows are samples.

    Args:
        catalog: opens the files.
        paths: the files.
        keys: the names.
        options: how files are opened.
    """
    own = [key for key in keys if not catalog.joins.is_column(key)]
    for path in paths if own and not options.swmr else ():
        try:
            cells = [key for key in own if _is_cells(catalog, path, key, options)]
            arrays = [key for key in own if key not in cells]
            return bool(cells) and not _are_columns(catalog, path, cells, arrays, options)
        except H5FileError:  # raised again, or skipped, when arrays are described
            continue
    return False


def _is_cells(catalog: Catalog, path: str, key: str, options: OpenOptions) -> bool:
    try:
        return is_references(catalog.describe(path, [key], options)[1][0])
    except H5FileError:
        raise
    except H5Error:  # as above
        return False


def _are_columns(
    catalog: Catalog, path: str, cells: Sequence[str], arrays: Sequence[str], options: OpenOptions
) -> bool:
    """Return whether arrays of references have one value for each row of the other arrays."""
    try:
        layouts = catalog.describe(path, arrays, options)[1]
        n_rows = {layout.n_rows for layout in layouts if layout.n_values != layout.n_rows}
        if len(n_rows) != 1:
            return False
        lengths = {len(values_of_cells(catalog, path, key, options)) for key in cells}
    except H5FileError:
        raise
    except H5Error:  # raised again when cells are described
        return False
    return lengths == n_rows

"""Open the samples of files: find the requested arrays, build the table of samples, and apply filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy.typing as npt

from ..catalog import WITHOUT_THEM, ArrayRequest, Catalog
from ..counters import Counters
from ..errors import H5ValueError, without_frames
from ..hdf5 import ArrayLayout, OpenOptions
from ..options import FileOptions
from ..samples import (
    Filters,
    LabelCriterion,
    RowTable,
    SampleOptions,
    SegmentChoice,
    Selection,
    SparseField,
    open_table,
    sample_kind,
    with_label,
    with_matrices,
)
from ..types import Paths
from .collate import Collate
from .fields import Fields, checked_rows, without_lacking
from .normalize import Normalize, normalized
from .sample_layout import Transform

__all__ = ["FileSamples", "Settle", "open_samples"]


@dataclass(frozen=True, eq=False)
class FileSamples:
    """Opened samples, and the settings for a dataset of them.

    Attributes:
        table: the files, and the rows of each sample.
        fields: the fields of a sample.
        files: how files are opened.
        indices: samples of the dataset, in its order; None for all.
        batch_transform: runs once on each batch.
        scanned: the table of the files that includes the arrays of filters.
        counters: counters of the rows that filters read.
    """

    table: RowTable
    fields: Fields
    files: FileOptions
    indices: npt.ArrayLike | None
    batch_transform: Transform | None
    scanned: RowTable
    counters: Counters


Settle: TypeAlias = Callable[[Fields, Sequence[ArrayLayout]], Fields]
"""Sets the dtypes of fields from the stored arrays of a file."""


@without_frames
def open_samples(
    path: Paths,
    fields: Fields,
    samples: SampleOptions,
    files: FileOptions,
    catalog: Catalog,
    *,
    takes_packed: bool = False,
    normalize: Normalize | None = None,
    collate: Collate | None = None,
    choice: SegmentChoice | None = None,
    indices: npt.ArrayLike | None = None,
    batch_transform: Transform | None = None,
    filters: Filters | None = None,
    bad: dict[str, str] | None = None,
    advice: str = WITHOUT_THEM,
    settle: Settle | None = None,
) -> FileSamples:
    """Open the samples of files.

    Args:
        path: the argument that names the files.
        fields: the requested fields.
        samples: options that define a sample.
        files: how files are opened.
        catalog: opens the files.
        takes_packed: accept packed integers as stored.
        normalize: statistics of fields; None leaves all fields unchanged.
        collate: how to batch samples of several shapes.
        choice: see ``open_table``; None for all segments.
        indices: rows to keep, in this order; None for all.
        batch_transform: runs once on each batch.
        filters: filters of rows or segments; None keeps all.
        bad: see ``open_table``.
        advice: see ``open_table``.
        settle: sets the dtypes of fields from the stored arrays; None keeps the requested dtypes.

    Raises:
        H5Error: see ``open_table``.
        NoRowPassesError: no row passes the filters.
    """
    paths, options, filters = catalog.files(path), OpenOptions(files=files), filters or Filters()
    kind = sample_kind(catalog, paths, fields.keys, options, samples)
    if filters.label is not None and kind.matrices:
        raise H5ValueError(
            f"label={filters.label} does not support sparse matrices: their rows have no steps. Use where."
        )
    keys = {**filters.keys, **dict(zip(fields.names, fields.keys, strict=True))}
    # Segments are selected by columns with one value per segment; such a column is not a field of the steps.
    columns = [*([] if kind.has_segments else filters.columns), *filters.of_label]
    numbered = {name for name, request in zip(fields.names, fields.requests, strict=True) if request.is_category}
    # Filters compare the names of categories, and a label is a class number.
    own_names = {*fields.names} - (numbered - {*filters.of_label})
    further = [name for name in dict.fromkeys(columns) if name not in own_names]
    requests = [replace(request, takes_packed=takes_packed) for request in fields.requests]
    for name in further:  # arrays that only filters read
        takes = takes_packed or name not in filters.of_label
        requests.append(ArrayRequest(key=keys.get(name, name), takes_packed=takes, paths=filters.paths.get(name)))
    chosen = replace(choice or SegmentChoice(), criteria=filters.criteria, keys=keys)
    names = [*fields.names, *further]
    full, _, matrices = open_table(
        catalog, paths, requests, names, options, kind, chosen, singles=further, bad=bad, advice=advice
    )
    numbers = {name: at for at, name in enumerate(names)}
    own = full.with_fields(range(len(fields.names))) if further else full
    if settle is not None:
        fields = settle(fields, _as_named(full.layouts[0], matrices))
    if matrices:
        pairs, _ = with_matrices(fields.requests, fields.names, kind.matrices, samples)
        stored = tuple(replace(request, takes_packed=False) for request in pairs)
        fields = replace(fields, requests=stored, matrices=matrices)
    of_class = None
    if filters.label is not None:
        valid = None if filters.valid_mask is None else numbers[filters.valid_mask]
        of_class = LabelCriterion(int(filters.label), numbers[filters.target], valid, filters.target_axes)
    indices, counters = without_lacking(full, indices), Counters()
    if not kind.has_segments and (filters.criteria or of_class is not None):
        among = checked_rows(indices, full.n_rows)
        selection = Selection(catalog, full, options, filters.criteria, of_class, numbers, keys, among)
        indices = selection.rows(counters)
    elif of_class is not None:
        own = with_label(full, of_class, options).with_fields(range(len(fields.names)))
    fields = fields.of_samples(own, mask=samples.has_mask, collate=collate)
    fields = normalized(fields, normalize, own, catalog, options)
    return FileSamples(own, fields, files, indices, batch_transform, full, counters)


def _as_named(arrays: Sequence[ArrayLayout], matrices: Mapping[int, SparseField]) -> list[ArrayLayout]:
    """Return one array per field: a sparse matrix counts as one array, with the shape of dense rows."""
    return [
        array.with_changes(row_shape=(matrices[at].n_columns,)) if at in matrices else array
        for at, array in enumerate(arrays)
        if at - 1 not in matrices
    ]

"""From what a user asks of files to the samples in them: what these are, and the table of their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy.typing as npt

from ..counters import Counters
from ..errors import H5ValueError, without_frames
from ..hdf5 import ArrayLayout, OpenOptions, SparseGroup
from ..options import FileOptions
from ..types import Paths
from .catalog import Catalog
from .cells import are_cells
from .collate import Collate
from .compatibility import WITHOUT_THEM, Asked, refuse_other_files
from .discovery import skip_into
from .fields import Fields, checked_rows, without_lacking
from .labels import LabelCriterion
from .normalize import Normalize, normalized
from .row_filters import Filters
from .row_table import RowTable
from .row_tables import table_of_rows
from .sample_layout import Transform
from .segment_choice import SegmentChoice, with_label
from .segment_fields import SampleOptions, selected
from .segment_tables import segment_table
from .selection import Selection
from .sparse_rows import SparseField
from .sparse_tables import matrices_in, sparse_table, with_matrices

__all__ = ["FileSamples", "KindOfSamples", "Settle", "open_samples", "open_table", "sample_kind"]


@dataclass(frozen=True, eq=False)
class KindOfSamples:
    """What samples of some files are.

    Attributes:
        options: what the user says of that.
        needs_segments: by what the user says, samples are anything but rows along axis 0.
        matrices: the sparse matrices among the arrays, by the names of their groups; a row of them is a sample.
        are_cells: arrays of references are among the arrays; what a reference leads to is a segment.
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
    """Return what samples of some arrays are; files are asked once, for all splits and datasets of a catalog.

    Args:
        catalog: opens the files.
        paths: the files.
        keys: the arrays.
        options: how files are opened.
        samples: what the user says.

    Raises:
        H5ValueError: rows of a sparse matrix cannot be read one by one.
    """

    def ask() -> KindOfSamples:
        needs_segments = samples.needs_segments(keys)
        matrices = matrices_in(catalog, paths, keys, options) if samples.are_rows(keys) else {}
        has_cells = not (needs_segments or matrices) and are_cells(catalog, paths, keys, options)
        return KindOfSamples(samples, needs_segments, matrices, has_cells)

    return catalog.once(("kind", tuple(paths), tuple(keys), options, repr(samples)), ask)


def open_table(
    catalog: Catalog,
    paths: Sequence[str],
    asked: Sequence[Asked],
    names: Sequence[str],
    options: OpenOptions,
    kind: KindOfSamples,
    choice: SegmentChoice,
    *,
    singles: Collection[str] = (),
    bad: dict[str, str] | None = None,
    advice: str = WITHOUT_THEM,
) -> tuple[RowTable, Sequence[Asked], dict[int, SparseField]]:
    """Return the table of the samples of files. Reads metadata, and what cuts rows.

    Args:
        catalog: opens the files.
        paths: the files.
        asked: the arrays, relative to their group if segments are groups.
        names: what a sample calls them.
        options: how files are opened.
        kind: what samples are.
        choice: which of the segments are kept, and what else is asked of them; not used if samples are rows.
        singles: names of fields of which a sample has one step.
        bad: files that are left out, with what is wrong with them, to which others are added; None raises their errors.
        advice: what to do to train without broken files, for their errors.

    Returns:
        The table; its arrays; and those that are sparse matrices, by their numbers (see ``with_matrices``).

    Raises:
        H5FileError: a file is missing or broken.
        H5KeyError: an array is missing, or no group or array matches the pattern.
        H5ValueError: arrays do not belong together, or there is no sample.
    """
    samples, skip = kind.options, skip_into(bad)
    left = [path for path in paths if path not in (bad or ())]
    if not kind.has_segments:
        asked = selected(asked, names, samples)
        n_files = len({*paths, *(bad or ())})
        sample = "row" if samples.sample == "row" else None
        rows = table_of_rows(catalog, left, asked, options, sample=sample, skip=skip, advice=advice, n_files=n_files)
        return rows, asked, {}
    refuse_other_files(asked)
    if kind.matrices:
        asked, matrices = with_matrices(asked, names, kind.matrices, samples)
        return sparse_table(catalog, left, asked, matrices, options, choice, skip=skip, advice=advice), asked, matrices
    table = segment_table(
        catalog, left, asked, names, options, samples, choice, singles=singles, skip=skip, advice=advice
    )
    return table, asked, {}


@dataclass(frozen=True, eq=False)
class FileSamples:
    """Samples of files, with what a dataset of them needs besides.

    Attributes:
        table: the files, and which rows samples have.
        fields: what is read of each sample.
        files: how files are opened.
        indices: samples that the dataset has, in its order; None for all.
        batch_transform: runs once on each batch.
        scanned: the files with the arrays that filters ask for among the fields.
        counters: has counted what filters read.
    """

    table: RowTable
    fields: Fields
    files: FileOptions
    indices: npt.ArrayLike | None
    batch_transform: Transform | None
    scanned: RowTable
    counters: Counters


Settle: TypeAlias = Callable[[Fields, Sequence[ArrayLayout]], Fields]
"""Returns fields with dtypes that depend on what is stored: takes the arrays of a file, those of fields."""


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
    """Return the samples of files.

    Args:
        path: the files, as the user names them.
        fields: the fields.
        samples: what a sample is.
        files: how files are opened.
        catalog: opens them.
        takes_packed: accept packed integers as they are stored.
        normalize: statistics of fields; None for none.
        collate: how samples of several shapes become a batch.
        choice: see ``open_table``; None for all segments.
        indices: rows that are kept, in this order; None for all.
        batch_transform: runs once on each batch.
        filters: which of these are kept; None for all.
        bad: see ``open_table``, as the one that follows.
        advice: see above.
        settle: gives fields their dtypes once arrays are known; None leaves them as they are asked for.

    Raises:
        H5Error: see ``open_table``.
        NoRowPassesError: the filters leave nothing.
    """
    paths, options, filters = catalog.files(path), OpenOptions(files=files), filters or Filters()
    kind = sample_kind(catalog, paths, fields.keys, options, samples)
    if filters.label is not None and kind.matrices:
        raise H5ValueError(f"label={filters.label} was given, and rows of sparse matrices have no steps. Use where.")
    keys = {**filters.keys, **dict(zip(fields.names, fields.keys, strict=True))}
    # Segments are chosen by values of columns, which are no fields of their steps.
    columns = [*([] if kind.has_segments else filters.columns), *filters.of_label]
    further = [name for name in dict.fromkeys(columns) if name not in fields.names]
    arrays = [replace(array, takes_packed=takes_packed) for array in fields.asked]
    for name in further:  # those that only filters read are decoded for them
        takes = takes_packed or name not in filters.of_label
        arrays.append(Asked(key=keys.get(name, name), takes_packed=takes, paths=filters.paths.get(name)))
    chosen = replace(choice or SegmentChoice(), criteria=filters.criteria, keys=keys)
    names = [*fields.names, *further]
    full, _, matrices = open_table(
        catalog, paths, arrays, names, options, kind, chosen, singles=further, bad=bad, advice=advice
    )
    numbers = {name: at for at, name in enumerate(names)}
    own = full.with_fields(range(len(fields.names))) if further else full
    if settle is not None:
        fields = settle(fields, _as_named(full.layouts[0], matrices))
    if matrices:
        pairs, _ = with_matrices(fields.asked, fields.names, kind.matrices, samples)
        fields = replace(fields, asked=tuple(replace(array, takes_packed=False) for array in pairs), matrices=matrices)
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
    """Return the arrays of fields: a sparse matrix is one, with rows as if they were dense."""
    return [
        array.with_changes(row_shape=(matrices[at].n_columns,)) if at in matrices else array
        for at, array in enumerate(arrays)
        if at - 1 not in matrices
    ]

"""From what a user asks of files to the samples in them: what these are, and the table of their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy.typing as npt

from ..catalog import Catalog
from ..errors import without_frames
from ..hdf5 import OpenOptions
from ..options import FileOptions
from ..samples import RowTable, SampleOptions, SegmentChoice, open_table, sample_kind
from ..types import Paths
from .collate import Collate
from .fields import Fields, without_lacking
from .normalize import Normalize, normalized
from .sample_layout import Transform

__all__ = ["FileSamples", "open_samples"]


@dataclass(frozen=True, eq=False)
class FileSamples:
    """Samples of files, with what a dataset of them needs besides.

    Attributes:
        table: the files, and which rows samples have.
        fields: what is read of each sample.
        files: how files are opened.
        indices: samples that the dataset has, in its order; None for all.
        batch_transform: runs once on each batch.
    """

    table: RowTable
    fields: Fields
    files: FileOptions
    indices: npt.ArrayLike | None = None
    batch_transform: Transform | None = None


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

    Raises:
        H5Error: see ``open_table``.
    """
    paths, options = catalog.files(path), OpenOptions(files=files)
    kind = sample_kind(catalog, paths, fields.keys, options, samples)
    asked = [replace(one, takes_packed=takes_packed) for one in fields.asked]
    table, arrays, matrices = open_table(catalog, paths, asked, fields.names, options, kind, choice or SegmentChoice())
    if matrices:
        fields = replace(fields, asked=tuple(replace(one, takes_packed=False) for one in arrays), matrices=matrices)
    fields = fields.of_samples(table, mask=samples.has_mask, collate=collate)
    fields = normalized(fields, normalize, table, catalog, options)
    return FileSamples(table, fields, files, without_lacking(table, indices), batch_transform)

"""Datasets over a table of files: the selection of samples, and the assembly of samples from several rows.

A column has the rows of one field. Windows, segments and patches have several rows in a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from ..catalog import whole_digest
from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, ChangeGuard, OpenOptions, close_when_collected
from ..readers import TaskQueue
from ..readers.buffers import BufferPool, Column
from ..samples import BatchRows, Places, RowTable
from ..types import Identity, IntArray
from .base import RowDataset
from .collate import Collate
from .fields import Fields, checked_rows
from .raw_batch import RawBatch
from .sample_layout import SampleLayout, Transform

__all__ = ["TableDataset", "check_shapes", "checked_step_counts", "places_columns"]

MAX_FIELDS = 12  # maximum number of fields in a summary
MAX_NAME = 80  # maximum characters of a path
MAX_SEGMENTS = 64  # number of segments with lengths to compare in setup


class TableDataset(RowDataset):
    """Rows of a table of files, read on demand or held in memory.

    Args:
        table: the files.
        fields: the fields and the layout of a sample; in the order of the table's arrays.
        batch_transform: runs once on each collated batch.
        indices: numbers of this dataset's samples in the table, in its order; None for all.
        options: how the HDF5 library opens files, if it reads them.
    """

    _of_process = (*RowDataset._of_process, "_buffers")

    def __init__(
        self,
        table: RowTable,
        fields: Fields,
        *,
        batch_transform: Transform | None,
        indices: npt.ArrayLike | None,
        options: OpenOptions,
    ) -> None:
        self.table, self.indices = table, checked_rows(indices, table.n_samples)
        self.plans = fields.plans(table.as_read)
        self.assemblers = [table.assembler(field) for field in range(table.n_fields)]
        self.fields, self.options = fields, options
        super().__init__(fields.sample_layout, batch_transform)

    def _assign(self, layout: SampleLayout) -> None:
        layout = replace(layout, length_of=self.fields.length_of(self.table, layout))
        self.fields = replace(self.fields, sample_layout=replace(layout, n_rows=self.fields.sample_layout.n_rows))
        super()._assign(layout)

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        close_when_collected(self, self.table.paths)
        self._buffers = BufferPool()

    def pin_batches(self, pins: bool) -> None:
        """See ``RowDataset.pin_batches``."""
        self._buffers.pins = pins

    def __len__(self) -> int:
        return self.table.n_samples if self.indices is None else len(self.indices)

    def located(self, samples: IntArray) -> IntArray:
        """Return the numbers of samples in the table: row numbers over all files, if samples are rows."""
        return samples if self.indices is None else self.indices[samples]

    def assembled(self, numbers: IntArray, batch: BatchRows, read: Callable[[], Sequence[Column]]) -> RawBatch:
        """Return samples, assembled from the rows of each field.

        Args:
            numbers: numbers of the samples (see ``RawBatch``).
            batch: rows of the samples.
            read: returns the rows of each field, from files or from memory.
        """
        device = self.decoding_device
        with nullcontext() if device is None else device.work():
            columns: list[Column] = [
                assembler.column(rows, column, self._buffers)
                for assembler, rows, column in zip(self.assemblers, batch.fields, read(), strict=True)
            ]
        for at in sorted(self.fields.matrices, reverse=True):  # the two arrays of a matrix make one column
            values, indices = map(torch.as_tensor, columns[at : at + 2])
            lengths = batch.fields[at].lengths_of(len(numbers))
            columns[at : at + 2] = [self.fields.matrices[at].column(values, indices, lengths, self._buffers)]
        return RawBatch(numbers, (*columns, *self._further_columns(batch)))

    @property
    def dense_bytes(self) -> int:
        """Bytes of a sample's rows of sparse matrices, if they are dense in a batch."""
        sizes = [
            matrix.n_columns * (dtype.itemsize if (dtype := self.plans[at].dtype) is not None else 0)
            for at, matrix in self.fields.matrices.items()
            if not matrix.as_csr
        ]
        return sum(sizes)

    def _further_columns(self, batch: BatchRows) -> list[Column]:
        """Return the requested masks, segments and steps of samples; rows have no such columns."""
        if batch.places is None:
            return []
        n_samples = len(batch.places.segments)
        columns: list[Column] = [
            self.assemblers[field].mask(batch.fields[field], n_samples) for field in self.fields.masked
        ]
        if self.sample_layout.with_index and self.table.indexer.has_places:
            columns += places_columns(self.table, batch.places)
        return columns

    def layouts(self) -> Iterator[ArrayLayout]:
        """See ``RowDataset.layouts``."""
        return chain.from_iterable(self.table.layouts.examples)

    def guards(self) -> Iterator[ChangeGuard]:
        """See ``RowDataset.guards``."""
        return iter(self.table.guards)

    def identity(self) -> Identity:
        """See ``RowDataset.identity``."""
        identity = {"sampled": self.table.digest_of(self.indices)}
        whole = whole_digest(self.table.layouts, self.table.guards, self.options)
        return identity if whole is None else identity | {"whole": whole}

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``."""
        files, rows = self.files_and_rows(numbers)
        return [(self.table.paths[file], row) for file, row in zip(files.tolist(), rows.tolist(), strict=True)]

    def files_and_rows(self, numbers: IntArray, epoch: int | None = None) -> tuple[IntArray, IntArray]:
        """Return the file of each sample, and its row in the array: the first row of a segment.

        A patch has its number instead, and a row of a sparse matrix its row number.

        Args:
            numbers: numbers of the samples.
            epoch: the epoch of the request; None without a plan.
        """
        table, samples = self.table, self.located(numbers)
        if table.indexer.is_known_by_row:
            parts, rows = table.locate(table.indexer.first_rows(samples, epoch))
            return table.files_of(parts), rows
        segments = table.indexer.segments.numbers_of(table.indexer.places(samples).segments)
        parts, inside = table.parts_and_numbers(segments)
        return table.files_of(parts), inside if table.indexer.is_whole else samples

    def place_of(self, number: int) -> tuple[str, str]:
        """See ``RowDataset.place_of``: segment and step, if samples have them."""
        table, numbers = self.table, np.array([number], np.int64)
        path, place = super().place_of(number)
        if not table.indexer.has_places:
            return path, place
        (segment,), steps = places_columns(table, table.indexer.places(self.located(numbers)))
        if table.indexer.is_whole:
            return path, f"segment {segment!r}"
        return path, f"step {steps[0].tolist()} of segment {segment!r}"

    @property
    def has_same_rows_each_epoch(self) -> bool:
        """See ``RowDataset.has_same_rows_each_epoch``: windows and patches may be random."""
        return self.table.indexer.numbers_are_rows

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        paths = self.table.paths
        ends = f" from {_short_path(paths[0])} to {_short_path(paths[-1])}" if paths else ""
        fields = []
        for at, (name, plan) in enumerate(zip(self.fields.names, self.plans, strict=False)):
            if (matrix := self.fields.matrices.get(at)) is not None:
                fields.append(f"{name}: {plan.dtype_name} ({matrix.n_columns},), sparse")
            elif at - 1 not in self.fields.matrices:
                fields.append(f"{name}: {plan.dtype_name} {plan.row_shape}")
        if len(fields) > MAX_FIELDS:
            fields[MAX_FIELDS:] = [f"{len(fields) - MAX_FIELDS} more fields"]
        return [
            _short_path(paths[0]) if len(paths) == 1 else f"{len(paths):,} files{ends}",
            *self._summary_of_rows(),
            *fields,
        ]

    def _summary_of_rows(self) -> list[str]:
        return [self.table.indexer.summary(len(self))]


def check_shapes(dataset: TableDataset, collate: Collate | None, batch_size: int) -> None:
    """Check that samples of all segments can be in one batch.

    Args:
        dataset: the samples.
        collate: how to batch tensors of several shapes.
        batch_size: number of samples of a batch.

    Raises:
        H5ValueError: rows of a field differ in the number of axes, or in shape if they are stacked.
    """
    table, fields = dataset.table, dataset.fields
    if collate == "list" or fields.sample_layout.has_transforms:
        return
    for field, (name, is_ragged) in enumerate(zip(fields.names, table.is_ragged, strict=False)):  # masks are no fields
        if not is_ragged or table.indexer.cuts(field):
            continue
        shapes = [arrays[field].row_shape for arrays in table.layouts.examples]
        counts = [len(shape) for shape in shapes]
        differs = counts if len(set(counts)) > 1 else shapes
        joins = collate == "pack" and table.indexer.numbers_are_rows
        if differs is shapes and (collate == "pad" or batch_size == 1 or joins):
            continue
        at = next(at for at, value in enumerate(differs) if value != differs[0])
        first, second = (table.name_of_part(int(table.layouts.firsts[kind])) for kind in (0, at))
        cure = "Write them alike" if differs is counts else "Pass collate_fn='pad'"
        key = fields.keys[field]
        title = repr(key) if key == name else f"{key!r} (field {name!r})"
        raise H5ValueError(
            f"{title} has rows of the shape {shapes[0]} in {first!r} and {shapes[at]} in {second!r}, which cannot be "
            f"in one batch. {cure}, pass collate_fn='list', or give all samples one shape in a transform."
        )
    if (
        collate not in ("pad", "pack")
        and batch_size > 1
        and len(dataset) > 1
        and table.indexer.is_whole
        and not table.indexer.passes_whole
    ):
        _check_lengths(dataset)


def _check_lengths(dataset: TableDataset) -> None:
    """Raise an ``H5ValueError`` if samples are segments of several lengths, among the first ones."""
    table, n_samples = dataset.table, min(len(dataset), MAX_SEGMENTS)
    samples = dataset.located(np.arange(n_samples))
    for name, rows in zip(dataset.fields.names, table.indexer.rows_of(samples).fields, strict=False):
        lengths = rows.lengths_of(n_samples)
        if (differs := lengths != lengths[0]).any():
            raise H5ValueError(
                f"samples are whole segments, and {name!r} has {lengths[0]} steps in the first one and "
                f"{lengths[differs.argmax()]} in another, which cannot be stacked. Pass collate_fn='pad' (zeros up to "
                "the longest, and 'length') or 'list', a window, or crop samples to one length in a transform."
            )


def checked_step_counts(dataset: TableDataset, max_tokens: int) -> IntArray:
    """Return the number of steps of each sample.

    Raises:
        H5ValueError: samples are not whole segments, or a sample has more steps than a batch may have.
    """
    counts, noun = dataset.table.indexer.step_counts, dataset.table.indexer.noun
    if counts is None:
        raise H5ValueError(
            f"segments.max_tokens={max_tokens} was given, but samples are {noun}: max_tokens counts the steps of whole "
            "segments. Pass sample='segment', or remove max_tokens and set batch_size."
        )
    counts = counts if dataset.indices is None else counts[dataset.indices]
    if (n_longer := int(np.count_nonzero(counts > max_tokens))) > 0:
        longest = np.array([counts.argmax()])
        name = places_columns(dataset.table, dataset.table.indexer.places(dataset.located(longest)))[0][0]
        raise H5ValueError(
            f"segments.max_tokens={max_tokens} was given, but {n_longer:,} of {len(counts):,} samples are longer. The "
            f"longest has {counts.max():,} steps: {name!r}, {dataset.describe(longest)}. Pass segments={{'max_length': "
            f"{max_tokens}, ...}}, which crops them, or a larger max_tokens."
        )
    return counts


def _short_path(path: str) -> str:
    return repr(path if len(path) <= MAX_NAME else f"...{path[-MAX_NAME:]}")


def places_columns(table: RowTable, places: Places) -> tuple[list[str], torch.Tensor]:
    """Return the name of each sample's segment, and its step, or the start of its patch along each axis that is cut."""
    segments, steps = table.indexer.segments, places.steps
    if segments.cut is not None:
        steps = steps + segments.cut[places.segments]
    numbers, inverse = np.unique(segments.numbers_of(places.segments), return_inverse=True)
    names = [table.segment_name(number) for number in numbers.tolist()]
    return [names[at] for at in inverse.tolist()], torch.from_numpy(steps.copy())

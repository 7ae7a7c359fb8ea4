"""Datasets over a table of files: which of its samples they have, and how rows become samples of several steps.

A column has the rows that were read of a field. Windows, segments and patches have several rows in a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, ChangeGuard, OpenOptions, close_when_collected
from ..readers import TaskQueue
from ..types import Identity, IntArray
from .base import RowDataset
from .buffers import BufferPool, Column
from .collate import Collate, stacked
from .fields import Fields, checked_rows
from .patches import Patches
from .row_table import BatchRows, RowTable
from .sample_layout import SampleLayout, Transform
from .segments import FieldRows
from .whole_digest import whole_digest
from .windows import WholeSegments, Windows

__all__ = ["TableDataset", "check_shapes", "column_of_samples", "mask_of_samples", "places_columns", "rows_of_all"]

MAX_FIELDS = 12  # named in a summary
MAX_NAME = 80  # characters of a path


class TableDataset(RowDataset):
    """Rows of a table of files, read on demand or held in memory.

    Args:
        table: the files.
        fields: what is read of each row, and what a sample looks like; in the order of the table's arrays.
        batch_transform: runs once on each collated batch.
        indices: samples of the table that this dataset has, in its order; None for all.
        options: how the HDF5 library opens files, if it reads.
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
        self.fields, self.options = fields, options
        super().__init__(fields.sample_layout, batch_transform)

    def _assign(self, layout: SampleLayout) -> None:
        if self.table.sampling is None and not self.fields.matrices:
            # Rows have one shape, unless a transform gives them others, whose lengths are counted.
            length_of = (0, 0) if layout.collate and layout.x.transform is not None else None
            layout = replace(layout, length_of=length_of)
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

    @property
    def has_all_rows(self) -> bool:
        """Whether the samples are all rows of all files, in their order."""
        return self.indices is None and self.table.sampling is None

    def located(self, samples: IntArray) -> IntArray:
        """Return the samples of the table that some samples of this dataset are: rows, over all files, if these are."""
        return samples if self.indices is None else self.indices[samples]

    def in_samples(self, asked: BatchRows, columns: Sequence[Column]) -> list[Column]:
        """Return the columns of arrays as those of fields: the arrays of a sparse matrix are one."""
        found = list(columns)
        for at in sorted(self.fields.matrices, reverse=True):
            values, stored = found[at : at + 2]
            lengths = asked.fields[at].lengths
            assert isinstance(values, torch.Tensor), "a matrix has numbers"
            assert isinstance(stored, torch.Tensor), "a matrix has numbers"
            assert lengths is not None, "rows have a length each"
            found[at : at + 2] = [self.fields.matrices[at].column(values, stored, lengths, self._buffers)]
        return found

    @property
    def dense_bytes(self) -> int:
        """Bytes of a sample's rows of sparse matrices, if these are dense in a batch."""
        sizes = [
            one.n_columns * (dtype.itemsize if (dtype := self.plans[at].dtype) is not None else 0)
            for at, one in self.fields.matrices.items()
            if not one.as_csr
        ]
        return sum(sizes)

    def further_columns(self, asked: BatchRows) -> list[Column]:
        """Return the masks of samples, and their segments and steps, as far as they are asked for."""
        sampling, columns = self.table.sampling, list[Column]()
        if isinstance(sampling, Windows) and asked.places is not None:
            n = len(asked.places.segments)
            columns += [mask_of_samples(asked.fields[field], n, sampling, field) for field in self.fields.masked]
        if self.sample_layout.with_index and sampling is not None and not self.fields.matrices:
            columns += places_columns(self.table, asked)
        return columns

    def layouts(self) -> Iterator[ArrayLayout]:
        """See ``RowDataset.layouts``."""
        return chain.from_iterable(self.table.layouts.examples)

    def guards(self) -> Iterator[ChangeGuard]:
        """See ``RowDataset.guards``."""
        return iter(self.table.guards)

    def identity(self) -> Identity:
        """See ``RowDataset.identity``."""
        table, found = self.table, {"sampled": self.table.digest_of(self.indices)}
        whole = whole_digest(table.layouts, table.guards, self.options)
        return found if whole is None else found | {"whole": whole}

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``."""
        files, rows = self.files_and_rows(numbers)
        return [(self.table.paths[file], row) for file, row in zip(files.tolist(), rows.tolist(), strict=True)]

    def files_and_rows(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Return the file of each of some samples, and its row in its array: of a segment the first.

        A patch has its number instead.
        """
        table, rows = self.table, self.located(numbers)
        if table.sampling is not None:
            places, segments = table.sampling.places(rows), table.sampling.segments
            if places.steps.ndim > 1:
                parts = table.parts_of_segments(segments.numbers_of(places.segments))
                return table.files_of(parts), rows
            if self.fields.matrices:
                numbers = segments.numbers_of(places.segments)
                parts = table.parts_of_segments(numbers)
                assert table.first_segments is not None, "files have rows"
                return parts, numbers - table.first_segments[parts]
            rows = segments.rows_at(segments.steps[0].firsts_of(places.segments) + places.steps)
        parts, local = table.locate(rows)
        return table.files_of(parts), local

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        paths = self.table.paths
        ends = f" from {_shortened(paths[0])} to {_shortened(paths[-1])}" if paths else ""
        fields = []
        for at, (name, plan) in enumerate(zip(self.fields.names, self.plans, strict=False)):
            if (matrix := self.fields.matrices.get(at)) is not None:
                fields.append(f"{name}: {plan.dtype_name} ({matrix.n_columns},), sparse")
            elif at - 1 not in self.fields.matrices:
                fields.append(f"{name}: {plan.dtype_name} {plan.row_shape}")
        if len(fields) > MAX_FIELDS:
            fields[MAX_FIELDS:] = [f"{len(fields) - MAX_FIELDS} more fields"]
        return [
            _shortened(paths[0]) if len(paths) == 1 else f"{len(paths):,} files{ends}",
            *self._summary_of_rows(),
            *fields,
        ]

    def _summary_of_rows(self) -> list[str]:
        if (sampling := self.table.sampling) is None:
            return [rows_of_all(len(self), self.table.n_samples)]
        if self.fields.matrices and self.table.first_segments is not None:
            return [rows_of_all(len(self), int(self.table.first_segments[-1]))]
        n_segments = f"{len(sampling.segments):,} segments"
        what = "patches" if isinstance(sampling, Patches) else "windows"
        return [n_segments if isinstance(sampling, WholeSegments) else f"{len(self):,} {what} of {n_segments}"]


def check_shapes(dataset: TableDataset, collate: Collate | None, batch_size: int) -> None:
    """Check that samples of all segments can be in one batch, if nothing else makes their shapes alike.

    Args:
        dataset: the samples.
        collate: how tensors of several shapes become a batch.
        batch_size: samples of a batch.

    Raises:
        H5ValueError: rows of a field have another number of axes in some segments, or another shape, and are stacked.
    """
    table, fields = dataset.table, dataset.fields
    if collate == "list" or fields.sample_layout.has_transforms or isinstance(table.sampling, Patches):
        return
    for field, (name, is_ragged) in enumerate(zip(fields.names, table.is_ragged, strict=False)):  # masks are no fields
        if not is_ragged:
            continue
        shapes = [arrays[field].row_shape for arrays in table.layouts.examples]
        counts = [len(shape) for shape in shapes]
        differs = counts if len(set(counts)) > 1 else shapes
        if differs is shapes and (collate == "pad" or batch_size == 1):
            continue
        at = next(at for at, value in enumerate(differs) if value != differs[0])
        first, other = (table.name_of_part(int(table.layouts.firsts[kind])) for kind in (0, at))
        cure = "Write them alike" if differs is counts else "Pass collate_fn='pad'"
        key = fields.keys[field]
        title = repr(key) if key == name else f"{key!r} (field {name!r})"
        raise H5ValueError(
            f"{title} has rows of the shape {shapes[0]} in {first!r} and {shapes[at]} in {other!r}, which cannot be "
            f"in one batch. {cure}, pass collate_fn='list', or give all samples one shape in a transform."
        )


def rows_of_all(n_rows: int, n_all: int) -> str:
    """Return how many rows of how many, as text."""
    return f"{n_rows:,} rows" if n_rows == n_all else f"{n_rows:,} of {n_all:,} rows"


def _shortened(path: str) -> str:
    return repr(path if len(path) <= MAX_NAME else f"...{path[-MAX_NAME:]}")


def column_of_samples(table: RowTable, field: int, found: FieldRows, column: Column, buffers: BufferPool) -> Column:
    """Return a field's column with an entry for each sample.

    Args:
        table: the files.
        field: number of the field.
        found: the rows that the samples have.
        column: these rows, one after the other; of a field with rows of several shapes those of each sample; patches.
        buffers: gives memory.

    Returns:
        A tensor if all samples have one shape; else a list with an entry for each.
    """
    if not table.has_steps[field]:
        return column
    if found.patches is not None:
        assert isinstance(column, torch.Tensor), "volumes have numbers"
        return found.patches.finished(column)
    sampling, place = table.sampling, table.step_places[field]
    if isinstance(sampling, WholeSegments):
        if not sampling.has_all_steps(field) or sampling.are_sparse:
            return column
        assert found.lengths is not None, "segments have a length each"
        lengths = np.unique(found.lengths).tolist()
        if isinstance(column, torch.Tensor) and not lengths:
            return _moved(column[None][:0], 1, 1 + place, buffers)
        if isinstance(column, torch.Tensor) and len(lengths) == 1 and lengths[0]:  # not to be stacked again
            return _moved(column.view(-1, lengths[0], *column.shape[1:]), 1, 1 + place, buffers)
        ends = np.concatenate([[0], np.cumsum(found.lengths)]).tolist()
        each = column if table.is_ragged[field] else [_stacked(column[low:high]) for low, high in pairwise(ends)]
        return [_moved(one, 0, place, buffers) for one in each]
    assert isinstance(sampling, Windows), "samples are windows"
    one = sampling.ranges[field]
    assert one is not None, "the field has steps"
    n_steps = len(one.offsets)
    if table.is_ragged[field]:
        return [
            _moved(_filled(steps, valid, sampling), 0, place, buffers)
            if not one.is_single
            else _filled(steps, valid, sampling)[0]
            for steps, valid in zip(column, _valid_of(found, len(column)), strict=True)
        ]
    if not isinstance(column, torch.Tensor):  # text
        if found.is_valid is not None and sampling.pad == "zeros":
            column = [
                value if valid else torch.zeros_like(value) if isinstance(value, torch.Tensor) else ""
                for value, valid in zip(column, found.is_valid.ravel().tolist(), strict=True)
            ]
        if one.is_single:
            return column
        return [_stacked(column[at : at + n_steps]) for at in range(0, len(column), n_steps)]
    if found.is_valid is not None and sampling.pad == "zeros" and not found.is_valid.all():
        _clear(column, ~found.is_valid.reshape(-1))
    if one.is_single:
        return column
    return _moved(column.view(-1, n_steps, *column.shape[1:]), 1, 1 + place, buffers)


def _stacked(steps: Column) -> Any:
    """Return steps that were decoded one by one as a tensor, if they have one shape."""
    if isinstance(steps, list) and steps and all(isinstance(one, torch.Tensor) for one in steps):
        return stacked(steps) if len({one.shape for one in steps}) == 1 else steps
    return steps


def _valid_of(found: FieldRows, n: int) -> Sequence[np.ndarray | None]:
    return [None] * n if found.is_valid is None else list(found.is_valid)


def _filled(steps: torch.Tensor, valid: np.ndarray | None, sampling: Windows) -> torch.Tensor:
    if valid is not None and sampling.pad == "zeros" and not valid.all():
        _clear(steps, ~valid)
    return steps


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""For dtypes that torch lacks most operations of, those with the same bits."""


def _clear(steps: torch.Tensor, which: npt.NDArray[np.bool_]) -> None:
    """Set some steps to zero."""
    steps.view(_SIGNED.get(steps.dtype, steps.dtype))[torch.from_numpy(which)] = 0


def _moved(steps: Column, axis: int, place: int, buffers: BufferPool) -> Column:
    """Return rows with the axis of steps at its place among the others."""
    if place == axis or not isinstance(steps, torch.Tensor):
        return steps
    moved = steps.movedim(axis, place)
    return buffers.tensor(tuple(moved.shape), moved.dtype).copy_(moved)


def mask_of_samples(found: FieldRows, n_samples: int, windows: Windows, field: int) -> torch.Tensor:
    """Return which steps of a field are no padding, with an entry for each sample."""
    one = windows.ranges[field]
    assert one is not None, "the field has steps"
    shape = (n_samples,) if one.is_single else (n_samples, len(one.offsets))
    if found.is_valid is None:
        return torch.ones(shape, dtype=torch.bool)
    return torch.from_numpy(found.is_valid.reshape(shape))


def places_columns(table: RowTable, asked: BatchRows) -> tuple[list[str], torch.Tensor]:
    """Return each sample's segment, by name, and its step, or the start of its patch along each axis that is cut."""
    assert asked.places is not None, "samples are rows"
    assert table.sampling is not None, "samples are rows"
    segments = table.sampling.segments
    steps: IntArray = asked.places.steps
    if segments.cut is not None:
        steps = steps + segments.cut[asked.places.segments]
    numbers, which = np.unique(segments.numbers_of(asked.places.segments), return_inverse=True)
    names = [table.segment_name(number) for number in numbers.tolist()]
    return [names[at] for at in which.tolist()], torch.from_numpy(steps.copy())

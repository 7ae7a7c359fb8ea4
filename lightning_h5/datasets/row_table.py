"""The rows of files as one table: which arrays they have, which rows are samples, and datasets over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import ArrayLayout, ChangeGuard, OpenOptions, close_when_collected, file_identity
from ..order import BlockTable
from ..readers import TaskQueue
from ..types import IntArray
from .base import RowDataset
from .buffers import BufferPool
from .fields import Fields, checked_rows
from .sample_layout import Transform

__all__ = ["HELD_BYTES", "RUN_BYTES", "RowTable", "SegmentTable", "TableDataset", "rows_of_all"]

HELD_BYTES = 16 << 20
"""An array whose rows take no more than this, over all files, is read whole, once, in each process."""

RUN_BYTES = 1 << 20
"""Rows of unchunked arrays are taken together by runs of this size: long enough for a disk, short to shuffle."""

MAX_FIELDS = 12  # named in a summary
MAX_NAME = 80  # characters of a path


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Steps that belong together, and how many samples they make: a sample is a segment and a start in it.

    Attributes:
        starts: samples before each segment, and the number of samples at the end; shape ``(n_segments + 1,)``.
        first_rows: the row of each segment's first step, counted over all files; shape ``(n_segments,)``.
    """

    starts: IntArray
    first_rows: IntArray

    def rows(self, samples: IntArray) -> IntArray:
        """Return the row, over all files, of each sample's first step."""
        segments = np.searchsorted(self.starts, samples, side="right") - 1
        return self.first_rows[segments] + samples - self.starts[segments]


@dataclass(frozen=True, eq=False)
class RowTable:
    """Some arrays of some files with consecutive rows: a view of the catalog.

    Attributes:
        paths: the files.
        layouts: for each file its arrays, in the order of the dataset's fields.
        guards: for each file how it looked when it was described.
        segments: which rows are samples; None if all rows of all files are, which takes no memory.
    """

    paths: tuple[str, ...]
    layouts: tuple[tuple[ArrayLayout, ...], ...]
    guards: tuple[ChangeGuard, ...]
    segments: SegmentTable | None = None

    @cached_property
    def starts(self) -> IntArray:
        """First row of each file, and the number of rows at the end; shape ``(n_files + 1,)``."""
        return np.concatenate([[0], np.cumsum([arrays[0].n_rows for arrays in self.layouts])]).astype(np.int64)

    @property
    def n_rows(self) -> int:
        """Rows of all files."""
        return int(self.starts[-1])

    @property
    def n_samples(self) -> int:
        """Samples that the rows make."""
        return self.n_rows if self.segments is None else int(self.segments.starts[-1])

    def rows_of(self, samples: IntArray) -> IntArray:
        """Return the row, over all files, of each sample."""
        return samples if self.segments is None else self.segments.rows(samples)

    def with_fields(self, fields: range | Sequence[int]) -> RowTable:
        """Return the same files with some of their arrays."""
        return replace(self, layouts=tuple(tuple(arrays[field] for field in fields) for arrays in self.layouts))

    def locate(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the file, and the row inside the file, of each row."""
        files = np.searchsorted(self.starts, rows, side="right") - 1
        return files, rows - self.starts[files]

    @cached_property
    def identity(self) -> str:
        """A digest of what the files hold (see ``file_identity``), in their order."""
        each = [
            file_identity(path, arrays, grows=guard.grows, others=[other.path for other in guard.others])
            for path, arrays, guard in zip(self.paths, self.layouts, self.guards, strict=True)
        ]
        return "-".join(each) if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()[:32]

    def digest_of(self, samples: IntArray | None) -> str:
        """Return a digest of what the files hold, and of some of the samples (None: all), in their order."""
        digest = hashlib.sha256(self.identity.encode())
        if self.segments is not None:
            digest.update(self.segments.starts.tobytes() + self.segments.first_rows.tobytes())
        if samples is not None:
            digest.update(samples.tobytes())
        return digest.hexdigest()[:32]

    @cached_property
    def held(self) -> list[bool]:
        """For each field, whether its rows are few enough bytes to be held whole.

        The same on all ranks and in all workers, since blocks, and with them the order, follow from it.
        """
        return [
            sum(layout.n_bytes for layout in of_field) <= HELD_BYTES for of_field in zip(*self.layouts, strict=True)
        ]

    @cached_property
    def rows_per_block(self) -> list[int]:
        """For each file, the rows of its blocks; the last one may have fewer."""
        return [_rows_per_block(arrays, self.held) for arrays in self.layouts]

    def blocks(self, samples: IntArray | None, *, of_all_fields: bool = False) -> BlockTable:
        """Return the block table of some samples.

        A block is what shares one chunk of the coarsest array; a run of about a megabyte if there are no chunks.

        Args:
            samples: which ones, in this order; None for all.
            of_all_fields: also of those that are held whole.
        """
        steps = self.rows_per_block
        if of_all_fields:
            steps = [_rows_per_block(arrays, [False] * len(arrays)) for arrays in self.layouts]
        if samples is None and self.segments is None:
            sizes = [
                size
                for step, n in zip(steps, np.diff(self.starts).tolist(), strict=True)
                for size in [step] * (n // step) + [n % step]
            ]
            return BlockTable.of_sizes(sizes)
        samples = np.arange(self.n_samples) if samples is None else samples
        files, local = self.locate(self.rows_of(samples))
        blocks = local // np.asarray(steps, dtype=np.int64)[files]
        cuts = np.flatnonzero((np.diff(files) != 0) | (np.diff(blocks) != 0)) + 1
        return BlockTable.of_sizes(np.diff(np.concatenate([[0], cuts, [len(samples)]])))


def _rows_per_block(arrays: Sequence[ArrayLayout], held: Sequence[bool]) -> int:
    loose = [array for array, is_held in zip(arrays, held, strict=True) if not is_held]
    coarsest = max((array.rows_per_chunk for array in loose if not array.is_contiguous), default=1)
    if coarsest > 1:
        return coarsest
    return max(1, RUN_BYTES // max(1, sum(array.row_bytes for array in loose or arrays)))


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
        self.plans = fields.plans(table.layouts[0])
        self.fields, self.options = fields, options
        super().__init__(fields.sample_layout, batch_transform)

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        close_when_collected(self, self.table.paths)
        self._buffers = BufferPool()

    def __len__(self) -> int:
        return self.table.n_samples if self.indices is None else len(self.indices)

    @property
    def has_all_rows(self) -> bool:
        """Whether the samples are all rows of all files, in their order."""
        return self.indices is None and self.table.segments is None

    def located(self, samples: IntArray) -> IntArray:
        """Return the rows, over all files, of some samples of this dataset."""
        return self.table.rows_of(samples if self.indices is None else self.indices[samples])

    def layouts(self) -> Iterator[ArrayLayout]:
        """See ``RowDataset.layouts``."""
        return chain.from_iterable(self.table.layouts)

    def identity(self) -> str:
        """See ``RowDataset.identity``."""
        return self.table.digest_of(self.indices)

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``."""
        files, local = self.table.locate(self.located(numbers))
        return [(self.table.paths[file], row) for file, row in zip(files.tolist(), local.tolist(), strict=True)]

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        paths = self.table.paths
        ends = f" from {_shortened(paths[0])} to {_shortened(paths[-1])}" if paths else ""
        names = zip(self.fields.names, self.plans, strict=False)
        fields = [f"{name}: {plan.dtype_name} {plan.row_shape}" for name, plan in names]
        if len(fields) > MAX_FIELDS:
            fields[MAX_FIELDS:] = [f"{len(fields) - MAX_FIELDS} more fields"]
        return [
            _shortened(paths[0]) if len(paths) == 1 else f"{len(paths):,} files{ends}",
            *self._summary_of_rows(),
            *fields,
        ]

    def _summary_of_rows(self) -> list[str]:
        return [rows_of_all(len(self), self.table.n_samples)]


def rows_of_all(n_rows: int, n_all: int) -> str:
    """Return how many rows of how many, as text."""
    return f"{n_rows:,} rows" if n_rows == n_all else f"{n_rows:,} of {n_all:,} rows"


def _shortened(path: str) -> str:
    return repr(path if len(path) <= MAX_NAME else f"...{path[-MAX_NAME:]}")

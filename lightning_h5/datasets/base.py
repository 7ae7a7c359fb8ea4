"""What all row datasets share: rows of fields in, samples and batches out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from reprlib import Repr
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from ..counters import Counters
from ..errors import H5ValueError, without_frames
from ..hdf5 import ArrayLayout
from ..order import BlockTable
from ..readers import TaskQueue
from ..types import BatchToken, Draws, IntArray
from .sample_layout import Column, SampleStructure, Transform
from .user_functions import (
    Samples,
    asked_for,
    fresh_draws,
    generators,
    note_rows,
    rows_text,
    seed_streams,
)

__all__ = ["MAX_ROWS", "RawBatch", "ReadCost", "RowDataset"]

MAX_ROWS = 8
"""Rows of a batch that a message names."""


class RawBatch(NamedTuple):
    """Rows as they were read, before any transform.

    Attributes:
        rows: the rows' numbers, as ``with_index`` gives them, shape ``(batch,)``.
        columns: for each field its rows.
    """

    rows: IntArray
    columns: tuple[Column, ...]

    def split(self, sizes: Sequence[int]) -> list[RawBatch]:
        """Batches of these sizes, which look into the memory of this one."""
        rows = [self.rows[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        return [RawBatch(*batch) for batch in zip(rows, self.split_columns(sizes), strict=True)]

    def split_columns(self, sizes: Sequence[int]) -> Iterator[tuple[Column, ...]]:
        """The columns of each of these batches."""
        columns = [
            torch.split_with_sizes(column, sizes)
            if isinstance(column, torch.Tensor)
            else [column[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
            for column in self.columns
        ]
        return zip(*columns, strict=True)


@dataclass(frozen=True)
class ReadCost:
    """What reading rows of a dataset costs: what orders, reading ahead and advice go by.

    Attributes:
        row_bytes: bytes of a row of all fields, as a batch is copied from them.
        has_cheap_random_access: random access is as cheap as sequential access; it is not if rows are decoded.
        block_bytes: decoded bytes of a block, the largest of all files; 1 if nothing is decoded.
        decoded_bytes: bytes of all rows of the files, decoded, except of arrays that are held whole; 0 if nothing is.
        rows_per_chunk: rows that are decoded together, at most; 0 if nothing is.
        rows_per_run: rows that the order reads together from arrays without chunks, at most; 0 if it mixes single rows.
    """

    row_bytes: int
    has_cheap_random_access: bool = True
    block_bytes: int = 1
    decoded_bytes: int = 0
    rows_per_chunk: int = 0
    rows_per_run: int = 0


class RowDataset(Dataset[Any]):
    """A map-style dataset of rows.

    Reading has two halves. ``begin`` and what it gives, or ``gather`` for both, read, decode and copy; they may run in
    any thread. ``finish`` runs the transforms and collates; it runs where the batch is taken, so that random streams
    are reproducible.

    Args:
        structure: what a sample looks like.
        batch_transform: runs once on each collated batch.

    Attributes:
        counters: what was read.
        work: where reading is shared among threads.
        in_runs: whether the order is known to mix runs of rows.
        reads_pinned: whether batches should be read into page-locked memory, where they are copies out of memory.
        public_name: the class that users know, for the ``repr`` of a class that they do not; None is this one.
        asked_cache_bytes: memory for decoded rows that its user asked for; None where nobody said anything.
    """

    asked_cache_bytes: int | None = None
    public_name: str | None = None
    in_runs = False
    reads_pinned = False

    def __init__(self, structure: SampleStructure, batch_transform: Transform | None) -> None:
        self.structure = structure
        self.batch_transform = batch_transform
        self._batch_asks_for = asked_for(batch_transform)
        self.counters = Counters()
        self._reset()

    def _reset(self) -> None:
        """Makes what belongs to one process."""
        self.work = TaskQueue()

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """Counts, and shares out what is to be decoded, together with others: it is part of a larger dataset."""
        self._reset()
        self.counters, self.work = counters, work

    # What a subclass says ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def n_rows(self) -> int:
        """Rows of all ranks; those of this dataset, where it has no shard."""
        return len(self)

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """Begins to read rows.

        Args:
            rows: indices into the dataset.
            epoch: see ``gather``.

        Returns:
            A function that reads them, in any thread. Begin the batches of a plan in their order, and read what was
            begun before the same thread begins more: it would wait for places that it holds itself.
        """
        raise NotImplementedError

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """Has what these rows need decoded, in the threads of ``work``, where there is room; or read by the system.

        Args:
            rows: indices into the dataset.
            epoch: see ``gather``.

        Returns:
            Whether there was room for all of it.
        """
        return True

    def prepare_workers(self, num_workers: int) -> None:
        """Has compiled what workers are about to use, so that those which are forked have it.

        Args:
            num_workers: how many there will be.
        """

    def files_of(self, rows: IntArray) -> list[str]:
        """The files that rows are read from, as far as they are; for messages."""
        return []

    def layouts(self) -> Iterator[ArrayLayout]:
        """The arrays that rows are read from, of all files."""
        return iter(())

    def identity(self) -> str:
        """A digest of these rows: what the files hold, and which of their rows this dataset has, in its order."""
        raise NotImplementedError

    def blocks(self) -> BlockTable:
        """Which of this dataset's rows lie together on disk."""
        raise NotImplementedError

    @property
    def is_in_memory(self) -> bool:
        """Whether all rows are in memory now, so that reading is copying."""
        return False

    @property
    def cost(self) -> ReadCost:
        """What reading costs; it depends on the files and on ``read_with`` alone."""
        raise NotImplementedError

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process keeps in memory now."""
        return 0

    def read_with(self, cache_bytes: int, *, keeps: bool | None = None, in_runs: bool = False) -> None:
        """Says how much memory decoded rows may take, and how they will be asked for (see ``FileDataset``)."""

    def close(self) -> None:
        """Gives back what this process holds; the next read gets it again. Calling it again has no effect."""

    def summary(self) -> list[str]:
        """What the dataset holds, in short texts for its ``repr``; no file is looked at."""
        return [f"{len(self):,} rows"]

    # What follows from it ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self.public_name or type(self).__name__}({', '.join(self.summary())})"

    @without_frames
    def __getitem__(self, index: int | slice | Sequence[int] | npt.NDArray[Any] | torch.Tensor | BatchToken) -> Any:
        """Return one sample for an integer, or a collated batch for several indices.

        Args:
            index: an integer; or a slice, a range, a list or a flat array of integers, which give what ``read_batch``
                does. So ``DataLoader(dataset, sampler=BatchSampler(...), batch_size=None)`` reads whole batches.

        Raises:
            IndexError: an index is outside of the dataset.
            H5ValueError: an index is not an integer.
        """
        if isinstance(index, BatchToken):
            return self._read_token(index)
        if isinstance(index, slice):
            return self.read_batch(range(len(self))[index])
        if isinstance(index, list | range) or (isinstance(index, np.ndarray | torch.Tensor) and index.ndim):
            return self.read_batch(index)
        (sample,) = self.finish(self.gather(self._normal([index], index)), samples=True)
        return sample

    def _read_token(self, token: BatchToken) -> Any:
        if is_worker := get_worker_info() is not None:
            self.counters.begin(token.epoch, token.step)
            if self.has_transforms or token.samples:
                seed_streams(token.draws)  # also for the `collate_fn` that comes after
        raw = self.gather(token.rows, token.epoch)
        began = perf_counter()
        batch = self.finish_token(raw, token)
        self.counters.add(finish_seconds=perf_counter() - began)
        if is_worker:
            self.counters.set_kept(self.kept_bytes)
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples one by one. Without this, Python takes a transform's ``IndexError`` for the end."""
        return (self[row] for row in range(len(self)))

    @without_frames
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples in the order asked, read in one go; what ``DataLoader(batch_size=...)`` calls."""
        samples: list[Any] = self.finish(self.gather(self._normal(indices)), samples=True)
        return samples

    @without_frames
    def read_batch(self, indices: Iterable[int] | npt.NDArray[Any] | torch.Tensor) -> Any:
        """A collated batch in the order asked, at full speed.

        Args:
            indices: any indices into the dataset, negative ones from its end; shape ``(batch,)``.

        Returns:
            ``x``, ``(x, y)`` or a dict of tensors with ``batch`` rows, and the indices where ``with_index``.
        """
        return self.finish(self.gather(self._normal(indices)))

    def gather(self, rows: IntArray, epoch: int | None = None) -> RawBatch:
        """Reads rows; the first half of a batch. Any thread may call; rows in memory are copied with torch's threads.

        Args:
            rows: indices into the dataset.
            epoch: the epoch in which each row is asked for at most once; None where nothing is planned.

        Raises:
            H5Error: they cannot be read.
        """
        return self.begin(rows, epoch)()

    def finish(self, raw: RawBatch, *, samples: bool = False, draws: Draws | None = None) -> Any:
        """Transforms and collates; the second half of a batch.

        Args:
            raw: what ``gather`` gave.
            samples: give a list of samples instead of a batch; ``batch_transform`` is not run then.
            draws: what decides the draws of transforms that ask for a generator; None draws others each time.
        """
        if draws is None:
            draws = fresh_draws() if self.structure.asks or self._batch_asks_for else Draws(0, 0, 0)
        if samples:
            return self.structure.samples(raw.columns, raw.rows, draws, self.describe)
        return self._transformed(self.structure.batch(raw.columns, raw.rows, draws, self.describe), raw.rows, draws)

    def finish_token(self, raw: RawBatch, token: BatchToken) -> Any:
        """The second half of what a loader's token asks for."""
        batch = self.finish(raw, samples=token.samples, draws=token.draws)
        return Samples(batch, partial(self.describe, raw.rows)) if token.samples else batch

    def _transformed(self, batch: Any, numbers: IntArray, draws: Draws) -> Any:
        """A batch after ``batch_transform``, an error of which names the rows."""
        if self.batch_transform is None:
            return batch
        try:
            return self.batch_transform(batch, **generators(self._batch_asks_for, draws))
        except Exception as error:
            note_rows(error, "batch_transform", self.batch_transform, lambda: self.describe(numbers))
            raise

    def describe(self, numbers: IntArray) -> str:
        """Which rows of which files some rows are, as text for a message.

        Args:
            numbers: as ``RawBatch`` has them.
        """
        places = self.places_of(numbers[:MAX_ROWS])
        if len(numbers) != 1:
            return rows_text(places, len(numbers))
        return f"{rows_text(places, 1)} (index {self.structure.shown(int(numbers[0]))})"

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """For each row its file, and its row there.

        Args:
            numbers: as ``RawBatch`` has them.
        """
        raise NotImplementedError

    @property
    def has_transforms(self) -> bool:
        """Whether a user's code makes samples or batches, and may draw random numbers."""
        return self.structure.has_transforms or self.batch_transform is not None

    @property
    def is_passthrough(self) -> bool:
        """Whether a batch is the tuple of its columns, as they were read."""
        return self.structure.is_as_read and self.batch_transform is None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["work"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _normal(self, indices: Iterable[Any] | npt.NDArray[Any] | torch.Tensor, passed: Any = None) -> IntArray:
        """Indices as an array, counted from the start, inside the dataset.

        Args:
            indices: several indices.
            passed: what the user passed, for messages; None if it is the same.
        """
        if not isinstance(indices, np.ndarray | torch.Tensor | Sequence):
            indices = list(indices)
        passed = indices if passed is None else passed
        try:
            rows = np.asarray(indices)
        except ValueError:  # lists of different lengths
            raise _nested(passed) from None
        if rows.dtype.kind == "b":
            raise H5ValueError(
                f"a mask of shape {rows.shape} was asked for; a row is found by an integer. Pass np.flatnonzero(mask)."
            )
        if rows.dtype.kind not in "iu" and rows.size:
            raise H5ValueError(f"{_shown(passed)} was asked for; a row is found by an integer. Pass integers.")
        if rows.ndim > 1:
            raise _nested(passed)
        rows = np.atleast_1d(rows)
        n_rows = len(self)
        outside = (rows < -n_rows) | (rows >= n_rows)
        if outside.any():
            # IndexError by protocol, as of a list.
            raise IndexError(
                f"index {rows[outside][0]} was asked of a dataset with {n_rows} rows. "
                f"Ask for -{n_rows} to {n_rows - 1}."
            )
        rows = rows.astype(np.int64)
        return np.where(rows < 0, rows + n_rows, rows)


def _nested(passed: Any) -> H5ValueError:
    return H5ValueError(
        f"{_shown(passed)} was asked for; several rows are found by a flat list of integers. Pass one, as "
        "dataset[[3, 1, 2]], or call read_batch([3, 1, 2]). A torch BatchSampler goes to DataLoader as "
        "batch_sampler=..., or as sampler=... together with batch_size=None."
    )


def _shown(passed: Any) -> str:
    """Indices for a message, cut."""
    if isinstance(passed, np.ndarray | torch.Tensor):
        return f"an array of dtype {passed.dtype} and shape {tuple(passed.shape)}"
    return _short.repr(passed)


_short = Repr()

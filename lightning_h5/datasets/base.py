"""What all row datasets share: rows of fields in, samples and batches out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from ..errors import H5ValueError
from ..files import ArrayLayout
from ..readers import Work
from ..sampling import BlockTable
from ..stats import Counters
from ..types import BatchToken, Draws, IntArray
from .randomness import asked_for, fresh_draws, generators, seed_streams
from .structure import Column, SampleStructure, Transform

__all__ = ["RawBatch", "RowDataset"]


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
        asked_cache_bytes: memory for decoded rows that its user asked for; None where nobody said anything.
    """

    asked_cache_bytes: int | None = None
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
        self.work = Work()

    def join(self, counters: Counters, work: Work) -> None:
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
    def is_at_hand(self) -> bool:
        """Whether all rows are in memory now, so that reading is copying."""
        return False

    @property
    def is_free(self) -> bool:
        """Whether single rows cost no more than rows in company, in any order; they do where rows are decoded."""
        return True

    @property
    def block_bytes(self) -> int:
        """Decoded bytes of a block, the largest of all files; 1 where nothing is decoded."""
        return 1

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all rows of the files, decoded, but for arrays that are held whole anyway; 0 where nothing is."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all fields, as a batch is copied from them."""
        raise NotImplementedError

    @property
    def rows_per_slab(self) -> int:
        """Rows that are decoded together, at most; 0 where nothing is."""
        return 0

    @property
    def rows_per_run(self) -> int:
        """Rows of a run, at most, where the order mixes runs; else 0."""
        return 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process keeps in memory now."""
        return 0

    def read_with(self, cache_bytes: int, *, keeps: bool | None = None, in_runs: bool = False) -> None:
        """Says how much memory decoded rows may take, and how they will be asked for (see ``StoredRowDataset``)."""

    def close(self) -> None:
        """Gives back what this process holds; the next read gets it again."""

    # What follows from it ------------------------------------------------------------------------------------

    def __getitem__(self, index: int | BatchToken) -> Any:
        """One sample, or, for a loader's token, what the token asks for."""
        if isinstance(index, BatchToken):
            if is_worker := get_worker_info() is not None:
                self.counters.begin(index.epoch, index.step)
                if self.has_transforms or index.samples:
                    seed_streams(index.draws)  # also for the `collate_fn` that comes after
            raw = self.gather(index.rows, index.epoch)
            began = perf_counter()
            batch = self.finish(raw, samples=index.samples, draws=index.draws)
            self.counters.add(finish_seconds=perf_counter() - began)
            if is_worker:
                self.counters.set_kept(self.kept_bytes)
            return batch
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples in the order asked, read in one go; what ``DataLoader(batch_size=...)`` calls."""
        samples: list[Any] = self.finish(self.gather(self._normal(indices)), samples=True)
        return samples

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
            return self.structure.samples(raw.columns, raw.rows, draws)
        batch = self.structure.batch(raw.columns, raw.rows, draws)
        if self.batch_transform is None:
            return batch
        return self.batch_transform(batch, **generators(self._batch_asks_for, draws))

    @property
    def has_transforms(self) -> bool:
        """Whether a user's code makes samples or batches, and may draw random numbers."""
        return self.structure.has_transforms or self.batch_transform is not None

    @property
    def gives_as_read(self) -> bool:
        """Whether a batch is the tuple of its columns, as they were read."""
        return self.structure.is_as_read and self.batch_transform is None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["work"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _normal(self, indices: Iterable[int] | npt.NDArray[Any] | torch.Tensor) -> IntArray:
        """Indices as an array, counted from the start, inside the dataset."""
        rows = np.asarray(indices if isinstance(indices, np.ndarray | torch.Tensor | Sequence) else list(indices))
        if rows.dtype.kind not in "iu" and rows.size:
            raise H5ValueError(
                f"indices of dtype {rows.dtype} were asked for; a row is found by an integer. Pass integers."
            )
        if rows.ndim > 1:
            raise H5ValueError(f"indices of shape {rows.shape} were asked for. Pass a flat list of them.")
        rows = np.atleast_1d(rows)
        n_rows = len(self)
        outside = (rows < -n_rows) | (rows >= n_rows)
        if outside.any():
            # IndexError by protocol: it ends a `for` loop over a dataset.
            raise IndexError(
                f"index {rows[outside][0]} was asked of a dataset with {n_rows} rows. "
                f"Ask for -{n_rows} to {n_rows - 1}."
            )
        rows = rows.astype(np.int64)
        return np.where(rows < 0, rows + n_rows, rows)

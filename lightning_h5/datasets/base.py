"""The base of all row datasets: reads rows, makes samples and batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from ..counters import FORKED_WORKERS, Counters
from ..errors import without_frames
from ..hdf5 import ArrayLayout, ChangeGuard
from ..options import BadRowOptions
from ..order import BlockTable
from ..readers import TaskQueue
from ..readers.on_device import DecodingDevice
from ..samples import ReadCost
from ..types import BatchToken, Draws, Identity, IntArray
from .bad_rows import RaiseBadRows, SkipBadRows
from .bad_sample_ledger import BadSampleLedger
from .fields import row_numbers
from .raw_batch import RawBatch
from .sample_layout import SampleLayout, Transform
from .transforms import HasTransforms
from .user_functions import Samples, asked_for, fresh_draws, generators, note_rows, own_streams, rows_text, seed_streams

__all__ = ["MAX_ROWS", "RowDataset"]

MAX_ROWS = 8
"""Rows of a batch that a message names."""


class RowDataset(HasTransforms, Dataset[Any]):
    """A map-style dataset of rows.

    Reading has two halves. ``begin`` and the function that it returns, or ``gather`` for both, read, decode and copy;
    they may run in any thread. ``finish`` runs the transforms and collates; it runs in the thread that receives the
    batch, so that random streams are reproducible.

    A dataset reads files, or combines the rows of other datasets, its sources. Methods that a subclass does not define
    call the sources.

    Args:
        sample_layout: the layout of a sample.
        batch_transform: runs once on each collated batch.
        sources: datasets that provide the rows. They share this dataset's counters and threads.
        counters: counters of rows, bytes and seconds; None creates them.

    Attributes:
        counters: counters of rows, bytes and seconds.
        work: the queue that divides decoding among threads.
        bad_rows: handles samples that cannot be read or transformed.
        public_name: the class name for the ``repr`` of a private class; None is its own name.
        asked_cache_bytes: memory for decoded rows that the user requested; None for the default.
    """

    asked_cache_bytes: int | None = None
    bad_rows: RaiseBadRows = RaiseBadRows()
    public_name: str | None = None
    _of_process: tuple[str, ...] = ("work",)
    """Attributes that belong to one process: ``join`` sets them, and they are not pickled."""

    def __init__(
        self,
        sample_layout: SampleLayout,
        batch_transform: Transform | None,
        *,
        sources: Sequence[RowDataset] = (),
        counters: Counters | None = None,
    ) -> None:
        self.sample_layout, self.batch_transform = sample_layout, batch_transform
        self.sources = tuple(sources)
        self.counters = Counters(n_workers=FORKED_WORKERS) if counters is None else counters
        self._start_process()

    def pin_batches(self, pins: bool) -> None:
        """Read batches into page-locked memory if that saves a copy; the loader pins all other batches."""

    def _start_process(self) -> None:
        """Create the counters and the task queue of this process."""
        self.join(self.counters, TaskQueue())

    def _check_process(self) -> None:
        """Start again in a forked child: it inherits neither its parent's threads nor their tasks."""
        if self._pid != os.getpid():
            self._start_process()

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """Start again in this process, alone or as a source of a larger dataset.

        Args:
            counters: counters of rows, bytes and seconds.
            work: the queue that divides decoding among threads.
        """
        self._pid, self.counters, self.work = os.getpid(), counters, work
        for source in self.sources:
            source.join(counters, work)

    # Defined by subclasses -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        raise NotImplementedError

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], RawBatch]:
        """Begin to read rows.

        Args:
            rows: indices into the dataset.
            epoch: see ``gather``.
            at_once: the caller waits for the rows now, and did not prefetch them.

        Returns:
            A function that reads the rows, in any thread. Begin the batches of a plan in order. A thread must complete
            a read before it begins another one: it would wait for cache places that it holds itself.
        """
        raise NotImplementedError

    def identity(self) -> Identity:
        """Return digests of the files' contents, and of the rows of this dataset in their order."""
        raise NotImplementedError

    def blocks(self) -> BlockTable:
        """Return the blocks of rows that are stored together."""
        raise NotImplementedError

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """Return the file of each row, and its row there; rows are numbered as in ``RawBatch``."""
        raise NotImplementedError

    def summary(self) -> list[str]:
        """Return short texts for the ``repr``: fields, shapes and counts, without opening a file."""
        raise NotImplementedError

    # Derived from the sources, unless a subclass reads files --------------------------------------------------

    @property
    def cost(self) -> ReadCost:
        """The cost of reading; it depends on files and ``read_with``, but for ``is_in_memory`` and ``is_kept``."""
        return ReadCost.of_several([source.cost for source in self.sources])

    @property
    def decoding_device(self) -> DecodingDevice | None:
        """The device that decodes chunks, and that batches are on; None if they are decoded on the CPU."""
        return None

    @property
    def n_rows(self) -> int:
        """Rows of all ranks; the same as ``len`` for a dataset without a shard."""
        return len(self)

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process keeps in memory now."""
        return sum(source.kept_bytes for source in self.sources)

    def prefetch(self, rows: IntArray, epoch: int | None = None) -> bool:
        """Start decoding rows in the threads of ``work``, or have the system read them ahead, as far as memory allows.

        Returns:
            Whether there was memory for all rows.
        """
        return True

    def prepare_workers(self, num_workers: int) -> None:
        """Compile the loops for this number of workers, so that forked workers inherit the compiled code."""
        for source in self.sources:
            source.prepare_workers(num_workers)

    def layouts(self) -> Iterator[ArrayLayout]:
        """Yield the arrays of all files that rows are read from."""
        return chain.from_iterable(source.layouts() for source in self.sources)

    def guards(self) -> Iterator[ChangeGuard]:
        """Yield the change guards of all files."""
        return chain.from_iterable(source.guards() for source in self.sources)

    def read_with(
        self, cache_bytes: int, *, retain: bool | None = None, in_runs: bool = False, gives_back: bool = False
    ) -> None:
        """Set the memory for decoded rows, and describe the order of reads.

        Args:
            cache_bytes: memory for decoded rows; sources share it by the size of their rows.
            retain: keep decoded rows for the next epoch; None keeps them if all rows fit.
            in_runs: the order mixes runs of rows.
            gives_back: drop pages from the system's page cache after reading, since it cannot hold the whole epoch.
        """
        sizes = [source.cost.decoded_bytes for source in self.sources]
        for source, n_bytes in zip(self.sources, sizes, strict=True):
            share = cache_bytes * n_bytes // max(1, sum(sizes))
            source.read_with(share, retain=retain, in_runs=in_runs, gives_back=gives_back)

    def close(self) -> None:
        """Close this process's files and release its memory; the next read opens them again. Safe to call twice."""
        for source in self.sources:
            source.close()

    # Derived from the above ----------------------------------------------------------------------------------

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
            index: an integer; or a slice, a range, a list or a flat array of integers, which return the batch of
                ``read_batch``. ``DataLoader(dataset, sampler=BatchSampler(...), batch_size=None)`` therefore reads
                whole batches.

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
        (sample,) = self.finish(self.gather(row_numbers([index], len(self), index)), samples=True)
        self.counters.add(direct_rows=1)
        return sample

    def _read_token(self, token: BatchToken) -> Any:
        if is_worker := get_worker_info() is not None:
            self.counters.begin(token.epoch, token.step)
            if self.has_transforms or token.samples:
                seed_streams(token.draws)  # also for the `collate_fn` that follows
        raw = self.gather(token.rows, token.epoch)
        began = perf_counter()
        with nullcontext() if is_worker or not self.has_transforms else own_streams(token.draws):
            batch = self.finish_token(raw, token)
        self.counters.add(finish_seconds=perf_counter() - began)
        if is_worker:
            self.counters.set_kept(self.kept_bytes)
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples one by one. Python's default would treat a transform's ``IndexError`` as the end."""
        return (self[row] for row in range(len(self)))

    @without_frames
    def __getitems__(self, indices: Sequence[int] | BatchToken) -> Any:
        """Read several samples at once, in the requested order; ``DataLoader(batch_size=...)`` calls this.

        For a token of a loader's batch sampler, return the input of the loader's ``collate_fn``.
        """
        if isinstance(indices, BatchToken):
            return self._read_token(indices)
        samples: list[Any] = self.finish(self.gather(row_numbers(indices, len(self))), samples=True)
        self.counters.add(direct_rows=len(samples), direct_batches=1)
        return [*samples]

    @without_frames
    def read_batch(self, indices: Iterable[int] | npt.NDArray[Any] | torch.Tensor) -> Any:
        """Return a collated batch in the requested order, at full speed.

        Args:
            indices: any indices into the dataset, negative ones from its end; shape ``(batch,)``.

        Returns:
            ``x``, ``(x, y)`` or a dict of tensors with ``batch`` rows, and the indices if ``with_index``.
        """
        rows = row_numbers(indices, len(self))
        batch = self.finish(self.gather(rows))
        self.counters.add(direct_rows=len(rows), direct_batches=1)
        return batch

    def gather(self, rows: IntArray, epoch: int | None = None) -> RawBatch:
        """Read rows; the first half of a batch. Any thread may call; rows in memory are copied with torch's threads.

        Samples that cannot be read are missing if ``bad_rows`` skips them.

        Args:
            rows: indices into the dataset.
            epoch: the epoch, in which each row is read at most once; None without a plan.

        Raises:
            H5DataChangedError: a file has changed since the dataset was created.
            H5Error: the rows cannot be read.
        """
        try:
            return self.begin(rows, epoch, at_once=True)()
        except Exception as error:
            return self.read_others(rows, epoch, error)

    def read_others(self, rows: IntArray, epoch: int | None, error: Exception) -> RawBatch:
        """Return the readable samples of a batch after an error; raise the error if samples are not skipped."""
        return self.bad_rows.read_others(self, rows, epoch, error)

    def finish(self, raw: RawBatch, *, samples: bool = False, draws: Draws | None = None) -> Any:
        """Transform and collate; the second half of a batch.

        Args:
            raw: the result of ``gather``.
            samples: return a list of samples instead of a batch, without running ``batch_transform``.
            draws: seed of the generators that transforms request; None draws differently each time.
        """
        self.take_over(raw)
        all_draws, errors, numbers = self._draws(draws), self.bad_rows.errors(), raw.rows
        finish = self.sample_layout.samples if samples else self.sample_layout.batch
        batch = finish(raw.columns, numbers, all_draws, self.describe, errors)
        if errors or raw.bad:
            self.bad_rows.left_out(self, raw, errors, draws)
            numbers = np.delete(numbers, [*(errors or ())])
        finished = (
            Samples(batch, partial(self.describe, numbers)) if samples else self._transformed(batch, numbers, all_draws)
        )
        self._count_finished(numbers)
        return finished

    def take_over(self, raw: RawBatch) -> None:
        """Let the caller's stream own the memory of rows on a device: before anything uses them, and frees them."""
        if (device := self.decoding_device) is not None:
            device.own(raw.columns)

    def _count_finished(self, numbers: IntArray) -> None:
        """Count the rows of a finished batch, beyond what loaders count."""

    def _draws(self, draws: Draws | None) -> Draws:
        if draws is not None:
            return draws
        asks = self.sample_layout.asks or (self._batch_transform is not None and self._batch_asks_for)
        return fresh_draws() if asks else Draws(0, 0, 0)

    def finish_token(self, raw: RawBatch, token: BatchToken) -> Any:
        """Return the batch, or the samples, of a loader's token; the second half of it."""
        return self.finish(raw, samples=token.samples, draws=token.draws)

    def _transformed(self, batch: Any, numbers: IntArray, draws: Draws) -> Any:
        """Apply ``batch_transform``; its errors name the rows."""
        transform = self._batch_transform
        if transform is None:
            return batch
        try:
            return transform(batch, **generators(self._batch_asks_for, draws))
        except Exception as error:
            note_rows(error, "batch_transform", transform, lambda: self.describe(numbers))
            raise

    def describe(self, numbers: IntArray) -> str:
        """Return the files and row numbers of some rows, as text for a message.

        Args:
            numbers: row numbers as in ``RawBatch``.
        """
        places = self.places_of(numbers[:MAX_ROWS])
        if len(numbers) != 1:
            return rows_text(places, len(numbers))
        return f"{rows_text(places, 1)} (index {self.sample_layout.shown(int(numbers[0]))})"

    def place_of(self, number: int) -> tuple[str, str]:
        """Return the file of a sample, and its place in the file as text.

        Args:
            number: the sample's number, as in ``RawBatch`` or from ``with_index``.
        """
        ((path, row),) = self.places_of(np.array([number], np.int64))
        return path, f"row {row}"

    @property
    def has_same_rows_each_epoch(self) -> bool:
        """Whether a sample consists of the same rows in each epoch."""
        return all(source.has_same_rows_each_epoch for source in self.sources)

    def skip_bad_rows(
        self, options: BadRowOptions | None, ledger: BadSampleLedger | None = None, stage: str = ""
    ) -> None:
        """Leave out samples that cannot be read or transformed.

        Args:
            options: limit and stages; None raises the errors instead.
            ledger: records the skipped samples; None creates one.
            stage: the stage of this dataset.
        """
        if options is not None:
            self.bad_rows = SkipBadRows(options, BadSampleLedger(options.limit) if ledger is None else ledger, stage)

    def numbers_of(self, rows: IntArray) -> IntArray:
        """Return the numbers that ``with_index`` adds for indices into the dataset."""
        numbers: IntArray = self.sample_layout.shown(rows)
        return numbers

    def shown_numbers(self, raw: RawBatch) -> IntArray:
        """Return the numbers that ``with_index`` adds for rows of a batch."""
        numbers: IntArray = self.sample_layout.shown(raw.rows)
        return numbers

    def files_of(self, rows: IntArray) -> list[str]:
        """Return the files that rows are read from, for messages."""
        return list(dict.fromkeys(path for path, _ in self.places_of(rows)))

    @property
    def has_transforms(self) -> bool:
        """Whether user functions transform samples or batches, and may draw random numbers."""
        return self.sample_layout.has_transforms or self._batch_transform is not None

    @property
    def is_passthrough(self) -> bool:
        """Whether a batch consists of the columns as read, if they are tensors (see ``SampleLayout.built``)."""
        return self.sample_layout.is_built_of_columns and self._batch_transform is None

    def __getstate__(self) -> dict[str, Any]:
        absent = {*self._of_process, "_batch_asks_for"}
        return {name: value for name, value in self.__dict__.items() if name not in absent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._batch_asks_for = asked_for(self.batch_transform)
        self._start_process()

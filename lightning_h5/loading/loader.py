"""The loader: a torch ``DataLoader`` that reads batches by token, starts late, and knows where it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from multiprocessing.context import BaseContext
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..counters import Counters, WaitTimes
from ..datasets import RawBatch, RowDataset, own_streams
from ..order import EpochPlan, PlanSampler
from ..readers import usable_cores
from ..types import BatchToken
from .collate import Collate, pin
from .in_memory_iterator import InMemoryIterator
from .iteration import Batches, Iteration, Passes, Progress
from .position import Position
from .prefetch import ReadAhead
from .workers import PinnedBatches, WorkerPool

__all__ = ["H5DataLoader"]

DEPTH = 4  # batches read ahead in this process: enough to bridge a slow step, few to hold in memory
MAX_TOGETHER = 16  # batches looked up at a time: what that costs is no longer seen beside copying them
TOGETHER_BYTES = 3 << 20  # what is being read and was not taken yet stays in the cores' shared cache
TOGETHER_BYTES_MORE = (
    8 << 20
)  # of many blocks or runs, where looking up costs more; in memory, where copying costs less
MAX_LOOKAHEAD = 512  # batches after these that are looked at for what to decode; a token takes a kilobyte


class H5DataLoader(DataLoader[Any]):
    """Batches of a row dataset in the order of a plan.

    ``iter(loader)`` starts nothing; the first ``next()`` starts workers and asks for the epoch. That is after
    everything that Lightning restores or sets between the two. ``len(loader)`` is the length of a whole epoch,
    also where an iteration goes on with the rest of one.

    Batches come collated, so ``batch_size`` stays None; shuffling is the sampler's.

    Iterations are independent, as torch's are without ``persistent_workers``: ``zip(loader, loader)`` yields the whole
    epoch twice, and a callback may look at ``next(iter(loader))`` during training. Persistent workers serve one
    iteration at a time: if it is not finished when another one begins, it keeps them to its end, and new workers are
    started for the other one and persist in their place.

    Under a Trainer the saved position is the Trainer's. Otherwise it is that of the iteration which yielded the last
    batch, and ``state_dict`` raises if it cannot know that this one trains: another iterator of the same epoch exists
    that did not come to its end and is at a different batch, or the last batch was yielded by an iterator that exists
    no more, and another one that did not come to its end had come further. So save the position before you look at
    ``next(iter(loader))``, or after the loop took its next batch. An iterator that begins after the end of an epoch
    counts as its next pass. Call ``loader.sampler.set_epoch(epoch)`` before each pass, which tells them apart.

    Args:
        dataset: what to read.
        sampler: which rows, in which order, on which rank.
        batch_size: None. Here since Lightning builds loaders anew with the arguments of torch's.
        shuffle: None or False, likewise.
        batch_sampler: None, likewise.
        drop_last: False, likewise; ask the sampler.
        num_workers: worker processes; with 0 a thread of this process reads ahead, without a copy (rows in memory: from
            when the consumer is longer elsewhere than copying them takes).
        collate_fn: runs on what the dataset gives for a token.
        pin_memory: put batches into page-locked memory.
        prefetch_factor: batches read ahead, for each worker or in this process. None means 2 a worker; here 4, or
            twice as many as are read together: up to 16 that take 3 MiB; 8 MiB of rows in memory, and in the order
            ``window``.
        persistent_workers: keep workers between epochs.
        multiprocessing_context: how workers start.
        timeout: seconds to wait for a worker; 0 waits for ever.
        worker_init_fn: runs in each worker, after its handles and seeds are set.
        generator: where torch draws the workers' base seed from.
    """

    dataset: RowDataset
    sampler: PlanSampler

    def __init__(
        self,
        dataset: RowDataset,
        *,
        sampler: PlanSampler,
        batch_size: None = None,
        shuffle: bool | None = None,
        batch_sampler: None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: Any = None,
    ) -> None:
        self._depth = prefetch_factor
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn if isinstance(collate_fn, Collate) else Collate(collate_fn),
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            timeout=timeout if num_workers else 0,
            worker_init_fn=worker_init_fn or _do_nothing,
            generator=generator,
        )
        self._pins = pin_memory and torch.accelerator.is_available()  # torch's own loader warns where it cannot
        dataset.reads_pinned = self._pins and not num_workers
        self._iterator: Any = None  # torch's name, which Lightning sets to None when a stage ends: persistent workers
        self.passes = Passes()
        self.waits = WaitTimes()
        self._reading: weakref.WeakSet[ReadAhead | InMemoryIterator] = weakref.WeakSet()
        self.running: weakref.WeakSet[Iteration] = weakref.WeakSet()  # began, and neither ended nor failed

    @property
    def counters(self) -> Counters:
        """What this loader and its dataset counted."""
        return self.dataset.counters

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process and its workers keep in memory, at last count."""
        return self.dataset.kept_bytes + int(self.counters.total()["kept_bytes"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own private class here
        return Iteration(self)

    def __len__(self) -> int:
        """Steps of a whole epoch on this rank."""
        return len(self.sampler)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self):,} steps, num_workers {self.num_workers}, {self.dataset!r}, "
            f"{self.sampler!r})"
        )

    def start(self) -> tuple[Batches, EpochPlan, Progress]:
        """Starts reading an epoch; called by the first ``next()``.

        Returns:
            The batches, the plan they follow, and the count of those that were yielded.

        Raises:
            H5Error: workers cannot be started: the system has no shared memory, descriptors or processes left.
            H5ValueError: a function of the user's cannot travel to workers.
            H5ResumeError: a position was loaded and nobody applied it.
        """
        epoch = self.sampler.starting_epoch()
        plan = self.sampler.plan(epoch)
        progress = self.passes.begin(epoch, self.sampler)
        tokens = self.sampler.tokens(epoch)
        return self._from_workers(tokens) if self.num_workers else self._from_threads(tokens), plan, progress

    def _from_workers(self, tokens: Iterator[BatchToken]) -> Batches:
        pool: WorkerPool | None = self._iterator
        if pool is None or not pool.can_begin():
            self.check_worker_number_rationality()
            pool = WorkerPool(self)
        self._iterator = pool if self.persistent_workers else None
        batches = pool.begin(tokens, self.prefetch_factor or 2)
        return PinnedBatches(batches) if self._pins else batches

    def _from_threads(self, tokens: Iterator[BatchToken]) -> Batches:
        reading = self._read(tokens)
        self._reading.add(reading)
        return reading

    def _read(self, tokens: Iterator[BatchToken]) -> ReadAhead | InMemoryIterator:
        dataset, is_in_memory = self.dataset, self.dataset.is_in_memory
        most_bytes = TOGETHER_BYTES_MORE if dataset.in_runs or is_in_memory else TOGETHER_BYTES
        together = max(1, min(MAX_TOGETHER, most_bytes // max(1, self.sampler.batch_size * dataset.cost.row_bytes)))
        if self._depth is not None:
            together = max(1, min(together, self._depth // 2))
        elif is_in_memory:
            return InMemoryIterator(dataset, self._finish_all, tokens, together, partial(self._read_ahead, together))
        return self._read_ahead(together, tokens)

    def _read_ahead(self, together: int, tokens: Iterator[BatchToken]) -> ReadAhead:
        batch_size, cost = self.sampler.batch_size, self.dataset.cost
        ahead = 2 * max(cost.rows_per_chunk, cost.rows_per_run)
        return ReadAhead(
            self.dataset,
            self._finish,
            tokens,
            self._depth or max(DEPTH, 2 * together),
            together=together,
            lookahead=min(MAX_LOOKAHEAD, -(-ahead // batch_size)),
            team=max(1, usable_cores() - 1) if cost.rows_per_chunk else 0,
        )

    def _finish(self, raw: Any, token: BatchToken) -> Any:
        """What a worker process, and torch's pinning thread, would do with what was read."""
        began = perf_counter()
        if self.dataset.has_transforms or token.samples:
            with own_streams(token.draws):
                batch = self.collate_fn(self.dataset.finish_token(raw, token))
        else:  # nothing of the user's runs, so nothing is drawn
            batch = self.collate_fn(self.dataset.finish(raw))
        self.counters.add(finish_seconds=perf_counter() - began)
        return pin(batch) if self._pins else batch

    def _finish_all(self, raw: RawBatch, tokens: Sequence[BatchToken]) -> Iterator[Any]:
        """The same for batches that were read together; each is finished when it is taken."""
        sizes = [len(token.rows) for token in tokens]
        as_read = self.dataset.is_passthrough and getattr(self.collate_fn, "user", True) is None
        if as_read and not self._pins and not tokens[0].samples:
            return raw.split_columns(sizes)
        # No `map`: it would end with a StopIteration of one batch, and the others would be lost.
        return (self._finish(each, token) for each, token in zip(raw.split(sizes), tokens, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # Neither threads nor processes travel; they start again where they are needed.
        return self.__dict__ | {"_reading": None, "running": None, "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_reading": weakref.WeakSet(), "running": weakref.WeakSet()})

    def close(self) -> None:
        """Ends reading ahead, so that nobody opens the files again behind the reader's back; and persistent workers."""
        for reading in list(self._reading):
            reading.close()
        if self._iterator is not None:
            self._iterator.end()
            self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: plain values, less than 4 KiB, whatever the number of rows.

        Without a Trainer it is what was given out. Under a data module's Trainer it is the data module's state.

        Raises:
            H5ResumeError: several iterations of the epoch came to different batches, and which of them trains is not
                known (see the class).
        """
        kept = self.sampler.kept_state()
        if kept is not None:
            return kept
        position = self.passes.position(self.sampler, [one.progress for one in list(self.running)])
        return position.state(self.sampler, self._identity)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken; sets the sampler's epoch. Does nothing under a Trainer.

        Raises:
            H5ResumeError: the state is not one of ours, or does not fit the present data or settings.
        """
        if not self.sampler.is_kept and state:
            self.passes.load(Position.from_state(state, self.sampler, self._identity), self.sampler)

    @cached_property
    def _identity(self) -> str:
        return self.dataset.identity()


def _do_nothing(worker: int) -> None:
    """In place of a user's ``worker_init_fn``: Lightning puts its own there if there is none, and ours seed by rank."""

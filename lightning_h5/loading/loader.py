"""The loader: a torch ``DataLoader`` that reads batches by token, starts late, and has a position."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from time import perf_counter
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ..counters import Counters, WaitTimes
from ..datasets import (
    AskedFor,
    RawBatch,
    RowDataset,
    Samples,
    asked_for,
    fresh_draws,
    generators,
    note_rows,
    own_streams,
)
from ..errors import MAX_LETTERS, H5Error, H5ResumeError
from ..options import ShuffleOptions
from ..order import EpochPlan, OrderParameters, Passes, PlanSampler, Position, Progress
from ..readers import LARGE_TEAM, MOST_TOGETHER, TASK_BYTES, team_size
from ..types import BatchToken, Identity, cached_property
from .accumulation import LoopRecord
from .batch_sampler import RowsOfBatches, TokenBatchSampler
from .choose_order import choose_order
from .device_ahead import STREAMS, DeviceAhead
from .held_batches import HeldBatches, HoldLimits
from .pass_tokens import PassTokens
from .prefetch import CLOSED, Batches, FinishAll, InMemoryIterator, ReadAhead
from .workers import PinnedBatches, WorkerPool, pin

__all__ = ["H5DataLoader", "Iteration", "SampleCollate"]

_log = logging.getLogger(__name__)

DEPTH = 4  # batches read ahead in this process: enough to bridge a slow step, few enough to hold in memory
MAX_TOGETHER = 64  # batches planned at a time: more would not be faster
TOGETHER_BYTES = 3 << 20  # bytes read but not consumed, so that they stay in the shared CPU cache
TOGETHER_BYTES_MORE = 8 << 20  # for rows in memory
TOGETHER_BYTES_DECODED = 16 << 20  # for chunks, whose windows take many times their bytes: 1.5 to 2 times faster
LEAST_TOGETHER = 4  # batches, if a local disk has all chunks decoded
PAGE_BYTES = 4096  # a smaller row takes as much of the page cache
FAR_BYTES = 64 << 20  # decoded ahead while reads wait for a disk or a server: 640 reads of 100 KiB are under way
TASKS_AHEAD = 2
"""Tasks that each thread of a large team has ahead of reads, as far as there is room: one that it runs, and the next.
With fewer, threads wait for a read to end, and the next read waits for all of its chunks."""

MAX_LOOKAHEAD = 512  # batches decoded ahead beyond those; a token takes 1 KB


class SampleCollate:
    """A ``collate_fn`` over samples, and the ``batch_transform`` after it; a class, so that it pickles for spawn.

    Args:
        collate_fn: makes a batch of a list of samples.
        batch_transform: runs on the batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batch_transform: Callable[..., Any] | None) -> None:
        self._collate_fn, self._batch_transform = collate_fn, batch_transform

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of a list of samples."""
        describe = samples.describe if isinstance(samples, Samples) else lambda: f"{len(samples)} samples"
        function, argument = self._collate_fn, "collate_fn"
        try:
            batch = function(list(samples))
            if self._batch_transform is None:
                return batch
            function, argument = self._batch_transform, "batch_transform"
            return function(batch, **self._generators())
        except Exception as error:
            note_rows(error, argument, function, describe)
            raise

    def followed_by(self, batch_transform: Callable[..., Any] | None) -> SampleCollate:
        """Return the same ``collate_fn`` with another ``batch_transform`` after it."""
        return SampleCollate(self._collate_fn, batch_transform)

    def _generators(self) -> dict[str, Any]:
        # The random stream is seeded for each batch, so other draws are reproducible, too.
        return generators(self._asks_for, fresh_draws()) if self._asks_for else {}

    @cached_property
    def _asks_for(self) -> AskedFor:
        return asked_for(self._batch_transform)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_asks_for"}


class Iteration:
    """Starts reading at the first ``next()``; times each one. After an error it raises errors only.

    Args:
        loader: the loader to iterate over.
    """

    def __init__(self, loader: H5DataLoader) -> None:
        self._loader = loader
        self._batches: Batches | None = None
        self._tokens: PassTokens
        self._plan: EpochPlan
        self._n_taken: int  # number of steps of the plan that a trainer runs
        self.progress: Progress
        self._failed: str | None = None
        self._is_over = False
        self._record: LoopRecord | None = None
        self._to_hold: HoldLimits | None = None
        self._held: HeldBatches | None = None
        self._ahead: DeviceAhead | None = None

    def hold(self, limits: HoldLimits) -> None:
        """Read the next batches together when the next one is requested, then yield them one by one from memory.

        In the meantime the loader reads nothing, apart from reads that have already started. The steps then show the
        time of a loop without loading.
        """
        self._to_hold, self._held = limits, HeldBatches() if self._held is None else self._held

    @property
    def n_held(self) -> int:
        """Number of batches that were read together and not yielded yet."""
        return 0 if self._held is None else len(self._held)

    @property
    def hold_seconds(self) -> float:
        """Seconds that it took to read the batches that are held, or were held last."""
        return 0.0 if self._held is None else self._held.seconds

    @property
    def has_begun(self) -> bool:
        """Whether a batch was requested."""
        return hasattr(self, "progress")

    @property
    def sampler(self) -> PlanSampler:
        """The loader's sampler."""
        return self._loader.sampler

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        loader, start_time = self._loader, perf_counter()
        if self._failed is not None:  # otherwise a loop that ignores errors would treat the rest as an epoch
            raise H5Error(self._failed)
        if self._is_over:
            raise StopIteration
        is_first = self._batches is None and not self.has_begun
        try:
            if is_first:
                self._begin()
            batch = self._read_next() if self._ahead is None and self._held is None else self._next_batch()
        except StopIteration:
            self._batches, self._is_over = None, True
            self._leave()
            loader.passes.end(self.progress)
            raise
        except H5Error as error:
            self._fail(error)
            # As in `without_frames`, but keep a StopIteration of user code as the cause.
            cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else None
            raise error.with_traceback(None) from cause
        except BaseException as error:
            self._fail(error)
            raise
        progress = self.progress
        start, stop = self._plan.bounds(progress.n_given)
        progress.position = start
        progress.n_given += 1
        if loader.passes.last is not progress:
            loader.passes.switch(progress)
        if progress.n_given == self._n_taken:
            self._leave_batches()
        if progress.n_given == self._plan.n_steps:
            loader.passes.complete(progress)
            if self._record is not None:
                self._record.end_of_dataloader = True
        wait_seconds = perf_counter() - start_time
        loader.counters.add_batch(stop - start, wait_seconds)
        loader.waits.add(wait_seconds)
        if is_first:
            loader.counters.add(start_seconds=wait_seconds)
        return batch

    def _begin(self) -> None:
        loader = self._loader
        self._batches, self._tokens, self._plan, self.progress = loader.start(self)
        self._n_taken = self._tokens.n_taken or self._plan.n_steps
        self._ahead = loader.batches_ahead()
        loader.running.add(self)
        loader.show_rows_of(self._plan)
        self._record = LoopRecord.begin()
        if self._record is not None:
            weakref.finalize(self, self._record.end).atexit = False

    def _leave_batches(self) -> None:
        """Pass reading ahead on to the next pass, if another one is certain."""
        if self._batches is not None and self._tokens.expects_more:
            self._loader.keep_for_next(self._batches, self._tokens)
            self._batches = None

    def _leave(self) -> None:
        self._loader.running.discard(self)
        if self._record is not None:
            self._record.end()

    def _next_batch(self) -> Any:
        """Return the next batch, on the device if it was copied ahead; raise StopIteration after the last one."""
        if self._ahead is None:
            return self._next_read()
        return self._ahead.next(self._next_read, self._is_ready, self._n_taken - self.progress.n_given)

    def _next_read(self) -> Any:
        """Return the next batch as it was read, from the held ones if any."""
        if (held := self._held) is None:
            return self._read_next()
        if self._to_hold is not None and not held:
            limits, self._to_hold = self._to_hold, None
            n_batches = min(limits.n_batches, self._n_taken - self._n_read)
            held.read(self._read_next, limits._replace(n_batches=n_batches))
        return held.take() if held else self._read_next()

    def _is_ready(self) -> bool:
        """Return whether the next batch is read without waiting."""
        return bool(self._held) or (self._batches is not None and self._batches.is_ready)

    @property
    def _n_read(self) -> int:
        """Number of batches of the plan that were read, yielded or not."""
        return self.progress.n_given + self.n_held + (0 if self._ahead is None else len(self._ahead))

    def _read_next(self) -> Any:
        """Read the next batch; raise StopIteration after the last step of the plan, and never before it."""
        if self._batches is None:  # left to the next pass
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration as error:
            n_steps, n_read = self._n_taken, self._n_read
            if n_read == n_steps:
                raise
            raise H5Error(
                f"the epoch has {n_steps} batches left, but ended after {n_read}: making the next one raised "
                "StopIteration. Raise another error in that code (see above)."
            ) from error

    def _fail(self, error: BaseException) -> None:
        batches, self._batches, self._ahead = self._batches, None, None
        self._leave()
        if error.args == (CLOSED,):
            self._failed = CLOSED
        else:
            text = (str(error).splitlines() or [""])[-1]  # the rest of a worker's error is its traceback
            self._failed = (
                f"the next batch was requested, but this iteration has failed ({type(error).__name__}: "
                f"{text[:MAX_LETTERS]}). Start a new iteration of the loader: `iter(loader)`."
            )
        if batches is not None:
            batches.close()


class H5DataLoader(DataLoader[Any]):
    """Batches of a row dataset in the order of a plan.

    ``iter(loader)`` starts nothing. The first ``next()`` starts the workers and determines the epoch, after everything
    that Lightning restores or sets in between. ``len(loader)`` is the length of a whole epoch, also if an iteration
    continues in the middle of an epoch. Batches are collated; the sampler shuffles.

    Iterations are independent, as in torch without ``persistent_workers``: ``zip(loader, loader)`` yields the whole
    epoch twice, and a callback may call ``next(iter(loader))`` during training. Persistent workers serve one iteration
    at a time. If an iteration is unfinished when another one starts, it keeps its workers to its end; the other
    iteration starts new workers, which then persist.

    Under a Trainer, the saved position is the Trainer's. Otherwise it is the position of the iteration that yielded the
    last batch. ``state_dict`` raises an error if several iterations may be the training loop: if another unfinished
    iterator of the same epoch is at a different batch, or if the iterator of the last batch was deleted and another
    unfinished one is further. So save the position before you call ``next(iter(loader))``, or after the loop has
    received its next batch.

    If a Trainer is certain to train another epoch, the loader reads the first batches of this epoch during the last
    steps of the present one. It drops them if the order changes or the fit ends before. Without a Trainer, reading
    starts with each pass.

    A complete pass advances the epoch of a training loader, so that the next pass has a new order and new random draws.
    After ``loader.set_epoch(epoch)``, only the caller sets the epoch; a Trainer always does so. All ranks have to make
    the same passes, or set the epoch.

    Args:
        dataset: the dataset to read.
        sampler: selects the rows of this rank, and their order; None uses the sampler of ``batch_sampler``.
        batch_size: ignored, as are ``shuffle`` and ``drop_last``, since the sampler has these settings. They exist
            because Lightning recreates loaders with torch's arguments.
        shuffle: see ``batch_size``.
        batch_sampler: the batch sampler of a loader that Lightning recreates.
        drop_last: see ``batch_size``.
        num_workers: number of worker processes. With 0, a thread of this process reads ahead, without a copy; rows in
            memory are read ahead if the consumer's steps are longer than copying them.
        collate_fn: runs on the dataset's batch for a token; None leaves the batch unchanged.
        pin_memory: put batches into page-locked memory.
        prefetch_to_device: number of batches to copy to ``device`` ahead of the one that is yielded, if it is a CUDA
            device. 0 yields batches in host memory. Batches that are not ready yet are not waited for.
        device: the device to copy batches to.
        prefetch_factor: number of batches to read ahead, per worker or in this process. None is 2 per worker. In this
            process it is 4, or twice the number of batches that are read together: up to 16 batches of 3 MiB in all, of
            8 MiB for rows in memory and with ``shuffle="chunks"``, or of 16 MiB if chunks are decoded.
        persistent_workers: keep workers between epochs.
        multiprocessing_context: start method of workers, or a context.
        timeout: seconds to wait for a worker; 0 waits forever.
        worker_init_fn: runs in each worker, after its handles and seeds are set.
        generator: source of the workers' base seed.
    """

    dataset: RowDataset
    sampler: PlanSampler

    # Hugging Face Accelerate uses a loader with this attribute unchanged. Otherwise it recreates the loader with a
    # sampler of its own, which reads single rows in storage order.
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: RowDataset,
        *,
        sampler: PlanSampler | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch_to_device: int = 0,
        device: torch.device | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: Any = None,
    ) -> None:
        self._depth = prefetch_factor
        self._batch_sampler = (
            TokenBatchSampler(cast("PlanSampler", sampler)) if batch_sampler is None else batch_sampler
        )
        super().__init__(
            dataset,
            batch_size=None,
            sampler=self._batch_sampler.sampler,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            timeout=timeout if num_workers else 0,
            worker_init_fn=worker_init_fn or _do_nothing,
            generator=generator,
        )
        self._pins = pin_memory and torch.accelerator.is_available()  # torch's own loader warns if it cannot
        dataset.pin_batches(self._pins and not num_workers)
        self.prefetch_to_device, self.device = prefetch_to_device, device
        self._n_assigned = dataset.n_assigned
        self._iterator: Any = None  # persistent workers; Lightning sets torch's name to None after a stage
        self.passes = Passes(self.sampler)
        self.waits = WaitTimes()
        self._reading: weakref.WeakSet[ReadAhead | InMemoryIterator] = weakref.WeakSet()
        self._next_pass: tuple[Batches, PassTokens] | None = None  # reads that have started for the next pass
        self.running: weakref.WeakSet[Iteration] = weakref.WeakSet()  # started, and neither ended nor failed

    @property
    def counters(self) -> Counters:
        """The counters of this loader and its dataset."""
        return self.dataset.counters

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process and its workers keep in memory, at last count."""
        return self.dataset.kept_bytes + int(self.counters.total()["kept_bytes"])

    # Values that torch's constructor sets are ignored: it treats each token as a sample.

    @property
    def batch_size(self) -> int:
        """Rows of a batch on one rank."""
        return self.sampler.batch_size

    @batch_size.setter
    def batch_size(self, value: object) -> None: ...

    @property
    def drop_last(self) -> bool:
        """Whether the last rows of an epoch are dropped if they do not fill a batch."""
        return self.sampler.drop_last

    @drop_last.setter
    def drop_last(self, value: object) -> None: ...

    @property
    def batch_sampler(self) -> Any:
        """Yields a token for each batch, for other libraries: Accelerate iterates over it, Lightning recreates it.

        In prediction it is Lightning's wrapper, which provides ``batch_indices`` to a ``BasePredictionWriter``.
        """
        return self._batch_sampler

    @batch_sampler.setter
    def batch_sampler(self, value: object) -> None: ...

    def show_rows_of(self, plan: EpochPlan) -> None:
        """Pass the row numbers of prediction batches to Lightning."""
        if not isinstance(self._batch_sampler, TokenBatchSampler):
            self._batch_sampler.seen_batch_indices = RowsOfBatches(self.dataset, plan)

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

    def start(self, iteration: Iteration) -> tuple[Batches, PassTokens, EpochPlan, Progress]:
        """Start to read an epoch, or continue it; called by the first ``next()``.

        Args:
            iteration: the iteration over the epoch.

        Returns:
            The batches, their tokens, the plan, and the number of batches that were yielded before.

        Raises:
            H5Error: the system refuses to start workers.
            H5ValueError: a user function cannot be pickled for workers.
            H5ResumeError: a position was loaded and not applied.
        """
        if self._n_assigned != self.dataset.n_assigned:
            self._take_assigned_transforms()
        epoch = self.sampler.starting_epoch()
        plan = self.sampler.plan(epoch)
        progress = self.passes.begin(epoch)
        progress.plan = weakref.ref(plan)  # which may have a number for each row
        n_taken = self.sampler.n_taken(epoch, iteration)
        read_ahead = self._kept_for(epoch, n_taken)
        batches, tokens = read_ahead or self._begin_to_read(PassTokens(self.sampler, epoch, n_taken))
        # Rows in memory need no reading ahead in the next pass.
        goes_on = batches.can_go_on and (self.num_workers > 0 or not self.dataset.cost.is_in_memory)
        following = self.sampler.next_epoch(epoch) if goes_on else None
        n_following = None if following is None else self.sampler.n_taken(following, iteration)
        tokens.consume(epoch, following, n_taken=n_taken, n_following=n_following)
        return batches, tokens, plan, progress

    def batches_ahead(self) -> DeviceAhead | None:
        """Return copies of batches on the device; None if batches are yielded in host memory."""
        stream = None if self.device is None else STREAMS.get(self.device.type)
        if self.device is None or stream is None or not self.prefetch_to_device:
            return None
        return DeviceAhead(stream(self.device), self.prefetch_to_device)

    def keep_for_next(self, batches: Batches, tokens: PassTokens) -> None:
        """Keep reading ahead for the next pass."""
        self._drop_next_pass()
        batches.end_pass()
        self._next_pass = batches, tokens

    def _kept_for(self, epoch: int, n_taken: int | None) -> tuple[Batches, PassTokens] | None:
        """Return the batches that were read ahead for a new pass; drop them if this is not the expected pass."""
        if self._next_pass is not None:
            batches, tokens = self._next_pass
            if batches.can_go_on and tokens.goes_on_with(epoch, n_taken):
                self._next_pass = None
                return batches, tokens
        self._drop_next_pass()
        return None

    def _drop_next_pass(self) -> None:
        if self._next_pass is not None:
            batches, _ = self._next_pass
            self._next_pass = None
            batches.close()

    def _begin_to_read(self, tokens: PassTokens) -> tuple[Batches, PassTokens]:
        return self._from_workers(tokens) if self.num_workers else self._from_threads(tokens), tokens

    def _take_assigned_transforms(self) -> None:
        self._n_assigned = self.dataset.n_assigned
        if isinstance(self.collate_fn, SampleCollate):
            self.collate_fn = self.collate_fn.followed_by(self.dataset.batch_transform)
        if self.num_workers:  # workers keep the transforms from their start
            self._drop_next_pass()
        pool: WorkerPool | None = self._iterator
        if pool is not None and pool.can_begin():
            pool.end()
        self._iterator = None

    def _from_workers(self, tokens: PassTokens) -> Batches:
        pool: WorkerPool | None = self._iterator
        if pool is None or not pool.can_begin():
            self.check_worker_number_rationality()
            pool = WorkerPool(self, self.dataset, self.sampler)
        self._iterator = pool if self.persistent_workers else None
        batches = pool.begin(tokens, self.prefetch_factor or 2, self._n_far)
        return PinnedBatches(batches) if self._pins else batches

    def _from_threads(self, tokens: PassTokens) -> Batches:
        reading = self._read(tokens)
        self._reading.add(reading)
        return reading

    def _read(self, tokens: PassTokens) -> ReadAhead | InMemoryIterator:
        dataset, cost = self.dataset, self.dataset.cost
        is_in_memory = cost.is_in_memory
        max_bytes = TOGETHER_BYTES_MORE if is_in_memory else TOGETHER_BYTES
        if cost.rows_per_chunk and not is_in_memory and not cost.is_kept:
            max_bytes = TOGETHER_BYTES_DECODED
        together = max(1, min(MAX_TOGETHER, max_bytes // max(1, self.sampler.mean_rows * cost.row_bytes)))
        if cost.is_kept:
            together = max(together, LEAST_TOGETHER)
        if self._depth is not None:
            together = max(1, min(together, self._depth // 2))
        elif is_in_memory:
            start_ahead = partial(self._read_ahead, together)
            return InMemoryIterator(dataset, self._finish_all, tokens.of_pass, together, start_ahead)
        return self._read_ahead(together, tokens, passes=tokens)

    @property
    def _n_far(self) -> int:
        """Number of batches to decode ahead while reads wait for storage, and at an epoch's start."""
        n_rows = FAR_BYTES // max(PAGE_BYTES, self.dataset.cost.row_bytes)
        return min(MAX_LOOKAHEAD, -(-n_rows // self.sampler.mean_rows))

    def _read_ahead(
        self, together: int, tokens: Iterator[BatchToken], *, passes: PassTokens | None = None
    ) -> ReadAhead:
        cost = self.dataset.cost
        is_on_device = self.dataset.decoding_device is not None
        # On a single core, one thread reads while another waits for the device.
        team = max(2 if is_on_device else 1, team_size()) if cost.rows_per_chunk else 0
        rows_ahead = 2 * cost.rows_per_chunk
        if team >= LARGE_TEAM:
            task_bytes = MOST_TOGETHER * TASK_BYTES
            rows_ahead = TASKS_AHEAD * team * max(cost.rows_per_chunk, task_bytes // max(1, cost.row_bytes))
        n_ahead = -(-rows_ahead // self.sampler.mean_rows)
        if is_on_device:  # as many chunks as there is room for, so that many are decoded together
            n_ahead = MAX_LOOKAHEAD
        return ReadAhead(
            self.dataset,
            _weakly(weakref.WeakMethod(self._finish_all)),
            tokens,
            self._depth or max(DEPTH, 2 * together),
            passes=passes,
            together=together,
            lookahead=min(MAX_LOOKAHEAD, n_ahead),
            far=self._n_far,
            team=team,
        )

    def _finish(self, raw: Any, token: BatchToken) -> Any:
        """Finish a batch as a worker process and torch's pinning thread would."""
        start_time = perf_counter()
        if self.dataset.has_transforms or token.samples:
            with own_streams(token.draws):
                batch = self.collate_fn(self.dataset.finish_token(raw, token))
        else:  # no user code runs, so nothing is drawn
            batch = self.collate_fn(self.dataset.finish(raw, draws=token.draws))
        self.counters.add(finish_seconds=perf_counter() - start_time)
        return pin(batch) if self._pins else batch

    def _finish_all(self, raw: RawBatch, tokens: Sequence[BatchToken]) -> Iterator[Any]:
        """Finish batches that were read together, each when it is requested."""
        if raw.bad:  # of one batch
            return iter([self._finish(raw, tokens[0])])
        sizes = [len(token.rows) for token in tokens]
        # Lists and rows in CSR form are collated to tensors, or raise that they cannot be stacked.
        are_tensors = all(isinstance(column, torch.Tensor) for column in raw.columns)
        as_read = self.dataset.is_passthrough and self.collate_fn is _as_it_is and not tokens[0].samples
        if as_read and are_tensors and not self._pins:
            self.dataset.take_over(raw)
            return map(self.dataset.sample_layout.built, raw.split_columns(sizes))
        # Not `map`, which a StopIteration in one batch would end, losing the others.
        return (self._finish(raw_batch, token) for raw_batch, token in zip(raw.split(sizes), tokens, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # Threads and processes are not pickled; they restart on demand.
        return self.__dict__ | {"_reading": None, "running": None, "_iterator": None, "_next_pass": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_reading": weakref.WeakSet(), "running": weakref.WeakSet()})

    def close(self) -> None:
        """Stop reading ahead, which would open the files again, and end persistent workers."""
        self._drop_next_pass()
        for reading in list(self._reading):
            reading.close()
        if self._iterator is not None:
            self._iterator.end()
            self._iterator = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; training loops other than Lightning's call this."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop as plain values, less than 4 KiB for any number of rows.

        Without a Trainer it counts the batches that were yielded. Under a Trainer it is the data module's state.

        Raises:
            H5ResumeError: several iterations of the epoch are at different batches, so the position of the training
                loop is unknown (see the class).
        """
        if (source := self.sampler.epoch_source) is not None:
            return source.state_dict()
        position = self.passes.position([iteration.progress for iteration in list(self.running)])
        return position.state(self.sampler, self._identity)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state_dict``, and set the sampler's epoch. Has no effect under a Trainer.

        Raises:
            H5ResumeError: the state is invalid, or does not fit the present data or settings; or Lightning restores it
                inside an epoch for another batch size or number of ranks, and ends that epoch by its count of batches.
        """
        if self.sampler.epoch_source is None and state:
            position = Position.from_state(state, self.sampler, self._identity)
            # A Trainer that restores a loader without its data module; other loops count nothing.
            if sys._getframe(1).f_globals.get("__name__", "").startswith(("lightning.pytorch.", "pytorch_lightning.")):
                change = position.change_of_batches(self.sampler.batch_size, self.sampler.replica.world_size)
                if change:
                    raise H5ResumeError(
                        f"{change}. Lightning counts the saved batches, and would end the epoch too early or too late. "
                        "Pass the data module to the Trainer (datamodule=) instead of its loader, or resume with the "
                        "saved batch_size and number of ranks."
                    )
            if (text := position.change_of_nodes(self.sampler)) and not self.sampler.rank:
                _log.info(text)
            if position.order.mode != self.sampler.parameters.mode:
                self._keep_order(position.order)
            self.passes.load(position)

    def _keep_order(self, saved: OrderParameters) -> None:
        """Continue in the mode of the saved run; with other free memory, this run may have chosen another mode."""
        sampler, dataset = self.sampler, self.dataset
        parameters = sampler.parameters
        sampler.parameters = replace(parameters, mode=saved.mode, streams=saved.streams, window=saved.window)
        world_size = sampler.replica.world_size
        order = choose_order(
            dataset, ShuffleOptions(), world_size=world_size, num_workers=self.num_workers, saved_mode=saved.mode
        )
        cache_bytes = order.cache_bytes if dataset.asked_cache_bytes is None else dataset.asked_cache_bytes
        dataset.read_with(cache_bytes, in_runs=saved.mode == "chunks")

    @cached_property
    def _identity(self) -> Identity:
        return self.dataset.identity()


def _weakly(finish_all: weakref.WeakMethod[FinishAll]) -> FinishAll:
    """Return a function that calls a method of a loader without keeping the loader alive, to avoid a cycle."""

    def call(raw: RawBatch, tokens: Sequence[BatchToken]) -> Iterator[Any]:
        method = finish_all()
        assert method is not None, "an iteration keeps the loader alive"
        return method(raw, tokens)

    return call


def _as_it_is(data: Any) -> Any:
    """Placeholder for a missing ``collate_fn``: torch would set its own, which converts arrays."""
    return data


def _do_nothing(worker: int) -> None:
    """Placeholder for a missing ``worker_init_fn``: Lightning would set its own, but workers already seed by rank."""

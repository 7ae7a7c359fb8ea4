"""The loader: a torch ``DataLoader`` that reads batches by token, starts late, and knows where it is."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from multiprocessing.context import BaseContext
from time import perf_counter, sleep
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader

from ..datasets import (
    RawBatch,
    RowDataset,
    WorkerMemory,
    open_outbox,
    own_streams,
    start_worker,
    starting_workers,
    this_outbox,
    worker_memory,
)
from ..datasets.outbox import naming_shared_memory
from ..errors import MOST_LETTERS, H5Error, H5WorkerError
from ..readers import usable_cores
from ..sampling import EpochPlan, PlanSampler
from ..stats import Counters, WaitTimes
from ..types import BatchToken
from .at_hand import AtHand
from .pinning import pin
from .readahead import CLOSED, ReadAhead
from .state import LoaderState
from .workers import WorkerBatches, end_with

__all__ = ["H5DataLoader"]

_log = logging.getLogger(__name__)

DEPTH = 4  # batches read ahead in this process: enough to bridge a slow step, few to hold in memory
MOST_TOGETHER = 16  # batches looked up at a time: what that costs is no longer seen beside copying them
TOGETHER_BYTES = 3 << 20  # what is being read and was not taken yet stays in the cores' shared cache
TOGETHER_BYTES_MORE = 8 << 20  # of many slabs or runs, where looking up costs more; in memory, where copying costs less
LEAST_SHARED = 16 << 20  # bytes of memory for a worker's batches, taken when they are used
N_SHARED = 8  # times the batches on their way: the consumer has some, transforms may make them larger
MOST_LOOKAHEAD = 512  # batches after these that are looked at for what to decode; a token takes a kilobyte


class H5DataLoader(DataLoader[Any]):
    """Batches of a row dataset in the order of a plan.

    ``iter(loader)`` starts nothing; the first ``next()`` starts workers and asks for the epoch. That is after
    everything that Lightning restores or sets between the two. ``len(loader)`` is the length of a whole epoch,
    also where an iteration goes on with the rest of one.

    Batches come collated, so ``batch_size`` stays None; shuffling is the sampler's.

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
        self._user_init = worker_init_fn.user if isinstance(worker_init_fn, _WorkerInit) else worker_init_fn
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn if isinstance(collate_fn, _Collate) else _Collate(collate_fn),
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            timeout=timeout if num_workers else 0,
            worker_init_fn=_WorkerInit(0, self._user_init, None),
            generator=generator,
        )
        self._pins = pin_memory and torch.accelerator.is_available()  # torch's own loader warns where it cannot
        dataset.reads_pinned = self._pins and not num_workers
        self.position = LoaderState()
        self.waits = WaitTimes()
        self._memory: WorkerMemory | None = None  # of workers that persist
        self._n_closed = 0  # how often these were ended
        self._reading: weakref.WeakSet[ReadAhead | AtHand] = weakref.WeakSet()

    @property
    def counters(self) -> Counters:
        """What this loader and its dataset counted."""
        return self.dataset.counters

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that this process and its workers keep in memory, at last count."""
        return self.dataset.kept_bytes + int(self.counters.total()["kept_bytes"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own private class here
        return _LateIterator(self)

    def __len__(self) -> int:
        """Steps of a whole epoch on this rank."""
        return len(self.sampler)

    def start(self) -> tuple[Iterator[Any], EpochPlan, int]:
        """Starts reading an epoch; called by the first ``next()``.

        Returns:
            The batches, the plan they follow, and the number of this iteration.

        Raises:
            H5Error: workers cannot be started: the system has no shared memory, descriptors or processes left.
            H5ValueError: a function of the user's cannot travel to workers.
            H5ResumeError: a position was loaded and nobody applied it.
        """
        epoch = self.sampler.starting_epoch()
        plan = self.sampler.plan(epoch)
        iteration = self.position.begin(epoch, self.sampler)
        if self.num_workers:
            return self._start_workers(), plan, iteration
        reading = self._read(self.sampler.tokens(epoch))
        self._reading.add(reading)
        return reading, plan, iteration

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return WorkerBatches(self)

    def _start_workers(self) -> Iterator[Any]:
        self._forget_workers_that_ended()
        is_new = getattr(self, "_iterator", None) is None  # else workers that persist go on
        batch_bytes = self.sampler.batch_size * self.dataset.row_bytes
        n_bytes = max(LEAST_SHARED, batch_bytes * N_SHARED * (self.prefetch_factor or 2))
        memory = worker_memory(self.num_workers, n_bytes) if is_new else None
        if is_new and (self.multiprocessing_context or multiprocessing).get_start_method() == "fork":
            self.dataset.prepare_workers(self.num_workers)
        init = _WorkerInit(self.sampler.replica.rank, self._user_init, memory)
        self.worker_init_fn = init
        try:
            with naming_shared_memory():
                self.dataset.counters.share(self.num_workers)
            _let_threads_leave_python()
            with starting_workers(), naming_shared_memory():
                batches = super().__iter__()  # keeps that function, and so the memory, as long as there are batches
        except BaseException as error:
            if memory is not None:
                memory.close()
            if is_new or not isinstance(error, H5WorkerError):
                raise
            # They were ending, as by an interrupt that all processes got. No batch of an epoch is lost by that.
            _log.warning("workers that persist were started again: %s", str(error))  # what is logged may be kept
            self.give_up(None, error)
            return self._start_workers()
        finally:
            self.worker_init_fn = init.without_memory()
        self._memory = (memory or self._memory) if self.persistent_workers else None
        return batches

    def _forget_workers_that_ended(self) -> None:
        workers = getattr(self, "_iterator", None)
        if workers is not None and not workers.are_well():
            workers.end_at_once()
            self.close()

    def _read(self, tokens: Iterator[BatchToken]) -> ReadAhead | AtHand:
        dataset, is_at_hand = self.dataset, self.dataset.is_at_hand
        most_bytes = TOGETHER_BYTES_MORE if dataset.in_runs or is_at_hand else TOGETHER_BYTES
        together = max(1, min(MOST_TOGETHER, most_bytes // max(1, self.sampler.batch_size * dataset.row_bytes)))
        if self._depth is not None:
            together = max(1, min(together, self._depth // 2))
        elif is_at_hand:
            return AtHand(dataset, self._finish_all, tokens, together, partial(self._read_ahead, together))
        return self._read_ahead(together, tokens)

    def _read_ahead(self, together: int, tokens: Iterator[BatchToken]) -> ReadAhead:
        batch_size, slab = self.sampler.batch_size, self.dataset.rows_per_slab
        ahead = 2 * max(slab, self.dataset.rows_per_run)
        return ReadAhead(
            self.dataset,
            self._finish,
            tokens,
            self._depth or max(DEPTH, 2 * together),
            together=together,
            lookahead=min(MOST_LOOKAHEAD, -(-ahead // batch_size)),
            team=max(1, usable_cores() - 1) if slab else 0,
        )

    def _finish(self, raw: Any, token: BatchToken) -> Any:
        """What a worker process, and torch's pinning thread, would do with what was read."""
        began = perf_counter()
        if self.dataset.has_transforms or token.samples:
            with own_streams(draws := token.draws):
                batch = self.collate_fn(self.dataset.finish(raw, samples=token.samples, draws=draws))
        else:  # nothing of the user's runs, so nothing is drawn
            batch = self.collate_fn(self.dataset.finish(raw))
        self.counters.add(finish_seconds=perf_counter() - began)
        return pin(batch) if self._pins else batch

    def _finish_all(self, raw: RawBatch, tokens: Sequence[BatchToken]) -> Iterator[Any]:
        """The same for batches that were read together; each is finished when it is taken."""
        sizes = [len(token.rows) for token in tokens]
        as_read = self.dataset.gives_as_read and getattr(self.collate_fn, "does_nothing", False)
        if as_read and not self._pins and not tokens[0].samples:
            return raw.split_columns(sizes)
        return map(self._finish, raw.split(sizes), tokens)

    def __getstate__(self) -> dict[str, Any]:
        # Neither threads nor processes travel; they start again where they are needed.
        return self.__dict__ | {"_reading": None, "_iterator": None, "_memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_reading": weakref.WeakSet()})

    def close(self) -> None:
        """Ends reading ahead, so that nobody opens the files again behind the reader's back; and persistent workers."""
        for reading in list(self._reading):
            reading.close()
        if (workers := getattr(self, "_iterator", None)) is not None:
            workers._shutdown_workers()  # as Lightning does; torch does it when the loader is forgotten
            self._iterator = None
            self._n_closed += 1
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def give_up(self, batches: Any, error: BaseException) -> None:
        """Ends an iteration that came to an error, so that the next one can start.

        Args:
            batches: what ``start`` gave; None where that failed.
            error: what came.
        """
        if not self.num_workers:
            if batches is not None:
                batches.close()
            return
        workers = batches if batches is not None else getattr(self, "_iterator", None)
        if workers is not None and (isinstance(error, H5WorkerError) or not isinstance(error, Exception)):
            workers.end_at_once()  # some may be gone, and what they have sent may be half taken
        elif workers is not None:
            workers._shutdown_workers()
        self.close()  # workers that persist too: some may have failed to start as their user wants

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: plain values, less than 4 KiB, whatever the number of rows.

        Without a Trainer it is what was given out. Under a data module's Trainer it is the data module's state.
        """
        kept = self.sampler.kept_state()
        return self.position.as_dict(self.sampler, self._identity) if kept is None else kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken; sets the sampler's epoch. Does nothing under a Trainer.

        Raises:
            H5ResumeError: the state is not one of ours, or does not fit the present data or settings.
        """
        if not self.sampler.is_kept and state:
            self.position.load(state, self.sampler, self._identity)

    @cached_property
    def _identity(self) -> str:
        return self.dataset.identity()


class _LateIterator:
    """Starts the real iteration at the first ``next()``; times each one. After an error it gives errors only."""

    def __init__(self, loader: H5DataLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._plan: EpochPlan
        self._iteration: int
        self._n_closed = 0
        self._step = 0
        self._failed: str | None = None

    def __iter__(self) -> _LateIterator:
        return self

    def __next__(self) -> Any:
        loader, began = self._loader, perf_counter()
        if self._failed is not None:  # else a loop that passes over errors would take the rest for an epoch
            raise H5Error(self._failed)
        is_first = self._batches is None
        try:
            if self._batches is None:
                self._batches, self._plan, self._iteration = loader.start()
                self._n_closed = loader._n_closed
            if self._n_closed != loader._n_closed:  # torch would end the epoch
                raise H5Error(CLOSED)
            batch = next(self._batches)
        except StopIteration:
            loader.position.end(self._iteration, loader.sampler)
            raise
        except BaseException as error:
            self._fail(error)
            raise
        loader.position.advance(self._iteration)
        start, stop = self._plan.bounds(self._step)
        waited = perf_counter() - began
        loader.counters.add_batch(stop - start, waited)
        loader.waits.add(waited)
        if is_first:
            loader.counters.add(start_seconds=waited)
        self._step += 1
        return batch

    def _fail(self, error: BaseException) -> None:
        batches, self._batches = self._batches, None
        if error.args == (CLOSED,):
            self._failed = CLOSED
            return
        text = (str(error).splitlines() or [""])[-1]  # of a worker's error all before that is its traceback
        self._failed = (
            f"the next batch was asked for, and this iteration has ended with an error ({type(error).__name__}: "
            f"{text[:MOST_LETTERS]}). Start a new iteration of the loader: `iter(loader)`."
        )
        self._loader.give_up(batches, error)


class _WorkerInit:
    """What a worker does first; a class, so that it pickles for spawn."""

    def __init__(self, rank: int, user: Callable[[int], None] | None, memory: WorkerMemory | None) -> None:
        self.rank, self.user, self.memory = rank, user, memory
        self.trainer = os.getpid()

    def __call__(self, worker_id: int) -> None:
        end_with(self.trainer)
        start_worker(self.rank)
        if self.memory is not None:
            open_outbox(self.memory, worker_id)
        if self.user is not None:
            self.user(worker_id)

    def without_memory(self) -> _WorkerInit:
        """The same for who keeps it longer than workers live."""
        return _WorkerInit(self.rank, self.user, None)


class _Collate:
    """The user's ``collate_fn``, if any; in a worker, tensors then go into memory that the other side has too."""

    def __init__(self, user: Callable[[Any], Any] | None) -> None:
        self.user = user

    @property
    def does_nothing(self) -> bool:
        """Whether batches stay as they are, outside of workers."""
        return self.user is None

    def __call__(self, data: Any) -> Any:
        batch = data if self.user is None else self.user(data)
        outbox = this_outbox()
        return batch if outbox is None else outbox.packed(batch)


def _let_threads_leave_python() -> None:
    """Waits a moment before workers are forked, where a thread of torch's may be inside the interpreter.

    Before Python 3.11.10 a fork at the instant when another thread enters or leaves the interpreter gives a child
    that hangs for ever (https://github.com/python/cpython/issues/112275; seen here with gloo, whose thread cleans up
    after the collective of the step before). There is nothing to wait for but time.
    """
    if sys.version_info < (3, 11, 10) and torch.distributed.is_available() and torch.distributed.is_initialized():
        sleep(0.05)

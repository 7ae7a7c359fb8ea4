"""One pass over a loader, and the position of loops without a Trainer, which is that of a loader's passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MAX_LETTERS, H5Error, H5ResumeError, listing
from ..order import EpochPlan, PlanSampler, Position
from .prefetch import CLOSED

if TYPE_CHECKING:
    from .loader import H5DataLoader

__all__ = ["Batches", "Iteration", "Passes", "Progress"]


class Batches(Protocol):
    """How batches come to an iteration: read by threads of this process, or by worker processes.

    An implementation that raised an error holds nothing afterwards that would keep another pass from beginning.
    """

    def __next__(self) -> Any:
        """Return the next batch. Raises H5Error if it was closed before the last one."""
        ...

    def close(self) -> None:
        """End the pass; calling it again has no effect."""
        ...


class Iteration:
    """Starts reading at the first ``next()``; times each one. After an error it raises errors only.

    Args:
        loader: what to iterate over.
    """

    def __init__(self, loader: H5DataLoader) -> None:
        self._loader = loader
        self._batches: Batches | None = None
        self._plan: EpochPlan
        self.progress: Progress
        self._failed: str | None = None
        self._is_over = False

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        loader, began = self._loader, perf_counter()
        if self._failed is not None:  # otherwise a loop that ignores errors would take the rest for an epoch
            raise H5Error(self._failed)
        if self._is_over:
            raise StopIteration
        is_first = self._batches is None
        try:
            if self._batches is None:
                self._batches, self._plan, self.progress = loader.start()
                loader.running.add(self)
            batch = self._next_of(self._batches)
        except StopIteration:
            self._batches, self._is_over = None, True
            loader.running.discard(self)
            loader.passes.end(self.progress)
            raise
        except H5Error as error:
            self._fail(error)
            # As `without_frames` does; only a StopIteration of the user's code stays.
            cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else None
            raise error.with_traceback(None) from cause
        except BaseException as error:
            self._fail(error)
            raise
        start, stop = self._plan.bounds(self.progress.n_given)
        loader.passes.advance(self.progress)
        waited = perf_counter() - began
        loader.counters.add_batch(stop - start, waited)
        loader.waits.add(waited)
        if is_first:
            loader.counters.add(start_seconds=waited)
        return batch

    def _next_of(self, batches: Batches) -> Any:
        """Return the next batch; raise StopIteration after the last step of the plan, and never before it."""
        try:
            return next(batches)
        except StopIteration as error:
            n_steps, n_given = self._plan.n_steps, self.progress.n_given
            if n_given == n_steps:
                raise
            raise H5Error(
                f"the epoch has {n_steps} batches left, and none came after {n_given} of them: making the next one "
                "raised StopIteration. Have the code that raised it (see above) raise another error."
            ) from error

    def _fail(self, error: BaseException) -> None:
        batches, self._batches = self._batches, None
        self._loader.running.discard(self)
        if error.args == (CLOSED,):
            self._failed = CLOSED
        else:
            text = (str(error).splitlines() or [""])[-1]  # of a worker's error all before that is its traceback
            self._failed = (
                f"the next batch was asked for, and this iteration has ended with an error ({type(error).__name__}: "
                f"{text[:MAX_LETTERS]}). Start a new iteration of the loader: `iter(loader)`."
            )
        if batches is not None:
            batches.close()


@dataclass(eq=False)
class Progress:
    """The progress of one iteration of a loader.

    Attributes:
        began: the position at which it began.
        first_row: rows of the epoch that were consumed by then.
        n_loaded: positions that were loaded before it began.
        step_rows: rows of a step on all ranks.
        n_given: batches that it has yielded.
    """

    began: Position
    first_row: int
    n_loaded: int
    step_rows: int
    n_given: int = 0

    @property
    def n_rows(self) -> int:
        """Rows of the epoch that are consumed; a last batch that is not full counts as full."""
        return self.first_row + self.step_rows * self.n_given


class Passes:
    """Keeps the position of a loader without a Trainer: that of the iteration which trains.

    Args:
        sampler: the loader's.
    """

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler
        self._last: Progress | None = None  # the one that yielded the last batch
        self._furthest: Progress | None = None  # of the same epoch
        self._loaded_epoch: int | None = None  # until an iteration begins
        self._n_loaded = 0

    def begin(self, epoch: int) -> Progress:
        """Begin an iteration of an epoch.

        Raises:
            H5ResumeError: the rest of another epoch was loaded and would be left out.
        """
        sampler, loaded = self._sampler, self._loaded_epoch
        self._loaded_epoch = None
        if loaded not in (None, epoch) and sampler.epoch_source is None and (left := sampler.plan(loaded).n_steps):
            raise H5ResumeError(
                f"a position in epoch {loaded} was loaded, which has {left} batches left, and an iteration of epoch "
                f"{epoch} was begun. Call loader.sampler.set_epoch({loaded}) first, or do not load the position."
            )
        began = sampler.position(epoch)
        return Progress(began, began.n_rows, self._n_loaded, sampler.batch_size * sampler.replica.world_size)

    def advance(self, one: Progress) -> None:
        """Count one more batch. Batches of an iteration that began before a position was loaded do not count."""
        one.n_given += 1
        if one.n_loaded == self._n_loaded:
            self._last, furthest = one, self._furthest
            if furthest is one:
                return
            if furthest is None or furthest.began.epoch != one.began.epoch or furthest.n_rows < one.n_rows:
                self._furthest = one

    def end(self, one: Progress) -> None:
        """End an iteration: the next one of the same epoch is a whole one again."""
        if self._furthest is one:  # what comes after it is another pass
            self._furthest = None
        if one.n_loaded == self._n_loaded and self._sampler.epoch_source is None:
            self._sampler.restore(None)

    def position(self, running: Iterable[Progress]) -> Position:
        """Return the position of the iteration which yielded the last batch.

        Args:
            running: iterations that began, and neither ended nor failed.

        Raises:
            H5ResumeError: others of the epoch are at other batches, so that it is not known which of them trains.
        """
        epoch, last, furthest = self._sampler.epoch, self._last, self._furthest
        here = [one for one in running if one.n_given and (one.began.epoch, one.n_loaded) == (epoch, self._n_loaded)]
        if last is None or last.began.epoch != epoch:
            last = here[0] if here else None
        if last is None:  # no iteration of it began here
            return self._sampler.position(epoch)
        others = [one for one in here if (one.began, one.n_given) != (last.began, last.n_given)]
        if last not in here and furthest and furthest.began.epoch == epoch and furthest.n_rows > last.n_rows:
            others.append(furthest)
        if others:
            raise H5ResumeError(
                f"the loader's position was asked for, and several of its iterations are at different batches of epoch "
                f"{epoch}: they have yielded {listing(sorted({one.n_given for one in (last, *others)}))}. Which of "
                "them trains is not known. Delete the other iterators, let the training loop take its next batch "
                "first, call loader.sampler.set_epoch(epoch) before each epoch, or look at batches through a loader "
                "of its own."
            )
        return last.began.after(self._sampler, last.n_given)

    def load(self, position: Position) -> None:
        """Continue from a saved position."""
        self._sampler.restore(position)
        self._sampler.resume_epoch(position.epoch)
        self._last = self._furthest = None
        self._n_loaded += 1
        self._loaded_epoch = position.epoch

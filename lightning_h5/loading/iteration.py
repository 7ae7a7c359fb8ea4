"""One pass over a loader, from its first batch on, and how far the passes of a loader have come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MAX_LETTERS, H5Error, H5ResumeError, listing
from ..order import EpochPlan, PlanSampler
from .position import Position, steps_left
from .prefetch import CLOSED

if TYPE_CHECKING:
    from .loader import H5DataLoader

__all__ = ["Batches", "Iteration", "Passes", "Progress"]


class Batches(Protocol):
    """How batches come to an iteration: read by threads of this process, or by worker processes.

    An implementation that raised an error holds nothing afterwards that would keep another pass from beginning.
    """

    def __next__(self) -> Any:
        """The next batch. Raises H5Error if it was closed before the last one."""
        ...

    def close(self) -> None:
        """Ends the pass; calling it again has no effect."""
        ...


class Iteration:
    """Starts reading at the first ``next()``; times each one. After an error it gives errors only.

    Args:
        loader: what to iterate over.
    """

    def __init__(self, loader: H5DataLoader) -> None:
        self._loader = loader
        self._batches: Batches | None = None
        self._plan: EpochPlan
        self.progress: Progress
        self._step = self._n_steps = 0
        self._failed: str | None = None
        self._is_over = False

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        loader, began = self._loader, perf_counter()
        if self._failed is not None:  # else a loop that passes over errors would take the rest for an epoch
            raise H5Error(self._failed)
        if self._is_over:
            raise StopIteration
        is_first = self._batches is None
        try:
            if self._batches is None:
                self._batches, self._plan, self.progress = loader.start()
                self._n_steps = self._plan.n_steps
                loader.running.add(self)
            batch = self._next_of(self._batches)
        except StopIteration:
            self._batches, self._is_over = None, True
            loader.running.discard(self)
            loader.passes.end(self.progress, loader.sampler)
            raise
        except H5Error as error:
            self._fail(error)
            # As `without_frames` does; only a StopIteration of the user's code stays.
            cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else None
            raise error.with_traceback(None) from cause
        except BaseException as error:
            self._fail(error)
            raise
        loader.passes.advance(self.progress)
        start, stop = self._plan.bounds(self._step)
        waited = perf_counter() - began
        loader.counters.add_batch(stop - start, waited)
        loader.waits.add(waited)
        if is_first:
            loader.counters.add(start_seconds=waited)
        self._step += 1
        return batch

    def _next_of(self, batches: Batches) -> Any:
        """The next batch; StopIteration after the last step of the plan, and never before it."""
        try:
            return next(batches)
        except StopIteration as error:
            if self._step == self._n_steps:
                raise
            raise H5Error(
                f"the epoch has {self._n_steps} batches left, and none came after {self._step} of them: making the "
                "next one raised StopIteration. Have the code that raised it (see above) raise another error."
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
    """How far one iteration of a loader is.

    Attributes:
        began: the position at which it began.
        n_loaded: positions that were loaded before it began.
        step_rows: rows of a step on all ranks.
        n_given: batches that it has yielded.
    """

    began: Position
    n_loaded: int
    step_rows: int
    n_given: int = 0

    @property
    def n_rows(self) -> int:
        """Rows of the epoch that were consumed, but for a last batch that is not full."""
        return self.began.n_rows + self.step_rows * self.n_given

    def is_where(self, other: Progress) -> bool:
        """Whether another one has come equally far."""
        return (self.began, self.n_given) == (other.began, other.n_given)


class Passes:
    """Knows which iteration of a loader trains, and its position; for loops without a Trainer."""

    def __init__(self) -> None:
        self._last: Progress | None = None  # that yielded a batch
        self._furthest: Progress | None = None  # of the same epoch
        self._loaded: int | None = None  # an epoch that was loaded, until an iteration goes on with it
        self._n_loaded = 0

    def begin(self, epoch: int, sampler: PlanSampler) -> Progress:
        """Begin an iteration of an epoch.

        Raises:
            H5ResumeError: the rest of another epoch was loaded and would be left out.
        """
        loaded, self._loaded = self._loaded, None
        if loaded not in (None, epoch) and not sampler.is_kept and (left := steps_left(sampler, loaded)):
            raise H5ResumeError(
                f"a position in epoch {loaded} was loaded, which has {left} batches left, and an iteration of epoch "
                f"{epoch} was begun. Call loader.sampler.set_epoch({loaded}) first, or do not load the position."
            )
        step_rows = sampler.batch_size * sampler.replica.world_size
        return Progress(Position.of(sampler, epoch), self._n_loaded, step_rows)

    def advance(self, one: Progress) -> None:
        """Count one more batch. What an iteration yields that began before a position was loaded does not count."""
        one.n_given += 1
        if one.n_loaded == self._n_loaded:
            self._last, furthest = one, self._furthest
            if furthest is None or furthest.began.epoch != one.began.epoch or furthest.n_rows < one.n_rows:
                self._furthest = one

    def end(self, one: Progress, sampler: PlanSampler) -> None:
        """An iteration came to its end: the next one of the same epoch is a whole one again."""
        if self._furthest is one:  # what comes after it is another pass
            self._furthest = None
        if one.n_loaded == self._n_loaded and not sampler.is_kept:
            sampler.forget()

    def position(self, sampler: PlanSampler, running: Iterable[Progress]) -> Position:
        """Return the position of the iteration which yielded the last batch.

        Args:
            sampler: the loader's.
            running: iterations that began, and neither ended nor failed.

        Raises:
            H5ResumeError: others of the epoch are at other batches, so that it is not known which of them trains.
        """
        epoch, last = sampler.epoch, self._last
        here = [one for one in running if one.n_given and (one.began.epoch, one.n_loaded) == (epoch, self._n_loaded)]
        if last is None or last.began.epoch != epoch:
            last = here[0] if here else None
        if last is None:  # no iteration of it began here
            return Position.of(sampler, epoch)
        others = [one for one in here if not last.is_where(one)]
        furthest = self._furthest
        if (
            last not in here
            and furthest is not None
            and furthest.began.epoch == epoch
            and furthest.n_rows > last.n_rows
        ):
            others.append(furthest)
        if others:
            raise H5ResumeError(
                f"the loader's position was asked for, and several of its iterations are at different batches of epoch "
                f"{epoch}: they have yielded {listing(sorted({one.n_given for one in (last, *others)}))}. Which of "
                "them trains is not known. Delete the other iterators, let the training loop take its next batch "
                "first, call loader.sampler.set_epoch(epoch) before each epoch, or look at batches through a loader "
                "of its own."
            )
        return last.began.after(sampler, last.n_given)

    def load(self, position: Position, sampler: PlanSampler) -> None:
        """Takes over a saved position."""
        position.restore(sampler)
        sampler.go_on_from(position.epoch)
        self._last = self._furthest = None
        self._n_loaded += 1
        self._loaded = position.epoch

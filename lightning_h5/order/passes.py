"""The position of a loader without a Trainer: the position of the iteration over it that trains."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import H5ResumeError
from .plan import EpochPlan
from .position import Position
from .samplers import PlanSampler

__all__ = ["Passes", "Progress"]


@dataclass(eq=False)
class Progress:
    """The progress of one iteration of a loader.

    Attributes:
        began: the position at which it began.
        first_row: rows of the epoch that were consumed by then.
        n_loaded: positions that were loaded before it began.
        step_rows: rows of a step on all ranks.
        plan: the plan that it follows, as long as the iteration exists; None in another process.
        position: place of the first row of the last batch in the plan.
        n_given: batches that it has yielded.
        is_complete: whether it has yielded its last batch.
        is_over: whether it was asked for another one after that.
    """

    began: Position
    first_row: int
    n_loaded: int
    step_rows: int
    plan: weakref.ref[EpochPlan] | None = None
    position: int = 0
    n_given: int = 0
    is_complete: bool = False
    is_over: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"plan": None}

    @property
    def n_rows(self) -> int:
        """Rows of the epoch that are consumed; a last batch that is not full counts as full."""
        return self.first_row + self.step_rows * self.n_given


class Passes:
    """Keeps the position of a loader without a Trainer: the position of the iteration that trains.

    Args:
        sampler: the loader's.

    Attributes:
        last: the iteration that yielded the last batch, or came to its end after that.
    """

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler
        self.last: Progress | None = None
        self._furthest: Progress | None = None  # furthest of the earlier iterations of its epoch
        self._loaded_epoch: int | None = None  # until an iteration begins
        self._n_loaded = 0

    def begin(self, epoch: int) -> Progress:
        """Begin an iteration of an epoch.

        Raises:
            H5ResumeError: the rest of another epoch was loaded and would be left out.
        """
        sampler, loaded_epoch = self._sampler, self._loaded_epoch
        self._loaded_epoch = None
        if (
            loaded_epoch not in (None, epoch)
            and sampler.epoch_source is None
            and (n_left := sampler.plan(loaded_epoch).n_steps)
        ):
            raise H5ResumeError(
                f"a position in epoch {loaded_epoch} was loaded, which has {n_left} batches left, but an iteration of "
                f"epoch {epoch} was started. Call loader.sampler.set_epoch({loaded_epoch}) first, or do not load the "
                "position."
            )
        position = sampler.position(epoch)
        return Progress(position, position.n_rows, self._n_loaded, sampler.batch_size * sampler.replica.world_size)

    def switch(self, iteration: Progress) -> None:
        """Note that another iteration yields batches from now on; ignored if it began before a position was loaded."""
        if iteration.n_loaded != self._n_loaded:
            return
        previous, self.last, furthest = self.last, iteration, self._furthest
        if previous is None or previous.is_over:
            return
        if furthest is None or furthest.began.epoch != previous.began.epoch or furthest.n_rows < previous.n_rows:
            self._furthest = previous

    def complete(self, iteration: Progress) -> None:
        """Note that an iteration has yielded its last batch, after which some loops never ask for its end.

        The next iteration is over the next epoch, or over all of the same one if ``set_epoch`` was called.
        """
        if iteration.is_complete:
            return
        iteration.is_complete = True
        if iteration.n_loaded == self._n_loaded and self._sampler.epoch_source is None:
            self._sampler.restore(None)
            self._sampler.complete(iteration.began.epoch)

    def end(self, iteration: Progress) -> None:
        """End an iteration: the next one is another pass."""
        self.complete(iteration)
        iteration.is_over = True
        if self._furthest is iteration or (self._furthest is not None and self._furthest.n_rows < iteration.n_rows):
            self._furthest = None
        if iteration.n_loaded == self._n_loaded:
            self.last = iteration

    def position(self, running: Iterable[Progress]) -> Position:
        """Return the position of the iteration which yielded the last batch.

        After ``set_epoch``, iterations of other epochs are ignored. Before, any unfinished one may be training.

        Args:
            running: iterations that began, and neither ended nor failed.

        Raises:
            H5ResumeError: others are at other batches, so that it is not known which of them trains.
        """
        epoch, counts_passes = self._sampler.epoch, self._sampler.counts_passes
        last, furthest = self.last, self._furthest
        candidates = [iteration for iteration in running if iteration.n_given and iteration.n_loaded == self._n_loaded]
        if not counts_passes:
            candidates = [iteration for iteration in candidates if iteration.began.epoch == epoch]
        if last is None or (last.began.epoch != epoch and not counts_passes):
            last = candidates[0] if candidates else None
        if last is None:  # no iteration of this epoch was started here
            return self._sampler.position(epoch)
        rivals = [
            iteration for iteration in candidates if (iteration.began, iteration.n_given) != (last.began, last.n_given)
        ]
        if last not in candidates and furthest and furthest.began.epoch == last.began.epoch:
            rivals += [furthest] if furthest.n_rows > last.n_rows else []
        if rivals:
            places = sorted({(iteration.began.epoch, iteration.n_given) for iteration in (last, *rivals)})
            raise H5ResumeError(
                "the loader's position was requested, but several of its iterations are at different batches: they "
                f"have yielded {', '.join(f'{n} of epoch {at}' for at, n in places)}. It is unknown which of them "
                "trains. Delete the other iterators, let the training loop take its next batch first, call "
                "loader.sampler.set_epoch(epoch) before each epoch, or look at batches through a loader of its own."
            )
        if counts_passes and last.is_over:
            return self._sampler.position(epoch)
        return last.began.after(self._sampler, last.n_given)

    def load(self, position: Position) -> None:
        """Continue from a saved position."""
        self._sampler.restore(position)
        self._sampler.resume_epoch(position.epoch)
        self.last = self._furthest = None
        self._n_loaded += 1
        self._loaded_epoch = position.epoch

"""Notes of a fit for the run's history: at the first batch of each epoch, and at unexpected steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._lightning import rank_zero_warn
from ..errors import H5ResumeError
from ..order import PlanSampler, Position, RunHistory, Stretch, run_settings
from ..types import Identity
from .trainer_progress import TrainerProgress

__all__ = ["HistoryNotes", "Present"]


class Present(NamedTuple):
    """The state of a fit at the start of a batch.

    Attributes:
        sampler: sampler of the training loader.
        position: the consumed part of the epoch.
        identity: identity of the training data.
    """

    sampler: PlanSampler
    position: Position
    identity: Identity


class HistoryNotes:
    """Keeps the history of a run during a fit. A batch costs a comparison of a few numbers.

    Args:
        history: history of an earlier fit of the same Trainer.
    """

    def __init__(self, history: RunHistory | None = None) -> None:
        self._history = history or RunHistory()
        self._has_begun = False

    @property
    def history(self) -> RunHistory:
        """The history, up to the present batch."""
        return self._history

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the history of a resumed run; None if it has none."""
        try:
            self._history = RunHistory.from_state(state)
        except H5ResumeError as error:
            rank_zero_warn(f"{error} Training continues without it: rows of earlier steps cannot be named.")
            self._history = RunHistory()

    def note(self, progress: TrainerProgress, present: Callable[[], Present | None]) -> None:
        """Note the start of a batch.

        Args:
            progress: counters of the Trainer.
            present: returns the state of the fit; None if the Trainer has other loaders.
        """
        epoch, batch, step = progress.epoch, progress.processed, progress.step
        last = self._history.stretches[-1] if self._history.stretches else None
        if self._has_begun and batch and last is not None:
            if not last.is_known:
                return
            if last.step_before(epoch, batch) == step and last.accumulated == progress.accumulated:
                return
        stretch = self._unknown(progress) or self._stretch(progress, present())
        if stretch is None:
            return
        self._has_begun = True
        if last is None or not last.goes_on_as(stretch):
            self._history = self._history.followed_by(stretch)

    def _unknown(self, progress: TrainerProgress) -> Stretch | None:
        """Return a stretch without known batches of each step; None if the batches are known."""
        if (reason := progress.why_unknown) is None:
            return None
        return Stretch(progress.epoch, progress.processed, progress.step, 0, 0, 0, 0, True, None, {"unknown": reason})

    def _stretch(self, progress: TrainerProgress, present: Present | None) -> Stretch | None:
        """Return the stretch that would begin with the present batch."""
        if present is None:
            return None
        sampler, position, identity = present
        return Stretch(
            progress.epoch,
            progress.processed,
            progress.step,
            sampler.batch_size,
            sampler.num_replicas,
            progress.n_batches,
            progress.accumulated,
            not self._has_begun,
            position.consumed(sampler),
            run_settings(sampler, position.epoch, position.order, identity),
        )

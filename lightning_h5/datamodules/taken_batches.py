"""Count batches for models that take them from an iterator: ``training_step(dataloader_iter)``."""

from __future__ import annotations

from typing import NamedTuple

from ..order import PlanSampler, Position
from .trainer_progress import TrainerProgress

__all__ = ["TakenBatches"]


class _AfterStep(NamedTuple):
    """The loader's position after a step of the Trainer.

    Attributes:
        epoch: of the step.
        processed: batches of the epoch that the Trainer had counted.
        position: of the loader; None if it is unknown.
    """

    epoch: int
    processed: int
    position: Position | None


class TakenBatches:
    """The position of the training loader's own iteration, noted at the end of each step.

    Batches that a step took count as trained on, also if the model keeps some of them for a later step. Batches of a
    step that failed do not count.
    """

    def __init__(self) -> None:
        self._last: _AfterStep | None = None
        self._ended_epoch = -1

    def end_step(self, progress: TrainerProgress, sampler: PlanSampler, epoch: int, begun: Position) -> None:
        """Note the loader's position at the end of a step.

        Args:
            progress: of the Trainer.
            sampler: the loader's.
            epoch: of the step.
            begun: position of the epoch before the loader's first iteration in this fit.
        """
        self._last = _AfterStep(epoch, progress.processed, self._present(progress, sampler, epoch, begun))

    def end_epoch(self, progress: TrainerProgress, epoch: int) -> None:
        """Note that a step found no batch left, which Lightning does not count as the end of a step."""
        if progress.is_exhausted:
            self._ended_epoch = epoch

    @property
    def has_counted(self) -> bool:
        """Whether a step was counted in this fit; Lightning forgets at its end how steps take batches."""
        return self._last is not None

    def has_ended(self, epoch: int) -> bool:
        """Return whether a step found no batch left in an epoch."""
        return self._ended_epoch == epoch

    def position(
        self, progress: TrainerProgress, sampler: PlanSampler, epoch: int, begun: Position, n_before: int
    ) -> Position | None:
        """Return the position after the last step that was not interrupted; None if it is unknown.

        Args:
            progress: of the Trainer.
            sampler: the loader's.
            epoch: of the position.
            begun: position of the epoch before the loader's first iteration in this fit.
            n_before: steps of the epoch that an earlier run counted.
        """
        if progress.processed <= n_before:
            return begun
        if self._last is not None and self._last[:2] == (epoch, progress.processed):
            return self._last.position
        return None if progress.is_in_step else self._present(progress, sampler, epoch, begun)

    def _present(self, progress: TrainerProgress, sampler: PlanSampler, epoch: int, begun: Position) -> Position | None:
        if not progress.is_alone:
            return None
        iteration = progress.iteration_of(sampler)
        if iteration is None or iteration.progress.began.epoch != epoch:
            return begun
        return iteration.progress.began.after(sampler, iteration.progress.n_given)

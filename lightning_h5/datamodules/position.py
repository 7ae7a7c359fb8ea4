"""Where a run is, under a trainer: from its own counter of processed batches, never from counting what was fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import H5ResumeError
from ..loading import Position, extend, position_from, position_state, steps_left
from ..sampling import PlanSampler

__all__ = ["RunPosition"]


class RunPosition:
    """The position of a training run: taken for a checkpoint, and applied when training goes on."""

    def __init__(self) -> None:
        self._pending: Mapping[str, Any] | None = None
        self._restored: Position | None = None
        self._base = 0  # batches of the restored epoch that the trainer had counted when it was restored
        self._epoch: int | None = None  # the epoch whose batches the trainer counts

    def load(self, trainer: Any, state: Mapping[str, Any]) -> None:
        """Takes a saved position; kept for a fit alone, since validating a checkpoint must not move a later run."""
        if state and trainer is not None and trainer.state.fn == "fit":
            self._pending = dict(state)

    def check_applied(self) -> None:
        """Refuses to go on from a position that was loaded and not applied.

        Raises:
            H5ResumeError: there is one.
        """
        if self._pending is not None:
            raise H5ResumeError(
                f"a checkpoint's position (epoch {self._pending.get('epoch')}) was loaded and never applied: training "
                "would repeat rows. Leave SetEpochCallback in trainer.callbacks, or call datamodule.apply_position() "
                "in on_train_start."
            )

    def equip(self, sampler: PlanSampler) -> None:
        """Gives a new sampler what an earlier one was restored to."""
        if self._restored is not None:
            sampler.restore(self._restored.epoch, self._restored.segments, self._restored.order)

    def apply(self, trainer: Any, sampler: PlanSampler, identity: str) -> None:
        """Makes the sampler, and the trainer's counter, go on where the restored position says.

        Raises:
            H5ResumeError: the position does not fit the present data or settings.
        """
        if self._pending is None:
            return
        self._restored = restored = position_from(self._pending, sampler, identity)
        self._pending = None
        self.equip(sampler)
        if restored.finished:
            _begin_next_epoch(trainer, restored.epoch)
            return
        if trainer.current_epoch == restored.epoch + 1:
            _reopen_epoch(trainer)
        if trainer.current_epoch == restored.epoch:
            _move(trainer, len(sampler) - steps_left(sampler, restored.epoch))
            self._base = _processed(trainer)

    def start(self, trainer: Any) -> int:
        """Notes that an iteration begins; gives its epoch. Others may begin beside the training loop's own."""
        self.check_applied()
        self._epoch = int(trainer.current_epoch)
        return self._epoch

    def state(self, trainer: Any, sampler: PlanSampler, identity: str) -> dict[str, Any]:
        """The position as plain values."""
        if self._pending is not None:
            return dict(self._pending)
        restored = self._restored
        if self._epoch is None:
            epoch = int(trainer.current_epoch) if restored is None else restored.epoch
            finished = restored is not None and restored.finished
            return position_state(sampler, epoch, sampler.consumed(epoch), identity, finished=finished)
        base = self._base if restored is not None and self._epoch == restored.epoch else 0
        world_size = sampler.replica.world_size
        n_batches = (_processed(trainer) - base) * world_size
        segments = extend(sampler.consumed(self._epoch), sampler.batch_size, world_size, n_batches)
        finished = _processed(trainer) >= trainer.num_training_batches
        return position_state(sampler, self._epoch, segments, identity, finished=finished)


def _processed(trainer: Any) -> int:
    """Batches of the running epoch whose training step is done.

    Not ``completed``, which lags behind while batch-end callbacks save; not ``ready``, which counts a batch
    whose step then fails.
    """
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def _move(trainer: Any, processed: int) -> None:
    """Sets the trainer's counter: under another world size or batch size the same rows are other batches."""
    delta = processed - _processed(trainer)
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed") if delta else ():
        setattr(current, name, getattr(current, name) + delta)


def _reopen_epoch(trainer: Any) -> None:
    """Goes back into an epoch that was broken off by ``max_steps``, and that the trainer counted as done."""
    loop = trainer.fit_loop
    for counts in (loop.epoch_progress.total, loop.epoch_progress.current):
        counts.processed = counts.completed = counts.started - 1
    loop.restarting = True  # hands on to the loops inside that their counts are to be kept
    if hasattr(loop, "update_restart_stage"):  # Lightning 2.5 and newer
        loop.update_restart_stage()


def _begin_next_epoch(trainer: Any, finished: int) -> None:
    """Keeps a trainer that counts by ``max_steps`` from passing once through the finished epoch, and counting it."""
    if trainer.current_epoch == finished + 1:
        trainer.fit_loop.epoch_loop.restarting = False

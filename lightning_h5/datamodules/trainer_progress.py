"""The Trainer's own counters, in attributes of its loops that Lightning does not document."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from .._lightning import PACKAGE, training_loaders
from ..errors import H5ResumeError

__all__ = [
    "begin_epoch_again",
    "begin_next_epoch",
    "cycles",
    "end_epoch",
    "epoch_of_batches",
    "has_loader",
    "is_alone",
    "is_interrupted",
    "loaders",
    "processed",
    "resume_epoch",
    "set_batch_count",
    "sync_counters",
]

F = TypeVar("F", bound=Callable[..., Any])


def _counters(function: F) -> F:
    """Name the version in the error if a later one keeps its counters elsewhere."""

    @wraps(function)
    def checked(trainer: Any, *arguments: Any) -> Any:
        try:
            return function(trainer, *arguments)
        except AttributeError as error:
            raise H5ResumeError(
                f"the position of training was asked of {PACKAGE}, and this version of it does not keep its counters "
                f"where lightning_h5 looks for them ({error}). Install a version that lightning_h5 allows."
            ) from error

    return checked  # type: ignore[return-value]


@_counters
def processed(trainer: Any) -> int:
    """Return the batches of the running epoch whose training step is done.

    Not ``completed``, which lags behind while batch-end callbacks save; not ``ready``, which counts a batch
    whose step then fails.
    """
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


@_counters
def sync_counters(trainer: Any) -> None:
    """Make the restored counters of batches agree with each other.

    A batch that was begun and not done when the checkpoint was saved is not done; one whose callbacks had not all run
    is done. Otherwise Lightning mistakes a later stop for another kind of stop, and loses or repeats a batch.
    """
    loop = trainer.fit_loop.epoch_loop
    if getattr(loop, "restarted_on_train_batch_end", False):  # Lightning 2.5 and newer will do it
        return
    for counts in (loop.batch_progress.total, loop.batch_progress.current):
        counts.ready = counts.started = counts.completed = counts.processed


@_counters
def set_batch_count(trainer: Any, batches: int) -> None:
    """Set the counter of batches: under another world size or batch size the same rows are other batches."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    delta = batches - processed(trainer)
    for name in ("ready", "started", "processed", "completed") if delta else ():
        setattr(current, name, getattr(current, name) + delta)


@_counters
def begin_epoch_again(trainer: Any) -> None:
    """Make the interrupted epoch start over."""
    sync_counters(trainer)
    set_batch_count(trainer, 0)
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False  # as Lightning had it, if that one failed


@_counters
def epoch_of_batches(trainer: Any) -> int:
    """Return the epoch whose batches the trainer has counted; between two epochs it is the one before."""
    progress = trainer.fit_loop.epoch_progress.current
    is_running = progress.started > progress.completed
    return int(progress.completed) if is_running else max(0, int(progress.completed) - 1)


@_counters
def is_interrupted(trainer: Any) -> bool:
    """Return whether the last epoch was left in its middle; also in its last batch, which Lightning counts as begun."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_done = progress.is_last_batch and progress.current.processed >= progress.current.ready
    return processed(trainer) > 0 and not is_done


@_counters
def resume_epoch(trainer: Any, epoch: object) -> None:
    """Go back into an epoch that ``max_steps`` interrupted, if the trainer counted it as done."""
    loop = trainer.fit_loop
    if trainer.current_epoch - 1 != epoch:
        return
    for counts in (loop.epoch_progress.total, loop.epoch_progress.current):
        counts.processed = counts.completed = counts.started - 1
    loop.restarting = True  # makes the inner loops keep their counts
    if hasattr(loop, "update_restart_stage"):  # Lightning 2.5 and newer
        loop.update_restart_stage()


@_counters
def end_epoch(trainer: Any) -> None:
    """Count the interrupted epoch as done."""
    progress = trainer.fit_loop.epoch_progress
    for counts in (progress.total, progress.current):
        counts.ready = counts.started = counts.processed = counts.completed = counts.processed + 1


@_counters
def begin_next_epoch(trainer: Any, finished: int) -> None:
    """Begin the epoch after a finished one as any other.

    Otherwise a trainer that counts by ``max_steps`` passes through the finished epoch once more, and one whose
    checkpoint was saved in the last batch's callbacks does not count that the next epoch began.
    """
    loop = trainer.fit_loop
    if trainer.current_epoch != finished + 1:
        return
    loop.epoch_loop.restarting = False
    if hasattr(loop, "reset_restart_stage") and not loop.restarted_on_epoch_start:  # Lightning 2.5 and newer
        loop.reset_restart_stage()


@_counters
def has_loader(trainer: Any) -> bool:
    """Return whether the trainer has made its training loader: what is iterated before is not for training."""
    return trainer.fit_loop._combined_loader is not None


loaders = _counters(training_loaders)


@_counters
def is_alone(trainer: Any) -> bool:
    """Return whether the training loader is one loader, so that a batch of the trainer is a batch of ours."""
    return len(loaders(trainer)) <= 1


@_counters
def cycles(trainer: Any) -> bool:
    """Return whether loaders that are shorter than others begin again within an epoch."""
    return not is_alone(trainer) and trainer.fit_loop._combined_loader._mode == "max_size_cycle"

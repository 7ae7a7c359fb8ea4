"""The Trainer's own counters, in attributes of its loops that Lightning does not document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._lightning import PACKAGE, training_loaders
from ..errors import H5ResumeError
from ..loading import Iteration
from ..order import PlanSampler

__all__ = ["TrainerProgress"]


class TrainerProgress:
    """The counters of a Trainer's fit.

    Args:
        trainer: the Trainer.

    Raises:
        H5ResumeError: this version of Lightning keeps its counters elsewhere.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        try:
            self._loop, self._inner = trainer.fit_loop, trainer.fit_loop.epoch_loop
            self._epochs, self._batches = self._loop.epoch_progress, self._inner.batch_progress
            self._combined, self._fetcher = self._loop._combined_loader, self._loop._data_fetcher
            self.loaders = training_loaders(trainer)
        except AttributeError as error:
            raise H5ResumeError(
                f"the position of training cannot be read: this version of {PACKAGE} does not keep its counters where "
                f"lightning_h5 expects them ({error}). Install a version that lightning_h5 supports."
            ) from error

    @property
    def processed(self) -> int:
        """Batches of the running epoch that were trained on.

        Not ``completed``, which lags behind while batch-end callbacks save; not ``ready``, which counts a batch
        before its step may fail.
        """
        return int(self._batches.current.processed)

    @property
    def epoch(self) -> int:
        """The running epoch, from 0."""
        return int(self._trainer.current_epoch)

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far: ``trainer.global_step``."""
        return int(self._trainer.global_step)

    @property
    def n_batches(self) -> int:
        """Batches of an epoch, as limited by the Trainer."""
        return int(self._trainer.num_training_batches)

    @property
    def accumulated(self) -> int:
        """Batches of an optimizer step."""
        return int(self._trainer.accumulate_grad_batches)

    @property
    def why_unknown(self) -> str | None:
        """A key of ``order.history.REASONS`` if the batches of a step cannot be determined; None if they can."""
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            return "manual"
        if self.hands_iterator:
            return "iterator"
        if not self.is_alone:
            return "several"
        if self.processed >= self.n_batches:
            return "beyond"
        accumulates_itself = trainer.strategy.handles_gradient_accumulation and self.n_batches % self.accumulated
        return "strategy" if accumulates_itself else None

    def sync(self) -> None:
        """Make the restored counters of batches agree with each other.

        A batch that was begun and not done when the checkpoint was saved is not done; one with callbacks left to run
        is done. Otherwise Lightning mistakes a later stop for another kind of stop, and loses or repeats a batch.
        """
        if getattr(self._inner, "restarted_on_train_batch_end", False):  # Lightning 2.5 and newer do it themselves
            return
        for counts in (self._batches.total, self._batches.current):
            counts.ready = counts.started = counts.completed = counts.processed

    def set_batch_count(self, batches: int) -> None:
        """Set the counter of batches: under another world size or batch size the same rows are other batches."""
        current, delta = self._batches.current, batches - self.processed
        for name in ("ready", "started", "processed", "completed") if delta else ():
            setattr(current, name, getattr(current, name) + delta)

    def begin_epoch_again(self) -> None:
        """Make the interrupted epoch start over."""
        self.sync()
        self.set_batch_count(0)
        self._batches.is_last_batch = False  # Lightning's own value if the last batch failed

    def begin_validation_again(self) -> None:
        """Make an interrupted validation visit all rows.

        Lightning counts the batches of its first part, but restores neither their metrics nor the loader's position.
        """
        self._inner.val_loop.batch_progress.current.reset()

    @property
    def epoch_of_batches(self) -> int:
        """The epoch of the batches that the trainer has counted; between two epochs it is the one before."""
        epochs = self._epochs.current
        return int(epochs.completed) if epochs.started > epochs.completed else max(0, int(epochs.completed) - 1)

    def is_open(self, epoch: int) -> bool:
        """Return whether an epoch was begun and is not counted as done."""
        epochs = self._epochs.current
        return int(epochs.started) == epoch + 1 and int(epochs.processed) == epoch

    @property
    def is_interrupted(self) -> bool:
        """Whether the last epoch was left in its middle; also in its last batch, which Lightning counts as begun."""
        return self.processed > 0 and not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether the last batch of an epoch was done, or the model skipped the rest (``on_train_batch_start``)."""
        return self.processed > 0 and bool(self._batches.is_last_batch) and not self.is_in_step

    @property
    def is_in_step(self) -> bool:
        """Whether a step began and was not done: it runs, or failed."""
        return int(self._batches.current.ready) > self.processed

    def resume_epoch(self, epoch: object) -> None:
        """Go back into an epoch that ``max_steps`` interrupted, if the trainer counted it as done."""
        if self._trainer.current_epoch - 1 != epoch:
            return
        for counts in (self._epochs.total, self._epochs.current):
            counts.processed = counts.completed = counts.started - 1
        self._loop.restarting = True  # inner loops then keep their counts
        if hasattr(self._loop, "update_restart_stage"):  # Lightning 2.5 and newer
            self._loop.update_restart_stage()

    def trains_again_in(self, epoch: int) -> bool:
        """Return whether Lightning would train on one more batch of a finished epoch, which it restarts.

        Lightning 2.4 does so after a checkpoint from the callbacks of the last batch, unless a validation is due: that
        runs in place of the batch. Lightning 2.5 and newer count the epoch as done.
        """
        if hasattr(self._loop, "update_restart_stage") or self._trainer.current_epoch != epoch:
            return False
        return bool(self._inner.restarting and not self._inner._should_check_val_fx(self._fetcher))

    def end_epoch(self) -> None:
        """Count the interrupted epoch as done."""
        for counts in (self._epochs.total, self._epochs.current):
            counts.ready = counts.started = counts.processed = counts.completed = counts.processed + 1

    def begin_next_epoch(self, finished: int) -> None:
        """Begin the epoch after a finished one as any other.

        Otherwise a trainer that counts by ``max_steps`` passes through the finished epoch once more, and after a
        checkpoint from the last batch's callbacks it does not count that the next epoch began.
        """
        if self._trainer.current_epoch != finished + 1:
            return
        self._inner.restarting = False
        if hasattr(self._loop, "reset_restart_stage") and not self._loop.restarted_on_epoch_start:  # Lightning 2.5
            self._loop.reset_restart_stage()

    def goes_on_after(self, epoch: int, n_left: int) -> bool:
        """Return whether another epoch follows, from the same loader.

        Early stopping and other ends that are decided later are not known.

        Args:
            epoch: the epoch that starts now.
            n_left: number of batches that the trainer takes of this epoch.
        """
        trainer, loop = self._trainer, self._loop
        reload_every = trainer.reload_dataloaders_every_n_epochs
        is_reloaded = reload_every and epoch + 1 - loop._last_train_dl_reload_epoch >= reload_every
        is_last = loop.max_epochs is not None and loop.max_epochs != -1 and epoch + 1 >= loop.max_epochs
        n_steps = self._inner.global_step + -(-n_left // trainer.accumulate_grad_batches)
        is_last = is_last or (loop.max_steps != -1 and n_steps >= loop.max_steps)
        return self.is_alone and not (is_reloaded or is_last)

    @property
    def has_loader(self) -> bool:
        """Whether the trainer has made its training loader: what is iterated before is not for training."""
        return self._loop._combined_loader is not None

    @property
    def is_alone(self) -> bool:
        """Whether the training loader is one loader, so that a batch of the trainer is a batch of ours."""
        return len(self.loaders) <= 1

    @property
    def hands_iterator(self) -> bool:
        """Whether steps take batches themselves, as many as they like: ``training_step(dataloader_iter)``."""
        return type(self._fetcher).__name__ == "_DataLoaderIterDataFetcher"

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches of the epoch were taken."""
        return bool(getattr(self._fetcher, "done", False))

    def set_fetched(self, batches: int) -> None:
        """Set the number of batches that were taken, by which Lightning knows the last one."""
        if self._fetcher is not None:
            self._fetcher.fetched = batches
            self._fetcher.done = self._fetcher.length is not None and batches >= self._fetcher.length

    def iteration_of(self, sampler: PlanSampler) -> Iteration | None:
        """Return the training iteration of the loader with a sampler; None if it has not begun or is gone."""
        for iteration in self._iterations:
            if isinstance(iteration, Iteration) and iteration.has_begun and iteration.sampler is sampler:
                return iteration
        return None

    def takes_from(self, iteration: object) -> bool:
        """Return whether an iteration over the only loader is the trainer's own."""
        return self.is_alone and any(one is iteration for one in self._iterations)

    @property
    def _iterations(self) -> Sequence[Any]:
        return getattr(getattr(self._combined, "_iterator", None), "iterators", None) or []

    @property
    def cycles(self) -> bool:
        """Whether loaders that are shorter than others begin again within an epoch."""
        return not self.is_alone and self._loop._combined_loader._mode == "max_size_cycle"

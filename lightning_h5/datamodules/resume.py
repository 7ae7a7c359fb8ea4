"""The position of a run under a Trainer: from its own counter of processed batches, never from counting fetches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from .._lightning import Checkpoint, rank_zero_info, rank_zero_warn, takes_loaders_from
from ..callbacks import H5StatsMonitor, SetEpochCallback
from ..distributed import exchange
from ..errors import H5Error, H5ResumeError, H5ValueError, short_repr
from ..loading import H5DataLoader
from ..order import Mode, OtherShardsError, PlanSampler, Position, RunHistory, is_position, saved_mode
from ..types import Identity
from .arguments import Split
from .loaders import MakesLoaders
from .run_history import HistoryNotes, Present
from .taken_batches import TakenBatches
from .trainer_progress import TrainerProgress

__all__ = ["KeepsPosition", "RunPosition", "is_running"]

OF_THE_DATA = (
    *("train_path", "mixture", "x_key", "y_key", "fields", "table", "split", "where", "label", "valid_mask"),
    *("sample", "segments", "window", "patch", "select", "shuffle", "weights", "seed", "drop_last"),
)
"""Arguments that define the training samples and their order."""


class RunPosition:
    """The position of one fit: saved in checkpoints, and applied when training resumes.

    A checkpoint's state is *loaded*, then *checked* against the data and *applied* when training starts; from then on
    the trainer's counters hold the position of the run. Iterations that callbacks begin read it and change nothing.

    Args:
        trainer: the trainer of the fit; None before there is one.
        history: history of an earlier fit of this trainer.

    Attributes:
        notes: notes for the run's history.
    """

    def __init__(self, trainer: Any = None, history: RunHistory | None = None) -> None:
        self.notes = HistoryNotes(history)
        self._trainer = None if trainer is None else weakref.ref(trainer)
        self._pending: Mapping[str, Any] | None = None
        self._restored: Position | None = None
        self._left = 0  # remaining steps of the restored epoch at the time of restoring
        self._base = 0  # batches of this epoch that the trainer had counted by then
        self._taken = TakenBatches()
        self._n_fetched: int | None = None  # batches of the restored epoch, until its first step
        self._is_resumed = False  # whether a checkpoint was loaded
        self.is_applied = False
        self.is_over = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trainer": None}  # spawned ranks get their own trainer

    @property
    def trainer(self) -> Any:
        """The trainer of the fit; None once it was deleted."""
        return None if self._trainer is None else self._trainer()

    @property
    def _progress(self) -> TrainerProgress:
        return TrainerProgress(self.trainer)

    @property
    def saved(self) -> str | None:
        """A digest of the saved position; None if none was loaded."""
        return None if self._pending is None else str(self._pending.get("digest"))

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of the order that is resumed: one, or of each source of a mixture; none without a run."""
        if self._restored is not None:
            order = self._restored.order
            return tuple(source.mode for source in order.sources) or (order.mode,)
        saved = (self._pending or {}).get("order")
        if not isinstance(saved, Mapping):  # none, or damaged, which is found when it is checked
            return ()
        return tuple(saved_mode(source[0]) for source in saved.get("sources", ())) or (saved_mode(saved["mode"]),)

    @property
    def is_unused(self) -> bool:
        """Whether an interrupted epoch was loaded, but training never reached it."""
        return self._pending is not None and not self._pending.get("finished") and bool(self._pending.get("segments"))

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position.

        No effect after training has started: a tuner then restores its own state, and the counters are correct.
        """
        self._is_resumed = True
        if state and not self.is_applied:
            self._pending = dict(state)
            self.notes.load(self._pending.get("history"))

    def find(self, checkpoint: Mapping[str, Any]) -> str | None:
        """Restore the position that a data module with another class name saved, if there is exactly one.

        Returns:
            The name in the checkpoint.
        """
        self._is_resumed = True
        names = [name for name, value in checkpoint.items() if is_position(value)]
        if self._pending is not None or len(names) != 1:
            if self._pending is None and not self.is_applied:
                self.notes.load(None)
            return None
        self.load(checkpoint[names[0]])
        return names[0]

    def resume_last_epoch(self) -> None:
        """Make the trainer resume an epoch that ``max_steps`` interrupted, which it counts as done.

        Without this it would end at once if that epoch is the last one.
        """
        if self._pending is not None and self._pending.get("finished") is False:
            self._progress.resume_epoch(self._pending.get("epoch"))

    def check(self, sampler: PlanSampler, identity: Identity) -> None:
        """Check that training can continue from the checkpoint.

        Raises:
            H5ResumeError: the checkpoint has no position, or a position that does not fit the present data or settings.
        """
        trainer, progress = self.trainer, self._progress
        if self._pending is not None:
            self._restored = restored = Position.from_state(self._pending, sampler, identity)
            if trainer.current_epoch not in (restored.epoch, restored.epoch + 1):
                raise H5ResumeError(
                    f"the checkpoint's position is in epoch {restored.epoch}, but its trainer is in epoch "
                    f"{trainer.current_epoch}; they do not belong together. Resume from another checkpoint."
                )
            if (processed := self._pending.get("processed", progress.processed)) != progress.processed:
                raise H5ResumeError(
                    f"the checkpoint's position is after {processed} batches of an epoch, but its trainer had trained "
                    f"on {progress.processed}; they do not belong together: another Trainer was fitted with the same "
                    "data module before the checkpoint was saved. Resume from one that was saved during the fit."
                )
            if self._pending.get("is_unknown") and not restored.finished:
                raise H5ResumeError(
                    "the batches that the interrupted epoch was trained on are unknown: training_step takes them "
                    "from dataloader_iter, and there are several loaders, or SetEpochCallback was not in "
                    "trainer.callbacks. Resume from a checkpoint that was saved at an epoch's end. Or pass "
                    "distributed={'on_resume_mismatch': 'restart_epoch'} to the data module: weights and counters are "
                    "restored, and the interrupted epoch starts over."
                )
            change = restored.change_of_batches(sampler.batch_size, sampler.replica.world_size)
            if change and not progress.is_alone:
                raise H5ResumeError(
                    f"{change} and a second loader, whose batches cannot be split differently. Resume with the saved "
                    "batch_size and number of ranks."
                )
        elif progress.is_interrupted and not self._is_resumed:
            rank_zero_warn(
                f"the previous fit of this Trainer stopped after {progress.processed} batches of an epoch; this fit "
                "starts a new epoch. Pass ckpt_path to resume with the remaining rows."
            )
        elif progress.is_interrupted:
            raise H5ResumeError(
                f"the checkpoint was saved after {progress.processed} batches of an epoch, and holds no position of "
                "this data module: the rows that were trained on are unknown. Resume from a checkpoint that was saved "
                "with this data module, or at an epoch's end. Or pass "
                "distributed={'on_resume_mismatch': 'restart_epoch'} to it: "
                "weights and counters are restored, and the interrupted epoch starts over."
            )

    def apply(self, sampler: PlanSampler) -> None:
        """Make the sampler, and the trainer's counter, continue from the position that was checked."""
        self.is_applied, self._pending = True, None
        self._progress.begin_validation_again()
        restored = self._restored
        if restored is None:
            return
        trainer, progress = self.trainer, self._progress
        if text := restored.change_of_nodes(sampler):
            rank_zero_info(text)
        sampler.continue_from(restored)
        progress.sync()
        if restored.finished:
            # Stopped in the validation at its end; in batches of another size Lightning would train on one more.
            is_stopped = progress.is_open(restored.epoch) and progress.processed != progress.n_batches
            if (progress.is_alone and is_stopped) or progress.trains_again_in(restored.epoch):
                progress.end_epoch()
            progress.begin_next_epoch(restored.epoch)
            return
        progress.resume_epoch(restored.epoch)
        sampler.restore(restored)
        self._left = sampler.plan(restored.epoch).n_steps
        if not self._left and not sampler.drop_last:
            n_left = sampler.n_left(restored.epoch)
            rank_zero_info(f"{n_left} rows of epoch {restored.epoch} are left, fewer than ranks, and are skipped")
        n_done = len(sampler) - self._left
        if not progress.is_alone:
            n_done = progress.processed
        elif n_done < trainer.num_training_batches:
            if progress.hands_iterator:
                self._n_fetched, n_done = n_done, min(n_done, progress.processed)  # the latter are steps
            progress.set_batch_count(n_done)
        else:  # counted in batches of the present size, the epoch has reached its limit
            self._restored = replace(restored, finished=True)
            progress.end_epoch()
            progress.begin_next_epoch(restored.epoch)
        self._base = n_done

    def restart(self, reason: H5ResumeError) -> None:
        """Start the interrupted epoch over, as requested for positions that cannot be used."""
        trainer, progress = self.trainer, self._progress
        rank_zero_warn(f"epoch {trainer.current_epoch} starts over: {reason}")
        if self._pending is not None and self._pending.get("finished") is True:
            progress.begin_next_epoch(trainer.current_epoch - 1)
        elif progress.is_interrupted:
            progress.begin_epoch_again()
        self._pending = self._restored = None

    def start(self, sampler: PlanSampler) -> int:
        """Restore the position of a sampler at the start of its iteration, and return the epoch.

        Raises:
            H5ResumeError: training resumes from a checkpoint, and its position was not applied.
        """
        trainer = self.trainer
        epoch = int(trainer.current_epoch)
        if not self.is_applied and self._is_resumed and self._progress.has_loader:
            raise H5ResumeError(
                "a batch was requested after a checkpoint was loaded, but before its position was applied: training "
                "would repeat rows. Leave SetEpochCallback in trainer.callbacks. To look at a batch first, do it in "
                "on_train_start. If a batch size or learning rate finder runs in this fit, run it before, without "
                "ckpt_path."
            )
        restored, progress = self._restored_in(epoch), self._progress
        if restored is not None and progress.processed - self._base >= self._left and progress.cycles:
            restored = None  # another loader is longer: ours starts over with all rows
        sampler.restore(restored)
        if self._restored is not None:  # the loader may be a new one
            sampler.continue_from(self._restored)
        return epoch

    def goes_on_after(self, epoch: int, sampler: PlanSampler) -> bool:
        """Return whether the trainer is sure to train another epoch from the same loader, unless it is stopped."""
        return self._progress.goes_on_after(epoch, self.n_taken(epoch, sampler))

    def n_taken(self, epoch: int, sampler: PlanSampler) -> int:
        """Return the batches that the trainer takes of an epoch that starts now, or next."""
        n_before = self._base if self._restored_in(epoch) is not None else 0
        # Infinitely many before the trainer has made its loader.
        return int(min(sampler.plan(epoch).n_steps, self.trainer.num_training_batches - n_before))

    def takes_from(self, iteration: object) -> bool:
        """Return whether an iteration over the loader is the trainer's own, which counts the batches of an epoch."""
        return self._progress.takes_from(iteration)

    @property
    def hands_iterator(self) -> bool:
        """Whether steps take batches themselves, so that the trainer does not count them."""
        return self._progress.hands_iterator

    def begin_step(self, present: Callable[[], Present | None]) -> None:
        """Note the step; and correct Lightning's count of fetched batches at the first one after a resume.

        Lightning took one batch for each step.

        Args:
            present: see ``HistoryNotes.note``.
        """
        progress = self._progress
        if self._n_fetched is not None:
            progress.set_fetched(self._n_fetched)
            self._n_fetched = None
        self.notes.note(progress, present)

    def before_batch(self, sampler: PlanSampler) -> Position:
        """Return the consumed part of the running epoch when a batch begins."""
        progress = self._progress
        begun = self._begun(progress.epoch, sampler)
        n_before = self._base if self._restored_in(progress.epoch) is not None else 0
        return begun.after(sampler, progress.processed - n_before)

    def end_step(self, sampler: PlanSampler) -> None:
        """Note the loader's position, if steps take batches themselves."""
        epoch = int(self.trainer.current_epoch)
        self._taken.end_step(self._progress, sampler, epoch, self._begun(epoch, sampler))

    def end_epoch(self) -> None:
        """Note the end of an epoch, if steps take batches themselves."""
        self._taken.end_epoch(self._progress, int(self.trainer.current_epoch))

    def state(self, sampler: PlanSampler, identity: Identity) -> dict[str, Any]:
        """Return the position as plain values, with the history of the run."""
        if self._pending is not None:
            return dict(self._pending)
        history = self.notes.history if self.is_applied else RunHistory()  # without the callback, there are no notes
        notes = {"history": history.state(), "processed": self._progress.processed}
        return self._position_state(sampler, identity) | notes

    def _position_state(self, sampler: PlanSampler, identity: Identity) -> dict[str, Any]:
        trainer, progress, restored = self.trainer, self._progress, self._restored
        epoch = progress.epoch_of_batches
        if restored is not None and trainer.current_epoch == restored.epoch:
            epoch = restored.epoch
        if restored is not None and restored.finished and epoch == restored.epoch:
            return restored.state(sampler, identity)
        begun, left, n_steps = self._begun(epoch, sampler), len(sampler), progress.processed
        if self._restored_in(epoch) is not None:
            left, n_steps = self._left, n_steps - self._base
        finished = 0 < trainer.num_training_batches <= progress.processed or (progress.is_done and n_steps > 0)
        if self._taken.has_counted or progress.hands_iterator:
            position = self._taken.position(progress, sampler, epoch, begun, progress.processed - n_steps)
            finished = finished or self._taken.has_ended(epoch)
            state = replace(position or begun, finished=finished).state(sampler, identity)
            return state if position is not None else state | {"is_unknown": True}
        if n_steps >= left and progress.cycles:
            begun, n_steps, left = replace(begun, segments=()), (n_steps - left) % len(sampler), len(sampler)
        return replace(begun.after(sampler, min(n_steps, left)), finished=finished).state(sampler, identity)

    def _begun(self, epoch: int, sampler: PlanSampler) -> Position:
        """Return the position at which this fit began an epoch."""
        return self._restored_in(epoch) or Position(epoch, (), sampler.order_in_epoch(epoch))

    def _restored_in(self, epoch: int) -> Position | None:
        """Return the restored position if it is in the middle of an epoch."""
        restored = self._restored
        return restored if restored and not restored.finished and epoch == restored.epoch else None


class KeepsPosition(MakesLoaders):
    """A data module that keeps the position of the run.

    Args:
        arguments: the constructor's arguments by name.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self._identities: dict[Split, Identity] = {}
        self._train_loader: H5DataLoader | None = None
        self._position = RunPosition()
        self._loaded_history: Mapping[str, Any] | None = None
        self._saved_settings: Mapping[str, Any] = {}  # of the data module that saved the checkpoint

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_train_loader": None}

    @property
    def is_attached(self) -> bool:
        """Whether a trainer keeps epoch and position: from the start of a fit to its end."""
        trainer = self._run().trainer
        return trainer is not None and not self._position.is_over and trainer.state.fn == "fit"

    @property
    def is_bystander(self) -> bool:
        """Whether the present run of the trainer uses other loaders; Lightning calls this module's hooks anyway."""
        return is_running(self.trainer) and not takes_loaders_from(self.trainer, self)

    @property
    def is_in_a_fit(self) -> bool:
        """Whether a trainer trains from this data module now."""
        return _is_fitting(self._position.trainer) and not self._position.is_over

    def start_epoch(self, sampler: PlanSampler) -> int | None:
        """Return the trainer's epoch, for an iteration that starts now; None if no trainer trains.

        Raises:
            H5ResumeError: a position was loaded and not applied.
        """
        return self._position.start(sampler) if self.is_attached else None

    def next_epoch(self, sampler: PlanSampler, epoch: int) -> int | None:
        """Return the epoch that a trainer is sure to train after one that starts now, unless it is stopped."""
        if not self.is_attached or sampler is not self._training_sampler():
            return None
        return epoch + 1 if self._position.goes_on_after(epoch, sampler) else None

    def n_taken(self, sampler: PlanSampler, epoch: int, iteration: object) -> int | None:
        """Return the batches of an epoch that a trainer takes, if its own iteration leaves it early; None for all."""
        position = self._position
        if not (self.is_attached and sampler is self._training_sampler() and position.takes_from(iteration)):
            return None
        n_taken = position.n_taken(epoch, sampler)
        return n_taken if 0 < n_taken < sampler.plan(epoch).n_steps else None

    def kept_modes(self) -> tuple[Mode, ...]:
        """See ``MakesLoaders.kept_modes``."""
        return self._position.modes

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training as plain values, less than 4 KiB for any number of rows."""
        sampler = self._training_sampler()
        if self._position.trainer is None or sampler is None:
            return {}
        return self._position.state(sampler, self._identity())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position, which a fit applies when training starts; without a fit, only the run's history."""
        if _is_fitting(self.trainer):
            self._run().load(state_dict)
            self._load_ledger(state_dict)
            self._insert_callbacks()  # also if a subclass skipped our setup
        else:
            self._loaded_history = state_dict.get("history")

    @property
    def run_history(self) -> RunHistory:
        """The history of the run: of the last fit, or of the checkpoint that was loaded without a fit.

        Raises:
            H5ResumeError: the checkpoint's history is damaged.
        """
        history = self._position.notes.history
        return history if history.stretches else RunHistory.from_state(self._loaded_history)

    def find_position(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the position that a data module with another class name saved, which Lightning ignores."""
        self._saved_settings = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY) or {}
        if _is_fitting(self.trainer) and (name := self._run().find(checkpoint)):
            self._load_ledger(checkpoint[name])
            self._log_once(
                f"a data module {name!r} saved this checkpoint; {type(self).__name__} continues from its position"
            )

    def apply_position(self) -> None:
        """Continue from the restored position; called when training starts, and without effect after that.

        Raises:
            H5ResumeError: the position does not fit the present data or settings, or the checkpoint has none; on all
                ranks with the same text.
        """
        run, sampler = self._run(), self._training_sampler()
        if sampler is None or run.is_applied or run.trainer is None:
            return
        failure: H5ResumeError | None = None
        raises = self._options.distributed.on_resume_mismatch == "raise"
        with exchange("resuming", self._options.distributed.setup_timeout, self._is_alone()) as all_ranks:
            try:
                run.check(sampler, self._identity())
            except H5ResumeError as error:
                error.args = (f"{error}{self._changed_settings()}",)
                if isinstance(error, OtherShardsError) or not raises:
                    run.restart(error)
                else:
                    failure = error
            all_ranks.agree({"saved position": run.saved}, failure)
        run.apply(sampler)

    def _changed_settings(self) -> str:
        """Return a sentence on arguments that define the data and differ from the checkpoint; empty if none differ."""
        settings = [name for name in OF_THE_DATA if name in self._saved_settings and name in self.hparams]
        changes = [
            f"{name} was {short_repr(self._saved_settings[name])} and is {short_repr(self.hparams[name])}"
            for name in settings
            if self._saved_settings[name] != self.hparams[name]
        ]
        return f" Arguments that changed: {'; '.join(changes)}." if changes else ""

    def position_before_step(self) -> None:
        """Called before each step of training."""
        run = self._position
        if run.trainer is not None:
            run.begin_step(self._present)

    def _present(self) -> Present | None:
        """Return the state of the fit at the start of a batch; None if it trains on other loaders."""
        sampler = self._training_sampler()
        if sampler is None:
            return None
        return Present(sampler, self._position.before_batch(sampler), self._identities["train"])

    def position_after_step(self) -> None:
        """Called after each step of training, before anything else may save a checkpoint."""
        run = self._position
        if run.trainer is not None and run.hands_iterator and (sampler := self._training_sampler()) is not None:
            run.end_step(sampler)

    def position_after_epoch(self) -> None:
        """Called at the end of each epoch of training."""
        run = self._position
        if run.trainer is not None and run.hands_iterator:
            run.end_epoch()
        if self._bad_rows is not None:
            if text := self._ledger.excess():
                raise H5Error(text)
            self._log_once(self._ledger.summary())

    def _identity(self) -> Identity:
        """Return the identity of the training data when it was set up."""
        return self._identities["train"]

    def _run(self) -> RunPosition:
        """Return the position of the current fit, a new one if another fit started."""
        old, trainer = self._position, self.trainer
        if _is_fitting(trainer) and (old.is_over or old.trainer is not trainer):
            if not old.is_over and _is_fitting(old.trainer):
                raise H5ValueError(
                    "this data module is still in use by the fit of another Trainer. Create a data module for each "
                    "Trainer."
                )
            self._position = RunPosition(trainer, old.notes.history if old.trainer is trainer else None)
            self._ledger.clear()
        return self._position

    def _load_ledger(self, state: Mapping[str, Any]) -> None:
        """Continue with the bad samples of the saved run, unless the run itself continues, as after a tuner."""
        if not self._position.is_applied:
            self._ledger.load(state.get("bad_samples", ()))

    def _training_sampler(self) -> PlanSampler | None:
        """Return the sampler of the training loader; other loaders may have been created since."""
        trainer = self._position.trainer
        for loader in [] if trainer is None else TrainerProgress(trainer).loaders:
            if loader in self._loaders["train"]:
                return cast("H5DataLoader", loader).sampler
        return None if self._train_loader is None or self.is_bystander else self._train_loader.sampler

    def _insert_callbacks(self) -> None:
        """Insert this package's callbacks into the trainer once, before callbacks that save checkpoints."""
        if self.trainer is None:
            return
        callbacks: list[Any] = self.trainer.callbacks
        if not any(isinstance(callback, SetEpochCallback) for callback in callbacks):
            callbacks.insert(0, SetEpochCallback())  # first, so that a batch read in on_train_start is correct
        if not self.trainer.barebones and not any(isinstance(callback, H5StatsMonitor) for callback in callbacks):
            at = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(at, H5StatsMonitor())


def is_running(trainer: Any) -> bool:
    """Return whether a trainer is in the middle of a run of any kind."""
    state = getattr(trainer, "state", None)
    return state is not None and bool(state.status == "running")


def _is_fitting(trainer: Any) -> bool:
    return is_running(trainer) and bool(trainer.state.fn == "fit")

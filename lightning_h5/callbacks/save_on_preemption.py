"""``SaveOnPreemption``: saves a checkpoint when a cluster announces the end of the job, and loses no sample."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal

import fsspec

from .._lightning import Callback, LightningModule, Trainer, is_between_batches
from ..errors import H5ValueError
from ..hdf5 import expand_user
from ..types import PathLike

__all__ = ["SaveOnPreemption"]

_log = logging.getLogger(__name__)


class SaveOnPreemption(Callback):
    """Save a checkpoint at the end of a batch when the cluster is about to end the job, then requeue the job or exit.

    The signal only sets a flag. At the end of each batch, all ranks agree on whether one of them received a signal.
    They then save after the same batch, so no sample is lost or repeated. Lightning itself saves inside the signal
    handler, when ranks may be a batch apart. This callback replaces Lightning's handlers when the first batch starts.

    The checkpoint is ``hpc_ckpt_<number>.ckpt``. ``Trainer.fit(ckpt_path="hpc")`` resumes from the last one; under
    SLURM, a fit without ``ckpt_path`` does the same. Pass the same folder as ``default_root_dir``.

    One value is reduced over all ranks after each batch, at the cost of one small collective. If a validation or the
    end of the epoch follows the batch, it runs first, and the checkpoint is saved after the next batch: a resumed run
    would skip it otherwise. Request enough time from the cluster for the validation.

    Args:
        dirpath: folder of the checkpoints; None for the trainer's ``default_root_dir``.
        signals: names of signals. ``#SBATCH --signal=SIGUSR1@90`` sends SIGUSR1; Kubernetes, ``scancel`` and cloud
            providers send SIGTERM.
        requeue: run ``scontrol requeue`` after saving. "auto" does so for jobs of SLURM, except for SIGTERM, with
            which SLURM also cancels jobs.

    Raises:
        H5ValueError: a signal does not exist.
        SystemExit: from ``Trainer.fit`` on all ranks after saving, with code 0 for a requeued job, otherwise with 128
            plus the number of the signal, as shells report it. Ranks started by Lightning's launcher exit with 0.
    """

    def __init__(
        self,
        dirpath: PathLike | None = None,
        signals: Sequence[str] = ("SIGUSR1", "SIGTERM"),
        requeue: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        numbers = signal.Signals.__members__
        if isinstance(signals, str) or any(name not in numbers for name in signals):
            raise H5ValueError(
                f"signals={signals!r} was given. Pass a list of signal names, such as ['SIGUSR1', 'SIGTERM']."
            )
        self.dirpath = None if dirpath is None else expand_user(dirpath)
        self.requeue = requeue
        self._signals = [numbers[name] for name in signals]
        self._arrived: list[int] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move this callback to the end, so that the saved states of other callbacks include the batch."""
        # A `Checkpoint` would be last as well, but Lightning then leaves out its own `ModelCheckpoint`.
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self] + [self]  # type: ignore[attr-defined]
        self._arrived.clear()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handlers; its teardown restores the previous ones."""
        self._note_signals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See ``on_sanity_check_start``."""
        self._note_signals()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and exit if a rank has received a signal."""
        if not is_between_batches(trainer, batch_idx):
            return
        decide = trainer.strategy.reduce_boolean_decision
        if not decide(bool(self._arrived), all=False):
            return
        is_auto = "SLURM_JOB_ID" in os.environ and any(number != signal.SIGTERM for number in self._arrived)
        requeues = decide(is_auto if self.requeue == "auto" else self.requeue, all=False)
        pl_module.on_train_batch_end(outputs, batch, batch_idx)  # Lightning's next step, which is not reached any more
        path = trainer.strategy.broadcast(self._next_path(trainer.default_root_dir))
        trainer.save_checkpoint(path)
        _log.info("saved %s after batch %d of epoch %d", path, batch_idx, trainer.current_epoch)
        is_requeued = trainer.strategy.broadcast(requeues and trainer.is_global_zero and _requeue())
        trainer.strategy.barrier("SaveOnPreemption")
        # Lightning's own launcher treats any other exit code of rank 1 as a crash, and kills rank 0 before it finishes.
        is_child = (
            not trainer.is_global_zero and type(trainer.strategy.launcher).__name__ == "_SubprocessScriptLauncher"
        )
        raise SystemExit(0 if is_requeued or is_child else 128 + (self._arrived or [signal.SIGTERM])[0])

    def _note_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "SaveOnPreemption receives no signals, since training does not run in the main thread. Save at regular "
                "steps with a ModelCheckpoint."
            )
            return
        for number in self._signals:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)

    def _next_path(self, root: str) -> str:
        folder = self.dirpath or root
        files, place = fsspec.core.url_to_fs(folder)
        names = files.ls(place, detail=False) if files.exists(place) else []
        matches = [re.fullmatch(r".*hpc_ckpt_(\d+)\.ckpt", path.rstrip("/")) for path in names]
        return f"{folder}/hpc_ckpt_{max((int(match[1]) for match in matches if match), default=0) + 1}.ckpt"


def _requeue() -> bool:
    """Ask SLURM to run this job again; return whether it will."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        process = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        failure = (process.stderr.strip() or f"exit code {process.returncode}") if process.returncode else ""
    except OSError as error:
        failure = str(error)
    if failure:
        _log.warning("`scontrol requeue %s` failed: %s. The checkpoint is saved; submit the job again.", job, failure)
    return not failure

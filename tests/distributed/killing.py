"""A training run for ``processes.run_ranks`` that stops in a given way, and what its checkpoints say it had trained on.

The model keeps its own ``history`` in the checkpoint: the rows of every step over all ranks. It knows nothing of the
position that the data module saves, so that a resumed run's history is what its weights were really trained on.
"""

import io
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from arguments import nested
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning_models import quiet_trainer

from lightning_h5 import LazyH5DataModule


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of the program: where it goes on, how it trains, and how it stops.

    Attributes:
        kind: the data module's class.
        at: batches trained by this start alone when ``way`` strikes.
        every: steps between two checkpoints, for the ways with a ``ModelCheckpoint``.
        pause: seconds that a step takes at least.
    """

    file: str
    folder: str
    world_size: int = 1
    batch_size: int = 4
    kind: type = LazyH5DataModule
    data: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    one_cycle: bool = False
    way: str | None = None
    at: int = 0
    every: int = 1
    pause: float = 0.0
    resume: str | None = None

    @property
    def folder_path(self):
        return Path(self.folder)


class Historian(LightningModule):
    def __init__(self, one_cycle=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.one_cycle = one_cycle
        self.history: list[list] = []  # [epoch, rows of all ranks] for each step
        self.trained = 0  # steps trained by this process

    def training_step(self, batch, batch_idx):
        x, index = batch
        assert torch.equal(x[:, 0], index.to(x) / 64)
        return (self.layer(x) - torch.sin(9 * x)).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.one_cycle:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint):
        self.history = checkpoint["history"]


class Remember(Callback):
    """Adds a step to the history as soon as it is done; and tells the parent process of it."""

    def __init__(self, job):
        self.journal, self.pause = job.folder_path / "journal", job.pause

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        ranks = [batch[-1].tolist()]
        if trainer.world_size > 1:
            ranks *= trainer.world_size
            torch.distributed.all_gather_object(ranks, batch[-1].tolist())
        model.history.append([trainer.current_epoch, [row for rows in ranks for row in rows]])
        model.trained += 1
        if trainer.is_global_zero:
            with self.journal.open("a") as journal:
                journal.write(".")
        time.sleep(self.pause)


class Strike(Checkpoint):
    """Does something in a hook once so many batches are trained; comes after all other callbacks."""

    def __init__(self, hook, at, *deeds):
        self.at, self.deeds = at, deeds
        setattr(self, hook, self.strike)

    def strike(self, trainer, model, *_):
        if not trainer.sanity_checking and model.trained == self.at:
            for deed in self.deeds:
                deed(trainer)


class SaveOnException(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_exception(self, trainer, model, exception):
        save(self.folder)(trainer)


class DieOnTheWayIn(Callback):
    """Dies in the sanity check, or at the start of training where a resumed run has none."""

    def on_validation_batch_end(self, trainer, *_):
        if trainer.sanity_checking:
            print("died in the sanity check", flush=True)
            die(trainer)

    def on_train_start(self, trainer, model):
        print("died at the start", flush=True)
        die(trainer)


def save(folder):
    return lambda trainer: trainer.save_checkpoint(Path(folder) / "by_hand.ckpt")


def die(trainer):
    os.kill(os.getpid(), signal.SIGKILL)


def last_rank_dies(trainer):
    if trainer.global_rank == trainer.world_size - 1:
        die(trainer)


def told_to_end(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted(trainer):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for background jobs
    os.kill(os.getpid(), signal.SIGINT)


def fail(trainer):
    raise RuntimeError("stop here")


def stop_training(trainer):
    trainer.should_stop = True


def die_while_writing(model, at):
    """Half of a checkpoint's bytes are written when the process dies."""
    from fsspec.implementations.local import LocalFileOpener

    write = LocalFileOpener.write

    def torn(self, content):
        if model.trained < at:
            return write(self, content)
        write(self, content[: len(content) // 2])
        self.f.flush()
        return die(None)

    LocalFileOpener.write = torn


class InPlace(TorchCheckpointIO):
    """Writes checkpoints under their own names at once, and dies in the middle of one."""

    def __init__(self, dies_at):
        self.dies_at, self.saved = dies_at, 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        whole = io.BytesIO()
        torch.save(checkpoint, whole)
        self.saved += 1
        if self.saved < self.dies_at:
            Path(path).write_bytes(whole.getvalue())
        else:
            Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])
            die(None)


def keep(job, **options):
    """A ``ModelCheckpoint`` that keeps its last file alone."""
    options = {"every_n_train_steps": job.every, "filename": "{epoch}-{step}", "save_top_k": 1} | options
    return ModelCheckpoint(job.folder, **options)


def callbacks_of(job):
    at, folder = job.at, job.folder
    every_epoch = {"every_n_train_steps": None, "every_n_epochs": 1}
    return {
        None: list,
        "killed after a save": lambda: [keep(job), Strike("on_train_batch_end", at, die)],
        "saved by hand and killed": lambda: [Strike("on_train_batch_end", at, save(folder), die)],
        "saved before a batch and killed": lambda: [Strike("on_train_batch_start", at, save(folder), die)],
        "saved at an epoch's start and killed": lambda: [Strike("on_train_epoch_start", at, save(folder), die)],
        "saved at an epoch's end and killed": lambda: [Strike("on_train_epoch_end", at, save(folder), die)],
        "one rank killed": lambda: [keep(job), Strike("on_train_batch_start", at, last_rank_dies)],
        "killed batches after a save": lambda: [keep(job), Strike("on_train_batch_start", at, die)],
        "killed while writing": lambda: [keep(job)],
        "killed inside a validation": lambda: [Strike("on_validation_batch_end", at, save(folder), die)],
        "killed after a validation": lambda: [
            keep(job, **every_epoch, save_on_train_epoch_end=False),
            Strike("on_validation_end", at, die),
        ],
        "killed after an epoch's checkpoint": lambda: [
            keep(job, **every_epoch, save_on_train_epoch_end=True),
            Strike("on_train_batch_start", at, die),
        ],
        "killed on the way in": lambda: [DieOnTheWayIn()],
        "killed from outside": lambda: [keep(job)],
        "SIGTERM": lambda: [SaveOnException(folder), Strike("on_train_batch_start", at, told_to_end)],
        "SIGTERM from outside": lambda: [SaveOnException(folder)],
        "SIGINT": lambda: [SaveOnException(folder), Strike("on_before_optimizer_step", at, interrupted)],
        "failed before a step": lambda: [SaveOnException(folder), Strike("on_train_batch_start", at, fail)],
        "failed in a step": lambda: [SaveOnException(folder), Strike("on_before_backward", at, fail)],
        "failed at a batch's end": lambda: [SaveOnException(folder), Strike("on_train_batch_end", at, fail)],
        "max_steps": list,
        "should_stop": lambda: [Strike("on_train_batch_end", at, stop_training)],
    }[job.way]()


def train(rank, job):
    """The target of ``run_ranks``: history and weights at the end of training, if it gets there."""
    tempfile.tempdir = job.folder
    seed_everything(7, verbose=False)
    model = Historian(job.one_cycle)
    options = {"max_epochs": 3} | job.trainer
    if job.way == "max_steps":
        options |= {"max_epochs": -1, "max_steps": done_before(job.resume) + job.at}
    if job.way == "killed while writing" and rank == 0:
        die_while_writing(model, job.at)
    (job.folder_path / f"{rank}.pid").write_text(str(os.getpid()))
    trainer = quiet_trainer(
        **options,
        devices=job.world_size,
        strategy="ddp" if job.world_size > 1 else "auto",
        callbacks=[Remember(job), *callbacks_of(job), Strike("no_hook", 0)],
        enable_checkpointing=True,
    )
    data = job.kind(job.file, job.file, batch_size=job.batch_size, with_index=True, **nested(**job.data))
    trainer.fit(model, datamodule=data, ckpt_path=job.resume)
    if job.way in ("max_steps", "should_stop"):
        save(job.folder)(trainer)
    return model.history, {name: value.tolist() for name, value in model.state_dict().items()}


def done_before(path):
    return 0 if path is None else torch.load(path, weights_only=True)["global_step"]


def newest(folder):
    """The checkpoint that goes furthest, and its history; None and an empty one where there is none."""
    saved = {path: torch.load(path, weights_only=True)["history"] for path in Path(folder).glob("*.ckpt")}
    path = max(saved, key=lambda path: len(saved[path]), default=None)
    return (None, []) if path is None else (str(path), saved[path])


class Outside:
    """Sends a signal to all ranks when the journal has come so far; runs in a thread of the parent."""

    def __init__(self, journal, job, sign):
        self.journal, self.job, self.sign = journal, job, sign
        self.is_over = False

    def __call__(self):
        while not self.is_over:
            if self.journal.exists() and self.journal.stat().st_size >= self.job.at:
                for rank in range(self.job.world_size):
                    os.kill(int((self.job.folder_path / f"{rank}.pid").read_text()), self.sign)
                return
            time.sleep(0.001)

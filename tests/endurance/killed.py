"""Training programs that are killed at any moment, the main process of each rank alone, and what they leave behind."""

import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import processes
import spaces
import torch
from arguments import nested
from guards import HANG
from lightning.pytorch import Callback, LightningModule
from lightning_models import quiet_trainer

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule

PAUSE = 0.02  # seconds per step, so that workers are ahead and their pipe is full

KINDS = {
    "lazy": lambda file, **options: LazyH5DataModule(file, file, **nested(x_key="x", num_workers=2, **options)),
    "lazy, spawned": lambda file, **options: LazyH5DataModule(
        file, file, **nested(x_key="x", num_workers=1, multiprocessing_context="spawn", **options)
    ),
    "combined": lambda file, **options: CombinedHDF5DataModule(
        file, **nested(fields=["x", "index"], val_fraction=0.1, num_workers=2, **options)
    ),
    "combined, filtered, split kept": lambda file, **options: CombinedHDF5DataModule(
        file,
        **nested(
            fields=["x", "index"],
            val_fraction=0.1,
            num_workers=2,
            split_file=str(Path(file).parent / "split.json"),
            where={"index": {"min": 3}},
            **options,
        ),
    ),
    "rank cached": lambda file, **options: RankCachedH5DataModule(
        file, file, **nested(x_key="x", num_workers=2, **options)
    ),
    "rank cached, shared": lambda file, **options: RankCachedH5DataModule(
        file, file, **nested(x_key="x", num_workers=2, share_memory=True, **options)
    ),
}


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        batch_size: rows of 4 KiB: up to 15 of them travel through the workers' pipe, more through shared memory.
        epochs: how long it trains.
    """

    kind: str
    file: str
    folder: str
    world_size: int = 1
    batch_size: int = 12
    epochs: int = 10_000

    @property
    def journal(self):
        """Has a byte for each step that rank 0 has trained."""
        return Path(self.folder) / "journal"

    @property
    def temporary(self):
        """The folder for temporary files."""
        return Path(self.folder) / "tmp"


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        x = batch["x"] if isinstance(batch, dict) else batch
        assert (x == x[:, :1]).all()
        return self.layer(x[:, :1] / 1000).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Tell(Callback):
    def __init__(self, program):
        self.program = program

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            with self.program.journal.open("a") as journal:
                journal.write(".")
        time.sleep(PAUSE if self.program.epochs > 1 else 0)


def train(rank, program):
    """What each rank runs; gives the steps that were trained."""
    program.temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(program.temporary)
    trainer = quiet_trainer(
        max_epochs=program.epochs,
        devices=program.world_size,
        strategy="ddp" if program.world_size > 1 else "auto",
        callbacks=[Tell(program)],
        num_sanity_val_steps=1,
    )
    data = KINDS[program.kind](program.file, batch_size=program.batch_size)
    trainer.fit(Model(), datamodule=data)
    return trainer.global_step


def train_apart(rank, world_size, port, program, sender, log):
    """A rank with a /dev/shm of its own, and a tracker of what it has there, as a program has that a shell started."""
    spaces.leave()
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    processes._rank(rank, world_size, port, train, (program,), sender, log)


def start(program):
    """Starts a program's ranks, each in a session of its own. Their processes."""
    Path(program.folder).mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(program.world_size):
        receiver, sender = processes.CONTEXT.Pipe(duplex=False)
        log = str(Path(program.folder) / f"{rank}.log")
        arguments = (rank, program.world_size, port, program, sender, log)
        ranks.append(processes.CONTEXT.Process(target=train_apart, args=arguments))
        ranks[-1].start()
        sender.close()
        ranks[-1].receiver = receiver  # open as long as the rank may send
    return ranks


def kill(ranks):
    """Kills main processes; none of their groups."""
    for rank in ranks:
        assert rank.is_alive()
        os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.join(HANG)


def of_sessions(leaders):
    """Processes of the sessions that some processes led: pids and command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in leaders and fields[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:200]
    return found


def end_all(leaders):
    """Kills what is left of sessions, however the test went."""
    for pid in of_sessions(leaders):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shared(folders):
    """Names in the programs' own /dev/shm."""
    return {name for folder in folders for name in os.listdir(folder)}


def own_shared(ranks):
    """Descriptors of the /dev/shm that each rank has for itself, which live longer than the ranks."""
    return [_own_shared(rank, time.monotonic() + HANG) for rank in ranks]


def _own_shared(rank, end):
    here = os.stat("/dev/shm").st_dev
    while time.monotonic() < end:
        fd = os.open(f"/proc/{rank.pid}/root/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
        if os.fstat(fd).st_dev != here:
            return fd
        os.close(fd)
        time.sleep(0.001)
    raise TimeoutError(f"rank {rank.pid} did not leave")

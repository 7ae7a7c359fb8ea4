"""A run that is killed in the middle of an epoch resumes exactly.

    python examples/resume.py [FOLDER]

trains three times: once to the end; once in a process that is ended by SIGKILL, as by a scheduler or by a machine
without memory; and once more from the killed run's last checkpoint. Rows and weights equal those of the first run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_h5 import LazyH5DataModule

DATA = Path(__file__).parent / "data"
EPOCHS, SAVED_EVERY, KILLED_IN = 3, 5, 33  # in steps; an epoch has 20


def write_waves(path: Path, n_rows: int = 640) -> None:
    """Write noisy waves and their frequencies."""
    rng = np.random.default_rng(0)
    frequency = rng.uniform(1, 5, n_rows)
    phase = rng.uniform(0, 2 * np.pi, n_rows)
    waves = np.sin(frequency[:, None] * np.linspace(0, 2 * np.pi, 64) + phase[:, None])
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("wave", data=waves.astype("f4"), chunks=(32, 64), compression="gzip")
        file["frequency"] = frequency.astype("f4")


def with_noise(wave: Tensor, rng: np.random.Generator) -> Tensor:
    """Add noise that a resumed run draws again: ``rng`` depends on the seed, the epoch and the row."""
    return wave + torch.from_numpy(0.1 * rng.standard_normal(len(wave), dtype="f4"))


class FrequencyNet(LightningModule):
    """Predicts the frequency of a wave; its checkpoints contain the rows that it was trained on, in order."""

    def __init__(self, killed_in: int | None = None) -> None:
        super().__init__()
        self.killed_in = killed_in
        self.rows: list[int] = []
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.killed_in:
            os.kill(os.getpid(), signal.SIGKILL)  # no cleanup of any kind
        wave, frequency, index = batch
        self.rows += index.tolist()
        return nn.functional.mse_loss(self.layers(wave)[:, 0], frequency)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rows"] = self.rows

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rows = list(checkpoint["rows"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(path: Path, saved: Path, killed_in: int | None = None) -> FrequencyNet:
    """Train, from the last checkpoint if there is one. Resuming needs nothing else."""
    seed_everything(1)
    datamodule = LazyH5DataModule(
        path, x_key="wave", y_key="frequency", transform=with_noise, with_index=True, batch_size=32
    )
    model = FrequencyNet(killed_in)
    last = saved / "last.ckpt"
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[ModelCheckpoint(saved, every_n_train_steps=SAVED_EVERY, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=datamodule, ckpt_path=last if last.exists() else None)
    return model


def main(folder: Path = DATA) -> None:
    """Train three times and compare."""
    path, checkpoints = folder / "waves.h5", folder / "resume"
    write_waves(path)
    shutil.rmtree(checkpoints, ignore_errors=True)
    unbroken = train(path, checkpoints / "unbroken")

    saved = checkpoints / "killed"
    child = subprocess.run([sys.executable, __file__, "--and-be-killed", path, saved], check=False)
    print(f"a run with the same settings ended with {signal.Signals(-child.returncode).name} in step {KILLED_IN + 1}")
    step = torch.load(saved / "last.ckpt", weights_only=True)["global_step"]
    print(f"its last checkpoint is of step {step}, in the middle of the second epoch")

    resumed = train(path, saved)
    n_same = sum(a == b for a, b in zip(resumed.rows, unbroken.rows, strict=True))
    print(f"rows: {n_same} of {len(unbroken.rows)} are those of the unbroken run, each in its place")
    pairs = zip(resumed.parameters(), unbroken.parameters(), strict=True)
    print(f"weights: the largest difference to the unbroken run is {max((a - b).abs().max().item() for a, b in pairs)}")


if __name__ == "__main__":
    if "--and-be-killed" in sys.argv:
        train(Path(sys.argv[2]), Path(sys.argv[3]), killed_in=KILLED_IN)
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

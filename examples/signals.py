"""A regression on signals of two channels, normalized by statistics of the training rows.

    python examples/signals.py [FOLDER]

Each row has ten minutes of heart rate and contractions, as recorded by a monitor before birth. After a contraction, the
heart rate dips; the network predicts the delay in seconds. Heart rates are about 140, contractions between 0 and 100:
without ``normalize``, the network would have to learn these scales first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError

from lightning_h5 import LazyH5DataModule, compute_stats

DATA = Path(__file__).parent / "data"
STEPS, SECONDS = 150, 4  # four seconds per step
SPLITS = {"train": 1200, "val": 200, "test": 300}


def write_recordings(path: Path) -> None:
    """Write a group for each split, with signals ``(rows, 2, 150)`` and the delay of each row in seconds."""
    rng = np.random.default_rng(0)
    time = np.arange(STEPS) * SECONDS
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for split, n_rows in SPLITS.items():
            delay = rng.uniform(0, 60, (n_rows, 1))
            first, apart = rng.uniform(30, 120, (n_rows, 1)), rng.uniform(120, 200, (n_rows, 1))
            contractions, dips = np.zeros((n_rows, STEPS)), np.zeros((n_rows, STEPS))
            for number in range(5):
                middle = first + number * apart
                contractions += 60 * np.exp(-(((time - middle) / 25) ** 2))
                dips += 25 * np.exp(-(((time - middle - delay) / 20) ** 2))
            heart_rate = rng.normal(140, 8, (n_rows, 1)) - dips + rng.normal(0, 3, dips.shape)
            signals = np.stack([heart_rate, contractions + rng.normal(10, 3, dips.shape)], axis=1)
            file.create_dataset(f"{split}/signal", data=signals.astype("f4"), chunks=(50, 2, STEPS), compression="gzip")
            file[f"{split}/delay"] = delay[:, 0].astype("f4")


def write_statistics(path: Path, stats: Path) -> None:
    """Write mean and deviation of each channel, over the training rows only.

    ``python -m lightning_h5 stats data/monitor.h5 --key train/signal --channel-axis 0 --output
    data/monitor-stats.json`` does the same.
    """
    report = compute_stats(path, "train/signal", channel_axis=0)
    report.save(stats, overwrite=True)
    mean, std = report.arrays[0].mean, report.arrays[0].std
    print(f"heart rate: {mean[0]:.1f} +- {std[0]:.1f}; contractions: {mean[1]:.1f} +- {std[1]:.1f}")


class DelayNet(LightningModule):
    """A small network of convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 16, 9, stride=2),
            nn.ReLU(),
            nn.Conv1d(16, 32, 9, stride=2),
            nn.ReLU(),
            nn.Conv1d(32, 32, 9, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(32, 1),
        )
        self.error = MeanAbsoluteError()

    def forward(self, signal: Tensor) -> Tensor:
        """Delays in seconds, shape ``(batch,)``, of normalized signals ``(batch, 2, steps)``."""
        delay: Tensor = 30 + 20 * self.layers(signal)[:, 0]
        return delay

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        signal, delay = batch
        return nn.functional.huber_loss(self(signal) / 20, delay / 20)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        signal, delay = batch
        self.error(self(signal), delay)
        self.log("error", self.error)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_error", (self(batch[0]) - batch[1]).abs().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(folder: Path = DATA) -> None:
    """Train, and compare with predicting the mean."""
    path, stats = folder / "monitor.h5", folder / "monitor-stats.json"
    write_recordings(path)
    write_statistics(path, stats)
    seed_everything(1)
    datamodule = LazyH5DataModule(
        path,
        x_key="{split}/signal",  # train/signal, val/signal, test/signal
        y_key="{split}/delay",
        normalize=stats,  # statistics of train/signal, applied to all splits
        batch_size=50,
    )
    model = DelayNet()
    trainer = Trainer(
        max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, datamodule=datamodule)
    (result,) = trainer.test(model, datamodule=datamodule, verbose=False)
    with h5py.File(path) as file:
        guessing = np.abs(file["test/delay"][:] - file["train/delay"][:].mean()).mean()
    print(f"mean error on the test rows: {result['error']:.1f} s; of always predicting the mean: {guessing:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

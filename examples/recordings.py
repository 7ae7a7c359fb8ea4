"""Recordings in several files, and a network for samples that are dicts, for ``examples/combined.yaml``.

    python examples/recordings.py [FOLDER]

only writes the files; ``python -m lightning_h5 fit --config examples/combined.yaml`` writes missing files, and trains.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

DATA = Path(__file__).parent / "data"
STEPS = 120


def write_recordings(folder: Path = DATA, n_files: int = 3, n_patients: int = 40) -> None:
    """Write a file for each site: signals of 2 channels, one row per chunk, and columns with facts on each row.

    One patient in five has the outcome: in each row of such a patient, both channels dip together once.
    """
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for site in range(n_files):
        patient = np.repeat(np.arange(n_patients), 6)
        outcome = patient % 5 == 0
        signal = (
            rng.normal(size=(len(patient), 2, STEPS))
            + np.where(rng.random(len(patient)) < 0.5, 0.3, -0.3)[:, None, None]
        )
        for row in np.flatnonzero(outcome):
            at = rng.integers(0, STEPS - 20)
            signal[row, :, at : at + 20] -= 1.5
        path = folder / f"recordings-{site}.h5"
        part = path.with_suffix(".part")
        with h5py.File(part, "w") as file:
            file.create_dataset("signal", data=signal.astype("f4"), chunks=(1, 2, STEPS), compression="lzf")
            file["outcome"] = outcome.astype("i8")
            file["cs_label"] = (rng.random(len(patient)) < 0.2).astype("u1")  # born by cesarean section
            file["meta/age"] = rng.integers(16, 48, len(patient))
            file["meta/patient"] = [f"site-{site}/patient-{number:02d}" for number in patient]
        part.rename(path)


class RecordingNet(LightningModule):
    """Classifies a recording: do the two channels dip together?

    Args:
        width: number of channels of the hidden layers.
        learning_rate: learning rate of AdamW.
    """

    def __init__(self, width: int = 16, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            nn.Conv1d(2, width, 15, stride=3),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(width, 2),
        )
        # The mean over both classes: always predicting "no" is right for four rows in five, but scores 0.5 here.
        self.val_accuracy = MulticlassAccuracy(2, average="macro")
        self.test_accuracy = MulticlassAccuracy(2, average="macro")

    def prepare_data(self) -> None:
        """Write missing files; Lightning calls this in one process, before data is read."""
        if not list(DATA.glob("recordings-*.h5")):
            write_recordings()

    def forward(self, signal: Tensor) -> Tensor:
        """Logits, shape ``(batch, 2)``, for signals of shape ``(batch, 2, steps)``."""
        logits: Tensor = self.layers(signal)
        return logits

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch["signal"]), batch["outcome"])
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["outcome"]))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.val_accuracy(self(batch["signal"]), batch["outcome"])
        # Batches are dicts with text, whose size Lightning cannot infer.
        self.log("val/accuracy", self.val_accuracy, prog_bar=True, batch_size=len(batch["outcome"]))

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.test_accuracy(self(batch["signal"]), batch["outcome"])
        self.log("test/accuracy", self.test_accuracy, batch_size=len(batch["outcome"]))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[tuple[str, float]]:
        chances = self(batch["signal"]).softmax(1)[:, 1].tolist()
        return list(zip(batch["guid"], chances, strict=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    write_recordings(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

"""Windows of EEG recordings, split by subject and normalized by channel.

    python examples/eeg.py [FOLDER]

Each subject is a group with ``eeg`` of shape (channel, time) and ``closed`` of shape (time,), a flag for closed eyes. A
sample is one second of EEG, with the flag in its middle as target. With closed eyes, a rhythm of about 10 Hz appears at
the back of the head. Channels have different scales: ``normalize`` removes them.
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
from torchmetrics.classification import BinaryAccuracy

from lightning_h5 import LazyH5DataModule, compute_stats

DATA = Path(__file__).parent / "data"
RATE, CHANNELS, N_TRAIN, N_VAL = 100, 8, 12, 4
SEGMENTS = {"groups": "subject*", "step_axis": {"eeg": 1, "closed": 0}}


def write_recordings(path: Path) -> None:
    """Write recordings of different lengths, and lists of the subjects of each split."""
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    scale, offset = 10.0 ** rng.uniform(-6, -4, (CHANNELS, 1)), rng.normal(0, 1e-3, (CHANNELS, 1))
    with h5py.File(path, "w") as file:
        for number in range(N_TRAIN + N_VAL):
            steps = int(rng.integers(40, 60)) * RATE
            closed = np.repeat(rng.random(steps // (5 * RATE) + 1) < 0.5, 5 * RATE)[:steps]
            rhythm = np.sin(2 * np.pi * rng.uniform(9, 11) * np.arange(steps) / RATE + rng.uniform(0, 6))
            back = np.linspace(0, 1, CHANNELS)[:, None]
            eeg = rng.normal(size=(CHANNELS, steps)) + 0.9 * back * closed * rhythm
            group = file.create_group(f"subject{number}")
            values = (offset + scale * eeg).astype("f4")
            group.create_dataset("eeg", data=values, chunks=(CHANNELS, 10 * RATE), compression="gzip")
            group["closed"] = closed.astype("i8")
        names = [f"subject{number}" for number in range(N_TRAIN + N_VAL)]
        file["splits/train"], file["splits/val"] = names[:N_TRAIN], names[N_TRAIN:]


class EyeNet(LightningModule):
    """Classifies one second of EEG: are the eyes closed?"""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv1d(CHANNELS, 16, RATE // 4)
        self.output = nn.Linear(16, 1)
        self.accuracy = BinaryAccuracy()

    def forward(self, eeg: Tensor) -> Tensor:
        """Logits, shape ``(batch,)``, for windows of shape ``(batch, channel, time)``."""
        power = self.filters(eeg).square().mean(dim=2)
        logits: Tensor = self.output(power.add(1e-3).log())[:, 0]
        return logits

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch["eeg"]), batch["closed"].float())

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.accuracy(self(batch["eeg"]), batch["closed"])
        self.log("accuracy", self.accuracy, batch_size=len(batch["closed"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: Path = DATA) -> None:
    """Train on some subjects and validate on others."""
    path, stats = folder / "eeg.h5", folder / "eeg-stats.json"
    write_recordings(path)
    # Statistics of the training subjects only: they are the first segments.
    segments = SEGMENTS | {"step_axis": 1}
    report = compute_stats(path, "eeg", segments=segments, channel_axis=0, rows=range(N_TRAIN))
    print(f"{report.arrays[0].n_rows} steps of {N_TRAIN} training subjects are normalized by channel")
    seed_everything(0)
    report.save(stats, overwrite=True)
    datamodule = LazyH5DataModule(
        path,
        x_key={"eeg": "eeg", "closed": "closed"},
        segments=SEGMENTS,
        window={"steps": {"eeg": [-RATE // 2, RATE // 2], "closed": 0}, "stride": RATE // 2},
        split={"key": "splits/{split}"},
        normalize=stats,
        batch_size=32,
    )
    model = EyeNet()
    trainer = Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, datamodule=datamodule)
    with h5py.File(path) as file:
        closed = np.concatenate([file[f"{name}/closed"][:] for name in file["splits/val"].asstr()]).mean()
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"accuracy for other subjects: {accuracy:.3f}; of a constant answer: {max(closed, 1 - closed):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

"""Train on a mixture of two sources, in the shares that you choose.

    python examples/mixture.py [FOLDER]

There are ten times as many recordings from a clinic as from home, where another sensor is used. Mixed by size, the
network learns only the clinic; with weights, it learns both. The example prints the shares of rows and the accuracy at
both places for each way of mixing. The shares of batches are exact. The shares of rows differ slightly, since a pass
through a source ends with smaller batches.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_h5 import CombinedHDF5DataModule, H5StatsMonitor

DATA = Path(__file__).parent / "data"
SOURCES = {"clinic": 3000, "home": 300}
WAYS: dict[str, dict[str, Any]] = {
    "concat": {"strategy": "concat"},  # all rows shuffled together: shares by size
    "weighted 0.7 : 0.3": {"strategy": "weighted", "weights": {"clinic": 0.7, "home": 0.3}},
    "the same, in each batch": {"strategy": "weighted", "weights": [0.7, 0.3], "mix": "rows"},
    "round_robin": {"strategy": "round_robin"},  # one batch of each in turn
}


def write_sources(folder: Path) -> None:
    """Write a file for each place. The outcome depends on two features; home and clinic have different ones."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for (name, n_rows), weights in zip(SOURCES.items(), ([1.0, 0.0], [0.3, 1.0]), strict=True):
        features = rng.normal(size=(n_rows, 2)).astype("f4")
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["features"] = features
            file["outcome"] = (features @ np.array(weights) > 0).astype("i8")


class LinearModel(LightningModule):
    """Logistic regression that counts the rows and the correct answers of each source."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.trained_on: Counter[str] = Counter()
        self.evaluated_on: Counter[str] = Counter()
        self.right: Counter[str] = Counter()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.trained_on.update(batch["source"])  # the name of each row's source
        return nn.functional.cross_entropy(self.layer(batch["features"]), batch["outcome"])

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        is_right = self.layer(batch["features"]).argmax(1) == batch["outcome"]
        self.evaluated_on.update(batch["source"])
        self.right.update(source for source, right in zip(batch["source"], is_right, strict=True) if right)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, way: dict[str, Any]) -> LinearModel:
    """Train for five epochs of 100 batches, and evaluate once, on held-out rows."""
    seed_everything(1, verbose=False)
    datamodule = CombinedHDF5DataModule(
        mixture={"sources": {name: folder / f"{name}.h5" for name in SOURCES}, "epoch_length": 100, **way},
        split=0.2,  # of the rows of all sources
        batch_size=20,
    )
    model = LinearModel()
    trainer = Trainer(
        max_epochs=5,
        accelerator="cpu",
        check_val_every_n_epoch=5,
        num_sanity_val_steps=0,
        callbacks=[H5StatsMonitor(print_summary=False)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=datamodule)
    return model


def main(folder: Path = DATA) -> None:
    """Train once for each way of mixing, and print a line for each."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    write_sources(folder)
    print(f"{'':<25}{'share of rows':>22}{'accuracy':>22}")
    print(f"{'':<25}" + 2 * "".join(f"{name:>11}" for name in SOURCES))
    for name, way in WAYS.items():
        model = train(folder, way)
        shares = [model.trained_on[source] / model.trained_on.total() for source in SOURCES]
        accuracies = [model.right[source] / model.evaluated_on[source] for source in SOURCES]
        print(f"{name:<25}" + "".join(f"{number:>11.3f}" for number in shares + accuracies))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

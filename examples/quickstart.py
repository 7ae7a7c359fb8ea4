"""Quick start: a typical HDF5 file, a small network, and one data module.

    python examples/quickstart.py

writes scikit-learn's handwritten digits (1,797 real scans) to an HDF5 file, trains a small convolutional network
on it, tests it and predicts. ``examples/quickstart.yaml`` does the same from the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_h5 import LazyH5DataModule

FILE = Path(__file__).parent / "data" / "digits.h5"


def write_digits(path: Path = FILE) -> None:
    """Write the digits to a typical file: gzip, 64 rows per chunk, arrays in a group, labels, text ids."""
    digits = load_digits()
    images = digits.images[:, None].astype("u1")  # (1797, 1, 8, 8), values 0 to 16
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # an interrupted run leaves no partial file under the final name
    with h5py.File(part, "w") as file:
        scans = file.create_group("scans")
        scans.create_dataset("images", data=images, chunks=(64, 1, 8, 8), compression="gzip", shuffle=True)
        scans.create_dataset("labels", data=digits.target.astype("i8"), chunks=(64,), compression="gzip")
        # Scans of one writer are consecutive, but the data set does not name the writers, so these names are made up.
        writers = [f"writer-{row // 45:02d}" for row in range(len(images))]
        scans.create_dataset("writer", data=np.array(writers, dtype=object), dtype=h5py.string_dtype())
    part.rename(path)


class DigitNet(LightningModule):
    """A small convolutional network for 8x8 digits.

    Args:
        width: number of channels of the first layer.
        learning_rate: learning rate of AdamW.
    """

    def __init__(self, width: int = 16, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 16, 10),
        )
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    def prepare_data(self) -> None:
        """Write the file if it is missing; Lightning calls this in one process, before data is read."""
        if not FILE.exists():
            write_digits()

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape ``(batch, 10)``, for images of shape ``(batch, 1, 8, 8)`` with values 0 to 16."""
        logits: Tensor = self.layers(images / 16)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.val_accuracy(self(images), labels)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test/accuracy", self.test_accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch[0]
        return self(images).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> float:
    """Train, test and predict; return the accuracy on the test rows."""
    seed_everything(1)
    datamodule = LazyH5DataModule(
        FILE,
        predict_path=FILE,
        x_key="scans/images",
        y_key="scans/labels",
        x_dtype="float32",
        split={"val_fraction": 0.1, "test_fraction": 0.2},
        batch_size=64,
    )
    model = DigitNet()
    # Progress bars are useless in log files.
    bar = sys.stdout.isatty()
    trainer = Trainer(
        max_epochs=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=bar
    )
    trainer.fit(model, datamodule=datamodule)
    accuracy = trainer.test(model, datamodule=datamodule)[0]["test/accuracy"]
    predictions = trainer.predict(model, datamodule=datamodule)
    labels = torch.cat([batch for batch in predictions or [] if isinstance(batch, Tensor)])
    print(
        f"accuracy on the test rows: {accuracy:.3f}; {len(labels)} rows predicted, the first are {labels[:10].tolist()}"
    )
    return float(accuracy)


if __name__ == "__main__":
    main()

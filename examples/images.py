"""Train on images stored as bytes, with augmentation that is reproducible for each image.

    python examples/images.py [FOLDER]

Images remain bytes on disk and in memory. Each image is flipped and shifted at random, and whole batches are converted
to floats. The random draws for an image depend only on the seed, the epoch and the image, not on its batch, rank or
worker. If torchvision is installed, images are also rotated slightly.
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
from torchmetrics.classification import MulticlassAccuracy

from lightning_h5 import LazyH5DataModule

try:
    from torchvision.transforms.v2 import functional as vision
except ImportError:
    vision = None

DATA = Path(__file__).parent / "data"
SIZE, SHAPES = 24, ("disc", "square", "cross")


def write_shapes(path: Path, n_images: int = 1200) -> None:
    """Write pictures of discs, squares and crosses of any color on noise: uint8, gzip, 50 images per chunk."""
    rng = np.random.default_rng(0)
    row, column = np.mgrid[:SIZE, :SIZE]
    labels = rng.integers(0, len(SHAPES), n_images)
    images = rng.integers(0, 120, (n_images, 3, SIZE, SIZE), dtype="u1")
    for image, label in zip(images, labels, strict=True):
        radius = rng.integers(4, 8)
        y, x = row - rng.integers(8, SIZE - 8), column - rng.integers(8, SIZE - 8)
        inside = [
            np.hypot(y, x) < radius,
            np.maximum(abs(y), abs(x)) < radius - 1,
            (np.minimum(abs(y), abs(x)) < 2) & (np.maximum(abs(y), abs(x)) < radius),
        ][label]
        image[:, inside] = rng.integers(100, 256, (3, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(50, 3, SIZE, SIZE), compression="gzip", shuffle=True)
        file["labels"] = labels


def augment(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Flip and shift an image. A transform with a parameter ``rng`` is called with a generator for each row."""
    if rng.random() < 0.5:
        image = image.flip(-1)
    image = image.roll(tuple(rng.integers(-3, 4, 2).tolist()), dims=(-2, -1))
    if vision is not None:
        image = vision.rotate(image, float(rng.uniform(-10, 10)))
    return image


def as_they_are(image: Tensor) -> Tensor:
    """Return the image unchanged. Without an ``eval_transform``, images would be augmented in validation, too."""
    return image


def to_float(batch: Any) -> Any:
    """Scale bytes to floats from 0 to 1, for a whole batch at once."""
    images, *rest = batch
    return images.float() / 255, *rest


def shapes(path: Path, **options: Any) -> LazyH5DataModule:
    """Return the data module of this example."""
    return LazyH5DataModule(
        path,
        x_key="images",
        y_key="labels",
        split=0.25,
        transform=augment,
        eval_transform=as_they_are,
        batch_transform=to_float,
        **options,
    )


class ShapeNet(LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(32, len(SHAPES)),
        )
        self.accuracy = MulticlassAccuracy(len(SHAPES), average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def images_of_an_epoch(path: Path, epoch: int, batch_size: int) -> dict[int, Tensor]:
    """Return the augmented training images of an epoch, by row."""
    datamodule = shapes(path, batch_size=batch_size, with_index=True, seed=1)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    loader.sampler.set_epoch(epoch)  # a Trainer calls this itself
    return {row: image for images, _, rows in loader for row, image in zip(rows.tolist(), images.clone(), strict=True)}


def main(folder: Path = DATA) -> None:
    """Train, then compare the augmented images of batches and epochs."""
    path = folder / "shapes.h5"
    write_shapes(path)
    seed_everything(1)
    trainer = Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(ShapeNet(), datamodule=shapes(path, batch_size=32))
    print(f"accuracy on the validation rows: {trainer.callback_metrics['accuracy']:.3f}; chance: {1 / len(SHAPES):.3f}")

    small, large, later = (images_of_an_epoch(path, epoch, size) for epoch, size in ((0, 8), (0, 100), (1, 100)))
    same = sum(torch.equal(small[row], large[row]) for row in small)
    print(f"in batches of 8 and of 100, {same} of {len(small)} images are augmented alike")
    other = sum(not torch.equal(later[row], large[row]) for row in large)
    print(f"in the next epoch {other} of {len(large)} are augmented differently")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

"""Compute features of every row on one rank or several, and write them to another file in the order of the rows.

    python examples/features.py [FOLDER] [--ranks 2]

``predict`` runs a network over all rows; a callback writes the features. ``with_index=True`` adds the index of each row
to the batch, so that the callback can write each feature at the place of its row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn

from lightning_h5 import LazyH5DataModule

DATA = Path(__file__).parent / "data"
N_ROWS, N_FEATURES = 1501, 16


class Encoder(LightningModule):
    """A stand-in for a trained network, with random weights that are the same on all ranks."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, N_FEATURES))

    def prepare_data(self) -> None:
        """Write images of 8x8 bytes; Lightning calls this on one rank."""
        images = np.random.default_rng(0).integers(0, 256, (N_ROWS, 8, 8), dtype="u1")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(self.path, "w") as file:
            file.create_dataset("images", data=images, chunks=(64, 8, 8), compression="gzip")

    def forward(self, images: Tensor) -> Tensor:
        """Features, shape ``(batch, 16)``, of images ``(batch, 8, 8)``."""
        features: Tensor = self.layers(images / 255)
        return features

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        images, index = batch
        return index, self(images)


class FeatureWriter(BasePredictionWriter):
    """Writes features to an HDF5 file, batch by batch.

    A file can have only one writer: each rank writes its own file, and rank 0 joins them at the end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="batch")
        self.path = path

    def part(self, rank: int) -> Path:
        return self.path.with_suffix(f".rank{rank}.part")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file = h5py.File(self.part(trainer.global_rank), "w")
        self.file.create_dataset("index", (0,), "i8", maxshape=(None,), chunks=(4096,))
        self.file.create_dataset(
            "features", (0, N_FEATURES), "f4", maxshape=(None, N_FEATURES), chunks=(4096, N_FEATURES)
        )

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        for name, values in zip(("index", "features"), prediction, strict=True):
            array = self.file[name]
            array.resize(len(array) + len(values), axis=0)
            array[-len(values) :] = values.cpu().numpy()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.close()
        trainer.strategy.barrier()  # wait until all parts are complete
        if trainer.is_global_zero:
            with h5py.File(self.path, "w") as whole:
                features = whole.create_dataset("features", (N_ROWS, N_FEATURES), "f4", fillvalue=np.nan)
                for rank in range(trainer.world_size):
                    with h5py.File(self.part(rank)) as part:
                        index = part["index"][:]
                        print(f"rank {rank} had {len(index)} rows")
                        # Outside of training, each rank has neighboring rows in file order.
                        features[index[0] : index[-1] + 1] = part["features"][:]
                    self.part(rank).unlink()


def main(folder: Path = DATA, ranks: int = 1) -> None:
    """Write the features, and compute them again without a Trainer to compare."""
    path, target = folder / "unlabelled.h5", folder / "features.h5"
    seed_everything(1)
    model = Encoder(path)
    datamodule = LazyH5DataModule(predict_path=path, x_key="images", x_dtype="float32", with_index=True, batch_size=128)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[FeatureWriter(target)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.predict(model, datamodule=datamodule, return_predictions=False)
    if trainer.is_global_zero:
        with h5py.File(path) as source, h5py.File(target) as written, torch.inference_mode():
            expected = model.eval()(torch.from_numpy(source["images"][:].astype("f4"))).numpy()
            at_their_rows = np.isclose(written["features"][:], expected, atol=1e-5).all(axis=1)
        print(f"{at_their_rows.sum()} of {N_ROWS} features lie at their rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=DATA)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.ranks)

"""Train on two ranks without any flag: each rank has its own rows, and together they read every row once per epoch.

    python examples/two_ranks.py [FOLDER]

fits a line on two CPU processes under ``strategy="ddp"``, and prints the rows of each process. GPUs work in the same
way: ``accelerator="gpu", devices=2``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_h5 import LazyH5DataModule

DATA = Path(__file__).parent / "data"
SLOPE, OFFSET, N_ROWS = 3.0, -1.0, 1001  # odd, so not divisible by two ranks


class Line(LightningModule):
    """Fits ``y = slope * x + offset``, and records the rows of this rank."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.layer = nn.Linear(1, 1)
        self.rows: list[int] = []

    def prepare_data(self) -> None:
        """Write the file. Lightning calls this on one rank; the other waits."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(N_ROWS, 1)).astype("f4")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(self.path, "w") as file:
            file["x"] = x
            file["y"] = (SLOPE * x + OFFSET + 0.1 * rng.normal(size=x.shape)).astype("f4")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch  # with_index=True adds the index
        self.rows += index.tolist()
        return nn.functional.mse_loss(self.layer(x), y)

    def on_train_epoch_end(self) -> None:
        self.report(f"epoch {self.current_epoch}", "trained on")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.rows += batch[-1].tolist()

    def on_test_epoch_end(self) -> None:
        self.report("test", "evaluated")

    def report(self, stage: str, what: str) -> None:
        """Print the rows of all ranks, on rank 0."""
        ranks: list[list[int]] = [[] for _ in range(self.trainer.world_size)]
        torch.distributed.all_gather_object(ranks, self.rows)
        self.rows = []
        if self.trainer.is_global_zero:
            for rank, rows in enumerate(ranks):
                print(f"{stage}: rank {rank} {what} {len(rows)} rows, the first are {rows[:6]}")
            together = [row for rows in ranks for row in rows]
            each_once = sorted(together) == list(range(N_ROWS))
            print(f"{stage}: together {len(together)} of {N_ROWS} rows, each of them once: {each_once}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: Path = DATA) -> None:
    """Train for three epochs and evaluate; both ranks run this."""
    path = folder / "line.h5"
    datamodule = LazyH5DataModule(path, test_path=path, x_key="x", y_key="y", with_index=True, batch_size=32)
    model = Line(path)
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule)
    if trainer.is_global_zero:
        slope, offset = model.layer.weight.item(), model.layer.bias.item()
        print(f"the line: slope {slope:.3f} and offset {offset:.3f}; the truth: {SLOPE} and {OFFSET}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

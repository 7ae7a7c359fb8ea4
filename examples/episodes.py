"""Behavior cloning on robot episodes in one file, as robomimic writes them.

    python examples/episodes.py [FOLDER]

Each episode is a group ``data/demo_i`` with ``obs/image`` and ``actions``; ``mask/train`` and ``mask/valid`` list the
episodes of each split. A sample has the images of the present and the previous step, and the next 8 actions. At the
ends of an episode, windows repeat the first or the last step, and a mask excludes repeated steps from the loss.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_h5 import LazyH5DataModule

DATA = Path(__file__).parent / "data"
SIZE, N_ACTIONS = 16, 8


def drawn(place: np.ndarray) -> np.ndarray:
    """Return a picture of a place in the unit square."""
    y, x = np.mgrid[:SIZE, :SIZE] / (SIZE - 1)
    picture: np.ndarray = 255 * np.exp(-((x - place[0]) ** 2 + (y - place[1]) ** 2) / 0.01)
    return picture


def write_demos(path: Path, n_demos: int = 40) -> None:
    """Write episodes of a hand that moves to an object. It starts slowly; two pictures show its speed."""
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for number in range(n_demos):
            hand, goal = rng.random(2), rng.random(2)
            speed = np.zeros(2)
            images, actions = [], []
            for _ in range(rng.integers(12, 30)):
                images.append(np.stack([drawn(hand), drawn(goal), drawn(hand) * 0], axis=-1))
                speed = 0.7 * speed + 0.1 * (goal - hand)
                actions.append(speed)
                hand = hand + speed
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = len(actions)
            frames = np.stack(images).astype("u1")
            demo.create_dataset("obs/image", data=frames, chunks=(8, SIZE, SIZE, 3), compression="gzip")
            demo["actions"] = np.stack(actions).astype("f4")
        names = [f"demo_{number}" for number in range(n_demos)]
        file["mask/train"], file["mask/valid"] = names[10:], names[:10]


class Policy(LightningModule):
    """Predicts the next actions from the mean place of each color in two images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(2 * 3 * 2, 64), nn.ReLU(), nn.Linear(64, N_ACTIONS * 2))
        axes = torch.linspace(-1, 1, SIZE)
        self.register_buffer("grid", torch.stack(torch.meshgrid(axes, axes, indexing="ij")))
        self.squares: list[Tensor] = []

    def forward(self, image: Tensor) -> Tensor:
        """Actions, shape ``(batch, 8, 2)``, for images of shape ``(batch, 2, height, width, 3)``."""
        weights = image.float()
        weights = weights / weights.sum((2, 3), keepdim=True).clamp(min=1)
        places = torch.einsum("btyxc,pyx->btcp", weights, self.grid)
        actions: Tensor = 0.1 * self.layers(places).view(-1, N_ACTIONS, 2)
        return actions

    def errors(self, batch: dict[str, Tensor]) -> Tensor:
        """Squared errors of the actions that exist."""
        apart: Tensor = self(batch["image"]) - batch["actions"]
        return apart[batch["actions_valid"]].square()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return 1000 * self.errors(batch).mean()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.squares.append(self.errors(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: Path = DATA) -> None:
    """Train on some episodes, and predict the actions of others."""
    path = folder / "demos.h5"
    write_demos(path)
    seed_everything(0)
    datamodule = LazyH5DataModule(
        path,
        x_key={"image": "obs/image", "actions": "actions"},
        segments="data/*",
        window={"steps": {"obs/*": [-1, 1], "actions": [0, N_ACTIONS]}, "pad": "edge", "mask": True},
        split={"key": {"train": "mask/train", "test": "mask/valid"}},
        batch_size=32,
    )
    model = Policy()
    trainer = Trainer(
        max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)
    error = float(torch.cat(model.squares).mean().sqrt())
    with h5py.File(path) as file:
        held_out = np.concatenate([file[f"data/{name}/actions"][:] for name in file["mask/valid"].asstr()])
    print(f"error of actions in held-out episodes: {error:.4f}; of standing still: {np.sqrt((held_out**2).mean()):.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)

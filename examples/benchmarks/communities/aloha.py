"""ACT, ALOHA and Mobile ALOHA: a file for each episode, one frame a chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

N_ACTIONS = 50


def write(folder: Path, size: float) -> None:
    """Write episodes of 100 steps (12 in tests) with images of 120 x 160, a quarter of theirs along each side."""
    rng, n = np.random.default_rng(0), 100 if size >= 0.5 else 12
    for number in range(max(8, round(40 * size))):
        with h5py.File(folder / f"episode_{number}.hdf5", "w", rdcc_nbytes=2 << 20) as file:
            file.attrs["sim"] = True
            images = file.create_group("observations/images")
            frames = rng.integers(0, 256, (n, 120, 160, 3), dtype=np.uint8)
            images.create_dataset("top", data=frames, chunks=(1, 120, 160, 3))
            file["observations/qpos"] = rng.standard_normal((n, 14), dtype=np.float32)
            file["observations/qvel"] = rng.standard_normal((n, 14), dtype=np.float32)
            file["action"] = rng.standard_normal((n, 14), dtype=np.float32)


class EpisodicDataset(Dataset[Any]):
    """As in ACT: the file is opened for each sample, and all later actions are read and padded to the episode's length.

    ACT draws one step of each episode; here all steps are samples, so that both ways have the same ones.
    """

    def __init__(self) -> None:
        self._samples = []
        for path in sorted(Path().glob("episode_*.hdf5")):
            with h5py.File(path) as file:
                self._samples += [(path, step) for step in range(len(file["action"]))]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, step = self._samples[index]
        with h5py.File(path) as root:
            n = root["/action"].shape[0]
            qpos = root["/observations/qpos"][step]
            image = root["/observations/images/top"][step]
            action = root["/action"][step:]
        padded = np.zeros((n + N_ACTIONS, 14), np.float32)
        padded[: len(action)] = action
        is_pad = np.ones(n + N_ACTIONS, bool)
        is_pad[: len(action)] = False
        return {"qpos": qpos, "image": image, "action": padded[:N_ACTIONS], "is_pad": is_pad[:N_ACTIONS]}


COMMUNITY = Community(
    title="ACT and ALOHA",
    loader="ACT's `EpisodicDataset`",
    sample="images with the next 50 actions",
    write=write,
    dataset=EpisodicDataset,
    options={
        "train_path": "episode_*.hdf5",
        "x_key": {"qpos": "observations/qpos", "image": "observations/images/top", "action": "action"},
        "window": {"steps": {"qpos": 0, "image": 0, "action": [0, 50]}, "pad": "zeros", "mask": True},
        "split": 0.2,
    },
    their_arrays=lambda sample: (sample["qpos"], sample["image"], sample["action"], ~sample["is_pad"]),
    our_arrays=lambda sample: tuple(sample[name].numpy() for name in ("qpos", "image", "action", "action_valid")),
)

"""ACT, ALOHA, Mobile ALOHA: a file for each episode of a robot, with a frame of each camera a chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from .base import Community

FOLDER, FILES = "sim_transfer_cube", "sim_transfer_cube/episode_*.hdf5"
ACTIONS = 50
EPISODES = 5


def write(folder: Path, size: float) -> None:
    """Write five episodes of as many steps each: frames of 480 x 640 without compression, and joints."""
    rng = np.random.default_rng(0)
    n = max(8, round(80 * size))
    (folder / FOLDER).mkdir()
    for number in range(EPISODES):
        with h5py.File(folder / FOLDER / f"episode_{number}.hdf5", "w", rdcc_nbytes=1024**2 * 2) as file:
            file.attrs["sim"] = True
            observations = file.create_group("observations")
            frame_of = (480, 640, 3)
            images = observations.create_group("images")
            top = images.create_dataset("top", (n, *frame_of), dtype="uint8", chunks=(1, *frame_of))
            scene = rng.integers(0, 200, (60, 80, 3), dtype="u1").repeat(8, axis=0).repeat(8, axis=1)
            for step in range(n):
                top[step] = np.roll(scene, step, axis=1) + rng.integers(0, 8, (480, 1, 3), dtype="u1")
            for group, name in ((observations, "qpos"), (observations, "qvel"), (file, "action")):
                group.create_dataset(name, (n, 14), dtype="f4")[...] = rng.standard_normal((n, 14))


class EpisodicDataset(Dataset[Any]):
    """As in ACT: opens the file for each sample, reads the frame and the joints at t, and all actions after it.

    Theirs draws t for an episode. Here each t of each episode is a sample, and images and joints are as stored.
    """

    def __init__(self) -> None:
        self._episodes = range(len(list(Path(FOLDER).glob("*.hdf5"))))
        with h5py.File(f"{FOLDER}/episode_0.hdf5") as file:
            self._n = len(file["/action"])

    def __len__(self) -> int:
        return len(self._episodes) * self._n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        episode, start = divmod(index, self._n)
        with h5py.File(f"{FOLDER}/episode_{self._episodes[episode]}.hdf5", "r") as file:
            shape = file["/action"].shape
            qpos = file["/observations/qpos"][start]
            image = file["/observations/images/top"][start]
            action = file["/action"][start:]
        n = shape[0] - start
        padded = np.zeros((max(ACTIONS, shape[0]), shape[1]), dtype="f4")
        padded[:n] = action
        is_pad = np.zeros(len(padded), dtype="?")
        is_pad[n:] = True
        # The policy takes as many actions as it predicts.
        values = image, qpos, padded[:ACTIONS], is_pad[:ACTIONS]
        return tuple(torch.from_numpy(value) for value in values)


COMMUNITY = Community(
    title="ACT and ALOHA",
    loader="ACT's `EpisodicDataset`",
    sample="frames with the next 50 actions",
    write=write,
    dataset=EpisodicDataset,
    batch_size=8,
    options={
        "train_path": FILES,
        "x_key": {"image": "observations/images/top", "qpos": "observations/qpos", "action": "action"},
        "window": {"steps": {"image": 0, "qpos": 0, "action": [0, ACTIONS]}, "pad": "zeros", "mask": True},
        "split": 0.2,
        "batch_size": 8,
    },
    their_arrays=lambda sample: (*(value.numpy() for value in sample[:3]), ~sample[3].numpy()),
    our_arrays=lambda sample: tuple(sample[name].numpy() for name in ("image", "qpos", "action", "action_valid")),
)

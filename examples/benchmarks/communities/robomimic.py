"""robomimic, LIBERO, MimicGen, RoboCasa: demonstrations of robots, a group for each in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

FILE, FRAMES, ACTIONS = "demo.hdf5", 2, 10


def write(folder: Path, size: float) -> None:
    """Write demonstrations of 60 to 140 steps: images of 84 x 84 in gzip chunks of h5py's own choice, and states."""
    rng = np.random.default_rng(0)
    names = [f"demo_{number}" for number in range(max(6, round(60 * size)))]
    with h5py.File(folder / FILE, "w") as file:
        for name in names:
            n = int(rng.integers(60, 140)) if size >= 1 else int(rng.integers(10, 20))
            scene = rng.integers(0, 200, (1, 12, 12, 3)).repeat(7, axis=1).repeat(7, axis=2)
            images = (scene + rng.integers(0, 8, (n, 84, 84, 3))).astype("u1")
            demo = file.create_group(f"data/{name}")
            demo.attrs["num_samples"] = n
            demo["actions"] = rng.standard_normal((n, 7))
            demo.create_dataset("obs/agentview_image", data=images, compression="gzip")
            demo["obs/robot0_eef_pos"] = rng.standard_normal((n, 3))
            demo["dones"] = np.arange(n) == n - 1
        last = max(1, len(names) // 10)
        file["mask/train"] = np.array(names[last:], dtype="S")
        file["mask/valid"] = np.array(names[:last], dtype="S")


class SequenceDataset(Dataset[Any]):
    """As in robomimic: a list entry for each step, and for each sample a slice of each array, padded by hand."""

    def __init__(self) -> None:
        self._file: h5py.File | None = None
        self._samples: list[tuple[str, int, int]] = []
        with h5py.File(FILE) as file:
            demos = sorted(file["data"], key=lambda name: int(name[5:]))
            for demo in demos:
                n = int(file["data"][demo].attrs["num_samples"])
                self._samples += [(demo, step, n) for step in range(n)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._file is None:
            self._file = h5py.File(FILE, swmr=True, libver="latest")
        demo, step, n = self._samples[index]
        group = self._file["data"][demo]
        return {
            "image": self._steps(group["obs/agentview_image"], step - FRAMES + 1, step + 1, n),
            "pos": self._steps(group["obs/robot0_eef_pos"], step - FRAMES + 1, step + 1, n),
            "actions": self._steps(group["actions"], step, step + ACTIONS, n),
        }

    @staticmethod
    def _steps(array: h5py.Dataset, start: int, stop: int, n: int) -> Any:
        before, after = max(0, -start), max(0, stop - n)
        values = array[max(0, start) : min(stop, n)]
        return np.pad(values, [(before, after)] + [(0, 0)] * (values.ndim - 1), mode="edge")


COMMUNITY = Community(
    title="robomimic and LIBERO",
    loader="robomimic's `SequenceDataset`",
    sample="windows of 2 frames and 10 actions",
    write=write,
    dataset=SequenceDataset,
    options={
        "train_path": FILE,
        "x_key": {"image": "obs/agentview_image", "pos": "obs/robot0_eef_pos", "actions": "actions"},
        "segments": "data/*",
        "window": {"steps": {"image": [-1, 1], "pos": [-1, 1], "actions": [0, 10]}, "pad": "edge"},
        "split": {"key": {"train": "mask/train", "val": "mask/valid"}},
    },
    their_arrays=lambda sample: (sample["image"], sample["pos"], sample["actions"]),
    our_arrays=lambda sample: (sample["image"].numpy(), sample["pos"].numpy(), sample["actions"].numpy()),
)

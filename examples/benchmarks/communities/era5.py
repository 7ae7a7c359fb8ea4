"""FourCastNet, Makani and others who train on ERA5: a file for each year, with all variables in one array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from .base import Community

CHANNELS, SHAPE = 21, (91, 180)  # on a grid of 2 degrees; theirs has 0.25 degrees, 721 x 1440
IN_CHANNELS = np.arange(20)
YEARS = {"train": (1979, 1980), "test": (2016,)}


def write(folder: Path, size: float) -> None:
    """Write a few weeks of two years and of another one: float32 without chunks, as their script copies it."""
    rng = np.random.default_rng(0)
    n = max(12, round(120 * size))
    for split, years in YEARS.items():
        (folder / split).mkdir()
        for year in years:
            with h5py.File(folder / split / f"{year}.h5", "w") as file:
                n_times = n if split == "train" else 12
                fields = file.create_dataset("fields", (n_times, CHANNELS, *SHAPE), dtype="f4")
                for time in range(n_times):
                    fields[time] = rng.standard_normal((CHANNELS, *SHAPE), dtype="f4")


class GetDataset(Dataset[Any]):
    """As in FourCastNet: files stay open, and each sample slices t and t + 1, with a list of channels, then crops.

    The last time of a year, which theirs predicts from itself, is left out, and so are means and deviations.
    """

    def __init__(self) -> None:
        self._paths = sorted(Path("train").glob("*.h5"))
        with h5py.File(self._paths[0], "r") as file:
            self._n = file["fields"].shape[0] - 1
            self._n_lines = file["fields"].shape[2] - 1
        self._files: list[h5py.Dataset | None] = [None for _ in self._paths]

    def __len__(self) -> int:
        return len(self._paths) * self._n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        year, time = divmod(index, self._n)
        fields = self._files[year]
        if fields is None:
            fields = self._files[year] = h5py.File(self._paths[year], "r")["fields"]
        now = self._cropped(fields[time : time + 1, IN_CHANNELS])
        return now, self._cropped(fields[time + 1, IN_CHANNELS])

    def _cropped(self, image: np.ndarray[Any, Any]) -> torch.Tensor:
        if image.ndim == 3:
            image = np.expand_dims(image, 0)
        image = image[:, :, : self._n_lines]
        return torch.as_tensor(np.reshape(image, image.shape[1:]))


COMMUNITY = Community(
    title="FourCastNet and ERA5",
    loader="FourCastNet's `GetDataset`",
    sample="pairs of times",
    write=write,
    dataset=GetDataset,
    batch_size=8,
    options={
        "train_path": "train",
        "val_path": "test",
        "x_key": {"fields": "fields"},
        "window": [0, 2],
        "select": {"fields": {1: {"stop": 20}, 2: {"stop": 90}}},
        "batch_size": 8,
    },
    their_arrays=lambda sample: (torch.stack(sample).numpy(),),
    our_arrays=lambda sample: (sample["fields"].numpy(),),
)

"""FourCastNet, Makani, physicsnemo: weather in a file for each year."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

CHANNELS = np.arange(20)


def write(folder: Path, size: float) -> None:
    """Write years of 50 times (20 in tests) of 21 channels on a grid of 91 x 180 (19 x 36 in tests)."""
    rng = np.random.default_rng(0)
    n_times, shape = (50, (91, 180)) if size >= 0.5 else (20, (19, 36))
    for split, years in (("train", range(1979, 1983)), ("valid", range(1983, 1984))):
        (folder / split).mkdir()
        for year in years:
            with h5py.File(folder / split / f"{year}.h5", "w") as file:
                file["fields"] = rng.standard_normal((n_times, 21, *shape), dtype=np.float32)


class GetDataset(Dataset[Any]):
    """As in FourCastNet: files stay open in each worker, and channels are picked by an array of their numbers.

    At the last time of a year, theirs has the input as its target; these samples are left out here.
    """

    def __init__(self) -> None:
        self._paths = sorted(Path("train").glob("*.h5"))
        with h5py.File(self._paths[0]) as file:
            self._n_times, _, self._height, _ = file["fields"].shape
        self._files: list[Any] = [None] * len(self._paths)

    def __len__(self) -> int:
        return len(self._paths) * (self._n_times - 1)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        year, time = divmod(index, self._n_times - 1)
        if self._files[year] is None:
            self._files[year] = h5py.File(self._paths[year], "r")["fields"]
        fields = self._files[year]
        first = fields[time, CHANNELS][:, : self._height - 1]
        second = fields[time + 1, CHANNELS][:, : self._height - 1]
        return first, second


COMMUNITY = Community(
    title="FourCastNet and ERA5",
    loader="FourCastNet's `GetDataset`",
    sample="pairs of times",
    write=write,
    dataset=GetDataset,
    options={
        "train_path": "train/*.h5",
        "val_path": "valid/*.h5",
        "x_key": "fields",
        "window": [0, 2],
        "select": {"fields": {1: {"stop": 20}, 2: {"stop": -1}}},
        "batch_size": 8,
    },
    batch_size=8,
    their_arrays=lambda sample: (np.stack(sample),),
    our_arrays=lambda sample: (sample.numpy(),),
)

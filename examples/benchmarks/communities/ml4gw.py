"""ml4gw, aframe: strain of gravitational wave detectors, a file for each segment of observation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

LENGTH, STRIDE = 8192, 4096


def write(folder: Path, size: float) -> None:
    """Write segments of 1,000 seconds (10 in tests) at 4,096 Hz of two detectors."""
    rng = np.random.default_rng(0)
    n = 4_096_000 if size >= 0.5 else 122_880
    (folder / "background").mkdir()
    for number in range(4):
        with h5py.File(folder / "background" / f"background-{1_256_665_618 + number}-1000.hdf5", "w") as file:
            for name in ("H1", "L1"):
                file[name] = rng.standard_normal(n)
                file[name].attrs.update({"x0": 0.0, "dx": 1 / 4096})


class Hdf5TimeSeriesDataset(Dataset[Any]):
    """As in ml4gw: each batch opens the files that it needs, and reads each window of each channel by itself.

    Theirs draws windows at random places; these follow each other with a stride, so that both ways have the same ones.
    """

    def __init__(self) -> None:
        self._windows = []
        for path in sorted(Path("background").glob("*.hdf5")):
            with h5py.File(path) as file:
                self._windows += [(path, start) for start in range(0, len(file["H1"]) - LENGTH + 1, STRIDE)]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        found: list[Any] = [None] * len(indices)
        by_path: dict[Path, list[tuple[int, int]]] = {}
        for at, index in enumerate(indices):
            path, start = self._windows[index]
            by_path.setdefault(path, []).append((at, start))
        for path, places in by_path.items():
            with h5py.File(path, "r") as file:
                for at, start in places:
                    found[at] = np.stack([file[name][start : start + LENGTH] for name in ("H1", "L1")])
        return found


COMMUNITY = Community(
    title="Gravitational waves",
    loader="ml4gw's `Hdf5TimeSeriesDataset`",
    sample="windows of 2 seconds of two detectors",
    write=write,
    dataset=Hdf5TimeSeriesDataset,
    options={
        "train_path": "background/*.hdf5",
        "x_key": {"H1": "H1", "L1": "L1"},
        "window": {"length": 8192, "stride": 4096},
        "split": 0.25,
    },
    their_arrays=lambda sample: (sample,),
    our_arrays=lambda sample: (np.stack([sample["H1"].numpy(), sample["L1"].numpy()]),),
)

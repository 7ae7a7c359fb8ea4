"""ml4gw, Aframe: strain of gravitational-wave detectors, a file for each stretch in which all of them measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from .base import Community

FOLDER, CHANNELS = "background", ("H1", "L1")
RATE = 2048
LENGTH, STRIDE = 8 * RATE, 2 * RATE


def write(folder: Path, size: float) -> None:
    """Write eight files of 500 to 1,100 seconds, as GWpy does: gzip, in chunks of h5py's own choice."""
    rng = np.random.default_rng(0)
    start = 1_240_579_783
    (folder / FOLDER).mkdir()
    for _ in range(8):
        seconds = max(32, round(int(rng.integers(500, 1100)) * size))
        with h5py.File(folder / FOLDER / f"background-{start}-{seconds}.hdf5", "w") as file:
            for channel in CHANNELS:
                strain = np.cumsum(rng.standard_normal(seconds * RATE)) * 1e-23
                array = file.create_dataset(channel, data=strain, compression="gzip")
                array.attrs.update({"name": channel, "channel": f"{channel}:STRAIN", "unit": "", "xunit": "s"})
                array.attrs.update({"x0": float(start), "dx": 1 / RATE})
        start += seconds + int(rng.integers(10, 10_000))


class Hdf5TimeSeriesDataset(Dataset[Any]):
    """As in ml4gw: a batch is allocated at once, and each of its files is opened once, for a slice of each channel.

    Theirs draws files and starts for each batch. Here the starts are two seconds apart, and a sampler draws them.
    """

    def __init__(self) -> None:
        self._paths = sorted(Path(FOLDER).glob("*.hdf5"))
        self._ends = np.cumsum([self._n_windows(path) for path in self._paths])

    @staticmethod
    def _n_windows(path: Path) -> int:
        with h5py.File(path, "r") as file:
            return (len(file[CHANNELS[0]]) - LENGTH) // STRIDE + 1

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        batch = np.zeros((len(indices), len(CHANNELS), LENGTH))
        numbers = np.searchsorted(self._ends, indices, side="right")
        firsts = np.concatenate([[0], self._ends])[numbers]
        starts = (np.asarray(indices) - firsts) * STRIDE
        for number in np.unique(numbers):
            with h5py.File(self._paths[number], "r") as file:
                for row in np.flatnonzero(numbers == number):
                    for at, channel in enumerate(CHANNELS):
                        batch[row, at] = file[channel][starts[row] : starts[row] + LENGTH]
        return torch.Tensor(batch)


def as_it_is(batch: torch.Tensor) -> torch.Tensor:
    """Return the batch, which is complete."""
    return batch


COMMUNITY = Community(
    title="Gravitational waves",
    loader="ml4gw's `Hdf5TimeSeriesDataset`",
    sample="windows of 8 s",
    write=write,
    dataset=Hdf5TimeSeriesDataset,
    collate_fn=as_it_is,  # type: ignore[arg-type]
    options={
        "train_path": f"{FOLDER}/*.hdf5",
        "x_key": {"H1": "H1", "L1": "L1"},
        "x_dtype": "float32",
        "window": {"length": LENGTH, "stride": STRIDE},
        "split": 0.2,
    },
    their_arrays=lambda sample: tuple(sample.numpy()),
    our_arrays=lambda sample: (sample["H1"].numpy(), sample["L1"].numpy()),
)

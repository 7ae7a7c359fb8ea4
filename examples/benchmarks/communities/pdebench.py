"""PDEBench: runs of a solver, a group for each in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

FILE, STEPS = "2D_diff-react_NA_NA.h5", 17


def write(folder: Path, size: float) -> None:
    """Write runs of 101 steps of two fields of 128 x 128, smooth in space and time, in chunks of h5py's own choice."""
    rng = np.random.default_rng(0)
    n_steps, n = (101, 128) if size >= 1 else (36, 32)
    x, t = np.linspace(-1, 1, n), np.linspace(0, 5, n_steps)
    lzf = {"dtype": "float32", "compression": "lzf"}
    with h5py.File(folder / FILE, "w") as file:
        for number in range(max(10, round(20 * size))):
            data = np.zeros((n_steps, n, n, 2), "f4")
            for wave in rng.uniform(1, 8, (6, 4)):
                along_x, along_y = np.sin(wave[0] * x), np.cos(wave[1] * x)
                in_time = np.stack([np.exp(-wave[2] * t / 9), np.cos(wave[3] * t)], axis=-1)
                data += np.einsum("tc,x,y->txyc", *(each.astype("f4") for each in (in_time, along_x, along_y)))
            group = file.create_group(f"{number:04}")
            group.attrs["config"] = f"sim:\n  Du: 0.001\n  Dv: 0.005\n  k: 0.005\n  seed: {number}\n"
            group.create_dataset("data", data=data, **lzf)
            for name, values in {"x": x, "y": x, "t": t}.items():
                group.create_dataset(f"grid/{name}", data=values, **lzf)


class DiffRe2DDataset(Dataset[Any]):
    """As in Multiple Physics Pretraining, for files of PDEBench: lists the runs and slices one for each window.

    Channels stay last, as they are stored. PDEBench's own loader gives whole runs, each from a file opened for it.
    """

    def __init__(self) -> None:
        self._file: h5py.File | None = None
        with h5py.File(FILE, "r") as file:
            runs = list(file.keys())
            self._n_windows = file[runs[0]]["data"].shape[0] - STEPS + 1
            self._n = len(runs) * self._n_windows

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        run, step = divmod(index, self._n_windows)
        if self._file is None:
            self._file = h5py.File(FILE, "r")
        runs = list(self._file.keys())
        trajectory = self._file[runs[run]]["data"][step : step + STEPS]
        return trajectory[:-1], trajectory[-1]


COMMUNITY = Community(
    title="PDEBench",
    loader="`DiffRe2DDataset` of Multiple Physics Pretraining",
    sample="windows of 16 + 1 steps",
    write=write,
    dataset=DiffRe2DDataset,
    options={
        "train_path": FILE,
        "x_key": {"u": "data"},
        "segments": "*",
        "window": {"length": STEPS, "stride": 1},
        "split": 0.1,
    },
    their_arrays=lambda sample: (np.concatenate([sample[0], sample[1][None]]),),
    our_arrays=lambda sample: (sample["u"].numpy(),),
)

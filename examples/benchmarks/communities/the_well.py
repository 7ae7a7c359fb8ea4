"""The Well: simulations as arrays of shape (trajectory, step, x, y), scalars and vectors in groups of their own."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

N_STEPS = 5  # four of input, one of output


def write(folder: Path, size: float) -> None:
    """Write files of trajectories of 60 steps (9 in tests) on a grid of 128 x 128 (16 x 16 in tests)."""
    rng = np.random.default_rng(0)
    n_trajectories, n_steps, width = (8, 60, 128) if size >= 0.5 else (4, 9, 16)
    for split, n_files in (("train", 4), ("valid", 1)):
        (folder / "data" / split).mkdir(parents=True)
        for number in range(n_files):
            with h5py.File(folder / "data" / split / f"flow_{number}.hdf5", "w") as file:
                file.attrs.update({"dataset_name": "flow", "n_trajectories": n_trajectories, "grid_type": "cartesian"})
                shape = (n_trajectories, n_steps, width, width)
                for name, values in {
                    "t0_fields/density": rng.standard_normal(shape, dtype=np.float32),
                    "t1_fields/velocity": rng.standard_normal((*shape, 2), dtype=np.float32),
                }.items():
                    array = file.create_dataset(name, data=values)
                    array.attrs.update({"dim_varying": [True, True], "sample_varying": True, "time_varying": True})


class WellDataset(Dataset[Any]):
    """As in The Well: the file is opened for each sample, and closed again so that memory does not grow."""

    def __init__(self) -> None:
        self._paths = sorted(Path("data/train").glob("*.hdf5"))
        self._windows = []
        for path in self._paths:
            with h5py.File(path) as file:
                self._windows.append(file["t0_fields/density"].shape[1] - N_STEPS + 1)
                n_trajectories = file["t0_fields/density"].shape[0]
        self._ends = list(accumulate(n * n_trajectories for n in self._windows))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        trajectory, step = divmod(index - (self._ends[number - 1] if number else 0), self._windows[number])
        found = {}
        with h5py.File(self._paths[number], "r") as file:
            for order in ("t0_fields", "t1_fields", "t2_fields"):
                for name in file.get(order, ()):
                    array = file[order][name]
                    if array.attrs["sample_varying"] and array.attrs["time_varying"]:
                        found[name] = array[trajectory, step : step + N_STEPS]
        return found


COMMUNITY = Community(
    title="The Well",
    loader="The Well's `WellDataset`",
    sample="windows of 5 steps",
    write=write,
    dataset=WellDataset,
    options={
        "train_path": "data/train/*.hdf5",
        "val_path": "data/valid/*.hdf5",
        "x_key": {"density": "t0_fields/density", "velocity": "t1_fields/velocity"},
        "segments": {"axis": 0, "step_axis": 1},
        "window": {"length": 5, "stride": 1},
        "batch_size": 16,
    },
    batch_size=16,
    their_arrays=lambda sample: (sample["density"], sample["velocity"]),
    our_arrays=lambda sample: (sample["density"].numpy(), sample["velocity"].numpy()),
)

"""PDEBench: a group for each run of a simulation, with its grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

FILE = "2D_diff-react_NA_NA.h5"


def write(folder: Path, size: float) -> None:
    """Write runs of 101 steps (21 in tests) on a grid of 64 x 64 (16 x 16 in tests), half of theirs along each side."""
    rng = np.random.default_rng(0)
    n_steps, width = (101, 64) if size >= 0.5 else (21, 16)
    at = np.linspace(-1, 1, width, dtype=np.float32)
    with h5py.File(folder / FILE, "w") as file:
        for number in range(max(12, round(80 * size))):
            waves = rng.uniform(1, 9, (2, 2))
            time = np.arange(n_steps, dtype=np.float32)[:, None, None, None] / 20
            x = np.sin(waves[0] * at[:, None, None] + time) * np.cos(waves[1] * at[None, :, None] - time)
            group = file.create_group(f"{number:04}")
            group.create_dataset("data", data=x.astype(np.float32), compression="lzf")
            for name in ("x", "y"):
                group[f"grid/{name}"] = at
            group["grid/t"] = np.arange(n_steps, dtype=np.float32) / 20
            group.attrs["config"] = "seed: 1"


class FNODatasetMult(Dataset[Any]):
    """As in PDEBench: the file is opened for each run, which is read whole."""

    def __init__(self) -> None:
        with h5py.File(FILE) as file:
            self._names = sorted(file.keys())

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with h5py.File(FILE, "r") as file:
            group = file[self._names[index]]
            return {
                "u": np.array(group["data"], dtype="f"),
                "x": np.array(group["grid"]["x"], dtype="f"),
                "y": np.array(group["grid"]["y"], dtype="f"),
            }


COMMUNITY = Community(
    title="PDEBench",
    loader="PDEBench's `FNODatasetMult`",
    sample="whole runs",
    write=write,
    dataset=FNODatasetMult,
    options={
        "train_path": FILE,
        "x_key": {"u": "data", "x": "grid/x", "y": "grid/y"},
        "segments": {"groups": "*", "constants": ["x", "y"]},
        "sample": "segment",
        "split": 0.1,
        "batch_size": 5,
    },
    batch_size=5,
    their_arrays=lambda sample: (sample["u"], sample["x"], sample["y"]),
    our_arrays=lambda sample: (sample["u"].numpy(), sample["x"].numpy(), sample["y"].numpy()),
)

"""pytorch-3dunet, ilastik: volumes of microscopy with labels, a file for each."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

SHAPE, STRIDE = (16, 64, 64), (8, 32, 32)


def write(folder: Path, size: float) -> None:
    """Write volumes of 64 x 256 x 256 (24 x 96 x 96 in tests), gzip, in chunks of h5py's own choice."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 6), ("val", 1)):
        (folder / split).mkdir()
        shape = (64, 256, 256) if size >= 0.5 else (24, 96, 96)
        for number in range(n):
            scene = rng.integers(0, 200, [side // 8 for side in shape]).repeat(8, 0).repeat(8, 1).repeat(8, 2)
            raw = (scene + rng.integers(0, 30, shape)).astype(np.uint8)
            with h5py.File(folder / split / f"embryo_{number}.h5", "w") as file:
                file.create_dataset("raw", data=raw, compression="gzip")
                file.create_dataset("label", data=(scene > 100).astype(np.uint16), compression="gzip")


class LazyHDF5Dataset(Dataset[Any]):
    """As `LazyHDF5Dataset` in pytorch-3dunet: the file is opened for each patch of each array.

    Its other dataset reads whole volumes into memory first.
    """

    def __init__(self) -> None:
        self._patches = []
        for path in sorted(Path("train").glob("*.h5")):
            with h5py.File(path) as file:
                sides = zip(file["raw"].shape, SHAPE, STRIDE, strict=True)
            starts = [range(0, n - size + 1, stride) for n, size, stride in sides]
            for corner in product(*starts):
                self._patches.append((path, tuple(slice(at, at + n) for at, n in zip(corner, SHAPE, strict=True))))

    def __len__(self) -> int:
        return len(self._patches)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, place = self._patches[index]
        return self._patch(path, "raw", place), self._patch(path, "label", place).astype("i4")

    @staticmethod
    def _patch(path: Path, name: str, place: Any) -> Any:
        with h5py.File(path, "r") as file:
            return file[name][place]


COMMUNITY = Community(
    title="3-D microscopy: pytorch-3dunet",
    loader="pytorch-3dunet's `LazyHDF5Dataset`",
    sample="overlapping patches",
    write=write,
    dataset=LazyHDF5Dataset,
    options={
        "train_path": "train/*.h5",
        "val_path": "val/*.h5",
        "x_key": "raw",
        "y_key": "label",
        "y_dtype": "int32",
        "patch": {"shape": [16, 64, 64], "stride": [8, 32, 32]},
        "batch_size": 8,
    },
    batch_size=8,
    their_arrays=lambda sample: sample,
    our_arrays=lambda sample: (sample[0].numpy(), sample[1].numpy()),
)

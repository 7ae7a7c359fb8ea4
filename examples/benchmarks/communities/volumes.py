"""pytorch-3dunet: a file for each volume of a microscope, with its labels; a sample is a patch of both."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

FOLDER, PATCH, STRIDE = "train", (80, 170, 170), (20, 40, 40)


def write(folder: Path, size: float) -> None:
    """Write volumes as 8-bit values and 16-bit labels, in gzip chunks of h5py's own choice."""
    rng = np.random.default_rng(0)
    shape = (128, 380, 400) if size >= 1 else (84, 180, 190)
    for part, n_volumes in (("train", max(2, round(3 * size))), ("val", 1)):
        (folder / part).mkdir()
        for number in range(n_volumes):
            blocks = [range(0, n, 16) for n in shape]
            cells = rng.integers(0, 2000, [len(each) for each in blocks], dtype="u2")
            label = cells.repeat(16, 0).repeat(16, 1).repeat(16, 2)[tuple(map(slice, shape))]
            raw = (label % 200).astype("u1") + rng.integers(0, 16, shape, dtype="u1")
            with h5py.File(folder / part / f"N_{number + 420}_ds2x.h5", "w") as file:
                file.create_dataset("raw", data=raw, compression="gzip")
                file.create_dataset("label", data=label, compression="gzip")


class LazyHDF5Datasets(Dataset[Any]):
    """As in pytorch-3dunet: a slice for each patch is listed, and each patch is read from the file, opened twice.

    This is its `LazyHDF5Dataset`, one for each file, concatenated. Its default loads whole volumes. Augmentation is
    left out.
    """

    def __init__(self) -> None:
        self.paths = sorted(Path(FOLDER).iterdir())
        self.slices = [list(self._slices(path)) for path in self.paths]
        self.ends = list(accumulate(map(len, self.slices)))

    @staticmethod
    def _slices(path: Path) -> Iterator[tuple[slice, ...]]:
        with h5py.File(path) as file:
            shape = file["raw"].shape
        axes = [
            [*range(0, n - size + 1, stride), *([n - size] if (n - size) % stride else [])]
            for n, size, stride in zip(shape, PATCH, STRIDE, strict=True)
        ]
        for place in product(*axes):
            yield tuple(slice(at, at + size) for at, size in zip(place, PATCH, strict=True))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        which = bisect_right(self.ends, index)
        part = self.slices[which][index - (self.ends[which - 1] if which else 0)]
        with h5py.File(self.paths[which]) as file:
            raw = file["raw"][part]
        with h5py.File(self.paths[which]) as file:
            label = file["label"][part]
        return raw, label


COMMUNITY = Community(
    title="3-D microscopy: pytorch-3dunet",
    loader="pytorch-3dunet's `LazyHDF5Dataset`",
    sample="overlapping patches of 80 x 170 x 170",
    write=write,
    dataset=LazyHDF5Datasets,
    options={
        "train_path": "train",
        "val_path": "val",
        "x_key": "raw",
        "y_key": "label",
        "patch": {"shape": [80, 170, 170], "stride": [20, 40, 40]},
        "batch_size": 1,
    },
    batch_size=1,
    their_arrays=lambda sample: sample,
    our_arrays=lambda sample: (sample[0].numpy(), sample[1].numpy()),
)

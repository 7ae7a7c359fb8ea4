"""fastMRI, M4Raw, SKM-TEA, CMRxRecon: a file for each volume of k-space, with attributes; a sample is a slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from .base import Community

FOLDER = "multicoil_train"
HEADER = "<ismrmrdHeader xmlns='http://www.ismrm.org/ISMRMRD'><encoding/></ismrmrdHeader>"


def write(folder: Path, size: float) -> None:
    """Write brain volumes of 8 slices: 4 to 8 coils, 640 x 320 to 396, without chunks, as in the published files."""
    rng = np.random.default_rng(0)
    number = 0
    for part, n_volumes in (("multicoil_train", max(3, round(5 * size))), ("multicoil_val", 1)):
        (folder / part).mkdir()
        for _ in range(n_volumes):
            n_coils, width = (4, 8, 5, 6)[number % 4], (320, 396, 372)[number % 3]
            n, height = 8, 640
            if size < 1:
                n, height, width = 4, max(16, round(height * size)), max(12, round(width * size))
            kspace = rng.standard_normal((n, n_coils, height, 2 * width), dtype="f4").view("c8")
            target = rng.random((n, height // 2, height // 2), dtype="f4")
            with h5py.File(folder / part / f"file_brain_AXT2_{200_0001 + number}.h5", "w") as file:
                file["ismrmrd_header"] = HEADER
                file["kspace"] = kspace
                file["reconstruction_rss"] = target
                file.attrs.update(
                    {
                        "acquisition": "AXT2",
                        "max": float(target.max()),
                        "norm": float(np.linalg.norm(target)),
                        "patient_id": f"{rng.integers(2**62):016x}",
                    }
                )
            number += 1


class SliceDataset(Dataset[Any]):
    """As in fastMRI: a list entry for each slice, and for each sample the file is opened and all attributes are read.

    Of its transforms, `to_tensor` is here: real and imaginary parts are copied to a last axis.
    """

    def __init__(self) -> None:
        self.examples: list[tuple[Path, int]] = []
        for name in sorted(Path(FOLDER).iterdir()):
            with h5py.File(name) as file:
                self.examples += [(name, number) for number in range(file["kspace"].shape[0])]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, number = self.examples[index]
        with h5py.File(name) as file:
            kspace = file["kspace"][number]
            target = file["reconstruction_rss"][number]
            attributes = dict(file.attrs)
        return {
            "kspace": torch.from_numpy(np.stack((kspace.real, kspace.imag), axis=-1)),
            "target": torch.from_numpy(target),
            "max": attributes["max"],
            "segment": name.name,
            "step": number,
        }


COMMUNITY = Community(
    title="fastMRI",
    loader="fastMRI's `SliceDataset`",
    sample="slices of k-space",
    write=write,
    dataset=SliceDataset,
    options={
        "train_path": "multicoil_train",
        "val_path": "multicoil_val",
        "x_key": {"kspace": "kspace", "target": "reconstruction_rss", "max": "@max"},
        "decode": {"kspace": "real"},
        "sample": "row",
        "segments": {"keep_together": True},
        "with_index": True,
        "batch_size": 1,
    },
    batch_size=1,
    their_arrays=lambda sample: (
        sample["kspace"].numpy(),
        sample["target"].numpy(),
        np.asarray(sample["max"]),
        np.asarray(sample["segment"]),
        np.asarray(sample["step"]),
    ),
    our_arrays=lambda sample: (
        sample["kspace"].numpy(),
        sample["target"].numpy(),
        np.asarray(sample["max"]),
        np.asarray(sample["segment"]),
        np.asarray(sample["step"]),
    ),
)

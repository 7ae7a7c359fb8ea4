"""fastMRI and other MRI collections: a file for each volume, whose attributes belong to its slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community


def write(folder: Path, size: float) -> None:
    """Write volumes of 20 to 36 slices (4 to 8 in tests) of 4 or 5 coils, of two widths."""
    rng = np.random.default_rng(0)
    few, many, height = (20, 36, 160) if size >= 0.5 else (4, 8, 24)
    (folder / "multicoil_train").mkdir()
    for number in range(max(10, round(20 * size))):
        n, coils, width = int(rng.integers(few, many)), int(rng.integers(4, 6)), int(rng.choice([92, 96]))
        shape = (n, coils, height, width)
        with h5py.File(folder / "multicoil_train" / f"file{1_000_000 + number}.h5", "w") as file:
            real, imaginary = rng.standard_normal((2, *shape), dtype=np.float32)
            file["kspace"] = real + 1j * imaginary
            file["reconstruction_rss"] = rng.random((n, height // 2, height // 2), dtype=np.float32)
            file.attrs.update(
                {"max": rng.random(), "norm": rng.random(), "patient_id": f"p{number // 2}", "acquisition": "CORPD_FBK"}
            )


class SliceDataset(Dataset[Any]):
    """As in fastMRI: a list entry for each slice, and the file is opened for each of them."""

    def __init__(self) -> None:
        self._samples = []
        for path in sorted(Path("multicoil_train").glob("*.h5")):
            with h5py.File(path) as file:
                metadata = {"max": file.attrs["max"], "num_slices": file["kspace"].shape[0]}
                self._samples += [(path, number, metadata) for number in range(metadata["num_slices"])]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, number, metadata = self._samples[index]
        with h5py.File(path, "r") as file:
            kspace = file["kspace"][number]
            target = file["reconstruction_rss"][number]
            attributes = dict(file.attrs)
            attributes.update(metadata)
        return {"kspace": kspace, "target": target, "max": attributes["max"]}


COMMUNITY = Community(
    title="fastMRI",
    loader="fastMRI's `SliceDataset`",
    sample="slices",
    write=write,
    dataset=SliceDataset,
    options={
        "train_path": "multicoil_train/*.h5",
        "x_key": {"kspace": "kspace", "target": "reconstruction_rss", "max": "@max"},
        "sample": "row",
        "segments": {"keep_together": True},
        "split": {"val_fraction": 0.2, "group_key": "@patient_id"},
        "batch_size": 1,
    },
    batch_size=1,
    their_arrays=lambda sample: (sample["kspace"], sample["target"], np.asarray(sample["max"])),
    our_arrays=lambda sample: (sample["kspace"].numpy(), sample["target"].numpy(), np.asarray(sample["max"])),
)

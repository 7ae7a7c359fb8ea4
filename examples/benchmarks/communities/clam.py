"""CLAM, TRIDENT, STAMP: a file of patch features for each slide, and labels in a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from .base import Community

FOLDER, TABLE = "h5_files", "slides.csv"


def write(folder: Path, size: float) -> None:
    """Write slides of 400 to 5,000 patches of features: growable arrays in chunks of one patch."""
    rng = np.random.default_rng(0)
    (folder / FOLDER).mkdir()
    with (folder / TABLE).open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["case_id", "slide_id", "label"])
        for number in range(max(12, round(30 * size))):
            slide = f"slide_{number:04}"
            lines.writerow([f"patient_{number // 2:04}", slide, number // 2 % 2])
            n = int(rng.integers(400, 5000)) if size >= 1 else int(rng.integers(400, 5000) * size)
            _save(folder / FOLDER / f"{slide}.h5", _features(rng, n))


def _features(rng: np.random.Generator, n: int) -> dict[str, np.ndarray[Any, Any]]:
    features = rng.standard_normal((n, 1024), dtype="f4")
    return {"features": features, "coords": rng.integers(0, 400, (n, 2)) * 256}


def _save(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            chunks, growing = (1, *values.shape[1:]), (None, *values.shape[1:])
            file.create_dataset(name, data=values, chunks=chunks, maxshape=growing)


class GenericMILDataset(Dataset[Any]):
    """As in CLAM with `load_from_h5(True)`: the table is in memory, and for each slide its file is opened and read."""

    def __init__(self) -> None:
        with Path(TABLE).open(newline="") as file:
            lines = list(csv.DictReader(file))
        self.slides = [line["slide_id"] for line in lines]
        self.labels = [int(line["label"]) for line in lines]

    def __len__(self) -> int:
        return len(self.slides)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, np.ndarray[Any, Any]]:
        with h5py.File(f"{FOLDER}/{self.slides[index]}.h5") as file:
            features = file["features"][:]
            coords = file["coords"][:]
        return torch.from_numpy(features), self.labels[index], coords


def collate(samples: list[Any]) -> list[Any]:
    """Return the only bag of a batch, its label and its coordinates, as CLAM's `collate_MIL` does."""
    features = torch.cat([sample[0] for sample in samples], dim=0)
    return [features, torch.LongTensor([sample[1] for sample in samples]), np.vstack([sample[2] for sample in samples])]


COMMUNITY = Community(
    title="Pathology slides: CLAM and TRIDENT",
    loader="CLAM's `Generic_MIL_Dataset`",
    sample="slides, bags of 400 to 5,000 patches",
    write=write,
    dataset=GenericMILDataset,
    collate_fn=collate,
    options={
        "train_path": "h5_files",
        "x_key": {"features": "features", "coords": "coords", "label": "table/label"},
        "sample": "segment",
        "table": {"path": "slides.csv", "on": {"slide_id": "@stem"}},
        "split": {"val_fraction": 0.2, "group_key": "table/case_id", "stratify_key": "table/label"},
        "batch_size": 1,
    },
    batch_size=1,
    their_arrays=lambda sample: (sample[0].numpy(), np.asarray(sample[1]), sample[2]),
    our_arrays=lambda sample: (sample["features"].numpy(), np.asarray(sample["label"]), sample["coords"].numpy()),
)

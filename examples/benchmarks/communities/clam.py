"""CLAM, TRIDENT, STAMP: features of a pathology slide in a file of its own, labels in a table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community


def write(folder: Path, size: float) -> None:
    """Write slides of 500 to 2,500 patches (10 to 40 in tests) with 1,024 features each."""
    rng = np.random.default_rng(0)
    few, many = (500, 2500) if size >= 0.5 else (10, 40)
    (folder / "h5_files").mkdir()
    lines = [["case_id", "slide_id", "label"]]
    for number in range(max(30, round(60 * size))):
        n, name = int(rng.integers(few, many)), f"slide_{number:03}"
        with h5py.File(folder / "h5_files" / f"{name}.h5", "w") as file:
            for key, values in {
                "features": rng.standard_normal((n, 1024), dtype=np.float32),
                "coords": rng.integers(0, 100_000, (n, 2)),
            }.items():
                width = values.shape[1]
                file.create_dataset(key, data=values, chunks=(1, width), maxshape=(None, width))
        lines.append([f"patient_{number // 2}", name, str(number % 4 // 2)])
    with (folder / "slides.csv").open("w", newline="") as table:
        csv.writer(table).writerows(lines)


class GenericMILDataset(Dataset[Any]):
    """As in CLAM: the file of a slide is opened and read whole for each sample."""

    def __init__(self) -> None:
        with Path("slides.csv").open(newline="") as table:
            self._slides = [(line["slide_id"], int(line["label"])) for line in csv.DictReader(table)]

    def __len__(self) -> int:
        return len(self._slides)

    def __getitem__(self, index: int) -> tuple[Any, int, Any]:
        slide_id, label = self._slides[index]
        with h5py.File(f"h5_files/{slide_id}.h5", "r") as file:
            return file["features"][:], label, file["coords"][:]


COMMUNITY = Community(
    title="Pathology slides: CLAM and TRIDENT",
    loader="CLAM's `Generic_MIL_Dataset`",
    sample="slides",
    write=write,
    dataset=GenericMILDataset,
    options={
        "train_path": "h5_files/*.h5",
        "x_key": {"features": "features", "coords": "coords"},
        "y_key": "table/label",
        "sample": "segment",
        "table": {"path": "slides.csv", "on": {"slide_id": "@stem"}},
        "split": {"val_fraction": 0.2, "group_key": "table/case_id", "stratify_key": "table/label"},
        "batch_size": 1,
    },
    batch_size=1,
    their_arrays=lambda sample: (sample[0], sample[2], np.asarray(sample[1])),
    our_arrays=lambda sample: (sample[0]["features"].numpy(), sample[0]["coords"].numpy(), np.asarray(sample[1])),
)

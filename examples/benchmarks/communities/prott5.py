"""ProtT5 and other embeddings of proteins: an array for each accession, of any length."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .base import Community

FILE = "per-residue.h5"


def write(folder: Path, size: float) -> None:
    """Write embeddings of 50 to 450 residues (5 to 45 in tests) of 1,024 half floats."""
    rng = np.random.default_rng(0)
    few, many = (50, 450) if size >= 0.5 else (5, 45)
    lines = [["accession", "location"]]
    with h5py.File(folder / FILE, "w") as file:
        for number in range(max(60, round(700 * size))):
            name = f"P{10_000 + number * 7}"
            values = rng.standard_normal((int(rng.integers(few, many)), 1024), dtype=np.float32)
            file.create_dataset(name, data=values.astype(np.float16))
            lines.append([name, str(int(rng.integers(0, 10)))])
    with (folder / "locations.csv").open("w", newline="") as table:
        csv.writer(table).writerows(lines)


class EmbeddingDataset(Dataset[Any]):
    """As people write it: a list of accessions, the file open in each worker, an array read for each sample."""

    def __init__(self) -> None:
        self._file: h5py.File | None = None
        with Path("locations.csv").open(newline="") as table:
            self._labels = {line["accession"]: int(line["location"]) for line in csv.DictReader(table)}
        with h5py.File(FILE) as file:
            self._names = sorted(file.keys())

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._file is None:
            self._file = h5py.File(FILE, "r")
        name = self._names[index]
        return torch.from_numpy(np.array(self._file[name])), self._labels[name]


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings with zeros at their ends, their lengths, and labels."""
    lengths = torch.tensor([len(x) for x, _ in samples])
    return pad_sequence([x for x, _ in samples], batch_first=True), lengths, torch.tensor([y for _, y in samples])


COMMUNITY = Community(
    title="Protein embeddings: ProtT5",
    loader="a usual `Dataset`",
    sample="proteins",
    write=write,
    dataset=EmbeddingDataset,
    collate_fn=padded,
    options={
        "train_path": FILE,
        "x_key": {"embedding": "*"},
        "y_key": "table/location",
        "table": {"path": "locations.csv", "on": {"accession": "@name"}},
        "collate_fn": "pad",
        "split": {"val_fraction": 0.1, "stratify_key": "table/location"},
        "batch_size": 16,
    },
    batch_size=16,
    their_arrays=lambda sample: (sample[0].numpy(), np.asarray(sample[1])),
    our_arrays=lambda sample: (sample[0]["embedding"].numpy(), np.asarray(sample[1])),
)

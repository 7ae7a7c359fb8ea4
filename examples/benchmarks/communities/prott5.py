"""ProtT5, as UniProt has it: an array for each protein, as long as the protein; labels in a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from .base import Community

FILE, TABLE = "prott5_swissprot.h5", "localization.csv"
LOCATIONS = ["Cytoplasm", "Nucleus", "Extracellular", "Cell membrane", "Mitochondrion", "Plastid"]


def write(folder: Path, size: float) -> None:
    """Write proteins of 40 to 600 residues, each an array of half floats without chunks, and their locations."""
    rng = np.random.default_rng(0)
    with h5py.File(folder / FILE, "w") as file, (folder / TABLE).open("w", newline="") as table:
        lines = csv.writer(table)
        lines.writerow(["ACC", "Partition", *LOCATIONS, "Sequence"])
        for number in range(max(90, round(500 * size))):
            n, accession = int(rng.integers(40, 600 if size >= 1 else 60)), f"{'OPQ'[number % 3]}{number:05}"
            file[accession] = rng.standard_normal((n, 1024), dtype="f4").astype("f2")
            sequence = "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), n))
            lines.writerow([accession, number % 5, *rng.integers(0, 2, len(LOCATIONS)), sequence])


class EmbeddingsLocalizationDataset(Dataset[Any]):
    """As in DeepLoc 2.0: the table is in memory, and for each protein its array is looked up by name and copied.

    Its fixed batches of proteins of similar length are left out, here and on the other side.
    """

    def __init__(self) -> None:
        self.data = pd.read_csv(TABLE).sort_values("ACC").reset_index(drop=True)
        self.data["Target"] = self.data[LOCATIONS].to_numpy().tolist()
        self.file = h5py.File(FILE)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[str, np.ndarray[Any, Any], list[int], str]:
        embedding = np.array(self.file[self.data["ACC"][index]]).copy()
        return self.data["Sequence"][index], embedding, self.data["Target"][index], self.data["ACC"][index]


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[str]]:
    """Pad embeddings with zeros as float32, as DeepLoc's `TrainBatchConverter` does."""
    longest = max(len(sequence) for sequence, *_ in samples)
    embeddings = torch.zeros((len(samples), longest, 1024), dtype=torch.float32)
    mask = torch.zeros((len(samples), longest))
    targets = torch.zeros((len(samples), len(LOCATIONS)), dtype=torch.float32)
    lengths, names = [], []
    for at, (sequence, embedding, target, name) in enumerate(samples):
        names.append(name)
        lengths.append(len(sequence))
        targets[at] = torch.tensor(target)
        embeddings[at, : len(sequence)] = torch.tensor(np.array(embedding))
        mask[at, : len(sequence)] = 1
    return embeddings, torch.tensor(lengths), mask == 1, targets, names


COMMUNITY = Community(
    title="Protein embeddings: ProtT5",
    loader="DeepLoc 2.0's `EmbeddingsLocalizationDataset`",
    sample="proteins, 40 to 600 residues",
    write=write,
    dataset=EmbeddingsLocalizationDataset,
    collate_fn=collate,
    options={
        "train_path": FILE,
        "x_key": {"embedding": "*", "target": [f"table/{name}" for name in LOCATIONS]},
        "x_dtype": {"embedding": "float32"},
        "collate_fn": "pad",
        "table": {"path": TABLE, "on": {"ACC": "@name"}},
        "split": {"val_fraction": 0.2, "group_key": "table/Partition"},
        "with_index": True,
    },
    their_arrays=lambda sample: (sample[1].astype("f4"), np.array(sample[2], "f4"), np.asarray(sample[3])),
    our_arrays=lambda sample: (
        sample["embedding"].numpy(),
        sample["target"].numpy(),
        np.asarray(sample["segment"]),
    ),
)

"""SPICE, ANI, QM7-X: a group for each molecule, with its conformations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .base import Community

FILE = "SPICE.hdf5"


def write(folder: Path, size: float) -> None:
    """Write molecules of 3 to 50 atoms with 50 conformations each (4 in tests)."""
    rng = np.random.default_rng(0)
    n = 50 if size >= 0.5 else 4
    with h5py.File(folder / FILE, "w") as file:
        for number in range(max(30, round(1500 * size))):
            n_atoms = int(rng.integers(3, 50))
            group = file.create_group(f"molecule_{number}")
            positions = rng.standard_normal((n, n_atoms, 3), dtype=np.float32)
            group.create_dataset("conformations", data=positions).attrs["units"] = "bohr"
            group["dft_total_gradient"] = rng.standard_normal((n, n_atoms, 3), dtype=np.float32)
            group["dft_total_energy"] = rng.standard_normal(n)
            group["atomic_numbers"] = rng.integers(1, 17, n_atoms).astype("i2")


class HDF5(Dataset[Any]):
    """As in torchmd-net: a list entry for each conformation, and each of its arrays is read by itself."""

    def __init__(self) -> None:
        self._index: list[tuple[Any, int]] | None = None
        with h5py.File(FILE) as file:
            self._n = sum(len(group["dft_total_energy"]) for group in file.values())

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if self._index is None:
            file = h5py.File(FILE, "r")
            names = sorted(file, key=lambda name: int(name.rpartition("_")[2]))
            self._index = [(file[name], at) for name in names for at in range(len(file[name]["dft_total_energy"]))]
        group, at = self._index[number]
        return {
            "z": torch.from_numpy(group["atomic_numbers"][:]),
            "pos": torch.from_numpy(group["conformations"][at]),
            "gradient": torch.from_numpy(group["dft_total_gradient"][at]),
            "energy": torch.tensor(group["dft_total_energy"][at]),
        }


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return molecules with zeros after their last atoms."""
    found = {"energy": torch.stack([sample["energy"] for sample in samples])}
    for name in ("z", "pos", "gradient"):
        found[name] = pad_sequence([sample[name] for sample in samples], batch_first=True)
    return found


NAMES = ("z", "pos", "gradient", "energy")
COMMUNITY = Community(
    title="Molecules: SPICE and ANI",
    loader="torchmd-net's `HDF5`",
    sample="conformations",
    write=write,
    dataset=HDF5,
    collate_fn=padded,
    options={
        "train_path": FILE,
        "x_key": {"z": "atomic_numbers", "pos": "conformations", "gradient": "dft_total_gradient"},
        "y_key": "dft_total_energy",
        "sample": "row",
        "segments": {"groups": "*", "constants": ["z"]},
        "collate_fn": "pad",
        "split": 0.1,
        "batch_size": 64,
    },
    batch_size=64,
    their_arrays=lambda sample: tuple(sample[name].numpy() for name in NAMES),
    our_arrays=lambda sample: (*(sample[0][name].numpy() for name in NAMES[:3]), np.asarray(sample[1])),
)

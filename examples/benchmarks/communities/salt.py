"""salt, umami: particle jets and their tracks as tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.lib.recfunctions import structured_to_unstructured
from torch.utils.data import DataLoader, Dataset, Sampler

from .base import Community

FILE, BATCH_SIZE = "jets.h5", 1000
JETS = ["pt", "eta", "mass", "energy"]
TRACKS = ["d0", "z0", "phi", "theta", "qOverP", "deta", "dphi"]


def write(folder: Path, size: float) -> None:
    """Write 100,000 jets (3,000 in tests) with up to 40 tracks, LZF, in chunks of 100."""
    rng = np.random.default_rng(0)
    n = 100_000 if size >= 0.5 else 3000
    jets = np.zeros(n, [*((name, "f4") for name in JETS), ("flavour_label", "i4")])
    tracks = np.zeros((n, 40), [*((name, "f4") for name in TRACKS), ("valid", "?")])
    for name in JETS:
        jets[name] = rng.standard_normal(n)
    jets["flavour_label"] = rng.integers(0, 3, n)
    tracks["valid"] = np.arange(40) < rng.integers(1, 40, n)[:, None]
    for name in TRACKS:
        tracks[name] = np.where(tracks["valid"], rng.standard_normal((n, 40)), 0)
    with h5py.File(folder / FILE, "w") as file:
        file.create_dataset("jets", data=jets, chunks=(100,), compression="lzf")
        file.create_dataset("tracks", data=tracks, chunks=(100, 40), compression="lzf")


def unstructured(table: Any) -> Any:
    """Return the members of a table on a last axis."""
    return np.ascontiguousarray(structured_to_unstructured(table, np.float32))


class SaltDataset(Dataset[Any]):
    """As in salt: an index is the slice of a batch, which is read from each table at once."""

    def __init__(self) -> None:
        self._file: h5py.File | None = None
        with h5py.File(FILE) as file:
            self._n = len(file["jets"])

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, place: int | slice) -> dict[str, Any]:
        if isinstance(place, int):
            return {name: values[0] for name, values in self[place : place + 1].items()}
        if self._file is None:
            self._file = h5py.File(FILE, "r")
            self._tables = {name: self._file[name] for name in ("jets", "tracks")}
        n = place.stop - place.start
        read = {}
        for name, table in self._tables.items():
            read[name] = np.empty((n, *table.shape[1:]), table.dtype)
            table.read_direct(read[name], place)
        return {
            "jets": torch.from_numpy(unstructured(read["jets"][JETS])),
            "tracks": torch.from_numpy(unstructured(read["tracks"][TRACKS])),
            "valid": torch.from_numpy(read["tracks"]["valid"].copy()),
            "label": torch.from_numpy(read["jets"]["flavour_label"].copy()),
        }


class RandomBatchSampler(Sampler[slice]):
    """Batches of neighboring jets, in random order: jets are not mixed."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return -(-self._n // BATCH_SIZE)

    def __iter__(self) -> Iterator[slice]:
        for number in torch.randperm(len(self)).tolist():
            yield slice(number * BATCH_SIZE, min(self._n, (number + 1) * BATCH_SIZE))


def loader_of(dataset: Any, num_workers: int) -> DataLoader[Any]:
    """Return salt's loader: a batch is one index."""
    sampler = RandomBatchSampler(len(dataset))
    return DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=num_workers)


NAMES = ("jets", "tracks", "valid", "label")
COMMUNITY = Community(
    title="Particle jets: salt and umami",
    loader="salt's `SaltDataset`, which shuffles batches only",
    sample="jets",
    write=write,
    dataset=SaltDataset,
    loader_of=loader_of,
    options={
        "train_path": FILE,
        "x_key": {
            "jets": ["jets/pt", "jets/eta", "jets/mass", "jets/energy"],
            "tracks": [
                "tracks/d0",
                "tracks/z0",
                "tracks/phi",
                "tracks/theta",
                "tracks/qOverP",
                "tracks/deta",
                "tracks/dphi",
            ],
            "valid": "tracks/valid",
        },
        "y_key": "jets/flavour_label",
        "split": {"val_fraction": 0.1, "stratify_key": "jets/flavour_label"},
        "batch_size": BATCH_SIZE,
    },
    batch_size=BATCH_SIZE,
    their_arrays=lambda sample: tuple(np.asarray(sample[name]) for name in NAMES),
    our_arrays=lambda sample: (*(sample[0][name].numpy() for name in NAMES[:3]), np.asarray(sample[1])),
)

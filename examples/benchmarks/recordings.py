"""Recordings as hospitals keep them: several files, eleven arrays each, LZF, one row a chunk; and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from rows import Data
from torch import Tensor
from torch.utils.data import Dataset

N_STEPS = 300
SIGNALS = {"fhr": (4800,), "up": (4800,)}
FEATURES = {"fhr_st": (43, N_STEPS), "fhr_ph": (44, N_STEPS), "fhr_up_ph": (130, N_STEPS)}
STEPS = {"target": (N_STEPS,), "weight": (N_STEPS,)}
FLAGS = ("cs_label", "bg_label")
FIELDS = [*SIGNALS, *FEATURES, *STEPS, "epoch", *FLAGS, "guid"]
FEW_FIELDS = ["fhr_st", "fhr_ph", "target", "weight", "epoch"]
N_PATIENTS = 40


def write(
    folder: Path, n_files: int, n_rows: int, rows_per_chunk: int = 1, fields: Sequence[str] = FIELDS
) -> list[Path]:
    """Writes files of rows, which are ``n_rows`` in all. The values of ``epoch`` are a permutation of their numbers."""
    rng = np.random.default_rng(0)
    epochs = rng.permutation(n_rows)
    paths = []
    for number, mine in enumerate(np.array_split(epochs, n_files)):
        paths.append(folder / f"recordings{number:04}.h5")
        with h5py.File(paths[-1], "w", libver="latest") as file:
            for name in fields:
                values = values_of(name, mine, rng)
                array = file.create_dataset(
                    name,
                    values.shape,
                    h5py.string_dtype() if values.dtype == object else values.dtype,
                    chunks=(min(rows_per_chunk, len(mine)), *values.shape[1:]),
                    maxshape=(None, *values.shape[1:]),
                    compression="lzf",
                )
                array[...] = values
    return paths


def values_of(name: str, epochs: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[Any]:
    """One field of some rows: signals in steps of a quarter, features that are nearly noise, classes with gaps."""
    n_rows = len(epochs)
    if name in SIGNALS:
        steps = rng.normal(0, 0.4, (n_rows, *SIGNALS[name])).astype("f4")
        return np.round(4 * (130 + steps.cumsum(1))) / np.float32(4)
    if name in FEATURES:
        return np.abs(rng.standard_normal((n_rows, *FEATURES[name]), dtype=np.float32))
    if name in STEPS:
        weight = (np.arange(N_STEPS) < rng.integers(N_STEPS // 2, N_STEPS + 1, (n_rows, 1))).astype("f4")
        return weight if name == "weight" else weight * rng.integers(1, 4, (n_rows, 1))
    if name in FLAGS:
        return rng.integers(0, 2, n_rows, dtype="u1")
    if name == "guid":
        return np.array([f"patient_{number:03}" for number in rng.integers(0, N_PATIENTS, n_rows)], dtype=object)
    return epochs.astype("f4")


def in_memory(paths: Sequence[Path], fields: Sequence[str]) -> Data:
    """All numbers with an axis beside the rows, side by side; the row's epoch is its label."""
    parts, labels = [], []
    for path in paths:
        with h5py.File(path, "r") as file:
            parts.append(side_by_side({name: torch.from_numpy(file[name][:]) for name in fields if name != "guid"}))
            labels.append(file["epoch"][:].astype("i8"))
    return Data(paths[0], torch.cat(parts).numpy(), np.concatenate(labels))


def side_by_side(batch: Mapping[str, Any]) -> Tensor:
    """The numbers of a batch with an axis beside the rows, in one tensor."""
    numbers = [batch[name] for name in sorted({**SIGNALS, **FEATURES, **STEPS}) if name in batch]
    return torch.cat([number.flatten(1).float() for number in numbers], 1)


class SampleBySample(Dataset[dict[str, Any]]):
    """The original approach: each field of a sample by an ``array[i]`` of its own, a cache that forgets its oldest.

    Args:
        paths: the files.
        fields: what a sample has.
        cache_size: samples that each process keeps, as the objects they are.
        looks_up: whether arrays are looked up in the file for each sample, as the original does; else once.
    """

    def __init__(self, paths: Sequence[Path], fields: Sequence[str], cache_size: int, *, looks_up: bool = True) -> None:
        self._paths, self._fields, self._cache_size = list(paths), list(fields), cache_size
        self._looks_up = looks_up
        self._index: list[tuple[int, int]] = []
        for number, path in enumerate(paths):
            with h5py.File(path, "r") as file:
                self._index += [(number, row) for row in range(len(file["epoch"]))]
        self._arrays: dict[int, Any] = {}
        self._cache: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> dict[str, Any]:
        if place in self._cache:
            return self._cache[place]
        number, row = self._index[place]
        if number not in self._arrays:
            file = h5py.File(self._paths[number], "r", rdcc_nbytes=128 << 20, rdcc_nslots=10_007)
            self._arrays[number] = file if self._looks_up else {name: file[name] for name in self._fields}
        arrays = self._arrays[number]
        sample = {name: as_sample(name, arrays[name][row]) for name in self._fields}
        if self._cache_size:
            if len(self._cache) >= self._cache_size:
                del self._cache[next(iter(self._cache))]
            self._cache[place] = sample
        return sample


def as_sample(name: str, value: Any) -> Any:
    """What the original makes of a value."""
    if name == "guid":
        return value.decode()
    return bool(value) if name in FLAGS else torch.as_tensor(value, dtype=torch.float32)

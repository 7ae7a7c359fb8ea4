"""The Well: simulations of physics, a group for scalar and one for vector fields of all trajectories of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from .base import Community

FOLDER = "turbulent_radiative_layer_2D/data"
STEPS_IN, STEPS_OUT = 4, 1
SHAPE = (64, 192)  # half of that of the project
FILES = {"train": (0.03, 0.06, 0.1), "valid": (0.18,), "test": (0.32,)}


def write(folder: Path, size: float) -> None:
    """Write files of a few trajectories of up to 101 steps: float32 without chunks, with their attributes."""
    rng = np.random.default_rng(0)
    n_steps = 101 if size >= 1 else max(16, round(101 * size))
    for split, parameters in FILES.items():
        (folder / FOLDER / split).mkdir(parents=True)
        for tcool in parameters:
            n = (4 if size >= 1 else 2) if split == "train" else 1
            with h5py.File(folder / FOLDER / split / f"turbulent_radiative_layer_tcool_{tcool}.hdf5", "w") as file:
                _write(file, tcool, n, n_steps, rng)


def _write(file: h5py.File, tcool: float, n: int, n_steps: int, rng: np.random.Generator) -> None:
    file.attrs.update(
        {
            "dataset_name": "turbulent_radiative_layer_2D",
            "grid_type": "cartesian",
            "n_spatial_dims": 2,
            "n_trajectories": n,
            "simulation_parameters": ["tcool"],
            "tcool": tcool,
        }
    )
    dimensions = file.create_group("dimensions")
    dimensions.attrs["spatial_dims"] = ["x", "y"]
    coordinates = {"time": np.arange(n_steps) * 1.6, "x": np.linspace(-0.5, 0.5, SHAPE[0]), "y": np.arange(SHAPE[1])}
    for name, values in coordinates.items():
        dimensions[name] = values.astype("f4")
        dimensions[name].attrs.update({"sample_varying": False, "time_varying": False})
    scalars = file.create_group("scalars")
    scalars.attrs["field_names"] = ["tcool"]
    scalars["tcool"] = np.float32(tcool)
    scalars["tcool"].attrs.update({"sample_varying": False, "time_varying": False})
    for order, names in enumerate([["density", "pressure"], ["velocity"], []]):
        group = file.create_group(f"t{order}_fields")
        group.attrs["field_names"] = names if names else np.empty(0, "S1")
        for name in names:
            group[name] = rng.standard_normal((n, n_steps, *SHAPE, *[2] * order), dtype="f4")
            group[name].attrs.update({"dim_varying": [True, True], "sample_varying": True, "time_varying": True})


class WellDataset(Dataset[Any]):
    """As in The Well: opens the file for each sample, asks its attributes, and slices each field; constants are kept.

    Grids and boundary conditions, which it keeps too, are left out, and fields are not joined along their channels.
    """

    def __init__(self) -> None:
        self._system = fsspec.filesystem("file")
        self._paths = sorted(self._system.glob(f"{FOLDER}/train/*.hdf5"))
        self._caches: list[dict[str, torch.Tensor]] = [{} for _ in self._paths]
        self._n_windows: list[int] = []
        self._offsets = [0]
        for path in self._paths:
            with self._system.open(path, "rb") as raw, h5py.File(raw) as file:
                self._n_windows.append(file["dimensions"]["time"].shape[-1] - STEPS_IN - STEPS_OUT + 1)
                self._offsets.append(self._offsets[-1] + int(file.attrs["n_trajectories"]) * self._n_windows[-1])

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = int(np.searchsorted(self._offsets, index, side="right") - 1)
        trajectory, step = divmod(index - self._offsets[number], self._n_windows[number])
        found: dict[str, torch.Tensor] = {}
        with h5py.File(self._system.open(self._paths[number], "rb"), "r") as file:
            for group in ("t0_fields", "t1_fields", "t2_fields", "scalars"):
                for name in file[group].attrs["field_names"]:
                    found[name] = self._values(file[group][name], name, self._caches[number], trajectory, step)
        values = {name: values for name, values in found.items() if name != "tcool"}
        return {
            **{f"input_{name}": value[:STEPS_IN] for name, value in values.items()},
            **{f"output_{name}": value[STEPS_IN:] for name, value in values.items()},
            "tcool": found["tcool"],
        }

    @staticmethod
    def _values(array: h5py.Dataset, name: str, cache: dict[str, Any], trajectory: int, step: int) -> torch.Tensor:
        if name in cache:
            return cache[name]
        index: tuple[Any, ...] = ()
        if array.attrs["sample_varying"]:
            index += (trajectory,)
        if array.attrs["time_varying"]:
            index += (slice(step, step + STEPS_IN + STEPS_OUT),)
        values = torch.as_tensor(array[index])
        if not index:
            cache[name] = values
        return values


FIELDS = ("density", "pressure", "velocity")

COMMUNITY = Community(
    title="The Well",
    loader="The Well's `WellDataset`",
    sample="windows of 4 + 1 steps",
    write=write,
    dataset=WellDataset,
    options={
        "train_path": f"{FOLDER}/train",
        "val_path": f"{FOLDER}/valid",
        "test_path": f"{FOLDER}/test",
        "x_key": {
            "density": "t0_fields/density",
            "pressure": "t0_fields/pressure",
            "velocity": "t1_fields/velocity",
            "tcool": "scalars/tcool",
        },
        "segments": {"axis": 0, "step_axis": 1},
        "window": {"length": 5, "stride": 1},
    },
    their_arrays=lambda sample: (
        *(torch.cat([sample[f"input_{name}"], sample[f"output_{name}"]]).numpy() for name in FIELDS),
        sample["tcool"].numpy(),
    ),
    our_arrays=lambda sample: tuple(np.asarray(sample[name]) for name in (*FIELDS, "tcool")),
)

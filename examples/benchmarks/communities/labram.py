"""LaBraM, TUH, SleepFM: EEG, a group for each subject, time along the second axis."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

FILE, LENGTH, STRIDE = "dataset.hdf5", 1600, 800


def write(folder: Path, size: float) -> None:
    """Write recordings of 10 minutes (30 seconds in tests) of 23 channels at 200 Hz, a second a chunk."""
    rng = np.random.default_rng(0)
    n = 120_000 if size >= 0.5 else 6000
    with h5py.File(folder / FILE, "w") as file:
        for number in range(max(12, round(20 * size))):
            group = file.create_group(f"subject{number}")
            eeg = group.create_dataset("eeg", data=rng.standard_normal((23, n), dtype=np.float32), chunks=(23, 200))
            eeg.attrs.update({"lFreq": 0.1, "hFreq": 75.0, "rsFreq": 200, "chOrder": [f"EEG {i}" for i in range(23)]})


class SingleShockDataset(Dataset[Any]):
    """As in LaBraM: the file stays open in each worker, and each window is read by itself."""

    def __init__(self) -> None:
        self._file: h5py.File | None = None
        with h5py.File(FILE) as file:
            self._subjects = sorted(file, key=lambda name: int(name[7:]))
            lengths = [file[subject]["eeg"].shape[1] for subject in self._subjects]
        self._ends = list(accumulate((length - LENGTH) // STRIDE + 1 for length in lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if self._file is None:
            self._file = h5py.File(FILE, "r")
        number = bisect_right(self._ends, index)
        start = (index - (self._ends[number - 1] if number else 0)) * STRIDE
        return self._file[self._subjects[number]]["eeg"][:, start : start + LENGTH]


COMMUNITY = Community(
    title="EEG: LaBraM",
    loader="LaBraM's `SingleShockDataset`",
    sample="windows of 8 seconds",
    write=write,
    dataset=SingleShockDataset,
    options={
        "train_path": FILE,
        "x_key": "eeg",
        "segments": {"groups": "subject*", "step_axis": 1},
        "window": {"length": 1600, "stride": 800},
        "split": 0.1,
    },
    their_arrays=lambda sample: (sample,),
    our_arrays=lambda sample: (sample.numpy(),),
)

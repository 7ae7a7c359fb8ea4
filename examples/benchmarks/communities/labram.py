"""LaBraM and other models of EEG: a group for each recording, with an array of channels and times."""

from __future__ import annotations

from bisect import bisect
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import Dataset

from .base import Community

FILE, WINDOW, STRIDE = "dataset.hdf5", 800, 200
CHANNELS = [f"{site}{number}" for site in ("FP", "AF", "F", "FC", "C", "CP", "P", "PO") for number in range(1, 9)][:62]


def write(folder: Path, size: float) -> None:
    """Write recordings of 3 to 4 minutes at 200 Hz in microvolts: chunks of all channels and one second."""
    rng = np.random.default_rng(0)
    with h5py.File(folder / FILE, "w") as file:
        for number in range(max(10, round(10 * size))):
            n = int(rng.integers(150, 250)) * 200 if size >= 1 else int(rng.integers(20, 24)) * 200
            group = file.create_group(f"subject_{number:02}")
            eeg = 20 * rng.standard_normal((len(CHANNELS), n))
            group.create_dataset("eeg", data=eeg, chunks=(len(CHANNELS), 200))
            group["eeg"].attrs.update({"lFreq": 0.1, "hFreq": 75.0, "rsFreq": 200, "chOrder": CHANNELS})


class SingleShockDataset(Dataset[Any]):
    """As in LaBraM: the file is opened at the start, windows are found by bisection, and each of them is a slice."""

    def __init__(self) -> None:
        self.file = h5py.File(FILE)
        self.subjects = list(self.file)
        self.firsts: list[int] = []
        self.length = 0
        for subject in self.subjects:
            self.firsts.append(self.length)
            self.length += (self.file[subject]["eeg"].shape[1] - WINDOW) // STRIDE + 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        at = bisect(self.firsts, index) - 1
        start = (index - self.firsts[at]) * STRIDE
        return self.file[self.subjects[at]]["eeg"][:, start : start + WINDOW]


COMMUNITY = Community(
    title="EEG: LaBraM",
    loader="LaBraM's `SingleShockDataset`",
    sample="windows of 4 seconds, one each second",
    write=write,
    dataset=SingleShockDataset,
    options={
        "train_path": FILE,
        "x_key": "eeg",
        "segments": {"groups": "*", "step_axis": 1},
        "window": {"length": WINDOW, "stride": STRIDE},
        "split": 0.2,
        "batch_size": 64,
    },
    batch_size=64,
    their_arrays=lambda sample: (sample,),
    our_arrays=lambda sample: (sample.numpy(),),
)

"""How soon does training begin: seconds to import the package, and from `fit()` to the first batch?

    python examples/benchmarks/start.py [--rounds 5] [--json FILE]

Each figure is of a fresh process; all take turns. Imports: Lightning alone, and `LazyH5DataModule`, which imports
Lightning, too. First batch: from the call of `Trainer.fit` until `training_step` has a batch of a shuffled gzip file,
for a hand-written `Dataset` in a `DataLoader`, and for `LazyH5DataModule`: as on the first day, without compiled code
of an earlier process, and later. Medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from statistics import median
from typing import Any

import h5py
import numpy as np
from common import add_outputs, environment, setting_of, write_outputs

N_CHUNKS, CHUNK = 6000, (32, 3, 32, 32)  # 562 MiB decoded: enough for compiled code to pay
IMPORTS = {"lightning": "import lightning.pytorch", "lightning_h5": "from lightning_h5 import LazyH5DataModule"}
TIMED = """
from time import perf_counter
began = perf_counter()
{imports}
print(perf_counter() - began)
"""
FIT = """
import logging, os, sys, warnings
from time import perf_counter
import h5py, torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset
from lightning_h5 import LazyH5DataModule

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
path, which = sys.argv[1:]


class Rows(Dataset):
    def __init__(self):
        with h5py.File(path) as file:
            self.n, self.file = len(file["x"]), None

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.file = self.file or h5py.File(path)
        return torch.from_numpy(self.file["x"][index])


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        global first
        first = perf_counter()
        return super().training_step(batch.flatten(1)[:, :32].float(), batch_idx)


trainer = Trainer(
    max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu",
)
model = Model()
if which == "plain":
    data = {"train_dataloaders": DataLoader(Rows(), 32, shuffle=True)}
else:
    data = {"datamodule": LazyH5DataModule(path, x_key="x")}
began = perf_counter()
trainer.fit(model, **data)
print(first - began)
"""


def seconds(code: str, *args: str, **more: str) -> float:
    """Return what a fresh process prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env=os.environ | more, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def write(path: str) -> None:
    """Write a gzip file, all of whose chunks are alike."""
    values = np.random.default_rng(0).integers(0, 50, CHUNK, dtype=np.uint8)
    stored = zlib.compress(values.tobytes(), 1)
    with h5py.File(path, "w") as file:
        array = file.create_dataset("x", (N_CHUNKS * CHUNK[0], *CHUNK[1:]), "u1", chunks=CHUNK, compression="gzip")
        for number in range(N_CHUNKS):
            array.id.write_direct_chunk((number * CHUNK[0], 0, 0, 0), stored)


def run(n_rounds: int) -> dict[str, float]:
    """Return the medians, in seconds."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as folder:
        write(path := f"{folder}/rows.h5")
        for number in range(n_rounds):
            for name, imports in IMPORTS.items():
                note(f"import {name}", seconds(TIMED.format(imports=imports)))
            note("first batch, plain h5py", seconds(FIT, path, "plain"))
            note("first batch, lightning_h5", seconds(FIT, path, "ours"))
            cold = {"NUMBA_CACHE_DIR": f"{folder}/{number}"}
            note("first batch, lightning_h5, nothing compiled", seconds(FIT, path, "ours", **cold))
    return {name: median(each) for name, each in found.items()}


def page(results: Mapping[str, Any]) -> str:
    """Return the table for the documentation."""
    about = results["environment"]
    lines = ["| | seconds |", "|---|---:|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in results["seconds"].items()]
    return "\n".join([*lines, "", f"Fresh processes, medians. {setting_of(about, 'start')}."]) + "\n"


def main() -> None:
    """Measure, and compare with what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    add_outputs(parser)
    given = parser.parse_args()
    found = run(given.rounds)
    for name, value in found.items():
        print(f"{name:46} {value:7.2f} s")
    results: dict[str, Any] = {"environment": environment(), "seconds": found, "more": {}}
    for name, least, other, most in (
        ("import", "lightning_h5", "lightning", 0.3),
        ("first batch,", "lightning_h5", "plain h5py", 1.0),
    ):
        what, more = name.strip(","), found[f"{name} {least}"] - found[f"{name} {other}"]
        results["more"][what] = more
        print(f"{what:12} {more:+.2f} s   asked at most {most:+.1f} s   {'met' if more <= most else 'NOT MET'}")
    write_outputs(given, results, page)


if __name__ == "__main__":
    main()

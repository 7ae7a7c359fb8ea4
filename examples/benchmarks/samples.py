"""How many samples of each kind come a second, and is another version of the package faster or slower?

    python examples/benchmarks/samples.py [--against FOLDER] [--rounds 5] [--kinds rows windows] [--json FILE]

reads shuffled epochs of rows, windows, whole segments, patches and rows of a sparse matrix, on demand and from memory,
in this process alone, from files in the page cache. Rates are samples a second of processor time, the best epoch of
all rounds. With ``--against``, the folder of another checkout, both versions take turns in processes of their own, and
ratios are shown: above 1, this one is faster. Files are small, so that what is measured is the work for each batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from time import process_time
from typing import Any

import h5py
import numpy as np

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rows": ("lazy", "rows", {"x_key": "x", "y_key": "y"}),
    "rows of gzip chunks": ("lazy", "chunks", {"x_key": "x", "y_key": "y"}),
    "rows in memory": ("cached", "chunks", {"x_key": "x", "y_key": "y"}),
    "windows": ("lazy", "rows", {"x_key": "x", "y_key": "y", "window": {"x": [-3, 5], "y": 0}}),
    "windows of gzip chunks": ("lazy", "chunks", {"x_key": "x", "window": 16}),
    "windows in memory": ("cached", "chunks", {"x_key": "x", "window": 16}),
    "segments": (
        "lazy",
        "chunks",
        {"x_key": "x", "segments": {"lengths": "lengths"}, "sample": "segment", "collate_fn": "pad"},
    ),
    "segments in memory": (
        "cached",
        "chunks",
        {"x_key": "x", "segments": {"lengths": "lengths"}, "sample": "segment", "collate_fn": "pad"},
    ),
    "patches": ("lazy", "volume", {"x_key": "v", "patch": {"shape": [16, 16, 16], "stride": 8}}),
    "patches in memory": ("cached", "volume", {"x_key": "v", "patch": {"shape": [16, 16, 16], "stride": 8}}),
    "sparse rows": ("lazy", "cells", {"x_key": "X"}),
    "sparse rows in memory": ("cached", "cells", {"x_key": "X"}),
    "sparse rows in CSR form": ("lazy", "cells", {"x_key": "X", "decode": {"X": "csr"}}),
}
"""For each kind of sample: where its rows live, the file, and the arguments of the data module."""


def write_files(folder: Path) -> None:
    """Write a file for each layout."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((96_000, 64)).astype(np.float32), rng.integers(0, 10, 96_000)
    for name, storage in (("rows", {}), ("chunks", {"chunks": (128, 64), "compression": "gzip"})):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=x, **storage)
            file["y"] = y
            file["lengths"] = np.tile([20, 44], 1_500)
    with h5py.File(folder / "volume.h5", "w") as file:
        volume = rng.standard_normal((128, 128, 128)).astype(np.float32)
        file.create_dataset("v", data=volume, chunks=(32, 32, 32), compression="gzip")
    n, n_columns = 20_000, 1_000
    lengths = rng.integers(20, 80, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    with h5py.File(folder / "cells.h5", "w") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [n, n_columns]})
        columns = np.concatenate([np.sort(rng.choice(n_columns, length, replace=False)) for length in lengths])
        values = rng.standard_normal(len(columns)).astype(np.float32)
        for name, array in (("data", values), ("indices", columns.astype(np.int32)), ("indptr", offsets)):
            matrix.create_dataset(name, data=array, chunks=(4096,), compression="gzip")


def rates(folder: Path, kinds: list[str], seconds: float) -> dict[str, float]:
    """Return samples a second of processor time of each kind."""
    from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule

    found = {}
    for kind in kinds:
        where, name, arguments = KINDS[kind]
        module_class = LazyH5DataModule if where == "lazy" else RankCachedH5DataModule
        module = module_class(folder / f"{name}.h5", **arguments, batch_size=256, seed=0)
        module.setup("fit")
        loader, best, epoch = module.train_dataloader(), 0.0, 0
        end = process_time() + seconds
        while epoch < 3 or process_time() < end:
            loader.sampler.set_epoch(epoch)
            start = process_time()
            for _ in loader:
                pass
            if epoch:  # the first one compiles, and fills caches
                best = max(best, len(loader.dataset) / (process_time() - start))
            epoch += 1
        found[kind] = best
        module.teardown("fit")
    return found


def in_process(checkout: Path, folder: Path, kinds: list[str], seconds: float) -> dict[str, float]:
    """Return the rates of a checkout, measured in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", str(folder), "--seconds", str(seconds), "--kinds", *kinds]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="folder of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="that a kind takes in a round")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    if given.child is not None:
        print(json.dumps(rates(given.child, given.kinds, given.seconds)))
        return
    checkouts = {"here": Path(__file__).resolve().parents[2]}
    if given.against is not None:
        checkouts["there"] = given.against.resolve()
    best: dict[str, dict[str, float]] = {name: {} for name in checkouts}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        for turn in range(given.rounds):
            for checkout in sorted(checkouts, reverse=bool(turn % 2)):
                measured = in_process(checkouts[checkout], folder, given.kinds, given.seconds)
                for kind, rate in measured.items():
                    best[checkout][kind] = max(rate, best[checkout].get(kind, 0.0))
    for kind in given.kinds:
        ratio = f"{best['here'][kind] / best['there'][kind]:8.2f} x" if "there" in best else ""
        print(f"{kind:26}{best['here'][kind]:12,.0f} samples a CPU second{ratio}")
    if given.json:
        given.json.write_text(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()

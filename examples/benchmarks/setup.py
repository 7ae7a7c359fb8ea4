"""How long does ``setup`` look at many small files, beside a plain h5py loop that asks each for two shapes?"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import h5py
import numpy as np

from lightning_h5 import LazyH5DataModule


def write_files(folder: Path, n_files: int) -> list[str]:
    """Files of 20 rows each: compressed signals, a label, a patient."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(n_files):
        paths.append(str(folder / f"{number:06}.h5"))
        with h5py.File(paths[-1], "w") as file:
            x = rng.standard_normal((20, 16)).astype("f4")
            file.create_dataset("x", data=x, chunks=(10, 16), compression="gzip", compression_opts=1)
            file["y"], file["label"] = rng.integers(0, 5, 20), rng.integers(0, 3, 20)
            file["patient"] = np.full(20, number // 4)
    return paths


def loop(paths: list[str]) -> int:
    """Rows of the files, as anybody would count them."""
    n_rows = 0
    for path in paths:
        with h5py.File(path) as file:
            n_rows += file["x"].shape[0] if file["x"].shape[0] == file["y"].shape[0] else 0
    return n_rows


def main() -> None:
    """Time all of them in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), given.files)
        contenders: dict[str, Callable[[], object]] = {
            "h5py, two shapes": lambda: loop(paths),
            "setup": lambda: LazyH5DataModule(paths, x_key="x", y_key="y").setup("fit"),
            "setup, split by groups and strata": lambda: LazyH5DataModule(
                paths,
                x_key="x",
                y_key="y",
                split={"val_fraction": 0.1, "group_key": "patient", "stratify_key": "label"},
            ).setup("fit"),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for run in contenders.values():
            run()
        for number in range(given.rounds):
            names = list(contenders)
            for name in names[number % 3 :] + names[: number % 3]:
                began = time.perf_counter()
                contenders[name]()
                times[name].append(time.perf_counter() - began)
    base = median(times["h5py, two shapes"])
    found = {name: {"seconds": median(each), "ratio": median(each) / base} for name, each in times.items()}
    for name, one in found.items():
        print(f"{name:36} {one['seconds']:6.2f} s   {one['ratio']:5.2f} x")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

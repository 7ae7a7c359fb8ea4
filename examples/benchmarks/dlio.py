"""DLIO, the benchmark of MLPerf Storage, with simulated accelerators: its own HDF5 reader and this package.

    python examples/benchmarks/dlio.py [--step-ms 20] [--rounds 3] [--json FILE]

Four files have 512 pictures of 64 KiB each, gzip, one per chunk, as DLIO writes its own; its generator of chunked
files fails in 2.0.0. DLIO runs a loop that takes batches of 64 and sleeps instead of training. Its accelerator
utilization (AU) is the share of the time that it sleeps, without the first step of an epoch. Its own reader opens the
file for each sample, reads the sample with h5py, and hands out the same array each time; ours delivers the samples. It
does without most packages that DLIO asks for (see `peers/requirements-dlio.txt`); TensorFlow, which it imports for a
profiler that is off, is replaced by an empty module.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np

N_FILES, N_SAMPLES, SIZE, N_EPOCHS, BATCH_SIZE = 4, 512, 256, 3, 64
WAYS = {
    "DLIO's own reader, 0 workers": {"reader.read_threads": 0},
    "DLIO's own reader, 2 workers": {"reader.read_threads": 2},
    "lightning_h5": {
        "reader.read_threads": 0,
        "reader.data_loader_classname": "peers.dlio.OurLoader",
        "reader.data_loader_sampler": "iterative",
    },
}


def settings(folder: Path) -> dict[str, Any]:
    """Return what all runs share."""
    return {
        "framework": "pytorch",
        "workflow.evaluation": False,
        "workflow.generate_data": False,
        "workflow.train": True,
        "dataset.format": "hdf5",
        "dataset.data_folder": folder / "data",
        "dataset.num_files_train": N_FILES,
        "dataset.num_files_eval": 0,
        "dataset.num_subfolders_train": 0,
        "dataset.num_subfolders_eval": 0,
        "dataset.num_samples_per_file": N_SAMPLES,
        "dataset.record_length": SIZE**2,
        "dataset.keep_files": True,
        "reader.batch_size": BATCH_SIZE,
        "reader.sample_shuffle": "random",
        "train.epochs": N_EPOCHS,
        "output.folder": folder / "out",
    }


def write(folder: Path) -> None:
    """Write the files."""
    import h5py
    from rows import pictures

    (folder / "data" / "train").mkdir(parents=True)
    (folder / "data" / "valid").mkdir()
    rng = np.random.default_rng(0)
    for number in range(N_FILES):
        with h5py.File(folder / "data" / "train" / f"img_{number}_of_{N_FILES}.hdf5", "w") as file:
            x = pictures(rng, N_SAMPLES, 1, SIZE, SIZE)[:, 0].astype("u1")
            file.create_dataset("records", data=x, chunks=(1, SIZE, SIZE), compression="gzip")


def start(folder: Path, more: dict[str, Any]) -> None:
    """Run DLIO in a process of its own."""
    given = settings(folder) | more
    options = [f"++workload.{name}={value}" for name, value in given.items()]
    command = [sys.executable, __file__, "--dlio", f"hydra.run.dir={folder}/hydra", "workload=default", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])


def run_dlio() -> None:
    """Run DLIO here with the command line's options."""
    del sys.argv[1]
    sys.modules["tensorflow"] = ModuleType("tensorflow")
    from dlio_benchmark.main import main as dlio_main

    del sys.modules["tensorflow"]
    dlio_main()


def main() -> None:
    """Measure all ways in turns."""
    from common import environment, line_of, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    about = environment(("dlio-benchmark",))
    print(line_of(about))
    found: dict[str, dict[str, list[float]]] = {name: {"au": [], "rows_per_second": []} for name in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        for _ in range(given.rounds):
            for way, more in WAYS.items():
                start(folder, {**more, "train.computation_time": given.step_ms / 1000})
                metric = json.loads((folder / "out" / "summary.json").read_text())["metric"]
                found[way]["au"].append(metric["train_au_percentage"][-1])
                found[way]["rows_per_second"].append(metric["train_throughput_samples_per_second"][-1])
    for way, figures in found.items():
        print(f"{way:30} AU {median(figures['au']):5.1f} %  {median(figures['rows_per_second']):8,.0f} samples/s")
    results = [{"name": way, **figures} for way, figures in found.items()]
    write_json(given.json, {"environment": about, "step_ms": given.step_ms, "rounds": given.rounds, "results": results})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--dlio"]:
        run_dlio()
    else:
        main()

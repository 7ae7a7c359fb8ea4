"""How much faster are later epochs if decoded chunks are kept on the local disk (`staging={"decoded": True}`)?

    python examples/benchmarks/decoded.py [--rows 20000] [--rounds 3] [--json FILE]

Rows a second of epochs of compressed images, signals, windows of frames, and sparse rows: without, in the first epoch
with it, in later ones, in a second job, with room for half of the chunks, and of a copy without compression (what
`lightning-h5 repack` writes for files that fit into memory). Memory for decoded rows is an eighth of them, as with
data that is larger than memory; files are in the page cache. All ways take turns; medians, or the best of first epochs.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lightning_h5 import LazyH5DataModule

GZIP = {"compression": "gzip", "shuffle": True}
EPOCHS = 4


def images(folder: Path, n_rows: int) -> dict[str, Any]:
    """Write images of 12 KiB, as smooth as photographs of faces."""
    rng = np.random.default_rng(0)
    steps = rng.integers(-3, 4, (n_rows, 3, 64, 64), dtype=np.int8)
    values = (np.cumsum(steps, axis=3, dtype=np.int16) + rng.integers(60, 190, (n_rows, 1, 1, 1))).astype(np.uint8)
    _write(folder, {"x": (values, (64, 3, 64, 64), {"compression": "gzip"})})
    return {"x_key": "x"}


def signals(folder: Path, n_rows: int) -> dict[str, Any]:
    """Write signals of 16 KiB: rounded floats."""
    rng = np.random.default_rng(0)
    values = np.cumsum(rng.integers(-9, 10, (n_rows, 4, 1024), dtype=np.int16), axis=2).astype(np.float32) / 8
    _write(folder, {"x": (values, (64, 4, 1024), GZIP)})
    return {"x_key": "x"}


def windows(folder: Path, n_rows: int) -> dict[str, Any]:
    """Write a recording of frames of 4 KiB, which are read 16 at a time."""
    rng = np.random.default_rng(0)
    frames = np.cumsum(rng.integers(-3, 4, (n_rows, 64, 64), dtype=np.int8), axis=2, dtype=np.int16).astype(np.uint8)
    _write(folder, {"x": (frames, (64, 64, 64), {"compression": "gzip"})})
    return {"x_key": "x", "window": {"length": 16, "stride": 4}}


def sparse(folder: Path, n_rows: int) -> dict[str, Any]:
    """Write rows of a sparse matrix with 1,000 values of 20,000 columns each, as cells have genes."""
    rng = np.random.default_rng(0)
    counts = rng.integers(800, 1200, n_rows)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    values = rng.poisson(1.5, int(offsets[-1])).astype(np.float32) + 1
    columns = np.concatenate([np.sort(rng.choice(20_000, count, replace=False)) for count in counts]).astype(np.int32)
    _write(folder, {"x/data": (values, (65_536,), GZIP), "x/indices": (columns, (65_536,), GZIP)})
    for name in ("gzip.h5", "plain.h5"):
        with h5py.File(folder / name, "a") as file:
            file["x/indptr"] = offsets
            file["x"].attrs.update(
                {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (n_rows, 20_000)}
            )
    return {"x_key": "x", "decode": {"x": "csr"}}


KINDS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "images": images,
    "signals": signals,
    "windows": windows,
    "sparse": sparse,
}


def _write(folder: Path, arrays: dict[str, tuple[np.ndarray, tuple[int, ...], dict[str, Any]]]) -> None:
    """Write arrays to a compressed file, and to one that is not."""
    with h5py.File(folder / "gzip.h5", "w") as packed, h5py.File(folder / "plain.h5", "w") as plain:
        for key, (values, chunks, options) in arrays.items():
            packed.create_dataset(key, data=values, chunks=chunks, **options)
            plain[key] = values


class Job:
    """The training loader of a file, whose epochs are timed.

    Args:
        path: the file.
        memory: bytes for decoded rows.
        arguments: of the data module.
        staging: see there.
    """

    def __init__(self, path: Path, memory: int, arguments: dict[str, Any], staging: Any = None) -> None:
        self._module = LazyH5DataModule(
            str(path),
            batch_size=64,
            shuffle={"buffer": memory},
            files={"cache_bytes": memory},
            staging=staging,
            **arguments,
        )
        self._module.setup("fit")
        self._loader = self._module.train_dataloader()

    def epoch(self) -> float:
        """Read an epoch, and return samples a second."""
        began, n_samples = time.perf_counter(), 0
        for batch in self._loader:
            n_samples += len(batch)
        return n_samples / (time.perf_counter() - began)

    def close(self) -> None:
        """Close the files."""
        self._module.teardown()


def measure(kind: str, n_rows: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return samples a second of all ways, and the bytes of the files."""
    arguments = KINDS[kind](folder, n_rows)
    n_bytes = (folder / "plain.h5").stat().st_size
    memory, found = max(1 << 20, n_bytes // 8), dict[str, list[float]]()

    def note(way: str, job: Job) -> None:
        found.setdefault(way, []).append(job.epoch())

    compressed, plain = Job(folder / "gzip.h5", memory, arguments), Job(folder / "plain.h5", memory, arguments)
    compressed.epoch(), plain.epoch()  # compiles, and fills the page cache
    for number in range(rounds):
        places = {"all": {"dir": folder / f"all{number}", "decoded": True}}
        places["half"] = {"dir": folder / f"half{number}", "decoded": True, "max_bytes": n_bytes // 2}
        kept = {name: Job(folder / "gzip.h5", memory, arguments, place) for name, place in places.items()}
        fresh = Job(folder / "gzip.h5", memory, arguments), Job(folder / "plain.h5", memory, arguments)
        for way, job in zip(("gzip, epoch 1", "without compression, epoch 1"), fresh, strict=True):
            note(way, job)
            job.close()
        note("decoded, epoch 1", kept["all"])
        kept["half"].epoch()
        for _ in range(EPOCHS - 1):
            note("gzip", compressed)
            note("decoded, later epochs", kept["all"])
            note("half decoded, later epochs", kept["half"])
            note("without compression", plain)
        second = Job(folder / "gzip.h5", memory, arguments, places["all"])
        note("decoded, second job", second)
        for job in (*kept.values(), second):
            job.close()
        for place in places.values():
            shutil.rmtree(place["dir"])
    for job in (compressed, plain):
        job.close()
    return {"kind": kind, "bytes": n_bytes, "packed": (folder / "gzip.h5").stat().st_size, "rates": found}


def report(result: dict[str, Any]) -> dict[str, float]:
    """Print a table, and return the ratios."""
    rates = {way: statistics.median(each) for way, each in result["rates"].items()}
    print(f"\n{result['kind']}: {result['bytes'] / 1e6:,.0f} MB, {result['packed'] / 1e6:,.0f} MB compressed")
    for way, rate in rates.items():
        print(f"  {way:28} {rate:12,.0f} samples/s  {rate / rates['gzip']:6.2f} x gzip")
    ratios = {
        "later epochs / gzip": rates["decoded, later epochs"] / rates["gzip"],
        "later epochs / without compression": rates["decoded, later epochs"] / rates["without compression"],
        "second job, epoch 1 / gzip, epoch 1": rates["decoded, second job"] / rates["gzip, epoch 1"],
        "second job, epoch 1 / without compression": rates["decoded, second job"]
        / rates["without compression, epoch 1"],
        "epoch 1, times as long": rates["gzip, epoch 1"] / rates["decoded, epoch 1"],
        "half / gzip": rates["half decoded, later epochs"] / rates["gzip"],
    }
    for name, ratio in ratios.items():
        print(f"    {name}: {ratio:.2f}")
    return ratios


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    found = []
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(kind, given.rows, given.rounds, Path(folder))
        found.append(result | {"ratios": report(result)})
    if given.json:
        given.json.write_text(json.dumps({"rows": given.rows, "rounds": given.rounds, "results": found}))


if __name__ == "__main__":
    main()

"""How long do epochs from a slow file system take, with a mirror on a local disk (`staging`) and without?

The file system is one of `slow_files.py`, with a delay and a bandwidth; mounting it needs root. All ways take turns in
one run: from a local copy, from the slow files, and from the slow files with room for a mirror of all or half of them.
A copy that is made first, as sites advise, takes the time of copying and that of the local copy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from slow_files import forget, slow_files

from lightning_h5 import LazyH5DataModule

SIDE = 64


def write(path: Path, n_rows: int, layout: str) -> int:
    """Write noisy images, and return the bytes that they take."""
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"chunks": (32, SIDE, SIDE), "compression": "gzip"} if layout == "gzip" else {}
    with h5py.File(path, "w") as file:
        images = file.create_dataset("x", (n_rows, SIDE, SIDE), "uint8", **options)
        for start in range(0, n_rows, 1024):
            n = min(1024, n_rows - start)
            images[start : start + n] = rng.integers(0, 24, (n, SIDE, SIDE), dtype=np.uint8)
        file["y"] = np.arange(n_rows)
        return int(images.id.get_storage_size())


def epochs(path: Path, n_rows: int, staging: Any = None) -> Iterator[tuple[float, int]]:
    """Set up, and yield seconds and requests of an epoch as often as asked; the first time those of setup before it."""
    began = time.perf_counter()
    # Less than all decoded rows, as with data that is larger than memory.
    memory = max(1 << 20, n_rows * SIDE**2 // 8)
    datamodule = LazyH5DataModule(
        str(path),
        x_key="x",
        y_key="y",
        batch_size=64,
        shuffle={"mode": "chunks", "buffer": memory},
        files={"cache_bytes": memory},
        staging=staging,
    )
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    yield time.perf_counter() - began, 0
    while True:
        began, before = time.perf_counter(), loader.counters.total()["origin_requests"]
        seen = sum(len(x) for x, _ in loader)
        assert seen == n_rows
        yield time.perf_counter() - began, int(loader.counters.total()["origin_requests"] - before)


def measure(layout: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of each way's epochs, and what was read of the slow files."""
    fast, slow, n_rows = folder / "fast", folder / "slow", given.rows
    for each in (fast, slow):
        each.mkdir()
    n_bytes = write(fast / "data.h5", n_rows, layout)
    ways: dict[str, tuple[Path, Any]] = {
        "local": (fast, None),
        "slow": (slow, None),
        "mirror": (slow, {"dir": str(folder / "mirror")}),
        "half a mirror": (slow, {"dir": str(folder / "half"), "max_bytes": n_bytes // 2}),
    }
    with slow_files(fast, slow, delay=given.delay / 1000, bandwidth=given.bandwidth * 1e6):
        timed = {name: epochs(source / "data.h5", n_rows, staging) for name, (source, staging) in ways.items()}
        found, requests = {name: [next(each)[0]] for name, each in timed.items()}, dict[str, list[int]]()
        for _ in range(given.epochs):
            for name, each in timed.items():
                forget(slow / "data.h5")  # the data is larger than memory
                seconds, n_requests = next(each)
                found[name].append(seconds)
                requests.setdefault(name, []).append(n_requests)
        forget(slow / "data.h5")
        began = time.perf_counter()
        shutil.copyfile(slow / "data.h5", folder / "copy.h5")
        copied = time.perf_counter() - began
    return {"layout": layout, "bytes": n_bytes, "seconds": found, "requests": requests, "copy": copied}


def report(result: dict[str, Any], given: argparse.Namespace) -> dict[str, float]:
    """Print a table, and return the ratios."""
    seconds = result["seconds"]

    def later(name: str) -> float:
        return statistics.median(seconds[name][2:])

    print(f"\n{result['layout']}: {given.rows:,} images, {result['bytes'] / 1e6:.0f} MB")
    print(f"{'':15} {'setup':>7} {'first epoch':>12} {'later epochs':>13} {'requests':>18}")
    for name, each in seconds.items():
        n = result["requests"][name]
        counts = f"{n[0]:,}, later {statistics.median(n[1:]):,.0f}" if "mirror" in name else ""
        print(f"{name:15} {each[0]:7.2f} {each[1]:12.2f} {later(name):13.2f} {counts:>18}")
    print(f"{'copy first':15} {'':7} {result['copy'] + seconds['local'][1]:12.2f} {later('local'):13.2f}")
    at_least = max(result["bytes"] / given.bandwidth / 1e6, later("local"))
    ratios = {
        "first epoch, mirror / slow": seconds["mirror"][1] / seconds["slow"][1],
        "first epoch, mirror / copy first": seconds["mirror"][1] / (result["copy"] + seconds["local"][1]),
        "first epoch, mirror / limit of bandwidth or decoding": seconds["mirror"][1] / at_least,
        "later epochs, mirror / local": later("mirror") / later("local"),
        "later epochs, half a mirror / slow": later("half a mirror") / later("slow"),
    }
    for name, ratio in ratios.items():
        print(f"  {name}: {ratio:.2f}")
    return ratios


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--delay", type=float, default=10.0, help="milliseconds that each read takes")
    parser.add_argument("--bandwidth", type=float, default=200.0, help="MB a second, of all reads together")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--layouts", nargs="+", choices=["gzip", "contiguous"], default=["gzip", "contiguous"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    print(f"each read takes {given.delay:g} ms, all together {given.bandwidth:g} MB/s")
    for layout in given.layouts:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = measure(layout, given, Path(folder))
            except RuntimeError as error:
                print(f"skipped: {error}")
                return
        found.append(result | {"ratios": report(result, given)})
    if given.json:
        given.json.write_text(json.dumps({"delay": given.delay, "bandwidth": given.bandwidth, "results": found}))


if __name__ == "__main__":
    main()

"""What grows with the number of rows, files, groups, windows and ranks, beside what h5py takes for the same objects?

    python examples/benchmarks/growth.py

Each point is measured in a process of its own: `setup`, the first batch, samples a second in the first epoch and in the
next, the memory that all of it adds, and the budget of decoded rows in it. Epochs over files and groups are whole, so
that each is opened; the others are cut off after some seconds. A script that opens each object with h5py and asks for
its shape is measured in the same process, before. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np
from common import add_outputs, environment, line_of, setting_of, table, write_outputs
from scale import FIELDS, walk, write_groups
from setup import loop, write_files

from lightning_h5 import H5LazyDataset, LazyH5DataModule, create_optimized_dataloader

WIDTH = 8  # numbers of a row
CHUNK = 1 << 15  # rows of a chunk: 1 MiB
WINDOW = 16
BATCH_SIZE = 64
POINTS = {
    "contiguous rows": (10**5, 10**7, 10**9),
    "gzip rows": (10**5, 10**7, 10**9),
    "files of 20 rows": (10**2, 10**3, 10**4),
    "groups of 3 arrays": (10**3, 10**4, 10**5),
    "windows": (10**6, 10**8),
    "ranks": (1, 64, 4096),
}
MANY_OBJECTS = {"files of 20 rows", "groups of 3 arrays"}
ROWS_OF_RANKS = 10**7


# Files ------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, n_rows: int) -> list[str]:
    """A contiguous array; nothing is written, so that the file takes no space."""
    with h5py.File(path, "w") as file:
        space, plist = h5py.h5s.create_simple((n_rows, WIDTH)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, plist)
    return [str(path)]


def write_gzip(path: Path, n_rows: int) -> list[str]:
    """An array of chunks that are all the same."""
    values = np.random.default_rng(0).integers(0, 4, (CHUNK, WIDTH)).astype("f4")
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("one", data=values, chunks=values.shape, compression="gzip", compression_opts=1)
        _, stored = file["one"].id.read_direct_chunk((0, 0))
        array = file.create_dataset("x", (n_rows, WIDTH), "f4", chunks=values.shape, compression="gzip")
        for start in range(0, n_rows, CHUNK):
            array.id.write_direct_chunk((start, 0), stored)
        del file["one"]
    return [str(path)]


def write(kind: str, n: int, folder: Path) -> list[str]:
    """The files of a point."""
    path = folder / "rows.h5"
    if kind == "gzip rows":
        return write_gzip(path, n)
    if kind == "files of 20 rows":
        return write_files(folder, n)
    if kind == "groups of 3 arrays":
        return write_groups(folder, n)
    return write_rows(path, ROWS_OF_RANKS if kind == "ranks" else n)


# A point ----------------------------------------------------------------------------------------------------------


def open_all(kind: str, paths: list[str]) -> None:
    """What a script does to know what it has."""
    if kind == "files of 20 rows":
        loop(paths)
    elif kind == "groups of 3 arrays":
        walk(paths, "groups")
    else:
        with h5py.File(paths[0]) as file:
            assert file["x"].shape
            assert file["x"].dtype


def loader_of(kind: str, n: int, paths: list[str]) -> Any:
    """The loader of training, set up."""
    if kind == "ranks":
        return create_optimized_dataloader(
            H5LazyDataset(paths[0], "x"), BATCH_SIZE, num_workers=0, world_size=n, rank=n // 2
        )
    given: dict[str, Any] = {"x_key": "x"}
    if kind == "files of 20 rows":
        given["y_key"] = "y"
    elif kind == "groups of 3 arrays":
        given = {"x_key": {field: field for field in FIELDS}, "window": [0, 2]}
        given["segments"] = {"groups": "data/*", "constants": ["energy"]}
    elif kind == "windows":
        given["window"] = WINDOW
    module = LazyH5DataModule(paths, batch_size=BATCH_SIZE, **given)
    module.setup("fit")
    return module.train_dataloader()


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Samples a second, for some seconds or to the end of the epoch."""
    began, n_batches = perf_counter(), 0
    for _ in batches:
        n_batches += 1
        if perf_counter() - began > seconds:
            break
    return n_batches * BATCH_SIZE / max(1e-9, perf_counter() - began)


def memory() -> int:
    """Bytes of this process, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def measure(kind: str, n: int, paths: list[str], seconds: float) -> dict[str, float]:
    """The figures of a point."""
    open_all(kind, paths)  # loads code, and files into memory
    began = perf_counter()
    open_all(kind, paths)
    plain, before, began = perf_counter() - began, memory(), perf_counter()
    loader = loader_of(kind, n, paths)
    setup, began = perf_counter() - began, perf_counter()
    batches = iter(loader)
    next(batches)
    first = perf_counter() - began
    seconds = inf if kind in MANY_OBJECTS else seconds
    rates = [rate(batches, seconds)]
    held, budget = memory() - before, loader.dataset.cache_bytes
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    next(batches)
    rates.append(rate(batches, seconds))
    loader.close()
    return {
        "h5py": plain,
        "setup": setup,
        "first_batch": first,
        "first_epoch": rates[0],
        "next_epoch": rates[1],
        "mib": held / 2**20,
        "budget_mib": budget / 2**20,
    }


def point(kind: str, n: int, seconds: float) -> dict[str, Any]:
    """A point, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write(kind, n, Path(folder))
        command = [sys.executable, __file__, "--point", kind, str(n), folder, "--seconds", str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind}, {n:,}: {done.stderr[-2000:]}")
    return {"kind": kind, "n": n, **json.loads(done.stdout.splitlines()[-1])}


def lines_of(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table."""
    return [
        (
            f"{one['n']:,} {one['kind']}",
            f"{1000 * one['h5py']:,.1f}",
            f"{1000 * one['setup']:,.1f}",
            f"{1000 * one['first_batch']:,.1f}",
            f"{one['first_epoch']:,.0f}",
            f"{one['next_epoch']:,.0f}",
            f"{one['mib']:,.0f}",
            f"{one['budget_mib']:,.0f}",
        )
        for one in results
    ]


COLUMNS = ("", "h5py, ms", "setup, ms", "first batch, ms", "samples/s", "next epoch", "memory, MiB", "budget")


def page(results: dict[str, Any]) -> str:
    """The documentation's table."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    lines += (f"| {' | '.join(line)} |" for line in lines_of(results["results"]))
    return "\n".join([*lines, "", f"{setting_of(results['environment'], 'growth')}."]) + "\n"


def main() -> None:
    """Measure all points, or one of them in this process."""
    parser = argparse.ArgumentParser(description="What grows with rows, files, groups, windows and ranks.")
    parser.add_argument("--kinds", nargs="+", choices=POINTS, default=list(POINTS), help="what grows (default: all)")
    parser.add_argument("--most", type=int, default=10**9, help="largest number of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of an epoch over rows (default: %(default)s)")
    parser.add_argument("--point", nargs=3, metavar=("KIND", "N", "FOLDER"), help=argparse.SUPPRESS)
    add_outputs(parser)
    options = parser.parse_args()
    if options.point:
        kind, n, folder = options.point
        paths = sorted(str(path) for path in Path(folder).glob("*.h5"))
        print(json.dumps(measure(kind, int(n), paths, options.seconds)))
        return
    print(line_of(environment()))
    results = []
    for kind in options.kinds:
        for n in POINTS[kind]:
            if n <= options.most:
                results.append(point(kind, n, options.seconds))
                print(f"  {', '.join(f'{name} {value}' for name, value in results[-1].items())}", file=sys.stderr)
    print(table(COLUMNS, lines_of(results)))
    write_outputs(options, {"environment": environment(), "results": results}, page)


if __name__ == "__main__":
    main()

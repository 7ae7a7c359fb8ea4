"""How long does ``setup`` take for very many segments, once and again, and how much memory does a segment take?

Beside a plain h5py loop that opens the same arrays and asks each for its shape and dtype. Segments are groups of a file
with three arrays each, arrays of one group, or files.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lightning_h5 import LazyH5DataModule

FIELDS = ("coords", "numbers", "energy")


def add_molecule(group: h5py.Group, rng: np.random.Generator) -> None:
    """Add three arrays, with 5 to 29 atoms."""
    n = int(rng.integers(5, 30))
    group["coords"], group["numbers"] = np.zeros((n, 3), "f4"), np.arange(n, dtype="i4")
    group["energy"] = np.zeros(1)


def write_groups(folder: Path, n: int) -> list[str]:
    """One file with a group for each segment."""
    rng, path = np.random.default_rng(0), folder / "groups.h5"
    with h5py.File(path, "w") as file:
        for number in range(n):
            add_molecule(file.create_group(f"data/item_{number}"), rng)
    return [str(path)]


def write_arrays(folder: Path, n: int) -> list[str]:
    """One file with an array for each segment."""
    rng, path = np.random.default_rng(0), folder / "arrays.h5"
    with h5py.File(path, "w") as file:
        for number in range(n):
            file[f"protein_{number}"] = np.zeros((int(rng.integers(5, 30)), 4), "f4")
    return [str(path)]


def write_files(folder: Path, n: int) -> list[str]:
    """A file for each segment."""
    rng, paths = np.random.default_rng(0), [str(folder / f"{number:07}.h5") for number in range(n)]
    for path in paths:
        with h5py.File(path, "w") as file:
            add_molecule(file, rng)
    return paths


def arrays_of(file: h5py.File, kind: str) -> Iterator[h5py.Dataset]:
    """Open the arrays of all segments of a file."""
    if kind == "arrays":
        yield from (file[name] for name in file)
    elif kind == "files":
        yield from (file[field] for field in FIELDS)
    else:
        for name in file["data"]:
            group = file["data"][name]
            yield from (group[field] for field in FIELDS)


def walk(paths: Iterable[str], kind: str) -> None:
    """Ask each array for its shape and dtype, as anybody would."""
    for path in paths:
        with h5py.File(path) as file:
            for array in arrays_of(file, kind):
                assert array.shape
                assert array.dtype


def data(paths: list[str], kind: str, catalog_dir: str | None) -> LazyH5DataModule:
    """Return the data module, set up: windows of two steps."""
    given: dict[str, Any] = {"x_key": "*"}
    if kind != "arrays":
        given = {"x_key": {field: field for field in FIELDS}, "segments": {"constants": ["energy"]}}
        given["segments"] |= {"groups": "data/*"} if kind == "groups" else {}
    datamodule = LazyH5DataModule(paths, window=[0, 2], files={"catalog_dir": catalog_dir}, **given)
    datamodule.setup("fit")
    return datamodule


def seconds(work: Callable[[], object]) -> float:
    """Return how long it takes, the faster of two tries."""
    took = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def held_bytes(work: Callable[[], Any]) -> int:
    """Return the bytes that stay in memory with what is made."""
    work()  # what stays once, such as modules
    gc.collect()
    tracemalloc.start()
    made = work()
    gc.collect()
    n_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return n_bytes


def measure(kind: str, n: int, folder: Path) -> dict[str, float]:
    """Return the figures of one kind of segments."""
    paths = {"groups": write_groups, "arrays": write_arrays, "files": write_files}[kind](folder, n)
    kept = str(folder / "kept")
    plain, first = seconds(lambda: walk(paths, kind)), seconds(lambda: data(paths, kind, None))
    data(paths, kind, kept)
    again = seconds(lambda: data(paths, kind, kept))
    n_bytes = held_bytes(lambda: data(paths, kind, kept))
    return {"segments": n, "walk": plain, "first": first, "ratio": first / plain, "again": again, "bytes": n_bytes / n}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=10_000, help="segments that are files")
    parser.add_argument(
        "--kinds", nargs="+", choices=["groups", "arrays", "files"], default=["groups", "arrays", "files"]
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    print(f"{'':8} {'segments':>9} {'h5py':>8} {'setup':>8} {'ratio':>6} {'again':>8} {'memory':>16}")
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            one = measure(kind, given.files if kind == "files" else given.segments, Path(folder))
        found[kind] = one
        print(
            f"{kind:8} {one['segments']:9,} {one['walk']:6.2f} s {one['first']:6.2f} s {one['ratio']:6.2f} "
            f"{one['again']:6.2f} s {one['bytes']:7,.0f} B/segment"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""How many windows and patches a second come from episodes, recordings and volumes, beside the usual loaders?

    python examples/benchmarks/windows.py [--cases images ...] [--rounds 3] [--json FILE]

writes arrays as projects store them, and times shuffled epochs of overlapping windows or patches: a `Dataset` that
reads one with `array[start : start + length]`, or with a slice of each axis, in a `DataLoader` with 0 and
with 2 workers; `LazyH5DataModule`, with so little memory for decoded chunks that each is decoded in every epoch; a loop
that only decodes all chunks with zlib, as HDF5 does, in as many threads as cores; and the limit of any loader with our
decoder: to decode each chunk once and to copy each window once, without any other work. Windows are compared with the
arrays first; then all take turns. Ratios are of medians.

Plain loaders decode a chunk or more for each window. So a ratio above that needs a faster decoder than zlib, and how
much faster ours is depends on the data and the machine: 1.5 to 2.5 times for noise, up to 4 for rendered images.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import deflate
import h5py
import numpy as np
from torch.utils.data import DataLoader, Dataset

from lightning_h5 import LazyH5DataModule

BATCH_SIZE = 32
SECONDS = 2.0  # that a plain loader is timed for
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arrays, and the windows that are made of them.

    Attributes:
        title: what they are.
        make: makes the arrays, by name.
        chunks: of each array; None for contiguous ones.
        options: of the data module.
        length: steps of a window; 0 if ``options`` have a patch.
        stride: from one window to the next.
        axis: of the steps, in an array.
        by_index: whether each index of axis 0 is a segment.
        against_plain: windows a second beside those of the better plain loader, at least.
        memory: for decoded chunks.
    """

    title: str
    make: Callable[[np.random.Generator], Arrays]
    chunks: tuple[int, ...] | None
    options: dict[str, Any]
    length: int = 0
    stride: int = 1
    against_plain: float
    axis: int = 0
    by_index: bool = False
    memory: str = "24 MiB"

    def windows(self, arrays: Arrays) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the array of each window, and its place there."""
        found: list[tuple[str, tuple[Any, ...]]] = []
        if (patch := self.options.get("patch")) is not None:
            for name, values in arrays.items():
                axes = zip(values.shape, patch["shape"], patch["stride"], strict=True)
                places = [[slice(at, at + size) for at in range(0, n - size + 1, stride)] for n, size, stride in axes]
                found += [(name, place) for place in product(*places)]
            return found
        for name, values in arrays.items():
            for segment in range(len(values)) if self.by_index else [None]:
                before = [] if segment is None else [segment]
                n, skipped = values.shape[self.axis], self.axis - len(before)
                for start in range(0, n - self.length + 1, self.stride):
                    place = (*before, *[slice(None)] * skipped, slice(start, start + self.length))
                    found.append((name, place))
        return found


def episodes(rng: np.random.Generator) -> Arrays:
    """Frames of moving pictures with noise."""
    found = {}
    for number in range(24):
        scene = rng.integers(0, 200, (1, 8, 8, 3)).repeat(8, axis=1).repeat(8, axis=2)
        found[f"demo_{number}/obs"] = (scene + rng.integers(0, 12, (600, 64, 64, 3))).astype("u1")
    return found


def volumes(rng: np.random.Generator) -> Arrays:
    """Volumes of blurred shapes with noise."""
    found = {}
    for number in range(3):
        scene = rng.integers(0, 200, (32, 32, 32)).repeat(8, axis=0).repeat(8, axis=1).repeat(8, axis=2)
        found[f"scan_{number}/raw"] = (scene + rng.integers(0, 12, scene.shape)).astype("u1")
    return found


CASES = {
    "images": Case(
        title="episodes: u1 images of 64x64x3, gzip chunks of 24 frames, windows of 4, stride 1",
        make=episodes,
        chunks=(24, 64, 64, 3),
        options={"x_key": "obs", "segments": "demo_*", "window": {"length": 4, "stride": 1}},
        length=4,
        stride=1,
        against_plain=60,
    ),
    "trajectories": Case(
        title="trajectories: f4 fields of 48x48, gzip chunks (1, 4, 48, 48), windows of 5, stride 1",
        make=lambda rng: {"u": rng.standard_normal((120, 100, 48, 48)).astype("f4")},
        chunks=(1, 4, 48, 48),
        options={"x_key": "u", "segments": {"axis": 0, "step_axis": 1}, "window": {"length": 5, "stride": 1}},
        length=5,
        stride=1,
        axis=1,
        by_index=True,
        against_plain=20,
    ),
    "eeg": Case(
        title="recordings: f4 (32, 60000), gzip chunks (32, 1000), windows of 200, stride 100",
        make=lambda rng: {f"s{i}/eeg": rng.standard_normal((32, 60_000)).astype("f4") for i in range(18)},
        chunks=(32, 1000),
        options={
            "x_key": "eeg",
            "segments": {"groups": "s*", "step_axis": 1},
            "window": {"length": 200, "stride": 100},
        },
        length=200,
        stride=100,
        axis=1,
        against_plain=15,
    ),
    "patches": Case(
        title="volumes: 3 of u1 (256, 256, 256), gzip chunks (64, 64, 64), patches (32, 64, 64), stride (16, 32, 32)",
        make=volumes,
        chunks=(64, 64, 64),
        options={
            "x_key": "raw",
            "segments": "scan_*",
            "patch": {"shape": [32, 64, 64], "stride": [16, 32, 32]},
        },
        against_plain=20,
    ),
    "contiguous": Case(
        title="contiguous: f4 (50000, 64), windows of 50, stride 10",
        make=lambda rng: {f"s{i}/x": rng.standard_normal((50_000, 64)).astype("f4") for i in range(4)},
        chunks=None,
        options={"x_key": "x", "segments": "s*", "window": {"length": 50, "stride": 10}},
        length=50,
        stride=10,
        against_plain=2,
    ),
}


class Plain(Dataset[Any]):
    """Reads each window by itself."""

    def __init__(self, path: str, windows: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._path, self._windows, self._file = path, windows, None

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Any:
        if self._file is None:
            self._file = h5py.File(self._path)
        name, place = self._windows[index]
        return self._file[name][place]


def plain_rate(path: str, windows: list[tuple[str, tuple[Any, ...]]], num_workers: int) -> float:
    """Return the windows a second of a plain loader, timed for a while after its first batches."""
    batches = iter(DataLoader(Plain(path, windows), BATCH_SIZE, shuffle=True, num_workers=num_workers))
    for _ in range(4):
        next(batches)
    began, n = perf_counter(), 0
    for batch in batches:
        n += len(batch)
        if perf_counter() - began > SECONDS:
            break
    return n / (perf_counter() - began)


def decode_seconds(path: str, decode: Callable[[bytes], bytes]) -> float:
    """Return the seconds of a loop that reads and decodes each chunk once, and makes no window."""
    places: list[tuple[int, int]] = []
    with h5py.File(path) as file:
        file.visititems(lambda _, item: places.extend(_places(item)) if isinstance(item, h5py.Dataset) else None)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            began = perf_counter()
            list(threads.map(lambda place: len(decode(os.pread(descriptor, place[1], place[0]))), places))
            return perf_counter() - began
    finally:
        os.close(descriptor)


def copy_seconds(arrays: Arrays, windows: list[tuple[str, tuple[Any, ...]]], rng: np.random.Generator) -> float:
    """Return the seconds of a loop that copies each window once into batches, in any order and in all threads."""
    order = rng.permutation(len(windows)).tolist()
    batches = [[windows[number] for number in order[at : at + BATCH_SIZE]] for at in range(0, len(order), BATCH_SIZE)]

    def copy(batch: list[tuple[str, tuple[Any, ...]]]) -> None:
        np.stack([arrays[name][place] for name, place in batch])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        began = perf_counter()
        list(threads.map(copy, batches))
        return perf_counter() - began


def _places(array: h5py.Dataset) -> list[tuple[int, int]]:
    infos = [array.id.get_chunk_info(number) for number in range(array.id.get_num_chunks())]
    return [(info.byte_offset, info.size) for info in infos]


def run(case: Case, path: str, n_rounds: int) -> dict[str, Any]:
    """Measure a case."""
    arrays = case.make(np.random.default_rng(0))
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            how = {} if case.chunks is None else {"chunks": case.chunks, "compression": "gzip"}
            file.create_dataset(name, data=values, **how)
    windows = case.windows(arrays)
    chunk_bytes = int(np.prod(case.chunks or ())) * next(iter(arrays.values())).itemsize
    n_chunks = sum(values.size // int(np.prod(case.chunks)) for values in arrays.values()) if case.chunks else 0
    files = {"cache_bytes": case.memory}
    shuffle = {"mode": "chunks" if case.chunks else "auto", "buffer": "12 MiB"}
    module = LazyH5DataModule(
        path, batch_size=BATCH_SIZE, files=files, shuffle=shuffle, with_index=True, **case.options
    )
    module.setup("fit")
    loader, dataset = module.train_dataloader(), module.datasets["train"]
    for x, index, *_ in loader:
        for value, number in zip(x.numpy(), index.tolist(), strict=True):
            name, place = windows[number]
            np.testing.assert_array_equal(value, arrays[name][place])
    rates: dict[str, list[float]] = {"plain, 0 workers": [], "plain, 2 workers": [], "lightning_h5": []}
    decoded = []
    for epoch in range(1, n_rounds + 1):
        for workers in (0, 2):
            rates[f"plain, {workers} workers"].append(plain_rate(path, windows, workers))
        loader.sampler.set_epoch(epoch)
        before, began, n = dataset.counters.total()["chunks_decoded"], perf_counter(), 0
        for x, *_ in loader:
            n += len(x)
        rates["lightning_h5"].append(n / (perf_counter() - began))
        decoded.append((dataset.counters.total()["chunks_decoded"] - before) / max(1, n_chunks))
        if case.chunks:
            rates.setdefault("bare decode", []).append(len(windows) / decode_seconds(path, zlib.decompress))
            least = decode_seconds(path, lambda stored: deflate.zlib_decompress(stored, chunk_bytes))
            least += copy_seconds(arrays, windows, np.random.default_rng(epoch))
            rates.setdefault("limit", []).append(len(windows) / least)
    module.teardown("fit")
    found = {name: median(each) for name, each in rates.items()}
    best = max(found["plain, 0 workers"], found["plain, 2 workers"])
    ratios = {"against the plain loader": (found["lightning_h5"] / best, case.against_plain)}
    if case.chunks:
        ratios["against bare decoding"] = (found["lightning_h5"] / found["bare decode"], 0.7)
    print(f"\n{case.title}; {len(windows):,} windows")
    for name, rate in found.items():
        print(f"  {name:20} {rate:12,.0f} windows/s")
    for name, (seen, least) in ratios.items():
        print(f"  {name:26} {seen:7.2f}   asked {least:g}   {'met' if seen >= least else 'NOT MET'}")
    if case.chunks:
        limit = found["limit"]
        reached = found["lightning_h5"] / limit
        print(f"  the limit is {limit / best:.1f} times the plain loader; {reached:.2f} of it is reached")
        print(f"  chunks decoded per epoch   {median(decoded):7.2f} of all   asked at most 1.1")
    return {"title": case.title, "windows": len(windows), "rates": found, "ratios": ratios, "decoded": decoded}


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run(CASES[name], f"{folder}/{name}.h5", given.rounds) for name in given.cases}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

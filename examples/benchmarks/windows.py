"""How many windows and patches a second come from episodes, recordings and volumes?

    python examples/benchmarks/windows.py [--cases images ...] [--rounds 3] [--json FILE]

writes arrays as projects store them, and times shuffled epochs of overlapping windows or patches: a `Dataset` that
reads one with `array[start : start + length]`, or with a slice of each axis, in a `DataLoader` with 0 and with 2
workers, and in SPDL's threads and processes; insitubatch, which has windows along the first axis of one array;
`LazyH5DataModule`, with so little memory for decoded chunks that each is decoded in every epoch; a loop that only
decodes all chunks with zlib, as HDF5 does, in as many threads as cores; and the limit of any loader with our decoder:
to decode each chunk once and to copy each window once, without any other work. Windows are compared with the arrays
first; then all take turns.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import deflate
import h5py
import numpy as np
from common import environment, line_of, merge_json
from peers import AS_STORED, VERSIONS, find
from torch.utils.data import DataLoader, Dataset

from lightning_h5 import LazyH5DataModule

BATCH_SIZE = 32
SECONDS = 2.0  # that another loader is timed for
N_CHECKED = 2000  # windows of each of these that are compared
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
        memory: for decoded chunks.
    """

    title: str
    make: Callable[[np.random.Generator], Arrays]
    chunks: tuple[int, ...] | None
    options: dict[str, Any]
    length: int = 0
    stride: int = 1
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
    ),
    "contiguous": Case(
        title="contiguous: f4 (50000, 64), windows of 50, stride 10",
        make=lambda rng: {f"s{i}/x": rng.standard_normal((50_000, 64)).astype("f4") for i in range(4)},
        chunks=None,
        options={"x_key": "x", "segments": "s*", "window": {"length": 50, "stride": 10}},
        length=50,
        stride=10,
    ),
    "sensors": Case(
        title="one recording: f4 (200000, 32), gzip chunks (1000, 32), windows of 16, stride 1",
        make=lambda rng: {"x": rng.standard_normal((200_000, 32)).astype("f4")},
        chunks=(1000, 32),
        options={"x_key": "x", "window": {"length": 16, "stride": 1}},
        length=16,
        memory="8 MiB",
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


def rate(batches: Iterator[Any]) -> float:
    """Return the windows a second of a loader, timed for a while after its first batches."""
    for _ in range(4):
        next(batches)
    began, n = perf_counter(), 0
    for batch in batches:
        n += len(batch)
        if perf_counter() - began > SECONDS:
            break
    return n / (perf_counter() - began)


def peer_ways(
    case: Case, path: str, windows: list[tuple[str, tuple[Any, ...]]], peers: dict[str, Any], stack: ExitStack
) -> dict[str, Callable[[int], Iterator[Any]]]:
    """Return the epochs of other loaders, by name."""
    ways: dict[str, Callable[[int], Iterator[Any]]] = {}
    if "spdl" in peers:
        epoch, pool = peers["spdl"].epoch, peers["spdl"].processes(Plain(path, windows), stack)
        ways["SPDL with h5py, 2 processes"] = lambda _: epoch(Plain(path, windows), BATCH_SIZE, pool)
        ways["SPDL with h5py, 2 threads"] = lambda _: epoch(Plain(path, windows), BATCH_SIZE, None)
    if "insitubatch" in peers and not case.by_index and case.chunks and len({name for name, _ in windows}) == 1:
        shown = peers["insitubatch"].windows(path, case.options["x_key"], case.length, BATCH_SIZE)
        ways["insitubatch"] = lambda number: (x for x, _ in shown(number))
    return ways


def check(batches: Iterator[Any], arrays: Arrays, windows: list[tuple[str, tuple[Any, ...]]], name: str) -> None:
    """Check that batches have windows of the arrays, and none of them twice; the first 2,000 are looked at."""
    expected = {arrays[array][place].tobytes() for array, place in windows}
    seen: list[bytes] = []
    for batch in batches:
        seen += [value.numpy().tobytes() for value in batch]
        if len(seen) > N_CHECKED:
            break
    if len(set(seen)) < len(seen) or not expected.issuperset(seen):
        raise SystemExit(f"{name!r} gives windows that differ from those written, or some of them twice")


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


def run(name: str, folder: str, peers: dict[str, Any], n_rounds: int) -> dict[str, Any]:
    """Measure a case."""
    case, path = CASES[name], f"{folder}/{name}.h5"
    arrays = case.make(np.random.default_rng(0))
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            how = {} if case.chunks is None else {"chunks": case.chunks, "compression": "gzip"}
            file.create_dataset(key, data=values, **how)
    windows = case.windows(arrays)
    chunk_bytes = int(np.prod(case.chunks or ())) * next(iter(arrays.values())).itemsize
    files = {"cache_bytes": case.memory}
    shuffle = {"mode": "chunks" if case.chunks else "auto", "buffer": "12 MiB"}
    module = LazyH5DataModule(
        path, batch_size=BATCH_SIZE, files=files, shuffle=shuffle, with_index=True, **case.options
    )
    module.setup("fit")
    loader = module.train_dataloader()
    n_seen = np.zeros(len(windows), int)
    for x, index, *_ in loader:
        for value, number in zip(x.numpy(), index.tolist(), strict=True):
            array, place = windows[number]
            np.testing.assert_array_equal(value, arrays[array][place])
            n_seen[number] += 1
    assert np.array_equal(n_seen, np.ones(len(windows)))
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways: dict[str, Callable[[int], Iterator[Any]]] = {
            f"plain h5py, {n} workers": lambda _, n=n: iter(
                DataLoader(Plain(path, windows), BATCH_SIZE, shuffle=True, num_workers=n)
            )
            for n in (0, 2)
        }
        ways |= peer_ways(case, path, windows, peers, stack)
        for way, epoch_of in ways.items():
            check(epoch_of(0), arrays, windows, way)
        for epoch in range(1, n_rounds + 1):
            for way, epoch_of in ways.items():
                rates.setdefault(way, []).append(rate(epoch_of(epoch)))
            loader.sampler.set_epoch(epoch)
            began, n = perf_counter(), 0
            for x, *_ in loader:
                n += len(x)
            rates.setdefault("lightning_h5", []).append(n / (perf_counter() - began))
            if case.chunks:
                rates.setdefault("bare decode loop", []).append(len(windows) / decode_seconds(path, zlib.decompress))
                least = decode_seconds(path, lambda stored: deflate.zlib_decompress(stored, chunk_bytes))
                least += copy_seconds(arrays, windows, np.random.default_rng(epoch))
                rates.setdefault("decoding and copying once", []).append(len(windows) / least)
    module.teardown("fit")
    print(f"\n{case.title}; {len(windows):,} windows")
    for way, each in rates.items():
        print(f"  {way:28} {median(each):12,.0f} windows/s", flush=True)
    contenders = [{"name": way, "team": way.partition(",")[0], "rows_per_second": each} for way, each in rates.items()]
    rows_are, _, title = case.title.partition(": ")
    return {"case": name, "rows_are": rows_are, "title": title, "windows": len(windows), "contenders": contenders}


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=AS_STORED, default=AS_STORED)
    parser.add_argument("--json", type=Path, help="add the measurements to those in this file")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    about, (peers, missing) = environment(VERSIONS), find(given.peers)
    print(line_of(about))
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        results = [run(name, folder, peers, given.rounds) for name in given.cases]
    settings = {"rounds": given.rounds, "batch_size": BATCH_SIZE, "skipped": missing}
    merge_json(given.json, {"environment": about, **settings, "results": results}, "case", CASES)


if __name__ == "__main__":
    main()

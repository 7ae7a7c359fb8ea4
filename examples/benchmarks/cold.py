"""How fast rows come from files that are not in memory, beside plain h5py and what the disk gives.

    python examples/benchmarks/cold.py

Files larger than memory are read from the disk in each epoch. So before each measurement the system drops the file from
its page cache, and each one reads other rows of it for some seconds. All take turns, and ratios are of medians. The
default is measured as on a machine whose memory the file exceeds, whatever this one has.

With root, the same code reads gzip through a file system that takes 1 and 10 ms for each read (`slow_files.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
from common import add_outputs, environment, line_of, setting_of, table, write_outputs
from slow_files import forget, slow_files
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from lightning_h5 import LazyH5DataModule
from lightning_h5.readers.many_reads import compile_reads

BATCH_SIZE = 256
BLOCK = 64 << 20  # bytes that are written together
WORKERS = (0, 2, 4, 16)
THREADS = (16, 64)
DELAYS = (0, 1, 10)  # milliseconds of a read through a slow file system; without any, its own cost shows


@dataclass(frozen=True)
class Case:
    """An array, and how its samples are asked for.

    Attributes:
        name: for the tables.
        width: numbers of a row, float32.
        chunk_bytes: of the chunks; None without chunks.
        compression: of the chunks.
        window: rows of a sample.
    """

    name: str
    width: int
    chunk_bytes: int | None = None
    compression: str | None = None
    window: int = 1

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample."""
        return 4 * self.width * self.window


CASES = (
    Case("contiguous 128 B", 32),
    Case("contiguous 4 KiB", 1024),
    Case("contiguous 48 KiB", 12288),
    Case("windows of 16 x 256 B", 64, window=16),
    Case("raw chunks 256 KiB, 4 KiB", 1024, chunk_bytes=256 << 10),
    Case("gzip 256 KiB, 4 KiB", 1024, chunk_bytes=256 << 10, compression="gzip"),
)


def write(path: Path, case: Case, n_bytes: int) -> None:
    """Write the array: random whole numbers, which gzip makes smaller."""
    random, n_rows = np.random.default_rng(0), n_bytes // (4 * case.width)
    chunks = None if case.chunk_bytes is None else (case.chunk_bytes // (4 * case.width), case.width)
    with h5py.File(path, "w") as file:
        array = file.create_dataset("x", (n_rows, case.width), "f4", chunks=chunks, compression=case.compression)
        step = BLOCK // (4 * case.width)
        for start in range(0, n_rows, step):
            n = min(step, n_rows - start)
            array[start : start + n] = (random.standard_normal((n, case.width), dtype="f4") * 8).round()
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)  # only pages that are written can be dropped
    os.close(fd)


# Ways to read -----------------------------------------------------------------------------------------------------


def ours(path: Path, case: Case, num_workers: int = 0, exceeds_memory: bool = True, **more: Any) -> Callable[[], Any]:
    """Batches of the data module, epoch after epoch."""
    window = {} if case.window == 1 else {"window": case.window}
    module = LazyH5DataModule(path, x_key="x", batch_size=BATCH_SIZE, num_workers=num_workers, **window, **more)
    memory = 1 if exceeds_memory else 1 << 60
    with patch("lightning_h5.datamodules.base.page_cache_memory", lambda: memory):
        module.setup("fit")
    loader = module.train_dataloader()
    epochs = count()

    def begin() -> Iterator[int]:
        while True:
            loader.sampler.set_epoch(next(epochs))
            for batch in loader:
                yield len(batch)

    return begin


class PlainRows(Dataset[Any]):
    """One ``array[...]`` of h5py for each sample, in the process that asks."""

    def __init__(self, path: Path, case: Case) -> None:
        self.path, self.window, self.array = path, case.window, None
        with h5py.File(path) as file:
            self.n_samples = len(file["x"]) // case.window

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, at: int) -> Any:
        if self.array is None:
            self.array = h5py.File(self.path)["x"]
        return self.array[at] if self.window == 1 else self.array[at * self.window : (at + 1) * self.window]


class RandomSamples:
    """Numbers of samples without end: a permutation of so many would take seconds to begin."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples, self.random = n_samples, np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self.random.integers(self.n_samples, size=BATCH_SIZE).tolist()


def plain(path: Path, case: Case, num_workers: int) -> Callable[[], Any]:
    """The recipe that people write."""
    dataset = PlainRows(path, case)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=RandomSamples(len(dataset)), num_workers=num_workers)
    return lambda: (len(batch) for batch in loader)


def by_threads(path: Path, case: Case, n_threads: int) -> Callable[[], Any]:
    """Samples at random places, read by so many threads with ``os.preadv``: what the disk gives for single ones."""
    random, size = np.random.default_rng(2), case.sample_bytes

    def begin() -> Iterator[int]:
        fd, n_places, n_each = os.open(path, os.O_RDONLY), path.stat().st_size // size - 1, 64

        def read() -> None:
            memory = bytearray(size)
            for place in random.integers(n_places, size=n_each).tolist():
                os.preadv(fd, [memory], place * size)

        try:
            while True:
                threads = [threading.Thread(target=read) for _ in range(n_threads)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                yield n_threads * n_each
        finally:
            os.close(fd)

    return begin


def in_order(path: Path, case: Case) -> Callable[[], Any]:
    """The file from its beginning to its end, a mebibyte at a time: what the disk gives at most."""

    def begin() -> Iterator[int]:
        memory = bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while n_bytes := file.readinto(memory):
                yield n_bytes / case.sample_bytes
                if n_bytes < len(memory):
                    forget(path)
                    file.seek(0)

    return begin


# Measuring --------------------------------------------------------------------------------------------------------


def share_of(way: str) -> float:
    """The share of the samples that a way reads at most: of random ones, many of a larger share would be in memory."""
    return 1 if way.startswith(("default", "in order")) else 1 / 3


def rate(
    begin: Callable[[], Any], path: Path, case: Case, seconds: float, share: float = 1, *, cold: bool = True
) -> float:
    """Samples a second, from the first batch on, of a share of the file at most."""
    with h5py.File(path) as file:
        most = len(file["x"]) / case.window * share
    if cold:
        forget(path)
    else:
        path.read_bytes()
    batches = begin()
    next(batches)
    n_samples, began = 0.0, perf_counter()
    for n in batches:
        n_samples += n
        if (passed := perf_counter() - began) >= seconds or n_samples >= most:
            break
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    return n_samples / passed


class Busy:
    """Another process's reads of the same disk, as a thread: random pieces of a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_over = path, threading.Event()
        self.thread = threading.Thread(target=self.read, daemon=True)

    def read(self) -> None:
        """Read until the end."""
        random, memory = np.random.default_rng(3), bytearray(64 << 10)
        with self.path.open("rb", buffering=0) as file:
            while not self.is_over.is_set():
                forget(self.path)
                for place in random.integers(self.path.stat().st_size - len(memory), size=100).tolist():
                    os.preadv(file.fileno(), [memory], place)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.thread.join()


def ways_of(path: Path, case: Case) -> dict[str, Callable[[], Any]]:
    """All ways to read a case, by name."""
    ways = {"default": ours(path, case)}
    ways |= {f"default, {n} workers": ours(path, case, n) for n in (2, 16)}
    if case.chunk_bytes is None:
        ways["global"] = ours(path, case, shuffle="global")
        ways |= {f"pread, {n} threads": by_threads(path, case, n) for n in THREADS}
    ways |= {f"plain h5py, {n} workers": plain(path, case, n) for n in WORKERS}
    if case.compression is None:
        ways["in order"] = in_order(path, case)
    return ways


def ratios_of(medians: dict[str, float]) -> dict[str, float]:
    """What is compared with what."""
    best_plain = max(rate for name, rate in medians.items() if name.startswith("plain"))
    found = {"default / plain h5py": medians["default"] / best_plain}
    if "default, warm" in medians:
        found["default / default, warm"] = medians["default"] / medians["default, warm"]
    if "in order" in medians:
        found["default / in order"] = medians["default"] / medians["in order"]
    if "global" in medians:
        threads = max(rate for name, rate in medians.items() if name.startswith("pread"))
        found["global / threads of pread"] = medians["global"] / threads
        found["global / plain h5py"] = medians["global"] / best_plain
    return found


def measure(case: Case, path: Path, options: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Rates of all ways to read a case, which take turns."""
    ways = ways_of(path, case)
    compile_reads()  # a run does that once, after some ten thousand rows
    if case.compression is not None:
        rate(ways["default"], path, case, options.seconds)  # loads machine code
        ways = {"default, warm": ways["default"], **ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, begin in ways.items():
            progress.set_postfix_str(f"{case.name}: {name}")
            is_cold = not name.endswith("warm")
            rates[name].append(rate(begin, path, case, options.seconds, share_of(name), cold=is_cold))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {"case": case.name, "samples_per_second": medians, "ratios": ratios_of(medians)}


def measure_busy(case: Case, path: Path, other: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same of some ways, while somebody else reads the same disk."""
    ways = {name: way for name, way in ways_of(path, case).items() if "default," not in name}
    with Busy(other):
        medians = {
            name: statistics.median(
                rate(begin, path, case, options.seconds, share_of(name)) for _ in range(options.rounds)
            )
            for name, begin in ways.items()
        }
    return {"case": f"{case.name}, busy disk", "samples_per_second": medians, "ratios": ratios_of(medians)}


def measure_slow(case: Case, path: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rates of the default through slow file systems, and warm."""
    few = {"buffer": "128 MiB"}
    medians = {}
    path.read_bytes()
    warm = ours(path, case, shuffle=few)
    medians["warm"] = statistics.median(
        rate(warm, path, case, options.seconds, cold=False) for _ in range(options.rounds)
    )
    for delay in DELAYS:
        target = folder / f"slow{delay}"
        target.mkdir()
        with slow_files(path.parent, target, delay=delay / 1000, bandwidth=1e10) as slow:
            begin = ours(slow / path.name, case, shuffle=few)
            found = [rate(begin, slow / path.name, case, options.seconds) for _ in range(options.rounds)]
            medians[f"{delay} ms a read"] = statistics.median(found)
    ratios = {
        f"{name} / {base}": rate / medians[base]
        for base in ("warm", "0 ms a read")
        for name, rate in medians.items()
        if name not in ("warm", base)
    }
    return {"case": f"{case.name}, slow file system", "samples_per_second": medians, "ratios": ratios}


def show(result: dict[str, Any]) -> str:
    """The tables of a case."""
    lines = [(name, f"{rate:,.0f}") for name, rate in result["samples_per_second"].items()]
    ratios = [(name, f"{ratio:,.2f}") for name, ratio in result["ratios"].items()]
    tables = table((result["case"], "samples/s"), lines), table(("ratio of medians", "seen"), ratios)
    return "\n" + "\n\n".join(tables) + "\n"


PAGE_WAYS = {
    "in order": "the file from its beginning to its end (a limit)",
    "pread": "single rows by the better of 16 and 64 threads (a limit)",
    "plain": "plain h5py, the best of 0, 2, 4 and 16 workers",
    "global": '`LazyH5DataModule`, `shuffle="global"`',
    "default": "`LazyH5DataModule`, the default",
    "default, warm": "the same, warm: the file is in memory",
}


def page(results: Mapping[str, Any]) -> str:
    """The documentation's tables."""
    cases = [result for result in results["results"] if "slow" not in result["case"]]
    lines = [f"| samples/s, cold | {' | '.join(result['case'] for result in cases)} |", f"|---|{'---:|' * len(cases)}"]
    for way, name in PAGE_WAYS.items():
        cells = []
        for result in cases:
            found = [
                rate
                for each, rate in result["samples_per_second"].items()
                if each == way or (way in ("pread", "plain") and each.startswith(way))
            ]
            cells.append(f"{max(found):,.0f}" if found else "-")
        if {*cells} != {"-"}:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    settings = results["settings"]
    lines += [
        "",
        f"Files of {settings['gib']:g} GiB that left the page cache before each measurement; batches of {BATCH_SIZE}.",
        f"{setting_of(results['environment'], 'cold')}.",
    ]
    for result in results["results"]:
        if "slow" in result["case"]:
            rates = result["samples_per_second"]
            lines += [
                "",
                "Gzip through a file system of the benchmark's own that takes long for each read, with 128 MiB of rows "
                "that are mixed: "
                + ", ".join(f"{name.removesuffix(' a read')} {rate:,.0f} samples/s" for name, rate in rates.items())
                + ". Without a delay (0 ms), what it costs itself shows.",
            ]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Rows a second from files that are not in memory.")
    parser.add_argument("--gib", type=float, default=4, help="size of each array (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4, help="time of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="beginnings of the cases' names (default: all)")
    parser.add_argument("--slow", action="store_true", help="also through slow file systems, which takes root")
    add_outputs(parser)
    return parser.parse_args()


def main() -> None:
    """Measures all cases, and prints their tables."""
    options = arguments()
    for name in ("lightning.pytorch", "lightning_h5"):
        logging.getLogger(name).setLevel(logging.WARNING)
    about = environment()
    print(line_of(about))
    print(f"{options.gib:g} GiB each, batches of {BATCH_SIZE}, {options.rounds} rounds of {options.seconds:g} s, cold")
    cases = [case for case in CASES if options.cases is None or case.name.startswith(tuple(options.cases))]
    results = []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(cases), leave=False, disable=None) as progress:
        for case in cases:
            progress.set_postfix_str(f"write {case.name}")
            place = Path(folder) / "files"
            place.mkdir(exist_ok=True)
            path = place / "rows.h5"
            write(path, case, int(options.gib * (1 << 30)))
            found = [measure(case, path, options, progress)]
            if case.name == "contiguous 4 KiB":
                other = Path(folder) / "other"
                other.write_bytes(os.urandom(BLOCK) * 8)
                found.append(measure_busy(case, path, other, options))
            if options.slow and case.compression is not None:
                found.append(measure_slow(case, path, Path(folder), options))
            for result in found:
                progress.write(show(result))
            results += found
            path.unlink()
            progress.update()
    settings = {name: getattr(options, name) for name in ("gib", "seconds", "rounds")}
    write_outputs(options, {"environment": about, "settings": settings, "results": results}, page)


if __name__ == "__main__":
    main()

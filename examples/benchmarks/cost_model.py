"""How many rows a second would more cores give, and how many can one process use before the interpreter's lock binds?

    python examples/benchmarks/cost_model.py [--cores 1 2 4 8 16 32 64] [--json FILE]

Simulates cores that this machine lacks. First, one core decodes, which gives the seconds of a chunk. Then the loader
runs with 1, 2, 4 ... threads whose decoding is a sleep of as many seconds: it takes no core and holds no lock.
Everything else is real: order, tasks, copies of rows into batches, labels, and the lock for which all threads compete.
Real decoding on the cores there are shows how far the simulation can be trusted. Copies share the cores of this
machine, so more cores would be faster than simulated, not slower.

The model that the documentation gives: rows a second are cores x the rows of one core, up to a ceiling.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any

import h5py
import numpy as np
from common import add_outputs, environment, setting_of, write_outputs

from lightning_h5 import LazyH5DataModule
from lightning_h5.readers import thread_pool
from lightning_h5.readers.filters import compiled
from lightning_h5.readers.filters.pipeline import ChunksRead

BATCH_SIZE, MEMORY = 64, "128 MiB"
CASES = {
    "images": ((32, 3, 64, 64), "u1", False),
    "signals": ((32, 4, 1024), "f4", True),
    "large images": ((8, 3, 224, 224), "u1", False),
}
DECODE = compiled.ChunkLoop.__call__


def write(path: str, chunk: tuple[int, ...], dtype: str, is_shuffled: bool, n_bytes: int) -> int:
    """Write a gzip file whose chunks are all alike, and return its rows."""
    rng = np.random.default_rng(0)
    if dtype == "u1":
        scene = rng.integers(0, 200, (1, chunk[1], chunk[2] // 8, chunk[3] // 8)).repeat(8, 2).repeat(8, 3)
        values = (scene + rng.integers(0, 4, chunk)).astype("u1")
    else:
        times = np.linspace(0, 40, chunk[2])
        values = (np.sin(times + rng.random((*chunk[:2], 1)) * 7) + rng.normal(0, 0.1, chunk)).astype("f4")
    octets = values.view("u1").reshape(-1, values.itemsize).T.copy() if is_shuffled else values
    stored, n_chunks = zlib.compress(octets.tobytes(), 4), n_bytes // values.nbytes
    with h5py.File(path, "w") as file:
        shape = (n_chunks * chunk[0], *chunk[1:])
        array = file.create_dataset("x", shape, dtype, chunks=chunk, compression="gzip", shuffle=is_shuffled)
        for number in range(n_chunks):
            array.id.write_direct_chunk((number * chunk[0], *[0] * (len(chunk) - 1)), stored)
        file["y"] = np.arange(shape[0])
    return shape[0]


def epoch_rate(path: str, n_threads: int) -> float:
    """Return rows a second of an epoch with so many threads that decode."""
    thread_pool.MAX_THREADS = n_threads
    thread_pool.cores_of_a_rank = lambda: n_threads  # type: ignore[attr-defined]
    options = {"shuffle": {"buffer": MEMORY}, "files": {"cache_bytes": MEMORY}}
    module = LazyH5DataModule(path, x_key="x", y_key="y", batch_size=BATCH_SIZE, **options)
    module.setup("fit")
    loader, n = module.train_dataloader(), 0
    began = perf_counter()
    for x, _ in loader:
        n += len(x)
    seconds = perf_counter() - began
    module.teardown("fit")
    return n / seconds


class Clock:
    """Counts the processor time of decoding."""

    def __init__(self) -> None:
        self.seconds, self.n_chunks, self._lock = 0.0, 0, threading.Lock()

    def __call__(self, loop: Any, fd: int, offsets: Any, *others: Any) -> Any:
        """Decode chunks, and count."""
        began = thread_time()
        found = DECODE(loop, fd, offsets, *others)
        with self._lock:
            self.seconds += thread_time() - began
            self.n_chunks += len(offsets)
        return found


@contextmanager
def decoding_is(function: Callable[..., Any]) -> Iterator[None]:
    """Have another function decode chunks."""
    compiled.ChunkLoop.__call__ = function  # type: ignore[method-assign]
    try:
        yield
    finally:
        compiled.ChunkLoop.__call__ = DECODE  # type: ignore[method-assign]


class Sleeps:
    """Takes as long as decoding on one of some cores, without a core."""

    def __init__(self, seconds: float, n_cores: int) -> None:
        self.seconds, self.cores = seconds, threading.Semaphore(n_cores)

    def __call__(self, offsets: Any) -> ChunksRead:
        """Sleep for chunks, which follow each other in one call."""
        with self.cores:
            sleep(self.seconds * len(offsets))
        return ChunksRead(0.0, are_cached=True)


def simulated_rate(path: str, n_cores: int, seconds: float) -> float:
    """Return rows a second if decoding a chunk takes so long on each of some cores."""
    sleeps = Sleeps(seconds, n_cores)
    with decoding_is(lambda loop, fd, offsets, *others: sleeps(offsets)):
        return epoch_rate(path, n_cores)


def real_rate(path: str, n_cores: int) -> float:
    """Return rows a second on some cores of this machine."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(mine)[:n_cores])  # of this thread, and of those that it starts
    try:
        return epoch_rate(path, n_cores)
    finally:
        os.sched_setaffinity(0, mine)


def run(name: str, cores: list[int], n_rounds: int, n_bytes: int) -> dict[str, Any]:
    """Measure a kind of rows."""
    with tempfile.TemporaryDirectory() as folder:
        n_rows = write(path := f"{folder}/rows.h5", *CASES[name], n_bytes)
        clock, here = Clock(), len(os.sched_getaffinity(0))
        epoch_rate(path, 1)  # compiles
        with decoding_is(lambda *args: clock(*args)):
            epoch_rate(path, 1)
        seconds = clock.seconds / clock.n_chunks
        rates: dict[str, dict[int, list[float]]] = {"real": {}, "simulated": {}}
        for _ in range(n_rounds):
            for k in range(1, here + 1):
                rates["real"].setdefault(k, []).append(real_rate(path, k))
            for k in cores:
                rates["simulated"].setdefault(k, []).append(simulated_rate(path, k, seconds))
    found = {which: {k: median(each) for k, each in by_cores.items()} for which, by_cores in rates.items()}
    row_bytes = int(np.prod(CASES[name][0][1:])) * np.dtype(CASES[name][1]).itemsize
    decoded = CASES[name][0][0] / seconds
    return {"rows": n_rows, "row_bytes": row_bytes, "decoded": decoded, **found}


def page(results: Mapping[str, Any]) -> str:
    """Return the table for the documentation."""
    about, by_name = results["environment"], results["results"]
    cores = list(next(iter(by_name.values()))["simulated"])
    lines = [f"| rows | one core decodes | {' | '.join('1 core' if int(k) == 1 else f'{k} cores' for k in cores)} |"]
    lines.append(f"|---|---:|{'---:|' * len(cores)}")
    for name, found in by_name.items():
        cells = [f"{name}, {found['row_bytes'] / 1024:,.0f} KiB", f"{found['decoded']:,.0f}"]
        cells += [f"{rate:,.0f} ({rate / (int(k) * found['decoded']):.2f})" for k, rate in found["simulated"].items()]
        lines.append(f"| {' | '.join(cells)} |")
    real = "; ".join(
        f"{name} {', '.join(f'{rate:,.0f} on {k}' for k, rate in found['real'].items())}"
        for name, found in by_name.items()
    )
    setting = f"{setting_of(about, 'cost_model')}."
    return "\n".join([*lines, "", f"Measured on real cores, for comparison: {real}.", "", setting]) + "\n"


def main() -> None:
    """Measure all kinds of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="decoded size of each file (default: %(default)s)")
    add_outputs(parser)
    given = parser.parse_args()
    logging.getLogger("lightning_h5").setLevel(logging.ERROR)
    results = {}
    for name in given.cases:
        results[name] = found = run(name, given.cores, given.rounds, given.mib << 20)
        print(f"\n{name}, {found['row_bytes']:,} bytes a row")
        print(f"  one core decodes     {found['decoded']:12,.0f} rows/s")
        for n, rate in found["real"].items():
            print(f"  {n:3} cores, real      {rate:12,.0f} rows/s")
        for n, rate in found["simulated"].items():
            part = rate / (n * found["decoded"])
            print(f"  {n:3} cores, simulated {rate:12,.0f} rows/s   {part:.2f} of {n} x one core's decoding")
    written = {"environment": environment(), "results": results}
    write_outputs(given, written, page)


if __name__ == "__main__":
    main()

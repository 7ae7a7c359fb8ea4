"""How many rows a second would more cores give, and how many can one process use before the interpreter's lock binds?

    python examples/benchmarks/cost_model.py [--cores 1 2 4 8 16 32 64] [--json FILE]

Simulates cores that this machine lacks. First, one core decodes, which gives the seconds of a chunk. Then the loader
runs as on 1, 2, 4 ... cores, with threads whose decoding is a sleep of as many seconds: it takes no core and no lock.
Everything else is real: order, tasks, copies of rows into batches, labels, and the lock for which all threads compete.
Real decoding on the cores there are shows how far the simulation can be trusted. Copies share the cores of this
machine, two of which copy about as many bytes as 16 decode: more cores would be faster than simulated, not slower.

Settings are the defaults, except for a smaller `shuffle.buffer` that allows smaller files. A rate is of a whole epoch,
from the start of the iteration to its last batch. Epochs with 8 cores or more read four times as many rows: in an epoch
of 0.1 s, decoding the rows that are mixed first is a large part. The time until the first batch is printed beside the
rates.

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
from typing import Any, NamedTuple

import h5py
import numpy as np
from common import add_outputs, environment, setting_of, write_outputs

from lightning_h5 import LazyH5DataModule
from lightning_h5.readers import thread_pool
from lightning_h5.readers.filters import compiled
from lightning_h5.readers.filters.pipeline import ChunksRead

BATCH_SIZE, BUFFER = 64, "128 MiB"
MANY_CORES, TIMES = 8, 4
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


class Epoch(NamedTuple):
    """An epoch that was read.

    Attributes:
        rate: rows a second.
        first: seconds until the first batch.
    """

    rate: float
    first: float


def read_epoch(path: str, n_cores: int) -> Epoch:
    """Read an epoch as on a number of cores: with a thread for each, up to the limit of a process."""
    thread_pool.cores_of_a_rank = lambda: n_cores  # type: ignore[attr-defined]
    module = LazyH5DataModule(path, x_key="x", y_key="y", batch_size=BATCH_SIZE, shuffle={"buffer": BUFFER})
    module.setup("fit")
    loader = module.train_dataloader()
    began = perf_counter()
    batches = iter(loader)
    n_rows = len(next(batches)[0])
    first = perf_counter() - began
    n_rows += sum(len(x) for x, _ in batches)
    seconds = perf_counter() - began
    module.teardown("fit")
    return Epoch(n_rows / seconds, first)


class Clock:
    """Counts the processor time of decoding."""

    def __init__(self) -> None:
        self._seconds, self._n_chunks, self._lock = 0.0, 0, threading.Lock()

    def __call__(self, loop: Any, fd: int, offsets: Any, *others: Any) -> Any:
        """Decode chunks, and count."""
        began = thread_time()
        found = DECODE(loop, fd, offsets, *others)
        with self._lock:
            self._seconds += thread_time() - began
            self._n_chunks += len(offsets)
        return found

    @property
    def seconds(self) -> float:
        """Processor time of a chunk."""
        return self._seconds / self._n_chunks


@contextmanager
def decoding_is(function: Callable[..., Any]) -> Iterator[None]:
    """Have another function decode chunks."""
    compiled.ChunkLoop.__call__ = lambda *args: function(*args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        compiled.ChunkLoop.__call__ = DECODE  # type: ignore[method-assign]


def simulated(path: str, n_cores: int, seconds: float) -> Epoch:
    """Read an epoch with cores that sleep for as long as decoding takes."""
    cores = threading.Semaphore(n_cores)

    def decode(loop: Any, fd: int, offsets: Any, *others: Any) -> ChunksRead:
        with cores:
            sleep(seconds * len(offsets))
        return ChunksRead(0.0, are_cached=True)

    with decoding_is(decode):
        return read_epoch(path, n_cores)


def real(path: str, n_cores: int) -> Epoch:
    """Read an epoch on some cores of this machine."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(mine)[:n_cores])  # of this thread, and of those that it starts
    try:
        return read_epoch(path, n_cores)
    finally:
        os.sched_setaffinity(0, mine)


def run(name: str, cores: list[int], n_rounds: int, n_bytes: int) -> dict[str, Any]:
    """Measure a kind of rows."""
    with tempfile.TemporaryDirectory() as folder:
        n_rows = write(few := f"{folder}/few.h5", *CASES[name], n_bytes)
        write(many := f"{folder}/many.h5", *CASES[name], n_bytes * TIMES if max(cores) >= MANY_CORES else 0)
        read_epoch(few, 1)  # compiles
        with decoding_is(clock := Clock()):
            read_epoch(few, 1)
        epochs: dict[str, dict[int, list[Epoch]]] = {"real": {}, "simulated": {}}
        for _ in range(n_rounds):
            for k in range(1, len(os.sched_getaffinity(0)) + 1):
                epochs["real"].setdefault(k, []).append(real(few, k))
            for k in cores:
                path = many if k >= MANY_CORES else few
                epochs["simulated"].setdefault(k, []).append(simulated(path, k, clock.seconds))
    rates = {which: {k: median(e.rate for e in of_k) for k, of_k in by_k.items()} for which, by_k in epochs.items()}
    first = {k: median(epoch.first for epoch in of_k) for k, of_k in epochs["simulated"].items()}
    row_bytes = int(np.prod(CASES[name][0][1:])) * np.dtype(CASES[name][1]).itemsize
    about = {"rows": n_rows, "row_bytes": row_bytes, "decoded": CASES[name][0][0] / clock.seconds}
    return about | rates | {"first": first}


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
    parser.add_argument(
        "--mib",
        type=int,
        default=512,
        help="decoded size of each file, 256 or more; with many cores four times as much (default: %(default)s)",
    )
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
            text = f"{rate / (n * found['decoded']):.2f} of {n} x one core's decoding; first batch"
            print(f"  {n:3} cores, simulated {rate:12,.0f} rows/s   {text} {found['first'][n] * 1e3:.0f} ms")
    written = {"environment": environment(), "results": results}
    write_outputs(given, written, page)


if __name__ == "__main__":
    main()

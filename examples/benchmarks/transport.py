"""Are batches of worker processes faster through this package's sockets and shared memory, or through torch's queue?

    python examples/benchmarks/transport.py [--seconds 1] [--rounds 7] [--deaths 20] [--json FILE]

The same dataset, order, workers and batches come to the main process in three ways, which take turns in one run:

- *own*: a socket for each worker, and batches in memory that both sides have mapped from the start;
- *packed*: torch's ``DataLoader``, whose queue has references to batches in that memory;
- *queue*: torch's ``DataLoader`` as it is, which sends each tensor in shared memory of its own.

Both of torch's get errors as values, since torch cannot send all of them. Rows are 4 KiB or 600 KiB, from the page
cache. A transform keeps a worker's core busy for 0, 1 or 10 ms a sample. The main process copies each batch, as to a
GPU. Ratios are of neighbors in time, and above 1 where *own* is better: by the clock, and by the processor time of all
processes. Then a worker is killed at a random moment, again and again: how long does the error take, and is it raised
where the next batch is requested, or in the middle of the training step?
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import pickle
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from time import CLOCK_PROCESS_CPUTIME_ID, clock_gettime, monotonic, perf_counter, sleep, thread_time
from typing import Any

import h5py
import numpy as np
import torch
from common import environment, line_of, table, write_json
from torch.utils.data import DataLoader

from lightning_h5 import H5LazyDataset, create_optimized_dataloader, h5_worker_init_fn
from lightning_h5.datasets import WorkerFailure
from lightning_h5.loading import H5DataLoader
from lightning_h5.loading.worker_buffers import WorkerBuffers, WorkerMemory, open_worker_buffers, worker_memory

N_WORKERS = 2
SMALL, LARGE = "4 KiB", "600 KiB"
ROW_BYTES = {SMALL: 4 << 10, LARGE: 600 << 10}
BATCH_SIZE = {SMALL: 64, LARGE: 16}
N_ROWS = {SMALL: 12_800, LARGE: 320}
MILLISECONDS = (0, 1, 10)
WAYS = ("own", "packed", "queue")
LEAST_BATCHES = 16
"""Batches of a timing: with fewer, those that are ahead already would count most."""

PAUSE, IDLE_SECONDS = 0.05, 0.002
"""Seconds between two looks at the processor time of the workers, and how much of it idle ones take meanwhile."""

MEMORY_BYTES = 256 << 20
"""Of each worker, for packed batches; what is not used takes no memory."""

STEP_SECONDS = 0.02
"""Of a training step while workers are killed."""

PATIENCE = 12.0
"""Seconds to wait for the error about a killed worker; it takes a fraction of one, or never comes."""


class Busy:
    """A transform that takes some milliseconds of processor time."""

    def __init__(self, milliseconds: float) -> None:
        self.seconds = milliseconds / 1000

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        end = thread_time() + self.seconds
        while thread_time() < end:
            pass
        return row


class ErrorsAsValues:
    """A dataset for torch's loader, which gives errors as values.

    Args:
        loader: what this package's workers would have.
        memory: for batches, if they are packed.
    """

    def __init__(self, loader: H5DataLoader, memory: WorkerMemory | None) -> None:
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        self._memory = memory
        self._buffers: WorkerBuffers | None = None

    def start(self, worker: int) -> None:
        """Prepare a worker."""
        h5_worker_init_fn(worker)
        if self._memory is not None:
            self._buffers = open_worker_buffers(self._memory, worker)

    def __getitem__(self, token: Any) -> Any:
        try:
            batch = self._collate(self._dataset[token])
            return batch if self._buffers is None else self._buffers.packed(batch)
        except Exception as error:
            return WorkerFailure(error)


class Tokens:
    """A sampler for torch's loader: the batches that this package's loader would ask its workers for."""

    def __init__(self, loader: H5DataLoader) -> None:
        self.sampler = loader.sampler

    def __iter__(self) -> Iterator[Any]:
        return self.sampler.tokens(self.sampler.starting_epoch())


def batches_of(way: str, path: Path, batch_size: int, transform: Callable[[Any], Any] | None) -> Iterator[Any]:
    """Return the batches of all epochs.

    Args:
        way: how batches come.
        path: the file.
        batch_size: rows of a batch.
        transform: of a row.
    """
    dataset = H5LazyDataset(path, x_key="x", y_key="number", transform=transform)
    loader = create_optimized_dataloader(
        dataset, batch_size, num_workers=N_WORKERS, shuffle="global", pin_memory=False, workers={"start_method": "fork"}
    )
    memory = worker_memory(N_WORKERS, MEMORY_BYTES) if way == "packed" else None
    source = ErrorsAsValues(loader, memory)
    queue: DataLoader[Any] = DataLoader(
        source,
        batch_size=None,
        sampler=Tokens(loader),
        num_workers=N_WORKERS,
        persistent_workers=True,
        collate_fn=unchanged,
        worker_init_fn=source.start,
        multiprocessing_context="fork",
    )

    def epochs() -> Iterator[Any]:
        for number in count():
            loader.sampler.set_epoch(number)
            for batch in loader if way == "own" else queue:
                if isinstance(batch, WorkerFailure):
                    batch.raise_again()
                yield batch if memory is None else pickle.loads(batch)

    return epochs()


def unchanged(batch: Any) -> Any:
    """Stand in for torch's function, which would convert values."""
    return batch


def processor_seconds() -> float:
    """Return the processor time of this process and its workers, which all live on."""
    workers = [clock_gettime((~process.pid << 3) | 2) for process in multiprocessing.active_children() if process.pid]
    return clock_gettime(CLOCK_PROCESS_CPUTIME_ID) + sum(workers)


def wait_until_idle() -> None:
    """Wait until all workers have made the batches that they were asked for, which would delay those of others."""
    before = -1.0
    while (spent := processor_seconds()) - before > IDLE_SECONDS:
        before = spent
        sleep(PAUSE)


def time_batches(
    batches: Iterator[Any], n_batches: int, memory: torch.Tensor
) -> tuple[float, float, list[torch.Tensor]]:
    """Take some batches, and leave the rest.

    Args:
        batches: of all epochs.
        n_batches: how many.
        memory: where each is copied to.

    Returns:
        Seconds by the clock, and of the processor; numbers of the rows.
    """
    wait_until_idle()
    began, spent, numbers = perf_counter(), processor_seconds(), []
    for _ in range(n_batches):
        rows, number = next(batches)
        memory[: len(rows)].copy_(rows)
        numbers.append(number.clone())
    return perf_counter() - began, processor_seconds() - spent, numbers


def write_rows(size: str, folder: Path) -> Path:
    """Return the path of a file with rows of a size, which is written if it does not exist."""
    path = folder / f"{size}.h5"
    if not path.exists():
        numbers = np.arange(N_ROWS[size])
        with h5py.File(path, "w") as file:
            file["x"] = numbers[:, np.newaxis].astype(np.float32).repeat(ROW_BYTES[size] // 4, axis=1)
            file["number"] = numbers
    return path


def compare(size: str, milliseconds: int, seconds: float, n_rounds: int, folder: Path) -> dict[str, Any]:
    """Return what was measured of one size of rows and one transform."""
    path, row_bytes, batch_size = write_rows(size, folder), ROW_BYTES[size], BATCH_SIZE[size]
    transform, memory = Busy(milliseconds) if milliseconds else None, torch.empty(batch_size, row_bytes // 4)
    batches = {way: batches_of(way, path, batch_size, transform) for way in WAYS}
    for way in WAYS:  # also the warm-up
        n_batches = LEAST_BATCHES if milliseconds else N_ROWS[size] // batch_size
        _, _, numbers = time_batches(batches[way], n_batches, memory)
        if not milliseconds and not torch.equal(torch.cat(numbers).sort().values, torch.arange(N_ROWS[size])):
            raise SystemExit(f"{way!r} repeats or leaves out rows")
    took, _, _ = time_batches(batches["queue"], n_batches, memory)
    n_batches = max(LEAST_BATCHES, round(n_batches * seconds / took))
    clock: dict[str, list[float]] = {way: [] for way in WAYS}
    processor: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(n_rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            spent = time_batches(batches[way], n_batches, memory)
            clock[way].append(1000 * spent[0] / n_batches)
            processor[way].append(1000 * spent[1] / n_batches)
    result: dict[str, Any] = {"size": size, "milliseconds": milliseconds, "clock": clock, "processor": processor}
    for name, figures in (("clock", clock), ("processor", processor)):
        for way in WAYS[1:]:
            pairs = zip(figures[way], figures["own"], strict=True)
            result[f"{way} / own, {name}"] = median(theirs / ours for theirs, ours in pairs)
    return result


class LateError(Exception):
    """No error about a killed worker was raised in time."""


def kill_worker(way: str, path: Path, wait: float) -> tuple[float | None, bool]:
    """Kill a worker while batches come.

    Args:
        way: how they come.
        path: the file.
        wait: seconds until then.

    Returns:
        Seconds until the error, or None if there was none; whether it was raised where the next batch is requested.
    """
    batches = batches_of(way, path, BATCH_SIZE[SMALL], as_bytes)
    others = multiprocessing.active_children()
    next(batches)
    worker = next(process for process in multiprocessing.active_children() if process not in others)
    times, is_requested = list[float](), False

    def kill() -> None:
        times.append(monotonic())
        worker.kill()

    timer = threading.Timer(wait, kill)
    signal.signal(signal.SIGALRM, be_late)
    signal.setitimer(signal.ITIMER_REAL, wait + PATIENCE)
    timer.start()
    try:
        while True:
            is_requested = True
            next(batches)
            is_requested = False
            sleep(STEP_SECONDS)
    except LateError:
        return None, is_requested
    except Exception:
        return monotonic() - times[0], is_requested
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        timer.join()


def be_late(number: int, frame: object) -> None:
    """Raise in the main thread."""
    raise LateError


def as_bytes(row: torch.Tensor) -> bytes:
    """Give what no tensor holds, so that messages are long."""
    return row.numpy().tobytes()


def main() -> None:
    """Print ratios of each size and transform, and how long the error about a killed worker takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=list(ROW_BYTES), default=list(ROW_BYTES), metavar="SIZE")
    parser.add_argument("--milliseconds", nargs="+", type=int, default=list(MILLISECONDS))
    parser.add_argument("--deaths", type=int, default=20, help="workers to kill")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("lightning_h5").setLevel(logging.ERROR)
    about = environment()
    print(line_of(about))
    with tempfile.TemporaryDirectory() as folder:
        results = [
            compare(size, milliseconds, options.seconds, options.rounds, Path(folder))
            for size in options.sizes
            for milliseconds in options.milliseconds
        ]
        names = [name for name in results[0] if "/" in name]
        header = ("rows, transform", *(f"{way}, ms" for way in WAYS), *names)
        print(table(header, [line_of_case(result, names) for result in results]))
        path = write_rows(SMALL, Path(folder))
        deaths: dict[str, list[tuple[float | None, bool]]] = {way: [] for way in WAYS}
        for _ in range(options.deaths):
            wait = random.uniform(0, 0.2)
            for way, ends in deaths.items():
                ends.append(kill_worker(way, path, wait))
        for way, ends in deaths.items():
            print(line_of_deaths(way, ends))
    write_json(options.json, {"environment": about, "results": results, "deaths": deaths})


def line_of_case(result: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return the cells of a line: milliseconds of a batch by the clock, and ratios."""
    clock = [f"{median(result['clock'][way]):.2f}" for way in WAYS]
    return [f"{result['size']}, {result['milliseconds']} ms", *clock, *(f"{result[name]:.2f}" for name in names)]


def line_of_deaths(way: str, ends: Sequence[tuple[float | None, bool]]) -> str:
    """Return how long errors about killed workers took."""
    errors = [seconds for seconds, _ in ends if seconds is not None]
    n_requested = sum(is_requested for seconds, is_requested in ends if seconds is not None)
    slowest = f", the slowest after {max(errors):.2f} s, {n_requested} by next()" if errors else ""
    return f"{way}: {len(errors)} of {len(ends)} killed workers were noticed{slowest}"


if __name__ == "__main__":
    main()

"""What `training.py` measures, each function in a process of its own; and the large files it needs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np
import torch
from common import BATCH_SIZE
from recipes import Ours, plain
from rows import Data
from torch import Tensor
from tqdm import tqdm

STEP_SECONDS = 0.002
N_SKIPPED = 10  # batches skipped at the start of an epoch
N_PLAIN = 60  # batches of the plain recipe, which waits long enough in these


# Waiting for batches ------------------------------------------------------------------------------------------


def sleep() -> None:
    """A training step that leaves the processor alone, as one on a GPU does."""
    time.sleep(STEP_SECONDS)


def work() -> Callable[[], None]:
    """A training step in torch on one thread: so many products of matrices as take two milliseconds when alone."""
    torch.set_num_threads(1)
    a, b, c = torch.randn(128, 128), torch.randn(128, 128), torch.empty(128, 128)

    def products(n: int) -> float:
        began = perf_counter()
        for _ in range(n):
            torch.mm(a, b, out=c)
        return perf_counter() - began

    products(100)
    n_products = max(1, round(100 * STEP_SECONDS / min(products(100) for _ in range(20))))
    return lambda: void(products(n_products))


def void(_: object) -> None:
    """Forgets a result."""


def waiting(path: Path, n_rows: int, options: dict[str, Any], kind: str, n_epochs: int) -> dict[str, float]:
    """Share of a loop's time that goes by waiting for batches, after the first ten of each epoch, and of all."""
    step = sleep if kind == "sleep" else work()
    ours = Ours(on_disk(path, n_rows), **options)
    ours.open()
    late, whole = Clock(), Clock()
    for number in range(n_epochs):
        loop(ours.epoch(number), step, late, whole)
    ours.close()
    return {"share": late.share, "whole_share": whole.share, "step_ms": 1e3 * whole.step_seconds / whole.n_batches}


def plain_waiting(path: Path, n_rows: int) -> dict[str, float]:
    """The same of the plain recipe with two workers, over fewer rows."""
    late, whole = Clock(), Clock()
    n_rows = min(n_rows, N_PLAIN * BATCH_SIZE)
    loop(plain(on_disk(path, n_rows), 2, n_rows)(0), sleep, late, whole)
    return {"share": late.share}


@dataclass
class Clock:
    """Where the time of a loop goes."""

    wait_seconds: float = 0.0
    step_seconds: float = 0.0
    n_batches: int = 0

    def add(self, wait_seconds: float, step_seconds: float) -> None:
        """Counts a batch."""
        self.wait_seconds += wait_seconds
        self.step_seconds += step_seconds
        self.n_batches += 1

    @property
    def share(self) -> float:
        """Waiting, of 100 %; none where nothing was counted."""
        return 100 * self.wait_seconds / ((self.wait_seconds + self.step_seconds) or 1)


def loop(batches: Iterator[tuple[Any, Tensor]], step: Callable[[], None], late: Clock, whole: Clock) -> None:
    """A training loop that measures itself."""
    n_done, asked = 0, perf_counter()
    for _ in batches:
        got = perf_counter()
        step()
        done = perf_counter()
        for clock in (whole, late) if n_done >= N_SKIPPED else (whole,):
            clock.add(got - asked, done - got)
        n_done, asked = n_done + 1, perf_counter()


# Memory and open files ----------------------------------------------------------------------------------------


def memory(path: Path, n_rows: int, options: dict[str, Any], n_epochs: int) -> dict[str, float]:
    """Memory over what the process held before it read, and how it and the open files go on over the epochs."""
    data = on_disk(path, n_rows)
    forget_peak()
    before = resident_mib("VmRSS")
    ours = Ours(data, **options)
    resident, descriptors = [], []
    for number in range(n_epochs):
        for _ in ours.epoch(number):
            pass
        resident.append(resident_mib("VmRSS"))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    settled = n_epochs // 4  # the first epochs fill the caches
    slope = np.polyfit(range(settled, n_epochs), resident[settled:], 1)[0] if n_epochs > settled + 1 else 0.0
    return {
        "peak_mib": resident_mib("VmHWM") - before,
        "slope": float(slope),
        "descriptors": descriptors[-1] - descriptors[min(1, n_epochs - 1)],
    }


def resident_mib(which: str) -> float:
    """Resident memory of this process in MiB: now (VmRSS), or the most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def forget_peak() -> None:
    """Makes the peak of memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


# More data ----------------------------------------------------------------------------------------------------


def growth(
    small: Path, n_small: int, large: Path, n_large: int, options: dict[str, Any], n_rounds: int
) -> dict[str, float]:
    """Rows a second of few rows and of many, in turn, over equally many rows each time."""
    files = [
        (small, n_small, Ours(on_disk(small, n_small), **options)),
        (large, n_large, Ours(on_disk(large, n_large), **options)),
    ]
    speeds: dict[Path, list[float]] = {small: [], large: []}
    number = 0
    for turn in range(n_rounds + 1):
        for path, n_rows, ours in files:
            began = perf_counter()
            for _ in range(n_large // n_rows):
                number += 1
                for _ in ours.epoch(number):
                    pass
            if turn:  # skip the warm-up
                speeds[path].append(n_large // n_rows * n_rows / (perf_counter() - began))
    for _, _, ours in files:
        ours.close()
    few, many = (statistics.median(speeds[path]) for path in (small, large))
    return {"few": few, "many": many, "ratio": many / few}


def opening(path: Path, n_rows: int) -> dict[str, float]:
    """Seconds from the path to a data module that is set up, and to its first batch."""
    data = on_disk(path, n_rows)
    before, began = resident_mib("VmRSS"), perf_counter()
    ours = Ours(data)
    ours.open()
    opened = perf_counter()
    next(ours.epoch(0))
    first = perf_counter()
    ours.close()
    return {"open_s": opened - began, "first_batch_s": first - opened, "mib": resident_mib("VmRSS") - before}


# Files --------------------------------------------------------------------------------------------------------


def on_disk(path: Path, n_rows: int) -> Data:
    """What is needed to read a file; its rows are not here."""
    return Data(path, np.empty((n_rows, 0), "u1"), np.empty(0, "i8"))


def repeat(source: Path, target: Path, times: int) -> None:
    """Writes the chunks of a file again and again into a larger one, without decoding them."""
    with h5py.File(source, "r") as few, h5py.File(target, "w") as many:
        x = few["x"]
        n_rows, together = len(x), x.chunks[0]
        if n_rows % together:
            raise SystemExit(f"--rows takes multiples of {together}")
        wanted = many.create_dataset("x", (times * n_rows, *x.shape[1:]), x.dtype, chunks=x.chunks, compression="gzip")
        many.create_dataset("labels", data=np.arange(times * n_rows))
        for start in range(0, n_rows, together):
            mask, raw = x.id.read_direct_chunk((start, *[0] * (x.ndim - 1)))
            for copy in range(times):
                wanted.id.write_direct_chunk((copy * n_rows + start, *[0] * (x.ndim - 1)), raw, mask)


def many_chunks(path: Path, n_chunks: int) -> int:
    """Writes a file of so many small chunks, four rows each; returns its rows."""
    rows = np.arange(4 * 64, dtype="u1").reshape(4, 64)
    with h5py.File(path, "w") as file:
        array = file.create_dataset("x", (4 * n_chunks, 64), "u1", chunks=rows.shape, compression="gzip")
        file.create_dataset("labels", data=np.arange(4 * n_chunks))
        array[:4] = rows
        mask, raw = array.id.read_direct_chunk((0, 0))
        for chunk in tqdm(range(1, n_chunks), desc="chunks", leave=False, disable=None):
            array.id.write_direct_chunk((4 * chunk, 0), raw, mask)
    return 4 * n_chunks

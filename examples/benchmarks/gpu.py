"""Shuffled batches of images on a CUDA device: which way of getting them there is fast, and what is left to wait for.

    python examples/benchmarks/gpu.py [--rows 20000] [--cores 1] [--json FILE]

1. Images (u1, 3x64x64, gzip, 32 in a chunk) become float32 batches of 64 on the device. The ways differ in where chunks
   are decoded, where the memory of a batch is, where it is cast, and who reads. The loop without a loader has batches
   on the device before. Each way first gives every row once, as it was written; then all take turns.
2. Batches of 64 MiB for a step that takes as long as some of their copies: copied before each step, or ahead of it.

`--cores 1` binds the process to one core, to see what decoding on the device saves. Both parts take 2 to 3 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from cases import CASES
from common import BATCH_SIZE, Contender, Epoch, environment, line_of, measure, report, write_json
from recipes import Ours, PlainDataset
from rows import Data, lifelike
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_h5 import RankCachedH5DataModule

DEVICE = torch.device("cuda")
LARGE_BATCH = 64 << 20  # bytes
N_STEPS = 20
COPIES_OF_A_STEP = 3
"""A step with a large batch takes as long as so many copies of it, so that a copy fits beside it."""


class Cached(Ours):
    """The data module that holds the rows of its rank."""

    kind = RankCachedH5DataModule


def on_device(epoch: Epoch) -> Callable[[int], Iterator[tuple[Any, Tensor]]]:
    """Batches of an epoch as float32 on the device; a sum stands for a step, and the last one is waited for."""

    def copied(number: int) -> Iterator[tuple[Any, Tensor]]:
        total = torch.zeros((), device=DEVICE)
        for x, labels in epoch(number):
            there = x.to(DEVICE, non_blocking=True).float()
            labels.to(DEVICE, non_blocking=True)
            total += there.sum()
            yield (there.to(torch.uint8).cpu() if number == 0 else there), labels.cpu() if number == 0 else labels
        total.item()

    return copied


def without_loader(data: Data) -> Epoch:
    """The batches of one order, on the device before the clock runs."""
    order = torch.randperm(len(data.x)).split(BATCH_SIZE)
    x, labels = torch.from_numpy(data.x), torch.from_numpy(data.labels)
    batches = [(x[rows].to(DEVICE), labels[rows].to(DEVICE)) for rows in order]
    return lambda number: iter(batches)


def contenders(data: Data, stack: ExitStack, n_workers: int) -> list[Contender]:
    """All ways, those that start processes first."""
    plain = DataLoader(
        PlainDataset(data),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=n_workers,
        persistent_workers=True,
        pin_memory=True,
    )
    ways = [Contender(name=f"plain h5py, {n_workers} workers, pinned", epoch=on_device(lambda number: iter(plain)))]
    # Less than all rows fit, so that each epoch decodes; otherwise only the first one does.
    n_bytes = data.x.nbytes
    each_epoch: dict[str, Any] = {"shuffle": {"buffer": n_bytes // 4}, "files": {"cache_bytes": n_bytes // 3}}
    there = each_epoch | {"files": each_epoch["files"] | {"decode_on": "cuda"}}
    has_nvcomp = find_spec("nvidia") is not None and find_spec("nvidia.libnvcomp") is not None
    for name, kind, options in (
        ("lazy, pageable", Ours, {"pin_memory": False}),
        ("lazy, pinned", Ours, {"pin_memory": True}),
        ("lazy, copied ahead", Ours, {"prefetch_to_device": 2}),
        ("lazy, pinned, cast on the host", Ours, {"pin_memory": True, "x_dtype": "float32"}),
        ("lazy, pinned, 2 workers", Ours, {"pin_memory": True, "num_workers": 2}),
        ("lazy, each epoch decoded", Ours, each_epoch),
        *([("lazy, each epoch decoded on the device", Ours, there)] if has_nvcomp else []),
        ("rank cached, pageable", Cached, {"pin_memory": False}),
        ("rank cached, pinned", Cached, {"pin_memory": True}),
        ("rank cached, copied ahead", Cached, {"prefetch_to_device": 2}),
        ("rank cached, on the device", Cached, {"memory": {"device": "cuda"}}),
    ):
        ours = kind(data, **options)
        stack.callback(ours.close)
        ways.append(Contender(name=name, epoch=on_device(ours.epoch), n_warm=1))
    ways.append(Contender(name="no loader: batches on the device", epoch=on_device(without_loader(data)), n_warm=1))
    return ways


# Large batches -------------------------------------------------------------------------------------------------------


def step_of(batch: Tensor) -> Callable[[Tensor], None]:
    """Return a step that takes as long as some copies of a batch."""
    pinned, weight = batch.cpu().pin_memory(), torch.randn(4096, 4096, device=DEVICE)
    n_products = 1

    def step(x: Tensor) -> None:
        result = weight
        for _ in range(n_products):
            result = result @ weight
        x.float().sum() + result.sum()

    def seconds(action: Callable[[], object]) -> float:
        action()
        torch.cuda.synchronize()
        began = perf_counter()
        for _ in range(5):
            action()
        torch.cuda.synchronize()
        return (perf_counter() - began) / 5

    wanted = COPIES_OF_A_STEP * seconds(lambda: pinned.to(DEVICE, non_blocking=True))
    while seconds(lambda: step(batch)) < wanted:
        n_products *= 2
    return step


def seconds_of_steps(batches: Iterator[Tensor], step: Callable[[Tensor], None]) -> tuple[float, float]:
    """Return the seconds of some steps, and those of them that the loop waited for batches."""
    step(next(batches).to(DEVICE))
    torch.cuda.synchronize()
    began, waited = perf_counter(), 0.0
    for _ in range(N_STEPS):
        asked = perf_counter()
        batch = next(batches)
        waited += perf_counter() - asked
        step(batch.to(DEVICE, non_blocking=True))
    torch.cuda.synchronize()
    return perf_counter() - began, waited


def large_batches(data: Data, n_rounds: int) -> dict[str, dict[str, float]]:
    """Time steps with large batches from memory: on the device, copied before each step, and copied ahead."""
    n_rows = LARGE_BATCH // data.x[0].nbytes
    on_the_device = torch.zeros((n_rows, *data.x.shape[1:]), dtype=torch.uint8, device=DEVICE)
    step = step_of(on_the_device)
    results: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        ways: dict[str, Callable[[int], Iterator[Tensor]]] = {
            "no loader: a batch on the device": lambda number: iter([on_the_device] * (N_STEPS + 1))
        }
        for n_ahead in (0, 1, 2):
            ours = Cached(data, batch_size=n_rows, prefetch_to_device=n_ahead, pin_memory=True, drop_last=True)
            stack.callback(ours.close)

            def rows(number: int, ours: Cached = ours) -> Iterator[Tensor]:
                epochs = (ours.epoch(number * 100 + epoch) for epoch in range(100))
                return (x for x, _ in chain.from_iterable(epochs))

            ways[f"rank cached, {n_ahead} ahead"] = rows
        for number in range(n_rounds):
            for name, batches in ways.items():
                seconds, waited = seconds_of_steps(batches(number), step)
                of_way = results.setdefault(name, {"seconds": [], "waited": []})
                of_way["seconds"].append(seconds / N_STEPS)
                of_way["waited"].append(waited / N_STEPS)
    return {name: {key: statistics.median(times) for key, times in of_way.items()} for name, of_way in results.items()}


def table_of_steps(results: dict[str, dict[str, float]]) -> str:
    """The steps with large batches, as text."""
    least = min(of_way["seconds"] for name, of_way in results.items() if name.startswith("no loader"))
    lines = [
        f"{name:<36} {1000 * of_way['seconds']:8.2f} ms a step, {1000 * of_way['waited']:7.2f} ms waiting, "
        f"{least / of_way['seconds']:5.2f} of the loop without a loader"
        for name, of_way in results.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Times all ways, and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each way (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="workers of plain h5py (default: %(default)s)")
    parser.add_argument("--cores", type=int, help="bind the process to so many cores (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "there is no CUDA device\n")
    if options.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    about = environment(("deflate", "zlib-into", "numba", "nvidia-nvcomp-cu12"))
    about |= {"gpu": torch.cuda.get_device_name(), "cores": len(os.sched_getaffinity(0))}
    print(line_of(about), flush=True)
    case = CASES["images-gzip-32"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, tqdm(disable=True) as progress:
        data = Data.write(Path(folder) / "images.h5", *lifelike(case.kind, options.rows), **case.storage())
        timings = measure(contenders(data, stack, options.workers), data, options.rounds, progress, most_seconds=20)
        print(f"\n{report(f'{case}, batch {BATCH_SIZE}', timings, [], n_rows=options.rows)}", flush=True)
        stack.close()
        steps = large_batches(data, options.rounds)
    print(f"\nbatches of {LARGE_BATCH >> 20} MiB\n{table_of_steps(steps)}")
    results = {"environment": about, "contenders": [asdict(timing) for timing in timings], "large batches": steps}
    write_json(options.json, results)


if __name__ == "__main__":
    main()

"""Shuffled batches of floating-point images on a CUDA device: which way of getting them there is fast.

    python examples/benchmarks/gpu.py [--rows 20000] [--json FILE]

Images (u1, 3x64x64, gzip, 32 in a chunk) become float32 batches on the device. The ways differ in where the memory of a
batch is, where it is cast, and who reads. Each way first gives every row once, as it was written; then all take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
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
    found = [Contender(name=f"plain h5py, {n_workers} workers, pinned", epoch=on_device(lambda number: iter(plain)))]
    for name, kind, options in (
        ("lazy, pageable", Ours, {"pin_memory": False}),
        ("lazy, pinned", Ours, {"pin_memory": True}),
        ("lazy, pinned, cast on the host", Ours, {"pin_memory": True, "x_dtype": "float32"}),
        ("lazy, pinned, 2 workers", Ours, {"pin_memory": True, "num_workers": 2}),
        ("rank cached, pageable", Cached, {"pin_memory": False}),
        ("rank cached, pinned", Cached, {"pin_memory": True}),
        ("rank cached, on the device", Cached, {"memory": {"device": "cuda"}}),
    ):
        ours = kind(data, **options)
        stack.callback(ours.close)
        found.append(Contender(name=name, epoch=on_device(ours.epoch), n_warm=1))
    return found


def main() -> None:
    """Times all ways, and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each way (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="workers of plain h5py (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "there is no CUDA device\n")
    about = environment(("deflate", "zlib-into", "numba")) | {"gpu": torch.cuda.get_device_name()}
    print(line_of(about), flush=True)
    case = CASES["images-gzip-32"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, tqdm(disable=True) as progress:
        data = Data.write(Path(folder) / "images.h5", *lifelike(case.kind, options.rows), **case.storage())
        timings = measure(contenders(data, stack, options.workers), data, options.rounds, progress, most_seconds=20)
    print(f"\n{report(f'{case}, batch {BATCH_SIZE}', timings, [], n_rows=options.rows)}")
    write_json(options.json, {"environment": about, "contenders": [asdict(timing) for timing in timings]})


if __name__ == "__main__":
    main()

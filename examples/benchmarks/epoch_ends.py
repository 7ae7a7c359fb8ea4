"""How long does training wait between two epochs, in steps?

    python examples/benchmarks/epoch_ends.py [--images 50000] [--step-ms 30] [--epochs 4] [--limit N] [--workers 0 2]
                                             [--rounds 3] [--json FILE]

writes gzip images (u1, 3x64x64, 16 a chunk) and trains on them in shuffled order, with steps that sleep, as a process
does while its GPU works. Each round fits once with the first batches of the next epoch read ahead, as it is, and once
without. A gap is the time from the start of a step to the start of the next one, divided by the median of all. At the
end of an epoch the longest of eleven counts: the step that ends the epoch, and ten after it. Gaps in the middle of
epochs show what other programs on the machine do.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
import zlib
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep
from typing import Any

import h5py
import numpy as np
import torch
from common import add_outputs, environment, line_of, setting_of, table, write_outputs
from lightning.pytorch import LightningModule, Trainer
from rows import IMAGES, lifelike

from lightning_h5 import H5StatsMonitor, LazyH5DataModule

BATCH_SIZE, PER_CHUNK, N_DIFFERENT = 64, 16, 64
N_AFTER = 10  # steps of an epoch's start
MOST = 2.0  # steps: the longest gap that is asked for
HEADER = ("", "step, ms", "Lightning, ms", "first batch, ms", "gap, median", "gap, longest", "in epochs, longest")


class Apart(LazyH5DataModule):
    """Reads nothing ahead of an epoch."""

    def next_epoch(self, sampler: Any, epoch: int) -> None:
        """Return that no epoch is sure to follow."""


WAYS = {"read ahead": LazyH5DataModule, "each epoch from its start": Apart}


class Sleeper(LightningModule):
    """Notes when each step starts, and sleeps.

    Attributes:
        starts: of each step, by epoch, in seconds.
        ended: when the last step of each epoch was done.
        begun: when Lightning began each epoch.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = torch.nn.Linear(1, 1), seconds
        self.starts: list[list[float]] = []
        self.ended: list[float] = []
        self.begun: list[float] = []
        self.automatic_optimization = False

    def on_train_epoch_start(self) -> None:
        """Note that Lightning begins an epoch."""
        self.begun.append(perf_counter())
        self.starts.append([])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Sleep."""
        self.starts[-1].append(perf_counter())
        sleep(self.seconds)

    def on_train_batch_end(self, *_: Any) -> None:
        """Note that a step is done; of each epoch the last one stays."""
        self.ended[len(self.starts) - 1 :] = [perf_counter()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer that is not used."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def write(path: str, n_images: int) -> None:
    """Write images; chunks repeat, since compressing takes longer than all that is measured."""
    images, _ = lifelike(IMAGES, min(n_images, N_DIFFERENT * PER_CHUNK))
    chunks = [zlib.compress(part.tobytes(), 4) for part in np.split(images, len(images) // PER_CHUNK)]
    with h5py.File(path, "w") as file:
        shape = (PER_CHUNK, *IMAGES.shape)
        array = file.create_dataset("x", (n_images, *IMAGES.shape), "u1", chunks=shape, compression="gzip")
        for number in range(n_images // PER_CHUNK):
            array.id.write_direct_chunk((number * PER_CHUNK, 0, 0, 0), chunks[number % len(chunks)])


def fit(path: str, way: str, n_workers: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Train; return the lengths of steps, what the ends of epochs took, and their gaps, in seconds."""
    model = Sleeper(options.step_ms / 1000)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"enable_progress_bar": False, "callbacks": [H5StatsMonitor(print_summary=False)]}
    datamodule = WAYS[way](
        path, x_key="x", batch_size=BATCH_SIZE, num_workers=n_workers, shuffle={"buffer": options.buffer}, seed=0
    )
    quiet["limit_train_batches"] = options.limit or 1.0
    Trainer(max_epochs=options.epochs, accelerator="cpu", **quiet).fit(model, datamodule=datamodule)
    n_steps = len(model.starts[0])
    first = [starts[0] for starts in model.starts[1:]]
    lengths = [np.diff([*own, *following[: N_AFTER + 1]]) for own, following in pairwise(model.starts)]
    return {
        "middle": np.concatenate([own[N_AFTER : n_steps - 1] for own in lengths]).tolist(),
        "gaps": [float(own[n_steps - 1 :].max()) for own in lengths],
        "lightning": [begun - ended for begun, ended in zip(model.begun[1:], model.ended[:-1], strict=True)],
        "first": [start - begun for start, begun in zip(first, model.begun[1:], strict=True)],
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of each way with each number of workers; ways take turns."""
    seconds: dict[tuple[int, str], dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(path := f"{folder}/images.h5", options.images)
        for _ in range(options.rounds):
            for n_workers in options.workers:
                for way in WAYS:
                    for name, values in fit(path, way, n_workers, options).items():
                        seconds.setdefault((n_workers, way), {}).setdefault(name, []).extend(values)
    results = []
    for (n_workers, way), lists in seconds.items():
        step = median(lists["middle"])
        results.append(
            {
                "workers": n_workers,
                "way": way,
                "step_ms": 1000 * step,
                "lightning_ms": 1000 * median(lists["lightning"]),
                "first_batch_ms": 1000 * median(lists["first"]),
                "gap_median": median(lists["gaps"]) / step,
                "gap_longest": max(lists["gaps"]) / step,
                "middle_longest": max(lists["middle"]) / step,
            }
        )
    return results


def cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line of the table."""
    figures = [f"{value:,.1f}" for name, value in result.items() if name not in ("workers", "way")]
    return f"{result['workers']} workers, {result['way']}", *figures


def page(results: Mapping[str, Any]) -> str:
    """Return the table for the documentation."""
    lines = [f"| {' | '.join(line)} |" for line in (HEADER, *map(cells, results["results"]))]
    rule = "|---|" + "---:|" * (len(HEADER) - 1)
    return "\n".join([lines[0], rule, *lines[1:], "", f"{setting_of(results['environment'], 'epoch_ends')}."]) + "\n"


def main() -> None:
    """Measure, and compare with what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000, help="a multiple of 16 (default: %(default)s)")
    steps = "milliseconds of a step; Lightning alone takes 6 between epochs (default: %(default)s)"
    parser.add_argument("--step-ms", type=float, default=30.0, help=steps)
    parser.add_argument("--epochs", type=int, default=4, help="of each fit (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="limit_train_batches; all if it is not given")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="fits of each kind (default: %(default)s)")
    parser.add_argument("--buffer", default="128 MiB", help="shuffle.buffer (default: %(default)s)")
    add_outputs(parser)
    options = parser.parse_args()
    if options.images % PER_CHUNK or options.images < BATCH_SIZE * (2 * N_AFTER):
        parser.error(f"--images takes multiples of {PER_CHUNK}, {BATCH_SIZE * 2 * N_AFTER} or more")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    about = environment()
    print(line_of(about))
    n_ends = options.rounds * (options.epochs - 1)
    print(f"{options.images:,} images, batch {BATCH_SIZE}, {n_ends} ends of epochs each\n")
    results = measure(options)
    print(table(HEADER, [cells(result) for result in results]), "\n")
    for result in results:
        if result["way"] == "read ahead":
            verdict = "met" if result["gap_longest"] <= MOST else "NOT MET"
            print(
                f"{result['workers']} workers: longest gap {result['gap_longest']:.1f} steps, median "
                f"{result['gap_median']:.1f}   asked at most {MOST:.1f}   {verdict}"
            )
    write_outputs(options, {"environment": about, "results": results}, page)


if __name__ == "__main__":
    main()

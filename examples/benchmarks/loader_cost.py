"""What does loading cost whole trainings, compared with the same batches held in memory?

    python examples/benchmarks/loader_cost.py [--trainings images ...] [--rounds 5] [--json FILE]

Five published networks train on the processor by `Trainer.fit`: with `LazyH5DataModule`, and without a loader, on
batches that were read before. Both take turns in one process, `--rounds` times, with all threads of torch. An epoch
reads all rows; the loader's buffers have a quarter of their decoded size. The clock runs from the tenth step to the
last one of the second epoch. The share is the median over the rounds of steps per second with the loader over those
without; "cpu_share" is the processor time that the loader adds to that of a step, on all cores.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import torch
from cells import write_cells
from common import environment, line_of, merge_json
from lightning.pytorch import Callback, LightningModule, Trainer
from networks import CountsVae, MaskedTokens, residual_network, table_network
from rows import IMAGES, lifelike, waves
from torch import Tensor, nn
from torch.nn import functional

from lightning_h5 import LazyH5DataModule

N_WARM = 10  # steps


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model and its file.

    Attributes:
        title: of both.
        write: writes the file.
        model: makes the model.
        loss: of the model and a batch.
        options: of the data module.
        decoded_mib: size of the decoded rows.
    """

    title: str
    write: Callable[[Path], None]
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    options: dict[str, Any]
    decoded_mib: int

    def data_module(self, path: Path) -> LazyH5DataModule:
        """Return the data module."""
        budget = f"{self.decoded_mib // 4} MiB"
        return LazyH5DataModule(path, shuffle={"buffer": budget}, files={"cache_bytes": budget}, **self.options)


# Files ----------------------------------------------------------------------------------------------------------------


def write_images(path: Path) -> None:
    """Write 768 pictures of 12 KiB with ten labels."""
    x, labels = lifelike(IMAGES, 768)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=x, chunks=(32, *x.shape[1:]), compression="gzip")
        file["labels"] = labels % 10


def write_table(path: Path) -> None:
    """Write a table of 25,600 rows with 256 columns, which hang together."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((25_600, 16)).astype("f4") @ rng.standard_normal((16, 256)).astype("f4")
    x = np.round(x + 0.1 * rng.standard_normal(x.shape), 2).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("table", data=x, chunks=(128, 256), compression="gzip", shuffle=True)


def write_recordings(path: Path) -> None:
    """Write 8 recordings of 32 channels with 16,384 steps."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(8):
            x = waves(rng, 1, 32, 16_384)[0]
            options = {"chunks": (32, 1024), "compression": "gzip", "shuffle": True}
            file.create_dataset(f"recording_{number}/eeg", data=x, **options)


def write_tokens(path: Path) -> None:
    """Write 240 sequences of 128 amino acids."""
    rng = np.random.default_rng(0)
    x = rng.choice(20, (240, 128), p=rng.dirichlet(np.full(20, 5.0))).astype("u1")
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=x, chunks=(64, 128), compression="gzip")


TRAININGS = {
    "images": Training(
        title="images 3x64x64: ResNet-18",
        write=write_images,
        model=lambda: residual_network(3, 10),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0].float() / 255), batch[1]),
        options={"x_key": "images", "y_key": "labels", "batch_size": 64},
        decoded_mib=9,
    ),
    "table": Training(
        title="table of 256 columns: residual network of eight blocks",
        write=write_table,
        model=lambda: table_network(256, 256),
        loss=lambda model, x: functional.mse_loss(model(x), x),
        options={"x_key": "table", "batch_size": 256},
        decoded_mib=25,
    ),
    "recordings": Training(
        title="recordings of 32 channels, windows of 512: ResNet-18 of one dimension",
        write=write_recordings,
        model=lambda: residual_network(32, 32, is_1d=True),
        loss=lambda model, x: functional.mse_loss(model(x), x.mean(dim=2)),
        options={
            "x_key": "eeg",
            "segments": {"groups": "recording_*", "step_axis": 1},
            "window": {"length": 512, "stride": 128},
            "batch_size": 64,
        },
        decoded_mib=16,
    ),
    "cells": Training(
        title="cells of 2,000 genes, sparse: scVI",
        write=lambda path: write_cells(str(path), 30_000, 2000),
        model=lambda: CountsVae(2000),
        loss=lambda model, x: model(x),
        options={"x_key": "X", "decode": {"X": "dense"}, "batch_size": 128},
        decoded_mib=24,
    ),
    "tokens": Training(
        title="sequences of 128 amino acids: ESM-2 of 8 million weights",
        write=write_tokens,
        model=lambda: MaskedTokens(20, 128),
        loss=lambda model, x: model(x.long()),
        options={"x_key": "tokens", "batch_size": 16},
        decoded_mib=4,
    ),
}


# Measuring ------------------------------------------------------------------------------------------------------------


class Model(LightningModule):
    """A model with its loss and Adam."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.loss = training.model(), training.loss

    def training_step(self, batch: Any) -> Tensor:
        """Return the loss."""
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Notes the time and the processor time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the end of a step."""
        self.ends.append((time.perf_counter(), time.process_time()))

    def per_step(self) -> tuple[float, float]:
        """Return the seconds and the processor seconds of a step."""
        (began, cpu_began), *_, (ended, cpu_ended) = self.ends[N_WARM:]
        n = len(self.ends) - N_WARM - 1
        return (ended - began) / n, (cpu_ended - cpu_began) / n


class Held:
    """Batches in memory."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def fit(training: Training, data: Any) -> tuple[float, float]:
    """Train for two epochs, and return the seconds and the processor seconds of a step."""
    clock = Clock()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Model(training), data)
    return clock.per_step()


def run(name: str, n_rounds: int) -> dict[str, Any]:
    """Measure a training."""
    training = TRAININGS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.h5"
        training.write(path)
        module = training.data_module(path)
        module.setup("fit")
        held = Held(list(module.train_dataloader()))
        module.teardown("fit")
        seconds: dict[str, list[tuple[float, float]]] = {"loader": [], "held": []}
        fit(training, training.data_module(path))  # compiles, and fills the page cache
        for number in range(n_rounds):
            for way in ("loader", "held") if number % 2 else ("held", "loader"):
                data = held if way == "held" else training.data_module(path)
                seconds[way].append(fit(training, data))
    pairs = list(zip(seconds["loader"], seconds["held"], strict=True))
    result = {
        "training": name,
        "title": training.title,
        "batch_size": training.options["batch_size"],
        "n_steps": len(held),
        "step_ms": [1000 * loader for (loader, _), _ in pairs],
        "held_step_ms": [1000 * free for _, (free, _) in pairs],
        "share": median(free / loader for (loader, _), (free, _) in pairs),
        "cpu_share": median(cpu / free_cpu - 1 for (_, cpu), (_, free_cpu) in pairs),
    }
    print(f"{training.title}: steps of {median(result['held_step_ms']):.1f} ms, {len(held)} per epoch")
    shares = ", ".join(f"{free / loader:.3f}" for (loader, _), (free, _) in pairs)
    print(f"  share of the speed without a loader: {result['share']:.3f} ({shares})")
    print(f"  processor time that the loader adds: {result['cpu_share']:.3f}", flush=True)
    return result


def main() -> None:
    """Measure the trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="add the measurements to those in this file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning_h5", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    about = environment(("lightning",))
    print(line_of(about))
    for name in given.trainings:
        results = [run(name, given.rounds)]
        merge_json(given.json, {"environment": about, "results": results}, "training", TRAININGS)


if __name__ == "__main__":
    main()

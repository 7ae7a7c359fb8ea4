"""What does loading cost whole trainings, compared with the same batches held in memory?

    python examples/benchmarks/loader_cost.py [--trainings images ...] [--rounds 5] [--json FILE]

Five models train on the processor by `Trainer.fit`: with `LazyH5DataModule`, and without a loader, on batches that
were read before. Both take turns in one process, `--rounds` times, with all threads of torch. An epoch reads all rows;
the loader's buffers have a quarter of their decoded size. The clock runs from the tenth step to the last one of the
second epoch. The share is the median over the rounds of steps per second with the loader over those without;
"cpu_share" is the processor time that the loader adds to that of a step, on all cores.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import torch
from cells import write_cells
from common import environment, line_of, merge_json
from lightning.pytorch import Callback, LightningModule, Trainer
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


def convolutions(n_in: int, n_classes: int, *, is_1d: bool = False) -> nn.Module:
    """Return four layers of convolutions for images or for signals, each with half the size and more features."""
    conv, norm, pool = (
        (nn.Conv1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d)
        if is_1d
        else (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d)
    )
    layers: list[nn.Module] = []
    for n_out in (32, 64, 128, 256):
        layers += [conv(n_in, n_out, 5, 2, 2, bias=False), norm(n_out), nn.ReLU()]
        n_in = n_out
    return nn.Sequential(*layers, pool(1), nn.Flatten(), nn.Linear(n_in, n_classes))


class CountsVae(nn.Module):
    """A variational autoencoder of counts with a negative binomial likelihood, with the default sizes of scVI."""

    def __init__(self, n_genes: int, n_hidden: int = 128, n_latent: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_genes, n_hidden), nn.BatchNorm1d(n_hidden), nn.ReLU())
        self.moments = nn.Linear(n_hidden, 2 * n_latent)
        self.decoder = nn.Sequential(nn.Linear(n_latent, n_hidden), nn.BatchNorm1d(n_hidden), nn.ReLU())
        self.shares = nn.Linear(n_hidden, n_genes)
        self.spread = nn.Parameter(torch.zeros(n_genes))

    def forward(self, counts: Tensor) -> Tensor:
        """Return the negative evidence lower bound."""
        mean, log_variance = self.moments(self.encoder(counts.log1p())).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        expected = self.shares(self.decoder(latent)).softmax(dim=1) * counts.sum(dim=1, keepdim=True)
        spread = self.spread.exp()
        log_sum = (spread + expected + 1e-8).log()
        likelihood = (
            spread * (spread.log() - log_sum)
            + counts * ((expected + 1e-8).log() - log_sum)
            + torch.lgamma(counts + spread)
            - torch.lgamma(spread)
            - torch.lgamma(counts + 1)
        )
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance)
        return divergence.sum(dim=1).mean() - likelihood.sum(dim=1).mean()


class Tokens(nn.Module):
    """A small causal transformer."""

    def __init__(self, n_tokens: int, length: int, width: int = 128, n_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, n_tokens)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the next tokens."""
        x = self.layers(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def autoencoder(n: int) -> nn.Module:
    """Return an autoencoder of table rows."""
    sizes = [n, 1024, 512, 64, 512, 1024, n]
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.GELU()]
    return nn.Sequential(*layers[:-1])


# Files ----------------------------------------------------------------------------------------------------------------


def write_images(path: Path) -> None:
    """Write 1,280 pictures of 12 KiB with ten labels."""
    x, labels = lifelike(IMAGES, 1280)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=x, chunks=(32, *x.shape[1:]), compression="gzip")
        file["labels"] = labels % 10


def write_table(path: Path) -> None:
    """Write a table of 51,200 rows with 256 columns, which hang together."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((51_200, 16)).astype("f4") @ rng.standard_normal((16, 256)).astype("f4")
    x = np.round(x + 0.1 * rng.standard_normal(x.shape), 2).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("table", data=x, chunks=(128, 256), compression="gzip", shuffle=True)


def write_recordings(path: Path) -> None:
    """Write 16 recordings of 32 channels with 16,384 steps."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(16):
            x = waves(rng, 1, 32, 16_384)[0]
            options = {"chunks": (32, 1024), "compression": "gzip", "shuffle": True}
            file.create_dataset(f"recording_{number}/eeg", data=x, **options)


def write_tokens(path: Path) -> None:
    """Write 640 sequences of 128 amino acids."""
    rng = np.random.default_rng(0)
    x = rng.choice(20, (640, 128), p=rng.dirichlet(np.full(20, 5.0))).astype("u1")
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=x, chunks=(64, 128), compression="gzip")


TRAININGS = {
    "images": Training(
        title="images 3x64x64: four layers of convolutions",
        write=write_images,
        model=lambda: convolutions(3, 10),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0].float() / 255), batch[1]),
        options={"x_key": "images", "y_key": "labels", "batch_size": 64},
        decoded_mib=15,
    ),
    "table": Training(
        title="table of 256 columns: autoencoder of 1.6 million weights",
        write=write_table,
        model=lambda: autoencoder(256),
        loss=lambda model, x: functional.mse_loss(model(x), x),
        options={"x_key": "table", "batch_size": 256},
        decoded_mib=50,
    ),
    "recordings": Training(
        title="recordings of 32 channels, windows of 512: four layers of convolutions",
        write=write_recordings,
        model=lambda: convolutions(32, 32, is_1d=True),
        loss=lambda model, x: functional.mse_loss(model(x), x.mean(dim=2)),
        options={
            "x_key": "eeg",
            "segments": {"groups": "recording_*", "step_axis": 1},
            "window": {"length": 512, "stride": 128},
            "batch_size": 64,
        },
        decoded_mib=32,
    ),
    "cells": Training(
        title="cells of 2,000 genes, sparse: variational autoencoder, sizes of scVI",
        write=lambda path: write_cells(str(path), 30_000, 2000),
        model=lambda: CountsVae(2000),
        loss=lambda model, x: model(x),
        options={"x_key": "X", "decode": {"X": "dense"}, "batch_size": 128},
        decoded_mib=24,
    ),
    "tokens": Training(
        title="sequences of 128 amino acids: transformer of two layers",
        write=write_tokens,
        model=lambda: Tokens(20, 128),
        loss=lambda model, x: model(x.long()),
        options={"x_key": "tokens", "batch_size": 32},
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

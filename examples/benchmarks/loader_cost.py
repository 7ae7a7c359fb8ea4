"""What does loading cost whole trainings, compared with the same batches held in memory?

    python examples/benchmarks/loader_cost.py [--trainings images ...] [--rounds 9] [--json FILE]

Five published networks train on the processor by `Trainer.fit`, with all threads of torch: on batches of
`LazyH5DataModule` from the file as it is stored ("stored"), from chunks that an earlier epoch kept decoded on the disk
("decoded"), and without a loader, on batches that were read before ("held"). They take turns, an epoch each, in one
training, so that they meet the same other programs. An epoch reads all rows; memory has a quarter of them. A share is
the median over the rounds of the time of an epoch without a loader over that of the epoch with it; its first batch is
included.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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

    def data_module(self, path: Path, **options: Any) -> LazyH5DataModule:
        """Return the data module, with memory for a quarter of the rows."""
        budget = f"{self.decoded_mib // 4} MiB"
        options |= {"shuffle": {"buffer": budget}, "files": {"cache_bytes": budget}}
        return LazyH5DataModule(path, **options, **self.options)


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


class Epoch(NamedTuple):
    """Time per step in an epoch.

    Attributes:
        ms: milliseconds.
        cpu_ms: of the processor, on all cores.
    """

    ms: float
    cpu_ms: float


class Turns(Callback):
    """Batches of several ways, an epoch each, in turns, and the time that each epoch takes.

    Args:
        ways: the ways: an iterable of an epoch's batches for each.
    """

    def __init__(self, ways: Mapping[str, Any]) -> None:
        self._ways, self._current = ways, ""
        self._began = 0.0, 0.0
        self.epochs: dict[str, list[Epoch]] = {way: [] for way in ways}

    def __len__(self) -> int:
        return len(self._ways["held"])

    def __iter__(self) -> Iterator[Any]:
        turn, place = divmod(sum(map(len, self.epochs.values())), len(self._ways))
        self._current = [*self._ways][:: 1 if turn % 2 else -1][place]
        self._began = time.perf_counter(), time.process_time()
        return iter(self._ways[self._current])

    def on_train_epoch_end(self, *_: Any) -> None:
        """Note the time of an epoch."""
        began, cpu_began = self._began
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        self.epochs[self._current].append(Epoch(1000 * seconds / len(self), 1000 * cpu_seconds / len(self)))


def fit(training: Training, ways: Mapping[str, Any], n_rounds: int) -> dict[str, list[Epoch]]:
    """Train for some rounds, of an epoch of each way."""
    turns = Turns(ways)
    trainer = Trainer(
        max_epochs=n_rounds * len(ways),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    trainer.fit(Model(training), turns)
    return {way: epochs[1:] for way, epochs in turns.epochs.items()}


def run(name: str, n_rounds: int) -> dict[str, Any]:
    """Measure a training."""
    training = TRAININGS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.h5"
        training.write(path)
        modules = {
            "stored": training.data_module(path),
            "decoded": training.data_module(path, staging={"dir": f"{folder}/node", "decoded": True}),
        }
        ways: dict[str, Any] = {}
        for way, module in modules.items():
            module.setup("fit")
            ways[way] = module.train_dataloader()
            for _ in range(2):  # the first keeps decoded rows
                held = list(ways[way])
        epochs = fit(training, ways | {"held": held}, n_rounds + 1)
        for module in modules.values():
            module.teardown("fit")
    result: dict[str, Any] = {
        "training": name,
        "title": training.title,
        "batch_size": training.options["batch_size"],
        "n_steps": len(held),
        "step_ms": {way: [epoch.ms for epoch in of_way] for way, of_way in epochs.items()},
    }
    print(f"{training.title}: steps of {median(result['step_ms']['held']):.1f} ms, {len(held)} per epoch")
    for way in modules:
        pairs = list(zip(epochs["held"], epochs[way], strict=True))
        shares = [free.ms / loader.ms for free, loader in pairs]
        result[f"{way}_share"] = median(shares)
        result[f"{way}_cpu_share"] = median(loader.cpu_ms / free.cpu_ms - 1 for free, loader in pairs)
        print(
            f"  {way}: {result[f'{way}_share']:.3f} of the speed without a loader "
            f"({', '.join(f'{share:.3f}' for share in shares)}), "
            f"{result[f'{way}_cpu_share']:+.3f} of the processor time",
            flush=True,
        )
    return result


def main() -> None:
    """Measure the trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--rounds", type=int, default=9)
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

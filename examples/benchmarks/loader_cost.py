"""What does loading cost whole trainings, compared with the same batches held in memory?

    python examples/benchmarks/loader_cost.py [--trainings images ...] [--rounds 9] [--json FILE]

Five published networks train on the processor by `Trainer.fit`, with all threads of torch: on batches of
`LazyH5DataModule` from the file as it is stored ("stored"), from chunks that an earlier epoch kept decoded on the disk
("decoded"), and on batches that were read before ("held"). They take turns step by step in one training, so that they
share the machine with the same other programs. A loader reads on when a batch was taken; what it then computes beside
the model is in the time of that step, since it is over before the next one. Memory has a quarter of the rows. A share
is the time of a round's steps without a loader over that of those with it; the median over the rounds. On a machine
with other programs it is within two or three percent. Beside it is the processor time of a batch in an epoch without a
model, over that of a step without a loader, on all cores.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
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
        n_steps: steps of each way in a round.
    """

    title: str
    write: Callable[[Path], None]
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    options: dict[str, Any]
    decoded_mib: int
    n_steps: int

    def data_module(self, path: Path, **options: Any) -> LazyH5DataModule:
        """Return the data module, with memory for a quarter of the rows."""
        budget = f"{self.decoded_mib // 4} MiB"
        options |= {"shuffle": {"buffer": budget}, "files": {"cache_bytes": budget}}
        return LazyH5DataModule(path, **options, **self.options)


# Files ----------------------------------------------------------------------------------------------------------------


def write_images(path: Path) -> None:
    """Write 8,192 pictures of 12 KiB with ten labels."""
    x, labels = lifelike(IMAGES, 8192)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=x, chunks=(32, *x.shape[1:]), compression="gzip")
        file["labels"] = labels % 10


def write_table(path: Path) -> None:
    """Write a table of 102,400 rows with 256 columns, which hang together."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((102_400, 16)).astype("f4") @ rng.standard_normal((16, 256)).astype("f4")
    x = np.round(x + 0.1 * rng.standard_normal(x.shape), 2).astype("f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("table", data=x, chunks=(128, 256), compression="gzip", shuffle=True)


def write_recordings(path: Path) -> None:
    """Write 32 recordings of 32 channels with 16,384 steps."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(32):
            x = waves(rng, 1, 32, 16_384)[0]
            options = {"chunks": (32, 1024), "compression": "gzip", "shuffle": True}
            file.create_dataset(f"recording_{number}/eeg", data=x, **options)


def write_tokens(path: Path) -> None:
    """Write 32,768 sequences of 128 amino acids."""
    rng = np.random.default_rng(0)
    x = rng.choice(20, (32_768, 128), p=rng.dirichlet(np.full(20, 5.0))).astype("u1")
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=x, chunks=(64, 128), compression="gzip")


TRAININGS = {
    "images": Training(
        title="images 3x64x64: ResNet-18",
        write=write_images,
        model=lambda: residual_network(3, 10),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0].float() / 255), batch[1]),
        options={"x_key": "images", "y_key": "labels", "batch_size": 64},
        decoded_mib=96,
        n_steps=8,
    ),
    "table": Training(
        title="table of 256 columns: residual network of eight blocks",
        write=write_table,
        model=lambda: table_network(256, 256),
        loss=lambda model, x: functional.mse_loss(model(x), x),
        options={"x_key": "table", "batch_size": 256},
        decoded_mib=100,
        n_steps=40,
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
        decoded_mib=64,
        n_steps=8,
    ),
    "cells": Training(
        title="cells of 2,000 genes, sparse: scVI",
        write=lambda path: write_cells(str(path), 250_000, 2000),
        model=lambda: CountsVae(2000),
        loss=lambda model, x: model(x),
        options={"x_key": "X", "decode": {"X": "dense"}, "batch_size": 128},
        decoded_mib=200,
        n_steps=150,
    ),
    "tokens": Training(
        title="sequences of 128 amino acids: ESM-2 of 8 million weights",
        write=write_tokens,
        model=lambda: MaskedTokens(20, 128),
        loss=lambda model, x: model(x.long()),
        options={"x_key": "tokens", "batch_size": 16},
        decoded_mib=4,
        n_steps=8,
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


class Steps(NamedTuple):
    """Time of a round's steps with the batches of one way, in seconds, on average.

    Attributes:
        seconds: of a clock.
        cpu_seconds: of the processor, on all cores.
    """

    seconds: float
    cpu_seconds: float


class Turns(Callback):
    """Batches of several ways, one after the other, and the time of the steps that they are for.

    Args:
        ways: an iterable of an epoch's batches for each way; it is iterated again when it ends.
        n_steps: steps of each way in a round, which is an epoch for the trainer.
    """

    def __init__(self, ways: Mapping[str, Any], n_steps: int) -> None:
        self._iterators = {way: itertools.chain.from_iterable(itertools.repeat(each)) for way, each in ways.items()}
        self._n_steps, self._random = n_steps, random.Random(0)
        self.rounds: dict[str, list[Steps]] = {way: [] for way in ways}

    def __len__(self) -> int:
        return self._n_steps * len(self._iterators)

    def __iter__(self) -> Iterator[Any]:
        self._spent = {way: np.zeros(2) for way in self._iterators}
        self._last = self._now()
        for _ in range(self._n_steps):
            for way in self._random.sample([*self._iterators], len(self._iterators)):
                self._current = way
                yield next(self._iterators[way])

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time of a step."""
        now = self._now()
        self._spent[self._current] += now - self._last
        self._last = now

    def on_train_epoch_end(self, *_: Any) -> None:
        """Note the times of a round."""
        for way, spent in self._spent.items():
            self.rounds[way].append(Steps(*(spent / self._n_steps).tolist()))

    @staticmethod
    def _now() -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([time.perf_counter(), time.process_time()])


def fit(training: Training, ways: Mapping[str, Any], n_rounds: int) -> dict[str, list[Steps]]:
    """Train for some rounds, and one before that is not counted."""
    turns = Turns(ways, training.n_steps)
    trainer = Trainer(
        max_epochs=1 + n_rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    trainer.fit(Model(training), turns)
    return {way: rounds[1:] for way, rounds in turns.rounds.items()}


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
        cpu_seconds: dict[str, float] = {}
        for way, module in modules.items():
            module.setup("fit")
            ways[way] = module.train_dataloader()
            for _ in range(2):  # the first keeps decoded rows
                began = time.process_time()
                n_batches = sum(1 for _ in ways[way])
            cpu_seconds[way] = (time.process_time() - began) / n_batches
        held = list(itertools.islice(ways["stored"], training.n_steps))
        rounds = fit(training, ways | {"held": held}, n_rounds)
        for module in modules.values():
            module.teardown("fit")
    result: dict[str, Any] = {
        "training": name,
        "title": training.title,
        "batch_size": training.options["batch_size"],
        "n_steps": training.n_steps,
        "step_ms": {way: [1000 * steps.seconds for steps in of_way] for way, of_way in rounds.items()},
    }
    print(f"{training.title}: steps of {median(result['step_ms']['held']):.1f} ms")
    for way in modules:
        pairs = list(zip(rounds["held"], rounds[way], strict=True))
        shares = [free.seconds / loader.seconds for free, loader in pairs]
        result[f"{way}_share"] = median(shares)
        result[f"{way}_cpu_share"] = cpu_seconds[way] / median(free.cpu_seconds for free in rounds["held"])
        print(
            f"  {way}: {result[f'{way}_share']:.3f} of the speed without a loader "
            f"({', '.join(f'{share:.3f}' for share in shares)}), "
            f"a batch takes {result[f'{way}_cpu_share']:.4f} of the processor time of a step",
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

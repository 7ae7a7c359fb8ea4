"""What `H5StatsMonitor` costs: steps of a training with it beside steps without, in turns.

    python examples/benchmarks/monitor.py [--batches 2000] [--rounds 9] [--json FILE]

The model does next to nothing, so that a step is as short as Lightning lets it be; what the monitor adds to it is then
set against the 2 ms that a step has at 500 batches a second. Loaders count whether or not a monitor looks: what that
costs is timed by itself.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import timeit
import warnings
from pathlib import Path
from time import perf_counter

import h5py
import numpy as np
import torch
from common import environment, line_of, met, table, write_json
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_h5 import H5StatsMonitor, LazyH5DataModule
from lightning_h5.counters import Counters, WaitTimes

BATCHES_A_SECOND = 500
MOST = 0.01


class Nothing(LightningModule):
    """Trains nothing, as fast as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> None:
        return None


class Silent(H5StatsMonitor):
    """Takes the monitor's place, so that none is inserted, and does nothing."""


for name in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Silent, name, getattr(Callback, name))


class Clock(Callback):
    """Seconds from the first batch's end to the last one's."""

    def on_train_batch_end(self, trainer: Trainer, *given: object) -> None:
        self.began = perf_counter() if trainer.fit_loop.epoch_loop.batch_idx == 0 else self.began

    def on_train_end(self, *given: object) -> None:
        self.seconds = perf_counter() - self.began


def main() -> None:
    """Prints microseconds a batch, and the share of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # advice that does not apply to a benchmark
    for noisy in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    about = environment(("lightning",))
    print(line_of(about))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.zeros((options.batches, 4), "f4")
        each: dict[str, list[float]] = {"without": [], "with": []}
        step(path, options.batches, Silent())  # warm
        for _ in range(options.rounds):
            each["without"].append(step(path, options.batches, Silent()))
            each["with"].append(step(path, options.batches, H5StatsMonitor(print_summary=False)))
    # The fastest of each, as in `timeit`: other load only adds time, ten times as much as is measured.
    took = {name: min(seconds) for name, seconds in each.items()}
    counting = counting_a_batch()
    share = (took["with"] - took["without"] + counting) * BATCHES_A_SECOND
    rows = [[f"a step {name} the monitor", f"{seconds * 1e6:.1f}"] for name, seconds in took.items()]
    rows += [["counting in the loader, alone", f"{counting * 1e6:.1f}"]]
    print(table(["", "us a batch"], rows))
    print(f"both, as a share of the time at {BATCHES_A_SECOND} batches a second: {share:.2%}")
    print(f"at most {MOST:.0%}: {met(share <= MOST)}")
    write_json(options.json, {"environment": about, "seconds": each, "counting": counting, "share": share})


def step(path: str, n_batches: int, monitor: H5StatsMonitor) -> float:
    """Seconds of a step."""
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[monitor, clock],
    )  # fmt: skip
    trainer.fit(Nothing(), datamodule=LazyH5DataModule(path, x_key="x", batch_size=1, shuffle=False))
    return clock.seconds / (n_batches - 1)


def counting_a_batch(n: int = 20_000) -> float:
    """Seconds that a loader takes to count a batch: rows, waiting, finishing, reading."""
    counters, waits = Counters(), WaitTimes()

    def count() -> None:
        counters.add_batch(64, 1e-4)
        waits.add(1e-4)
        counters.add(finish_seconds=1e-5)
        counters.add(bytes_read=1, bytes_decoded=1, chunks_decoded=1, read_seconds=1e-5, decode_seconds=-1e-5)
        counters.add(decode_seconds=1e-5)

    return min(timeit.repeat(count, number=n, repeat=5)) / n


if __name__ == "__main__":
    main()

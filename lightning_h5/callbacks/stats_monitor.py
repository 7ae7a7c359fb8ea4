"""``H5StatsMonitor``: throughput and waiting, in the loggers while training and in a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from .._lightning import Callback, LightningModule, Trainer
from ..datasets import rows_of
from ..errors import H5ValueError
from ..loading import H5DataLoader
from ..sampling import MixtureRecipe
from ..stats import COUNTED

__all__ = ["H5StatsMonitor"]

MIB = 1 << 20


@dataclass
class _Meter:
    """What one stage counted, and how long it ran, since the last lap and in all."""

    seconds: float = 0.0
    running_since: float | None = None
    at_lap: dict[str, float] = field(default_factory=dict)
    at_epoch: dict[str, float] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        self.running_since = self.running_since or perf_counter()

    def stop(self) -> None:
        if self.running_since is not None:
            self.seconds += perf_counter() - self.running_since
            self.running_since = None

    def now(self, loaders: Iterable[H5DataLoader]) -> dict[str, float]:
        """Totals so far: everything counted, and the seconds."""
        if self.running_since is not None:
            self.stop()
            self.start()
        sums = dict.fromkeys(COUNTED, 0.0)
        for loader in loaders:
            for name, amount in loader.counters.total().items():
                sums[name] = sums.get(name, 0.0) + amount
        return sums | {"seconds": self.seconds}


class H5StatsMonitor(Callback):
    """Shows how fast rows come, and how long training waits for them.

    The data modules of this package insert it themselves; pass one to set its options. It works without a
    logger (then the table alone), and with any number of them. Sums are taken over all ranks, but for prediction,
    where ranks may have nothing to do: there rank 0 shows its own.

    Logged each ``log_every_n_steps`` training steps, over the steps since the last time, and for each epoch
    with the suffix ``_epoch``:

    - ``h5/samples_per_second``: rows handed to training, per second.
    - ``h5/read_mib_per_second``: MiB taken from files, per second (an estimate where the HDF5 library reads).
    - ``h5/decoded_mib_per_second``: MiB of these after decoding, per second.
    - ``h5/wait_fraction``: share of the time spent waiting for a batch, transforms in this process included; 0 to 1.
    - ``h5/wait_ms``: milliseconds waited for a batch, on average.
    - ``h5/share/NAME``: share of the rows that were of a source of a mixture, 0 to 1.
    - ``h5/expected_share/NAME``: the share that it is to have.

    Args:
        log_every_n_steps: None takes the trainer's.
        print_summary: print a table when a stage ends, on rank 0.
        prefix: what the keys begin with.

    Raises:
        H5ValueError: ``log_every_n_steps`` is below 1.

    Cost:
        One reduction of six numbers over the ranks each time it logs.
    """

    def __init__(self, log_every_n_steps: int | None = None, print_summary: bool = True, prefix: str = "h5/") -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise H5ValueError(f"log_every_n_steps={log_every_n_steps} was given. Pass at least 1, or None.")
        self.log_every_n_steps = log_every_n_steps
        self.print_summary = print_summary
        self.prefix = prefix
        self._meters: dict[str, _Meter] = {}

    # Training ------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew; a second fit does not show the first one's figures."""
        self._meters = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; not at the epoch's start, which is not called when one goes on in its middle."""
        self._begin("train", trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs, where it is time to."""
        every = self.log_every_n_steps or getattr(trainer, "log_every_n_steps", 50)
        if every and (batch_idx + 1) % every == 0:
            meter = self._meters["train"]
            figures = self._lap(trainer, meter, meter.at_lap)
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's figures."""
        meter = self._meters["train"]
        for name, value in self._lap(trainer, meter, meter.at_epoch).items():
            # The value is the same on all ranks by now; Lightning wants to hear that it is reduced.
            pl_module.log(f"{name}_epoch", value, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table."""
        self._end(trainer, "train", "validate")

    # Evaluation ----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the training clock and starts the other."""
        if "train" in self._meters:
            self._meters["train"].stop()
        if not trainer.sanity_checking:
            self._begin("validate", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the training clock again; prints the table where nothing trains."""
        if trainer.sanity_checking:
            return
        self._meters["validate"].stop()
        if "train" in self._meters and trainer.state.fn == "fit":
            self._meters["train"].start()
        else:
            self._end(trainer, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._begin("test", trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table."""
        self._end(trainer, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._begin("predict", trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table."""
        self._end(trainer, "predict")

    # Parts ---------------------------------------------------------------------------------------------------

    def _begin(self, stage: str, trainer: Trainer) -> None:
        meter = self._meters.get(stage)
        if meter is None:
            meter = self._meters[stage] = _Meter()
            meter.baseline = meter.now(_loaders(trainer, stage))
            meter.at_lap, meter.at_epoch = dict(meter.baseline), dict(meter.baseline)
        meter.start()

    def _lap(self, trainer: Trainer, meter: _Meter, since: dict[str, float]) -> dict[str, float]:
        """Figures since a mark, over all ranks; moves the mark."""
        loaders = _loaders(trainer, "train")
        now = meter.now(loaders)
        amounts = {name: value - since.get(name, 0.0) for name, value in now.items()}
        since.update(now)
        amounts = _sum(trainer, amounts)
        figures = _figures(amounts, trainer.world_size) | _shares(amounts, loaders)
        return {self.prefix + name: value for name, value in figures.items()}

    def _end(self, trainer: Trainer, *stages: str) -> None:
        lines = {}
        for stage in stages:
            if (meter := self._meters.get(stage)) is None:
                continue
            meter.stop()
            now = meter.now(_loaders(trainer, stage))
            amounts = {name: value - meter.baseline.get(name, 0.0) for name, value in now.items()}
            # A rank without a row to predict skips its loop and this hook, so nobody may wait for it here.
            lines[stage] = amounts if stage == "predict" else _sum(trainer, amounts)
        if lines and self.print_summary and trainer.is_global_zero:
            own = "predict" in lines
            n_ranks = 1 if own else trainer.world_size
            table = {stage: (amounts, _figures(amounts, n_ranks)) for stage, amounts in lines.items()}
            sys.stdout.write(_table(table, "on rank 0" if own else "over all ranks"))
            sys.stdout.flush()
        for stage in stages:
            self._meters.pop(stage, None)


_LOADERS = {
    "train": "train_dataloader",
    "validate": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}


def _loaders(trainer: Trainer, stage: str) -> list[H5DataLoader]:
    """Our loaders of a stage, however the user nested them."""
    flat: list[H5DataLoader] = []
    todo = [getattr(trainer, _LOADERS[stage])]
    while todo:
        item = todo.pop()
        if isinstance(item, H5DataLoader):
            flat.append(item)
        elif isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
    return flat


def _sum(trainer: Trainer, amounts: Mapping[str, float]) -> dict[str, float]:
    values = torch.tensor(list(amounts.values()), dtype=torch.float64)
    device = trainer.strategy.root_device
    # Float64 is not to be had on every accelerator (MPS); sums of a run fit float32 well enough to show there.
    values = values.to(device if device.type != "mps" else "cpu")
    reduced = trainer.strategy.reduce(values, reduce_op="sum")
    return dict(zip(amounts, torch.as_tensor(reduced).tolist(), strict=True))


def _figures(amounts: Mapping[str, float], n_ranks: int) -> dict[str, float]:
    """Rates over all ranks. Seconds were summed over ranks as well, so a rank's mean time counts."""
    seconds = max(amounts["seconds"] / max(1, n_ranks), 1e-9)
    return {
        "samples_per_second": amounts["rows"] / seconds,
        "read_mib_per_second": amounts["bytes_read"] / MIB / seconds,
        "decoded_mib_per_second": amounts["bytes_decoded"] / MIB / seconds,
        "wait_fraction": min(1.0, amounts["wait_seconds"] / max(amounts["seconds"], 1e-9)),
        "wait_ms": 1000 * amounts["wait_seconds"] / max(1.0, amounts["batches"]),
    }


def _shares(amounts: Mapping[str, float], loaders: Iterable[H5DataLoader]) -> dict[str, float]:
    """Of each mixture the share of rows that each source had, and was to have."""
    shares: dict[str, float] = {}
    for loader in loaders:
        if isinstance(recipe := loader.sampler.recipe, MixtureRecipe):
            expected = recipe.expected_shares(loader.sampler.batch_size, drop_last=loader.sampler.drop_last)
            counted = {name: amounts[rows_of(name)] for name in expected if rows_of(name) in amounts}
            for name, n_rows in counted.items():  # none where sources have no names
                shares[f"share/{name}"] = n_rows / max(1.0, sum(counted.values()))
                shares[f"expected_share/{name}"] = expected[name]
    return shares


def _table(lines: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]], whose: str) -> str:
    head = ("stage", "batches", "rows", "seconds", "rows/s", "MiB/s read", "MiB/s decoded", "waiting", "ms a batch")
    rows = [head]
    for stage, (amounts, figures) in lines.items():
        seconds = amounts["rows"] / max(figures["samples_per_second"], 1e-9)
        rows.append(
            (
                stage,
                f"{amounts['batches']:,.0f}",
                f"{amounts['rows']:,.0f}",
                f"{seconds:,.1f}",
                f"{figures['samples_per_second']:,.0f}",
                f"{figures['read_mib_per_second']:,.1f}",
                f"{figures['decoded_mib_per_second']:,.1f}",
                f"{figures['wait_fraction']:.1%}",
                f"{figures['wait_ms']:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    text = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    rule = "-" * len(text[0])
    return "\n".join(["", f"lightning_h5: rows from HDF5, {whose}", rule, text[0], rule, *text[1:], rule, ""])

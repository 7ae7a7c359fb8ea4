"""``H5StatsMonitor``: throughput and waiting, in the loggers while training and in a table at the end."""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._lightning import Callback, LightningModule, Trainer, drop_logged, is_logging_step, logged_step
from ..datasets import SequenceDataset
from ..datasets.file_dataset import FileDataset
from ..errors import H5Error, H5ValueError
from ..loading import H5DataLoader
from ..readers import usable_cores
from .bottleneck import what_limits
from .metrics import Meter, TransferTimer, chart_of, figures_of, over_ranks, shares_of, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["H5StatsMonitor"]

logger = logging.getLogger(__name__)

MAX_POINTS = 4096
"""Points of a plot; every other one is left out where there are more."""

IN_PROGRESS_BAR = ("samples_per_second", "wait_fraction")


class H5StatsMonitor(Callback):
    """Shows how fast rows come, how long training waits for them, and what to change.

    The data modules of this package insert it themselves; pass one to set its options. It works without a
    logger (then the table alone), and with any number of them. Sums are exact and taken over all ranks, but for
    prediction, where ranks may have nothing to do: there rank 0 shows its own.

    Logged each ``log_every_n_steps`` optimizer steps, over the time since the last log, and for each epoch with the
    suffix ``_epoch``. Steps have the numbers that Lightning logs, and where Lightning logs at the same step the values
    are part of its row:

    - ``h5/samples_per_second``: rows handed to training, per second.
    - ``h5/read_mib_per_second``: MiB taken from files, per second (an estimate where the HDF5 library reads).
    - ``h5/decoded_mib_per_second``: MiB of these after decoding, per second.
    - ``h5/wait_fraction``: share of the time spent waiting for a batch, transforms in this process included; 0 to 1.
    - ``h5/wait_ms``: milliseconds waited for a batch, on average.
    - ``h5/cache_hit_rate``: share of what was asked for that was in memory: among rows used last, in decoded blocks,
      or held whole; 0 to 1.
    - ``h5/cache_mib``: MiB of rows that are kept in memory, over all ranks and workers.
    - ``h5/transfer_ms``: milliseconds for copying a batch to the device, where there is one besides the CPU.
    - ``h5/share/NAME``: share of the rows that were of a source of a mixture, 0 to 1.
    - ``h5/expected_share/NAME``: the share that it is to have.

    The table at the end has these for each stage, with the share of the rank that waited most, the 95th percentile of
    the time that a batch was waited for, and a sentence that names the bottleneck and what to change. Figures that are
    0 in all stages are left out, and so is the hit rate of rows that are in memory as a whole.

    Args:
        log_every_n_steps: optimizer steps, so that steps which accumulate gradients do not count. None takes the
            trainer's.
        print_summary: print a table when a stage ends, on rank 0.
        prefix: what the keys begin with.
        progress_bar: show rows a second and the share of waiting in the progress bar as well.
        slow_batch_seconds: a batch that is waited for longer is reported at once, with its step, through Python's
            logging, by the rank that waits. The default is far above what reading takes and far below a time limit;
            None reports none.
        save_plot: save the plot of the run as ``h5_stats.png`` next to the logs (``trainer.log_dir``, else
            ``trainer.default_root_dir``) when training ends. Needs the extra ``plot``.

    Raises:
        H5ValueError: ``log_every_n_steps`` is below 1, or ``slow_batch_seconds`` not above 0.

    Cost:
        Some 15 microseconds a batch, logging every 50 steps included (0.8 % of the time at 500 batches a second; two
        cores, 2026-11-22). One collective of some twenty numbers each time it logs, and none in between.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        print_summary: bool = True,
        prefix: str = "h5/",
        *,
        progress_bar: bool = False,
        slow_batch_seconds: float | None = 10.0,
        save_plot: bool = False,
    ) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise H5ValueError(f"log_every_n_steps={log_every_n_steps} was given. Pass at least 1, or None.")
        if slow_batch_seconds is not None and not slow_batch_seconds > 0:
            raise H5ValueError(f"slow_batch_seconds={slow_batch_seconds} was given. Pass seconds above 0, or None.")
        self.log_every_n_steps = log_every_n_steps
        self.print_summary = print_summary
        self.prefix = prefix
        self.progress_bar = progress_bar
        self.slow_batch_seconds = slow_batch_seconds
        self.save_plot = save_plot
        self._meters: dict[str, Meter] = {}
        self._training: list[H5DataLoader] = []  # the loaders of this epoch
        self._transfer: TransferTimer | None = None
        self._history: list[tuple[int, dict[str, float]]] = []
        self._logged: tuple[str, ...] = ()  # by the batch before

    def plot(self) -> Figure:
        """The last training's figures over its steps: rows a second, waiting, MiB a second.

        Returns:
            A matplotlib ``Figure``, to be saved or shown.

        Raises:
            H5Error: matplotlib is not installed.
            H5ValueError: nothing was logged yet.
        """
        if not self._history:
            raise H5ValueError(
                "a plot was asked for, and no figures were logged yet. Train for log_every_n_steps steps at least."
            )
        return chart_of(self._history)

    # Training ------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew; a second fit does not show the first one's figures."""
        self._meters, self._history, self._logged = {}, [], ()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; not at the epoch's start, which is not called when one goes on in its middle."""
        self._begin("train", trainer)
        self._training = _loaders(trainer, "train")
        if self._transfer is None and trainer.strategy.root_device.type != "cpu":
            self._transfer = TransferTimer(trainer.strategy)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes note of the epoch's loaders, which may be new ones."""
        self._training = _loaders(trainer, "train")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Reports a batch that was waited for too long."""
        most = self.slow_batch_seconds
        if most is None:
            return
        for loader in self._training:
            if (waited := loader.waits.last) > most:
                loader.waits.last = 0.0  # told once, where another loader's batch is next
                self._meters["train"].n_slow += 1
                logger.warning(
                    "rank %d waited %.1f s for batch %d of epoch %d (step %d); more than slow_batch_seconds=%g.",
                    trainer.global_rank,
                    waited,
                    batch_idx,
                    trainer.current_epoch,
                    logged_step(trainer),
                    most,
                )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs if the figures are due."""
        drop_logged(trainer, "on_train_batch_end", self._logged)
        self._logged = ()
        every = self.log_every_n_steps or getattr(trainer, "log_every_n_steps", 50)  # Lightning does not declare it
        if not every or not is_logging_step(trainer, every):  # the same on all ranks, which come together in `_lap`
            return
        step, meter = logged_step(trainer), self._meters["train"]
        figures, meter.at_lap = self._lap(trainer, meter, meter.at_lap)
        self._history.append((step, figures))
        if len(self._history) > MAX_POINTS:
            self._history = self._history[::2]
        named = self._named(figures)
        shown = {self.prefix + name for name in IN_PROGRESS_BAR if self.progress_bar}
        for name, value in named.items():  # the same on all ranks by now
            pl_module.log(name, value, prog_bar=name in shown, logger=bool(trainer.loggers), on_step=True, batch_size=1)
        self._logged = tuple(named)
        if not is_logging_step(trainer):  # otherwise Lightning writes them after this hook, into its own row
            for each in trainer.loggers:
                each.log_metrics(named, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's figures."""
        # A progress bar asks for what was logged, which ranks then reduce together: on rank 0, in this hook, before or
        # after this callback. So all ranks ask for it here, and nobody is in one collective and others in another.
        _ = trainer.progress_bar_metrics
        meter = self._meters["train"]
        figures, meter.at_epoch = self._lap(trainer, meter, meter.at_epoch)
        # The value is the same on all ranks by now; Lightning wants to hear that it is reduced. It reduces once more,
        # when it is asked for the value: by all ranks here, before anybody goes on to collectives of their own.
        for name, value in self._named(figures).items():
            pl_module.log(f"{name}_epoch", value, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        _ = trainer.progress_bar_metrics

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table, and saves the plot."""
        self._end(trainer, "train", "validate")
        if self.save_plot and trainer.is_global_zero and self._history:
            folder = trainer.log_dir or trainer.default_root_dir
            os.makedirs(folder, exist_ok=True)
            try:
                self.plot().savefig(os.path.join(folder, "h5_stats.png"), dpi=120)
            except (H5Error, OSError) as error:  # a run that is over is not to fail for want of a picture
                logger.warning("the plot was not saved: %s", error)

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

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the strategy and the loaders as they were."""
        if self._transfer is not None:
            self._transfer.remove()
        self._transfer, self._training = None, []
        self._meters = {}  # what was broken off says nothing of what comes next

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forgets what was broken off."""
        self._meters = {}

    # Parts ---------------------------------------------------------------------------------------------------

    def _begin(self, stage: str, trainer: Trainer) -> None:
        if stage not in self._meters:
            self._meters[stage] = Meter.of(_loaders(trainer, stage))
        self._meters[stage].start()

    def _lap(
        self, trainer: Trainer, meter: Meter, mark: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Figures since a mark, over all ranks; and the next mark."""
        loaders = _loaders(trainer, "train")
        if self._transfer is not None:
            meter.transfer_seconds = self._transfer.seconds()
        amounts, now = meter.since(mark, loaders)
        amounts, _ = over_ranks(amounts, trainer.strategy.root_device, own=_is_alone(trainer))
        figures = figures_of(amounts, trainer.world_size) | shares_of(amounts, loaders)
        if self._transfer is not None:
            figures["transfer_ms"] = 1000 * amounts["transfer_seconds"] / max(1.0, amounts["batches"])
        return figures, now

    def _named(self, figures: Mapping[str, float]) -> dict[str, float]:
        return {self.prefix + name: value for name, value in figures.items()}

    def _end(self, trainer: Trainer, *stages: str) -> None:
        """Prints the table of these stages, and forgets them."""
        ranks: dict[str, list[dict[str, float]]] = {}
        limit = None
        own = "predict" in stages  # a rank without a row to predict skips its loop and this hook
        for stage in stages:
            if (meter := self._meters.pop(stage, None)) is None:
                continue
            meter.stop()
            loaders = _loaders(trainer, stage)
            amounts, _ = meter.since(meter.baseline, loaders, waits=True)
            amounts["memory"] = _peak_memory()
            sums, ranks[stage] = over_ranks(amounts, trainer.strategy.root_device, own=own or _is_alone(trainer))
            limit = limit or _limit_of(stage, sums, loaders)
        if ranks and self.print_summary and trainer.is_global_zero:
            remarks = _remarks(ranks, self.slow_batch_seconds) + ([limit] if limit else [])
            whose = "" if trainer.world_size == 1 else ", on rank 0" if own else ", over all ranks"
            sys.stdout.write(table_of(f"lightning_h5: rows from HDF5{whose}", ranks, remarks))
            sys.stdout.flush()


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


def _is_alone(trainer: Trainer) -> bool:
    """Whether the trainer has one process, whatever others are about."""
    return bool(trainer.world_size == 1)


def _limit_of(stage: str, amounts: Mapping[str, float], loaders: list[H5DataLoader]) -> str | None:
    """What limits a stage, as a remark."""
    n_workers = max((loader.num_workers for loader in loaders), default=0)
    to_keep = _to_keep(loaders) if stage == "train" else None  # other stages read each row once
    limit = what_limits(amounts, n_workers=n_workers, n_cores=usable_cores(), to_keep=to_keep)
    return None if limit is None else f"{stage}: {limit.text}"


def _to_keep(loaders: list[H5DataLoader]) -> str:
    """What to pass so that all decoded rows of training stay in memory; empty if they do."""
    missing = []  # for each loader whose rows do not fit: bytes for all of them, and the argument
    for loader in loaders:
        dataset = loader.dataset.dataset if isinstance(loader.dataset, SequenceDataset) else loader.dataset
        if not isinstance(dataset, FileDataset):  # sources of a mixture share `shuffle_bytes` otherwise
            return "shuffle_bytes that holds all"
        all_bytes = dataset.cost.decoded_bytes * max(1, loader.num_workers)  # each worker has a cache of its own
        if dataset.cache_bytes < all_bytes:
            # The cache has the size of `shuffle_bytes` only where rows are shuffled, and if nothing else was asked for.
            is_own = loader.dataset.asked_cache_bytes is not None or loader.sampler.present_order().mode == "none"
            missing.append((all_bytes, "cache_bytes" if is_own else "shuffle_bytes"))
    if not missing:
        return ""
    all_bytes, name = max(missing)
    return f"{name}='{-(-all_bytes >> 20)} MiB' holds all"


def _remarks(ranks: Mapping[str, list[dict[str, float]]], most: float | None) -> list[str]:
    """Slow batches, and the memory of the largest rank."""
    amounts = [rank for stage in ranks.values() for rank in stage]
    n_slow = sum(rank["n_slow"] for rank in amounts)
    batches = f"{n_slow:,.0f} batch{'es' if n_slow != 1 else ''}"
    slow = [f"{batches} took longer than {most:g} s to arrive; the log has the steps."] if n_slow else []
    memory = max(rank["memory"] for rank in amounts)
    return [f"peak memory of a rank's main process: {memory / 2**20:,.0f} MiB", *slow]


def _peak_memory() -> float:
    """Bytes that this process had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

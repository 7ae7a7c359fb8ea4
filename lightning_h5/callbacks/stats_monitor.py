"""``H5StatsMonitor``: throughput and waiting times, in the loggers during training and in a table at the end."""

from __future__ import annotations

import logging
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves  # Lightning finds loaders with it, too

from .._lightning import Callback, LightningModule, Trainer, drop_logged, is_logging_step, logged_step, passed_loaders
from ..datasets.file_dataset import FileDataset
from ..errors import H5ValueError, listing
from ..loading import H5DataLoader, what_limits
from ..metrics import Loader, LoaderMetrics, datasets_of
from ..options.base import check_whole
from ..options.keywords import checks_keywords
from ..readers import usable_cores
from .loader_cost import LoaderCost, cost_remark
from .meters import Meter, StageTotals, TransferTimer, over_ranks
from .summary_table import stage_table

__all__ = ["H5StatsMonitor"]

logger = logging.getLogger(__name__)

IN_PROGRESS_BAR = ("samples_per_second", "wait_fraction")


@checks_keywords
class H5StatsMonitor(Callback):
    """Report throughput, the time that training waits for data, and the setting to change.

    The data modules of this package insert it themselves; pass your own to set its options. It works with any number
    of loggers; without a logger it only prints the table. Sums are exact and include all ranks, except in prediction,
    which some ranks may skip: there, rank 0 shows its own figures.
    :class:`lightning_h5.metrics.LoaderMetrics` computes the figures.

    Under torch's own ``DataLoader`` over a dataset of this package, rows and bytes are counted, but waiting is not
    measured, and its figures are left out. If no loader of a stage reads a dataset of this package, the stage logs no
    figures, and one message explains why.

    The figures are logged every ``log_every_n_steps`` optimizer steps, for the time since the last log, and for each
    epoch with the suffix ``_epoch``. They have Lightning's step numbers. If Lightning logs at the same step, they are
    part of its row:

    - ``h5/samples_per_second``: rows delivered to training, per second.
    - ``h5/read_mib_per_second``: MiB read from files, per second (an estimate if the HDF5 library reads).
    - ``h5/decoded_mib_per_second``: MiB after decoding, per second.
    - ``h5/wait_fraction``: share of the time spent waiting for a batch, including transforms in this process; 0 to 1.
    - ``h5/wait_ms``: average waiting time for a batch, in milliseconds.
    - ``h5/cache_hit_rate``: share of requested data that was in memory (recently used rows, decoded chunks, or rows
      held whole); 0 to 1.
    - ``h5/cache_mib``: MiB of rows in memory, over all ranks and workers.
    - ``h5/origin_mib``: MiB read from the origin, the slow storage, of staged files; this figure and the next three are
      logged only if files are staged.
    - ``h5/origin_requests``: number of requests to the origin.
    - ``h5/origin_wait_ms``: average time that reading a batch waited for the origin, in milliseconds, summed over
      threads.
    - ``h5/mirror_hit_rate``: share of the requested bytes that were in the mirror; 0 to 1.
    - ``h5/transfer_ms``: average time to copy a batch to the device, in milliseconds; not on the CPU.
    - ``h5/share/NAME``: share of a mixture's source in the rows, 0 to 1.
    - ``h5/expected_share/NAME``: the source's expected share.

    Rows that are read ahead count for the epoch in which they are read.

    The table at the end shows these figures for each stage. It adds the waiting share of the slowest rank, the 95th
    percentile of the waiting time, the median and 99th percentile of the request time to the origin, the cost of
    loading (see ``measure_cost``), and a sentence with the bottleneck and the remedy. Samples that ``on_bad_row`` left
    out are counted, and the first of them are named with their causes. Figures that are 0 in all stages are left out,
    as is the hit rate if all rows are held in memory.

    Args:
        log_every_n_steps: number of optimizer steps between logs; accumulating gradients does not count. None uses the
            trainer's value.
        print_summary: print the table when a stage ends, on rank 0.
        prefix: prefix of all keys.
        progress_bar: show rows per second and the waiting share in the progress bar as well.
        slow_batch_seconds: log a batch that took longer than this, with its step, through Python's logging, on the
            rank that waits. The default is far above the time of reading and far below a time limit; None turns it off.
        measure_cost: in the first 10 epochs, read some 20 batches (at most 1 s, 0.5 % of the run and 256 MiB) before
            training on them, and compare the time of these steps with the others; the table shows the cost of loading.
            The batches and their order do not change. Nothing is measured if figures are logged more often than every
            24 steps.

    Raises:
        H5ValueError: ``log_every_n_steps`` is below 1, or ``slow_batch_seconds`` is not above 0.

    Cost:
        Some 15 microseconds per batch, including a log every 50 steps (0.8 % of the time at 500 batches per second; two
        cores, 2026-11-22). One collective of some thirty numbers per log, and none in between.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        print_summary: bool = True,
        prefix: str = "h5/",
        *,
        progress_bar: bool = False,
        slow_batch_seconds: float | None = 10.0,
        measure_cost: bool = True,
    ) -> None:
        check_whole(log_every_n_steps, "log_every_n_steps", 1)
        if slow_batch_seconds is not None and not slow_batch_seconds > 0:
            raise H5ValueError(f"slow_batch_seconds={slow_batch_seconds} was given. Pass seconds above 0, or None.")
        self.log_every_n_steps = log_every_n_steps
        self.print_summary = print_summary
        self.prefix = prefix
        self.progress_bar = progress_bar
        self.slow_batch_seconds = slow_batch_seconds
        self.measure_cost = measure_cost
        self._meters: dict[str, Meter] = {}
        self._training: list[H5DataLoader] = []  # loaders of this epoch
        self._transfer: TransferTimer | None = None
        self._cost: LoaderCost | None = None
        self._logged: tuple[str, ...] = ()  # names that the previous batch logged
        self._before = StageTotals()  # counts of datasets before a method of the trainer
        self._has_explained = False  # whether the reason for missing figures was logged

    # Training ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record earlier counts of the datasets in loaders that were passed to the trainer."""
        self._before = StageTotals(*[loader for loader in passed_loaders(trainer) if datasets_of(loader)])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop earlier figures, so that a second fit does not include the first one's."""
        self._meters, self._logged = {}, ()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock here: Lightning does not call the epoch's hook if a run resumes in the middle of an epoch."""
        self._begin("train", trainer)
        self._training = _own_loaders(trainer)
        if self.measure_cost and self._cost is None:
            seconds = (self.slow_batch_seconds or math.inf) / 2  # longer waits would be logged as slow batches
            self._cost = LoaderCost(trainer.strategy.root_device, self._every(trainer), seconds)
        if self._transfer is None and trainer.strategy.root_device.type != "cpu":
            self._transfer = TransferTimer(trainer.strategy)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look up the epoch's loaders, which may be new ones."""
        self._training = _own_loaders(trainer)
        if self._cost is not None:
            self._cost.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Log a batch that took too long."""
        limit = self.slow_batch_seconds
        if limit is None:
            return
        for loader in self._training:
            if (waited := loader.waits.last) > limit:
                loader.waits.last = 0.0  # report once, even if another loader's batch is next
                self._meters["train"].n_slow += 1
                logger.warning(
                    "rank %d waited %.1f s for batch %d of epoch %d (step %d); more than slow_batch_seconds=%g.",
                    trainer.global_rank,
                    waited,
                    batch_idx,
                    trainer.current_epoch,
                    logged_step(trainer),
                    limit,
                )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log if the figures are due."""
        if self._cost is not None:
            self._cost.step(self._training)
        drop_logged(trainer, "on_train_batch_end", self._logged)
        self._logged = ()
        every = self._every(trainer)
        # Both are the same on all ranks, which synchronize in `_figures`.
        if "train" not in self._meters or not every or not is_logging_step(trainer, every):
            return
        step = logged_step(trainer)
        named_figures = self._named(self._figures(trainer, self._meters["train"].by_step))
        bar_names = {self.prefix + name for name in IN_PROGRESS_BAR if self.progress_bar}
        for name, value in named_figures.items():  # the same on all ranks by now
            pl_module.log(
                name, value, prog_bar=name in bar_names, logger=bool(trainer.loggers), on_step=True, batch_size=1
            )
        self._logged = tuple(named_figures)
        if not is_logging_step(trainer):  # otherwise Lightning writes them itself after this hook
            for trainer_logger in trainer.loggers:
                trainer_logger.log_metrics(named_figures, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's figures."""
        # A progress bar on rank 0 reads the logged values in this hook, before or after this callback, which reduces
        # them over all ranks. So all ranks read them here, in the same collective.
        _ = trainer.progress_bar_metrics
        if "train" not in self._meters:
            return
        figures = self._figures(trainer, self._meters["train"].by_epoch)
        # The value is already the same on all ranks, but Lightning wants `sync_dist`, and reduces again when the value
        # is read. All ranks read it here, before any of them starts another collective.
        for name, value in self._named(figures).items():
            pl_module.log(f"{name}_epoch", value, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        _ = trainer.progress_bar_metrics

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        self._end(trainer, "train", "validate")

    # Evaluation ----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the training clock and start the validation clock."""
        if "train" in self._meters:
            self._meters["train"].stop()
        if self._cost is not None:
            self._cost.pause()
        if not trainer.sanity_checking:
            self._begin("validate", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the training clock again; print the table if nothing trains."""
        if trainer.sanity_checking:
            return
        if "validate" in self._meters:
            self._meters["validate"].stop()
        if "train" in self._meters and trainer.state.fn == "fit":
            self._meters["train"].start()
        else:
            self._end(trainer, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._begin("test", trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        self._end(trainer, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._begin("predict", trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        self._end(trainer, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the strategy, and release the loaders."""
        if self._transfer is not None:
            self._transfer.remove()
        self._transfer, self._training, self._cost = None, [], None
        self._meters = {}  # an interrupted stage must not count for the next one

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Call ``teardown``, which Lightning does not call after an error."""
        self.teardown(trainer, pl_module, "")

    # Parts ---------------------------------------------------------------------------------------------------

    def _every(self, trainer: Trainer) -> int:
        """Return the number of steps between two logs; 0 for none."""
        return self.log_every_n_steps or int(getattr(trainer, "log_every_n_steps", 50))  # not declared by Lightning

    def _begin(self, stage: str, trainer: Trainer) -> None:
        loaders = _loaders(trainer, stage)
        if stage not in self._meters:
            if not loaders:
                self._explain(stage, trainer)
                return
            self._meters[stage] = Meter(loaders, self._before, has_collectives=trainer.world_size > 1)
        self._meters[stage].start()

    def _explain(self, stage: str, trainer: Trainer) -> None:
        """Log once why a stage has no figures."""
        if not self._has_explained and trainer.is_global_zero:
            self._has_explained = True
            logger.warning(
                "H5StatsMonitor logs no figures of %r: none of its loaders reads a dataset of lightning_h5. Use a data "
                "module or create_optimized_dataloader, or remove the callback.",
                stage,
            )

    def _figures(self, trainer: Trainer, metric: LoaderMetrics) -> dict[str, float]:
        """Return the figures of training since the last call for this metric, over all ranks."""
        meter, loaders = self._meters["train"], _loaders(trainer, "train")
        if self._transfer is not None:
            meter.add_transfer(self._transfer.seconds())
        figures = meter.log(metric, loaders)
        expected = meter.expected_shares(metric, loaders)
        return figures | {name: share for name, share in expected.items() if name.removeprefix("expected_") in figures}

    def _named(self, figures: Mapping[str, float]) -> dict[str, float]:
        return {self.prefix + name: value for name, value in figures.items()}

    def _end(self, trainer: Trainer, *stages: str) -> None:
        """Print the table of the stages, and drop their meters."""
        ranks: dict[str, list[dict[str, float]]] = {}
        limit, cost, alone, left_out = None, None, list[str](), dict[str, None]()
        for stage in stages:
            if (meter := self._meters.pop(stage, None)) is None:
                continue
            meter.stop()
            loaders = _loaders(trainer, stage)
            if stage == "train" and self._transfer is not None:
                meter.add_transfer(self._transfer.seconds())
            meter.whole.update(*loaders)
            amounts = meter.whole.counts() | {"n_slow": float(meter.n_slow), "memory": _peak_memory()}
            if stage == "train" and self._cost is not None:
                amounts |= self._cost.amounts()
            # A rank without batches skips the loop and this hook, so other ranks would wait for it in a collective.
            has_idle_rank = any(isinstance(loader, H5DataLoader) and loader.sampler.has_idle_rank for loader in loaders)
            if trainer.world_size > 1 and (stage == "predict" or has_idle_rank):
                alone.append(stage)
            own = trainer.world_size == 1 or stage in alone
            sums, ranks[stage] = over_ranks(amounts, trainer.strategy.root_device, own=own)
            limit = limit or _limit_of(stage, sums, loaders)
            if "n_held_steps" in sums:
                cost = cost_remark(sums)
            left_out |= dict.fromkeys(
                dataset.bad_rows.remark() for loader in loaders for dataset in datasets_of(loader)
            )
        if ranks and self.print_summary and trainer.is_global_zero:
            remarks = [*_remarks(ranks, self.slow_batch_seconds), *filter(None, [*left_out, cost, limit])]
            scope = "" if trainer.world_size == 1 else ", on rank 0" if len(alone) == len(ranks) else ", over all ranks"
            if alone and len(alone) < len(ranks):
                remarks.append(f"{listing(alone)}: on rank 0 alone, since another rank has no batches.")
            sys.stdout.write(stage_table(f"lightning_h5: rows from HDF5{scope}", ranks, remarks))
            sys.stdout.flush()


def _loaders(trainer: Trainer, stage: str) -> list[Loader]:
    """Return the loaders of a stage that read datasets of this package, however the user nested them."""
    attribute = {"train": "train_dataloader", "validate": "val_dataloaders"}.get(stage, f"{stage}_dataloaders")
    return [loader for loader in tree_leaves(getattr(trainer, attribute)) if datasets_of(loader)]


def _own_loaders(trainer: Trainer) -> list[H5DataLoader]:
    """Return this package's loaders of training, which measure waiting."""
    return [loader for loader in _loaders(trainer, "train") if isinstance(loader, H5DataLoader)]


def _limit_of(stage: str, amounts: Mapping[str, float], every_loader: Sequence[Loader]) -> str | None:
    """Return the bottleneck of a stage, as a remark; None if a loader did not measure waiting."""
    loaders = [loader for loader in every_loader if isinstance(loader, H5DataLoader)]
    if len(loaders) < len(every_loader):
        return None
    n_workers = max((loader.num_workers for loader in loaders), default=0)
    to_keep = _to_keep(loaders) if stage == "train" else None  # other stages read each row once
    limit = what_limits(amounts, n_workers=n_workers, n_cores=usable_cores(), to_keep=to_keep)
    return None if limit is None else f"{stage}: {limit.text}"


def _to_keep(loaders: list[H5DataLoader]) -> str:
    """Return the argument that keeps all decoded rows of training in memory; empty if they fit."""
    missing = []  # bytes of all rows, and the argument to raise, for each loader with too small a cache
    for loader in loaders:
        dataset = loader.dataset
        if not isinstance(dataset, FileDataset):  # sources of a mixture share `shuffle.buffer` otherwise
            return "shuffle.buffer that holds all"
        all_bytes = dataset.cost.decoded_bytes * max(1, loader.num_workers)  # each worker has a cache of its own
        if dataset.cache_bytes < all_bytes:
            # The cache has the size of `shuffle.buffer` only if rows are shuffled and no other size was requested.
            is_own = loader.dataset.asked_cache_bytes is not None or loader.sampler.present_order().mode == "none"
            missing.append((all_bytes, "files.cache_bytes" if is_own else "shuffle.buffer"))
    all_bytes, name = max(missing, default=(0, ""))
    return name and f"{name}='{-(-all_bytes >> 20)} MiB' holds all"


def _remarks(ranks: Mapping[str, list[dict[str, float]]], slow_seconds: float | None) -> list[str]:
    """Return remarks on slow batches, and on the memory of the largest rank."""
    amounts = [rank for stage in ranks.values() for rank in stage]
    n_slow = sum(rank["n_slow"] for rank in amounts)
    batches = f"{n_slow:,.0f} batch{'es' if n_slow != 1 else ''}"
    slow = [f"{batches} took longer than {slow_seconds:g} s to arrive; the log has the steps."] if n_slow else []
    memory = max(rank["memory"] for rank in amounts) / 2**20
    return [f"peak memory of a rank's main process: {memory:,.0f} MiB", *slow]


def _peak_memory() -> float:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

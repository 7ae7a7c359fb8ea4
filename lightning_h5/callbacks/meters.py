"""Counts of a stage, on one rank and over all ranks, and the time of copies to a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed

from ..counters import Counters, RequestTimes, WaitTimes
from ..loading import H5DataLoader
from ..metrics import Loader, LoaderMetrics, gather_ranks
from ..order import PlanSampler

__all__ = ["REQUESTS", "WAITS", "Meter", "StageTotals", "TransferTimer", "over_ranks"]

WAITS = tuple(f"waits {at}" for at in range(WaitTimes.N_CLASSES))
"""Names of the classes of waiting times among a stage's amounts."""

REQUESTS = tuple(f"requests {at}" for at in range(RequestTimes.N_CLASSES))
"""Names of the classes of request times to an origin."""


class StageTotals(LoaderMetrics):
    """Counts of a whole stage, with histograms of waiting times and of request times to an origin."""

    @staticmethod
    def _totals(counters: Counters) -> dict[str, float]:
        return counters.total() | dict(zip(REQUESTS, counters.request_times().tolist(), strict=True))

    def _added(self, loader: Loader) -> dict[str, float]:
        amounts = dict.fromkeys(WAITS, 0.0) | super()._added(loader)
        if isinstance(loader, H5DataLoader):
            amounts |= self._since_mark(loader.waits, dict(zip(WAITS, map(float, loader.waits.counts), strict=True)))
        return amounts


class Meter:
    """Counts of one stage: since the last log by step, since the last log by epoch, and since the start of the stage.

    Args:
        loaders: the stage's loaders; earlier counts of loaders of this package are left out.
        before: counts before the loaders started. Workers of torch's own loaders read ahead of the stage's start.
        has_collectives: sum over ranks; False if this rank is alone, or if other ranks may skip the stage.

    Attributes:
        by_step: figures since the last log by step.
        by_epoch: figures since the last log by epoch.
        whole: counts since the start of the stage.
        n_slow: number of batches with a long wait.
    """

    def __init__(self, loaders: Sequence[Loader], before: LoaderMetrics, *, has_collectives: bool) -> None:
        own_loaders = [loader for loader in loaders if isinstance(loader, H5DataLoader)]
        self.by_step = LoaderMetrics(*own_loaders, sync_on_compute=has_collectives)
        self.by_epoch = LoaderMetrics(*own_loaders, sync_on_compute=has_collectives)
        self.whole = StageTotals(*own_loaders, sync_on_compute=False)
        for metric in self._metrics:
            metric.count_since(before)
        self.n_slow = 0
        self._transfer_seconds = 0.0
        self._logged_units: dict[tuple[bool, PlanSampler], int] = {}  # of the run, by kind of figures and loader

    def start(self) -> None:
        """Start the clock; has no effect if it runs."""
        for metric in self._metrics:
            metric.start()

    def stop(self) -> None:
        """Stop the clock; has no effect if it is stopped."""
        for metric in self._metrics:
            metric.stop()

    def add_transfer(self, seconds: float) -> None:
        """Count the time of copies to the device.

        Args:
            seconds: the time of all copies since the stage began.
        """
        added, self._transfer_seconds = seconds - self._transfer_seconds, seconds
        for metric in self._metrics:
            metric.add(transfer_seconds=added)

    def log(self, metric: LoaderMetrics, loaders: Sequence[Loader]) -> dict[str, float]:
        """Return the figures of ``by_step`` or ``by_epoch``, over all ranks, and begin the next interval."""
        metric.update(*loaders)
        figures = {name: float(value) for name, value in metric.compute().items()}
        metric.reset()
        return figures

    def expected_shares(self, metric: LoaderMetrics, loaders: Iterable[Loader]) -> dict[str, float]:
        """Return the expected share of each source of a mixture since the last call, by the names of the figures.

        Args:
            metric: ``by_step`` or ``by_epoch``.
            loaders: the stage's loaders.
        """
        shares: dict[str, float] = {}
        for loader in loaders:
            if not isinstance(loader, H5DataLoader):
                continue
            sampler, progress, units = loader.sampler, loader.passes.last, (0, 1)
            if sampler.recipe.continues and progress is not None:
                key = metric is self.by_step, sampler
                start = self._logged_units.get(key, sampler.unit(progress.began))
                stop = sampler.unit(progress.began.after(sampler, progress.n_given))
                self._logged_units[key], units = stop, (start, max(stop, start + 1))
            expected = sampler.recipe.expected_shares(sampler.present_order(), drop_last=sampler.drop_last, units=units)
            shares |= {f"expected_share/{name}": share for name, share in expected.items()}
        return shares

    @property
    def _metrics(self) -> tuple[LoaderMetrics, ...]:
        return self.by_step, self.by_epoch, self.whole


class TransferTimer:
    """Times the copies of a strategy to its device, without waiting for the device.

    Users may override every Lightning hook around this copy, so the strategy's method is wrapped while a stage runs. On
    CUDA the timer records events in the stream of the copies, and reads them once the copies have ended. On other
    devices it times the call, which is correct if the call waits for the copy.

    Args:
        strategy: the strategy of a Trainer.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._has_events = strategy.root_device.type == "cuda"
        self._seconds = 0.0
        self._copies: deque[tuple[Any, Any]] = deque()  # start and end events of copies that may still run
        copy = strategy.batch_to_device

        def timed(*arguments: Any, **named: Any) -> Any:
            began = self._now()
            copied = copy(*arguments, **named)
            self._copies.append((began, self._now()))
            self.seconds()  # keeps the queue short
            return copied

        strategy.batch_to_device = timed

    def _now(self) -> Any:
        if not self._has_events:
            return perf_counter()
        event = cast("Any", torch.cuda.Event)(enable_timing=True)  # not annotated in torch
        event.record()
        return event

    def seconds(self) -> float:
        """Return the seconds of all copies that have finished."""
        while self._copies and (not self._has_events or self._copies[0][1].query()):
            first, last = self._copies.popleft()
            self._seconds += first.elapsed_time(last) / 1000 if self._has_events else last - first
        return self._seconds

    def remove(self) -> None:
        """Restore the strategy's own method."""
        self._strategy.__dict__.pop("batch_to_device", None)


def over_ranks(
    amounts: Mapping[str, float], device: torch.device, *, own: bool = False
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the sums over all ranks, and the amounts of each rank, with one collective.

    All ranks must call it with the same names in the same order, except with ``own``.

    Args:
        amounts: amounts of this rank.
        device: device of the collective.
        own: return only this rank's amounts, without a collective.
    """
    values = torch.tensor(list(amounts.values()), dtype=torch.float64)
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    gathered = gather_ranks(values, device) if is_distributed and not own else [values]
    ranks = [dict(zip(amounts, rank.tolist(), strict=True)) for rank in gathered]
    return {name: sum(rank[name] for rank in ranks) for name in amounts}, ranks

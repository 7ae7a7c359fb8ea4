"""What a stage counted on one rank, and the same of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torchmetrics import Metric

from ..loading import H5DataLoader
from ..stats import COUNTED, WaitTimes

__all__ = ["WAITS", "Meter", "over_ranks"]

WAITS = tuple(f"waits {at}" for at in range(WaitTimes.N_CLASSES))
"""Names of the classes of waiting times among a stage's amounts."""


@dataclass
class Meter:
    """Totals of one stage: counters of its loaders, and how long it ran.

    Attributes:
        seconds: that it ran, while it does not run.
        transfer_seconds: that copying batches to the device took.
        n_slow: batches that were waited for too long.
        baseline: what loaders had counted before the stage began.
    """

    seconds: float = 0.0
    transfer_seconds: float = 0.0
    n_slow: int = 0
    baseline: dict[str, float] = field(default_factory=dict)
    at_lap: dict[str, float] = field(default_factory=dict)
    at_epoch: dict[str, float] = field(default_factory=dict)
    _running_since: float | None = None

    @classmethod
    def of(cls, loaders: Iterable[H5DataLoader]) -> Meter:
        """A meter that begins with what these loaders have counted so far."""
        meter = cls()
        meter.baseline = meter.now(loaders, waits=True)
        meter.at_lap, meter.at_epoch = dict(meter.baseline), dict(meter.baseline)
        return meter

    def start(self) -> None:
        """Runs on; does nothing where it runs."""
        self._running_since = self._running_since or perf_counter()

    def stop(self) -> None:
        """Stands still; does nothing where it does."""
        if self._running_since is not None:
            self.seconds += perf_counter() - self._running_since
            self._running_since = None

    def now(self, loaders: Iterable[H5DataLoader], *, waits: bool = False) -> dict[str, float]:
        """Totals so far; ``bytes_given`` are those of the rows that were handed out.

        Args:
            loaders: of the stage.
            waits: how many batches took how long, as well.
        """
        if self._running_since is not None:
            self.stop()
            self.start()
        sums = dict.fromkeys((*COUNTED, "bytes_given"), 0.0)
        counts = [0.0] * len(WAITS)
        for loader in loaders:
            total = loader.counters.total()
            for name, amount in total.items():
                sums[name] = sums.get(name, 0.0) + amount
            sums["bytes_given"] += total["rows"] * loader.dataset.row_bytes
            if waits:
                counts = [a + b for a, b in zip(counts, loader.waits.counts, strict=True)]
        sums |= {"seconds": self.seconds, "transfer_seconds": self.transfer_seconds, "n_slow": float(self.n_slow)}
        return sums | dict(zip(WAITS, counts, strict=True)) if waits else sums

    def since(
        self, mark: Mapping[str, float], loaders: Sequence[H5DataLoader], *, waits: bool = False
    ) -> tuple[dict[str, float], dict[str, float]]:
        """What was counted since a mark, and a mark for the next time. Bytes that are kept are those of now.

        Args:
            mark: what ``now`` gave then.
            loaders: of the stage.
            waits: see ``now``.
        """
        now = self.now(loaders, waits=waits)
        amounts = {name: value - mark.get(name, 0.0) for name, value in now.items()}
        amounts["kept_bytes"] = float(sum(loader.kept_bytes for loader in loaders))
        return amounts, now


class _RankTotals(Metric):
    """A vector of each rank; the sums are formed from it, exactly, with the ranks' own beside them."""

    full_state_update = False
    totals: torch.Tensor

    def __init__(self, n: int, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("totals", torch.zeros(n, dtype=torch.float64), dist_reduce_fx=None)

    def update(self, totals: torch.Tensor) -> None:
        self.totals = totals

    def compute(self) -> torch.Tensor:
        return self.totals if self.totals.ndim == 2 else self.totals[None]


def over_ranks(
    amounts: Mapping[str, float], device: torch.device, *, own: bool = False
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Sums over all ranks, in one collective; and each rank's amounts.

    All ranks call it with the same names in the same order, unless ``own``.

    Args:
        amounts: this rank's.
        device: where collectives run.
        own: ask nobody else.
    """
    values = torch.tensor(list(amounts.values()), dtype=torch.float64)
    metric = _RankTotals(len(amounts), sync_on_compute=not own)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and not own:
        metric, values = metric.to(device), values.to(device)
    metric.update(values)
    totals = metric.compute().cpu()
    each = [dict(zip(amounts, rank, strict=True)) for rank in totals.tolist()]
    return dict(zip(amounts, totals.sum(dim=0).tolist(), strict=True)), each

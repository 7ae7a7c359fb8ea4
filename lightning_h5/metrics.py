"""Throughput, waiting and caching of loaders as torchmetrics metrics, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, Subset
from torchmetrics import Metric

from .counters import COUNTED, Counters
from .datasets import RowDataset, rows_of
from .errors import H5ValueError
from .loading import H5DataLoader

__all__ = [
    "CacheHitRate",
    "CacheMib",
    "DecodedMibPerSecond",
    "LoaderMetrics",
    "ReadMibPerSecond",
    "SamplesPerSecond",
    "WaitFraction",
    "WaitMs",
    "datasets_of",
    "figures_of",
    "gather_ranks",
    "waiting_share",
]

MIB = 1 << 20
ROWS_OF = rows_of("")

Loader = H5DataLoader | DataLoader[Any] | RowDataset


# What is counted ----------------------------------------------------------------------------------------------------


def datasets_of(loader: object) -> list[RowDataset]:
    """Return the datasets of this package that a loader reads; empty if it reads none.

    Args:
        loader: a loader of this package, or torch's ``DataLoader`` over a dataset of this package, or over subsets and
            concatenations of them; or such a dataset.
    """
    if isinstance(loader, RowDataset):
        return [loader]
    if isinstance(loader, DataLoader | Subset):
        return datasets_of(loader.dataset)
    if isinstance(loader, ConcatDataset | ChainDataset):
        parts: Iterable[Dataset[Any]] = loader.datasets
        return list(dict.fromkeys(dataset for part in parts for dataset in datasets_of(part)))
    return []


STANDARD = (*COUNTED, "bytes_given", "seconds", "transfer_seconds", "is_staged", "timed_loaders")
"""Amounts of every metric. Mixtures add the rows of their sources."""


class _Marks(WeakKeyDictionary[Any, dict[str, float]]):
    """Counts at the last update, by counters or loader. A copy in another process starts without any."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Marks, ()


# Metrics ------------------------------------------------------------------------------------------------------------


class LoaderMetrics(Metric):
    """All figures of loaders as one metric, which ranks sum in one collective.

    ``update`` adds the loaders' counts since the last update, and the time since then. ``compute`` returns the figures
    since the last ``reset``, over all ranks::

        metrics = LoaderMetrics(loader)
        for epoch in range(n_epochs):
            for batch in loader:
                train(batch)
            metrics.update(loader)
            print(metrics.compute()["samples_per_second"])
            metrics.reset()

    :class:`H5StatsMonitor` logs the same figures:

    - ``samples_per_second``: rows that the loaders returned, per second.
    - ``read_mib_per_second``: MiB read from files, per second (an estimate if the HDF5 library reads).
    - ``decoded_mib_per_second``: MiB after decoding, per second.
    - ``wait_fraction``: share of the time that was spent waiting for a batch, 0 to 1.
    - ``wait_ms``: average waiting time for a batch, in milliseconds.
    - ``cache_hit_rate``: share of the requested rows or chunks that was in memory, 0 to 1.
    - ``cache_mib``: MiB of rows in memory at the last update, over all ranks and workers.
    - ``share/NAME``: share of a mixture's source in the rows, 0 to 1.
    - ``origin_mib``, ``origin_requests``, ``origin_wait_ms``, ``mirror_hit_rate``: only if files are staged.

    Waiting is measured by loaders of this package. Under torch's own ``DataLoader`` over a dataset of this package the
    two figures of waiting are left out.

    Args:
        *loaders: loaders, or datasets, whose earlier counts are left out. A loader that ``update`` receives for the
            first time counts from its creation on.
        sync_on_compute: sum over the ranks of ``torch.distributed``, if it is initialized. All ranks must call
            ``compute`` then.

    Raises:
        H5ValueError: a loader reads no dataset of this package.

    Cost:
        ``update`` takes some 20 microseconds a loader, ``compute`` one collective of some thirty numbers.
    """

    amounts: torch.Tensor
    full_state_update = False

    def __init__(self, *loaders: Loader, sync_on_compute: bool = True) -> None:
        super().__init__(sync_on_compute=sync_on_compute, dist_sync_fn=_gathered)
        self.add_state("amounts", torch.zeros(len(STANDARD), dtype=torch.float64), dist_reduce_fx="sum")
        self.names: tuple[str, ...] = STANDARD
        self._marks = _Marks()
        for loader in loaders:
            self._added(loader)
        self._running_since: float | None = perf_counter()

    def start(self) -> None:
        """Start the clock; has no effect if it runs, as it does from the beginning."""
        if self._running_since is None:
            self._running_since = perf_counter()

    def stop(self) -> None:
        """Stop the clock, for time that should not count, such as validation; has no effect if it is stopped."""
        self._add({"seconds": self._elapsed()})
        self._running_since = None

    def update(self, *loaders: Loader) -> None:
        """Add the loaders' counts since the last update.

        Args:
            *loaders: loaders, or datasets.

        Raises:
            H5ValueError: a loader reads no dataset of this package.
        """
        amounts = {"seconds": self._elapsed()}
        gauges: dict[str, float] = {"kept_bytes": 0.0, "is_staged": 0.0, "timed_loaders": 0.0}
        for loader in loaders:
            for name, amount in self._added(loader).items():
                amounts[name] = amounts.get(name, 0.0) + amount
            for dataset in datasets_of(loader):
                counts = dataset.counters.total()
                gauges["kept_bytes"] += dataset.kept_bytes + counts["kept_bytes"]
                gauges["is_staged"] = max(gauges["is_staged"], float(_staged_bytes(counts) > 0))
            gauges["timed_loaders"] += isinstance(loader, H5DataLoader)
        self._add(amounts, gauges)

    def add(self, **amounts: float) -> None:
        """Add to amounts that loaders do not count, such as ``transfer_seconds``; on all ranks to the same ones."""
        self._add(amounts)

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the figures since the last ``reset``, by name, as scalars of float64."""
        figures = figures_of(self.counts(), _world_size() if self._is_synced else 1)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}

    def forward(self, *loaders: Loader) -> Any:
        """Update, and return this rank's figures since the last ``reset``."""
        self.update(*loaders)
        to_sync, self._to_sync = self._to_sync, False
        figures: Any = self.compute()
        self._to_sync, self._computed, self._forward_cache = to_sync, None, figures
        return figures

    def counts(self) -> dict[str, float]:
        """Return the amounts since the last ``reset`` by name, from which the figures are computed."""
        return dict(zip(self.names, self.amounts.tolist(), strict=True))

    def count_since(self, earlier: LoaderMetrics) -> None:
        """Let datasets that this metric does not know count from the last update of another metric on."""
        for source, totals in earlier._marks.items():
            self._marks.setdefault(source, totals)

    def _elapsed(self) -> float:
        """Return the seconds since the last call, and count from now on; 0 if the clock is stopped."""
        if self._running_since is None:
            return 0.0
        now = perf_counter()
        elapsed, self._running_since = now - self._running_since, now
        return elapsed

    def _added(self, loader: Loader) -> dict[str, float]:
        """Return the amounts that a loader and its datasets counted since the last call."""
        datasets = datasets_of(loader)
        if not datasets:
            raise H5ValueError(
                f"{loader!r:.200} reads no dataset of lightning_h5, so there is nothing to count. Pass a loader of "
                "this package, a torch DataLoader over one of its datasets, or such a dataset."
            )
        amounts = {"bytes_given": 0.0}
        for dataset in datasets:
            counts = self._since_mark(dataset.counters, self._totals(dataset.counters))
            if not isinstance(loader, H5DataLoader):
                counts |= {"rows": counts["direct_rows"], "batches": counts["direct_batches"]}
            for name, amount in counts.items():
                amounts[name] = amounts.get(name, 0.0) + amount
            amounts["bytes_given"] += counts["rows"] * dataset.cost.row_bytes
        return amounts

    @staticmethod
    def _totals(counters: Counters) -> dict[str, float]:
        """Return the counts of a process and its workers since the start."""
        return counters.total()

    def _since_mark(self, source: object, totals: dict[str, float]) -> dict[str, float]:
        """Return the increase of a source's totals since the last call."""
        mark = self._marks.get(source, {})
        self._marks[source] = totals
        return {name: total - mark.get(name, 0.0) for name, total in totals.items() if name != "kept_bytes"}

    def _add(self, amounts: Mapping[str, float], gauges: Mapping[str, float] | None = None) -> None:
        """Add amounts to the state, and set amounts that are not summed over time."""
        counts = self.counts()
        for name, amount in amounts.items():
            counts[name] = counts.get(name, 0.0) + amount
        counts |= gauges or {}
        self.names = tuple(counts)
        self.amounts = torch.tensor([*counts.values()], dtype=torch.float64, device=self.amounts.device)
        self._computed = None

    def reset(self) -> None:
        """Begin a new interval, at the last update."""
        super().reset()
        self.names = STANDARD


class _Figure(LoaderMetrics):
    """One figure of :class:`LoaderMetrics`, as a scalar that ``LightningModule.log`` accepts."""

    figure: ClassVar[str]

    def compute(self) -> torch.Tensor:  # type: ignore[override]  # one of the figures
        """Return the figure since the last ``reset``, as a scalar of float64; NaN if it was not measured."""
        return super().compute().get(self.figure, torch.tensor(torch.nan, dtype=torch.float64))


class SamplesPerSecond(_Figure):
    """Rows that loaders returned, per second, over all ranks. See :class:`LoaderMetrics`."""

    figure = "samples_per_second"
    higher_is_better = True


class ReadMibPerSecond(_Figure):
    """MiB read from files, per second, over all ranks. See :class:`LoaderMetrics`."""

    figure = "read_mib_per_second"


class DecodedMibPerSecond(_Figure):
    """Decoded MiB per second, over all ranks. See :class:`LoaderMetrics`."""

    figure = "decoded_mib_per_second"


class WaitFraction(_Figure):
    """Share of the time that was spent waiting for a batch, 0 to 1. See :class:`LoaderMetrics`."""

    figure = "wait_fraction"
    higher_is_better = False


class WaitMs(_Figure):
    """Milliseconds of waiting for a batch, on average. See :class:`LoaderMetrics`."""

    figure = "wait_ms"
    higher_is_better = False


class CacheHitRate(_Figure):
    """Share of the requested rows or chunks that was in memory, 0 to 1. See :class:`LoaderMetrics`."""

    figure = "cache_hit_rate"
    higher_is_better = True


class CacheMib(_Figure):
    """MiB of rows in memory at the last update, over all ranks and workers. See :class:`LoaderMetrics`."""

    figure = "cache_mib"


# Sums and figures ---------------------------------------------------------------------------------------------------


def gather_ranks(values: torch.Tensor, device: torch.device | None = None) -> list[torch.Tensor]:
    """Return the values of all ranks, from one collective; they have the same shape on all ranks.

    Args:
        values: this rank's values.
        device: device of the collective; None for the values' own, or the current GPU under NCCL.
    """
    if device is None:
        is_on_gpu = torch.distributed.get_backend() == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else values.device
    local_values = values.to(device)
    ranks = [torch.empty_like(local_values) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, local_values)
    return [rank.to(values.device) for rank in ranks]


def _gathered(values: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Gather as torchmetrics asks for; its own function takes three collectives, since shapes may differ."""
    return gather_ranks(values)


def _world_size() -> int:
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_initialized else 1


def figures_of(amounts: Mapping[str, float], n_ranks: int) -> dict[str, float]:
    """Return rates over all ranks. Seconds were summed over ranks as well, so a rank's mean time counts.

    Figures of an origin are left out if nothing is staged, figures of waiting and of copies to a device if nothing
    measured them, and shares if the rows are not of a mixture with names.

    Args:
        amounts: sums over ranks.
        n_ranks: number of ranks.
    """
    seconds = max(amounts["seconds"] / max(1, n_ranks), 1e-9)
    figures = {
        "samples_per_second": amounts["rows"] / seconds,
        "read_mib_per_second": amounts["bytes_read"] / MIB / seconds,
        "decoded_mib_per_second": amounts["bytes_decoded"] / MIB / seconds,
    }
    if amounts.get("timed_loaders", 1.0):
        figures |= {
            "wait_fraction": waiting_share(amounts),
            "wait_ms": 1000 * amounts["wait_seconds"] / max(1.0, amounts["batches"]),
        }
    figures |= {"cache_hit_rate": _hit_rate(amounts), "cache_mib": amounts["kept_bytes"] / MIB}
    if amounts["transfer_seconds"]:
        figures["transfer_ms"] = 1000 * amounts["transfer_seconds"] / max(1.0, amounts["batches"])
    rows = {name: amount for name, amount in amounts.items() if name.startswith(ROWS_OF)}
    for name, amount in rows.items():
        figures[f"share/{name.removeprefix(ROWS_OF)}"] = amount / max(1.0, sum(rows.values()))
    if not amounts["is_staged"]:
        return figures
    return figures | {
        "origin_mib": amounts["origin_bytes"] / MIB,
        "origin_requests": amounts["origin_requests"],
        "origin_wait_ms": 1000 * amounts["origin_seconds"] / max(1.0, amounts["batches"]),
        # Granules of a mirror are larger than the first request, and bytes are fetched ahead for later requests.
        "mirror_hit_rate": max(0.0, 1 - amounts["origin_bytes"] / max(1.0, _staged_bytes(amounts))),
    }


def waiting_share(amounts: Mapping[str, float]) -> float:
    """Return the share of the time that was spent waiting for batches."""
    return min(1.0, amounts["wait_seconds"] / max(amounts["seconds"], 1e-9))


def _staged_bytes(amounts: Mapping[str, float]) -> float:
    """Return the bytes of staged files that readers needed, wherever they were read."""
    return amounts["mirror_bytes"] + amounts["missed_bytes"]


def _hit_rate(amounts: Mapping[str, float]) -> float:
    """Return the share of requests served from memory: recently used rows, decoded chunks, or rows held whole."""
    lookups, blocks_used, bytes_given = (
        amounts["cache_hits"] + amounts["cache_misses"],
        amounts["blocks_used"],
        amounts["bytes_given"],
    )
    row_hit_rate = amounts["cache_hits"] / lookups if lookups else 0.0
    n_missing, n_total = (
        (amounts["blocks_loaded"], blocks_used) if blocks_used else (amounts["bytes_decoded"], bytes_given)
    )
    block_hit_rate = 1 - n_missing / n_total if n_total else 0.0
    return row_hit_rate + (1 - row_hit_rate) * max(0.0, block_hit_rate)

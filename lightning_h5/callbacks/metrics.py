"""What a stage counted on one rank and on all, and the figures and table made from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from shutil import get_terminal_size
from textwrap import wrap
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
import torch.distributed

from ..counters import COUNTED, RequestTimes, WaitTimes
from ..datasets import rows_of
from ..loading import H5DataLoader

__all__ = [
    "REQUESTS",
    "WAITS",
    "Meter",
    "TransferTimer",
    "difference",
    "figures_of",
    "over_ranks",
    "shares_of",
    "table_of",
]

WAITS = tuple(f"waits {at}" for at in range(WaitTimes.N_CLASSES))
"""Names of the classes of waiting times among a stage's amounts."""

REQUESTS = tuple(f"requests {at}" for at in range(RequestTimes.N_CLASSES))
"""Names of the classes of the times that requests to an origin took."""


@dataclass
class Meter:
    """Totals of one stage: counters of its loaders, and how long it ran.

    Attributes:
        seconds: that it ran, up to the last ``stop``.
        transfer_seconds: that copying batches to the device took.
        n_slow: batches that were waited for too long.
        baseline: what loaders had counted before the stage began, times of waiting and of requests included.
        at_lap: counts when figures were last logged by step.
        at_epoch: counts when figures were last logged by epoch.
    """

    seconds: float = 0.0
    transfer_seconds: float = 0.0
    n_slow: int = 0
    baseline: dict[str, float] = field(default_factory=dict)
    at_lap: dict[str, float] = field(default_factory=dict)
    at_epoch: dict[str, float] = field(default_factory=dict)
    _running_since: float | None = None

    @classmethod
    def of(cls, loaders: Sequence[H5DataLoader]) -> Meter:
        """Return a meter that starts from the present counts of these loaders."""
        meter = cls()
        meter.at_lap = meter.at_epoch = meter.now(loaders)
        meter.baseline = meter.at_lap | times_of(loaders)
        return meter

    def start(self) -> None:
        """Start the clock; has no effect if it runs."""
        self._running_since = self._running_since or perf_counter()

    def stop(self) -> None:
        """Stop the clock; has no effect if it stands."""
        if self._running_since is not None:
            self.seconds += perf_counter() - self._running_since
            self._running_since = None

    def now(self, loaders: Iterable[H5DataLoader]) -> dict[str, float]:
        """Return the totals so far; ``bytes_given`` are those of the rows that were handed out."""
        if self._running_since is not None:
            self.stop()
            self.start()
        sums = dict.fromkeys((*COUNTED, "bytes_given"), 0.0)
        for loader in loaders:
            total = loader.counters.total()
            for name, amount in total.items():
                sums[name] = sums.get(name, 0.0) + amount
            sums["bytes_given"] += total["rows"] * loader.dataset.cost.row_bytes
        of_stage = {"seconds": self.seconds, "transfer_seconds": self.transfer_seconds, "n_slow": float(self.n_slow)}
        return sums | of_stage

    def whole(self, loaders: Sequence[H5DataLoader]) -> dict[str, float]:
        """Return the counts of the whole stage, including times of waiting and of requests."""
        return difference(self.baseline, self.now(loaders) | times_of(loaders), loaders)


def difference(
    mark: Mapping[str, float], now: Mapping[str, float], loaders: Iterable[H5DataLoader]
) -> dict[str, float]:
    """Return the counts since a mark, but the present number of kept bytes; ``is_staged`` if a mirror was ever read.

    Args:
        mark: what a meter's ``now`` returned then.
        now: what it returned now.
        loaders: of the stage.
    """
    amounts = {name: value - mark.get(name, 0.0) for name, value in now.items()}
    kept_bytes = sum(loader.kept_bytes for loader in loaders)
    return amounts | {"kept_bytes": float(kept_bytes), "is_staged": float(_staged_bytes(now) > 0)}


def times_of(loaders: Iterable[H5DataLoader]) -> dict[str, float]:
    """Return how many batches were waited for how long, and how many requests took how long, by the names of both."""
    waits, requests = np.zeros(len(WAITS)), np.zeros(len(REQUESTS))
    for loader in loaders:
        waits += loader.waits.counts
        requests += loader.counters.request_times()
    return dict(zip((*WAITS, *REQUESTS), [*waits.tolist(), *requests.tolist()], strict=True))


class TransferTimer:
    """Times what a strategy copies to its device, without waiting for the device.

    Lightning has no hook around that copy that a user's own may not take; so the strategy's method is wrapped for as
    long as a stage runs. On CUDA it records events in the stream of the copies, which are read once they are over. On
    other devices it takes the time of the call, which is right if the call waits for the copy.

    Args:
        strategy: a Trainer's.
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
        """Return the seconds of all copies that are known to be over."""
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
    """Return the sums over all ranks, from one collective; and each rank's amounts.

    All ranks call it with the same names in the same order, unless ``own``.

    Args:
        amounts: this rank's.
        device: where collectives run.
        own: use this rank's amounts alone.
    """
    values = torch.tensor(list(amounts.values()), dtype=torch.float64)
    totals = [values]
    if torch.distributed.is_available() and torch.distributed.is_initialized() and not own:
        values = values.to(device)
        totals = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(totals, values)
    each = [dict(zip(amounts, rank.tolist(), strict=True)) for rank in totals]
    return {name: sum(rank[name] for rank in each) for name in amounts}, each


MIB = 1 << 20

WIDTH = 100  # maximum line length of remarks
ALWAYS = ("batches", "rows", "seconds", "rows/s")
TRIVIAL = frozenset(("0", "0.0%", "-"))
READ, DECODED = "MiB/s read", "MiB/s decoded"


def figures_of(amounts: Mapping[str, float], n_ranks: int) -> dict[str, float]:
    """Return rates over all ranks. Seconds were summed over ranks as well, so a rank's mean time counts.

    Figures of an origin are there only if something is staged.

    Args:
        amounts: sums over ranks.
        n_ranks: number of ranks.
    """
    seconds = max(amounts["seconds"] / max(1, n_ranks), 1e-9)
    figures = {
        "samples_per_second": amounts["rows"] / seconds,
        "read_mib_per_second": amounts["bytes_read"] / MIB / seconds,
        "decoded_mib_per_second": amounts["bytes_decoded"] / MIB / seconds,
        "wait_fraction": _waiting(amounts),
        "wait_ms": 1000 * amounts["wait_seconds"] / max(1.0, amounts["batches"]),
        "cache_hit_rate": _hit_rate(amounts),
        "cache_mib": amounts["kept_bytes"] / MIB,
    }
    if not amounts["is_staged"]:
        return figures
    return figures | {
        "origin_mib": amounts["origin_bytes"] / MIB,
        "origin_requests": amounts["origin_requests"],
        "origin_wait_ms": 1000 * amounts["origin_seconds"] / max(1.0, amounts["batches"]),
        # Granules of a mirror are larger than what was needed first; and what is fetched ahead is needed later.
        "mirror_hit_rate": max(0.0, 1 - amounts["origin_bytes"] / max(1.0, _staged_bytes(amounts))),
    }


def _staged_bytes(amounts: Mapping[str, float]) -> float:
    """Return the bytes of files that are staged that readers needed, wherever they got them."""
    return amounts["mirror_bytes"] + amounts["missed_bytes"]


def _waiting(amounts: Mapping[str, float]) -> float:
    return min(1.0, amounts["wait_seconds"] / max(amounts["seconds"], 1e-9))


def _hit_rate(amounts: Mapping[str, float]) -> float:
    """Return the share of requests served from memory: recently used rows, decoded chunks, or rows held whole."""
    asked, used, given = amounts["cache_hits"] + amounts["cache_misses"], amounts["blocks_used"], amounts["bytes_given"]
    used_last = amounts["cache_hits"] / asked if asked else 0.0
    missing, of = (amounts["blocks_loaded"], used) if used else (amounts["bytes_decoded"], given)
    there = 1 - missing / of if of else 0.0
    return used_last + (1 - used_last) * max(0.0, there)


def shares_of(amounts: Mapping[str, float], loaders: Iterable[H5DataLoader]) -> dict[str, float]:
    """Return the share of rows that each source of a mixture had, and was to have."""
    shares: dict[str, float] = {}
    for loader in loaders:
        sampler = loader.sampler
        expected = sampler.recipe.expected_shares(sampler.batch_size, drop_last=sampler.drop_last)
        counted = {name: amounts[rows_of(name)] for name in expected if rows_of(name) in amounts}
        for name, n_rows in counted.items():  # empty if sources have no names
            shares[f"share/{name}"] = n_rows / max(1.0, sum(counted.values()))
            shares[f"expected_share/{name}"] = expected[name]
    return shares


def table_of(title: str, stages: Mapping[str, Sequence[Mapping[str, float]]], remarks: Sequence[str]) -> str:
    """Return the table that is printed at the end: a column for each stage, a line for each figure.

    Figures that are 0 in all stages are left out, and so are decoded bytes if none were compressed. Remarks are wrapped
    at the width of the terminal, 100 columns at most.

    Args:
        title: the line above it.
        stages: for each stage what each rank counted, waiting times included.
        remarks: lines below the table.
    """
    columns = [_column(ranks) for ranks in stages.values()]
    lines = [("", *stages)]
    for name in columns[0]:
        cells = [column[name] for column in columns]
        is_trivial = TRIVIAL.issuperset(cells) or (name == DECODED and cells == [column[READ] for column in columns])
        if name in ALWAYS or not is_trivial:
            lines.append((name, *cells))
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    rule = "-" * max(len(title), *map(len, text))
    width = max(len(rule), min(WIDTH, get_terminal_size((WIDTH, 24)).columns))
    below = [line for remark in remarks for line in wrap(remark, width, subsequent_indent="  ", break_long_words=False)]
    return "\n".join(["", title, rule, text[0], rule, *text[1:], rule, *below, ""])


def _column(ranks: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return a stage's figures by name."""
    amounts = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    figures = figures_of(amounts, len(ranks))
    most, worst = max((_waiting(rank), -number) for number, rank in enumerate(ranks))
    # A hit rate is meaningless if all rows are held, or none.
    has_cache = amounts["cache_hits"] + amounts["cache_misses"] + amounts["blocks_used"] > 0
    p95 = WaitTimes.quantile([amounts[name] for name in WAITS], 0.95)
    p50, p99 = (RequestTimes.quantile([amounts[name] for name in REQUESTS], share) for share in (0.5, 0.99))
    return {
        "batches": f"{amounts['batches']:,.0f}",
        "rows": f"{amounts['rows']:,.0f}",
        "seconds": _number(amounts["seconds"] / len(ranks)),
        "rows/s": f"{figures['samples_per_second']:,.0f}",
        READ: _number(figures["read_mib_per_second"]),
        DECODED: _number(figures["decoded_mib_per_second"]),
        "waiting for data": f"{figures['wait_fraction']:.1%}",
        "waiting, worst rank": f"{most:.1%} (rank {-worst})" if len(ranks) > 1 and most >= 0.0005 else "-",
        "wait per batch, ms": _number(figures["wait_ms"]),
        "wait, 95th percentile, ms": _number(1000 * p95),
        "cache hits": f"{figures['cache_hit_rate']:.1%}" if has_cache else "-",
        "rows in memory, MiB": _number(figures["cache_mib"]),
        "from the origin, MiB": _number(figures.get("origin_mib", 0.0)),
        "requests to the origin": f"{figures.get('origin_requests', 0.0):,.0f}",
        "request, median, ms": _number(1000 * p50),
        "request, 99th percentile, ms": _number(1000 * p99),
        "in the mirror": f"{figures['mirror_hit_rate']:.1%}" if amounts["is_staged"] else "-",
    }


def _number(value: float) -> str:
    """Return a number to three digits; only 0 is written as 0."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return "<0.01" if value < 0.01 else f"{value:.{1 if value >= 10 else 2}f}"

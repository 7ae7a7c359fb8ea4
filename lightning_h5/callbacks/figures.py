"""From what was counted to figures, and to the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

from ..datasets import rows_of
from ..loading import H5DataLoader
from ..sampling import MixtureRecipe
from ..stats import WaitTimes
from .meters import WAITS

__all__ = ["figures_of", "shares_of", "table_of"]

MIB = 1 << 20

HEADS = (
    "stage",
    "batches",
    "rows",
    "seconds",
    "rows/s",
    "MiB/s read",
    "MiB/s decoded",
    "waiting",
    "worst rank",
    "ms a batch",
    "ms p95",
    "in cache",
    "cache MiB",
)
WIDTH = 100  # of remarks, at least
SLOWEST = HEADS.index("worst rank")


def figures_of(amounts: Mapping[str, float], n_ranks: int) -> dict[str, float]:
    """Rates over all ranks. Seconds were summed over ranks as well, so a rank's mean time counts.

    Args:
        amounts: sums over ranks.
        n_ranks: so many.
    """
    seconds = max(amounts["seconds"] / max(1, n_ranks), 1e-9)
    return {
        "samples_per_second": amounts["rows"] / seconds,
        "read_mib_per_second": amounts["bytes_read"] / MIB / seconds,
        "decoded_mib_per_second": amounts["bytes_decoded"] / MIB / seconds,
        "wait_fraction": _waiting(amounts),
        "wait_ms": 1000 * amounts["wait_seconds"] / max(1.0, amounts["batches"]),
        "cache_hit_rate": _hit_rate(amounts),
        "cache_mib": amounts["kept_bytes"] / MIB,
    }


def _waiting(amounts: Mapping[str, float]) -> float:
    return min(1.0, amounts["wait_seconds"] / max(amounts["seconds"], 1e-9))


def _hit_rate(amounts: Mapping[str, float]) -> float:
    """Share of what was asked for that was in memory: among rows used last, in decoded slabs, or held whole."""
    asked, used, given = amounts["cache_hits"] + amounts["cache_misses"], amounts["slabs_used"], amounts["bytes_given"]
    used_last = amounts["cache_hits"] / asked if asked else 0.0
    missing, of = (amounts["slabs_loaded"], used) if used else (amounts["bytes_decoded"], given)
    there = 1 - missing / of if of else 0.0
    return used_last + (1 - used_last) * max(0.0, there)


def shares_of(amounts: Mapping[str, float], loaders: Iterable[H5DataLoader]) -> dict[str, float]:
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


def table_of(stages: Mapping[str, Sequence[Mapping[str, float]]], whose: str, remarks: Sequence[str]) -> str:
    """The table at the end.

    Args:
        stages: for each stage what each rank counted, waiting times included.
        whose: ranks the figures are of, in words.
        remarks: lines below the table.
    """
    rows = [HEADS, *(_line(stage, ranks) for stage, ranks in stages.items())]
    if all(len(ranks) == 1 for ranks in stages.values()):  # it would say the same as the column before it
        rows = [(*row[:SLOWEST], *row[SLOWEST + 1 :]) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    rule = "-" * len(text[0])
    width = max(WIDTH, len(rule))
    below = [line for remark in remarks for line in wrap(remark, width, subsequent_indent="  ")]
    lines = ["", f"lightning_h5: rows from HDF5, {whose}", rule, text[0], rule, *text[1:], rule, *below, ""]
    return "\n".join(lines)


def _line(stage: str, ranks: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    amounts = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    figures = figures_of(amounts, len(ranks))
    waiting = [_waiting(rank) for rank in ranks]
    slowest = max(range(len(ranks)), key=lambda rank: waiting[rank])
    p95 = WaitTimes.quantile([amounts[name] for name in WAITS], 0.95)
    return (
        stage,
        f"{amounts['batches']:,.0f}",
        f"{amounts['rows']:,.0f}",
        f"{amounts['seconds'] / len(ranks):,.1f}",
        f"{figures['samples_per_second']:,.0f}",
        f"{figures['read_mib_per_second']:,.1f}",
        f"{figures['decoded_mib_per_second']:,.1f}",
        f"{figures['wait_fraction']:.1%}",
        f"{waiting[slowest]:.1%}" + (f" ({slowest})" if len(ranks) > 1 else ""),
        f"{figures['wait_ms']:.2f}",
        f"{1000 * p95:.2f}",
        f"{figures['cache_hit_rate']:.1%}",
        f"{figures['cache_mib']:,.1f}",
    )

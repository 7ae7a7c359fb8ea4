"""The table of a stage's figures that is printed at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from textwrap import wrap

from ..counters import RequestTimes, WaitTimes
from ..metrics import figures_of, waiting_share
from .meters import REQUESTS, WAITS

__all__ = ["stage_table"]

WIDTH = 100  # maximum line length of remarks
ALWAYS = ("batches", "rows", "seconds", "rows/s")
TRIVIAL = frozenset(("0", "0.0%", "-"))
READ, DECODED = "MiB/s read", "MiB/s decoded"


def stage_table(title: str, stages: Mapping[str, Sequence[Mapping[str, float]]], remarks: Sequence[str]) -> str:
    """Format the table that is printed at the end: a column for each stage, a line for each figure.

    Figures that are 0 in all stages are left out, as are decoded bytes if no data is compressed. Remarks are wrapped at
    the width of the terminal, at most 100 columns.

    Args:
        title: the line above the table.
        stages: for each stage the counts of each rank, including waiting times.
        remarks: lines below the table.
    """
    columns = [_stage_column(ranks) for ranks in stages.values()]
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
    remark_lines = [
        line for remark in remarks for line in wrap(remark, width, subsequent_indent="  ", break_long_words=False)
    ]
    return "\n".join(["", title, rule, text[0], rule, *text[1:], rule, *remark_lines, ""])


def _stage_column(ranks: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return a stage's figures by name."""
    amounts = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    figures = figures_of(amounts, len(ranks))
    share, worst = max((waiting_share(rank), -number) for number, rank in enumerate(ranks))
    # A hit rate is meaningless if all rows are held, or none.
    has_cache = amounts["cache_hits"] + amounts["cache_misses"] + amounts["blocks_used"] > 0
    p95 = WaitTimes.quantile([amounts[name] for name in WAITS], 0.95)
    p50, p99 = (RequestTimes.quantile([amounts[name] for name in REQUESTS], share) for share in (0.5, 0.99))
    return {
        "batches": f"{amounts['batches']:,.0f}",
        "rows": f"{amounts['rows']:,.0f}",
        "seconds": _three_digits(amounts["seconds"] / len(ranks)),
        "rows/s": f"{figures['samples_per_second']:,.0f}",
        "samples left out": f"{amounts['left_out']:,.0f}",
        READ: _three_digits(figures["read_mib_per_second"]),
        DECODED: _three_digits(figures["decoded_mib_per_second"]),
        "waiting for data": f"{figures['wait_fraction']:.1%}" if "wait_fraction" in figures else "-",
        "waiting, worst rank": f"{share:.1%} (rank {-worst})" if len(ranks) > 1 and share >= 0.0005 else "-",
        "wait per batch, ms": _three_digits(figures["wait_ms"]) if "wait_ms" in figures else "-",
        "wait, 95th percentile, ms": _three_digits(1000 * p95),
        "cache hits": f"{figures['cache_hit_rate']:.1%}" if has_cache else "-",
        "rows in memory, MiB": _three_digits(figures["cache_mib"]),
        "from the origin, MiB": _three_digits(figures.get("origin_mib", 0.0)),
        "requests to the origin": f"{figures.get('origin_requests', 0.0):,.0f}",
        "request, median, ms": _three_digits(1000 * p50),
        "request, 99th percentile, ms": _three_digits(1000 * p99),
        "in the mirror": f"{figures['mirror_hit_rate']:.1%}" if amounts["is_staged"] else "-",
    }


def _three_digits(value: float) -> str:
    """Return a number to three digits; only 0 is written as 0."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return "<0.01" if value < 0.01 else f"{value:.{1 if value >= 10 else 2}f}"

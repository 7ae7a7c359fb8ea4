"""Which of the settings that were measured to take: the simplest that is about as fast as the fastest."""

from __future__ import annotations

from collections.abc import Mapping

from .contenders import BenchRows, Contender

__all__ = ["NEARLY", "choose", "reasons_for"]

NEARLY = 0.95
"""Who has this share of the fastest one's rows a second is as fast: runs differ by as much."""

MUCH = 0.25
"""A larger spread than this says more of the machine than of the settings."""


def choose(rates: Mapping[Contender, float]) -> Contender:
    """The simplest contender that is about as fast as the fastest.

    Simplest first: on demand without worker processes, then ``mmap``, then more ``shuffle_bytes``, then all rows in
    memory; the same with worker processes after that. The plain recipe has no settings to choose.

    Args:
        rates: rows a second of each, one of a data module among them.
    """
    ours = {contender: rate for contender, rate in rates.items() if contender.way != "plain"}
    fastest = max(ours.values())
    return min((contender for contender, rate in ours.items() if rate >= NEARLY * fastest), key=lambda each: each.rank)


def reasons_for(
    chosen: Contender, rates: Mapping[Contender, float], rows: BenchRows, *, spread: float = 0.0
) -> tuple[str, ...]:
    """Why a contender was chosen, and what to know of it, in sentences.

    Args:
        chosen: the contender.
        rates: rows a second of each.
        rows: what was read.
        spread: by how much the figures of one contender differ, over their median; the largest of all.
    """
    ours = {contender: rate for contender, rate in rates.items() if contender.way != "plain"}
    fastest = max(ours, key=lambda each: ours[each])
    if chosen == fastest:
        found = [f"{chosen.name} is the fastest: {ours[chosen]:,.0f} rows/s."]
    else:
        share = 100 * ours[chosen] / ours[fastest]
        why = f"the simplest that has {100 * NEARLY:.0f} % or more of what the fastest has ({fastest.name})"
        found = [f"{chosen.name} is {why}: {share:.0f} %, {ours[chosen]:,.0f} rows/s."]
    found += _to_know(chosen, rows)
    plain = max((rate for contender, rate in rates.items() if contender.way == "plain"), default=None)
    if plain and ours[chosen] < plain / NEARLY:
        word = "as fast" if ours[chosen] >= NEARLY * plain else "faster"
        found.append(
            f"The plain recipe is {word} here ({plain:,.0f} rows/s): a data module shards, resumes and shuffles, and "
            "gains no time."
        )
    if spread > MUCH:
        found.append(
            f"Rates of one and the same setting differ by {100 * spread:.0f} %: other programs use the machine. "
            "Measure again when it is quiet, or with more rounds."
        )
    return tuple(found)


def _to_know(chosen: Contender, rows: BenchRows) -> list[str]:
    found = []
    if chosen.mmap:
        found.append("mmap=True is for files that nobody truncates while they are read: that ends the process.")
    size = f"{chosen.memory(rows) / 2**20:,.0f} MiB"
    if chosen.way == "cached":
        found.append(f"All rows are loaded before the first step: {size}, of which several ranks hold a shard each.")
    elif chosen.keeps_rows(rows):
        found.append(f"All rows are decoded in the first epoch and stay in memory: {size} a rank.")
    if chosen.prefetch_factor is not None:
        found.append(
            f"prefetch_factor={chosen.prefetch_factor} has a thread copy rows ahead; without it all cores do when a "
            "batch is asked for, which is slow where other programs use them."
        )
    if not chosen.num_workers:
        found.append("Transforms were not measured: take num_workers where yours are slow.")
    return found

"""The results of compressed.py as Markdown, for the documentation.

python examples/benchmarks/page.py RESULTS.json > docs/_parts/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, PLAIN, LIMITS = "lightning_h5", "plain h5py", ("bare", "index_select")


def page(results: Mapping[str, Any]) -> str:
    """All cases, where others are faster, and what was measured with what."""
    parts = [setting(results), *map(case, results["results"]), losses(results["results"])]
    return "\n\n".join(parts) + "\n"


def setting(results: Mapping[str, Any]) -> str:
    """With what it was measured, in a sentence."""
    about = dict(results["environment"])
    day, cores = about.pop("date"), about.pop("cpus")
    versions = ", ".join(f"{name} {version}" for name, version in about.items() if name != "torch_threads")
    skipped = "".join(f" {name} is missing: {reason}." for name, reason in results["skipped"].items())
    return (
        f"{day}, {cores} cores, {results['rows']:,} rows, batches of {results['batch_size']}, all files in the page "
        f"cache, medians of {results['rounds']} rounds in one run. Versions: {versions}.{skipped}"
    )


def case(result: Mapping[str, Any]) -> str:
    """The tables of one array."""
    rows = medians(result)
    plain = max(rate for name, rate in rows.items() if name.startswith(PLAIN))
    stored = f"{result['stored_bytes'] / 2**20:,.0f} MiB in the file"
    if result["chunks"] is not None:
        stored += f", chunks ({', '.join(map(str, result['chunks']))}), {result['compression_ratio']:.2f} times smaller"
    rates = [
        (f"**{name}**" if name.startswith(OURS) else name, f"{rate:,.0f}", ratio(rate / plain))
        for name, rate in rows.items()
    ]
    ratios = [
        (
            each["name"],
            "" if each["target"] is None else ratio(each["target"]),
            ratio(each["seen"]),
            verdict(each["met"]),
        )
        for each in result["ratios"]
    ]
    return "\n\n".join(
        [
            f"### {result['rows_are'].capitalize()}, {result['title']}",
            f"{stored}.",
            table(("", "rows/s", "times plain h5py"), rates),
            table(("ratio", "target", "measured", ""), ratios),
        ]
    )


def losses(results: Sequence[Mapping[str, Any]]) -> str:
    """Who is faster than we are by default, and where."""
    found = list(_losses(results))
    return "\n\n".join(
        [
            "### Where others are faster",
            table(("array", "loader", "times ours"), found) if found else "Nowhere.",
        ]
    )


def _losses(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for result in results:
        rows = medians(result)
        ours = min(rate for name, rate in rows.items() if _team(result, name) == OURS)
        for name, rate in rows.items():
            if rate > ours and not name.startswith((OURS, *LIMITS)):
                yield f"{result['rows_are']}, {result['title']}", name, ratio(rate / ours)


def _team(result: Mapping[str, Any], name: str) -> str:
    return next(str(each["team"]) for each in result["contenders"] if each["name"] == name)


def medians(result: Mapping[str, Any]) -> dict[str, float]:
    """Rows a second of each contender."""
    return {each["name"]: statistics.median(each["rows_per_second"]) for each in result["contenders"]}


def ratio(value: float) -> str:
    """Two digits that mean something."""
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"


def verdict(met: bool | None) -> str:
    """The word for a target that is met, or not."""
    return {None: "", True: "met", False: "**missed**"}[met]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what compressed.py --json wrote")
    print(page(json.loads(parser.parse_args().results.read_text())), end="")

"""The chart of the front page: rows per second of three cases that `compressed.py` measured, on a logarithmic axis.

    python examples/benchmarks/speed_chart.py [RESULTS.json [CHART.svg]]

draws `docs/_static/speed.svg` from the figures of the benchmark page. The picture follows the reader's light or dark
theme. Dots and not bars, since a bar on a logarithmic axis has no honest length.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
CASES = {
    ("images", "gzip, 32 rows a chunk"): "Images 3x64x64 uint8, gzip, 32 rows per chunk",
    ("signals", "shuffle and gzip, 32 rows a chunk"): "Signals 4x1024 float32, shuffle + gzip, 32 rows per chunk",
    ("images", "contiguous"): "Images 3x64x64 uint8, contiguous",
}
TEAMS = {
    "plain h5py": ("plain h5py",),
    "mosaicml-streaming*": ("mosaicml-streaming",),
    "litdata*": ("litdata", "litdata with arrays"),
    "FFCV*": ("ffcv",),
    "lightning_h5": ("lightning_h5",),
    "lightning_h5, rows fit in memory": ("lightning_h5, 512 MiB",),
}
SLOWER_OF = "lightning_h5"  # counts with the slower of epochs 1 and 10; the others with their best number of workers
WIDTH, LEFT, RIGHT, LINE, HEAD, AXIS = 860, 270, 90, 22, 34, 62
LOWEST, HIGHEST = 100, 2_000_000
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2937 } .title { font-weight: 600 } .ours { font-weight: 600 }
.note, .tick { fill: #64748b; font-size: 13px } .grid { stroke: #e2e8f0 } .dot { fill: #64748b }
.dot.ours { fill: #c2410c } .page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .note, .tick { fill: #94a3b8 } .grid { stroke: #334155 } .dot { fill: #94a3b8 }
  .dot.ours { fill: #fb923c } .page { fill: #131416 }
}
"""


def x_of(rows_per_second: float) -> float:
    """The place of a figure on the axis."""
    share = math.log(rows_per_second / LOWEST) / math.log(HIGHEST / LOWEST)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Median rows per second of each team that took part in a case."""
    medians: dict[str, list[float]] = {}
    for each in result["contenders"]:
        medians.setdefault(each["team"], []).append(statistics.median(each["rows_per_second"]))
    found = {}
    for label, teams in TEAMS.items():
        if of_team := [figure for team in teams for figure in medians.get(team, [])]:
            found[label] = min(of_team) if label == SLOWER_OF else max(of_team)
    return found


def draw(results: Mapping[str, Any]) -> str:
    """Return the chart as SVG."""
    by_case = {(each["rows_are"], each["title"]): each for each in results["results"]}
    parts, y = [], 4
    for case, title in CASES.items():
        parts.append(f'<text class="title" x="0" y="{y + 16}">{escape(title)}</text>')
        y += HEAD - 8
        for label, figure in figures(by_case[case]).items():
            ours = " ours" if label.startswith("lightning_h5") else ""
            middle = y + LINE // 2
            parts.append(f'<text class="label{ours}" x="{LEFT - 14}" y="{middle + 4}" text-anchor="end">{label}</text>')
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{middle}" y2="{middle}"/>')
            parts.append(f'<circle class="dot{ours}" cx="{x_of(figure):.1f}" cy="{middle}" r="5.5"/>')
            parts.append(
                f'<text class="{ours.strip()}" x="{x_of(figure) + 11:.1f}" y="{middle + 4}">{figure:,.0f}</text>'
            )
            y += LINE
        y += 12
    ticks = [10**power for power in range(2, 7)]
    lines = [f'<line class="grid" x1="{x_of(n):.1f}" x2="{x_of(n):.1f}" y1="26" y2="{y}"/>' for n in ticks]
    texts = [f'<text class="tick" x="{x_of(n):.1f}" y="{y + 18}" text-anchor="middle">{n:,}</text>' for n in ticks]
    environment = results["environment"]
    notes = [
        "rows per second (logarithmic), shuffled epoch, batches of 64, two cores, files in the page cache, "
        f"{environment.get('date', '')}".rstrip(", "),
        "* reads a converted, uncompressed copy; the others read the HDF5 file as it is",
    ]
    said = [f'<text class="note" x="0" y="{y + 40 + 17 * at}">{escape(note)}</text>' for at, note in enumerate(notes)]
    height = y + AXIS + 4
    body = "\n".join([*lines, *parts, *texts, *said])
    label = "Rows per second of plain h5py, other loaders and lightning_h5"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">\n'
        f'<style>{STYLE}</style>\n<rect class="page" width="{WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    """Draw the chart."""
    given = [Path(each) for each in sys.argv[1:]]
    source, target = [*given, *[DOCS / "_parts" / "benchmarks.json", DOCS / "_static" / "speed.svg"][len(given) :]]
    target.write_text(draw(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()

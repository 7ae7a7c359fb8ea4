"""The charts of the benchmark page: a dot for each loader on a logarithmic axis, from a stored result.

Dots and not bars, since a bar on a logarithmic axis has no honest length. The picture follows the reader's light or
dark theme, and its text has at least 11 pixels on a screen of 390. `page.py` draws all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, LEFT, RIGHT, LINE, SHOWN = 400, 184, 70, 21, 480
STYLE = """
text { font: 12.5px system-ui, sans-serif; fill: #1f2937 } .title, .ours { font-weight: 600 }
.note, .tick { fill: #64748b } .grid { stroke: #e2e8f0 } .dot { fill: #64748b } .dot.ours { fill: #c2410c }
.page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .note, .tick { fill: #94a3b8 } .grid { stroke: #334155 } .dot { fill: #94a3b8 }
  .dot.ours { fill: #fb923c } .page { fill: #131416 }
}
"""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What is drawn of a result.

    Attributes:
        unit: of the figures.
        cases: titles of the cases that are drawn if they were measured, by name.
        labels: of the teams that are drawn, in their order.
        ours: teams of ours that others are compared with: the one with the same last word, or the slowest.
    """

    unit: str
    cases: Mapping[str, str]
    labels: Mapping[str, str]
    ours: tuple[str, ...] = ("lightning_h5",)


def medians(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the figure of each team: of ours the slowest way with the same settings, of others the fastest."""
    found: dict[str, list[float]] = {}
    for each in case["contenders"]:
        found.setdefault(each["team"], []).append(statistics.median(each["rows_per_second"]))
    return {team: min(rates) if team.startswith("lightning_h5") else max(rates) for team, rates in found.items()}


def draw(chart: Chart, result: Mapping[str, Any]) -> str:
    """Return a chart as SVG."""
    cases = {case["case"]: medians(case) for case in result["results"]}
    figures = {
        title: {label: cases[name][team] for team, label in chart.labels.items() if team in cases[name]}
        for name, title in chart.cases.items()
        if name in cases
    }
    rates = [rate for each in figures.values() for rate in each.values()]
    first, last = math.floor(math.log10(min(rates))), math.log10(max(rates))
    parts, y = [], 0

    def x_of(rate: float) -> float:
        return LEFT + (math.log10(rate) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    for title, by_label in figures.items():
        parts.append(f'<text class="title" x="0" y="{y + 15}">{escape(title)}</text>')
        y += 22
        for label, rate in by_label.items():
            ours = " ours" if label.startswith("lightning_h5") else ""
            x, middle = x_of(rate), y + LINE // 2
            parts += [
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{middle}" y2="{middle}"/>',
                f'<text class="label{ours}" x="{LEFT - 10}" y="{middle + 4}" text-anchor="end">{escape(label)}</text>',
                f'<circle class="dot{ours}" cx="{x:.1f}" cy="{middle}" r="5"/>',
                f'<text class="{ours.strip()}" x="{x + 9:.1f}" y="{middle + 4}">{rounded(rate)}</text>',
            ]
            y += LINE
        y += 12
    powers = range(first, math.floor(last) + 1)
    lines = [f'<line class="grid" x1="{x_of(10**n):.1f}" x2="{x_of(10**n):.1f}" y1="20" y2="{y}"/>' for n in powers]
    ticks = [
        f'<text class="tick" x="{x_of(10**n):.1f}" y="{y + 14}" text-anchor="middle">{short(10**n)}</text>'
        for n in powers
    ]
    notes = [f"{chart.unit}, logarithmic"]
    if any(label.endswith("*") for each in figures.values() for label in each):
        notes.append("* from a converted copy")
    said = [f'<text class="note" x="0" y="{y + 34 + 17 * at}">{escape(note)}</text>' for at, note in enumerate(notes)]
    height = y + 24 + 17 * len(notes)
    body = "\n".join([*lines, *parts, *ticks, *said])
    names = dict.fromkeys(name for by_label in figures.values() for name in by_label)
    label = f"{chart.unit.capitalize()} of {', '.join(names)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{SHOWN}" '
        f'height="{height * SHOWN // WIDTH}" role="img" aria-label="{escape(label)}">\n<style>{STYLE}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )


def rounded(rate: float) -> str:
    """Return a rate with three digits that mean something."""
    digits = max(0, math.floor(math.log10(rate)) - 2)
    return f"{round(rate / 10**digits) * 10**digits:,.0f}"


def short(power: int) -> str:
    """Return a power of ten as text for the axis."""
    return f"{power // 1_000_000}M" if power >= 1_000_000 else f"{power // 1000}k" if power >= 1000 else str(power)

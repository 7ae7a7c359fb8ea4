"""A chart of what `compressed.py` measured: a panel for each case, a bar for each contender, ours in colour.

    python examples/benchmarks/chart.py RESULTS.json CHART.png

draws a file of results again.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, PLAIN, LIMITS = "lightning_h5", "plain h5py", ("bare", "index_select")
COLOURS = {"ours": "#c2410c", "theirs": "#94a3b8", "limit": "#e2e8f0"}
N_COLUMNS = 2
BAR_INCHES, PANEL_INCHES = 0.27, 0.55
STYLE: Any = {
    "font.size": 9,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.spines.bottom": False,
    "svg.fonttype": "none",
}


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws all cases into a picture; its format follows from the file's name."""
    bars = [best_of_each_team(result["contenders"]) for result in results]
    lines = [list(range(start, min(start + N_COLUMNS, len(bars)))) for start in range(0, len(bars), N_COLUMNS)]
    most = [max(len(bars[i]) for i in line) for line in lines]
    with mpl.rc_context(STYLE):
        n_columns = min(N_COLUMNS, len(bars))
        figure = Figure(
            figsize=(6.8 * n_columns, sum(PANEL_INCHES + BAR_INCHES * n for n in most) + 0.5), layout="constrained"
        )
        panels = figure.subplots(len(lines), n_columns, squeeze=False, gridspec_kw={"height_ratios": most})
        for i, axes in enumerate(panels.flat):
            if i < len(bars):
                panel(axes, f"{results[i]['rows_are']}, {results[i]['title']}", bars[i])
                axes.set_ylim(
                    max(len(bars[j]) for j in lines[i // N_COLUMNS]) - 0.4, -0.6
                )  # bars as thick as in the other panel
            else:
                axes.set_axis_off()
        figure.supxlabel(
            "Rows a second (median of the rounds) and how many times the plain recipe. Pale: limits, which only "
            "decode, read or copy.\nOthers with their better number of workers; litdata, mosaicml-streaming and "
            "ffcv read a converted, uncompressed copy.",
            fontsize=9,
            color="#475569",
        )
        figure.savefig(path, dpi=130)


def best_of_each_team(contenders: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median rows a second by name: all of ours, and of others the better of each team."""
    medians = {each["name"]: statistics.median(each["rows_per_second"]) for each in contenders}
    best: dict[str, str] = {}
    for each in contenders:
        name = each["name"]
        team = name if name.startswith(OURS) else each["team"]
        if team not in best or medians[name] > medians[best[team]]:
            best[team] = name
    return {name: medians[name] for name in best.values()}


def panel(axes: Axes, title: str, bars: Mapping[str, float]) -> None:
    """The bars of a case from the fastest to the slowest, each with its rows a second and times the plain recipe."""
    names = sorted(bars, key=bars.__getitem__, reverse=True)
    plain = next((bars[name] for name in names if name.startswith(PLAIN)), None)
    colours = [COLOURS[kind_of(name)] for name in names]
    axes.barh(range(len(names)), [bars[name] for name in names], color=colours, height=0.78)
    longest = max(bars.values())
    for at, name in enumerate(names):
        ratio = (
            f"   \N{MULTIPLICATION SIGN}{rounded(bars[name] / plain)}" if plain and name[: len(PLAIN)] != PLAIN else ""
        )
        axes.text(
            bars[name] + 0.012 * longest,
            at,
            f"{bars[name]:,.0f}{ratio}",
            va="center",
            color=COLOURS["ours"] if kind_of(name) == "ours" else "#475569",
            fontweight="bold" if kind_of(name) == "ours" else "normal",
        )
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if kind_of(name) == "ours" else "normal")
    axes.set_xlim(0, 1.4 * longest)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")


def rounded(ratio: float) -> str:
    """A ratio with two digits, or all before the point."""
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


def kind_of(name: str) -> str:
    """Whose bar it is."""
    if name.startswith(OURS):
        return "ours"
    return "limit" if name.startswith(LIMITS) else "theirs"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["results"], Path(sys.argv[2]))

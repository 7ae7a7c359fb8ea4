"""A run's figures as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import H5Error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["chart_of"]

BLUE, RED, GRAY = "#2b6cb0", "#c53030", "#4a5568"


def chart_of(history: Sequence[tuple[int, Mapping[str, float]]]) -> Figure:
    """Rows a second, waiting, and MiB a second over the steps of a run.

    Args:
        history: for each time that figures were logged the global step, and the figures without prefix.

    Raises:
        H5Error: matplotlib is not installed.
    """
    try:
        figure: Any = import_module("matplotlib.figure").Figure(figsize=(8, 7), layout="constrained")
        import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)  # saves without a display
    except ImportError as error:
        raise H5Error(
            f"a plot needs matplotlib, which is not installed ({error}). Run `pip install 'lightning-h5[plot]'`."
        ) from error
    steps = [step for step, _ in history]
    rows, waiting, mib = figure.subplots(3, 1, sharex=True)

    def line(axes: Any, name: str, **style: Any) -> None:
        axes.plot(steps, [figures[name] for _, figures in history], marker="." if len(steps) < 60 else "", **style)

    line(rows, "samples_per_second", color=BLUE)
    rows.set_ylabel("rows a second")
    line(waiting, "wait_fraction", color=RED)
    waiting.set_ylabel("share of time waiting")
    waiting.set_ylim(0, 1)
    line(mib, "read_mib_per_second", color=GRAY, label="read")
    line(mib, "decoded_mib_per_second", color=BLUE, label="decoded")
    mib.set_ylabel("MiB a second")
    mib.set_xlabel("step")
    mib.legend(frameon=False)
    for axes in (rows, waiting, mib):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    rows.set_title("Rows from HDF5", loc="left")
    made: Figure = figure
    return made

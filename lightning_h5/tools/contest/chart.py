"""A benchmark as bars, and the picture that ``bench --plot`` writes."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...errors import H5Error, H5FileError, H5ValueError, listing
from ...types import PathLike
from ..bench import BenchReport
from ..safe_output import new_file, refuse_existing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["chart_of_bench", "check_chart", "save_chart"]

BLUE, GRAY, DARK = "#2b6cb0", "#a0aec0", "#4a5568"
FORMATS = (".pdf", ".png", ".svg")


def check_chart(target: PathLike) -> None:
    """Makes sure that a picture can be written, before an hour goes into what it shows.

    Raises:
        H5ValueError: its name ends in no format that is known.
        H5FileError: it is there already, or its folder is missing or closed to us.
        H5Error: matplotlib is not installed.
    """
    name = os.fspath(target)
    if not name.casefold().endswith(FORMATS):
        raise H5ValueError(f"the picture {name!r} ends in no format that is known; there are {listing(FORMATS)}.")
    refuse_existing(name)
    _new_figure(1)


def save_chart(report: BenchReport, target: PathLike) -> None:
    """Writes the picture of a benchmark; a file that is there is never written over.

    Args:
        report: the benchmark.
        target: a name that ends in .png, .svg or .pdf.

    Raises:
        H5Error: see ``check_chart``; or the disk is full.
    """
    name = os.fspath(target)
    check_chart(name)
    figure: Any = chart_of_bench(report)
    try:
        with new_file(name) as partial:
            figure.savefig(partial, format=name.rpartition(".")[2].casefold(), dpi=150)
    except H5Error:
        raise
    except OSError as error:
        raise H5FileError(f"the picture {name!r} cannot be written: {error.strerror}. Make room.") from error


def chart_of_bench(report: BenchReport) -> Figure:
    """Bars of rows a second, the one that is advised in colour; lines from the slowest time to the fastest.

    Args:
        report: the benchmark.

    Raises:
        H5Error: matplotlib is not installed.
    """
    results = report.results[::-1]  # bars begin at the bottom
    figure: Any = _new_figure(1.6 + 0.42 * len(results))
    axes = figure.subplots()
    medians = [result.rows_per_second for result in results]
    axes.barh(
        [result.name for result in results],
        medians,
        xerr=[
            [result.rows_per_second - min(result.rates) for result in results],
            [max(result.rates) - result.rows_per_second for result in results],
        ],
        color=[BLUE if result.name == report.chosen else GRAY for result in results],
        error_kw={"ecolor": DARK, "elinewidth": 1},
    )
    for at, result in enumerate(results):
        times = (
            f" ({result.times_plain:,.{1 if result.times_plain < 10 else 0}f} x)"
            if result.times_plain and result.datamodule
            else ""
        )
        axes.annotate(
            f"{result.rows_per_second:,.0f}{times}",
            (max(result.rates), at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=DARK,
            fontsize=9,
        )
    axes.set_xlim(0, 1.4 * max(max(result.rates) for result in results))  # room for the figures beside the bars
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"rows a second, batches of {report.batch_size}")
    axes.set_title(f"{os.path.basename(report.files[0])}: {report.n_rows:,} rows", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    made: Figure = figure
    return made


def _new_figure(height: float) -> Any:
    try:
        figure: Any = import_module("matplotlib.figure").Figure(figsize=(9, height), layout="constrained")
        import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)  # saves without a display
    except ImportError as error:
        raise H5Error(
            f"a plot needs matplotlib, which is not installed ({error}). Run `pip install 'lightning-h5[plot]'`."
        ) from error
    return figure

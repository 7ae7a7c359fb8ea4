"""``bench``: how fast rows come from one's own files on this machine, and the settings to take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

from ..tools.bench import BenchReport, BenchResult, bench_file
from ..tools.contest.chart import check_chart, save_chart
from .terminal import bold, bytes_text, faint, table, write, write_json

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = (
    "Measures how fast shuffled batches come from your files on this machine: the plain recipe against the data "
    "modules with the settings that matter. Ends with the settings to take, as YAML."
)
EXAMPLES = """\
  lightning-h5 bench signals.h5
  lightning-h5 bench images.h5 --x-key train/images --y-key train/labels --batch-size 256
  lightning-h5 bench 'runs/*.h5' --x-key signal --num-workers 0 4 --seconds 5 --plot rates.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what ``bench`` takes."""
    add = parser.add_argument
    add("paths", nargs="+", metavar="FILE", help="a file, a glob or a directory; several are one data set")
    add(
        "--x-key",
        action="append",
        metavar="K",
        help="the input array; may be given repeatedly. Left out: what the file leaves no doubt about",
    )
    add("--y-key", action="append", metavar="K", help="the target array, likewise")
    add("--batch-size", type=_count, default=64, metavar="N", help="rows of a batch (default: 64)")
    add(
        "--num-workers",
        type=_workers,
        nargs="+",
        default=[0, 2],
        metavar="N",
        help="worker processes to try (default: 0 2)",
    )
    add("--seconds", type=_seconds, default=2.0, metavar="S", help="time for each measurement (default: 2)")
    add("--rounds", type=_count, default=3, metavar="N", help="times that the fastest take turns (default: 3)")
    add("--no-plain", action="store_true", help="leave the plain recipe out")
    add("--plot", metavar="FILE", help="write the rates as a picture (.png, .svg, .pdf); never over a file")


def run(options: argparse.Namespace) -> int:
    """Measures, and writes what was found."""
    if options.plot is not None:
        check_chart(options.plot)
    report = bench_file(
        options.paths[0] if len(options.paths) == 1 else options.paths,
        _keys(options.x_key),
        _keys(options.y_key),
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        seconds=options.seconds,
        rounds=options.rounds,
        plain=not options.no_plain,
        shows_progress=True,
    )
    if options.json:
        write_json(report)
    else:
        write("\n".join(_text(report)))
    if options.plot is not None:
        save_chart(report, options.plot)
        if not options.json:
            write(f"\nwrote {options.plot}")
    return 0


def _text(report: BenchReport) -> Iterator[str]:
    n_files = len(report.files)
    what = report.files[0] if n_files == 1 else f"{n_files:,} files"
    row = f"{report.n_rows:,} rows of {bytes_text(report.row_bytes)}"
    yield f"{bold(what)}  {row}, in shuffled batches of {report.batch_size}"
    if not report.is_warm:
        yield "The files were not read before, or are larger than the free memory: the rates are of the storage, too."
    yield ""
    heads = ("", "rows/s", "MiB/s", "times plain", "first epoch", "spread")
    yield table([heads, *(_cells(result, is_chosen=result.name == report.chosen) for result in report.results)])
    for result in report.results:
        if result.note is not None:
            yield faint(f"{result.name}: {result.note}")
    for each in report.left_out:
        yield faint(f"not measured: {each.name}: {each.why}")
    yield faint(", ".join(f"{name} {value}" for name, value in report.environment.items()))
    yield ""
    yield f"{bold('use')}  " + "\n     ".join(report.reasons)
    yield ""
    yield report.yaml


def _cells(result: BenchResult, *, is_chosen: bool) -> tuple[str, ...]:
    return (
        f"{'*' if is_chosen else ' '} {result.name}",
        f"{result.rows_per_second:,.0f}",
        f"{result.mib_per_second:,.1f}",
        "-" if result.times_plain is None else _times(result.times_plain),
        "-" if result.first_epoch is None else f"{result.first_epoch:,.0f}",
        "-" if result.spread is None else f"{100 * result.spread:.0f} %",
    )


def _keys(given: list[str] | None) -> str | list[str] | None:
    return given[0] if given is not None and len(given) == 1 else given


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")


def _workers(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; pass 0 or more")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 0 < seconds < math.inf:
        return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no time of more than 0 seconds")


def _times(ratio: float) -> str:
    """A ratio with as many digits as mean something."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"

"""``bench``: how fast rows come from your files on this machine, and the settings to use."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator

from ..sizes import bytes_text
from ..tools.bench import BenchReport, bench_file
from .terminal import bold, faint, paragraphs, table, write, write_json

SUMMARY = (
    "Measures how fast shuffled batches come from your files on this machine: plain h5py against the data modules with "
    "the settings that matter. Ends with the settings to use, as YAML."
)
EXAMPLES = """\
  lightning-h5 bench signals.h5
  lightning-h5 bench images.h5 --x-key train/images --y-key train/labels --batch-size 256
  lightning-h5 bench 'runs/*.h5' --x-key signal --num-workers 4 --seconds 5"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    add = parser.add_argument
    add("paths", nargs="+", metavar="FILE", help="a file, a glob or a directory; several are one data set")
    add("--x-key", action="append", metavar="K", help="the input array; repeatable (default: what inspect suggests)")
    add("--y-key", action="append", metavar="K", help="the target array; repeatable")
    add("--batch-size", type=int, metavar="N", help="rows of a batch (default: 64, fewer if rows are few or large)")
    add("--num-workers", type=int, default=2, metavar="N", help="worker processes to try (default: 2; 0: none)")
    add("--seconds", type=float, default=2.0, metavar="S", help="time for each measurement (default: 2)")
    add("--rounds", type=int, default=3, metavar="N", help="measurements of each setting (default: 3)")


def run(options: argparse.Namespace) -> int:
    """Measure, and write the results."""
    given = (options.paths, options.x_key, options.y_key)
    paths, x_key, y_key = (names[0] if names and len(names) == 1 else names for names in given)
    logging.disable(logging.INFO)  # what each data module logs about its rows
    try:
        report = bench_file(
            paths,
            x_key,
            y_key,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            seconds=options.seconds,
            rounds=options.rounds,
            shows_progress=True,
        )
    finally:
        logging.disable(logging.NOTSET)
    if options.json:
        write_json(report)
    else:
        write("\n".join(_text(report)))
    return 0


def _text(report: BenchReport) -> Iterator[str]:
    what = report.files[0] if len(report.files) == 1 else f"{len(report.files):,} files"
    row = f"{report.n_rows:,} row{'' if report.n_rows == 1 else 's'} of {bytes_text(report.row_bytes)}"
    yield f"{bold(what)}  {row}, in shuffled batches of {report.batch_size}"
    yield ""
    plain = next((each.rows_per_second for each in report.results if each.datamodule is None), None)
    rows = [["", "rows/s", "MiB/s", "vs h5py"]]
    for result in report.results:
        rate = result.rows_per_second
        times = "-" if plain is None else f"{rate / plain:,.{1 if rate < 10 * plain else 0}f}x"
        name = f"{'*' if result.name == report.chosen.name else ' '} {result.name}"
        rows.append([name, f"{rate:,.0f}", f"{rate * report.row_bytes / 2**20:,.1f}", times])
    yield table(rows)
    for name, why in report.left_out.items():
        yield faint(f"not measured: {name}: {why}")
    yield ""
    yield paragraphs("use  ", report.reasons)
    yield ""
    yield report.yaml

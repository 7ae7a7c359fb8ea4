"""``stats``: mean, standard deviation, minimum and maximum of arrays, and the file that ``normalize`` reads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import H5Error, H5ValueError
from ..hdf5 import expand_paths, expand_user
from ..tools.output_files import check_output
from ..tools.stats import ArrayStats, ChannelAxis, StatsReport, compute_stats, named_keys
from ..types import IntArray
from .terminal import bold, faint, table, warn, write, write_json

SUMMARY = (
    "Computes mean, standard deviation, minimum and maximum of arrays, over one file or several, in one pass, on all "
    "cores. NaN and infinite values are counted and left out of the rest."
)
EXAMPLES = """\
  lightning-h5 stats data.h5
  lightning-h5 stats images.h5 --key images --channel-axis 0 --output stats.json
  lightning-h5 stats 'runs/*.h5' --key signal --split-file splits.json --output stats.json
  lightning-h5 stats data.h5 --key x --rows 0:8000"""

MAX_CHANNELS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``stats``."""
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="a file, a glob or a directory; several are one data set")
    add("--key", action="append", dest="keys", metavar="K", help="an array; repeatable (default: the input)")
    axis = "axis of a row that has the channels: 0 for rows (C, ...), -1 for (..., C); K=A for one of several arrays"
    add("--channel-axis", action="append", default=[], type=_axis, metavar="A", help=f"{axis} (default: none)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rows", type=_range, metavar="START:STOP[:STEP]", help="rows to read, counted over all files")
    which.add_argument("--split-file", metavar="FILE", help="read the rows of a split in this file of a data module")
    add("--split", choices=("train", "val", "test"), default="train", help="which split of that file (default: train)")
    add("--output", metavar="FILE", help="write the file that `normalize` of data modules and datasets reads")
    add("--force", action="store_true", help="replace an existing output")


def run(options: argparse.Namespace) -> int:
    """Compute the statistics, and write them."""
    paths = expand_paths(options.paths, "PATH")
    if options.output is not None:
        check_output(expand_user(options.output), paths, overwrite=options.force)  # before hours of reading
    rows = options.rows
    if options.split_file is not None:
        rows = _rows_of_split(options.split_file, options.split, paths, options.keys)
    report = compute_stats(
        paths,
        options.keys,
        channel_axis=_channel_axis(options.channel_axis, options.keys or ()),
        rows=rows,
        shows_progress=True,
    )
    failure = None
    if options.output is not None:
        try:
            report.save(options.output, overwrite=options.force)
        except H5Error as error:  # what was computed is shown all the same
            failure = error
    if options.json:
        write_json(report)
    else:
        write(_text(report))
        if options.output is not None and failure is None:
            write(f"\nwrote {options.output}: pass it as normalize={options.output!r}")
    for line in _doubts(report):
        warn(line)
    if failure is not None:
        raise failure
    return 0


def _channel_axis(given: Sequence[tuple[str | None, int | None]], keys: Sequence[str]) -> ChannelAxis:
    """Return what ``compute_stats`` takes: one axis for all arrays, or that of each."""
    of_all = dict(given).get(None)
    named = {key: axis for key, axis in given if key is not None}
    return dict.fromkeys(keys, of_all) | named if named else of_all


def _axis(text: str) -> tuple[str | None, int | None]:
    """Return ``A`` or ``K=A`` as the array (None for all) and its axis."""
    key, _, axis = text.rpartition("=")
    try:
        return key or None, None if axis.casefold() == "none" else int(axis)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no axis; pass a number such as 0 or -1, or none") from None


def _range(text: str) -> range:
    try:
        start, stop, step = map(int, [*text.split(":"), "1"][:3])
        if text.count(":") <= 2 and start >= 0 and step > 0:
            return range(start, stop, step)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no range of rows; write START:STOP or START:STOP:STEP")


def _rows_of_split(name: str, split: str, paths: Sequence[str], keys: Sequence[str] | None) -> IntArray:
    # The data modules bring Lightning along, which takes seconds to import.
    from ..datamodules.split_file import read_splits
    from ..datasets import column_of, count_rows

    try:
        text = json.loads(Path(expand_user(name)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise H5ValueError(f"--split-file {name!r} cannot be read as JSON: {error}. Name another file.") from error
    group_key = text.get("group_key") if isinstance(text, dict) else None
    n_rows = count_rows(paths, named_keys(paths, keys)[0])
    groups = None
    if group_key is not None:
        groups = column_of(paths, group_key, n_rows, argument="group_key")
    splits = read_splits(name, n_rows, group_key, groups, {})
    found = {} if splits is None else {str(each): rows for each, rows in splits.items()}
    if not len(found.get(split, ())):
        raise H5ValueError(f"--split-file {name!r} has no row in the split {split!r}. Name another with --split.")
    return found[split]


def _text(report: StatsReport) -> str:
    n_files = len(report.files)
    of_files = "" if n_files == 1 else f" in {n_files} files"
    blocks = []
    for array in report.arrays:
        rows = f"{array.n_rows:,} rows"
        if array.n_rows != report.n_rows_of_files:
            rows += f" of {report.n_rows_of_files:,}"
        shape = "x".join(map(str, array.row_shape)) or "1"
        lines = [f"{bold(array.key)}: {rows}{of_files}, each {shape} of {array.dtype}", table(_lines(array))]
        if (hidden := array.mean.size - MAX_CHANNELS) > 0:
            lines.append(faint(f"and {hidden:,} more channels; --json and --output have all of them"))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _lines(array: ArrayStats) -> list[list[str]]:
    """Return a line for each channel; columns of NaN and infinite values if there are any."""
    columns = {name: getattr(array, name) for name in ("mean", "std", "min", "max")}
    columns |= {name: n for name, n in (("NaN", array.n_nan), ("infinite", array.n_infinite)) if n.any()}
    each = [np.atleast_1d(column)[:MAX_CHANNELS].tolist() for column in columns.values()]
    lines = [["channel" if array.mean.ndim else "", *columns]]
    for channel, numbers in enumerate(zip(*each, strict=True)):
        lines.append([str(channel) if array.mean.ndim else "all values", *map(_number, numbers)])
    return lines


def _number(value: float) -> str:
    """Return a number with 7 digits; integers with all of theirs."""
    return f"{value:,}" if isinstance(value, int) else "-" if value != value else f"{value:.7g}"


def _doubts(report: StatsReport) -> Iterator[str]:
    """Yield warnings to consider before these statistics are used."""
    for array in report.arrays:
        n_nan, n_infinite = int(array.n_nan.sum()), int(array.n_infinite.sum())
        if n_nan or n_infinite:
            yield f"{array.key!r} has {n_nan:,} NaN and {n_infinite:,} infinite values, which are left out of the rest."
        flat = np.flatnonzero(np.atleast_1d(array.std == 0)).tolist()
        if flat:
            which = f"channels {', '.join(map(str, flat[:12]))}{' ...' if len(flat) > 12 else ''} of " * array.mean.ndim
            yield f"{which}{array.key!r}: all values are equal (std 0); normalized they become 0."

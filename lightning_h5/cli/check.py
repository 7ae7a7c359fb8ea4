"""``check``: what is wrong with files, and what may be."""

from __future__ import annotations

import argparse
from itertools import groupby

from ..tools.check import CheckReport, Problem, check_files
from .terminal import bold, bytes_text, faint, write, write_json

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = (
    "Checks that files can be trained from: all open, have the same arrays, dtypes, shapes and numbers of rows, and "
    "every chunk decodes and fits its checksum. Ends with 1 where there is an error."
)
EXAMPLES = """\
  lightning-h5 check data.h5
  lightning-h5 check runs/ --nan
  lightning-h5 check 'runs/*.h5' --key signal --key label
  lightning-h5 check runs/ --no-decode --json"""

SHOWN = 200  # problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what ``check`` takes."""
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="a file, a glob or a directory")
    add("--key", action="append", dest="keys", metavar="K", help="an array; may be given repeatedly. Left out: all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--nan", action="store_true", help="NaN and infinite values are errors, too")
    how.add_argument("--no-decode", action="store_true", help="read metadata alone: fast, and finds no damaged chunk")
    add("--strict", action="store_true", help="end with 1 where there is a warning, too")


def run(options: argparse.Namespace) -> int:
    """Checks the files."""
    report = check_files(
        options.paths,
        decode=not options.no_decode,
        finite=options.nan,
        keys=options.keys,
        shows_progress=True,
    )
    if options.json:
        write_json(report)
    else:
        write(_text(report, decoded=not options.no_decode))
    return 1 if report.errors or (options.strict and report.warnings) else 0


def _text(report: CheckReport, *, decoded: bool) -> str:
    place = {path: at for at, path in enumerate(report.files)}
    problems = sorted([*report.errors, *report.warnings], key=lambda problem: place[problem.file])
    lines = []
    for path, of_file in groupby(problems[:SHOWN], key=lambda problem: problem.file):
        lines.append(bold(path))
        lines += [f"  {_line(problem)}" for problem in of_file]
    if (more := len(problems) - SHOWN) > 0:
        lines.append(faint(f"and {more:,} more problems; --json has all of them"))
    lines.append(_summary(report, decoded=decoded))
    if report.unchecked and decoded:
        names = ", ".join(report.unchecked[:6]) + (" ..." if len(report.unchecked) > 6 else "")
        lines.append(faint(f"without checksums, so that most damage to their values would not show: {names}"))
    return "\n".join(lines)


def _line(problem: Problem) -> str:
    array = "" if problem.array is None else f"{problem.array}: "
    return f"{problem.severity} ({problem.kind}): {array}{problem.text}"


def _summary(report: CheckReport, *, decoded: bool) -> str:
    read = f"{bytes_text(report.n_bytes)} decoded" if decoded else "metadata alone"
    found = ", ".join([_count(len(report.errors), "error"), _count(len(report.warnings), "warning")])
    return f"{_count(len(report.files), 'file')}, {_count(report.n_arrays, 'array')}, {read}: {bold(found)}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"

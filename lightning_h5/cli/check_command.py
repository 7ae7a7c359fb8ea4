"""``check``: what is wrong with files, and what may be."""

from __future__ import annotations

import argparse
from itertools import groupby

from ..errors import H5ValueError
from ..hdf5 import INTEGRITY
from ..tools.check import CheckReport, Problem, check_files
from .terminal import bold, bytes_text, faint, safe, write, write_json

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = (
    "Checks that files can be trained from: all open, have the same arrays, dtypes, shapes and numbers of rows, and "
    "every chunk decodes and fits its checksum. Ends with 1 where there is an error. Take --sandbox for files of "
    "strangers, and for a file that crashed a program or made it hang: such a file ends a process of its own then."
)
EXAMPLES = """\
  lightning-h5 check data.h5
  lightning-h5 check runs/ --nan
  lightning-h5 check 'runs/*.h5' --key signal --key label
  lightning-h5 check runs/ --no-decode --json
  lightning-h5 check runs/ --write-digests
  lightning-h5 check downloads/ --sandbox --sandbox-memory '2 GiB'"""

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
    add(
        "--write-digests",
        action="store_true",
        help="where a file has no error, write digests beside it, which verify='digest' compares rows with",
    )
    apart = parser.add_argument_group("files that are not trusted")
    add = apart.add_argument
    add("--sandbox", action="store_true", help="open each file in a process of its own, with limits; 0.2 s more a file")
    add("--sandbox-memory", metavar="SIZE", help="address space of such a process (default: 4 GiB)")
    add("--sandbox-seconds", type=float, metavar="S", help="time for a file (default: 60), and 1 s more for each 10 MB")


def run(options: argparse.Namespace) -> int:
    """Checks the files."""
    memory, seconds = options.sandbox_memory, options.sandbox_seconds
    if not options.sandbox and (memory is not None or seconds is not None):
        raise H5ValueError("--sandbox-memory and --sandbox-seconds are limits of --sandbox. Add it, or leave them out.")
    report = check_files(
        options.paths,
        decode=not options.no_decode,
        finite=options.nan,
        keys=options.keys,
        sandbox=options.sandbox,
        sandbox_memory="4 GiB" if memory is None else memory,
        sandbox_seconds=60.0 if seconds is None else seconds,
        write_digests=options.write_digests,
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
        lines.append(bold(safe(path)))
        lines += [f"  {_line(problem)}" for problem in of_file]
    if (more := len(problems) - SHOWN) > 0:
        lines.append(faint(f"and {more:,} more problems; --json has all of them"))
    lines.append(_summary(report, decoded=decoded))
    if report.digested:
        lines.append(f"digests written beside {_count(len(report.digested), 'file')}")
    elif report.integrity is not None:
        lines.append(faint(f"integrity level {report.integrity} of 0 to 3: {_meaning(report)}"))
    return "\n".join(lines)


def _meaning(report: CheckReport) -> str:
    """What the level means, in a line; for level 0 with the arrays, whose names come from the file."""
    if report.integrity:
        return INTEGRITY[report.integrity]
    # `repr` escapes what moves a terminal's cursor or ends a line, as `safe` does.
    names = ", ".join(map(repr, report.unchecked[:6])) + (" ..." if len(report.unchecked) > 6 else "")
    return f"most damage to the values of {names} would not show (no checksums)"


def _line(problem: Problem) -> str:
    array = "" if problem.array is None else f"{problem.array}: "
    # Names and texts come from the file, or from a process that it took over: no line's end of theirs is one of ours.
    return safe(f"{problem.severity} ({problem.kind}): {array}{problem.text}")


def _summary(report: CheckReport, *, decoded: bool) -> str:
    read = f"{bytes_text(report.n_bytes)} decoded" if decoded else "metadata alone"
    apart = ", each file in a process of its own" if report.sandboxed else ""
    found = ", ".join([_count(len(report.errors), "error"), _count(len(report.warnings), "warning")])
    return f"{_count(len(report.files), 'file')}, {_count(report.n_arrays, 'array')}, {read}{apart}: {bold(found)}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"

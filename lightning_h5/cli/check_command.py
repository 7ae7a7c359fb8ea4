"""``check``: what is wrong with files, and what may be."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby

from ..errors import H5ValueError
from ..hdf5 import INTEGRITY
from ..sizes import bytes_text
from ..tools.check import CheckReport, check_files
from .terminal import bold, faint, safe, write, write_json

SUMMARY = (
    "Checks that files can be trained from: all open, have the same arrays, dtypes, shapes and numbers of rows, and "
    "every chunk decodes and fits its checksum. Ends with 1 if an error is found. Take --sandbox for untrusted files, "
    "and for a file that crashed a program or made it hang: it then ends a process of its own."
)
EXAMPLES = """\
  lightning-h5 check data.h5
  lightning-h5 check runs/ --nan
  lightning-h5 check 'runs/*.h5' --key signal --key label
  lightning-h5 check runs/ --no-decode --json
  lightning-h5 check runs/ --write-digests
  lightning-h5 check downloads/ --sandbox --sandbox-memory '2 GiB'"""

MAX_PROBLEMS = 200  # that are shown
MAX_NAMES = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="a file, a glob or a directory")
    add("--key", action="append", dest="keys", metavar="K", help="an array; repeatable (default: all)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--nan", action="store_true", help="NaN and infinite values are errors, too")
    how.add_argument("--no-decode", action="store_true", help="read metadata alone: fast, and finds no damaged chunk")
    add("--strict", action="store_true", help="end with 1 if a warning is found, too")
    digests = "write digests beside each file without an error, which files.verify='digest' compares rows with"
    add("--write-digests", action="store_true", help=digests)
    add = parser.add_argument_group("untrusted files").add_argument
    add("--sandbox", action="store_true", help="open each file in a process of its own, with limits; 0.2 s more a file")
    add("--sandbox-memory", metavar="SIZE", help="address space of such a process (default: 4 GiB)")
    add("--sandbox-seconds", type=float, metavar="S", help="time for a file (default: 60), and 1 s more for each 10 MB")


def run(options: argparse.Namespace) -> int:
    """Check the files."""
    limits = {"sandbox_memory": options.sandbox_memory, "sandbox_seconds": options.sandbox_seconds}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if limits and not options.sandbox:
        raise H5ValueError("--sandbox-memory and --sandbox-seconds are limits of --sandbox. Add it, or leave them out.")
    report = check_files(
        options.paths,
        decode=not options.no_decode,
        finite=options.nan,
        keys=options.keys,
        sandbox=options.sandbox,
        write_digests=options.write_digests,
        shows_progress=True,
        **limits,
    )
    if options.json:
        write_json(report)
    else:
        write("\n".join(_text(report, decoded=not options.no_decode)))
    return 1 if report.errors or (options.strict and report.warnings) else 0


def _text(report: CheckReport, *, decoded: bool) -> Iterator[str]:
    place = {path: at for at, path in enumerate(report.files)}
    problems = sorted([*report.errors, *report.warnings], key=lambda problem: place[problem.file])
    # Names and texts come from the file, or from a process that it took over: `safe` lets them end no line.
    for path, of_file in groupby(problems[:MAX_PROBLEMS], key=lambda problem: problem.file):
        yield bold(safe(path))
        for problem in of_file:
            array = "" if problem.array is None else f"{problem.array}: "
            yield safe(f"  {problem.severity} ({problem.kind}): {array}{problem.text}")
    if (more := len(problems) - MAX_PROBLEMS) > 0:
        yield faint(f"and {more:,} more problems; --json has all of them")
    read = f"{bytes_text(report.n_bytes)} decoded" if decoded else "metadata alone"
    sandboxed = ", each file in a process of its own" if report.sandboxed else ""
    found = f"{_count(len(report.errors), 'error')}, {_count(len(report.warnings), 'warning')}"
    files, arrays = _count(len(report.files), "file"), _count(report.n_arrays, "array")
    yield f"{files}, {arrays}, {read}{sandboxed}: {bold(found)}"
    if report.digested:
        yield f"digests written beside {_count(len(report.digested), 'file')}"
    elif report.integrity is not None:
        names = ", ".join(map(repr, report.unchecked[:MAX_NAMES])) + " ..." * (len(report.unchecked) > MAX_NAMES)
        unchecked = f"most damage to the values of {names} would not show (no checksums)"
        meaning = INTEGRITY[report.integrity] if report.integrity else unchecked
        yield faint(f"integrity level {report.integrity} of 0 to 3: {meaning}")


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"

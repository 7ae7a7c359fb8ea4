"""``inspect``: what is in a file, how it is stored, what a random row costs, what to use."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from textwrap import wrap

from ..hdf5 import Entry, expand_user
from ..sizes import bytes_text
from ..tools.inspect import ArrayReport, FileReport, FolderReport, inspect_file, inspect_folder
from .terminal import bold, faint, line_width, paragraphs, safe, table, write, write_json

SUMMARY = "Shows what is in a file, how it is stored, what a random row costs, and what to train it with."
EXAMPLES = """  lightning-h5 inspect signals.h5
  lightning-h5 inspect signals.h5 --depth 1
  lightning-h5 inspect recordings/ --json"""

MAX_NAME = 36  # letters of a name in a table
MAX_ARRAYS = 20
MIN_ROOM = 30  # letters below a name of the tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    parser.add_argument("path", metavar="FILE", nargs="+", help="a file; or a directory, a glob or several files")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the tree to show (default: all)")


def run(options: argparse.Namespace) -> int:
    """Show a file, or several as one set."""
    only = expand_user(options.path[0])
    report: FileReport | FolderReport
    if len(options.path) == 1 and not os.path.isdir(only) and not any(mark in only for mark in "*?["):
        report = inspect_file(only)
        text = _file_text(report, options.depth)
    else:
        report = inspect_folder(options.path, shows_progress=not options.json)
        text = _folder_text(report, options.depth)
    if options.json:
        write_json(report)
    else:
        write("\n".join(text))
    return 0


def _file_text(report: FileReport, depth: int | None) -> Iterator[str]:
    kinds = [entry.kind for entry in report.entries]
    counts = ", ".join(
        f"{kinds.count(kind)} {kind}{'s' if kinds.count(kind) != 1 else ''}"
        for kind in ("group", "array", "soft link", "hard link", "external link")
        if kinds.count(kind)
    )
    yield f"{bold(report.path)}  {bytes_text(report.n_bytes)}: {counts or 'empty'}"
    yield ""
    yield from _tree(report, depth)
    yield from _rows(report)
    yield from _advice(report)


def _folder_text(report: FolderReport, depth: int | None) -> Iterator[str]:
    n_files = len(report.paths)
    yield f"{bold(f'{n_files:,} files')}  {bytes_text(report.n_bytes)}, {report.n_rows:,} rows in those that are alike"
    yield ""
    yield f"{report.n_alike:,} of {n_files:,} have the same arrays; {report.example.path} is one of them:"
    yield ""
    yield from _tree(report.example, depth)
    yield from _rows(report.example)
    if report.outliers:
        yield ""
        yield bold(f"{len(report.outliers):,} differ")
        yield from (f"  {path}: {text}" for path, text in report.outliers.items())
    yield from _advice(report.example)


def _tree(report: FileReport, depth: int | None) -> Iterator[str]:
    """Yield a line for each name, indented by its depth; what makes it too wide goes below the name."""
    arrays = {array.name: array for array in report.arrays}
    shown = [entry for entry in report.entries if depth is None or entry.name.count("/") < depth]
    names = ["  " * (1 + entry.name.count("/")) + safe(entry.name.rpartition("/")[2]) for entry in shown]
    width = min(48, max(map(len, names), default=0))
    yield "/"
    for entry, name in zip(shown, names, strict=True):
        text = _entry_text(entry, arrays.get(entry.name))
        line = f"{name:<{width}}  {text}".rstrip()
        if len(line) <= line_width() or not text:
            yield line
            continue
        yield name
        indent = " " * (len(name) - len(name.lstrip()) + 4)
        lines = wrap(text, max(line_width() - len(indent), MIN_ROOM), break_long_words=False)
        if max(map(len, lines)) > line_width() - len(indent):  # a long target of a link, which no break makes shorter
            lines = [text]
        yield from (indent + each for each in lines)
    if left := len(report.entries) - len(shown):
        yield faint(f"... and {left} below; --depth shows more")


def _entry_text(entry: Entry, array: ArrayReport | None) -> str:
    n = entry.n_attributes
    attributes = f"  {n} attribute{'s' if n != 1 else ''}" if n else ""
    if entry.kind in ("soft link", "external link", "hard link"):
        return f"-> {safe(entry.target or '')}  ({entry.kind})"
    if entry.kind == "unreadable":
        return f"unreadable: {safe(entry.target or '')}"
    if entry.kind != "array" or array is None:
        return faint(f"{'a named datatype, ' + entry.dtype if entry.kind == 'type' else ''}{attributes}".strip())
    parts = ["(no shape)" if entry.shape is None else f"({', '.join(map(str, entry.shape))})", entry.dtype]
    if array.storage is not None:
        parts.append(f"chunks ({', '.join(map(str, array.chunks))})" if array.chunks else array.storage)
        parts += [" + ".join(array.filters)] if array.filters else []
        parts += [f"{array.ratio:.1f}:1"] if array.filters and array.ratio else []
        parts += [f"packed: {array.packing}"] if array.packing else []
        parts += [f"fill {array.fill:g}"] if array.fill else []
        parts += [f"{array.n_unwritten} of {array.n_chunks} chunks never written"] if array.n_unwritten else []
    return "  ".join(parts) + attributes


def _rows(report: FileReport) -> Iterator[str]:
    """Yield what a random row costs of each array, the largest first; what cannot be read, and why."""
    # Text has no cost that means anything: a row's size is that of a pointer.
    able = [a for a in report.arrays if a.row is not None and a.n_bytes and not a.dtype.startswith("text")]
    able.sort(key=lambda array: -array.n_bytes)
    rows, notes = [["a random row of", "has", "reads", "decodes", "chunks"]], []
    for array in able[:MAX_ARRAYS]:
        name = array.name if len(array.name) <= MAX_NAME else f"...{array.name[3 - MAX_NAME :]}"
        if (row := array.row) is not None:
            costs = (array.n_bytes / max(1, (array.shape or (1,))[0]), row.bytes_read, row.bytes_decoded)
            rows.append([name, *map(bytes_text, costs), str(row.n_chunks or "-")])
            if row.why_slow:
                notes.append(f"{array.name} is read through the HDF5 library, in one thread: {row.why_slow}")
    if able:
        yield ""
        yield table(rows)
    if len(able) > MAX_ARRAYS:
        yield faint(f"... and {len(able) - MAX_ARRAYS} smaller arrays; --json has all")
    notes += [f"{a.name}: {a.problem}" for a in report.arrays if a.problem is not None and a.row is None]
    yield from (each for note in notes for each in wrap(safe(note), line_width(), subsequent_indent="  "))


def _advice(report: FileReport) -> Iterator[str]:
    advice = report.advice
    yield ""
    if report.integrity is not None:
        yield f"{bold('integrity')}  {report.integrity}"
    if advice.datamodule is not None:
        names = safe(", ".join((*advice.x_keys, *advice.y_keys)))
        yield paragraphs("in memory  ", [f"{bytes_text(advice.cached_bytes)} for all rows of {names}"])
    yield paragraphs("use        ", advice.reasons)
    if advice.datamodule is not None:
        yield ""
        yield advice.yaml

"""``inspect``: what is in a file, how it is stored, what a random row costs, what to use."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from textwrap import wrap

from ..files import Entry
from ..tools.advice import Advice, yaml_of
from ..tools.inspection import ArrayReport, FileReport, FolderReport, inspect_file, inspect_folder
from .terminal import bold, bytes_text, faint, safe, table, write, write_json

SUMMARY = "Shows what is in a file, how it is stored, what a random row costs, and what to train it with."
EXAMPLES = """  lightning-h5 inspect signals.h5
  lightning-h5 inspect signals.h5 --depth 1
  lightning-h5 inspect recordings/ --json"""

WIDTH = 120  # of a line, where names allow it
LONGEST_NAME = 48  # in a table
LEAST_ROOM = 30  # of a table's last column


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument("path", metavar="FILE", nargs="+", help="a file; or a directory, a glob or several files")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the tree that are shown; all unless given")


def run(options: argparse.Namespace) -> int:
    """Shows a file, or several as one set."""
    only = options.path[0]
    if len(options.path) == 1 and not os.path.isdir(only) and not any(mark in only for mark in "*?["):
        report = inspect_file(only)
        if options.json:
            write_json(report)
        else:
            write("\n".join(_file_text(report, options.depth)))
        return 0
    folder = inspect_folder(options.path, shows_progress=not options.json)
    if options.json:
        write_json(folder)
    else:
        write("\n".join(_folder_text(folder, options.depth)))
    return 0


def _file_text(report: FileReport, depth: int | None) -> Iterator[str]:
    kinds = [entry.kind for entry in report.entries]
    counts = ", ".join(
        f"{kinds.count(kind)} {kind}{'s' if kinds.count(kind) != 1 else ''}"
        for kind in ("group", "array", "soft link", "hard link", "external link")
        if kinds.count(kind)
    )
    block = f", {bytes_text(report.user_block)} of user block" if report.user_block else ""
    kind = f"superblock {report.superblock}{block}"
    yield f"{bold(report.path)}  {bytes_text(report.n_bytes)}, {kind}; {counts or 'empty'}"
    yield ""
    yield from _tree(report, depth)
    yield from _rows(report)
    yield from _advice(report.advice, report.integrity)


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
    yield from _advice(report.example.advice, report.example.integrity)


def _tree(report: FileReport, depth: int | None) -> Iterator[str]:
    arrays = {array.name: array for array in report.arrays}
    shown = [entry for entry in report.entries if depth is None or entry.name.count("/") < depth]
    names = dict(_branches(shown))
    width = min(48, max(map(len, names.values()), default=0))
    yield "/"
    for entry in shown:
        yield from _branch(safe(names[entry.name]), width, _entry_text(entry, arrays.get(entry.name)))
    if left := len(report.entries) - len(shown):
        yield faint(f"... and {left} below; --depth shows more")


def _branch(name: str, width: int, text: str) -> Iterator[str]:
    """A line of the tree; what makes it too wide goes below the name, which stays whole."""
    line = f"{name:<{width}}  {text}".rstrip()
    if len(line) <= WIDTH or not text:
        yield line
        return
    yield name
    inside = len(name) - len(name.lstrip("│├└─ "))
    lead = name[:inside].replace("├── ", "│   ").replace("└── ", "    ") + "    "
    lines = wrap(text, max(WIDTH - len(lead), LEAST_ROOM), break_long_words=False)
    if max(map(len, lines)) > WIDTH - len(lead):  # a long target of a link, which no break makes shorter
        lines = [text]
    yield from (lead + each for each in lines)


def _branches(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """For each entry of a tree its name, and its last part behind the branch that it hangs on."""
    inside = defaultdict(list)
    for entry in entries:
        inside[entry.name.rpartition("/")[0]].append(entry.name)
    todo = [(name, "", at == 0) for at, name in enumerate(reversed(inside[""]))]
    while todo:
        group, lead, is_last = todo.pop()
        yield group, f"{lead}{'└── ' if is_last else '├── '}{group.rsplit('/', 1)[-1]}"
        lead += "    " if is_last else "│   "
        todo += [(name, lead, at == 0) for at, name in enumerate(reversed(inside[group]))]


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
        parts += [f"fill {array.fill:g}"] if array.fill else []
        parts += [f"{array.n_unwritten} of {array.n_chunks} chunks never written"] if array.n_unwritten else []
    return "  ".join(parts) + attributes


def _rows(report: FileReport) -> Iterator[str]:
    """What a random row costs of each array, the largest first; what cannot be read, and why."""
    readable = [array for array in report.arrays if array.row is not None and array.n_bytes]
    if readable:
        yield ""
        rows = [("a random row of", "has", "reads", "decodes", "chunks", "way")]
        for array in sorted(readable, key=lambda a: -a.n_bytes)[:20]:
            row, n_rows = array.row, (array.shape or (1,))[0]
            if row is not None:
                own = bytes_text(array.n_bytes / max(1, n_rows))
                costs = own, bytes_text(row.bytes_read), bytes_text(row.bytes_decoded), str(row.n_chunks or "-")
                rows.append((_end_of(array.name), *costs, row.way + (f": {row.why_slow}" if row.why_slow else "")))
        yield from _left_last(rows)
        if len(readable) > 20:
            yield faint(f"... and {len(readable) - 20} smaller arrays; --json has all")
    for array in report.arrays:
        if array.problem is not None and array.row is None:
            yield f"{safe(array.name)}: {safe(array.problem)}"


def _end_of(name: str) -> str:
    """A name as a column of a table has room for; the tree has all of it."""
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


def _left_last(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose last column begins flush, and goes on below where it is long."""
    front = table([row[:-1] for row in rows]).split("\n")
    width = max(len(line) for line in front[1:])
    lines = [front[0] + "  " + bold(rows[0][-1])]
    for line, row in zip(front[1:], rows[1:], strict=True):
        first, *more = wrap(row[-1], max(WIDTH - width - 2, LEAST_ROOM), break_long_words=False)
        lines += [f"{line:<{width}}  {first}", *(f"{'':<{width}}  {each}" for each in more)]
    return lines


def _advice(advice: Advice, integrity: str | None) -> Iterator[str]:
    yield ""
    if integrity is not None:
        yield f"{bold('integrity')}  {integrity}"
    shards = advice.shard_bytes
    if shards:
        each = ", ".join(f"{bytes_text(n_bytes)} on {n}" for n, n_bytes in shards.items())
        names = safe(", ".join((*advice.x_keys, *advice.y_keys)))
        lines = wrap(f"a rank's shard of {names}: {each} ranks", WIDTH - 11, break_long_words=False)
        yield f"{bold('cached')}     " + "\n           ".join(lines)
    lines = [line for reason in advice.reasons for line in wrap(safe(reason), 100, break_long_words=False)]
    yield f"{bold('use')}        " + "\n           ".join(lines)
    if advice.datamodule is not None:
        yield ""
        yield yaml_of(advice)

"""What the verbs share: running them, exit codes, JSON, tables, and colors for terminals that have them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..errors import H5Error

INTERRUPTED = 130  # what a shell shows for a process that Ctrl-C ended
PROBLEM = 1
MIN_WIDTH, MAX_WIDTH = 60, 120
_OURS = re.compile(r"(\n|\x1b\[[012]m)")  # a line's end, and the codes of `bold` and `faint`


class Verb(Protocol):
    """What a verb's module has."""

    SUMMARY: str
    """What the verb does, in a line."""

    EXAMPLES: str
    """Commands to try, a line each."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's arguments; ``--json`` is added for all."""

    def run(self, options: argparse.Namespace) -> int:
        """Run it, write the results, and return the exit code: 0, or 1 if a problem was found."""


def run_verb(name: str, verb: Verb, arguments: Sequence[str]) -> None:
    """Run a verb, and write errors to the standard error.

    Args:
        name: of the verb.
        verb: its module.
        arguments: what follows the name.

    Raises:
        SystemExit: with 0, with 1 for a problem, with 2 for wrong usage, with 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog=f"lightning-h5 {name}",
        description=textwrap.fill(verb.SUMMARY, 80),
        epilog=f"examples:\n{verb.EXAMPLES}",
        formatter_class=_HelpFormatter,
    )
    verb.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write the result as JSON instead of text")
    options = parser.parse_args(arguments)
    code = PROBLEM
    try:
        code = verb.run(options)
        sys.stdout.flush()
    except H5Error as error:
        text = f"{error}"
        if "allow_external=True" in text:
            text += f" (Data modules and datasets take that; `lightning-h5 {name}` opens no file that you do not name.)"
        warn(text)
    except MemoryError as error:
        warn(f"{name} ran out of memory{f': {error}' if f'{error}' else ''}. Run it on a machine with more.")
    except KeyboardInterrupt:
        warn(f"{name} was interrupted.")
        code = INTERRUPTED
    except BrokenPipeError:  # `... | head` has read enough
        _discard_output()
        code = 0
    except OSError as error:  # errors of files are H5Errors, above
        _discard_output()
        warn(f"{name} could not write its output: {error.strerror or error}. Its work is done; look for disk space.")
    raise SystemExit(code)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no line within a word such as ``blosc-zstd``."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _discard_output() -> None:
    """Python would complain once more at its end of what it could not write."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def line_width() -> int:
    """Return the columns of a line: the terminal's (or ``COLUMNS``), 60 to 120; 80 if there is no terminal."""
    return min(MAX_WIDTH, max(MIN_WIDTH, shutil.get_terminal_size((80, 24)).columns))


def paragraphs(head: str, lines: Iterable[str]) -> str:
    """Return wrapped lines, after a head in bold and below each other."""
    room = line_width() - len(head)
    found = [each for line in lines for each in textwrap.wrap(safe(line), room, break_long_words=False)]
    return bold(head.rstrip()) + " " * (len(head) - len(head.rstrip())) + f"\n{' ' * len(head)}".join(found)


def write(text: str = "") -> None:
    """Write lines to the standard output.

    What its encoding lacks, and whatever of a file's names would move the cursor, is written as an escape.
    """
    encoding = sys.stdout.encoding or "utf-8"
    parts = [part if _OURS.fullmatch(part) else safe(part) for part in _OURS.split(text)]
    sys.stdout.write("".join(parts).encode(encoding, "backslashreplace").decode(encoding) + "\n")


def safe(name: str) -> str:
    """Return a name out of a file without what moves a terminal's cursor, changes its colors, or ends a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def warn(text: str) -> None:
    """Write a message to the standard error; lines after its first are indented, as no other message is."""
    lines = [safe(line.strip()) for line in text.split("\n")]
    sys.stderr.write("lightning_h5: " + "\n  ".join(lines) + "\n")


def write_json(report: Any) -> None:
    """Write a report of the package's dataclasses as JSON; what is no number there (NaN, infinity) is null."""
    write(json.dumps(_plain(report), indent=1))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def bold(text: str) -> str:
    """Return the text in bold, if the terminal shows it."""
    return _coded(text, "1")


def faint(text: str) -> str:
    """Return the text in a fainter color, if the terminal shows it."""
    return _coded(text, "2")


def _coded(text: str, code: str) -> str:
    # https://no-color.org: any value but an empty one
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if wanted else text


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of cells under each other: the first row the heads, the first column left, all others right."""
    rows = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *more in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(more, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([bold(lines[0]), *lines[1:]])

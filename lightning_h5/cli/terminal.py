"""Output on a terminal: text or JSON, tables, wrapped lines, colors; and how a program ends at signals."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

MIN_WIDTH, MAX_WIDTH = 60, 120
_OURS = re.compile(r"(\n|\x1b\[[012]m)")  # line ends, and the codes of `bold` and `faint`


def discard_output() -> None:
    """Drop unwritten output, which Python would report again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def line_width() -> int:
    """Return the width of a line: the terminal's (or ``COLUMNS``), from 60 to 120; 80 without a terminal."""
    return min(MAX_WIDTH, max(MIN_WIDTH, shutil.get_terminal_size((80, 24)).columns))


def paragraphs(head: str, lines: Iterable[str]) -> str:
    """Return a bold head, followed by wrapped lines with a hanging indent."""
    room = line_width() - len(head)
    wrapped_lines = [part for line in lines for part in textwrap.wrap(safe(line), room, break_long_words=False)]
    return bold(head.rstrip()) + " " * (len(head) - len(head.rstrip())) + f"\n{' ' * len(head)}".join(wrapped_lines)


def write(text: str = "") -> None:
    """Write lines to the standard output.

    Characters that the encoding lacks, or that would move the cursor, are written as escapes.
    """
    encoding = sys.stdout.encoding or "utf-8"
    parts = [part if _OURS.fullmatch(part) else safe(part) for part in _OURS.split(text)]
    sys.stdout.write("".join(parts).encode(encoding, "backslashreplace").decode(encoding) + "\n")


def safe(name: str) -> str:
    """Return a name from a file, with escapes for characters that move the cursor, change colors or end a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def warn(text: str) -> None:
    """Write a message to the standard error; lines after the first are indented, so that a name cannot imitate one."""
    lines = [safe(line.strip()) for line in text.split("\n")]
    sys.stderr.write("lightning_h5: " + "\n  ".join(lines) + "\n")


def show(report: Any, text: Iterable[str], *, as_json: bool) -> None:
    """Write a report as text or as JSON, in which NaN is null."""
    write(json.dumps(_plain_text(report), indent=1) if as_json else "\n".join(text))


def _plain_text(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain_text(element) for key, element in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_text(element) for element in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def bold(text: str) -> str:
    """Return the text in bold, if the terminal shows it."""
    return _colored(text, "1")


def faint(text: str) -> str:
    """Return the text in a fainter color, if the terminal shows it."""
    return _colored(text, "2")


def _colored(text: str, code: str) -> str:
    # https://no-color.org: any non-empty value
    has_colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if has_colors else text


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first row is the header, the first column is aligned left, all others right."""
    rows = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([bold(lines[0]), *lines[1:]])


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no line within a word with a hyphen, for example ``blosc-zstd``."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


@contextmanager
def ends_at_signals() -> Iterator[None]:
    """Exit with the exception of a signal, also if the signal causes another error.

    Python calls a handler between any two steps of the program. An exception raised while a lock is being released, for
    example, would surface as the error of a lock that is not held.
    """
    arrived: list[BaseException] = []

    def end(number: int, _frame: FrameType | None) -> None:
        # 128 + number is the exit code that shells report after a signal.
        arrived.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise arrived[0]

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, end)
    try:
        yield
    except Exception:
        if arrived:
            raise arrived[0] from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

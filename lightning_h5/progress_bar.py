"""Progress of long work: a bar on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeAlias, TypeVar

from .sizes import bytes_text

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Progress", "progress_bar", "with_bar"]

SECONDS = 30.0
"""Seconds between lines in a log file. Shorter work writes none."""

T = TypeVar("T")


def progress_bar(total: int, what: str, *, shows_progress: bool, unit: str = "iB", delay: float = 1.0) -> Progress:
    """Return a bar if the standard error is a terminal or a notebook's, otherwise lines in a log every 30 seconds.

    Args:
        total: number of units; ``update`` adds completed units.
        what: the name of the work.
        shows_progress: whether anything is shown at all.
        unit: of what is counted; ``iB`` are bytes.
        delay: seconds before a bar is shown.
    """
    file: Any = sys.stderr
    is_terminal = False
    with suppress(AttributeError, OSError, ValueError):  # a stream without `isatty`, or a closed one
        is_terminal = bool(file.isatty())
    if not shows_progress or file is None:
        return _Lines(total, what, unit, None)
    if type(file).__module__.startswith("ipykernel"):
        file = sys.stdout  # notebooks show stderr on a red background
    elif not is_terminal:
        return _Lines(total, what, unit, file)
    from tqdm import tqdm  # takes 10 ms to import

    counts_bytes = unit == "iB"  # tqdm adds the prefix K, M or G
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=counts_bytes,
        unit_divisor=1024 if counts_bytes else 1000,
        delay=delay,
        leave=False,
        file=file,
    )


def with_bar(items: Sequence[T], what: str, *, shows_progress: bool, unit: str, delay: float = 1.0) -> Iterator[T]:
    """Yield the items, with a bar of how many were done (see ``progress_bar``)."""
    with progress_bar(len(items), what, shows_progress=shows_progress, unit=unit, delay=delay) as bar:
        for item in items:
            yield item
            bar.update()


class _Lines:
    """Progress in a log file: whole lines, none for short work, or without a file."""

    def __init__(self, total: float, what: str, unit: str, file: TextIO | None) -> None:
        self.total, self._what, self._unit, self._file = total, what, unit, file
        self._done: float = 0
        self._began = self._last = time.monotonic()

    def update(self, n: float = 1, /) -> None:
        self._done += n
        if time.monotonic() >= self._last + SECONDS:
            self._last = time.monotonic()
            done = self._amount(self._done) if self._unit == "iB" else f"{self._done:,.0f}"
            self._write(f"{done} of {self._amount(self.total)}")

    def set_postfix_str(self, text: str, /) -> None:
        pass

    def close(self) -> None:
        if self._last > self._began:
            self._last = self._began
            self._write(f"{'done' if self._done >= self.total else 'ended'}, {self._amount(self._done)}")

    def _amount(self, n: float) -> str:
        return bytes_text(n) if self._unit == "iB" else f"{n:,.0f} {self._unit}{'' if n == 1 else 's'}"

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        with suppress(AttributeError, OSError, ValueError):  # a full or closed log must not stop the work
            print(f"{self._what}: {text}, {time.monotonic() - self._began:,.0f} s", file=self._file, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


Progress: TypeAlias = "tqdm[Any] | _Lines"
"""Shows the progress of work: ``update(n)``, ``set_postfix_str(text)``, ``close()``; also a context manager."""

"""One figure a line, each measured in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from common import met

CONTEXT = multiprocessing.get_context("spawn")
HEADER = ("measured", "target", "seen", "unit", "met")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the table.

    Attributes:
        name: what was measured.
        seen: the figure.
        unit: of it.
        target: the promise; None is for information.
        at_least: whether more is better.
    """

    name: str
    seen: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept."""
        if self.target is None:
            return None
        return self.seen >= self.target if self.at_least else self.seen <= self.target

    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        sign = ">=" if self.at_least else "<="
        target = "-" if self.target is None else f"{sign} {self.target:,g}"
        return (
            self.name,
            target,
            f"{round(self.seen, 3) + 0.0:,.3g}" if abs(self.seen) < 100 else f"{self.seen:,.0f}",
            self.unit,
            met(self.met),
        )


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process that has done nothing else.

    It is a fresh interpreter. One that is forked has the pages of torch's libraries, but they count as its memory only
    once it looks at them again: as if it had got 17 MiB more by reading rows.
    """
    with ProcessPoolExecutor(1, mp_context=CONTEXT, initializer=be_quiet) as pool:
        return pool.submit(function, *arguments).result()


def be_quiet() -> None:
    """Keeps Lightning from telling which order it took."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

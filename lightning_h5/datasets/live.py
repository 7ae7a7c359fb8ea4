"""Files that grow while they are looked at: one number of rows for arrays that belong together, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from ..files import ArrayLayout
from ..ranks import first_told

__all__ = ["agreeing_on_rows", "as_agreed", "as_long_as"]

PATIENCE = 10.0  # seconds for rows to appear that another look, or another rank, has seen
PAUSE = 0.05

_agreed: ContextVar[dict[tuple[str, str], int] | None] = ContextVar("_agreed", default=None)
"""Rows of each array, by file and key, since the first look at it."""


@contextmanager
def agreeing_on_rows() -> Iterator[None]:
    """Inside, all looks at an array of a file that grows find the same number of rows; and so do all ranks."""
    token = _agreed.set({})
    try:
        yield
    finally:
        _agreed.reset(token)


def as_agreed(path: str, look: Callable[[], Sequence[ArrayLayout]]) -> tuple[ArrayLayout, ...]:
    """Arrays of a file with a live writer, as long as the shortest of them: it appends to one after the other.

    Args:
        path: the file.
        look: looks at the arrays, anew each time.

    Returns:
        See ``as_long_as``.
    """
    found = tuple(look())
    shortest = min(layout.n_rows for layout in found)
    keys = [(path, layout.key) for layout in found]
    agreed = {} if (known := _agreed.get()) is None else known
    if not (seen := [agreed[key] for key in keys if key in agreed]):
        seen = [shortest if known is None else first_told(f"rows of {keys}", shortest)]
    agreed.update(dict.fromkeys(keys, min(seen)))
    if min(seen) <= shortest:
        return _cut(found, min(seen))
    return as_long_as(min(seen), look)


def as_long_as(n_rows: int, look: Callable[[], Sequence[ArrayLayout]]) -> tuple[ArrayLayout, ...]:
    """Arrays that grow, as long as was seen elsewhere.

    Args:
        n_rows: how long that is.
        look: looks at the arrays, anew each time. Where they are shorter that is repeated, for ten seconds.

    Returns:
        The arrays with so many rows; as they were seen last, where one has less to the end.
    """
    found, end = tuple(look()), time.monotonic() + PATIENCE
    while min(layout.n_rows for layout in found) < n_rows:
        if time.monotonic() >= end:
            return found
        time.sleep(PAUSE)
        found = tuple(look())
    return _cut(found, n_rows)


def _cut(found: Sequence[ArrayLayout], n_rows: int) -> tuple[ArrayLayout, ...]:
    return tuple(replace(layout, n_rows=n_rows) for layout in found)

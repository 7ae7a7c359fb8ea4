"""Comparing with digests what is not compared while it is read: once, before the first row is handed out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from ..files import ArrayLayout, ChangeGuard, OpenOptions, process_pool
from ..readers import is_checked_by_slab, is_pooled, verify_tasks
from .base import RowDataset
from .doing import do_with_bar
from .table import FileTable

__all__ = ["compare_digests", "digests_of", "integrity_of", "is_compared_as_read", "sharing_digests"]

HEARTBEAT = 2.0  # seconds between words to the ranks that wait


class _Part(NamedTuple):
    """A process's part of the work, of so many; and whom it tells that it goes on."""

    place: int = 0
    n_places: int = 1
    tell: Callable[[], None] | None = None


_ALL = _Part()

_part: ContextVar[_Part] = ContextVar("_part", default=_ALL)

_compared: set[tuple[ChangeGuard, str, str, int, int]] = set()
"""Arrays that this process has compared: files that were not touched since need no second time, for another split."""


@contextmanager
def sharing_digests(place: int, n_places: int, tell: Callable[[], None]) -> Iterator[None]:
    """Inside, this process compares one part; others of its machine do the rest, and all hear of what is found.

    Args:
        place: of this process, from 0.
        n_places: processes that share the work.
        tell: called now and then while it goes on.
    """
    token = _part.set(_Part(place, n_places, tell))
    try:
        yield
    finally:
        _part.reset(token)


def is_compared_as_read(layout: ArrayLayout, options: OpenOptions) -> bool:
    """Whether all that is read on demand of an array is compared then: its chunks are decoded whole, by us."""
    return is_pooled(layout, options) and is_checked_by_slab(layout, options)


def compare_digests(
    table: FileTable,
    options: OpenOptions,
    is_compared: Callable[[ArrayLayout, OpenOptions], bool] = is_compared_as_read,
) -> None:
    """Reads arrays that have digests, and compares them.

    Args:
        table: the files.
        options: how they are opened where the HDF5 library reads.
        is_compared: of which arrays all that is read will be compared then.

    Raises:
        H5CorruptError: a piece of an array differs.
    """
    place, n_places, tell = _part.get()
    todo = {
        (guard, layout.name, layout.digests.sum, place, n_places): layout
        for guard, arrays in zip(table.guards, table.layouts, strict=True)
        for layout in arrays
        if layout.digests is not None and not is_compared(layout, options)
    }
    new = {which: layout for which, layout in todo.items() if which not in _compared}
    if not new:
        return
    said = time.monotonic()

    def heard(_: int) -> None:
        nonlocal said
        if tell is not None and time.monotonic() > said + HEARTBEAT:
            said = time.monotonic()
            tell()

    tasks = [task for layout in new.values() for task in verify_tasks(layout, options, place, n_places)]
    try:
        do_with_bar(tasks, "comparing digests", shows_bar=place == 0, tell=heard)
    finally:
        for path in table.paths:
            process_pool().close(path)
    for guard in table.guards:
        guard.check()
    _compared.update(new)


def integrity_of(datasets: Iterable[RowDataset]) -> dict[str, int]:
    """For each array the lowest integrity level of all files (see ``INTEGRITY``)."""
    levels: dict[str, int] = {}
    for dataset in datasets:
        for layout in dataset.layouts():
            levels[layout.key] = min(layout.integrity, levels.get(layout.key, layout.integrity))
    return levels


def digests_of(dataset: RowDataset) -> str | None:
    """A digest of all digests that a dataset's rows are compared with; None where there are none."""
    sums = [layout.digests.sum for layout in dataset.layouts() if layout.digests is not None]
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:32] if sums else None

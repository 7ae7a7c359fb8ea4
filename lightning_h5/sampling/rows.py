"""Sets of rows: ranges where they can be, numbers where not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..types import IntArray

__all__ = ["Rows", "as_array", "places_in", "union"]

Rows: TypeAlias = range | IntArray
"""Numbers of rows, in ascending order."""


def union(each: Sequence[Rows]) -> Rows:
    """All rows of some sets that are disjoint, in ascending order; a range where they are one.

    Args:
        each: the sets.
    """
    if len(each) == 1:
        return each[0]
    ranges = sorted((rows for rows in each if isinstance(rows, range)), key=lambda rows: (rows.step, rows.start))
    if len(ranges) == len(each) and len({rows.step for rows in ranges}) == 1:
        if all(rows.step == 1 for rows in ranges) and all(a.stop == b.start for a, b in pairwise(ranges)):
            return range(ranges[0].start, ranges[-1].stop)
        if [rows.start for rows in ranges] == list(range(ranges[0].step)):
            return range(max((rows[-1] + 1 for rows in ranges if rows), default=0))
    merged: IntArray = np.sort(np.concatenate([as_array(rows) for rows in each]))
    return merged


def as_array(rows: Rows) -> IntArray:
    """Rows as an array, none of them too."""
    return np.asarray(rows, dtype=np.int64)


def places_in(held: Rows, rows: Rows) -> Rows:
    """Where rows stand among those that are held.

    Args:
        held: in ascending order.
        rows: some of them.
    """
    if isinstance(held, range) and isinstance(rows, range):
        if not rows:
            return range(0)
        first, step = held.index(rows[0]), max(1, rows.step // held.step)
        return range(first, first + len(rows) * step, step)
    places: IntArray = np.searchsorted(held, rows).astype(np.int64)
    return places

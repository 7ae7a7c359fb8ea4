"""Runs of rows: a pure function that says which rows can be read in one piece."""

from __future__ import annotations

import numpy as np

from ..types import IntArray

__all__ = ["runs"]


def runs(rows: IntArray) -> tuple[IntArray, IntArray]:
    """Cuts a list of rows where the next row is not the one after.

    Args:
        rows: any rows, shape ``(n,)``.

    Returns:
        Positions in ``rows`` at which runs start and stop (exclusive), shape ``(n_runs,)`` each.
    """
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = np.concatenate([[0], breaks]) if len(rows) else breaks
    stops = np.concatenate([breaks, [len(rows)]]) if len(rows) else breaks
    return starts, stops

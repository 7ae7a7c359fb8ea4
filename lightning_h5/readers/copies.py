"""What copies decoded rows to where they belong, and changes them on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import IntArray
from .base import row_slices, take_rows
from .block_map import Pieces
from .block_sources import Change, CopyChange

__all__ = ["Copy", "CopyRows", "copy_on_all_cores", "copy_pieces"]

CopyRows = Callable[[npt.NDArray[Any], IntArray, IntArray | None], None]
"""Copies decoded rows to their destination.

Its arguments are the decoded rows, positions among them, and the numbers of these among the requested rows; None for
all, in order.
"""

LONG_RUN = 128
"""Rows of a run from which on it is copied as a whole."""


def copy_on_all_cores(
    rows: npt.NDArray[Any],
    places: IntArray,
    out_places: IntArray | None,
    *,
    out: npt.NDArray[Any],
    change: Change | None,
) -> None:
    """Copy all rows to ``out`` with the threads of torch, and change them there."""
    take_rows(rows, places, out, all_cores=True)
    if change is not None:
        change(out)


def copy_pieces(
    copy: CopyRows,
    rows: npt.NDArray[Any],
    firsts: IntArray,
    pieces: Pieces,
    are_there: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Copy runs of rows, as a whole if they are long: less work than to locate each row.

    Args:
        copy: copies them.
        rows: decoded rows.
        firsts: place of the first row of each run.
        pieces: the runs.
        are_there: which of them are there; None for all.
    """
    if isinstance(copy, Copy) and pieces.sizes is not None and pieces.n_rows >= LONG_RUN * len(pieces.sizes):
        starts, sizes = pieces.starts, pieces.sizes
        if are_there is not None:
            firsts, starts, sizes = firsts[are_there], starts[are_there], sizes[are_there]
        copy.runs(rows, firsts, starts, sizes)
        return
    places = pieces.of_rows(firsts)
    if are_there is None:
        copy(rows, places, None)
    else:
        out_places = np.flatnonzero(pieces.repeated(are_there))
        copy(rows, places[out_places], out_places)


class Copy:
    """Copies rows to memory, and changes them.

    Args:
        out: the memory.
        change: changes them; None for none.
    """

    def __init__(self, out: npt.NDArray[Any], change: CopyChange | None) -> None:
        self._out, self._change = out, change

    def __call__(self, rows: npt.NDArray[Any], places: IntArray, out_places: IntArray | None) -> None:
        """See ``CopyRows``."""
        out, change = self._out, self._change
        if change is not None and out.flags.c_contiguous:
            change.take(rows, places, out, out_places)
        elif out_places is None and out.flags.c_contiguous and out.dtype == rows.dtype:
            np.take(rows, places, axis=0, out=out, mode="clip")  # other modes allocate a buffer
        else:
            for part in row_slices(len(places), max(rows[:1].nbytes, out[:1].nbytes)):
                places_of_part = part if out_places is None else out_places[part]
                with np.errstate(all="ignore"):  # numbers too large for another dtype become infinite, as in torch
                    out[places_of_part] = _copies(rows, places[part], out.dtype, change)

    def runs(self, rows: npt.NDArray[Any], firsts: IntArray, starts: IntArray, sizes: IntArray) -> None:
        """Copy runs of rows.

        Args:
            rows: decoded rows.
            firsts: place of the first row of each run.
            starts: destination of each run.
            sizes: number of rows of each run.
        """
        out = self._out
        for first, start, size in zip(firsts.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            if self._change is not None:
                self(rows, np.arange(first, first + size), np.arange(start, start + size))
                continue
            with np.errstate(all="ignore"):  # as for single rows
                out[start : start + size] = rows[first : first + size]


def _copies(
    rows: npt.NDArray[Any], places: IntArray, dtype: np.dtype[Any], change: CopyChange | None
) -> npt.NDArray[Any]:
    if change is None:
        return np.take(rows, places, axis=0, mode="clip")
    copies = np.empty((len(places), *rows.shape[1:]), dtype)
    change.take(rows, places, copies)
    return copies

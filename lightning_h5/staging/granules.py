"""Granules, the units that a mirror has or lacks: which ones ranges of bytes need, and their marks.

A granule that is damaged is marked as missing, and fetched again. A reader compares the marks before and after reading.
If they differ, it reads the original file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..types import IntArray
from .checksums import MARK, SUM, sums_of_pieces

__all__ = [
    "GRANULE",
    "MARK",
    "granules_of",
    "is_present",
    "length_of",
    "marks_at",
    "runs_of",
    "sums_at",
    "sums_of",
    "widened",
]

GRANULE = 16 << 10
"""Bytes of a granule: a multiple of most block sizes of file systems, so that it takes no more disk space."""

ALIGNMENT = 64 << 10  # of the marks in a file: a multiple of all sizes of memory pages


def granules_of(offsets: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
    """Return the granules of pieces of a file, in the order of the pieces.

    Args:
        offsets: where each piece begins, shape ``(n_pieces,)``.
        sizes: bytes of each, at least one.

    Returns:
        The granules, which several pieces can share; and the position of each piece's first granule among them.
    """
    first = offsets // GRANULE
    counts = (offsets + sizes - 1) // GRANULE + 1 - first
    starts = np.cumsum(counts) - counts
    if len(counts) == int(counts.sum()):
        return first, starts
    return np.repeat(first - starts, counts) + np.arange(counts.sum()), starts


def runs_of(granules: IntArray, longest: int) -> Iterator[tuple[int, int]]:
    """Yield first and last granule (exclusive) of each run of neighbors.

    Args:
        granules: in ascending order, each once.
        longest: granules of a run; longer ones are cut.
    """
    if not len(granules):
        return
    cuts = np.flatnonzero(np.diff(granules) > 1) + 1
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(granules)], strict=True):
        first, stop = int(granules[low]), int(granules[high - 1]) + 1
        for start in range(first, stop, longest):
            yield start, min(start + longest, stop)


def widened(granules: IntArray, width: int, within: tuple[int, int]) -> IntArray:
    """Return granules together with their neighbors, in ascending order.

    Args:
        granules: some granules.
        width: granules that are taken together, in a grid that begins at granule 0.
        within: first and last byte (exclusive) that neighbors may have.
    """
    low, high = within[0] // GRANULE, -(-within[1] // GRANULE)
    blocks = np.unique(granules // width)
    neighbors = (blocks[:, np.newaxis] * width + np.arange(width)).reshape(-1)
    return np.union1d(granules, neighbors[(neighbors >= low) & (neighbors < high)])


def marks_at(n_bytes: int) -> int:
    """Return where the marks of a mirror begin in its file, from the size of its source."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def sums_at(n_bytes: int, size: int = GRANULE) -> int:
    """Return where the checksums of a mirror begin in its file, behind the marks, from the size of its source.

    Args:
        n_bytes: of the source.
        size: bytes of a granule.
    """
    return marks_at(n_bytes) + -(-n_bytes // (2 * size)) * 2 * MARK.itemsize


def length_of(n_bytes: int, size: int = GRANULE, n_sums: int = 1) -> int:
    """Return the length of a mirror's file, from the size of its source.

    Args:
        n_bytes: of the source.
        size: bytes of a granule.
        n_sums: checksums of each granule.
    """
    return sums_at(n_bytes, size) + -(-n_bytes // size) * n_sums * SUM.itemsize


def sums_of(data: memoryview | bytes, size: int = GRANULE) -> npt.NDArray[np.uint32]:
    """Return the checksums of granules that lie one after the other (see ``sums_at``)."""
    memory = np.frombuffer(data, np.uint8)
    return sums_of_pieces(memory, np.zeros(1, np.int64), np.array([len(memory)]), size)


def is_present(marks: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Return 1 for each granule that a mirror has, 0 for the others."""
    return marks & np.uint16(1)

"""Which rows a rank holds."""

from __future__ import annotations

import numpy as np

from ..errors import H5ValueError
from ..types import IntArray

__all__ = ["balanced_contiguous_shard", "interleaved_indices"]


def balanced_contiguous_shard(total: int, world_size: int, rank: int) -> tuple[int, int]:
    """A rank's contiguous piece of ``total`` rows; the pieces of two ranks differ by at most one row.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.

    Returns:
        First row, and the row after the last. The first ``total % world_size`` ranks have one row more.

    Raises:
        H5ValueError: the numbers make no sense.
    """
    _check(total, world_size, rank)
    size, rest = divmod(total, world_size)
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest)


def interleaved_indices(total: int, world_size: int, rank: int) -> IntArray:
    """Every ``world_size``-th of ``total`` rows, starting at ``rank``; shape ``(n,)``.

    Args:
        total: number of rows.
        world_size: number of ranks.
        rank: this rank, from 0.

    Raises:
        H5ValueError: the numbers make no sense.
    """
    _check(total, world_size, rank)
    return np.arange(rank, total, world_size, dtype=np.int64)


def _check(total: int, world_size: int, rank: int) -> None:
    if total < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise H5ValueError(
            f"a shard of total={total} rows was asked for rank={rank} of world_size={world_size}. "
            "Pass total >= 0, world_size >= 1 and a rank from 0 to world_size - 1."
        )

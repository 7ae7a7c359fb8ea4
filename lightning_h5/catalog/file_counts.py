"""Counts that a file states: checked against its arrays before any arithmetic, which could overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import IntArray

__all__ = ["boundaries_in", "counts_up_to", "ends_of"]


def counts_up_to(values: npt.NDArray[Any], maximum: int) -> IntArray | None:
    """Return whole numbers from 0 to ``maximum`` as int64; None if a value is out of this range.

    Args:
        values: of an integer dtype, shape ``(n,)``.
        maximum: the largest possible number, such as the rows of an array.
    """
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) <= maximum:
        return None
    return values.astype(np.int64)


def ends_of(lengths: npt.NDArray[Any], total: int) -> IntArray | None:
    """Return the ends of consecutive pieces; None if their lengths do not add up to ``total``.

    Args:
        lengths: of an integer dtype, shape ``(n,)``.
        total: the only possible sum.
    """
    counts = counts_up_to(lengths, total)
    if counts is None:
        return None
    ends = np.cumsum(counts)
    # The first sum beyond 64 bits is negative: both of its terms are below 2**63.
    is_right = int(ends[-1] if len(ends) else 0) == total and bool((ends >= 0).all())
    return ends if is_right else None


def boundaries_in(values: npt.NDArray[Any], total: int) -> IntArray | None:
    """Return ascending numbers from 0 to at most ``total``, the first of them 0; None if values are others."""
    bounds = counts_up_to(values, total)
    is_right = bounds is not None and len(bounds) and bounds[0] == 0 and (np.diff(bounds) >= 0).all()
    return bounds if is_right else None

"""Rows of a virtual array that are made of nothing: HDF5 reads them as the fill value, without a word."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Any

import h5py
import numpy as np

__all__ = ["unmapped_rows"]

MOST_RUNS = 1 << 24
"""Runs of rows that are looked at: each takes some 50 bytes of memory, and a few bytes of a file can name billions."""


def unmapped_rows(array: Any) -> int | None:
    """Rows of an open virtual array of which some element, or all, is made of nothing. Opens no source.

    Where a mapping names an element twice, another one of the same row may be missed.

    Args:
        array: h5py's dataset, with a row or more.

    Returns:
        How many; None where they are too many to be counted.
    """
    shape = array.shape
    places, changes, n_runs = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], 0
    for source in array.virtual_sources():
        for firsts, n_rows, n_elements in _runs(source.vspace, shape):
            n_runs += len(firsts)
            if n_runs > MOST_RUNS:
                return None
            begins = np.arange(firsts.start, firsts.stop, firsts.step, dtype=np.int64)
            places += [begins, np.minimum(begins + n_rows, shape[0])]
            changes += [np.full(len(begins), n_elements), np.full(len(begins), -n_elements)]
    # From one row to the next, what is mapped changes only where a run begins or ends.
    at = np.concatenate(places)
    order = np.argsort(at)
    mapped = np.cumsum(np.concatenate(changes)[order])
    return int(np.diff(at[order], append=shape[0])[mapped < math.prod(shape[1:])].sum())


def _runs(space: Any, shape: Sequence[int]) -> Iterator[tuple[range, int, int]]:
    """Where runs of rows begin that a selection is in, how many rows each has, and its elements in each of them."""
    kind = space.get_select_type()
    if kind == h5py.h5s.SEL_ALL:
        yield range(1), shape[0], math.prod(shape[1:])
    elif kind == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
        (firsts, n_rows), *others = starmap(_blocks, zip(*space.get_regular_hyperslab(), shape, strict=True))
        yield firsts, n_rows, math.prod(starmap(_length, zip(others, shape[1:], strict=True)))
    elif kind == h5py.h5s.SEL_HYPERSLABS:
        for first, last in space.get_select_hyper_blocklist().tolist():
            n_elements = math.prod(b + 1 - a for a, b in zip(first[1:], last[1:], strict=True))
            yield range(first[0], first[0] + 1), last[0] + 1 - first[0], n_elements


def _blocks(start: int, stride: int, count: int, block: int, size: int) -> tuple[range, int]:
    """Where blocks along an axis begin, and their length. Of an array that may grow they have no end by themselves."""
    start, stride, count, block, size = map(int, (start, stride, count, block, size))
    n = min(count, max(0, -(-(size - start) // stride)))
    if stride == block:  # one after the other
        return range(start, start + min(n, 1)), min(n * block, size)
    return range(start, start + n * stride, stride), min(block, size)


def _length(blocks: tuple[range, int], size: int) -> int:
    """Elements of such blocks that lie on the axis."""
    firsts, block = blocks
    return len(firsts) * block - max(0, firsts[-1] + block - size) if firsts else 0

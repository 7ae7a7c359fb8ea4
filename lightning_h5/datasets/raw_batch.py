"""Rows of a batch as they were read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ..readers.buffers import Column
from ..types import IntArray
from .bad_sample_ledger import BadSample

__all__ = ["RawBatch"]


class RawBatch(NamedTuple):
    """Rows as they were read, before any transform.

    Attributes:
        rows: the rows' numbers, as ``with_index`` gives them, shape ``(batch,)``.
        columns: for each field its rows.
        bad: the samples of the batch that could not be read, and are not among these.
    """

    rows: IntArray
    columns: tuple[Column, ...]
    bad: tuple[BadSample, ...] = ()

    def split(self, sizes: Sequence[int]) -> list[RawBatch]:
        """Return batches of these sizes, which are views of this one."""
        rows = [self.rows[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        return [RawBatch(*batch) for batch in zip(rows, self.split_columns(sizes), strict=True)]

    def split_columns(self, sizes: Sequence[int]) -> Iterator[tuple[Column, ...]]:
        """Return the columns of each of these batches."""
        columns = [
            torch.split_with_sizes(column, sizes)
            if isinstance(column, torch.Tensor)
            else [column[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
            for column in self.columns
        ]
        return zip(*columns, strict=True)

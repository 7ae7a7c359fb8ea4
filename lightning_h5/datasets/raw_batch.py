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
        rows: row numbers, shape ``(batch,)``.
        columns: the rows of each field.
        bad: samples of the batch that could not be read; ``rows`` and ``columns`` leave them out.
    """

    rows: IntArray
    columns: tuple[Column, ...]
    bad: tuple[BadSample, ...] = ()

    def split(self, sizes: Sequence[int]) -> list[RawBatch]:
        """Split the batch into batches of the given sizes, without copying."""
        rows = [self.rows[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        return [RawBatch(*batch) for batch in zip(rows, self.split_columns(sizes), strict=True)]

    def split_columns(self, sizes: Sequence[int]) -> Iterator[tuple[Column, ...]]:
        """Return the columns of each batch of ``split``."""
        columns = [
            torch.split_with_sizes(column, sizes)
            if isinstance(column, torch.Tensor)
            else [column[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
            for column in self.columns
        ]
        return zip(*columns, strict=True)

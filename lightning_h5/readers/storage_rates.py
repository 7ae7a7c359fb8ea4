"""Measure a disk's rate of single rows and of runs of rows within some milliseconds, for the log."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from ..hdf5 import ArrayLayout
from .contiguous import ContiguousReader

__all__ = ["storage_rates"]

N_SINGLE = 512  # rows that are read one by one
RUN_BYTES = 4 << 20  # of a run


def storage_rates(layout: ArrayLayout) -> tuple[float, float] | None:
    """Return the rows per second of single rows, and of a run of rows; None for an array with chunks.

    Rows in the page cache are faster than the disk.

    Args:
        layout: an array of rows.

    Raises:
        OSError: the file cannot be read.
    """
    if not layout.is_contiguous or layout.view is not None or layout.stacked or not layout.row_bytes:
        return None
    reader, random = ContiguousReader(layout), np.random.default_rng()
    single = np.sort(random.integers(layout.n_rows, size=min(N_SINGLE, layout.n_rows)))
    n_run = max(1, min(layout.n_rows, RUN_BYTES // layout.row_bytes))
    first = int(random.integers(layout.n_rows - n_run + 1))
    rates = []
    for rows in (single, np.arange(first, first + n_run)):
        began = perf_counter()
        reader.read(rows)
        rates.append(len(rows) / max(1e-9, perf_counter() - began))
    return rates[0], rates[1]

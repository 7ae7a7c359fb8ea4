"""How much HDF5's own cache may take, and hints to the system about rows that will be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..hdf5 import MAX_H5, OpenOptions
from ..options import FileOptions
from ..readers import is_pooled
from ..types import IntArray
from .row_table import RowTable

__all__ = ["ReadaheadHints", "chunk_cache"]


def chunk_cache(table: RowTable, budget: int, *, swmr: bool) -> int:
    """Return the bytes of HDF5's chunk cache of an array: room for the chunks of one row, as far as the budget goes.

    HDF5 keeps a cache for each open array, so the budget is shared among the arrays of the files that may be open.
    Arrays that are decoded in this package are read whole chunks at a time, and need none.
    """
    plain = OpenOptions(files=FileOptions(swmr=swmr))
    spans = [
        array.chunk_span_bytes
        for arrays in table.layouts.examples
        for array, is_held in zip(arrays, table.held, strict=True)
        if not is_held and not is_pooled(array, plain)
    ]
    n_open = max(1, min(len(table.paths), MAX_H5) * sum(not is_held for is_held in table.held))
    return max(64 << 10, min(budget // n_open, max([1 << 20, *spans])))


class ReadaheadHints:
    """Yields each run of rows once per epoch, on the first access to one of its rows.

    Args:
        rows_per_run: for each file, rows of a run; the last one may have fewer.
        n_rows: for each file, its rows.
    """

    def __init__(self, rows_per_run: Sequence[int], n_rows: Sequence[int]) -> None:
        self._rows_per_run, self._n_rows = rows_per_run, n_rows
        self._is_named = [np.zeros(-(-n // step), np.bool_) for n, step in zip(n_rows, rows_per_run, strict=True)]
        self._epoch: int | None = None

    def new(self, file: int, rows: IntArray, epoch: int) -> list[range]:
        """Return the runs that these rows are in and that this epoch has not named; two threads may both get one.

        Args:
            file: number of the file.
            rows: inside the file.
            epoch: of the plan that asks.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            for is_named in self._is_named:
                is_named[:] = False
        step, is_named = self._rows_per_run[file], self._is_named[file]
        runs = np.unique(rows // step)
        runs = runs[~is_named[runs]]
        is_named[runs] = True
        return [range(run * step, min(run * step + step, self._n_rows[file])) for run in runs.tolist()]

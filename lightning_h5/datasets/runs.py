"""Which runs of rows an order is about to ask for, so that the system can read each in one piece, ahead of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..types import IntArray

__all__ = ["RunsAhead"]


class RunsAhead:
    """Names each run of rows once an epoch, when the first of its rows is asked for.

    Args:
        rows_per_run: for each file, rows of a run; the last one may have fewer.
        n_rows: for each file, its rows.
    """

    def __init__(self, rows_per_run: Sequence[int], n_rows: Sequence[int]) -> None:
        self._rows_per_run, self._n_rows = rows_per_run, n_rows
        self._is_named = [np.zeros(-(-n // step), np.bool_) for n, step in zip(n_rows, rows_per_run, strict=True)]
        self._epoch: int | None = None

    def new(self, file: int, rows: IntArray, epoch: int) -> list[range]:
        """Runs of a file that these rows are in, and none before them in this epoch; two threads may both hear of one.

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

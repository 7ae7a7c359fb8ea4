"""What reading the rows of a table costs, how often an epoch reads each block, and hints about rows to come.

Also how much memory HDF5's own cache may take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..hdf5 import MAX_H5, OpenOptions
from ..options import FileOptions
from ..readers import BlockMap, is_pooled
from ..types import IntArray
from .base import ReadCost
from .patches import Patches
from .row_table import RowTable
from .sample_layout import FieldPlan
from .table_blocks import rows_per_block, unit_rows
from .windows import WholeSegments

__all__ = ["SAMPLES_AT_A_TIME", "ReadaheadHints", "chunk_cache", "cost_of_files", "reads_of_blocks"]

SAMPLES_AT_A_TIME = 1 << 14  # whose rows are counted


def cost_of_files(
    table: RowTable, plans: Sequence[FieldPlan], fields: Sequence[int], *, encoded_bytes: int, dense_bytes: int
) -> ReadCost:
    """Return what reading samples costs, as far as it follows from the files alone.

    Args:
        table: the files.
        plans: of all fields.
        fields: those that are read on demand.
        encoded_bytes: bytes of a row of the fields that are decoded one by one.
        dense_bytes: bytes of a sample's rows of sparse matrices that are dense in a batch.
    """
    kinds = table.layouts.examples
    of_segments = [field for field in fields if field in table.fields_of_segments]
    loose = [field for field in fields if not table.has_steps or table.has_steps[field]]
    loose_bytes = table.layouts.of_kinds(lambda arrays: sum(arrays[field].row_bytes for field in loose), object)
    n_rows = np.diff(table.starts)
    if of_segments:  # about as many of their bytes belong to a step
        sizes = table.layouts.of_kinds(lambda arrays: sum(arrays[field].n_bytes for field in of_segments), object)
        loose_bytes = loose_bytes + sizes // np.maximum(n_rows, 1)
        loose = [*loose, *of_segments]
    has_cheap_random_access = all(
        arrays[field].is_contiguous or arrays[field].rows_per_chunk == 1 for arrays in kinds for field in loose
    )
    rows_of_blocks = rows_per_block(table)
    row_bytes = sum(layout.row_bytes for layout in kinds[0]) + encoded_bytes
    if isinstance(table.sampling, Patches):
        return ReadCost(
            row_bytes=table.sampling.mean_bytes([plan.row_bytes for plan in plans]),
            has_cheap_random_access=False,
            block_bytes=max(1, table.sampling.block_bytes),
            decoded_bytes=sum(arrays[field].n_bytes for arrays in kinds for field in loose),
        )
    if (sampling := table.sampling) is not None:
        is_own = isinstance(sampling, WholeSegments) and len(sampling.segments) == len(table.layouts)
        is_placed = all(arrays[field].is_contiguous for arrays in kinds for field in loose)
        has_cheap_random_access = is_own or is_placed or (has_cheap_random_access and sampling.reach == 1)
        rows_of_blocks = np.minimum(unit_rows(table), n_rows)
        row_bytes = sampling.mean_bytes([array.row_bytes for array in kinds[0]]) + dense_bytes
    return ReadCost(
        row_bytes=row_bytes,
        has_cheap_random_access=has_cheap_random_access,
        block_bytes=int(max(1, (rows_of_blocks * loose_bytes).max())),
        decoded_bytes=int((n_rows * loose_bytes).sum()),
    )


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


def reads_of_blocks(table: RowTable, samples: IntArray | None, field: int, blocks: BlockMap) -> IntArray:
    """Return how often an epoch reads rows of each block; more than it can if that is not known.

    Args:
        table: the files, with a sampling.
        samples: those of an epoch; None for all.
        field: number of the field.
        blocks: of the field.
    """
    sampling = table.sampling
    assert sampling is not None, "each row is read once"
    if samples is None and sampling.segments.are_ascending:
        numbers, low, high = blocks.ranges()
        before, after = (sampling.n_reads_before(bounds, field) for bounds in (low, high))
        if before is None or after is None:
            return np.full(blocks.n_blocks, np.iinfo(np.int64).max)
        return np.bincount(numbers, weights=after - before, minlength=blocks.n_blocks).astype(np.int64)
    samples = np.arange(len(sampling)) if samples is None else samples
    found = np.zeros(blocks.n_blocks, dtype=np.int64)
    for start in range(0, len(samples), SAMPLES_AT_A_TIME):
        rows = table.rows_of(samples[start : start + SAMPLES_AT_A_TIME]).fields[field].rows
        found += np.bincount(blocks.locate(rows)[0], minlength=blocks.n_blocks)
    return found

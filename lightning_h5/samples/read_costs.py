"""Blocks of the rows of a table, what reading them costs, and how often an epoch reads each.

Also how much memory HDF5's own cache may take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..hdf5 import MAX_H5, ArrayLayout, OpenOptions
from ..options import FileOptions
from ..order import BlockTable
from ..readers import BlockMap, RowGrid, is_pooled
from ..types import IntArray, cached_property
from .indexer import SAMPLES_AT_A_TIME
from .row_table import RUN_BYTES, RowTable, lines_of

__all__ = ["ReadCost", "RowUnits", "blocks_of", "chunk_cache", "cost_of_files", "reads_of_blocks"]

UNIT_CHUNKS = 20
"""Chunks of a unit for each chunk that samples of two units share: a twentieth is decoded twice, at most."""


@dataclass(frozen=True)
class ReadCost:
    """What reading rows of a dataset costs. Orders, reading ahead and advice depend on it.

    Attributes:
        row_bytes: bytes of a row of all fields, as a batch is copied from them.
        has_cheap_random_access: random access is as cheap as sequential access; it is not if rows are decoded.
        block_bytes: decoded bytes of a block, the largest of all files; 1 if nothing is decoded.
        decoded_bytes: bytes of all rows of the files, decoded, except of arrays that are held whole; 0 if nothing is.
        stored_bytes: bytes of these arrays in their files.
        rows_per_chunk: rows that are decoded together, at most; 0 if nothing is.
        is_in_memory: all rows are in memory now, so that reading is copying.
        is_kept: all blocks are stored decoded now, and rows are read by position.
    """

    row_bytes: int
    has_cheap_random_access: bool = True
    block_bytes: int = 1
    decoded_bytes: int = 0
    stored_bytes: int = 0
    rows_per_chunk: int = 0
    is_in_memory: bool = False
    is_kept: bool = False

    @classmethod
    def of_several(cls, costs: Sequence[ReadCost]) -> ReadCost:
        """Return the cost of reading several datasets as one: the largest of each, and the sum of decoded bytes."""
        return cls(
            row_bytes=max(cost.row_bytes for cost in costs),
            has_cheap_random_access=all(cost.has_cheap_random_access for cost in costs),
            block_bytes=max(cost.block_bytes for cost in costs),
            decoded_bytes=sum(cost.decoded_bytes for cost in costs),
            stored_bytes=sum(cost.stored_bytes for cost in costs),
            rows_per_chunk=max(cost.rows_per_chunk for cost in costs),
            is_in_memory=all(cost.is_in_memory for cost in costs),
            is_kept=all(cost.is_kept for cost in costs),
        )


class RowUnits:
    """Where the rows of a table may be cut into blocks; see ``Units``.

    Args:
        table: the rows.
        of_all_fields: also of arrays that are held whole.
    """

    def __init__(self, table: RowTable, *, of_all_fields: bool = False) -> None:
        self._table = table
        self._is_held = [False] * table.n_fields if of_all_fields else table.held

    @property
    def starts(self) -> IntArray:
        """See ``Units.starts``."""
        return self._table.starts

    @property
    def rows_per_block(self) -> IntArray:
        """See ``Units.rows_per_block``: a run of about a megabyte if there are no chunks."""
        return self._table.layouts.of_kinds(lambda arrays: _rows_per_block(arrays, self._is_held))

    @property
    def rows_per_unit(self) -> IntArray:
        """See ``Units.rows_per_unit``.

        Samples share chunks with samples of the next block, so a block has enough chunks that few are decoded twice.
        """
        return self._units[:, 0]

    @property
    def bounds(self) -> IntArray:
        """See ``Units.bounds``."""
        starts, (sizes, periods) = self.starts, self._units.T
        if (sizes % np.maximum(periods, 1) == 0).all():  # also without lines
            n_units = -(-np.diff(starts) // sizes)
            inside = np.arange(n_units.sum()) - np.repeat(np.cumsum(n_units) - n_units, n_units)
            firsts: IntArray = np.repeat(starts[:-1], n_units) + inside * np.repeat(sizes, n_units)
            return np.append(firsts, starts[-1])
        units = []
        for first, end, size, period in zip(starts[:-1], starts[1:], sizes, periods, strict=True):
            if size % max(period, 1) == 0:
                units.append(np.arange(first, end, size))
            else:  # units end with each line, as chunks do
                lines = np.arange(first, end, period)
                units.append((lines[:, None] + np.arange(0, period, size)).reshape(-1))
        return np.concatenate([*units, starts[-1:]])

    @cached_property
    def _units(self) -> IntArray:
        """For each part the rows of a unit, and of a line that units end with; 0 if they do not."""
        layouts = self._table.layouts
        n_rows = np.diff(self.starts)[layouts.firsts].tolist()
        units = [self._unit(*kind) for kind in zip(layouts.examples, n_rows, strict=True)]
        return np.array(units, dtype=np.int64).reshape(-1, 2)[layouts.kinds]

    def _unit(self, arrays: Sequence[ArrayLayout], n_rows: int) -> tuple[int, int]:
        table = self._table
        fields = [field for field in table.step_fields if not self._is_held[field]]
        grids = [RowGrid.of(arrays[field], arrays[field].rows_per_chunk) for field in fields]
        n_lines = max((lines_of(arrays[field])[0] for field in fields), default=0)
        across = max((grid.across for grid in grids), default=1)
        along = [grid.along for field, grid in zip(fields, grids, strict=True) if not arrays[field].is_contiguous]
        if not fields or max(along, default=1) == 1:
            row_bytes = sum(arrays[field].row_bytes for field in fields or table.step_fields)
            return max(1, RUN_BYTES // max(1, row_bytes)), 0
        period = n_rows // n_lines if n_lines else 0
        if across > 1 and period:
            return across * period, period
        n_shared = -(-(table.indexer.reach - 1) // max(along))
        if table.n_segments > table.n_parts and not period:  # segments share chunks
            n_shared = max(1, n_shared)
        size = max(along) * (UNIT_CHUNKS * n_shared or 1)
        return (period if period and size >= period else size), period


def blocks_of(table: RowTable, samples: IntArray | None, *, of_all_fields: bool = False) -> BlockTable:
    """Return the block table of some samples.

    A block has the samples in one chunk of the coarsest array, or in a run of about a megabyte without chunks.

    Args:
        table: the rows.
        samples: which ones, in this order; None for all.
        of_all_fields: also consider fields that are read as a whole.
    """
    return table.indexer.blocks(RowUnits(table, of_all_fields=of_all_fields), samples)


def reads_of_blocks(table: RowTable, samples: IntArray | None, field: int, blocks: BlockMap) -> IntArray:
    """Return how often an epoch reads rows of each block of a field; more than it can if that is not known.

    Args:
        table: the rows.
        samples: the samples of an epoch; None for all.
        field: number of the field.
        blocks: the blocks of the field.
    """
    indexer = table.indexer
    if samples is None and indexer.segments.are_ascending:
        numbers, parts, low, high = blocks.ranges()
        firsts = table.rows_of_own(field, parts, low)
        before, after = (indexer.n_reads_before(rows, field) for rows in (firsts, firsts + high - low))
        if before is None or after is None:
            return np.full(blocks.n_blocks, np.iinfo(np.int64).max)
        return np.bincount(numbers, weights=after - before, minlength=blocks.n_blocks).astype(np.int64)
    samples = np.arange(len(indexer)) if samples is None else samples
    counts = np.zeros(blocks.n_blocks, dtype=np.int64)
    for start in range(0, len(samples), SAMPLES_AT_A_TIME):
        boxes = table.boxes(indexer.rows_of(samples[start : start + SAMPLES_AT_A_TIME]).fields)[field]
        counts += np.bincount(blocks.locate(boxes)[0], minlength=blocks.n_blocks)
    return counts


def _rows_per_block(arrays: Sequence[ArrayLayout], held: Sequence[bool]) -> int:
    loose = [array for array, is_held in zip(arrays, held, strict=True) if not is_held]
    coarsest = max((array.rows_per_chunk for array in loose if not array.is_contiguous), default=1)
    if coarsest > 1:
        return coarsest
    return max(1, RUN_BYTES // max(1, sum(array.row_bytes for array in loose or arrays)))


def cost_of_files(
    table: RowTable, fields: Sequence[int], *, encoded_bytes: Sequence[int], dense_bytes: int
) -> ReadCost:
    """Return the cost of reading samples, as far as it depends on the files alone.

    Args:
        table: the files.
        fields: the fields that are read on demand.
        encoded_bytes: for each field the bytes of a row that is decoded by itself; 0 for others.
        dense_bytes: bytes of a sample's rows of sparse matrices that are dense in a batch.
    """
    kinds, indexer = table.layouts.examples, table.indexer
    of_segments = [field for field in fields if field in table.fields_of_segments]
    loose = [field for field in fields if table.has_steps[field]]
    loose_bytes = table.layouts.of_kinds(lambda arrays: sum(arrays[field].row_bytes for field in loose), object)
    n_rows = np.diff(table.starts)
    if of_segments:  # about as many of their bytes belong to a step
        sizes = table.layouts.of_kinds(lambda arrays: sum(arrays[field].n_bytes for field in of_segments), object)
        loose_bytes = loose_bytes + sizes // np.maximum(n_rows, 1)
        loose = [*loose, *of_segments]
    arrays_read = [arrays[field] for arrays in kinds for field in loose]
    stored_row_bytes = table.layouts.of_kinds(
        lambda arrays: sum(_stored_row_bytes(arrays[field]) for field in loose), float
    )
    sizes_read = [array.row_bytes + extra for array, extra in zip(table.as_read, encoded_bytes, strict=True)]
    return ReadCost(
        row_bytes=indexer.mean_bytes(sizes_read) + dense_bytes,
        has_cheap_random_access=indexer.is_cheap(
            by_rows=all(array.is_contiguous or array.rows_per_chunk == 1 for array in arrays_read),
            by_steps=all(array.is_contiguous for array in arrays_read),
            n_parts=table.n_parts,
        ),
        block_bytes=indexer.block_bytes(RowUnits(table), loose_bytes),
        decoded_bytes=int((n_rows * loose_bytes).sum()),
        stored_bytes=int((n_rows * stored_row_bytes).sum()),
    )


def _stored_row_bytes(array: ArrayLayout) -> float:
    return array.n_stored_bytes / max(1, array.n_rows)


def chunk_cache(table: RowTable, budget: int, files: FileOptions) -> int:
    """Return the bytes of HDF5's chunk cache per array: enough for the chunks of one row, within the budget.

    HDF5 keeps a cache for each open array, so the budget is shared among the arrays of the files that may be open.
    Arrays that are decoded in this package are read whole chunks at a time, and need none.
    """
    plain = OpenOptions(files=files)
    spans = [
        array.chunk_span_bytes
        for arrays in table.layouts.examples
        for array, is_held in zip(arrays, table.held, strict=True)
        if not is_held and not is_pooled(array, plain)
    ]
    n_open = max(1, min(len(table.paths), MAX_H5) * sum(not is_held for is_held in table.held))
    return max(64 << 10, min(budget // n_open, max([1 << 20, *spans])))

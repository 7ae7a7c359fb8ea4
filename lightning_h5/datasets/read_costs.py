"""Blocks of the rows of a table, what reading them costs, and how often an epoch reads each.

Also how much memory HDF5's own cache may take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..hdf5 import MAX_H5, ArrayLayout, OpenOptions
from ..options import FileOptions
from ..order import BlockTable
from ..readers import BlockMap, is_pooled
from ..types import IntArray
from .base import ReadCost
from .patches import Patches
from .row_table import RUN_BYTES, RowTable
from .sample_layout import FieldPlan
from .segments import Sampling
from .windows import WholeSegments

__all__ = [
    "SAMPLES_AT_A_TIME",
    "blocks_of",
    "chunk_cache",
    "cost_of_files",
    "reads_of_blocks",
    "rows_per_block",
    "unit_rows",
]

UNIT_CHUNKS = 20
"""Chunks of a unit for each chunk that samples of two units share: a twentieth is decoded twice, at most."""


def rows_per_block(table: RowTable) -> IntArray:
    """Return for each file, or part, the rows of its blocks; the last one may have fewer."""
    return table.layouts.of_kinds(lambda arrays: _rows_per_block(arrays, table.held))


def blocks_of(table: RowTable, samples: IntArray | None, *, of_all_fields: bool = False) -> BlockTable:
    """Return the block table of some samples.

    A block is what shares one chunk of the coarsest array; a run of about a megabyte if there are no chunks.

    Args:
        table: the rows.
        samples: which ones, in this order; None for all.
        of_all_fields: also of those that are held whole.
    """
    if table.sampling is not None:
        return _blocks_of_samples(table, table.sampling, samples, of_all_fields=of_all_fields)
    steps = rows_per_block(table)
    if of_all_fields:
        steps = table.layouts.of_kinds(lambda arrays: _rows_per_block(arrays, [False] * len(arrays)))
    if samples is None:
        sizes = [
            size
            for step, n in zip(steps.tolist(), np.diff(table.starts).tolist(), strict=True)
            for size in [step] * (n // step) + [n % step]
        ]
        return BlockTable.of_sizes(sizes)
    files, local = table.locate(samples)
    blocks = local // steps[files]
    cuts = np.flatnonzero((np.diff(files) != 0) | (np.diff(blocks) != 0)) + 1
    return BlockTable.of_sizes(np.diff(np.concatenate([[0], cuts, [len(samples)]])))


def _blocks_of_samples(
    table: RowTable, sampling: Sampling, samples: IntArray | None, *, of_all_fields: bool
) -> BlockTable:
    """Return the block table of samples of several rows: what is around rows of one unit (see ``unit_rows``)."""
    if not len(sampling):
        return BlockTable.of_sizes([0])
    if isinstance(sampling, Patches):
        sizes = sampling.block_sizes()
        if samples is not None:
            blocks = np.searchsorted(np.cumsum(sizes), samples, side="right")
            sizes = np.diff(np.concatenate([[0], np.flatnonzero(np.diff(blocks)) + 1, [len(samples)]]))
        return BlockTable.of_sizes(sizes)
    bounds = np.append(_unit_bounds(table, of_all_fields=of_all_fields), table.starts[-1])
    segments = sampling.segments
    if samples is None and segments.are_ascending:
        before = sampling.n_before(bounds)
        before[-1] = len(sampling)  # a segment without steps may be at the very end
        return BlockTable.of_sizes(np.diff(before, prepend=0) if len(before) == 1 else np.diff(before))
    samples = np.arange(len(sampling)) if samples is None else samples
    places = sampling.places(samples)
    rows = segments.rows_at(segments.steps[0].firsts_of(places.segments) + places.steps)
    units = np.searchsorted(bounds, rows, side="right")
    cuts = np.flatnonzero(np.diff(units)) + 1
    return BlockTable.of_sizes(np.diff(np.concatenate([[0], cuts, [len(samples)]])))


def _unit_bounds(table: RowTable, *, of_all_fields: bool) -> IntArray:
    """Return the first row of each unit, part by part."""
    sizes, periods = _units(table, of_all_fields=of_all_fields).T
    if (sizes % np.maximum(periods, 1) == 0).all():  # also without lines
        n_units = -(-np.diff(table.starts) // sizes)
        inside = np.arange(n_units.sum()) - np.repeat(np.cumsum(n_units) - n_units, n_units)
        firsts: IntArray = np.repeat(table.starts[:-1], n_units) + inside * np.repeat(sizes, n_units)
        return firsts
    found = []
    for first, end, size, period in zip(table.starts[:-1], table.starts[1:], sizes, periods, strict=True):
        if size % max(period, 1) == 0:
            found.append(np.arange(first, end, size))
        else:  # units end with each line, as chunks do
            lines = np.arange(first, end, period)
            found.append((lines[:, None] + np.arange(0, period, size)).reshape(-1))
    return np.concatenate(found)


def unit_rows(table: RowTable) -> IntArray:
    """Return for each part the rows that the samples of a block are around.

    Samples share chunks with those of the next block, so a block is so many chunks long that few are decoded twice.
    """
    return _units(table, of_all_fields=False)[:, 0]


def _units(table: RowTable, *, of_all_fields: bool) -> IntArray:
    """Return for each part the rows of a unit, and of a line that units end with; 0 if they do not."""
    return table.layouts.of_kinds(lambda arrays: _unit(table, arrays, of_all_fields=of_all_fields))


def _unit(table: RowTable, arrays: Sequence[ArrayLayout], *, of_all_fields: bool = False) -> tuple[int, int]:
    """Return the rows of a unit of a part, and the rows of a line if chunks end with each line; otherwise 0."""
    assert table.sampling is not None, "samples are rows"
    fields = [field for field in table.step_fields if of_all_fields or not table.held[field]]
    views = [arrays[field].view for field in fields]
    lines = {view.period for view in views if view is not None and len(view.row_axes) > 1}
    across = max((view.block[0] for view in views if view is not None and len(view.row_axes) > 1), default=1)
    along = [
        arrays[field].rows_per_chunk if view is None else view.block[-1] if view.block else 1
        for field, view in zip(fields, views, strict=True)
        if not arrays[field].is_contiguous
    ]
    if not fields or max(along, default=1) == 1:
        row_bytes = sum(arrays[field].row_bytes for field in fields or table.step_fields)
        return max(1, RUN_BYTES // max(1, row_bytes)), 0
    period = max(lines, default=0)
    if across > 1 and period:
        return across * period, period
    n_shared = -(-(table.sampling.reach - 1) // max(along))
    if len(table.sampling.segments) > table.n_parts and not period:  # segments share chunks
        n_shared = max(1, n_shared)
    size = max(along) * (UNIT_CHUNKS * n_shared or 1)
    return (period if period and size >= period else size), period


def _rows_per_block(arrays: Sequence[ArrayLayout], held: Sequence[bool]) -> int:
    loose = [array for array, is_held in zip(arrays, held, strict=True) if not is_held]
    coarsest = max((array.rows_per_chunk for array in loose if not array.is_contiguous), default=1)
    if coarsest > 1:
        return coarsest
    return max(1, RUN_BYTES // max(1, sum(array.row_bytes for array in loose or arrays)))


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
    stored_row_bytes = table.layouts.of_kinds(
        lambda arrays: sum(_stored_row_bytes(arrays[field]) for field in loose), float
    )
    stored_bytes = int((n_rows * stored_row_bytes).sum())
    rows_of_blocks = rows_per_block(table)
    row_bytes = sum(layout.row_bytes for layout in kinds[0]) + encoded_bytes
    if isinstance(table.sampling, Patches):
        return ReadCost(
            row_bytes=table.sampling.mean_bytes([plan.row_bytes for plan in plans]),
            has_cheap_random_access=False,
            block_bytes=max(1, table.sampling.block_bytes),
            decoded_bytes=sum(arrays[field].n_bytes for arrays in kinds for field in loose),
            stored_bytes=stored_bytes,
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
        stored_bytes=stored_bytes,
    )


def _stored_row_bytes(array: ArrayLayout) -> float:
    return array.n_stored_bytes / max(1, array.n_rows)


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

"""Blocks of the rows of a table, as orders see them: what is read or decoded together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..hdf5 import ArrayLayout
from ..order import BlockTable
from ..types import IntArray
from .patches import Patches
from .row_table import RUN_BYTES, RowTable
from .segments import Sampling

__all__ = ["blocks_of", "rows_per_block", "unit_rows"]

UNIT_CHUNKS = 20
"""Chunks of a unit for each chunk that samples of two units share: a twentieth is decoded twice, at most."""


def rows_per_block(table: RowTable) -> IntArray:
    """For each file, or part, the rows of its blocks; the last one may have fewer."""
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
    """For each part, the rows that the samples of a block are around.

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

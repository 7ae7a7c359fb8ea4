"""Which reader an array gets. That follows from its layout, never from the user."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import ArrayLayout, OpenOptions, kind_of
from ..types import IntArray, RowReader
from .base import LayoutReader
from .bulk import ArrayTarget, bulk_tasks
from .chunk_cache import InMemoryReader
from .chunk_loader import Change, ChunkLoader, PreparedSource, ReaderSource, SlabSource
from .chunked import ChunkedReader
from .contiguous import ContiguousReader, MappedReader
from .digesting import compared
from .filters import why_not_decodable
from .h5py_reader import H5pyReader
from .heaps import heap_guard
from .thread_pool import TaskQueue

__all__ = ["fallback_reason", "is_pooled", "open_chunked", "open_reader", "open_source"]

MIN_PREPARED = 128 << 10  # bytes of a slab

MIN_COMPILED = 64 << 20
"""Decoded bytes of what is worth a second or two of compiling, where it is decoded anew in each epoch. An epoch of so
many takes a tenth of a second, of which compiled code spares a tenth to a half."""


def open_reader(
    layout: ArrayLayout,
    options: OpenOptions,
    *,
    mmap: bool = False,
    held_bytes: int = 0,
    counters: Counters | None = None,
) -> RowReader:
    """The reader for the rows of one file's array, each read where it is asked. Opens nothing yet.

    Args:
        layout: the array.
        options: how its file is opened where the HDF5 library reads.
        mmap: map contiguous arrays into memory (see ``MappedReader`` for the risk).
        held_bytes: keep all rows in memory after the first read, if text does not turn out longer; 0 does not.
        counters: where bytes read and decoded are counted.
    """
    reader: LayoutReader
    guard = None
    if not layout.is_placed:
        guard = heap_guard(layout, options)
        reader = H5pyReader(layout, options, counters, guard)
    elif mmap and not held_bytes and layout.offset is not None:
        reader = MappedReader(layout, counters)
    else:
        reader = ContiguousReader(layout, counters)
    reader = compared(reader, layout, options)
    if not held_bytes:
        return reader
    is_decoded = is_pooled(layout, options) and fallback_reason(layout) is None
    read_all = partial(_read_all, layout, options, counters) if is_decoded else None
    return InMemoryReader(reader, held_bytes, read_all, None if guard is None else guard.n_bytes)


def _read_all(layout: ArrayLayout, options: OpenOptions, counters: Counters | None) -> npt.NDArray[Any]:
    """All rows of a chunked array, in this thread, without the HDF5 library."""
    rows = np.empty((layout.n_rows, *layout.row_shape), dtype=layout.dtype)
    source = open_source(layout, options, 1, counters or Counters())
    for task in bulk_tasks(source, layout, range(layout.n_rows), ArrayTarget(rows), 0):
        task.run()
    return rows


def is_pooled(layout: ArrayLayout, options: OpenOptions) -> bool:
    """Whether rows of an array are decoded in company, and so kept for a while."""
    if layout.storage != "chunked" or layout.is_placed or not layout.row_bytes or kind_of(layout.dtype) != "number":
        return False
    if options.swmr:  # a live writer moves the chunk that it writes to
        return False
    return fallback_reason(layout) is None or layout.rows_per_chunk > 1


def fallback_reason(layout: ArrayLayout) -> str | None:
    """Why the HDF5 library reads an array, with its lock, in a few words; None where a faster way does."""
    if layout.plain_reason is not None or layout.is_placed or layout.storage != "chunked":
        return layout.plain_reason
    return why_not_decodable(layout)


def open_chunked(
    layouts: Sequence[ArrayLayout],
    options: OpenOptions,
    *,
    rows_per_run: Sequence[int],
    n_bytes: int,
    work: TaskQueue,
    counters: Counters,
    rows: IntArray | None = None,
    keeps: bool | None = None,
    prepare: Change | None = None,
    dtype: np.dtype[Any] | None = None,
) -> ChunkedReader:
    """The reader for one field of all files, for arrays that are decoded a slab at a time. Opens nothing yet.

    Args:
        layouts: each file's array.
        options: how files are opened where the HDF5 library reads.
        rows_per_run: for each file, rows that are read together where there are no chunks.
        n_bytes: memory for decoded slabs.
        work: where loading is shared among threads.
        counters: where bytes and slabs are counted.
        rows: rows that the dataset has; None for all.
        keeps: see ``ChunkedReader``.
        prepare: changes rows of ``dtype``: as they are copied out of slabs; or as soon as they are decoded, in slabs
            that are decoded whole, are not small and are of this dtype, where they stay for later epochs, or where
            copying does not change them at once.
        dtype: what rows are read as, where something is done to them; None as they are stored.
    """
    sources = [open_source(a, options, run, counters) for a, run in zip(layouts, rows_per_run, strict=True)]
    change = prepare
    stays = _holds_all(sources, layouts, n_bytes) if keeps is None else keeps
    if not stays and sum(layout.n_rows * layout.row_bytes for layout in layouts) >= MIN_COMPILED:
        for source in sources:
            if isinstance(source, ChunkLoader):
                source.compile()
    is_early = prepare is not None and (stays or not prepare.takes_at_once)
    if prepare is not None and is_early and dtype in (None, layouts[0].dtype) and _may_change_slabs(sources, layouts):
        sources, change = [PreparedSource(source, prepare) for source in sources], None
    return ChunkedReader(
        layouts, sources, n_bytes=n_bytes, work=work, counters=counters, rows=rows, keeps=keeps, change=change
    )


def _may_change_slabs(sources: Sequence[SlabSource], layouts: Sequence[ArrayLayout]) -> bool:
    # Threads that do little at a time would spend their time waiting for the interpreter's lock.
    return all(
        source.n_parts == 1 and source.rows_per_slab * array.row_bytes >= MIN_PREPARED
        for source, array in zip(sources, layouts, strict=True)
    )


def _holds_all(sources: Sequence[SlabSource], layouts: Sequence[ArrayLayout], n_bytes: int) -> bool:
    """Whether all slabs have a place in so much memory."""
    n_slabs = sum(-(-source.n_rows // source.rows_per_slab) for source in sources)
    return n_slabs * max(source.rows_per_slab for source in sources) * layouts[0].row_bytes <= n_bytes


def open_source(layout: ArrayLayout, options: OpenOptions, rows_per_run: int, counters: Counters) -> SlabSource:
    """Where the slabs of one file's array come from. Opens nothing yet.

    Args:
        layout: an array of numbers.
        options: how its file is opened where the HDF5 library reads.
        rows_per_run: rows that are read together where there are no chunks.
        counters: where bytes are counted.
    """
    if layout.is_placed:
        return ReaderSource(compared(ContiguousReader(layout, counters), layout, options), rows_per_run)
    # A live writer moves the chunk that it writes to.
    if fallback_reason(layout) is None and layout.table is not None and not options.swmr:
        return ChunkLoader(layout, counters)
    reader = H5pyReader(layout, options, counters, heap_guard(layout, options))
    return ReaderSource(compared(reader, layout, options), layout.chunks[0] if layout.chunks else rows_per_run)

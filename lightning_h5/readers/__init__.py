"""Rows in, ndarray out. Which reader an array gets follows from its layout, never from the user."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import ArrayLayout, OpenOptions, kind_of
from ..stats import Counters
from ..types import IntArray, RowReader
from .base import blocks, check_bounds
from .bulk import ArrayTarget, BulkTarget, BulkTask, bulk_tasks, do_tasks, first_places
from .codecs import why_not_decodable
from .digesting import CheckedRowSource, can_digest, digest_tasks, verify_tasks
from .heaps import HeapGuard, heap_guard
from .held import HeldReader
from .placed import MappedReader, PlacedReader
from .plain import PlainReader
from .pooled import BegunRead, PooledReader
from .slabs import SlotMemory
from .sources import Change, ChunkSource, PreparedSource, ReaderSource, SlabSource
from .work import Work, usable_cores

__all__ = [
    "ArrayTarget",
    "BegunRead",
    "BulkTarget",
    "BulkTask",
    "Change",
    "ChunkSource",
    "HeapGuard",
    "HeldReader",
    "MappedReader",
    "PlacedReader",
    "PlainReader",
    "PooledReader",
    "PreparedSource",
    "ReaderSource",
    "SlabSource",
    "SlotMemory",
    "Work",
    "blocks",
    "bulk_tasks",
    "can_digest",
    "check_bounds",
    "digest_tasks",
    "do_tasks",
    "first_places",
    "heap_guard",
    "is_checked_by_slab",
    "is_pooled",
    "open_pooled",
    "open_reader",
    "open_source",
    "usable_cores",
    "verify_tasks",
    "why_plain",
]


LEAST_PREPARED = 128 << 10  # bytes of a slab

LEAST_COMPILED = 64 << 20
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
    reader: RowReader
    guard = None
    if not layout.is_placed:
        guard = heap_guard(layout, options)
        reader = PlainReader(layout, options, counters, guard)
    elif mmap and not held_bytes and layout.offset is not None:
        reader = MappedReader(layout, counters)
    else:
        reader = PlacedReader(layout, counters)
    if not held_bytes:
        return reader
    is_decoded = is_pooled(layout, options) and why_plain(layout) is None
    read_all = partial(_read_all, layout, options, counters) if is_decoded else None
    return HeldReader(reader, held_bytes, read_all, None if guard is None else guard.n_bytes)


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
    return why_plain(layout) is None or layout.rows_per_chunk > 1


def is_checked_by_slab(layout: ArrayLayout, options: OpenOptions) -> bool:
    """Whether the slabs of ``open_source`` are compared with digests while they are loaded.

    Others have to be compared apart, by ``verify_tasks``.
    """
    if layout.digests is None or layout.digests.kind == "values":
        return False
    # A live writer moves the chunk that it writes to.
    return layout.table is None or (not options.swmr and why_not_decodable(layout) is None)


def why_plain(layout: ArrayLayout) -> str | None:
    """Why the HDF5 library reads an array, with its lock, in a few words; None where a faster way does."""
    if layout.plain_reason is not None or layout.is_placed or layout.storage != "chunked":
        return layout.plain_reason
    return why_not_decodable(layout)


def open_pooled(
    layouts: Sequence[ArrayLayout],
    options: OpenOptions,
    *,
    rows_per_run: Sequence[int],
    n_bytes: int,
    work: Work,
    counters: Counters,
    rows: IntArray | None = None,
    keeps: bool | None = None,
    prepare: Change | None = None,
    dtype: np.dtype[Any] | None = None,
) -> PooledReader:
    """The reader for one field of all files, for arrays that are decoded a slab at a time. Opens nothing yet.

    Args:
        layouts: each file's array.
        options: how files are opened where the HDF5 library reads.
        rows_per_run: for each file, rows that are read together where there are no chunks.
        n_bytes: memory for decoded slabs.
        work: where loading is shared among threads.
        counters: where bytes and slabs are counted.
        rows: rows that the dataset has; None for all.
        keeps: see ``PooledReader``.
        prepare: changes rows of ``dtype``: as they are copied out of slabs; or as soon as they are decoded, in slabs
            that are decoded whole, are not small and are of this dtype, where they stay for later epochs, or where
            copying does not change them at once.
        dtype: what rows are read as, where something is done to them; None as they are stored.
    """
    sources = [open_source(a, options, run, counters) for a, run in zip(layouts, rows_per_run, strict=True)]
    change = prepare
    stays = _holds_all(sources, layouts, n_bytes) if keeps is None else keeps
    if not stays and sum(layout.n_rows * layout.row_bytes for layout in layouts) >= LEAST_COMPILED:
        for source in sources:
            if isinstance(source, ChunkSource):
                source.compile()
    is_early = prepare is not None and (stays or not prepare.takes_at_once)
    if prepare is not None and is_early and dtype in (None, layouts[0].dtype) and _may_change_slabs(sources, layouts):
        sources, change = [PreparedSource(source, prepare) for source in sources], None
    reader = PooledReader(
        layouts, sources, n_bytes=n_bytes, work=work, counters=counters, rows=rows, keeps=keeps, change=change
    )
    reader.is_prepared = prepare is not None
    return reader


def _may_change_slabs(sources: Sequence[SlabSource], layouts: Sequence[ArrayLayout]) -> bool:
    # Threads that do little at a time would spend their time waiting for the interpreter's lock.
    return all(
        source.n_parts == 1 and source.rows_per_slab * array.row_bytes >= LEAST_PREPARED
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
    if is_checked_by_slab(layout, options):
        return ChunkSource(layout, counters) if layout.table is not None else CheckedRowSource(layout, counters)
    if layout.is_placed:
        return ReaderSource(PlacedReader(layout, counters), rows_per_run)
    # A live writer moves the chunk that it writes to.
    if why_plain(layout) is None and layout.table is not None and not options.swmr:
        return ChunkSource(layout, counters)
    reader = PlainReader(layout, options, counters, heap_guard(layout, options))
    return ReaderSource(reader, layout.chunks[0] if layout.chunks else rows_per_run)

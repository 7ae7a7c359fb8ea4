"""Choose the reader of an array: from its layout alone. All readers return identical values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import ArrayLayout, ArrayView, OpenOptions, check_decoding_memory, is_out_of_proportion, kind_of
from ..types import IntArray, RowReader
from .base import InMemoryReader, LayoutReader, ValueReader
from .block_map import BlockMap, RowGrid
from .block_sources import BlockSource, BlockSources, Change, FieldLayouts, PreparedSource, ReaderSource
from .bulk import ArrayTarget, bulk_tasks
from .chunk_loader import ChunkLoader
from .chunked import Changes, ChunkedReader, CountReads
from .codecs import Unpack, unpack_loops
from .contiguous import ContiguousReader, MappedReader, RunsReader
from .decoded import DecodedCopies, DecodedReader, DecodedSource, EncodedReader
from .digest_reader import DigestReader
from .filters.pipeline import why_not_decodable
from .h5py_reader import H5pyReader
from .row_codecs import RowCodec
from .stacked import StackReader, StackSource
from .thread_pool import TaskQueue
from .view_source import BlockReader, ViewSource

__all__ = ["fallback_reason", "is_pooled", "open_chunked", "open_reader", "open_source"]

MIN_PREPARED = 128 << 10  # bytes of a block

MIN_COMPILED = 64 << 20
"""Decoded bytes from which on compiling is worth a second or two, for arrays that are decoded in each epoch: an epoch
takes a tenth of a second, and compiled code saves a tenth to a half of it."""


def open_reader(
    layout: ArrayLayout,
    options: OpenOptions,
    *,
    mmap: bool = False,
    held_bytes: int = 0,
    in_blocks: bool = False,
    counters: Counters | None = None,
    work: TaskQueue | None = None,
) -> RowReader:
    """Return a reader for single rows of one file's array. Opens nothing yet.

    Args:
        layout: the array.
        options: how its file is opened if the HDF5 library reads.
        mmap: map contiguous arrays into memory (see ``MappedReader`` for the risk), unless their file is staged.
        in_blocks: decode whole blocks here instead of reading rows through the HDF5 library, if that is possible.
        held_bytes: keep all rows in memory after the first read, text up to this length; 0 keeps none.
        counters: counts bytes read and decoded.
        work: shares the decoding of images among threads.
    """
    is_held = held_bytes > 0
    reader = _layout_reader(
        layout, options, mmap=mmap, is_held=is_held, in_blocks=in_blocks, counters=counters, work=work
    )
    if not is_held or isinstance(reader, EncodedReader | ValueReader):
        return reader
    is_one_array = layout.view is None and (layout.decoding is not None or not layout.stacked)
    is_decoded = is_one_array and _is_decoded_here(layout, options)
    read_all = partial(_read_all, layout, options, counters) if is_decoded else None
    open_blocks = partial(_layout_reader, layout, options, in_blocks=True, counters=counters) if is_decoded else None
    return InMemoryReader(reader, held_bytes, read_all, open_blocks, layout.rows_per_chunk if is_decoded else 1)


def _layout_reader(
    layout: ArrayLayout,
    options: OpenOptions,
    *,
    mmap: bool = False,
    is_held: bool = False,
    in_blocks: bool = False,
    counters: Counters | None = None,
    work: TaskQueue | None = None,
) -> LayoutReader:
    """Return a reader that holds no rows (see ``open_reader``); ``is_held`` if another one will hold its rows."""
    if layout.stacked and layout.decoding is None:
        open_layout = partial(
            _layout_reader, options=options, mmap=mmap, in_blocks=in_blocks, counters=counters, work=work
        )
        return StackReader(layout, [open_layout(array) for array in layout.stacked], counters)
    if layout.value is not None and layout.decoding is None:
        return ValueReader(layout, counters)
    if (runs := layout.runs) is not None:
        return RunsReader(layout, runs, counters)
    if layout.view is not None and layout.decoding is None:
        return BlockReader(layout, _view_source(layout, layout.view, options, counters or Counters()), counters)
    if (decoding := layout.decoding) is not None:
        stored = _layout_reader(decoding.array, options, mmap=mmap, in_blocks=in_blocks, counters=counters)
        if isinstance(decoding.codec, RowCodec):
            return EncodedReader(layout, decoding.codec, stored, work, counters)
        decoded = DecodedReader(layout, decoding, stored, counters)
        if layout.n_bytes >= MIN_COMPILED and not is_held:
            decoded.compile()
        return decoded
    reader: LayoutReader
    if (in_blocks or is_out_of_proportion(layout.filters)) and _is_decoded_here(layout, options):
        reader = BlockReader(layout, open_source(layout, options, 1, counters or Counters()), counters)
    elif not layout.is_contiguous:
        reader = H5pyReader(layout, options, counters)
    elif mmap and not is_held and layout.offset is not None and layout.guard.staging is None:
        reader = MappedReader(layout, counters)
    else:
        reader = ContiguousReader(layout, counters)
    return _checked_by_digests(reader, layout, options)


def _is_decoded_here(layout: ArrayLayout, options: OpenOptions) -> bool:
    """Return whether whole blocks of an array are decoded without the HDF5 library."""
    return is_pooled(layout, options) and fallback_reason(layout) is None


def _read_all(layout: ArrayLayout, options: OpenOptions, counters: Counters | None) -> npt.NDArray[Any]:
    """Read all rows of a chunked array, in this thread, without the HDF5 library."""
    rows = np.empty((layout.n_rows, *layout.row_shape), dtype=layout.dtype)
    source = open_source(layout, options, 1, counters or Counters())
    for task in bulk_tasks(source, layout, range(layout.n_rows), ArrayTarget(rows), 0):
        task.run()
    return rows


def is_pooled(layout: ArrayLayout, options: OpenOptions, *, in_runs: bool = False) -> bool:
    """Return whether rows of an array are decoded or read together, and so cached.

    Args:
        layout: the array.
        options: how its file is opened.
        in_runs: rows of arrays without chunks are read in runs.
    """
    stored = layout if layout.decoding is None else layout.decoding.array
    is_number = kind_of(layout.dtype) == "number" and not stored.dtype.hasobject  # members of tables may be numbers
    layout = stored
    if layout.stacked:
        return any(is_pooled(array, options, in_runs=in_runs) for array in layout.stacked)
    if layout.is_contiguous or layout.runs is not None:
        return in_runs and bool(layout.row_bytes) and is_number and not options.swmr
    if layout.view is not None:
        return bool(layout.row_bytes) and is_number and not options.swmr
    if layout.storage != "chunked" or not layout.row_bytes or not is_number:
        return False
    if options.swmr:  # a live writer moves the chunk that it writes to
        return False
    return fallback_reason(layout) is None or layout.rows_per_chunk > 1


def fallback_reason(layout: ArrayLayout) -> str | None:
    """Return why the HDF5 library reads an array, with its lock, in a few words; None if a faster reader does."""
    if layout.decoding is not None:
        layout = layout.decoding.array
    if layout.stacked:
        return next((reason for array in layout.stacked if (reason := fallback_reason(array)) is not None), None)
    if layout.plain_reason is not None or layout.is_contiguous or layout.storage != "chunked":
        return layout.plain_reason
    return why_not_decodable(layout)


def open_chunked(
    layouts: Sequence[ArrayLayout],
    options: OpenOptions,
    *,
    rows_per_run: Sequence[int] | IntArray,
    n_bytes: int,
    work: TaskQueue,
    counters: Counters,
    rows: IntArray | None = None,
    retain: bool | None = None,
    prepare: Change | None = None,
    dtype: np.dtype[Any] | None = None,
    reads: CountReads | None = None,
) -> ChunkedReader:
    """Return the reader for one field of all files, for arrays that are decoded by blocks. Opens nothing yet.

    Args:
        layouts: each file's array, or each part's: see ``FieldLayouts``.
        options: how files are opened if the HDF5 library reads.
        rows_per_run: for each file, rows that are read together if it has no chunks.
        n_bytes: memory for decoded blocks.
        work: shares loading among threads.
        counters: counts bytes and blocks.
        rows: rows that the dataset has; None for all.
        retain: see ``ChunkedReader``.
        prepare: changes rows of ``dtype``: when they are copied out of blocks; or once they are decoded, in blocks that
            are decoded whole, are not small and are of this dtype, if they stay for later epochs, or if copying does
            not change them at once. Packed numbers are decoded when they are copied, by the same rule.
        dtype: of the memory that rows are copied to, and changed in; None if the caller copies stored rows itself.
        reads: see ``ChunkedReader``.
    """
    arrays = FieldLayouts.of(layouts)

    def opened(number: int, layout: ArrayLayout) -> BlockSource:
        source = open_source(layout, options, int(rows_per_run[number]), counters)
        if is_compiled:
            _compile_source(source)
        return changed(source)

    def changed(source: BlockSource) -> BlockSource:
        if copies is not None and isinstance(source, DecodedSource):
            return source.stored
        return PreparedSource(source, prepare) if is_changed and prepare is not None else source

    is_compiled = is_changed = False
    copies: Changes | None = None
    sources = BlockSources(arrays, opened)
    stays = _fits_all(sources, arrays, n_bytes) if retain is None else retain
    is_compiled = not stays and arrays.n_bytes >= MIN_COMPILED
    if is_compiled:
        for source in sources.examples:
            _compile_source(source)
        copies = _decoded_copies(arrays, prepare, dtype)
    is_early = prepare is not None and (stays or not prepare.takes_at_once)
    is_changed = is_early and dtype in (None, arrays.examples[0].dtype) and _may_change_blocks(sources, arrays)
    sources.examples = [changed(source) for source in sources.examples]
    return ChunkedReader(
        arrays if copies is None else arrays.as_stored(),
        sources,
        n_bytes=n_bytes,
        work=work,
        counters=counters,
        rows=rows,
        retain=retain,
        changes=copies or Changes.all_by(None if is_changed else prepare),
        reads=reads,
    )


def _decoded_copies(arrays: FieldLayouts, then: Change | None, dtype: np.dtype[Any] | None) -> Changes | None:
    """Return the changes that decode rows while they are copied; None if blocks are decoded instead."""
    decodings = [array.decoding for array in arrays.examples]
    codecs = [decoding.codec for decoding in decodings if decoding is not None and isinstance(decoding.codec, Unpack)]
    stored = {decoding.array.dtype for decoding in decodings if decoding is not None}
    if len(codecs) < len(decodings) or (loops := unpack_loops()) is None:
        return None
    if dtype is None or dtype != arrays.examples[0].dtype or len(stored) != 1:
        return None
    if dtype in stored:  # floats take as much memory after as before, and are copied on all cores
        return None
    if then is not None and not then.takes_at_once:
        return None
    numbers: dict[Unpack, int] = {}
    of_kind = np.array([numbers.setdefault(codec, len(numbers)) for codec in codecs])
    changes = tuple(DecodedCopies(codec, loops, dtype) if then is None else then.after(codec) for codec in numbers)
    for change in changes:
        change.compile(next(iter(stored)))
    return Changes(changes, of_kind[arrays.kinds])


def _compile_source(source: BlockSource) -> None:
    """Compile the codec of a source, if possible."""
    if isinstance(source, DecodedSource):
        source.compile()
        source = source.stored
    if isinstance(source, StackSource):
        for stacked in source.sources:
            _compile_source(stacked)
    if isinstance(source, ChunkLoader | ViewSource):
        source.compile()


def _may_change_blocks(sources: BlockSources, arrays: FieldLayouts) -> bool:
    # With smaller blocks, threads would mostly wait for the GIL.
    return all(
        source.n_parts == 1 and array.view is None and source.rows_per_block * array.row_bytes >= MIN_PREPARED
        for source, array in zip(sources.examples, arrays.examples, strict=True)
    )


def _fits_all(sources: BlockSources, arrays: FieldLayouts, n_bytes: int) -> bool:
    """Return whether all blocks fit into memory of this size."""
    n_blocks = BlockMap(sources.grids).n_blocks
    return (
        n_blocks * max(source.rows_per_block for source in sources.examples) * arrays.examples[0].row_bytes <= n_bytes
    )


def open_source(layout: ArrayLayout, options: OpenOptions, rows_per_run: int, counters: Counters) -> BlockSource:
    """Return the source of blocks of one file's array. Opens nothing yet.

    Args:
        layout: an array of numbers.
        options: how its file is opened if the HDF5 library reads.
        rows_per_run: rows that are read together if there are no chunks.
        counters: counts bytes.
    """
    if layout.value is not None:
        return ReaderSource(ValueReader(layout, counters), rows_per_run)
    if layout.decoding is not None:
        stored = open_source(layout.decoding.array, options, rows_per_run, counters)
        return DecodedSource(layout, layout.decoding, stored)
    if layout.stacked:
        return _stack_source(layout, options, rows_per_run, counters)
    if (runs := layout.runs) is not None:
        return ReaderSource(RunsReader(layout, runs, counters), rows_per_run, gives_back=options.gives_back)
    if layout.view is not None:
        return _view_source(layout, layout.view, options, counters)
    if layout.is_contiguous:
        reader = _checked_by_digests(ContiguousReader(layout, counters), layout, options)
        return ReaderSource(reader, rows_per_run, gives_back=options.gives_back)
    has_digests_of_rows = layout.digests is not None and layout.digests.kind == "rows"
    # A live writer moves the chunk that it writes to.
    if fallback_reason(layout) is None and layout.table is not None and not options.swmr and not has_digests_of_rows:
        return ChunkLoader(layout, counters, gives_back=options.gives_back)
    reader = _checked_by_digests(H5pyReader(layout, options, counters), layout, options)
    return ReaderSource(reader, layout.chunks[0] if layout.chunks else rows_per_run)


def _stack_source(layout: ArrayLayout, options: OpenOptions, rows_per_run: int, counters: Counters) -> StackSource:
    """Return the source of several stacked arrays, with the blocks of the coarsest one."""
    size = layout.rows_per_chunk if layout.rows_per_chunk > 1 else rows_per_run
    sources = [open_source(array, options, size, counters) for array in layout.stacked]
    if len({source.grid for source in sources}) > 1:
        grid = RowGrid(1, layout.n_rows, 1, size)
        for at, array in enumerate(layout.stacked):
            if sources[at].grid != grid:  # blocks of another size
                reader = _layout_reader(array, options, in_blocks=True, counters=counters)
                sources[at] = ReaderSource(reader, size, grid)
    return StackSource(layout, sources)


def _view_source(layout: ArrayLayout, view: ArrayView, options: OpenOptions, counters: Counters) -> ViewSource:
    """Return the source of blocks of an array that is seen another way."""
    array = view.array
    has_digests_of_rows = array.digests is not None and array.digests.kind == "rows"
    is_decoded_here = view.is_chunked and array.table is not None and fallback_reason(array) is None
    if is_decoded_here and not has_digests_of_rows and not options.swmr:
        return ViewSource(layout, view, options, counters, ChunkLoader(array, counters), None)
    check_decoding_memory(array.filters, array.chunk_bytes, array.path, array.key, options.files)
    # Text is decoded, and digests are compared, for whole rows.
    takes_rows = has_digests_of_rows or kind_of(array.dtype) == "text"
    reader = _checked_by_digests(H5pyReader(array, options, counters), array, options) if takes_rows else None
    return ViewSource(layout, view, options, counters, None, reader)


def _checked_by_digests(reader: LayoutReader, layout: ArrayLayout, options: OpenOptions) -> LayoutReader:
    """Return a reader that compares rows with the array's digests, if it has any."""
    return reader if layout.digests is None else DigestReader(reader, layout.digests, options)

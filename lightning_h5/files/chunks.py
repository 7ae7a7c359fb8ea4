"""The chunk table: where the chunks of an array lie in its file, as NumPy arrays, from one pass over its index."""

from __future__ import annotations

import array
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ..types import IntArray
from .door import skipped_bytes

__all__ = ["MOST_CHUNKS", "ChunkTable", "chunk_table", "grid_of", "leaves_edges_plain", "plain_edges"]

DONT_FILTER_PARTIAL = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
MOST_CHUNKS = 1 << 26
"""A table of more chunks takes more than 1.3 GB, and is not made."""

MOST = 2**63 - 1  # places in a damaged index may be larger still; they lie beyond any file


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Place, stored size and filter mask of each chunk, in the order of the chunk grid (last axis fastest).

    Attributes:
        grid: number of chunks along each axis.
        offsets: byte position in the file; -1 for a chunk that was never written, shape ``(n_chunks,)``.
        sizes: bytes in the file, shape ``(n_chunks,)``.
        masks: bit ``i`` says that filter ``i`` was not applied to the chunk, shape ``(n_chunks,)``.
    """

    grid: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    masks: npt.NDArray[np.uint32]

    @property
    def per_row(self) -> int:
        """Chunks that a row takes part in, which are neighbours in the table."""
        return math.prod(self.grid[1:])

    def is_plain(self, n_filters: int, chunk_bytes: int) -> bool:
        """Whether all chunks were written and went through no filter; some filters pass over what they cannot shrink.

        Args:
            n_filters: filters of the array.
            chunk_bytes: bytes of a chunk before any filter.
        """
        skip = self.masks == (1 << n_filters) - 1
        return bool((skip & (self.offsets >= 0) & (self.sizes == chunk_bytes)).all())


def grid_of(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Number of chunks along each axis."""
    return tuple(-(-size // step) for size, step in zip(shape, chunks, strict=True))


def chunk_table(array_id: Any, shape: Sequence[int], chunks: Sequence[int]) -> ChunkTable:
    """Reads the chunk index of an open array, about 1.5 microseconds a chunk.

    Args:
        array_id: h5py's low-level dataset.
        shape: of the array.
        chunks: shape of a chunk.

    Raises:
        ValueError: the index names a chunk that lies outside of the array or between chunks, or one twice: the HDF5
            library would not find it, and read fill values.
    """
    grid = grid_of(shape, chunks)
    places, others = array.array("q"), array.array("q")
    skipped = skipped_bytes(array_id)

    def note(info: Any) -> None:
        # Called for each chunk. Kept as bare numbers: a million of HDF5's own records would take 300 MB.
        places.extend(info.chunk_offset)
        others.extend((min(info.byte_offset + skipped, MOST), min(info.size, MOST), info.filter_mask))

    array_id.chunk_iter(note)
    n_chunks = math.prod(grid)
    table = ChunkTable(
        grid,
        np.full(n_chunks, -1, dtype=np.int64),
        np.zeros(n_chunks, dtype=np.int64),
        np.zeros(n_chunks, dtype=np.uint32),
    )
    if others:
        corners = np.frombuffer(places, dtype=np.int64).reshape(-1, len(grid))
        found = np.frombuffer(others, dtype=np.int64).reshape(-1, 3)
        if (corners % np.asarray(chunks)).any():
            raise ValueError("a chunk begins where none can")
        at = np.ravel_multi_index(tuple((corners // np.asarray(chunks)).T), grid)
        if len(np.unique(at)) < len(at):
            raise ValueError("a chunk is there twice")
        table.offsets[at], table.sizes[at], table.masks[at] = found.T
    return table


def leaves_edges_plain(plist: Any) -> bool | None:
    """Whether chunks that hang over an array's edge go through no filter (H5Pset_chunk_opts); None: cannot be told.

    Their filter masks say nothing of it, and h5py has no name for it, so the library is asked itself.

    Args:
        plist: the array's creation property list.
    """
    options = ctypes.c_uint(0)
    try:
        ask = ctypes.CDLL(h5py.h5p.__file__).H5Pget_chunk_opts
    except (AttributeError, OSError):
        return None
    ask.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_uint)]
    with h5py._objects.phil:  # the library takes one caller at a time
        failed = ask(plist.id, ctypes.byref(options)) < 0
    return None if failed else bool(options.value & DONT_FILTER_PARTIAL)


def plain_edges(
    table: ChunkTable, shape: Sequence[int], chunks: Sequence[int], *, n_filters: int, known: bool | None
) -> ChunkTable | None:
    """The table with masks that say what is filtered, where chunks at the edge may not be; None: cannot be told.

    Args:
        table: as the index has it.
        shape: of the array.
        chunks: shape of a chunk.
        n_filters: filters of the array.
        known: what ``leaves_edges_plain`` found.
    """
    if known is False:
        return table
    at_edge = np.zeros(table.grid, dtype=np.bool_)
    for axis, (size, step) in enumerate(zip(shape, chunks, strict=True)):
        if size % step:
            np.moveaxis(at_edge, axis, 0)[-1] = True
    if known is None:
        return None if n_filters and at_edge.any() else table
    masks = np.where(at_edge.reshape(-1), np.uint32((1 << n_filters) - 1), table.masks)
    return ChunkTable(table.grid, table.offsets, table.sizes, masks)

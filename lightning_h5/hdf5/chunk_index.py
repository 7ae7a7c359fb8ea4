"""The chunk table: where an array's chunks lie."""

from __future__ import annotations

import array
import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ..types import IntArray
from .open import h5_in_memory

__all__ = [
    "MAX_CHUNKS",
    "OLD_INDEX",
    "ChunkTable",
    "chunk_table",
    "grid_of",
    "index_type",
    "leaves_edges_plain",
    "moves_axis",
    "plain_edges",
    "skipped_bytes",
    "tree_table",
]

DONT_FILTER_PARTIAL = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
MAX_CHUNKS = 1 << 26
"""A table of more chunks takes more than 1.3 GB, and is not made."""

MAX_PLACE = 2**63 - 1  # larger addresses, from a damaged index, lie beyond any file

OLD_INDEX, EXTENSIBLE_ARRAY = 0, 4  # H5D_CHUNK_IDX_BTREE, H5D_CHUNK_IDX_EARRAY

UNDEFINED = 2**64 - 1  # address
NODE, HEAD_BYTES, CHUNK_NODE = struct.Struct("<4sBBH"), 24, 1
"""Signature, kind, level and number of entries of a node of a B-tree; bytes before them; the kind for chunks."""

FEW = 16  # chunks that are faster to note one by one
MAX_LEVELS = 64  # more levels than any tree has that fits into a file


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Position, stored size and filter mask of each chunk, in the order of the chunk grid (last axis fastest).

    Attributes:
        grid: number of chunks along each axis.
        offsets: byte position in the file; -1 for a chunk that was never written, shape ``(n_chunks,)``.
        sizes: bytes in the file, shape ``(n_chunks,)``.
        masks: bit ``i`` is set if filter ``i`` was not applied to the chunk, shape ``(n_chunks,)``.
    """

    grid: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    masks: npt.NDArray[np.uint32]

    @property
    def per_row(self) -> int:
        """Number of chunks that contain parts of one row; they are neighbors in the table."""
        return math.prod(self.grid[1:])

    def is_plain(self, n_filters: int, chunk_bytes: int) -> bool:
        """Return whether all chunks were written, unfiltered; some filters skip chunks that they cannot shrink.

        Args:
            n_filters: filters of the array.
            chunk_bytes: bytes of a chunk before any filter.
        """
        is_skipped = self.masks == (1 << n_filters) - 1
        return bool(is_skipped.all() and (self.offsets >= 0).all() and (self.sizes == chunk_bytes).all())


def grid_of(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each axis."""
    return tuple(-(-size // step) for size, step in zip(shape, chunks, strict=True))


def chunk_table(
    array_id: Any, shape: Sequence[int], chunks: Sequence[int], *, has_user_block: bool = True
) -> ChunkTable:
    """Read the chunk index of an open array; takes about 1.5 microseconds a chunk.

    Args:
        array_id: h5py's low-level dataset, for which ``moves_axis`` is False.
        shape: of the array.
        chunks: shape of a chunk.
        has_user_block: whether the file may begin with a user block.

    Raises:
        ValueError: the index has a chunk that lies outside of the array or between chunks, or one twice. The HDF5
            library would not find it, and read fill values.
    """
    grid = grid_of(shape, chunks)
    coordinates, records = array.array("q"), array.array("q")
    skipped = skipped_bytes(array_id) if has_user_block else 0

    def note(info: Any) -> None:
        # Called for each chunk. Keeps plain numbers: a million of h5py's records would take 300 MB.
        coordinates.extend(info.chunk_offset)
        records.extend((min(info.byte_offset + skipped, MAX_PLACE), min(info.size, MAX_PLACE), info.filter_mask))

    array_id.chunk_iter(note)
    corners = np.frombuffer(coordinates, dtype=np.int64).reshape(-1, len(grid))
    return _table(grid, chunks, corners, np.frombuffer(records, dtype=np.int64).reshape(-1, 3))


def _table(grid: tuple[int, ...], chunks: Sequence[int], corners: IntArray, records: IntArray) -> ChunkTable:
    """Return the table of chunks that were found in an index.

    Args:
        grid: number of chunks along each axis.
        chunks: shape of a chunk.
        corners: the first element of each chunk, shape ``(n, n_axes)``.
        records: position, stored size and filter mask of each, shape ``(n, 3)``.
    """
    n_chunks = math.prod(grid)
    if n_chunks == 1 and len(records) == 1 and not corners.any():  # 5 microseconds instead of 30, for many arrays
        offset, size, mask = records.T.copy()
        return ChunkTable(grid, offset, size, mask.astype(np.uint32))
    table = ChunkTable(
        grid,
        np.full(n_chunks, -1, dtype=np.int64),
        np.zeros(n_chunks, dtype=np.int64),
        np.zeros(n_chunks, dtype=np.uint32),
    )
    if len(records):
        if (corners % np.asarray(chunks)).any():
            raise ValueError("a chunk begins between chunks")
        at = np.ravel_multi_index(tuple((corners // np.asarray(chunks)).T), grid)
        is_found = np.zeros(n_chunks, dtype=np.bool_)
        is_found[at] = True
        if np.count_nonzero(is_found) < len(at):
            raise ValueError("it has a chunk twice")
        table.offsets[at], table.sizes[at], table.masks[at] = records.T
    return table


def tree_table(
    read: Callable[[int, int], bytes], address: int, shape: Sequence[int], chunks: Sequence[int], user_block: int
) -> ChunkTable:
    """Read a chunk index of the older kind, a B-tree, from the file's bytes.

    The "HDF5 File Format Specification" defines the format in section III.A.1.

    Args:
        read: returns a number of bytes at an address, which is counted from the end of the user block.
        address: of the root node; ``UNDEFINED`` if no chunk was written.
        shape: of the array.
        chunks: shape of a chunk.
        user_block: bytes of the user block.

    Raises:
        ValueError: the tree is damaged, or has what ``chunk_table`` refuses.
    """
    grid = grid_of(shape, chunks)
    if math.prod(grid) <= FEW and address != UNDEFINED:
        return _table_of_few(read, address, grid, chunks, user_block)
    entry = np.dtype([("size", "<u4"), ("mask", "<u4"), ("corner", "<u8", len(shape) + 1), ("child", "<u8")])
    leaves: list[npt.NDArray[Any]] = []
    nodes, level = [] if address == UNDEFINED else [address], None
    for _ in range(MAX_LEVELS):
        children: list[int] = []
        next_level = None
        for node in nodes:
            signature, kind, level, n = NODE.unpack(read(NODE.size, node))
            if signature != b"TREE" or kind != CHUNK_NODE or next_level not in (None, level):
                raise ValueError("the chunk index is damaged")
            next_level = level
            entries = np.frombuffer(read(HEAD_BYTES + n * entry.itemsize, node), entry, n, HEAD_BYTES)
            if level:
                children += entries["child"].tolist()
            else:
                leaves.append(entries)
        nodes = children
        if not nodes:
            break
    else:
        raise ValueError("the chunk index is damaged")
    found = np.concatenate([np.empty(0, entry), *leaves])
    if (
        found["corner"][:, -1].any()
        or (found["child"] > MAX_PLACE - user_block).any()
        or (found["corner"] > MAX_PLACE).any()
    ):
        raise ValueError("the chunk index is damaged")
    records = np.stack([found["child"] + np.uint64(user_block), found["size"], found["mask"]], axis=1).astype(np.int64)
    return _table(grid, chunks, found["corner"][:, :-1].astype(np.int64), records)


def _table_of_few(
    read: Callable[[int, int], bytes], address: int, grid: tuple[int, ...], chunks: Sequence[int], user_block: int
) -> ChunkTable:
    """Return the table of an array with few chunks (see ``tree_table``), faster than NumPy does, for many arrays."""
    signature, kind, level, n = NODE.unpack(read(NODE.size, address))
    if signature != b"TREE" or kind != CHUNK_NODE or level or n > FEW:
        raise ValueError("the chunk index is damaged, or has several levels")
    entry, n_chunks = struct.Struct(f"<II{len(grid) + 2}Q"), math.prod(grid)
    offsets, sizes, masks = [-1] * n_chunks, [0] * n_chunks, [0] * n_chunks
    entries = read(HEAD_BYTES + n * entry.size, address)[HEAD_BYTES:]
    if len(entries) < n * entry.size:
        raise ValueError("the chunk index is cut off")
    for size, mask, *corner, end, child in entry.iter_unpack(entries):
        at = 0
        for position, step, length in zip(corner, chunks, grid, strict=True):
            number, rest = divmod(position, step)
            if rest or number >= length:
                raise ValueError("a chunk begins between chunks, or outside of the array")
            at = at * length + number
        if offsets[at] >= 0 or end or child > MAX_PLACE - user_block:
            raise ValueError("the chunk index is damaged, or has a chunk twice")
        offsets[at], sizes[at], masks[at] = child + user_block, size, mask
    return ChunkTable(grid, np.array(offsets), np.array(sizes), np.array(masks, np.uint32))


def index_type(array_id: Any) -> int | None:
    """Return the kind of an array's chunk index (``H5D_chunk_index_t``); None if it is unknown.

    Args:
        array_id: h5py's low-level dataset.
    """
    kind = ctypes.c_int(OLD_INDEX)
    try:  # h5py has no name for it, so the library is called directly
        get_index_type = ctypes.CDLL(h5py.h5d.__file__).H5Dget_chunk_index_type
    except (AttributeError, OSError):
        return None
    get_index_type.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int)]
    with h5py._objects.phil:  # the library takes one caller at a time
        is_failure = get_index_type(array_id.id, ctypes.byref(kind)) < 0
    return None if is_failure else kind.value


def skipped_bytes(array_id: Any) -> int:
    """Return the bytes at the start of an array's file that the library leaves out of a chunk's position.

    HDF5 1.14.2 leaves the user block out, 1.14.4 does not. This is tested with a file in memory, since packagers
    backport fixes without another version number.

    Args:
        array_id: h5py's low-level dataset.
    """
    user_block = int(h5py.h5i.get_file_id(array_id).get_create_plist().get_userblock())
    return 0 if not user_block or _counts_user_block() else user_block


@cache
def _counts_user_block() -> bool:
    size = 1 << 20
    with h5_in_memory(userblock_size=size) as file:
        array = file.create_dataset("x", data=[1], chunks=(1,))
        file.flush()
        return bool(array.id.get_chunk_info(0).byte_offset >= size)


def leaves_edges_plain(plist: Any) -> bool | None:
    """Return whether chunks that reach beyond an array's edge are unfiltered (H5Pset_chunk_opts); None if unknown.

    Their filter masks do not show it, and h5py has no name for it, so the library is called directly.

    Args:
        plist: the array's creation property list.
    """
    if (get_options := _chunk_options()) is None:
        return None
    options = ctypes.c_uint(0)
    with h5py._objects.phil:  # the library takes one caller at a time
        is_failure = get_options(plist.id, ctypes.byref(options)) < 0
    return None if is_failure else bool(options.value & DONT_FILTER_PARTIAL)


@cache
def _chunk_options() -> Any:
    try:
        get_options = ctypes.CDLL(h5py.h5p.__file__).H5Pget_chunk_opts
    except (AttributeError, OSError):
        return None
    get_options.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_uint)]
    return get_options


def plain_edges(
    table: ChunkTable, shape: Sequence[int], chunks: Sequence[int], *, n_filters: int, are_plain: bool | None
) -> ChunkTable | None:
    """Return the table with the right masks of chunks at the edge, which may be unfiltered; None if that is unknown.

    Args:
        table: the table as it was read.
        shape: of the array.
        chunks: shape of a chunk.
        n_filters: filters of the array.
        are_plain: the result of ``leaves_edges_plain``.
    """
    if are_plain is False:
        return table
    at_edge = np.zeros(table.grid, dtype=np.bool_)
    for axis, (size, step) in enumerate(zip(shape, chunks, strict=True)):
        if size % step:
            np.moveaxis(at_edge, axis, 0)[-1] = True
    if are_plain is None:
        return None if n_filters and at_edge.any() else table
    masks = np.where(at_edge.reshape(-1), np.uint32((1 << n_filters) - 1), table.masks)
    return ChunkTable(table.grid, table.offsets, table.sizes, masks)


def moves_axis(array_id: Any) -> bool:
    """Return whether the library may report wrong coordinates of an array's chunks.

    HDF5 numbers chunks of an extensible array with the growing axis in front, and forgets that when it reports them.

    Args:
        array_id: h5py's low-level dataset, chunked.
    """
    limits = array_id.get_space().get_simple_extent_dims(True)
    unlimited = [axis for axis, limit in enumerate(limits) if limit == h5py.h5s.UNLIMITED]
    return len(unlimited) == 1 and unlimited[0] > 0 and index_type(array_id) in (None, EXTENSIBLE_ARRAY)

"""The chunk table: where an array's chunks lie, also if the HDF5 library reports wrong coordinates of chunks."""

from __future__ import annotations

import array
import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from ..types import IntArray
from .open import h5_in_memory

__all__ = [
    "MAX_CHUNKS",
    "OLD_INDEX",
    "ChunkTable",
    "Reported",
    "chunk_table",
    "coordinates_of",
    "coordinates_reported",
    "grid_of",
    "index_type",
    "leaves_edges_plain",
    "moves_axis",
    "plain_edges",
    "report_chunks",
    "skipped_bytes",
]

DONT_FILTER_PARTIAL = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
MAX_CHUNKS = 1 << 26
"""A table of more chunks takes more than 1.3 GB, and is not made."""

MAX_PLACE = 2**63 - 1  # a damaged index can contain larger addresses; these lie beyond any file

OLD_INDEX, EXTENSIBLE_ARRAY = 0, 4  # H5D_CHUNK_IDX_BTREE, H5D_CHUNK_IDX_EARRAY


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
        skip = self.masks == (1 << n_filters) - 1
        return bool((skip & (self.offsets >= 0) & (self.sizes == chunk_bytes)).all())


def grid_of(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each axis."""
    return tuple(-(-size // step) for size, step in zip(shape, chunks, strict=True))


def chunk_table(
    array_id: Any, shape: Sequence[int], chunks: Sequence[int], *, has_user_block: bool = True
) -> ChunkTable | None:
    """Read the chunk index of an open array; takes about 1.5 microseconds a chunk.

    Args:
        array_id: h5py's low-level dataset.
        shape: of the array.
        chunks: shape of a chunk.
        has_user_block: whether the file may begin with a user block.

    Returns:
        The table; None if it is unknown how the library reports the coordinates of this array's chunks.

    Raises:
        ValueError: the index has a chunk that lies outside of the array or between chunks, or one twice. The HDF5
            library would not find it, and read fill values.
    """
    if (how := coordinates_reported(array_id)) is None:
        return None
    grid = grid_of(shape, chunks)
    places, others = array.array("q"), array.array("q")
    skipped = skipped_bytes(array_id) if has_user_block else 0

    def note(info: Any) -> None:
        # Called for each chunk. Kept as bare numbers: a million of HDF5's own records would take 300 MB.
        places.extend(info.chunk_offset)
        others.extend((min(info.byte_offset + skipped, MAX_PLACE), min(info.size, MAX_PLACE), info.filter_mask))

    report_chunks(array_id, note)
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
            raise ValueError("a chunk begins between chunks")
        coordinates = coordinates_of(array_id, corners // np.asarray(chunks), how)
        at = np.ravel_multi_index(tuple(coordinates.T), grid)
        if len(np.unique(at)) < len(at):
            raise ValueError("it has a chunk twice")
        table.offsets[at], table.sizes[at], table.masks[at] = found.T
    return table


def index_type(array_id: Any) -> int | None:
    """Return the kind of an array's chunk index (``H5D_chunk_index_t``); None if it is unknown.

    Args:
        array_id: h5py's low-level dataset.
    """
    kind = ctypes.c_int(OLD_INDEX)
    try:  # h5py has no name for it, so the library is called directly
        ask = ctypes.CDLL(h5py.h5d.__file__).H5Dget_chunk_index_type
    except (AttributeError, OSError):
        return None
    ask.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int)]
    with h5py._objects.phil:  # the library takes one caller at a time
        failed = ask(array_id.id, ctypes.byref(kind)) < 0
    return None if failed else kind.value


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
    with h5_in_memory(userblock_size=size) as (file, _):
        array = file.create_dataset("x", data=[1], chunks=(1,))
        file.flush()
        return bool(array.id.get_chunk_info(0).byte_offset >= size)


def leaves_edges_plain(plist: Any) -> bool | None:
    """Return whether chunks that reach beyond an array's edge are unfiltered (H5Pset_chunk_opts); None if unknown.

    Their filter masks do not show it, and h5py has no name for it, so the library is called directly.

    Args:
        plist: the array's creation property list.
    """
    if (ask := _chunk_options()) is None:
        return None
    options = ctypes.c_uint(0)
    with h5py._objects.phil:  # the library takes one caller at a time
        failed = ask(plist.id, ctypes.byref(options)) < 0
    return None if failed else bool(options.value & DONT_FILTER_PARTIAL)


@cache
def _chunk_options() -> Any:
    try:
        ask = ctypes.CDLL(h5py.h5p.__file__).H5Pget_chunk_opts
    except (AttributeError, OSError):
        return None
    ask.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_uint)]
    return ask


def plain_edges(
    table: ChunkTable, shape: Sequence[int], chunks: Sequence[int], *, n_filters: int, known: bool | None
) -> ChunkTable | None:
    """Return the table with the right masks of chunks at the edge, which may be unfiltered; None if that is unknown.

    Args:
        table: the table as it was read.
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


MAX_NUMBERS = 1 << 32  # chunks that an extensible array numbers
MAX_AXES = 8  # of an array that is tried out in memory, with two or three chunks along each

Reported: TypeAlias = Literal["right", "moved"]
"""How the library reports coordinates of chunks: right, or wrong because the growing axis was moved."""


def report_chunks(array_id: Any, call: Callable[[Any], object]) -> None:
    """Call a function with what the library reports of each chunk (h5py's ``StoreInfo``).

    Args:
        array_id: h5py's low-level dataset.
        call: the function. Coordinates can be wrong, see ``coordinates_reported``.
    """
    array_id.chunk_iter(call)


def moves_axis(array_id: Any) -> bool:
    """Return whether the chunk index of an array numbers chunks with another axis than the first in front, or may.

    Args:
        array_id: h5py's low-level dataset, chunked.
    """
    return _growth(array_id)[0] > 0 and index_type(array_id) in (None, EXTENSIBLE_ARRAY)


def coordinates_reported(array_id: Any) -> Reported | None:
    """Return how the library reports the coordinates of an array's chunks; None if that is unknown.

    Args:
        array_id: h5py's low-level dataset.
    """
    if not moves_axis(array_id):
        return "right"
    axis, limits = _growth(array_id)
    is_known = index_type(array_id) is not None and len(limits) <= MAX_AXES and math.prod(limits) < MAX_NUMBERS
    return _reported_in_memory(len(limits), axis) if is_known else None


def coordinates_of(array_id: Any, reported: IntArray, how: Reported) -> IntArray:
    """Return coordinates of chunks in the chunk grid, from those that the library reports.

    Args:
        array_id: h5py's low-level dataset.
        reported: by the library, in chunks, shape ``(n_chunks, n_axes)``.
        how: what ``coordinates_reported`` found.

    Raises:
        ValueError: the array has no such chunk.
    """
    return reported if how == "right" else _moved_back(reported, *_growth(array_id))


def _growth(array_id: Any) -> tuple[int, tuple[int, ...]]:
    """Return the only axis without a limit, or 0, and the most chunks along each axis (1 along that one)."""
    limits = array_id.get_space().get_simple_extent_dims(True)
    unlimited = [axis for axis, limit in enumerate(limits) if limit == h5py.h5s.UNLIMITED]
    if len(unlimited) != 1:
        return 0, ()
    chunks = array_id.get_create_plist().get_chunk()
    return unlimited[0], tuple(
        1 if limit == h5py.h5s.UNLIMITED else -(-limit // step) for limit, step in zip(limits, chunks, strict=True)
    )


def _moved_back(reported: IntArray, axis: int, limits: Sequence[int]) -> IntArray:
    """Return coordinates of chunks, from those that the library computed without moving the growing axis.

    Args:
        reported: by the library, shape ``(n_chunks, n_axes)``.
        axis: the axis that grows.
        limits: the most chunks along each axis; 1 along that one.
    """
    if reported[:, :axis].any():  # no number is so large that anything would be left for these
        raise ValueError("a chunk lies outside of the array")
    numbers = np.zeros(len(reported), dtype=np.int64)
    for at in range(axis, len(limits)):
        numbers = numbers * limits[at] + reported[:, at]
    found = np.empty_like(reported)
    for at in (each for each in reversed(range(len(limits))) if each != axis):
        numbers, found[:, at] = np.divmod(numbers, limits[at])
    found[:, axis] = numbers
    return found


@cache
def _reported_in_memory(n_axes: int, axis: int) -> Reported | None:
    """Return how the library reports chunks of a small array in memory that grows along an axis."""
    limits = [2 + at % 2 for at in range(n_axes)]
    shape = [3 if at == axis else 2 for at in range(n_axes)]
    with h5_in_memory(libver="latest") as (file, content):
        stored = file.create_dataset(
            "x",
            data=np.arange(math.prod(shape)).reshape(shape),
            dtype="<i8",
            chunks=(1,) * n_axes,
            maxshape=[None if at == axis else limit for at, limit in enumerate(limits)],
        )
        file.flush()
        found: list[Any] = []
        report_chunks(stored.id, found.append)
        if index_type(stored.id) != EXTENSIBLE_ARRAY or len(found) != math.prod(shape):
            return None
        places = [info.byte_offset for info in found]
        numbers = [int.from_bytes(content.getvalue()[place : place + 8], "little") for place in places]
    right, reported = np.array(np.unravel_index(numbers, shape)).T, np.array([info.chunk_offset for info in found])
    if np.array_equal(right, reported):
        return "right"
    limits[axis] = 1
    try:
        return "moved" if np.array_equal(right, _moved_back(reported, axis, limits)) else None
    except ValueError:
        return None

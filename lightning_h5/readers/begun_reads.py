"""Reads of chunked arrays that have begun: blocks are leased, and rows copied out once these are decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..types import IntArray
from .base import row_slices, take_rows
from .block_map import Pieces
from .block_sources import Change
from .chunk_cache import ChunkCache, Lease

if TYPE_CHECKING:
    from .chunked import ChunkedReader

__all__ = [
    "BegunRead",
    "CachedRead",
    "Changes",
    "CompleteRead",
    "CopyRows",
    "PickedRead",
    "copy_on_all_cores",
    "copy_rows",
]

CopyRows = Callable[[npt.NDArray[Any], IntArray, IntArray | None], None]
"""Takes decoded rows, places among them, and which of the rows that were asked for these are; None for all, in order.
Copies them to where they belong."""


class Changes(NamedTuple):
    """What rows are changed by when they are copied out of blocks.

    Attributes:
        each: the different changes; empty if there are none.
        of_array: for several changes, the number of that of each array.
    """

    each: tuple[Change, ...] = ()
    of_array: IntArray | None = None

    @classmethod
    def all_by(cls, change: Change | None) -> Changes:
        """Return one change of all rows; None leaves them as they are."""
        return cls() if change is None else cls((change,))


class BegunRead(Protocol):
    """Rows that a reader has begun to read. Each is finished or cancelled once."""

    def finish(self) -> None:
        """Read the rows.

        Raises:
            H5CorruptError: stored bytes are missing or do not decode.
            H5FileError: the file cannot be read.
        """
        ...

    def cancel(self) -> None:
        """Return leases without reading; no effect once it is finished."""
        ...


class CompleteRead:
    """Rows of a complete cache: nothing to wait for, and no lease."""

    def __init__(self, cache: ChunkCache, places: IntArray, copy: CopyRows) -> None:
        self._cache, self._places, self._copy = cache, places, copy

    def finish(self) -> None:
        """Copy the rows."""
        self._copy(self._cache.rows, self._places, None)

    def cancel(self) -> None:
        """Do nothing: there is no lease."""


class PickedRead:
    """Rows of blocks that do not fit into the cache, which are read one after the other."""

    def __init__(self, reader: ChunkedReader, blocks: IntArray, pieces: Pieces, copy: CopyRows) -> None:
        self._reader, self._blocks, self._copy = reader, blocks, copy
        self._which, self._within = pieces.repeated(pieces.blocks), pieces.of_rows(pieces.within)

    def finish(self) -> None:
        """Read and decode the rows."""
        for number, block in enumerate(self._blocks.tolist()):
            here = np.flatnonzero(self._which == number)
            within, places = np.unique(self._within[here], return_inverse=True)
            self._copy(self._reader.pick(block, within), places, here)

    def cancel(self) -> None:
        """Do nothing: there is no lease."""


class CachedRead:
    """Rows of blocks that have slots in the cache, and of those that still need one."""

    def __init__(
        self,
        reader: ChunkedReader,
        cache: ChunkCache,
        blocks: IntArray,
        pieces: Pieces,
        copy: CopyRows,
        epoch: int | None,
    ) -> None:
        self._reader, self._cache, self._blocks, self._epoch = reader, cache, blocks, epoch
        self._pieces, self._copy_rows = pieces, copy
        self._lease: Lease | None = None
        self._part = self.left = np.arange(len(blocks))  # blocks of this lease, and those without a slot

    def take(self, lease: Lease) -> bool:
        """Take a lease for blocks that are left, and start to load them; return whether all have slots now."""
        self._lease, self._part = lease, self.left
        self.left = self.left[lease.slots < 0]
        self._reader.load(self._cache, self._blocks[self._part], lease)
        return not len(self.left)

    def finish(self) -> None:
        """Wait for the leased blocks, copy their rows, and return the lease."""
        lease, self._lease = self._lease, None
        assert lease is not None, "it was finished before"
        is_done = np.zeros(len(self._part), dtype=np.bool_)
        try:
            self._reader.wait(self._cache, lease)
            self._copy(lease)
            if self._epoch is not None:
                is_done = self._note(lease, self._epoch)
        finally:
            self._cache.give_back(lease, is_done)

    def cancel(self) -> None:
        """Return the lease without reading."""
        if self._lease is not None:
            self._cache.give_back(self._lease, np.zeros(len(self._part), dtype=np.bool_))
            self._lease = None

    def _copy(self, lease: Lease) -> None:
        """Copy rows out of the cache, without those of other blocks."""
        slot_of = np.full(len(self._blocks), -1, dtype=np.int64)
        slot_of[self._part] = lease.slots
        pieces, slots = self._pieces, slot_of[self._pieces.blocks]
        places = pieces.of_rows(slots * self._cache.slot_rows + pieces.within)
        is_all = len(self._part) == len(self._blocks) and not len(self.left)
        here = None if is_all else np.flatnonzero(pieces.repeated(slots >= 0))
        self._copy_rows(self._cache.rows, places if here is None else places[here], here)

    def _note(self, lease: Lease, epoch: int) -> npt.NDArray[np.bool_]:
        counts = np.bincount(self._pieces.blocks, self._pieces.sizes, len(self._blocks))[self._part].astype(np.int64)
        has_slot = lease.slots >= 0
        counts = np.where(has_slot, counts, 0)
        return has_slot & self._reader.note_read(self._cache, self._blocks[self._part], counts, epoch)


def copy_on_all_cores(
    rows: npt.NDArray[Any], places: IntArray, here: IntArray | None, *, out: npt.NDArray[Any], change: Change | None
) -> None:
    """Copy all rows to ``out`` with the threads of torch, and change them there."""
    take_rows(rows, places, out, all_cores=True)
    if change is not None:
        change(out)


def copy_rows(
    rows: npt.NDArray[Any], places: IntArray, here: IntArray | None, *, out: npt.NDArray[Any], change: Change | None
) -> None:
    """Copy rows to their places in ``out`` (``here``; None is all of it), and change them."""
    if change is not None and out.flags.c_contiguous:
        change.take(rows, places, out, here)
    elif here is None and out.flags.c_contiguous and out.dtype == rows.dtype:
        np.take(rows, places, axis=0, out=out, mode="clip")  # other modes allocate a buffer
    else:
        for some in row_slices(len(places), max(rows[:1].nbytes, out[:1].nbytes)):
            with np.errstate(all="ignore"):  # numbers too large for another dtype become infinite, as in torch
                out[some if here is None else here[some]] = _taken(rows, places[some], out.dtype, change)


def _taken(rows: npt.NDArray[Any], places: IntArray, dtype: np.dtype[Any], change: Change | None) -> npt.NDArray[Any]:
    if change is None:
        return np.take(rows, places, axis=0, mode="clip")
    taken = np.empty((len(places), *rows.shape[1:]), dtype)
    change.take(rows, places, taken)
    return taken

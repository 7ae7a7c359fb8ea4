"""Rows of chunks that a local disk has decoded, read by position straight to where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..memory import page_cache_memory
from ..types import IntArray
from .base import BegunRead
from .block_map import BlockMap, Pieces
from .copies import CopyRows
from .kept_chunks import CACHE_SHARE, KeptChunks

if TYPE_CHECKING:
    from .block_sources import BlockSource

__all__ = ["KeptRead", "KeptRows"]

LEAST_BYTES = 2048
"""Bytes of a run of rows from which on reading it alone is faster than reading its chunk and copying it."""


class KeptRows:
    """Reads rows of the arrays of a field by position.

    Args:
        kept: decoded chunks of each array.
        blocks: the blocks of all arrays, a chunk each.
        row_bytes: bytes of a row.
    """

    def __init__(self, kept: Sequence[KeptChunks], blocks: BlockMap, row_bytes: int) -> None:
        self._kept, self._blocks, self._row_bytes = kept, blocks, row_bytes

    @classmethod
    def of(cls, sources: Sequence[BlockSource], blocks: BlockMap, row_bytes: int) -> KeptRows | None:
        """Return the reader for arrays whose chunks are whole rows and stored decoded, if all fit into memory."""
        if not isinstance(sources, list):
            return None
        stores = [source.kept for source in sources if source.kept is not None]
        if len(stores) < len(sources) or sum(chunks.n_bytes for chunks in stores) > CACHE_SHARE * (
            page_cache_memory() or 0
        ):
            return None
        return cls(stores, blocks, row_bytes)

    def are_long(self, pieces: Pieces) -> bool:
        """Return whether reading rows alone is faster than reading their chunks."""
        return pieces.n_rows * self._row_bytes >= LEAST_BYTES * max(1, len(pieces.blocks))

    def has(self, pieces: Pieces) -> npt.NDArray[np.bool_]:
        """Return a mask of the pieces whose block is stored."""
        is_stored = np.empty(len(pieces.blocks), np.bool_)
        for file, which, numbers in self._by_file(pieces.blocks):
            is_stored[which] = self._kept[file].has(numbers)
        return is_stored

    def read(self, pieces: Pieces, out: npt.NDArray[np.uint8], starts: IntArray) -> bool:
        """Read rows; return False if the disk lacks some of them, or a checksum differs.

        Args:
            pieces: the rows.
            out: memory for them.
            starts: first row of each piece in ``out``.
        """
        sizes = np.full(len(pieces.blocks), self._row_bytes) if pieces.sizes is None else pieces.sizes * self._row_bytes
        within, starts = pieces.within * self._row_bytes, starts * self._row_bytes
        return all(
            self._kept[file].read(numbers, out, starts[which], within[which], sizes[which]).all()
            for file, which, numbers in self._by_file(pieces.blocks)
        )

    def _by_file(self, blocks: IntArray) -> list[tuple[int, Any, IntArray]]:
        """Return, for each array with some of the blocks, its number, which they are, and their numbers in it."""
        if len(self._kept) == 1:
            return [(0, slice(None), blocks)]
        files = self._blocks.array_of(blocks)
        parts = [(int(file), np.flatnonzero(files == file)) for file in np.unique(files)]
        return [(file, which, blocks[which] - self._blocks.first_block[file]) for file, which in parts]


class KeptRead:
    """A read of pieces by position, and of the others in another way.

    Args:
        rows: reads pieces.
        pieces: pieces that are read by position.
        starts: number of each piece's first row among all rows.
        out: memory for all rows that takes them as they are stored; None if they are copied.
        row: shape and dtype of a row.
        copy: copies rows to where they belong.
        otherwise: reads the pieces if that fails.
        rest: the read of the others; None if there are none.
    """

    def __init__(
        self,
        rows: KeptRows,
        pieces: Pieces,
        starts: IntArray,
        out: npt.NDArray[Any] | None,
        row: tuple[tuple[int, ...], np.dtype[Any]],
        copy: CopyRows,
        otherwise: Callable[[], None],
        rest: BegunRead | None,
    ) -> None:
        self._rows, self._pieces, self._starts, self._out = rows, pieces, starts, out
        self._row, self._copy, self._otherwise, self._rest = row, copy, otherwise, rest

    def finish(self) -> None:
        """Read the rows."""
        if self._rest is not None:
            self._rest.finish()
        pieces, rows, starts = self._pieces, self._out, self._starts
        if rows is None:
            shape, dtype = self._row
            rows, starts = np.empty((pieces.n_rows, *shape), dtype), pieces.starts
        if not self._rows.read(pieces, rows.reshape(-1).view(np.uint8), starts):
            self._otherwise()
        elif self._out is None:
            out_places = None if self._rest is None else pieces.of_rows(self._starts)
            self._copy(rows, np.arange(len(rows)), out_places)

    def cancel(self) -> None:
        """Return leases of the rest."""
        if self._rest is not None:
            self._rest.cancel()

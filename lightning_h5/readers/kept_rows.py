"""Rows of chunks that a local disk has decoded, read by position straight to where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..memory import page_cache_memory
from ..types import IntArray
from .block_map import BlockMap, Pieces
from .kept_chunks import KeptChunks

if TYPE_CHECKING:
    from .block_sources import BlockSource

__all__ = ["KeptRead", "KeptRows"]

LEAST_BYTES = 4096
"""Bytes of a run of rows from which on reading it alone is faster than reading its chunk and copying it."""

CACHE_SHARE = 0.8
"""Share of the memory for pages of files that decoded rows may take: single rows of a disk are slower than chunks."""


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
        """Return them for arrays whose chunks are whole rows and kept, if all fit into memory."""
        if not isinstance(sources, list):
            return None
        kept = [source.kept for source in sources if source.kept is not None]
        if len(kept) < len(sources) or sum(each.n_bytes for each in kept) > CACHE_SHARE * (page_cache_memory() or 0):
            return None
        return cls(kept, blocks, row_bytes)

    def suits(self, pieces: Pieces) -> bool:
        """Return whether all blocks of some rows are there, and reading the rows alone is faster."""
        if pieces.n_rows * self._row_bytes < LEAST_BYTES * len(pieces.blocks):
            return False
        return all(self._kept[file].has_all(numbers) for file, _, numbers in self._by_file(pieces))

    def read(self, pieces: Pieces, out: npt.NDArray[np.uint8]) -> bool:
        """Read rows one after the other; return False if the disk lacks some of them, or has them wrong.

        Args:
            pieces: the rows.
            out: memory for them.
        """
        sizes = np.full(len(pieces.blocks), self._row_bytes) if pieces.sizes is None else pieces.sizes * self._row_bytes
        starts = np.cumsum(sizes) - sizes
        return all(
            self._kept[file].read_rows(
                numbers, pieces.within[which] * self._row_bytes, sizes[which], out, starts[which]
            )
            for file, which, numbers in self._by_file(pieces)
        )

    def _by_file(self, pieces: Pieces) -> list[tuple[int, Any, IntArray]]:
        """Return, for each array with some of the rows, its number, its pieces, and their blocks."""
        if len(self._kept) == 1:
            return [(0, slice(None), pieces.blocks)]
        files = self._blocks.array_of(pieces.blocks)
        parts = [(int(file), np.flatnonzero(files == file)) for file in np.unique(files)]
        return [(file, which, pieces.blocks[which] - self._blocks.first_block[file]) for file, which in parts]


class KeptRead:
    """A read of rows by position.

    Args:
        rows: reads them.
        pieces: the rows.
        out: memory for them that takes them as they are stored; None if they are copied.
        memory: returns memory to read to before they are copied.
        copy: copies rows to where they belong.
        otherwise: reads them in another way.
    """

    def __init__(
        self,
        rows: KeptRows,
        pieces: Pieces,
        out: npt.NDArray[Any] | None,
        memory: Callable[[], npt.NDArray[Any]],
        copy: Callable[[npt.NDArray[Any], IntArray, IntArray | None], None],
        otherwise: Callable[[], None],
    ) -> None:
        self._rows, self._pieces, self._out = rows, pieces, out
        self._memory, self._copy, self._otherwise = memory, copy, otherwise

    def finish(self) -> None:
        """Read the rows."""
        rows = self._memory() if self._out is None else self._out
        if not self._rows.read(self._pieces, rows.reshape(-1).view(np.uint8)):
            self._otherwise()
        elif self._out is None:
            self._copy(rows, np.arange(len(rows)), None)

    def cancel(self) -> None:
        """Do nothing: there is no lease."""

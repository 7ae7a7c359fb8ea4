"""The block table: which rows belong together on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BlockTable"]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Rows of a dataset cut into blocks, in storage order, over all its files.

    Attributes:
        starts: first row of each block, and the number of rows at the end; ascending, shape ``(n_blocks + 1,)``.
    """

    starts: npt.NDArray[np.int64]

    @classmethod
    def of_sizes(cls, sizes: Sequence[int] | npt.NDArray[Any]) -> BlockTable:
        """Blocks of these many rows each, one after the other; blocks without rows are left out."""
        kept = np.asarray(sizes, dtype=np.int64)
        kept = kept[kept > 0]
        return cls(np.concatenate([[0], np.cumsum(kept)]).astype(np.int64))

    @property
    def n_rows(self) -> int:
        """Rows in all blocks."""
        return int(self.starts[-1])

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.starts) - 1

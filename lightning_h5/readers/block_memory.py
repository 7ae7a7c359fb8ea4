"""The memory for loaded blocks, and scratch memory of each thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import IntArray

__all__ = ["BlockMemory", "scratch"]


class BlockMemory(Sequence[npt.NDArray[Any]]):
    """The memory of blocks: a sequence of arrays of shape ``(n_rows, *row_shape)``, or bytes.

    Args:
        rows: memory of all blocks.
        firsts: the first row of each block in it.
        n_rows: rows of each block.
    """

    def __init__(self, rows: npt.NDArray[Any], firsts: IntArray, n_rows: int) -> None:
        self._rows, self._firsts, self._n_rows = rows, firsts, n_rows

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, at: Any) -> Any:
        first = int(self._firsts[at])
        return self._rows[first : first + self._n_rows]

    def octets(self) -> tuple[npt.NDArray[np.uint8], IntArray]:
        """Return the whole memory as bytes, and the start of each block in it."""
        return self._rows.reshape(-1).view(np.uint8), self._firsts * self._rows.strides[0]


_scratch = threading.local()  # per thread, shared by all readers, which take turns


def scratch(use: str, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of this thread, which the next call for the same use overwrites."""
    memory_of_use: npt.NDArray[np.uint8] | None = getattr(_scratch, use, None)
    if memory_of_use is None or len(memory_of_use) < n_bytes:
        memory_of_use = np.empty(n_bytes, dtype=np.uint8)
        setattr(_scratch, use, memory_of_use)
    return memory_of_use[:n_bytes]

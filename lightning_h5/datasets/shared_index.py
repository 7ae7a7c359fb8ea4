"""Which rows pass, worked out by one process of each machine and held in memory that all of them have."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import H5Error
from ..ranks import Question
from ..types import IntArray
from .shard_memory import ShardMemory

__all__ = ["SharedIndex", "digest_of_index"]


NAME = "h5_index"  # of the memory


class SharedIndex:
    """Rows that one process of this machine found, and all others took; each has them for itself where that cannot be.

    Args:
        name: says which rows; the same in all processes that ask for the same.
        find: works them out; calls what it is given as it goes on.

    Attributes:
        rows: the rows; not to be written to.

    Raises:
        H5Error: what ``find`` raised, in each process.
    """

    def __init__(self, name: str, find: Callable[[Callable[[], None]], IntArray]) -> None:
        question = Question(f"rows that pass/{name}")
        self._memory: ShardMemory | None = None  # its descriptor stays open: others may come later
        taken = None if question.is_first else self._take(question.first, question.answer())
        if taken is not None:
            self.rows = taken
            return
        told = None
        try:
            self.rows = find(question.progress)
            told = self._share() if question.has_others else None
        finally:
            if question.has_others:
                question.tell(told)

    def _share(self) -> list[Any] | None:
        """Moves the rows to shared memory; says where they are."""
        digest = digest_of_index(self.rows)
        try:
            memory = ShardMemory([(len(self.rows), self.rows.itemsize)], shared=True, name=NAME)
            memory.write(0, 0, self.rows)
        except H5Error:
            return None
        self._memory, self.rows = memory, _rows_in(memory)
        return [memory.descriptor, len(self.rows), digest]

    def _take(self, first: list[str], told: list[Any] | None) -> IntArray | None:
        if told is None:
            return None
        descriptor, n_rows, digest = told
        try:
            path = f"/proc/{first[2]}/fd/{descriptor}"
            if NAME not in os.readlink(path):  # the descriptor is another file's by now
                return None
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._memory = ShardMemory([(n_rows, np.dtype(np.int64).itemsize)], shared=True, descriptor=opened)
        except (OSError, H5Error):  # another user's, or gone
            return None
        rows = _rows_in(self._memory)
        if digest_of_index(rows) == digest:
            return rows
        self._memory = None  # the descriptor is another's by now
        return None


def digest_of_index(rows: IntArray) -> str:
    """Of rows in their order."""
    return hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()


def _rows_in(memory: ShardMemory) -> IntArray:
    rows: IntArray = memory.columns[0].reshape(-1).view(np.int64)
    rows.flags.writeable = False
    return rows

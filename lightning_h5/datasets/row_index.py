"""Which rows pass the filters: worked out once on each machine, and kept on disk for the next time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..distributed import OncePerNode
from ..errors import H5Error
from ..hdf5 import expand_user
from ..order import resolve_replica
from ..types import IntArray, PathLike
from .catalog import FileCatalog
from .selection import Selection
from .shard_memory import ShardMemory

__all__ = ["RowIndexStore", "SharedIndex", "name_of_index"]

NAME = "h5_index"  # of the shared memory
VERSION = 1  # of what a selection means; another number makes all that was kept void

_log = logging.getLogger(__name__)


def name_of_index(table: FileCatalog, selection: Selection, rows: IntArray | None) -> str | None:
    """What an index is known by: the files as they are, and all that is asked of them.

    None where a function decides: whether it is the same in another process cannot be told.
    """
    if any(one.key is None for one in selection.criteria):
        return None
    arrays = [array.key for array in table.layouts[0]]
    of_files: list[Any] = [[one.n_bytes, one.mtime_ns] for guard in table.guards for one in (guard, *guard.others)]
    asked = [[one.key, arrays[selection.fields[one.column or ""]]] for one in selection.criteria]
    label: list[Any] = []
    if (wanted := selection.label) is not None:
        valid = None if wanted.valid is None else arrays[wanted.valid]
        label = [wanted.label, arrays[wanted.target], valid, wanted.layout]
    digest = hashlib.sha256(json.dumps([VERSION, table.identity(), of_files, asked, label]).encode())
    if rows is not None:
        digest.update(b"among" + rows.tobytes())
    return digest.hexdigest()[:32]


class RowIndexStore:
    """A folder with an index a file. What is not there, or not whole, is as if it had not been kept.

    Args:
        folder: where; True is ``lightning_h5`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``).
    """

    def __init__(self, folder: PathLike | Literal[True]) -> None:
        if folder is True:
            folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lightning_h5")
        self._folder = Path(expand_user(folder))

    def load(self, name: str, n_rows: int) -> IntArray | None:
        """The rows kept by a name; None where there are none."""
        path = self._path(name)
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as kept:
                rows, digest = kept["rows"], str(kept["digest"])
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with it, it is made anew
            _log.warning("%s is not a whole index (%s); it is made anew", path, error)
            return None
        if digest != digest_of_index(rows) or rows.dtype != np.int64 or rows.ndim != 1 or not _is_within(rows, n_rows):
            _log.warning("%s is not a whole index; it is made anew", path)
            return None
        found: IntArray = rows
        return found

    def keep(self, name: str, rows: IntArray) -> None:
        """Keeps rows: whole or not at all. Where that cannot be, training goes on without."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, made = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    np.savez(file, rows=rows, digest=np.array(digest_of_index(rows)))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(made, self._path(name))
            except BaseException:
                with suppress(OSError):
                    os.unlink(made)
                raise
        except OSError as error:
            _log.warning("the index of rows is not kept in %s: %s", self._folder, error)

    def _path(self, name: str) -> Path:
        return self._folder / f"index-{name}.npz"


def _is_within(rows: IntArray, n_rows: int) -> bool:
    return not len(rows) or bool(rows.min() >= 0 and rows.max() < n_rows)


class SharedIndex:
    """Rows that one process of this machine found, and all others took; each has them for itself where that cannot be.

    Args:
        name: says which rows; the same in all processes that ask for the same.
        find: works them out; calls its first argument as it goes on. The second is whether this process shows
            progress: one on each machine does, or rank 0 if each rank works for itself.

    Attributes:
        rows: the rows; not to be written to.

    Raises:
        H5Error: what ``find`` raised, in each process.
    """

    def __init__(self, name: str, find: Callable[[Callable[[], None], bool], IntArray]) -> None:
        question = OncePerNode(f"rows that pass/{name}")
        self._memory: ShardMemory | None = None  # its descriptor stays open: others may come later
        taken = None if question.is_first else self._take(question.first, question.value())
        if taken is not None:
            self.rows = taken
            return
        told = None
        try:
            shows = question.has_others or (question.is_first and resolve_replica().rank == 0)
            self.rows = find(question.progress, shows)
            told = self._share() if question.has_others else None
        finally:
            if question.has_others:
                question.publish(told)

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

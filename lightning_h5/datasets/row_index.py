"""Rows that passed the filters, kept on disk for the next time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..types import IntArray, PathLike
from .selection import Selection
from .shared_index import digest_of_index
from .table import FileTable

__all__ = ["RowIndexStore", "name_of_index"]

VERSION = 1  # of what a selection means; another number makes all that was kept void

_log = logging.getLogger(__name__)


def name_of_index(table: FileTable, selection: Selection, rows: IntArray | None) -> str | None:
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
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = Path(cache) / "lightning_h5" if folder is True else Path(os.fspath(folder)).expanduser()

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

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

from ..errors import H5ValueError
from ..types import IntArray, PathLike
from .selection import Selection
from .table import FileTable

__all__ = ["RowIndexStore"]

VERSION = 1  # of what a selection means; another number makes all that was kept void

_log = logging.getLogger(__name__)


class RowIndexStore:
    """A folder with an index a file. What is not there, or not whole, is as if it had not been kept.

    Args:
        folder: where; True is ``lightning_h5`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``).
    """

    def __init__(self, folder: PathLike | Literal[True]) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = Path(cache) / "lightning_h5" if folder is True else Path(os.fspath(folder)).expanduser()

    def name_of(self, table: FileTable, selection: Selection, rows: IntArray | None) -> str:
        """What an index is kept by: the files as they are, and all that is asked of them.

        Raises:
            H5ValueError: a function decides, and whether it is the same next time cannot be told.
        """
        nameless = [one.text for one in selection.criteria if one.key is None]
        if nameless:
            raise H5ValueError(
                f"cache_index was asked for, and {nameless[0]} is a function, which is not known again in another "
                "process. Say the same by values and ranges, or leave cache_index out."
            )
        arrays = [array.key for array in table.layouts[0]]
        of_files: list[Any] = [[guard.n_bytes, guard.mtime_ns] for guard in table.guards]
        asked = [[one.key, arrays[selection.fields[one.column or ""]]] for one in selection.criteria]
        label: list[Any] = []
        if (wanted := selection.label) is not None:
            valid = None if wanted.valid is None else arrays[wanted.valid]
            label = [wanted.label, arrays[wanted.target], valid, wanted.layout]
        digest = hashlib.sha256(json.dumps([VERSION, table.identity(), of_files, asked, label]).encode())
        if rows is not None:
            digest.update(b"among" + rows.tobytes())
        return digest.hexdigest()[:32]

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
        if digest != _digest(rows) or rows.dtype != np.int64 or rows.ndim != 1 or not _is_within(rows, n_rows):
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
                    np.savez(file, rows=rows, digest=np.array(_digest(rows)))
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


def _digest(rows: IntArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def _is_within(rows: IntArray, n_rows: int) -> bool:
    return not len(rows) or bool(rows.min() >= 0 and rows.max() < n_rows)

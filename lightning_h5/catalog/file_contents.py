"""What one file has in it, as it was when it was opened."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5DataChangedError, H5Error
from ..hdf5 import AlikeArrays, ArrayLayout, ChangeGuard, OpenOptions, external_guards, open_h5, pread_of, stat_of

__all__ = ["FileContents", "collector_paused", "opened"]

COLUMN_BYTES = 1 << 20
"""Columns of at most this size in a file are read when it is opened; longer ones by all cores, once it is closed."""


@dataclass
class FileContents:
    """What one file has in it.

    Attributes:
        guard: how it looked.
        arrays: descriptions of arrays, or why there are none.
        others: guards of other files that arrays have rows in, by array.
        values: of columns.
        found: what searches found, by name.
    """

    guard: ChangeGuard
    arrays: dict[str, ArrayLayout | H5Error] = field(default_factory=dict)
    others: dict[str, tuple[ChangeGuard, ...]] = field(default_factory=dict)
    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    found: dict[Any, Any] = field(default_factory=dict)

    def describe(
        self, h5: Any, path: str, key: str, options: OpenOptions, alike: AlikeArrays, *, is_asked: bool
    ) -> None:
        """Describe an array, or note why that is an error.

        Args:
            h5: the open file.
            path: its path.
            key: of the array.
            options: how it was opened.
            alike: describes it.
            is_asked: whether it has to exist.
        """
        files = options.files
        try:
            found = alike.describe(h5, path, key, files, self.guard, if_exists=not is_asked)
            if files.allow_external and found is not None:
                strict = files.verify is not None
                self.others[key] = external_guards(h5, [key], files, grows=options.swmr, strict=strict)
        except H5Error as error:
            self.arrays[key] = error.with_traceback(None)
            return
        if found is not None:
            self.arrays[key] = found

    def read_if_short(self, h5: Any, key: str) -> None:
        """Keep the values of a column that is short and lies in the open file as it is read."""
        layout = self.arrays.get(key)
        if not isinstance(layout, ArrayLayout) or layout.offset is None or layout.row_shape or layout.members:
            return
        if layout.n_bytes > COLUMN_BYTES or layout.digests is not None or (pread := pread_of(h5)) is None:
            return
        content = pread(layout.n_bytes, layout.offset)
        if len(content) == layout.n_bytes:
            self.values[key] = np.frombuffer(content, layout.stored).astype(layout.dtype)


@contextmanager
def opened(path: str, options: OpenOptions) -> Iterator[tuple[Any, ChangeGuard]]:
    """Open a file, and yield it with its guard: of one and the same file, though another may take its place meanwhile.

    Raises:
        H5DataChangedError: it changed while it was open, whatever error that caused.
        H5FileError: it cannot be opened.
    """
    guard: ChangeGuard | None = None
    with suppress(OSError):  # open raises a better error
        guard = ChangeGuard.of(path, grows=options.swmr, strict=options.files.verify is not None)
    if guard is not None:
        guard = guard.staged(options.files.staged)
    status = guard.status if guard is not None and guard.is_remote else None
    with open_h5(path, swmr=options.swmr, status=status, takes_index=True) as h5:
        if guard is None:
            raise H5DataChangedError(f"{path!r} was created while it was being read. Start again when it is complete.")
        try:
            yield h5, guard
        finally:
            guard.compare(stat_of(h5))  # a change explains any other error
            guard.check()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: it would go again and again through thousands of descriptions that are kept."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

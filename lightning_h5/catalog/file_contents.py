"""The contents of one file, as they were when it was opened."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5DataChangedError, H5Error
from ..hdf5 import (
    AlikeArrays,
    Annotations,
    ArrayLayout,
    ChangeGuard,
    OpenFile,
    OpenOptions,
    annotations_of,
    external_guards,
    has_first_link,
    open_h5,
)

__all__ = ["FileContents", "collector_paused", "open_guarded"]

COLUMN_BYTES = 1 << 20
"""Columns of at most this size in a file are read when it is opened; longer ones by all cores, once it is closed."""


@dataclass
class FileContents:
    """The contents of one file.

    Attributes:
        guard: the state of the file.
        arrays: description of each array, or the error if it cannot be described.
        annotations: what the file says about arrays, other than ``arrays``.
        others: for each array, guards of the other files that hold some of its rows.
        values: of columns.
        results: of searches, by name.
    """

    guard: ChangeGuard
    arrays: dict[str, ArrayLayout | H5Error] = field(default_factory=dict)
    annotations: dict[str, Annotations | None] = field(default_factory=dict)
    others: dict[str, tuple[ChangeGuard, ...]] = field(default_factory=dict)
    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    results: dict[Any, Any] = field(default_factory=dict)

    def describe(
        self, file: OpenFile, path: str, key: str, options: OpenOptions, alike: AlikeArrays, *, is_required: bool
    ) -> None:
        """Describe an array, or note the error.

        Args:
            file: the open file.
            path: its path.
            key: of the array.
            options: how it was opened.
            alike: describes it.
            is_required: whether it has to exist.
        """
        if not is_required and not has_first_link(file, key):
            return
        files = options.files
        try:
            layout = alike.describe(file, path, key, files, self.guard)
            if files.allow_external:
                strict = files.verify is not None
                self.others[key] = external_guards(file.h5, [key], files, grows=options.swmr, strict=strict)
        except H5Error as error:
            self.arrays[key] = error.with_traceback(None)
        else:
            self.arrays[key] = layout
            self.annotations[key] = annotations_of(
                file,
                key,
                may_have_attributes=layout.is_annotated,
                with_scales=layout.is_annotated and alike.takes_scales(path),
            )

    def read_if_short(self, file: OpenFile, key: str) -> None:
        """Read the values of a column, if it is short and stored in the open file without filters."""
        layout = self.arrays.get(key)
        if not isinstance(layout, ArrayLayout) or layout.offset is None or layout.row_shape or layout.members:
            return
        if layout.n_bytes > COLUMN_BYTES or layout.digests is not None or (pread := file.pread) is None:
            return
        content = pread(layout.n_bytes, layout.offset)
        if len(content) == layout.n_bytes:
            self.values[key] = np.frombuffer(content, layout.stored).astype(layout.dtype)


@contextmanager
def open_guarded(path: str, options: OpenOptions) -> Iterator[tuple[OpenFile, ChangeGuard]]:
    """Open a file, and yield it with its guard. Both are of the same file, even if another replaces it meanwhile.

    Raises:
        H5DataChangedError: it changed while it was open.
        H5FileError: it cannot be opened.
    """
    try:
        guard = ChangeGuard.of(path, grows=options.swmr, strict=options.files.verify is not None)
    except OSError:
        open_h5(path, swmr=options.swmr).close()  # raises a better error
        raise H5DataChangedError(
            f"{path!r} was created while it was being read. Start again when it is complete."
        ) from None
    guard = guard.staged(options.files.staged)
    with OpenFile(path, guard) as file:
        try:
            yield file, guard
        finally:
            guard.compare(file.stat)  # a change explains any other error
            guard.check()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which would scan thousands of live descriptions again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

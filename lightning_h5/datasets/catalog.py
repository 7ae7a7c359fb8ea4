"""The one description of the files of a dataset: their arrays, which rows are samples, and where these lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import H5DataChangedError, H5Error, H5FileError, H5ValueError, listing
from ..hdf5 import ArrayLayout, ChangeGuard, OpenOptions, file_identity
from ..order import BlockTable, resolve_replica
from ..progress_bar import with_bar
from ..types import IntArray
from .compatibility import Asked, Compatibility, refuse_images
from .visits import current_visits

__all__ = [
    "HELD_BYTES",
    "RUN_BYTES",
    "FileCatalog",
    "SegmentTable",
    "advise_on_broken",
    "describe_files",
    "digest_of_rows",
    "held_fields",
]

HELD_BYTES = 16 << 20
"""An array whose rows take no more than this, over all files, is read whole, once, in each process."""

RUN_BYTES = 1 << 20
"""Rows of unchunked arrays are taken together by runs of this size: long enough for a disk, short to shuffle."""


WITHOUT_THEM = "Repair them, or pass a list of files without them; no file is left out in silence."
"""What to do about broken files in classes that have no argument for it."""


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Which steps belong together, and how many samples they make: a sample is a segment and a start in it.

    A segment takes 8 bytes if each file is one, whose samples are its rows; otherwise 24.

    Attributes:
        starts: samples before each segment, and the number of samples at the end; shape ``(n_segments + 1,)``.
        files: for each segment the number of its file; None if each file is one segment.
        first_rows: for each segment its first row in the file; None if that is 0.
    """

    starts: IntArray
    files: IntArray | None = None
    first_rows: IntArray | None = None

    def locate(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Segment, and start in it, of each sample."""
        segments = np.searchsorted(self.starts, samples, side="right") - 1
        return segments, samples - self.starts[segments]

    def rows(self, segments: IntArray, starts: IntArray) -> tuple[IntArray, IntArray]:
        """File, and row in it, of starts in segments."""
        files = segments if self.files is None else self.files[segments]
        return files, starts if self.first_rows is None else self.first_rows[segments] + starts


@dataclass(frozen=True, eq=False)
class FileCatalog:
    """The files of a dataset, one after the other.

    Attributes:
        paths: the files.
        layouts: for each file its arrays, in the order of the dataset's fields.
        segments: which rows are samples; here each row of each file.
        guards: for each file how it looked when it was described.
    """

    paths: tuple[str, ...]
    layouts: tuple[tuple[ArrayLayout, ...], ...]
    segments: SegmentTable
    guards: tuple[ChangeGuard, ...]

    @property
    def starts(self) -> IntArray:
        """First row of each file, and the number of rows at the end; shape ``(n_files + 1,)``."""
        return self.segments.starts

    @property
    def n_rows(self) -> int:
        """Rows of all files."""
        return int(self.starts[-1])

    def with_fields(self, n_fields: int) -> FileCatalog:
        """The same files with the first of their arrays alone."""
        return replace(self, layouts=tuple(arrays[:n_fields] for arrays in self.layouts))

    def locate(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """File, and row inside the file, of each row."""
        return self.segments.rows(*self.segments.locate(rows))

    def places_of(self, rows: IntArray) -> list[tuple[str, int]]:
        """The path of the file, and the row inside it, of each row; for messages."""
        files, local = self.locate(rows)
        return [(self.paths[file], row) for file, row in zip(files.tolist(), local.tolist(), strict=True)]

    def identity(self) -> str:
        """A digest of what the files hold (see ``file_identity``), in their order; worked out once."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        each = (
            file_identity(path, arrays, grows=guard.grows, others=[other.path for other in guard.others])
            for path, arrays, guard in zip(self.paths, self.layouts, self.guards, strict=True)
        )
        return "-".join(each) if len(self.paths) == 1 else _digest(each)

    def blocks(self, rows: IntArray | None, held: Sequence[bool]) -> BlockTable:
        """The block table of these rows (None: all, in order).

        A block is what shares one chunk of the coarsest array that is not held whole; a run of about a
        megabyte where there are no chunks.
        """
        steps = self.rows_per_block(held)
        if rows is None:
            sizes = [
                size
                for step, n in zip(steps, np.diff(self.starts).tolist(), strict=True)
                for size in [step] * (n // step) + [n % step]
            ]
            return BlockTable.of_sizes(sizes)
        files, local = self.locate(rows)
        blocks = local // np.asarray(steps, dtype=np.int64)[files]
        cuts = np.flatnonzero((np.diff(files) != 0) | (np.diff(blocks) != 0)) + 1
        return BlockTable.of_sizes(np.diff(np.concatenate([[0], cuts, [len(rows)]])))

    def rows_per_block(self, held: Sequence[bool]) -> list[int]:
        """For each file, the rows of its blocks; the last one may have fewer."""
        return [_rows_per_block(arrays, held) for arrays in self.layouts]


def digest_of_rows(table: FileCatalog, rows: IntArray | None) -> str:
    """A digest of what files hold, and of which of their rows are meant (None: all), in their order."""
    digest = hashlib.sha256(table.identity().encode())
    if rows is not None:
        digest.update(rows.tobytes())
    return digest.hexdigest()[:32]


def held_fields(table: FileCatalog) -> list[bool]:
    """For each field, whether its rows are few bytes enough to be held whole.

    The same on all ranks and in all workers, since blocks, and with them the order, follow from it.
    """
    return [sum(layouts[field].n_bytes for layouts in table.layouts) <= HELD_BYTES for field in range(_n(table))]


def describe_files(
    paths: Sequence[str],
    asked: Sequence[Asked],
    options: OpenOptions,
    *,
    sample: str | None = None,
    skip: Callable[[str, H5FileError], None] | None = None,
    instead: str = WITHOUT_THEM,
    n_files: int | None = None,
) -> FileCatalog:
    """Looks at the arrays of all files and checks that they belong together. Reads metadata only.

    Args:
        paths: the files.
        asked: the arrays, in the order of the fields.
        options: how files are opened.
        sample: "row" if the user said that rows are samples, so that no other meaning is looked for.
        skip: is told of files that are missing or broken, which are left out; None raises their errors.
        instead: what to do to train without broken files, for their errors.
        n_files: how many files were given, if some of them are left out already.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: an array is not there.
        H5ValueError: an array cannot become a tensor, or holds packed integers; arrays of a file differ in their rows,
            files differ, or each of them may be one image or volume.
    """
    if sample not in (None, "row"):
        raise H5ValueError(f"sample={sample!r} was given. Pass 'row' (an index along axis 0 is a sample), or None.")
    which = ("catalog", tuple(paths), tuple(asked), options, sample, n_files)

    def describe() -> FileCatalog:
        return _describe(paths, asked, options, sample, skip, instead, n_files)

    try:
        return describe() if skip is not None else current_visits().once(which, describe)
    except H5Error as error:  # its text says all that a user can do; frames and causes in here add nothing
        raise error.with_traceback(None) from None


def _describe(
    paths: Sequence[str],
    asked: Sequence[Asked],
    options: OpenOptions,
    sample: str | None,
    skip: Callable[[str, H5FileError], None] | None,
    instead: str,
    n_files: int | None,
) -> FileCatalog:
    used, layouts, guards = [], [], []
    keys = [one.key for one in asked]
    visits, compatibility = current_visits(), Compatibility(asked)
    shows_progress = len(paths) >= 50 and resolve_replica().rank == 0  # all ranks look at them
    for path in with_bar(paths, "looking at files", unit="file", shows_progress=shows_progress, delay=2):
        try:
            guard, found = visits.describe(path, keys, options)
        except H5FileError as error:
            if skip is None:
                advise_on_broken(error, len(paths), instead)
                raise
            skip(path, error)
            continue
        used.append(path)
        guards.append(guard)
        layouts.append(found)
        compatibility.check(found)
    if not used:
        raise H5FileError(f"none of {listing(paths)} can be read. Look at the errors that were logged for each.")
    if sample is None:
        refuse_images(layouts[0], [arrays[0].n_rows for arrays in layouts], n_files or len(paths))
    starts = np.concatenate([[0], np.cumsum([arrays[0].n_rows for arrays in layouts])]).astype(np.int64)
    return FileCatalog(tuple(used), tuple(layouts), SegmentTable(starts), tuple(guards))


def advise_on_broken(error: H5FileError, n_files: int, instead: str) -> None:
    """Add to the error of a broken file what to do if it is one of several.

    Args:
        error: of the file; one of the system, as of a lock, or of a file that changed stays as it is.
        n_files: how many files there are.
        instead: what to do to train without such files.
    """
    is_broken = not isinstance(error, H5DataChangedError) and getattr(error.__cause__, "errno", None) is None
    if n_files > 1 and is_broken:
        error.args = (
            f"{error} It is one of {n_files:,} files: `lightning-h5 check` finds all that cannot be read. {instead}",
        )


def _rows_per_block(arrays: Sequence[ArrayLayout], held: Sequence[bool]) -> int:
    loose = [array for array, whole in zip(arrays, held, strict=True) if not whole]
    coarsest = max((array.rows_per_chunk for array in loose if not array.is_contiguous), default=1)
    if coarsest > 1:
        return coarsest
    return max(1, RUN_BYTES // max(1, sum(array.row_bytes for array in loose or arrays)))


def _n(table: FileCatalog) -> int:
    return len(table.layouts[0])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]

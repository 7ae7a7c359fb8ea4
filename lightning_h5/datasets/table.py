"""Which rows lie where: the files of a dataset, their arrays, and the checks that they belong together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from ..errors import H5DataChangedError, H5FileError, H5ValueError, listing
from ..files import (
    ArrayLayout,
    ChangeGuard,
    OpenOptions,
    file_identity,
    guards_of_others,
    kind_of,
    look_up,
    looks_of,
    open_h5,
    process_pool,
    refuse_overlaps,
)
from ..sampling import BlockTable
from ..types import IntArray
from .live import as_agreed

__all__ = ["HELD_BYTES", "RUN_BYTES", "FileTable", "digest_of_rows", "held_fields", "scan_files"]

HELD_BYTES = 16 << 20
"""An array whose rows take no more than this, over all files, is read whole, once, in each process."""

RUN_BYTES = 1 << 20
"""Rows of unchunked arrays are taken together by runs of this size: long enough for a disk, short to shuffle."""


@dataclass(frozen=True, eq=False)
class FileTable:
    """The files of a dataset, one after the other.

    Attributes:
        paths: the files.
        layouts: for each file its arrays, in the order of the dataset's fields.
        starts: first row of each file, and the number of rows at the end; shape ``(n_files + 1,)``.
        guards: for each file how it looked when it was scanned.
    """

    paths: tuple[str, ...]
    layouts: tuple[tuple[ArrayLayout, ...], ...]
    starts: IntArray
    guards: tuple[ChangeGuard, ...]

    @property
    def n_rows(self) -> int:
        """Rows of all files."""
        return int(self.starts[-1])

    def locate(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """File, and row inside the file, of each row."""
        files = np.searchsorted(self.starts, rows, side="right") - 1
        return files, rows - self.starts[files]

    def identity(self) -> str:
        """A digest of what the files hold (see ``file_identity``), in their order."""
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


def digest_of_rows(table: FileTable, rows: IntArray | None) -> str:
    """A digest of what files hold, and of which of their rows are meant (None: all), in their order."""
    digest = hashlib.sha256(table.identity().encode())
    if rows is not None:
        digest.update(rows.tobytes())
    return digest.hexdigest()[:32]


def held_fields(table: FileTable) -> list[bool]:
    """For each field, whether its rows are few bytes enough to be held whole.

    The same on all ranks and in all workers, since blocks, and with them the order, follow from it.
    """
    return [sum(layouts[field].n_bytes for layouts in table.layouts) <= HELD_BYTES for field in range(_n(table))]


def scan_files(
    paths: Sequence[str],
    keys: Sequence[str],
    options: OpenOptions,
    *,
    text_ok: Sequence[bool],
    pass_over: Callable[[str, H5FileError], None] | None = None,
) -> FileTable:
    """Looks at the arrays of all files and checks that they belong together. Reads metadata only.

    Args:
        paths: the files.
        keys: the arrays, in the order of the fields.
        options: how files are opened.
        text_ok: for each key, whether it may hold text (a label may, a single input may not).
        pass_over: is told of files that are missing or broken, which are left out; None raises their errors.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: an array is not there.
        H5ValueError: an array cannot become a tensor, arrays of a file differ in their rows, or files differ.
    """
    used, layouts, guards = [], [], []
    for path in tqdm(paths, desc="looking at files", unit="file", delay=2, leave=False, disable=len(paths) < 50):
        try:
            guard, found = _look(path, keys, options)
        except H5FileError as error:
            if pass_over is None:
                raise
            pass_over(path, error)
            continue
        used.append(path)
        guards.append(guard)
        layouts.append(found)
        for layout, text in zip(layouts[-1], text_ok, strict=True):
            _check_kind(layout, text_ok=text)
        _check_rows(layouts[-1])
        refuse_overlaps(layouts[-1])
        _check_alike(layouts[0], layouts[-1])
    if not used:
        raise H5FileError(f"none of {listing(paths)} can be read. Look at the errors that were logged for each.")
    starts = np.concatenate([[0], np.cumsum([arrays[0].n_rows for arrays in layouts])]).astype(np.int64)
    return FileTable(tuple(used), tuple(layouts), starts, tuple(guards))


def _rows_per_block(arrays: Sequence[ArrayLayout], held: Sequence[bool]) -> int:
    loose = [array for array, whole in zip(arrays, held, strict=True) if not whole]
    coarsest = max((array.rows_per_chunk for array in loose if not array.is_placed), default=1)
    if coarsest > 1:
        return coarsest
    return max(1, RUN_BYTES // max(1, sum(array.row_bytes for array in loose or arrays)))


def _look(path: str, keys: Sequence[str], options: OpenOptions) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
    """A file's guard and its arrays, of one and the same file: another may take its place while it is looked at."""
    guard: ChangeGuard | None = None
    kind = {"grows": options.swmr, "strict": options.trust.verify is not None}
    with suppress(OSError):  # said with more words when it is opened
        guard = ChangeGuard.of(path, **kind)

    def look() -> tuple[ArrayLayout, ...]:
        nonlocal guard
        with open_h5(path, swmr=options.swmr) as file:
            process_pool().close_replaced(path)  # what is read is to be what is looked at here
            try:
                if guard is not None:
                    guard = replace(guard, others=guards_of_others(file, keys, options.trust, **kind))
                return tuple(look_up(file, path, key, options.trust) for key in keys)
            finally:
                if guard is not None:  # what went wrong meanwhile went wrong because of that
                    guard.compare(looks_of(file))
                    guard.check()

    found = as_agreed(path, look) if options.swmr else look()
    if guard is None:
        raise H5DataChangedError(f"{path!r} was made while it was looked at. Start again once it is written.")
    return guard, tuple(_guarded(layout, guard) for layout in found)


def _guarded(layout: ArrayLayout, guard: ChangeGuard) -> ArrayLayout:
    """An array that is read from the file of a guard alone."""
    references = None if layout.references is None else replace(layout.references, guard=guard)
    return replace(layout, references=references, guard=guard)


def _n(table: FileTable) -> int:
    return len(table.layouts[0])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]


def _check_kind(layout: ArrayLayout, *, text_ok: bool) -> None:
    kind = kind_of(layout.dtype)
    where = f"{layout.key!r} in {layout.path!r}"
    if kind == "number" or (kind == "text" and text_ok):
        return
    if kind == "text":
        raise H5ValueError(
            f"{where} holds text, and a tensor cannot. Take it as y_key, or as one of several x_key "
            "(text then comes as a list of str), or encode it as numbers."
        )
    if kind == "compound":
        members = listing(f"{layout.key}/{name}" for name in layout.dtype.base.names or ())
        raise H5ValueError(
            f"{where} is a table: its rows have the members {members}. "
            "Name one of them as the key, or several as a list."
        )
    raise H5ValueError(
        f"{where} has the dtype {layout.stored}, which a tensor cannot have. "
        "Choose another array, or write it again as integers or floats of up to 64 bits."
    )


def _check_rows(arrays: Sequence[ArrayLayout]) -> None:
    first = arrays[0]
    for other in arrays[1:]:
        if other.n_rows != first.n_rows:
            raise H5ValueError(
                f"{first.key!r} has {first.n_rows} rows and {other.key!r} has {other.n_rows} in {first.path!r}; "
                "row i of each must belong together. Name arrays with the same length along axis 0."
            )


def _check_alike(expected: Sequence[ArrayLayout], found: Sequence[ArrayLayout]) -> None:
    for a, b in zip(expected, found, strict=True):
        for what, left, right in (("dtype", a.dtype, b.dtype), ("shape of a row", a.row_shape, b.row_shape)):
            if left != right and not (kind_of(a.dtype) == kind_of(b.dtype) == "text" and what == "dtype"):
                raise H5ValueError(
                    f"{a.key!r} has the {what} {left} in {a.path!r} and {right} in {b.path!r}. "
                    "Train on files that are alike, or make two data modules."
                )

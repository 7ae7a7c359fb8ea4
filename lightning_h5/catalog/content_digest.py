"""A digest of all bytes of small files, or of small arrays. Of other arrays only samples are compared.

All bytes of the files are read if their sum is small, and otherwise the bytes of the smallest arrays. The shapes alone
determine these arrays, so that all ranks, and a resumed run, choose the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from deflate import crc32

from ..errors import H5DataChangedError, H5Error
from ..hdf5 import ArrayDigests, ArrayLayout, ChangeGuard, OpenOptions
from ..readers import BulkTask, digest_tasks, do_tasks, empty_digests, usable_cores
from ..types import IntArray
from .part_layouts import PartLayouts

__all__ = ["MAX_WHOLE_BYTES", "whole_digest"]

MAX_WHOLE_BYTES = 256 << 20
"""Bytes of a dataset that are read whole: a fraction of a second. Another number needs another name of the digest."""

MAX_ARRAYS = 4_096  # describing and opening each takes as long as reading 256 KiB
TEXT_BYTES = 1 << 10  # reading text of variable length takes as long as reading so many bytes
PIECE_BYTES = 4 << 20


def whole_digest(layouts: PartLayouts, guards: Sequence[ChangeGuard], options: OpenOptions) -> str | None:
    """Return a digest of all bytes of files, or of their smallest arrays; it is computed once, also for several splits.

    Args:
        layouts: the arrays that are used.
        guards: of the files.
        options: how files are opened if the HDF5 library reads.

    Returns:
        None if a file is an object of a store, has a live writer, or cannot be read, and if no array is small.

    Raises:
        H5DataChangedError: a file has changed since it was described.
    """
    if layouts.whole_digest is None:
        layouts.whole_digest = (_digest_of_data(layouts, guards, options),)
    return layouts.whole_digest[0]


def _digest_of_data(layouts: PartLayouts, guards: Sequence[ChangeGuard], options: OpenOptions) -> str | None:
    files = list({guard.path: guard for guard in _with_others(guards)}.values())
    if any(guard.is_remote or guard.grows for guard in files):
        return None
    try:
        if sum(guard.n_bytes for guard in files) <= MAX_WHOLE_BYTES:
            return _digest_of_files(files)
        return _digest_of_arrays(_smallest(layouts), options)
    except H5DataChangedError:
        raise
    except (OSError, H5Error):  # raised again when samples need these bytes
        return None


def _with_others(guards: Iterable[ChangeGuard]) -> Iterator[ChangeGuard]:
    for guard in guards:
        yield guard
        yield from _with_others(guard.others)


def _digest_of_files(files: Sequence[ChangeGuard]) -> str:
    pieces = [
        (guard, start, min(PIECE_BYTES, guard.n_bytes - start))
        for guard in files
        for start in range(0, guard.n_bytes, PIECE_BYTES)
    ]
    checksums = np.zeros(len(pieces), dtype="<u4")

    def run(numbers: range) -> None:
        for number in numbers:
            checksums[number] = _checksum(*pieces[number])

    ends = np.cumsum([n_bytes for _, _, n_bytes in pieces])
    cuts = [0, *(np.flatnonzero(np.diff(ends // PIECE_BYTES)) + 1).tolist(), len(pieces)]
    tasks = [BulkTask(PIECE_BYTES, 2 * PIECE_BYTES, partial(run, range(start, stop))) for start, stop in pairwise(cuts)]
    do_tasks(tasks, usable_cores(), lambda _: None)
    return hashlib.sha256(checksums.tobytes()).hexdigest()[:32]


def _checksum(guard: ChangeGuard, start: int, n_bytes: int) -> int:
    """Return the checksum of bytes of a file, which is closed again: there may be thousands of files."""
    checksum, stop = 0, start + n_bytes
    fd = os.open(guard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe by now
    try:
        guard.compare(os.fstat(fd))
        while start < stop:
            data = os.pread(fd, stop - start, start)
            if not data:
                raise OSError(f"{guard.path!r} ended at byte {start}")
            checksum = crc32(data, checksum)
            start += len(data)
    finally:
        os.close(fd)
    return checksum


def _digest_of_arrays(arrays: Iterable[ArrayLayout], options: OpenOptions) -> str | None:
    digests: list[ArrayDigests] = []
    tasks: list[BulkTask] = []
    for array in arrays:
        if (empty := empty_digests(array)) is not None:
            digests.append(empty)
            tasks += digest_tasks(array, options, empty)
    if not digests:
        return None
    do_tasks(tasks, usable_cores(), lambda _: None)
    digest = hashlib.sha256()
    for array_digests in digests:
        digest.update(array_digests.pieces.tobytes())
    return digest.hexdigest()[:32]


def _smallest(layouts: PartLayouts) -> list[ArrayLayout]:
    """Return the smallest stored arrays of files, up to ``MAX_WHOLE_BYTES`` and ``MAX_ARRAYS``."""
    sizes = np.stack([_sizes(layouts, field) for field in range(layouts.n_fields)], axis=1).reshape(-1)
    order = np.argsort(sizes, kind="stable")[:MAX_ARRAYS]
    whole_arrays = np.sort(order[np.cumsum(sizes[order]) <= MAX_WHOLE_BYTES])
    smallest: dict[tuple[str, str], ArrayLayout] = {}  # members of a table are one array
    for part, field in (divmod(number, layouts.n_fields) for number in whole_arrays.tolist()):
        stored = _stored_array(layouts.one(part, field))
        for array in (stored, stored.categories):
            if array is not None:
                smallest[array.path, array.name] = array
    return list(smallest.values())


def _sizes(layouts: PartLayouts, field: int) -> npt.NDArray[np.float64]:
    """Return the bytes of a field's array in each part, before any filter; infinite for values without an array."""

    def of_rows(arrays: tuple[ArrayLayout, ...]) -> tuple[float, float]:
        array, stored = arrays[field], _stored_array(arrays[field])
        if array.value is not None:
            return np.inf, 0
        n_bytes = stored.stored_row_bytes
        if stored.stored.hasobject:
            n_bytes = n_bytes // stored.stored.itemsize * TEXT_BYTES
        is_view = (array if array.decoding is None else array.decoding.array).view is not None
        return stored.n_rows * n_bytes if is_view else 0, 0 if is_view else n_bytes

    of_part, of_row = layouts.of_kinds(of_rows, np.float64).T
    n_rows: IntArray = layouts.n_rows(field)
    sizes: npt.NDArray[np.float64] = of_part + of_row * n_rows
    return sizes


def _stored_array(array: ArrayLayout) -> ArrayLayout:
    """Return the array as it is stored, below its codec and its view."""
    array = array if array.decoding is None else array.decoding.array
    return array if array.view is None else array.view.array

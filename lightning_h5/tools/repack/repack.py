"""Copy a file with other chunks, another compression, or its rows in random order; everything else is preserved."""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import h5py

from ...errors import H5DataChangedError, H5Error, H5FileError
from ...hdf5 import ChangeGuard, create_h5, expand_user, filters_of, open_h5, process_pool, shape_of
from ...options import FileOptions
from ...order.permutation import permutation
from ...progress_bar import progress_bar
from ...readers import usable_cores
from ...types import PathLike
from ..output_files import check_output, new_file
from .copy import FileCopy
from .plan import RepackOptions, plan_arrays
from .row_io import chunks_of
from .verify import CopyVerifier

REPACK = 15  # purpose of the random stream
CACHE_BYTES = 64 << 20  # cache of the HDF5 library for the array being read


@dataclass(frozen=True, kw_only=True)
class StoredAs:
    """How an array is stored in a file.

    Attributes:
        chunks: shape of a chunk; None if it is not chunked.
        filters: names of its filters, in the order of writing.
        n_bytes: bytes in the file.
        row_cost: bytes that are decoded to read a single row.
    """

    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    n_bytes: int
    row_cost: int


@dataclass(frozen=True, kw_only=True)
class RepackedArray:
    """How an array was copied.

    Attributes:
        name: one of its names in the file.
        n_bytes: decoded bytes of all rows.
        is_rewritten: whether its rows were rewritten; otherwise it is stored as before.
        is_shuffled: whether its rows were permuted.
        before: how the source stores it.
        after: how the copy stores it.
        note: the reason if an option was not applied to it.
    """

    name: str
    n_bytes: int
    is_rewritten: bool
    is_shuffled: bool
    before: StoredAs
    after: StoredAs
    note: str


@dataclass(frozen=True, kw_only=True)
class RepackReport:
    """The result of ``repack_file``.

    Attributes:
        source: the file that was copied.
        target: the copy.
        arrays: all arrays, in the order of the file.
        n_bytes_before: size of the source.
        n_bytes_after: size of the copy.
        seconds: duration of the copy, without the verification.
        verify_seconds: duration of the verification; None without one.
    """

    source: str
    target: str
    arrays: tuple[RepackedArray, ...]
    n_bytes_before: int
    n_bytes_after: int
    seconds: float
    verify_seconds: float | None


def repack_file(
    source: PathLike,
    target: PathLike,
    *,
    rows_per_chunk: int | Literal["auto"] | None = None,
    compression: str | None = None,
    level: int | None = None,
    shuffle_filter: bool = False,
    checksum: bool = False,
    shuffle_rows: int | None = None,
    shuffle_keys: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    verify: bool = False,
    for_object_store: bool = False,
    trusted: bool = False,
    shows_progress: bool = False,
) -> RepackReport:
    """Copy a file with chunks for training: reading a random row should decode little more than the row.

    Everything else is preserved: attributes, groups, links of all kinds, dimension scales, references to objects, fill
    values, maximum shapes, the user block. Arrays with a named type get an equal type of their own. Data in other files
    (external links and storage, virtual arrays) remains a link; no other file is opened. References to regions of
    arrays raise an error; HDF5's own ``h5repack`` copies them.

    The copy has a temporary name until it is complete and, on request, verified. It never replaces a file. After an
    error, Ctrl-C or a full disk, it is removed.

    Chunks are decoded in threads, and encoded in threads for gzip and zstd. Needs less than 512 MiB for a file of any
    size, unless one stored chunk or one row of text is larger. Rows that share chunks and have more than 64 MiB in
    total are assembled in a temporary file in the target's folder.

    Args:
        source: the file to copy. It must not change during the copy.
        target: the copy, which must not exist.
        rows_per_chunk: number of whole rows per chunk. "auto" chooses a power of two, so that a decoded chunk has 256
            to 512 KiB, or a single row. Arrays with rows above 32 MiB are copied unchanged. A number applies to arrays
            with rows of several values; columns (one-dimensional arrays except tables) keep their layout if the file
            has other arrays, as their ``note`` in the report mentions. If you request filters, contiguous columns get
            "auto". Name columns in ``keys`` to rewrite them as well. None is "auto" for chunked arrays; contiguous
            arrays remain contiguous, unless an option needs chunks.
        compression: ``gzip``, ``lzf``, ``none``, or with the extra ``filters`` ``zstd``, ``lz4``, ``blosc``,
            ``blosc-zstd``, ``blosc2``, ``bitshuffle``. None, or ``keep``, keeps the filters of each array.
        level: compression level: gzip 1 to 9 (default 4), zstd 1 to 22 (3), Blosc 0 to 9 (5).
        shuffle_filter: shuffle bytes before compressing, which helps with numbers of several bytes.
        checksum: store a checksum with each chunk, which is verified whenever the chunk is read.
        shuffle_rows: a seed to permute the rows of all arrays in the same order. The new places are
            ``permutation(n_rows, seed, 0, 15)`` of ``lightning_h5.order.permutation``, which never changes. Decoded
            rows of more than 64 MiB pass through a temporary file of their size in the target's folder. Text is written
            row by row, about 20 microseconds each. Virtual arrays and references cannot be shuffled.
        shuffle_keys: the arrays that belong together. Required if arrays of the file have different numbers of rows.
        keys: arrays to write with other chunks or filters; None for all. Others are copied as stored, unless they are
            shuffled.
        verify: read the copy and the source with the HDF5 library, on one core, and compare them completely before the
            copy is renamed. For virtual arrays, the mappings are compared, not the values.
        for_object_store: write a file for an object store, where each request takes tens of milliseconds: "auto"
            chooses chunks of 2 to 4 MiB, and metadata is stored together in pages of 1 MiB. On a local disk, reading a
            random row is then more expensive.
        trusted: accept chunks of more than 1 GiB, decoded, which are held whole, and arrays that declare over 4 GiB and
            over 1,000 times their stored bytes.
        shows_progress: show progress on the standard error: a bar on a terminal, otherwise a line every 30 seconds.

    Returns:
        The result, array by array.

    Raises:
        H5FileError: the source cannot be read, or the target cannot be written: it exists, the disk is full, or the
            folder is missing or not writable.
        H5KeyError: an array in the options does not exist.
        H5ValueError: an argument does not apply to this file, a compression is not installed, or an array declares far
            more than it stores.
        H5CorruptError: the source is damaged, or the copy differs from it.
        H5DataChangedError: the source changed during the copy.
    """
    options = RepackOptions(
        rows_per_chunk=rows_per_chunk,
        compression=compression or "keep",
        level=level,
        shuffle_filter=shuffle_filter,
        checksum=checksum,
        shuffle_rows=shuffle_rows,
        shuffle_keys=shuffle_keys,
        keys=keys,
        verify=verify,
        for_object_store=for_object_store,
        files=FileOptions(trusted=trusted),
    )
    source, target = expand_user(source), expand_user(target)
    if os.path.isdir(source):
        raise H5FileError(f"{source!r} is a directory, but repack copies one file at a time. Pass a file.")
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise H5FileError(f"{target!r} is the file to be repacked. Name another file; rename it afterwards.")
    try:
        with open_h5(source, rdcc_nbytes=CACHE_BYTES) as file, _translate_errors(source, target):
            return _repack_file(file, source, target, options, shows_progress)
    finally:
        process_pool().close(source)


def _repack_file(file: Any, source: str, target: str, options: RepackOptions, shows_progress: bool) -> RepackReport:
    began, verify_seconds, folder = time.monotonic(), None, os.path.dirname(os.path.abspath(target))
    guard = ChangeGuard.of_open(file, source)
    plans = plan_arrays(file, options)
    check_output(target)
    order = None
    if (seed := options.shuffle_rows) is not None and (shuffled := [p for p in plans.values() if p.is_shuffled]):
        order = permutation(file[shuffled[0].name].shape[0], seed, 0, REPACK)
    total = sum(plan.n_bytes for plan in plans.values() if plan.way in ("values", "rows"))
    total += sum(plan.n_bytes for plan in plans.values() if plan.way != "elsewhere") if options.verify else 0
    with (
        new_file(target) as partial,
        ThreadPoolExecutor(usable_cores(), "lightning_h5-repack") as pool,
        progress_bar(total, "repacking", shows_progress=shows_progress, delay=0.5) as bar,
    ):
        with create_h5(partial, like=file, checked=options.checksum, paged=options.for_object_store) as copy:
            file_copy = FileCopy(file, copy, plans, order, pool, folder)
            file_copy.copy_structure()
            file_copy.copy_rows(bar.update)
            file_copy.copy_attributes()
        if file.userblock_size:
            with open(source, "rb") as source_file, open(partial, "r+b") as copy_file:
                copy_file.write(source_file.read(file.userblock_size))
        written = time.monotonic()
        with open_h5(partial, rdcc_nbytes=CACHE_BYTES) as copy:
            if options.verify:
                CopyVerifier(file_copy, copy, bar.update).verify()
                verify_seconds = time.monotonic() - written
            arrays = tuple(_report_arrays(file_copy, copy))
        if not _is_unchanged(guard):
            raise H5DataChangedError(
                f"{source!r} was written to, replaced or deleted while it was copied; the copy is discarded. Repack it "
                "again when no other program changes it."
            )
        n_after = os.path.getsize(partial)
    return RepackReport(
        source=source,
        target=target,
        arrays=arrays,
        n_bytes_before=guard.n_bytes,
        n_bytes_after=n_after,
        seconds=written - began,
        verify_seconds=verify_seconds,
    )


@contextmanager
def _translate_errors(source: str, target: str) -> Iterator[None]:
    """Translate errors of the HDF5 library or the system into errors with a remedy."""
    try:
        yield
    except H5Error:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, MemoryError) as error:
        reported = re.search(r"errno = (\d+)", str(error))  # format of the HDF5 library
        number = int(reported[1]) if reported else getattr(error, "errno", None)
        cure = "look for damage with `lightning-h5 check FILE`, and check the disk and permissions of both folders."
        if isinstance(error, MemoryError) or "memory allocation failed" in str(error):
            number = errno.ENOMEM
            cure = (
                "a chunk, or a row of text, is held in memory: see the sizes in `lightning-h5 inspect`, and repack on "
                "a machine with more memory. A crafted file of a few bytes can request any amount."
            )
        elif number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            cure = "make room on the disk, or name a target on another one."
        raise H5FileError(
            f"{source!r} could not be copied to {target!r}: {os.strerror(number) if number else error}. Nothing is "
            f"left of the copy; {cure}"
        ) from error


def _is_unchanged(guard: ChangeGuard) -> bool:
    try:
        return ChangeGuard.of(guard.path) == guard
    except OSError:
        return False


def _report_arrays(file_copy: FileCopy, copy: Any) -> Iterator[RepackedArray]:
    for address, plan in file_copy.plans.items():
        place = file_copy.places[address]
        before, after = (_stored_as(h5py.h5o.open(file.id, place)) for file in (file_copy.source, copy))
        yield RepackedArray(
            name=plan.name,
            n_bytes=plan.n_bytes,
            is_rewritten=plan.way == "rows",
            is_shuffled=plan.is_shuffled,
            before=before,
            after=after,
            note=plan.note,
        )


def _stored_as(array: Any) -> StoredAs:
    chunks, shape, itemsize = chunks_of(array), shape_of(array) or (), array.get_type().get_size()
    filters = filters_of(h5py.Dataset(array))
    row_cost = math.prod(shape[1:]) * itemsize if shape else 0
    if chunks is not None and (filters or chunks[1:] != shape[1:]):
        chunk_counts = (-(-size // step) for size, step in zip(shape[1:], chunks[1:], strict=True))
        row_cost = math.prod(chunk_counts) * math.prod(chunks) * itemsize
    names = tuple("gzip" if step.id == 1 else step.label.split(";")[0] for step in filters)
    return StoredAs(chunks=chunks, filters=names, n_bytes=array.get_storage_size(), row_cost=row_cost)

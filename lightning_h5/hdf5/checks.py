"""Checks of a file's declarations: linked files, sizes, filters, overlaps, and integrity levels.

They are called at three points: before following a link (``check_link``, ``check_source``), after describing an array
(all other checks of this module), and before decoding a chunk (``readers``: its place in the file and its digest).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from ..errors import H5CorruptError, H5FileError, H5ValueError, listing
from ..sizes import bytes_text
from .chunk_index import grid_of
from .open import is_in_other_file

if TYPE_CHECKING:
    from ..options import FileOptions
    from .layout import ArrayLayout, Filter

__all__ = [
    "INTEGRITY",
    "check_decoding_memory",
    "check_in_file",
    "check_integrity",
    "check_library",
    "check_link",
    "check_no_overlap",
    "check_sizes",
    "check_source",
    "ensure_filters",
    "is_out_of_proportion",
    "may_run_code",
    "overlaps",
]

INTEGRITY = (
    "most damage to values would go unnoticed",
    "damage to values is noticed; damage to the file's own tables may not be",
    "damage is noticed, except in chunks that were overwritten with zeros",
    "damage is noticed, except if whole chunks were exchanged",
    "rows are compared with digests of their values",
)
"""The meaning of each integrity level; only digests next to a file reach the last one."""

MAX_VALUE_BYTES = 64 << 20  # a text, a member of a table, or an array inside a value
MAX_CHUNK_BYTES = 1 << 30
MAX_BYTES = 4 << 30
MAX_RATIO = 1000
"""Compression ratio of zeros. An array that declares more than this times its stored bytes was never written, or was
crafted to exhaust memory."""

MAX_ROW_CHUNKS = 1 << 16
"""Chunks of a row that are accepted for a file of any size: the library needs about 3 KiB for each, written or not."""

MAX_SIMPLE = 64  # chunks

SHUFFLE, FLETCHER32, SZIP, NBIT, SCALE_OFFSET, BZIP2, BLOSC2 = 2, 3, 4, 5, 6, 307, 32026  # HDF5 filter numbers
SAME_SIZE = {SHUFFLE, FLETCHER32, NBIT, SCALE_OFFSET}  # filters with decoded sizes that no chunk states
N_VALUES, VALUE_BYTES = 2, 4  # places of numbers in the options of N-bit and scale-offset


# Before a link is followed ----------------------------------------------------------------------------------------


def check_link(file: Any, key: str, name: str, link: Any, *, allow_external: bool) -> None:
    """Check a link on the way to an object.

    Args:
        file: the open file.
        key: the requested name.
        name: the path of the link itself, the beginning of ``key``.
        link: h5py's link.
        allow_external: accept links into other files.

    Raises:
        H5ValueError: the link leads out of the file.
    """
    if isinstance(link, h5py.ExternalLink) and not allow_external:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} leaves the file: {name!r} is an external link to {link.path!r} in "
            f"{link.filename!r}. Pass that file itself, or files=FileOptions(allow_external=True) if you trust it."
        )


def check_source(file: Any, key: str, name: str, source: str, *, is_own: bool, allow_external: bool) -> None:
    """Check one source of a virtual array.

    Args:
        file: the open file.
        key: the virtual array.
        name: the source's file, or a pattern of names.
        source: the array in it, or a pattern of names.
        is_own: whether the file is the virtual array's own.
        allow_external: accept sources in other files.

    Raises:
        H5ValueError: the source may be in another file.
    """
    # A "%" is a pattern or an escape: HDF5 opens a name that differs from this one.
    if allow_external or (is_own and "%" not in name + source):
        return
    origin = "a pattern of names," if is_own else f"other files, among them {name!r}:"
    raise H5ValueError(
        f"{key!r} in {file.filename!r} is a virtual array over {origin} {source!r}. Pass these files themselves as a "
        "list, or files=FileOptions(allow_external=True) if you trust them."
    )


# Once an array is found, and described ----------------------------------------------------------------------------


def check_in_file(file: Any, array: Any, key: str) -> None:
    """Check that an array and its bytes are in the opened file.

    Raises:
        H5ValueError: they are in another file.
    """
    if array.external:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} keeps its bytes in other files: "
            f"{listing(name for name, _, _ in array.external)}. Pass files=FileOptions(allow_external=True) if you "
            "trust the file."
        )
    # Independent of the checked links: the object must be in the opened file.
    if is_in_other_file(file, array):
        raise H5ValueError(
            f"{key!r} in {file.filename!r} lies in another file, {array.file.filename!r}. Pass that file itself, "
            "or files=FileOptions(allow_external=True) if you trust it."
        )


def check_sizes(file: Any, array: Any, key: str, files: FileOptions, n_stored: int | None = None) -> None:
    """Check that an array declares no sizes out of proportion to its stored bytes.

    Args:
        file: the open file.
        array: h5py's dataset.
        key: the requested name.
        files: options with the accepted sizes.
        n_stored: stored bytes of a virtual array; None reads them from the array itself.

    Raises:
        H5ValueError: a chunk is too large to decode, a row has too many chunks, or almost no part of the array is
            stored.
    """
    itemsize = array.id.get_type().get_size()
    if itemsize > MAX_VALUE_BYTES and not files.trusted:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has a type of {bytes_text(itemsize, digits=2)} for a single value, and more "
            f"than {bytes_text(MAX_VALUE_BYTES, digits=2)} is refused: reading a row takes all of it. Pass "
            "files=FileOptions(trusted=True) if you trust the file."
        )
    chunk_bytes = math.prod(array.chunks) * itemsize if array.chunks else 0
    if chunk_bytes > MAX_CHUNK_BYTES and not files.trusted:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has chunks of {bytes_text(chunk_bytes, digits=2)} (shape {array.chunks}); "
            f"reading a row decodes a whole chunk, and more than {bytes_text(MAX_CHUNK_BYTES, digits=2)} is refused. "
            "Make a copy with smaller ones by `lightning-h5 repack --trusted`, or pass "
            "files=FileOptions(trusted=True) if you trust the file."
        )
    n_chunks = math.prod(grid_of(array.shape, array.chunks)[1:]) if array.chunks else 1  # of a row
    n_file = int(h5py.h5i.get_file_id(array.id).get_filesize()) if n_chunks > MAX_ROW_CHUNKS else 0
    if n_chunks > max(MAX_ROW_CHUNKS, n_file) and not files.trusted:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has rows of {n_chunks:,} chunks (shape {array.shape}, chunks "
            f"{array.chunks}), more than the file has bytes: most were never written, or the file was crafted to "
            "exhaust memory. Make a copy with larger ones by `lightning-h5 repack --trusted`, or pass "
            "files=FileOptions(trusted=True) if you trust the file."
        )
    n_declared = math.prod(array.shape) * itemsize
    if n_declared <= MAX_BYTES or files.trusted or array.external:
        return
    if n_stored is None:
        n_stored = int(min(array.id.get_storage_size(), h5py.h5i.get_file_id(array.id).get_filesize()))
    if n_declared > MAX_RATIO * n_stored:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has the shape {array.shape}, which is {bytes_text(n_declared, digits=2)}, "
            f"but only {bytes_text(n_stored, digits=2)} are stored: most of its rows were never written, or the file "
            "was crafted to exhaust memory. Check it with `lightning-h5 inspect`, and pass "
            "files=FileOptions(trusted=True) if this is intended."
        )


def ensure_filters(filters: tuple[Filter, ...], path: str, key: str) -> None:
    """Check that the HDF5 library can decode an array; loads hdf5plugin if that is required.

    Raises:
        H5FileError: a filter is not installed.
    """
    _check_decoder([f.id for f in filters], path, key)
    missing = [f for f in filters if not h5py.h5z.filter_avail(f.id)]
    if not missing:
        return
    has_plugins = False
    with suppress(ImportError):
        importlib.import_module("hdf5plugin")  # registers its filters when imported
        has_plugins = True
    missing = [f for f in filters if not h5py.h5z.filter_avail(f.id)]
    if missing:
        # A label can contain anything, even control characters for the terminal.
        names = ", ".join(f"{f.label if f.label.isprintable() else repr(f.label)} (number {f.id})" for f in missing)
        raise H5FileError(
            f"{key!r} in {path!r} is compressed with {names}, which this installation cannot decode. "
            + ("" if has_plugins else "Run `pip install 'lightning-h5[filters]'`, or install")
            + ("Install" if has_plugins else "")
            + " the plugin for that number and set HDF5_PLUGIN_PATH."
        )


def _check_decoder(filters: Sequence[int], path: str, key: str) -> None:
    """Check that this package can decode Blosc2; it validates each chunk first.

    Raises:
        H5FileError: the package ``blosc2`` is not installed.
        H5ValueError: only the HDF5 library can undo these filters.
    """
    if BLOSC2 not in filters:
        return
    if find_spec("blosc2") is None:
        raise H5FileError(
            f"{key!r} in {path!r} is compressed with Blosc2, which requires the package `blosc2`; it is not installed. "
            "Run `pip install 'lightning-h5[filters]'`."
        )
    earlier, later = filters[: filters.index(BLOSC2)], filters[filters.index(BLOSC2) + 1 :]
    if set(earlier) - {SHUFFLE, FLETCHER32} or set(later) - {FLETCHER32}:
        raise H5ValueError(_refused_key(key, path, "it has other filters, which only the library can undo"))


def check_library(array: Any, path: str, key: str, reason: str) -> None:
    """Check that the HDF5 library may decode an array: its filters run no code that a chunk can name.

    Args:
        array: h5py's dataset.
        path: the file.
        key: the requested name.
        reason: why only the library can read it, for the error.

    Raises:
        H5ValueError: a filter may run code.
    """
    if may_run_code(array.id):
        raise H5ValueError(_refused_key(key, path, reason))


def is_out_of_proportion(filters: Sequence[Filter]) -> bool:
    """Return whether the HDF5 library may decode a chunk to a million times its stored bytes.

    This is the case for two compressors, since the library does not compare decoded sizes with the chunk's size, and
    for bzip2. The size in szip's options can be checked, unless another filter was applied after it.
    """
    ids = [step.id for step in filters]
    is_hidden = SZIP in ids and bool(set(ids[ids.index(SZIP) + 1 :]) - {FLETCHER32})
    return sum(number not in SAME_SIZE for number in ids) > 1 or BZIP2 in ids or is_hidden


def check_decoding_memory(filters: Sequence[Filter], chunk_bytes: int, path: str, key: str, files: FileOptions) -> None:
    """Check that the HDF5 library decodes the chunks of an array in proportion to their stored bytes.

    Args:
        filters: filters of an array that only the library can read.
        chunk_bytes: bytes of a chunk.
        path: the file.
        key: the requested name.
        files: options with the accepted sizes.

    Raises:
        H5ValueError: a chunk may decode to far more than its stored bytes.
        H5CorruptError: a filter's options state more than the bytes of a chunk.
    """
    if files.trusted:
        return
    if is_out_of_proportion(filters):
        raise H5ValueError(
            f"{key!r} in {path!r} is compressed with {listing(step.label for step in filters)}, and only the HDF5 "
            "library can read it. A crafted chunk could need a million times its stored bytes in memory. Rewrite the "
            "array with one compressor, or pass files=FileOptions(trusted=True) if you trust the file."
        )
    for step in filters:
        if step.id in (NBIT, SCALE_OFFSET) and len(step.options) > VALUE_BYTES:
            n_bytes = step.options[N_VALUES] * step.options[VALUE_BYTES]
            if n_bytes > chunk_bytes:
                raise H5CorruptError(
                    f"the filter {step.label!r} of {key!r} in {path!r} declares chunks of {n_bytes:,} bytes, but they "
                    f"have {chunk_bytes:,}. The file is damaged; copy it again."
                )


def may_run_code(array_id: Any) -> bool:
    """Return whether the HDF5 library may run code that a chunk of an array names: Blosc2 does.

    Args:
        array_id: h5py's low-level dataset.
    """
    plist = array_id.get_create_plist()
    if plist.get_layout() != h5py.h5d.CHUNKED:
        return False
    return any(plist.get_filter(at)[0] == BLOSC2 for at in range(plist.get_nfilters()))


def _refused_key(key: str, path: str, reason: str) -> str:
    return (
        f"{key!r} in {path!r} is compressed with Blosc2, and only the HDF5 library could read it: {reason}. That "
        "library can run code that a chunk names, and the chunks cannot be checked beforehand. Rewrite the array with "
        "another compression."
    )


def check_integrity(layout: ArrayLayout, min_integrity: int) -> None:
    """Check the integrity level of an array.

    Raises:
        H5ValueError: the level is below the minimum.
    """
    if layout.integrity >= min_integrity:
        return
    cure = ""
    if min_integrity < len(INTEGRITY) - 1:
        cure = " Make a copy by `lightning-h5 repack --compression gzip --checksum`, which has level 3."
    raise H5ValueError(
        f"min_integrity={min_integrity} was requested, but {layout.key!r} in {layout.path!r} has level "
        f"{layout.integrity}: {INTEGRITY[layout.integrity]}.{cure} Write digests by `lightning-h5 check "
        "--write-digests` and pass verify='digest', which is level 4."
    )


def check_no_overlap(layouts: Sequence[ArrayLayout]) -> None:
    """Check that arrays of one file, and their chunks, share no bytes; takes about 0.1 microseconds a chunk.

    Raises:
        H5CorruptError: two pieces overlap.
    """
    for layout, _, text in overlaps(layouts):
        raise H5CorruptError(f"{layout.path!r}: {text}")


def overlaps(layouts: Sequence[ArrayLayout]) -> Iterator[tuple[ArrayLayout, ArrayLayout, str]]:
    """Find arrays and chunks of one file that share bytes.

    Args:
        layouts: arrays of one file.

    Yields:
        For each piece that begins before another one ends, the two arrays (or one array twice), and a message.
    """
    arrays = list({array.name: array for layout in layouts for array in layout.stored_arrays}.values())
    if _are_few_and_apart(arrays):
        return
    array_pieces = [layout.pieces() for layout in arrays]
    if sum(map(len, array_pieces)) < 2:
        return
    pieces = np.concatenate(array_pieces)
    owners = np.repeat(np.arange(len(arrays)), [len(spans) for spans in array_pieces])
    order = np.argsort(pieces[:, 0], kind="stable")
    pieces, owners = pieces[order], owners[order]
    for at in np.flatnonzero(np.diff(pieces[:, 0]) < pieces[:-1, 1]):
        a, b = arrays[owners[at]], arrays[owners[at + 1]]
        subject = f"two chunks of {a.key!r}" if a is b else f"{a.key!r} and {b.key!r}"
        at_byte = f"{pieces[at + 1, 0]:,}"
        text = f"{subject} have the same bytes of the file (at byte {at_byte}). The file is damaged; copy it again."
        yield a, b, text


def _are_few_and_apart(layouts: Sequence[ArrayLayout]) -> bool:
    """Return whether arrays have few chunks, which do not overlap: for small files this is faster than NumPy."""
    pieces: list[tuple[int, int]] = []
    for layout in layouts:
        if layout.table is not None:
            if len(layout.table.offsets) > MAX_SIMPLE:
                return False
            chunks = zip(layout.table.offsets.tolist(), layout.table.sizes.tolist(), strict=True)
            pieces += [(start, size) for start, size in chunks if start >= 0]
        elif (extent := layout.extent) is not None:
            pieces.append(extent)
    pieces.sort()
    return all(start + size <= next_start for (start, size), (next_start, _) in pairwise(pieces))

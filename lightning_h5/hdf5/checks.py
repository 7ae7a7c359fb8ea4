"""Checks of what a file declares: sizes, bytes that arrays share, filters, and how surely damage shows.

Blosc2 chunks are decoded after a look (``readers/filters/blosc2.py``), and never by the library: a damaged one can make
it hang or take all memory, and one may name a codec that runs Python to import a module from the working directory.
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

from ..errors import H5CorruptError, H5FileError, H5ValueError
from .headers import OLD_INDEX, has_checked_header, index_type

if TYPE_CHECKING:
    from ..options import FileOptions
    from .layout import ArrayLayout, Filter

__all__ = [
    "INTEGRITY",
    "check_sizes",
    "ensure_filters",
    "integrity_level",
    "may_run_code",
    "overlaps",
    "refuse_library",
    "refuse_overlaps",
    "size_text",
]

INTEGRITY = (
    "most damage to its values shows nowhere",
    "damage to its values shows; damage to the file's own tables may not",
    "damage shows, but for chunks that were overwritten with zeros",
    "damage shows, but for whole chunks that took each other's place",
    "rows are compared with digests that were made of them",
)
"""What each level means, in words; the last one is reached by digests beside a file alone."""

SHUFFLE, FLETCHER32, GZIP, BZIP2, ZSTD, BLOSC2 = 2, 3, 1, 307, 32015, 32026  # filters, by HDF5's number

MAX_CHUNK_BYTES = 1 << 30
MAX_BYTES = 4 << 30
FEW = 64  # chunks
MAX_TIMES = 1000
"""What compressors make of zeros; an array of more than that is not written, or is a trap."""


def check_sizes(file: Any, array: Any, key: str, trust: FileOptions) -> None:
    """Refuses arrays that claim far more than is there.

    Args:
        file: the open file.
        array: h5py's dataset, whose rows lie in this file.
        key: what it was asked for as.
        trust: what passes all the same.

    Raises:
        H5ValueError: a chunk is too large to be decoded in company, or next to nothing of the array is stored.
    """
    itemsize = array.id.get_type().get_size()
    chunk_bytes = math.prod(array.chunks) * itemsize if array.chunks else 0
    if chunk_bytes > MAX_CHUNK_BYTES and not trust.trusted:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has chunks of {size_text(chunk_bytes)} (shape {array.chunks}); a row takes "
            f"the decoding of a whole one, and more than {size_text(MAX_CHUNK_BYTES)} is refused. Make a copy with "
            "smaller ones by `lightning-h5 repack --trusted`, or pass files=FileOptions(trusted=True) if you trust the "
            "file."
        )
    claimed = math.prod(array.shape) * itemsize
    if claimed <= MAX_BYTES or trust.trusted or array.external:
        return
    stored = _stored_bytes(file, array)
    if stored is not None and claimed > MAX_TIMES * stored:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has the shape {array.shape}, which is {size_text(claimed)}, and "
            f"{size_text(stored)} of it are stored: most of its rows were never written, or the file is made to "
            "exhaust memory. Check it with `lightning-h5 inspect`, and pass files=FileOptions(trusted=True) if "
            "it is meant to be so."
        )


def _stored_bytes(file: Any, array: Any) -> int | None:
    """Bytes that an array takes in its file, which has no more than it has; None where they lie in other files.

    Of a virtual array those of all that it is made of, each once, however many levels down.
    """
    found, todo, seen = 0, [array], set()
    while todo:
        array = todo.pop()
        if not array.is_virtual:
            found += int(min(array.id.get_storage_size(), file.id.get_filesize()))
            continue
        for source in array.virtual_sources():
            if source.file_name not in (".", file.filename):
                return None  # it was allowed to leave the file
            if source.dset_name not in seen:
                seen.add(source.dset_name)
                todo.append(file[source.dset_name])
    return found


def size_text(n_bytes: int) -> str:
    """A number of bytes for a message."""
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB")):
        if n_bytes >> power:
            return f"{n_bytes / 2**power:,.2f} {unit}"
    return f"{n_bytes:,} bytes"


def refuse_overlaps(layouts: Sequence[ArrayLayout]) -> None:
    """Make sure that arrays of one file, and their chunks, share no bytes; about 0.1 microseconds a chunk.

    Raises:
        H5CorruptError: two of them have bytes in common.
    """
    for layout, _, text in overlaps(layouts):
        raise H5CorruptError(f"{layout.path!r}: {text}")


def overlaps(layouts: Sequence[ArrayLayout]) -> Iterator[tuple[ArrayLayout, ArrayLayout, str]]:
    """Find arrays and chunks of one file that share bytes.

    Args:
        layouts: arrays of one file.

    Yields:
        Two arrays, or one twice, for each piece that begins before another one has ended; and what is wrong.
    """
    arrays = list({layout.name: layout for layout in layouts}.values())
    if _lie_apart(arrays):
        return
    each = [layout.places() for layout in arrays]
    if sum(map(len, each)) < 2:
        return
    places = np.concatenate(each)
    owners = np.repeat(np.arange(len(arrays)), [len(one) for one in each])
    order = np.argsort(places[:, 0], kind="stable")
    places, owners = places[order], owners[order]
    for at in np.flatnonzero(np.diff(places[:, 0]) < places[:-1, 1]):
        a, b = arrays[owners[at]], arrays[owners[at + 1]]
        what = f"two chunks of {a.key!r}" if a is b else f"{a.key!r} and {b.key!r}"
        at_byte = f"{places[at + 1, 0]:,}"
        text = f"{what} have the same bytes of the file (at byte {at_byte}). The file is damaged; copy it again."
        yield a, b, text


def _lie_apart(layouts: Sequence[ArrayLayout]) -> bool:
    """Whether arrays have few chunks, which lie apart: in small files NumPy would take longer than all the rest."""
    pieces: list[tuple[int, int]] = []
    for layout in layouts:
        if layout.table is not None:
            if len(layout.table.offsets) > FEW:
                return False
            chunks = zip(layout.table.offsets.tolist(), layout.table.sizes.tolist(), strict=True)
            pieces += [(start, size) for start, size in chunks if start >= 0]
        elif layout.offset is not None:
            pieces.append((layout.offset, layout.n_rows * layout.stored_row_bytes))
    pieces.sort()
    return all(start + size <= after for (start, size), (after, _) in pairwise(pieces))


def ensure_filters(filters: tuple[Filter, ...], path: str, key: str) -> None:
    """Makes sure that the HDF5 library can decode an array, loading hdf5plugin where that is what it takes.

    Raises:
        H5FileError: a filter is not installed.
        H5ValueError: a filter may run code, and only the HDF5 library could undo all of them.
    """
    _ensure_own_decoder([f.id for f in filters], path, key)
    missing = [f for f in filters if not h5py.h5z.filter_avail(f.id)]
    if not missing:
        return
    has_plugins = False
    with suppress(ImportError):
        importlib.import_module("hdf5plugin")  # registers its filters when imported
        has_plugins = True
    missing = [f for f in filters if not h5py.h5z.filter_avail(f.id)]
    if missing:
        # A file may say anything here; it should not speak to the terminal.
        names = ", ".join(f"{f.label if f.label.isprintable() else repr(f.label)} (number {f.id})" for f in missing)
        raise H5FileError(
            f"{key!r} in {path!r} is compressed with {names}, which this installation cannot decode. "
            + ("" if has_plugins else "Run `pip install 'lightning-h5[filters]'`, or install")
            + ("Install" if has_plugins else "")
            + " the plugin for that number and set HDF5_PLUGIN_PATH."
        )


def _ensure_own_decoder(filters: Sequence[int], path: str, key: str) -> None:
    """Makes sure that what may run code is decoded here.

    Args:
        filters: of an array, by HDF5's number, in the order of writing.
        path: the file.
        key: the array.

    Raises:
        H5FileError: the package that decodes it is not installed.
        H5ValueError: only the HDF5 library can undo these filters.
    """
    if BLOSC2 not in filters:
        return
    if find_spec("blosc2") is None:
        raise H5FileError(
            f"{key!r} in {path!r} is compressed with Blosc2, which the package `blosc2` decodes, and it is not "
            "installed. Run `pip install 'lightning-h5[filters]'`."
        )
    before, after = filters[: filters.index(BLOSC2)], filters[filters.index(BLOSC2) + 1 :]
    if set(before) - {SHUFFLE, FLETCHER32} or set(after) - {FLETCHER32}:
        raise H5ValueError(_refusal(key, path, "it has other filters that no one else undoes"))


def refuse_library(array: Any, path: str, key: str, why: str) -> None:
    """Refuses an array that only the HDF5 library can read, where its filters may run code.

    Args:
        array: h5py's dataset.
        path: the file.
        key: what it was asked for as.
        why: nobody else can.

    Raises:
        H5ValueError: they may.
    """
    if may_run_code(array.id):
        raise H5ValueError(_refusal(key, path, why))


def may_run_code(array_id: Any) -> bool:
    """Whether the HDF5 library, decoding an array, may run code that a chunk names.

    Args:
        array_id: h5py's low-level dataset.
    """
    plist = array_id.get_create_plist()
    if plist.get_layout() != h5py.h5d.CHUNKED:
        return False
    return any(plist.get_filter(at)[0] == BLOSC2 for at in range(plist.get_nfilters()))


def _refusal(key: str, path: str, why: str) -> str:
    return (
        f"{key!r} in {path!r} is compressed with Blosc2, and only the HDF5 library could read it: {why}. The library "
        "runs code that a chunk may name, and nobody can look before it does. Write the array again with another "
        "compression."
    )


def integrity_level(array: Any, filters: Sequence[int]) -> int:
    """The level of an open array, 0 to 3 (see ``INTEGRITY``).

    gzip and bzip2 carry checksums, and so does HDF5's ``fletcher32``; other compressors find a part of the damage, or
    none. A Fletcher checksum of zeros is zero, so that a chunk of zeros passes it unless a compressor finds it. The
    tables that say where chunks lie have checksums in the newer file format alone (``libver="latest"``).

    Args:
        array: h5py's dataset.
        filters: its filters, by HDF5's number, without those that some chunk passed over: such a chunk has no checksum
            of theirs.
    """
    if array.dtype.hasobject:  # values lie elsewhere in the file, where nothing has a checksum
        return 0
    checked = FLETCHER32 in filters
    if not checked and GZIP not in filters and BZIP2 not in filters:
        return 0
    if not checked or not _has_checked_tables(array):
        return 1
    return 3 if {GZIP, BZIP2, ZSTD} & set(filters) else 2


def _has_checked_tables(array: Any) -> bool:
    """Whether superblock, object header and chunk index have checksums."""
    superblock = h5py.h5i.get_file_id(array.id).get_create_plist().get_version()[0]
    if superblock < 2 or not has_checked_header(array):
        return False
    return index_type(array.id) not in (None, OLD_INDEX)  # the old one alone has no checksum

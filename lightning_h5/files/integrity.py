"""How surely damage to a file shows: from an array's checks, a level from 0 to 3."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import h5py

from .places import has_checked_header

__all__ = ["INTEGRITY", "integrity_level"]

INTEGRITY = (
    "most damage to its values shows nowhere",
    "damage to its values shows; damage to the file's own tables may not",
    "damage shows, but for chunks that were overwritten with zeros",
    "damage shows, but for whole chunks that took each other's place",
    "rows are compared with digests that were made of them",
)
"""What each level means, in words; the last one is reached by digests beside a file alone."""

GZIP, FLETCHER32, BZIP2, ZSTD = 1, 3, 307, 32015
OLD_INDEX = 0  # H5D_CHUNK_IDX_BTREE, which has no checksum; all others have


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
    kind = ctypes.c_int(OLD_INDEX)
    try:  # h5py has no name for it, so the library is asked itself
        ask = ctypes.CDLL(h5py.h5d.__file__).H5Dget_chunk_index_type
    except (AttributeError, OSError):
        return False
    ask.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int)]
    with h5py._objects.phil:  # the library takes one caller at a time
        failed = ask(array.id.id, ctypes.byref(kind)) < 0
    return not failed and kind.value != OLD_INDEX

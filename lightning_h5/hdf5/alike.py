"""Describe an array quickly, from an array of an earlier file that has the same object header.

A full description asks the HDF5 library some twenty questions about an array. In thousands of files of one structure,
all answers but four are equal: the number of rows, the place of the bytes, their number, and the chunk index. So object
headers are read and compared byte by byte, without these four. If anything else differs, or lies outside of the header,
the array is described in full.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import h5py
import numpy as np

from ..options import FileOptions
from .checks import MAX_BYTES
from .chunk_index import ChunkTable, grid_of
from .describe import MAX_UNWRITTEN, check_described, layout_of, table_of
from .dtypes import ATTRIBUTES
from .identity import ChangeGuard, is_on_disk
from .layout import ArrayLayout
from .links import find_array

__all__ = ["AlikeArrays"]

DATASPACE, DATATYPE, OLD_FILL, FILL, LAYOUT, FILTERS = 1, 3, 4, 5, 8, 11
ATTRIBUTE, CONTINUATION, ATTRIBUTE_INFO = 12, 16, 21
"""Numbers of the header messages that a description follows from."""

IRRELEVANT = {0, 13, 14, 16, 18, 22}
"""Gaps, comments, times of modification, continuations, and counts of links."""

SHARED = 2  # flag of a message whose content lies elsewhere in the file
CONTIGUOUS, CHUNKED = 1, 2  # classes of layouts
INDEX_SETTINGS = {1: 0, 2: 0, 3: 1, 4: 5, 5: 6}  # bytes of the settings of a chunk index, by its type
SIMPLE = {0, 1, 3}  # classes of datatypes whose values lie in the attribute: integers, floats, text of a fixed length
UNDEFINED = 2**64 - 1  # address
MAX_HEADER, MAX_BLOCKS = 16 << 20, 1000  # bytes of a block of a header, and blocks
WINDOW = 4096  # bytes that are read at a time


@dataclass
class _File:
    """An open file, as the library and the system know it."""

    id: Any
    descriptor: int
    n_bytes: int
    version: int
    user_block: int
    window: bytes = b""  # of the file, read last
    start: int = 0

    def read(self, n_bytes: int, address: int) -> bytes:
        """Return bytes at an address, which is counted from the end of the user block; fewer at the file's end.

        Headers lie next to each other, so several are read at a time.
        """
        start = address + self.user_block - self.start
        if start < 0 or start + n_bytes > len(self.window):
            self.start, start = address + self.user_block, 0
            self.window = os.pread(self.descriptor, max(n_bytes, WINDOW), self.start)
        return self.window[start : start + n_bytes]


class _Header(NamedTuple):
    """What an object header declares about an array.

    Attributes:
        structure: equal for arrays with descriptions that differ only in the following.
        n_rows: length of axis 0.
        place: start of a contiguous array, from the end of the user block.
        n_bytes: bytes of a contiguous array.
    """

    structure: tuple[Any, ...]
    n_rows: int
    place: int | None
    n_bytes: int


class AlikeArrays:
    """Describes arrays of many files, the first two of each structure in full.

    Not for files with a live writer: headers can change while they are compared.
    """

    def __init__(self) -> None:
        # By key and structure: the first array, and whether the second one showed that its description can be reused.
        self._known: dict[tuple[Any, ...], tuple[ArrayLayout, bool]] = {}
        self._members: set[str] = set()
        self._file: tuple[Any, _File | None] = None, None

    def describe(
        self, file: Any, path: str, key: str, files: FileOptions, guard: ChangeGuard, *, if_exists: bool = False
    ) -> ArrayLayout | None:
        """Return what ``describe_array`` returns, with the file's guard.

        Args:
            file: the open file.
            path: its path.
            key: the array.
            files: see ``describe_array``.
            guard: change guard of the file.
            if_exists: return None if the first component of the key does not exist in the file.

        Raises:
            H5Error: see ``describe_array``.
        """
        found = None if key in self._members else self._header(file, key)
        if found is None:
            if if_exists and not _has_first(file, key):
                return None
            return check_described(self._in_full(file, path, key, files), files).guarded(guard)
        (opened, group, name), header = found
        which = (key, files, header.structure)
        known, is_proven = self._known.get(which, (None, False))
        made = None
        if known is not None:
            with suppress(OSError, RuntimeError, ValueError, KeyError):  # the full description reports what is wrong
                made = _made(known, path, opened, group, name, header, guard)
        if made is not None and is_proven:
            return check_described(made, files)
        layout = self._in_full(file, path, key, files)
        if known is None and not layout.members:
            self._known[which] = layout, False
        elif known is not None and made is not None and _is_equal(made, layout.guarded(made.guard)):
            self._known[which] = known, True
        return check_described(layout, files).guarded(guard)

    def _in_full(self, file: Any, path: str, key: str, files: FileOptions) -> ArrayLayout:
        layout = layout_of(find_array(file, key, files), path, key)
        if layout.members:
            self._members.add(key)
        return layout

    def _header(self, file: Any, key: str) -> tuple[tuple[_File, Any, bytes], _Header] | None:
        """Return the open file, the array's group and name there, and its header; None if only the library knows."""
        try:
            if self._file[0] is not file:
                self._file = file, _opened(file)
            opened = self._file[1]
            located = None if opened is None else _locate(opened, key)
            if opened is None or located is None:
                return None
            group, name, address = located
            header = _header_of(opened, address)
        except (OSError, RuntimeError, ValueError, KeyError, NotImplementedError, struct.error, IndexError):
            return None  # the full description reports what is wrong
        return None if header is None else ((opened, group, name), header)


def _opened(file: Any) -> _File | None:
    if file.swmr_mode or not is_on_disk(file):
        return None
    options = file.id.get_create_plist()
    if options.get_sizes() != (8, 8):  # of addresses and lengths
        return None
    descriptor = file.id.get_vfd_handle()
    version, user_block = options.get_version()[0], options.get_userblock()
    return _File(file.id, descriptor, os.fstat(descriptor).st_size, version, user_block)


def _parts(key: str) -> list[bytes]:
    return [part.encode() for part in key.split("/") if part not in ("", ".")] or [b""]


def _has_first(file: Any, key: str) -> bool:
    """Return whether a file has a link by the first component of a key. Opens nothing."""
    try:
        h5py.h5g.get_objinfo(file.id, _parts(key)[0], follow_link=False)
    except (KeyError, ValueError, RuntimeError, OSError):
        return False
    return True


def _locate(file: _File, key: str) -> tuple[Any, bytes, int] | None:
    """Return an array's group, its name there and the address of its header; None unless hard links lead to it."""
    if "\0" in key:  # HDF5 takes it as the end of a name
        return None
    group = file.id
    *groups, name = _parts(key)
    for part in groups:
        found = h5py.h5g.get_objinfo(group, part, follow_link=False)
        if found.type != h5py.h5g.GROUP:  # a link that is not followed is none, so this is a group of this file
            return None
        group = h5py.h5g.open(group, part)
    found = h5py.h5g.get_objinfo(group, name, follow_link=False)
    if found.type != h5py.h5g.DATASET:
        return None
    low, high = found.objno
    return group, name, (high << 64) + low


# Object headers ---------------------------------------------------------------------------------------------------


def _messages(file: _File, address: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, flags and content of all messages of an object header, block by block.

    Raises:
        ValueError: the header is damaged.
    """
    head = file.read(32, address)
    is_new = head[:4] == b"OHDR"
    if is_new:
        has_times, has_counts, width = head[5] & 0x20, head[5] & 0x10, 1 << (head[5] & 3)
        first = 6 + (16 if has_times else 0) + (4 if has_counts else 0)
        blocks = [(address + first + width, int.from_bytes(head[first : first + width], "little"))]
        header = struct.Struct("<BHBxx" if head[5] & 4 else "<BHB")  # number, bytes, flags, order of creation
    else:
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
        header = struct.Struct("<HHBxxx")
    for _ in range(MAX_BLOCKS):
        if not blocks:
            return
        place, n_bytes = blocks.pop(0)
        block, at = file.read(min(n_bytes, MAX_HEADER), place), 0
        while at + header.size <= len(block):
            number, size, flags = header.unpack_from(block, at)
            at += header.size + size
            data = block[at - size : at]
            yield number, flags, data
            if number == CONTINUATION:
                start, length = struct.unpack_from("<QQ", data)
                # Later blocks of the newer format have a signature before their messages, and a checksum after them.
                blocks.append((start + 4, max(0, length - 8)) if is_new else (start, length))
        if at > len(block) or len(block) < n_bytes:
            break
    raise ValueError("the object header is damaged")


def _header_of(file: _File, address: int) -> _Header | None:
    """Return what a header declares; None if it does not contain everything that a description follows from."""
    parts: dict[int, Any] = {}
    attributes = []
    is_checked = file.read(4, address) == b"OHDR"
    for number, flags, data in _messages(file, address):
        if number in IRRELEVANT:
            continue
        if flags & SHARED:
            return None
        if number == ATTRIBUTE:
            attributes.append(_packing_attribute(data))
        elif number == ATTRIBUTE_INFO:  # attributes that lie in a heap instead of the header
            if struct.unpack_from("<Q", data, 4 if data[1] & 1 else 2)[0] != UNDEFINED:
                return None
        elif number in parts or number not in (DATASPACE, DATATYPE, OLD_FILL, FILL, LAYOUT, FILTERS):
            return None  # external storage, or what a newer library writes
        else:
            parts[number] = data
    n_rows, parts[DATASPACE] = _dataspace(parts[DATASPACE])
    place, n_bytes, parts[LAYOUT] = _place(parts[LAYOUT])
    structure = (file.version, file.user_block, is_checked, *sorted(parts.items()), *attributes)
    return _Header(structure, n_rows, place, n_bytes)


def _dataspace(data: bytes) -> tuple[int, tuple[Any, ...]]:
    """Return the number of rows, and the other axes with all limits."""
    version, rank, flags = data[:3]
    if version not in (1, 2) or not rank or flags not in (0, 1) or (version == 2 and data[3] != 1):
        raise ValueError("the dataspace has no rows, or an unknown version")
    start = 8 if version == 1 else 4
    sizes = struct.unpack_from(f"<{rank}Q", data, start)
    limits = struct.unpack_from(f"<{rank}Q", data, start + 8 * rank) if flags else sizes
    if not all(sizes):
        raise ValueError("the array is empty")
    return sizes[0], (sizes[1:], limits[1:], "as it is" if limits[0] == sizes[0] else limits[0])


def _place(data: bytes) -> tuple[int | None, int, bytes]:
    """Return where a contiguous array lies, its bytes, and the rest of a storage layout."""
    version, kind = data[:2]
    if version in (3, 4, 5) and kind == CONTIGUOUS:
        address, n_bytes = struct.unpack_from("<QQ", data, 2)
        if address != UNDEFINED and n_bytes:
            return address, n_bytes, data[:2]
    elif version == 3 and kind == CHUNKED:  # version, class, axes, address of the index, chunk
        return None, 0, data[:3] + data[11 : 11 + 4 * data[2]]
    elif version in (4, 5) and kind == CHUNKED:
        end = 5 + data[3] * data[4]  # behind the shape of a chunk: axes times bytes of a number
        return None, 0, data[: end + 1 + INDEX_SETTINGS[data[end]]]
    raise ValueError("the storage layout is another one")


def _packing_attribute(data: bytes) -> bytes | None:
    """Return an attribute that descriptions depend on; None for others."""
    version, flags, *sizes = struct.unpack_from("<BBHHH", data)
    if version not in (1, 2, 3):
        raise ValueError("the attribute has an unknown version")
    start = 9 if version == 3 else 8
    if data[start : start + sizes[0]].rstrip(b"\0") not in ATTRIBUTES:
        return None
    kind = start + ((sizes[0] + 7) // 8 * 8 if version == 1 else sizes[0])
    if (flags and version > 1) or data[kind] & 15 not in SIMPLE:
        raise ValueError("the attribute's value lies elsewhere")
    return data


# Descriptions -----------------------------------------------------------------------------------------------------


def _made(
    known: ArrayLayout, path: str, file: _File, group: Any, name: bytes, header: _Header, guard: ChangeGuard
) -> ArrayLayout | None:
    """Return the description of an array with the structure of a known one; None if something in it is unusual."""
    as_stored = known if known.references is None else known.references
    shape = (header.n_rows, *known.axes)
    n_bytes = math.prod(shape) * as_stored.stored.itemsize
    if not n_bytes or n_bytes > MAX_BYTES:
        return None
    offset = table = None
    if header.place is not None:
        offset, n_stored = header.place + file.user_block, header.n_bytes
        if header.n_bytes != n_bytes or offset + n_bytes > file.n_bytes:
            return None
    else:
        if as_stored.table is None or known.chunks is None or math.prod(grid_of(shape, known.chunks)) > MAX_UNWRITTEN:
            return None
        array_id = h5py.h5d.open(group, name)
        if array_id.shape != shape:
            return None
        table = table_of(array_id, path, known.key, has_user_block=file.user_block != 0)
        n_stored = int(array_id.get_storage_size())
        if table is None or table.masks.any() or as_stored.table.masks.any():
            return None
    changes: dict[str, Any] = {"path": path, "n_rows": header.n_rows, "n_stored_bytes": n_stored, "guard": guard}
    place = {"offset": offset, "table": table}
    references = None if known.references is None else known.references.with_changes(**changes, **place)
    if known.plain_reason is None:
        changes |= place
    return known.with_changes(**changes, references=references)


def _is_equal(a: ArrayLayout, b: ArrayLayout) -> bool:
    """Return whether two descriptions of one array are equal, including what ``==`` leaves out."""
    if a != b or not _is_same_table(a.table, b.table):
        return False
    if a.references is None or b.references is None:
        return a.references is b.references
    return _is_equal(a.references, b.references)


def _is_same_table(a: ChunkTable | None, b: ChunkTable | None) -> bool:
    if a is None or b is None:
        return a is b
    pairs = ((a.offsets, b.offsets), (a.sizes, b.sizes), (a.masks, b.masks))
    return a.grid == b.grid and all(np.array_equal(left, right) for left, right in pairs)

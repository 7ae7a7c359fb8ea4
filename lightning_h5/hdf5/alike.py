"""Describing an array of the next file from that of an earlier one, if their object headers say the same.

A full description asks the HDF5 library some twenty questions about an array. In thousands of files of one structure,
all answers but four are equal: the number of rows, the place of the bytes, their number, and the chunk index. So the
header of the array is compared with those that were described in full before, byte by byte but for these four. Whatever
differs, or lies outside the header, is described in full.
"""

from __future__ import annotations

import math
import os
import struct
from typing import Any, NamedTuple

import h5py
import numpy as np

from ..options import FileOptions
from .checks import MAX_BYTES
from .chunk_index import ChunkTable, grid_of
from .describe import vouched_for
from .h5py_errors import translate_h5py_errors
from .headers import NOWHERE, messages_of
from .identity import ChangeGuard, is_on_disk
from .layout import MAX_UNWRITTEN, ArrayLayout, layout_of, table_of
from .open import find_array
from .packing import ATTRIBUTES

__all__ = ["AlikeArrays"]

DATASPACE, DATATYPE, OLD_FILL, FILL, LAYOUT, FILTERS, ATTRIBUTE, ATTRIBUTE_INFO = 1, 3, 4, 5, 8, 11, 12, 21
"""Numbers of the messages that a description follows from."""

IRRELEVANT = {0, 13, 14, 16, 18, 22}
"""Gaps, comments, times of modification, continuations, and counts of links."""

SHARED = 2  # flag of a message whose content lies elsewhere in the file
CONTIGUOUS, CHUNKED = 1, 2  # classes of layouts
SINGLE_CHUNK = 1  # an index that has the chunk's stored size in the header
SIMPLE = {0, 1, 3}  # classes of datatypes: integers, floats and text of one length, whose attributes hold their values


class _Header(NamedTuple):
    """What an object header says of an array.

    Attributes:
        structure: equal for arrays whose descriptions differ in nothing but what follows.
        n_rows: length of axis 0.
        place: where a contiguous array begins, from the end of the user block.
        n_bytes: that a contiguous array takes.
    """

    structure: tuple[Any, ...]
    n_rows: int
    place: int | None
    n_bytes: int


class _File(NamedTuple):
    """An open file, as the library and the system know it."""

    id: Any
    descriptor: int
    number: tuple[int, int]
    n_bytes: int
    version: int
    user_block: int


class AlikeArrays:
    """Describes arrays of many files, the first two of each structure in full.

    Not for files with a live writer, whose headers may change while they are compared.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[ArrayLayout, bool]] = {}
        self._members: set[str] = set()
        self._file: tuple[Any, _File | None] = None, None

    def describe(
        self, file: Any, path: str, key: str, trust: FileOptions, guard: ChangeGuard, *, if_there: bool = False
    ) -> ArrayLayout | None:
        """Return what ``describe_array`` returns, with the file's guard.

        Args:
            file: the open file.
            path: its path.
            key: the array.
            trust: what of the file is believed.
            guard: of the file.
            if_there: return None if the file has nothing by the first name of the key.

        Raises:
            H5Error: see ``describe_array``.
        """
        found = None if key in self._members else self._header(file, key)
        if found is None:
            if if_there and not _has_first(file, key):
                return None
            return vouched_for(self._in_full(file, path, key, trust), trust).guarded(guard)
        (opened, group, name), header = found
        which = (key, trust, header.structure)
        known, is_proven = self._known.get(which, (None, False))
        with translate_h5py_errors(path, repr(key)):
            made = None if known is None else _made(known, path, opened, group, name, header, guard)
        if made is not None and is_proven:
            return vouched_for(made, trust)
        layout = self._in_full(file, path, key, trust)
        # The first array of a structure is proven by the second one: a large one alone is not described twice.
        if known is None and not layout.members:
            self._known[which] = layout, False
        elif known is not None and made is not None and _is_equal(made, layout.guarded(made.guard)):
            self._known[which] = known, True
        return vouched_for(layout, trust).guarded(guard)

    def _in_full(self, file: Any, path: str, key: str, trust: FileOptions) -> ArrayLayout:
        layout = layout_of(find_array(file, key, trust), path, key)
        if layout.members:
            self._members.add(key)
        return layout

    def _header(self, file: Any, key: str) -> tuple[tuple[_File, Any, bytes], _Header] | None:
        """The open file, the array's group and its name there, and its header; None if only the library knows."""
        try:
            if self._file[0] is not file:
                self._file = file, _opened(file)
            opened = self._file[1]
            located = None if opened is None else _locate(opened, key)
            if opened is None or located is None:
                return None
            group, name, address = located
            header = _header_of(opened, address)
        except (OSError, RuntimeError, ValueError, KeyError, NotImplementedError, struct.error):
            return None  # the full description says what is wrong
        return None if header is None else ((opened, group, name), header)


def _has_first(file: Any, key: str) -> bool:
    """Whether a file has a link by the first name of a key; nothing is opened for it."""
    first = [part for part in key.split("/") if part not in ("", ".")][:1]
    try:
        h5py.h5g.get_objinfo(file.id, first[0].encode(), follow_link=False)
    except (IndexError, KeyError, ValueError, RuntimeError, OSError):
        return False
    return True


def _opened(file: Any) -> _File | None:
    if file.swmr_mode or not is_on_disk(file):
        return None
    options = file.id.get_create_plist()
    if options.get_sizes() != (8, 8):  # of addresses and lengths
        return None
    descriptor = file.id.get_vfd_handle()
    number = h5py.h5g.get_objinfo(file.id, b"/").fileno
    version, user_block = options.get_version()[0], options.get_userblock()
    return _File(file.id, descriptor, number, os.fstat(descriptor).st_size, version, user_block)


def _locate(file: _File, key: str) -> tuple[Any, bytes, int] | None:
    """An array's group, its name there and the address of its header; None if hard links alone do not lead to it."""
    if "\0" in key:  # HDF5 takes it for the end of a name
        return None
    group = file.id
    *groups, name = [part.encode() for part in key.split("/") if part not in ("", ".")] or [b""]
    for part in groups:
        found = h5py.h5g.get_objinfo(group, part, follow_link=False)
        if found.type != h5py.h5g.GROUP or found.fileno != file.number:
            return None
        group = h5py.h5g.open(group, part)
    found = h5py.h5g.get_objinfo(group, name, follow_link=False)
    if found.type != h5py.h5g.DATASET or found.fileno != file.number:
        return None
    low, high = found.objno
    return group, name, (high << 64) + low


def _header_of(file: _File, address: int) -> _Header | None:
    """What a header says; None if it does not say all itself."""
    parts: dict[int, bytes] = {}
    attributes = []
    dataspace: tuple[int, tuple[Any, ...]] | None = None
    place: tuple[int | None, int, bytes] | None = None
    is_checked = os.pread(file.descriptor, 4, address + file.user_block) == b"OHDR"
    for message in messages_of(file.descriptor, address, file.user_block):
        number, data = message.number, message.data
        if number in IRRELEVANT:
            continue
        if message.flags & SHARED:
            return None
        if number == ATTRIBUTE:
            is_known, part = _packing_part(data)
            if not is_known:
                return None
            if part is not None:
                attributes.append(part)
        elif number == ATTRIBUTE_INFO:
            if _lies_elsewhere(data):
                return None
        elif number == DATASPACE and dataspace is None:
            dataspace = _dataspace(data)
        elif number == LAYOUT and place is None:
            place = _place(data)
        elif number in (DATATYPE, OLD_FILL, FILL, FILTERS) and number not in parts:
            parts[number] = data
        else:  # damage, external storage, or what a newer library writes
            return None
    if dataspace is None or place is None or DATATYPE not in parts:
        return None
    structure = (file.version, file.user_block, is_checked, dataspace[1], place[2], *parts.items(), *attributes)
    return _Header(structure, dataspace[0], place[0], place[1])


def _dataspace(data: bytes) -> tuple[int, tuple[Any, ...]] | None:
    """The number of rows, and the other axes with all limits; None if there are no rows, or no such version."""
    version, rank, flags = data[:3]
    if version not in (1, 2) or not rank or flags not in (0, 1) or (version == 2 and data[3] != 1):
        return None
    start = 8 if version == 1 else 4
    sizes = struct.unpack_from(f"<{rank}Q", data, start)
    limits = struct.unpack_from(f"<{rank}Q", data, start + 8 * rank) if flags else sizes
    most = "as it is" if limits[0] == sizes[0] else limits[0]
    return (sizes[0], (sizes[1:], limits[1:], most)) if all(sizes) else None


def _place(data: bytes) -> tuple[int | None, int, bytes] | None:
    """Where an array lies, its bytes, and the rest of a layout; None for other layouts than two."""
    version, kind = data[:2]
    if version not in (3, 4, 5):
        return None
    if kind == CONTIGUOUS:
        address, n_bytes = struct.unpack_from("<QQ", data, 2)
        return None if address == NOWHERE or not n_bytes else (address, n_bytes, data[:2])
    if kind != CHUNKED:
        return None
    if version == 3:  # version, class, axes, address of the index, chunk
        return None, 0, data[:3] + data[11 : 11 + 4 * data[2]]
    _, _, _, n_axes, width = data[:5]
    end = 5 + n_axes * width
    after = {SINGLE_CHUNK: 0, 2: 0, 3: 1, 4: 5, 5: 6}.get(data[end])  # bytes of the index's own settings
    return None if after is None else (None, 0, data[: end + 1 + after])


def _packing_part(data: bytes) -> tuple[bool, bytes | None]:
    """Whether an attribute can be compared, and what of it: None if no description follows from it."""
    version, flags, *sizes = struct.unpack_from("<BBHHH", data)
    if version not in (1, 2, 3):
        return False, None
    start = 9 if version == 3 else 8
    if data[start : start + sizes[0]].rstrip(b"\0") not in ATTRIBUTES:
        return True, None
    kind = start + ((sizes[0] + 7) // 8 * 8 if version == 1 else sizes[0])
    is_simple = not (flags and version > 1) and data[kind] & 15 in SIMPLE
    return is_simple, data


def _lies_elsewhere(data: bytes) -> bool:
    """Whether attributes lie in a heap instead of the header."""
    start = 4 if data[1] & 1 else 2
    return bool(struct.unpack_from("<Q", data, start)[0] != NOWHERE)


def _made(
    known: ArrayLayout, path: str, file: _File, group: Any, name: bytes, header: _Header, guard: ChangeGuard
) -> ArrayLayout | None:
    """An array with the structure of a known one; None if something in it is out of the ordinary."""
    in_file = known if known.references is None else known.references
    shape = (header.n_rows, *known.axes)
    n_bytes = math.prod(shape) * in_file.stored.itemsize
    if not n_bytes or n_bytes > MAX_BYTES:
        return None
    table = None
    if header.place is not None:
        place, n_stored = header.place + file.user_block, header.n_bytes
        if header.n_bytes != n_bytes or place + n_bytes > file.n_bytes:
            return None
    else:
        place = None
        if in_file.table is None or known.chunks is None or math.prod(grid_of(shape, known.chunks)) > MAX_UNWRITTEN:
            return None
        array_id = h5py.h5d.open(group, name)
        if array_id.shape != shape:
            return None
        table = table_of(array_id, path, known.key, has_user_block=file.user_block != 0)
        n_stored = int(array_id.get_storage_size())
        if table is None or table.masks.any() or in_file.table.masks.any():
            return None
    changes: dict[str, Any] = {"path": path, "n_rows": header.n_rows, "n_stored_bytes": n_stored, "guard": guard}
    at = {"offset": place, "table": table}
    references = None if known.references is None else known.references.with_changes(**changes, **at)
    if known.plain_reason is None:
        changes |= at
    return known.with_changes(**changes, references=references)


def _is_equal(a: ArrayLayout, b: ArrayLayout) -> bool:
    """Whether two descriptions of one array are equal, with what ``==`` leaves out."""
    if a != b or (a.references is None) != (b.references is None) or not _same_table(a.table, b.table):
        return False
    return a.references is None or b.references is None or _is_equal(a.references, b.references)


def _same_table(a: ChunkTable | None, b: ChunkTable | None) -> bool:
    if a is None or b is None:
        return a is b
    pairs = ((a.offsets, b.offsets), (a.sizes, b.sizes), (a.masks, b.masks))
    return a.grid == b.grid and all(np.array_equal(left, right) for left, right in pairs)

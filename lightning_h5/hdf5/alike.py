"""Describe an array quickly, from an array of an earlier file that has the same object header.

A full description asks the HDF5 library some twenty questions about an array. In thousands of files of one structure,
all answers but four are equal: the number of rows, the place of the bytes, their number, and the chunk index. So object
headers are compared without these four. If anything else differs, or lies outside of the header,
the array is described in full.
"""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any

import h5py
import numpy as np

from ..options import FileOptions
from .checks import MAX_BYTES
from .chunk_index import ChunkTable, chunk_table, grid_of, leaves_edges_plain
from .describe import MAX_UNWRITTEN, check_described, layout_of
from .identity import ChangeGuard
from .layout import ArrayLayout
from .links import find_array
from .object_headers import HeaderFile, HeaderTemplate, ObjectHeader, read_header

__all__ = ["AlikeArrays"]


class AlikeArrays:
    """Describes arrays of many files, the first two of each structure in full.

    Not for files with a live writer: headers can change while they are compared.
    """

    def __init__(self) -> None:
        # By key and structure: the first array, and whether the second one showed that its description can be reused.
        self._known: dict[tuple[Any, ...], tuple[ArrayLayout, bool]] = {}
        self._templates: dict[str, HeaderTemplate | None] = {}
        self._members: set[str] = set()
        self._file: tuple[Any, HeaderFile | None] = None, None

    def describe(
        self,
        file: Any,
        path: str,
        key: str,
        files: FileOptions,
        guard: ChangeGuard,
        *,
        if_exists: bool = False,
        alike: str | None = None,
    ) -> ArrayLayout | None:
        """Return what ``describe_array`` returns, with the file's guard.

        Args:
            file: the open file.
            path: its path.
            key: the array.
            files: see ``describe_array``.
            guard: change guard of the file.
            if_exists: return None if the first component of the key does not exist in the file.
            alike: a name for all arrays that may be alike; None is the key.

        Raises:
            H5Error: see ``describe_array``.
        """
        alike = alike or key
        found = None if alike in self._members else self._header(file, key, alike)
        if found is None:
            if if_exists and not _has_first(file, key):
                return None
            return check_described(self._in_full(file, path, key, files, alike), files).guarded(guard)
        (opened, group, name), header = found
        which = (alike, files, header.structure)
        known, is_proven = self._known.get(which, (None, False))
        made = None
        if known is not None:
            # The full description reports what is wrong.
            with suppress(OSError, RuntimeError, ValueError, KeyError, OverflowError):
                made = _made(known, path, key, opened, group, name, header, guard)
        if made is not None and is_proven:
            return check_described(made, files)
        layout = self._in_full(file, path, key, files, alike)
        if known is None and not layout.members:
            self._known[which] = layout, False
        elif known is not None and made is not None and _is_equal(made, layout.guarded(made.guard)):
            self._known[which] = known, True
        return check_described(layout, files).guarded(guard)

    def _in_full(self, file: Any, path: str, key: str, files: FileOptions, alike: str) -> ArrayLayout:
        layout = layout_of(find_array(file, key, files), path, key)
        if layout.members:
            self._members.add(alike)
        return layout

    def _header(self, file: Any, key: str, alike: str) -> tuple[tuple[HeaderFile, Any, bytes], ObjectHeader] | None:
        """Return the open file, the array's group and name there, and its header; None if only the library knows."""
        try:
            if self._file[0] is not file:
                self._file = file, HeaderFile.of(file)
            opened = self._file[1]
            located = None if opened is None else _locate(opened, key)
            if opened is None or located is None:
                return None
            group, name, address = located
            template = self._templates.get(alike)
            header = None if template is None else template.read(opened, address)
            if header is None and (header := read_header(opened, address)) is not None:
                self._templates[alike] = HeaderTemplate.of(opened, address, header)
        except (OSError, RuntimeError, ValueError, KeyError, NotImplementedError, struct.error, IndexError):
            return None  # the full description reports what is wrong
        return None if header is None else ((opened, group, name), header)


def _parts(key: str) -> list[bytes]:
    return [part.encode() for part in key.split("/") if part not in ("", ".")] or [b""]


def _has_first(file: Any, key: str) -> bool:
    """Return whether a file has a link by the first component of a key. Opens nothing."""
    try:
        h5py.h5g.get_objinfo(file.id, _parts(key)[0], follow_link=False)
    except (KeyError, ValueError, RuntimeError, OSError):
        return False
    return True


def _locate(file: HeaderFile, key: str) -> tuple[Any, bytes, int] | None:
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


def _made(
    known: ArrayLayout,
    path: str,
    key: str,
    file: HeaderFile,
    group: Any,
    name: bytes,
    header: ObjectHeader,
    guard: ChangeGuard,
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
        is_partial = any(size % step for size, step in zip(shape, known.chunks, strict=True))
        if array_id.shape != shape or (is_partial and leaves_edges_plain(array_id.get_create_plist()) is not False):
            return None
        table = chunk_table(array_id, shape, known.chunks, has_user_block=file.user_block != 0)
        n_stored = int(table.sizes.sum())
        if table.masks.any() or as_stored.table.masks.any():
            return None
    changes: dict[str, Any] = {"path": path, "n_rows": header.n_rows, "n_stored_bytes": n_stored, "guard": guard}
    if key != known.key:
        changes |= {"key": key, "name": f"/{'/'.join(part.decode() for part in _parts(key))}"}
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

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
from .describe import MAX_UNWRITTEN, bytes_layout, check_described, layout_of
from .identity import ChangeGuard
from .layout import ArrayLayout, path_of
from .links import ScalarError, find_array
from .object_headers import HeaderFile, HeaderTemplate, ObjectHeader, read_header
from .packing import has_packing_outside

__all__ = ["AlikeArrays"]


class AlikeArrays:
    """Describes arrays of many files, the first two of each structure in full.

    Not for files with a live writer: headers can change while they are compared.
    """

    def __init__(self) -> None:
        # By key and structure: the number of the first array among the templates, and whether the second one showed
        # that its description can be reused.
        self._known: dict[tuple[Any, ...], tuple[int, bool]] = {}
        self._templates: dict[str, HeaderTemplate | None] = {}
        self._members: set[str] = set()
        self._file: tuple[Any, HeaderFile | None] = None, None
        self._group: tuple[Any, list[bytes], Any] = None, [], None  # the file and group that was opened last
        self.templates: list[ArrayLayout] = []

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
        found = self.describe_alike(file, path, key, files, guard, if_exists=if_exists, alike=alike)
        return None if found is None else found[0]

    def describe_alike(
        self,
        file: Any,
        path: str,
        key: str,
        files: FileOptions,
        guard: ChangeGuard,
        *,
        if_exists: bool = False,
        alike: str | None = None,
        takes_scalars: bool = False,
    ) -> tuple[ArrayLayout, int | None] | None:
        """Return the description, and the number of the template that it is ``ArrayLayout.moved`` from, if any.

        Args:
            file: see ``describe``, as all that follow.
            path: see above.
            key: see above.
            files: see above.
            guard: see above.
            if_exists: see above.
            alike: see above.
            takes_scalars: describe scalars that hold bytes as arrays of one row.

        Raises:
            H5Error: see ``describe_array``.
        """
        alike = alike or key
        found = None if alike in self._members else self._header(file, key, alike)
        if found is None:
            if if_exists and not _has_first(file, key):
                return None
            layout = self._in_full(file, path, key, files, alike, takes_scalars)
            return check_described(layout, files).guarded(guard), None
        (opened, group, name), header = found
        which = (alike, files, takes_scalars, header.structure)
        number, is_proven = self._known.get(which, (None, False))
        made = None
        if number is not None:
            # The full description reports what is wrong.
            with suppress(OSError, RuntimeError, ValueError, KeyError, OverflowError):
                made = _made(self.templates[number], path, key, opened, group, name, header, guard)
        if made is not None and is_proven:
            return self._checked(made, files, number)
        layout = self._in_full(file, path, key, files, alike, takes_scalars).guarded(guard)
        if number is None and not layout.members:
            number = len(self.templates)
            self.templates.append(layout)
            self._known[which] = number, False
            made = _moved_to_itself(layout)
        if number is None or made is None or not _is_equal(made, layout):
            return self._checked(layout, files, None)
        self._known[which] = number, layout is not self.templates[number]
        return self._checked(layout, files, number)

    def value(self, layout: ArrayLayout, alike: str) -> int:
        """Return the number of the template of an attribute or a scalar: only name and value differ from it.

        Args:
            layout: the description.
            alike: a name for all that may be alike.
        """
        which = ("@", alike, layout.dtype.str, layout.axes, layout.n_stored_bytes)
        if which not in self._known:
            self._known[which] = len(self.templates), True
            self.templates.append(layout)
        return self._known[which][0]

    def _checked(self, layout: ArrayLayout, files: FileOptions, number: int | None) -> tuple[ArrayLayout, int | None]:
        return check_described(layout, files), number if files.verify is None else None

    def _in_full(
        self, file: Any, path: str, key: str, files: FileOptions, alike: str, takes_scalars: bool
    ) -> ArrayLayout:
        try:
            layout = layout_of(find_array(file, key, files), path, key)
        except ScalarError:
            stored = bytes_layout(file, path, key) if takes_scalars else None
            if stored is None:
                raise
            layout = stored
        if layout.members:
            self._members.add(alike)
        return layout

    def _header(self, file: Any, key: str, alike: str) -> tuple[tuple[HeaderFile, Any, bytes], ObjectHeader] | None:
        """Return the open file, the array's group and name there, and its header; None if only the library knows."""
        try:
            if self._file[0] is not file:
                self._file = file, HeaderFile.of(file)
            opened = self._file[1]
            located = None if opened is None or opened.format == "ODIM" else self._locate(opened, key)
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

    def _locate(self, file: HeaderFile, key: str) -> tuple[Any, bytes, int] | None:
        """Return an array's group, its name there and its header's address; None unless hard links lead to it."""
        if "\0" in key:  # HDF5 takes it as the end of a name
            return None
        *groups, name = _parts(key)
        if self._group[0] is not file or self._group[1] != groups:  # the arrays of a group follow each other
            group = file.id
            for part in groups:
                found = h5py.h5g.get_objinfo(group, part, follow_link=False)
                if found.type != h5py.h5g.GROUP:  # a link that is not followed is none, so this is a group of this file
                    return None
                group = h5py.h5g.open(group, part)
            self._group = file, groups, group
        group = self._group[2]
        found = h5py.h5g.get_objinfo(group, name, follow_link=False)
        if found.type != h5py.h5g.DATASET or has_packing_outside(group, name):
            return None
        low, high = found.objno
        return group, name, (high << 64) + low


def _parts(key: str) -> list[bytes]:
    return [part.encode() for part in key.split("/") if part not in ("", ".")] or [b""]


def _has_first(file: Any, key: str) -> bool:
    """Return whether a file has a link by the first component of a key. Opens nothing."""
    try:
        h5py.h5g.get_objinfo(file.id, _parts(key)[0], follow_link=False)
    except (KeyError, ValueError, RuntimeError, OSError):
        return False
    return True


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
    shape = (header.n_rows,) if known.is_scalar else (header.n_rows, *known.axes)
    n_bytes = math.prod(shape) * as_stored.stored.itemsize
    if not n_bytes or n_bytes > MAX_BYTES:
        return None
    offset = table = None
    if header.place is not None:
        offset = header.place + file.user_block
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
        if table.masks.any() or as_stored.table.masks.any():
            return None
    made = known.moved(path, key, header.n_rows, offset, table, guard)
    return made if made.is_contiguous == known.is_contiguous else None


def _moved_to_itself(layout: ArrayLayout) -> ArrayLayout | None:
    """Return what ``moved`` makes of an array's own rows and place; None if these say not all about its chunks."""
    as_stored = layout if layout.references is None else layout.references
    if (as_stored.table is None and as_stored.offset is None) or layout.name != path_of(layout.key):
        return None
    if as_stored.table is not None and as_stored.table.masks.any():
        return None
    return layout.moved(layout.path, layout.key, layout.varying_length, as_stored.offset, as_stored.table, layout.guard)


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

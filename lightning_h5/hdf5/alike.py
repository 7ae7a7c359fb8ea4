"""Describe an array quickly, from an array of an earlier file that has the same object header.

A full description asks the HDF5 library some twenty questions about an array. In thousands of files of one structure,
all answers but four are equal: the number of rows, the place of the bytes, their number, and the chunk index. So object
headers are compared without these four. If anything else differs, or lies outside of the header,
the array is described in full.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import h5py
import numpy as np

from ..options import FileOptions
from ..types import cached_property
from .change_guard import ChangeGuard
from .checks import MAX_BYTES
from .chunk_index import ChunkTable, chunk_table, grid_of, leaves_edges_plain, tree_table
from .contents import frame_categories
from .describe import MAX_UNWRITTEN, bytes_layout, check_described, layout_at
from .dtypes import kind_of
from .group_links import ObjectPlaces
from .layout import ArrayLayout, path_of
from .links import ScalarError
from .object_headers import HeaderFile, HeaderTemplate, ObjectHeader, header_address, read_header
from .open import FAULTS
from .open_file import OpenFile
from .packing import OUTSIDE, has_packing_outside

__all__ = ["AlikeArrays", "has_first_link"]

FILES_WITH_SCALES = 128
"""Number of files in which attached dimension scales are looked at, which takes some milliseconds in each."""

UNREADABLE = (*FAULTS, struct.error, IndexError, OverflowError)
"""Exceptions for bytes that are damaged, or of a kind that only the library reads."""


class AlikeArrays:
    """Describes arrays of many files, the first two of each structure in full.

    Not for files with a live writer: headers can change while they are compared.

    Args:
        remembers: keep each description, and return it if the array of an unchanged file is asked for again.
    """

    def __init__(self, *, remembers: bool = False) -> None:
        self._remembers = remembers
        self._described: dict[tuple[str, str], tuple[FileOptions, ArrayLayout, int]] = {}
        # By key and structure: the number of the first array among the templates, and whether the second one showed
        # that its description can be reused.
        self._structures: dict[tuple[Any, ...], tuple[int, bool]] = {}
        self._templates: dict[str, HeaderTemplate | None] = {}
        self._members: set[str] = set()
        self._table: _OpenTable | None = None  # the one that was asked for last
        self._group: tuple[Any, list[bytes], Any] = None, [], None  # the file and group that was opened last
        self.templates: list[ArrayLayout] = []
        self._paths_with_scales: set[str] = set()

    def takes_scales(self, path: str) -> bool:
        """Return whether the dimension scales of a file are looked at: in the first files only, since it takes long."""
        if len(self._paths_with_scales) < FILES_WITH_SCALES:
            self._paths_with_scales.add(path)
        return path in self._paths_with_scales

    def describe(
        self,
        file: OpenFile,
        path: str,
        key: str,
        files: FileOptions,
        guard: ChangeGuard,
        *,
        alike: str | None = None,
    ) -> ArrayLayout:
        """Describe an array as ``describe_array`` does, with the file's guard.

        Args:
            file: the open file.
            path: its path.
            key: the array.
            files: see ``describe_array``.
            guard: change guard of the file.
            alike: a name for all arrays that may be alike; None is the key.

        Raises:
            H5Error: see ``describe_array``.
        """
        return self.describe_alike(file, path, key, files, guard, alike=alike)[0]

    def describe_alike(
        self,
        file: OpenFile,
        path: str,
        key: str,
        files: FileOptions,
        guard: ChangeGuard,
        *,
        alike: str | None = None,
        takes_scalars: bool = False,
    ) -> tuple[ArrayLayout, int | None]:
        """Return the description, and the number of the template that it is ``ArrayLayout.moved`` from, if any.

        Args:
            file: see ``describe``, as all that follow.
            path: see above.
            key: see above.
            files: see above.
            guard: see above.
            alike: see above.
            takes_scalars: describe scalars that hold bytes as arrays of one row.

        Raises:
            H5Error: see ``describe_array``.
        """
        if (known := self._described.get((path, key))) is not None:
            known_files, layout, number = known
            if known_files == files and layout.guard == guard:
                return layout, number
        layout, template = self._describe(file, path, key, files, guard, alike or key, takes_scalars)
        if self._remembers and template is not None:
            self._described[path, key] = files, layout, template
        return layout, template

    def _describe(
        self,
        file: OpenFile,
        path: str,
        key: str,
        files: FileOptions,
        guard: ChangeGuard,
        alike: str,
        takes_scalars: bool,
    ) -> tuple[ArrayLayout, int | None]:
        lookup = None if alike in self._members else self._header(file, key, alike)
        if lookup is None:
            layout = self._full_layout(file.h5, path, key, files, alike, takes_scalars)
            return check_described(layout, files).guarded(guard), None
        place, header = lookup
        structure_key = (alike, files, takes_scalars, header.structure)
        number, is_proven = self._structures.get(structure_key, (None, False))
        candidate = None
        if number is not None:
            # The full description reports what is wrong.
            with suppress(*UNREADABLE):
                candidate = _derived_layout(self.templates[number], path, key, place, header, guard)
        if candidate is not None and is_proven:
            return self._checked(candidate, files, number)
        layout = self._full_layout(file.h5, path, key, files, alike, takes_scalars).guarded(guard)
        layout = layout.with_changes(is_annotated=header.is_annotated)
        if number is None and not layout.members and layout.categories is None:  # these are of each file
            number = len(self.templates)
            self.templates.append(layout)
            self._structures[structure_key] = number, False
            candidate = _moved_to_itself(layout)
        if number is None or candidate is None or not _is_equal(candidate, layout):
            return self._checked(layout, files, None)
        self._structures[structure_key] = number, layout is not self.templates[number]
        return self._checked(layout, files, number)

    def value(self, layout: ArrayLayout, alike: str) -> int:
        """Return the number of the template of an attribute or a scalar: only name and value differ from it.

        Args:
            layout: the description.
            alike: a name for all that may be alike.
        """
        structure_key = ("@", alike, layout.dtype.str, layout.axes, layout.n_stored_bytes)
        if structure_key not in self._structures:
            self._structures[structure_key] = len(self.templates), True
            self.templates.append(layout)
        return self._structures[structure_key][0]

    def _checked(self, layout: ArrayLayout, files: FileOptions, number: int | None) -> tuple[ArrayLayout, int | None]:
        return check_described(layout, files), number if files.verify is None else None

    def _full_layout(
        self, file: Any, path: str, key: str, files: FileOptions, alike: str, takes_scalars: bool
    ) -> ArrayLayout:
        table, (key_of_table, _, name) = self._table, key.rpartition("/")
        is_known = table is not None and table.is_at(file, key_of_table, files)
        if table is not None and is_known and (member := table.member(path, name)) is not None:
            return member
        try:
            layout = layout_at(file, path, key, files)
        except ScalarError:
            scalar = bytes_layout(file, path, key) if takes_scalars else None
            if scalar is None:
                raise
            layout = scalar
        if layout.members:
            self._members.add(alike)
            if not is_known and len(layout.members) == 1:
                self._table = _OpenTable(file, key_of_table, files)
        return layout

    def _header(self, file: OpenFile, key: str, alike: str) -> tuple[_Place, ObjectHeader] | None:
        """Return where an array is, and its header; None if only the library knows."""
        if "\0" in key:  # HDF5 would end the name at the NUL
            return None
        try:
            headers = file.headers
            if headers is None or headers.format == "ODIM":
                return None
            if (place := self._locate(file, headers, _parts(key))) is None:
                return None
            template = self._templates.get(alike)
            header = None if template is None else template.read(headers, place.address)
            if header is None and (header := read_header(headers, place.address)) is not None:
                self._templates[alike] = HeaderTemplate.of(headers, place.address, header)
        except UNREADABLE:
            return None  # the full description reports what is wrong
        return None if header is None else (place, header)

    def _locate(self, file: OpenFile, headers: HeaderFile, parts: list[bytes]) -> _Place | None:
        """Return where an array is; None unless hard links lead to it."""
        if file.places is not None:
            with suppress(*UNREADABLE):
                address = file.places.address_of(parts)
                if address is not None and not _has_packing_outside(file.places, parts):
                    return _Place(headers, address, partial(_opened, file, b"/".join(parts)))
        *groups, name = parts
        h5 = file.h5
        if self._group[0] is not file or self._group[1] != groups:  # the arrays of a group follow each other
            group = h5.id
            for part in groups:
                info = h5py.h5g.get_objinfo(group, part, follow_link=False)
                if info.type != h5py.h5g.GROUP:  # a soft link has another type, so this is a group of this file
                    return None
                group = h5py.h5g.open(group, part)
            self._group = file, groups, group
        group = self._group[2]
        info = h5py.h5g.get_objinfo(group, name, follow_link=False)
        if info.type != h5py.h5g.DATASET or has_packing_outside(group, name):
            return None
        return _Place(headers, header_address(info.objno), partial(h5py.h5d.open, group, name))


class _Place(NamedTuple):
    """Where an array is.

    Attributes:
        file: its file.
        address: of its object header.
        open: opens it through the library.
    """

    file: HeaderFile
    address: int
    open: Callable[[], Any]


def _opened(file: OpenFile, path: bytes) -> Any:
    return h5py.h5d.open(file.h5.id, path)


def _has_packing_outside(places: ObjectPlaces, parts: list[bytes]) -> bool:
    """See ``has_packing_outside``; true if all arrays beside it exist that may declare its packing."""
    *groups, name = parts
    return name in OUTSIDE and all(places.address_of([*groups, other.encode()]) is not None for other in OUTSIDE[name])


class _OpenTable:
    """A table of an open file, described once for all members: HDF5 takes milliseconds if there are hundreds.

    Args:
        file: the open file.
        key: the table.
        files: how the file was opened.
    """

    def __init__(self, file: Any, key: str, files: FileOptions) -> None:
        self._file, self._key, self._files = file, key, files

    @cached_property
    def _layout(self) -> ArrayLayout:
        return layout_at(self._file, self._file.filename, self._key, self._files)

    def is_at(self, file: Any, key: str, files: FileOptions) -> bool:
        """Return whether the table is at a name of an open file."""
        return file is self._file and key == self._key and files == self._files

    def member(self, path: str, name: str) -> ArrayLayout | None:
        """Return the description of a member that holds numbers; None for another one."""
        table = self._layout
        if name not in (table.stored.names or ()) or kind_of(table.stored[name].base) != "number":
            return None
        if frame_categories(self._file, table.name, name) is not None:
            return None
        return table.member(name).with_changes(path=path)


def _parts(key: str) -> list[bytes]:
    return [part.encode() for part in key.split("/") if part not in ("", ".")] or [b""]


def has_first_link(file: OpenFile, key: str) -> bool:
    """Return whether a file has a link by the first component of a key. Opens nothing."""
    if file.places is not None and "\0" not in key:
        with suppress(*UNREADABLE):
            return file.places.address_of(_parts(key)[:1]) is not None
    try:
        h5py.h5g.get_objinfo(file.h5.id, _parts(key)[0], follow_link=False)
    except (KeyError, ValueError, RuntimeError, OSError):
        return False
    return True


def _derived_layout(
    template: ArrayLayout,
    path: str,
    key: str,
    place: _Place,
    header: ObjectHeader,
    guard: ChangeGuard,
) -> ArrayLayout | None:
    """Return the description of an array with the structure of a known one; None if something in it is unusual."""
    as_stored = template if template.references is None else template.references
    shape = (header.n_rows,) if template.is_scalar else (header.n_rows, *template.axes)
    n_bytes = math.prod(shape) * as_stored.stored.itemsize
    if not n_bytes or n_bytes > MAX_BYTES:
        return None
    file, offset, table = place.file, None, None
    if header.place is not None:
        offset = header.place + file.user_block
        if header.n_bytes != n_bytes or not file.has_bytes_of(header):
            return None
    else:
        if (
            as_stored.table is None
            or template.chunks is None
            or math.prod(grid_of(shape, template.chunks)) > MAX_UNWRITTEN
        ):
            return None
        if header.tree is not None:
            table = tree_table(file.read, header.tree, shape, template.chunks, file.user_block)
        else:
            array_id = place.open()
            is_partial = any(size % step for size, step in zip(shape, template.chunks, strict=True))
            if array_id.shape != shape or (is_partial and leaves_edges_plain(array_id.get_create_plist()) is not False):
                return None
            table = chunk_table(array_id, shape, template.chunks, has_user_block=file.user_block != 0)
        if table.masks.any() or as_stored.table.masks.any():
            return None
    layout = template.moved(path, key, header.n_rows, offset, table, guard)
    return layout if layout.is_contiguous == template.is_contiguous else None


def _moved_to_itself(layout: ArrayLayout) -> ArrayLayout | None:
    """Return an array, ``moved`` to its own place; None if that needs more: another name, or filter masks of chunks."""
    as_stored = layout if layout.references is None else layout.references
    if (as_stored.table is None and as_stored.offset is None) or layout.name != path_of(layout.key):
        return None
    if as_stored.table is not None and as_stored.table.masks.any():
        return None
    return layout.moved(layout.path, layout.key, layout.varying_length, as_stored.offset, as_stored.table, layout.guard)


def _is_equal(a: ArrayLayout, b: ArrayLayout) -> bool:
    """Return whether two descriptions of one array are equal, including fields that ``==`` ignores."""
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

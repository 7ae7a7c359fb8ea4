"""List the names in a file, and find the object of a name. Each link is checked before it is followed."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import h5py

from ..errors import H5CorruptError, H5KeyError, H5ValueError, listing, near
from .checks import check_link
from .dtypes import dtype_text, numpy_dtype, unknown_dtype
from .object_headers import HeaderFile, HeaderTemplate, header_address, read_header
from .open import FAULTS, address_of, is_in_other_file, object_address, open_h5
from .paths import file_number
from .structures import COORDINATES, matrices_among, structure_of
from .suggestions import segments_hint

__all__ = [
    "OLD_CATEGORIES",
    "Entry",
    "GroupError",
    "Target",
    "entries_of",
    "frame_categories",
    "has_arrays",
    "identity_of_object",
    "is_text",
    "list_arrays",
    "list_data",
    "old_categories",
    "resolve_path",
    "shape_of",
    "target_of",
]

MAX_LINKS = 16  # HDF5's own limit on links followed in one lookup

DIGITS_IN_NAME = re.compile(rb"\d+")

EntryKind = Literal["group", "array", "type", "hard link", "soft link", "external link", "unreadable"]


class GroupError(H5ValueError):
    """A group was named as an array.

    Attributes:
        key: the requested name or pattern.
    """

    key = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name in a file.

    Attributes:
        name: path from the root, without the first slash.
        kind: the kind of object. A "hard link" is another name of an object listed before; a "type" is a named
            datatype; an "unreadable" object is damaged, or of a kind that h5py does not support.
        target: target of a link, or the reason why the object is unreadable; otherwise None.
        shape: shape of an array; None for an empty dataspace.
        dtype: dtype of an array, in words.
        n_attributes: number of attributes of a group or an array.
        is_damaged: whether HDF5 cannot read the object. Other unreadable objects are of a kind that h5py does not
            support.
        structure: a description in words, if other software keeps the object beside its data; None for data.
    """

    name: str
    kind: EntryKind
    target: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    n_attributes: int = 0
    is_damaged: bool = False
    structure: str | None = None

    @property
    def is_data(self) -> bool:
        """Whether it is an array that may have values."""
        return self.kind == "array" and (self.structure is None or self.structure in COORDINATES)


def entries_of(file: Any) -> Iterator[Entry]:
    """Yield all names in an open file, each group before its contents, in the file's order. Follows no link.

    Takes 20 to 80 microseconds an entry. A damaged object becomes an entry of kind "unreadable".
    """
    look = _Look(file)
    try:
        whole = structure_of(file.id, "")
        todo: list[tuple[Any, str, bytes, str | None]] = [(file.id, "", name, whole) for name in reversed([*file.id])]
    except FAULTS as error:
        todo = []
        yield Entry(name="", kind="unreadable", target=f"{error}", is_damaged=True)
    while todo:
        group, prefix, child, outer_structure = todo.pop()
        name = prefix + text_of(child)
        try:
            item, entry = look.at(group, child, name, outer_structure)
            children = [] if item is None else [*item]
        except FAULTS as error:
            is_damaged = not isinstance(error, TypeError)
            children, entry = [], Entry(name=name, kind="unreadable", target=f"{error}", is_damaged=is_damaged)
        yield entry
        todo += [(item, f"{name}/", inner, entry.structure) for inner in reversed(children)]


def list_arrays(group: Any) -> list[str]:
    """Return the paths of all arrays below a group, in the file's order, without links and damaged arrays."""
    return [entry.name for entry in entries_of(group) if entry.kind == "array"]


def has_arrays(group: Any, *names: str) -> bool:
    """Return whether a group contains arrays with the given names, not through links. Opens no array.

    Raises:
        H5CorruptError: an object with such a name cannot be read.
    """
    infos = [_info(group, encoded(name)) for name in names]
    return all(info is not None and info.type == h5py.h5g.DATASET for info in infos)


def list_data(file: Any) -> tuple[list[str], list[str]]:
    """Return the paths of the arrays that may be fields, and of arrays that are fields only if the user names them.

    Structures of other software are in neither list. The second list has coordinates, unless there are no other arrays,
    and the arrays of sparse matrices, since their group is the field.

    Raises:
        H5CorruptError: an object cannot be read, so the lists could be incomplete.
    """
    entries = []
    for entry in entries_of(file):
        if entry.is_damaged:
            raise _damaged(file, entry.name or "/", entry.target)
        if entry.is_data:
            entries.append(entry)
    matrices = matrices_among([entry.name for entry in entries])
    fields, others = list[str](), list[str]()
    for entry in entries:
        is_field = entry.structure is None and entry.name.rpartition("/")[0] not in matrices
        (fields if is_field else others).append(entry.name)
    return (fields, others) if fields or matrices else (others, [])


OLD_CATEGORIES = "__categories"
"""The group of the categories of the columns beside it, which are codes, as AnnData wrote them until version 0.7."""


def old_categories(file: Any, key: str, array: Any, *, allow_external: bool) -> str | None:
    """Return the name of the array with the categories of an array's codes, in a group beside it; None without one.

    Args:
        file: the open file.
        key: the requested name of the array.
        array: h5py's dataset.
        allow_external: follow links into other files.
    """
    # The name of an array in another file may not exist in this file.
    group_name, _, name = (key if is_in_other_file(file, array) else text_of(array.name)).strip("/").rpartition("/")
    group, members = resolve_path(file, group_name, allow_external=allow_external)
    if members or not isinstance(group, h5py.Group):
        return None
    info = _info(group, encoded(OLD_CATEGORIES))
    if info is None or info.type != h5py.h5g.GROUP or not has_arrays(group[OLD_CATEGORIES], name):
        return None
    return f"{group_name}/{OLD_CATEGORIES}/{name}".strip("/")


def frame_categories(file: Any, table: str, member: str) -> str | None:
    """Return the name of the array with the categories of a column of codes, as pandas stores them; None without one.

    Args:
        file: the open file.
        table: path of the table of a frame.
        member: the column, or block of columns.
    """
    group_name, _, last = text_of(table).strip("/").rpartition("/")
    name = f"{group_name}/meta/{member}/meta/table".strip("/")
    if last != "table" or "/" in member:
        return None
    target = target_of(file, file, name, allow_external=False)
    return f"{name}/values" if target is not None and target.kind == "array" else None


class Target(NamedTuple):
    """The object that a name leads to.

    Attributes:
        kind: "group", "array", or "type" for a named datatype.
        identity: a key that is equal for all names of one object, including links, and differs for other objects (see
            ``identity_of_object``).
        is_linked: whether a soft or external link leads to it.
    """

    kind: Literal["group", "array", "type"]
    identity: Any
    is_linked: bool = False


_KINDS: dict[int, Literal["group", "array", "type"]] = {
    h5py.h5g.GROUP: "group",
    h5py.h5g.DATASET: "array",
    h5py.h5g.TYPE: "type",
}


def target_of(file: Any, group: Any, name: str, *, allow_external: bool) -> Target | None:
    """Return the object that a name below a group leads to; None if there is no such name.

    Opens nothing unless a link leads there. Takes 13 microseconds.

    Args:
        file: the open file.
        group: a group of this file, found by ``resolve_path``.
        name: the name, relative to the group.
        allow_external: follow links into other files.

    Raises:
        H5CorruptError: the object cannot be read.
        H5KeyError: a link leads to nothing.
        H5ValueError: a link leads out of the file. The other file is not opened.
    """
    parts, target = name.split("/"), None
    external_number = file_number(group.file.filename) if allow_external and is_in_other_file(file, group) else None
    for end in range(1, len(parts) + 1):
        if target is not None and target.kind != "group":  # only groups have names below
            return None
        path = "/".join(parts[:end])
        if (info := _info(group, encoded(path))) is None:
            return None
        if info.type not in _KINDS:
            return _target_of_link(file, group, path, "/".join(parts[end:]), allow_external=allow_external)
        target = Target(_KINDS[info.type], info.objno if external_number is None else (external_number, info.objno))
    return target


def _target_of_link(file: Any, group: Any, path: str, below: str, *, allow_external: bool) -> Target | None:
    """Return the object that a link leads to, or that a name below its target leads to (see ``target_of``)."""
    full_path = f"{text_of(group.name)}/{path}".strip("/")
    item, members = _Resolver(file, full_path, allow_external=allow_external).below(group, path.split("/"))
    if members or (below and not isinstance(item, h5py.Group)):
        return None
    if below:
        target = target_of(file, item, below, allow_external=allow_external)
        if target is None or target.is_linked:
            return target
        item = item[encoded(below)]
    kind: Literal["group", "array", "type"] = "type"
    if isinstance(item, h5py.Group | h5py.Dataset):
        kind = "group" if isinstance(item, h5py.Group) else "array"
    return Target(kind, identity_of_object(file, item), is_linked=True)


def identity_of_object(file: Any, item: Any) -> Any:
    """Return a key that identifies an object: its address, and its file if it is another one.

    Args:
        file: the file that was opened.
        item: h5py's group, array or named datatype.
    """
    number, address = object_address(item)
    return address if number == object_address(file)[0] else (file_number(item.file.filename), address)


def encoded(name: str) -> bytes:
    """Return a name as HDF5 stores it, also if it is not UTF-8."""
    return name.encode(errors="surrogateescape")


def text_of(name: str | bytes) -> str:
    """Return a name, as listed by h5py or as stored by HDF5, as text."""
    return name.decode(errors="surrogateescape") if isinstance(name, bytes) else name


def is_text(name: str) -> bool:
    """Return whether a name is UTF-8 as HDF5 stores it."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _info(group: Any, name: bytes) -> Any:
    """Return HDF5's information on a name below a group; None for no such name. Follows no link at its end.

    Raises:
        H5CorruptError: the name exists, and the object cannot be read.
    """
    try:
        return h5py.h5g.get_objinfo(group.id, name, follow_link=False)
    except FAULTS as error:
        try:
            exists = group.id.links.exists(name)
        except FAULTS:
            exists = True
        if not exists:
            return None
        path = f"{text_of(group.name or '')}/{text_of(name)}".strip("/")
        raise _damaged(group.file, path, error) from error


def _damaged(file: Any, name: str, error: object) -> H5CorruptError:
    return H5CorruptError(
        f"{name!r} in {file.filename!r} is linked but cannot be opened: {error}. Check the file (and, for a link to "
        "another file, that the other file exists)."
    )


class _Look:
    """Inspects the objects of a file, one after the other.

    An array is not opened if its object header equals the header of an array that was opened before, except for the
    number of rows and the place of the bytes. Files with thousands of arrays often have few kinds of arrays.

    Args:
        file: an open file, or a group of one.
    """

    def __init__(self, file: Any) -> None:
        self._names = {_address(file.id): "/"}  # by address
        self._file: HeaderFile | None = None
        with suppress(*FAULTS):
            self._file = HeaderFile.of(file.file) if file.file.mode == "r" else None
        # The header and the entry of the array that was opened last, by its name without digits.
        self._opened: dict[bytes, tuple[HeaderTemplate, Entry]] = {}

    def at(self, group: Any, child: bytes, name: str, outer_structure: str | None) -> tuple[Any, Entry]:
        """Return the low-level object if it is a group, and its entry.

        Args:
            group: the low-level group.
            child: name in it.
            name: path of the object.
            outer_structure: the structure that the group is, or is in.
        """
        link = _link(group, child)
        if isinstance(link, h5py.SoftLink):
            return None, Entry(name=name, kind="soft link", target=link.path)
        if isinstance(link, h5py.ExternalLink):
            return None, Entry(name=name, kind="external link", target=f"{link.filename}:{link.path}")
        if (alike := self._alike_array(group, child, name, outer_structure)) is not None:
            return None, alike
        item = h5py.h5o.open(group, child)
        address = _address(item)
        if (first_name := self._names.setdefault(address, name)) != name:
            return None, Entry(name=name, kind="hard link", target=first_name)
        if isinstance(item, h5py.h5t.TypeID):
            return None, Entry(name=name, kind="type", dtype=str(item.dtype))
        n_attributes = h5py.h5a.get_num_attrs(item)
        structure = outer_structure
        if structure is None and (n_attributes or isinstance(item, h5py.h5g.GroupID)):
            structure = structure_of(item, name.rpartition("/")[2])
        if isinstance(item, h5py.h5g.GroupID):
            return item, Entry(name=name, kind="group", n_attributes=n_attributes, structure=structure)
        words, shape = dtype_text(numpy_dtype(item)), shape_of(item)
        entry = Entry(name=name, kind="array", shape=shape, dtype=words, n_attributes=n_attributes, structure=structure)
        if structure == outer_structure:
            self._note(child, address, entry)
        return None, entry

    def _alike_array(self, group: Any, child: bytes, name: str, outer_structure: str | None) -> Entry | None:
        """Return the entry of an array like one that was opened before; None if it must be opened."""
        if self._file is None or (opened := self._opened.get(DIGITS_IN_NAME.sub(b"#", child))) is None:
            return None
        template, entry = opened
        info = h5py.h5g.get_objinfo(group, child, follow_link=False)
        if info.type != h5py.h5g.DATASET or entry.structure != outer_structure:
            return None
        header = template.read(self._file, header_address(info.objno))
        if header is None or not header.has_same_row_bytes(template.header) or not self._file.has_bytes_of(header):
            return None
        if self._names.setdefault((info.fileno, info.objno), name) != name:
            return None
        return replace(entry, name=name, shape=(header.n_rows, *(entry.shape or ())[1:]))

    def _note(self, child: bytes, address: Any, entry: Entry) -> None:
        """Remember an array that was opened."""
        if self._file is None or not isinstance(address, tuple):
            return
        with suppress(*FAULTS, IndexError, struct.error):
            position = header_address(address[1])
            header = read_header(self._file, position)
            template = None if header is None else HeaderTemplate.of(self._file, position, header)
            if template is not None and entry.shape and entry.shape[0] == template.header.n_rows:
                self._opened[DIGITS_IN_NAME.sub(b"#", child)] = template, entry


def _link(group: Any, name: bytes) -> Any:
    """Return the link of a name; None for a hard link.

    Raises:
        TypeError: it is of a kind that h5py does not support.
    """
    kind = group.links.get_info(name).type
    if kind == h5py.h5l.TYPE_HARD:
        return None
    if kind not in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL):
        raise TypeError("it is a link of a kind that h5py does not support")
    target = group.links.get_val(name)
    return h5py.ExternalLink(*map(text_of, target)) if isinstance(target, tuple) else h5py.SoftLink(text_of(target))


def _address(item: Any) -> Any:
    """Return a key that identifies an object; the key of a damaged object equals no other key."""
    try:
        return address_of(item)
    except FAULTS:
        return object()


def shape_of(array: Any) -> tuple[int, ...] | None:
    """Return the shape of a low-level array without opening other files; None for an empty dataspace.

    HDF5 opens all files of a virtual array to find its length if it may grow, and nothing reports whether it may. So a
    virtual array has the shape here that was declared when it was made.
    """
    if array.get_offset() is None:  # a virtual array has none; asked first, since the settings take longer
        settings = array.get_create_plist()
        if settings.get_layout() == h5py.h5d.VIRTUAL and settings.get_virtual_count():
            extent: tuple[int, ...] = settings.get_virtual_vspace(0).get_simple_extent_dims()
            return extent
    shape: tuple[int, ...] | None = array.shape
    return shape


def resolve_path(file: Any, key: str, *, allow_external: bool) -> tuple[Any, tuple[str, ...]]:
    """Find the object that a name leads to.

    Args:
        file: an open file.
        key: the name.
        allow_external: follow links into other files.

    Returns:
        The object, and the members of a compound array that the name ends in.

    Raises:
        H5KeyError: the name does not exist, or leads through too many links.
        H5ValueError: the name leads out of the file.
        H5CorruptError: the object is linked and cannot be opened.
    """
    return _Resolver(file, key, allow_external=allow_external).follow(key)


class _Resolver:
    """Follows a path component by component, and the soft links in it.

    Args:
        file: an open file.
        key: the requested name, for messages.
        allow_external: follow links into other files.
    """

    def __init__(self, file: Any, key: str, *, allow_external: bool) -> None:
        self._file, self._key, self._allow_external = file, key, allow_external
        self._n_links = 0

    def follow(self, path: str) -> tuple[Any, tuple[str, ...]]:
        """Return the object at a path from the root, and members."""
        return self.below(self._file, _parts_of(path))

    def below(self, item: Any, parts: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
        """Return the object at a path from a group, and members."""
        for at, part in enumerate(parts):
            if isinstance(item, h5py.Dataset):
                return item, self._members(item, tuple(parts[at:]))
            link = self._link(item, part)
            if link is not None:
                check_link(self._file, self._key, "/".join(parts[: at + 1]), link, allow_external=self._allow_external)
            if isinstance(link, h5py.SoftLink):
                item = self._follow_soft(item, link)
                continue
            if isinstance(link, h5py.ExternalLink):
                self._check_external(item.file, link)
            item = self._open(item, part)
        return item, ()

    def _check_external(self, file: Any, link: Any) -> None:
        """Resolve the target of an external link here, since HDF5 would wait forever at a pipe."""
        self._count_link()
        path = _find_external(file, link.filename)
        if path is not None:
            with open_h5(path) as target_file:
                self.below(target_file, _parts_of(link.path))

    def _link(self, item: Any, part: str) -> Any:
        if not is_text(part):
            raise H5ValueError(
                f"{self._key.encode(errors='surrogateescape')!r} in {self._file.filename!r} is a name that is not "
                "UTF-8. Rename it (h5py: file.move), or name another array."
            )
        # HDF5 would end the name at the NUL, and open another object.
        has_links = isinstance(item, h5py.Group) and "\0" not in part
        try:
            if has_links and item.id.links.exists(encoded(part)):
                return _link(item.id, encoded(part))
        except FAULTS as error:
            raise _damaged(self._file, self._key, error) from error
        raise _missing(self._file, self._key)

    def _count_link(self) -> None:
        self._n_links += 1
        if self._n_links > MAX_LINKS:
            raise H5KeyError(
                f"{self._key!r} in {self._file.filename!r} leads through a cycle of links, or through more than "
                f"{MAX_LINKS}. Name the array itself."
            )

    def _follow_soft(self, group: Any, link: Any) -> Any:
        self._count_link()
        try:
            item, members = self.below(group.file if link.path.startswith("/") else group, _parts_of(link.path))
        except H5KeyError as error:
            if self._n_links > MAX_LINKS:
                raise
            raise H5KeyError(
                f"{self._key!r} in {self._file.filename!r} is a soft link to {link.path!r}, which does not exist. Name "
                "the array itself, or fix the link."
            ) from error
        if members:
            raise _missing(self._file, self._key)
        return item

    def _open(self, group: Any, part: str) -> Any:
        try:
            return group[encoded(part)]
        except FAULTS as error:
            raise _damaged(self._file, self._key, error) from error

    def _members(self, array: Any, members: tuple[str, ...]) -> tuple[str, ...]:
        dtype = numpy_dtype(array)
        if dtype is None:
            raise H5ValueError(f"{text_of(array.name)!r} in {self._file.filename!r} has {unknown_dtype(array)}")
        for member in members:
            base = dtype.base
            if base.names is None or member not in base.names:
                contents = f"has the members {listing(base.names)}" if base.names else "has no members"
                raise H5KeyError(
                    f"is not in {self._file.filename!r}.",
                    f"{array.name!r} is an array there and {contents}.",
                    near(member, base.names or ()).strip(),
                    "Name the array, or one of its members.",
                    key=self._key,
                )
            dtype = base[member]
        return members


def _find_external(file: Any, name: str) -> str | None:
    """Return the path of the file that an external link names, as HDF5 searches for it; None if it does not exist."""
    own_path = os.path.abspath(file.filename)
    folders = [*os.environ.get("HDF5_EXT_PREFIX", "").split(":"), os.path.dirname(own_path)]
    folders += [os.getcwd(), os.path.dirname(os.path.realpath(own_path))]
    below = os.path.basename(name) if os.path.isabs(name) else name
    paths = [name] if os.path.isabs(name) else []
    paths += [
        os.path.join(folder.replace("${ORIGIN}", os.path.dirname(own_path)), below) for folder in folders if folder
    ]
    return next((path for path in paths if os.path.exists(path) and not os.path.isdir(path)), None)


def _parts_of(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _missing(file: Any, key: str) -> H5KeyError:
    """Return the error about a name that a file lacks."""
    names = list_arrays(file)
    place, remedy = f"is not in {file.filename!r}.", "Pass one of these as the key."
    if hint := segments_hint(names, key):
        return H5KeyError(place, f"Its arrays are {listing(names)}.", "", hint.strip(), key=key)
    group = key.strip("/").rpartition("/")[0]
    if group and (siblings := [name for name in names if name.startswith(f"{group}/")]):
        contents = f"{group!r} has the arrays {listing(siblings)}."
        return H5KeyError(place, contents, near(key, siblings).strip(), remedy, key=key)
    if not names:
        return H5KeyError(place, "It has no arrays.", "", "Pass a file with arrays.", key=key)
    return H5KeyError(place, f"Its arrays are {listing(names)}.", near(key, names).strip(), remedy, key=key)

"""What is in a file: every name as plain data, and what a name stands for, each component of its path looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import h5py

from ..errors import H5CorruptError, H5KeyError, H5ValueError, listing, near
from .dtypes import dtype_text, numpy_dtype
from .h5py_errors import FAULTS
from .headers import ensure_opens, place_of
from .links import shape_of

__all__ = ["Entry", "entries_of", "list_arrays", "resolve_path"]

MAX_LINKS = 16  # HDF5's own limit on links followed in one look-up

EntryKind = Literal["group", "array", "type", "hard link", "soft link", "external link", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name in a file.

    Attributes:
        name: path from the root, without the first slash.
        kind: what the name stands for. A hard link is one more name of something that came before; a type is a named
            datatype; what is unreadable is damaged, or of a kind that h5py does not know.
        target: where a link leads; why something is unreadable; else None.
        shape: of an array; None where it has none (an empty dataspace).
        dtype: of an array, in words.
        n_attributes: of a group or an array.
    """

    name: str
    kind: EntryKind
    target: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    n_attributes: int = 0


def entries_of(file: Any) -> Iterator[Entry]:
    """All names in an open file, each group before what is in it, in the file's order. Follows no link.

    Some 50 microseconds an entry. A damaged entry is one that is unreadable, and ends nothing.
    """
    seen = {_place(file): "/"}
    try:
        todo = [(file, "", name) for name in reversed(list(file))]
    except FAULTS as error:
        todo = []
        yield Entry(name="", kind="unreadable", target=f"{error}")
    while todo:
        group, above, last = todo.pop()
        name = above + (last.decode(errors="surrogateescape") if isinstance(last, bytes) else last)
        try:
            item, entry = _look(group, last, name, seen)
            inside = [] if item is None else list(item)
        except FAULTS as error:
            inside, entry = [], Entry(name=name, kind="unreadable", target=f"{error}")
        yield entry
        todo += [(item, f"{name}/", inner) for inner in reversed(inside)]


def list_arrays(group: Any) -> list[str]:
    """Paths of all arrays below a group, in the file's order, without links and what is damaged."""
    return [entry.name for entry in entries_of(group) if entry.kind == "array"]


def _look(group: Any, last: str | bytes, name: str, seen: dict[Any, str]) -> tuple[Any, Entry]:
    """The entry, and the group to go into, if it is one."""
    link = group.get(last, getlink=True) if isinstance(last, str) else _link(group, last)
    if isinstance(link, h5py.SoftLink):
        return None, Entry(name=name, kind="soft link", target=link.path)
    if isinstance(link, h5py.ExternalLink):
        return None, Entry(name=name, kind="external link", target=f"{link.filename}:{link.path}")
    ensure_opens(group, last)
    item = group[last]
    first = seen.setdefault(_place(item), name)
    if first != name:
        return None, Entry(name=name, kind="hard link", target=first)
    n_attributes = h5py.h5a.get_num_attrs(item.id)
    if isinstance(item, h5py.Group):
        return item, Entry(name=name, kind="group", n_attributes=n_attributes)
    if isinstance(item, h5py.Datatype):
        return None, Entry(name=name, kind="type", dtype=str(item.dtype))
    words = dtype_text(numpy_dtype(item))
    return None, Entry(name=name, kind="array", shape=shape_of(item), dtype=words, n_attributes=n_attributes)


def _link(group: Any, name: bytes) -> Any:
    """The link of a name that is no UTF-8, which h5py finds as an object, and not as a link; None for a hard one."""
    kind = group.id.links.get_info(name).type
    if kind == h5py.h5l.TYPE_SOFT:
        return h5py.SoftLink(group.id.links.get_val(name).decode(errors="surrogateescape"))
    if kind != h5py.h5l.TYPE_HARD:
        raise ValueError("it is a link whose name is no UTF-8")
    return None


def _place(item: Any) -> Any:
    """What tells an object from others; a damaged one is like no other."""
    try:
        return place_of(item)
    except FAULTS:
        return object()


def resolve_path(file: Any, key: str, *, allow_external: bool) -> tuple[Any, tuple[str, ...]]:
    """What a name stands for, and the members of a table that it ends in.

    Args:
        file: an open file.
        key: the name.
        allow_external: follow links into other files.

    Raises:
        H5KeyError: there is no such name, or it leads through too many links.
        H5ValueError: it leaves the file.
        H5CorruptError: it is linked, and cannot be opened.
    """
    return _Walk(file, key, allow_external=allow_external).to(key)


class _Walk:
    """A walk along a path, and along those of the soft links in it.

    Args:
        file: an open file.
        key: where it leads, for messages.
        allow_external: follow links into other files.
    """

    def __init__(self, file: Any, key: str, *, allow_external: bool) -> None:
        self._file, self._key, self._allow_external = file, key, allow_external
        self._n_links = 0

    def to(self, path: str) -> tuple[Any, tuple[str, ...]]:
        """Goes along a path from the root; gives what is there, and members."""
        item: Any = self._file
        parts = [part for part in path.split("/") if part not in ("", ".")]
        for at, part in enumerate(parts):
            if isinstance(item, h5py.Dataset):
                return item, self._members(item, tuple(parts[at:]))
            link = self._link(item, part)
            if isinstance(link, h5py.ExternalLink) and not self._allow_external:
                where = "/".join(parts[: at + 1])
                raise H5ValueError(
                    f"{self._key!r} in {self._file.filename!r} leaves the file: {where!r} is an external link to "
                    f"{link.path!r} in {link.filename!r}. Pass that file itself, or "
                    "files=FileOptions(allow_external=True) if you trust it."
                )
            if isinstance(link, h5py.SoftLink) and not self._allow_external:
                item = self._follow(item, link)
            else:
                item = self._open(item, part)
        return item, ()

    def _link(self, item: Any, part: str) -> Any:
        try:
            # HDF5 takes a NUL for the end of a name, and finds another one.
            has_links = isinstance(item, h5py.Group) and "\0" not in part
            link = item.get(part, getlink=True) if has_links else None
        except (KeyError, ValueError, RuntimeError):
            link = None
        if link is None:
            raise H5KeyError(_missing(self._file, self._key))
        return link

    def _follow(self, group: Any, link: Any) -> Any:
        self._n_links += 1
        if self._n_links > MAX_LINKS:
            raise H5KeyError(
                f"{self._key!r} in {self._file.filename!r} goes round in soft links, or through more than {MAX_LINKS}. "
                "Name the array itself."
            )
        try:
            item, members = self.to(link.path if link.path.startswith("/") else f"{group.name}/{link.path}")
        except H5KeyError as error:
            if self._n_links > MAX_LINKS:
                raise
            raise H5KeyError(
                f"{self._key!r} in {self._file.filename!r} is a soft link to {link.path!r}, which leads nowhere. "
                "Name the array itself, or mend the link."
            ) from error
        if members:
            raise H5KeyError(_missing(self._file, self._key))
        return item

    def _open(self, group: Any, part: str) -> Any:
        try:
            ensure_opens(group, part)
            return group[part]
        except H5CorruptError:  # an OSError too, and it has said what is wrong
            raise
        except (KeyError, OSError, RuntimeError) as error:
            raise H5CorruptError(
                f"{self._key!r} in {self._file.filename!r} is linked but cannot be opened: {error}. Check the file "
                "(and, for a link to another file, that the other file is there)."
            ) from error

    def _members(self, array: Any, members: tuple[str, ...]) -> tuple[str, ...]:
        dtype = array.dtype
        for member in members:
            base = dtype.base
            if base.names is None or member not in base.names:
                what = f"has the members {listing(base.names)}" if base.names else "has no members"
                guess = near(member, base.names or ())
                raise H5KeyError(
                    f"{self._key!r} is not in {self._file.filename!r}: {array.name!r} is an array there and {what}."
                    f"{guess} Name the array, or one of its members."
                )
            dtype = base[member]
        return members


def _missing(file: Any, key: str) -> str:
    names = list_arrays(file)
    return (
        f"{key!r} is not in {file.filename!r}; its arrays are {listing(names)}.{near(key, names)} "
        "Pass one of these as the key."
    )

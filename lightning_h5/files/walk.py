"""Looking up a name in a file: every component of a path is looked at, since each may leave the file."""

from __future__ import annotations

from typing import Any

import h5py

from ..errors import H5CorruptError, H5KeyError, H5ValueError, listing, near
from .headers import ensure_opens
from .tree import list_arrays

__all__ = ["walk"]

MAX_LINKS = 16  # HDF5's own limit on links followed in one look-up


def walk(file: Any, key: str, *, allow_external: bool) -> tuple[Any, tuple[str, ...]]:
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
                    f"{link.path!r} in {link.filename!r}. Pass that file itself, or allow_external=True if you trust "
                    "it."
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

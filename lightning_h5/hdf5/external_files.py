"""Which other files the rows of an array come from, through links, virtual arrays and external storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ..errors import H5FileError, H5ValueError
from ..options import FileOptions
from .contents import resolve_path
from .identity import ChangeGuard
from .links import is_foreign, names_of, sources_of, storage_of
from .open import MAX_LEVELS, find_array, open_h5

__all__ = ["guards_of_others"]


def guards_of_others(
    file: Any, keys: Iterable[str], trust: FileOptions, *, grows: bool = False, strict: bool = False
) -> tuple[ChangeGuard, ...]:
    """Guards of the files beside an open one that its arrays have rows from, in the order in which they are met.

    Args:
        file: the open file.
        keys: arrays of it.
        trust: what is followed; without leave to follow anything there are none.
        grows: see ``ChangeGuard.of``.
        strict: likewise.

    Raises:
        H5Error: an array is not there, or refused (see ``find_array``).
        H5FileError: another file is not there.
    """
    search = _Search()
    for key in keys if trust.allow_external else ():
        search.look_at(file, find_array(file, key, trust).array)
    guards = []
    for path in search.paths:
        try:
            guards.append(ChangeGuard.of(path, grows=grows, strict=strict))
        except OSError as error:
            raise H5FileError(
                f"{file.filename!r} has rows in {path!r}, which cannot be looked at: {error.strerror}. Put it back."
            ) from error
    return tuple(guards)


class _Search:
    """Collects paths. The door has let the first array in: what it is made of is there, and never made of itself."""

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}
        self._seen: set[tuple[str, str]] = set()

    def look_at(self, file: Any, array: Any, level: int = 0) -> None:
        """An array that was found by way of an open file, and all that it is made of."""
        home = array.file
        if is_foreign(file, array):
            self._add(home.filename)
        if (me := (home.filename, array.name)) in self._seen:
            return
        self._seen.add(me)
        if level > MAX_LEVELS:
            raise H5ValueError(
                f"{array.name!r} in {home.filename!r} is made of others, which are made of others, more than "
                f"{MAX_LEVELS} times. Write its rows to a file as an array of their own."
            )
        for stored in storage_of(array):
            self._add(stored)
        for path, source in sources_of(home, array) if array.is_virtual else ():
            if path is None:
                self._look_for(home, source, level)
            else:
                self._add(path)
                with open_h5(path) as other:
                    self._look_for(other, source, level)

    def _look_for(self, file: Any, source: str, level: int) -> None:
        for name in names_of(source):
            if name not in file:  # the end of a pattern, or of a file that is one of a pattern
                break
            self.look_at(file, resolve_path(file, name, allow_external=True)[0], level + 1)

    def _add(self, path: str) -> None:
        self.paths[os.path.abspath(path)] = None

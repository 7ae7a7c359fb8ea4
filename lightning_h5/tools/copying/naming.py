"""Arrays that a user named, found without a look into other files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import h5py

from ...errors import H5ValueError
from ...files import Trust, find_array, shape_of
from ...files.damage import blamed_on
from ...files.walk import walk
from .walk import address_of

__all__ = ["named_arrays"]


def named_arrays(file: Any, keys: Sequence[str], argument: str, trust: Trust) -> set[int]:
    """Addresses of arrays that a user named. Opens no other file.

    Args:
        file: the open file.
        keys: the names.
        argument: that they were given as.
        trust: which of the file's claims pass.

    Raises:
        H5KeyError: there is no array of a name.
        H5ValueError: it is a member of a table, or lies behind a link to another file, or is no array of rows.
    """
    found = set()
    for key in keys:
        if (place := _elsewhere(file, key, argument)) is not None:
            found.add(place)
            continue
        handle = find_array(file, key, trust)
        if handle.members:
            raise H5ValueError(
                f"{argument} names {key!r}, a member of the table {handle.array.name!r}; tables are written as a "
                "whole. Name the table."
            )
        found.add(address_of(handle.array.id))
    return found


def _elsewhere(file: Any, key: str, argument: str) -> int | None:
    """The address of an array that has its rows in others or in other files, of which a copy stays the same.

    ``find_array`` refuses some of these, and names an argument that lets them be read, which there is none of here.
    """
    try:
        with blamed_on(file.filename, repr(key)):
            array, members = walk(file, key, allow_external=False)
            is_array = isinstance(array, h5py.Dataset) and not members
            is_elsewhere = is_array and (array.is_virtual or array.external) and bool(shape_of(array))
    except H5ValueError as error:
        raise H5ValueError(
            f"{argument} names {key!r}, which a link leads to out of {file.filename!r}; no other file is opened. "
            f"Repack that file by itself, or leave it out of {argument}."
        ) from error
    return address_of(array.id) if is_elsewhere else None

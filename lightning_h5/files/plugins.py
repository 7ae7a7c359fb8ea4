"""Filters that run code which a chunk names: their chunks are decoded here, after a look, and never by the library.

A Blosc2 chunk may name a codec that its library does not have; that runs Python then, to import a module of that name
from the folder that the process is in. The HDF5 library's filter does so too, and nobody can look before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import h5py

from ..errors import H5FileError, H5ValueError

__all__ = ["ensure_own_decoder", "may_run_code", "refuse_library"]

SHUFFLE, FLETCHER32, BLOSC2 = 2, 3, 32026


def ensure_own_decoder(filters: Sequence[int], path: str, key: str) -> None:
    """Makes sure that what may run code is decoded here.

    Args:
        filters: of an array, by HDF5's number, in the order of writing.
        path: the file.
        key: the array.

    Raises:
        H5FileError: the package that decodes it is not installed.
        H5ValueError: only the HDF5 library can undo these filters.
    """
    if BLOSC2 not in filters:
        return
    if find_spec("blosc2") is None:
        raise H5FileError(
            f"{key!r} in {path!r} is compressed with Blosc2, which the package `blosc2` decodes, and it is not "
            "installed. Run `pip install 'lightning-h5[filters]'`."
        )
    before, after = filters[: filters.index(BLOSC2)], filters[filters.index(BLOSC2) + 1 :]
    if set(before) - {SHUFFLE, FLETCHER32} or set(after) - {FLETCHER32}:
        raise H5ValueError(_refusal(key, path, "it has other filters that no one else undoes"))


def refuse_library(array: Any, path: str, key: str, why: str) -> None:
    """Refuses an array that only the HDF5 library can read, where its filters may run code.

    Args:
        array: h5py's dataset.
        path: the file.
        key: what it was asked for as.
        why: nobody else can.

    Raises:
        H5ValueError: they may.
    """
    if may_run_code(array.id):
        raise H5ValueError(_refusal(key, path, why))


def may_run_code(array_id: Any) -> bool:
    """Whether the HDF5 library, decoding an array, may run code that a chunk names.

    Args:
        array_id: h5py's low-level dataset.
    """
    plist = array_id.get_create_plist()
    if plist.get_layout() != h5py.h5d.CHUNKED:
        return False
    return any(plist.get_filter(at)[0] == BLOSC2 for at in range(plist.get_nfilters()))


def _refusal(key: str, path: str, why: str) -> str:
    return (
        f"{key!r} in {path!r} is compressed with Blosc2, and only the HDF5 library could read it: {why}. The library "
        "runs code that a chunk may name, and nobody can look before it does. Write the array again with another "
        "compression."
    )

"""Where an object lies: the file that it was found in, and its address there."""

from __future__ import annotations

import os
from typing import Any

import h5py

__all__ = ["has_checked_header", "place_of"]

SIGNATURE = b"OHDR"  # of the object headers that have checksums


def place_of(item: Any) -> tuple[Any, Any]:
    """The number of an object's file, and its address; alike for two handles of one object, and for no others.

    ``H5Oget_info`` would tell it too, but looks at the chunk index on its way: one that is damaged ends the process.

    Args:
        item: h5py's file, group, array or named datatype.
    """
    if isinstance(item, h5py.Datatype):  # has no index
        found = h5py.h5o.get_info(item.id)
        return (found.fileno, 0), (found.addr, 0)
    named = h5py.h5g.get_objinfo(item.id)
    return named.fileno, named.objno


def has_checked_header(array: Any) -> bool:
    """Whether the object header of an array has a checksum: that of an older format has none."""
    file = h5py.h5i.get_file_id(array.id)
    low, high = h5py.h5g.get_objinfo(array.id).objno
    place = (high << 64 if high else 0) + low + file.get_create_plist().get_userblock()
    try:
        return os.pread(file.get_vfd_handle(), len(SIGNATURE), place) == SIGNATURE
    except (OSError, ValueError, NotImplementedError, RuntimeError):  # a file that lies elsewhere than on a disk
        return False

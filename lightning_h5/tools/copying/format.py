"""Objects of a newer format than the file they are in: a program that opened an old file for writing may make them."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import h5py

from ...files.places import has_checked_header
from .walk import all_objects

__all__ = ["allow_newer_objects"]

OLD_SUPERBLOCK, OLD_HEADER = 1, 1  # the newest versions that HDF5 wrote before 1.8
LIBVER_V18 = 1  # H5F_LIBVER_V18


def allow_newer_objects(file: Any, copy: Any) -> None:
    """Lets objects of the copy have the format of HDF5 1.8 where a file of an older format has such ones.

    Only they may have attributes of more than 64 KiB. h5py has no name for it, so the library is asked itself.

    Args:
        file: the open source.
        copy: the open new file, in which nothing was made yet.
    """
    if file.id.get_create_plist().get_version()[0] > OLD_SUPERBLOCK:
        return
    if not any(_is_newer(item) for *_, item in all_objects(file)):
        return
    with suppress(AttributeError, OSError):  # as a last resort, what does not fit is an error of its own
        function = ctypes.CDLL(h5py.h5o.__file__).H5Fset_libver_bounds
        function.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        with h5py._objects.phil:  # the library takes one caller at a time
            function(copy.id.id, LIBVER_V18, copy.id.get_access_plist().get_libver_bounds()[1])


def _is_newer(item: Any) -> bool:
    """Whether the file's own format did not make an object so: one that keeps an order needs the newer one anyway."""
    if isinstance(item, h5py.h5d.DatasetID):  # that which tells it of others looks at a chunk index, damaged or not
        is_old = not has_checked_header(h5py.Dataset(item))
    else:
        is_old = h5py.h5o.get_info(item).hdr.version <= OLD_HEADER
    if is_old:
        return False
    return not (hasattr(item, "get_create_plist") and item.get_create_plist().get_attr_creation_order())

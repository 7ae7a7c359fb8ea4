"""Virtual arrays whose sources are permuted: which show rows of their own file, and which cannot be kept."""

from __future__ import annotations

from typing import Any

import h5py

from ...errors import H5ValueError

__all__ = ["is_own", "refuse_mixed"]


def is_own(array: Any, plist: Any) -> bool:
    """Whether a virtual array's rows all lie in its own file."""
    return all(plist.get_virtual_filename(at) == "." for at in range(plist.get_virtual_count()))


def refuse_mixed(file: Any, name: str, array: Any, shuffled: set[int]) -> None:
    """Makes sure that an array over other files, which stays a link, shows no rows of its own file that are permuted.

    Args:
        file: the open file.
        name: of the array.
        array: h5py's low-level dataset.
        shuffled: addresses of arrays whose rows are permuted.

    Raises:
        H5ValueError: it does, and would change.
    """
    plist = array.get_create_plist()
    if plist.get_layout() != h5py.h5d.VIRTUAL or is_own(array, plist):
        return
    if _reads_permuted(file["/"].id, plist, shuffled, set()):
        raise H5ValueError(
            f"{name!r} is virtual and shows rows of other files beside rows that are to be shuffled, which would "
            "change it. Write its values to an ordinary array first, or name other shuffle_keys."
        )


def _reads_permuted(root: Any, plist: Any, shuffled: set[int], seen: set[int]) -> bool:
    """Whether a virtual array shows rows that are permuted, directly or by way of other virtual arrays."""
    for at in range(plist.get_virtual_count()):
        if plist.get_virtual_filename(at) != ".":
            continue
        try:
            item = h5py.h5o.open(root, plist.get_virtual_dsetname(at).encode())
        except (KeyError, ValueError, RuntimeError):  # there is none: it reads as the fill value
            continue
        address = h5py.h5o.get_info(item).addr
        if address in shuffled:
            return True
        if address in seen or not isinstance(item, h5py.h5d.DatasetID):
            continue
        seen.add(address)
        below = item.get_create_plist()
        if below.get_layout() == h5py.h5d.VIRTUAL and _reads_permuted(root, below, shuffled, seen):
            return True
    return False

"""What HDF5's types hold, by h5py's low-level objects: sizes that are not fixed, references, unreadable kinds."""

from __future__ import annotations

from typing import Any

import h5py

from ...errors import H5FileError

__all__ = ["ensure_readable", "has_class", "is_variable"]


def is_variable(stored: Any) -> bool:
    """Whether elements of a type have no fixed size: text or lists that lie elsewhere in the file."""
    return has_class(stored, h5py.h5t.VLEN) or has_class(stored, h5py.h5t.STRING, only_variable=True)


def has_class(stored: Any, wanted: int, *, only_variable: bool = False) -> bool:
    """Whether a type, or one inside it, is of a class of HDF5's.

    Args:
        stored: h5py's low-level type.
        wanted: the class, such as ``h5py.h5t.REFERENCE``.
        only_variable: of strings, those of no fixed size.
    """
    kind = stored.get_class()
    if kind == wanted:
        return not only_variable or bool(stored.is_variable_str())
    if kind == h5py.h5t.COMPOUND:
        members = (stored.get_member_type(at) for at in range(stored.get_nmembers()))
        return any(has_class(member, wanted, only_variable=only_variable) for member in members)
    if kind in (h5py.h5t.ARRAY, h5py.h5t.VLEN):
        return has_class(stored.get_super(), wanted, only_variable=only_variable)
    return False


def ensure_readable(item: Any, name: str, so: str) -> None:
    """Makes sure that h5py can read the values of an array or attribute.

    Args:
        item: h5py's low-level object.
        name: of it.
        so: what follows if it cannot, and what to do.

    Raises:
        H5FileError: they are of a type that it does not have.
    """
    try:
        _ = item.dtype
    except TypeError as error:
        raise H5FileError(
            f"{name!r} holds values of a type that h5py cannot read ({str(error).rstrip('.')}), so that {so}"
        ) from error

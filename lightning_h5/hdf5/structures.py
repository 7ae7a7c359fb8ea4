"""Structures that other software keeps in a file beside its data: their descriptions, and how to recognize them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import h5py
import numpy as np

__all__ = [
    "DIMENSION_SCALE",
    "MATLAB_EMPTY",
    "SPARSE_PARTS",
    "is_empty_matlab",
    "is_private_group",
    "matrices_among",
    "structure_of",
]

SPARSE_PARTS = (("data", "indices", "indptr"), ("data", "ir", "jc"))
"""Arrays of a group that is a sparse matrix: as AnnData, 10x Genomics and SciPy name them, and as MATLAB does."""

MATLAB_EMPTY = b"MATLAB_empty"
"""The attribute of MATLAB's ``[]``."""

NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"


DIMENSION_SCALE = "a dimension scale"
"""The one structure with values that are worth loading, if a user names it; but not a target."""


class Structure(NamedTuple):
    """A kind of structure.

    Attributes:
        what: a description in words.
        is_group: whether a group is marked, and everything in it belongs to the structure.
        marks: returns whether an object is one, from h5py's low-level object and its name in its group.
    """

    what: str
    is_group: bool
    marks: Callable[[Any, str], bool]


def structure_of(item: Any, name: str) -> str | None:
    """Return the structure that an open group or array is, in words; None if it is data.

    Args:
        item: h5py's group or array.
        name: its name in its group.
    """
    is_group = isinstance(item, h5py.Group)
    if not is_group and not h5py.h5a.get_num_attrs(item.id):
        return None
    return next(
        (
            structure.what
            for structure in STRUCTURES
            if structure.is_group == is_group and structure.marks(item.id, name)
        ),
        None,
    )


def is_empty_matlab(array_id: Any) -> bool:
    """Return whether an array is MATLAB's ``[]``, which stores its sizes in place of values."""
    return bool(np.any(_attribute_or_default(array_id, MATLAB_EMPTY, 0)))


def matrices_among(names: Collection[str]) -> dict[str, str]:
    """Return the groups of some arrays that are sparse matrices, and the array of each with the starts of its rows."""
    name_set = set(names)
    matrices = {}
    for *members, starts in SPARSE_PARTS:
        for name in names:
            group, _, last = name.rpartition("/")
            if last == starts and group and {f"{group}/{member}" for member in members} <= name_set:
                matrices[group] = name
    return matrices


def is_private_group(name: str) -> bool:
    """Return whether the name of a group alone marks it as one that other software keeps beside its data."""
    return name in ("#refs#", "#subsystem#") or name.startswith("_i_")


def _is_index(item: Any, name: str) -> bool:
    return name.startswith("_i_") or _text_attribute(item, b"CLASS") in (b"INDEX", b"TINDEX")


def _is_of_matlab(item: Any, name: str) -> bool:
    return name in ("#refs#", "#subsystem#")


def _is_placeholder(item: Any, name: str) -> bool:
    return _is_scale(item, name) and _text_attribute(item, b"NAME").startswith(NO_VARIABLE)


def _is_scale(item: Any, name: str) -> bool:
    return _text_attribute(item, b"CLASS") == b"DIMENSION_SCALE"


def _is_empty(item: Any, name: str) -> bool:
    return is_empty_matlab(item)


STRUCTURES = (
    Structure("an index of PyTables", is_group=True, marks=_is_index),
    Structure("contents of cells of MATLAB", is_group=True, marks=_is_of_matlab),
    Structure("a dimension of netCDF without values", is_group=False, marks=_is_placeholder),
    Structure(DIMENSION_SCALE, is_group=False, marks=_is_scale),
    Structure("an empty array of MATLAB", is_group=False, marks=_is_empty),
)
"""All structures; the first one that marks an object counts."""


def _text_attribute(item: Any, name: bytes) -> bytes:
    value = _attribute_or_default(item, name, b"")
    return (
        value.encode(errors="replace") if isinstance(value, str) else bytes(value) if isinstance(value, bytes) else b""
    )


def _attribute_or_default(item: Any, name: bytes, default: Any) -> Any:
    """Return an attribute of a low-level object; a default without it, or if it cannot be read."""
    try:
        if not h5py.h5a.exists(item, name):
            return default
        owner = h5py.Group(item) if isinstance(item, h5py.h5g.GroupID) else h5py.Dataset(item)
        return owner.attrs[name.decode()]
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeDecodeError):
        return default

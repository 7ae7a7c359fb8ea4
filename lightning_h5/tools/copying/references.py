"""Attributes and references of one file in a copy of it: what points at an object there points at its copy here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ...errors import H5ValueError
from .stored_types import has_class
from .walk import address_of

__all__ = ["References", "attributes_of", "copy_attributes", "raw_values"]


class References:
    """Turns references into one file into references into its copy.

    Args:
        source: the open file.
        copy: the open copy.
        places: for each object of the source, by its address, a path of its copy.
        moved: addresses of arrays whose rows are permuted: a region of them would be another one.
    """

    def __init__(self, source: Any, copy: Any, places: Mapping[int, bytes], moved: frozenset[int]) -> None:
        self._source, self._copy, self._places, self._moved = source.id, copy.id, places, moved

    def translated(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Values as h5py reads them, with all references in them, however deep, turned."""
        if values.dtype.names is not None:
            out = values.copy()
            for name in values.dtype.names:
                out[name] = self.translated(values[name])
            return out
        if values.dtype.kind != "O":
            return values
        out = np.empty(values.shape, dtype=values.dtype)
        for at, value in enumerate(values.reshape(-1)):
            out.reshape(-1)[at : at + 1] = _alone(self._one(value))
        return out

    def _one(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.translated(value)
        if not isinstance(value, h5py.h5r.Reference):
            return value
        is_region = isinstance(value, h5py.h5r.RegionReference)
        place, address = self.place_of(value)
        if place is None:
            return h5py.h5r.RegionReference() if is_region else h5py.h5r.Reference()
        if not is_region:
            return h5py.h5r.create(self._copy, place, h5py.h5r.OBJECT)
        if address in self._moved:
            raise H5ValueError(
                f"a region reference points at rows of {place.decode(errors='replace')!r}, whose rows are to be "
                "shuffled; it would point at others. Repack without shuffle_rows, or with shuffle_keys without it."
            )
        region = h5py.h5r.get_region(value, self._source)
        return h5py.h5r.create(self._copy, place, h5py.h5r.DATASET_REGION, region)

    def place_of(self, reference: Any) -> tuple[bytes | None, int]:
        """The path of the copy of what is referred to, None for nothing; and the object's own address."""
        if not reference:
            return None, 0
        try:
            address = address_of(h5py.h5r.dereference(reference, self._source))
        except (ValueError, KeyError, RuntimeError, OSError):  # what it points at was deleted
            return None, 0
        return self._places.get(address), address


def _alone(value: Any) -> npt.NDArray[Any]:
    """One object in an array: NumPy would take a list of references apart."""
    alone = np.empty(1, dtype=object)
    alone[0] = value
    return alone


def raw_values(item: Any, stored: Any) -> npt.NDArray[Any]:
    """All values, as bytes; of text and lists, pointers to memory that the library takes back when they are written."""
    values: npt.NDArray[Any] = np.empty(item.shape, dtype=f"V{stored.get_size()}")
    item.read(values, stored)
    return values


def attributes_of(owner: Any) -> list[bytes]:
    """Names of an object's attributes, in the order of their creation where the file keeps it."""
    plist = owner.get_create_plist() if hasattr(owner, "get_create_plist") else None
    by_creation = plist is not None and plist.get_attr_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
    kind = h5py.h5.INDEX_CRT_ORDER if by_creation else h5py.h5.INDEX_NAME
    return [h5py.h5a.open(owner, index=at, index_type=kind).get_name() for at in range(h5py.h5a.get_num_attrs(owner))]


def copy_attributes(source: Any, copy: Any, references: References, type_for: Callable[[Any], Any]) -> None:
    """Copies all attributes of an object.

    Args:
        source: h5py's low-level object.
        copy: its copy, which has none.
        references: of the two files.
        type_for: gives the copy's type for one of the source.

    Raises:
        H5ValueError: an attribute holds references of a kind that h5py does not know.
    """
    for name in attributes_of(source):
        found = h5py.h5a.open(source, name)
        stored, space = found.get_type(), found.get_space()
        made = h5py.h5a.create(copy, name, type_for(stored), space)
        if space.get_simple_extent_type() == h5py.h5s.NULL:
            continue
        if not has_class(stored, h5py.h5t.REFERENCE):
            made.write(raw_values(found, stored), stored)
            continue
        values, memory_type = _objects(found, name)
        made.write(references.translated(values), memory_type)


def _objects(found: Any, name: bytes) -> tuple[npt.NDArray[Any], Any]:
    try:
        dtype = found.dtype
    except TypeError as error:
        raise H5ValueError(
            f"the attribute {name.decode(errors='replace')!r} holds references that h5py cannot read ({error}), so its "
            "copy would point nowhere. Delete it, or write it again with an older kind of reference."
        ) from error
    values: npt.NDArray[Any] = np.zeros(found.shape, dtype=dtype)
    memory_type = h5py.h5t.py_create(dtype)
    found.read(values, memory_type)
    return values, memory_type

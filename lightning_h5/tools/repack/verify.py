"""A copy compared with its source: links, types, attributes, and every row, read through the HDF5 library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import h5py
import numpy as np

from ...errors import H5CorruptError
from ...hdf5.checks import may_run_code
from .copy import FileCopy
from .objects import address_of, attributes_of, has_class, is_variable, links_in, read_attribute, was_written
from .plan import ArrayPlan
from .row_io import PIECE_BYTES, make_buffer, read_box, rows_box


class CopyVerifier:
    """Compares a copy with its source.

    The HDF5 library reads both files, so that the encoders and chunk indexes of this package do not verify themselves.
    The exception is Blosc2 in the source: the library finds its chunks, and this package decodes them (see
    ``hdf5.checks``).

    Args:
        file_copy: the object that wrote the copy.
        copy: the copy, open for reading.
        report: called with the decoded bytes of rows that were compared.
    """

    def __init__(self, file_copy: FileCopy, copy: Any, report: Callable[[int], object]) -> None:
        self._file_copy, self._source, self._copy, self._report = file_copy, file_copy.source, copy, report

    def verify(self) -> None:
        """Compare everything.

        Raises:
            H5CorruptError: something differs.
        """
        self._check_attributes(self._source["/"].id, self._copy["/"].id, "/")
        addresses = {address_of(self._source["/"].id): address_of(self._copy["/"].id)}
        for link, copied_link in zip_longest(links_in(self._source), links_in(self._copy)):
            self._ensure(link and copied_link and link.path == copied_link.path, (link or copied_link).shown, "links")
            is_same = link.info.type == copied_link.info.type and link.value == copied_link.value
            self._ensure(is_same, link.shown, "links")
            if link.item is None:
                continue
            copied_address = addresses.setdefault(link.address, copied_link.address)
            self._ensure(copied_address == copied_link.address, link.shown, "links")
            if not link.is_first:
                continue
            self._ensure(copied_link.is_first and type(link.item) is type(copied_link.item), link.shown, "kinds")
            self._check_attributes(link.item, copied_link.item, link.shown)
            if isinstance(link.item, h5py.h5d.DatasetID):
                self._check_array(self._file_copy.plans[link.address], link.item, copied_link.item)
            elif isinstance(link.item, h5py.h5t.TypeID):
                self._ensure(link.item == copied_link.item, link.shown, "types")

    def _ensure(self, is_same: Any, name: str, difference: str) -> None:
        if not is_same:
            raise H5CorruptError(
                f"the copy of {name!r} in {self._source.filename!r} differs from it in its {difference}. The copy is "
                "discarded: check the disk and the memory of this machine, or try another compression."
            )

    def _check_attributes(self, source_object: Any, copied_object: Any, name: str) -> None:
        for original, copied in zip_longest(attributes_of(source_object), attributes_of(copied_object)):
            self._ensure(original and copied and original.name == copied.name, name, "attributes")
            difference = f"attribute {original.name.decode(errors='replace')!r}"
            is_same_kind = original.get_type() == copied.get_type() and original.shape == copied.shape
            self._ensure(is_same_kind, name, difference)
            if original.get_space().get_simple_extent_type() != h5py.h5s.NULL:
                as_objects = _is_objects(original.get_type())
                values = (read_attribute(attribute, as_objects=as_objects)[0] for attribute in (original, copied))
                self._ensure(self._equal(*values), name, difference)

    def _check_array(self, plan: ArrayPlan, original: Any, copied: Any) -> None:
        self._ensure(original.get_type() == copied.get_type(), plan.name, "dtype")
        if plan.way == "elsewhere":
            self._ensure(_sources_of(original) == _sources_of(copied), plan.name, "sources")
            return
        self._ensure(_extent_of(original) == _extent_of(copied), plan.name, "shape")
        self._ensure(_fill_of(original) == _fill_of(copied), plan.name, "fill value")
        if not original.get_space().get_simple_extent_npoints() or not (was_written(original) or was_written(copied)):
            return
        if not original.shape or _is_objects(original.get_type()):
            copied_array = h5py.Dataset(copied)
            for place, values in self._file_copy.objects_of(original, plan):
                self._ensure(self._equal(np.asarray(values), np.asarray(copied_array[place])), plan.name, "values")
            self._report(plan.n_bytes)
            return
        for first, rows in self._file_copy.rows_of(original, plan, by_library=not may_run_code(original)):
            expected, read = rows.reshape(-1), make_buffer(rows.nbytes, self._file_copy.folder)
            read_box(copied, plan.name, rows_box(original.shape, first, len(rows)), read)
            parts = (slice(at, at + PIECE_BYTES) for at in range(0, len(read), PIECE_BYTES))
            is_same = all(np.array_equal(read[part], expected[part]) for part in parts)
            self._ensure(is_same, plan.name, f"rows {first} to {first + len(rows) - 1}")
            self._report(rows.nbytes)

    def _equal(self, original: Any, copied: Any) -> bool:
        """Return whether values are equal to the bit, and references point to copies of the same objects."""
        if isinstance(original, np.ndarray) and isinstance(copied, np.ndarray):
            if original.shape != copied.shape or original.dtype != copied.dtype:
                return False
            if not original.dtype.hasobject:
                return original.tobytes() == copied.tobytes()
            if original.dtype.names is not None:
                return all(self._equal(original[name], copied[name]) for name in original.dtype.names)
            return all(self._equal(*pair) for pair in zip(original.reshape(-1), copied.reshape(-1), strict=True))
        if not isinstance(original, h5py.h5r.Reference):
            return bool(original == copied)
        place = self._file_copy.place_of(original)
        if place is None or not copied:
            return place is None and not copied
        expected = address_of(h5py.h5o.open(self._copy.id, place))
        return address_of(h5py.h5r.dereference(copied, self._copy.id)) == expected


def _is_objects(stored: Any) -> bool:
    return is_variable(stored) or has_class(stored, h5py.h5t.REFERENCE)


def _extent_of(array: Any) -> Any:
    space = array.get_space()
    is_simple = space.get_simple_extent_type() == h5py.h5s.SIMPLE
    limits = space.get_simple_extent_dims(True) if is_simple else None
    return space.get_simple_extent_type(), array.shape, limits


def _fill_of(array: Any) -> Any:
    plist = array.get_create_plist()
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return plist.fill_value_defined()
    with suppress(TypeError, ValueError, RuntimeError):  # a number format unknown to NumPy
        return np.asarray(h5py.Dataset(array).fillvalue).tobytes()
    return None


def _sources_of(array: Any) -> Any:
    """Return the declared sources of an array: external files, the fill value, and virtual mappings."""
    plist = array.get_create_plist()
    external = [plist.get_external(at) for at in range(plist.get_external_count())]
    mappings = h5py.Dataset(array).virtual_sources() if plist.get_layout() == h5py.h5d.VIRTUAL else []
    return external, _fill_of(array), [(m[1], m[2], m[0].encode(), m[3].encode()) for m in mappings]

"""A copy compared with its source: links, types, attributes, and every row, read through the HDF5 library."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError
from .compression import Bytes
from .copying import (
    ArrayPlan,
    FileCopy,
    address_of,
    attributes_of,
    has_class,
    is_variable,
    links_in,
    read_values,
    row_boxes,
    value_boxes,
    was_written,
)
from .copying_rows import (
    PIECE_BYTES,
    Box,
    Order,
    boxes_of,
    chunks_of,
    in_order,
    read_box,
    read_rows,
    row_bytes_of,
)

__all__ = ["Comparison"]


class Comparison:
    """Compares a copy with its source.

    Neither our encoders nor what we make of a chunk index judge themselves: the HDF5 library reads both files, except
    for Blosc2 in the source, whose chunks the library finds and this package decodes (see ``hdf5.checks``).

    Args:
        made: what made the copy.
        copy: the copy, open for reading.
        order: where rows went that were permuted.
        pool: threads that read ahead.
        folder: for temporary files.
        done: called with the decoded bytes of rows that were compared.
    """

    def __init__(
        self, made: FileCopy, copy: Any, order: Order | None, pool: Executor, folder: str, done: Callable[[int], object]
    ) -> None:
        self._made, self._source, self._copy = made, made.source, copy
        self._order, self._pool, self._folder, self._done = order, pool, folder, done

    def check(self) -> None:
        """Compare everything.

        Raises:
            H5CorruptError: something differs.
        """
        self._check_attributes(self._source["/"].id, self._copy["/"].id, "/")
        addresses = {address_of(self._source["/"].id): address_of(self._copy["/"].id)}
        for link, other in zip_longest(links_in(self._source), links_in(self._copy)):
            self._same(link and other and link.path == other.path, (link or other).shown, "links")
            self._same(link.info.type == other.info.type and link.is_first == other.is_first, link.shown, "links")
            if link.item is None:
                self._same(link.value == other.value, link.shown, "links")
                continue
            self._same(addresses.setdefault(link.address, other.address) == other.address, link.shown, "links")
            if not link.is_first:
                continue
            self._same(type(link.item) is type(other.item), link.shown, "kinds")
            self._check_attributes(link.item, other.item, link.shown)
            if isinstance(link.item, h5py.h5d.DatasetID):
                self._check_array(self._made.plans[link.address], link.item, other.item)
            elif isinstance(link.item, h5py.h5t.TypeID):
                self._same(link.item == other.item, link.shown, "types")

    def _same(self, is_same: Any, name: str, what: str) -> None:
        if not is_same:
            raise H5CorruptError(
                f"the copy of {name!r} in {self._source.filename!r} differs from it in its {what}. The copy is "
                "discarded: check the disk and the memory of this machine, or try another compression."
            )

    def _check_attributes(self, original: Any, copied: Any, name: str) -> None:
        for one, two in zip_longest(attributes_of(original), attributes_of(copied)):
            self._same(one and two and one.name == two.name, name, "attributes")
            what = f"attribute {one.name.decode(errors='replace')!r}"
            self._same(one.get_type() == two.get_type() and one.shape == two.shape, name, what)
            if one.get_space().get_simple_extent_type() != h5py.h5s.NULL:
                self._same(self._equal(_values(one, name), _values(two, name)), name, what)

    def _check_array(self, plan: ArrayPlan, original: Any, copied: Any) -> None:
        self._same(original.get_type() == copied.get_type(), plan.name, "dtype")
        if plan.is_elsewhere:
            self._same(_description_of(original) == _description_of(copied), plan.name, "sources")
            return
        spaces = original.get_space(), copied.get_space()
        self._same(_extent_of(spaces[0]) == _extent_of(spaces[1]), plan.name, "shape")
        self._same(_fill_of(original) == _fill_of(copied), plan.name, "fill value")
        if not spaces[0].get_simple_extent_npoints() or not (was_written(original) or was_written(copied)):
            return
        order, stored = self._order if plan.is_shuffled else None, original.get_type()
        if not original.shape or is_variable(stored) or has_class(stored, h5py.h5t.REFERENCE):
            for box in value_boxes(original):
                boxes = [box] if box is None or order is None else row_boxes(box, order)
                found = np.concatenate([np.atleast_1d(_values(copied, plan.name, each)) for each in boxes])
                values = np.atleast_1d(_values(original, plan.name, box))
                self._same(self._equal(values, found), plan.name, "values")
                self._done(values.size * stored.get_size())
            return
        if order is None:
            for box in boxes_of(original.shape, stored.get_size(), PIECE_BYTES, (chunks_of(original) or (1,))[0]):
                self._check_rows(plan.name, copied, box, read_box(original, plan.name, box))
            return
        pieces = read_rows(original, plan.name, None, pool=self._pool, folder=self._folder)
        pieces = in_order(pieces, order, original.shape[0], row_bytes_of(original), self._folder)
        for first, rows in pieces:
            box = (first, *[0] * (len(original.shape) - 1)), (len(rows), *original.shape[1:])
            self._check_rows(plan.name, copied, box, rows)

    def _check_rows(self, name: str, copied: Any, box: Box, expected: Bytes) -> None:
        (first, *_), (n_rows, *_) = box
        is_same = np.array_equal(read_box(copied, name, box), expected.reshape(-1))
        self._same(is_same, name, f"rows {first} to {first + n_rows - 1}")
        self._done(expected.nbytes)

    def _equal(self, one: Any, two: Any) -> bool:
        """Return whether values are the same, to the bit; references, if they point at copies of the same."""
        if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
            if one.shape != two.shape or one.dtype != two.dtype:
                return False
            if not one.dtype.hasobject:
                return one.tobytes() == two.tobytes()
            if one.dtype.names is not None:
                return all(self._equal(one[name], two[name]) for name in one.dtype.names)
            return all(self._equal(a, b) for a, b in zip(one.reshape(-1), two.reshape(-1), strict=True))
        if not isinstance(one, h5py.h5r.Reference):
            return bool(one == two)
        place = self._made.place_of(one)
        if place is None or not two:
            return place is None and not two
        expected = address_of(h5py.h5o.open(self._copy.id, place))
        return address_of(h5py.h5r.dereference(two, self._copy.id)) == expected


def _values(item: Any, name: str, box: Box | None = None) -> npt.NDArray[Any]:
    stored = item.get_type()
    is_objects = is_variable(stored) or has_class(stored, h5py.h5t.REFERENCE)
    return read_values(item, name, box, as_objects=is_objects)[0]


def _extent_of(space: Any) -> Any:
    kind = space.get_simple_extent_type()
    is_simple = kind == h5py.h5s.SIMPLE
    return kind, [space.get_simple_extent_dims(limits) for limits in (False, True)] if is_simple else []


def _fill_of(array: Any) -> Any:
    plist = array.get_create_plist()
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return plist.fill_value_defined()
    with suppress(TypeError, ValueError, RuntimeError):  # a number format that NumPy does not have
        return np.asarray(h5py.Dataset(array).fillvalue).tobytes()
    return None


def _description_of(array: Any) -> Any:
    """Return what an array says of the places of its values: what it shows of which file, and the fill value."""
    plist = array.get_create_plist()
    if plist.get_layout() != h5py.h5d.VIRTUAL:
        return [plist.get_external(at) for at in range(plist.get_external_count())]
    mappings = [
        (
            plist.get_virtual_filename(at),
            plist.get_virtual_dsetname(at),
            plist.get_virtual_vspace(at).encode(),
            plist.get_virtual_srcspace(at).encode(),
        )
        for at in range(plist.get_virtual_count())
    ]
    return mappings, _fill_of(array)

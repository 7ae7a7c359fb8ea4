"""A copy of a file held to its source: links, types, attributes, and every row, read by the HDF5 library itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from ...errors import H5CorruptError
from .plan import ArrayPlan
from .raw_array import Bytes, RawArray, read_region, written_anywhere
from .references import References, attributes_of
from .row_copy import MOST_PLACES, MOST_VALUES, Order, boxes, ordered_pieces, value_boxes
from .stored_types import ensure_readable, has_class, is_variable
from .tree_copy import TreeCopy
from .virtual_arrays import description_of, is_virtual
from .walk import address_of, links_of

__all__ = ["Comparison"]

VALUE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compares a copy with its source.

    Attributes:
        source: the open file.
        copy: the open copy.
        tree: who made it, and knows what is a copy of what.
        references: between the two, as they are open now.
        order: where rows went that were permuted.
        pool: threads that decode the source. The copy is decoded by the HDF5 library, in one thread, so that an encoder
            of ours that is wrong does not judge itself.
        folder: for temporary files.
        done: called with the decoded bytes of rows that were compared.
    """

    source: Any
    copy: Any
    tree: TreeCopy
    references: References
    order: Order | None
    pool: Executor
    folder: str
    done: Callable[[int], None]

    def check(self) -> None:
        """Compares everything.

        Raises:
            H5CorruptError: something differs.
        """
        for address, place in self.tree.places.items():
            original, copied = h5py.h5o.open(self.source.id, place), h5py.h5o.open(self.copy.id, place)
            self._same(type(original) is type(copied), place, "kinds")
            self._check_attributes(original, copied, place)
            if isinstance(original, h5py.h5g.GroupID):
                self._check_links(original, copied, place)
            elif isinstance(original, h5py.h5d.DatasetID):
                self._check_array(self.tree.plans[address], original, copied, place)
            else:
                self._same(original == copied, place, "types")

    def _same(self, is_same: bool, place: bytes, what: str) -> None:
        if not is_same:
            raise H5CorruptError(
                f"the copy of {place.decode(errors='replace')!r} in {self.source.filename!r} differs from it in its "
                f"{what}. The copy is discarded: check the disk and the memory of this machine, or try another "
                "compression."
            )

    def _check_links(self, original: Any, copied: Any, place: bytes) -> None:
        names = links_of(original)
        self._same(names == links_of(copied), place, "links")
        for name in names:
            one, other = original.links.get_info(name), copied.links.get_info(name)
            self._same(one.type == other.type, place, "links")
            if one.type != h5py.h5l.TYPE_HARD:
                self._same(original.links.get_val(name) == copied.links.get_val(name), place, "links")
                continue
            address = address_of(h5py.h5o.open(original, name))
            expected = address_of(h5py.h5o.open(self.copy.id, self.tree.places[address]))
            found = address_of(h5py.h5o.open(copied, name))
            self._same(expected == found, place, "links")

    def _check_attributes(self, original: Any, copied: Any, place: bytes) -> None:
        names = attributes_of(original)
        self._same(names == attributes_of(copied), place, "attributes")
        for name in names:
            one, other = h5py.h5a.open(original, name), h5py.h5a.open(copied, name)
            is_same = one.get_type() == other.get_type() and one.shape == other.shape
            self._same(is_same, place, f"attribute {name.decode(errors='replace')!r}")
            if one.get_space().get_simple_extent_type() != h5py.h5s.NULL:
                is_same = self._equal(_values(one, None), _values(other, None))
                self._same(is_same, place, f"attribute {name.decode(errors='replace')!r}")

    def _check_array(self, plan: ArrayPlan, original: Any, copied: Any, place: bytes) -> None:
        self._same(original.get_type() == copied.get_type(), place, "dtype")
        if plan.is_unread and is_virtual(original):
            is_same = description_of(original) == description_of(copied)
            self._same(is_same, place, "sources, which it shows as a virtual array")
            return
        one, other = original.get_space(), copied.get_space()
        kind = one.get_simple_extent_type()
        self._same(kind == other.get_simple_extent_type(), place, "shape")
        if kind == h5py.h5s.NULL:
            return
        for limits in (False, True):
            same = one.get_simple_extent_dims(limits) == other.get_simple_extent_dims(limits)
            self._same(same, place, "shape")
        if plan.is_unread or not one.get_simple_extent_npoints():
            return
        if plan.way in ("rows", "boxes"):
            self._check_rows(plan, original, copied, place)
        elif kind == h5py.h5s.SCALAR:
            self._same(self._equal(_values(original, None), _values(copied, None)), place, "value")
        else:
            self._check_values(plan, original, copied, place)

    def _check_rows(self, plan: ArrayPlan, original: Any, copied: Any, place: bytes) -> None:
        source = RawArray.of(original, self.source.filename, plan.name)
        copy = RawArray.of(copied, self.copy.filename, plan.name)
        self._same(source.fill == copy.fill, place, "fill value")
        if not written_anywhere(original):
            self._same(not written_anywhere(copied), place, "rows: none was written")
            return
        if plan.way == "boxes":
            for corner, shape, content in boxes(source, plan, self.order):
                self._same(_reads(copy, corner, shape, content), place, f"row {corner[0]}")
                self.done(content.nbytes)
            return
        pieces = ordered_pieces(
            source, plan, self.order, pool=self.pool, folder=self.folder, multiple=1, with_unwritten=True
        )
        step = max(1, VALUE_BYTES // source.row_bytes)
        for first, rows in pieces:
            for at in range(0, len(rows), step):
                part = rows[at : at + step]
                corner = (first + at, *(0,) * (len(source.shape) - 1))
                is_same = _reads(copy, corner, (len(part), *source.shape[1:]), part)
                self._same(is_same, place, f"rows {first + at} to {first + at + len(part) - 1}")
                self.done(part.nbytes)

    def _check_values(self, plan: ArrayPlan, original: Any, copied: Any, place: bytes) -> None:
        stored = original.get_type()
        if stored.get_size() > VALUE_BYTES and not (written_anywhere(original) or written_anywhere(copied)):
            return  # an element may claim GiB, of which nothing is there
        n_values = MOST_VALUES if _is_objects(stored) else MOST_PLACES
        for corner, box in value_boxes(original.shape, stored.get_size(), n_values):
            start, stop = corner[0], corner[0] + box[0]
            values = _values(original, (corner, box))
            if plan.is_shuffled and self.order is not None:
                places = self.order(start, stop).tolist()
                found = np.concatenate([_values(copied, ((at, *corner[1:]), (1, *box[1:]))) for at in places])
            else:
                found = _values(copied, (corner, box))
            self._same(self._equal(values, found), place, f"rows {start} to {stop - 1} of the original")
            self.done(values.nbytes)

    def _equal(self, one: Any, other: Any) -> bool:
        """Whether values are the same, to the bit; references are where they point at copies of the same."""
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if not one.dtype.hasobject:
                return one.tobytes() == other.tobytes()
            if one.dtype.names is not None:
                return all(self._equal(one[name], other[name]) for name in one.dtype.names)
            return all(self._equal(a, b) for a, b in zip(one.reshape(-1), other.reshape(-1), strict=True))
        if isinstance(one, h5py.h5r.Reference):
            return self._points_alike(one, other)
        return bool(one == other)

    def _points_alike(self, one: Any, other: Any) -> bool:
        place, _ = self.references.place_of(one)
        if place is None or not other:
            return place is None and not other
        expected = address_of(h5py.h5o.open(self.copy.id, place))
        if address_of(h5py.h5r.dereference(other, self.copy.id)) != expected:
            return False
        if not isinstance(one, h5py.h5r.RegionReference):
            return True
        regions = h5py.h5r.get_region(one, self.source.id), h5py.h5r.get_region(other, self.copy.id)
        n, m = (region.get_select_npoints() for region in regions)
        return bool(n == m and (not n or regions[0].get_select_bounds() == regions[1].get_select_bounds()))


def _reads(copy: RawArray, corner: tuple[int, ...], shape: tuple[int, ...], expected: Bytes) -> bool:
    found = np.empty(math.prod(shape) * copy.itemsize, dtype=np.uint8)
    read_region(copy, corner, shape, found)
    return bool(np.array_equal(found, expected.reshape(-1)))


def _name_of(item: Any) -> str:
    name: bytes = item.name if isinstance(item, h5py.h5a.AttrID) else h5py.h5i.get_name(item) or b"?"
    return name.decode(errors="replace")


def _is_objects(stored: Any) -> bool:
    return is_variable(stored) or has_class(stored, h5py.h5t.REFERENCE)


def _values(item: Any, where: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Any:
    """Values of an attribute, a scalar or a box: as Python objects where they have no fixed size, else as bytes."""
    stored = item.get_type()
    is_objects = _is_objects(stored)
    if is_objects:
        ensure_readable(item, _name_of(item), "its copy cannot be compared with it. Repack without verify.")
    dtype = item.dtype if is_objects else np.dtype(f"V{stored.get_size()}")
    memory_type = h5py.h5t.py_create(dtype) if is_objects else stored
    if where is None:
        shape: tuple[int, ...] = item.shape
        values: Any = np.zeros(shape, dtype=dtype)
        if isinstance(item, h5py.h5d.DatasetID):
            item.read(h5py.h5s.ALL, h5py.h5s.ALL, values, memory_type)
        else:
            item.read(values, memory_type)
        return values
    corner, shape = where
    values, space = np.zeros(shape, dtype=dtype), item.get_space()
    space.select_hyperslab(corner, shape)
    item.read(h5py.h5s.create_simple(shape), space, values, memory_type)
    return values

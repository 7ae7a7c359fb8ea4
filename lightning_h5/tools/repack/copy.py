"""Copies of groups, links, arrays and attributes, with other chunks for some arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

import h5py
import numpy as np

from ...errors import H5ValueError
from .compression import stored_steps
from .objects import Link, address_of, attributes_of, has_class, links_in, read_attribute, unknown_type, was_written
from .plan import ArrayPlan
from .row_io import Order, Pieces, raw_layout, read_rows, row_bytes_of, shuffle_pieces, write_rows

MAX_OBJECTS = 1 << 16  # texts, lists and references held as Python objects at a time


class FileCopy:
    """Copies a file into a new one; objects with several names remain one object.

    Args:
        source: the open file.
        copy: the open copy.
        plans: plan for each array, by its address in the source.
        order: new places of permuted rows.
        pool: threads that decode and encode.
        folder: folder for temporary files.

    Attributes:
        places: a path of each object, the same in both files, by its address in the source.
    """

    def __init__(
        self, source: Any, copy: Any, plans: Mapping[int, ArrayPlan], order: Order | None, pool: Executor, folder: str
    ) -> None:
        self.source, self.copy, self.plans, self.order = source, copy, plans, order
        self._pool, self.folder = pool, folder
        self.places: dict[int, bytes] = {address_of(source["/"].id): b"/"}

    def copy_structure(self) -> None:
        """Create all objects and links, without attributes, and without the rows of rewritten arrays.

        Raises:
            H5ValueError: HDF5 does not know the kind of a link.
        """
        for link in links_in(self.source):
            into = h5py.h5o.open(self.copy.id, link.group)
            options = h5py.h5p.create(h5py.h5p.LINK_CREATE)
            options.set_char_encoding(link.info.cset)
            if link.is_first:
                self.places[link.address] = link.path
                self._make(link, into, options)
            elif link.item is not None:
                into.links.create_hard(link.name, self.copy.id, self.places[link.address], options)
            elif link.info.type == h5py.h5l.TYPE_SOFT:
                into.links.create_soft(link.name, link.value, options)
            elif link.info.type == h5py.h5l.TYPE_EXTERNAL:
                into.links.create_external(link.name, *link.value, options)
            else:
                raise H5ValueError(
                    f"{link.shown!r} in {self.source.filename!r} is a link of type {link.info.type}, which HDF5 does "
                    "not know. Remove it from a copy of the file, then repack this copy."
                )

    def _make(self, link: Link, into: Any, options: Any) -> None:
        plan = self.plans.get(link.address)
        if isinstance(link.item, h5py.h5g.GroupID):
            # Not HDF5's whole property list, which has the places of links in the old file.
            source_options, group_options = link.item.get_create_plist(), h5py.h5p.create(h5py.h5p.GROUP_CREATE)
            group_options.set_link_creation_order(source_options.get_link_creation_order())
            group_options.set_attr_creation_order(source_options.get_attr_creation_order())
            h5py.h5g.create(into, link.name, options, group_options)
        elif plan is None or plan.way in ("as it is", "elsewhere"):
            copy_options = h5py.h5p.create(h5py.h5p.OBJECT_COPY)
            copy_options.set_copy_object(h5py.h5o.COPY_WITHOUT_ATTR_FLAG)
            h5py.h5o.copy(h5py.h5o.open(self.source.id, link.group), link.name, into, link.name, copy_options, options)
        else:
            plist = link.item.get_create_plist().copy()
            steps = plan.steps if plan.way == "rows" else stored_steps(plist)
            if plist.get_nfilters():
                plist.remove_filter(h5py.h5z.FILTER_ALL)
            for step in steps:
                plist.set_filter(*step)
            if plan.way == "rows" and plan.chunks is None:
                plist.set_layout(h5py.h5d.CONTIGUOUS)
                plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
            elif plan.way == "rows":
                plist.set_chunk(plan.chunks)
                # With early allocation, each chunk would be allocated twice: encoding moves it.
                plist.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
            stored = link.item.get_type().copy()  # not the named type of the other file
            h5py.h5d.create(into, link.name, stored, link.item.get_space(), plist, options)

    def copy_rows(self, report: Callable[[int], object]) -> None:
        """Write the rows of rewritten arrays.

        Args:
            report: called with the decoded bytes of rows that were written.
        """
        for address, plan in self.plans.items():
            if plan.way in ("as it is", "elsewhere"):
                continue
            original, copied = (h5py.h5o.open(file.id, self.places[address]) for file in (self.source, self.copy))
            if not was_written(original) or not original.get_space().get_simple_extent_npoints():
                continue
            if plan.way == "values":
                for place, values in self.objects_of(original, plan):
                    h5py.Dataset(copied)[place] = self.translate(values)
                report(plan.n_bytes)
            else:
                write_rows(copied, self.rows_of(original, plan), self._pool, report)

    def rows_of(self, original: Any, plan: ArrayPlan, *, by_library: bool = False) -> Pieces:
        """Yield all rows of an array of the source as bytes, in pieces, in the order of the copy.

        Args:
            original: h5py's low-level dataset.
            plan: plan for the array.
            by_library: read only through the HDF5 library.
        """
        raw = None if by_library else raw_layout(original, self.source.filename, plan.name)
        pieces = read_rows(original, plan.name, raw, self.folder)
        if self.order is None or not plan.is_shuffled:
            return pieces
        return shuffle_pieces(pieces, self.order, original.shape[0], row_bytes_of(original), self.folder)

    def objects_of(self, original: Any, plan: ArrayPlan) -> Iterator[tuple[Any, Any]]:
        """Yield selections in the copy, and the values of the source for them as Python objects.

        Raises:
            H5FileError: h5py does not support the type.
        """
        array = h5py.Dataset(original)
        parts: list[Any] = [()]
        if array.shape:
            step = max(1, MAX_OBJECTS // max(1, math.prod(array.shape[1:])))
            parts = [slice(at, at + step) for at in range(0, len(array), step)]
        for part in parts:
            try:
                values = array[part]
            except TypeError as error:
                raise unknown_type(plan.name, error) from error
            if self.order is None or not plan.is_shuffled:
                yield part, values
            else:
                yield from zip(self.order(part.start, part.start + len(values)).tolist(), values, strict=True)

    def copy_attributes(self) -> None:
        """Copy the attributes and comments of all objects, once all objects that they refer to exist."""
        for place in self.places.values():
            original, copied = h5py.h5o.open(self.source.id, place), h5py.h5o.open(self.copy.id, place)
            for attribute in attributes_of(original):
                space = attribute.get_space()
                copied_attribute = h5py.h5a.create(copied, attribute.name, attribute.get_type().copy(), space)
                if space.get_simple_extent_type() != h5py.h5s.NULL:
                    has_references = has_class(attribute.get_type(), h5py.h5t.REFERENCE)
                    values, memory_type = read_attribute(attribute, as_objects=has_references)
                    copied_attribute.write(self.translate(values) if has_references else values, memory_type)
            # h5py's h5o.get_comment returns uninitialized memory.
            if comment := self.source["/"].id.get_comment(place):
                self.copy["/"].id.set_comment(place, comment)

    def translate(self, value: Any) -> Any:
        """Return a value of the source, or an array of them, with references to objects in the copy.

        Raises:
            H5ValueError: a reference is to a region of an array.
        """
        if isinstance(value, np.ndarray):
            out = value.copy()
            if value.dtype.names is not None:
                for name in value.dtype.names:
                    out[name] = self.translate(value[name])
            elif value.dtype.hasobject:
                for at, element in enumerate(value.reshape(-1)):
                    out.reshape(-1)[at] = self.translate(element)
            return out
        if not isinstance(value, h5py.h5r.Reference) or not value:
            return value
        if isinstance(value, h5py.h5r.RegionReference):
            raise H5ValueError(
                f"{self.source.filename!r} has references to regions of arrays, which are not copied. Use HDF5's own "
                "`h5repack`, which does not shuffle rows."
            )
        place = self.place_of(value)
        return type(value)() if place is None else h5py.h5r.create(self.copy.id, place, h5py.h5r.OBJECT)

    def place_of(self, reference: Any) -> bytes | None:
        """Return the path of the object that a reference of the source points to; None if it was deleted."""
        try:
            return self.places.get(address_of(h5py.h5r.dereference(reference, self.source.id))) if reference else None
        except (ValueError, KeyError, RuntimeError, OSError):  # its target was deleted
            return None

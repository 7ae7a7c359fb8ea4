"""Groups, links, named types, arrays and attributes of a file in a new one; rows written anew are others' work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import h5py

from ...errors import H5ValueError
from .compression import FilterStep, kept_steps
from .plan import ArrayPlan
from .references import References, copy_attributes
from .walk import address_of, links_of

__all__ = ["TreeCopy"]

MERGE_TYPES = 0x40  # H5O_COPY_MERGE_COMMITTED_DTYPE_FLAG, for which h5py has no name
TYPE_PLACE = b".lightning_h5 named type %d"


class TreeCopy:
    """Copies the structure of a file; objects with several names stay one object.

    Args:
        source: the open file.
        copy: the open new one.
        plans: for each array, by its address in the source.

    Attributes:
        places: for each object, by its address in the source, a path of it in both files.
    """

    def __init__(self, source: Any, copy: Any, plans: Mapping[int, ArrayPlan]) -> None:
        self._source, self._copy, self.plans = source, copy, plans
        self.moved = frozenset(address for address, plan in plans.items() if plan.is_shuffled)
        self.places: dict[int, bytes] = {}
        self._types: dict[int, tuple[bytes, Any]] = {}
        self.references = References(source, copy, self.places, self.moved)

    def copy_structure(self) -> None:
        """Makes all but attributes and the rows of arrays that are written anew. Follows no soft or external link.

        Arrays that stay as they are are copied by the HDF5 library, chunk by chunk as stored.

        Raises:
            H5ValueError: a link is of a kind that only some other program knows.
        """
        self.places[address_of(self._source["/"].id)] = b"/"
        todo = [b"/"]
        while todo:
            above = todo.pop()
            group, into = h5py.h5o.open(self._source.id, above), h5py.h5o.open(self._copy.id, above)
            below = [above + name for name in links_of(group) if self._copy_link(group, into, name, above + name)]
            todo += [path + b"/" for path in reversed(below)]

    def copy_attributes(self) -> None:
        """Copies the attributes of all objects; what they refer to has to be there by now."""
        for place in self.places.values():
            original, copied = h5py.h5o.open(self._source.id, place), h5py.h5o.open(self._copy.id, place)
            copy_attributes(original, copied, self.references, self.type_for)
            # Not by h5py's h5o.get_comment, which gives back memory that it never wrote to.
            if comment := self._source["/"].id.get_comment(place):
                self._copy["/"].id.set_comment(place, comment)

    def finish(self) -> None:
        """Takes away the names that copied types had until now."""
        for name, _ in self._types.values():
            self._copy.id.unlink(name)
        self._types.clear()

    def arrays(self) -> Iterator[tuple[ArrayPlan, Any, Any]]:
        """Arrays whose rows have still to be written, with the low-level datasets of both files."""
        for address, plan in self.plans.items():
            if plan.way != "as it is":
                place = self.places[address]
                yield plan, h5py.h5o.open(self._source.id, place), h5py.h5o.open(self._copy.id, place)

    def _copy_link(self, group: Any, into: Any, name: bytes, path: bytes) -> bool:
        """One name; whether it is the first one of a group."""
        info = group.links.get_info(name)
        options = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        options.set_char_encoding(info.cset)
        if info.type == h5py.h5l.TYPE_SOFT:
            into.links.create_soft(name, group.links.get_val(name), options)
            return False
        if info.type == h5py.h5l.TYPE_EXTERNAL:
            file_name, object_name = group.links.get_val(name)
            into.links.create_external(name, file_name, object_name, options)
            return False
        if info.type != h5py.h5l.TYPE_HARD:
            raise H5ValueError(
                f"{path.decode(errors='replace')!r} in {self._source.filename!r} is a link of number {info.type}, "
                "which HDF5 does not know. Remove it from a copy of the file, then repack that."
            )
        original = h5py.h5o.open(group, name)
        address = address_of(original)
        if address in self.places:
            into.links.create_hard(name, self._copy.id, self.places[address], options)
            return False
        self.places[address] = path
        if isinstance(original, h5py.h5g.GroupID):
            h5py.h5g.create(into, name, options, _group_options(original))
            return True
        if isinstance(original, h5py.h5d.DatasetID):
            self._make_array(original, into, name, options, self.plans[address])
        else:
            into.links.create_hard(name, self._copy.id, self._hidden_type(original)[0], options)
        return False

    def _make_array(self, original: Any, into: Any, name: bytes, options: Any, plan: ArrayPlan) -> None:
        if plan.way == "as it is":
            how, flags = h5py.h5p.create(h5py.h5p.OBJECT_COPY), h5py.h5o.COPY_WITHOUT_ATTR_FLAG
            if (stored := original.get_type()).committed():
                self.type_for(stored)  # makes the type's copy, which the library then finds
                flags |= MERGE_TYPES
            how.set_copy_object(flags)
            h5py.h5o.copy(original, b".", into, name, how, options)
            return
        plist = original.get_create_plist().copy()
        if plan.way == "values" and not plan.was_virtual:
            _set_filters(plist, kept_steps(plist))
        else:
            _lay_out(plist, plan)
        h5py.h5d.create(into, name, self.type_for(original.get_type()), original.get_space(), plist, options)

    def type_for(self, stored: Any) -> Any:
        """The type for an array or attribute of the copy: the same, or the copy of a named one."""
        return self._hidden_type(stored)[1] if stored.committed() else stored

    def _hidden_type(self, original: Any) -> tuple[bytes, Any]:
        """A named type's copy, with a name that goes when all are done: it may be needed before its own turn comes."""
        address = address_of(original)
        if address not in self._types:
            name = TYPE_PLACE % len(self._types)
            original.copy().commit(self._copy.id, name)
            self._types[address] = name, h5py.h5t.open(self._copy.id, name)
        return self._types[address]


def _group_options(group: Any) -> Any:
    """What a group is made with. Not the list that HDF5 gives: it says where the group's links lie in the old file."""
    found, options = group.get_create_plist(), h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    options.set_link_creation_order(found.get_link_creation_order())
    options.set_attr_creation_order(found.get_attr_creation_order())
    options.set_attr_phase_change(*found.get_attr_phase_change())
    options.set_obj_track_times(found.get_obj_track_times())
    return options


def _set_filters(plist: Any, steps: tuple[FilterStep, ...]) -> None:
    if plist.get_nfilters():
        plist.remove_filter(h5py.h5z.FILTER_ALL)
    for step in steps:
        plist.set_filter(step.id, step.flags, step.options)


def _lay_out(plist: Any, plan: ArrayPlan) -> None:
    """A creation property list with another layout; fill value, order of attributes and times stay."""
    if plist.get_nfilters():
        plist.remove_filter(h5py.h5z.FILTER_ALL)
    if plan.chunks is None:
        plist.set_layout(h5py.h5d.CONTIGUOUS)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
        return
    plist.set_chunk(plan.chunks)
    # Early allocation would give each chunk a place that it leaves as soon as it is encoded.
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
    _set_filters(plist, plan.steps)

"""A file's groups, links, arrays and attributes in a copy of it, in which some arrays are laid out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from ..errors import H5FileError, H5ValueError
from .compression import FilterStep, kept_steps, set_filters
from .copying_rows import Box, Order, boxes_of, in_order, pipeline_of, read_rows, row_bytes_of, write_rows

__all__ = [
    "ArrayPlan",
    "FileCopy",
    "Link",
    "address_of",
    "attributes_of",
    "has_class",
    "is_variable",
    "links_in",
    "read_values",
    "row_boxes",
    "value_boxes",
    "was_written",
]

MAX_DEEP = 1000  # groups in groups: a path is followed part by part from the root
VALUE_BYTES = 4 << 20  # of values that are read at a time,
MAX_VALUES = 1 << 16  # each of which may become a Python object


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """What becomes of an array.

    Attributes:
        name: one of its names in the file.
        way: copied by the HDF5 library as it is stored; or its values are written again in the same layout; or its rows
            are laid out again.
        chunks: of the copy; None if it has none. For ``rows`` alone.
        steps: filters of the copy. For ``rows`` alone.
        is_shuffled: whether its rows are permuted.
        is_elsewhere: its values lie in other files, or it is virtual: they are never read.
        n_bytes: of all rows, decoded.
        note: why it is not as asked, if so.
    """

    name: str
    way: Literal["as it is", "values", "rows"] = "as it is"
    chunks: tuple[int, ...] | None = None
    steps: tuple[FilterStep, ...] = ()
    is_shuffled: bool = False
    is_elsewhere: bool = False
    n_bytes: int = 0
    note: str = ""


class Link(NamedTuple):
    """A name in a group.

    Attributes:
        group: path of the group, which ends in a slash.
        name: in the group.
        info: h5py's record of the link.
        value: what a soft or external link names.
        item: h5py's low-level object, for hard links.
        address: where the object lies in its file, for hard links.
        is_first: whether the object has no other name before this one.
    """

    group: bytes
    name: bytes
    info: Any
    value: Any = None
    item: Any = None
    address: int = 0
    is_first: bool = False

    @property
    def path(self) -> bytes:
        """Path of the link."""
        return self.group + self.name

    @property
    def shown(self) -> str:
        """The path for people."""
        return self.path.decode(errors="surrogateescape").lstrip("/")


def links_in(file: Any) -> Iterator[Link]:
    """Yield all links of an open file, each group before what is in it. Soft and external links are not followed.

    Raises:
        H5ValueError: groups lie in groups more than 1,000 deep.
    """
    seen, todo = {address_of(file["/"].id)}, [b"/"]
    while todo:
        above, below = todo.pop(), []
        if above.count(b"/") > MAX_DEEP + 1:
            raise H5ValueError(
                f"{file.filename!r} has groups in groups, more than {MAX_DEEP:,} deep, which are not copied. Copy the "
                "arrays that are needed to a file with fewer."
            )
        group = h5py.h5o.open(file.id, above)
        for name in _names_in(group):
            link = Link(above, name, group.links.get_info(name))
            if link.info.type == h5py.h5l.TYPE_HARD:
                item = h5py.h5o.open(group, name)
                link = link._replace(item=item, address=address_of(item))
                link = link._replace(is_first=link.address not in seen)
                seen.add(link.address)
                if link.is_first and isinstance(item, h5py.h5g.GroupID):
                    below.append(link.path + b"/")
            elif link.info.type in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL):
                link = link._replace(value=group.links.get_val(name))
            yield link
        todo += reversed(below)


def address_of(item: Any) -> int:
    """Return where an object lies in its file.

    ``H5Oget_info`` would look at an array's chunk index on its way: a damaged one ends the process.

    Args:
        item: h5py's low-level group, dataset or named type.
    """
    if isinstance(item, h5py.h5t.TypeID):  # has no index
        return int(h5py.h5o.get_info(item).addr)
    low, high = h5py.h5g.get_objinfo(item).objno
    return int(low) + (int(high) << 64)


def _names_in(group: Any) -> list[bytes]:
    """Return the names in a group, in the order of their creation if the file keeps it."""
    by_creation = group.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
    kind = h5py.h5.INDEX_CRT_ORDER if by_creation else h5py.h5.INDEX_NAME
    names: list[bytes] = []
    group.links.iterate(names.append, idx_type=kind, order=h5py.h5.ITER_INC)
    return names


def attributes_of(owner: Any) -> Iterator[Any]:
    """Yield an object's attributes, in the order of their creation if the file keeps it."""
    plist = owner.get_create_plist() if hasattr(owner, "get_create_plist") else None
    by_creation = plist is not None and plist.get_attr_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
    kind = h5py.h5.INDEX_CRT_ORDER if by_creation else h5py.h5.INDEX_NAME
    for at in range(h5py.h5a.get_num_attrs(owner)):
        yield h5py.h5a.open(owner, index=at, index_type=kind)


def has_class(stored: Any, *wanted: int) -> bool:
    """Return whether h5py's low-level type, or one inside it, is of a class of HDF5's, such as ``h5t.REFERENCE``."""
    kind = stored.get_class()
    if kind in wanted:
        return True
    if kind == h5py.h5t.COMPOUND:
        return any(has_class(stored.get_member_type(at), *wanted) for at in range(stored.get_nmembers()))
    return kind in (h5py.h5t.ARRAY, h5py.h5t.VLEN) and has_class(stored.get_super(), *wanted)


def is_variable(stored: Any) -> bool:
    """Return whether elements of a type have no fixed size: text or lists that lie elsewhere in the file."""
    kind = stored.get_class()
    if kind == h5py.h5t.STRING:
        return bool(stored.is_variable_str())
    if kind == h5py.h5t.COMPOUND:
        return any(is_variable(stored.get_member_type(at)) for at in range(stored.get_nmembers()))
    return kind == h5py.h5t.VLEN or (kind == h5py.h5t.ARRAY and is_variable(stored.get_super()))


def was_written(array_id: Any) -> bool:
    """Return whether any row of an array, which lies in its own file, was ever written."""
    is_compact = array_id.get_create_plist().get_layout() == h5py.h5d.COMPACT
    return is_compact or bool(array_id.get_space_status() != h5py.h5d.SPACE_STATUS_NOT_ALLOCATED)


def read_values(item: Any, name: str, box: Box | None = None, *, as_objects: bool) -> tuple[npt.NDArray[Any], Any]:
    """Read values, and return them with the type that they have in memory.

    Args:
        item: h5py's low-level attribute or dataset.
        name: of it, for messages.
        box: a part of a dataset; None for everything.
        as_objects: make Python objects of text, lists and references. Otherwise values are bytes; of text and lists,
            pointers to memory that the library takes back when they are written.

    Raises:
        H5FileError: h5py has no such type.
    """
    stored = item.get_type()
    try:
        dtype = item.dtype if as_objects else np.dtype(f"V{stored.get_size()}")
    except TypeError as error:
        raise H5FileError(
            f"{name!r} holds values of a type that h5py cannot read ({str(error).rstrip('.')}): they cannot be "
            "compared, and references among them would point nowhere. Repack without verify, or use HDF5's own "
            "`h5repack`."
        ) from error
    memory_type = h5py.h5t.py_create(dtype) if as_objects else stored
    values = np.zeros(item.shape if box is None else box[1], dtype=dtype)
    if isinstance(item, h5py.h5a.AttrID):
        item.read(values, memory_type)
    else:
        item.read(*_spaces(item, box), values, memory_type)
    return values, memory_type


def value_boxes(array_id: Any) -> Iterator[Box | None]:
    """Yield the parts of an array whose values are read together; None for the single value of a scalar."""
    if not array_id.shape:
        yield None
        return
    itemsize = array_id.get_type().get_size()
    yield from boxes_of(array_id.shape, itemsize, min(VALUE_BYTES, MAX_VALUES * itemsize))


def row_boxes(box: Box, order: Order) -> list[Box]:
    """Return where each row of a part goes."""
    corner, shape = box
    return [((at, *corner[1:]), (1, *shape[1:])) for at in order(corner[0], corner[0] + shape[0]).tolist()]


def _spaces(array_id: Any, box: Box | None) -> tuple[Any, Any]:
    if box is None:
        return h5py.h5s.ALL, h5py.h5s.ALL
    space = array_id.get_space()
    space.select_hyperslab(*box)
    return h5py.h5s.create_simple(box[1]), space


class FileCopy:
    """Copies a file into a new one; objects with several names stay one object.

    Args:
        source: the open file.
        copy: the open new one.
        plans: for each array, by its address in the source.

    Attributes:
        places: a path of each object, the same in both files, by its address in the source.
    """

    def __init__(self, source: Any, copy: Any, plans: Mapping[int, ArrayPlan]) -> None:
        self.source, self.copy, self.plans = source, copy, plans
        self.places: dict[int, bytes] = {address_of(source["/"].id): b"/"}

    def copy_structure(self) -> None:
        """Make all but attributes and the rows of arrays that are written again.

        Raises:
            H5ValueError: a link is of a kind that HDF5 does not know.
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
                    f"{link.shown!r} in {self.source.filename!r} is a link of number {link.info.type}, which HDF5 does "
                    "not know. Remove it from a copy of the file, then repack that."
                )

    def _make(self, link: Link, into: Any, options: Any) -> None:
        if isinstance(link.item, h5py.h5g.GroupID):
            h5py.h5g.create(into, link.name, options, _group_options(link.item))
            return
        plan = self.plans.get(link.address)
        if plan is None or plan.way == "as it is":
            how = h5py.h5p.create(h5py.h5p.OBJECT_COPY)
            how.set_copy_object(h5py.h5o.COPY_WITHOUT_ATTR_FLAG)
            group = h5py.h5o.open(self.source.id, link.group)
            h5py.h5o.copy(group, link.name, into, link.name, how, options)
            return
        plist = link.item.get_create_plist().copy()
        set_filters(plist, plan.steps if plan.way == "rows" else kept_steps(plist))
        if plan.way == "rows" and plan.chunks is None:
            plist.set_layout(h5py.h5d.CONTIGUOUS)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
        elif plan.way == "rows":
            plist.set_chunk(plan.chunks)
            # Early allocation would give each chunk a place that it leaves as soon as it is encoded.
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
        stored = link.item.get_type().copy()  # no named type of another file
        h5py.h5d.create(into, link.name, stored, link.item.get_space(), plist, options)

    def copy_rows(self, order: Order | None, pool: Executor, folder: str, done: Callable[[int], object]) -> None:
        """Write the rows of arrays that are written again.

        Args:
            order: where rows go that are permuted.
            pool: threads that decode and encode.
            folder: for temporary files.
            done: called with the decoded bytes of rows that were written.
        """
        for address, plan in self.plans.items():
            if plan.way == "as it is":
                continue
            original, copied = (h5py.h5o.open(file.id, self.places[address]) for file in (self.source, self.copy))
            if not was_written(original) or not original.get_space().get_simple_extent_npoints():
                continue
            if plan.way == "values":
                self._copy_values(plan, original, copied, order, done)
                continue
            pipeline = pipeline_of(original, self.source.filename, plan.name)
            pieces = read_rows(original, plan.name, pipeline, pool=pool, folder=folder)
            if plan.is_shuffled and order is not None:
                pieces = in_order(pieces, order, original.shape[0], row_bytes_of(original), folder)
            write_rows(copied, pieces, pool, done)

    def _copy_values(
        self, plan: ArrayPlan, original: Any, copied: Any, order: Order | None, done: Callable[[int], object]
    ) -> None:
        for box in value_boxes(original):
            values, memory_type = self._values(original, plan.name, box)
            if box is None or order is None or not plan.is_shuffled:
                copied.write(*_spaces(copied, box), values, memory_type)
            else:
                for at, row in enumerate(row_boxes(box, order)):
                    copied.write(*_spaces(copied, row), values[at : at + 1], memory_type)
            done(values.size * original.get_type().get_size())

    def copy_attributes(self) -> None:
        """Copy the attributes of all objects; what they refer to must exist by now."""
        for place in self.places.values():
            original, copied = h5py.h5o.open(self.source.id, place), h5py.h5o.open(self.copy.id, place)
            for found in attributes_of(original):
                space, stored = found.get_space(), found.get_type().copy()
                made = h5py.h5a.create(copied, found.name, stored, space)
                if space.get_simple_extent_type() != h5py.h5s.NULL:
                    made.write(*self._values(found, found.name.decode(errors="replace")))
            # Not by h5py's h5o.get_comment, which gives back memory that it never wrote to.
            if comment := self.source["/"].id.get_comment(place):
                self.copy["/"].id.set_comment(place, comment)

    def _values(self, item: Any, name: str, box: Box | None = None) -> tuple[npt.NDArray[Any], Any]:
        """Values for the copy: references point at objects there."""
        has_references = has_class(item.get_type(), h5py.h5t.REFERENCE)
        values, memory_type = read_values(item, name, box, as_objects=has_references)
        return (self._translated(values) if has_references else values), memory_type

    def _translated(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        out = values.copy()
        if values.dtype.names is not None:
            for name in values.dtype.names:
                out[name] = self._translated(values[name])
        elif values.dtype.kind == "O":
            for at, value in enumerate(values.reshape(-1)):
                out.reshape(-1)[at] = self._translated_one(value)
        return out

    def _translated_one(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._translated(value)
        if not isinstance(value, h5py.h5r.Reference):
            return value
        if isinstance(value, h5py.h5r.RegionReference) and value:
            raise H5ValueError(
                f"{self.source.filename!r} has references to regions of arrays, which are not copied. Use HDF5's own "
                "`h5repack`, which does not shuffle rows."
            )
        place = self.place_of(value)
        return type(value)() if place is None else h5py.h5r.create(self.copy.id, place, h5py.h5r.OBJECT)

    def place_of(self, reference: Any) -> bytes | None:
        """Return the path of what a reference of the source points at; None if it points nowhere."""
        try:
            return self.places.get(address_of(h5py.h5r.dereference(reference, self.source.id))) if reference else None
        except (ValueError, KeyError, RuntimeError, OSError):  # what it points at was deleted
            return None


def _group_options(group: Any) -> Any:
    """Return what a group is made with. HDF5's own list of it says where the links lie in the old file."""
    found, options = group.get_create_plist(), h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    options.set_link_creation_order(found.get_link_creation_order())
    options.set_attr_creation_order(found.get_attr_creation_order())
    options.set_attr_phase_change(*found.get_attr_phase_change())
    return options

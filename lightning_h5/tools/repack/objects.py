"""Objects of a file: links, addresses, types and attributes, through h5py's low-level interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from ...errors import H5FileError, H5ValueError

MAX_DEPTH = 1000  # of nested groups, since each path is resolved part by part from the root


class Link(NamedTuple):
    """A name in a group.

    Attributes:
        group: path of the group, which ends in a slash.
        name: name in the group.
        info: h5py's record of the link.
        value: target of a soft or external link.
        item: h5py's low-level object, for hard links.
        address: address of the object in its file, for hard links.
        is_first: whether this is the first name of the object.
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
        """The path for messages."""
        return self.path.decode(errors="surrogateescape").lstrip("/")


def links_in(file: Any) -> Iterator[Link]:
    """Yield all links of an open file, each group before its members. Soft and external links are not followed.

    Raises:
        H5ValueError: groups are nested more than 1,000 deep.
    """
    addresses, todo = {address_of(file["/"].id)}, [b"/"]
    while todo:
        parent, child_groups = todo.pop(), []
        if parent.count(b"/") > MAX_DEPTH + 1:
            raise H5ValueError(
                f"{file.filename!r} has groups nested more than {MAX_DEPTH:,} deep, which are not copied. Copy the "
                "arrays you need to a file with fewer levels."
            )
        group = h5py.h5o.open(file.id, parent)
        names: list[bytes] = []
        group.links.iterate(
            names.append,
            idx_type=_creation_index(group.get_create_plist().get_link_creation_order()),
            order=h5py.h5.ITER_INC,
        )
        for name in names:
            link = Link(parent, name, group.links.get_info(name))
            if link.info.type == h5py.h5l.TYPE_HARD:
                item = h5py.h5o.open(group, name)
                address = address_of(item)
                link = link._replace(item=item, address=address, is_first=address not in addresses)
                addresses.add(address)
                if link.is_first and isinstance(item, h5py.h5g.GroupID):
                    child_groups.append(link.path + b"/")
            elif link.info.type in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL):
                link = link._replace(value=group.links.get_val(name))
            yield link
        todo += reversed(child_groups)


def address_of(item: Any) -> int:
    """Return the address of an object in its file.

    ``H5Oget_info`` would also look at an array's chunk index: a damaged one ends the process.

    Args:
        item: h5py's low-level group, dataset or named type.
    """
    if isinstance(item, h5py.h5t.TypeID):  # a datatype has no chunk index
        return int(h5py.h5o.get_info(item).addr)
    low, high = h5py.h5g.get_objinfo(item).objno
    return int(low) + (int(high) << 64)


def _creation_index(creation_order: int) -> int:
    """Return the index to iterate by: the order of creation if the file keeps it, otherwise names."""
    is_tracked = creation_order & h5py.h5p.CRT_ORDER_TRACKED
    return int(h5py.h5.INDEX_CRT_ORDER if is_tracked else h5py.h5.INDEX_NAME)


def attributes_of(owner: Any) -> Iterator[Any]:
    """Yield an object's attributes, in the order of their creation if the file keeps it."""
    tracked = owner.get_create_plist().get_attr_creation_order() if hasattr(owner, "get_create_plist") else 0
    for at in range(h5py.h5a.get_num_attrs(owner)):
        yield h5py.h5a.open(owner, index=at, index_type=_creation_index(tracked))


def has_class(stored: Any, *classes: int) -> bool:
    """Return whether a low-level type, or one inside it, has an HDF5 class, for example ``h5t.REFERENCE``."""
    return _contains(stored, lambda kind: kind.get_class() in classes)


def is_variable(stored: Any) -> bool:
    """Return whether elements of a type have no fixed size: text or lists, which are stored elsewhere in the file."""
    return _contains(stored, lambda kind: isinstance(kind, h5py.h5t.TypeVlenID) or _is_text(kind))


def _is_text(stored: Any) -> bool:
    return stored.get_class() == h5py.h5t.STRING and bool(stored.is_variable_str())


def _contains(stored: Any, condition: Callable[[Any], bool]) -> bool:
    """Return whether a low-level type, or one inside it, meets a condition."""
    kind = stored.get_class()
    if condition(stored):
        return True
    if kind == h5py.h5t.COMPOUND:
        return any(_contains(stored.get_member_type(at), condition) for at in range(stored.get_nmembers()))
    return kind in (h5py.h5t.ARRAY, h5py.h5t.VLEN) and _contains(stored.get_super(), condition)


def was_written(array_id: Any) -> bool:
    """Return whether any row of an array without external storage was ever written."""
    is_compact = array_id.get_create_plist().get_layout() == h5py.h5d.COMPACT
    return is_compact or bool(array_id.get_space_status() != h5py.h5d.SPACE_STATUS_NOT_ALLOCATED)


def read_attribute(attribute: Any, *, as_objects: bool) -> tuple[npt.NDArray[Any], Any]:
    """Read an attribute, and return its values with their type in memory.

    Args:
        attribute: h5py's low-level attribute.
        as_objects: return text, lists and references as Python objects. Otherwise values are bytes; text and lists are
            pointers to memory that the library frees when they are written.

    Raises:
        H5FileError: h5py does not support the type.
    """
    stored = attribute.get_type()
    try:
        dtype = attribute.dtype if as_objects else np.dtype(f"V{stored.get_size()}")
    except TypeError as error:
        raise unknown_type(attribute.name.decode(errors="replace"), error) from error
    memory_type = h5py.h5t.py_create(dtype) if as_objects else stored
    values = np.zeros(attribute.shape, dtype=dtype)
    attribute.read(values, memory_type)
    return values, memory_type


def unknown_type(name: str, error: TypeError) -> H5FileError:
    """Return the error about values that h5py cannot read."""
    return H5FileError(
        f"{name!r} holds values of a type that h5py cannot read ({str(error).rstrip('.')}), so they cannot be "
        "compared, and references in them cannot be copied. Repack without verify, or use HDF5's own `h5repack`."
    )

"""The objects of a file and their names, each once; no soft or external link is followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py

from ...errors import H5ValueError
from ...files.headers import ensure_opens

__all__ = ["MOST_DEEP", "address_of", "all_arrays", "all_objects", "links_of"]

MOST_DEEP = 1000
"""Groups in groups. A path is looked up part by part from the root, so that time grows faster than their number."""


def all_objects(file: Any) -> Iterator[tuple[int, bytes, Any]]:
    """All objects of an open file but its root group, as ``(address, path, low-level object)``.

    Raises:
        H5ValueError: groups lie in groups without end.
        H5CorruptError: a virtual array cannot be opened, at which the HDF5 library would walk for ever.
    """
    root = file["/"].id
    # A group that is still to be opened is known by the one that it lies in, and its name there.
    seen, todo = {address_of(root)}, [(root, b".", b"/", 0)]
    while todo:
        outer, last, above, n_above = todo.pop()
        if n_above > MOST_DEEP:
            raise H5ValueError(
                f"{file.filename!r} has groups in groups, more than {MOST_DEEP:,} deep, which are not copied. Copy the "
                "arrays that are needed to a file with fewer."
            )
        group, below = h5py.h5o.open(outer, last), []
        for name in links_of(group):
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                continue
            ensure_opens(h5py.Group(group), name)
            item = h5py.h5o.open(group, name)
            if (address := address_of(item)) in seen:
                continue
            seen.add(address)
            yield address, above + name, item
            if isinstance(item, h5py.h5g.GroupID):
                below.append((group, name, above + name + b"/", n_above + 1))
        todo += reversed(below)


def all_arrays(file: Any) -> Iterator[tuple[int, str, Any]]:
    """All arrays of an open file, as ``(address, name, low-level dataset)``."""
    for address, path, item in all_objects(file):
        if isinstance(item, h5py.h5d.DatasetID):
            yield address, path.decode(errors="surrogateescape").lstrip("/"), item


def address_of(item: Any) -> int:
    """Where an object lies in its file.

    ``H5Oget_info`` would look at an array's chunk index on its way: one that is damaged ends the process.

    Args:
        item: h5py's low-level group, dataset or named type.
    """
    if isinstance(item, h5py.h5t.TypeID):  # has no index
        return int(h5py.h5o.get_info(item).addr)
    low, high = h5py.h5g.get_objinfo(item).objno
    return int(low) + (int(high) << 64)


def links_of(group: Any) -> list[bytes]:
    """Names in a group, in the order of their creation where the file keeps it."""
    by_creation = group.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
    kind = h5py.h5.INDEX_CRT_ORDER if by_creation else h5py.h5.INDEX_NAME
    names: list[bytes] = []
    group.links.iterate(names.append, idx_type=kind, order=h5py.h5.ITER_INC)
    return names

"""The objects of a file and their names, each once; no soft or external link is followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py

__all__ = ["all_arrays", "all_objects", "links_of"]


def all_objects(file: Any) -> Iterator[tuple[int, bytes, Any]]:
    """All objects of an open file but its root group, as ``(address, path, low-level object)``."""
    root = file["/"].id
    seen, todo = {h5py.h5o.get_info(root).addr}, [b"/"]
    while todo:
        above = todo.pop()
        group, below = h5py.h5o.open(root, above), []
        for name in links_of(group):
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                continue
            item = h5py.h5o.open(group, name)
            if (address := h5py.h5o.get_info(item).addr) in seen:
                continue
            seen.add(address)
            yield address, above + name, item
            if isinstance(item, h5py.h5g.GroupID):
                below.append(above + name + b"/")
        todo += reversed(below)


def all_arrays(file: Any) -> Iterator[tuple[int, str, Any]]:
    """All arrays of an open file, as ``(address, name, low-level dataset)``."""
    for address, path, item in all_objects(file):
        if isinstance(item, h5py.h5d.DatasetID):
            yield address, path.decode(errors="surrogateescape").lstrip("/"), item


def links_of(group: Any) -> list[bytes]:
    """Names in a group, in the order of their creation where the file keeps it."""
    by_creation = group.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
    kind = h5py.h5.INDEX_CRT_ORDER if by_creation else h5py.h5.INDEX_NAME
    names: list[bytes] = []
    group.links.iterate(names.append, idx_type=kind, order=h5py.h5.ITER_INC)
    return names

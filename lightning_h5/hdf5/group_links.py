"""The links of a group, read from the file's bytes instead of through the HDF5 library.

These are the groups that h5py writes by default: a B-tree of names, which are in a heap. The "HDF5 File Format
Specification" defines them in sections III.A.1, III.B and III.D. Everything else is left to the library: soft links,
groups of the newer format, and whatever looks damaged.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import NamedTuple

from .chunk_index import HEAD_BYTES, MAX_LEVELS, NODE
from .object_headers import CONSTANT, PLACE, HeaderFile, messages

__all__ = ["GroupLinks", "ObjectPlaces"]

SYMBOL_TABLE = 17  # number of the header message of such a group
LINK_INFO, LINK = 2, 6  # and of those of a newer one
HEAP, GROUP_NODE = struct.Struct("<4sB3xQQQ"), 0
LEAF, ENTRY, MAX_ENTRIES = struct.Struct("<4sBxH"), struct.Struct("<QQI4x16x"), 1 << 12
SOFT = 2  # kind of an entry that is a soft link
MAX_HEAP = 16 << 20  # bytes of names; longer heaps are left to the library
MAX_FOUND = 1 << 16  # links of a group that are remembered: some 10 MiB


class _Node(NamedTuple):
    """A node of a B-tree of names.

    Attributes:
        level: above the leaves.
        last_names: the last name in each child.
        children: their addresses.
    """

    level: int
    last_names: list[bytes]
    children: tuple[int, ...]


class GroupLinks:
    """The hard links of a group.

    Args:
        file: the file.
        address: of the group's object header.

    Raises:
        ValueError: only the library knows the links of this group.
    """

    def __init__(self, file: HeaderFile, address: int) -> None:
        places: tuple[int, int] | None = None
        for number, flags, data, _ in messages(file, address):
            if number in (LINK_INFO, LINK) or flags > CONSTANT:
                raise ValueError("the group is of the newer format")
            if number == SYMBOL_TABLE:
                places = PLACE.unpack_from(data)
        if places is None:
            raise ValueError("the object is no group")
        self._file, (self._tree, heap) = file, places
        signature, version, n_bytes, _, names = HEAP.unpack(file.read(HEAP.size, heap))
        if signature != b"HEAP" or version or n_bytes > MAX_HEAP:
            raise ValueError("the names of the group are damaged, or very many")
        self._names = file.read(n_bytes, names)
        if len(self._names) < n_bytes:
            raise ValueError("the names of the group are damaged")
        self._nodes: dict[int, _Node] = {}
        self._found: dict[bytes, tuple[int, int]] = {}  # address and kind of each link of the leaves that were read

    def address_of(self, name: bytes) -> int | None:
        """Return where the object header of a name is; None if there is no such link.

        Raises:
            ValueError: it is no hard link, or the group is damaged.
        """
        if name not in self._found:
            if (leaf := self._leaf_of(name)) is None:
                return None
            if len(self._found) > MAX_FOUND:
                self._found.clear()
                self._nodes.clear()
            self._found |= self._entries(leaf)
            if name not in self._found:
                return None
        address, kind = self._found[name]
        if kind >= SOFT:
            raise ValueError("it is a soft link")
        return address

    def _leaf_of(self, name: bytes) -> int | None:
        """Return where the leaf is that has a name, if any leaf has it."""
        address, level = self._tree, None
        for _ in range(MAX_LEVELS):
            if (node := self._nodes.get(address)) is None:
                node = self._nodes[address] = self._node(address)
            if level not in (None, node.level):
                raise ValueError("the group is damaged")
            child = bisect_left(node.last_names, name)
            if child == len(node.last_names):
                return None
            address, level = node.children[child], node.level - 1
            if level < 0:
                return address
        raise ValueError("the group is damaged")

    def _node(self, address: int) -> _Node:
        signature, kind, level, n = NODE.unpack(self._file.read(NODE.size, address))
        if signature != b"TREE" or kind != GROUP_NODE or n > MAX_ENTRIES:
            raise ValueError("the group is damaged")
        # Offsets of names and addresses of children in turns; a child has names above the one before it, up to the one
        # after it.
        found = struct.unpack(f"<{2 * n + 1}Q", self._file.read(16 * n + 8, address + HEAD_BYTES))
        return _Node(level, [self._name(offset) for offset in found[2::2]], found[1::2])

    def _entries(self, leaf: int) -> dict[bytes, tuple[int, int]]:
        signature, version, n = LEAF.unpack(self._file.read(LEAF.size, leaf))
        if signature != b"SNOD" or version != 1 or n > MAX_ENTRIES:
            raise ValueError("the group is damaged")
        data = self._file.read(n * ENTRY.size, leaf + LEAF.size)
        if len(data) < n * ENTRY.size:
            raise ValueError("the group is damaged")
        return {self._name(offset): (address, kind) for offset, address, kind in ENTRY.iter_unpack(data)}

    def _name(self, offset: int) -> bytes:
        return self._names[offset : self._names.index(b"\0", offset)]


class ObjectPlaces:
    """Finds objects of a file by their paths, from the root through groups.

    Args:
        file: the file.
    """

    def __init__(self, file: HeaderFile) -> None:
        self._file = file
        self._path: list[bytes] = []  # of the object that was found last; the groups on the way follow
        self._groups: list[GroupLinks] = []

    def address_of(self, path: list[bytes]) -> int | None:
        """Return where an object header is; None if the file has no such path.

        Args:
            path: the names of the groups, and of the object.

        Raises:
            ValueError: only the library knows, as for soft links.
        """
        address = self._file.root
        if address is None:
            raise ValueError("the file has a user block, or is of a newer format")
        n_known = 0
        while n_known < min(len(path), len(self._groups)) and path[:n_known] == self._path[:n_known]:
            n_known += 1
        del self._groups[n_known:]
        self._path = path
        for at, name in enumerate(path):
            if at == len(self._groups):
                self._groups.append(GroupLinks(self._file, address))
            elif at + 1 < len(self._groups):
                continue
            if (found := self._groups[at].address_of(name)) is None:
                return None
            address = found
        return address

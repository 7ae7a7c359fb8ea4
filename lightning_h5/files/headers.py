"""Object headers, read without the HDF5 library: what says where an array lies, before the library opens it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import h5py

from ..errors import H5CorruptError
from .heaps import NOWHERE, heap_damage

__all__ = ["compact_place", "ensure_opens"]

LAYOUT, CONTINUATION = 8, 16  # numbers of messages
COMPACT, VIRTUAL = 0, 3  # classes of layouts
MOST_BYTES, MOST_BLOCKS = 16 << 20, 1000  # of a header; more is left to the library


class _Message(NamedTuple):
    """A message of a header: its number, where its bytes lie in the file, and these."""

    number: int
    place: int
    data: bytes


def ensure_opens(group: Any, name: str | bytes) -> None:
    """Makes sure that an object can be opened: the library may walk for ever through a heap that is damaged.

    The map of a virtual array lies in such a heap, and is read when the array is opened. Objects in other files are not
    looked at.

    Args:
        group: h5py's, in a file of this disk.
        name: of a hard link in it.

    Raises:
        H5CorruptError: its map is damaged.
    """
    found = h5py.h5g.get_objinfo(group.id, _encoded(name))
    if found.type != h5py.h5g.DATASET or found.fileno != h5py.h5g.get_objinfo(group.id).fileno:
        return
    file = h5py.h5i.get_file_id(group.id)
    for message in _layouts(file, found.objno):
        version, kind = message.data[:2]
        address = int.from_bytes(message.data[2:10], "little")
        if version < 4 or kind != VIRTUAL or address == NOWHERE:
            continue
        why = heap_damage(file.get_vfd_handle(), address + file.get_create_plist().get_userblock())
        if why is not None:
            shown = _encoded(name).decode(errors="surrogateescape")
            raise H5CorruptError(
                f"the virtual array {shown!r} in {os.fsdecode(file.name)!r} cannot be opened: {why}. The file is "
                "damaged there; copy it again."
            )


def _encoded(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else name.encode(errors="surrogateescape")


def compact_place(array: Any) -> int | None:
    """Where in its file the bytes of an array lie that are part of its header; None where that cannot be told."""
    file = h5py.h5i.get_file_id(array.id)
    for message in _layouts(file, h5py.h5g.get_objinfo(array.id).objno):
        version, kind = message.data[:2]
        if version >= 3 and kind == COMPACT:
            return message.place + 4  # behind version, class and size
    return None


def _layouts(file: Any, objno: tuple[int, int]) -> Iterator[_Message]:
    """What a header says of its array's storage."""
    options = file.get_create_plist()
    if options.get_sizes() != (8, 8):  # of addresses and lengths
        return
    try:
        fd = file.get_vfd_handle()
    except (ValueError, NotImplementedError, RuntimeError):  # a file that lies elsewhere than on a disk
        return
    low, high = objno
    for message in _messages(fd, (high << 64) + low, options.get_userblock()):
        if message.number == LAYOUT and len(message.data) >= 10:
            yield message


def _messages(fd: int, address: int, user_block: int) -> Iterator[_Message]:
    """All messages of a header, in the order of its blocks; what is damaged ends them."""
    head = os.pread(fd, 32, address + user_block)
    is_new = head[:4] == b"OHDR"
    if is_new:
        times, counts, width = head[5] & 0x20, head[5] & 0x10, 1 << (head[5] & 3)
        first = 6 + (16 if times else 0) + (4 if counts else 0)
        n_bytes = int.from_bytes(head[first : first + width], "little")
        blocks = [(address + first + width, n_bytes)]
        header = struct.Struct("<BHBxx" if head[5] & 4 else "<BHB")  # number, bytes, flags, order of creation
    else:
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
        header = struct.Struct("<HHBxxx")
    for _ in range(MOST_BLOCKS):
        if not blocks:
            return
        place, n_bytes = blocks.pop(0)
        place += user_block
        block = os.pread(fd, min(n_bytes, MOST_BYTES), place)
        at = 0
        while at + header.size <= len(block):
            number, size, _ = header.unpack_from(block, at)
            at += header.size
            data = block[at : at + size]
            yield _Message(number, place + at, data)
            if number == CONTINUATION and len(data) >= 16:
                start, length = struct.unpack_from("<QQ", data)
                # Later blocks of the newer format have a signature before their messages, and a checksum behind.
                blocks.append((start + 4, max(0, length - 8)) if is_new else (start, length))
            at += size

"""Object headers and heaps, looked at without the HDF5 library, which does not survive some damage to them.

A hole of zeros in a heap, which a lost block of a disk leaves, or a flipped bit in it, has the library walk for ever.
Text of any length and the maps of virtual arrays lie in heaps. Object addresses are asked for in a way that damage to a
chunk index does not crash.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import h5py
import numpy as np

from ..errors import H5CorruptError

__all__ = [
    "NOWHERE",
    "OLD_INDEX",
    "Message",
    "compact_place",
    "ensure_opens",
    "has_checked_header",
    "heap_damage",
    "index_type",
    "messages_of",
    "place_of",
    "short_text",
    "stored_references",
]

NOWHERE = 2**64 - 1
HEAP_HEADER = 16
OBJECT = struct.Struct("<HHIQ")  # number, users, nothing, bytes

OLD_INDEX = 0  # H5D_CHUNK_IDX_BTREE
SIGNATURE = b"OHDR"  # of the object headers that have checksums
STORED_REFERENCE = "V16"  # to text of any length: 4 bytes of length, 8 of address, 4 of a number there

LAYOUT, ATTRIBUTE, CONTINUATION = 8, 12, 16  # numbers of messages
COMPACT, VIRTUAL = 0, 3  # classes of layouts
REFERENCE = struct.Struct("<IQI")  # to text in a heap: length, address of the heap, number of the object
MAX_BYTES, MAX_BLOCKS = 16 << 20, 1000  # of a header; more is left to the library


DAMAGE = -1
"""In place of a message's number: the header goes on in a way that is not understood."""


class Message(NamedTuple):
    """A message of a header: its number, where its bytes lie in the file, these, and its flags."""

    number: int
    place: int
    data: bytes
    flags: int = 0


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


def short_text(array: Any, name: str, most: int) -> bytes | None:
    """Text of any length that is the one value of an attribute of an array; None if it cannot be read for certain.

    That is: if it is longer, if its heap is damaged, or if attributes lie elsewhere than in the array's header.

    Args:
        array: an h5py dataset.
        name: of the attribute.
        most: bytes that it may have.
    """
    file, wanted = h5py.h5i.get_file_id(array.id), name.encode()
    for message in _messages_of(file, h5py.h5g.get_objinfo(array.id).objno):
        data = message.data
        if message.number != ATTRIBUTE or len(data) < 8:
            continue
        version, _, *sizes = struct.unpack_from("<BBHHH", data)
        start = 9 if version == 3 else 8
        if data[start : start + sizes[0]].rstrip(b"\0") != wanted:
            continue
        start += sum((size + 7) // 8 * 8 if version == 1 else size for size in sizes)  # of name, dtype and dataspace
        reference = data[start : start + REFERENCE.size]
        if len(reference) < REFERENCE.size:
            return None
        length, address, number = REFERENCE.unpack(reference)
        if length == 0 or address in (0, NOWHERE):
            return b""
        if length > most:
            return None
        found = object_in_heap(file.get_vfd_handle(), address + file.get_create_plist().get_userblock(), number)
        return None if found is None or len(found) < length else found[:length]
    return None


def _layouts(file: Any, objno: tuple[int, int]) -> Iterator[Message]:
    """What a header says of its array's storage."""
    for message in _messages_of(file, objno):
        if message.number == LAYOUT and len(message.data) >= 10:
            yield message


def _messages_of(file: Any, objno: tuple[int, int]) -> Iterator[Message]:
    """The messages of an object's header; none if the file cannot be read without the library."""
    options = file.get_create_plist()
    if options.get_sizes() != (8, 8):  # of addresses and lengths
        return
    try:
        fd = file.get_vfd_handle()
    except (ValueError, NotImplementedError, RuntimeError):  # a file that lies elsewhere than on a disk
        return
    low, high = objno
    yield from messages_of(fd, (high << 64) + low, options.get_userblock())


def messages_of(fd: int, address: int, user_block: int) -> Iterator[Message]:
    """All messages of a header, in the order of its blocks; what is damaged ends them with a message ``DAMAGE``."""
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
    for _ in range(MAX_BLOCKS):
        if not blocks:
            return
        place, n_bytes = blocks.pop(0)
        place += user_block
        block = os.pread(fd, min(n_bytes, MAX_BYTES), place)
        at = 0
        while at + header.size <= len(block):
            number, size, flags = header.unpack_from(block, at)
            at += header.size
            data = block[at : at + size]
            yield Message(number, place + at, data, flags)
            if number == CONTINUATION and len(data) >= 16:
                start, length = struct.unpack_from("<QQ", data)
                # Later blocks of the newer format have a signature before their messages, and a checksum behind.
                blocks.append((start + 4, max(0, length - 8)) if is_new else (start, length))
            at += size
        if at > len(block) or len(block) < n_bytes:
            break
    yield Message(DAMAGE, 0, b"")


def heap_damage(fd: int, address: int) -> str | None:
    """What is wrong with the heap at a place of a file; None where nothing is.

    A hole of zeros in it, which a lost block of a disk leaves, is an object that ends where it begins: the HDF5 library
    never gets past it, and takes its lock with it.

    Args:
        fd: the file, open.
        address: the heap's first byte.
    """
    n_file = os.fstat(fd).st_size
    head = os.pread(fd, HEAP_HEADER, address) if address < n_file else b""
    n_bytes = int.from_bytes(head[8:], "little")
    if head[:5] != b"GCOL\x01" or not HEAP_HEADER < n_bytes <= n_file - address:
        return f"at byte {address:,} should be a heap of text, and is none"
    heap = os.pread(fd, n_bytes, address)
    at = HEAP_HEADER
    while at + OBJECT.size <= len(heap):
        number, _, _, size = OBJECT.unpack_from(heap, at)
        step = OBJECT.size + (size + 7) // 8 * 8 if number else size  # what is free says its size with its header
        if step < OBJECT.size or step > len(heap) - at:
            return f"the heap of text at byte {address:,} is damaged at its byte {at:,}"
        at += step
    return None


def object_in_heap(fd: int, address: int, number: int) -> bytes | None:
    """The bytes of an object in the heap at a place of a file; None if it is not there, or the heap is damaged.

    Args:
        fd: the file, open.
        address: the heap's first byte.
        number: of the object.
    """
    if heap_damage(fd, address) is not None:
        return None
    heap = os.pread(fd, int.from_bytes(os.pread(fd, HEAP_HEADER, address)[8:], "little"), address)
    at = HEAP_HEADER
    while at + OBJECT.size <= len(heap):
        found, _, _, size = OBJECT.unpack_from(heap, at)
        at += OBJECT.size
        if found == number:
            return heap[at : at + size]
        at += (size + 7) // 8 * 8 if found else size - OBJECT.size  # more than 0, or the heap were damaged
    return None


def place_of(item: Any) -> tuple[Any, Any]:
    """The number of an object's file, and its address; alike for two handles of one object, and for no others.

    ``H5Oget_info`` would tell it too, but looks at the chunk index on its way: one that is damaged ends the process.

    Args:
        item: h5py's file, group, array or named datatype.
    """
    if isinstance(item, h5py.Datatype):  # has no index
        found = h5py.h5o.get_info(item.id)
        return (found.fileno, 0), (found.addr, 0)
    named = h5py.h5g.get_objinfo(item.id)
    return named.fileno, named.objno


def has_checked_header(array: Any) -> bool:
    """Whether the object header of an array has a checksum: that of an older format has none."""
    file = h5py.h5i.get_file_id(array.id)
    low, high = h5py.h5g.get_objinfo(array.id).objno
    place = (high << 64 if high else 0) + low + file.get_create_plist().get_userblock()
    try:
        return os.pread(file.get_vfd_handle(), len(SIGNATURE), place) == SIGNATURE
    except (OSError, ValueError, NotImplementedError, RuntimeError):  # a file that lies elsewhere than on a disk
        return False


def index_type(array_id: Any) -> int | None:
    """The kind of an array's chunk index (``H5D_chunk_index_t``); None if it is unknown.

    Args:
        array_id: h5py's low-level dataset.
    """
    kind = ctypes.c_int(OLD_INDEX)
    try:  # h5py has no name for it, so the library is asked itself
        ask = ctypes.CDLL(h5py.h5d.__file__).H5Dget_chunk_index_type
    except (AttributeError, OSError):
        return None
    ask.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int)]
    with h5py._objects.phil:  # the library takes one caller at a time
        failed = ask(array_id.id, ctypes.byref(kind)) < 0
    return None if failed else kind.value


def stored_references(element: Any) -> np.dtype[Any] | None:
    """An element as the file has it, of which no more is known than its references to text; None where it has none."""
    n_bytes, places = _references_in(element)
    if not places:
        return None
    names = [str(at) for at in range(len(places))]
    offsets, formats = [at for at, _ in places], [(STORED_REFERENCE, shape) for _, shape in places]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": n_bytes})


def _references_in(element: Any) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
    """Bytes that an element takes in the file; where in it are references to text and lists, and how many there.

    The library tells of types as they are in memory, where text is a pointer of half a reference's size.
    """
    kind = element.get_class()
    if kind == h5py.h5t.VLEN or (kind == h5py.h5t.STRING and element.is_variable_str()):
        return np.dtype(STORED_REFERENCE).itemsize, [(0, ())]
    if kind == h5py.h5t.ARRAY:
        axes, (n_bytes, places) = element.get_array_dims(), _references_in(element.get_super())
        if n_bytes == np.dtype(STORED_REFERENCE).itemsize:  # tables in arrays in tables are left to the library
            return math.prod(axes) * n_bytes, [(0, (*axes, *shape)) for _, shape in places]
        return math.prod(axes) * n_bytes, []
    if kind != h5py.h5t.COMPOUND:
        return element.get_size(), []
    found, longer = [], 0
    for at in sorted(range(element.get_nmembers()), key=element.get_member_offset):
        member = element.get_member_type(at)
        n_bytes, places = _references_in(member)
        found += [(element.get_member_offset(at) + longer + place, shape) for place, shape in places]
        longer += n_bytes - member.get_size()
    return element.get_size() + longer, found

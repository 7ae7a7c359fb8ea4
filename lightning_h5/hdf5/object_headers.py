"""Object headers: declarations about an array, read from the file's bytes instead of through the HDF5 library.

Only messages that a description depends on are parsed. Some are left to the library: attributes in heaps,
shared messages, external storage. The "HDF5 File Format Specification" defines the format in section IV.A.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .change_guard import pread_of, stat_of
from .chunk_index import UNDEFINED
from .packing import ATTRIBUTES, FORMATS, MARKERS, file_format
from .paths import SIGNATURE
from .structures import MATLAB_EMPTY

__all__ = [
    "SCALES",
    "UNITS",
    "HeaderFile",
    "HeaderTemplate",
    "ObjectHeader",
    "header_address",
    "messages",
    "read_header",
    "units_at",
]

DATASPACE, DATATYPE, OLD_FILL, FILL, LAYOUT, FILTERS = 1, 3, 4, 5, 8, 11
ATTRIBUTE, CONTINUATION, ATTRIBUTE_INFO = 12, 16, 21
"""Numbers of the header messages that a description follows from."""

IRRELEVANT = {0, 13, 14, 16, 18, 22}
"""Gaps, comments, times of modification, continuations, and counts of links."""

UNITS, SCALES = (b"units", b"unit"), b"DIMENSION_LIST"
"""Attributes of an array with its units, and with references to the scales of its dimensions."""

CONSTANT, SHARED = 1, 2  # flags of a message that never changes, and of one whose content lies elsewhere in the file
CONTIGUOUS, CHUNKED = 1, 2  # classes of layouts
INDEX_SETTINGS = {1: 0, 2: 0, 3: 1, 4: 5, 5: 6}  # bytes of the settings of a chunk index, by its type
SIMPLE = {0, 1, 3}  # classes of datatypes whose values lie in the attribute: integers, floats, text of a fixed length
OPAQUE, OPAQUE_SCALAR = 5, "an opaque scalar"  # class of such datatypes, and a part of the structure of such a header
TEXT, LISTS = 3, 9  # classes of text of a fixed length, and of lists, which text of any length is
HEAP_REFERENCE, HEAP_HEAD, HEAP_OBJECT = struct.Struct("<IQI"), struct.Struct("<4s4xQ"), struct.Struct("<H6xQ")
MAX_HEADER, MAX_BLOCKS = 16 << 20, 1000  # bytes of a block of a header, and blocks
NUMBER, PLACE = struct.Struct("<Q"), struct.Struct("<QQ")
WINDOW = 4096  # bytes that are read at a time

FIRST_BYTES = 16384  # read first: all headers of many small files
OLD = struct.Struct("<8x5BBBxHHIQQQQ8x8xI")
"""A superblock of version 0: versions of its parts, bytes of an address and of a length, sizes of nodes, flags, base
address, place of free space, end of the file, place of a driver's information, and kind of the root."""

SUPERBLOCKS = {0: (13, 24, 64), 1: (13, 28, 68), 2: (9, 12, 36), 3: (9, 12, 36)}
"""Where a superblock of each version has the sizes of addresses and lengths, its base address, and that of the root."""

MIN_SUPERBLOCK = 76  # bytes of the longest part of these that is read


@dataclass
class HeaderFile:
    """A file whose headers are read by position.

    Attributes:
        pread: reads bytes at a position.
        n_bytes: size of the file.
        version: of the superblock.
        user_block: bytes of the user block.
        format: see ``file_format``.
        root: where the object header of the root is; None if only the library may look for it.
        window: bytes that were read last.
        start: their position.
    """

    pread: Callable[[int, int], bytes]
    n_bytes: int
    version: int
    user_block: int
    format: str | None
    root: int | None = None
    window: bytes = b""
    start: int = 0

    @classmethod
    def of(cls, file: Any) -> HeaderFile | None:
        """Return an open file of h5py's; None if it grows, is not on a disk, or has addresses of another size."""
        pread = pread_of(file)
        if file.swmr_mode or pread is None:
            return None
        status = stat_of(file)
        if (by_position := cls._of_first_bytes(pread(WINDOW, 0), pread, status.st_size)) is not None:
            return by_position
        options = file.id.get_create_plist()
        if options.get_sizes() != (8, 8):  # of addresses and lengths
            return None
        version, user_block = options.get_version()[0], options.get_userblock()
        return cls(pread, status.st_size, version, user_block, file_format(file))

    @classmethod
    def by_position(cls, pread: Callable[[int, int], bytes], n_bytes: int) -> HeaderFile | None:
        """Return a file that the library would open, without opening it; None if only the library knows.

        Args:
            pread: reads bytes at a position.
            n_bytes: size of the file.
        """
        file = cls._of_first_bytes(pread(FIRST_BYTES, 0), pread, n_bytes)
        return file if file is not None and file.root is not None else None

    @classmethod
    def _of_first_bytes(cls, window: bytes, pread: Callable[[int, int], bytes], n_bytes: int) -> HeaderFile | None:
        """Return a file that has no user block and follows no format; None for others, and if that is not clear."""
        if window[: len(SIGNATURE)] != SIGNATURE or len(window) < MIN_SUPERBLOCK:
            return None
        version = window[8]
        if version > 3:
            return None
        sizes, base_at, root_at = SUPERBLOCKS[version]
        base, root = (NUMBER.unpack_from(window, at)[0] for at in (base_at, root_at))
        if window[sizes : sizes + 2] != b"\x08\x08" or base:
            return None
        file, is_plain = cls(pread, n_bytes, version, 0, None, None, window), _is_plain(window, n_bytes)
        try:
            for number, flags, data, _ in messages(file, root):
                if number == ATTRIBUTE_INFO:
                    return None
                if number == ATTRIBUTE and (flags & SHARED or _attribute_name(data)[0] in FORMATS):
                    return None
                is_plain = is_plain and flags <= CONSTANT
        except (OSError, ValueError, struct.error, IndexError, OverflowError):
            return None
        file.root = root if is_plain else None
        return file

    def has_bytes_of(self, header: ObjectHeader) -> bool:
        """Return whether the bytes of a contiguous array end before the file does; true for chunked arrays."""
        return header.place is None or header.place + self.user_block + header.n_bytes <= self.n_bytes

    def read(self, n_bytes: int, address: int) -> bytes:
        """Return bytes at an address, which is counted from the end of the user block; fewer at the file's end.

        Headers lie next to each other, so several are read at a time.
        """
        start = address + self.user_block - self.start
        if start < 0 or start + n_bytes > len(self.window):
            self.start, start = address + self.user_block, 0
            self.window = self.pread(max(n_bytes, WINDOW), self.start)
        return self.window[start : start + n_bytes]


def header_address(objno: tuple[int, int]) -> int:
    """Return where an object header is, from the number of the object in h5py's ``get_objinfo``."""
    low, high = objno
    return (high << 64) + low


def _is_plain(superblock: bytes, n_bytes: int) -> bool:
    """Return whether the library would open a file of version 0, and take all addresses from the file's start."""
    *versions, n_address, n_length, leaf, node, flags, base, free_space, end, driver, root = OLD.unpack_from(superblock)
    is_known = not any(versions) and n_address == n_length == 8 and leaf and node and not flags and not base
    return bool(is_known and free_space == driver == UNDEFINED and end <= n_bytes and root <= 1)


class ObjectHeader(NamedTuple):
    """The declarations of an object header about an array.

    Attributes:
        structure: equal for arrays with descriptions that differ only in the following.
        n_rows: length of axis 0; of an opaque scalar the number of its bytes.
        place: start of a contiguous array, from the end of the user block.
        n_bytes: bytes of a contiguous array.
        tree: start of the chunk index, if it is a B-tree of the older kind.
    """

    structure: tuple[Any, ...]
    n_rows: int
    place: int | None
    n_bytes: int
    tree: int | None = None

    @property
    def is_annotated(self) -> bool:
        """Whether the array has units or dimensions."""
        return any(name in self.structure for name in (*UNITS, SCALES))

    def has_same_row_bytes(self, other: ObjectHeader) -> bool:
        """Return whether a row takes as many bytes as one of another contiguous array; true for chunked arrays."""
        return self.n_bytes * other.n_rows == other.n_bytes * self.n_rows


class HeaderTemplate(NamedTuple):
    """A header in one piece, to recognize others of its structure by their bytes. This is faster than parsing them.

    Attributes:
        header: its declarations.
        fixed: runs of bytes that are equal in all of them: start, end, content.
        n_rows: where the length of axis 0 is, and its limit if that is the same number.
        limit: of axis 0, if it is another number.
        place: where a contiguous array's start and size are.
    """

    header: ObjectHeader
    fixed: tuple[tuple[int, int, bytes], ...]
    n_rows: tuple[int, ...]
    limit: int | None
    place: int

    @classmethod
    def of(cls, file: HeaderFile, address: int, header: ObjectHeader) -> HeaderTemplate | None:
        """Return the template of a header; None if it is in more than one piece, or of a scalar."""
        if OPAQUE_SCALAR in header.structure:
            return None
        n_rows: tuple[int, ...] = ()
        limit, place, at, fixed = None, 0, 0, []
        for number, _, data, start in messages(file, address):
            start -= address
            if number == CONTINUATION:
                return None
            if number in IRRELEVANT:
                varying = [(start, start + len(data))]
            elif number == DATASPACE:
                lengths_start = start + (8 if data[0] == 1 else 4)
                n_rows, limits_start = (lengths_start,), lengths_start + 8 * data[1]
                if data[2]:
                    limit = int.from_bytes(data[limits_start - start :][:8], "little")
                    if limit == header.n_rows:
                        n_rows, limit = (lengths_start, limits_start), None
                varying = [(position, position + 8) for position in n_rows]
            elif number == LAYOUT:
                place = start + _address_in(data)
                varying = [(place, place + (8 if header.place is None else 16))]
            else:
                varying = []
            for low, high in varying:
                fixed.append((at, low, file.read(low - at, address + at)))
                at = high
            end = start + len(data)
        fixed.append((at, end, file.read(end - at, address + at)))
        return cls(header, tuple(fixed), n_rows, limit, place)

    def read(self, file: HeaderFile, address: int) -> ObjectHeader | None:
        """Return the declarations of a header of this structure; None for others."""
        data = file.read(self.fixed[-1][1], address)
        if (file.version, file.user_block, file.format) != self.header.structure[:3]:
            return None
        for start, end, content in self.fixed:
            if data[start:end] != content:
                return None
        n_rows: int = NUMBER.unpack_from(data, self.n_rows[0])[0]
        if not n_rows or n_rows == self.limit or data[self.n_rows[-1] :][:8] != data[self.n_rows[0] :][:8]:
            return None
        if self.header.place is None:
            tree: int | None = None if self.header.tree is None else NUMBER.unpack_from(data, self.place)[0]
            return self.header._replace(n_rows=n_rows, tree=tree)
        place, n_bytes = PLACE.unpack_from(data, self.place)
        if place == UNDEFINED or not n_bytes:
            return None
        return ObjectHeader(self.header.structure, n_rows, place, n_bytes)


def messages(file: HeaderFile, address: int) -> Iterator[tuple[int, int, bytes, int]]:
    """Yield number, flags, content and address of all messages of an object header, block by block.

    Raises:
        ValueError: the header is damaged.
    """
    head = file.read(32, address)
    is_new = head[:4] == b"OHDR"
    if is_new:
        has_times, has_counts, width = head[5] & 0x20, head[5] & 0x10, 1 << (head[5] & 3)
        first = 6 + (16 if has_times else 0) + (4 if has_counts else 0)
        blocks = [(address + first + width, int.from_bytes(head[first : first + width], "little"))]
        header = struct.Struct("<BHBxx" if head[5] & 4 else "<BHB")  # number, bytes, flags, order of creation
    elif head[:1] != b"\x01":
        raise ValueError("the object header is damaged")
    else:
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
        header = struct.Struct("<HHBxxx")
    for _ in range(MAX_BLOCKS):
        if not blocks:
            return
        place, n_bytes = blocks.pop(0)
        block, at = file.read(min(n_bytes, MAX_HEADER), place), 0
        while at + header.size <= len(block):
            number, size, flags = header.unpack_from(block, at)
            at += header.size + size
            data = block[at - size : at]
            yield number, flags, data, place + at - size
            if number == CONTINUATION:
                start, length = struct.unpack_from("<QQ", data)
                # Later blocks of the newer format have a signature before their messages, and a checksum after them.
                blocks.append((start + 4, max(0, length - 8)) if is_new else (start, length))
        if at > len(block) or len(block) < n_bytes:
            break
    raise ValueError("the object header is damaged")


def read_header(file: HeaderFile, address: int) -> ObjectHeader | None:
    """Return the declarations of a header; None if a description depends on bytes outside of it."""
    parts: dict[int, Any] = {}
    attributes = []
    is_checked = file.read(4, address) == b"OHDR"
    for number, flags, data, _ in messages(file, address):
        if number in IRRELEVANT:
            continue
        if flags & SHARED:
            return None
        if number == ATTRIBUTE:
            attributes.append(_packing_attribute(data))
        elif number == ATTRIBUTE_INFO:  # attributes that lie in a heap instead of the header
            if struct.unpack_from("<Q", data, 4 if data[1] & 1 else 2)[0] != UNDEFINED:
                return None
        elif number in parts or number not in (DATASPACE, DATATYPE, OLD_FILL, FILL, LAYOUT, FILTERS):
            return None  # external storage, or what a newer library writes
        else:
            parts[number] = data
    tree = _tree(parts[LAYOUT])
    place, n_bytes, parts[LAYOUT] = _place(parts[LAYOUT])
    if _is_opaque_scalar(parts):
        if place is None or n_bytes != int.from_bytes(parts[DATATYPE][4:8], "little"):
            return None
        scalar_structure = (file.version, file.user_block, file.format, is_checked, OPAQUE_SCALAR, parts[LAYOUT])
        return ObjectHeader(scalar_structure, n_bytes, place, n_bytes)
    n_rows, parts[DATASPACE] = _dataspace(parts[DATASPACE])
    structure = (file.version, file.user_block, file.format, is_checked, *sorted(parts.items()), *attributes)
    return ObjectHeader(structure, n_rows, place, n_bytes, tree)


def units_at(file: HeaderFile, address: int, *, with_scales: bool = True) -> str | None:
    """Return the text of the attribute with an array's units; None without one.

    Args:
        file: the file.
        address: of the array's header.
        with_scales: whether attached dimension scales matter, which only the library reads.

    Raises:
        ValueError: only the library can read it.
    """
    found = dict[bytes, str]()
    for number, flags, data, _ in messages(file, address):
        if number == ATTRIBUTE_INFO:
            raise ValueError("attributes may lie in a heap")
        if number == ATTRIBUTE and (name := _attribute_name(data)[0]) in (*UNITS, SCALES):
            if name == SCALES and not with_scales:
                continue
            if name == SCALES or flags & SHARED:
                raise ValueError("the attribute has references, or lies elsewhere")
            found[name] = _text_of_attribute(file, data)
    return next((found[name] for name in UNITS if name in found), None)


def _text_of_attribute(file: HeaderFile, data: bytes) -> str:
    """Return the text in an attribute's message, or in the heap that it refers to."""
    version, flags, n_name, n_kind, n_space = struct.unpack_from("<BBHHH", data)
    padding = 8 if version == 1 else 1
    kind_at = (9 if version == 3 else 8) + -(-n_name // padding) * padding
    space_at = kind_at + -(-n_kind // padding) * padding
    value = data[space_at + -(-n_space // padding) * padding :]
    kind, space = data[kind_at : kind_at + n_kind], data[space_at : space_at + n_space]
    if (flags and version > 1) or space[1]:
        raise ValueError("the attribute has several values, or a shared type")
    if kind[0] & 15 == TEXT:
        return value[: int.from_bytes(kind[4:8], "little")].decode(errors="replace")
    if kind[0] & 15 != LISTS or kind[1] & 15 != 1:
        raise ValueError("the attribute is no text")
    n_bytes, heap, number = HEAP_REFERENCE.unpack_from(value)
    signature, size = HEAP_HEAD.unpack(file.read(HEAP_HEAD.size, heap))
    objects, at = file.read(min(size, MAX_HEADER), heap), HEAP_HEAD.size
    while signature == b"GCOL" and at + HEAP_OBJECT.size <= len(objects):
        found, size = HEAP_OBJECT.unpack_from(objects, at)
        at += HEAP_OBJECT.size
        if found == number and n_bytes <= size:
            return objects[at : at + n_bytes].decode(errors="replace")
        if not found:
            break
        at += -(-size // 8) * 8
    raise ValueError("the heap of the text is damaged")


def _is_opaque_scalar(parts: dict[int, Any]) -> bool:
    version, rank, _, kind = parts[DATASPACE][:4]
    is_scalar = not rank and (version == 1 or (version == 2 and kind == 0))
    return bool(is_scalar and parts[DATATYPE][0] & 15 == OPAQUE and FILTERS not in parts)


def _dataspace(data: bytes) -> tuple[int, tuple[Any, ...]]:
    """Return the number of rows, and the other axes with all limits."""
    version, rank, flags = data[:3]
    if version not in (1, 2) or not rank or flags not in (0, 1) or (version == 2 and data[3] != 1):
        raise ValueError("the dataspace has no rows, or an unknown version")
    start = 8 if version == 1 else 4
    sizes = struct.unpack_from(f"<{rank}Q", data, start)
    limits = struct.unpack_from(f"<{rank}Q", data, start + 8 * rank) if flags else sizes
    if not all(sizes):
        raise ValueError("the array is empty")
    return sizes[0], (sizes[1:], limits[1:], "as it is" if limits[0] == sizes[0] else limits[0])


def _place(data: bytes) -> tuple[int | None, int, bytes]:
    """Return where a contiguous array lies, its bytes, and the rest of a storage layout."""
    at = _address_in(data)
    if data[1] == CONTIGUOUS:
        address, n_bytes = PLACE.unpack_from(data, at)
        if address == UNDEFINED or not n_bytes:
            raise ValueError("nothing was written")
        return address, n_bytes, data[:at]
    return None, 0, data[:at] + (data[at + 8 : at + 8 + 4 * data[2]] if data[0] == 3 else b"")


def _tree(data: bytes) -> int | None:
    """Return where a storage layout says that a B-tree of chunks is; None if it says nothing of the kind."""
    if tuple(data[:2]) != (3, CHUNKED):
        return None
    address: int = NUMBER.unpack_from(data, _address_in(data))[0]
    return address


def _address_in(data: bytes) -> int:
    """Return where a storage layout has the address of a contiguous array, or of a chunk index."""
    version, kind = data[:2]
    if version in (3, 4, 5) and kind == CONTIGUOUS:  # version, class, address, size
        return 2
    if version == 3 and kind == CHUNKED:  # version, class, axes, address, chunk
        return 3
    if version in (4, 5) and kind == CHUNKED:  # version, class, flags, axes, bytes of a number, chunk, index, address
        end = 5 + data[3] * data[4]
        return end + 1 + INDEX_SETTINGS[data[end]]
    raise ValueError("the storage layout is another one")


def _attribute_name(data: bytes) -> tuple[bytes, int]:
    """Return the name in an attribute's message, and its end, padding left out."""
    version, n_bytes = struct.unpack_from("<BxH", data)
    if version not in (1, 2, 3):
        raise ValueError("the attribute has an unknown version")
    start = 9 if version == 3 else 8
    return data[start : start + n_bytes].rstrip(b"\0"), start + n_bytes


def _packing_attribute(data: bytes) -> bytes | None:
    """Return an attribute that descriptions depend on, or its name; None for others."""
    name, end = _attribute_name(data)
    if name in MARKERS or name in UNITS:
        return name
    if name not in ATTRIBUTES and name != MATLAB_EMPTY:
        return None
    version, flags = data[:2]
    kind = (end + 7) // 8 * 8 if version == 1 else end
    if (flags and version > 1) or data[kind] & 15 not in SIMPLE:
        raise ValueError("the attribute's value lies elsewhere")
    return data

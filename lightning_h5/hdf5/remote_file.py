"""An object of a store as a file for the HDF5 library, which reads its tables one after another.

Each read of an object takes as long as a packet to the store and back. So where the library reads a node of a B-tree,
all nodes below it are fetched at once. The library still parses them: a wrong guess costs a useless request.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import H5FileError
from ..staging import ObjectStatus, is_url, mirror_of, object_status, shown_url
from .garbage import guard_collections, inside_library
from .metadata_index import MetadataIndex
from .paths import SIGNATURE, SIGNATURE_OFFSETS

__all__ = [
    "Read",
    "RecordedFile",
    "RemoteFile",
    "close_at_exit",
    "opened",
    "remote_file_of",
    "sample_content",
    "sampled_identity",
    "size_of",
    "status_of",
]

Read: TypeAlias = Callable[[int, int], bytes]
"""Returns so many bytes from a place, as ``os.pread`` does; fewer at the end."""

NODE = struct.Struct("<4sBBH16x")  # signature, kind, level, entries; then both neighbors
GROUP, CHUNKS = 0, 1  # kinds of B-trees
MAX_CHILDREN = 1 << 16
LEAF_BYTES = 328  # of a node with names of a group, as the library makes them
UNDEFINED = (1 << 64) - 1
MAX_PLACE = 1 << 48
BLOCK_BYTES = 1 << 16  # fetched of a block of an extensible array, whose size its place does not tell
SAMPLES = 16  # pieces of a file's content in its identity
SAMPLE_BYTES = 4096


class _FileByPlace(io.RawIOBase):
    """A file for the HDF5 library, made of a function that reads by place.

    Args:
        n_bytes: its size.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self._at = n_bytes, 0

    def pread(self, n_bytes: int, start: int) -> bytes:
        """Return bytes from a place, as ``os.pread`` does."""
        raise NotImplementedError

    def readinto(self, memory: Any) -> int:
        """Read from the present position on, as the library asks."""
        view = memoryview(memory).cast("B")
        with inside_library():
            data = self.pread(len(view), self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.n_bytes}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


class RemoteFile(_FileByPlace):
    """An object of a store, read through its mirror.

    Args:
        url: the object.
        status: its state; None asks the store.
    """

    def __init__(self, url: str, status: ObjectStatus | None = None) -> None:
        self.url = url
        self.status = object_status(url) if status is None else status
        super().__init__(self.status.st_size)
        self.mirror = mirror_of(url, self.status)
        tag = hashlib.sha256(repr(self.status).encode()).hexdigest()[:8]
        self.name = f"{shown_url(url)}#{tag}".encode("ascii", "backslashreplace").decode()
        self.index: MetadataIndex | None = None  # of published metadata
        self.is_paged = False
        self._base = 0  # bytes before the library's address space
        guard_collections()
        _open[self.name] = self

    def __repr__(self) -> str:
        return self.name  # the library takes it as the name of the file

    def pread(self, n_bytes: int, start: int) -> bytes:
        """Return bytes from a place, as ``os.pread`` does.

        Raises:
            H5FileError: the object cannot be read.
        """
        if self.index is not None and (piece := self.index.find(n_bytes, start)) is not None:
            return piece
        if self.is_paged and start < self.n_bytes:
            size = min(n_bytes, self.n_bytes - start)
            self.mirror.stage(np.array([start]), np.array([size]), (0, self.n_bytes))
        data = self.mirror.pread(n_bytes, start)
        if start in SIGNATURE_OFFSETS and data.startswith(SIGNATURE):
            self._base = start
        self._fetch_below(data, n_bytes)
        return data

    def fetch(self, places: Sequence[int], n_bytes: int) -> None:
        """Fetch pieces of a size, all at once."""
        self.mirror.stage(np.array(places), np.full(len(places), n_bytes))

    def _fetch_below(self, node: bytes, n_bytes: int) -> None:
        """Fetch all nodes below a node of a B-tree, a level at a time. Each once: a damaged tree can be a circle."""
        nodes, fetched = [node], set[int]()
        while nodes:
            places, size, are_nodes = dict[int, None](), 0, True
            for parent in nodes:
                children, size, are_nodes = _children(parent, n_bytes)
                places |= dict.fromkeys(self._base + place for place in children)
            new_places = [place for place in places if 0 < place < self.n_bytes - size and place not in fetched]
            if not new_places:
                return
            fetched.update(new_places)
            self.fetch(new_places, size)
            nodes = [self.mirror.pread(size, place) for place in new_places] if are_nodes else []

    def close(self) -> None:
        """Close the mirror. There is none if the constructor raised; Python closes such files as well."""
        if not self.closed and hasattr(self, "mirror"):
            self.mirror.close()
        super().close()


class RecordedFile(_FileByPlace):
    """A file that records each read.

    Args:
        n_bytes: its size.
        pread: reads it.
        read: the list that place and size of each read are appended to.
    """

    def __init__(self, n_bytes: int, pread: Read, read: list[tuple[int, int]]) -> None:
        super().__init__(n_bytes)
        self._pread, self._read = pread, read

    def __repr__(self) -> str:
        return os.devnull  # the library's name of the file, whose status is asked for

    def pread(self, n_bytes: int, start: int) -> bytes:
        """Return bytes from a place, and note it."""
        data = self._pread(n_bytes, start)
        self._read.append((start, len(data)))
        return data


def _children(node: bytes, n_bytes: int) -> tuple[list[int], int, bool]:
    """Return where the nodes below a node of a B-tree are, their size, and whether they are such nodes themselves.

    Args:
        node: bytes that may be such a node.
        n_bytes: bytes that the library asked for: the size of a node.
    """
    if len(node) < NODE.size:
        return [], 0, False
    if node[:4] in (b"EAIB", b"EASB"):
        return _blocks_of_array(node), BLOCK_BYTES, False
    signature, kind, level, n = NODE.unpack_from(node)
    if signature != b"TREE" or kind not in (GROUP, CHUNKS) or (kind == CHUNKS and level == 0):
        return [], 0, False
    width = _key_bytes(kind, n_bytes)
    if width is None or len(node) < NODE.size + n * (width + 8):
        return [], 0, False
    at = range(NODE.size + width, NODE.size + n * (width + 8), width + 8)
    places = [place for start in at if (place := int.from_bytes(node[start : start + 8], "little")) != UNDEFINED]
    return places[:MAX_CHILDREN], n_bytes if level else LEAF_BYTES, level > 0


def _blocks_of_array(block: bytes) -> list[int]:
    """Return where blocks of an extensible array are, which newer files have in the place of a B-tree.

    Their places end the block that names them, before its checksum of four bytes.
    """
    words = np.frombuffer(block[14 + (len(block) - 18) % 8 : -4], "<u8")[::-1]
    is_place = (words == UNDEFINED) | (words < MAX_PLACE)
    n = len(words) if is_place.all() else int(np.argmin(is_place))
    return [int(word) for word in words[:n] if word != UNDEFINED]


def _key_bytes(kind: int, n_bytes: int) -> int | None:
    """Return the bytes of a key, from the size of a node: it has room for an even number of entries, and a key more.

    A key of a tree of chunks has an offset for each axis and one more. The library's default is 64 chunks a node.
    """
    if kind == GROUP:
        return 8
    room, entries = n_bytes - NODE.size, 64
    width, remainder = divmod(room - 8 * entries, entries + 1)
    return width if not remainder and width >= 16 and width % 8 == 0 else None


class Opened(NamedTuple):
    """A file or an object open for reading.

    Attributes:
        n_bytes: its size.
        pread: reads bytes at a position.
        fetch: fetches pieces of a size at once, before they are read one after another.
    """

    n_bytes: int
    pread: Read
    fetch: Callable[[Sequence[int], int], None]


_open: weakref.WeakValueDictionary[str, RemoteFile] = weakref.WeakValueDictionary()
_files: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(file: Any) -> None:
    """Close a file of h5py's before Python exits: the library would call Python after its end, and crash."""
    _files.add(file)


@atexit.register
def _close_all() -> None:
    for file in list(_files):
        file.close()


def remote_file_of(file: Any) -> RemoteFile | None:
    """Return the object that an open file of h5py's is read from; None for a file on a disk."""
    return _open.get(file.filename)


def status_of(path: str) -> os.stat_result | ObjectStatus:
    """Return the present status of a file or an object.

    Raises:
        OSError: it is not there.
    """
    return object_status(path) if is_url(path) else os.stat(path)


def size_of(path: str) -> int:
    """Return the bytes of a file or an object.

    Raises:
        OSError: it is not there.
    """
    return status_of(path).st_size


@contextmanager
def opened(path: str, status: ObjectStatus | None = None) -> Iterator[Opened]:
    """Open a file or an object for reading by position.

    Args:
        path: the file.
        status: state of an object; None asks the store.

    Raises:
        H5FileError: it cannot be opened.
    """
    if is_url(path):
        remote = next((file for file in list(_open.values()) if file.url == path and not file.closed), None)
        if remote is not None:
            yield Opened(remote.n_bytes, remote.pread, remote.fetch)
            return
        with RemoteFile(path, status) as remote:
            yield Opened(remote.n_bytes, remote.pread, remote.fetch)
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise H5FileError(
            f"{path!r} cannot be opened: {error.strerror}. Check the path and its permissions."
        ) from error
    try:
        yield Opened(os.fstat(fd).st_size, partial(os.pread, fd), lambda places, n_bytes: None)
    finally:
        os.close(fd)


def sample_content(digest: Any, path: str, status: ObjectStatus | None = None) -> None:
    """Add the size and samples of the content of a file or an object to a digest; at most 64 KiB.

    Args:
        digest: of ``hashlib``.
        path: the file.
        status: see ``opened``.
    """
    with opened(path, status) as (n_bytes, pread, fetch):
        digest.update(str(n_bytes).encode())
        places = [max(0, n_bytes - SAMPLE_BYTES) * i // (SAMPLES - 1) for i in range(SAMPLES)]
        if n_bytes <= SAMPLES * SAMPLE_BYTES:
            content = pread(n_bytes, 0)
            digest.update(b"".join([content[at : at + SAMPLE_BYTES] for at in places]))
        else:
            fetch(places, SAMPLE_BYTES)
            for at in places:
                digest.update(pread(SAMPLE_BYTES, at))


def sampled_identity(path: str) -> str:
    """Return a digest of the size and samples of the content of a file or an object."""
    digest = hashlib.sha256()
    sample_content(digest, path)
    return digest.hexdigest()[:32]

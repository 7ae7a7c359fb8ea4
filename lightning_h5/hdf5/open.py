"""Open and create HDF5 files. Every file is opened here, and errors of h5py become errors of this package."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BytesIO
from typing import Any

import h5py

from ..errors import H5CorruptError, H5Error, H5FileError, H5ValueError
from ..staging import INDEX_SUFFIX, ObjectStatus, is_url, published_index, shown_url
from .file_kinds import HEAD_BYTES, TAR_MARK, advice_about
from .metadata_index import MetadataIndex
from .paths import SIGNATURE
from .remote_file import Read, RecordedFile, RemoteFile, close_at_exit, sampled_identity

_log = logging.getLogger(__name__)

__all__ = [
    "FAULTS",
    "address_of",
    "before_opening",
    "check_regular",
    "create_h5",
    "h5_in_memory",
    "is_in_other_file",
    "object_address",
    "open_h5",
    "open_recorded",
    "translate_h5py_errors",
]

FAULTS = (KeyError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions of h5py for files that are damaged, or have contents that h5py does not support."""

PAGE_BYTES = 1 << 20
"""Page size of a file for an object store; metadata shares pages, and larger chunks have their own pages."""

before_opening: list[Callable[[str], None]] = []
"""Called with the path of each file before it is opened."""


@contextmanager
def translate_h5py_errors(path: str, what: str) -> Iterator[None]:
    """Convert exceptions of h5py inside the block to an ``H5CorruptError`` that names the file.

    Args:
        path: the file.
        what: the subject of the message, such as a quoted key.

    Raises:
        H5CorruptError: an exception was raised, except for errors of this package and a lack of memory.
    """
    try:
        yield
    except (H5Error, MemoryError):  # a lack of memory does not mean damage
        raise
    except Exception as error:  # damage can raise any exception
        raise H5CorruptError(
            f"{what} in {path!r} cannot be read: {type(error).__name__}: {error}. The file is damaged there; copy it "
            "again, and run `lightning-h5 check` to find other damage."
        ) from error


def open_h5(
    path: str,
    *,
    rdcc_nbytes: int | None = None,
    rdcc_nslots: int | None = None,
    rdcc_w0: float | None = None,
    swmr: bool = False,
    status: ObjectStatus | None = None,
    takes_index: bool = False,
) -> Any:
    """Open an HDF5 file for reading.

    Args:
        path: a regular file, or the URL of an object of a store.
        rdcc_nbytes: bytes of HDF5's chunk cache for each array; None for the library's default.
        rdcc_nslots: number of slots of that cache.
        rdcc_w0: preference for evicting chunks that were read completely, 0 to 1.
        swmr: open a file that is being written in single-writer/multiple-reader mode.
        status: the expected state of an object; None requests the present state from the store.
        takes_index: use an index that is stored next to an object, if any.

    Raises:
        H5FileError: the file is missing, not HDF5, truncated, locked or unreadable.
    """
    for call in before_opening:
        call(path)
    cache = {"rdcc_nbytes": rdcc_nbytes, "rdcc_nslots": rdcc_nslots, "rdcc_w0": rdcc_w0}
    if is_url(path):
        return _open_object(path, status, swmr=swmr, takes_index=takes_index or status is None, **cache)
    check_regular(path)
    try:
        flags = h5py.h5f.ACC_RDONLY | (h5py.h5f.ACC_SWMR_READ if swmr else 0)
        file = _File(h5py.h5f.open(os.fsencode(path), flags, _access(rdcc_nbytes, rdcc_nslots, rdcc_w0)))
        if file.userblock_size == HEAD_BYTES:
            _refuse_archive(path, file)
        return file
    except H5Error:
        raise
    except OSError as error:
        raise H5FileError(_why_not_open(path, error)) from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise H5CorruptError(
            f"{path!r} cannot be opened: {type(error).__name__}: {error}. The file is damaged; copy it again."
        ) from error


@lru_cache(maxsize=16)
def _access(rdcc_nbytes: int | None, rdcc_nslots: int | None, rdcc_w0: float | None) -> Any:
    """Return how files are opened, as h5py does it: made once, not for each of thousands of files."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
    unused, *defaults = access.get_cache()
    given = (rdcc_nslots, rdcc_nbytes, rdcc_w0)
    settings = [default if value is None else value for value, default in zip(given, defaults, strict=True)]
    access.set_cache(unused, *settings)
    return access


def _open_object(url: str, status: ObjectStatus | None, *, swmr: bool, takes_index: bool, **cache: Any) -> Any:
    if swmr:
        raise H5ValueError(
            f"files.swmr was given for {shown_url(url)!r}, but objects of a store have no live writer. Remove swmr."
        )
    remote = RemoteFile(url, status)
    if takes_index:
        remote.index = _index_of(url, remote.status.st_size)
    try:
        file = _File(remote, "r", **cache)
    except H5Error:  # of the store
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        head, n_bytes = remote.pread(8, 0), remote.status.st_size
        raise H5FileError(
            f"{shown_url(url)!r} cannot be opened as an HDF5 file: it has {n_bytes:,} bytes and begins with {head!r} "
            f"({type(error).__name__}: {error}). Check that it is an HDF5 file, uploaded completely."
        ) from error
    strategy = file.id.get_create_plist().get_file_space_strategy()[0]
    remote.is_paged = strategy == h5py.h5f.FSPACE_STRATEGY_PAGE
    close_at_exit(file)
    return file


def open_recorded(n_bytes: int, pread: Read, read: list[tuple[int, int]]) -> Any:
    """Open a file or an object, and record the place and size of each read.

    Args:
        n_bytes: size of the file.
        pread: reads from the file.
        read: list to append the place and size of each read to.

    Raises:
        H5FileError: the file is not HDF5.
    """
    try:
        file = _File(RecordedFile(n_bytes, pread, read), "r")
    except H5Error:  # of a store
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise H5FileError(
            f"a file of {n_bytes:,} bytes cannot be opened as HDF5: {error}. Check that it is an HDF5 file."
        ) from error
    close_at_exit(file)
    return file


def _index_of(url: str, n_bytes: int) -> MetadataIndex | None:
    """Return the index that is stored next to an object, if it belongs to this state."""
    if (data := published_index(url, n_bytes)) is None:
        return None
    name = shown_url(url) + INDEX_SUFFIX
    try:
        index = MetadataIndex.from_bytes(data, name)
    except H5FileError as error:
        _log.warning("%s It is not used.", error)
        return None
    if index.n_bytes == n_bytes and index.identity == sampled_identity(url):
        return index
    _log.warning("%r belongs to another state of the file and is not used. Write it again: `lightning-h5 index`.", name)
    return None


class _File(h5py.File):  # type: ignore[misc]  # h5py has no types
    """A file open for reading. Closing a damaged file can raise, which must not hide an earlier error."""

    def close(self) -> None:
        """Close the file."""
        with suppress(RuntimeError, OSError):
            super().close()


def check_regular(path: str) -> None:
    """Check that a file exists and is a regular file: opening a pipe would wait for a writer.

    Raises:
        H5FileError: the path is not a regular file, or does not exist.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise H5FileError(
            f"{path!r} cannot be opened: {error.strerror}. Check the path and its permissions."
        ) from error
    if not stat.S_ISREG(mode):
        raise H5FileError(f"{path!r} is not a regular file. Pass the path of an HDF5 file.")


def _refuse_archive(path: str, file: Any) -> None:
    """Raise an ``H5FileError`` for a tar archive: the library finds the first file in it, and ignores the others."""
    with open(path, "rb") as archive:
        archive.seek(TAR_MARK[0])
        is_archive = archive.read(len(TAR_MARK[1])) == TAR_MARK[1]
    if is_archive:
        file.close()
        raise H5FileError(
            f"{path!r} is a tar archive, of which the HDF5 library reads only the first file. Unpack it: `tar xf`."
        )


def _why_not_open(path: str, error: OSError) -> str:
    text = str(error)
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if "truncated" in text:
        return (
            f"{path!r} is truncated: it has {size:,} bytes, fewer than its header declares ({text}). "
            "Copy or download it again."
        )
    if "signature not found" in text:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
        return f"{path!r} is not an HDF5 file: it has {size:,} bytes and begins with {head[:8]!r}. {advice_about(head)}"
    if error.errno in (11, 35, 37, 524) or "unable to lock file" in text:
        lock = os.environ.get("HDF5_USE_FILE_LOCKING")
        return (
            f"{path!r} cannot be locked for reading ({text}); HDF5_USE_FILE_LOCKING is {lock!r}. "
            "Close the program that writes it, or, on a file system without locks, "
            "set HDF5_USE_FILE_LOCKING=FALSE before Python starts."
        )
    if "already open for write" in text or "consistency flags" in text:
        return (
            f"{path!r} is marked as being written to: a program writes it now, or ended without closing it ({text}). "
            "Wait for that program, open it with files=FileOptions(swmr=True) if it writes in that mode, write the "
            "file again, or, if it is known to be whole, run `h5clear -s` on it."
        )
    if error.errno == errno.EIO or f"errno = {errno.EIO}," in text:
        return (
            f"{path!r} cannot be opened: {os.strerror(errno.EIO)}. Check the disk or the network file system, then "
            "start again."
        )
    if error.errno is None:
        return (
            f"{path!r} cannot be opened: {text}. It is damaged, or of a newer format than this HDF5 library; copy it "
            "again."
        )
    if error.errno == 24:
        return f"{path!r} cannot be opened: too many open files ({text}). Raise `ulimit -n`."
    return f"{path!r} cannot be opened: {text}. Check its permissions, or run `h5dump -H` on it."


def create_h5(path: str, *, like: Any = None, checked: bool = False, paged: bool = False) -> Any:
    """Create an HDF5 file, which must not exist.

    Args:
        path: the file.
        like: an open file; the new file has the same format version, user block size, file space strategy and creation
            order of the root group.
        checked: write metadata with checksums, in the format of HDF5 1.10 (see ``INTEGRITY``).
        paged: store metadata together, in pages of 1 MiB, which also needs the format of HDF5 1.10. A user block then
            has a page of its own.

    Raises:
        H5FileError: the file exists, or its folder is missing, full or not writable.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    lowest = max(_lowest_version(like), int(h5py.h5f.LIBVER_V110) if checked or paged else 0)
    access.set_libver_bounds(lowest, h5py.h5f.LIBVER_LATEST)
    options = None
    if like is not None:
        options, root = like.id.get_create_plist(), like["/"].id.get_create_plist()
        options.set_link_creation_order(root.get_link_creation_order())
        options.set_attr_creation_order(root.get_attr_creation_order())
    if paged:
        options = h5py.h5p.create(h5py.h5p.FILE_CREATE) if options is None else options
        options.set_file_space_strategy(h5py.h5f.FSPACE_STRATEGY_PAGE, False, 1)
        options.set_file_space_page_size(PAGE_BYTES)
        if user_block := options.get_userblock():  # the library requires whole pages
            options.set_userblock(max(user_block, PAGE_BYTES))
    existed = os.path.lexists(path)  # on a full disk an empty file is left
    try:
        return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fcpl=options, fapl=access))
    except OSError as error:
        if existed or isinstance(error, FileExistsError):
            raise H5FileError(f"{path!r} exists already. Remove it, or choose another name.") from error
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise H5FileError(
            f"{path!r} cannot be created: {reason}. Check that its folder exists and is writable, "
            "and that the disk is not full."
        ) from error


def _lowest_version(like: Any) -> int:
    """Return the lowest format version for a copy of a file: its superblock's version, but at least HDF5 1.8.

    Files of older formats can contain newer objects, such as attributes above 64 KiB.
    """
    if like is None:
        return int(h5py.h5f.LIBVER_EARLIEST)
    with open(like.filename, "rb") as file:
        file.seek(like.userblock_size + len(SIGNATURE))
        version = file.read(1)[0]
    return int(h5py.h5f.LIBVER_V18 if version <= 2 else h5py.h5f.LIBVER_V110)


def h5_in_memory(**options: Any) -> Any:
    """Create a file in memory, to find out how the HDF5 library behaves.

    Args:
        options: options of ``h5py.File``.
    """
    return h5py.File(BytesIO(), "w", **options)


def object_address(item: Any) -> tuple[Any, Any]:
    """Return the number of an object's file, and its address in the file, which identify the object.

    ``H5Oget_info`` returns the same, but also reads the chunk index, which ends the process if it is damaged.

    Args:
        item: h5py's file, group, array or named datatype.
    """
    return address_of(item.id)


def address_of(item_id: Any) -> tuple[Any, Any]:
    """Return ``object_address`` of an open low-level object."""
    if isinstance(item_id, h5py.h5t.TypeID):  # has no chunk index
        info = h5py.h5o.get_info(item_id)
        return (info.fileno, 0), (info.addr, 0)
    info = h5py.h5g.get_objinfo(item_id)
    return info.fileno, info.objno


def is_in_other_file(file: Any, item: Any) -> bool:
    """Return whether an object is in a file other than the opened one."""
    return bool(object_address(item)[0] != object_address(file)[0])

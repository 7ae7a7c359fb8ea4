"""The one door: every file that is opened and every array that is looked up passes here.

An HDF5 file can name other files as its own content (external links, external storage, virtual arrays).
These are refused here unless the user allows them, for every component of a path: a leaf that looks
harmless may hang under a group that leaves the file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from typing import Any

import h5py

from ..errors import H5CorruptError, H5FileError, H5KeyError, H5ValueError, listing
from ..options import FileOptions
from .checks import check_sizes, refuse_library
from .contents import list_arrays, resolve_path
from .dtypes import numpy_dtype
from .h5py_errors import translate_h5py_errors
from .links import foreign_sources, is_foreign, own_sources, refuse_foreign
from .paths import SIGNATURE

__all__ = ["ArrayHandle", "before_opening", "create_h5", "find_array", "h5_in_memory", "open_h5", "skipped_bytes"]

_DEFAULTS = FileOptions()

MAX_LEVELS = 16
"""Virtual arrays may be made of virtual ones, so often."""

MAX_READS = 1_000_000
"""Pieces of others that a virtual array may be made of, in all: what HDF5 reads for it grows with each level."""


@dataclass(frozen=True)
class ArrayHandle:
    """An open array, the member of its rows that the key ends in, if any, and whether it lies in another file.

    ``file`` is the file that it was found from; None is its own.
    """

    array: Any
    members: tuple[str, ...] = ()
    foreign: bool = False
    file: Any = None


before_opening: list[Callable[[str], None]] = []
"""Called with the path of each file before it is opened."""


def open_h5(
    path: str,
    *,
    rdcc_nbytes: int | None = None,
    rdcc_nslots: int | None = None,
    rdcc_w0: float | None = None,
    swmr: bool = False,
) -> Any:
    """Opens an HDF5 file for reading.

    Args:
        path: a regular file.
        rdcc_nbytes: bytes of HDF5's chunk cache for each array; None leaves the library's default.
        rdcc_nslots: slots of that cache.
        rdcc_w0: how eagerly wholly read chunks leave it, 0 to 1.
        swmr: the file has a live writer in single-writer/multiple-reader mode.

    Raises:
        H5FileError: the file is missing, not HDF5, truncated, locked or not readable.
    """
    for call in before_opening:
        call(path)
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise H5FileError(
            f"{path!r} cannot be opened: {error.strerror}. Check the path and its permissions."
        ) from error
    if not stat.S_ISREG(mode):
        raise H5FileError(f"{path!r} is not a regular file. Pass the path of an HDF5 file.")
    try:
        return _File(path, "r", swmr=swmr, rdcc_nbytes=rdcc_nbytes, rdcc_nslots=rdcc_nslots, rdcc_w0=rdcc_w0)
    except OSError as error:
        raise H5FileError(_why_not_open(path, error)) from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise H5CorruptError(
            f"{path!r} cannot be opened: {type(error).__name__}: {error}. The file is damaged; copy it again."
        ) from error


class _File(h5py.File):  # type: ignore[misc]  # h5py has no types
    """A file that is read. A damaged one may complain when it is closed, which must not hide what went wrong before."""

    def close(self) -> None:
        """Closes it."""
        with suppress(RuntimeError, OSError):
            super().close()


def _why_not_open(path: str, error: OSError) -> str:
    text = str(error)
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if "truncated" in text:
        return (
            f"{path!r} is truncated: it has {size:,} bytes, fewer than its header says ({text}). "
            "Copy or download it again."
        )
    if "signature not found" in text:
        with open(path, "rb") as file:
            first = file.read(8)
        return (
            f"{path!r} is not an HDF5 file: it has {size:,} bytes and begins with {first!r}. "
            "Pass an HDF5 file, or check that the copy of this one is complete."
        )
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


def create_h5(path: str, *, like: Any = None, checked: bool = False) -> Any:
    """Creates an HDF5 file, which must not exist.

    Args:
        path: where.
        like: an open file whose format version, user block size, file space strategy and order of the root group the
            new one gets, so that who can read the one can read the other.
        checked: the file's own tables get checksums, which HDF5 1.10 and newer can read (``INTEGRITY`` says why).

    Raises:
        H5FileError: it is there already, or its folder is missing, full or may not be written to.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    lowest = max(_lowest_version(like), int(h5py.h5f.LIBVER_V110) if checked else 0)
    access.set_libver_bounds(lowest, h5py.h5f.LIBVER_LATEST)
    options = None
    if like is not None:
        options, root = like.id.get_create_plist(), like["/"].id.get_create_plist()
        options.set_link_creation_order(root.get_link_creation_order())
        options.set_attr_creation_order(root.get_attr_creation_order())
    existed = os.path.lexists(path)  # a full disk leaves an empty file
    try:
        return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fcpl=options, fapl=access))
    except OSError as error:
        if existed or isinstance(error, FileExistsError):
            raise H5FileError(f"{path!r} is there already. Remove it, or name another file.") from error
        why = os.strerror(error.errno) if error.errno else str(error)
        raise H5FileError(
            f"{path!r} cannot be created: {why}. Check that its folder is there, that you may write to it, and that "
            "there is room."
        ) from error


def _lowest_version(like: Any) -> int:
    """The oldest format that a file like this one may have: that of its superblock, or of HDF5 1.8.

    Objects of a file in an older format may be newer than it, such as those with attributes above 64 KiB.
    """
    if like is None:
        return int(h5py.h5f.LIBVER_EARLIEST)
    with open(like.filename, "rb") as file:
        file.seek(like.userblock_size + len(SIGNATURE))
        version = file.read(1)[0]
    return int(h5py.h5f.LIBVER_V18 if version <= 2 else h5py.h5f.LIBVER_V110)


def find_array(file: Any, key: str, trust: FileOptions = _DEFAULTS) -> ArrayHandle:
    """Looks up an array by its path inside the file; the path may end in a member of a table.

    Args:
        file: an open file.
        key: such as ``"train/images"``, or ``"obs/labels"`` where ``obs`` is a table (compound array).
        trust: what is followed out of the file, and which sizes are taken. What leaves the file without leave is not
            opened, not even to be refused.

    Raises:
        H5KeyError: there is no such array, with near matches and what is there.
        H5ValueError: it is a group, a scalar, or empty of a shape, or it lies outside the file.
    """
    with translate_h5py_errors(file.filename, repr(key)):
        return _find(file, key, trust, _Seen())


@dataclass
class _Seen:
    """What was seen on the way to an array.

    Attributes:
        above: the virtual arrays that are made of it, as file and name.
        reads: of each virtual array that is sound, how many others HDF5 reads for all of its rows.
    """

    above: list[tuple[str, str]] = field(default_factory=list)
    reads: dict[tuple[str, str], int] = field(default_factory=dict)


def _find(file: Any, key: str, trust: FileOptions, seen: _Seen) -> ArrayHandle:
    """The same for an array that others may be made of."""
    array, members = resolve_path(file, key, allow_external=trust.allow_external)
    path = file.filename
    if isinstance(array, h5py.Group):
        inside = [f"{key.strip('/')}/{name}" for name in list_arrays(array)]
        raise H5ValueError(
            f"{key!r} in {path!r} is a group, not an array; the arrays below it are {listing(inside)}. "
            f"Name one of them{f', such as {inside[0]!r}' if inside else ''}."
        )
    if not isinstance(array, h5py.Dataset):
        raise H5ValueError(
            f"{key!r} in {path!r} is a named datatype, not an array; the file has {listing(list_arrays(file))}. "
            "Name one of these."
        )
    # Before its shape is asked for: that of a virtual array may be found out by opening the others.
    if not trust.allow_external:
        refuse_foreign(file, array, key)
    if array.is_virtual:
        _check_sources(file, array, key, trust, seen)
    if not array.shape:
        kind = "has no shape (an empty dataspace)" if array.shape is None else "is a scalar (shape ())"
        raise H5ValueError(
            f"{key!r} in {path!r} {kind}; a row is one index along axis 0. Name an array with an axis; "
            f"the file has {listing(list_arrays(file))}."
        )
    if numpy_dtype(array) is None:
        raise H5ValueError(
            f"{key!r} in {path!r} has a number format that NumPy does not have. Write it again as integers or floats "
            "of 8, 16, 32 or 64 bits."
        )
    check_sizes(file, array, key, trust)
    return ArrayHandle(array, members, is_foreign(file, array), file)


def _check_sources(file: Any, array: Any, key: str, trust: FileOptions, seen: _Seen) -> None:
    """Looks at what a virtual array is made of: a missing source would read as fill values, without an error."""
    me = (file.filename, array.name)
    if me in seen.above or len(seen.above) > MAX_LEVELS:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} is a virtual array that is made of itself. Name another array; the file is "
            "damaged, or made to do harm."
        )
    seen.above.append(me)
    n_reads = 0
    for source, times in own_sources(file, array, key, allow_external=trust.allow_external).items():
        which = (file.filename, source)
        if which not in seen.reads:
            seen.reads[which] = 1
            found = _source_of(key, file, file, source, trust, seen)
            seen.reads[which] = seen.reads.get((file.filename, found.array.name), 1)
        n_reads += times * seen.reads[which]
    for path, source in foreign_sources(file, array) if trust.allow_external else ():
        with open_h5(path) as other:
            _source_of(key, file, other, source, trust, seen)
    if n_reads > MAX_READS:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} is a virtual array over {n_reads:,} pieces of others, which are virtual "
            "too. Write its rows to a file as an array of their own; the file may be made to do harm."
        )
    seen.above.pop()
    seen.reads[me] = max(1, n_reads)


def _source_of(key: str, file: Any, other: Any, source: str, trust: FileOptions, seen: _Seen) -> ArrayHandle:
    """An array that a virtual one is made of."""
    try:
        found = _find(other, source, trust, seen)
    except H5KeyError as error:
        raise H5KeyError(
            f"{key!r} in {file.filename!r} is a virtual array over {source!r} in {other.filename!r}, which is not "
            "there; its rows would read as fill values. Put it back, or name another array."
        ) from error
    if found.members:
        raise H5KeyError(
            f"{key!r} in {file.filename!r} is a virtual array over {source!r} in {other.filename!r}, a member of a "
            "table, where HDF5 finds nothing; its rows would read as fill values. Name the member itself."
        )
    refuse_library(found.array, other.filename, source, f"{key!r} is a virtual array over it")
    return found


@contextmanager
def h5_in_memory(**options: Any) -> Iterator[tuple[Any, BytesIO]]:
    """A new file in memory, and its bytes, to find out what the HDF5 library does.

    Args:
        options: of ``h5py.File``.
    """
    content = BytesIO()
    with h5py.File(content, "w", **options) as file:
        yield file, content


def skipped_bytes(array_id: Any) -> int:
    """Bytes at the start of an array's file that the library leaves out where it says a chunk's position.

    HDF5 1.14.2 leaves the user block out, 1.14.4 does not. It is found out with a file in memory: no version number
    tells of a library that was mended by whoever packed it.

    Args:
        array_id: h5py's low-level dataset.
    """
    user_block = int(h5py.h5i.get_file_id(array_id).get_create_plist().get_userblock())
    return 0 if not user_block or _counts_user_block() else user_block


@cache
def _counts_user_block() -> bool:
    size = 1 << 20
    with h5_in_memory(userblock_size=size) as (file, _):
        array = file.create_dataset("x", data=[1], chunks=(1,))
        file.flush()
        return bool(array.id.get_chunk_info(0).byte_offset >= size)

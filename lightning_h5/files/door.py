"""The one door: every file that is opened and every array that is looked up passes here.

An HDF5 file can name other files as its own content (external links, external storage, virtual arrays).
These are refused here unless the user allows them, for every component of a path: a leaf that looks
harmless may hang under a group that leaves the file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import h5py
import numpy as np

from ..errors import H5CorruptError, H5FileError, H5KeyError, H5ValueError, listing, near

__all__ = ["ArrayHandle", "create_h5", "find_array", "list_arrays", "numpy_dtype", "open_h5", "skipped_bytes"]

SIGNATURE = b"\x89HDF\r\n\x1a\n"
MAX_LINKS = 16  # HDF5's own limit on links followed in one look-up


@dataclass(frozen=True)
class ArrayHandle:
    """An open array, the member of its rows that the key ends in, if any, and whether it lies in another file."""

    array: Any
    members: tuple[str, ...] = ()
    foreign: bool = False


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
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise H5FileError(
            f"{path!r} cannot be opened: {error.strerror}. Check the path and its permissions."
        ) from error
    if not stat.S_ISREG(mode):
        raise H5FileError(f"{path!r} is not a regular file. Pass the path of an HDF5 file.")
    try:
        return h5py.File(path, "r", swmr=swmr, rdcc_nbytes=rdcc_nbytes, rdcc_nslots=rdcc_nslots, rdcc_w0=rdcc_w0)
    except OSError as error:
        raise H5FileError(_why_not_open(path, error)) from error


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
    if error.errno in (11, 35, 37, 524) or "lock" in text:
        lock = os.environ.get("HDF5_USE_FILE_LOCKING")
        return (
            f"{path!r} cannot be locked for reading ({text}); HDF5_USE_FILE_LOCKING is {lock!r}. "
            "Close the program that writes it, or, on a file system without locks, "
            "set HDF5_USE_FILE_LOCKING=FALSE before Python starts."
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
    try:
        return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fcpl=options, fapl=access))
    except OSError as error:
        if os.path.lexists(path):
            raise H5FileError(f"{path!r} is there already. Remove it, or name another file.") from error
        why = os.strerror(error.errno) if error.errno else str(error)
        raise H5FileError(
            f"{path!r} cannot be created: {why}. Check that its folder is there, that you may write to it, and that "
            "there is room."
        ) from error


def _lowest_version(like: Any) -> int:
    """The oldest format that a file like this one may have: that of its superblock."""
    if like is None:
        return int(h5py.h5f.LIBVER_EARLIEST)
    with open(like.filename, "rb") as file:
        file.seek(like.userblock_size + len(SIGNATURE))
        version = file.read(1)[0]
    lowest = {0: h5py.h5f.LIBVER_EARLIEST, 1: h5py.h5f.LIBVER_EARLIEST, 2: h5py.h5f.LIBVER_V18}
    return int(lowest.get(version, h5py.h5f.LIBVER_V110))


def find_array(file: Any, key: str, *, allow_external: bool = False) -> ArrayHandle:
    """Looks up an array by its path inside the file; the path may end in a member of a table.

    Args:
        file: an open file.
        key: such as ``"train/images"``, or ``"obs/labels"`` where ``obs`` is a table (compound array).
        allow_external: follow links, storage and virtual arrays that lie in other files.

    Raises:
        H5KeyError: there is no such array, with near matches and what is there.
        H5ValueError: it is a group, a scalar, or empty of a shape, or it lies outside the file.
    """
    array, members = _walk(file, key, allow_external, depth=0)
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
    if not allow_external:
        _refuse_foreign(file, array, key)
    if array.is_virtual:
        _check_sources(file, array, key, allow_external)
    return ArrayHandle(array, members, _is_foreign(file, array))


def numpy_dtype(array: Any) -> np.dtype[Any] | None:
    """An array's dtype, or None where NumPy has none like it (times of HDF5's own, quadruple precision ...)."""
    try:
        dtype: np.dtype[Any] = array.dtype
    except (TypeError, ValueError):
        return None
    return dtype


def list_arrays(group: Any) -> list[str]:
    """Paths of all arrays below a group, in the file's order. Links that leave the file are not followed."""
    names: list[str] = []

    def visit(name: str | bytes, item: Any) -> None:  # bytes where they are no UTF-8
        if isinstance(item, h5py.Dataset):
            names.append(name.decode(errors="surrogateescape") if isinstance(name, bytes) else name)

    group.visititems(visit)
    return names


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
    with h5py.File(BytesIO(), "w", userblock_size=size) as file:
        array = file.create_dataset("x", data=[1], chunks=(1,))
        file.flush()
        return bool(array.id.get_chunk_info(0).byte_offset >= size)


def _walk(file: Any, key: str, allow_external: bool, depth: int) -> tuple[Any, tuple[str, ...]]:
    if depth > MAX_LINKS:
        raise H5KeyError(f"{key!r} in {file.filename!r} goes round in soft links. Name the array itself.")
    item: Any = file
    parts = [part for part in key.split("/") if part not in ("", ".")]
    for at, part in enumerate(parts):
        if isinstance(item, h5py.Dataset):
            return item, _members(file, item, key, tuple(parts[at:]))
        try:
            link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
        except (KeyError, ValueError, RuntimeError):
            link = None
        if link is None:
            raise H5KeyError(_missing(file, key))
        if isinstance(link, h5py.ExternalLink) and not allow_external:
            raise H5ValueError(
                f"{key!r} in {file.filename!r} leaves the file: {'/'.join(parts[: at + 1])!r} is an external link "
                f"to {link.path!r} in {link.filename!r}. Pass that file itself, or allow_external=True if you trust it."
            )
        if isinstance(link, h5py.SoftLink) and not allow_external:
            base = link.path if link.path.startswith("/") else f"{item.name}/{link.path}"
            try:
                item, members = _walk(file, base, allow_external, depth + 1)
            except H5KeyError as error:
                raise H5KeyError(
                    f"{key!r} in {file.filename!r} is a soft link to {link.path!r}, which leads nowhere. "
                    "Name the array itself, or mend the link."
                ) from error
            if members:
                raise H5KeyError(_missing(file, key))
        else:
            try:
                item = item[part]
            except (KeyError, OSError, RuntimeError) as error:
                raise H5CorruptError(
                    f"{key!r} in {file.filename!r} is linked but cannot be opened: {error}. Check the file "
                    "(and, for a link to another file, that the other file is there)."
                ) from error
    return item, ()


def _members(file: Any, array: Any, key: str, members: tuple[str, ...]) -> tuple[str, ...]:
    dtype = array.dtype
    for member in members:
        base = dtype.base
        if base.names is None or member not in base.names:
            what = f"has the members {listing(base.names)}" if base.names else "has no members"
            guess = near(member, base.names or ())
            raise H5KeyError(
                f"{key!r} is not in {file.filename!r}: {array.name!r} is an array there and {what}.{guess} "
                "Name the array, or one of its members."
            )
        dtype = base[member]
    return members


def _missing(file: Any, key: str) -> str:
    names = list_arrays(file)
    return (
        f"{key!r} is not in {file.filename!r}; its arrays are {listing(names)}.{near(key, names)} "
        "Pass one of these as the key."
    )


def _refuse_foreign(file: Any, array: Any, key: str) -> None:
    if array.external:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} keeps its bytes in other files: "
            f"{listing(name for name, _, _ in array.external)}. Pass allow_external=True if you trust the file."
        )
    # A second, independent look: whatever way led here, the object must lie in the file that was opened.
    if _is_foreign(file, array):
        raise H5ValueError(
            f"{key!r} in {file.filename!r} lies in another file, {array.file.filename!r}. Pass that file itself, "
            "or allow_external=True if you trust it."
        )


def _is_foreign(file: Any, array: Any) -> bool:
    return bool(h5py.h5o.get_info(array.id).fileno != h5py.h5o.get_info(file.id).fileno)


def _check_sources(file: Any, array: Any, key: str, allow_external: bool) -> None:
    folder = os.path.dirname(os.path.abspath(file.filename))
    for name, source in _sources(array):
        if name in (".", file.filename):
            # A missing source would read as fill values, without an error; one that is virtual itself may leave.
            find_array(file, source, allow_external=allow_external)
        elif not allow_external:
            raise H5ValueError(
                f"{key!r} in {file.filename!r} is a virtual array over other files, among them {name!r}. "
                "Pass these files themselves as a list, or allow_external=True if you trust them."
            )
        elif "%b" not in name and not any(os.path.exists(os.path.join(at, name)) for at in (folder, os.getcwd())):
            raise H5FileError(
                f"{key!r} in {file.filename!r} is a virtual array over {name!r}, which does not exist; its rows would "
                "read as fill values. Put the file back."
            )


def _sources(array: Any) -> Iterator[tuple[str, str]]:
    seen = set()
    for source in array.virtual_sources():
        if (where := (source.file_name, source.dset_name)) not in seen:
            seen.add(where)
            yield where

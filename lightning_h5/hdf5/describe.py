"""Describe arrays of open files from their metadata."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5KeyError, H5ValueError, listing, near, short_repr
from ..options import FileOptions
from .change_guard import ChangeGuard, pread_of
from .checks import check_integrity, check_library, ensure_filters
from .chunk_index import (
    MAX_CHUNKS,
    OLD_INDEX,
    ChunkTable,
    chunk_table,
    grid_of,
    index_type,
    leaves_edges_plain,
    moves_axis,
    plain_edges,
)
from .contents import GroupError, resolve_path
from .digest_checks import with_digests
from .digests import read_digests
from .dtypes import is_bytes, kind_of, native
from .layout import CHARACTER, ArrayLayout, Filter, Storage, filters_of
from .links import ArrayHandle, find_array
from .open import is_in_other_file, translate_h5py_errors
from .packing import NULLABLE, is_of_netcdf, packing_of

__all__ = [
    "IMAGE_SIGNATURES",
    "MAX_UNWRITTEN",
    "REFERENCE",
    "attribute_layout",
    "bytes_layout",
    "check_described",
    "column_layout",
    "describe_array",
    "layout_at",
    "layout_of",
    "scalar_layout",
    "table_of",
]

_log = logging.getLogger(__name__)

IMAGE_SIGNATURES = (b"\xff\xd8", b"\x89PNG")
"""The first bytes of JPEG and PNG files."""

MAX_UNWRITTEN = 1 << 16
"""Number of chunks that is accepted for a table of a file of any size: 1.3 MB of memory."""

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
"""A stored text of variable length: its length, the address of its heap, and its number there."""

FLETCHER32, GZIP, BZIP2, ZSTD = 3, 1, 307, 32015  # HDF5 filter numbers
EXACT_IN_FLOAT64 = 1 << 53
CHECKED_HEADER = b"OHDR"  # signature of object headers with checksums


def describe_array(file: Any, path: str, key: str, files: FileOptions) -> ArrayLayout:
    """Describe an array of an open file, and check it. Reads metadata only.

    Args:
        file: the open file.
        path: its path.
        key: the array.
        files: which declarations of the file are accepted, and which proofs are required.

    Raises:
        H5KeyError: the array does not exist.
        H5ValueError: it is refused (see ``find_array``), has no digests although they are required, or too low an
            integrity level.
        H5CorruptError: it is not the array that its digests were made of, or its chunk index is damaged.
        H5FileError: a filter is not installed, or the file has no digests although they are required.
    """
    return check_described(layout_at(file, path, key, files), files)


def layout_at(file: Any, path: str, key: str, files: FileOptions) -> ArrayLayout:
    """Describe the array, or the column with missing values, that a key names.

    AnnData stores such a column as two arrays of a group, ``values`` and ``mask``. It is read whole, as floats.

    Args:
        file: the open file.
        path: its path.
        key: the array, or the group of the column.
        files: which declarations of the file are accepted.

    Raises:
        H5Error: see ``describe_array``; text or a large integer of a column is missing.
    """
    try:
        layout = layout_of(find_array(file, key, files), path, key)
    except GroupError as error:
        if error.key == key and (is_missing := _missing_in(file, key, files)) is not None:
            return _column_with_missing(file, path, key, files, is_missing)
        raise
    column, _, name = key.rpartition("/")
    is_missing = _missing_in(file, column, files) if name == NULLABLE[0] and column else None
    if is_missing is not None and is_missing.any():
        _missing_note(key, os.path.dirname(path))
    return layout


def _missing_in(file: Any, column: str, files: FileOptions) -> npt.NDArray[np.bool_] | None:
    """Return the mask of a column with missing values; None for any other group."""
    group = resolve_path(file, column, allow_external=files.allow_external)[0]
    if not isinstance(group, h5py.Group) or not str(group.attrs.get("encoding-type", "")).startswith("nullable-"):
        return None
    mask = find_array(file, f"{column}/{NULLABLE[1]}", files).array[...].astype(bool)
    return mask if mask.ndim == 1 else None


def _column_with_missing(
    file: Any, path: str, key: str, files: FileOptions, is_missing: npt.NDArray[np.bool_]
) -> ArrayLayout:
    handle = find_array(file, f"{key}/{NULLABLE[0]}", files)
    if kind_of(handle.array.dtype) == "text" and not is_missing.any():
        return layout_of(handle, path, key)
    values = handle.array[...]
    is_number = values.shape == is_missing.shape and values.dtype.kind in "biuf"
    if not is_number or np.abs(values[~is_missing].astype(np.float64)).max(initial=0) > EXACT_IN_FLOAT64:
        raise H5ValueError(
            f"{key!r} in {path!r} has {is_missing.sum():,} of {len(is_missing):,} rows without a value, and "
            f"{'numbers beyond 2**53' if is_number else 'text'} in others, which floats with NaN cannot hold. Name "
            f"'{key}/values' for the values as stored, with where={{'{key}/mask': False}} to leave these rows out."
        )
    numbers = values.astype(np.float32 if values.dtype.itemsize <= 2 else np.float64)
    numbers[is_missing] = np.nan
    return column_layout(numbers, path, key, ChangeGuard.of_open(file, path))


@lru_cache(1000)
def _missing_note(key: str, folder: str) -> None:
    column = key.rpartition("/")[0]
    _log.warning(
        "%r has rows without a value in files of %r, and other numbers are stored there. Name %r for NaN, or leave "
        "them out with where={'%s/mask': False}",
        key,
        folder,
        column,
        column,
    )


def attribute_layout(item: Any, path: str, key: str, guard: ChangeGuard) -> ArrayLayout:
    """Describe an attribute, as an array of one row.

    Args:
        item: the open group or array that has it.
        path: the file.
        key: the name of the object, if any, then ``@`` and the attribute's name.
        guard: change guard of the file.

    Raises:
        H5KeyError: the attribute does not exist.
        H5ValueError: the attribute has no value, or a value that is neither numbers nor text.
    """
    name = key.rpartition("@")[2]
    with translate_h5py_errors(path, repr(key)):
        if name not in item.attrs:
            contents = f"the attributes {listing(item.attrs)}" if len(item.attrs) else "no attributes"
            raise H5KeyError(
                f"is not in {path!r}.",
                f"{item.name!r} has {contents}.",
                near(name, item.attrs).strip(),
                "Name one of its attributes.",
                key=key,
            )
        value = item.attrs[name]
    return _value_layout(value, path, key, guard)


def scalar_layout(file: Any, path: str, key: str, guard: ChangeGuard) -> ArrayLayout:
    """Describe a scalar array, with its value, as an array of one row.

    Args:
        file: the open file.
        path: its path.
        key: name of the array, which was found in the file.
        guard: change guard of the file.

    Raises:
        H5ValueError: its value is neither numbers nor text.
    """
    with translate_h5py_errors(path, repr(key)):
        value = file[key][()]
    return _value_layout(value, path, key, guard)


def bytes_layout(file: Any, path: str, key: str) -> ArrayLayout | None:
    """Describe a scalar that holds bytes, such as an encoded image, as an array of one row. Reads no opaque value.

    Args:
        file: the open file.
        path: its path.
        key: name of the scalar, which ``find_array`` looked up.

    Returns:
        The description; None if the scalar holds something else, or bytes that only the library can read.
    """
    with translate_h5py_errors(path, repr(key)):
        array = file[key]
        kind = array.dtype.kind
        if is_bytes(array.dtype):
            layout = _layout_of(ArrayHandle(array, (), is_in_other_file(file, array), file, ()), path, key)
            return None if layout.references is None else layout.with_changes(is_scalar=True)
        is_opaque = kind == "V" and array.dtype.names is None and array.dtype.subdtype is None
        if not is_opaque and not (kind == "S" and array[()].startswith(IMAGE_SIGNATURES)):
            return None
        offset = array.id.get_offset()
        if _storage(array) != "contiguous" or offset is None or is_in_other_file(file, array):
            return None
        n_bytes = array.dtype.itemsize
        return ArrayLayout(
            path=path,
            key=key,
            name=array.name,
            members=(),
            n_rows=1,
            axes=(n_bytes,),
            row_shape=(n_bytes,),
            stored=np.dtype(np.uint8),
            dtype=np.dtype(np.uint8),
            storage="contiguous",
            chunks=None,
            filters=(),
            offset=offset,
            n_stored_bytes=n_bytes,
            fill=b"\0",
            plain_reason=None,
            is_scalar=True,
            guard=ChangeGuard.of_open(array.file, path),
        )


def column_layout(values: npt.NDArray[Any], path: str, key: str, guard: ChangeGuard) -> ArrayLayout:
    """Describe values from outside of a file, such as a table's column, as an array of the file.

    Args:
        values: numbers, or text as objects; shape ``(n_rows, ...)``.
        path: the file with the corresponding rows.
        key: name of the values.
        guard: change guard of the file.
    """
    element = np.zeros(values.shape[1:], values.dtype) if values.dtype.kind != "O" else ""
    layout = _value_layout(element, path, key, guard)
    return layout.with_changes(n_rows=len(values), value=values, n_stored_bytes=values.nbytes)


def _value_layout(value: Any, path: str, key: str, guard: ChangeGuard) -> ArrayLayout:
    is_opaque = isinstance(value, np.void) and value.dtype.names is None
    if is_opaque or (isinstance(value, bytes | np.bytes_) and value.startswith(IMAGE_SIGNATURES)):
        value = np.frombuffer(bytes(value), np.uint8)
    elif isinstance(value, bytes | np.bytes_):
        value = value.decode(errors="replace")
    array = np.array(value, dtype=object) if isinstance(value, str) else np.asarray(value)
    if array.dtype.kind in "SU":
        array = np.array(array.astype(str), dtype=object)
    is_text = array.dtype.kind == "O" and all(isinstance(element, str) for element in array.flat)
    if isinstance(value, h5py.Empty) or array.dtype.kind not in ("biufcO" if is_text else "biufc"):
        raise H5ValueError(
            f"{key!r} in {path!r} has the value {short_repr(value)}, which is neither numbers nor text. Name another "
            "one."
        )
    dtype = h5py.string_dtype() if is_text else native(array.dtype)
    return ArrayLayout(
        path=path,
        key=key,
        name=key,
        members=(),
        n_rows=1,
        axes=array.shape,
        row_shape=array.shape,
        stored=dtype,
        dtype=dtype,
        storage="attribute",
        chunks=None,
        filters=(),
        offset=None,
        n_stored_bytes=array.nbytes,
        fill=b"",
        plain_reason="it is an attribute",
        integrity=3,  # it is a part of the files' identity
        value=array.astype(object if is_text else dtype)[None],
        guard=guard,
    )


def check_described(layout: ArrayLayout, files: FileOptions) -> ArrayLayout:
    """Check a described array; return it with its digests, if they are required.

    Raises:
        H5Error: see ``describe_array``.
    """
    if files.verify == "digest":
        layout = with_digests(layout, read_digests(layout.path))
    check_integrity(layout, files.min_integrity)
    return layout


def layout_of(handle: ArrayHandle, path: str, key: str) -> ArrayLayout:
    """Describe an open array. Reads metadata only.

    Args:
        handle: the result of ``find_array``.
        path: the file.
        key: the requested name.

    Raises:
        H5FileError: a filter of the array is not installed.
        H5CorruptError: its chunk index, or other metadata, is damaged.
    """
    with translate_h5py_errors(path, repr(key)):
        layout = _layout_of(handle, path, key)
        if handle.categories is None:
            return layout
        name = str(handle.categories.array.name).removeprefix("/")
        return layout.with_changes(categories=_layout_of(handle.categories, path, name))


def _layout_of(handle: ArrayHandle, path: str, key: str) -> ArrayLayout:
    array, members = handle.array, handle.members
    filters = filters_of(array)
    ensure_filters(filters, path, key)
    storage = _storage(array)
    stored = array.dtype
    element, inner = stored, ()
    for member in (None, *members):
        element = element if member is None else element[member]
        if element.subdtype is not None:
            inner += element.subdtype[1]
        element = element.base
    # Until the first write the library returns "undefined" plus the user block: 511 for a user block of 512 bytes.
    is_allocated = array.id.get_space_status() != h5py.h5d.SPACE_STATUS_NOT_ALLOCATED
    offset = array.id.get_offset() if storage == "contiguous" and is_allocated else None
    why_plain = "it lies in another file" if handle.is_external else _plain_reason(array, storage, offset, element)
    table = None
    if storage == "chunked" and (why_plain is None or (filters and not stored.hasobject and not handle.is_external)):
        table, why_no_table = _table_or_reason(array, path, key)
        why_plain = why_plain or why_no_table
    if why_plain is not None:
        check_library(array, path, key, why_plain)
    row_shape, dtype = (*array.shape[1:], *inner), native(element)
    if stored == CHARACTER and min(row_shape, default=0) > 0 and is_of_netcdf(array):
        row_shape, dtype = row_shape[:-1], np.dtype(f"S{row_shape[-1]}")
    layout = ArrayLayout(
        path=path,
        key=key,
        # An array in another file may have another name there, so it is looked up by the key again.
        name=_without(key, members) if handle.is_external else array.name,
        members=members,
        n_rows=array.shape[0] if array.shape else 1,
        axes=array.shape[1:],
        row_shape=row_shape,
        stored=stored,
        dtype=dtype,
        storage=storage,
        chunks=array.chunks,
        filters=filters,
        offset=None if why_plain else offset,
        n_stored_bytes=array.id.get_storage_size(),
        fill=_fill_value(array),
        plain_reason=why_plain,
        integrity=_integrity_level(array, _applied_everywhere(filters, table)),
        table=None if why_plain else table,
        packing=None if members else packing_of(array, native(element)),  # attributes apply to the whole compound
        guard=ChangeGuard.of_open(handle.file or array.file, path),
    )
    return layout if handle.is_external else _with_references(layout, array, offset)


def _table_or_reason(array: Any, path: str, key: str) -> tuple[ChunkTable | None, str | None]:
    """Return the chunk table of an array, or the reason why there is none."""
    if array.file.swmr_mode:
        return None, "its chunks move under a live writer"  # an index may grow while it is read
    if (n := math.prod(grid_of(array.shape, array.chunks))) > _max_chunks(array):
        return None, f"it has {n:,} chunks, too many for a table"
    if moves_axis(array.id):
        return None, "it grows along an axis other than the first, and HDF5 does not report which chunk is which"
    if (table := table_of(array.id, path, key)) is None:
        return None, "chunks at its edge may have gone through no filter, and do not say so"
    return table, None


def _max_chunks(array: Any) -> int:
    """Return the maximum number of chunks for a table: with more chunks, most were never written."""
    n_file = h5py.h5i.get_file_id(array.id).get_filesize()
    return min(MAX_CHUNKS, max(MAX_UNWRITTEN, int(n_file)))


def table_of(array_id: Any, path: str, key: str) -> ChunkTable | None:
    """Return the chunk table of an open array; None if only the library knows the filters of its chunks.

    Args:
        array_id: h5py's low-level dataset, chunked, without a live writer, for which ``moves_axis`` is false.
        path: its file, for messages.
        key: its name, for messages.

    Raises:
        H5CorruptError: its chunk index is damaged.
    """
    plist, shape = array_id.get_create_plist(), array_id.shape
    chunks, n_filters = plist.get_chunk(), plist.get_nfilters()
    try:
        table = chunk_table(array_id, shape, chunks)
        are_plain = leaves_edges_plain(plist) if n_filters else False
        return plain_edges(table, shape, chunks, n_filters=n_filters, are_plain=are_plain)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise H5CorruptError(
            f"the chunk index of {key!r} in {path!r} cannot be read, or names chunks outside of its shape "
            f"{shape}: {error}. The file is damaged; copy it again."
        ) from error


def _with_references(layout: ArrayLayout, array: Any, offset: int | None) -> ArrayLayout:
    """Return an array of text or lists of variable length with the layout of its references."""
    options, kind = h5py.h5i.get_file_id(array.id).get_create_plist(), array.id.get_type()
    is_text = kind.get_class() == h5py.h5t.STRING and kind.is_variable_str()
    is_list = kind.get_class() == h5py.h5t.VLEN
    if not (is_text or is_list) or options.get_sizes() != (8, 8):  # sizes of addresses and lengths in this file
        return layout
    n = math.prod(grid_of(array.shape, array.chunks)) if array.chunks else 0
    has_table = 0 < n <= _max_chunks(array) and not moves_axis(array.id)
    table = table_of(array.id, layout.path, layout.key) if has_table else None
    if table is None and offset is None:
        return layout
    references = layout.with_changes(
        stored=REFERENCE, dtype=REFERENCE, offset=offset, table=table, fill=bytes(REFERENCE.itemsize), plain_reason=None
    )
    return layout.with_changes(references=references, user_block=options.get_userblock())


def _integrity_level(array: Any, filters: Sequence[int]) -> int:
    """Return the integrity level of an open array, 0 to 3 (see ``INTEGRITY``).

    gzip, bzip2 and HDF5's ``fletcher32`` have checksums; other compressors detect a part of the damage, or none. The
    Fletcher checksum of zeros is zero, so a chunk of zeros passes it unless a compressor finds it. The tables of
    chunks have checksums only in the newer file format (``libver="latest"``).

    Args:
        array: h5py's dataset.
        filters: HDF5's numbers of the filters that were applied to all chunks.
    """
    if array.dtype.hasobject:  # values are elsewhere in the file, without checksums
        return 0
    has_checksum = FLETCHER32 in filters
    if not has_checksum and GZIP not in filters and BZIP2 not in filters:
        return 0
    if not has_checksum or not _has_checked_tables(array):
        return 1
    return 3 if {GZIP, BZIP2, ZSTD} & set(filters) else 2


def _has_checked_tables(array: Any) -> bool:
    """Return whether superblock, object header and chunk index have checksums."""
    options = h5py.h5i.get_file_id(array.id).get_create_plist()
    if options.get_version()[0] < 2 or index_type(array.id) in (None, OLD_INDEX):
        return False
    low, high = h5py.h5g.get_objinfo(array.id).objno
    try:
        place = (high << 64) + low + options.get_userblock()
        pread = pread_of(array.file)
        return pread is not None and pread(len(CHECKED_HEADER), place) == CHECKED_HEADER
    except (OSError, ValueError, NotImplementedError, RuntimeError):
        return False


def _applied_everywhere(filters: tuple[Filter, ...], table: ChunkTable | None) -> list[int]:
    """Return the numbers of the filters that were applied to all chunks; none if that is unknown."""
    if table is None:
        return []
    skip_mask = int(np.bitwise_or.reduce(table.masks[table.offsets >= 0], initial=0))
    return [step.id for at, step in enumerate(filters) if not skip_mask >> at & 1]


def _fill_value(array: Any) -> bytes:
    """Return the stored value of an element that was never written; zeros if the file leaves it undefined."""
    if array.dtype.hasobject:
        return b""
    try:
        array.id.get_create_plist().fill_value_defined()  # raises for damage that would crash the process below
        return np.asarray(array.fillvalue, dtype=array.dtype).tobytes()
    except RuntimeError:
        return bytes(array.dtype.itemsize)


def _without(key: str, members: tuple[str, ...]) -> str:
    parts = [part for part in key.split("/") if part not in ("", ".")]
    return "/".join(parts[: len(parts) - len(members)])


def _storage(array: Any) -> Storage:
    if array.is_virtual:
        return "virtual"
    if array.external:
        return "external"
    layout = array.id.get_create_plist().get_layout()
    if layout == h5py.h5d.COMPACT:
        return "compact"
    return "chunked" if layout == h5py.h5d.CHUNKED else "contiguous"


def _plain_reason(array: Any, storage: Storage, offset: int | None, element: np.dtype[Any]) -> str | None:
    if storage not in ("contiguous", "chunked"):
        return f"its storage is {storage}"
    if storage == "contiguous" and offset is None:
        return "no byte of it was ever written (it reads as its fill value)"
    if kind_of(element) == "text":
        return "text is decoded by the HDF5 library"
    if array.dtype.hasobject:
        return "its rows hold references to text or lists elsewhere in the file"
    # NumPy's idea of the type must be the file's idea to the bit (not so for 24-bit integers, bfloat16 ...).
    if h5py.h5t.py_create(array.dtype, logical=True) != array.id.get_type():
        return "its number format does not exist in NumPy"
    return None

"""One array as rows of bytes, for copies, to which it does not matter what the bytes mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from ...errors import H5CorruptError
from ...files import ArrayLayout
from ...files.chunks import ChunkTable, chunk_table, leaves_edges_plain, plain_edges
from ...files.layout import ensure_filters
from .compression import steps_of

__all__ = ["Bytes", "RawArray", "chunks_of", "raw_layout", "read_region", "write_region", "written_anywhere"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class RawArray:
    """An open array as rows of bytes.

    Attributes:
        id: h5py's low-level dataset.
        path: its file.
        name: inside the file.
        shape: of the array, with at least one axis.
        itemsize: bytes of an element.
        fill: an element that was never written; None where only the HDF5 library knows.
    """

    id: Any
    path: str
    name: str
    shape: tuple[int, ...]
    itemsize: int
    fill: bytes | None

    @classmethod
    def of(cls, array_id: Any, path: str, name: str) -> RawArray:
        """Looks at an open array whose elements have a fixed size."""
        itemsize = array_id.get_type().get_size()
        return cls(id=array_id, path=path, name=name, shape=array_id.shape, itemsize=itemsize, fill=_fill(array_id))

    @property
    def n_rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, decoded."""
        return math.prod(self.shape[1:]) * self.itemsize


def _fill(array_id: Any) -> bytes | None:
    plist = array_id.get_create_plist()
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return bytes(array_id.get_type().get_size())
    try:
        dtype = array_id.dtype
        if h5py.h5t.py_create(dtype, logical=True) != array_id.get_type():
            return None
        return np.asarray(h5py.Dataset(array_id).fillvalue, dtype=dtype).tobytes()
    except (TypeError, ValueError, RuntimeError):  # a number format that NumPy does not have
        return None


def written_anywhere(array_id: Any) -> bool:
    """Whether any row of an array was ever written."""
    plist = array_id.get_create_plist()
    if plist.get_layout() in (h5py.h5d.VIRTUAL, h5py.h5d.COMPACT) or plist.get_external_count():
        return True
    return bool(array_id.get_space_status() != h5py.h5d.SPACE_STATUS_NOT_ALLOCATED)


def read_region(array: RawArray, corner: tuple[int, ...], shape: tuple[int, ...], out: Bytes) -> None:
    """Reads a box of elements through the HDF5 library, as bytes.

    Args:
        array: where from.
        corner: its first element.
        shape: of the box.
        out: memory; the first bytes of it are filled.

    Raises:
        H5CorruptError: it cannot be read.
    """
    values = out[: math.prod(shape) * array.itemsize].view(f"V{array.itemsize}").reshape(shape)
    space = array.id.get_space()
    space.select_hyperslab(corner, shape)
    try:
        array.id.read(h5py.h5s.create_simple(shape), space, values, array.id.get_type())
    except (OSError, RuntimeError) as error:
        raise H5CorruptError(
            f"rows {corner[0]} to {corner[0] + shape[0] - 1} of {array.name!r} in {array.path!r} cannot be read: "
            f"{error}. The file is damaged there; copy it again, or write it again without these rows."
        ) from error


def write_region(array: RawArray, corner: tuple[int, ...], shape: tuple[int, ...], content: Bytes) -> None:
    """Writes a box of elements through the HDF5 library, from bytes.

    Args:
        array: where to.
        corner: its first element.
        shape: of the box.
        content: its bytes, C-contiguous.
    """
    n_bytes = math.prod(shape) * array.itemsize
    values = content.reshape(-1)[:n_bytes].view(f"V{array.itemsize}").reshape(shape)
    space = array.id.get_space()
    space.select_hyperslab(corner, shape)
    array.id.write(h5py.h5s.create_simple(shape), space, values, array.id.get_type())


def chunks_of(array_id: Any) -> tuple[int, ...] | None:
    """Shape of an array's chunks; None where it has none."""
    plist = array_id.get_create_plist()
    return plist.get_chunk() if plist.get_layout() == h5py.h5d.CHUNKED else None


def raw_layout(array: RawArray) -> ArrayLayout | None:
    """The array as one of words or opaque elements, for the readers; None where only the HDF5 library reads it."""
    plist = array.id.get_create_plist()
    chunks, filters = chunks_of(array.id), steps_of(plist)[0]
    ensure_filters(filters, array.path, array.name)
    table, offset = None, None
    if chunks is not None:
        if array.fill is None or (table := _table_of(array, chunks, len(filters))) is None:
            return None
    elif plist.get_layout() == h5py.h5d.CONTIGUOUS and not plist.get_external_count() and written_anywhere(array.id):
        offset = array.id.get_offset()
    if table is None and offset is None:
        return None
    dtype = np.dtype(f"u{array.itemsize}" if array.itemsize in (1, 2, 4, 8) else f"V{array.itemsize}")
    return ArrayLayout(
        path=array.path,
        key=array.name,
        name=array.name,
        members=(),
        n_rows=array.n_rows,
        axes=array.shape[1:],
        row_shape=array.shape[1:],
        stored=dtype,
        dtype=dtype,
        storage="contiguous" if chunks is None else "chunked",
        chunks=chunks,
        filters=filters,
        offset=offset,
        n_stored_bytes=array.id.get_storage_size(),
        fill=array.fill or b"",
        plain_reason=None,
        table=table,
    )


def _table_of(array: RawArray, chunks: tuple[int, ...], n_filters: int) -> ChunkTable | None:
    try:
        table = chunk_table(array.id, array.shape, chunks)
        known = leaves_edges_plain(array.id.get_create_plist()) if n_filters else False
        return plain_edges(table, array.shape, chunks, n_filters=n_filters, known=known)
    except (ValueError, RuntimeError) as error:
        raise H5CorruptError(
            f"the chunk index of {array.name!r} in {array.path!r} cannot be read, or names chunks outside of its shape "
            f"{array.shape}: {error}. The file is damaged; copy it again."
        ) from error

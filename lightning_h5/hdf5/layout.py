"""What an array looks like on disk, as plain data: it pickles, and no file stays open for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import h5py
import numpy as np

from ..errors import H5CorruptError
from ..types import IntArray
from .checks import ensure_filters, integrity_level, refuse_library
from .chunk_index import (
    MAX_CHUNKS,
    ChunkTable,
    chunk_table,
    coordinates_reported,
    grid_of,
    leaves_edges_plain,
    plain_edges,
)
from .dtypes import kind_of, native
from .h5py_errors import translate_h5py_errors
from .headers import compact_place, stored_references
from .identity import ChangeGuard
from .open import ArrayHandle
from .packing import Packing, packing_of

if TYPE_CHECKING:
    from .digests import ArrayDigests

__all__ = ["ArrayLayout", "Filter", "filters_of", "layout_of", "table_of"]

MAX_UNWRITTEN = 1 << 16
"""Chunks of which a table is made however small the file: one takes 1.3 MB."""

Storage = Literal["contiguous", "chunked", "compact", "virtual", "external"]


_KNOWN = {
    305: "lzo",
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}
"""Names of filters that files often leave out, by the number registered with the HDF Group."""


@dataclass(frozen=True)
class Filter:
    """One step of an array's filter pipeline, by HDF5's registered number."""

    id: int
    name: str
    options: tuple[int, ...]

    @property
    def label(self) -> str:
        """A short name: files have long ones, or none."""
        return _KNOWN.get(self.id) or self.name or "a filter"


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """One array of one file.

    Attributes:
        path: the file.
        key: what the user asked for, a member of a table included.
        name: the array inside the file, without the member.
        members: path of the member inside a row of a compound array, outermost first; empty for a whole row.
        n_rows: length of axis 0.
        axes: lengths of the array's further axes in the file.
        row_shape: shape of a row as read: ``axes``, and an array-valued element's own axes.
        stored: dtype of an element in the file (the whole compound, in the file's byte order).
        dtype: dtype of an element as read, in native byte order.
        storage: how the bytes lie in the file.
        chunks: shape of a chunk, for chunked storage.
        filters: filter pipeline, in the order of writing.
        offset: byte position of the first row in the file, where rows lie one after the other in one
            piece as ``stored`` describes them; else None.
        n_stored_bytes: bytes the array takes in the file.
        fill: an element that was never written, as stored.
        plain_reason: why only the HDF5 library can find or understand this array's bytes, or None. (Filters are
            the readers' business.)
        integrity: how surely damage to it shows, 0 to 3 (see ``INTEGRITY``).
        table: where the chunks lie, for chunked storage that others than the HDF5 library understand.
        digests: what its pieces are compared with as they are read, or None.
        references: where rows have text of any length, the same array as it is stored: references to text elsewhere in
            the file. None where they cannot be found without the HDF5 library.
        user_block: bytes at the start of the file that are not HDF5's.
        guard: how the file looked when this was found in it: only such a file is opened to read it.
        packing: what attributes say that the stored integers mean, if anything else than themselves.
    """

    path: str
    key: str
    name: str
    members: tuple[str, ...]
    n_rows: int
    axes: tuple[int, ...]
    row_shape: tuple[int, ...]
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    storage: Storage
    chunks: tuple[int, ...] | None
    filters: tuple[Filter, ...]
    offset: int | None
    n_stored_bytes: int
    fill: bytes
    plain_reason: str | None
    integrity: int = 0
    table: ChunkTable | None = field(default=None, compare=False, repr=False)
    digests: ArrayDigests | None = field(default=None, compare=False, repr=False)
    references: ArrayLayout | None = field(default=None, compare=False, repr=False)
    user_block: int = 0
    packing: Packing | None = None
    guard: ChangeGuard = field(compare=False, repr=False)

    def guarded(self, guard: ChangeGuard) -> ArrayLayout:
        """The array, read from the file of another guard alone."""
        references = None if self.references is None else self.references.with_changes(guard=guard)
        return self.with_changes(references=references, guard=guard)

    def with_changes(self, **changes: Any) -> ArrayLayout:
        """The same with other attributes; much faster than ``dataclasses.replace``, which adds up over many files."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **changes)
        made.__dict__.pop("is_placed", None)  # was worked out from the old ones
        return made

    def member(self, name: str) -> ArrayLayout:
        """A member of the rows of a table, as an array of its own. Costs nothing, whatever the number of members.

        Args:
            name: of a member that is no text and no table.
        """
        element = self.stored[name]
        inner = element.shape
        return replace(
            self,
            key=f"{self.key}/{name}",
            members=(*self.members, name),
            row_shape=(*self.axes, *inner),
            dtype=native(element.base),
        )

    def places(self) -> IntArray:
        """Return where the array's pieces begin in the file, and their bytes; shape ``(n, 2)``."""
        if self.table is not None:
            written = self.table.offsets >= 0
            return np.stack([self.table.offsets[written], self.table.sizes[written]], axis=1)
        if self.offset is None:
            return np.empty((0, 2), dtype=np.int64)
        return np.array([[self.offset, min(self.n_rows * self.stored_row_bytes, 2**62)]])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as read (text counts as a pointer each)."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of a row as stored, before any filter, all members of a table included."""
        return self.stored.itemsize * math.prod(self.axes)

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows as read."""
        return self.row_bytes * self.n_rows

    @property
    def rows_per_chunk(self) -> int:
        """Rows that share a chunk; 1 where there are no chunks."""
        return self.chunks[0] if self.chunks else 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk before any filter; 0 where there are no chunks."""
        return math.prod(self.chunks) * self.stored.itemsize if self.chunks else 0

    @property
    def chunk_span_bytes(self) -> int:
        """Decoded bytes of all chunks that one row takes part in; 0 where there are no chunks."""
        if not self.chunks:
            return 0
        across = math.prod(-(-size // step) for size, step in zip(self.axes, self.chunks[1:], strict=True))
        return across * self.chunk_bytes

    @cached_property
    def is_placed(self) -> bool:
        """Whether each row lies in one piece, unfiltered, so that random access is as cheap as sequential access."""
        return self.offset is not None or (
            self.table is not None
            and self.chunks is not None
            and self.chunks[1:] == self.axes
            and self.table.is_plain(len(self.filters), self.chunk_bytes)
        )


def layout_of(handle: ArrayHandle, path: str, key: str) -> ArrayLayout:
    """Looks at an open array. Reads metadata only.

    Raises:
        H5FileError: one of the array's filters is not installed.
        H5CorruptError: its chunk index, or something else of it, cannot be right.
    """
    with translate_h5py_errors(path, repr(key)):
        return _layout_of(handle, path, key)


def _layout_of(handle: ArrayHandle, path: str, key: str) -> ArrayLayout:
    array, members = handle.array, handle.members
    plist = array.id.get_create_plist()
    filters = filters_of(array)
    ensure_filters(filters, path, key)
    storage = _storage(array, plist)
    stored = array.dtype
    element, inner = stored, ()
    for member in (None, *members):
        element = element if member is None else element[member]
        if element.subdtype is not None:
            inner += element.subdtype[1]
        element = element.base
    # Before the first byte is written the library gives "undefined" plus the user block: 511 for one of 512 bytes.
    allocated = array.id.get_space_status() != h5py.h5d.SPACE_STATUS_NOT_ALLOCATED
    offset = array.id.get_offset() if storage == "contiguous" and allocated else None
    reason = "it lies in another file" if handle.foreign else _plain_reason(array, storage, offset, element)
    table = seen = None  # where its chunks lie, for those who read them, and for what is said of them
    if storage == "chunked":
        why_unseen = reason if handle.foreign else _why_unseen(array)
        reason = reason or why_unseen
        if why_unseen is None and (reason is None or (filters and not stored.hasobject)):
            seen = table_of(array.id, path, key)
        if reason is None and (table := seen) is None:
            reason = "chunks at its edge may have gone through no filter, and do not say so"
    if reason is not None:
        refuse_library(array, path, key, reason)
    layout = ArrayLayout(
        path=path,
        key=key,
        # An array in another file is known there by another name: it is found again by the way that led to it.
        name=_without(key, members) if handle.foreign else array.name,
        members=members,
        n_rows=array.shape[0],
        axes=array.shape[1:],
        row_shape=(*array.shape[1:], *inner),
        stored=stored,
        dtype=native(element),
        storage=storage,
        chunks=array.chunks,
        filters=filters,
        offset=None if reason else offset,
        n_stored_bytes=array.id.get_storage_size(),
        fill=_fill(array),
        plain_reason=reason,
        integrity=integrity_level(array, _applied_everywhere(filters, seen)),
        table=table,
        packing=None if members else packing_of(array, native(element)),  # attributes are of the whole table
        guard=ChangeGuard.of_open(handle.file or array.file, path),
    )
    return layout if handle.foreign else _with_references(layout, array, offset)


def _why_unseen(array: Any) -> str | None:
    """Why no table of an array's chunks is made; None where one is."""
    if array.file.swmr_mode:
        return "its chunks move under a live writer"  # an index that grows while it is read makes no table
    if (n := math.prod(grid_of(array.shape, array.chunks))) > _most(array):
        return f"it has {n:,} chunks, of which no table is made"
    if coordinates_reported(array.id) is None:
        return "it grows along another axis than the first, and the HDF5 library does not say which chunk is which"
    return None


def _with_references(layout: ArrayLayout, array: Any, offset: int | None) -> ArrayLayout:
    """An array with text of any length, with where its references lie."""
    options = h5py.h5i.get_file_id(array.id).get_create_plist()
    is_known = options.get_sizes() == (8, 8)  # of addresses and lengths in this file
    stored = stored_references(array.id.get_type())
    if stored is None or not is_known or layout.storage not in ("contiguous", "chunked", "compact"):
        return layout
    if layout.storage == "compact":
        offset = compact_place(array)
    n = math.prod(grid_of(array.shape, array.chunks)) if array.chunks else 0
    table = table_of(array.id, layout.path, layout.key) if 0 < n <= _most(array) else None
    if table is None and offset is None:
        return layout
    references = replace(
        layout,
        members=(),
        stored=stored,
        dtype=stored,
        offset=offset,
        table=table,
        fill=bytes(stored.itemsize),
        plain_reason=None,
    )
    return replace(layout, references=references, user_block=options.get_userblock())


def _applied_everywhere(filters: tuple[Filter, ...], table: ChunkTable | None) -> list[int]:
    """Numbers of the filters that no chunk passed over; of none, where the chunks' masks are not known."""
    if table is None:
        return []
    skipped = int(np.bitwise_or.reduce(table.masks[table.offsets >= 0], initial=0))
    return [found.id for at, found in enumerate(filters) if not skipped >> at & 1]


def _fill(array: Any) -> bytes:
    """An element that was never written; zeros where the file says that it may be anything."""
    if array.dtype.hasobject:
        return b""
    try:
        array.id.get_create_plist().fill_value_defined()  # raises for some damage that ends the process just after
        return np.asarray(array.fillvalue, dtype=array.dtype).tobytes()
    except RuntimeError:
        return bytes(array.dtype.itemsize)


def _most(array: Any) -> int:
    """Chunks that a table is made of: each takes some bytes of the file, so that of more most were never written."""
    n_file = h5py.h5i.get_file_id(array.id).get_filesize()
    return min(MAX_CHUNKS, max(MAX_UNWRITTEN, int(n_file)))


def table_of(array_id: Any, path: str, key: str, *, has_user_block: bool = True) -> ChunkTable | None:
    """The chunk table of an open array; None if only the library knows where its chunks are, or how they are filtered.

    Args:
        array_id: h5py's low-level dataset, chunked and not open to a live writer.
        path: its file, for messages.
        key: its name, for messages.
        has_user_block: whether its file may begin with bytes that are not HDF5's.

    Raises:
        H5CorruptError: the index of its chunks cannot be right.
    """
    plist, shape = array_id.get_create_plist(), array_id.shape
    chunks, n_filters = plist.get_chunk(), plist.get_nfilters()
    try:
        if (table := chunk_table(array_id, shape, chunks, has_user_block=has_user_block)) is None:
            return None
        known = leaves_edges_plain(plist) if n_filters else False
        return plain_edges(table, shape, chunks, n_filters=n_filters, known=known)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise H5CorruptError(
            f"the chunk index of {key!r} in {path!r} cannot be read, or names chunks outside of its shape "
            f"{shape}: {error}. The file is damaged; copy it again."
        ) from error


def filters_of(array: Any) -> tuple[Filter, ...]:
    """The filter pipeline of an open array, in the order of writing."""
    plist = array.id.get_create_plist()
    return tuple(Filter(*_filter(plist.get_filter(i))) for i in range(plist.get_nfilters()))


def _filter(entry: tuple[int, int, tuple[int, ...], bytes]) -> tuple[int, str, tuple[int, ...]]:
    number, _flags, options, name = entry
    return number, name.decode(errors="replace"), tuple(options)


def _without(key: str, members: tuple[str, ...]) -> str:
    parts = [part for part in key.split("/") if part not in ("", ".")]
    return "/".join(parts[: len(parts) - len(members)])


def _storage(array: Any, plist: Any) -> Storage:
    if array.is_virtual:
        return "virtual"
    if array.external:
        return "external"
    layout = plist.get_layout()
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
        return "its number format has no equal in NumPy"
    return None

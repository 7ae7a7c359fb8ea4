"""What an array looks like on disk, as plain data: it can be pickled, and needs no open file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..types import IntArray
from .chunk_index import ChunkTable
from .dtypes import Packing, native
from .identity import ChangeGuard

if TYPE_CHECKING:
    from .digests import ArrayDigests

__all__ = ["ArrayLayout", "Filter", "Storage"]

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
"""Names of filters that files often lack, by the number registered with the HDF Group."""


@dataclass(frozen=True)
class Filter:
    """One step of an array's filter pipeline, by HDF5's registered number."""

    id: int
    name: str
    options: tuple[int, ...]

    @property
    def label(self) -> str:
        """A short name; files store long names, or none."""
        return _KNOWN.get(self.id) or self.name or "a filter"


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """One array of one file.

    Attributes:
        path: the file.
        key: the name that was asked for, including a member of a compound array.
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
        offset: byte position of the first row in the file if all rows lie in one piece, as ``stored`` describes them;
            otherwise None.
        n_stored_bytes: bytes the array takes in the file.
        fill: the stored value of an element that was never written.
        plain_reason: why only the HDF5 library can find or convert this array's bytes, or None. (Readers look at the
            filters.)
        integrity: how well damage shows, 0 to 4 (see ``INTEGRITY``).
        table: where the chunks lie, for chunked arrays that can be read without the HDF5 library.
        digests: digests that its chunks or rows are compared with when they are read, or None.
        references: for text of variable length, the same array as it is stored: references to text elsewhere in the
            file. None if they cannot be read without the HDF5 library.
        user_block: bytes at the start of the file that are not part of HDF5's address space.
        packing: how attributes declare that stored integers are decoded, or None.
        guard: change guard of the file that was described; no other file is read.
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
        """Return the array with another change guard."""
        references = None if self.references is None else self.references.with_changes(guard=guard)
        return self.with_changes(references=references, guard=guard)

    def with_changes(self, **changes: Any) -> ArrayLayout:
        """Return the array with other attributes; much faster than ``dataclasses.replace``, for many files."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **changes)
        made.__dict__.pop("is_contiguous", None)  # computed from the old fields
        return made

    def member(self, name: str) -> ArrayLayout:
        """Return a member of a compound array as an array.

        Args:
            name: a member that is neither text nor a compound.
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

    def pieces(self) -> IntArray:
        """Return offset and size in the file of each piece of the array, shape ``(n, 2)``."""
        if self.table is not None:
            written = self.table.offsets >= 0
            return np.stack([self.table.offsets[written], self.table.sizes[written]], axis=1)
        if self.offset is None:
            return np.empty((0, 2), dtype=np.int64)
        return np.array([[self.offset, min(self.n_rows * self.stored_row_bytes, 2**62)]])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as read (each text counts as a pointer)."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of a row as stored, before any filter, with all members of a compound."""
        return self.stored.itemsize * math.prod(self.axes)

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows as read."""
        return self.row_bytes * self.n_rows

    @property
    def rows_per_chunk(self) -> int:
        """Rows that share a chunk; 1 without chunks."""
        return self.chunks[0] if self.chunks else 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk before any filter; 0 without chunks."""
        return math.prod(self.chunks) * self.stored.itemsize if self.chunks else 0

    @property
    def chunk_span_bytes(self) -> int:
        """Decoded bytes of all chunks that contain a part of one row; 0 without chunks."""
        if not self.chunks:
            return 0
        across = math.prod(-(-size // step) for size, step in zip(self.axes, self.chunks[1:], strict=True))
        return across * self.chunk_bytes

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether each row lies in one unfiltered piece, so that random access is as cheap as sequential access."""
        return self.offset is not None or (
            self.table is not None
            and self.chunks is not None
            and self.chunks[1:] == self.axes
            and self.table.is_plain(len(self.filters), self.chunk_bytes)
        )

"""The layout of an array on disk, and its views, as plain data: it can be pickled, and needs no open file.

A view may differ from the stored array: rows along other axes, a part of each row, or cells as rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, listing
from ..types import IntArray, cached_property
from .change_guard import ChangeGuard
from .chunk_index import ChunkTable, grid_of
from .digests import ArrayDigests
from .dtypes import dtype_text, kind_of, native
from .packing import Packing

__all__ = [
    "CHARACTER",
    "ArrayLayout",
    "ArrayView",
    "Codec",
    "Decoding",
    "Filter",
    "Storage",
    "filters_of",
    "path_of",
    "stack_arrays",
]

CHARACTER = np.dtype("S1")
"""Elements of netCDF's arrays of characters; their last axis is the length of a text."""

RUN_BYTES = 1 << 20
"""Bytes of a view's rows that are read together if the array has no chunks."""

MIN_RUN = 16 << 10
"""Minimum bytes of a row's pieces to read them by position, without the HDF5 library."""

Storage = Literal["contiguous", "chunked", "compact", "virtual", "external", "attribute"]

_FILTER_NAMES = {
    305: "lzo",
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}
"""Names of filters, which files often lack, by the number registered with the HDF Group."""


@dataclass(frozen=True)
class Filter:
    """One step of an array's filter pipeline, by HDF5's registered number."""

    id: int
    name: str
    options: tuple[int, ...]

    @property
    def label(self) -> str:
        """A short name; files store long names, or none."""
        return _FILTER_NAMES.get(self.id) or self.name or "a filter"


def filters_of(array: Any) -> tuple[Filter, ...]:
    """Return the filter pipeline of an open array, in the order of writing; equal ones are one object."""
    plist = array.id.get_create_plist()
    filters = []
    for at in range(plist.get_nfilters()):
        number, _flags, options, name = plist.get_filter(at)
        filters.append(Filter(number, name.decode(errors="replace"), tuple(options)))
    return _known_filters(tuple(filters))


@lru_cache(maxsize=256)
def _known_filters(filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
    return filters


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayLayout:
    """One array of one file.

    Attributes:
        path: the file.
        key: the requested name, including a member of a compound array.
        name: the array inside the file, without the member.
        members: path of the member inside a row of a compound array, outermost first; empty for a whole row.
        n_rows: length of axis 0.
        axes: lengths of the array's further axes in the file.
        row_shape: shape of a row as read: ``axes``, and an array-valued element's own axes.
        stored: dtype of an element in the file (the whole compound, in the file's byte order).
        dtype: dtype of an element as read, in native byte order.
        storage: storage layout in the file.
        chunks: shape of a chunk, for chunked storage.
        filters: filter pipeline, in the order of writing.
        offset: byte position of the first row in the file if all rows are in one piece, as ``stored`` describes them;
            otherwise None.
        n_stored_bytes: bytes of the array in the file.
        fill: the stored value of an element that was never written.
        plain_reason: the reason why only the HDF5 library can locate or convert this array's bytes, or None. (Readers
            check the filters.)
        integrity: integrity level, 0 to 4 (see ``INTEGRITY``).
        table: places of the chunks, for chunked arrays that can be read without the HDF5 library.
        digests: digests to compare chunks or rows with when they are read, or None.
        references: for text of variable length, the stored array: references to text elsewhere in the file. None if
            they cannot be read without the HDF5 library.
        user_block: bytes at the start of the file that are not part of HDF5's address space.
        packing: the decoding of stored integers that attributes declare, or None.
        categories: the array of categories, if the values are codes of a categorical column; None otherwise.
        value: the single row of an attribute, or the rows of a table's column; None for an array of the file.
        view: the view, if rows are not the whole array along axis 0; otherwise None. ``n_rows``, ``axes`` and
            ``row_shape`` describe the viewed rows; ``axes`` excludes the axes of an array-valued element.
        is_scalar: whether this is a scalar that holds bytes (an opaque value, or a list), which has one row. Opaque
            values are described as ``uint8``.
        decoding: how rows are decoded; None if they are not. ``dtype`` and ``row_shape`` describe decoded rows.
        stacked: the arrays that are stacked on a new last axis of a row; empty for a single array. ``axes``, ``chunks``
            and ``view`` describe the first array, and the new axis counts as an axis of an array-valued element.
        is_annotated: whether the array may have units or dimensions (see ``annotations_of``).
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
    categories: ArrayLayout | None = field(default=None, compare=False, repr=False)
    value: Any = field(default=None, compare=False, repr=False)
    view: ArrayView | None = None
    is_scalar: bool = False
    decoding: Decoding | None = None
    stacked: tuple[ArrayLayout, ...] = ()
    is_annotated: bool = field(default=True, compare=False, repr=False)
    guard: ChangeGuard = field(compare=False, repr=False)
    _is_contiguous: bool | None = field(default=None, init=False, compare=False, repr=False)
    _identity_parts: tuple[str, str] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def first_byte(self) -> int | None:
        """Address of the array's bytes in the file, which no other array shares; None without bytes in the file."""
        if self.value is not None:
            return None
        if self.stacked:
            return self.stacked[0].first_byte
        as_stored = self if self.references is None else self.references
        if as_stored.table is None:
            return as_stored.offset
        offsets = as_stored.table.offsets[as_stored.table.offsets >= 0][:1]
        return int(offsets[0]) if len(offsets) else None

    def guarded(self, guard: ChangeGuard) -> ArrayLayout:
        """Return the array with another change guard."""
        if self.decoding is not None:
            return self.decoding.array.guarded(guard).decoded(self.decoding.codec)
        if self.stacked:
            return stack_arrays([array.guarded(guard) for array in self.stacked], self.key)
        references = None if self.references is None else self.references.with_changes(guard=guard)
        categories = None if self.categories is None else self.categories.guarded(guard)
        return self.with_changes(references=references, categories=categories, guard=guard)

    def with_changes(self, **changes: Any) -> ArrayLayout:
        """Return the array with other attributes; much faster than ``dataclasses.replace``, for many files."""
        layout = object.__new__(type(self))
        for name in _ATTRIBUTES:
            _assign(layout, name, changes[name] if name in changes else getattr(self, name))
        for name in _COMPUTED:
            _assign(layout, name, None)
        return layout

    def moved(
        self, path: str, key: str, n_rows: int, offset: int | None, table: ChunkTable | None, guard: ChangeGuard
    ) -> ArrayLayout:
        """Return an array that differs from this one only in its name, its rows and the place of its bytes.

        Args:
            path: file of the array.
            key: name of the array.
            n_rows: length of axis 0, or number of bytes of an opaque scalar.
            offset: address of its bytes if they are in one piece.
            table: places of its chunks.
            guard: change guard of the file.
        """
        as_stored = self if self.references is None else self.references
        if self.is_opaque:
            changes: dict[str, Any] = {"axes": (n_rows,), "row_shape": (n_rows,), "n_stored_bytes": n_rows}
        else:
            n_stored = n_rows * as_stored.stored_row_bytes if table is None else int(table.sizes.sum())
            changes = {"n_rows": n_rows, "n_stored_bytes": n_stored}
        changes |= {"path": path, "guard": guard}
        if key != self.key:
            changes |= {"key": key, "name": path_of(key)}
        place = {"offset": offset, "table": table}
        references = None if self.references is None else self.references.with_changes(**changes, **place)
        if self.plain_reason is None:
            changes |= place
        return self.with_changes(**changes, references=references)

    @property
    def is_opaque(self) -> bool:
        """Whether this is an opaque scalar: its bytes are one row."""
        return self.is_scalar and self.stored == np.uint8

    @property
    def varying_length(self) -> int:
        """The argument ``n_rows`` of ``moved``: the length of axis 0, or the bytes of an opaque scalar."""
        return self.axes[0] if self.is_opaque else self.n_rows

    def member_of(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values of this array among stored ones: those of a member of a compound, otherwise all."""
        for member in self.members:
            stored = stored[member]
        return stored

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
            packing=None,
        )

    def seen(
        self,
        row_axes: Sequence[int],
        selection: Mapping[int, int | slice | Sequence[int]] | None = None,
        *,
        keeps_axes: bool = False,
    ) -> ArrayLayout:
        """Return the array with its rows counted along other axes, or restricted to a part.

        Args:
            row_axes: the axes that number the rows, the slowest first; none if the whole array is one row.
            selection: part of other axes, by axis: an index, a slice or indices; other axes are kept whole.
            keeps_axes: create a view even if the rows are contiguous in the file and do not need one.

        Raises:
            H5ValueError: an axis has no such index.
        """
        if self.value is not None:
            return self
        if self.decoding is not None:
            return self.decoding.array.seen(row_axes, selection, keeps_axes=keeps_axes).decoded(self.decoding.codec)
        if self.stacked:
            views = [array.seen(row_axes, selection, keeps_axes=keeps_axes) for array in self.stacked]
            return stack_arrays(views, self.key)
        shape, row_axes = (self.n_rows, *self.axes), tuple(row_axes)
        if self.joins_characters and (row_axes != (0,) or selection):
            letters = self.with_changes(dtype=self.stored, row_shape=self.axes)
            return letters.seen(row_axes, selection, keeps_axes=keeps_axes)
        others = [axis for axis in range(len(shape)) if axis not in row_axes]
        parts = tuple(self._selection((selection or {}).get(axis, slice(None)), axis, shape) for axis in others)
        is_whole = all(part == slice(0, shape[axis], 1) for axis, part in zip(others, parts, strict=True))
        if row_axes == (0,) and is_whole:
            return self
        axes = tuple(
            len(range(shape[axis])[part]) if isinstance(part, slice) else len(part)
            for axis, part in zip(others, parts, strict=True)
            if not isinstance(part, int)
        )
        changes: dict[str, Any] = {
            "n_rows": math.prod(shape[axis] for axis in row_axes),
            "axes": axes,
            "row_shape": (*axes, *self.row_shape[len(self.axes) :]),
        }
        # Orders of epochs depend on which arrays have a view: most arrays that are one row do.
        is_first = row_axes == tuple(range(len(row_axes))) if row_axes else shape[-1] == 1
        is_cut_elsewhere = is_first and is_whole and not keeps_axes
        if is_cut_elsewhere and self.offset is not None and (self.digests is None or self.digests.kind == "chunks"):
            return self.with_changes(**changes)  # the same bytes, in rows of another size
        if self.chunks is not None:
            block = [self.chunks[axis] for axis in row_axes]
        else:
            row_bytes = max(1, self.stored.itemsize * math.prod(shape[axis] for axis in others))
            block = [1] * len(row_axes)
            block[-1:] = [max(1, min(shape[axis], RUN_BYTES // row_bytes)) for axis in row_axes[-1:]]
        return self.with_changes(**changes, view=ArrayView(self, row_axes, parts, tuple(block)))

    def _selection(
        self, selection: int | slice | Sequence[int], axis: int, shape: tuple[int, ...]
    ) -> int | slice | tuple[int, ...]:
        try:
            return _indices_of(selection, shape[axis])
        except IndexError as error:
            raise H5ValueError(
                f"select requests {error} of axis {axis} of {self.key!r} in {self.path!r}, but this axis has the "
                f"length {shape[axis]} (shape {shape}). Name indices that all files have."
            ) from None

    def in_cells(self, cell: tuple[int, ...], n_values: int) -> ArrayLayout:
        """Return the array with its cells as rows: the parts that a grid cuts it into, in order, each as flat values.

        Args:
            cell: shape of a cell: the chunk shape of chunked arrays. Cells at the edges reach beyond the array.
            n_values: values of a row, at least as many as a cell has: arrays of several files have rows of one size.
        """
        if self.decoding is not None:
            return self.decoding.array.in_cells(cell, n_values).decoded(self.decoding.codec)
        if self.stacked:
            return stack_arrays([array.in_cells(cell, n_values) for array in self.stacked], self.key)
        view = ArrayView(self, tuple(range(len(cell))), (), cell, is_in_cells=True)
        return self.with_changes(
            n_rows=math.prod(view.row_grid),
            axes=(n_values,),
            row_shape=(n_values, *self.row_shape[len(self.axes) :]),
            view=view,
        )

    def decoded(self, codec: Codec) -> ArrayLayout:
        """Return the array with decoded rows.

        Raises:
            H5ValueError: the codec does not support the array's values.
        """
        dtype, row_shape = codec.decoded(self)
        return self.with_changes(dtype=dtype, row_shape=row_shape, packing=None, decoding=Decoding(self, codec))

    @property
    def stored_arrays(self) -> tuple[ArrayLayout, ...]:
        """The arrays of the file that this one consists of: itself, or the stacked arrays."""
        if self.decoding is not None and self.decoding.array.stacked:
            return self.decoding.array.stacked
        return self.stacked or (self,)

    @property
    def missing_as_stored(self) -> list[str]:
        """Sentences about values that are declared as missing, and loaded as any other."""
        packings = [(array.key, array.packing) for array in self.stored_arrays if array.packing is not None]
        return [text for key, packing in packings if (text := packing.missing_as_stored(key)) is not None]

    @property
    def is_guarded(self) -> bool:
        """Whether ``refuse_missing`` has to check values."""
        is_packed = self.packing is not None and self.packing.policy == "guard"
        return is_packed or any(array.is_guarded for array in self.stacked)

    def refuse_missing(self, values: npt.NDArray[Any]) -> None:
        """Raise an ``H5ValueError`` if integers that remain integers have missing values (see ``Packing.policy``)."""
        for at, array in enumerate(self.stacked):
            if array.is_guarded:
                array.refuse_missing(values[..., at].astype(array.dtype))
        if self.packing is not None and self.packing.policy == "guard":
            self.packing.guard(values, self.key)

    def pieces(self) -> IntArray:
        """Return offset and size in the file of each piece of the array, shape ``(n, 2)``."""
        if self.stacked:
            return np.concatenate([array.pieces() for array in self.stacked])
        if self.table is not None:
            is_written = self.table.offsets >= 0
            return np.stack([self.table.offsets[is_written], self.table.sizes[is_written]], axis=1)
        return np.array([] if self.extent is None else [self.extent], dtype=np.int64).reshape(-1, 2)

    @property
    def extent(self) -> tuple[int, int] | None:
        """Offset and size in the file of an array in one piece, including unselected parts; None for other arrays."""
        if self.offset is None or self.table is not None:
            return None
        array = self if self.view is None else self.view.array
        return self.offset, min(array.n_rows * array.stored_row_bytes, 2**62)

    @property
    def n_values(self) -> int:
        """Number of values of all rows."""
        return self.n_rows * math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as read (each text counts as a pointer)."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def joins_characters(self) -> bool:
        """Whether characters along the last axis are one text, as in netCDF files."""
        return self.stored == CHARACTER and self.dtype.kind == "S" and len(self.row_shape) < len(self.axes)

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
        """Number of rows that share a chunk; 1 without chunks."""
        if self.stacked:
            return max(array.rows_per_chunk for array in self.stacked)
        if self.view is not None:
            return math.prod(self.view.block)
        return self.chunks[0] if self.chunks else 1

    @property
    def chunks_per_row(self) -> int:
        """Number of chunks that contain parts of one row; 1 without chunks."""
        return math.prod(grid_of(self.axes, self.chunks[1:])) if self.chunks else 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk before any filter; 0 without chunks."""
        return math.prod(self.chunks) * self.stored.itemsize if self.chunks else 0

    @property
    def chunk_span_bytes(self) -> int:
        """Decoded bytes of all chunks that contain a part of one row; 0 without chunks."""
        if self.stacked:
            return sum(array.chunk_span_bytes for array in self.stacked)
        if not self.chunks:
            return 0
        if self.view is not None:
            other_axes = self.view.other_axes
            return math.prod(-(-self.view.shape[axis] // self.chunks[axis]) for axis in other_axes) * self.chunk_bytes
        n_chunks = math.prod(-(-size // step) for size, step in zip(self.axes, self.chunks[1:], strict=True))
        return n_chunks * self.chunk_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether each row is one unfiltered piece, or a few. Random access is then as cheap as sequential access."""
        if (is_contiguous := self._is_contiguous) is None:
            is_contiguous = self._has_rows_in_pieces()
            _assign(self, "_is_contiguous", is_contiguous)
        return is_contiguous

    def _has_rows_in_pieces(self) -> bool:
        if self.stacked:
            return all(array.is_contiguous for array in self.stacked)
        if self.view is not None:
            return self.runs is not None
        return self.offset is not None or (
            self.table is not None
            and self.chunks is not None
            and self.chunks[1:] == self.axes
            and self.table.is_plain(len(self.filters), self.chunk_bytes)
        )

    @property
    def runs(self) -> Runs | None:
        """Places of the view's rows if each is a few long pieces of an array without chunks; None otherwise."""
        is_plain = not (self.members or self.stacked) and self.decoding is None
        return self.view.runs if is_plain and self.view is not None else None

    @property
    def identity_parts(self) -> tuple[str, str]:
        """The members, and all attributes after the number of rows, as text: equal for many arrays."""
        if (parts := self._identity_parts) is None:
            schema = repr((self.row_shape, self.stored.str, self.dtype.str, self.storage, self.chunks))[1:]
            filters = tuple((step.id, step.options) for step in self.filters)
            parts = repr(self.members), f"{schema}, {filters!r}"
            _assign(self, "_identity_parts", parts)
        return parts


_assign = object.__setattr__  # the class is frozen
_COMPUTED = ("_is_contiguous", "_identity_parts")  # from the other attributes
_ATTRIBUTES = tuple(each.name for each in fields(ArrayLayout) if each.name not in _COMPUTED)


@dataclass(frozen=True)
class ArrayView:
    """A view of an array: rows along other axes than the first, a part of the array, or its cells.

    Attributes:
        array: the array as it is stored.
        row_axes: the axes that number the rows, the slowest first; none if the whole array is one row.
        selections: the selected part of each other axis: an index (a row has no such axis then), a slice, or indices.
        block: number of indices along each of ``row_axes`` that are read together.
        is_in_cells: whether a block is one row of flat values (see ``ArrayLayout.in_cells``).
    """

    array: ArrayLayout
    row_axes: tuple[int, ...]
    selections: tuple[int | slice | tuple[int, ...], ...]
    block: tuple[int, ...]
    is_in_cells: bool = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array as it is stored."""
        return (self.array.n_rows, *self.array.axes)

    @property
    def other_axes(self) -> list[int]:
        """The axes that do not number the rows."""
        return [axis for axis in range(len(self.shape)) if axis not in self.row_axes]

    @cached_property
    def row_grid(self) -> tuple[int, ...]:
        """Number of blocks along each of ``row_axes``."""
        return tuple(-(-self.shape[axis] // step) for axis, step in zip(self.row_axes, self.block, strict=True))

    @property
    def has_lines(self) -> bool:
        """Whether rows are numbered along two axes."""
        return len(self.row_axes) > 1 and not self.is_in_cells

    @property
    def is_chunked(self) -> bool:
        """Whether the rows of a block are the rows of chunks."""
        chunks = self.array.chunks
        return chunks is not None and self.block == tuple(chunks[axis] for axis in self.row_axes)

    @cached_property
    def runs(self) -> Runs | None:
        """Places of the rows if each is a few long pieces of an array without chunks; None otherwise."""
        if self.row_axes != (0,) or self.is_in_cells:
            return None
        array, sizes = self.array, self.shape[1:]
        if array.offset is None or array.digests is not None or array.dtype.hasobject:
            return None
        parts = [slice(part, part + 1) if isinstance(part, int) else part for part in self.selections]
        if not all(isinstance(part, slice) and part.step == 1 for part in parts):
            return None
        ranges = [range(size)[part] for part, size in zip(parts, sizes, strict=True) if isinstance(part, slice)]
        # The last axis that is not selected as a whole, and all axes after it, are in one piece.
        axis = max(
            (at for at, (part, size) in enumerate(zip(ranges, sizes, strict=True)) if len(part) < size), default=0
        )
        steps = [math.prod(sizes[at + 1 :]) * array.stored.itemsize for at in range(len(sizes))]
        n_bytes = len(ranges[axis]) * steps[axis]
        if n_bytes < MIN_RUN:
            return None
        begins = np.zeros(1, dtype=np.int64)
        for at in range(axis):
            begins = (begins[:, np.newaxis] + np.array(ranges[at], dtype=np.int64) * steps[at]).reshape(-1)
        begins = begins + ranges[axis].start * steps[axis]
        return Runs(array.offset, math.prod(sizes) * array.stored.itemsize, begins, n_bytes)


class Runs(NamedTuple):
    """Places of a view's rows in an array without chunks: a few pieces of each row of the array.

    Attributes:
        offset: address of the array in its file.
        stride: bytes from a row of the array to the next.
        begins: offset of each piece in a row, shape ``(n_pieces,)``.
        n_bytes: bytes of a piece.
    """

    offset: int
    stride: int
    begins: IntArray
    n_bytes: int


class Codec(ABC):
    """How rows are decoded, as plain data: a codec is pickled and compared, and its text is part of a file's identity.

    The codecs themselves are in ``readers``. A description needs only dtype and shape of decoded rows.
    """

    @abstractmethod
    def decoded(self, array: ArrayLayout) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of a decoded row.

        Args:
            array: the array before decoding.

        Raises:
            H5ValueError: the codec does not support the array's values.
        """

    @abstractmethod
    def decode(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Decode rows into ``out``, which has the same number of rows."""

    @property
    def identity(self) -> str:
        """The part of a file's identity that covers the codec."""
        return repr(self)


@dataclass(frozen=True)
class Decoding:
    """How rows are decoded.

    Attributes:
        array: the array with stored rows.
        codec: decodes the rows.
    """

    array: ArrayLayout
    codec: Codec


def _indices_of(selection: int | slice | Sequence[int], n: int) -> int | slice | tuple[int, ...]:
    """Return the selected indices of an axis, counted from its start; an ascending slice stays a slice.

    Args:
        selection: an index, a slice, or indices; negative ones count from the end.
        n: length of the axis.

    Raises:
        IndexError: an index is out of range, or the slice is empty; the text names it.
    """
    if isinstance(selection, slice):
        numbers = range(n)[selection]
        for name, limit in (("start", selection.start), ("stop", selection.stop)):
            if limit is not None and not -n <= limit <= n:
                raise IndexError(f"a slice with the {name} {limit}")
        if n and not numbers:
            raise IndexError(f"an empty slice from {selection.start} to {selection.stop}")
        return slice(numbers.start, numbers.stop, numbers.step) if numbers.step > 0 else tuple(numbers)
    for index in [selection] if isinstance(selection, int) else selection:
        if not -n <= index < n:
            raise IndexError(f"index {index}")
    return range(n)[selection] if isinstance(selection, int) else tuple(range(n)[index] for index in selection)


def stack_arrays(arrays: Sequence[ArrayLayout], key: str) -> ArrayLayout:
    """Return arrays of one file, of one shape, as one array with a new last axis.

    Numbers of several dtypes are converted to NumPy's promoted dtype, if it represents all of them.

    Args:
        arrays: the arrays, in the order of the axis.
        key: name of the stacked array.

    Raises:
        H5ValueError: arrays differ in shape, hold no numbers, or have dtypes without a common dtype.
    """
    first = arrays[0]
    for array in arrays:
        if kind_of(array.dtype) != "number" or array.categories is not None:
            problem = "is categorical" if array.categories is not None else f"has the dtype {dtype_text(array.dtype)}"
            raise H5ValueError(
                f"{array.key!r} in {array.path!r} {problem}, but only arrays of numbers are stacked. Give it a field "
                "of its own."
            )
        if (array.n_rows, array.row_shape) != (first.n_rows, first.row_shape):
            raise H5ValueError(
                f"{first.key!r} has the shape {(first.n_rows, *first.row_shape)} and {array.key!r} has "
                f"{(array.n_rows, *array.row_shape)} in {array.path!r}, but stacked arrays must have one shape. Stack "
                "arrays of one shape, or give each a field of its own."
            )
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))
    dtype = np.result_type(*dtypes)
    if not all(_holds_all_numbers(dtype, part) for part in dtypes):
        raise H5ValueError(
            f"{listing(array.key for array in arrays)} in {first.path!r} have the dtypes {listing(map(str, dtypes))}, "
            "but no dtype represents the numbers of all. Give each a field of its own."
        )
    views = [array.view for array in arrays if array.view is not None]
    is_viewed = len(views) == len(arrays)  # arrays in one piece may have rows along two axes without a view
    if is_viewed and len({view.block for view in views}) > 1:  # chunks differ: slabs of one size
        block = tuple(map(max, *(view.block for view in views)))
        arrays = [
            array.with_changes(view=replace(view, block=block)) for array, view in zip(arrays, views, strict=True)
        ]
    return first.with_changes(
        key=key,
        name=path_of(key),
        members=(),
        row_shape=(*first.row_shape, len(arrays)),
        dtype=dtype,
        filters=(),
        offset=None,
        n_stored_bytes=sum(array.n_stored_bytes for array in arrays),
        plain_reason=None,
        integrity=min(array.integrity for array in arrays),
        table=None,
        digests=None,
        references=None,
        packing=None,
        categories=None,
        view=arrays[0].view if is_viewed else None,
        decoding=None,
        stacked=tuple(arrays),
    )


def _holds_all_numbers(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Return whether a dtype represents all numbers of another one. NumPy promotes 64-bit integers to float64."""
    if other.kind in "iu" and dtype.kind in "fc":
        part = dtype.type(0).real.dtype
        return other.itemsize * 8 <= np.finfo(part).nmant + 1
    return bool(np.can_cast(other, dtype))


def path_of(key: str) -> str:
    """Return the path of an array from the root of its file."""
    return f"/{'/'.join(part for part in key.split('/') if part not in ('', '.'))}"

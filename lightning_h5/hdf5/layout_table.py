"""Descriptions of many arrays as columns of numbers. Arrays that are alike differ in name, rows and place alone.

An array takes 20 bytes, and 16 for each of its chunks. A description is made when it is asked for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import IntArray, cached_property
from .change_guard import ChangeGuard
from .chunk_index import ChunkTable, grid_of
from .layout import ArrayLayout

__all__ = ["ArrayColumns", "LayoutTable"]


@dataclass(eq=False)
class ArrayColumns:
    """Compact columns that describe the arrays of one file.

    Attributes:
        numbers: number of the template that an array is ``moved`` from; -1 for one that is kept as it is.
        n_rows: length of axis 0; of an opaque scalar the number of its bytes.
        places: where its bytes begin, or the number of its first chunk; of an attribute the number of its value.
        offsets: where chunks lie, of all arrays; -1 for one that was never written.
        sizes: stored bytes of these chunks.
        values: of attributes.
        others: descriptions that are kept as they are, by the number of the array.
    """

    numbers: array[int] = field(default_factory=lambda: array("i"))
    n_rows: array[int] = field(default_factory=lambda: array("q"))
    places: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    values: list[Any] = field(default_factory=list)
    others: dict[int, ArrayLayout] = field(default_factory=dict)

    def append(self, layout: ArrayLayout, number: int | None) -> None:
        """Append an array.

        Args:
            layout: its description.
            number: of the template that it is ``moved`` from; None if it is not.
        """
        for column in (self.numbers, self.n_rows, self.places):
            column.append(0)
        self.put(len(self.numbers) - 1, layout, number)

    def put(self, at: int, layout: ArrayLayout, number: int | None) -> None:
        """Replace an array by another one (see ``append``)."""
        as_stored, place = _as_stored(layout), 0
        if layout.value is None and as_stored.table is None and as_stored.offset is None:
            number = None  # its bytes have no place: it was not written, or lies elsewhere
        if number is None:
            self.others[at] = layout
        elif layout.value is not None:
            place = len(self.values)
            self.values.append(layout.value)
        elif as_stored.table is not None:
            place = len(self.offsets)
            self.offsets.frombytes(as_stored.table.offsets.tobytes())
            self.sizes.frombytes(as_stored.table.sizes.tobytes())
        elif as_stored.offset is not None:
            place = as_stored.offset
        self.numbers[at], self.n_rows[at], self.places[at] = (
            -1 if number is None else number,
            layout.varying_length,
            place,
        )

    def template(self, at: int, templates: Sequence[ArrayLayout]) -> ArrayLayout:
        """Return the array that another one is ``moved`` from, or that one itself."""
        return self.others[at] if self.numbers[at] < 0 else templates[self.numbers[at]]

    def has(self, at: int, layout: ArrayLayout) -> bool:
        """Return whether an array has the rows and the place that the columns have for it."""
        as_stored, place = _as_stored(layout), self.places[at]
        if as_stored.table is None:
            return (layout.varying_length, as_stored.offset) == (self.n_rows[at], place)
        n = len(as_stored.table.offsets)
        recorded = (self.offsets[place : place + n].tobytes(), self.sizes[place : place + n].tobytes())
        chunks = (as_stored.table.offsets.tobytes(), as_stored.table.sizes.tobytes())
        return layout.n_rows == self.n_rows[at] and recorded == chunks


@dataclass(frozen=True, eq=False)
class LayoutTable:
    """Arrays of many parts of files, equally many of each part.

    Attributes:
        templates: arrays that others are ``moved`` from.
        numbers: see ``ArrayColumns``, shape ``(n_parts, n_arrays)``.
        lengths: see ``n_rows`` above, of the same shape.
        starts: ``places`` there, of the same shape.
        offsets: see above, of all chunks.
        sizes: see above.
        values: see above.
        others: see above, by part and array.
    """

    templates: tuple[ArrayLayout, ...]
    numbers: npt.NDArray[np.int32]
    lengths: IntArray
    starts: IntArray
    offsets: IntArray
    sizes: IntArray
    values: list[Any]
    others: dict[tuple[int, int], ArrayLayout]

    @classmethod
    def of(cls, files: Sequence[ArrayColumns], n_arrays: int, templates: Sequence[ArrayLayout]) -> LayoutTable:
        """Return the arrays of files, one after the other.

        Args:
            files: the columns of each file.
            n_arrays: arrays of a part.
            templates: see the class.
        """
        templates, others, values = tuple(templates), dict[tuple[int, int], ArrayLayout](), list[Any]()
        # One more entry is of arrays that are kept as they are, whose number is -1.
        is_chunked = np.array([*(_as_stored(template).table is not None for template in templates), False])
        is_value = np.array([*(template.value is not None for template in templates), False])
        numbers, places, n_before, n_chunks = list[npt.NDArray[np.int32]](), list[IntArray](), 0, 0
        for columns in files:
            numbers.append(np.frombuffer(columns.numbers, np.int32))
            places.append(np.frombuffer(columns.places, np.int64))
            if n_chunks or values:
                places[-1] = places[-1] + n_chunks * is_chunked[numbers[-1]] + len(values) * is_value[numbers[-1]]
            n_chunks += len(columns.offsets)
            values += columns.values
            others |= {divmod(n_before + at, n_arrays): layout for at, layout in columns.others.items()}
            n_before += len(numbers[-1])
        rows, offsets, sizes = (
            np.concatenate(
                [np.empty(0, np.int64), *(np.frombuffer(getattr(columns, name), np.int64) for columns in files)]
            )
            for name in ("n_rows", "offsets", "sizes")
        )
        return cls(
            templates,
            np.concatenate(numbers).reshape(-1, n_arrays),
            rows.reshape(-1, n_arrays),
            np.concatenate(places).reshape(-1, n_arrays),
            offsets,
            sizes,
            values,
            others,
        )

    def with_column(
        self, at: int, values: Sequence[npt.NDArray[Any]], describe: Callable[[npt.NDArray[Any]], ArrayLayout]
    ) -> LayoutTable:
        """Return the table with one more array of each part, whose values come from elsewhere.

        Args:
            at: number of the array among those of a part; later ones move up.
            values: of each part.
            describe: describes the values of a part; values of as many rows are alike.
        """
        sizes = [len(column) for column in values]
        part_of_length = {n: part for part, n in reversed(list(enumerate(sizes)))}
        template_of_length = {n: len(self.templates) + at_end for at_end, n in enumerate(part_of_length)}
        return replace(
            self,
            templates=(*self.templates, *(describe(values[part]) for part in part_of_length.values())),
            numbers=np.insert(self.numbers, at, [template_of_length[n] for n in sizes], axis=1),
            lengths=np.insert(self.lengths, at, sizes, axis=1),
            starts=np.insert(self.starts, at, len(self.values) + np.arange(len(sizes)), axis=1),
            values=[*self.values, *values],
            others={(part, index + (index >= at)): layout for (part, index), layout in self.others.items()},
        )

    def without_column(self, at: int) -> LayoutTable:
        """Return the table without an array of each part."""
        return replace(
            self,
            numbers=np.delete(self.numbers, at, axis=1),
            lengths=np.delete(self.lengths, at, axis=1),
            starts=np.delete(self.starts, at, axis=1),
            others={
                (part, index - (index > at)): layout for (part, index), layout in self.others.items() if index != at
            },
        )

    @cached_property
    def n_rows(self) -> IntArray:
        """Length of axis 0 of each array, shape ``(n_parts, n_arrays)``."""
        is_opaque = np.array([*(template.is_opaque for template in self.templates), False])
        return np.where(is_opaque[self.numbers], 1, self.lengths) if is_opaque.any() else self.lengths

    def layout(self, part: int, at: int, path: str, key: str, guard: ChangeGuard) -> ArrayLayout:
        """Return the description of an array.

        Args:
            part: number of the part.
            at: number of the array there.
            path: the file.
            key: name of the array.
            guard: change guard of the file.
        """
        number = int(self.numbers[part, at])
        if number < 0:
            return self.others[part, at].guarded(guard)
        template, n_rows, place = self.templates[number], int(self.lengths[part, at]), int(self.starts[part, at])
        if template.value is not None:
            return template.with_changes(path=path, key=key, name=key, value=self.values[place], guard=guard)
        stored = _as_stored(template)
        if stored.table is None:
            return template.moved(path, key, n_rows, place, None, guard)
        table = self._chunks(stored.table, stored.rows_per_chunk, n_rows, place)
        return template.moved(path, key, n_rows, None, table, guard)

    def first_bytes(self, parts: IntArray, at: int) -> IntArray:
        """Return where the bytes of arrays begin (see ``ArrayLayout.first_byte``); -1 if that needs a description.

        Args:
            parts: numbers of the parts.
            at: number of the array there.
        """
        is_chunked = np.array([*(_as_stored(template).table is not None for template in self.templates), False])
        is_known = np.array([*(template.value is None for template in self.templates), False])
        numbers, starts = self.numbers[parts, at], self.starts[parts, at]
        is_known, is_chunked = is_known[numbers] & (self.n_rows[parts, at] > 0), is_chunked[numbers]
        if len(self.offsets):
            starts = np.where(is_chunked, self.offsets[np.where(is_chunked & is_known, starts, 0)], starts)
        return np.where(is_known, starts, -1)

    def places(self, parts: IntArray, at: int) -> Iterator[tuple[int, int | None, int, ChunkTable | None] | None]:
        """Yield rows, offset, stored bytes and chunk table of the arrays of parts; None for one that is kept as it is.

        Args:
            parts: numbers of the parts.
            at: number of the array there.
        """
        forms = [
            (_as_stored(template), _unit_bytes(_as_stored(template)), template.plain_reason is None)
            for template in self.templates
        ]
        columns = (column[parts, at].tolist() for column in (self.numbers, self.lengths, self.starts))
        for number, n_rows, place in zip(*columns, strict=True):
            if number < 0:
                yield None
                continue
            template, row_bytes, is_read_here = forms[number]
            if template.table is None:
                yield n_rows, place if is_read_here else None, n_rows * row_bytes, None
                continue
            table = self._chunks(template.table, template.rows_per_chunk, n_rows, place)
            yield n_rows, None, int(table.sizes.sum()), table if is_read_here else None

    def _chunks(self, alike: ChunkTable, rows_per_chunk: int, n_rows: int, place: int) -> ChunkTable:
        """Return the chunk table of an array with other rows than the one that has the table ``alike``."""
        grid = (-(-n_rows // rows_per_chunk), *alike.grid[1:])
        chunks = slice(place, place + math.prod(grid))
        return ChunkTable(grid, self.offsets[chunks], self.sizes[chunks], np.zeros(math.prod(grid), np.uint32))

    def n_chunks(self, at: int) -> IntArray:
        """Return the chunks of the arrays at a place of their parts; 0 without."""
        counts = np.zeros(len(self.numbers), dtype=np.int64)
        for number, template in enumerate(self.templates):
            if template.chunks is not None and template.table is not None:
                per_row = math.prod(grid_of(template.axes, template.chunks[1:]))
                is_alike = self.numbers[:, at] == number
                counts[is_alike] = -(-self.n_rows[is_alike, at] // template.chunks[0]) * per_row
        return counts

    def suspicious(self, arrays: Sequence[int], n_bytes: IntArray) -> IntArray:
        """Return the parts of which arrays share bytes, or have chunks that lie beyond the end of the file.

        Parts with arrays that are kept as they are may, too, so they are always returned.

        Args:
            arrays: numbers of different arrays of a part.
            n_bytes: size of each part's file.
        """
        parts, starts, sizes = [], [], []
        for at in arrays:
            numbers, n_chunks = self.numbers[:, at], self.n_chunks(at)
            row_bytes = np.array(
                [*(-1 if template.offset is None else _unit_bytes(template) for template in self.templates), -1]
            )
            parts_in_one_piece = np.flatnonzero(row_bytes[numbers] >= 0)
            parts.append(parts_in_one_piece)
            starts.append(self.starts[parts_in_one_piece, at])
            sizes.append(self.lengths[parts_in_one_piece, at] * row_bytes[numbers[parts_in_one_piece]])
            ends = np.cumsum(n_chunks)
            chunks = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.starts[:, at] - ends + n_chunks, n_chunks)
            is_written = self.offsets[chunks] >= 0
            parts.append(np.repeat(np.arange(len(numbers)), n_chunks)[is_written])
            starts.append(self.offsets[chunks][is_written])
            sizes.append(self.sizes[chunks][is_written])
        part, start, size = (np.concatenate(columns) for columns in (parts, starts, sizes))
        order = np.lexsort((start, part))
        part, start, size = part[order], start[order], size[order]
        is_shared = (np.diff(part) == 0) & (np.diff(start) < size[:-1])
        other_parts = np.array([part for part, _ in self.others], dtype=np.int64)
        return np.unique(np.concatenate([part[1:][is_shared], part[start > n_bytes[part] - size], other_parts]))


def _unit_bytes(layout: ArrayLayout) -> int:
    """Return the stored bytes of one of the ``lengths``."""
    return 1 if layout.is_opaque else layout.stored_row_bytes


def _as_stored(layout: ArrayLayout) -> ArrayLayout:
    return layout if layout.references is None else layout.references

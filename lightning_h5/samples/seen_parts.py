"""The arrays of parts with the axes that samples use; arrays are described on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..catalog import PartLayouts, StoredParts, filled, places_of
from ..counters import Counters
from ..hdf5 import ArrayLayout, ChangeGuard, check_no_overlap, file_identity, identity_text, meaning_of, path_of
from ..readers import ChunkLoader, fallback_reason
from ..types import IntArray
from .segment_fields import SegmentField

__all__ = ["DescribedParts"]

PARTS_AT_A_TIME = 1 << 12  # maximum number of parts whose schemas are listed at a time


@dataclass(eq=False)
class DescribedParts(PartLayouts):
    """Parts of which some arrays are seen in some way.

    Attributes:
        stored: the arrays as they are stored.
        columns: for each field its array.
        fields: for each field how its arrays are seen.
        kinds: see ``PartLayouts``.
        firsts: see ``PartLayouts``.
        periods: for each kind, see ``SegmentField.seen``.
        n_values: for each kind, see there.
    """

    stored: StoredParts
    columns: tuple[int, ...]
    fields: tuple[SegmentField, ...]
    kinds: npt.NDArray[np.int32]
    firsts: IntArray
    periods: list[int]
    n_values: list[int | None]

    @property
    def n_fields(self) -> int:
        """See ``PartLayouts.n_fields``."""
        return len(self.columns)

    def one(self, part: int, field: int) -> ArrayLayout:
        """See ``PartLayouts.one``."""
        kind, stored = self.kinds[part], self.stored.one(part, self.columns[field])
        return self.fields[field].seen(stored, self.periods[kind], self.n_values[kind])

    def with_fields(self, fields: Sequence[int]) -> DescribedParts:
        """See ``PartLayouts.with_fields``."""
        columns = tuple(self.columns[field] for field in fields)
        return replace(self, columns=columns, fields=tuple(self.fields[field] for field in fields))

    def first_bytes(self, parts: IntArray, field: int) -> list[int | str]:
        """See ``PartLayouts.first_bytes``."""
        places: list[int | str] = list(self.stored.table.first_bytes(parts, self.columns[field]).tolist())
        unknown = [at for at, place in enumerate(places) if place == -1]
        for at, place in zip(unknown, super().first_bytes(parts[unknown], field), strict=True):
            places[at] = place
        return places

    def places(self, field: int) -> IntArray:
        """See ``PartLayouts.places``."""
        table, column = self.stored.table, self.columns[field]
        has_place = places_of([arrays[field] for arrays in self.examples]) >= 0
        if not has_place.any():
            return np.full(len(self), -1)
        is_read = has_place[self.kinds] & (table.numbers[:, column] >= 0)
        is_read &= np.array([guard.staging is None for guard in self.stored.guards])[self.stored.files]
        return np.where(is_read, table.starts[:, column], -1)

    def name_pattern(self, field: int) -> str:
        """See ``PartLayouts.name_pattern``."""
        return self.stored.names.key_pattern(self.columns[field])

    def n_rows(self, field: int) -> IntArray:
        """See ``PartLayouts.n_rows``."""
        is_as_stored = self.fields[field].is_as_stored
        return self.stored.table.n_rows[:, self.columns[field]] if is_as_stored else super().n_rows(field)

    def check_places(self) -> None:
        """Raise an ``H5CorruptError`` if arrays of a part share bytes, or have chunks beyond the end of the file."""
        stored = self.stored
        stored_columns = [at for column in self.columns for at in stored.columns_of(column)]
        column_by_key = {stored.names.keys[column]: column for column in stored_columns}
        n_bytes = np.array([guard.n_bytes for guard in stored.guards])[stored.files]
        for part in stored.table.suspicious(sorted(column_by_key.values()), n_bytes).tolist():
            check_no_overlap(self[part])
            for array in [array for layout in self[part] for array in layout.stored_arrays]:
                if array.table is not None and array.view is None and fallback_reason(array) is None:
                    ChunkLoader(array, Counters())  # compares the places of chunks with the size of the file

    def identity_of(self, path: str, guard: ChangeGuard, parts: IntArray) -> str:
        """See ``PartLayouts.identity_of``."""
        others, status = [other.path for other in guard.others], guard.object_status
        has_meaning = any(meaning_of(array) for arrays in self.examples for array in arrays)
        if has_meaning or guard.grows:
            layouts = (self.one(part, field) for part in parts.tolist() for field in range(self.n_fields))
            return file_identity(path, layouts, grows=guard.grows, others=others, status=status)
        return file_identity(path, (), others=others, schemas=self._schemas(parts), status=status)

    def _schemas(self, parts: IntArray) -> Iterator[bytes]:
        """Yield the bytes of each array for the identity of a file, without describing the array."""
        for start in range(0, len(parts), PARTS_AT_A_TIME):
            batch = parts[start : start + PARTS_AT_A_TIME]
            stars, kinds = [self.stored.stars[part] for part in batch.tolist()], self.kinds[batch].tolist()
            of_fields = [self._schemas_of(field, batch, stars, kinds) for field in range(self.n_fields)]
            yield b"".join([text for of_part in zip(*of_fields, strict=True) for text in of_part])

    def _schemas_of(self, field: int, parts: IntArray, stars: list[str], kinds: list[int]) -> Iterator[bytes]:
        table, column, examples = self.stored.table, self.columns[field], [arrays[field] for arrays in self.examples]
        key = self.stored.names.key_pattern(column)
        in_path = path_of(key)
        is_as_stored = self.fields[field].is_as_stored
        stars = [self.stored.names.star(column, star) for star in stars]
        for part, star, kind, place in zip(parts.tolist(), stars, kinds, table.places(parts, column), strict=True):
            example = examples[kind]
            if place is None:
                layout = self.one(part, field)
                place, name = (layout.n_rows, layout.offset, layout.n_stored_bytes, layout.table), layout.name
            else:
                name = filled(in_path, star)
            n_rows, offset, n_stored, chunks = place
            n_rows = n_rows if is_as_stored else example.n_rows
            yield identity_text(example, filled(key, star), name, n_rows, offset, n_stored, chunks)

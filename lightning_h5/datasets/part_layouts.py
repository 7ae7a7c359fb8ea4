"""The arrays of parts of files. Parts with alike arrays are of one kind, of which one is described."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..hdf5 import (
    ArrayLayout,
    ChangeGuard,
    LayoutTable,
    check_no_overlap,
    file_identity,
    identity_text,
    meaning_of,
    path_of,
    stack_arrays,
)
from ..readers import ChunkLoader, FieldLayouts, fallback_reason
from ..types import IntArray, cached_property
from .segment_fields import SegmentField
from .segment_parts import PartNames, filled

__all__ = ["DescribedParts", "ListedParts", "PartLayouts", "StoredParts"]


PARTS_AT_A_TIME = 1 << 12  # whose schemas are listed


class PartLayouts(Sequence[tuple[ArrayLayout, ...]]):
    """For each part of files its arrays, in the order of the dataset's fields.

    Attributes:
        kinds: kind of each part. Arrays of parts of one kind differ in their names, the place of their bytes, and their
            rows, if these are rows as stored; shape ``(n_parts,)``.
        firsts: first part of each kind.
        whole_digest: what ``whole_digest`` returned of them; None before.
    """

    kinds: npt.NDArray[np.int32]
    firsts: IntArray
    whole_digest: tuple[str | None] | None = None
    _identity: str | None = None

    @property
    def n_fields(self) -> int:
        """Arrays of a part."""
        raise NotImplementedError

    def one(self, part: int, field: int) -> ArrayLayout:
        """Return an array of a part."""
        raise NotImplementedError

    def n_rows(self, field: int) -> IntArray:
        """Return the number of rows of an array of each part."""
        return self.of_kinds(lambda arrays: arrays[field].n_rows)

    def first_bytes(self, parts: IntArray, field: int) -> list[int | str]:
        """Return where the bytes of a field's arrays begin in their files; the names of those without bytes."""
        arrays = (self.one(part, field) for part in parts.tolist())
        return [array.name if (place := array.first_byte) is None else place for array in arrays]

    def name_pattern(self, field: int) -> str:
        """Return the name that a field's arrays have in all parts, with a ``*`` for what differs."""
        return self.one(0, field).key

    def with_fields(self, fields: Sequence[int]) -> PartLayouts:
        """Return the parts with some of their arrays."""
        raise NotImplementedError

    def identity_of(self, path: str, guard: ChangeGuard, parts: IntArray) -> str:
        """Return the identity of a file (see ``file_identity``), from its parts."""
        raise NotImplementedError

    def identity(self, paths: Sequence[str], guards: Sequence[ChangeGuard], files: IntArray) -> str:
        """Return a digest of what files hold (see ``file_identity``), in their order; it is computed once.

        Args:
            paths: the files.
            guards: of the files.
            files: number of each part's file.
        """
        if self._identity is None:
            n_parts = np.bincount(files, minlength=len(paths))
            parts = np.split(np.argsort(files, kind="stable"), np.cumsum(n_parts)[:-1])
            each = [self.identity_of(*one) for one in zip(paths, guards, parts, strict=True)]
            self._identity = each[0] if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()[:32]
        return self._identity

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, part: Any) -> Any:
        if isinstance(part, slice):
            return [self[at] for at in range(len(self))[part]]
        part = range(len(self))[part]
        return tuple(self.one(part, field) for field in range(self.n_fields))

    @cached_property
    def examples(self) -> list[tuple[ArrayLayout, ...]]:
        """The arrays of the first part of each kind."""
        return [self[part] for part in self.firsts.tolist()]

    def of_field(self, field: int) -> FieldLayouts:
        """Return the arrays of a field."""
        return FieldLayouts(self.kinds, self.firsts, self.n_rows(field), partial(self.one, field=field))

    def of_kinds(self, value: Callable[[tuple[ArrayLayout, ...]], Any], dtype: Any = np.int64) -> npt.NDArray[Any]:
        """Return a value of each part that follows from its kind."""
        return np.array([value(arrays) for arrays in self.examples], dtype=dtype)[self.kinds]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "examples"}


class ListedParts(PartLayouts):
    """Parts that are described one by one.

    Args:
        listed: the arrays of each.
    """

    def __init__(self, listed: Sequence[tuple[ArrayLayout, ...]]) -> None:
        self._listed = tuple(listed)
        self.examples = list(self._listed)
        self.firsts = np.arange(len(self._listed))
        self.kinds = self.firsts.astype(np.int32)

    @property
    def n_fields(self) -> int:
        """See ``PartLayouts.n_fields``."""
        return len(self._listed[0]) if self._listed else 0

    def one(self, part: int, field: int) -> ArrayLayout:
        """See ``PartLayouts.one``."""
        return self._listed[part][field]

    def with_fields(self, fields: Sequence[int]) -> ListedParts:
        """See ``PartLayouts.with_fields``."""
        return ListedParts([tuple(arrays[at] for at in fields) for arrays in self._listed])

    def identity_of(self, path: str, guard: ChangeGuard, parts: IntArray) -> str:
        """See ``PartLayouts.identity_of``."""
        layouts = [array for part in parts.tolist() for array in self._listed[part]]
        return file_identity(path, layouts, grows=guard.grows, others=[other.path for other in guard.others])


@dataclass(frozen=True, eq=False)
class StoredParts:
    """The arrays of parts as they are stored, which are described when they are asked for.

    Attributes:
        table: what is known of the arrays.
        names: how they are called.
        stars: what the ``*`` in a name stands for, for each part.
        files: number of each part's file.
        paths: the files.
        guards: of the files.
        stacks: for a column of several arrays that are stacked, the columns of all of them.
        stacked_as: what such a column is called.
    """

    table: LayoutTable
    names: PartNames
    stars: Sequence[str]
    files: npt.NDArray[np.int32]
    paths: tuple[str, ...]
    guards: tuple[ChangeGuard, ...]
    stacks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stacked_as: Mapping[int, str] = field(default_factory=dict)

    def one(self, part: int, column: int) -> ArrayLayout:
        """Return an array of a part."""
        if column in self.stacks:
            arrays = [self._single(part, at) for at in self.stacks[column]]
            return stack_arrays(arrays, self.stacked_as[column])
        return self._single(part, column)

    def columns_of(self, column: int) -> tuple[int, ...]:
        """Return the columns that a column is made of."""
        return self.stacks.get(column, (column,))

    def check_stacks(self) -> None:
        """Raise an ``H5ValueError`` if arrays that are stacked have different numbers of rows."""
        for column, columns in self.stacks.items():
            n_rows = self.table.n_rows[:, columns]
            if (differs := (n_rows != n_rows[:, :1]).any(axis=1)).any():
                self.one(int(differs.argmax()), column)  # raises

    def _single(self, part: int, column: int) -> ArrayLayout:
        file = int(self.files[part])
        key = self.names.key(column, self.stars[part])
        return self.table.layout(part, column, self.paths[file], key, self.guards[file])

    def kinds(
        self, n_arrays: int, fixed: Sequence[int], further: Sequence[int] | None
    ) -> tuple[npt.NDArray[np.int32], IntArray]:
        """Return the kind of each part, and the first part of each kind, in the order of the parts.

        Args:
            n_arrays: arrays that are alike in parts of a kind: so many of each part.
            fixed: those that also have as many rows.
            further: a number of each part that is also equal; None for none.
        """
        table = self.table
        alone = np.zeros(len(self.files), dtype=np.int64)  # parts with arrays that are like no other
        alike = [at for column in range(n_arrays) for at in self.columns_of(column)]
        for number, part in enumerate(sorted({part for part, at in table.others if at in alike})):
            alone[part] = number + 1
        columns = [alone, *table.numbers[:, alike].T, *table.n_rows[:, fixed].T]
        columns += [] if further is None else [np.asarray(further)]
        each = np.stack(columns, axis=1)
        _, firsts, kinds = np.unique(each, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return np.argsort(order).astype(np.int32)[kinds.reshape(-1)], firsts[order]


@dataclass(eq=False)
class DescribedParts(PartLayouts):
    """Parts of which some arrays are seen in some way.

    Attributes:
        stored: the arrays as they are stored.
        columns: for each field its array.
        seen: for each field how it is seen.
        kinds: see ``PartLayouts``.
        firsts: see ``PartLayouts``.
        periods: for each kind, see ``SegmentField.seen``.
        n_values: for each kind, see there.
    """

    stored: StoredParts
    columns: tuple[int, ...]
    seen: tuple[SegmentField, ...]
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
        return self.seen[field].seen(stored, self.periods[kind], self.n_values[kind])

    def with_fields(self, fields: Sequence[int]) -> DescribedParts:
        """See ``PartLayouts.with_fields``."""
        columns = tuple(self.columns[field] for field in fields)
        return replace(self, columns=columns, seen=tuple(self.seen[field] for field in fields))

    def first_bytes(self, parts: IntArray, field: int) -> list[int | str]:
        """See ``PartLayouts.first_bytes``."""
        places: list[int | str] = list(self.stored.table.first_bytes(parts, self.columns[field]).tolist())
        unknown = [at for at, place in enumerate(places) if place == -1]
        for at, place in zip(unknown, super().first_bytes(parts[unknown], field), strict=True):
            places[at] = place
        return places

    def name_pattern(self, field: int) -> str:
        """See ``PartLayouts.name_pattern``."""
        return self.stored.names.key_pattern(self.columns[field])

    def n_rows(self, field: int) -> IntArray:
        """See ``PartLayouts.n_rows``."""
        is_as_stored = self.seen[field].is_as_stored
        return self.stored.table.n_rows[:, self.columns[field]] if is_as_stored else super().n_rows(field)

    def check_places(self) -> None:
        """Raise an ``H5CorruptError`` if arrays of a part share bytes, or have chunks beyond the end of the file."""
        stored = self.stored
        each = [at for column in self.columns for at in stored.columns_of(column)]
        different = {stored.names.keys[column]: column for column in each}
        n_bytes = np.array([guard.n_bytes for guard in stored.guards])[stored.files]
        for part in stored.table.suspicious(sorted(different.values()), n_bytes).tolist():
            check_no_overlap(self[part])
            for array in [array for one in self[part] for array in one.stored_arrays]:
                if array.table is not None and array.view is None and fallback_reason(array) is None:
                    ChunkLoader(array, Counters())  # compares the places of chunks with the size of the file

    def identity_of(self, path: str, guard: ChangeGuard, parts: IntArray) -> str:
        """See ``PartLayouts.identity_of``."""
        others = [other.path for other in guard.others]
        has_more = any(meaning_of(array) for arrays in self.examples for array in arrays)
        layouts = (self.one(part, field) for part in parts.tolist() for field in range(self.n_fields))
        if has_more or guard.grows:
            return file_identity(path, layouts, grows=guard.grows, others=others)
        return file_identity(path, (), others=others, schemas=self._schemas(parts))

    def _schemas(self, parts: IntArray) -> Iterator[bytes]:
        """Yield what the identity of a file has of each array, without describing it."""
        for start in range(0, len(parts), PARTS_AT_A_TIME):
            some = parts[start : start + PARTS_AT_A_TIME]
            stars, kinds = [self.stored.stars[part] for part in some.tolist()], self.kinds[some].tolist()
            each = [self._schemas_of(field, some, stars, kinds) for field in range(self.n_fields)]
            yield b"".join([text for of_part in zip(*each, strict=True) for text in of_part])

    def _schemas_of(self, field: int, parts: IntArray, stars: list[str], kinds: list[int]) -> Iterator[bytes]:
        table, column, examples = self.stored.table, self.columns[field], [arrays[field] for arrays in self.examples]
        key = self.stored.names.key_pattern(column)
        in_path = path_of(key)
        is_as_stored = self.seen[field].is_as_stored
        stars = [self.stored.names.star(column, star) for star in stars]
        for part, star, kind, known in zip(parts.tolist(), stars, kinds, table.places(parts, column), strict=True):
            example = examples[kind]
            if known is None:
                one = self.one(part, field)
                known, name = (one.n_rows, one.offset, one.n_stored_bytes, one.table), one.name
            else:
                name = filled(in_path, star)
            n_rows, offset, n_stored, chunks = known
            n_rows = n_rows if is_as_stored else example.n_rows
            yield identity_text(example, filled(key, star), name, n_rows, offset, n_stored, chunks)

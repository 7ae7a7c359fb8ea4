"""The arrays of parts of files. Parts with alike arrays are of one kind, of which one is described."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayLayout, ChangeGuard, LayoutTable, file_identity, stack_arrays
from ..readers import FieldLayouts
from ..types import IntArray, cached_property
from .part_names import PartNames

__all__ = ["ListedParts", "PartLayouts", "StoredParts", "places_of"]


class PartLayouts(Sequence[tuple[ArrayLayout, ...]]):
    """For each part of files its arrays, in the order of the dataset's fields.

    Attributes:
        kinds: kind of each part. Arrays of parts of one kind differ in their names, the place of their bytes, and their
            rows, if these are rows as stored; shape ``(n_parts,)``.
        firsts: first part of each kind.
        whole_digest: the result of ``whole_digest``; None before its first call.
    """

    kinds: npt.NDArray[np.int32]
    firsts: IntArray
    whole_digest: tuple[str | None] | None = None
    _identity: str | None = None

    @property
    @abstractmethod
    def n_fields(self) -> int:
        """Arrays of a part."""
        ...

    @abstractmethod
    def one(self, part: int, field: int) -> ArrayLayout:
        """Return an array of a part."""
        ...

    def n_rows(self, field: int) -> IntArray:
        """Return the number of rows of an array of each part."""
        return self.of_kinds(lambda arrays: arrays[field].n_rows)

    def first_bytes(self, parts: IntArray, field: int) -> list[int | str]:
        """Return the first byte of a field's arrays in their files; the name of an array without bytes."""
        arrays = (self.one(part, field) for part in parts.tolist())
        return [array.name if (place := array.first_byte) is None else place for array in arrays]

    def places(self, field: int) -> IntArray:
        """Return where the rows of a field's array begin in the file of each part.

        -1 for an array of which that is not all that a reader needs: its rows do not follow each other there, they are
        decoded, or they are stored otherwise than those of the first array that has a place.
        """
        return places_of([self.one(part, field) for part in range(len(self))])

    def name_pattern(self, field: int) -> str:
        """Return the name of a field's arrays in all parts, with a ``*`` for the text that differs."""
        return self.one(0, field).key

    @abstractmethod
    def with_fields(self, fields: Sequence[int]) -> PartLayouts:
        """Return the parts with some of their arrays."""
        ...

    @abstractmethod
    def identity_of(self, path: str, guard: ChangeGuard, parts: IntArray) -> str:
        """Return the identity of a file (see ``file_identity``), from its parts."""
        ...

    def identity(self, paths: Sequence[str], guards: Sequence[ChangeGuard], files: IntArray) -> str:
        """Return a digest of the contents of files (see ``file_identity``), in their order; it is computed once.

        Args:
            paths: the files.
            guards: of the files.
            files: number of each part's file.
        """
        if self._identity is None:
            n_parts = np.bincount(files, minlength=len(paths))
            parts = np.split(np.argsort(files, kind="stable"), np.cumsum(n_parts)[:-1])
            digests = [self.identity_of(*file) for file in zip(paths, guards, parts, strict=True)]
            joined = "".join(digests)
            self._identity = joined if len(digests) == 1 else hashlib.sha256(joined.encode()).hexdigest()[:32]
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
        others, status = [other.path for other in guard.others], guard.object_status
        return file_identity(path, layouts, grows=guard.grows, others=others, status=status)


def places_of(arrays: Sequence[ArrayLayout]) -> IntArray:
    """Return where the rows of arrays begin in their files (see ``PartLayouts.places``)."""
    plain = [array if _has_place(array) else None for array in arrays]
    first = next((array for array in plain if array is not None), None)
    return np.array(
        [-1 if array is None or not _are_alike(array, first) else array.offset for array in plain], np.int64
    )


def _has_place(array: ArrayLayout) -> bool:
    is_as_stored = array.view is None and array.decoding is None and array.references is None and not array.stacked
    is_file = array.guard.staging is None and not array.guard.is_remote
    return is_as_stored and is_file and array.digests is None and array.value is None and array.offset is not None


def _are_alike(array: ArrayLayout, other: ArrayLayout | None) -> bool:
    return other is not None and (array.stored, array.axes, array.members) == (other.stored, other.axes, other.members)


@dataclass(frozen=True, eq=False)
class StoredParts:
    """The stored arrays of parts, which are described on request.

    Attributes:
        table: compact descriptions of the arrays.
        names: of parts and arrays.
        stars: the text that the ``*`` in a name stands for, for each part.
        files: number of each part's file.
        paths: the files.
        guards: of the files.
        stacks: for a column of several arrays that are stacked, the columns of all of them.
        stacked_as: the name of such a column.
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
        """Return the columns that are stacked in a column; itself if none are."""
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
            n_arrays: parts are of one kind if so many of their arrays are alike.
            fixed: arrays that also have as many rows in parts of a kind.
            further: numbers, one a part, that are also equal in parts of a kind; None for none.
        """
        table = self.table
        alone = np.zeros(len(self.files), dtype=np.int64)  # numbers parts with an array that is like no other
        alike = [at for column in range(n_arrays) for at in self.columns_of(column)]
        for number, part in enumerate(sorted({part for part, at in table.others if at in alike})):
            alone[part] = number + 1
        columns = [alone, *table.numbers[:, alike].T, *table.n_rows[:, fixed].T]
        columns += [] if further is None else [np.asarray(further)]
        features = np.stack(columns, axis=1)
        _, firsts, kinds = np.unique(features, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return np.argsort(order).astype(np.int32)[kinds.reshape(-1)], firsts[order]

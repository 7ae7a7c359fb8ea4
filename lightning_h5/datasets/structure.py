"""How the fields of a row become a sample or a batch: one value, a tuple or a dict; transforms; an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.utils.data import default_collate

from ..errors import H5ValueError
from ..files import FieldNames
from ..types import Draws, IntArray
from .randomness import asked_for, generators

__all__ = ["Column", "Part", "SampleStructure", "Transform"]

Transform: TypeAlias = Callable[..., Any]
"""Takes a value; also ``rng`` (a NumPy generator) or ``generator`` (torch's), where it has such a parameter."""

Column: TypeAlias = torch.Tensor | list[Any]
"""One field of a batch: a tensor, or nested lists of str."""


@dataclass(frozen=True)
class Part:
    """The input of a sample, or its target.

    Attributes:
        fields: what it is made of.
        transform: runs on it, one sample at a time.
        flags: for each field whether a sample has it as a bool of Python; none where empty.
    """

    fields: FieldNames
    transform: Transform | None = None
    flags: tuple[bool, ...] = ()

    def build(self, values: Sequence[Any]) -> Any:
        """The value, a tuple or a dict, of a row or of a whole batch."""
        if self.fields.kind == "single":
            return values[0]
        return tuple(values) if self.fields.kind == "tuple" else dict(zip(self.fields.names, values, strict=True))

    @cached_property
    def asks_for(self) -> tuple[str, ...]:
        """The generators that the transform asks for."""
        return asked_for(self.transform)

    def sample(self, columns: Sequence[Column], place: int, row: int, draws: Draws) -> Any:
        """One row's part, transformed. Input and target of a row have generators that draw the same."""
        values = [column[place] for column in columns]
        if self.flags:
            values = [bool(value) if flag else value for value, flag in zip(values, self.flags, strict=True)]
        value = self.build(values)
        return value if self.transform is None else self.transform(value, **generators(self.asks_for, draws, row))

    def batch(self, columns: Sequence[Column], rows: IntArray, draws: Draws) -> Any:
        """All rows' part; as it was read where nothing runs on single samples."""
        if self.transform is None:
            return self.build(columns)
        if not len(rows):
            raise H5ValueError(
                "a batch of no rows was asked for, and the transform runs on single samples. Ask for rows."
            )
        batch = default_collate([self.sample(columns, place, row, draws) for place, row in enumerate(rows.tolist())])
        # torch makes a list of tuples' parts; without a transform it is a tuple.
        return tuple(batch) if self.fields.kind == "tuple" and isinstance(batch, list) else batch


@dataclass(frozen=True)
class SampleStructure:
    """What a sample looks like: its input, its target if any, and its index if asked for.

    Attributes:
        x: the input; the first columns of what is read.
        y: the target, the columns after them; or None.
        with_index: put each row's index last in a tuple, or under ``"index"`` in a dict.
        n_rows: of the dataset, where rows' numbers go beyond them: those are shown as they are within; else 0.
    """

    x: Part
    y: Part | None
    with_index: bool
    n_rows: int = 0

    def __post_init__(self) -> None:
        if self.with_index and self.y is None and self.x.fields.kind == "dict" and "index" in self.x.fields.names:
            raise H5ValueError(
                "with_index=True would overwrite the field 'index' of x_key. Call the field something else."
            )

    @cached_property
    def has_transforms(self) -> bool:
        """Whether anything runs on single samples."""
        return self.x.transform is not None or (self.y is not None and self.y.transform is not None)

    @cached_property
    def asks(self) -> bool:
        """Whether a transform asks for a generator."""
        return bool(self.x.asks_for or (self.y is not None and self.y.asks_for))

    def samples(self, columns: Sequence[Column], rows: IntArray, draws: Draws) -> list[Any]:
        """A list of samples."""
        return [
            self._join([part.sample(columns[own], place, row, draws) for part, own in self._parts], self._shown(row))
            for place, row in enumerate(rows.tolist())
        ]

    def batch(self, columns: Sequence[Column], rows: IntArray, draws: Draws) -> Any:
        """A collated batch."""
        parts = [part.batch(columns[own], rows, draws) for part, own in self._parts]
        return self._join(parts, torch.from_numpy(self._shown(rows.copy())) if self.with_index else None)

    def _shown(self, number: Any) -> Any:
        """What ``with_index`` gives for a row, or rows."""
        return number % self.n_rows if self.n_rows else number

    @cached_property
    def _parts(self) -> list[tuple[Part, slice]]:
        """Each part, and which columns are its own."""
        n_x = len(self.x.fields.keys)
        parts = [(self.x, slice(n_x))]
        return parts if self.y is None else [*parts, (self.y, slice(n_x, None))]

    @cached_property
    def is_as_read(self) -> bool:
        """Whether a batch is the tuple of the fields as they were read."""
        if self.y is None or self.has_transforms or self.with_index:
            return False
        return self.x.fields.kind == self.y.fields.kind == "single"

    def _join(self, parts: list[Any], index: Any) -> Any:
        if self.with_index and len(parts) == 1 and isinstance(parts[0], dict):
            return {**parts[0], "index": index}
        if self.with_index:
            parts = [*parts, index]
        return parts[0] if len(parts) == 1 else tuple(parts)

"""Conversion of rows to samples and batches: transforms, normalization, collation of several shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from ..errors import H5ValueError, listing, named
from ..hdf5 import FieldNames
from ..readers.buffers import BufferPool, Column, copied_alone, tensor_of
from ..samples import CsrRows, PatchRows
from ..types import Draws, IntArray, cached_property
from .collate import Collate, axis_length, collated, collated_samples, of_one
from .joined_steps import JoinedField, Joint, columns_of, joined_fields, sample_ends
from .multiply_add import Affine
from .sample_errors import SampleErrors, is_of_sample
from .user_functions import AskedFor, add_note, asked_for, generators, note_rows

__all__ = [
    "Describe",
    "FieldPlan",
    "SampleLayout",
    "SamplePart",
    "Transform",
    "numpy_dtype_like",
]


Transform: TypeAlias = Callable[..., Any]
"""A function of a value, and optionally of ``rng`` (a NumPy generator) or ``generator`` (a torch generator)."""

Describe: TypeAlias = Callable[[IntArray], str]
"""Returns the files and row numbers of rows, as text for a message."""


@dataclass(frozen=True, eq=False)
class FieldPlan:
    """How a field is converted between file and batch: dtypes and normalization. Readers, caches and shards all use it.

    Attributes:
        stored: dtype of rows as read.
        row_shape: shape of a row.
        dtype: dtype of a batch; None for text, which becomes ``str`` in every encoding.
        affine: normalization; None if rows are only cast.
        is_encoded: rows are decoded one by one, to arrays of several shapes.
        element: dtype of the arrays that are decoded one by one; None keeps the decoder's.
        guards: raise an error if stored rows have a missing value, or a value that the dtype cannot hold.
    """

    stored: np.dtype[Any]
    row_shape: tuple[int, ...]
    dtype: torch.dtype | None
    affine: Affine | None = None
    is_encoded: bool = False
    element: torch.dtype | None = None
    guards: tuple[Callable[[npt.NDArray[Any]], None], ...] = ()

    def check(self, rows: npt.NDArray[Any]) -> None:
        """Raise an ``H5ValueError`` if stored rows have a missing value, or a value that the dtype cannot hold."""
        for guard in self.guards:
            guard(rows)

    @cached_property
    def normalized(self) -> np.dtype[Any]:
        """The dtype of rows before the cast: as stored, or of the normalization."""
        return self.stored if self.affine is None else self.affine.work

    @cached_property
    def gathered(self) -> np.dtype[Any]:
        """The dtype of rows that a reader copies out of decoded chunks: it normalizes or casts them while copying."""
        if self.guards:  # stored values are checked first
            return self.stored
        return numpy_dtype_like(self.dtype, self.stored) if self.affine is None else self.affine.work

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a batch; text is not counted."""
        return 0 if self.dtype is None else math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype of a batch, as text."""
        if self.dtype is None:
            return "decoded row by row" if self.is_encoded else "text"
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.dtype_name} of shape {self.row_shape}"

    def finished(
        self, rows: npt.NDArray[Any] | torch.Tensor, buffers: BufferPool, patches: PatchRows | None = None
    ) -> Column:
        """Normalize and cast stored rows, or rows that were decoded one by one. The caller owns the result.

        Args:
            rows: an array; or a tensor, if rows were decoded one by one to the same shape.
            buffers: allocates memory for batches.
            patches: which patches the rows are; None if they are whole rows.
        """
        if isinstance(rows, torch.Tensor):
            self.check(rows.numpy())
            return rows if self.element is None else rows.to(self.element)
        if patches is not None and self.guards:
            patches.finished(tensor_of(rows))  # memory beyond the edges has arbitrary values
        if self.dtype is not None:
            self.check(rows)
        affine = None if self.affine is None else self.affine.of_shape(rows.shape[1:])
        if affine is not None and rows.dtype == affine.work:
            affine(rows)
        elif affine is not None:
            stored, rows = rows, buffers.array(rows.shape, affine.work)
            affine.take(stored, None, rows)
        return self.cast(rows, buffers)

    def cast(self, rows: npt.NDArray[Any] | torch.Tensor, buffers: BufferPool) -> Column:
        """Return normalized rows in the dtype of a batch, or text as lists; return tensors unchanged."""
        if isinstance(rows, torch.Tensor):
            return rows
        if self.dtype is None:
            values: list[Any] = rows.tolist()
            return [self.as_element(value) for value in values]
        column = tensor_of(rows)
        if column.dtype == self.dtype:
            return column
        return copied_alone(buffers.tensor(tuple(column.shape), self.dtype), column)

    def as_element(self, value: Any) -> Any:
        """Convert an array that was decoded one by one to a tensor; text is returned unchanged."""
        if not isinstance(value, np.ndarray):
            return value
        self.check(value)
        tensor = torch.from_numpy(value)
        return tensor if self.element is None else tensor.to(self.element)


@dataclass(frozen=True)
class SamplePart:
    """The input of a sample, or its target.

    Attributes:
        fields: names and structure of its fields.
        transform: runs on one sample at a time.
        flags: for each field, whether its values become Python bools; empty if none.
        argument: the argument that holds the transform, for messages.
    """

    fields: FieldNames
    transform: Transform | None = None
    flags: tuple[bool, ...] = ()
    argument: str = "transform"

    def build(self, values: Sequence[Any]) -> Any:
        """Return the fields of a row or of a whole batch: a single value, a tuple or a dict."""
        if self.fields.kind == "single":
            return values[0]
        return tuple(values) if self.fields.kind == "tuple" else dict(zip(self.fields.names, values, strict=True))

    @cached_property
    def asks_for(self) -> AskedFor:
        """The generators that the transform requests as arguments, and the generators that it owns."""
        return asked_for(self.transform)

    def __getstate__(self) -> dict[str, Any]:
        # Another process searches for generators again: pickling a function omits the generators that it refers to.
        return {name: value for name, value in self.__dict__.items() if name != "asks_for"}

    def sample(self, columns: Sequence[Column], place: int, row: int, draws: Draws, describe: Describe) -> Any:
        """Return one row's part, transformed. The generators of a row's input and target draw the same numbers."""
        values = [column[place] for column in columns]
        if self.flags:
            values = [bool(value) if flag else value for value, flag in zip(values, self.flags, strict=True)]
        return self.transformed(self.build(values), row, draws, describe)

    def transformed(self, value: Any, row: int, draws: Draws, describe: Describe) -> Any:
        """Apply the transform to one row's value; its errors name the row."""
        if self.transform is None:
            return value
        try:
            return self.transform(value, **generators(self.asks_for, draws, row))
        except Exception as error:
            note_rows(error, self.argument, self.transform, lambda: self._describe([row], describe))
            raise

    def samples(
        self,
        columns: Sequence[Column],
        rows: Sequence[int],
        draws: Draws,
        describe: Describe,
        errors: SampleErrors | None = None,
    ) -> list[Any]:
        """Return the part of all rows, transformed one by one.

        Args:
            columns: the fields of the part.
            rows: numbers of the samples.
            draws: see ``RowDataset.finish``.
            describe: returns the rows as text.
            errors: collects the errors of samples, by place; the part of a failed sample is None. None raises errors.
        """
        if errors is None:
            return [self.sample(columns, place, row, draws, describe) for place, row in enumerate(rows)]
        return _despite_errors(lambda place: self.sample(columns, place, rows[place], draws, describe), rows, errors)

    def _describe(self, rows: Sequence[int], describe: Describe) -> str:
        return f"{listing(self.fields.keys, 3)}, {describe(np.array(rows, np.int64))}"

    def batch(
        self,
        columns: Sequence[Column],
        samples: Sequence[Any] | None,
        rows: IntArray,
        describe: Describe,
        how: Collate | None = None,
        length_of: tuple[int, int] | None = None,
        buffers: BufferPool | None = None,
    ) -> tuple[Any, list[int]]:
        """Return the part of a batch, and the lengths of its samples.

        Args:
            columns: the fields of the part.
            samples: results of the transform (see ``samples``); None without a transform.
            rows: numbers of the samples.
            describe: returns the rows as text.
            how: how to batch samples of several shapes.
            length_of: the field and the axis with a sample's steps; None returns no lengths.
            buffers: memory for padded batches; None allocates it.
        """
        field, axis = length_of or (0, 0)
        if samples is None or self.transform is None:
            lengths = [] if length_of is None else [axis_length(value, axis) for value in columns[field]]
            return self.build([collated(of_one(column, how), how, buffers) for column in columns]), lengths
        lengths = [] if length_of is None else [axis_length(self._field_of(sample, field), axis) for sample in samples]
        try:
            batch = collated_samples(samples, how, buffers)
        except Exception as error:  # tensors of different shapes, or types that torch cannot collate
            when = f"while stacking what {named(self.argument, self.transform)} returned"
            add_note(error, when, lambda: self._describe(rows.tolist(), describe))
            if "equal size" in str(error):
                error.add_note("Return samples of one shape, or pass collate_fn='pad' or 'list'.")
            elif "NoneType" in str(error):
                error.add_note("Return the sample, also from a function that changes it in place.")
            raise
        # torch collates tuples to a list; without a transform the batch is a tuple.
        return (tuple(batch) if self.fields.kind == "tuple" and isinstance(batch, list) else batch), lengths

    def packed(
        self,
        columns: Sequence[Column],
        samples: Sequence[Any] | None,
        rows: IntArray,
        describe: Describe,
        joints: Sequence[Joint | None],
        buffers: BufferPool,
    ) -> tuple[Any, dict[str, JoinedField]]:
        """Return the part of a batch with samples joined along their steps, and its fields by name.

        Args:
            columns: the fields of the part.
            samples: results of the transform (see ``samples``); None without a transform.
            rows: numbers of the samples.
            describe: returns the rows as text.
            joints: how to join the samples of each field; None stacks them.
            buffers: memory for batches.
        """
        names, build = self.fields.names, cast("Callable[[Sequence[Any]], Any]", self.build)
        by_name, named_joints = dict(zip(names, columns, strict=True)), dict(zip(names, joints, strict=True))
        if samples is not None:
            by_name, build = columns_of(samples, names)
            if not named_joints.keys() & by_name.keys():  # one field became several
                named_joints = {next(iter(by_name)): joints[0]}
        try:
            fields = joined_fields(by_name, named_joints, buffers)
        except Exception as error:
            add_note(error, "while joining samples", lambda: self._describe(rows.tolist(), describe))
            raise
        return build([field.value for field in fields.values()]), fields

    def _field_of(self, sample: Any, field: int) -> Any:
        """Return a field of a transformed sample, if it still has it."""
        if isinstance(sample, dict):
            return sample.get(self.fields.names[field], next(iter(sample.values()), None))
        return sample[min(field, len(sample) - 1)] if isinstance(sample, tuple | list) and sample else sample


@dataclass(frozen=True)
class SampleLayout:
    """The layout of a sample: its input, and optionally a target and an index.

    Attributes:
        x: the input, made of the first columns.
        y: the target, made of the next columns; or None.
        with_index: put each row's index last in a tuple, or under ``"index"`` in a dict.
        n_rows: number of rows, if row numbers repeat in cycles and are shown modulo this number; otherwise 0.
        extras: names of the last columns, which follow the parts and the index in a sample.
        collate: how to batch samples of several shapes; None stacks them.
        joints: how to join the samples of each field, if ``collate`` is "pack"; None stacks them.
        length_of: the input field and the axis that define ``"length"``; None if all samples have the same length.
    """

    x: SamplePart
    y: SamplePart | None
    with_index: bool
    n_rows: int = 0
    extras: tuple[str, ...] = ()
    collate: Collate | None = None
    joints: tuple[Joint | None, ...] = ()
    length_of: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.with_index and self.y is None and self.x.fields.kind == "dict" and "index" in self.x.fields.names:
            raise H5ValueError(
                "with_index=True would overwrite the field 'index' of x_key. Load this field under another name."
            )

    @cached_property
    def has_transforms(self) -> bool:
        """Whether a transform runs on single samples."""
        return self.x.transform is not None or (self.y is not None and self.y.transform is not None)

    @cached_property
    def asks(self) -> bool:
        """Whether a transform asks for a generator, or owns one."""
        return bool(self.x.asks_for or (self.y is not None and self.y.asks_for))

    def samples(
        self,
        columns: Sequence[Column],
        rows: IntArray,
        draws: Draws,
        describe: Describe,
        errors: SampleErrors | None = None,
    ) -> list[Any]:
        """Return a list of samples.

        Args:
            columns: all fields.
            rows: numbers of the samples.
            draws: see ``RowDataset.finish``.
            describe: returns the rows as text.
            errors: collects the errors of transforms, by place, and leaves these samples out. None raises errors.
        """
        numbers = rows.tolist()
        if errors is None:
            return [self._sample(columns, place, row, draws, describe) for place, row in enumerate(numbers)]
        samples = _despite_errors(
            lambda place: self._sample(columns, place, numbers[place], draws, describe), numbers, errors
        )
        return [samples[place] for place in _places_left(len(numbers), errors)]

    def _sample(self, columns: Sequence[Column], place: int, row: int, draws: Draws, describe: Describe) -> Any:
        return self._join(
            [part.sample(columns[own], place, row, draws, describe) for part, own in self._parts],
            {"index": self.shown(row)} if self.with_index else {},
            {
                name: column[place].item() if isinstance(column, torch.Tensor) and column.ndim == 1 else column[place]
                for name, column in self._extras_of(columns)
            },
        )

    def batch(
        self,
        columns: Sequence[Column],
        rows: IntArray,
        draws: Draws,
        describe: Describe,
        errors: SampleErrors | None = None,
    ) -> Any:
        """Return a collated batch (see ``samples``)."""
        if not self.has_transforms:  # otherwise its samples are dense
            columns = [column.csr() if isinstance(column, CsrRows) else column for column in columns]
        if self.is_built_of_columns:
            return self.built([collated(column, None) for column in columns])
        transformed = self._transformed(columns, rows, draws, describe, errors)
        if errors:
            left = _places_left(len(rows), errors)
            columns, rows = [_taken(column, left) for column in columns], rows[left]
            transformed = [samples and [samples[place] for place in left] for samples in transformed]
        make = self._packed if self.collate == "pack" else self._collated
        parts, added = make(columns, transformed, rows, describe)
        index = {"index": torch.from_numpy(self.shown(rows.copy()))} if self.with_index else {}
        return self._join(parts, added | index, dict(self._extras_of(columns)))

    def _collated(
        self, columns: Sequence[Column], transformed: Sequence[list[Any] | None], rows: IntArray, describe: Describe
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the parts of a batch, and the lengths of padded samples."""
        parts, length = [], {}
        for (part, own), samples in zip(self._parts, transformed, strict=True):
            counted = self.length_of if part is self.x and self.collate == "pad" else None
            batch, lengths = part.batch(columns[own], samples, rows, describe, self.collate, counted, self._buffers)
            parts.append(batch)
            if counted is not None:
                length["length"] = torch.tensor(lengths, dtype=torch.int64)
        return parts, length

    def _packed(
        self, columns: Sequence[Column], transformed: Sequence[list[Any] | None], rows: IntArray, describe: Describe
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the parts of a batch with samples joined along their steps, and the boundaries of the samples."""
        parts, fields = list[Any](), list[tuple[str, JoinedField]]()
        for (part, own), samples in zip(self._parts, transformed, strict=True):
            batch, of_part = part.packed(columns[own], samples, rows, describe, self.joints[own], self._buffers)
            parts.append(batch)
            fields += of_part.items()
        counted = None if self.length_of is None else self.joints[self.length_of[0]]
        return parts, sample_ends(fields, counted)

    @cached_property
    def built(self) -> Callable[[Sequence[Any]], Any]:
        """A function that builds a batch from its columns, if it consists of nothing else."""
        if all(part.fields.kind == "single" for part, _ in self._parts):
            return itemgetter(0) if self.y is None else tuple
        return self._built

    def _built(self, columns: Sequence[Any]) -> Any:
        built = [part.build(columns[own]) for part, own in self._parts]
        return built[0] if len(built) == 1 else tuple(built)

    def _transformed(
        self,
        columns: Sequence[Column],
        rows: IntArray,
        draws: Draws,
        describe: Describe,
        errors: SampleErrors | None,
    ) -> list[list[Any] | None]:
        """Return the transformed samples of each part; None for a part without a transform."""
        if self.has_transforms and not len(rows):
            raise H5ValueError(
                "an empty batch was requested, but the transform runs on single samples. Pass at least one row."
            )
        return [
            None if part.transform is None else part.samples(columns[own], rows.tolist(), draws, describe, errors)
            for part, own in self._parts
        ]

    def shown(self, number: Any) -> Any:
        """Return the number that ``with_index`` adds for a row, or the numbers for several rows."""
        return number % self.n_rows if self.n_rows else number

    @cached_property
    def _buffers(self) -> BufferPool:
        """Memory for padded batches; only two buffers are kept, since sizes differ."""
        return BufferPool(min_free=2)

    @cached_property
    def _parts(self) -> list[tuple[SamplePart, slice]]:
        """Each part and its columns."""
        n_x = len(self.x.fields.keys)
        parts = [(self.x, slice(n_x))]
        return parts if self.y is None else [*parts, (self.y, slice(n_x, n_x + len(self.y.fields.keys)))]

    @cached_property
    def is_built_of_columns(self) -> bool:
        """Whether a batch consists of the columns as read, if they are tensors."""
        is_changed = self.has_transforms or self.collate is not None or self.length_of is not None
        return not (is_changed or self.with_index or self.extras)

    def _extras_of(self, columns: Sequence[Column]) -> list[tuple[str, Column]]:
        return list(zip(self.extras, columns[len(columns) - len(self.extras) :], strict=True))

    def _join(self, parts: list[Any], index: dict[str, Any], extras: dict[str, Any]) -> Any:
        added = index | extras
        if added and len(parts) == 1 and isinstance(parts[0], dict):
            return parts[0] | added
        parts = [*parts, *added.values()]
        return parts[0] if len(parts) == 1 else tuple(parts)


def _despite_errors(make: Callable[[int], Any], rows: Sequence[int], errors: SampleErrors) -> list[Any]:
    """Return the sample at each place; a sample that raises an error is None, and ``errors`` collects the error."""
    samples: list[Any] = [None] * len(rows)
    for place in range(len(rows)):
        try:
            samples[place] = make(place)
        except Exception as error:
            if not is_of_sample(error):
                raise
            errors.setdefault(place, error)
    return samples


def _places_left(n_samples: int, errors: SampleErrors | None) -> list[int]:
    """Return the places of samples without an error; raise the first error if there are none."""
    if not errors:
        return [*range(n_samples)]
    places = [place for place in range(n_samples) if place not in errors]
    if not places:
        raise errors[min(errors)]
    return places


def _taken(column: Column, places: list[int]) -> Column:
    """Return some entries of a column."""
    return column[places] if isinstance(column, torch.Tensor) else [column[place] for place in places]


def numpy_dtype_like(dtype: torch.dtype | None, stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the NumPy dtype to read rows into: the requested one if NumPy casts as torch does, else as stored."""
    try:
        target = stored if dtype is None else np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:  # bfloat16
        return stored
    # Torch rounds twice: to 32 bits, then to 16.
    is_same = target != np.float16 or stored in (np.float16, np.float32, np.uint8, np.int8, np.bool_)
    return target if is_same and np.can_cast(stored, target, "same_kind") else stored

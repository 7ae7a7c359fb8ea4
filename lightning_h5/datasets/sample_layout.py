"""How the fields of a row become a sample or a batch: transforms, normalization, collation of several shapes."""

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
from ..readers.buffers import BufferPool, Column, tensor_of
from ..samples import CsrRows
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
    "as_tensor",
    "numpy_dtype_like",
]


Transform: TypeAlias = Callable[..., Any]
"""Takes a value; also ``rng`` (a NumPy generator) or ``generator`` (torch's), if it has such a parameter."""

Describe: TypeAlias = Callable[[IntArray], str]
"""Returns which rows of which files some rows of a dataset are, as text for a message."""


@dataclass(frozen=True, eq=False)
class FieldPlan:
    """What becomes of a field's rows between a file and a batch. Whatever reads, holds or caches rows goes by it.

    Attributes:
        stored: dtype of rows as they are read.
        row_shape: shape of a row.
        dtype: dtype of a batch; None for text, which comes as ``str`` however it is stored.
        affine: normalizes rows; None if they are at most cast.
        is_encoded: rows are decoded one by one, to arrays of several shapes.
        element: dtype that these are cast to; None leaves them.
        guard: raises an error if rows that were read as stored have a missing value; None if all are values.
    """

    stored: np.dtype[Any]
    row_shape: tuple[int, ...]
    dtype: torch.dtype | None
    affine: Affine | None = None
    is_encoded: bool = False
    element: torch.dtype | None = None
    guard: Callable[[npt.NDArray[Any]], None] | None = None

    def check(self, rows: npt.NDArray[Any]) -> None:
        """Raise an ``H5ValueError`` if rows that were read as stored have a missing value."""
        if self.guard is not None:
            self.guard(rows)

    @cached_property
    def normalized(self) -> np.dtype[Any]:
        """The dtype of rows before they are cast: as stored, or normalized."""
        return self.stored if self.affine is None else self.affine.work

    @cached_property
    def gathered(self) -> np.dtype[Any]:
        """The dtype that a reader of decoded chunks gathers rows as: it normalizes them, or casts them itself."""
        if self.guard is not None:  # these are checked first
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

    def finished(self, rows: npt.NDArray[Any] | torch.Tensor, buffers: BufferPool) -> Column:
        """Return rows that were read as stored, or decoded one by one, normalized and cast; they are the caller's own.

        Args:
            rows: an array; a tensor if they were decoded one by one, and all have one shape.
            buffers: where memory for batches comes from.
        """
        if isinstance(rows, torch.Tensor):
            return rows if self.element is None else rows.to(self.element)
        self.check(rows)
        affine = None if self.affine is None else self.affine.of_shape(rows.shape[1:])
        if affine is not None and rows.dtype == affine.work:
            affine(rows)
        elif affine is not None:
            stored, rows = rows, buffers.array(rows.shape, affine.work)
            affine.take(stored, None, rows)
        return self.cast(rows, buffers)

    def cast(self, rows: npt.NDArray[Any], buffers: BufferPool) -> Column:
        """Return normalized rows in the dtype of a batch, or text as lists."""
        if self.dtype is None:
            values: list[Any] = rows.tolist()
            return [as_tensor(value, self.element) for value in values]
        column = tensor_of(rows)
        if column.dtype == self.dtype:
            return column
        return buffers.tensor(tuple(column.shape), self.dtype).copy_(column)


def as_tensor(value: Any, dtype: torch.dtype | None) -> Any:
    """Return an array that was decoded as a tensor; text as it is."""
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value)
    return tensor if dtype is None else tensor.to(dtype)


@dataclass(frozen=True)
class SamplePart:
    """The input of a sample, or its target.

    Attributes:
        fields: what it is made of.
        transform: runs on it, one sample at a time.
        flags: for each field whether a sample has it as a bool of Python; empty if none.
        argument: the argument by which the transform was passed, for messages.
    """

    fields: FieldNames
    transform: Transform | None = None
    flags: tuple[bool, ...] = ()
    argument: str = "transform"

    def build(self, values: Sequence[Any]) -> Any:
        """Return the value, a tuple or a dict, of a row or of a whole batch."""
        if self.fields.kind == "single":
            return values[0]
        return tuple(values) if self.fields.kind == "tuple" else dict(zip(self.fields.names, values, strict=True))

    @cached_property
    def asks_for(self) -> AskedFor:
        """The generators that the transform asks for, and those that it owns."""
        return asked_for(self.transform)

    def __getstate__(self) -> dict[str, Any]:
        # Generators are looked for again in another process: those that a function refers to are not pickled with it.
        return {name: value for name, value in self.__dict__.items() if name != "asks_for"}

    def sample(self, columns: Sequence[Column], place: int, row: int, draws: Draws, describe: Describe) -> Any:
        """Return one row's part, transformed. Input and target of a row have generators that draw the same."""
        values = [column[place] for column in columns]
        if self.flags:
            values = [bool(value) if flag else value for value, flag in zip(values, self.flags, strict=True)]
        return self.transformed(self.build(values), row, draws, describe)

    def transformed(self, value: Any, row: int, draws: Draws, describe: Describe) -> Any:
        """Return one row's value, transformed; an error of the transform names the row."""
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
            describe: returns which rows they are, as text.
            errors: gets the errors of samples, by place; these have None instead of a part. None raises them.
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
        """Return all rows' part, as it was read if nothing runs on single samples; and the lengths of the samples.

        Args:
            columns: the fields of the part.
            samples: what the transform returned (see ``samples``); None without one.
            rows: numbers of the samples.
            describe: returns which rows they are, as text.
            how: how samples of several shapes become a batch.
            length_of: the field whose steps are counted, and their axis; None counts none.
            buffers: where memory for padded batches comes from; None allocates it.
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
        """Return all rows' part with samples joined along their steps, and its fields by name.

        Args:
            columns: the fields of the part.
            samples: what the transform returned (see ``samples``); None without one.
            rows: numbers of the samples.
            describe: returns which rows they are, as text.
            joints: for each field how its samples are joined; None stacks them.
            buffers: where memory comes from.
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
    """What a sample looks like: its input, its target if any, and its index if asked for.

    Attributes:
        x: the input; the first columns of what is read.
        y: the target, the columns after them; or None.
        with_index: put each row's index last in a tuple, or under ``"index"`` in a dict.
        n_rows: of the dataset, if numbers of rows go beyond it and are shown modulo that; otherwise 0.
        extras: names of the columns that follow the parts and the index in a sample; the last columns that are read.
        collate: how samples of several shapes become a batch; None stacks them.
        joints: for each field of the parts how its samples are joined, if ``collate`` packs; None stacks them.
        length_of: the field of the input with steps that are counted for ``"length"``, and their axis in a sample; None
            if samples have equally many.
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
                "with_index=True would overwrite the field 'index' of x_key. Call the field something else."
            )

    @cached_property
    def has_transforms(self) -> bool:
        """Whether anything runs on single samples."""
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
            describe: returns which rows they are, as text.
            errors: gets the errors of transforms, by place; these samples are left out. None raises them.
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
        """Return the parts of a batch, and the lengths of samples if these are padded."""
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
        """Return the parts of a batch with samples joined along their steps, and where each sample begins and ends."""
        parts, fields = list[Any](), list[tuple[str, JoinedField]]()
        for (part, own), samples in zip(self._parts, transformed, strict=True):
            batch, of_part = part.packed(columns[own], samples, rows, describe, self.joints[own], self._buffers)
            parts.append(batch)
            fields += of_part.items()
        counted = None if self.length_of is None else self.joints[self.length_of[0]]
        return parts, sample_ends(fields, counted)

    @cached_property
    def built(self) -> Callable[[Sequence[Any]], Any]:
        """Makes a batch of its columns, if it consists of them."""
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
        """Return what each part's transform returned for each sample; None for a part without one."""
        if self.has_transforms and not len(rows):
            raise H5ValueError(
                "an empty batch was requested, but the transform runs on single samples. Pass at least one row."
            )
        return [
            None if part.transform is None else part.samples(columns[own], rows.tolist(), draws, describe, errors)
            for part, own in self._parts
        ]

    def shown(self, number: Any) -> Any:
        """Return what ``with_index`` adds for a row, or rows."""
        return number % self.n_rows if self.n_rows else number

    @cached_property
    def _buffers(self) -> BufferPool:
        """Memory of padded batches; few of them are kept, as sizes differ."""
        return BufferPool(min_free=2)

    @cached_property
    def _parts(self) -> list[tuple[SamplePart, slice]]:
        """Each part, and which columns are its own."""
        n_x = len(self.x.fields.keys)
        parts = [(self.x, slice(n_x))]
        return parts if self.y is None else [*parts, (self.y, slice(n_x, n_x + len(self.y.fields.keys)))]

    @cached_property
    def is_built_of_columns(self) -> bool:
        """Whether a batch consists of its columns as they were read, if these are tensors."""
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
    """Return the sample at each place; None where making it raises an error of this sample, which is noted."""
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
    """Return the NumPy dtype to gather into: the requested one if NumPy casts to it as torch does, else as stored."""
    try:
        target = stored if dtype is None else np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:  # bfloat16
        return stored
    # Torch rounds twice: to 32 bits, then to 16.
    is_same = target != np.float16 or stored in (np.float16, np.float32, np.uint8, np.int8, np.bool_)
    return target if is_same and np.can_cast(stored, target, "same_kind") else stored

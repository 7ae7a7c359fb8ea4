"""Check that arrays are as requested, that arrays and files belong together, and that files can be read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..errors import H5DataChangedError, H5FileError, H5ValueError, listing, short_repr
from ..hdf5 import (
    ArrayLayout,
    GroupError,
    Packing,
    StackedKeys,
    check_no_overlap,
    enum_names,
    holds_regions,
    is_bytes,
    is_list,
    is_references,
    kind_of,
    stack_arrays,
    torch_dtype,
)
from ..lazy_torch import torch
from ..readers import (
    ClassNumbers,
    Conventions,
    DecodeRequest,
    Function,
    Image,
    MatrixRows,
    MoveLast,
    Ragged,
    RowCodec,
    Stack,
    Unpack,
)
from ..types import Paths

__all__ = [
    "WITHOUT_THEM",
    "ArrayRequest",
    "Compatibility",
    "Skip",
    "Span",
    "check_same_numbers",
    "each_readable",
    "has_lists",
    "is_encoded",
    "joined_arrays",
    "refuse_images",
    "refuse_other_files",
    "shape_of_images",
    "with_stacks",
]


class Span(NamedTuple):
    """A slice that can be compared and hashed."""

    start: int | None
    stop: int | None
    step: int | None


MAX_CHANNELS = 4
"""Largest number of values of a pixel, on the last axis of an image."""

MAX_RATIO = 4
"""Largest ratio of the lengths of two axes of an image or volume."""


@dataclass(frozen=True, kw_only=True)
class ArrayRequest:
    """A requested array.

    Attributes:
        key: its name in the files.
        text_ok: whether it may hold text (a label may, a single input may not).
        dtype: the dtype that the user requested, if any.
        argument: the argument that sets its dtype, such as ``"x_dtype={}"``; None if there is none.
        takes_packed: accept packed integers as they are stored: they are decoded later, or no value is used.
        only_counted: whether only its number of rows is used, so that rows may have any dtype.
        codec: how rows are decoded; None if values are as stored.
        stacks: the names of stacked arrays, or of members of a table; ``key`` is then the name of the result.
        is_stack: whether several arrays are stacked. Members of one table are decoded together instead.
        paths: other files that have the array; None for the files of the data.
        selection: the selection along axes other than axis 0, as stored: pairs of an axis, and an index, indices or a
            slice.
    """

    key: str
    text_ok: bool = True
    dtype: torch.dtype | None = None
    argument: str | None = None
    takes_packed: bool = False
    only_counted: bool = False
    codec: DecodeRequest | None = None
    stacks: StackedKeys | None = None
    is_stack: bool = False
    paths: Paths | None = None
    selection: tuple[tuple[int, int | Span | tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, key: str, codec: DecodeRequest | None, stacks: StackedKeys | None, **options: Any) -> ArrayRequest:
        """Return a request. Several names without a common group are arrays, not members of a table."""
        is_stack = stacks is not None and stacks.group is None
        return cls(key=key, codec=codec, stacks=stacks, is_stack=is_stack, **options)

    @property
    def is_category(self) -> bool:
        """Whether text is decoded as class numbers."""
        return isinstance(self.codec, ClassNumbers)

    @property
    def is_decoded_by_user(self) -> bool:
        """Whether a function of the user decodes each row."""
        return _is_of_user(self.codec)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its arrays in the files."""
        return self.stacks.names if self.is_stack and self.stacks is not None else (self.key,)

    def joined(self, arrays: Sequence[ArrayLayout]) -> ArrayLayout:
        """Return the requested array, stacked if it is made of several arrays (``keys``)."""
        return stack_arrays(arrays, self.key) if self.is_stack else arrays[0]

    def decoded(self, array: ArrayLayout) -> ArrayLayout:
        """Return the array with the decoding of its rows. Packed numbers of netCDF files are decoded by default."""
        if array.stacked:
            codec = self.codec.of_each if isinstance(self.codec, Stack) else self.codec
            request = replace(self, codec=codec, stacks=None, is_stack=False)
            array = stack_arrays([request.decoded(member) for member in array.stacked], self.key)
            axis = None if self.stacks is None else self.stacks.axis
            return array if axis is None else array.decoded(MoveLast(axis))
        array = self._selected(array) if self.selection else array
        packing = array.packing
        if isinstance(self.codec, Conventions):
            return array if packing is None else array.decoded(Unpack(packing))
        if isinstance(self.codec, MatrixRows):
            raise self.codec.refusal(array)
        if isinstance(self.codec, ClassNumbers):
            self.codec.check(array)
            return array
        if isinstance(self.codec, Image) and array.dtype.kind == "S" and array.view is None:  # not text
            n_bytes = np.dtype(f"V{array.dtype.itemsize}")
            return array.with_changes(stored=n_bytes, dtype=n_bytes).decoded(self.codec)
        if self.codec is not None:
            return array.decoded(self.codec)
        if is_list(array.dtype) or array.is_scalar:
            return array.decoded(Ragged())
        if packing is None or self.takes_packed:
            return array
        if packing.policy == "keep" and self.dtype is not None and self.dtype == torch_dtype(array.dtype, "dtype"):
            return array.with_changes(packing=replace(packing, policy="stored"))
        if packing.policy == "guard" and self.dtype is not None:
            if self.dtype == torch_dtype(array.dtype, "dtype"):
                return array.with_changes(packing=None)
            return array.decoded(Unpack(packing)) if self.dtype.is_floating_point else array
        if packing.policy == "decode" and not self.takes_stored(array):
            return array.decoded(Unpack(packing))
        return array

    def _selected(self, array: ArrayLayout) -> ArrayLayout:
        """Return the array with the selected part of its rows."""
        shape, parts = (array.n_rows, *array.axes), {}
        for axis, part in self.selection:
            if not -len(shape) < axis < len(shape) or axis % len(shape) == 0:
                raise H5ValueError(
                    f"select names axis {axis} of {array.key!r} in {array.path!r}, which has the shape {shape} and "
                    "rows along axis 0. Name one of its other axes."
                )
            if axis % len(shape) in parts:
                raise H5ValueError(f"select names axis {axis} of {array.key!r} twice. Name each axis once.")
            parts[axis % len(shape)] = slice(*part) if isinstance(part, Span) else part
        return array.seen((0,), parts)

    def takes_stored(self, array: ArrayLayout) -> bool:
        """Return whether the user requested the stored dtype of packed numbers, or one that holds all their values."""
        if self.dtype is None or array.packing is None or array.dtype.kind == "f":
            return False
        if self.dtype == torch_dtype(array.dtype, "dtype"):
            return True
        return array.packing.only_misses and _holds(self.dtype, array.dtype)


def joined_arrays(requests: Sequence[ArrayRequest], arrays: Iterable[ArrayLayout]) -> list[ArrayLayout]:
    """Return one array per request; several arrays of a file are stacked if a request names them.

    Args:
        requests: the requested arrays.
        arrays: of the file: for each request the arrays of its ``keys``, one after the other.
    """
    of_keys = iter(arrays)
    return [request.joined(list(islice(of_keys, len(request.keys)))) for request in requests]


def with_stacks(requests: Sequence[ArrayRequest], error: GroupError) -> list[ArrayRequest] | None:
    """Return the requests after a name turned out to be a group: its arrays are stacked.

    Args:
        requests: the requests before, which took the list of names for members of a table.
        error: the error about the group.

    Returns:
        None if no request stacks arrays of the group.
    """
    changed = [
        replace(request, is_stack=True) if request.stacks is not None and request.key == error.key else request
        for request in requests
    ]
    return None if changed == list(requests) else changed


class Compatibility:
    """Checks the arrays of one file after the other. Arrays of a structure that was checked before cost almost nothing.

    Args:
        requests: the arrays, in the order of the fields.
        of_one_row: whether row i of each array belongs together, and rows have the same shape in all files.
    """

    def __init__(self, requests: Sequence[ArrayRequest], *, of_one_row: bool = True) -> None:
        self._requests, self._of_one_row = tuple(requests), of_one_row
        self._first: tuple[ArrayLayout, ...] = ()
        self._passed: dict[tuple[int, ...], tuple[ArrayLayout, ...]] = {}

    def check(self, layouts: tuple[ArrayLayout, ...]) -> None:
        """Check the arrays of a file.

        Raises:
            H5ValueError: an array cannot become a tensor, or holds packed integers; arrays differ in their rows, or
                from the arrays of the first file.
            H5CorruptError: two arrays have bytes in common.
        """
        # Arrays of one structure share these objects. Checked arrays are kept, so that no id is reused.
        structure = tuple(
            id(part) for layout in layouts for part in (layout.dtype, layout.row_shape, layout.packing, layout.stored)
        )
        if structure not in self._passed:
            for layout, request in zip(layouts, self._requests, strict=True):
                if not request.only_counted:
                    _check_tensor_kind(layout, request)
                if not request.takes_packed:
                    for stored in layout.stored_arrays:
                        _check_packing(stored, request)
        if self._of_one_row:
            _check_rows(layouts)
        check_no_overlap([layout for layout in layouts if layout.path == layouts[0].path])  # not in other files
        if structure not in self._passed:
            self._first = self._first or layouts
            _check_same_rows(self._first, layouts, shapes=self._of_one_row)
            _check_same_numbers(self._first, layouts, self._requests)
            self._passed[structure] = layouts


def refuse_other_files(requests: Sequence[ArrayRequest]) -> None:
    """Raise an ``H5ValueError`` if an array is in another file, which is matched row by row."""
    if keys := [request.key for request in requests if request.paths is not None]:
        raise H5ValueError(
            f"{listing(keys)} of another file is matched row by row, but samples are not rows. Write it into the "
            "data's files, or pass table."
        )


def is_encoded(array: ArrayLayout) -> bool:
    """Return whether rows are decoded one by one, to arrays of different shapes."""
    return array.decoding is not None and isinstance(array.decoding.codec, RowCodec)


def has_lists(array: ArrayLayout) -> bool:
    """Return whether rows are lists of numbers, other than bytes, of different lengths."""
    stored = array.decoding
    return stored is not None and isinstance(stored.codec, Ragged) and not is_bytes(stored.array.dtype)


def _check_tensor_kind(layout: ArrayLayout, request: ArrayRequest) -> None:
    kind = kind_of(layout.dtype)
    where = f"{layout.key!r} in {layout.path!r}"
    if kind == "text" and not request.is_category and request.dtype is not None and request.argument == "y_dtype={}":
        raise H5ValueError(
            f"y_dtype={str(request.dtype).removeprefix('torch.')!r} was given, and {where} holds text. Pass "
            f"decode={{{layout.key!r}: 'category'}} for class numbers, or leave y_dtype out."
        )
    if kind == "number" or (kind == "text" and request.text_ok) or is_encoded(layout):
        return
    if kind == "text":
        raise H5ValueError(
            f"{where} holds text, and a tensor cannot. Pass it as y_key or as one of several x_key (batches then have "
            f"a list of str), or pass decode={{{layout.key!r}: 'category'}} for class numbers."
        )
    if kind == "compound":
        members = listing(f"{layout.key}/{name}" for name in layout.dtype.base.names or ())
        raise H5ValueError(
            f"{where} is a table: its rows have the members {members}. "
            "Name one of them as the key, or several as a list."
        )
    if is_references(layout):
        raise H5ValueError(
            f"{where} holds references to other arrays. These are segments if the array of references is named as it "
            "is: not in segments.groups, next to a key with a pattern, or in a file with a live writer."
        )
    if holds_regions(layout):
        raise H5ValueError(
            f"{where} holds references to regions of arrays, which are not followed. Name an array of references to "
            "whole arrays, or the array that has the regions."
        )
    raise H5ValueError(
        f"{where} has the dtype {layout.stored}, which a tensor cannot have. "
        "Choose another array, or write it again as integers or floats of up to 64 bits."
    )


def _check_packing(layout: ArrayLayout, request: ArrayRequest) -> None:
    """Refuse packed integers, unless the user requested the stored dtype: they are no values.

    If they are the values themselves, except markers of missing ones, any dtype that holds these integers is accepted.
    """
    packing = layout.packing
    if packing is None or packing.policy in ("keep", "stored", "guard") or request.takes_stored(layout):
        return
    field = layout.key if request.stacks is None else request.key
    raw = "" if request.argument is None else request.argument.replace("{}", repr(str(layout.dtype)))
    transform = "target_transform" if raw.startswith(("y_dtype", "dtype_y")) else "transform"
    raise H5ValueError(
        f"{layout.key!r} in {layout.path!r} holds packed integers ({layout.dtype} with {packing}), whose values are "
        f"decoded so: {packing.formula}. "
        + (f"Pass decode={{{field!r}: 'cf'}} to decode them" if packing.unclear is None else packing.how(field))
        + (f", or {raw} to load them as they are stored, and decode them in a {transform}." if raw else ".")
    )


def _holds(dtype: torch.dtype | None, stored: np.dtype[Any]) -> bool:
    """Return whether a dtype of integers holds all values of a stored dtype."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return False
    limits, needed = torch.iinfo(dtype), np.iinfo(stored)
    return limits.min <= needed.min and needed.max <= limits.max


def _check_same_numbers(
    expected: Sequence[ArrayLayout], layouts: Sequence[ArrayLayout], requests: Sequence[ArrayRequest]
) -> None:
    for a, b, request in zip(expected, layouts, requests, strict=True):
        if request.takes_packed or request.is_category or request.is_decoded_by_user or request.only_counted:
            continue
        for left, right in zip(a.stored_arrays, b.stored_arrays, strict=False):
            check_same_numbers(left, right)


def check_same_numbers(a: ArrayLayout, b: ArrayLayout) -> None:
    """Check that the same stored number means the same in two arrays, unless it was requested as it is stored.

    Raises:
        H5ValueError: they are packed in other ways, or values of an enum have other names.
    """
    if _compared_packing(a.packing) != _compared_packing(b.packing):
        left, right = (f"packed with {array.packing}" if array.packing else "not packed" for array in (a, b))
        is_kept = any(array.packing is not None and array.packing.policy == "keep" for array in (a, b))
        stored = f"; or request the stored dtype, {str(a.dtype)!r}, by name to load stored numbers" if is_kept else ""
        raise H5ValueError(
            f"{a.key!r} is {left} in {a.path!r}, and {b.key!r} is {right} in {b.path!r}: one formula does not decode "
            f"both. Pass decode={{{a.key!r}: 'cf'}} to decode each file by its own formula, or train on files with the "
            f"same one{stored}."
        )
    names, others = (
        None if x.decoding is not None and _is_of_user(x.decoding.codec) else enum_names(x.stored, x.members)
        for x in (a, b)
    )
    both = (names or {}).keys() & (others or {}).keys()
    if names is not None and others is not None and any(names[value] != others[value] for value in both):
        raise H5ValueError(
            f"the values of {a.key!r} stand for {short_repr(names)} in {a.path!r} and for {short_repr(others)} in "
            f"{b.path!r}. Pass decode={{{a.key!r}: 'category'}} for class numbers by these names, the same in all "
            "files."
        )


def _is_of_user(codec: Any) -> bool:
    """Return whether a codec is a function of the user, for which any number may have any meaning."""
    return isinstance(codec.of_each if isinstance(codec, Stack) else codec, Function)


def _compared_packing(packing: Packing | None) -> Any:
    if packing is None or packing.policy == "stored":
        return None
    if packing.policy == "keep":  # markers of missing values are values
        formula = np.float32(packing.scale), np.float32(packing.offset)  # attributes have one precision or the other
        return None if packing.only_misses else (*formula, packing.stored, packing.unclear)
    return packing


def refuse_images(arrays: Sequence[ArrayLayout], n_rows: Collection[int], n_files: int) -> None:
    """Refuse files that may be an image or volume each: their rows would be lines of pixels.

    Args:
        arrays: the requested arrays of one file; in other files only the number of rows may differ.
        n_rows: number of rows of each file.
        n_files: number of all files, including those that cannot be read.
    """
    shape = shape_of_images(arrays, n_rows, n_files)
    if shape is not None:
        raise H5ValueError(
            f"{listing(array.key for array in arrays)} have the shape {shape} in each of {n_files} files, such as "
            f"{arrays[0].path!r}, and no array has other axes: each file may be one image or volume, and its rows the "
            "lines of it. If a file is a sample, pass sample='segment'. If an "
            "index along axis 0 is a sample, pass sample='row'."
        )


def shape_of_images(arrays: Sequence[ArrayLayout], n_rows: Collection[int], n_files: int) -> tuple[int, ...] | None:
    """Return the shape of the image that each of several files may be; None if an index along axis 0 is a sample.

    Files may be images if all of this holds: there are several files, with equally many rows; each has several arrays;
    these have one 2-D or 3-D shape, without a last axis of up to four channels; and no axis is more than four times as
    long as another. A single array says nothing: one array with equally many rows in each file is the usual case of
    rows as samples.

    Args:
        arrays: see ``refuse_images``.
        n_rows: of each file.
        n_files: number of all files.
    """
    if n_files == 1 or len(arrays) == 1 or len(set(n_rows)) != 1 or arrays[0].n_rows <= 1:
        return None
    shapes = [(array.n_rows, *array.axes) for array in arrays]
    pixels = {shape[:-1] if len(shape) > 2 and shape[-1] <= MAX_CHANNELS else shape for shape in shapes}
    shape = pixels.pop()
    is_image = not pixels and len(shape) in (2, 3) and max(shape) <= MAX_RATIO * min(shape)
    return shape if is_image else None


def _check_rows(arrays: Sequence[ArrayLayout]) -> None:
    first = arrays[0]
    for other in arrays[1:]:
        if other.n_rows != first.n_rows:
            raise H5ValueError(
                f"{first.key!r} has {first.n_rows} rows and {other.key!r} has {other.n_rows} in {first.path!r}; "
                f"row i of each must belong together. {_advice_about_rows(first, other)}"
            )


def _advice_about_rows(first: ArrayLayout, other: ArrayLayout) -> str:
    """Return advice for two arrays with different numbers of rows, by their shapes."""
    for array, steps in ((first, other.n_rows), (other, first.n_rows)):
        if steps > 1 and steps in array.row_shape:
            axis = 1 + array.row_shape.index(steps)
            return (
                f"Axis {axis} of {array.key!r} is as long as the other array: if it has the steps, pass "
                f"segments={{'step_axis': {{{array.key!r}: {axis}}}}}."
            )
    coarse, fine = (first, other) if first.n_rows < other.n_rows else (other, first)
    if coarse.n_rows > 1 and fine.n_rows % coarse.n_rows == 0:
        return (
            f"If each row of {coarse.key!r} spans {fine.n_rows // coarse.n_rows} rows of {fine.key!r}, pass "
            f"segments={{'steps_per': {{{coarse.key!r}: {fine.n_rows // coarse.n_rows}}}}}; otherwise name arrays with "
            "the same length along axis 0."
        )
    return (
        "Name arrays with the same length along axis 0; or pass "
        f"segments={{'constants': [{coarse.key!r}]}} if it belongs to the file as a whole."
    )


def _check_same_rows(expected: Sequence[ArrayLayout], layouts: Sequence[ArrayLayout], *, shapes: bool) -> None:
    for a, b in zip(expected, layouts, strict=True):
        properties = [("dtype", a.dtype, b.dtype), ("shape of a row", a.row_shape, b.row_shape)]
        if a.categories is not None and b.categories is not None:  # their codes are converted to one dtype
            continue
        for name, left, right in properties if shapes else properties[:1]:
            if left != right and not (kind_of(a.dtype) == kind_of(b.dtype) == "text" and name == "dtype"):
                difference = right if a.key == b.key else f"{b.key!r} has {right}"
                raise H5ValueError(
                    f"{a.key!r} has the {name} {left} in {a.path!r} and {difference} in {b.path!r}. Train on files "
                    "with equal arrays, or create a data module for each kind."
                )


WITHOUT_THEM = "Repair them, or pass a list of files without them; files are never skipped silently."
"""The advice about broken files in errors of classes that have no argument for it."""

Skip = Callable[[str, H5FileError], None]
"""Called with a file that is left out, since it is missing or broken, and with its error."""

_T = TypeVar("_T")


def each_readable(
    paths: Sequence[str], look: Callable[[str], _T], skip: Skip | None, advice: str, bar: Iterable[str] | None = None
) -> Iterator[tuple[str, _T]]:
    """Yield each file with its contents. Broken files are left out if the user asked for that.

    Args:
        paths: the files.
        look: returns the contents of a file.
        skip: called with a file that is left out; None raises its error.
        advice: the way to train without broken files, for the error.
        bar: yields the files and shows progress.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
    """
    n_readable = 0
    for path in paths if bar is None else bar:
        try:
            contents = look(path)
        except H5FileError as error:
            if skip is not None:
                skip(path, error)
                continue
            # System errors, such as locks, and changed files do not mean that a file is broken.
            is_broken = not isinstance(error, H5DataChangedError) and getattr(error.__cause__, "errno", None) is None
            if len(paths) > 1 and is_broken:
                check = "`lightning-h5 check` finds all unreadable files."
                error.args = (f"{error} It is one of {len(paths):,} files: {check} {advice}",)
            raise
        n_readable += 1
        yield path, contents
    if not n_readable:
        raise H5FileError(f"none of {listing(paths)} can be read. See the error that was logged for each.")

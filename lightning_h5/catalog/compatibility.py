"""Check that arrays are as requested, that arrays and files belong together, and which files can be read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ..errors import H5DataChangedError, H5FileError, H5ValueError, listing
from ..hdf5 import (
    ArrayLayout,
    Codec,
    Conventions,
    GroupError,
    Image,
    MoveLast,
    Ragged,
    RowCodec,
    Stack,
    StackedKeys,
    Unpack,
    check_no_overlap,
    holds_regions,
    is_bytes,
    is_list,
    is_references,
    kind_of,
    stack_arrays,
    torch_dtype,
)
from ..types import Paths

__all__ = [
    "WITHOUT_THEM",
    "ArrayRequest",
    "Compatibility",
    "Skip",
    "Span",
    "are_packed_alike",
    "different_packing",
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
"""Values of a pixel, at most, on the last axis of an image."""

MAX_RATIO = 4
"""An axis of an image or volume is at most so many times as long as another."""


@dataclass(frozen=True, kw_only=True)
class ArrayRequest:
    """A requested array.

    Attributes:
        key: its name in the files.
        text_ok: whether it may hold text (a label may, a single input may not).
        dtype: the dtype that the user asked for, if any.
        argument: how the user can name a dtype for it, such as ``"x_dtype={}"``; None if there is no way.
        takes_packed: accept packed integers as they are stored: they are decoded later, or no value is used.
        only_counted: whether nothing but its number of rows is used, so that a row may be anything.
        codec: decodes rows; None if values are as stored.
        stacks: what is stacked, if these are several arrays, or members of a table; ``key`` is then its name.
        is_stack: whether it is arrays; of a table its members are decoded together.
        paths: other files that have the array; None for those of the data.
        taken: of rows along axis 0, what is taken of further axes, as stored: pairs of an axis, and an index, indices
            or a slice.
    """

    key: str
    text_ok: bool = True
    dtype: torch.dtype | None = None
    argument: str | None = None
    takes_packed: bool = False
    only_counted: bool = False
    codec: Codec | None = None
    stacks: StackedKeys | None = None
    is_stack: bool = False
    paths: Paths | None = None
    taken: tuple[tuple[int, int | Span | tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, key: str, codec: Codec | None, stacks: StackedKeys | None, **more: Any) -> ArrayRequest:
        """Return what is asked for; several arrays that are in no one group can be no members of a table."""
        return cls(key=key, codec=codec, stacks=stacks, is_stack=stacks is not None and stacks.group is None, **more)

    @property
    def keys(self) -> tuple[str, ...]:
        """The arrays that are looked for in files."""
        return self.stacks.names if self.is_stack and self.stacks is not None else (self.key,)

    def joined(self, arrays: Sequence[ArrayLayout]) -> ArrayLayout:
        """Return the array that is made of those of ``keys``."""
        return stack_arrays(arrays, self.key) if self.is_stack else arrays[0]

    def decoded(self, array: ArrayLayout) -> ArrayLayout:
        """Return the array with rows as they are decoded: packed numbers of netCDF files unless asked otherwise."""
        if array.stacked:
            codec = self.codec.of_each if isinstance(self.codec, Stack) else self.codec
            each = replace(self, codec=codec, stacks=None, is_stack=False)
            array = stack_arrays([each.decoded(one) for one in array.stacked], self.key)
            axis = None if self.stacks is None else self.stacks.axis
            return array if axis is None else array.decoded(MoveLast(axis))
        array = self._cut(array) if self.taken else array
        packing = array.packing
        if isinstance(self.codec, Conventions):
            return array if packing is None else array.decoded(Unpack(packing))
        if isinstance(self.codec, Image) and array.dtype.kind == "S" and array.view is None:  # not text
            n_bytes = np.dtype(f"V{array.dtype.itemsize}")
            return array.with_changes(stored=n_bytes, dtype=n_bytes).decoded(self.codec)
        if self.codec is not None:
            return array.decoded(self.codec)
        if is_list(array.dtype) or array.is_scalar:
            return array.decoded(Ragged())
        if packing is None or self.takes_packed:
            return array
        if packing.policy == "guard" and self.dtype is not None:
            if self.dtype == torch_dtype(array.dtype, "dtype"):
                return array.with_changes(packing=None)
            return array.decoded(Unpack(packing)) if self.dtype.is_floating_point else array
        if packing.policy == "decode" and not self.takes_stored(array):
            return array.decoded(Unpack(packing))
        return array

    def _cut(self, array: ArrayLayout) -> ArrayLayout:
        """Return the array with the part of its rows that is taken."""
        shape, taken = (array.n_rows, *array.axes), {}
        for axis, part in self.taken:
            if not -len(shape) < axis < len(shape) or axis % len(shape) == 0:
                raise H5ValueError(
                    f"select names axis {axis} of {array.key!r} in {array.path!r}, which has the shape {shape} and "
                    "rows along axis 0. Name one of its other axes."
                )
            if axis % len(shape) in taken:
                raise H5ValueError(f"select names axis {axis} of {array.key!r} twice. Name each axis once.")
            taken[axis % len(shape)] = slice(*part) if isinstance(part, Span) else part
        return array.seen((0,), taken)

    def takes_stored(self, array: ArrayLayout) -> bool:
        """Return whether the user named the stored dtype of packed numbers, or one that holds all that are values."""
        if self.dtype is None or array.packing is None or array.dtype.kind == "f":
            return False
        if self.dtype == torch_dtype(array.dtype, "dtype"):
            return True
        return array.packing.only_misses and _holds(self.dtype, array.dtype)


def joined_arrays(asked: Sequence[ArrayRequest], arrays: Iterable[ArrayLayout]) -> list[ArrayLayout]:
    """Return the arrays that are made of those of a file.

    Args:
        asked: what is looked for.
        arrays: of the file, those of ``keys`` of each, one after the other.
    """
    of_keys = iter(arrays)
    return [one.joined(list(islice(of_keys, len(one.keys)))) for one in asked]


def with_stacks(asked: Sequence[ArrayRequest], error: GroupError) -> list[ArrayRequest] | None:
    """Return what is looked for if a name turned out to be a group, of which arrays are stacked.

    Args:
        asked: what was looked for: a list of names may be of members of a table.
        error: what the search raised.

    Returns:
        None if the group was not named so.
    """
    found = [replace(one, is_stack=True) if one.stacks is not None and one.key == error.key else one for one in asked]
    return None if found == list(asked) else found


class Compatibility:
    """Checks the arrays of one file after the other; those that are built as others before them cost next to nothing.

    Args:
        asked: the arrays, in the order of the fields.
        of_one_row: whether row i of each array belongs together, and rows have the same shape in all files.
    """

    def __init__(self, asked: Sequence[ArrayRequest], *, of_one_row: bool = True) -> None:
        self._asked, self._of_one_row = tuple(asked), of_one_row
        self._first: tuple[ArrayLayout, ...] = ()
        self._passed: dict[tuple[int, ...], tuple[ArrayLayout, ...]] = {}

    def check(self, layouts: tuple[ArrayLayout, ...]) -> None:
        """Check the arrays of a file.

        Raises:
            H5ValueError: an array cannot become a tensor, or holds packed integers; arrays differ in their rows, or
                from those of the first file.
            H5CorruptError: two arrays have bytes in common.
        """
        # Arrays of one structure share these objects. Checked ones are kept here, so that no id is reused.
        structure = tuple(id(each) for one in layouts for each in (one.dtype, one.row_shape, one.packing))
        if structure not in self._passed:
            for layout, one in zip(layouts, self._asked, strict=True):
                if not one.only_counted:
                    _check_tensor_kind(layout, text_ok=one.text_ok)
                if not one.takes_packed:
                    for each in layout.stored_arrays:
                        _check_packing(each, one)
        if self._of_one_row:
            _check_rows(layouts)
        check_no_overlap([one for one in layouts if one.path == layouts[0].path])  # others are of another file
        if structure not in self._passed:
            self._first = self._first or layouts
            _check_same_rows(self._first, layouts, shapes=self._of_one_row)
            _check_packed_alike(self._first, layouts, self._asked)
            self._passed[structure] = layouts


def refuse_other_files(asked: Sequence[ArrayRequest]) -> None:
    """Raise an ``H5ValueError`` if an array is of another file: these are matched row by row."""
    if others := [one.key for one in asked if one.paths is not None]:
        raise H5ValueError(
            f"{listing(others)} of another file was named, which is matched row by row, and samples are no rows. Put "
            "it into the data's files, or pass table."
        )


def is_encoded(array: ArrayLayout) -> bool:
    """Return whether rows are decoded one by one, to arrays of several shapes."""
    return array.decoding is not None and isinstance(array.decoding.codec, RowCodec)


def has_lists(array: ArrayLayout) -> bool:
    """Return whether rows are lists of numbers, other than bytes, of several lengths."""
    stored = array.decoding
    return stored is not None and isinstance(stored.codec, Ragged) and not is_bytes(stored.array.dtype)


def _check_tensor_kind(layout: ArrayLayout, *, text_ok: bool) -> None:
    kind = kind_of(layout.dtype)
    where = f"{layout.key!r} in {layout.path!r}"
    if kind == "number" or (kind == "text" and text_ok) or is_encoded(layout):
        return
    if kind == "text":
        raise H5ValueError(
            f"{where} holds text, and a tensor cannot. Pass it as y_key or as one of several x_key (batches then have "
            "a list of str), or encode it as numbers."
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


def _check_packing(layout: ArrayLayout, asked: ArrayRequest) -> None:
    """Refuse packed integers, which are no values, unless the user named the stored dtype.

    If they are the values themselves, except some that stand for missing ones, any integers that hold them will do.
    """
    packing = layout.packing
    if packing is None or packing.policy in ("keep", "guard") or asked.takes_stored(layout):
        return
    field = layout.key if asked.stacks is None else asked.key
    raw = "" if asked.argument is None else asked.argument.replace("{}", repr(str(layout.dtype)))
    transform = "target_transform" if raw.startswith(("y_dtype", "dtype_y")) else "transform"
    raise H5ValueError(
        f"{layout.key!r} in {layout.path!r} holds packed integers ({layout.dtype} with {packing}), whose values are "
        f"decoded so: {packing.formula}. "
        + (f"Pass decode={{{field!r}: 'cf'}} to decode them" if packing.unclear is None else packing.how(field))
        + (f", or {raw} to load them as they are stored, and decode them in a {transform}." if raw else ".")
    )


def _holds(wanted: torch.dtype | None, stored: np.dtype[Any]) -> bool:
    """Return whether a dtype is one of integers that has all values of a stored one."""
    if wanted is None or wanted.is_floating_point or wanted.is_complex or wanted == torch.bool:
        return False
    limits, needed = torch.iinfo(wanted), np.iinfo(stored)
    return limits.min <= needed.min and needed.max <= limits.max


def _check_packed_alike(
    expected: Sequence[ArrayLayout], found: Sequence[ArrayLayout], asked: Sequence[ArrayRequest]
) -> None:
    for a, b, one in zip(expected, found, asked, strict=True):
        for left, right in zip(a.stored_arrays, b.stored_arrays, strict=False):
            if not (one.takes_packed or are_packed_alike(left, right)):
                raise different_packing(left, right)


def are_packed_alike(a: ArrayLayout, b: ArrayLayout) -> bool:
    """Return whether stored numbers of two arrays mean the same, as far as these are not kept as they are anyway."""
    refused = [None if one.packing is None or one.packing.policy == "keep" else one.packing for one in (a, b)]
    return refused[0] == refused[1]


def different_packing(a: ArrayLayout, b: ArrayLayout) -> H5ValueError:
    """Return the error about stored integers that mean something else in another file."""
    left, right = (f"packed with {one.packing}" if one.packing else "not packed" for one in (a, b))
    return H5ValueError(
        f"{a.key!r} is {left} in {a.path!r}, and {b.key!r} is {right} in {b.path!r}: one formula does not decode both. "
        "Pass decode={...: 'cf'} to decode each file by its own formula, or train on files with the same one."
    )


def refuse_images(arrays: Sequence[ArrayLayout], n_rows: Collection[int], n_files: int) -> None:
    """Refuse files that may be an image or volume each: their rows would be lines of pixels.

    Args:
        arrays: those of one file that are asked for; others have the same but for the number of rows.
        n_rows: of each file.
        n_files: how many files were given, those that cannot be read among them.
    """
    shape = shape_of_images(arrays, n_rows, n_files)
    if shape is not None:
        raise H5ValueError(
            f"{listing(array.key for array in arrays)} have the shape {shape} in each of {n_files} files, such as "
            f"{arrays[0].path!r}, and no array has other axes: each file may be one image or volume, and its rows the "
            "lines of it. If a file is a sample, pass sample='segment' (not to CombinedHDF5DataModule). If an "
            "index along axis 0 is a sample, pass sample='row'."
        )


def shape_of_images(arrays: Sequence[ArrayLayout], n_rows: Collection[int], n_files: int) -> tuple[int, ...] | None:
    """Return the shape of the image that each of several files may be; None if an index along axis 0 is a sample.

    Files may be images if there are several, with as many rows each, and their arrays, two or more, have one 2-D or 3-D
    shape, up to four channels on a further, last axis left out, of which no axis is more than four times as long as
    another. A single array leaves no trace of what it is: rows of one array, equally many in each file, are the usual
    case and are taken.

    Args:
        arrays: see ``refuse_images``, as all of these.
        n_rows: of each file.
        n_files: how many were given.
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
                "row i of each must belong together. Name arrays with the same length along axis 0."
            )


def _check_same_rows(expected: Sequence[ArrayLayout], found: Sequence[ArrayLayout], *, shapes: bool) -> None:
    for a, b in zip(expected, found, strict=True):
        pairs = [("dtype", a.dtype, b.dtype), ("shape of a row", a.row_shape, b.row_shape)]
        if a.categories is not None and b.categories is not None:  # their codes become those of one dtype
            continue
        for what, left, right in pairs if shapes else pairs[:1]:
            if left != right and not (kind_of(a.dtype) == kind_of(b.dtype) == "text" and what == "dtype"):
                other = right if a.key == b.key else f"{b.key!r} has {right}"
                raise H5ValueError(
                    f"{a.key!r} has the {what} {left} in {a.path!r} and {other} in {b.path!r}. Train on files with "
                    "equal arrays, or create a data module for each kind."
                )


WITHOUT_THEM = "Repair them, or pass a list of files without them; files are never skipped silently."
"""What to do about broken files in classes that have no argument for it."""

Skip = Callable[[str, H5FileError], None]
"""Called with a file that is missing or broken, and is left out, and its error."""

_T = TypeVar("_T")


def each_readable(
    paths: Sequence[str], look: Callable[[str], _T], skip: Skip | None, advice: str, bar: Iterable[str] | None = None
) -> Iterator[tuple[str, _T]]:
    """Yield files with what is found in them, one after the other, without broken ones if the user asked for that.

    Args:
        paths: the files.
        look: looks at one.
        skip: called with a file that is left out; None raises its error.
        advice: what to do to train without broken files, for the error.
        bar: yields the files and shows progress.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
    """
    n_found = 0
    for path in paths if bar is None else bar:
        try:
            found = look(path)
        except H5FileError as error:
            if skip is not None:
                skip(path, error)
                continue
            # System errors, such as locks, and changed files do not mean that a file is broken.
            is_broken = not isinstance(error, H5DataChangedError) and getattr(error.__cause__, "errno", None) is None
            if len(paths) > 1 and is_broken:
                find = "`lightning-h5 check` finds all unreadable files."
                error.args = (f"{error} It is one of {len(paths):,} files: {find} {advice}",)
            raise
        n_found += 1
        yield path, found
    if not n_found:
        raise H5FileError(f"none of {listing(paths)} can be read. See the error that was logged for each.")

"""Cells: the arrays that an array of references names, each a part of the file, and the further values of each cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..hdf5 import (
    MAX_TEXT,
    AlikeArrays,
    ArrayLayout,
    ChangeGuard,
    OpenFile,
    OpenOptions,
    column_layout,
    is_matlab_text,
    referenced_arrays,
)
from .column_values import flat_values_of

__all__ = ["SEPARATOR", "CellValues", "names_of_cells"]

SEPARATOR = "\0"  # no name in a file has it


def names_of_cells(file: Any, path: str, keys: Sequence[str], options: OpenOptions) -> list[str]:
    """Return for each index the arrays that the arrays of references name there, as one text.

    Args:
        file: the open file.
        path: its path.
        keys: the arrays of references; the first one names the segments.
        options: how the file is opened.

    Raises:
        H5Error: see ``referenced_arrays``.
        H5ValueError: they have different lengths, or the first one names an array twice.
    """
    names_by_key = [referenced_arrays(file, path, key, options.files) for key in keys]
    for key, names in zip(keys[1:], names_by_key[1:], strict=True):
        if len(names) != len(names_by_key[0]):
            raise H5ValueError(
                f"{keys[0]!r} has {len(names_by_key[0])} references and {key!r} has {len(names)} in {path!r}; index i "
                "of each must belong together. Name arrays with equally many."
            )
    first: dict[str, int] = {}
    for at, name in enumerate(names_by_key[0]):
        if (before := first.setdefault(name, at)) != at:
            raise H5ValueError(
                f"{keys[0]!r} in {path!r} refers at index {before} and at index {at} to {name!r}: the same segment "
                "twice, of which a split could take one. Write an array for each index."
            )
    return [SEPARATOR.join(names) for names in zip(*names_by_key, strict=True)]


class CellValues:
    """Describes the cells of a file.

    Args:
        file: the open file.
        path: its path.
        options: how it is opened.
        guard: of the file.
        alike: describes arrays.
    """

    def __init__(self, file: OpenFile, path: str, options: OpenOptions, guard: ChangeGuard, alike: AlikeArrays) -> None:
        self._file, self._path, self._options, self._guard, self._alike = file, path, options, guard, alike
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._first: dict[str, ArrayLayout] = {}

    def of_column(self, key: str, cell: int, n_cells: int) -> ArrayLayout:
        """Describe the value of a cell in an array that has one value per cell.

        Raises:
            H5ValueError: it has another number of values.
        """
        if key not in self._columns:
            layout = self._alike.describe(self._file, self._path, key, self._options.files, self._guard)
            if (n := layout.n_rows * int(np.prod(layout.row_shape, dtype=np.int64))) != n_cells:
                raise H5ValueError(
                    f"{key!r} in {self._path!r} has {n:,} values, shape {(layout.n_rows, *layout.row_shape)}, for "
                    f"{n_cells:,} references. Name an array of as many references, or with one value for each."
                )
            self._columns[key] = flat_values_of(layout, self._options)
        return column_layout(self._columns[key][cell : cell + 1], self._path, key, self._guard)

    def checked(self, array: ArrayLayout, key: str, cell: int) -> ArrayLayout:
        """Return the description of a cell. MATLAB characters are described as text.

        Args:
            array: its description as an array.
            key: the array of references.
            cell: its index there.

        Raises:
            H5ValueError: it has another dtype, or number of axes, than the first cell; or lines of text.
        """
        checked = array
        if array.dtype == np.uint16 and array.value is None and is_matlab_text(self._file.h5, array.name):
            shape = (array.n_rows, *array.row_shape)
            n = int(np.prod(shape, dtype=np.int64))
            if max(shape) < n or n > MAX_TEXT:
                raise H5ValueError(
                    f"{key!r} in {self._path!r} refers at index {cell} to {array.key!r}, characters of shape {shape}. "
                    f"Write one line of text for each index, of up to {MAX_TEXT:,} characters."
                )
            letters = flat_values_of(array, self._options).astype("<u2").tobytes()
            text = np.array([letters.decode("utf-16-le", "replace")], dtype=object)
            checked = column_layout(text, self._path, array.key, self._guard)
        first = self._first.setdefault(key, checked)
        form, first_form = _dtype_and_axes(checked), _dtype_and_axes(first)
        if form != first_form:
            raise H5ValueError(
                f"{key!r} in {self._path!r} refers at index {cell} to {checked.key!r} ({form}), and before that "
                f"to {first.key!r} ({first_form}). Write arrays of one dtype with as many axes."
            )
        return checked


def _dtype_and_axes(array: ArrayLayout) -> str:
    """Return in words the dtype and number of axes, which all cells have in common."""
    n_axes = len(array.axes) + (array.value is None)
    return f"{'text' if array.dtype.kind == 'O' else array.dtype}, {n_axes} {'axis' if n_axes == 1 else 'axes'}"

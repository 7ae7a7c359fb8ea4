"""The values of an array with one value a row, as comparisons need them: decoded, with names for codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions
from ..readers import open_reader
from .categories import names_of_codes

__all__ = ["decoded", "flat_values_of", "values_of"]


def decoded(layout: ArrayLayout, column: npt.NDArray[Any], options: OpenOptions) -> npt.NDArray[Any]:
    """Return a column for comparisons: packed numbers are decoded, with NaN for missing ones; codes become names."""
    if layout.categories is not None:
        return names_of_codes(layout, column, options)
    is_kept = layout.packing is None or layout.packing.policy == "keep"
    return column if is_kept or layout.packing is None else layout.packing.decode(column)


def values_of(array: ArrayLayout, options: OpenOptions) -> npt.NDArray[Any]:
    """Return the values of an array with one value a row, for comparisons; text as ``str``.

    Raises:
        H5ValueError: it has rows of another shape.
    """
    if array.row_shape not in ((), (1,)):
        raise H5ValueError(
            f"{array.key!r} in {array.path!r} has rows of the shape {array.row_shape}. Name an array with one "
            "value a row."
        )
    return flat_values_of(array, options)


def flat_values_of(array: ArrayLayout, options: OpenOptions) -> npt.NDArray[Any]:
    """Return all values of an array of any shape, one after the other (see ``values_of``)."""
    values = array.value
    if values is None:
        values = open_reader(array, options, counters=Counters()).read(np.arange(array.n_rows))
    values = decoded(array, values.reshape(-1), options)
    if values.dtype.kind in "OS":
        texts = (one.decode() if isinstance(one, bytes) else one for one in values.tolist())
        values = np.fromiter(texts, dtype=object, count=len(values))
    return values

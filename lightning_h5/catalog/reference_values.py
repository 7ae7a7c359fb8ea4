"""Columns of references: the texts or numbers that an array of references points to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..hdf5 import OpenOptions, referenced_arrays, value_of_cell
from .catalog import Catalog

__all__ = ["values_of_cells"]


def values_of_cells(catalog: Catalog, path: str, key: str, options: OpenOptions) -> npt.NDArray[Any]:
    """Return the texts or numbers that an array of references points to.

    Args:
        catalog: opens the file.
        path: the file.
        key: the array of references.
        options: how the file is opened.

    Raises:
        H5ValueError: a cell has more than one number or line of text, or some have numbers and some text.
        H5Error: see ``referenced_arrays``.
    """

    def search(file: Any) -> tuple[npt.NDArray[Any], list[str]]:
        names = referenced_arrays(file, path, key, options.files, takes_empty=True)
        values = [value_of_cell(file, name, options.files) for name in names]
        are_texts = [isinstance(value, str) for value in values]
        wrong = next((at for at, value in enumerate(values) if value is None or are_texts[at] != are_texts[0]), None)
        if wrong is not None:
            raise H5ValueError(
                f"{key!r} in {path!r} refers at index {wrong} to {names[wrong]!r}, which is not one "
                f"{'line of text' if are_texts[0] else 'number'}, and rows of other arrays were named. Write one value "
                "for each row, or name arrays of references alone, whose arrays are segments."
            )
        return np.array(values, dtype=object if are_texts[0] else None), []

    return catalog.search(path, options, f"values of the cells {key!r}", search)

"""Dtypes of the input's fields that depend on the stored dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..catalog import has_lists
from ..datasets import Fields
from ..errors import H5ValueError, listing
from ..hdf5 import ArrayLayout, dtype_of_numbers, torch_dtype
from ..types import DTypeLike

__all__ = ["AUTO", "check_x_dtype", "is_settled_late", "settled"]

AUTO = "auto"
"""The value of ``x_dtype`` that converts float64 to float32, the usual dtype of models."""


def is_settled_late(x_dtype: DTypeLike, *, is_of_fields: bool) -> bool:
    """Return whether a dtype applies to some of the fields, depending on the stored dtypes."""
    return x_dtype is not None and not isinstance(x_dtype, Mapping) and (is_of_fields or _is_auto(x_dtype))


def check_x_dtype(x_dtype: DTypeLike, *, is_of_fields: bool) -> None:
    """Raise an ``H5ValueError`` if ``x_dtype`` is invalid."""
    if _is_auto(x_dtype):
        return
    named = x_dtype if isinstance(x_dtype, Mapping) else {"": x_dtype}
    for name, dtype in named.items():
        parsed = torch_dtype(dtype, f"x_dtype[{name!r}]" if name else "x_dtype")
        if is_of_fields and not name and parsed is not None and not parsed.is_floating_point:
            raise H5ValueError(
                f"x_dtype={x_dtype!r} was given with fields, and then applies to floating fields only. Pass a floating "
                "dtype, a mapping from fields to dtypes, or None to keep all dtypes."
            )


def settled(
    fields: Fields,
    arrays: Sequence[ArrayLayout],
    *,
    names: Sequence[str],
    x_dtype: DTypeLike,
    target: str,
    log: Callable[[str], None],
) -> Fields:
    """Set the dtypes of fields that depend on the stored dtypes.

    Args:
        fields: the fields of a sample: the input's, then the target's.
        arrays: the arrays of a file, one for each field.
        names: names of the input's fields.
        x_dtype: see the data modules: "auto", or the dtype of floating fields with several values per row.
        target: name of the field that keeps its dtype, except with "auto".
        log: logs the converted fields.
    """
    requests, narrowed = list(fields.requests), []
    for at, (name, array) in enumerate(zip(names, arrays, strict=False)):
        if _is_auto(x_dtype) and _is_float64(array):
            narrowed.append(name)
            requests[at] = replace(requests[at], dtype=torch.float32)
        elif not _is_auto(x_dtype) and array.dtype.kind == "f" and array.row_shape and name != target:
            requests[at] = replace(requests[at], dtype=torch_dtype(x_dtype, "x_dtype"))
    if narrowed:
        log(
            f"{listing(narrowed)} {'is' if len(narrowed) == 1 else 'are'} stored as float64, and loaded as float32 "
            "(x_dtype='auto'; x_dtype=None keeps float64)"
        )
    return replace(fields, requests=tuple(requests))


def _is_auto(x_dtype: DTypeLike) -> bool:
    return isinstance(x_dtype, str) and x_dtype == AUTO


def _is_float64(array: ArrayLayout) -> bool:
    """Return whether rows have 64-bit floats, or lists of 64-bit floats."""
    lists = array.decoding if has_lists(array) else None
    return dtype_of_numbers(array.dtype if lists is None else lists.array.dtype) == np.float64

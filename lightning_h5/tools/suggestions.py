"""Settings that follow from the arrays: dtypes for a float32 model, a split that works, a batch size that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, kind_of

__all__ = ["MAX_COLUMN_ROWS", "batch_size_for", "suggest_dtypes", "suggest_split", "trained_row_bytes"]

MAX_BATCH = 64
MAX_BATCH_BYTES = 64 << 20
MIN_STEPS = 4  # of an epoch

MIN_ROWS = 10  # of which a tenth validates

FRACTIONS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Shares of the rows to validate on, the first of which leaves rows, and rows of all classes, on both sides."""

MAX_CLASSES_SHARE = 0.2  # of the rows: more different numbers are no classes

MAX_COLUMN_ROWS = 1_000_000
"""Longer columns are not read for a suggestion."""


def suggest_dtypes(
    x: Sequence[ArrayLayout], y: Sequence[ArrayLayout], labels: npt.NDArray[Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Suggest dtypes for a model in float32.

    Args:
        x: the input's arrays.
        y: the target's arrays.
        labels: the target's values, if they are known.

    Returns:
        ``x_dtype`` and ``y_dtype``, if the arrays need them, and a sentence for each.
    """
    settings: dict[str, Any] = {}
    reasons = []
    inputs = _to_cast(x, "biuf", "float32")
    if inputs:
        settings["x_dtype"] = "float32"
        names = ", ".join(dict.fromkeys(str(array.dtype) for array in inputs))
        text = f"x_dtype: float32, since the input is stored as {names} and most models compute in float32"
        if any(array.dtype == np.uint8 for array in inputs):
            text += " (values stay 0 to 255: scale them, or see `lightning-h5 stats`)"
        elif any(array.dtype.kind in "iu" for array in inputs):
            text += " (leave it out if they are indices, as for an embedding)"
        reasons.append(f"{text}.")
    for kinds, dtype, use in (("biu", "int64", "torch takes class numbers"), ("f", "float32", "losses compare")):
        if (targets := _to_cast(y, kinds, dtype)) and not (dtype == "int64" and _exceed_int64(labels)):
            settings["y_dtype"] = dtype
            reasons.append(f"y_dtype: {dtype}, since the target is stored as {targets[0].dtype} and {use} in {dtype}.")
    for argument, arrays in (("x_dtype", x), ("y_dtype", y)):
        if packed := [array for array in arrays if array.packing is not None]:
            stored = {array.key: str(array.dtype) for array in packed}
            settings[argument] = stored if len(arrays) > 1 else stored[packed[0].key]
            reasons += [_why_as_stored(array) for array in packed]
    return settings, reasons


def _exceed_int64(labels: npt.NDArray[Any] | None) -> bool:
    return labels is not None and bool((labels > np.iinfo("i8").max).any())


def _why_as_stored(array: ArrayLayout) -> str:
    formula = "" if array.packing is None else f" ({array.packing.formula})"
    return f"{array.key!r} holds packed integers, loaded as they are stored: decode them in a transform{formula}."


def _to_cast(arrays: Sequence[ArrayLayout], kinds: str, dtype: str) -> list[ArrayLayout]:
    """Arrays that are not stored as wanted; none if some are not of these kinds, since a dtype is of all of them."""
    if not all(kind_of(a.dtype) == "number" and a.dtype.kind in kinds and a.packing is None for a in arrays):
        return []
    return [array for array in arrays if array.dtype != dtype]


def batch_size_for(n_rows: int, row_bytes: int) -> int:
    """Return a power of two, 64 at most, that leaves several steps in an epoch and batches of 64 MiB or less.

    Args:
        n_rows: rows to train on.
        row_bytes: bytes of a row, as the model gets it.
    """
    most = max(1, min(MAX_BATCH, n_rows // MIN_STEPS, MAX_BATCH_BYTES // max(1, row_bytes)))
    return 1 << (most.bit_length() - 1)


def trained_row_bytes(arrays: Sequence[ArrayLayout], dtype: str | Mapping[str, str] | None) -> int:
    """Return the bytes of a row of some arrays, as stored or in another dtype (for some, by key), whichever is more."""
    asked = [dtype.get(array.key) if isinstance(dtype, Mapping) else dtype for array in arrays]
    sizes = [0 if each is None else np.dtype(each).itemsize for each in asked]
    return sum(
        max(array.row_bytes, math.prod(array.row_shape) * size) for array, size in zip(arrays, sizes, strict=True)
    )


def suggest_split(
    n_rows: int,
    y_key: str | None,
    labels: npt.NDArray[Any] | None,
    group_key: str | None,
    groups: npt.NDArray[Any] | None,
) -> tuple[dict[str, Any], list[str]]:
    """Suggest how to cut validation rows off: by group, by class, with a share that leaves rows on both sides.

    Args:
        n_rows: rows that there are.
        y_key: the target.
        labels: its values, shape ``(n_rows,)``; None if they are not known.
        group_key: an array that names what rows belong to.
        groups: its values, shape ``(n_rows,)``; None if they are not known.

    Returns:
        ``val_fraction``, ``group_key`` and ``stratify_key``, as far as they apply, and sentences.
    """
    if n_rows < MIN_ROWS:
        there_are = "There is 1 row" if n_rows == 1 else f"There are {n_rows} rows"
        return {}, [f"{there_are}, too few to validate on some of them."]
    reasons = []
    if groups is not None and (problem := _why_no_groups(groups)) is not None:
        reasons.append(f"{group_key!r} is no group_key: {problem}.")
        group_key = groups = None
    classes = labels if labels is not None and _are_classes(labels) and (groups is not None or not group_key) else None
    fraction, has_all = _fraction(n_rows, groups, classes)
    settings: dict[str, Any] = {"val_fraction": fraction}
    if group_key is not None:
        settings["group_key"] = group_key
        reasons.append(
            f"group_key: {group_key}, which seems to name what rows belong to: rows of one {group_key!r} are all in "
            "training or all in validation."
        )
    if classes is not None:
        settings["stratify_key"] = y_key
        some = "" if has_all else " as far as possible"
        reasons.append(f"stratify_key: {y_key}, so that training and validation have rows of all classes{some}.")
    return settings, reasons


def _why_no_groups(groups: npt.NDArray[Any]) -> str | None:
    from ..order import group_split  # brings torch, which takes longer to import than a look at most files

    try:
        group_split(groups, [0.5, 0.5])
    except H5ValueError as error:
        return f"{error}".rstrip(".")
    n_groups = len(np.unique(groups.astype(str) if groups.dtype.kind == "O" else groups))
    if n_groups == len(groups):
        return "each row has a value of its own"
    return "all rows have the same value" if n_groups == 1 else None


def _are_classes(labels: npt.NDArray[Any]) -> bool:
    return labels.dtype.kind in "biu" and 2 <= len(np.unique(labels)) <= MAX_CLASSES_SHARE * len(labels)


def _fraction(n_rows: int, groups: npt.NDArray[Any] | None, classes: npt.NDArray[Any] | None) -> tuple[float, bool]:
    """The share to validate on, and whether both sides have all classes with it."""
    if groups is None and classes is None:
        return FRACTIONS[0], True
    from ..order import group_split

    n_classes = 0 if classes is None else len(np.unique(classes))
    able = []
    for fraction in FRACTIONS:
        parts = group_split(n_rows if groups is None else groups, [1 - fraction, fraction], labels=classes)
        if all(map(len, parts)):
            able.append(fraction)
            if classes is None or all(len(np.unique(classes[rows])) == n_classes for rows in parts):
                return fraction, True
    return min(able, default=FRACTIONS[0]), False

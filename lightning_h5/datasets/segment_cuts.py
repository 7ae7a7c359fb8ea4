"""Where segments begin among consecutive rows: by lengths, first rows, flags, values or a coordinate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..options import SegmentOptions
from ..types import IntArray
from .row_filters import Mask
from .segments import Steps

__all__ = ["by_coordinate", "by_value", "check_present", "firsts_in", "steps_of"]


def firsts_in(segments: SegmentOptions, cuts: Mapping[str, npt.NDArray[Any]], n_rows: int, path: str) -> IntArray:
    """Return the first rows of the segments of a part.

    Raises:
        H5ValueError: the values do not fit the rows.
    """
    for key in (segments.lengths, segments.offsets):
        if key is not None and cuts[key].dtype.kind not in "iu":
            raise H5ValueError(f"{key!r} in {path!r} has values of {cuts[key].dtype}. Name an array of whole numbers.")
    if segments.lengths is not None:
        lengths = cuts[segments.lengths].astype(np.int64)
        if (lengths < 0).any() or lengths.sum() != n_rows:
            raise H5ValueError(
                f"segments.lengths={segments.lengths!r} has the sum {lengths.sum()} in {path!r}, and the data has "
                f"{n_rows} steps there. Name the array with the number of steps of each segment."
            )
        return np.cumsum(lengths) - lengths
    if segments.offsets is not None:
        firsts = cuts[segments.offsets].astype(np.int64)
        if len(firsts) and firsts[-1] == n_rows:
            firsts = firsts[:-1]
        if not len(firsts) or firsts[0] != 0 or (np.diff(firsts) < 0).any() or firsts[-1] > n_rows:
            raise H5ValueError(
                f"segments.offsets={segments.offsets!r} has the values {_some(firsts)} in {path!r}, and the data has "
                f"{n_rows} steps there. Name the array with the first step of each segment, from 0 on, ascending."
            )
        return firsts
    flags = np.zeros(n_rows, dtype=np.bool_)
    for key in [segments.ends] if isinstance(segments.ends, str) else segments.ends or []:
        if len(cuts[key]) != n_rows:
            raise H5ValueError(
                f"segments.ends names {key!r}, which has {len(cuts[key])} values in {path!r}, and the data has "
                f"{n_rows} steps there. Name arrays with a flag for each step."
            )
        flags |= cuts[key].astype(np.bool_)
    return np.concatenate([[0], np.flatnonzero(flags[:-1]) + 1]).astype(np.int64)


def steps_of(firsts: IntArray, lengths: IntArray, n_rows: int) -> Steps:
    """Return the steps of segments; without their lengths if each ends where the next one begins."""
    if len(firsts) and np.array_equal(np.append(firsts[1:], n_rows), firsts + lengths):
        return Steps(np.append(firsts, n_rows))
    return Steps(firsts, lengths)


def by_value(
    values: npt.NDArray[Any], order: npt.NDArray[Any] | None, segments: SegmentOptions
) -> tuple[IntArray, IntArray, IntArray | None]:
    """Return first place and length of the segments of rows with the same value, and the row at each place.

    Segments are in the order of their first rows. Rows without a value are in none. The rows are None if segments have
    consecutive ones, and these are all.

    Args:
        values: of ``segments.key``.
        order: of ``segments.sort_key``; equal values, and None, keep the order of storage.
        segments: names of the two.
    """
    if order is not None and order.dtype.kind not in "biuf":
        raise H5ValueError(
            f"segments.sort_key={segments.sort_key!r} has values of {order.dtype}. Name an array with one number per "
            "row."
        )
    there = np.flatnonzero(~is_missing(values))
    values = values.astype(str) if values.dtype.kind == "O" else values
    _, first, codes = np.unique(values[there], return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))[codes]
    sorted_rows = np.argsort(place, kind="stable") if order is None else np.lexsort((order[there], place))
    rows, lengths = there[sorted_rows].astype(np.int64), np.bincount(place).astype(np.int64)
    is_consecutive = np.array_equal(rows, np.arange(len(values)))
    return np.cumsum(lengths) - lengths, lengths, None if is_consecutive else rows


def check_present(values: npt.NDArray[Any] | None, name: str, is_kept: Mask | None) -> None:
    """Raise an ``H5ValueError`` if a row that filters keep has no value (NaN, or empty text)."""
    if values is None:
        return
    missing = is_missing(values) if is_kept is None else is_missing(values) & is_kept
    if missing.any():
        raise H5ValueError(
            f"{name!r} has no value (NaN or empty) in {int(missing.sum())} of {len(values)} rows, first in row "
            f"{int(missing.argmax())}. Fill these in, or exclude them with a filter (where of CombinedHDF5DataModule)."
        )


def is_missing(values: npt.NDArray[Any]) -> Mask:
    """Return which rows have no value: NaN, or empty text."""
    if values.dtype.kind == "f":
        return np.asarray(np.isnan(values))
    return np.asarray(values == "", dtype=np.bool_) if values.dtype.kind in "UO" else np.zeros(len(values), np.bool_)


def by_coordinate(values: npt.NDArray[Any], name: str) -> IntArray:
    """Return the first rows of segments in which a coordinate advances by its usual step, the median of all."""
    if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and not np.isfinite(values).all()):
        raise H5ValueError(f"segments.join={name!r} has values of {values.dtype}. Name an array of finite numbers.")
    steps = np.diff(values.astype(np.float64))
    if not len(steps):
        return np.zeros(min(1, len(values)), dtype=np.int64)
    usual = float(np.median(steps))
    if usual <= 0:
        raise H5ValueError(
            f"segments.join={name!r} has the median step {usual:g} over all files. Name a coordinate that advances, or "
            "pass the files in its order."
        )
    return np.concatenate([[0], np.flatnonzero(np.abs(steps - usual) > usual / 1000) + 1]).astype(np.int64)


def _some(values: npt.NDArray[Any]) -> str:
    return f"{values[:3].tolist()} ... {values[-2:].tolist()}" if len(values) > 6 else str(values.tolist())

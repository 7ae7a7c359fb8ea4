"""Cut rows into segments: by lengths, first rows, flags, values or a coordinate.

Coordinates of several files are compared on one scale: times may have a unit of their own in each file, such as
``"hours since 2020-01-01"``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..catalog import boundaries_in, ends_of
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions, process_pool
from ..options import SegmentOptions
from ..types import IntArray
from .row_filters import Mask
from .segments import Steps

__all__ = [
    "TimeUnit",
    "by_coordinate",
    "by_value",
    "check_present",
    "on_one_scale",
    "ranges_in",
    "steps_of",
    "unit_of",
]


def firsts_in(segments: SegmentOptions, cuts: Mapping[str, npt.NDArray[Any]], n_rows: int, path: str) -> IntArray:
    """Return the first rows of the segments of a part.

    Raises:
        H5ValueError: the values do not fit the rows.
    """
    for key in (segments.lengths, segments.offsets):
        if key is not None and cuts[key].dtype.kind not in "iu":
            raise H5ValueError(f"{key!r} in {path!r} has values of {cuts[key].dtype}. Name an array of whole numbers.")
    if segments.lengths is not None:
        lengths = cuts[segments.lengths]
        if (ends := ends_of(lengths, n_rows)) is None:
            raise H5ValueError(
                f"segments.lengths={segments.lengths!r} has the sum {sum(lengths.tolist())} and values from "
                f"{lengths.min(initial=0)} in {path!r}, and the data has {n_rows} steps there. Name the array with the "
                "number of steps of each segment."
            )
        return ends - lengths.astype(np.int64)
    if segments.offsets is not None:
        bounds = boundaries_in(cuts[segments.offsets], n_rows)
        if bounds is None:
            raise H5ValueError(
                f"segments.offsets={segments.offsets!r} has the values {_abridged(cuts[segments.offsets])} in "
                f"{path!r}, and the data has {n_rows} steps there. Name the array with the first step of each segment, "
                "from 0 on, ascending."
            )
        return bounds[:-1] if bounds[-1] == n_rows else bounds
    keys = [segments.ends] if isinstance(segments.ends, str) else segments.ends or []
    if len(keys) == 1 and cuts[keys[0]].dtype.kind in "iu" and not _are_flags(values := cuts[keys[0]], n_rows):
        bounds = boundaries_in(np.insert(values, 0, 0), n_rows)
        if bounds is None or bounds[-1] != n_rows:
            raise H5ValueError(
                f"segments.ends={keys[0]!r} has {len(values)} values, {_abridged(values)}, in {path!r}, and the data "
                f"has {n_rows} steps there. They are neither a flag for each step, 0 or 1, nor the number of steps up "
                "to the end of each segment, ascending to that of all steps. Name an array with one of these."
            )
        return bounds[:-1]
    flags = np.zeros(n_rows, dtype=np.bool_)
    for key in keys:
        if len(cuts[key]) != n_rows:
            raise H5ValueError(
                f"segments.ends names {key!r}, which has {len(cuts[key])} values in {path!r}, and the data has "
                f"{n_rows} steps there. Name arrays with a flag for each step, or one of whole numbers: the steps "
                "up to the end of each segment."
            )
        if not _are_flags(cuts[key], n_rows):
            raise H5ValueError(
                f"segments.ends names {key!r}, which has the values {_abridged(cuts[key])} in {path!r}. Name arrays "
                "with a flag for each step, 0 or 1, or one of whole numbers: the steps up to the end of each segment."
            )
        flags |= cuts[key].astype(np.bool_)
    return np.concatenate([[0], np.flatnonzero(flags[:-1]) + 1]).astype(np.int64)


def _are_flags(values: npt.NDArray[Any], n_rows: int) -> bool:
    """Return whether there is a value for each row, and all are 0 or 1."""
    return len(values) == n_rows and values.dtype.kind in "biuf" and bool(((values == 0) | (values == 1)).all())


def ranges_in(
    segments: SegmentOptions, cuts: Mapping[str, npt.NDArray[Any]], n_rows: int, path: str
) -> tuple[IntArray, IntArray]:
    """Return the first rows and the lengths of the segments of a part.

    Raises:
        H5ValueError: the values do not fit the rows.
    """
    key = segments.offsets if segments.spans is None else segments.spans
    if key is None or (segments.spans is None and cuts[key].ndim == 1):
        firsts = firsts_in(segments, cuts, n_rows, path)
        return firsts, np.diff(np.append(firsts, n_rows))
    values = cuts[key]
    if values.dtype.kind not in "iu" or values.shape[1:] != (2,):
        raise H5ValueError(
            f"segments.spans={key!r} has values of {values.dtype} and the shape {values.shape} in {path!r}. "
            "Name an array of whole numbers of the shape (n, 2): the first row of each segment, and the row after its "
            "last one."
        )
    starts, ends = values.T
    if bad := np.flatnonzero((starts < 0) | (ends < starts) | (ends > n_rows))[:1].tolist():
        raise H5ValueError(
            f"segments.spans={key!r} has the pair {values[bad[0]].tolist()} in row {bad[0]} in {path!r}, and "
            f"the data has {n_rows} steps there. Name the array with (start, stop) of each segment."
        )
    return starts.astype(np.int64), (ends - starts).astype(np.int64)


def steps_of(firsts: IntArray, lengths: IntArray, starts: IntArray) -> Steps:
    """Return the steps of segments. Lengths are omitted if each segment ends where the next one begins.

    Args:
        firsts: first row of each segment.
        lengths: steps of each segment.
        starts: first row of each part, followed by the number of rows; shared with the steps if parts are segments.
    """
    bounds = np.append(firsts, starts[-1])
    if len(firsts) and np.array_equal(bounds[1:], firsts + lengths):
        return Steps(starts if np.array_equal(bounds, starts) else bounds)
    return Steps(firsts, lengths)


def by_value(
    values: npt.NDArray[Any], order: npt.NDArray[Any] | None, segments: SegmentOptions
) -> tuple[IntArray, IntArray, IntArray | None]:
    """Group rows with the same value into segments; return their first places and lengths, and the row at each place.

    Segments are in the order of their first rows. Rows without a value are in no segment. The row numbers are None if
    places and rows are the same: all rows belong to segments, which are consecutive.

    Args:
        values: of ``segments.key``.
        order: of ``segments.sort_key``; equal values, and None, keep the order of storage.
        segments: names of both arrays.
    """
    if order is not None and order.dtype.kind not in "biuf":
        raise H5ValueError(
            f"segments.sort_key={segments.sort_key!r} has values of {order.dtype}. Name an array with one number per "
            "row."
        )
    present = np.flatnonzero(~is_missing(values))
    values = values.astype(str) if values.dtype.kind == "O" else values
    _, first, codes = np.unique(values[present], return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))[codes]
    sorted_rows = np.argsort(place, kind="stable") if order is None else np.lexsort((order[present], place))
    rows, lengths = present[sorted_rows].astype(np.int64), np.bincount(place).astype(np.int64)
    is_consecutive = np.array_equal(rows, np.arange(len(values)))
    return np.cumsum(lengths) - lengths, lengths, None if is_consecutive else rows


def check_present(values: npt.NDArray[Any] | None, name: str, is_kept: Mask | None) -> None:
    """Raise an ``H5ValueError`` if a row that passes filters has no value (NaN, or empty text)."""
    if values is None:
        return
    is_absent = is_missing(values) if is_kept is None else is_missing(values) & is_kept
    if is_absent.any():
        raise H5ValueError(
            f"{name!r} has no value (NaN or empty) in {int(is_absent.sum())} of {len(values)} rows, first in row "
            f"{int(is_absent.argmax())}. Fill these in, or exclude them with a filter (where)."
        )


def is_missing(values: npt.NDArray[Any]) -> Mask:
    """Return a mask of rows without a value: NaN, or empty text."""
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
            f"segments.join={name!r} has the median step {usual:g} over all files, which are sorted by it. Name a "
            "coordinate that advances."
        )
    return np.concatenate([[0], np.flatnonzero(np.abs(steps - usual) > usual / 1000) + 1]).astype(np.int64)


def _abridged(values: npt.NDArray[Any]) -> str:
    return f"{values[:3].tolist()} ... {values[-2:].tolist()}" if len(values) > 6 else str(values.tolist())


SECONDS = {
    1e-6: ("microsecond", "us"),
    1e-3: ("millisecond", "ms"),
    1.0: ("second", "sec", "s"),
    60.0: ("minute", "min"),
    3600.0: ("hour", "hr", "h"),
    86_400.0: ("day", "d"),
}
SINCE = re.compile(
    r"\s*([a-z]+)\s+since\s+(\d{4})-(\d{1,2})-(\d{1,2})"
    r"(?:[t\s]+(\d{1,2}):(\d{1,2})(?::(\d{1,2}(?:\.\d*)?))?)?\s*(z|utc|gmt|[+-]\d{1,2}(?::?\d{2})?)?\s*"
)
CALENDARS = {"", "standard", "gregorian", "proleptic_gregorian"}
FIRST_YEAR = 1583  # before it, days of the calendar "standard" are those of the Julian one


class TimeUnit(NamedTuple):
    """The attributes of an array of times; empty if they are missing.

    Attributes:
        units: such as ``"hours since 2020-01-01"``.
        calendar: of the CF conventions.
    """

    units: str = ""
    calendar: str = ""

    def __str__(self) -> str:
        return f"{self.units!r}{f' ({self.calendar})' if self.calendar else ''}" if self.units else "no units"

    def scale(self) -> tuple[float, int] | None:
        """Return the seconds of a unit, and the microseconds from 1970 to its number 0; None if the unit is unknown."""
        match = SINCE.fullmatch(self.units.lower())
        if match is None or self.calendar.lower() not in CALENDARS:
            return None
        name, *date, hour, minute, second, zone = match.groups()
        factor = next((n for n, names in SECONDS.items() if name in names or name.removesuffix("s") in names), None)
        year, month, day = map(int, date)
        if factor is None or (year < FIRST_YEAR and self.calendar.lower() != "proleptic_gregorian"):
            return None
        try:
            midnight = datetime(year, month, day, tzinfo=UTC)
        except ValueError:
            return None
        since = midnight - datetime(1970, 1, 1, tzinfo=UTC)
        clock = timedelta(hours=int(hour or 0), minutes=int(minute or 0), seconds=float(second or 0))
        return factor, (since + clock - _offset(zone)) // timedelta(microseconds=1)


def _offset(zone: str | None) -> timedelta:
    """Return the offset of a time zone from UTC."""
    if zone is None or zone[0] not in "+-":
        return timedelta(0)
    digits = zone[1:].replace(":", "")
    hours, minutes = (int(digits), 0) if len(digits) <= 2 else (int(digits[:-2]), int(digits[-2:]))
    return (-1 if zone[0] == "-" else 1) * timedelta(hours=hours, minutes=minutes)


def unit_of(array: ArrayLayout, options: OpenOptions) -> TimeUnit:
    """Return the unit of an array of times."""
    if array.value is not None:  # an attribute, or a column of a table
        return TimeUnit()
    with process_pool().h5(array.path, options, array.guard) as handle:
        attributes = handle.array(array).attrs
        return TimeUnit(*(_value_as_text(attributes.get(name, "")) for name in TimeUnit._fields))


def _value_as_text(value: Any) -> str:
    value = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def on_one_scale(
    values: list[npt.NDArray[Any]], units: list[TimeUnit], paths: list[str], name: str
) -> list[npt.NDArray[Any]]:
    """Return times of all parts on one scale.

    Times are as stored if all have one unit. Otherwise they count from the earliest number 0: in the common unit of
    time, such as hours, if there is one, and in seconds if not.

    Args:
        values: times of each part.
        units: of each part.
        paths: the file of each part, for errors.
        name: the array that the user named, for errors.

    Raises:
        H5ValueError: units differ, and one of them is unknown.
    """
    if len(set(units)) <= 1:
        return values
    scales = [unit.scale() for unit in units]
    if None in scales:
        unknown = scales.index(None)
        different = next(at for at, unit in enumerate(units) if unit != units[unknown])
        raise H5ValueError(
            f"segments.join={name!r} has {units[unknown]} in {paths[unknown]!r} and {units[different]} in "
            f"{paths[different]!r}, and these are not compared. Write both in one unit, such as 'hours since "
            "1970-01-01', or pass files with one."
        )
    factors, starts = zip(*(scale for scale in scales if scale is not None), strict=True)
    first = min(starts)
    parts = list(zip(values, factors, starts, strict=True))
    if len(set(factors)) == 1:
        return [times.astype(np.float64) + (start - first) / 1e6 / factor for times, factor, start in parts]
    return [times.astype(np.float64) * factor + (start - first) / 1e6 for times, factor, start in parts]

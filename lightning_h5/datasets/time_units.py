"""Times as numbers with a unit of their own in each file, such as ``"hours since 2020-01-01"``, on one scale."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions, process_pool

__all__ = ["TimeUnit", "on_one_scale", "unit_of"]

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
    """What the attributes of an array of times say; empty if they are missing.

    Attributes:
        units: such as ``"hours since 2020-01-01"``.
        calendar: of the CF conventions.
    """

    units: str = ""
    calendar: str = ""

    def __str__(self) -> str:
        return f"{self.units!r}{f' ({self.calendar})' if self.calendar else ''}" if self.units else "no units"

    def scale(self) -> tuple[float, int] | None:
        """Return the seconds of a unit, and the microseconds from 1970 to number 0; None if this is not known."""
        found = SINCE.fullmatch(self.units.lower())
        if found is None or self.calendar.lower() not in CALENDARS:
            return None
        name, *date, hour, minute, second, zone = found.groups()
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
        return factor, (since + clock - _ahead(zone)) // timedelta(microseconds=1)


def _ahead(zone: str | None) -> timedelta:
    """Return by how much clocks of a time zone are ahead."""
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
        return TimeUnit(*(_text(attributes.get(name, "")) for name in TimeUnit._fields))


def _text(value: Any) -> str:
    value = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def on_one_scale(
    values: list[npt.NDArray[Any]], units: list[TimeUnit], paths: list[str], name: str
) -> list[npt.NDArray[Any]]:
    """Return times that can be compared: as stored if all have one unit, otherwise from the earliest number 0 on.

    They are in their unit if it has one length, and otherwise in seconds.

    Args:
        values: times of each part.
        units: of each part.
        paths: the file of each part, for errors.
        name: what the user named, for errors.

    Raises:
        H5ValueError: units differ, and how is not known.
    """
    if len(set(units)) <= 1:
        return values
    scales = [unit.scale() for unit in units]
    if None in scales:
        unknown = scales.index(None)
        other = next(at for at, unit in enumerate(units) if unit != units[unknown])
        raise H5ValueError(
            f"segments.join={name!r} has {units[unknown]} in {paths[unknown]!r} and {units[other]} in "
            f"{paths[other]!r}, and these are not compared. Write both in one unit, such as 'hours since 1970-01-01', "
            "or pass files with one."
        )
    known = [scale for scale in scales if scale is not None]
    first = min(start for _, start in known)
    if len({factor for factor, _ in known}) == 1:
        return [
            one.astype(np.float64) + (start - first) / 1e6 / factor
            for one, (factor, start) in zip(values, known, strict=True)
        ]
    return [
        one.astype(np.float64) * factor + (start - first) / 1e6
        for one, (factor, start) in zip(values, known, strict=True)
    ]

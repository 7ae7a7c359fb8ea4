"""Whether the numbers of a field mean the same in all files: units, the order of axes, and the names along them."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError, listing
from ..hdf5 import Annotations, AxisNames
from ..order import resolve_replica

__all__ = ["Agreement", "Difference", "differences"]

_log = logging.getLogger(__name__)

UNIT = re.compile(r"([^\d+-]+?)\^?([+-]?\d+)?")
"""A unit with its exponent."""

MICRO = re.compile("u(?=(m|s|g|l|L|M|V|A|W|T|S|F|H|J|N|C|K|Pa|Hz|mol)$)")
"""The prefix of a millionth in ASCII."""

SPELLINGS = {
    "K": "kelvin degk deg_k degree_kelvin degrees_kelvin degreesk",
    "degC": "celsius degc deg_c degree_celsius degrees_celsius degreesc °c ℃",
    "degN": "degree_north degrees_north degree_n degrees_n degreen degreesn",
    "degE": "degree_east degrees_east degree_e degrees_e degreese",
    "deg": "degree °",
    "rad": "radian",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "mm": "millimeter millimetre",
    "μm": "micrometer micrometre micron",
    "s": "second sec",
    "ms": "millisecond msec",
    "μs": "microsecond usec",
    "ns": "nanosecond",
    "min": "minute",
    "h": "hour hr",
    "d": "day",
    "V": "volt",
    "mV": "millivolt",
    "μV": "microvolt",
    "A": "ampere amp",
    "Hz": "hertz",
    "kHz": "kilohertz",
    "Pa": "pascal",
    "hPa": "hectopascal millibar mbar",
    "g": "gram",
    "kg": "kilogram",
    "W": "watt",
    "J": "joule",
    "N": "newton",
    "T": "tesla",
    "mol": "mole",
    "L": "liter litre l",
    "%": "percent pct",
}
"""Words for units, without a plural's s."""

SAME_UNITS = {word: unit for unit, words in SPELLINGS.items() for word in words.split()}

DIMENSIONLESS = {"1", "1.0", "-", "dimensionless", "unitless"}

UNKNOWN = {"", "unknown", "unspecified", "undefined", "none", "n/a", "na", "nan", "null", "?"}
UNKNOWN |= {"a.u.", "au", "arbitrary", "arbitrary units", "arb. units", "arb. unit"}
"""Texts that state no unit."""

MIN_WORD = 4
"""Letters from which neither the case of a word matters, nor a plural's s, as in "Counts". mV and MV are different."""

NamesAt = Callable[[str, str], npt.NDArray[Any]]
"""Returns the names along an axis: takes the file and ``AxisNames.source``."""


class Difference(NamedTuple):
    """A difference in the meaning of numbers.

    Attributes:
        text: a sentence without a full stop.
        is_error: whether it cannot be meant.
        names: the names along one axis in both files, if these differ.
        cure: what to do about an error, without a full stop.
    """

    text: str
    is_error: bool = True
    names: tuple[AxisNames, AxisNames] | None = None
    cure: str = "Write files with the same columns in the same order"


class Agreement:
    """The meaning of each array's numbers in the first file, which all files of all splits must share.

    Attributes:
        source: name of the source of rows, if batches are made from one source each: sources may differ.
    """

    def __init__(self) -> None:
        self.source = ""
        self._first: dict[tuple[str, str], tuple[str, Annotations]] = {}
        self._logged: set[str] = set()

    def check(
        self,
        name: str,
        path: str,
        found: Annotations,
        rows: Collection[int],
        selection: Mapping[int, Any],
        names_at: NamesAt,
    ) -> None:
        """Compare a file with the first one.

        Args:
            name: the array, or the pattern of its name.
            path: the file.
            found: what the file says about the array.
            rows: the axes that number rows: these have other names in each file.
            selection: the selected part of other axes.
            names_at: reads names.

        Raises:
            H5ValueError: the numbers mean something else.
        """
        rows = {axis % found.n_axes for axis in rows}
        first, expected = self._first.setdefault((self.source, name), (path, found))
        if first == path or expected == found:  # a file may have been written again
            self._first[self.source, name] = first, found
            return
        if _dates_or_unit(expected.units) is None and found.units is not None:
            self._first[self.source, name] = path, expected._replace(units=found.units)
        for difference in differences(first, expected, path, found, rows):
            text = difference.text
            is_error = difference.is_error and expected.key == found.key  # other groups may be other things
            if difference.names is not None and is_error:
                part = {axis % found.n_axes: index for axis, index in selection.items()}.get(difference.names[0].axis)
                left, right = (
                    _selected(names_at(file, names.source), part)
                    for file, names in zip((first, path), difference.names, strict=True)
                )
                if np.array_equal(left, right):
                    continue
                text += _first_difference(left, right, difference.names[1].source)
            if is_error:
                cure = f"{difference.cure}, or create a data module for each kind"
                if found.key == name:  # no function decodes sparse matrices
                    cure += f"; or pass decode={{{name!r}: function}} if a function of yours decodes both"
                raise H5ValueError(f"{text}. {cure}.")
            if (note := f"{name} {difference.names and difference.names[0].axis}") not in self._logged:
                self._logged.add(note)
                if resolve_replica().rank == 0:
                    _log.warning("%s; further files are not named", text)


def differences(
    first: str, expected: Annotations, path: str, found: Annotations, rows: Collection[int]
) -> Iterator[Difference]:
    """Yield the differences in the meaning of an array's numbers between two files.

    Args:
        first: a file.
        expected: what it says about the array.
        path: another file.
        found: what that one says.
        rows: the axes that number rows.
    """
    key = expected.key
    left, right = (_dates_or_unit(units) for units in (expected.units, found.units))
    if left is not None and right is not None and left != right:
        text = f"{key!r} has the units {expected.units!r} in {first!r} and {found.units!r} in {path!r}"
        yield Difference(text, left[0] == right[0] == "unit", cure="Write files with the same units")
    dimensions = expected.dimensions, found.dimensions
    if all(dimensions) and len(dimensions[0]) == len(dimensions[1]):
        pairs = [(a, b) for at, (a, b) in enumerate(zip(*dimensions, strict=True)) if a != b and at not in rows]
        if _is_permuted(*dimensions):
            axes, others = map(listing, dimensions)
            text = f"the axes of {key!r} are {axes} in {first!r} and {others} in {path!r}"
            yield Difference(text, cure="Write files with the axes in one order")
            return
        if pairs and all(map(all, pairs)):
            a, b = pairs[0]
            yield Difference(f"an axis of {key!r} is {a!r} in {first!r} and {b!r} in {path!r}", is_error=False)
    by_axis = {(names.axis, names.are_names): names for names in expected.names}
    for names in found.names:
        other = by_axis.get((names.axis, names.are_names))
        if other is None or names.axis in rows or names.digest == other.digest:
            continue
        of_axis = f"along axis {names.axis} of {key!r}"
        if names.are_names:
            what = f"columns of {key!r}" if names.axis == 1 else f"names {of_axis}"
            yield Difference(f"the {what} differ between {first!r} and {path!r}", names=(other, names))
        elif names.content == other.content:
            text = f"the coordinates {of_axis} are in another order in {path!r} than in {first!r}"
            yield Difference(text, names=(other, names), cure="Write files with them in one order")
        elif not names.varies or names.ascends != other.ascends:
            how, than = ("ascend", ", and descend") if names.ascends else ("descend", ", and ascend")
            how, than = (how, than) if names.varies else ("are others", " than")
            text = f"the coordinates {of_axis} {how} in {path!r}{than} in {first!r} ({names.source!r})"
            yield Difference(text, False, (other, names))


def _is_permuted(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    """Return whether the same axes are in another order."""
    return left != right and sorted(left) == sorted(right)


def _dates_or_unit(text: str | None) -> tuple[Any, ...] | None:
    """Return a unit so that equal ones in other spellings, such as "m/s" and "m s**-1", are equal; None if unknown."""
    text = unicodedata.normalize("NFKC", text or "").strip()
    if text.casefold() in UNKNOWN or "\ufffd" in text:  # not UTF-8, as a micro sign in Latin-1
        return None
    if text.casefold() in DIMENSIONLESS:
        return "unit", ()
    if " since " in text:
        return "since", text
    powers = Counter[str]()
    for place, quotient in enumerate(text.replace("**", "^").split("/")):
        for word in re.split(r"[\s.*·]+", quotient.strip(" ()")):
            if word in ("", "1"):
                continue
            if (match := UNIT.fullmatch(word)) is None:
                return "text", text
            powers[_unit(match[1])] += int(match[2] or 1) * (-1 if place else 1)
    return "unit", tuple(sorted((unit, power) for unit, power in powers.items() if power))


def _unit(word: str) -> str:
    """Return one spelling of a unit."""
    lower = word.casefold()
    if (unit := SAME_UNITS.get(lower) or SAME_UNITS.get(lower.removesuffix("s"))) is not None and len(word) > 1:
        return unit
    return MICRO.sub("μ", word) if len(word) < MIN_WORD else lower.removesuffix("s")


def _selected(names: npt.NDArray[Any], part: Any) -> npt.NDArray[Any]:
    """Return the names of the selected part of an axis."""
    if part is None:
        return names
    if isinstance(part, Mapping):
        part = slice(part.get("start"), part.get("stop"), part.get("step"))
    elif isinstance(part, tuple) and hasattr(part, "start"):  # a Span
        part = slice(*part)
    try:
        return np.atleast_1d(names[part if isinstance(part, slice) else np.asarray(part)])
    except IndexError:
        return names


def _first_difference(left: npt.NDArray[Any], right: npt.NDArray[Any], source: str) -> str:
    n = min(len(left), len(right))
    at = int(np.argmax(np.append(left[:n] != right[:n], True)))
    a, b = (names[at] if at < len(names) else "missing" for names in (left, right))
    return f": {'column' if isinstance(a, str) else 'number'} {at} is {_shown(a)} and {_shown(b)} ({source!r})"


def _shown(name: Any) -> str:
    return repr(name) if isinstance(name, str) else str(name)

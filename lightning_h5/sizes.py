"""Numbers as people give and read them: sizes in bytes, and counts."""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex

from .errors import H5ValueError

__all__ = ["bytes_text", "parse_bytes", "whole"]

_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}b": factor for unit, factor in _UNITS.items() if unit not in ("", "b")}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", start=1)}


def parse_bytes(size: int | str, name: str) -> int:
    """A size such as ``1048576``, ``"512 MiB"`` or ``"2GB"`` as a number of bytes.

    Args:
        size: the size; KiB, MiB, GiB, TiB count in 1024s, KB, MB, GB, TB in 1000s.
        name: the argument's name, for the error.

    Raises:
        H5ValueError: it is negative or cannot be read.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or match is None or match[2].casefold() not in _UNITS:
        raise H5ValueError(f"{name}={size!r} is not a size. Pass a number of bytes, or a text such as '512 MiB'.")
    return int(float(match[1]) * _UNITS[match[2].casefold()])


def bytes_text(n_bytes: float, *, least: str = "B", most: str = "TiB", digits: int = 1) -> str:
    """A number of bytes in the unit that suits it: ``1.5 MiB``.

    Args:
        n_bytes: the number.
        least: the smallest unit that may be taken, one of ``B``, ``KiB``, ``MiB``, ``GiB``, ``TiB``.
        most: the largest.
        digits: behind the point; single bytes have none.
    """
    power = _NAMES.index(least)
    while power < _NAMES.index(most) and abs(n_bytes) >= 1024 ** (power + 1):
        power += 1
    return f"{n_bytes / 1024**power:,.{digits if power else 0}f} {_NAMES[power]}"


def whole(value: SupportsIndex, name: str, *, least: int) -> int:
    """A whole number, NumPy's among them, as an ``int``.

    Raises:
        H5ValueError: it is none, or below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise H5ValueError(f"{name}={value!r} was given. Pass a whole number of at least {least}.")
    return number

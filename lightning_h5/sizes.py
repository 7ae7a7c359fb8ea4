"""Sizes in bytes, as numbers or as people write them."""

from __future__ import annotations

import re

from .errors import H5ValueError

__all__ = ["parse_bytes"]

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

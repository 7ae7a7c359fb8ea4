"""The order of names with numbers: ``run_2`` before ``run_10``."""

from __future__ import annotations

import re

__all__ = ["natural_order"]


def natural_order(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key: as text, but numbers are compared by value, and by their text if the values are equal."""
    key: list[tuple[int, int, str]] = []
    for part in re.findall(r"[0-9]+|[^0-9]+", name):
        if part[0] in "0123456789":
            digits = part.lstrip("0")  # compared by their number first: int() refuses thousands of digits
            key.append((ord("0"), len(digits), digits))
        else:
            key += [(ord(letter), 0, "") for letter in part]
    return key, name

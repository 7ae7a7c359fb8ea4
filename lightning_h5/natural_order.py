"""The order of names with numbers: ``run_2`` before ``run_10``, and ``t_0.06`` before ``t_0.1``."""

from __future__ import annotations

import re

__all__ = ["natural_order"]


def natural_order(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key: as text, but numbers are compared by value, and by their text if the values are equal.

    Digits after a point are decimals if those before it are 0, or if they begin with 0 themselves; otherwise they are a
    number of their own, since names of parts and versions, ``1.9`` and ``1.10``, are as common as decimals.
    """
    key: list[tuple[int, int, str]] = []
    for point, digits, letter in re.findall(r"(?:(?<=[0-9])(\.))?([0-9]+)|([^0-9])", name):
        if point:
            key.append((ord("."), 0, ""))
        if letter:
            key.append((ord(letter), 0, ""))
        elif point and (digits[0] == "0" or not key[-2][1]):
            key.append((ord("0"), 0, digits))
        else:
            number = digits.lstrip("0")  # compared by their number of digits first: int() refuses thousands of them
            key.append((ord("0"), len(number), number))
    return key, name

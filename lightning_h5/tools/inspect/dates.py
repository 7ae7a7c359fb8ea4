"""Dates and times in text or whole numbers, recognized by their form."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

__all__ = ["are_dates"]

N_LOOKED_AT = 100  # of the values

MONTH, DAY, TIME = r"(0?[1-9]|1[0-2])", r"(0?[1-9]|[12]\d|3[01])", r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?"
DATES = (
    rf"(1[5-9]|20|21)\d\d(?P<point>[-/.]){MONTH}(?P=point){DAY}",  # 2020-01-31
    rf"{DAY}[-/.]{MONTH}[-/.](1[5-9]|20|21)\d\d",  # 31.01.2020
    rf"{MONTH}/{DAY}/(1[5-9]|20|21)\d\d",
    r"(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])",  # 20200131
    rf"{DAY}[- ][A-Za-z]{{3,9}}[- ](19|20)?\d\d",  # 31-Jan-2020
)
FORMS = [
    re.compile(rf"(\w{{3}},? )?{date}([T ]({TIME}|\d{{6}}))?\s*(Z|UTC|GMT|[+-]\d\d:?\d\d)?", re.ASCII) for date in DATES
]
FORMS.append(re.compile(TIME, re.ASCII))


def are_dates(values: Iterable[Any]) -> bool:
    """Return whether values are dates or times of day, by the form of the first hundred: text, or numbers YYYYMMDD."""
    first = islice(values, N_LOOKED_AT)
    texts = [value.decode(errors="replace") if isinstance(value, bytes) else f"{value}" for value in first]
    texts = [text.strip("\0 ") for text in texts]
    return any(texts) and all(any(form.fullmatch(text) for form in FORMS) for text in texts if text)

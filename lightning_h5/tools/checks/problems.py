"""A problem with a file, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Problem", "error", "is_of_memory", "warning"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with a file, or may be.

    Attributes:
        file: the file.
        array: the array, or another name in the file; None where it is the file as a whole.
        kind: what it is about, in a word or two, the same for all problems alike.
        text: what is wrong, in a sentence or two.
        severity: an error keeps rows from being read as they were written; a warning is worth knowing.
    """

    file: str
    array: str | None
    kind: str
    text: str
    severity: Literal["error", "warning"] = "error"


def error(file: str, array: str | None, kind: str, text: object) -> Problem:
    """A problem that keeps rows from being read as they were written."""
    return Problem(file=file, array=array, kind=kind, text=f"{text}")


def warning(file: str, array: str | None, kind: str, text: object) -> Problem:
    """Something worth knowing."""
    return Problem(file=file, array=array, kind=kind, text=f"{text}", severity="warning")


def is_of_memory(why: BaseException | None) -> bool:
    """Whether an error came of memory that was not there, which may be so of a file that is whole."""
    while why is not None:
        if isinstance(why, MemoryError):
            return True
        why = why.__cause__
    return False

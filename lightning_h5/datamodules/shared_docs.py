"""Arguments that several classes share are documented in one of them, and copied to the others' docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TypeVar

__all__ = ["with_arguments_of"]

_Class = TypeVar("_Class", bound=type)


def with_arguments_of(other: type) -> Callable[[_Class], _Class]:
    """Return a decorator that adds what another class says of arguments that a class does not describe itself.

    ``help``, the documentation and the command line then show all of them, in the order of the constructor.

    Args:
        other: the class that describes them.
    """

    def decorate(documented: _Class) -> _Class:
        if documented.__doc__ is None or other.__doc__ is None:  # python -OO
            return documented
        text = inspect.cleandoc(documented.__doc__)
        entries = _entries(inspect.cleandoc(other.__doc__)) | _entries(text)
        names = list(inspect.signature(documented.__init__).parameters)[1:]  # type: ignore[misc]  # of this class
        section = "".join(entries[name] for name in names if name in entries)
        documented.__doc__ = _ARGUMENTS.sub(lambda _: f"Args:\n{section}", text, count=1)
        return documented

    return decorate


_ARGUMENTS = re.compile(r"^Args:\n((?:    .*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): .*\n(?:     .*\n)*", re.MULTILINE)


def _entries(text: str) -> dict[str, str]:
    """Return the lines that describe each argument, by its name."""
    section = _ARGUMENTS.search(text)
    return {} if section is None else {entry[1]: entry[0] for entry in _ENTRY.finditer(section[1])}

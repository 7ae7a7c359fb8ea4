"""The errors of this package: few types, each also a builtin one.

Every message has three parts, in this order: what was requested, what exists, what to do.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "H5CorruptError",
    "H5DataChangedError",
    "H5Error",
    "H5FileError",
    "H5KeyError",
    "H5MemoryError",
    "H5ResumeError",
    "H5ValueError",
    "H5WorkerError",
]

MAX_LETTERS = 300  # maximum length of a name in a message
MAX_VALUE = 80  # maximum length of a value in a message
MAX_MESSAGE = 2000  # maximum length of a message
CERTAIN, POSSIBLE = 0.75, 0.6  # similarity of a misspelled name, by difflib; in between a common beginning counts more

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class H5Error(Exception):
    """Base of all errors raised on purpose by this package. Its text prints as written."""

    def __str__(self) -> str:
        # KeyError prints the repr of its text, and OSError an errno.
        return _message(self.args)


class H5FileError(H5Error, OSError):
    """A file is missing, is not HDF5, is truncated, locked or cannot be read."""


class H5KeyError(H5Error, KeyError):
    """An array, a member of a table or an attribute is not in the file.

    Args:
        sentences: the message. With a ``key``, the sentences are: where the key is missing ("is not in 'data.h5'."),
            the existing names, the nearest name (or ""), and the remedy.
        key: see below.

    Attributes:
        key: the missing name, with which the message begins; None if the message is about something else.
        argument: the argument of a data module that has the key, such as ``x_key='images'``. The message begins with it
            instead. None for a key of unknown origin.
    """

    def __init__(self, *sentences: str, key: str | None = None) -> None:
        super().__init__(*sentences)
        self.key = key
        self.argument: str | None = None

    def __str__(self) -> str:
        subject = self.argument or ("" if self.key is None else repr(self.key))
        return _message([subject, *self.args])


class H5ValueError(H5Error, ValueError):
    """An argument, or the data it names, does not make sense."""


class H5DataChangedError(H5FileError):
    """A file changed after ``setup``."""


class H5CorruptError(H5FileError):
    """Stored bytes cannot be read back: a short read, a bad checksum, a chunk that does not decode."""


class H5WorkerError(H5Error, RuntimeError):
    """A worker process was killed, crashed, or returned nothing for too long."""


class H5MemoryError(H5Error, MemoryError):
    """The requested rows do not fit into memory."""


class H5ResumeError(H5Error, ValueError):
    """A saved position does not fit the present data or settings."""


def without_frames(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorate a function so that an ``H5Error`` leaves it without the frames and causes inside this package.

    The error's text is complete, and internal frames would only hide the line of the user's script. All other errors
    keep their frames.

    Args:
        function: a function that users call.
    """

    @functools.wraps(function)
    def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except H5Error as error:
            raise error.with_traceback(None) from None

    return wrapper


def named(argument: str, function: Callable[..., Any]) -> str:
    """The argument by which a user's function was passed, and the function's name, as text for a message."""
    while isinstance(function, functools.partial):
        function = function.func
    return f"{argument} {_without_middle(getattr(function, '__qualname__', type(function).__qualname__))!r}"


def stop_iteration(argument: str, function: Callable[..., Any]) -> RuntimeError:
    """Return the error to raise when a user's function raised StopIteration, as PEP 479 defines for generators.

    A loop over batches or samples would otherwise end without an error.

    Args:
        argument: the argument that the function was passed as.
        function: the function.
    """
    return RuntimeError(
        f"{named(argument, function)} raised StopIteration, which loops take for the end of their iterator. Raise "
        "another error there; next(iterator, default) raises none."
    )


def listing(names: Iterable[object], most: int = 12) -> str:
    """Names for a message: quoted, separated by commas, cut after ``most`` of them; a very long one in its middle."""
    quoted = [_without_middle(repr(name)) for name in names]
    rest = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return (", ".join(quoted[:most]) + rest) or "nothing"


def shown(name: str) -> str:
    """A name as it is, or quoted if it has control characters for a terminal; a very long one cut in its middle."""
    return _without_middle(name if name.isprintable() else repr(name))


def short_repr(value: object) -> str:
    """Return the ``repr`` of a value, at most a line of it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]} ..."


def _message(sentences: Iterable[object]) -> str:
    """Join sentences. Of a long text the longest words are cut, such as values of a file, and then the middle."""
    text = " ".join(sentence for sentence in map(str, sentences) if sentence)
    for word in sorted(text.split(), key=len, reverse=True):
        if len(word) <= MAX_LETTERS or len(text) <= MAX_MESSAGE:
            break
        text = text.replace(word, _without_middle(word))
    half = (MAX_MESSAGE - len(" ... ")) // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"


def _without_middle(text: str) -> str:
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS // 2]} ... {text[-MAX_LETTERS // 2 :]}"


def near(name: str, names: Iterable[str], cutoffs: Sequence[float] = (CERTAIN, POSSIBLE)) -> str:
    """A ``did you mean`` sentence for a misspelled name, with a leading blank, or nothing.

    Of arrays in the same group the last parts are compared, of others the whole name and then the last part.

    Args:
        name: the misspelled name.
        names: names that exist.
        cutoffs: similarities to accept, from the highest to the lowest.
    """
    names = list(names)
    group, _, last_part = name.casefold().rpartition("/")
    siblings = [candidate for candidate in names if group and candidate.casefold().rpartition("/")[0] == group]
    others = [candidate for candidate in names if candidate not in siblings]
    comparisons = [
        ({candidate.rsplit("/", 1)[-1].casefold(): candidate for candidate in siblings}, last_part),
        ({candidate.casefold(): candidate for candidate in others}, name.casefold()),
        ({candidate.rsplit("/", 1)[-1].casefold(): candidate for candidate in others}, last_part),
    ]
    for cutoff in cutoffs:
        for candidates, part in comparisons:
            if part and (matches := difflib.get_close_matches(part, candidates, n=1, cutoff=cutoff)):
                return f" Did you mean {candidates[matches[0]]!r}?"
            longer_and_shorter = [
                candidate
                for candidate in candidates
                if candidate.startswith(part) or (len(candidate) > 2 and part.startswith(candidate))
            ]
            if part and len(longer_and_shorter) == 1:
                return f" Did you mean {candidates[longer_and_shorter[0]]!r}?"
    return ""

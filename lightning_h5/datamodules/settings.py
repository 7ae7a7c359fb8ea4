"""The settings of a data module as plain values: what loggers record and checkpoints keep (``hparams``)."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from ..errors import H5ValueError

__all__ = ["NOT_STORED", "constructor_settings", "outermost_frame", "plain_settings"]

MAX_LETTERS = 4096  # of one setting as JSON; the names of thousands of files would go into every checkpoint and log
NOT_STORED = "not stored: "


def constructor_settings(module: object) -> dict[str, Any]:
    """Return the arguments of the constructor that makes an object, by name. Call it first in a constructor.

    If a subclass has a constructor of its own, its arguments count: ``load_from_checkpoint`` passes them to it.

    Args:
        module: the object that is being made.

    Raises:
        H5ValueError: an argument is what ``plain_settings`` puts in the place of a value that is not stored.
    """
    outer, *inner = _constructors(module)
    names, varargs, keywords, values = inspect.getargvalues(outer)
    settings = {name: values[name] for name in names[1:]} | (values[keywords] if keywords else {})
    rest: Sequence[Any] = values[varargs] if varargs else ()
    for frame in inner if rest else ():  # `*args` that are passed on have the names of the next constructor
        names, varargs, _, values = inspect.getargvalues(frame)
        settings |= dict(zip(names[1:], rest, strict=False))
        rest = values[varargs] if varargs else ()
        if not rest:
            break
    _check_stored(type(module).__name__, settings)
    return settings


def outermost_frame() -> FrameType:
    """Return the frame in which this thread began."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _constructors(module: object) -> list[FrameType]:
    """The running constructors of an object, the one that was called first in front."""
    # No variable may hold the frame that it is in: such a cycle would keep the object until the collector comes.
    found: list[FrameType] = []
    frame = sys._getframe().f_back
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            found.insert(0, frame)
        frame = frame.f_back
    return found


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as numbers, text, lists and dicts, which every logger and ``torch.load`` accept.

    Paths, dtypes and NumPy's numbers become what the constructors also accept. For a function, any other object, and a
    value of more than 4,096 letters the result has a note. It says what the value was, and constructors refuse it.

    Args:
        settings: by name.
    """
    plain = {}
    for name, value in settings.items():
        found = _plain(value)
        if (n_letters := len(json.dumps(found))) > MAX_LETTERS:
            found = f"{NOT_STORED}{_length(value)} ({n_letters:,} letters)"
        plain[name] = found
    return plain


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kinds, convert in _CONVERSIONS:
        if isinstance(value, kinds):
            return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, type) and (value in (bool, int, float) or issubclass(value, np.generic)):
        return np.dtype(value).name
    return NOT_STORED + _name_of(value)


def _plain_array(value: Any) -> Any:
    n_values = value.numel() if isinstance(value, torch.Tensor) else value.size
    is_object = isinstance(value, np.ndarray) and value.dtype.hasobject
    too_large = n_values > MAX_LETTERS  # each takes a letter or more
    return f"{NOT_STORED}{_length(value)}" if too_large else _plain(list(value) if is_object else value.tolist())


def _plain_key(key: Any) -> Any:
    plain = _plain(key)
    return plain if plain is None or isinstance(plain, str | int | float) else str(plain)


_CONVERSIONS: tuple[tuple[Any, Any], ...] = (
    (np.generic, lambda value: _plain(value.item())),
    (Enum, lambda value: _plain(value.value)),
    (int, int),
    (float, float),
    (str, str),
    (os.PathLike, lambda value: os.fsdecode(value)),
    (np.dtype, lambda value: value.name),
    (torch.dtype, lambda value: str(value).removeprefix("torch.")),
    (torch.device, str),
    (np.ndarray | torch.Tensor, _plain_array),
    (Mapping, lambda value: {_plain_key(key): _plain(each) for key, each in value.items()}),
    (AbstractSet, lambda value: sorted(map(_plain, value), key=repr)),
    (bytes, lambda value: NOT_STORED + _length(value)),
    (Sequence, lambda value: [_plain(each) for each in value]),
)
"""What becomes of a value of each kind; the first kind that fits counts."""


def _name_of(value: Any) -> str:
    """A name that says what an object is; not its ``repr``, which may hold anything."""
    while isinstance(value, partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _length(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value):,}" if hasattr(value, "__len__") else f"a {kind}"


def _check_stored(class_name: str, settings: Mapping[str, Any]) -> None:
    missing = {name: note for name, value in settings.items() if (note := _first_note(value)) is not None}
    if missing:
        told = ", ".join(f"{name} was {note.removeprefix(NOT_STORED)}" for name, note in missing.items())
        raise H5ValueError(
            f"{class_name} is being made from a checkpoint or log that does not hold all of its settings: {told}. "
            f"Functions, other objects, and values of more than {MAX_LETTERS:,} letters are not stored. Pass them: "
            f"{class_name}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in missing)})."
        )


def _first_note(value: Any) -> str | None:
    """The first note of a value that was not stored, at any depth."""
    if isinstance(value, str):
        return value if value.startswith(NOT_STORED) else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((note for part in parts if (note := _first_note(part)) is not None), None)

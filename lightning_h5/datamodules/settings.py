"""The settings of data modules as plain values (``hparams``), for checkpoints and loggers."""

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
from pprint import pformat
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from .._lightning import LightningDataModule
from ..errors import H5ValueError
from ..sizes import whole

__all__ = ["RecordsSettings", "plain_settings"]

MAX_LETTERS = 4096  # per setting as JSON: thousands of file names would bloat every checkpoint and log
NOT_STORED = "not stored: "
SECRETS = {"storage_options"}
"""Fields of settings that may hold credentials, which no checkpoint or log may have."""


class RecordsSettings(LightningDataModule):
    """A data module that records its settings, and shows them.

    Each argument of a constructor of this package is also an attribute. Setting it has the effect of a constructor call
    with the new value, from the next ``setup`` on. Attributes that a subclass sets before it calls this constructor are
    not affected.

    Args:
        arguments: the constructor's arguments by name.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self._record(constructor_settings(self))
        self._batch_size = whole(arguments["batch_size"], "batch_size", least=1)
        self._is_batch_size_in_hparams = self.hparams.get("batch_size") == self._batch_size
        self._passed = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
        self._changed: dict[str, Any] = {}  # hyperparameters that were set since, as plain values

    def _use_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Parse and check the arguments; called by the constructor, and whenever an argument is set.

        Raises:
            H5ValueError: an argument is invalid.
        """

    def _infer(self, **values: Any) -> None:
        """Set attributes to the values that ``setup`` has determined for arguments without a value."""
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        is_argument = name in vars(self).get("_passed", ())
        if is_argument and not isinstance(getattr(type(self), name, None), property):
            self._change(name, value)
        else:
            super().__setattr__(name, value)

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            arguments = vars(self).get("_passed", {})
            if name in arguments:
                return arguments[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _change(self, name: str, value: Any) -> None:
        """Change the value of an argument.

        Raises:
            H5ValueError: the value is invalid, as in the constructor.
        """
        before, arguments = dict(vars(self)), self._passed | {name: value}
        vars(self).pop(name, None)
        try:
            self._use_arguments(arguments)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        old, new = (plain_settings({name: setting})[name] for setting in (self._passed[name], value))
        self._passed = arguments
        if name in self.hparams and _equal(self.hparams[name], old):  # not another argument, of a subclass
            self.hparams[name] = self._changed[name] = new

    @property
    def batch_size(self) -> int:
        """Rows of a training batch on one rank. May be set between runs; ``hparams.batch_size`` is the same number."""
        size = self.hparams.get("batch_size") if self._is_batch_size_in_hparams else None
        return self._batch_size if size is None else cast("int", size)

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._batch_size = whole(batch_size, "batch_size", least=1)
        if self._is_batch_size_in_hparams:
            self.hparams["batch_size"] = batch_size

    @property
    def hparams_initial(self) -> Any:
        """The settings that loggers record.

        Lightning refuses to log a model's and a data module's hyperparameters together if they have different values
        under one name. The model's keep the name then, and these are recorded as, for example, ``data/batch_size``.
        """
        settings = super().hparams_initial
        settings.update(self._changed)
        for name in [name for name in settings if name.startswith("_")]:
            del settings[name]  # added by LightningCLI; Lightning before 2.5 compares it with the model's
        model = getattr(self.trainer, "lightning_module", None)
        of_model = {} if model is None or not getattr(model, "_log_hyperparams", True) else model.hparams_initial
        for name in [name for name in settings if name in of_model and not _equal(settings[name], of_model[name])]:
            settings[f"data/{name}"] = settings.pop(name)
        return settings

    def _record(self, settings: Mapping[str, Any]) -> None:
        # LightningCLI stores the arguments in its own form, from which it can recreate the module, functions included:
        # the first call saves that. Without LightningCLI it saves nothing, as no constructor is above the outermost
        # frame.
        frame = list(walk_stack(sys._getframe()))[-1][0]
        self.save_hyperparameters(frame=frame)
        of_cli = dict(self.hparams)
        is_of_cli = bool(of_cli) and {name for name in of_cli if not name.startswith("_")} <= set(settings)
        self.hparams.clear()
        self.save_hyperparameters(plain_settings(of_cli if is_of_cli else settings), frame=frame)

    def _shown_settings(self) -> str:
        """The class and its settings, except for defaults, in the form of a call."""
        parameters = inspect.signature(type(self).__init__).parameters
        defaults = plain_settings({name: parameter.default for name, parameter in parameters.items()})
        settings = [
            f"{name}={_shown_setting(value)}"
            for name, value in self.hparams.items()
            if not name.startswith("_") and not (name in defaults and _equal(defaults[name], value))
        ]
        return f"{type(self).__name__}({', '.join(settings)})"


def constructor_settings(module: object) -> dict[str, Any]:
    """Return the arguments of an object's constructor, by name. Call it first in a constructor.

    If a subclass has its own constructor, the arguments of this constructor are returned: ``load_from_checkpoint``
    passes them to it.

    Args:
        module: the object under construction.

    Raises:
        H5ValueError: an argument is a placeholder of ``plain_settings`` for a value that is not stored.
    """
    outer, *inner = _constructors(module)
    names, varargs, keywords, values = inspect.getargvalues(outer)
    settings = {name: values[name] for name in names[1:]} | (values[keywords] if keywords else {})
    rest: Sequence[Any] = values[varargs] if varargs else ()
    for frame in inner if rest else ():  # `*args` passed on are named by the next constructor
        names, varargs, _, values = inspect.getargvalues(frame)
        settings |= dict(zip(names[1:], rest, strict=False))
        rest = values[varargs] if varargs else ()
        if not rest:
            break
    _check_stored(type(module).__name__, settings)
    return settings


def _constructors(module: object) -> list[FrameType]:
    """Return the running constructors of an object, the outermost first."""
    # A variable that holds its own frame is a cycle, and would keep the object alive until the next collection.
    frames = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code.co_name == "__init__")
    return [frame for frame in frames if frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")) is module][::-1]


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as numbers, text, lists and dicts, which every logger and ``torch.load`` accept.

    Paths, dtypes and NumPy's numbers are converted to plain values that the constructors accept as well. Functions,
    other objects, and values of more than 4,096 letters are replaced by a note with a description, for which
    constructors raise an error.

    Args:
        settings: settings by name.
    """
    plain = {}
    for name, value in settings.items():
        plain[name] = _plain_value(value)
        if (n_letters := len(json.dumps(plain[name]))) > MAX_LETTERS:
            plain[name] = f"{NOT_STORED}{_json_length(value)} ({n_letters:,} letters)"
    return plain


def _plain_value(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kinds, convert in _CONVERSIONS:
        if isinstance(value, kinds):
            return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
        values = {name: getattr(value, name) for name in defaults}
        return _plain_fields({name: values[name] for name in values if not _equal(values[name], defaults[name])})
    if isinstance(value, type) and (value in (bool, int, float) or issubclass(value, np.generic)):
        return np.dtype(value).name
    return NOT_STORED + _object_name(value)


def _plain_fields(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    return {_plain_key(key): _plain_value(_without_secret(key, value)) for key, value in fields.items()}


def _without_secret(key: Any, value: Any) -> Any:
    return value if value is None or key not in SECRETS else NOT_STORED + "credentials"


def _plain_array(value: Any) -> Any:
    n_values = value.numel() if isinstance(value, torch.Tensor) else value.size
    is_object = isinstance(value, np.ndarray) and value.dtype.hasobject
    too_large = n_values > MAX_LETTERS  # each takes at least one character
    return (
        f"{NOT_STORED}{_json_length(value)}"
        if too_large
        else _plain_value(list(value) if is_object else value.tolist())
    )


def _plain_key(key: Any) -> Any:
    plain = _plain_value(key)
    return plain if plain is None or isinstance(plain, str | int | float) else str(plain)


_CONVERSIONS: tuple[tuple[Any, Any], ...] = (
    (np.generic, lambda value: _plain_value(value.item())),
    (Enum, lambda value: _plain_value(value.value)),
    (int, int),
    (float, float),
    (str, str),
    (os.PathLike, lambda value: os.fsdecode(value)),
    (np.dtype, lambda value: value.name),
    (torch.dtype, lambda value: str(value).removeprefix("torch.")),
    (torch.device, str),
    (np.ndarray | torch.Tensor, _plain_array),
    (Mapping, _plain_fields),
    (AbstractSet, lambda value: sorted(map(_plain_value, value), key=repr)),
    (bytes, lambda value: NOT_STORED + _json_length(value)),
    (Sequence, lambda value: [_plain_value(item) for item in value]),
)
"""The conversions by type; the first matching type counts."""


def _object_name(value: Any) -> str:
    """Return a name for an object; not its ``repr``, which may hold anything."""
    while isinstance(value, partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") and hasattr(value, "__module__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _json_length(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value):,}" if hasattr(value, "__len__") else f"a {kind}"


def _check_stored(class_name: str, settings: Mapping[str, Any]) -> None:
    missing = {name: note for name, value in settings.items() if (note := _first_note(value)) is not None}
    if missing:
        reasons = ", ".join(f"{name} was {note.removeprefix(NOT_STORED)}" for name, note in missing.items())
        raise H5ValueError(
            f"{class_name} is created from a checkpoint or log that does not hold all of its settings: {reasons}. "
            f"Functions, other objects, and values of more than {MAX_LETTERS:,} letters are not stored. Pass them: "
            f"{class_name}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in missing)})."
        )


def _first_note(value: Any) -> str | None:
    """The first note of a value that was not stored, at any depth."""
    if isinstance(value, str):
        return value if value.startswith(NOT_STORED) else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((note for part in parts if (note := _first_note(part)) is not None), None)


def _equal(ours: Any, theirs: Any) -> bool:
    """Return whether Lightning considers two hyperparameters equal."""
    if type(ours) is not type(theirs):
        return False
    try:
        return bool(ours == theirs)
    except (TypeError, ValueError, RuntimeError):  # they contain arrays
        return False


def _shown_setting(value: Any) -> str:
    """Return the short text of a setting; for a value that is not stored, its name in angle brackets."""
    if isinstance(value, str) and value.startswith(NOT_STORED):
        return f"<{value.removeprefix(NOT_STORED)}>"
    text = pformat(value, width=sys.maxsize)
    return text if len(text) <= 120 else f"{text[:117]}..."

"""The base of option classes, which parses an argument, and checks of their fields."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np

from ..errors import H5ValueError, listing, near, short_repr
from ..sizes import whole
from .keywords import unknown_keyword

__all__ = [
    "Options",
    "check_callable",
    "check_choice",
    "check_flag",
    "check_fraction",
    "check_transform",
    "check_whole",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the option classes: parses the value of an argument."""

    shorthand: ClassVar[str] = ""
    """Short values that the argument accepts, as text for messages."""

    @classmethod
    def parse(cls, value: Any, argument: str) -> Self:
        """Return the options that an argument stands for.

        Args:
            value: the object itself, a mapping of its fields, the class's shorthand, or None for the defaults.
            argument: name of the argument, for errors.

        Raises:
            H5ValueError: a field is unknown, or the value has none of these types.
        """
        if isinstance(value, cls):
            return value
        values = {} if value is None else value
        if not isinstance(values, Mapping) or not cls._is_mapping_of_fields(values):
            values = cls._from_shorthand(value)
        names = [field.name for field in fields(cls)]
        if values is None:
            shorthand = f"{cls.shorthand}, " if cls.shorthand else ""
            raise H5ValueError(
                f"{argument}={short_repr(value)} was given. Pass {shorthand}{cls.__name__}, or a mapping with some of "
                f"its fields: {', '.join(names)}."
            )
        for name in values:
            if name not in names:
                raise H5ValueError(unknown_keyword(cls, str(name), values[name], argument))
        return cls(**values)

    @classmethod
    def _is_mapping_of_fields(cls, value: Mapping[Any, Any]) -> bool:
        """Whether a mapping names fields, and is not a shorthand."""
        return True

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        """The fields that a shorthand stands for; None if the value is not a shorthand."""
        return None


def check_choice(value: object, name: str, allowed: Sequence[object]) -> None:
    """Raise an ``H5ValueError`` if a value is not allowed."""
    if isinstance(value, bool) or value not in allowed:
        hint = near(value, [choice for choice in allowed if isinstance(choice, str)]) if isinstance(value, str) else ""
        raise H5ValueError(f"{name}={short_repr(value)} was given.{hint} Pass {listing(allowed)}.")


def check_flag(value: object, name: str) -> None:
    """Raise an ``H5ValueError`` if a value is neither True nor False: text such as "false" counts as true."""
    if not isinstance(value, bool | np.bool_):
        raise H5ValueError(f"{name}={short_repr(value)} was given. Pass True or False.")


def check_callable(value: object, name: str) -> None:
    """Raise an ``H5ValueError`` unless a value is None or callable; also for a class whose objects are callable."""
    if isinstance(value, type) and any("__call__" in vars(base) for base in value.__mro__):
        raise H5ValueError(
            f"{name}={value.__qualname__} is a class. Pass an object of it: {name}={value.__qualname__}(...)."
        )
    if value is not None and not callable(value):
        several = (
            " torchvision.transforms.Compose combines several functions into one."
            if isinstance(value, list | tuple)
            else ""
        )
        raise H5ValueError(f"{name}={short_repr(value)} is not callable. Pass a function, or None.{several}")


def check_transform(value: Any, name: str, argument: str) -> None:
    """Raise an ``H5ValueError`` unless a value is a function of one argument, besides ``rng`` and ``generator``.

    Args:
        value: the function, or None.
        name: the argument that holds the function.
        argument: the value that the function is called with, for messages.
    """
    check_callable(value, name)
    try:
        parameters = inspect.signature(getattr(value, "forward", value)).parameters.values()
    except (TypeError, ValueError):  # no function, or a C function without a signature
        return
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in ("rng", "generator")
    ]
    if len(required) > 1:
        raise H5ValueError(
            f"{name} requires the arguments {listing(required)}, but is called with one, {argument}. transform is "
            "called with an input, target_transform with a target, and batch_transform with a batch. Pass a function "
            "of one argument."
        )


def check_whole(value: Any, name: str, least: int, *, allow_none: bool = True) -> None:
    """Raise an ``H5ValueError`` if a value is not a whole number of at least ``least``, nor None if that is allowed."""
    if value is not None or not allow_none:
        whole(value, name, least=least)


def check_fraction(value: object, name: str) -> None:
    """Raise an ``H5ValueError`` if a value is not a number from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        hint = f" Did you mean {number / 100:g}, which is {number:g} %?" if 1 <= number < 100 else ""
        raise H5ValueError(f"{name}={value!r} was given.{hint} Pass a fraction of the rows, from 0 to below 1.")

"""Unknown names of arguments and of options' fields: the error names the nearest one, or the class that has it."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from ..errors import CERTAIN, H5ValueError, listing, near, short_repr
from .other_names import other_name

__all__ = ["checks_keywords", "unknown_keyword"]

_Class = TypeVar("_Class", bound=type)

_CHECKED: dict[str, type] = {}
"""Classes with checked constructors, by name: options, and all that have options as arguments."""


def checks_keywords(kind: _Class) -> _Class:
    """Decorate a class so that a constructor call with an unknown keyword names the nearest argument.

    The constructor keeps its signature. Subclasses that pass ``**kwargs`` on are checked too.
    """
    init: Any = kind.__init__  # type: ignore[misc]  # of this class
    parameters = dict(list(inspect.signature(init).parameters.items())[1:])
    types = {field.name: field.type for field in fields(kind)} if is_dataclass(kind) else {}
    n_positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())

    @functools.wraps(init)
    def check_keywords(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in parameters:
                raise TypeError(unknown_keyword(kind, name, value))
            _check_type(kind, name, value, types.get(name))
        if len(args) > n_positional:
            names, others = [*parameters][:n_positional], [*parameters][n_positional:]
            raise TypeError(
                f"{kind.__name__} was called with {len(args)} positional arguments, but accepts "
                f"{f'{n_positional}: {listing(names)}' if names else 'none'}. Pass the others by name"
                f"{f', such as {others[0]}=...' if others else ''}."
            )
        init(self, *args, **kwargs)

    kind.__init__ = check_keywords  # type: ignore[misc]
    _CHECKED[kind.__name__] = kind
    return kind


def _check_type(kind: type, name: str, value: object, annotation: Any) -> None:
    """Raise an ``H5ValueError`` for a wrong type of a flag or a name: any text would count as true."""
    if annotation == "bool" and not isinstance(value, bool | np.bool_):
        raise H5ValueError(f"{kind.__name__} was given {name}={short_repr(value)}. Pass True or False.")
    if annotation == "str | None" and not isinstance(value, str | None):
        raise H5ValueError(f"{kind.__name__} was given {name}={short_repr(value)}. Pass text, or None.")


def unknown_keyword(kind: type, name: str, value: object, argument: str | None = None) -> str:
    """Return the message about an unknown argument of a class, or an unknown field of an option.

    Args:
        kind: the class.
        name: the unknown name.
        value: its value; ``...`` if it is unknown.
        argument: the argument that stands for the option, if the name is a key of a mapping.
    """
    parameters = inspect.signature(kind).parameters
    options = {
        option_argument: {field.name: field for field in fields(_CHECKED[option])}
        for option_argument, parameter in parameters.items()
        for option in _options_in(parameter)
        if option in _CHECKED
    }
    text = "..." if value is ... else short_repr(value)
    of_options = [
        f"{option_argument}={{{name!r}: {'...' if field.metadata.get('secret') else text}}}"
        for option_argument, option_fields in options.items()
        if (field := option_fields.get(name)) is not None
    ]
    request = f"{kind.__name__} has no argument {name!r}" if argument is None else f"{argument} has no field {name!r}"
    if hint := other_name(name, parameters):
        return f"{request}.{hint}"
    if of_options:
        return f"{request}; it is a field of an option. Pass {' or '.join(of_options)}."
    if is_dataclass(kind) and _is_beside(kind, name):
        return f"{request}; it is an argument of its own. Pass {name}={text}."
    if owners := _relatives_with(kind, name):
        return f"{request}; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it."
    if hint := near(name, parameters):
        return f"{request}.{hint}"
    for option, names in options.items():
        if hint := near(name, names, cutoffs=(CERTAIN,)):
            return f"{request}, nor does its option {option}.{hint} Pass it in the mapping {option}."
    names_of = "arguments" if argument is None else "fields"
    return f"{request}. Its {names_of} are {listing(parameters, most=len(parameters))}."


def _options_in(parameter: inspect.Parameter) -> list[str]:
    """Return the names of the option classes that an argument accepts."""
    return re.findall(r"\w+Options", str(parameter.annotation))


def _is_beside(option: type, name: str) -> bool:
    """Return whether classes that accept an option have an argument of this name."""
    signatures = [inspect.signature(kind).parameters for kind in _CHECKED.values() if not is_dataclass(kind)]
    return any(
        name in parameters and any(option.__name__ in _options_in(parameter) for parameter in parameters.values())
        for parameters in signatures
    )


def _relatives_with(kind: type, name: str) -> list[str]:
    """Return the names of this package's classes with the same base that have an argument."""
    bases: tuple[Any, ...] = kind.__bases__
    relatives = [relative for base in bases for relative in base.__subclasses__()]
    return [
        relative.__name__
        for relative in relatives
        if relative is not kind
        and relative.__module__.startswith(f"{__name__.partition('.')[0]}.")
        and name in inspect.signature(relative).parameters
    ]

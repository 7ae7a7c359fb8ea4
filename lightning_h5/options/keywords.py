"""Unknown keywords of constructors: the error names the nearest argument, or the option that has such a field."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ..errors import listing, near, short_repr
from .base import Options
from .other_names import other_name

__all__ = ["checks_keywords"]

_Class = TypeVar("_Class", bound=type)


def checks_keywords(kind: _Class) -> _Class:
    """Decorate a class so that a constructor call with an unknown keyword names the nearest argument.

    The signature stays that of the constructor. Subclasses that pass ``**kwargs`` on are checked too.
    """
    init: Any = kind.__init__  # type: ignore[misc]  # of this class
    parameters = dict(list(inspect.signature(init).parameters.items())[1:])
    n_positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())

    @functools.wraps(init)
    def check_keywords(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in parameters:
                raise TypeError(_unknown_keyword(kind, parameters, name, value))
        if len(args) > n_positional:
            names, others = [*parameters][:n_positional], [*parameters][n_positional:]
            raise TypeError(
                f"{kind.__name__} was called with {len(args)} values without a name, and takes "
                f"{f'{n_positional} of them: {listing(names)}' if names else 'none'}. Pass the others by name"
                f"{f', such as {others[0]}=...' if others else ''}."
            )
        init(self, *args, **kwargs)

    kind.__init__ = check_keywords  # type: ignore[misc]
    return kind


def _unknown_keyword(kind: type, parameters: Mapping[str, inspect.Parameter], name: str, value: object) -> str:
    """Return the message about a keyword that a constructor does not have."""
    options = {
        argument: {field.name: field for field in fields(option)}
        for argument, parameter in parameters.items()
        for option in Options.__subclasses__()
        if option.__name__ in re.findall(r"\w+Options", str(parameter.annotation))
    }
    of_options = [
        f"{argument}={{{name!r}: {'...' if field.metadata.get('secret') else short_repr(value)}}}"
        for argument in options
        if (field := options[argument].get(name)) is not None
    ]
    relatives = list[Any]()
    for base in kind.__bases__:
        relatives += base.__subclasses__()
    owners = [
        relative.__name__
        for relative in relatives
        if relative is not kind
        and relative.__module__.startswith(f"{__name__.partition('.')[0]}.")
        and name in inspect.signature(relative).parameters
    ]
    request = f"{kind.__name__} has no argument {name!r}"
    if hint := other_name(name, parameters):
        return f"{request}.{hint}"
    if of_options:
        return f"{request}; it is a field of an option. Pass {' or '.join(of_options)}."
    if owners:
        return f"{request}; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it."
    if hint := near(name, parameters):
        return f"{request}.{hint}"
    for argument, names in options.items():
        if hint := near(name, names):
            return f"{request}, nor has its option {argument} such a field.{hint} {argument} takes it in a mapping."
    return f"{request}. Its arguments are {listing(parameters, most=len(parameters))}."

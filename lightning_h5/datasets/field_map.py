"""Names of ours for arrays that are called otherwise in the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import H5ValueError, listing

__all__ = ["TARGET", "FieldMap", "checked_names", "keys_of"]

TARGET = "target"

FieldMap = Mapping[str, Any]
"""For a field's name here its array in the files; or ``{"key": ..., "layout": "NTC"}`` for ``target``."""


def keys_of(field_map: FieldMap | None) -> tuple[dict[str, str], str | None]:
    """Arrays by our names, and the target's axes where they are said.

    Raises:
        H5ValueError: a name is given no array, or one that another has.
    """
    keys: dict[str, str] = {}
    layout = None
    for name, given in (field_map or {}).items():
        said = {"key": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
        if not isinstance(said.get("key", name), str) or not said or set(said) - {"key", "layout"}:
            raise H5ValueError(
                f"field_map[{name!r}]={given!r} is no array. Pass its name in the files, or "
                "{'key': its name, 'layout': 'NTC'} for a target."
            )
        if "layout" in said and name != TARGET:
            raise H5ValueError(f"field_map[{name!r}] has a layout, which says where a target's classes are.")
        keys[name] = said.get("key", name).strip("/")
        layout = said.get("layout", layout)
    twice = [key for key in keys.values() if list(keys.values()).count(key) > 1]
    if twice:
        raise H5ValueError(f"field_map gives {listing(dict.fromkeys(twice))} several names. Give each array one.")
    return keys, layout


def checked_names(names: Any) -> list[str]:
    """Fields to load, each once.

    Raises:
        H5ValueError: these are no names, or one comes twice.
    """
    given = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else []
    if not given or not all(isinstance(name, str) and name.strip("/") for name in given):
        raise H5ValueError(f"load_fields={names!r} names no field. Pass a list of names, or None for all fields.")
    if len(set(given)) < len(given):
        raise H5ValueError(f"load_fields={names!r} names a field twice. A sample has each once.")
    return given

"""Names of fields as users map them to arrays: ``field_map`` and ``load_fields``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import H5ValueError, listing
from ..hdf5 import stacked_members

__all__ = ["TARGET", "FieldMap", "checked_names", "hashable", "keys_of", "members_of", "paths_of"]

TARGET = "target"

FieldMap = Mapping[str, Any]
"""For a field's name here its array in the files; or ``{"key": ..., "layout": "NTC"}`` for ``target``."""


def members_of(field_map: FieldMap | None, names: Sequence[str]) -> list[tuple[str, ...] | None]:
    """Return for each name the members of a table that it stacks; None for an array."""
    given = field_map or {}
    return [stacked_members(given.get(name), f"field_map[{name!r}]")[1] for name in names]


def paths_of(field_map: FieldMap | None, names: Sequence[str]) -> list[Any]:
    """Return for each name the other files that have its array; None for those of the data."""
    given = [(field_map or {}).get(name) for name in names]
    return [hashable(one.get("path")) if isinstance(one, Mapping) else None for one in given]


def keys_of(field_map: FieldMap | None) -> tuple[dict[str, str], str | None]:
    """Return the array of each name in a field map, and the axes of the target if they are given.

    Raises:
        H5ValueError: a name has no array, or one that another name has.
    """
    keys: dict[str, str] = {}
    layout = None
    stacked = []
    for name, asked in (field_map or {}).items():
        given, members = stacked_members(asked, f"field_map[{name!r}]")
        stacked += [] if members is None else [given]
        entry = {"key": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
        if not isinstance(entry.get("key", name), str) or not entry or set(entry) - {"key", "layout", "path"}:
            raise H5ValueError(
                f"field_map[{name!r}]={given!r} is not an array. Pass its name in the files, or "
                "{'key': its name, 'layout': 'NTC'} for a target."
            )
        if "layout" in entry and name != TARGET:
            raise H5ValueError(f"field_map[{name!r}] has a layout, which only a target can have.")
        keys[name] = entry.get("key", name).strip("/")
        layout = entry.get("layout", layout)
    twice = [key for key in keys.values() if list(keys.values()).count(key) > 1 and key not in stacked]
    if twice:
        raise H5ValueError(f"field_map gives {listing(dict.fromkeys(twice))} several names. Give each array one.")
    return keys, layout


def checked_names(names: Any) -> list[str]:
    """Return the fields to load, each once.

    Raises:
        H5ValueError: these are no names, or one comes twice.
    """
    given = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else []
    if not given or not all(isinstance(name, str) and name.strip("/") for name in given):
        raise H5ValueError(f"load_fields={names!r} names no field. Pass a list of names, or None for all fields.")
    if len(set(given)) < len(given):
        raise H5ValueError(f"load_fields={names!r} names a field twice. A sample has each once.")
    return given


def hashable(paths: Any) -> Any:
    """Return paths, one or several, as they can be compared."""
    return tuple(map(str, paths)) if isinstance(paths, list | tuple) else paths

"""The parts of a file that are segments each: groups, or arrays, that match a pattern; attributes of these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..errors import H5KeyError, H5ValueError, listing, near
from ..hdf5 import ArrayLayout, ChangeGuard, attribute_layout, kind_of_object, translate_h5py_errors

__all__ = ["FileParts", "parts_in"]

FileParts: TypeAlias = list[tuple[str | None, list[str | ArrayLayout]]]
"""For each part its name, None for a whole file, and the names of its arrays; attributes are described already."""


def parts_in(
    path: str, keys: Sequence[str], groups: str | None, file: Any, guard: ChangeGuard
) -> tuple[FileParts, list[tuple[str, str]]]:
    """Return the parts of an open file, and all their arrays, each with the key that it was found by."""
    with translate_h5py_errors(path, "what is"):
        if groups is not None:
            if with_star := [key for key in keys if "*" in key]:
                raise H5ValueError(f"segments.groups={groups!r} and {with_star[0]!r} were given. Pass one pattern.")
            names = _matches(file, path, groups, "group")
            parts: FileParts = [
                (name, [key if key.startswith("/") else f"{name}/{key}" for key in keys]) for name, _ in names
            ]
        elif patterns := [key for key in keys if "*" in key]:
            names = _matches(file, path, patterns[0], "array")
            parts = [(name, [key.replace("*", found) for key in keys]) for name, found in names]
        else:
            parts = [(None, list(keys))]
        for name, asked in parts:
            for at, key in enumerate(asked):
                if "@" in str(key):
                    asked[at] = _attribute(file, path, name, str(key), guard)
    return parts, [
        (name, key) for _, names in parts for name, key in zip(names, keys, strict=True) if isinstance(name, str)
    ]


def _attribute(file: Any, path: str, part: str | None, key: str, guard: ChangeGuard) -> ArrayLayout:
    """Return the description of an attribute: of a part, a group or an array."""
    owner = key.rpartition("@")[0].strip("/") or part or ""
    try:
        item = file[owner] if owner else file
    except KeyError:
        raise H5KeyError(f"{key!r} is not in {path!r}, which has no {owner!r}.{near(owner, file)}") from None
    return attribute_layout(item, path, key, guard)


def _matches(file: Any, path: str, pattern: str, kind: str) -> list[tuple[str, str]]:
    """Return the objects that match a pattern with one ``*``, and what the star stands for, sorted as numbers."""
    if pattern.count("*") != 1:
        raise H5ValueError(f"{pattern!r} has {pattern.count('*')} of '*'. Pass a pattern with one.")
    above, _, below = pattern.strip("/").partition("*")
    group_name, _, before = above.rpartition("/")
    after, _, inside = below.partition("/")
    try:
        group = file[group_name] if group_name else file
        names = list(group)
    except (KeyError, AttributeError, TypeError):
        raise H5KeyError(
            f"{pattern!r} matches nothing in {path!r}, which has no group {group_name!r}; it has {listing(file)}."
            f"{near(group_name, file)} Pass a pattern such as 'data/*'."
        ) from None
    found = []
    for name in names:
        if not name.startswith(before) or not name.endswith(after) or len(name) < len(before) + len(after):
            continue
        whole = "/".join(part for part in (group_name, name, inside) if part)
        if kind_of_object(file, whole) == kind:
            found.append((whole, name[len(before) : len(name) - len(after)]))
    if not found:
        raise H5KeyError(
            f"{pattern!r} matches no {kind}s in {path!r}; {group_name or 'the file'} has {listing(names)}. Pass a "
            "pattern such as 'data/*'."
        )
    return sorted(found, key=lambda one: _as_numbers(one[1]))


def _as_numbers(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts names by the numbers in them: 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]

"""Objects whose names match a pattern. Damaged ones are errors, and links into other files are not followed."""

from __future__ import annotations

import re
from typing import Any, Literal

import h5py

from ..errors import H5KeyError, H5ValueError, listing, near
from .contents import Target, is_text, resolve_path, target_of, text_of

__all__ = ["matching_objects"]


def matching_objects(
    file: Any, path: str, pattern: str, kind: Literal["group", "array"], *, allow_external: bool
) -> dict[str, Target]:
    """Return what the ``*`` of a pattern stands for in each object that matches, sorted as numbers, with the object.

    Args:
        file: the open file.
        path: its path.
        pattern: a name with one ``*``.
        kind: groups or arrays.
        allow_external: follow links into other files.

    Raises:
        H5CorruptError: an object that matches cannot be read.
        H5KeyError: nothing matches, or a link that matches leads nowhere.
        H5ValueError: a link that matches leads into another file, which is not opened.
    """
    if pattern.count("*") != 1:
        raise H5ValueError(f"{pattern!r} has {pattern.count('*')} of '*'. Pass a pattern with one.")
    above, _, below = pattern.strip("/").partition("*")
    group_name, _, before = above.rpartition("/")
    after, _, inside = below.partition("/")
    try:
        group, _ = resolve_path(file, group_name, allow_external=allow_external)
    except H5KeyError:
        group = None
    if not isinstance(group, h5py.Group):
        raise H5KeyError(
            f"{pattern!r} matches nothing in {path!r}, which has no group {group_name!r}; it has {listing(file)}."
            f"{near(group_name, map(text_of, file))} Pass a pattern such as 'data/*'."
        )
    names = [text_of(name) for name in group]
    stars = [
        name[len(before) : len(name) - len(after)]
        for name in names
        if name.startswith(before) and name.endswith(after) and len(name) >= len(before) + len(after)
    ]
    targets = dict[str, Target]()
    for star in sorted(stars, key=_as_numbers):
        name = f"{before}{star}{after}"
        if not is_text(name):
            raise H5ValueError(
                f"{pattern!r} matches {name.encode(errors='surrogateescape')!r} in {path!r}, a name that is not UTF-8. "
                "Rename it (h5py: file.move), or pass a pattern that does not match it."
            )
        target = target_of(file, group, f"{name}/{inside}" if inside else name, allow_external=allow_external)
        if target is not None and target.kind == kind:
            targets[star] = target
    if not targets:
        raise H5KeyError(
            f"{pattern!r} matches no {kind}s in {path!r}; {group_name or 'the file'} has {listing(names)}. Pass a "
            "pattern such as 'data/*'."
        )
    return targets


def _as_numbers(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names by the numbers in them: 2 before 10."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    # Digits, as a file may have a number of thousands of these.
    numbers = [part.lstrip("0") if part.isdecimal() else None for part in parts]
    pairs = zip(parts, numbers, strict=True)
    return [(1, 0, part) if number is None else (0, len(number), number) for part, number in pairs]

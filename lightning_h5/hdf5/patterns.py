"""Objects with names that match a pattern. Damaged ones are errors, and links into other files are not followed."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ..errors import H5KeyError, H5ValueError, listing, near
from ..natural_order import natural_order
from .contents import GroupError, Target, is_text, list_arrays, resolve_path, target_of, text_of
from .structures import is_private_group
from .suggestions import nearest_pattern

__all__ = ["matching_objects"]


def matching_objects(
    file: Any,
    path: str,
    pattern: str,
    kind: Literal["group", "array"],
    *,
    allow_external: bool,
    may_lack: bool = False,
) -> dict[str, Target]:
    """Return the objects that match a pattern, by the text in place of each ``*``; the texts are joined by ``/``.

    They are sorted as numbers, level by level.

    Args:
        file: the open file.
        path: its path.
        pattern: a name with one ``*`` in at least one level.
        kind: groups or arrays.
        allow_external: follow links into other files.
        may_lack: return an empty mapping if no object matches, instead of an error.

    Raises:
        GroupError: groups match instead of arrays.
        H5CorruptError: an object that matches cannot be read.
        H5KeyError: nothing matches, or a link that matches leads nowhere.
        H5ValueError: a link that matches leads into another file, which is not opened; or the pattern has no ``*``, or
            several in a level.
    """
    if max(level.count("*") for level in pattern.split("/")) != 1:
        raise H5ValueError(
            f"{pattern!r} has {pattern.count('*')} of '*'. Pass a pattern with one for each level that varies."
        )
    search = _Search(file, path, pattern, kind, allow_external)
    group_name, below = _until_star(pattern.strip("/"))
    group = search.group_at(group_name)
    targets = {} if group is None else search.matches(group, group_name, below)
    if targets:
        return targets
    if kind == "array" and group is not None and search._replace(kind="group").matches(group, group_name, below):
        error = GroupError(
            f"{pattern!r} matches groups in {path!r}, and no arrays. Pass a pattern of arrays inside them, such as "
            f"'{pattern}/x'."
        )
        error.key = pattern
        raise error
    if may_lack:
        return targets
    if kind == "group" and group is not None and search._replace(kind="array").matches(group, group_name, below):
        groups, _, key = pattern.strip("/").rpartition("/")
        advice = f"Pass segments={groups!r}, and {key!r} as the key." if "*" in groups else f"Pass x_key={pattern!r}."
        raise H5KeyError(f"{pattern!r} matches arrays in {path!r}, and no groups. {advice}")
    names = list_arrays(file)
    nearest = nearest_pattern(pattern, names, kind) or nearest_pattern(pattern, names, "array")
    advice = (
        "Pass the name of an array instead." if nearest is None else f"Pass a pattern that does, such as {nearest!r}."
    )
    if group is None:
        raise H5KeyError(
            f"{pattern!r} matches nothing in {path!r}, which has no group {group_name!r}; it has "
            f"{listing(map(text_of, file))}.{near(group_name, map(text_of, file))} {advice}"
        )
    raise H5KeyError(
        f"{pattern!r} matches no {kind}s in {path!r}; {group_name or 'the file'} has {listing(map(text_of, group))}. "
        f"{advice}"
    )


class _Search(NamedTuple):
    """A search for the objects that match a pattern (see ``matching_objects``)."""

    file: Any
    path: str
    pattern: str
    kind: Literal["group", "array"]
    allow_external: bool

    def group_at(self, name: str) -> Any:
        """Return the group of a name; None if there is none."""
        target = target_of(self.file, self.file, name, allow_external=self.allow_external) if name else None
        if name and (target is None or target.kind != "group"):
            return None
        return resolve_path(self.file, name, allow_external=self.allow_external)[0]

    def matches(self, group: Any, group_name: str, pattern: str) -> dict[str, Target]:
        """Return the objects below a group that match.

        Args:
            group: the open group.
            group_name: its name in the file.
            pattern: relative to the group, with a ``*`` in its first level.
        """
        level, _, inner_levels = pattern.partition("/")
        prefix, _, suffix = level.partition("*")
        inner_levels, below = _until_star(inner_levels)
        stars = [
            name[len(prefix) : len(name) - len(suffix)]
            for name in map(text_of, group)
            if name.startswith(prefix) and name.endswith(suffix) and len(name) >= len(prefix) + len(suffix)
        ]
        if level == "*" and (below or inner_levels or self.kind == "group"):  # "#*" names groups such as #refs#
            stars = [star for star in stars if not is_private_group(star)]
        targets = dict[str, Target]()
        for star in sorted(stars, key=natural_order):
            name = f"{prefix}{star}{suffix}"
            if not is_text(name):
                raise H5ValueError(
                    f"{self.pattern!r} matches {name.encode(errors='surrogateescape')!r} in {self.path!r}, a name that "
                    "is not UTF-8. Rename it (h5py: file.move), or pass a pattern that does not match it."
                )
            name = f"{name}/{inner_levels}" if inner_levels else name
            target = target_of(self.file, group, name, allow_external=self.allow_external)
            if target is None or target.kind != ("group" if below else self.kind):
                continue
            if not below:
                targets[star] = target
                continue
            name = f"{group_name}/{name}" if group_name else name
            for inner_star, inner in self.matches(self.group_at(name), name, below).items():
                targets[f"{star}/{inner_star}"] = inner._replace(is_linked=target.is_linked or inner.is_linked)
        return targets


def _until_star(pattern: str) -> tuple[str, str]:
    """Return the levels of a pattern before the first one with a ``*``, and the others."""
    if "*" not in pattern:
        return pattern, ""
    group_name = pattern.partition("*")[0].rpartition("/")[0]
    return group_name, pattern[len(group_name) :].lstrip("/")

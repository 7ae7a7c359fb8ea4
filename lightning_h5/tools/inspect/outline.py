"""The names in a file as an outline, in which alike groups and arrays are folded into one line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...hdf5 import Entry
from ...natural_order import natural_order
from ...types import cached_property
from .contents import ArrayReport

__all__ = ["Branch", "outline_of", "patterns_of"]

MIN_GROUPS = 3  # minimum number of alike groups to fold
MIN_NUMBERED, MIN_ARRAYS = 5, 40  # the same for alike arrays: if names differ in numbers, and for any names

Signature: TypeAlias = tuple[Any, ...]


@dataclass(eq=False, kw_only=True)
class Branch:
    """A name in a file, or alike names side by side, with the names below.

    Attributes:
        names: the last component of each name, in the order of the file.
        pattern: the name; ``*`` for alike names.
        entries: the entry of each name, in all groups that are folded with the parent group.
        reports: the report of each array; empty for groups.
        branches: the names below the first name; joined over all names, if they are alike.
        signature: equal for alike groups or arrays.
    """

    names: dict[str, None]
    pattern: str
    entries: list[Entry]
    reports: list[ArrayReport] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    signature: Signature = ()

    @property
    def is_folded(self) -> bool:
        """Whether the branch has several alike names; a single name may be an asterisk."""
        return self.pattern == "*" and len(self.names) > 1

    @property
    def has_folded(self) -> bool:
        """Whether this branch or one below is folded."""
        return self.is_folded or any(branch.has_folded for branch in self.branches)

    @cached_property
    def label(self) -> str:
        """The name, or the first and the last of alike names, in natural order."""
        if not self.is_folded:
            return self.pattern
        return f"{min(self.names, key=natural_order)} ... {max(self.names, key=natural_order)}"

    @property
    def shape_text(self) -> str:
        """The shape of the arrays; a range for each axis along which they differ."""
        shapes = [entry.shape for entry in self.entries]
        if any(shape is None for shape in shapes):
            return "(no shape)"
        sizes = zip(*(shape for shape in shapes if shape is not None), strict=True)
        return f"({', '.join(str(min(axis)) if len(set(axis)) == 1 else f'{min(axis)}-{max(axis)}' for axis in sizes)})"

    @property
    def has_arrays(self) -> bool:
        """Whether there are arrays below."""
        return any(branch.entries[0].kind == "array" or branch.has_arrays for branch in self.branches)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Branch]]:
        """Yield the names of the arrays below, relative to this branch, and their branches."""
        for branch in self.branches:
            if branch.branches:
                yield from branch.leaves(f"{prefix}{branch.label}/")
            elif branch.entries[0].kind == "array":
                yield f"{prefix}{branch.label}", branch


def outline_of(entries: Sequence[Entry], arrays: Sequence[ArrayReport]) -> list[Branch]:
    """Return the outline of a file.

    Args:
        entries: all names, each group before its members.
        arrays: the reports of its arrays.
    """
    reports = {array.name: array for array in arrays}
    children: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        children[entry.name.rpartition("/")[0] if "/" in entry.name else ""].append(entry)
    return _branches_of("", children, reports)


def patterns_of(outline: Sequence[Branch]) -> dict[str, str]:
    """Return the name of each array in an outline, with a ``*`` for each component that differs between alike ones."""
    patterns: dict[str, str] = {}

    def add(branches: Sequence[Branch], pattern: str) -> None:
        for branch in branches:
            name = f"{pattern}{branch.pattern}"
            patterns.update({report.name: name for report in branch.reports})
            add(branch.branches, f"{name}/")

    add(outline, "")
    return patterns


def _branches_of(
    group: str, children: Mapping[str, Sequence[Entry]], reports: Mapping[str, ArrayReport]
) -> list[Branch]:
    branches = []
    for entry in children.get(group, ()):
        name = entry.name.rpartition("/")[2]
        branch = Branch(names={name: None}, pattern=name, entries=[entry], signature=(entry.kind, entry.name))
        if entry.kind == "array":
            branch.reports = [reports[entry.name]] if entry.name in reports else []
            branch.signature = ("array", entry.dtype, None if entry.shape is None else len(entry.shape))
        elif entry.kind == "group" and entry.name:
            branch.branches = _branches_of(entry.name, children, reports)
            if branch.has_arrays:
                below = sorted((below.pattern, below.signature) for below in branch.branches)
                branch.signature = ("group", *below)
        branches.append(branch)
    return _folded(branches)


def _folded(branches: Sequence[Branch]) -> list[Branch]:
    """Join alike branches."""
    families: dict[Signature, list[Branch]] = defaultdict(list)
    for branch in branches:
        families[branch.signature].append(branch)
    keys: dict[int, Signature] = {}
    for signature, family in families.items():
        numbered: dict[str, list[Branch]] = defaultdict(list)
        for branch in family:
            numbered[re.sub(r"\d+", "0", branch.pattern)].append(branch)
        if (signature[0] == "group" and len(family) >= MIN_GROUPS) or (
            signature[0] == "array" and len(family) >= MIN_ARRAYS
        ):
            keys.update(dict.fromkeys(map(id, family), signature))
        elif signature[0] == "array":
            for name, members in numbered.items():
                if len(members) >= MIN_NUMBERED:
                    keys.update(dict.fromkeys(map(id, members), (name, *signature)))
    joined: dict[Signature, Branch] = {}
    outline = []
    for branch in branches:
        key = keys.get(id(branch))
        if key is None:
            outline.append(branch)
        elif key not in joined:
            joined[key] = branch
            branch.pattern = "*"
            outline.append(branch)
        else:
            _join(joined[key], branch)
    return outline


def _join(branch: Branch, other: Branch) -> None:
    """Add an alike branch, including the branches below it, to another."""
    branch.names |= other.names
    branch.entries += other.entries
    branch.reports += other.reports
    below = {(member.pattern, member.signature): member for member in branch.branches}
    for member in other.branches:
        _join(below[member.pattern, member.signature], member)

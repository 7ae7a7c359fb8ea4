"""The parts of a file that are segments each: groups, or arrays, that match a pattern; attributes of these."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import H5KeyError, H5ValueError, listing, near
from ..hdf5 import (
    AlikeArrays,
    ArrayColumns,
    ArrayLayout,
    ChangeGuard,
    OpenOptions,
    ScalarError,
    attribute_layout,
    external_guards,
    is_references,
    kind_of_object,
    scalar_layout,
    translate_h5py_errors,
)
from ..order import resolve_replica
from ..progress_bar import with_bar
from .cells import SEPARATOR, CellValues, names_of_cells
from .kept_parts import KeptParts, PackedText

__all__ = ["FoundParts", "NamedParts", "PartNames", "attribute_of", "parts_in"]

MANY = 5000  # parts of a file from which on the user sees how far it is


@dataclass(frozen=True)
class PartNames:
    """How the parts of a file, and their arrays, are called.

    Attributes:
        pattern: of the parts, with one ``*``; None if each file is one.
        is_group: whether parts are groups, which the keys are relative to; arrays if not.
        keys: the arrays of a part.
        columns: keys of columns of a side table among them, which have the same name in all parts.
        cells: keys of arrays of references among them, each of which names an array of a part; its ``*`` stands for
            the names of these.
    """

    pattern: str | None
    is_group: bool
    keys: tuple[str, ...]
    columns: frozenset[str] = frozenset()
    cells: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Sequence[str], groups: str | None, columns: Collection[str] = ()) -> PartNames:
        """Return the names for arrays, and the pattern of groups, as the user gave them."""
        columns = frozenset(columns)
        if groups is not None:
            if with_star := [key for key in keys if "*" in key]:
                raise H5ValueError(f"segments.groups={groups!r} and {with_star[0]!r} were given. Pass one pattern.")
            return cls(groups, True, tuple(keys), columns)
        pattern = next((key for key in keys if "*" in key), None)
        return cls(pattern, False, tuple(keys), columns)

    def part(self, star: str) -> str:
        """Return the name of a part, from what the ``*`` stands for."""
        if self.cells:
            return star.partition(SEPARATOR)[0]
        return "" if self.pattern is None else self.pattern.strip("/").replace("*", star)

    def of_cells(self, cells: Sequence[str]) -> PartNames:
        """Return the names if arrays of references name the arrays of parts."""
        return replace(self, pattern=cells[0], cells=tuple(cells)) if cells else self

    def key_pattern(self, at: int) -> str:
        """Return the name in the file of an array of any part, with a ``*`` for what ``star`` returns of it."""
        return "*" if self.keys[at] in self.cells else self.key(at, "*")

    def star(self, at: int, star: str) -> str:
        """Return what the ``*`` stands for in the name of an array of a part."""
        key = self.keys[at]
        return star.split(SEPARATOR)[self.cells.index(key)] if key in self.cells else star

    def key(self, at: int, star: str) -> str:
        """Return the name in the file of an array of a part."""
        key = self.keys[at]
        if key in self.columns:
            return key
        if key in self.cells:
            return self.star(at, star)
        if not self.is_group:
            return key.replace("*", star)
        return key if key.startswith("/") else f"{self.part(star)}/{key}"


class NamedParts(Sequence[str]):
    """The names of parts.

    Args:
        names: how parts are called.
        stars: what the ``*`` stands for in each.
    """

    def __init__(self, names: PartNames, stars: Sequence[str]) -> None:
        self._names, self._stars = names, stars

    def __len__(self) -> int:
        return len(self._stars)

    def __getitem__(self, part: Any) -> Any:
        return self._names.part(self._stars[part])


class FoundParts(NamedTuple):
    """The parts of a file, and their arrays.

    Attributes:
        stars: what the ``*`` stands for in each part.
        arrays: the arrays, part by part.
        names: how they are called.
        others: guards of other files that arrays have rows in.
    """

    stars: PackedText
    arrays: ArrayColumns
    names: PartNames
    others: tuple[ChangeGuard, ...] = ()


def parts_in(
    path: str,
    names: PartNames,
    options: OpenOptions,
    file: Any,
    guard: ChangeGuard,
    alike: AlikeArrays,
) -> FoundParts:
    """Return the parts of an open file, and describe their arrays: from what was kept of the file, if it is the same.

    Args:
        path: the file.
        names: how parts and arrays are called.
        options: how the file is opened.
        file: the open file.
        guard: of the file.
        alike: describes arrays.

    Raises:
        H5KeyError: no part matches the pattern, or an array is missing.
        H5Error: an array is refused.
    """
    files, others, n = options.files, dict[str, ChangeGuard](), len(names.keys)
    scalars, of_cells = list[str](), CellValues(file, path, options, guard, alike)

    def describe(stars: Sequence[str], at: int) -> tuple[ArrayLayout, int | None]:
        part, number = divmod(at, n)
        key = names.key(number, stars[part])
        if "@" in names.keys[number]:
            with translate_h5py_errors(path, repr(key)):
                layout = attribute_of(file, path, names.part(stars[part]), key, guard)
            return layout, alike.value(layout, names.keys[number])
        if names.cells and names.keys[number] not in names.cells:
            layout = of_cells.of_column(key, part, len(stars))
            return layout, alike.value(layout, key)
        try:
            found = alike.describe_alike(
                file, path, key, files, guard, alike=names.keys[number], takes_scalars=not names.cells
            )
        except ScalarError:
            scalar = scalar_layout(file, path, key, guard)
            found = scalar, None
        assert found is not None, "it was asked for"
        if names.cells:
            found = of_cells.checked(found[0], names.keys[number], part), found[1]
        if found[0].value is not None:
            scalars.append(key)
            return found[0], alike.value(found[0], names.keys[number])
        if files.allow_external:
            given = external_guards(file, [key], files, grows=options.swmr, strict=files.verify is not None)
            others.update((each.path, each) for each in given)
        return found

    kept = KeptParts.of(path, guard, options, (names.pattern, names.is_group, names.keys))
    is_attribute = np.array(
        ["@" in key or bool(names.cells and key not in names.cells) for key in names.keys], dtype=np.bool_
    )
    if kept is not None and (known := kept.read(describe, is_attribute)) is not None:
        return FoundParts(*known, names)
    stars = [""]
    if names.cells:
        stars = names_of_cells(file, path, names.cells, options)
    elif names.pattern is not None:
        with translate_h5py_errors(path, "what is"):
            stars = _matches(file, path, names.pattern, "group" if names.is_group else "array")
    arrays = ArrayColumns()
    shows_progress = len(stars) >= MANY and resolve_replica().rank == 0  # all ranks look at them
    what = f"looking at {os.path.basename(path)}"
    for part in with_bar(range(len(stars)), what, unit="segment", shows_progress=shows_progress, delay=2):
        for at in range(n * part, n * part + n):
            arrays.append(*describe(stars, at))
    cells = [names.keys[at] for at, array in arrays.others.items() if is_references(array)]
    if cells and names.pattern is None:
        return parts_in(path, names.of_cells(cells), options, file, guard, alike)
    found = FoundParts(PackedText.of(stars), arrays, names, tuple(others.values()))
    if kept is not None and not scalars:  # values are not kept
        kept.write(found.stars, arrays)
    return found


def attribute_of(file: Any, path: str, part: str, key: str, guard: ChangeGuard) -> ArrayLayout:
    """Return the description of an attribute: of a part, a group or an array."""
    owner = key.rpartition("@")[0].strip("/") or part
    try:
        item = file[owner] if owner else file
    except KeyError:
        raise H5KeyError(f"{key!r} is not in {path!r}, which has no {owner!r}.{near(owner, file)}") from None
    return attribute_layout(item, path, key, guard)


def _matches(file: Any, path: str, pattern: str, kind: str) -> list[str]:
    """Return what the ``*`` of a pattern stands for in each object that matches, sorted as numbers."""
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
            found.append(name[len(before) : len(name) - len(after)])
    if not found:
        raise H5KeyError(
            f"{pattern!r} matches no {kind}s in {path!r}; {group_name or 'the file'} has {listing(names)}. Pass a "
            "pattern such as 'data/*'."
        )
    return sorted(found, key=_as_numbers)


def _as_numbers(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts names by the numbers in them: 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]

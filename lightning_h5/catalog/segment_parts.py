"""The parts of a file that are segments each: groups, or arrays, that match a pattern; attributes of these."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import H5KeyError, H5ValueError, listing
from ..hdf5 import (
    AlikeArrays,
    ArrayColumns,
    ArrayLayout,
    ChangeGuard,
    GroupError,
    OpenOptions,
    ScalarError,
    Target,
    attribute_layout,
    column_layout,
    external_guards,
    identity_of_object,
    is_attribute_key,
    is_references,
    matching_objects,
    resolve_path,
    scalar_layout,
    target_of,
    translate_h5py_errors,
)
from ..order import resolve_replica
from ..progress_bar import with_bar
from .cells import SEPARATOR, CellValues, names_of_cells
from .kept_parts import KeptParts, PackedText

__all__ = ["FoundParts", "NamedParts", "PartNames", "attribute_of", "filled", "parts_in"]

LEVEL = re.compile(r"@name\[(\d+)\]")
"""The key of a field with the name of the group that a ``*`` of a pattern stands in."""

_log = logging.getLogger(__name__)

MANY = 5000  # parts of a file from which on the user sees how far it is


@dataclass(frozen=True)
class PartNames:
    """How the parts of a file, and their arrays, are called.

    Attributes:
        pattern: of the parts, with a ``*`` in at least one level; None if each file is one.
        is_group: whether parts are groups, which the keys are relative to; arrays if not.
        keys: the arrays of a part.
        columns: keys of columns of a side table among them, which have the same name in all parts.
        cells: keys of arrays of references among them, each of which names an array of a part; its ``*`` stands for
            the names of these.
        drops: leave out parts that lack an array.
    """

    pattern: str | None
    is_group: bool
    keys: tuple[str, ...]
    columns: frozenset[str] = frozenset()
    cells: tuple[str, ...] = ()
    drops: bool = False

    @classmethod
    def of(
        cls, keys: Sequence[str], groups: str | None, columns: Collection[str] = (), *, drops: bool = False
    ) -> PartNames:
        """Return the names for arrays, and the pattern of groups, as the user gave them."""
        columns = frozenset(columns)
        if groups is not None:
            if with_star := [key for key in keys if "*" in key]:
                raise H5ValueError(f"segments.groups={groups!r} and {with_star[0]!r} were given. Pass one pattern.")
            return cls(groups, True, tuple(keys), columns, drops=drops)
        patterns = [key for key in keys if "*" in key]
        if len({key.count("*") for key in patterns}) > 1:
            raise H5ValueError(f"the patterns {listing(patterns)} have different numbers of '*'. Name arrays alike.")
        return cls(next(iter(patterns), None), False, tuple(keys), columns, drops=drops)

    def part(self, star: str) -> str:
        """Return the name of a part, from what the ``*`` stands for."""
        if self.cells:
            return star.partition(SEPARATOR)[0]
        return "" if self.pattern is None else filled(self.pattern.strip("/"), star)

    def level(self, star: str, number: int) -> str:
        """Return the name of the group, or array, that a ``*`` of the pattern stands in.

        Args:
            star: what each ``*`` stands for.
            number: of the ``*``, from 0 on.

        Raises:
            H5ValueError: the pattern has not so many.
        """
        levels = [] if self.pattern is None or self.cells else self.pattern.strip("/").split("/")
        varying = [at for at, level in enumerate(levels) if "*" in level]
        if number >= len(varying):
            raise H5ValueError(
                f"'@name[{number}]' was given, and the pattern of segments ({self.pattern!r}) has {len(varying)} of "
                "'*', which are counted from 0 on. Name one of these."
            )
        return self.part(star).split("/")[varying[number]]

    def of_cells(self, cells: Sequence[str]) -> PartNames:
        """Return the names if arrays of references name the arrays of parts."""
        return replace(self, pattern=cells[0], cells=tuple(cells)) if cells else self

    def key_pattern(self, at: int) -> str:
        """Return the name in the file of an array of any part, with a ``*`` for what ``star`` returns of it."""
        if self.keys[at] in self.cells or self.pattern is None:
            return "*" if self.keys[at] in self.cells else self.key(at, "*")
        return self.key(at, "/".join("*" * self.pattern.count("*")))

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
            return filled(key, star)
        return key if key.startswith("/") else f"{self.part(star)}/{key}"


def filled(pattern: str, star: str) -> str:
    """Return a pattern with names in place of each ``*``: ``star`` has one for each, separated by ``/``."""
    if pattern.count("*") <= 1:
        return pattern.replace("*", star)
    first, *others = pattern.split("*")
    return first + "".join(name + text for name, text in zip(star.split("/"), others, strict=True))


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
        aliases: further names of parts: for what the ``*`` stands for in each, what it stands for in the part's own.
        n_missing: parts that lack an array and were left out.
    """

    stars: PackedText
    arrays: ArrayColumns
    names: PartNames
    others: tuple[ChangeGuard, ...] = ()
    aliases: Mapping[str, str] = {}
    n_missing: int = 0


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
        if (level := LEVEL.fullmatch(names.keys[number])) is not None:
            name = np.array([names.level(stars[part], int(level[1]))], dtype=object)
            layout = column_layout(name, path, key, guard)
            return layout, alike.value(layout, names.keys[number])
        if is_attribute_key(names.keys[number]):
            layout = attribute_of(file, path, names.part(stars[part]), key, guard, allow_external=files.allow_external)
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
        except GroupError as error:
            error.key = names.keys[number]
            raise
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
        [is_attribute_key(key) or bool(names.cells and key not in names.cells) for key in names.keys], dtype=np.bool_
    )
    if kept is not None and (known := kept.read(describe, is_attribute)) is not None:
        return FoundParts(known.stars, known.arrays, names, aliases=known.aliases)
    stars, aliases = [""], dict[str, str]()
    objects = _SameObjects(file, names, files.allow_external)
    if names.cells:
        stars = names_of_cells(file, path, names.cells, options)
    elif names.pattern is not None:
        with translate_h5py_errors(path, "what is"):
            kind: Literal["group", "array"] = "group" if names.is_group else "array"
            targets = matching_objects(
                file, path, names.pattern, kind, allow_external=files.allow_external, may_lack=names.drops
            )
            stars, aliases = objects.named_once(targets)
        if not stars:
            return FoundParts(PackedText.of([]), ArrayColumns(), names, n_missing=1)
    arrays, used, n_missing = ArrayColumns(), list[str](), 0
    shows_progress = len(stars) >= MANY and resolve_replica().rank == 0  # all ranks look at them
    what = f"looking at {os.path.basename(path)}"
    for part in with_bar(range(len(stars)), what, unit="segment", shows_progress=shows_progress, delay=2):
        described = list[tuple[ArrayLayout, int | None]]()
        for number in range(n):
            try:
                described.append(describe(stars, n * part + number))
            except H5KeyError:
                if not names.drops or objects.has(number, stars[part]):
                    raise
                break
        if len(described) < n:
            n_missing += 1
            continue
        if len(stars) > 1 and names.is_group and (first := objects.known(stars[part], described)) is not None:
            aliases[stars[part]] = first
            continue
        used.append(stars[part])
        for layout, number_of_template in described:
            arrays.append(layout, number_of_template)
    cells = [names.keys[at] for at, array in arrays.others.items() if is_references(array)]
    if cells and names.pattern is None:
        return parts_in(path, names.of_cells(cells), options, file, guard, alike)
    if n_missing:
        are_used = set(used)
        aliases = {other: star for other, star in aliases.items() if star in are_used}
    if aliases and resolve_replica().rank == 0:
        other, star = next(iter(aliases.items()))
        _log.info(
            "%s: %d further names of segments by links, such as %r of %r; each segment is used once",
            path,
            len(aliases),
            names.part(other),
            names.part(star),
        )
    found = FoundParts(PackedText.of(used), arrays, names, tuple(others.values()), aliases, n_missing)
    if kept is not None and not scalars and not n_missing:  # values are not kept
        kept.write(found.stars, arrays, aliases)
    return found


class _SameObjects:
    """Finds parts of a file that are the same objects under several names: hard links, or soft links to them.

    Args:
        file: the open file.
        names: how parts are called.
        allow_external: links into other files are followed.
    """

    def __init__(self, file: Any, names: PartNames, allow_external: bool) -> None:
        self._file, self._names, self._allow_external = file, names, allow_external
        self._first: dict[Any, str] = {}  # by the places of a part's arrays

    def named_once(self, targets: Mapping[str, Target]) -> tuple[list[str], dict[str, str]]:
        """Return the names of parts, each object once, and the other names that objects have.

        An object is called by a hard link rather than by a soft one, and by a name that is like those of other parts.

        Args:
            targets: the objects that names of parts lead to.
        """
        several = defaultdict[Any, list[str]](list)
        for star, target in targets.items():
            several[target.identity].append(star)
        aliases = dict[str, str]()
        if len(several) == len(targets):
            return list(targets), aliases
        alike = Counter(map(_form_of_name, targets))
        for same in several.values():
            if len(same) == 1:
                continue
            same.sort(key=lambda star: (targets[star].is_linked, -alike[_form_of_name(star)]))
            first = dict[Any, str]()
            for star in same:
                # Parts of several arrays can have one of them in common.
                own = () if self._names.is_group else self._identity(star)
                if (name := first.setdefault(own, star)) != star:
                    aliases[star] = name
        return [star for star in targets if star not in aliases], aliases

    def known(self, star: str, described: Sequence[tuple[ArrayLayout, Any]]) -> str | None:
        """Return the name of an earlier group with the same arrays; None if there is none.

        Args:
            star: the group.
            described: its arrays.
        """
        places = tuple([place for layout, _ in described if (place := layout.first_byte) is not None])
        if (first := self._first.setdefault(places or self._identity(star), star)) == star:
            return None
        return first if self._identity(first) == self._identity(star) else None

    def has(self, at: int, star: str) -> bool:
        """Return whether an array, or attribute, of a part exists.

        Args:
            at: the number of its key.
            star: the part.

        Raises:
            H5CorruptError: it cannot be read.
            H5KeyError: it is a link to nothing.
            H5ValueError: it is in another file.
        """
        key = self._names.keys[at]
        name = self._names.key(at, star)
        is_attribute = is_attribute_key(key)
        owner = (owner_of(name, self._names.part(star)) if is_attribute else name).strip("/")
        if owner and target_of(self._file, self._file, owner, allow_external=self._allow_external) is None:
            return False
        if not is_attribute:
            return True
        item, _ = resolve_path(self._file, owner, allow_external=self._allow_external)
        return name.rpartition("@")[2] in item.attrs

    def _identity(self, star: str) -> tuple[Any, ...]:
        """Return the objects that a part has."""
        return tuple([self._object(at, star) for at in range(len(self._names.keys))])

    def _object(self, at: int, star: str) -> Any:
        name = self._names.key(at, star)
        if is_attribute_key(self._names.keys[at]):
            name = owner_of(name, self._names.part(star))
        item, members = resolve_path(self._file, name, allow_external=self._allow_external)
        return identity_of_object(self._file, item), members


def _form_of_name(name: str) -> str:
    """Return what names have in common that differ in numbers alone."""
    return re.sub(r"\d+", "0", name)


def owner_of(key: str, part: str) -> str:
    """Return the name of the object that has an attribute.

    Args:
        key: the attribute's key.
        part: the part that has it if the key names no object.
    """
    return key.rpartition("@")[0].strip("/") or part


def attribute_of(
    file: Any, path: str, part: str, key: str, guard: ChangeGuard, *, allow_external: bool = False
) -> ArrayLayout:
    """Return the description of an attribute: of a part, a group or an array.

    Raises:
        H5KeyError: the object, or its attribute, does not exist.
        H5ValueError: it is in another file.
    """
    owner = owner_of(key, part)
    with translate_h5py_errors(path, repr(key)):
        item, members = resolve_path(file, owner, allow_external=allow_external)
        if members:
            raise H5KeyError(f"{key!r} is not in {path!r}: {owner!r} is a member of a table. Name the table instead.")
        return attribute_layout(item, path, key, guard)

"""The parts of a file, each of them a segment: groups or arrays that match a pattern, and their attributes."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..errors import H5KeyError
from ..hdf5 import (
    AlikeArrays,
    ArrayColumns,
    ArrayLayout,
    ChangeGuard,
    GroupError,
    OpenFile,
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
from .cells import CellValues, names_of_cells
from .kept_parts import KeptParts, PackedText, PartsOfFile
from .part_names import LEVEL, PartNames

__all__ = ["attribute_of", "parts_in"]

_log = logging.getLogger(__name__)

MANY = 5000  # a progress bar is shown for a file with at least so many parts


def parts_in(
    path: str,
    names: PartNames,
    options: OpenOptions,
    opened: OpenFile,
    guard: ChangeGuard,
    alike: AlikeArrays,
) -> PartsOfFile:
    """Return the parts of an open file with the descriptions of their arrays, from kept contents if it is unchanged.

    Args:
        path: the file.
        names: of parts and arrays.
        options: how the file is opened.
        opened: the open file.
        guard: of the file.
        alike: describes arrays.

    Raises:
        H5KeyError: no part matches the pattern, or an array is missing.
        H5Error: an array is refused.
    """
    files, others, n = options.files, dict[str, ChangeGuard](), len(names.keys)
    scalars, of_cells = list[str](), CellValues(opened, path, options, guard, alike)

    def describe(stars: Sequence[str], at: int) -> tuple[ArrayLayout, int | None]:
        part, number = divmod(at, n)
        key = names.key(number, stars[part])
        if (level := LEVEL.fullmatch(names.keys[number])) is not None:
            name = np.array([names.level(stars[part], int(level[1]))], dtype=object)
            layout = column_layout(name, path, key, guard)
            return layout, alike.value(layout, names.keys[number])
        if is_attribute_key(names.keys[number]):
            layout = attribute_of(
                opened.h5, path, names.part(stars[part]), key, guard, allow_external=files.allow_external
            )
            return layout, alike.value(layout, names.keys[number])
        if names.cells and names.keys[number] not in names.cells:
            layout = of_cells.of_column(key, part, len(stars))
            return layout, alike.value(layout, key)
        try:
            layout, template = alike.describe_alike(
                opened, path, key, files, guard, alike=names.keys[number], takes_scalars=not names.cells
            )
        except ScalarError:
            layout, template = scalar_layout(opened.h5, path, key, guard), None
        except GroupError as error:
            error.key = names.keys[number]
            raise
        if names.cells:
            layout = of_cells.checked(layout, names.keys[number], part)
        if layout.value is not None:
            scalars.append(key)
            return layout, alike.value(layout, names.keys[number])
        if files.allow_external:
            guards = external_guards(opened.h5, [key], files, grows=options.swmr, strict=files.verify is not None)
            others.update((other.path, other) for other in guards)
        return layout, template

    store = KeptParts.of(path, guard, options, names)
    is_attribute = np.array(
        [is_attribute_key(key) or bool(names.cells and key not in names.cells) for key in names.keys], dtype=np.bool_
    )
    if store is not None and (parts := store.read(describe, is_attribute)) is not None:
        return parts
    stars, aliases = [""], dict[str, str]()
    objects = _SameObjects(opened, names, files.allow_external)
    if names.cells:
        stars = names_of_cells(opened.h5, path, names.cells, options)
    elif names.pattern is not None:
        with translate_h5py_errors(path, "what is"):
            kind: Literal["group", "array"] = "group" if names.is_group else "array"
            targets = matching_objects(
                opened.h5, path, names.pattern, kind, allow_external=files.allow_external, may_lack=names.drops
            )
            stars, aliases = objects.named_once(targets)
        if not stars:
            return PartsOfFile(PackedText.of([]), ArrayColumns(), names, n_missing=1)
    arrays, used_names, n_missing = ArrayColumns(), list[str](), 0
    shows_progress = len(stars) >= MANY and resolve_replica().rank == 0  # all ranks look at them
    title = f"looking at {os.path.basename(path)}"
    for part in with_bar(range(len(stars)), title, unit="segment", shows_progress=shows_progress, delay=2):
        layouts = list[tuple[ArrayLayout, int | None]]()
        for number in range(n):
            try:
                layouts.append(describe(stars, n * part + number))
            except H5KeyError:
                if not names.drops or objects.has(number, stars[part]):
                    raise
                break
        if len(layouts) < n:
            n_missing += 1
            continue
        if len(stars) > 1 and names.is_group and (first := objects.earlier(stars[part], layouts)) is not None:
            aliases[stars[part]] = first
            continue
        used_names.append(stars[part])
        for layout, template in layouts:
            arrays.append(layout, template)
    cells = [names.keys[at] for at, array in arrays.others.items() if is_references(array)]
    if cells and names.pattern is None:
        return parts_in(path, names.of_cells(cells), options, opened, guard, alike)
    if n_missing:
        are_used = set(used_names)
        aliases = {alias: star for alias, star in aliases.items() if star in are_used}
    if aliases and resolve_replica().rank == 0:
        alias, star = next(iter(aliases.items()))
        _log.info(
            "%s: %d further names of segments by links, such as %r of %r; each segment is used once",
            path,
            len(aliases),
            names.part(alias),
            names.part(star),
        )
    packed = PackedText.of(used_names)
    if store is not None and not scalars and not n_missing:  # values are not kept
        store.write(packed, arrays, aliases)
    return PartsOfFile(packed, arrays, names, tuple(others.values()), aliases, n_missing)


class _SameObjects:
    """Finds parts of a file that are the same objects under several names: hard links, or soft links to them.

    Args:
        file: the open file.
        names: of parts and arrays.
        allow_external: follow links into other files.
    """

    def __init__(self, file: OpenFile, names: PartNames, allow_external: bool) -> None:
        self._file, self._names, self._allow_external = file, names, allow_external
        self._first: dict[Any, str] = {}  # by the first bytes of a part's arrays

    def named_once(self, targets: Mapping[str, Target]) -> tuple[list[str], dict[str, str]]:
        """Return one name for each object, and the further names of objects.

        A hard link is preferred to a soft one, and then a name that resembles the names of other parts.

        Args:
            targets: the object of each name.
        """
        names_by_object = defaultdict[Any, list[str]](list)
        for star, target in targets.items():
            names_by_object[target.identity].append(star)
        aliases = dict[str, str]()
        if len(names_by_object) == len(targets):
            return list(targets), aliases
        alike = Counter(map(_form_of_name, targets))
        for same in names_by_object.values():
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

    def earlier(self, star: str, layouts: Sequence[tuple[ArrayLayout, Any]]) -> str | None:
        """Return the name of an earlier group with the same arrays; None if there is none.

        Args:
            star: the group.
            layouts: its arrays.
        """
        first_bytes = tuple([byte for layout, _ in layouts if (byte := layout.first_byte) is not None])
        if (first := self._first.setdefault(first_bytes or self._identity(star), star)) == star:
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
        if owner and target_of(self._file.h5, self._file.h5, owner, allow_external=self._allow_external) is None:
            return False
        if not is_attribute:
            return True
        item, _ = resolve_path(self._file.h5, owner, allow_external=self._allow_external)
        return name.rpartition("@")[2] in item.attrs

    def _identity(self, star: str) -> tuple[Any, ...]:
        """Return the identities of the objects of a part."""
        return tuple([self._object(at, star) for at in range(len(self._names.keys))])

    def _object(self, at: int, star: str) -> Any:
        name = self._names.key(at, star)
        if is_attribute_key(self._names.keys[at]):
            name = owner_of(name, self._names.part(star))
        item, members = resolve_path(self._file.h5, name, allow_external=self._allow_external)
        return identity_of_object(self._file.h5, item), members


def _form_of_name(name: str) -> str:
    """Return a name with zeros for its numbers: names that differ in numbers alone have the same form."""
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
            contents = f"{owner!r} is a member of a table."
            raise H5KeyError(f"is not in {path!r}.", contents, "", "Name the table instead.", key=key)
        return attribute_layout(item, path, key, guard)

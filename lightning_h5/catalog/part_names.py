"""The names of parts of files, and of their arrays: patterns, and the text that their ``*`` stands for."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..errors import H5ValueError, listing
from .cells import SEPARATOR

__all__ = ["LEVEL", "PartNames", "filled"]

LEVEL = re.compile(r"@name\[(\d+)\]")
"""The key of a field that has names as values: of the groups at the level of a ``*`` of the pattern."""


@dataclass(frozen=True)
class PartNames:
    """The names of the parts of a file, and of their arrays.

    Attributes:
        pattern: of the parts, with a ``*`` in at least one level; None if each file is one part.
        is_group: whether parts are groups, and keys relative to them; if not, parts are arrays.
        keys: the arrays of a part.
        columns: keys of columns of a side table among them, which have the same name in all parts.
        cells: keys of arrays of references among them, each of which names an array of a part. The ``*`` stands for
            the names of these arrays.
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
        """Return the names for the user's keys and pattern of groups."""
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
        """Return the name of a part, from the text that the ``*`` stands for."""
        if self.cells:
            return star.partition(SEPARATOR)[0]
        return "" if self.pattern is None else filled(self.pattern.strip("/"), star)

    def level(self, star: str, number: int) -> str:
        """Return the name of the group, or array, at the level of a ``*`` of the pattern.

        Args:
            star: the text for each ``*``.
            number: of the ``*``, from 0 on.

        Raises:
            H5ValueError: the pattern has fewer.
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
        """Return the names with arrays of references that name the arrays of parts."""
        return replace(self, pattern=cells[0], cells=tuple(cells)) if cells else self

    def key_pattern(self, at: int) -> str:
        """Return the name in the file of an array of any part, with a ``*`` for the text that ``star`` returns."""
        if self.keys[at] in self.cells or self.pattern is None:
            return "*" if self.keys[at] in self.cells else self.key(at, "*")
        return self.key(at, "/".join("*" * self.pattern.count("*")))

    def star(self, at: int, star: str) -> str:
        """Return the text that the ``*`` stands for in the name of an array of a part."""
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
    """Return a pattern with a name in place of each ``*``. ``star`` has these names, separated by ``/``."""
    if pattern.count("*") <= 1:
        return pattern.replace("*", star)
    first, *others = pattern.split("*")
    return first + "".join(name + text for name, text in zip(star.split("/"), others, strict=True))

"""Checks over all files together. Each is a generator of problems; add one to ``SET_CHECKS`` and it is run."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .looking import FileFacts
from .problems import Problem, error, warning

__all__ = ["SET_CHECKS", "Schema", "SetCheck", "same_arrays", "schema_of"]

NEARLY = 0.011
"""Two arrays of one file whose numbers of rows differ by less than this share were probably meant to have the same."""

FEW = 90
"""Up to so many rows such a small difference may be chance."""

_Look: TypeAlias = tuple[str, tuple[int, ...]]
"""Dtype in words, and shape of a row."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Schema:
    """What is kept of each file for the time when all have been looked at.

    Attributes:
        path: the file.
        looks: for each array with rows, its dtype and the shape of a row.
        n_rows: for each of these, its rows.
        identity: of what the file holds; None where that cannot be told.
    """

    path: str
    looks: dict[str, _Look]
    n_rows: dict[str, int]
    identity: str | None


SetCheck = Callable[[Sequence[Schema]], Iterator[Problem]]


def schema_of(facts: FileFacts) -> Schema:
    """What to keep of a file.

    Args:
        facts: what its metadata say.
    """
    looks: dict[str, _Look] = {}
    n_rows = {}
    for entry in facts.entries:
        if entry.kind == "array" and entry.shape and (entry.name in facts.layouts or entry.name in facts.refused):
            # Text of any length becomes a list of str.
            looks[entry.name] = "text" if entry.dtype.startswith("text") else entry.dtype, entry.shape[1:]
            n_rows[entry.name] = entry.shape[0]
    for key, layout in facts.layouts.items():
        if key not in looks:  # a member of a table, which is no entry of its own
            looks[key], n_rows[key] = (str(layout.dtype), layout.row_shape), layout.n_rows
    return Schema(path=facts.path, looks=looks, n_rows=n_rows, identity=facts.identity)


def same_arrays(schemas: Sequence[Schema]) -> Iterator[Problem]:
    """All files have the same arrays; the majority is right. Of use where none was asked for by name."""
    total = len(schemas)
    holders = Counter(name for schema in schemas for name in schema.looks)
    usual = [name for name, n in holders.items() if 2 * n >= total]
    for schema in schemas:
        for name in usual:
            if name not in schema.looks:
                yield error(schema.path, name, "missing", f"{holders[name]} of {total} files have it, and this has not")
        for name in schema.looks:
            if 2 * holders[name] < total:
                text = f"{holders[name]} of {total} files have it, and all others do without"
                yield warning(schema.path, name, "extra", text)


def _same_looks(schemas: Sequence[Schema]) -> Iterator[Problem]:
    """An array has the same dtype and shape of a row in all files; the majority is right."""
    of_name: dict[str, Counter[_Look]] = defaultdict(Counter)
    for schema in schemas:
        for name, look in schema.looks.items():
            of_name[name][look] += 1
    usual = {name: (*looks.most_common(1)[0], looks.total()) for name, looks in of_name.items()}
    for schema in schemas:
        for name, look in schema.looks.items():
            most, n, total = usual[name]
            if look != most:
                text = f"{n} of {total} files have it as {_words(most)}; here it is {_words(look)}"
                yield error(schema.path, name, "schema", text)


def _same_rows(schemas: Sequence[Schema]) -> Iterator[Problem]:
    """Arrays that have equally many rows in most files have so in all."""
    usual, n = _usual_groups(schemas)
    for schema in schemas:
        for group in usual:
            there = {name: schema.n_rows[name] for name in group if name in schema.n_rows}
            if len(set(there.values())) > 1:
                each = ", ".join(f"{name!r} {count:,}" for name, count in there.items())
                text = f"rows are missing: it has {each} rows; in {n} of {len(schemas)} files these are equally many"
                yield error(schema.path, None, "rows", text)


def _nearly_same_rows(schemas: Sequence[Schema]) -> Iterator[Problem]:
    """In a file that is alone, or where all files are so, lengths that differ by a little."""
    usual, _ = _usual_groups(schemas)
    group_of = {name: number for number, group in enumerate(usual) for name in group}
    for schema in schemas:
        rows = {name: count for name, count in schema.n_rows.items() if not _is_of_a_layout(name)}
        names = sorted(rows, key=lambda name: -rows[name])
        falling = [-rows[name] for name in names]  # searched, since a file may have a hundred thousand arrays
        for name in names:
            count = rows[name]
            near = names[bisect_left(falling, -(count * (1 + NEARLY)))]  # the longest that is not much longer
            is_usual = name in group_of and group_of[name] == group_of.get(near)
            if FEW < count < rows[near] and not is_usual:
                text = f"it has {count:,} rows, {near!r} {rows[near]:,}: if they belong together, some are missing"
                yield warning(schema.path, name, "rows", text)


def _is_of_a_layout(name: str) -> bool:
    """Whether an array is part of a sparse matrix or of an index of PyTables, which have lengths of their own."""
    *groups, last = name.split("/")
    return last in ("indptr", "indices") or any(group.startswith("_i_") for group in groups)


def _same_data(schemas: Sequence[Schema]) -> Iterator[Problem]:
    """No two files hold the same data."""
    first: dict[str, str] = {}
    for schema in schemas:
        if schema.identity is not None and first.setdefault(schema.identity, schema.path) != schema.path:
            text = f"it holds the same as {first[schema.identity]!r}: its rows would be trained on twice"
            yield warning(schema.path, None, "duplicate", text)


def _usual_groups(schemas: Sequence[Schema]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """What most files have in groups of equally many rows, and how many files do; of as many, the larger groups."""
    found = Counter(_groups(schema) for schema in schemas)
    return max(found.items(), key=lambda item: (item[1], -len(item[0])), default=((), 0))


def _groups(schema: Schema) -> tuple[tuple[str, ...], ...]:
    """The arrays of a file, those with equally many rows together."""
    by_rows: dict[int, list[str]] = defaultdict(list)
    for name, count in schema.n_rows.items():
        by_rows[count].append(name)
    return tuple(sorted(tuple(sorted(names)) for names in by_rows.values()))


def _words(look: _Look) -> str:
    return f"{look[0]} {look[1]}"


SET_CHECKS: tuple[SetCheck, ...] = (same_arrays, _same_looks, _same_rows, _nearly_same_rows, _same_data)
"""What is run over all files, in this order."""

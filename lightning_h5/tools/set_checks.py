"""Checks over all files together: small generators of problems that compare what was kept of each file."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from .file_checks import Problem, error, warning

if TYPE_CHECKING:
    from .check import Findings

__all__ = ["SET_CHECKS", "same_arrays"]

NEARLY = 0.011
"""Two arrays of one file whose numbers of rows differ by less than this share were probably meant to have the same."""

FEW = 90
"""Up to so many rows such a small difference may be chance."""

_Groups: TypeAlias = tuple[tuple[str, ...], ...]


def same_arrays(files: Sequence[Findings]) -> Iterator[Problem]:
    """All files have the same arrays; the majority is right. Of use if none was asked for by name."""
    total = len(files)
    holders = Counter(name for found in files for name in found.arrays)
    usual = [name for name, n in holders.items() if 2 * n >= total]
    for found in files:
        for name in usual:
            if name not in found.arrays:
                yield error(found.path, name, "missing", f"{holders[name]} of {total} files have it, and this has not")
        for name in found.arrays:
            if 2 * holders[name] < total:
                text = f"{holders[name]} of {total} files have it, and all others do without"
                yield warning(found.path, name, "extra", text)


def _same_looks(files: Sequence[Findings]) -> Iterator[Problem]:
    """An array has the same dtype and shape of a row in all files; the majority is right."""
    of_name: dict[str, Counter[str]] = defaultdict(Counter)
    for found in files:
        for name, (look, _) in found.arrays.items():
            of_name[name][look] += 1
    usual = {name: (*looks.most_common(1)[0], looks.total()) for name, looks in of_name.items()}
    for found in files:
        for name, (look, _) in found.arrays.items():
            most, n, total = usual[name]
            if look != most:
                yield error(found.path, name, "schema", f"{n} of {total} files have it as {most}; here it is {look}")


def _same_rows(files: Sequence[Findings]) -> Iterator[Problem]:
    """Arrays that have equally many rows in most files have so in all."""
    usual, n = _usual_groups(files)
    for found in files:
        for group in usual:
            rows = {name: found.arrays[name][1] for name in group if name in found.arrays}
            if len(set(rows.values())) > 1:
                each = ", ".join(f"{name!r} {count:,}" for name, count in rows.items())
                text = f"rows are missing: it has {each} rows; in {n} of {len(files)} files these are equally many"
                yield error(found.path, None, "rows", text)


def _nearly_same_rows(files: Sequence[Findings]) -> Iterator[Problem]:
    """In a file that is alone, or if all files are so, lengths that differ by a little."""
    usual, _ = _usual_groups(files)
    group_of = {name: number for number, group in enumerate(usual) for name in group}
    for found in files:
        rows = {name: count for name, (_, count) in found.arrays.items() if not _is_of_a_layout(name)}
        names = sorted(rows, key=lambda name: -rows[name])
        falling = [-rows[name] for name in names]  # searched, since a file may have a hundred thousand arrays
        for name in names:
            count = rows[name]
            near = names[bisect_left(falling, -(count * (1 + NEARLY)))]  # the longest that is not much longer
            is_usual = name in group_of and group_of[name] == group_of.get(near)
            if FEW < count < rows[near] and not is_usual:
                text = f"it has {count:,} rows, {near!r} {rows[near]:,}: if they belong together, some are missing"
                yield warning(found.path, name, "rows", text)


def _is_of_a_layout(name: str) -> bool:
    """Return whether an array is part of a sparse matrix or of an index of PyTables, which have their own lengths."""
    *groups, last = name.split("/")
    return last in ("indptr", "indices") or any(group.startswith("_i_") for group in groups)


def _same_data(files: Sequence[Findings]) -> Iterator[Problem]:
    """No two files hold the same data."""
    first: dict[str, str] = {}
    for found in files:
        if found.identity is not None and first.setdefault(found.identity, found.path) != found.path:
            text = f"it holds the same as {first[found.identity]!r}: its rows would be trained on twice"
            yield warning(found.path, None, "duplicate", text)


def _usual_groups(files: Sequence[Findings]) -> tuple[_Groups, int]:
    """What most files have in groups of equally many rows, and how many files do; of as many, the larger groups."""
    found = Counter(_groups(each) for each in files)
    return max(found.items(), key=lambda item: (item[1], -len(item[0])), default=((), 0))


def _groups(found: Findings) -> _Groups:
    """The arrays of a file, those with equally many rows together."""
    by_rows: dict[int, list[str]] = defaultdict(list)
    for name, (_, count) in found.arrays.items():
        by_rows[count].append(name)
    return tuple(sorted(tuple(sorted(names)) for names in by_rows.values()))


SET_CHECKS: tuple[Callable[[Sequence[Findings]], Iterator[Problem]], ...] = (
    same_arrays,
    _same_looks,
    _same_rows,
    _nearly_same_rows,
    _same_data,
)
"""The checks over all files, in this order."""

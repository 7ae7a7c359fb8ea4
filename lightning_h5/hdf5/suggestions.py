"""Keys and patterns to propose in messages, from the names of a file's arrays. Reads no file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Literal

__all__ = ["alike_groups", "nearest_pattern", "segments_hint"]

SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing", "predict"}


def alike_groups(names: Iterable[str], key: str | None = None) -> tuple[str, list[str]] | None:
    """Return a pattern of groups that have arrays of the same names, and these names; None if there are no such groups.

    Groups that are called like splits do not count.

    Args:
        names: arrays of a file.
        key: the name, relative to a group, of an array that the groups have; None for any.

    Example:
        >>> alike_groups(["data/demo_0/obs", "data/demo_1/obs", "mask/train"])
        ('data/*', ['obs'])
    """
    groups_by_key = defaultdict[tuple[int, str], list[list[str]]](list)  # by the number of levels, and the key
    for name in names:
        levels = name.strip("/").split("/")
        for depth in range(1, len(levels)):
            if key is None or "/".join(levels[depth:]) == key.strip("/"):
                groups_by_key[depth, "/".join(levels[depth:])].append(levels[:depth])
    keys_by_pattern = defaultdict[str, list[str]](list)
    counts = Counter[str]()
    for (_, tail), groups in groups_by_key.items():
        if len(groups) < 2:
            continue
        columns = list(zip(*groups, strict=True))
        pattern = "/".join("*" if len(set(column)) > 1 else column[0] for column in columns)
        varying = {name for column in columns if len(set(column)) > 1 for name in column}
        if varying and not varying & SPLIT_NAMES and pattern.split("/")[-1] == "*":
            keys_by_pattern[pattern].append(tail)
            counts[pattern] += len(groups)
    if not counts:
        return None
    pattern, _ = counts.most_common(1)[0]
    return pattern, keys_by_pattern[pattern]


def segments_hint(names: Iterable[str], key: str | None = None) -> str:
    """Return a sentence that proposes segments if groups are alike, with a leading blank, or nothing (see above)."""
    if (groups := alike_groups(names, key)) is None:
        return ""
    pattern, keys = groups
    return (
        f" If each group is a recording, an episode or another segment, pass segments={pattern!r}, and names relative "
        f"to a group, such as {keys[0]!r}."
    )


def nearest_pattern(pattern: str, names: Sequence[str], kind: Literal["group", "array"]) -> str | None:
    """Return a pattern that matches several groups, or arrays, and resembles one that matches none.

    Args:
        pattern: matches nothing.
        names: arrays of a file.
        kind: groups or arrays.
    """
    paths = set(names)
    if kind == "group":
        paths = {name[: match.start()] for name in names for match in re.finditer("/", name)}
    counts = Counter[str]()
    for path in paths:
        group, slash, last = path.rpartition("/")
        counts.update({f"{group}{slash}{form}" for form in {re.sub(r"\d+", "*", last, count=1), "*"} if "*" in form})
    likely = [candidate for candidate, count in counts.items() if count > 1]
    return max(
        likely,
        key=lambda candidate: (SequenceMatcher(None, pattern, candidate).ratio(), counts[candidate], candidate),
        default=None,
    )

"""Groups of the same structure side by side, each a segment, and lists of these for each split."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .recognize_parts import FileLooks, Look, Reader, Settings

__all__ = ["lists_of_splits", "siblings", "why_two_levels"]

SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def siblings(files: Sequence[FileLooks]) -> tuple[str, list[FileLooks], bool] | None:
    """Return a pattern of groups of the same structure, these groups, and whether each is surely a segment."""
    by_parent: dict[str, dict[tuple[int, str], dict[str, Look]]] = {}
    for at, file in enumerate(files):
        for name, look in file.arrays.items():
            words = name.split("/")
            for depth in range(len(words) - 1):
                groups = by_parent.setdefault("".join(f"{word}/" for word in words[:depth]), {})
                groups.setdefault((at, words[depth]), {})["/".join(words[depth + 1 :])] = look
    for above, groups in sorted(by_parent.items(), key=lambda item: (item[0].count("/"), item[0])):
        kinds = Counter(
            tuple(sorted((n, len(look.shape), look.dtype) for n, look in each.items())) for each in groups.values()
        )
        kind, inside = kinds.most_common(1)[0]
        if inside < 2:
            continue
        same = {
            at: each
            for at, each in groups.items()
            if set(kind) <= {(n, len(look.shape), look.dtype) for n, look in each.items()}
        }
        children = {child for _, child in same}
        if len(children) < 2 or children <= set(SPLITS):
            continue
        lengths = {at: frozenset(look.shape[0] for look in each.values() if look.shape) for at, each in same.items()}
        outside = [_lengths_outside(file, above) for file in files]
        if all(lengths[at] & outside[at[0]] for at in same):
            continue  # an array outside has a value for each row: all are fields of one row
        star = _star(children, {child for _, child in groups} - children)
        if star is None:
            continue
        numbered = len({re.sub(r"\d+", "0", child) for child in children}) == 1
        is_sure = numbered or len(children) > 4 or len(set(lengths.values())) > 1
        parts = [
            FileLooks(path=files[at].path, group=f"{above}{child}", arrays=each) for (at, child), each in same.items()
        ]
        return above + star, parts, is_sure
    return None


def _lengths_outside(file: FileLooks, above: str) -> set[int]:
    """Return the lengths of the arrays of a file that are in no group directly below another."""
    return {
        look.shape[0]
        for name, look in file.arrays.items()
        if look.shape and not (name.startswith(above) and "/" in name[len(above) :])
    }


def _star(names: set[str], others: set[str]) -> str | None:
    """Return a pattern that fits some names and no others."""
    prefix = re.sub(r"\d+$", "", _common_prefix(names))
    for pattern, start in (("*", ""), (f"{prefix}*", prefix)):
        if not any(other.startswith(start) for other in others):
            return pattern
    return None


def _common_prefix(names: set[str]) -> str:
    first, last = min(names), max(names)
    return first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def why_two_levels(pattern: str, part: FileLooks) -> str:
    """Return why groups that have groups of one structure are no segments, and what to do."""
    return (
        f"Groups in groups have the same arrays ({pattern!r}, and below each such as {part.group!r}), and a pattern "
        f"has one '*'. Train on one of them, such as segments={part.group + '/*'!r}, or write a file for each."
    )


def lists_of_splits(file: FileLooks, parts: Sequence[FileLooks], reader: Reader) -> Settings:
    """Return arrays that list the groups of each split, such as ``mask/train``."""
    known = {part.group.rpartition("/")[2] for part in parts} | {part.group for part in parts}
    found: dict[str, str] = {}
    for name, look in file.arrays.items():
        split = SPLITS.get(name.rpartition("/")[2])
        if split and len(look.shape) == 1 and look.dtype.startswith("text"):
            values = reader.values(name)
            texts = [v.decode() if isinstance(v, bytes) else str(v) for v in ([] if values is None else values)]
            if texts and {text.strip("/") for text in texts} <= known:
                found.setdefault(split, name)
    return {"split": {"key": found}} if "train" in found else {}

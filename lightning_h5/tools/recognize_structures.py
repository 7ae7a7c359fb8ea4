"""Structures that samples are stored in: groups side by side, sparse matrices, arrays of references, images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ..errors import H5Error, listing
from ..hdf5 import (
    FAULTS,
    OLD_CATEGORIES,
    Image,
    OpenOptions,
    ScalarError,
    bytes_of,
    find_array,
    is_bytes,
    layout_of,
    matrices_among,
    open_h5,
    words_in,
)
from ..readers import open_reader
from .recognize_parts import TARGETS, AlikeParts, FileLooks, Guess, Look, Reader, Settings

__all__ = [
    "cells_of_references",
    "groups_in_groups",
    "images",
    "lists",
    "lists_of_splits",
    "named_images",
    "siblings",
    "sparse_rows",
    "why_two_levels",
]

SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # of JPEG and PNG files
MAX_READ = 16  # arrays of which a row is read
N_DECODED = 8  # images whose shapes are compared
MIN_NAMES = 2  # of images that have names of their own
MIN_ROWS = 10  # of which some are left to validate on


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


def groups_in_groups(parts: Sequence[FileLooks]) -> tuple[str, list[FileLooks], bool] | None:
    """Return a pattern of groups of the same structure in groups, and these; None if no pattern fits all."""
    inside = [(part, siblings([part])) for part in parts]
    patterns = {found[0] for _, found in inside if found is not None}
    if len(patterns) != 1 or any(found is None for _, found in inside):
        return None
    groups = [
        replace(group, group=f"{part.group}/{group.group}") for part, found in inside if found for group in found[1]
    ]
    return patterns.pop(), groups, all(found[2] for _, found in inside if found)


def why_two_levels(pattern: str, part: FileLooks) -> str:
    """Return why groups that have groups of one structure are no segments, and what to do."""
    return (
        f"Groups in groups have the same arrays ({pattern!r}, and below each such as {part.group!r}), and no pattern "
        f"fits the names of all. Pass one with a '*' for each level, such as segments={pattern + '/*'!r}, or write a "
        "file for each."
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


def images(files: Sequence[FileLooks]) -> list[Guess]:
    """Return how to read the only array of images in files; none if there is no such array."""
    arrays = files[0].arrays
    looks = {**arrays, **files[0].of_bytes}
    likely = [
        *(name for name, look in files[0].of_bytes.items() if look.shape),
        *(name for name, look in arrays.items() if _may_hold_bytes(look)),
    ]
    found = {name: rows for name in likely[:MAX_READ] if (rows := _first(files[0].path, name))}
    if len(found) != 1:
        return []
    ((name, rows),) = found.items()
    n_rows = looks[name].shape[0]
    columns = [other for other, look in arrays.items() if look.shape == (n_rows,) and other != name]
    numbers = [other for other in columns if arrays[other].dtype.startswith(("int", "uint", "float"))]
    targets = [other for other in numbers if words_in(other) & TARGETS]
    settings: Settings = {"x_key": name, **({"y_key": targets[0]} if len(targets) == 1 else {})}
    settings["decode"] = {name: "image"}
    if len(_shapes(rows)) > 1:
        settings["collate_fn"] = "list"
    if n_rows >= MIN_ROWS:
        settings["split"] = 0.1
    kind = "JPEG" if rows[0].startswith(BEGINNINGS[0]) else "PNG"
    return [Guess(settings=settings, why=f"{name!r} holds {kind} files, one a row, which are decoded to images.")]


def named_images(file: FileLooks) -> list[Guess]:
    """Return how to read images that are opaque scalars, each with a name of its own; none if there are none."""
    names = [name for name, look in file.of_bytes.items() if not look.shape]
    groups = {name.rpartition("/")[0] for name in names}
    if len(names) < MIN_NAMES or len(groups) > 1 or any(name.rpartition("/")[0] in groups for name in file.arrays):
        return []
    rows = [row for name in names[:N_DECODED] for row in _first(file.path, name)]
    if not rows:
        return []
    group = next(iter(groups))
    pattern = f"{group}/*" if group else "*"
    settings: Settings = {"x_key": {"image": pattern}, "decode": {"image": "image"}, "sample": "segment"}
    if len(_shapes(rows)) > 1:
        settings["collate_fn"] = "list"
    if len(names) >= MIN_ROWS:
        settings["split"] = 0.1
    return [Guess(settings=settings, why=f"{len(names):,} opaque values are images, each with a name of its own.")]


def lists(files: Sequence[FileLooks]) -> list[Guess]:
    """Return how to read rows that are lists of numbers; none if other arrays have several numbers in a row."""
    arrays = files[0].arrays
    ragged = {name: look for name, look in files[0].of_bytes.items() if len(look.shape) == 1 and "list" in look.dtype}
    if not ragged:
        return []
    n_rows = max(look.shape[0] for look in ragged.values())
    inputs = [name for name, look in ragged.items() if look.shape[0] == n_rows]
    if not n_rows or any(len(look.shape) > 1 for look in arrays.values()):
        return []
    numbers = [name for name, look in arrays.items() if look.shape == (n_rows,) and look.dtype[:4] != "text"]
    targets = [name for name in numbers if words_in(name) & TARGETS] or (numbers if len(numbers) == 1 else [])
    settings: Settings = {"x_key": inputs[0] if len(inputs) == 1 else inputs, "collate_fn": "pad"}
    if len(targets) == 1:
        settings["y_key"] = targets[0]
    if n_rows >= MIN_ROWS:
        settings["split"] = 0.1
    return [Guess(settings=settings, why=f"Rows of {listing(inputs)} are lists of several lengths, padded in a batch.")]


def _may_hold_bytes(look: Look) -> bool:
    return (look.dtype == "uint8" and len(look.shape) == 2) or (look.dtype[:4] == "text" and len(look.shape) == 1)


def _first(path: str, name: str) -> list[bytes]:
    """Return the first rows of an array as bytes; none if the first one does not begin as an image does."""
    try:
        with open_h5(path) as file:
            try:
                layout = layout_of(find_array(file, name), path, name)  # opens no other file
            except ScalarError:
                value = bytes(file[name][()])
                return [value] if value.startswith(BEGINNINGS) else []
        if layout.dtype.kind == "S" and not layout.row_shape:  # not text
            n_bytes = np.dtype(f"V{layout.dtype.itemsize}")
            layout = layout.with_changes(stored=n_bytes, dtype=n_bytes)
        is_padded = layout.dtype == np.uint8 and len(layout.row_shape) == 1
        if not (is_padded or (not layout.row_shape and (is_bytes(layout.dtype) or layout.dtype.kind == "V"))):
            return []
        reader = open_reader(layout, OpenOptions())
        rows = [bytes(bytes_of(row)) for row in reader.read(np.arange(min(1, layout.n_rows)))]
        if rows and rows[0].startswith(BEGINNINGS):
            return rows + [bytes(bytes_of(row)) for row in reader.read(np.arange(1, min(N_DECODED, layout.n_rows)))]
    except (H5Error, *FAULTS):  # checking the file reports it
        pass
    return []


def _shapes(rows: Sequence[bytes]) -> set[tuple[int, ...]]:
    """Return the shapes of images; none if they cannot be decoded here."""
    with suppress(Exception):  # trying the settings reports why
        return {Image().row(row).shape for row in rows}
    return set()


def sparse_rows(files: Sequence[FileLooks]) -> list[Guess]:
    """Return how to read the rows of a sparse matrix, as AnnData and Cell Ranger write it; none if there is none."""
    arrays = files[0].arrays
    matrices = matrices_among(arrays)
    groups = sorted(matrices)
    main = next((group for group in groups if group in ("X", "matrix")), groups[0] if len(groups) == 1 else None)
    if main is None:
        return []
    n_rows = arrays[matrices[main]].shape[0] - 1
    columns = [name for name in arrays if re.fullmatch(r"obs/[^/]+/codes", name)]
    columns += [name for name in arrays if f"obs/{OLD_CATEGORIES}/{name.removeprefix('obs/')}" in arrays]
    columns = [name.removesuffix("/codes") for name in columns if arrays[name].shape == (n_rows,)]
    target = min(columns, key=lambda name: (not words_in(name) & (TARGETS | {"type"}), name), default=None)
    why = f"{main!r} is a sparse matrix, of which a row is a sample; it becomes dense in a batch, or stays sparse with "
    why += f"decode={{{main!r}: 'csr'}}."
    if target is not None:
        why += f" {target!r} is a column of categories, whose codes are the same in all files (datamodule.categories)."
    split: Settings = {"split": 0.1} if n_rows >= MIN_ROWS else {}
    return [Guess(settings={"x_key": main, **({} if target is None else {"y_key": target}), **split}, why=why)]


def cells_of_references(file: FileLooks, reader: Reader) -> list[Guess]:
    """Return how to read the arrays that cells of MATLAB refer to, each a segment; none if there are no references."""
    cells = {name: looks for name in file.references if (looks := reader.cells(name))}
    if not cells:
        return []
    main = max(cells, key=lambda name: sum(look.n_values for look in cells[name] if look.dtype != "text"))
    n = len(cells[main])
    cells = {name: looks for name, looks in cells.items() if len(looks) == n}
    others = file.arrays
    if any(look.n_values > sum(one.n_values for one in cells[main]) for look in others.values()):
        return []
    each = [{name: looks[at] for name, looks in cells.items()} for at in range(n)]
    named = [FileLooks(path=file.path, group=f"{main}[{at}]", arrays=one) for at, one in enumerate(each)]
    parts = AlikeParts(named, reader, {})
    shapes = [look.shape for look in cells[main]]
    if {len(shape) for shape in shapes} == {2} and len({a for a, _ in shapes}) == 1 < len({b for _, b in shapes}):
        parts.step_axis, parts.axis_is_sure = 1, False
    values = [name for name, looks in cells.items() if looks[0].dtype == "text"]
    values += [name for name, look in others.items() if look.n_values == n]
    target = [name for name in values if words_in(name) & TARGETS]
    guesses = parts.guesses()
    whole = [one for one in guesses if (one.settings or {}).get("sample") == "segment"]
    if len(target) == 1 and whole:
        guesses = [replace(one, settings={**(one.settings or {}), "y_key": target[0]}, is_sure=True) for one in whole]
    why = f"{main!r} refers to {n:,} arrays, each of which is a segment."
    return [replace(one, why=f"{why} {one.why}") for one in guesses]

"""What to train a file with: which arrays, which data module, which settings, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import listing
from ..files import ArrayLayout
from ..readers import why_plain
from ..sizes import bytes_text, parse_bytes

__all__ = ["Advice", "advise", "yaml_of"]

SHUFFLE_BYTES = parse_bytes("512 MiB", "shuffle_bytes")
"""What the data modules mix at a time unless told otherwise."""

MOST_OF_ROOM = 2
"""One in so many of the bytes that are free may hold cached rows: the model wants some, and so do its batches."""

MOST_SHUFFLE = 4 << 30
"""Up to so many bytes to mix rows in are better asked for than a copy of the file."""


RANKS = (1, 2, 4, 8)

LEAST_ROWS = 10  # of which a tenth validates

GROUP_WORDS = {
    "guid",
    "uuid",
    "patient",
    "patients",
    "subject",
    "participant",
    "recording",
    "session",
    "donor",
    "writer",
}
"""Words in the name of a column that says what rows belong to."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The data module and settings for a file.

    Attributes:
        datamodule: its name; None where nothing in the file can be trained from.
        settings: its arguments.
        x_keys: the arrays that are taken as input.
        y_keys: the array that is taken as target, if one is.
        others: further arrays with as many rows.
        shard_bytes: memory that the largest shard of these arrays takes when rows are cached on 1, 2, 4 and 8 ranks.
        reasons: a sentence for each choice.
    """

    datamodule: str | None
    settings: dict[str, Any]
    x_keys: tuple[str, ...] = ()
    y_keys: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    shard_bytes: dict[int, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def advise(
    path: str,
    layouts: Sequence[ArrayLayout],
    *,
    n_rows: int | None = None,
    columns: Mapping[str, int] | None = None,
    tables: Sequence[str] = (),
    problem: str | None = None,
) -> Advice:
    """What to use for one file. Looks at how much memory is free here.

    Args:
        path: the file, or the files as their user names them.
        layouts: the arrays of numbers of one file that have rows.
        n_rows: rows of all files; None where there is one.
        columns: arrays of one value a row, text among them, and their rows: one may name groups.
        tables: arrays of tables, whose members can be trained from.
        problem: why an array that there is cannot be read, if so.
    """
    sparse = _sparse(layouts)
    layouts = [array for array in layouts if array.key.rpartition("/")[0] not in sparse]
    if not layouts:
        return Advice(datamodule=None, settings={}, reasons=(_why_none(tables, problem),))
    x, y, others = _choose(layouts)
    fields = [x, *y]
    settings: dict[str, Any] = {"train_path": path, "x_key": x.key}
    if y:
        settings["y_key"] = y[0].key
    rows = x.n_rows if n_rows is None else n_rows
    settings |= {"val_fraction": 0.1} if rows >= LEAST_ROWS else {}
    settings["batch_size"] = 64
    reasons = [_why_these(x, y, others), *_groups(columns or {}, x.n_rows, settings)]
    reasons += [
        f"{group!r} is a sparse matrix, whose rows are no rows of an array: write it dense." for group in sparse
    ]
    name, more, why = _module(fields, path, rows / x.n_rows)
    settings, reasons = settings | more, reasons + why
    reasons += [_why_slow(array) for array in fields if why_plain(array) is not None and array.n_bytes > SHUFFLE_BYTES]
    return Advice(
        datamodule=name,
        settings=settings,
        x_keys=(x.key,),
        y_keys=tuple(array.key for array in y),
        others=tuple(array.key for array in others),
        shard_bytes={n: -(-rows // n) * sum(array.row_bytes for array in fields) for n in RANKS},
        reasons=tuple(reasons),
    )


def yaml_of(advice: Advice) -> str:
    """The advice as the ``data`` part of a configuration."""
    data = {"class_path": advice.datamodule, "init_args": advice.settings}
    text: str = yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True, width=1000)
    return text.rstrip()


def _choose(layouts: Sequence[ArrayLayout]) -> tuple[ArrayLayout, list[ArrayLayout], list[ArrayLayout]]:
    """Input, target (if one stands out) and what else has as many rows."""
    # Where no row has many values, the largest array has to do.
    x = max(layouts, key=lambda array: (bool(array.row_shape), array.n_bytes))
    others = [array for array in layouts if array.n_rows == x.n_rows and array is not x]
    single = [array for array in others if not array.row_shape]
    named = [a for a in single if any(word in a.key.casefold() for word in ("label", "target", "class", "/y"))]
    y = single if len(single) == 1 else named[:1] or [a for a in single if a.key.casefold() == "y"]
    return x, y, [array for array in others if array not in y]


def _sparse(layouts: Sequence[ArrayLayout]) -> list[str]:
    """Groups that hold a compressed sparse matrix, as SciPy and AnnData write it."""
    names = {array.key for array in layouts}
    groups = [name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == "indptr"]
    return sorted(group for group in groups if {f"{group}/data", f"{group}/indices"} <= names)


def _why_these(x: ArrayLayout, y: list[ArrayLayout], others: list[ArrayLayout]) -> str:
    target = f", and {y[0].key!r} has one value for each" if y else ""
    more = (
        f" Arrays with as many rows, to take as you need them: {listing((o.key for o in others), 4)}." if others else ""
    )
    return f"{x.key!r} is the largest array{target}.{more}"


def _why_none(tables: Sequence[str], problem: str | None) -> str:
    if problem is not None:
        return problem
    if tables:
        return f"The arrays are tables: name members, as in x_key={tables[0] + '/MEMBER'!r}."
    return "No array of numbers with rows is there to train from."


def _groups(columns: Mapping[str, int], n_rows: int, settings: Mapping[str, Any]) -> list[str]:
    """A column that seems to name patients, recordings and the like."""
    named = [
        name
        for name, length in columns.items()
        if length == n_rows and name not in settings.values() and set(_words(name)) & GROUP_WORDS
    ]
    return [f"{name!r} may name what rows belong to: group_key={name!r} keeps it on one side." for name in named[:1]]


def _words(name: str) -> list[str]:
    return name.rpartition("/")[2].casefold().replace("_", " ").replace("-", " ").split()


def _module(fields: list[ArrayLayout], path: str, n_files: float) -> tuple[str, dict[str, Any], list[str]]:
    """The data module, what it is to be told, and why; for so many times the rows of these arrays."""
    dear = [array for array in fields if not array.is_placed and array.n_bytes * n_files > SHUFFLE_BYTES]
    if not dear:
        placed = all(array.is_placed for array in fields)
        why = "single rows are read by position" if placed else "all decoded rows fit shuffle_bytes"
        return "LazyH5DataModule", {}, [f"Rows are read on demand: {why}, so that any order costs the same."]
    # These bring torch, which takes longer to import than a look at most files.
    from ..datasets import room
    from ..loading import FEW_BLOCKS, blocks_mixed

    decoded, free = round(n_files * sum(array.n_bytes for array in fields)), room()
    if free is not None and decoded <= free.n_bytes // MOST_OF_ROOM:
        why = f"All rows take {_size(decoded)} decoded and fit the memory of this machine: decode them once."
        return "RankCachedH5DataModule", {}, [why]
    block = max(array.rows_per_chunk for array in dear) * sum(array.row_bytes for array in fields)
    if blocks_mixed(SHUFFLE_BYTES, block, 1) >= FEW_BLOCKS:
        why = f"A row costs a block of {_size(block)}; blocks are mixed a window at a time, each decoded once an epoch."
        return "LazyH5DataModule", {}, [why]
    wanted = (block * FEW_BLOCKS * 4 // 3 >> 20) + 1  # MiB; one block in four is being decoded
    if wanted << 20 <= MOST_SHUFFLE:
        why = f"A row costs a block of {_size(block)}: {wanted} MiB of shuffle_bytes mix {FEW_BLOCKS} at a time."
        return "LazyH5DataModule", {"shuffle_bytes": f"{wanted} MiB"}, [why]
    rows = max(1, (1 << 20) // max(1, dear[0].row_bytes))
    command = f"lightning-h5 repack {os.path.basename(path)} repacked.h5 --rows-per-chunk {rows} --compression gzip"
    why = f"A row costs a block of {_size(block)}, of which {_size(SHUFFLE_BYTES)} mix few. Repack: {command}"
    return "LazyH5DataModule", {}, [why]


def _why_slow(array: ArrayLayout) -> str:
    return f"{array.key!r} is read through the HDF5 library, one thread at a time, since {why_plain(array)}."


def _size(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="MiB", most="GiB")

"""What to train a file with: which arrays, which data module, which settings, and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import Any

import numpy.typing as npt
import yaml

from ..errors import listing
from ..hdf5 import GROUP_WORDS, ArrayLayout, names_rows, words_in
from ..readers import fallback_reason
from ..sizes import bytes_text, parse_bytes
from .suggestions import batch_size_for, suggest_dtypes, suggest_split, trained_row_bytes

__all__ = [
    "MAX_OF_ROOM",
    "SHUFFLE_BYTES",
    "Advice",
    "advise",
    "further_settings",
    "group_key_in",
    "map_files",
    "mix_bytes",
    "sample_setting",
    "use_workers",
    "yaml_of",
]

SHUFFLE_BYTES = parse_bytes("512 MiB", "shuffle_bytes")
"""What the data modules mix at a time unless told otherwise."""

MAX_OF_ROOM = 2
"""One in so many of the bytes that are free may hold cached rows: the model wants some, and so do its batches."""

MAX_SHUFFLE = 4 << 30
"""Up to so many bytes to mix rows in are better asked for than a copy of the file."""


TARGET_WORDS = {word.removesuffix("s") for word in ("label", "target", "mask", "y", "class", "classes")}
"""Words in the name of an array that is no input if there is another, as ``words_in`` returns them."""

NOTHING = "No array of numbers with rows is there to train from."


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The data module and settings for a file.

    Attributes:
        datamodule: its name; None where nothing in the file can be trained from.
        settings: its arguments.
        x_keys: the arrays that are taken as input.
        y_keys: the array that is taken as target, if one is.
        cached_bytes: memory that all rows of these arrays take in the dtypes of ``settings``; ranks share it.
        reasons: a sentence for each choice.
        comments: those of them that belong into the configuration.
    """

    datamodule: str | None
    settings: dict[str, Any]
    x_keys: tuple[str, ...] = ()
    y_keys: tuple[str, ...] = ()
    cached_bytes: int = 0
    reasons: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()


def advise(
    path: str | list[str],
    layouts: Sequence[ArrayLayout],
    *,
    n_rows: int | None = None,
    columns: Mapping[str, int] | None = None,
    texts: Sequence[str] = (),
    problem: str | None = None,
    read_column: Callable[[str], npt.NDArray[Any] | None] = lambda _: None,
) -> Advice:
    """What to use for one file. Looks at how much memory is free here.

    Args:
        path: the file, or the files as their user names them.
        layouts: the arrays of numbers of one file that have rows, members of tables among them.
        n_rows: rows of all files; None where there is one.
        columns: arrays and members of tables with one value a row, text among them, and their rows. One may
            name groups.
        texts: arrays of text with one value a row.
        problem: why an array that there is cannot be read, if so.
        read_column: gives the values of such an array, of all files; None if they cannot be read, or are too many.
    """
    sparse = _sparse(layouts)
    layouts = [array for array in layouts if array.key.rpartition("/")[0] not in sparse]
    if all(array.members and names_rows(array.key) for array in layouts):
        return Advice(datamodule=None, settings={}, reasons=(problem or NOTHING,))
    xs, y, others = _choose(layouts)
    if y and (labels := read_column(y[0].key)) is not None and _misses_some(y[0].key, labels):
        # Class numbers of AnnData and pandas, which no loss takes.
        others, y = [*others, *y], []
    fields = [*xs, *y]
    x_keys, y_key = [x.key for x in xs], y[0].key if y else None
    settings: dict[str, Any] = {"train_path": path, "x_key": x_keys[0] if len(x_keys) == 1 else x_keys}
    settings |= {} if y_key is None else {"y_key": y_key}
    rows = xs[0].n_rows if n_rows is None else n_rows
    group_key = group_key_in(columns or {}, xs[0].n_rows, [*x_keys, y_key])
    more, reasons = further_settings(xs, y, rows, group_key, read_column)
    settings |= more
    reasons = [_why_these(xs, y, others), *reasons]
    reasons += [
        f"{group!r} is a sparse matrix, whose rows are no rows of an array: write it dense." for group in sparse
    ]
    comments = [] if y else [_why_no_target(key) for key in texts if _names_target(key)][:1]
    held = trained_row_bytes(xs, settings.get("x_dtype")) + trained_row_bytes(y, settings.get("y_dtype"))
    name, more, why = _module(fields, path if isinstance(path, str) else path[0], rows / xs[0].n_rows, held * rows)
    settings, reasons = settings | more, reasons + comments + why
    reasons += [
        _why_slow(array) for array in fields if fallback_reason(array) is not None and array.n_bytes > SHUFFLE_BYTES
    ]
    return Advice(
        datamodule=name,
        settings=settings,
        x_keys=tuple(x_keys),
        y_keys=tuple(array.key for array in y),
        cached_bytes=rows * held,
        reasons=tuple(reasons),
        comments=tuple(comments),
    )


def further_settings(
    x: Sequence[ArrayLayout],
    y: Sequence[ArrayLayout],
    n_rows: int,
    group_key: str | None,
    read_column: Callable[[str], npt.NDArray[Any] | None],
) -> tuple[dict[str, Any], list[str]]:
    """Dtypes, split and batch size for arrays to train from, and why.

    Args:
        x: the input's arrays.
        y: the target's arrays.
        n_rows: rows of all files.
        group_key: an array that seems to name groups, if any.
        read_column: see ``advise``.
    """
    y_key = y[0].key if len(y) == 1 and not y[0].row_shape else None
    labels, groups = (None if key is None else read_column(key) for key in (y_key, group_key))
    dtypes, why_dtypes = suggest_dtypes(x, y, labels)
    split, why_split = suggest_split(n_rows, y_key, labels, group_key, groups)
    n_train = round(n_rows * (1 - split.get("val_fraction", 0)))
    row_bytes = trained_row_bytes(x, dtypes.get("x_dtype")) + trained_row_bytes(y, dtypes.get("y_dtype"))
    batch_size = batch_size_for(n_train, row_bytes)
    return dtypes | split | {"batch_size": batch_size}, [*why_dtypes, *why_split]


def sample_setting(arrays: Sequence[ArrayLayout], rows_of_files: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """``sample``, if these files are refused without it, and why.

    ``advise`` has no use for it: its target has one value a row, so that it takes no files that are refused.

    Args:
        arrays: input and target of one file.
        rows_of_files: rows of each file.
    """
    from ..datasets import shape_of_images  # it brings torch, see below

    shape = shape_of_images(arrays, rows_of_files, len(rows_of_files))
    if shape is None:
        return {}, []
    why = (
        f"sample: row takes an index along axis 0 as a sample. All arrays have the shape {shape} in each file. If a "
        "file is one image or volume, write the samples to arrays with one more axis in front instead."
    )
    return {"sample": "row"}, [why]


def map_files() -> dict[str, Any]:
    """Return the setting that maps contiguous arrays into memory."""
    return {"mmap": True}


def mix_bytes(n_bytes: int) -> dict[str, Any]:
    """Return the setting that mixes at least so many decoded bytes at a time."""
    return {"shuffle_bytes": f"{-(-n_bytes >> 20)} MiB"}


def use_workers(n: int) -> dict[str, Any]:
    """Return the setting that takes so many worker processes."""
    return {"num_workers": n}


def yaml_of(advice: Advice) -> str:
    """The advice as the ``data`` part of a configuration."""
    forms = {name: _form_in_yaml(name, value) for name, value in advice.settings.items()}
    settings = {name: form for name, form in forms.items() if form is not None}
    comments = [
        *advice.comments,
        *(_why_left_out(name, advice.settings[name]) for name in forms if name not in settings),
    ]
    data = {"class_path": advice.datamodule, "init_args": settings}
    text = yaml.dump({"data": data}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    lines = [line for comment in comments for line in wrap(_printable(comment), 78, break_long_words=False)]
    return "\n".join([*(f"# {line}" for line in lines), text.rstrip()])


def _quoted(dumper: Any, text: str) -> Any:
    """A string, in quotes if YAML 1.2 reads it as a number, such as 1e3, which PyYAML leaves plain."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _is_number(text) else None)


_Dumper: Any = type("_Dumper", (yaml.SafeDumper,), {})
_Dumper.add_representer(str, _quoted)


def _is_number(text: str) -> bool:
    for read in (float, partial(int, base=0)):
        with suppress(ValueError):
            read(text.replace("_", ""))
            return True
    return False


def _form_in_yaml(name: str, value: Any) -> Any:
    """A setting as a configuration can have it; None if it cannot."""
    keys = list(_keys_in(value)) if name.endswith("_key") else []
    if any("{split}" in key for key in keys):
        return None
    if not isinstance(value, str) or _survives(value):
        return value
    if name == "train_path":
        return [value]
    return f"/{value}" if _survives(f"/{value}") else None  # the same array


def _survives(text: str) -> bool:
    """Whether jsonargparse, which reads a string of YAML once more as YAML, leaves it a string."""
    try:
        read = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # no YAML, no date
        return True
    if isinstance(read, dict):
        return text in (f"{key}:" for key in read)
    return read is not None and not isinstance(read, list)


def _keys_in(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return [value]
    return value.values() if isinstance(value, Mapping) else value


def _why_left_out(name: str, value: Any) -> str:
    if any("{split}" in key for key in _keys_in(value)):
        return f"{name} is left out: {{split}} in {value!r} would be replaced by a split's name. Rename the array."
    return f"{name} is left out: a configuration cannot name {value!r}. Use Python: {name}={value!r}."


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _choose(layouts: Sequence[ArrayLayout]) -> tuple[list[ArrayLayout], list[ArrayLayout], list[ArrayLayout]]:
    """Input, target (if one stands out) and what else has as many rows."""
    able = [array for array in layouts if not (array.members and names_rows(array.key))]
    # If no row has many values, the largest array has to do.
    x = max(able, key=_size_as_input)
    if words_in(x.key) & TARGET_WORDS:
        instead = [
            a for a in able if a.n_rows == x.n_rows and not words_in(a.key) & TARGET_WORDS and not names_rows(a.key)
        ]
        x = max(instead, key=_size_as_input, default=x)
    others = [array for array in layouts if array.n_rows == x.n_rows and array is not x]
    single = [a for a in others if not a.row_shape and not names_rows(a.key)]
    named = [array for array in single if _names_target(array.key)]
    y = named[:1] or [a for a in single if a.key.casefold() == "y"] or (single if len(single) == 1 else [])
    xs = [x]
    if x.members and not x.row_shape:  # columns of a table
        xs = [a for a in layouts if a.name == x.name and a not in y and not a.row_shape]
        xs = [a for a in xs if not names_rows(a.key)]
    return xs, y, [array for array in others if array not in (*xs, *y)]


def _size_as_input(array: ArrayLayout) -> tuple[bool, int]:
    return bool(array.row_shape), array.n_bytes


def _names_target(key: str) -> bool:
    return any(word in key.casefold() for word in ("label", "target", "class", "/y"))


def _misses_some(key: str, labels: npt.NDArray[Any]) -> bool:
    """Whether these are codes of categories, -1 for none."""
    return key.endswith("/codes") and labels.dtype.kind == "i" and bool((labels < 0).any())


def _why_no_target(key: str) -> str:
    return (
        f"{key!r} is text and left out: y_key={key!r} gives batches a list of str. Store class numbers, or pass it "
        "with a target_transform that makes numbers of it."
    )


def _sparse(layouts: Sequence[ArrayLayout]) -> list[str]:
    """Groups that hold a compressed sparse matrix, as SciPy and AnnData write it."""
    names = {array.key for array in layouts}
    groups = [name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == "indptr"]
    return sorted(group for group in groups if {f"{group}/data", f"{group}/indices"} <= names)


def _why_these(xs: list[ArrayLayout], y: list[ArrayLayout], others: list[ArrayLayout]) -> str:
    target = f", and {y[0].key!r} has one value for each" if y else ""
    more = (
        f" Arrays with as many rows, to take as you need them: {listing((o.key for o in others), 4)}." if others else ""
    )
    if xs[0].members:
        name, inputs = xs[0].name.strip("/"), listing(x.key for x in xs)
        several = " (a tuple)" if len(xs) > 1 else ""
        return f"{name!r} is a table: the input is {inputs}{several}{target}.{more}"
    return f"{xs[0].key!r} is the largest array{target}.{more}"


def group_key_in(columns: Mapping[str, int], n_rows: int, taken: Sequence[str | None]) -> str | None:
    """A column that seems to name patients, recordings and the like.

    Args:
        columns: columns by name, and their rows.
        n_rows: rows that there are.
        taken: arrays that are trained from.
    """
    named = (name for name, length in columns.items() if length == n_rows and name not in taken)
    return next((name for name in named if words_in(name) & GROUP_WORDS), None)


def _module(
    fields: list[ArrayLayout], path: str, n_files: float, held_bytes: int
) -> tuple[str, dict[str, Any], list[str]]:
    """The data module, what it is to be told, and why; for so many times the rows of these arrays.

    Args:
        fields: the arrays.
        path: the first file, for a command.
        n_files: all rows over those of ``fields``.
        held_bytes: what all rows take in memory, in the dtypes they are trained in.
    """
    dear = [array for array in fields if not array.is_contiguous and array.n_bytes * n_files > SHUFFLE_BYTES]
    if not dear:
        placed = all(array.is_contiguous for array in fields)
        why = "single rows are read by position" if placed else "all decoded rows fit shuffle_bytes"
        return "LazyH5DataModule", {}, [f"Rows are read on demand: {why}, so that any order costs the same."]
    # These bring torch, which takes longer to import than a look at most files.
    from ..datasets import room
    from ..loading import FEW_BLOCKS, blocks_mixed, bytes_to_mix

    free = room()
    if free is not None and held_bytes <= free.n_bytes // MAX_OF_ROOM:
        why = f"All rows take {_size(held_bytes)} decoded and fit the memory of this machine: decode them once."
        return "RankCachedH5DataModule", {}, [why]
    block = max(array.rows_per_chunk for array in dear) * sum(array.row_bytes for array in fields)
    if blocks_mixed(SHUFFLE_BYTES, block, 1) >= FEW_BLOCKS:
        why = f"A row costs a block of {_size(block)}; blocks are mixed a window at a time, each decoded once an epoch."
        return "LazyH5DataModule", {}, [why]
    wanted = -(-bytes_to_mix(FEW_BLOCKS, block, 1) >> 20)  # MiB
    if wanted << 20 <= MAX_SHUFFLE:
        why = f"A row costs a block of {_size(block)}: {wanted} MiB of shuffle_bytes mix {FEW_BLOCKS} at a time."
        return "LazyH5DataModule", mix_bytes(wanted << 20), [why]
    rows = max(1, (1 << 20) // max(1, dear[0].row_bytes))
    command = f"lightning-h5 repack {os.path.basename(path)} repacked.h5 --rows-per-chunk {rows} --compression gzip"
    why = f"A row costs a block of {_size(block)}, of which {_size(SHUFFLE_BYTES)} mix few. Repack: {command}"
    return "LazyH5DataModule", {}, [why]


def _why_slow(array: ArrayLayout) -> str:
    return f"{array.key!r} is read through the HDF5 library, one thread at a time, since {fallback_reason(array)}."


def _size(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="MiB", most="GiB")

"""Suggested arrays, data module and settings for a file, with reasons, as a call and as YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from textwrap import wrap
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from ...errors import H5Error, H5ValueError, listing
from ...hdf5 import (
    AXIS,
    COORDINATES,
    FAULTS,
    GROUP_WORDS,
    WEIGHTS,
    ArrayLayout,
    OpenOptions,
    find_array,
    keys_in,
    kind_of,
    layout_of,
    matrices_among,
    names_rows,
    open_h5,
    words_in,
)
from ...memory import FREE_SHARE, available_memory, page_cache_memory
from ...natural_order import natural_order
from ...readers import open_reader
from ...sizes import bytes_text, parse_bytes
from .contents import CODES_OF_PANDAS, TIMES_OF_PANDAS, Contents
from .dates import are_dates

SHUFFLE_BYTES = parse_bytes("512 MiB", "shuffle_bytes")
"""Bytes that the data modules mix at a time by default."""

MEMORY_SHARE = 2
"""The divisor of free memory for cached rows; the rest of the memory is for the model and its batches."""

MAX_SHUFFLE = 4 << 30
"""The largest buffer to suggest for mixing rows, before a copy of the file is suggested instead."""

MAX_BATCH, MAX_BATCH_BYTES, MIN_STEPS = 64, 64 << 20, 4
MIN_SIDE = 8  # pixels of an image
MIN_ROWS = 10  # minimum number of rows to use a tenth of them for validation

FRACTIONS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # for validation; the first with all classes in both splits is used

MAX_CLASSES = 0.2  # share of the rows: more distinct numbers are not classes

TARGET_WORDS = {word.removesuffix("s") for word in ("label", "target", "mask", "y", "class", "classes")}
"""Words in the name of an array that is not the input if there is another array, as ``words_in`` returns them."""

TIMES = {"time", "t", "timestamp", "datetime"}
"""Words in the name of a coordinate of time."""

NO_TARGET_WORDS = {"weight", "qweight", "kweight", "map"}
"""Words in the name of a column that is not a target, even if it is the only column beside an input."""

HEADER_WORDS = {"header", "metadata"}
"""Words in the name of a group with descriptions of data."""

MAX_SETTING = 64  # maximum count of numbers in a setting

MAX_COLUMN_ROWS = 1_000_000
"""The longest column that is read for a suggestion."""

OPTION_NAMES = ("split", "shuffle", "files", "segments", "window", "table")
"""Arguments that accept option objects."""

Column = npt.NDArray[Any] | None


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """The average cost of a sample that is a window or a segment.

    Attributes:
        n_samples: number of samples.
        n_segments: number of segments; 0 if rows are samples.
        n_bytes: bytes of a sample as stored.
        n_chunks: number of chunks with a part of the sample.
        bytes_decoded: bytes that reading one sample decodes, with nothing kept in memory.
        bytes_decoded_in_chunk_order: bytes for each sample of an epoch that decodes each chunk once.
    """

    n_samples: int
    n_segments: int
    n_bytes: int
    n_chunks: float
    bytes_decoded: int
    bytes_decoded_in_chunk_order: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The data module and settings for a file.

    Attributes:
        datamodule: its name; None if nothing in the file can be trained from.
        settings: its arguments.
        x_keys: the arrays used as input.
        y_keys: the array used as target, if there is one.
        cached_bytes: memory for all rows of the input and target in the dtypes of ``settings``, divided over ranks.
        reasons: a sentence for each choice.
        comments: sentences for the configuration.
        integrity: the lowest integrity level of input and target, 0 to 3; None without arrays.
        cost: the cost of a sample; None if rows are samples.
        other: the advice if the first reason is wrong; None if it is likely right.
    """

    datamodule: str | None
    settings: dict[str, Any]
    x_keys: tuple[str, ...] = ()
    y_keys: tuple[str, ...] = ()
    cached_bytes: int = 0
    reasons: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    integrity: int | None = None
    cost: SampleCost | None = None
    other: Advice | None = None

    @property
    def python(self) -> str:
        """The call of the data module."""
        return _python_of(self.datamodule or "", self.settings)

    @property
    def yaml(self) -> str:
        """The ``data`` part of a configuration."""
        has_pattern = not any("{split}" in key for key in (*self.x_keys, *self.y_keys))
        return yaml_of(self.datamodule or "", self.settings, self.comments, has_pattern=has_pattern)


def advise(path: str | list[str], contents: Contents, *, files: Sequence[str], n_rows: int | None = None) -> Advice:
    """Return settings for one file, or for several files with the same arrays, and the free memory of this machine.

    Args:
        path: the file, or the files in the form of the argument ``train_path``.
        contents: the contents of one file.
        files: paths of files to read columns from.
        n_rows: rows of all files; None for a single file.
    """
    layouts: Sequence[ArrayLayout] = list(contents.layouts.values())
    sparse = sorted(matrices_among([array.key for array in layouts]))
    layouts = [array for array in layouts if array.key.rpartition("/")[0] not in sparse]
    scales = {array.name for array in contents.arrays if array.structure in COORDINATES}
    layouts = [array for array in layouts if array.name.strip("/") not in scales]
    why_pandas = _why_pandas(contents.pandas)
    layouts = [array for array in layouts if contents.pandas.get(array.key) != TIMES_OF_PANDAS]
    # The same code may be another category in another file.
    codes = {key for key, what in contents.pandas.items() if what == CODES_OF_PANDAS}
    layouts = [a for a in layouts if a.key not in codes or (len(files) == 1 and _names_target(a.key))]
    if contents.software == "NWB":
        layouts = [array for array in layouts if not array.key.startswith("general/")]
    if len({array.name for array in layouts}) > 1:
        layouts = [array for array in layouts if not _is_setting(array)]
    if all(array.key in codes or (array.members and names_rows(array.key)) for array in layouts):
        unreadable = (a.problem for a in contents.arrays if a.problem and a.storage is None and a.filters)
        reason = next(unreadable, "The file has no array of numbers with rows to train from.")
        if not layouts and scales:
            reason = f"The only arrays of numbers are coordinates: {listing(sorted(scales), 6)}."
        if any(array.structure == WEIGHTS for array in contents.arrays):
            reason = "The file holds weights of a Keras model: there are no samples in it. Name another file."
        return Advice(datamodule=None, settings={}, reasons=(reason, *why_pandas))
    largest = _largest_input([array for array in layouts if array.key not in codes])
    classes, other_texts = _text_targets(contents, largest.n_rows, files)
    x, y, other_arrays = _choose_arrays(largest, layouts, classes, codes)
    comments = [] if y else [_why_no_target(array.key) for array in other_texts]
    if len(x) == 1 and (why_none := _why_no_samples(x[0], other_arrays, len(contents.layouts))) is not None:
        return Advice(datamodule=None, settings={}, reasons=(why_none,))
    has_axes = any(array.structure == AXIS for array in contents.arrays)  # such files name their signal
    if y and not _names_target(y[0].key) and (has_axes or _may_be_places(read_column(files, y[0].key))):
        other_arrays, y = [*other_arrays, *y], []
    if y and _are_dates(files, y[0].key):
        other_arrays, y = [*other_arrays, *y], []
    are_codes = y and (y[0].key.endswith("/codes") or y[0].key in codes)
    classes_of_rows = read_column(files, y[0].key) if are_codes else None
    if classes_of_rows is not None and classes_of_rows.dtype.kind == "i" and (classes_of_rows < 0).any():
        other_arrays, y = [*other_arrays, *y], []  # AnnData and pandas use -1 for missing values, which losses reject
    if x[0].packing is not None and x[0].packing.unclear is not None:  # for the user to decode with
        group, names = x[0].key.rpartition("/")[0], [name for name, _ in x[0].packing.attributes]
        limits = [array for array in other_arrays if array.key in [f"{group}/{name}".strip("/") for name in names]]
        x, other_arrays = [*x, *limits], [array for array in other_arrays if array not in limits]
    rows = x[0].n_rows if n_rows is None else n_rows
    x_keys, y_keys = [layout.key for layout in x], [layout.key for layout in y]
    group_key = group_key_in(contents.columns, x[0].n_rows, [*x_keys, *y_keys])
    splits = _splits_beside([*x_keys, *y_keys], {**contents.layouts, **contents.texts})
    choices, why = suggest(x, y, rows, group_key, files, has_val="val" in splits)
    row_bytes = trained_row_bytes(x, y, choices)
    name, module_settings, why_module = _choose_module([*x, *y], rows / x[0].n_rows, row_bytes * rows)
    header = {array.key.rpartition("/")[0] for array in layouts if _is_in_header(array.key)}
    is_left_out = header and not any(_is_in_header(key) for key in x_keys)
    reasons = [
        _why_these(x, y, other_arrays),
        *why_pandas,
        *_why_permute(x),
        *([f"Arrays in {listing(sorted(header), 2)} are not input, because of the name."] if is_left_out else []),
        *why,
        *(f"{group!r} is a sparse matrix: its rows are samples with x_key={group!r}." for group in sparse),
        *comments,
        why_module,
    ]
    keys: dict[str, Any] = {"x_key": x_keys[0] if len(x_keys) == 1 else x_keys}
    keys |= {"y_key": y_keys[0]} if y_keys else {}
    if splits:
        keys = {argument: value.replace("train", "{split}", 1) for argument, value in keys.items()}
        reasons.insert(1, f"{{split}} stands for train, {' and '.join(splits)}: the file has arrays for each.")
        if "decode" in choices:
            choices["decode"] = {key.replace("train", "{split}", 1): how for key, how in choices["decode"].items()}
    return Advice(
        datamodule=name,
        settings={"train_path": path, **keys, **choices, **module_settings},
        x_keys=tuple(x_keys),
        y_keys=tuple(y_keys),
        cached_bytes=rows * row_bytes,
        reasons=tuple(reasons),
        comments=tuple(comments),
        integrity=min(layout.integrity for layout in (*x, *y)),
    )


def _splits_beside(keys: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the other splits, val or test, whose names in place of ``train`` turn all keys into arrays of the file."""
    if not all(len(re.findall(r"(?<![a-zA-Z])train(?![a-zA-Z])", key)) == 1 for key in keys):
        return []
    return [s for s in ("val", "test") if all(key.replace("train", s, 1) in names for key in keys)]


def suggest(
    x: Sequence[ArrayLayout],
    y: Sequence[ArrayLayout],
    n_rows: int,
    group_key: str | None,
    files: Sequence[str],
    *,
    has_val: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Return dtypes, split and batch size for the arrays, as arguments of a data module, and the reasons.

    Args:
        x: the input's arrays.
        y: the target's arrays.
        n_rows: rows of all files.
        group_key: an array that seems to name groups, if any.
        files: paths of files to read columns from.
        has_val: whether the file has validation rows of its own, so that the training rows are not split.
    """
    y_key = y[0].key if len(y) == 1 and math.prod(y[0].row_shape) == 1 else None
    labels, groups = (None if key is None else read_column(files, key) for key in (y_key, group_key))
    labels = _class_numbers(labels)
    settings, why_dtypes = suggest_dtypes(x, y, labels)
    if y_key is not None and len(y[0].row_shape) == 1:
        settings["select"] = {y_key: {1: 0}}
        why_dtypes.append(f"select: {y_key!r} has rows of one value, {y[0].row_shape}; losses take the value.")
    is_column = y_key is not None and not y[0].row_shape
    split: dict[str, Any] = {}
    why_split: list[str] = []
    if not has_val:
        split, why_split = suggest_split(n_rows, y_key, labels if is_column else None, group_key, groups)
    if split:
        settings["split"] = split if len(split) > 1 else split["val_fraction"]
    n_train = round(n_rows * (1 - split.get("val_fraction", 0)))
    row_bytes = trained_row_bytes(x, y, settings)
    return settings | {"batch_size": batch_size_for(n_train, row_bytes)}, [*why_dtypes, *why_split]


def batch_size_for(n_samples: int, sample_bytes: int) -> int:
    """Return the suggested batch size: a power of two that leaves an epoch some steps, and a batch small."""
    limit = max(1, min(MAX_BATCH, n_samples // MIN_STEPS, MAX_BATCH_BYTES // max(1, sample_bytes)))
    return 1 << (limit.bit_length() - 1)


def read_column(files: Sequence[str], key: str) -> npt.NDArray[Any] | None:
    """Return the values of a column of all files; None if it cannot be read, or is too long for a suggestion.

    Args:
        files: the files.
        key: the column, or a member of a table.
    """
    parts, n_rows = [], 0
    try:
        for path in files:
            with open_h5(path) as file:
                layout = layout_of(find_array(file, key), path, key)
            n_rows += layout.n_rows
            is_line = layout.n_rows == 1 and len(layout.row_shape) == 1  # as MATLAB stores a column
            if not (layout.row_shape in ((), (1,)) or is_line) or n_rows > MAX_COLUMN_ROWS:
                return None
            parts.append(np.asarray(open_reader(layout, OpenOptions()).read(np.arange(layout.n_rows))).reshape(-1))
    except (H5Error, *FAULTS):
        return None
    return np.concatenate(parts) if parts else None


def suggest_dtypes(
    x: Sequence[ArrayLayout], y: Sequence[ArrayLayout], labels: Column
) -> tuple[dict[str, Any], list[str]]:
    """Return dtypes for a model in float32, if the arrays need them, and a sentence for each."""
    dtypes: dict[str, Any] = {}
    reasons = []
    if inputs := _to_cast(x, "biuf", "float32"):
        dtypes["x_dtype"] = "float32"
        names = ", ".join(dict.fromkeys(str(array.dtype) for array in inputs))
        text = f"x_dtype: float32, since the input is stored as {names} and most models compute in float32"
        if any(array.dtype == np.uint8 for array in inputs):
            text += " (values stay 0 to 255: scale them, or see `lightning-h5 stats`)"
        elif any(array.dtype.kind in "iu" for array in inputs):
            text += " (leave it out if they are indices, as for an embedding)"
        reasons.append(f"{text}.")
    decode: dict[str, str] = {}
    for target in y:
        if kind_of(target.dtype) == "text":
            decode[target.key] = "category"
            reasons.append(f"decode: {target.key!r} is text, and 'category' numbers its distinct values as classes.")
    labels = _class_numbers(labels)
    fits_int64 = labels is None or not (labels > np.iinfo("i8").max).any()
    if (classes := _classes_as_floats(labels)) is not None and _to_cast(y, "f", "int64"):
        dtypes["y_dtype"] = "int64"
        first = int(classes[0])
        shift = f" (from {first}: torch counts from 0, so subtract {first} in target_transform)" if first else ""
        reasons.append(
            f"y_dtype: int64, since the target's values are the {len(classes)} whole numbers {first} to "
            f"{int(classes[-1])}, which seem to be classes{shift}. If they are not, pass float32."
        )
        y = []
    for kinds, dtype, use in (("biu", "int64", "torch needs class numbers"), ("f", "float32", "losses compare")):
        if (targets := _to_cast(y, kinds, dtype)) and (dtype == "float32" or fits_int64):
            dtypes["y_dtype"] = dtype
            reasons.append(f"y_dtype: {dtype}, since the target is stored as {targets[0].dtype} and {use} in {dtype}.")
    packed_arrays = [array for array in (*x, *y) if array.packing is not None and array.packing.policy != "keep"]
    refused_keys = []
    for array in packed_arrays:
        packing, kind = array.packing, "floats" if array.dtype.kind == "f" else "integers"
        if packing is None:
            continue
        if packing.unclear is not None and packing.policy == "refuse":
            argument, n_arrays = ("y_dtype", len(y)) if array in y else ("x_dtype", len(x))
            dtypes[argument] = str(array.dtype) if n_arrays == 1 else {array.key: str(array.dtype)}
            reasons.append(f"{array.key!r} holds packed {kind}, which are not decoded. {packing.how(array.key)}.")
            continue
        if packing.policy == "refuse":
            refused_keys.append(array.key)
        reasons.append(f"{array.key!r} holds packed {kind}, which are decoded ({packing.formula}).")
    decode |= dict.fromkeys(refused_keys, "cf")
    return {**dtypes, **({"decode": decode} if decode else {})}, reasons


def _class_numbers(labels: Column) -> Column:
    """Return a column with numbers in place of text."""
    if labels is None or labels.dtype.kind in "biufc":
        return labels
    return np.unique(labels.astype(str), return_inverse=True)[1]


def _classes_as_floats(labels: Column) -> Column:
    """Return the distinct values of a column of floats, if they are numbers of classes: 0, 1, 2, ..., or from 1."""
    if labels is None or labels.dtype.kind != "f" or not len(labels):
        return None
    values = np.unique(labels)
    is_few = 2 <= len(values) <= MAX_CLASSES * len(labels)
    return values if is_few and values[0] in (0, 1) and (np.diff(values) == 1).all() else None


def _to_cast(arrays: Sequence[ArrayLayout], kinds: str, dtype: str) -> list[ArrayLayout]:
    """Return the arrays to cast; none if an array has a dtype of another kind, since one dtype applies to all."""
    if not all(kind_of(a.dtype) == "number" and a.dtype.kind in kinds for a in arrays):
        return []
    if any(a.packing is not None and a.packing.policy != "keep" for a in arrays):
        return []
    return [array for array in arrays if array.dtype != dtype]


def trained_row_bytes(x: Sequence[ArrayLayout], y: Sequence[ArrayLayout], settings: Mapping[str, Any]) -> int:
    """Return the bytes of a row of input and target, as stored or in the dtypes of ``settings``; the larger of both."""
    n_bytes = 0
    for arrays, dtype in ((x, settings.get("x_dtype")), (y, settings.get("y_dtype"))):
        for array in arrays:
            target_dtype = dtype.get(array.key) if isinstance(dtype, Mapping) else dtype
            itemsize = 0 if target_dtype is None else np.dtype(target_dtype).itemsize
            n_bytes += max(array.row_bytes, math.prod(array.row_shape) * itemsize)
    return n_bytes


def suggest_split(
    n_rows: int, y_key: str | None, labels: Column, group_key: str | None, groups: Column
) -> tuple[dict[str, Any], list[str]]:
    """Return the split of validation rows: by group, by class, with a share that leaves rows on both sides."""
    if n_rows < MIN_ROWS:
        there_are = "There is 1 row" if n_rows == 1 else f"There are {n_rows} rows"
        return {}, [f"{there_are}, too few to hold some out for validation."]
    reasons = []
    if groups is not None and not _are_groups(groups):
        reasons.append(f"{group_key!r} cannot be group_key: its values do not form groups of rows.")
        group_key = groups = None
    classes = None
    if labels is not None and labels.dtype.kind in "biu" and (groups is not None or not group_key):
        classes = labels if 2 <= len(np.unique(labels)) <= MAX_CLASSES * len(labels) else None
    fraction, has_all = _fraction(n_rows, groups, classes)
    split: dict[str, Any] = {"val_fraction": fraction}
    if group_key is not None:
        split["group_key"] = group_key
        reasons.append(
            f"group_key: {group_key}, which seems to identify groups, by its name: all rows of one {group_key!r} are "
            "in training, or all are in validation."
        )
    if classes is not None:
        split["stratify_key"] = y_key
        limit = "" if has_all else " as far as possible"
        reasons.append(f"stratify_key: {y_key}, so that training and validation have rows of all classes{limit}.")
    return split, reasons


def _are_groups(groups: npt.NDArray[Any]) -> bool:
    """Return whether values can be compared, and some but not all rows have equal values."""
    from ...order import group_split  # imports torch, which takes longer than inspecting most files

    with suppress(H5ValueError):
        group_split(groups, [0.5, 0.5])
        n_groups = len(np.unique(groups.astype(str) if groups.dtype.kind == "O" else groups))
        return 1 < n_groups < len(groups)
    return False


def _fraction(n_rows: int, groups: Column, classes: Column) -> tuple[float, bool]:
    """Return the share to validate on, and whether both sides have all classes with it."""
    if groups is None and classes is None:
        return FRACTIONS[0], True
    from ...order import group_split

    codes, n_classes = np.zeros(n_rows, dtype=np.int64), 1
    if classes is not None:
        names, codes = np.unique(classes, return_inverse=True)
        n_classes = len(names)
    usable_fractions = []
    for fraction in FRACTIONS:
        parts = group_split(n_rows if groups is None else groups, [1 - fraction, fraction], labels=codes)
        if all(map(len, parts)):
            usable_fractions.append(fraction)
            if all(np.bincount(codes[rows], minlength=n_classes).all() for rows in parts):
                return fraction, True
            if np.bincount(codes).min() == 1:
                break  # a class with one row is on one side with any fraction
    return min(usable_fractions, default=FRACTIONS[0]), False


def group_key_in(columns: Mapping[str, int], n_rows: int, used_keys: Sequence[str]) -> str | None:
    """Return the first column with ``n_rows`` rows that seems to identify patients, recordings or similar groups."""
    names = (name for name, length in columns.items() if length == n_rows and name not in used_keys)
    return next((name for name in names if words_in(name) & GROUP_WORDS), None)


def _largest_input(layouts: Sequence[ArrayLayout]) -> ArrayLayout:
    """Return the input: the largest array, or member of a table, that is not a target."""

    def size_as_input(array: ArrayLayout) -> tuple[bool, int, int]:
        return bool(array.row_shape), array.n_rows * math.prod(array.row_shape), array.n_bytes

    candidates = [array for array in layouts if not (array.members and names_rows(array.key))]
    candidates = [array for array in candidates if not _is_in_header(array.key)] or candidates
    x = max(candidates, key=size_as_input)  # if no row has many values, take the largest array
    if _is_called_target(x.key):
        alternatives = [a for a in candidates if a.n_rows == x.n_rows and not _is_called_target(a.key)]
        x = max((a for a in alternatives if not names_rows(a.key)), key=size_as_input, default=x)
    return x


def _choose_arrays(
    x: ArrayLayout, layouts: Sequence[ArrayLayout], text: list[ArrayLayout], codes: Collection[str]
) -> tuple[list[ArrayLayout], list[ArrayLayout], list[ArrayLayout]]:
    """Return input, target (if one stands out), and other arrays with the same number of rows.

    Args:
        x: the input, or one of its members.
        layouts: all arrays of numbers.
        text: columns of text that may be the target.
        codes: keys of category codes, which may be targets and are not input.
    """
    other_arrays = [array for array in layouts if array.n_rows == x.n_rows and array is not x]
    columns = [a for a in other_arrays if not a.row_shape and not names_rows(a.key)]
    columns += [a for a in other_arrays if a.row_shape == (1,) and _is_called_target(a.key)]  # as MATLAB stores them
    keys = {array.key for array in columns if array is not x}
    columns = [array for array in columns if array.n_rows > 1 and not _is_coordinate_beside(array.key, keys)]
    named_targets = [array for array in columns if _names_target(array.key)]
    is_clear = len(columns) == 1 and not codes and x.n_rows >= MIN_ROWS
    is_clear = is_clear and not words_in(columns[0].key) & NO_TARGET_WORDS
    y = (named_targets or text)[:1] or (columns if is_clear else [])
    xs = [x]
    if x.members and not x.row_shape:  # columns of a table
        xs = [a for a in layouts if a.name == x.name and a not in y and not a.row_shape and not names_rows(a.key)]
        xs = [a for a in xs if a.key not in codes]
    keys = {array.key for array in (*xs, *y)}
    return xs, y, [array for array in other_arrays if array.key not in keys]


def _is_called_target(key: str) -> bool:
    return any(words_in(part) & TARGET_WORDS for part in key.split("/"))


def _names_target(key: str) -> bool:
    return _is_called_target(key) or any(word in key.casefold() for word in ("label", "target", "class"))


def _is_setting(array: ArrayLayout) -> bool:
    """Return whether an array has a few numbers in one row or column, as typical for settings beside the data."""
    n_values = math.prod(array.row_shape)
    return (
        len(array.row_shape) < 2
        and n_values <= MAX_SETTING
        and (array.n_rows == 1 or (array.row_shape == (1,) and array.n_rows < MIN_ROWS))
    )


def _why_no_samples(x: ArrayLayout, other_arrays: Sequence[ArrayLayout], n_arrays: int) -> str | None:
    """Return the reason why the largest array, and arrays of its length, are not samples; None if they may be."""
    if _is_time(x) and all(_is_time(array) for array in other_arrays):
        times = [x.key, *(array.key for array in other_arrays)]
        has = "has" if len(times) == 1 else "have"
        return f"The only arrays are coordinates: {listing(times, 6)} {has} times, by the name."
    if n_arrays > 1 and not other_arrays and x.n_rows * math.prod(x.row_shape) < MIN_ROWS:
        return f"{x.key!r}, the largest array, has few numbers: it seems to be a setting."
    return None


def _is_in_header(key: str) -> bool:
    return _are_in_header(key.rpartition("/")[0])


@lru_cache(maxsize=16)  # the arrays of a group follow each other
def _are_in_header(group: str) -> bool:
    return any(words_in(part) & HEADER_WORDS for part in group.split("/"))


def _is_time(array: ArrayLayout) -> bool:
    return math.prod(array.row_shape) == 1 and bool(words_in(array.key) & TIMES)


def _is_coordinate_beside(key: str, keys: Collection[str]) -> bool:
    """Return whether x, y or z in the name of a column is a coordinate: there are columns named alike with x and y."""
    group, slash, name = key.rpartition("/")
    match = re.search(r"(?<![a-zA-Z])[xyz](?![a-zA-Z])", name, re.IGNORECASE)
    if match is None:
        return False
    letters = "XY" if match[0].isupper() else "xy"
    return all(f"{group}{slash}{name[: match.start()]}{letter}{name[match.end() :]}" in keys for letter in letters)


def _may_be_places(values: Column) -> bool:
    """Return whether the values of a column may be times, offsets or row numbers: none is less than the one before.

    Classes that are sorted ascend, too, and are few.
    """
    if values is None:
        return True
    ascends = values.dtype.kind in "iuf" and bool((values[1:] >= values[:-1]).all())
    return ascends and len(np.unique(values)) > MAX_CLASSES * len(values)


def _text_targets(contents: Contents, n_rows: int, files: Sequence[str]) -> tuple[list[ArrayLayout], list[ArrayLayout]]:
    """Return the column of text that is a target by its name and has classes as values, or the one without classes."""
    keys = [key for key in contents.texts if contents.columns[key] == n_rows and _names_target(key)]
    if (key := next((key for key in keys if not _are_dates(files, key)), None)) is None:
        return [], []
    values, text = read_column(files, key), [contents.texts[key]]
    return (text, []) if values is None or _are_classes(values) else ([], text)


def _are_classes(values: npt.NDArray[Any]) -> bool:
    """Return whether values repeat as classes do."""
    return 2 <= len(np.unique(values.astype(str))) <= MAX_CLASSES * len(values)


def _are_dates(files: Sequence[str], key: str) -> bool:
    values = read_column(files[:1], key)
    return values is not None and values.dtype.kind in "OSUiu" and are_dates(values.tolist())


def _why_no_target(key: str) -> str:
    return (
        f"{key!r} is text and left out, since its values are not a few classes. With y_key={key!r}, batches have a "
        f"list of str; with decode={{{key!r}: 'category'}} as well, a number for each distinct text."
    )


def _why_these(x: Sequence[ArrayLayout], y: Sequence[ArrayLayout], other_arrays: Sequence[ArrayLayout]) -> str:
    target = ""
    if y:
        is_named = _names_target(y[0].key)
        evidence = " and is a target by its name" if is_named else ", as no other array does"
        target = f", and {y[0].key!r} has one value for each{evidence}"
    hints = ""
    if other_arrays:
        hints = f" Other arrays with the same number of rows: {listing((array.key for array in other_arrays), 4)}."
    if channels := _channels(x, other_arrays):
        group, *_ = channels[0].rpartition("/")
        names = ", ".join(map(repr, channels[:3])) + (", ..." if len(channels) > 3 else "")
        hints += f" x_key={{{group.rpartition('/')[2]!r}: [{names}]}} stacks the arrays of {group!r} into one field."
    if x[0].members:
        name, inputs = x[0].name.strip("/"), listing(layout.key for layout in x)
        form = " (a tuple)" if len(x) > 1 else ""
        if len(x) > 1 and not any(layout.row_shape for layout in x):
            names = ", ".join(repr(layout.key) for layout in x[:3]) + (", ..." if len(x) > 3 else "")
            hints += (
                f" x_key={{{name.rpartition('/')[2]!r}: [{names}]}} makes one tensor of them, with a column for each."
            )
        return f"{name!r} is a table: the input is {inputs}{form}{target}.{hints}"
    no_targets = [array.key for array in other_arrays if words_in(array.key) & NO_TARGET_WORDS and not array.row_shape]
    if no_targets and not y:
        by, is_not = ("its name", "is not a target") if len(no_targets) == 1 else ("their names", "are not targets")
        hints += f" By {by}, {listing(no_targets, 4)} {is_not}."
    is_larger = [array for array in other_arrays if array.n_bytes > x[0].n_bytes and _is_called_target(array.key)]
    largest = "is the largest array" if not is_larger else "is, by the names, the largest array that is not a target"
    return f"{x[0].key!r} {largest}{target}.{hints}"


def _why_pandas(marked: Mapping[str, str]) -> list[str]:
    """Return a sentence for dates and times, and one for category codes, which are not input."""
    sentences = []
    for what in (TIMES_OF_PANDAS, CODES_OF_PANDAS):
        if keys := [key for key, key_what in marked.items() if key_what == what]:
            verb, end = ("holds", "is not an input") if len(keys) == 1 else ("hold", "are not inputs")
            sentences.append(f"{listing(keys, 4)} {verb} {what}, as marked by pandas, and {end}.")
    return sentences


def _why_permute(x: Sequence[ArrayLayout]) -> list[str]:
    """Return a sentence on images with channels last, the usual order outside of torch."""
    *pixels, n_channels = x[0].row_shape or (0,)
    if (
        len(x) > 1
        or x[0].dtype != np.uint8
        or len(pixels) != 2
        or n_channels not in (1, 3, 4)
        or min(pixels) < MIN_SIDE
    ):
        return []
    why = f"Its rows {x[0].row_shape} have the channels last, but torch's layers expect them first: call"
    return [f"{why} x.permute(2, 0, 1) in transform."]


def _channels(x: Sequence[ArrayLayout], other_arrays: Sequence[ArrayLayout]) -> list[str]:
    """Return the names of the input and of all columns in its group, if each looks like one channel."""
    group = x[0].key.rpartition("/")[0]
    group_arrays = [x[0], *(array for array in other_arrays if array.key.rpartition("/")[0] == group)]
    are_alike = all(not array.row_shape and not array.members and array.dtype == x[0].dtype for array in group_arrays)
    is_signal = group and len(x) == 1 and len(group_arrays) > 1 and x[0].dtype.kind in "iuf"
    return sorted((array.key for array in group_arrays), key=natural_order) if is_signal and are_alike else []


def _choose_module(fields: Sequence[ArrayLayout], n_files: float, held_bytes: int) -> tuple[str, dict[str, Any], str]:
    """Return the data module, further settings for it, and the reason.

    There are ``n_files`` times the rows of ``fields``, with ``held_bytes`` in the dtypes of training.
    """
    lazy = "LazyH5DataModule"
    costly_fields = [array for array in fields if not array.is_contiguous and array.n_bytes * n_files > SHUFFLE_BYTES]
    if not costly_fields:
        why = "all decoded rows fit shuffle.buffer"
        if all(array.is_contiguous for array in fields):
            n_bytes, memory = round(n_files * sum(array.n_bytes for array in fields)), page_cache_memory()
            if memory is not None and n_bytes > FREE_SHARE * memory:
                why = (
                    f"All rows have {_size_text(n_bytes)}, more than {FREE_SHARE:.0%} of this machine's free memory "
                    f"({_size_text(memory)}): the default order mixes runs of rows, which a disk reads ten times as "
                    "fast as single rows."
                )
                return lazy, {}, why
            why = "single rows are read by position"
        why = (
            f"Rows are read on demand: {why}, so that any order costs the same. `lightning-h5 bench` measures whether "
            "RankCachedH5DataModule, which loads all rows first, is faster."
        )
        return lazy, {}, why
    # These import torch, which takes longer than inspecting most files.
    from ...loading import FEW_BLOCKS, blocks_mixed, bytes_to_mix

    memory_left = available_memory()
    if memory_left is not None and held_bytes <= memory_left.n_bytes // MEMORY_SHARE:
        why = f"All rows have {_size_text(held_bytes)} decoded and fit the memory of this machine: decode them once."
        return "RankCachedH5DataModule", {}, why
    block = max(array.rows_per_chunk for array in costly_fields) * sum(array.row_bytes for array in fields)
    if blocks_mixed(SHUFFLE_BYTES, block, 1) >= FEW_BLOCKS:
        costs = f"Reading a row decodes a block of {_size_text(block)}"
        why = f"{costs}; several blocks are mixed at a time, so that each is decoded once per epoch."
        return lazy, {}, why
    n_mib = -(-bytes_to_mix(FEW_BLOCKS, block, 1) >> 20)  # MiB
    if n_mib << 20 <= MAX_SHUFFLE:
        why = (
            f"Reading a row decodes a block of {_size_text(block)}: shuffle.buffer of {n_mib} MiB mixes {FEW_BLOCKS} "
            "blocks at a time."
        )
        return lazy, {"shuffle": {"buffer": f"{n_mib} MiB"}}, why
    rows = max(1, (1 << 20) // max(1, costly_fields[0].row_bytes))
    why = f"Reading a row decodes a block of {_size_text(block)}, so shuffle.buffer mixes only a few at a time."
    return lazy, {}, f"{why} Repack: lightning-h5 repack IN OUT --rows-per-chunk {rows} --compression gzip"


def _size_text(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="MiB", most="GiB")


def _python_of(datamodule: str, settings: Mapping[str, Any]) -> str:
    """Return the call of a data module, a line for each argument."""
    return "\n".join([f"{datamodule}(", *(f"    {name}={value!r}," for name, value in settings.items()), ")"])


def yaml_of(datamodule: str, settings: Mapping[str, Any], comments: Sequence[str], *, has_pattern: bool = False) -> str:
    """Return the ``data`` part of a configuration.

    Args:
        datamodule: the class.
        settings: its arguments.
        comments: sentences above it.
        has_pattern: ``{split}`` in a key stands for the name of a split, and is not part of an array's name.
    """
    comments = [*comments]
    forms = _yaml_forms(settings, comments, has_pattern=has_pattern)
    data = {"data": {"class_path": datamodule, "init_args": forms}}
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    printable = ("".join(c if c.isprintable() else " " for c in comment) for comment in comments)
    lines = [line for comment in printable for line in wrap(comment, 78, break_long_words=False)]
    return "\n".join([*(f"# {line}" for line in lines), text.rstrip()])


def _yaml_forms(settings: Mapping[str, Any], comments: list[str], *, has_pattern: bool = False) -> dict[str, Any]:
    """Return settings in a form that a configuration supports; add a comment for each unsupported one."""
    forms: dict[str, Any] = {}
    for name, value in settings.items():
        if name in OPTION_NAMES and isinstance(value, Mapping):
            if fields := _yaml_forms(value, comments):
                forms[name] = fields
        elif name.endswith("_key") and not has_pattern and any("{split}" in key for key in keys_in(value)):
            comments.append(
                f"{name} is left out: {{split}} in {value!r} would be replaced by a split's name. Rename the array."
            )
        elif not isinstance(value, str) or _stays_text(value):
            forms[name] = value
        elif name == "train_path":
            forms[name] = [value]
        elif _stays_text(f"/{value}"):
            forms[name] = f"/{value}"  # the same array
        else:
            comments.append(f"{name} is left out: a configuration cannot name {value!r}. Use Python: {name}={value!r}.")
    return forms


def _stays_text(text: str) -> bool:
    """Return whether jsonargparse, which reads a string of YAML once more as YAML, leaves it a string."""
    try:
        read = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # neither YAML nor a date
        return True
    if isinstance(read, dict):
        return text in (f"{key}:" for key in read)
    return read is not None and not isinstance(read, list)


def _quoted(dumper: Any, text: str) -> Any:
    """Write a string, with quotes if YAML 1.2 would read a number: PyYAML leaves 1e3 plain."""
    style = None
    for read in (float, lambda digits: int(digits, base=0)):
        with suppress(ValueError):
            read(text.replace("_", ""))
            style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper: Any = type("_Dumper", (yaml.SafeDumper,), {})
_Dumper.add_representer(str, _quoted)

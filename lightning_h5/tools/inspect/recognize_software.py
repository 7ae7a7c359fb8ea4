"""Recognize samples in files of known programs, by the marks in the files: one rule for each program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import listing
from ...hdf5 import GROUP_WORDS, OLD_CATEGORIES, matrices_among, words_in
from .recognize_parts import MAX_STEPS, TARGETS, AlikeParts, FileLooks, Guess, Look, Reader, Settings, names_of

__all__ = ["recognize_software", "sparse_rows", "split_in_order"]

PIXELS = "pixels/count"  # of cooler

MIN_ROWS = 10  # minimum number of rows for a validation split
MIN_SERIES = 50  # minimum number of steps for a validation split in time


def recognize_software(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Return guesses for files with the marks of a program; empty without a rule for the program."""
    rule = RULES.get(files[0].software or "")
    return [] if rule is None else rule(files, reader)


def sparse_rows(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Return a guess for the rows of a sparse matrix in the format of AnnData and Cell Ranger."""
    arrays = files[0].arrays
    matrices = matrices_among(arrays)
    groups = sorted(matrices)
    main = next((group for group in groups if group in ("X", "matrix")), None)
    if main is None:
        sizes = {group: (arrays[f"{group}/data"].n_values, arrays[matrices[group]].n_values) for group in groups}
        main = max(groups, key=lambda group: sizes[group], default=None)
        if main is None or any(look.n_values > sizes[main][0] for look in arrays.values() if len(look.shape) > 1):
            return []
    n_rows = arrays[matrices[main]].shape[0] - 1
    why = f"{main!r} is a sparse matrix: a row is a sample. It becomes dense in a batch, or remains sparse with "
    why += f"decode={{{main!r}: 'csr'}}."
    return [_cells(files, main, n_rows, why, reader)]


def _anndata(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """X is a dense matrix with a row for each cell (see ``sparse_rows`` for sparse ones)."""
    look = files[0].arrays.get("X")
    if look is None or len(look.shape) != 2:
        return []
    return [_cells(files, "X", look.shape[0], "'X' is the matrix of an AnnData file: a row is a cell.", reader)]


def _cells(files: Sequence[FileLooks], main: str, n_rows: int, why: str, reader: Reader) -> Guess:
    """Return a guess for rows of a matrix, with a column of categories as target, and a column to split by."""
    arrays = files[0].arrays
    columns = [name for name in arrays if re.fullmatch(r"obs/[^/]+/codes", name)]
    columns += [name for name in arrays if f"obs/{OLD_CATEGORIES}/{name.removeprefix('obs/')}" in arrays]
    columns = [name for name in columns if arrays[name].shape == (n_rows,)]
    names = {name: name.removesuffix("/codes") for name in columns}
    targets = [name for name in columns if words_in(name) & (TARGETS | {"type"})]
    groups = [name for name in columns if words_in(name) & GROUP_WORDS and name not in targets]
    settings: Settings = {"x_key": main}
    if targets:
        settings["y_key"] = names[targets[0]]
        why += f" {names[targets[0]]!r}, a target by its name, is a column of categories; its codes are the same in "
        why += "all files (datamodule.categories)."
        values = reader.values(targets[0])
        if values is not None and (values < 0).any():
            why += f" {int((values < 0).sum()):,} rows have no category, code -1: pass ignore_index=-1 to the loss."
    others = [names[name] for name in columns if name not in targets[:1]]
    nullable = [name.removesuffix("/mask") for name in arrays if re.fullmatch(r"obs/[^/]+/mask", name)]
    others += [name for name in nullable if f"{name}/values" in arrays]
    if others:
        why += f" Other columns: {listing(others, 4)}."
    if n_rows >= MIN_ROWS:
        settings["split"] = 0.1
        values = reader.values(groups[0]) if groups else None
        if values is not None and 1 < len(set(values.tolist())) < n_rows and (values >= 0).all():
            n_groups = len(set(values.tolist()))
            settings["split"] = {"val_fraction": 0.1 if n_groups >= MIN_ROWS else 0.25, "group_key": names[groups[0]]}
            why += f" By its name, {names[groups[0]]!r} groups rows: a group is in training or in validation."
    return Guess(settings=settings, why=why)


def _biom(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """The table is stored twice, by observations and by samples."""
    arrays = files[0].arrays
    if "sample/matrix" not in matrices_among(arrays):
        return []
    n_rows = arrays["sample/matrix/indptr"].shape[0] - 1
    columns = {name: look for name, look in arrays.items() if name.startswith("sample/metadata/")}
    columns = {name: look for name, look in columns.items() if look.shape == (n_rows,)}
    numbers = [name for name, look in columns.items() if look.dtype[:4] != "text"]
    target = next((name for name in numbers if words_in(name) & TARGETS), numbers[0] if len(numbers) == 1 else None)
    why = "'sample/matrix' has the table of BIOM by samples: a row is a sample, and becomes dense in a batch."
    if columns:
        why += f" Columns of samples: {listing(columns, 4)}."
    settings: Settings = {"x_key": "sample/matrix", **({} if target is None else {"y_key": target})}
    return [Guess(settings=settings | ({"split": 0.1} if n_rows >= MIN_ROWS else {}), why=why)]


def _loom(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """The matrix has genes along axis 0 and cells along axis 1, and ``col_attrs`` has a value for each cell."""
    arrays = files[0].arrays
    look = arrays.get("matrix")
    if look is None or len(look.shape) != 2:
        return []
    columns = [name for name in arrays if name.startswith("col_attrs/") and arrays[name].shape == (look.shape[1],)]
    numbers = [name for name in columns if arrays[name].dtype[:4] != "text"]
    targets = [name for name in numbers if words_in(name) & TARGETS] or (numbers if len(numbers) == 1 else [])
    axes = {"matrix": 1, **dict.fromkeys(targets[:1], 0)}
    settings: Settings = {"x_key": "matrix", **({"y_key": targets[0]} if targets else {})}
    settings |= {"segments": {"step_axis": axes if targets else 1}, "sample": "row"}
    why = f"'matrix' of a loom file has {look.shape[0]:,} genes along axis 0 and {look.shape[1]:,} cells along axis 1, "
    why += "and a cell is a sample."
    if targets:
        why += f" {targets[0]!r} has one number for each."
    if len(files) == 1:
        split, why_split = split_in_order(look.shape[1], reader.values(targets[0]) if targets else None)
        settings |= split
        why += f" {why_split}"
    return [Guess(settings=settings, why=why)]


def split_in_order(n: int, labels: Any) -> tuple[Settings, str]:
    """Return a split in time for samples that are not along axis 0, which cannot be split at random, and the reason.

    Args:
        n: the number of samples.
        labels: target of the samples; None without a target.
    """
    n_train = n - round(0.1 * n)
    is_class = labels is not None and len(set(labels.tolist())) <= n // MIN_ROWS
    if n < MIN_ROWS:
        return {}, "There are too few samples for a validation split."
    if is_class and {*labels[n_train:].tolist()} != {*labels.tolist()}:
        return {}, (
            "No split: samples are sorted, and the last tenth lacks classes. Pass val_path, or write samples along "
            "axis 0, so that they can be split at random."
        )
    why = "The last tenth is for validation, since random splits need samples along axis 0."
    return {"split": {"val_fraction": 0.1, "by": "time"}}, why


def _cooler(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Contacts are rows of ``pixels``, sorted by their first bin; ``bin1_offset`` has the first row of each bin."""
    arrays = files[0].arrays
    sizes = {name.removesuffix(PIXELS): look.n_values for name, look in arrays.items() if name.endswith(PIXELS)}
    if len(sizes) > 1 and all(re.fullmatch(r"cells/[^/]+/", group) for group in sizes):
        looks_of_cells = {
            group: {name.removeprefix(group): arrays[name] for name in arrays if name.startswith(f"{group}pixels/")}
            for group in sizes
        }
        cells = [
            FileLooks(path=files[0].path, group=group.strip("/"), arrays=looks)
            for group, looks in looks_of_cells.items()
        ]
        segments: Settings = {"groups": "cells/*"}
        why = f"'cells' has the contacts of {len(cells):,} cells, each a segment."
    else:
        group = max(sizes, key=lambda group: sizes[group], default="")
        offsets = f"{group}indexes/bin1_offset"
        values = reader.values(offsets) if offsets in arrays else None
        if values is None or group not in sizes or values[-1] != sizes[group]:
            return []
        names = [name for name in arrays if name.startswith(f"{group}pixels/")]
        if len(values) - 1 < sizes[group]:
            names += [name for name in (f"{group}bins/start", f"{group}bins/end") if name in arrays]
        cells = [FileLooks(path=file.path, arrays={name: file.arrays[name] for name in names}) for file in files]
        segments = {"offsets": offsets}
        why = f"{offsets!r} has the first contact of each bin, and {f'{group}{PIXELS}'!r} their counts."
    parts = AlikeParts(cells, reader, segments)
    parts.attributes, parts.mixed, parts.scalars, parts.texts = {}, [], [], []
    return [replace(guess, why=f"{why} {guess.why}") for guess in parts.guesses()[:1]]


def _h5md(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """Positions and other values of particles, by frame; frames with times are steps."""
    arrays = files[0].arrays
    positions = [name for name in arrays if re.fullmatch(r"particles/.+/position/value", name)]
    main = max(positions, key=lambda name: arrays[name].n_values, default=None)
    if main is None:
        return []
    group = main.removesuffix("position/value")
    fields = [name for name in arrays if re.fullmatch(f"{re.escape(group)}[^/]+/value", name)]
    fields = [name for name in fields if arrays[name].shape[:2] == arrays[main].shape[:2]]
    settings: Settings = {"x_key": names_of(fields) if len(fields) > 1 else main}
    if arrays[main].shape[0] >= MIN_ROWS:
        settings["split"] = 0.1
    why = f"{group!r} of an H5MD file has {listing(fields, 4)}, with a row for each frame."
    time = f"{main.removesuffix('value')}time"
    if time in arrays and arrays[time].shape == arrays[main].shape[:1]:
        settings |= {"segments": {"join": time}, "window": [0, 2]}
        if "split" in settings:
            settings["split"] = {"val_fraction": 0.1, "by": "time"}
        why += f" By {time!r}, frames are steps in time. A sample is two consecutive frames."
    return [Guess(settings=settings, why=why)]


def _nwb(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """A time series with a rate, or a ragged column of a table, whichever is larger."""
    return _ragged_column(files[0], reader) or _series_with_rate(files[0])


def _series_with_rate(file: FileLooks) -> list[Guess]:
    """Rows of a time series of NWB are steps in time; a series with a rate has ``starting_time``, not time stamps."""
    data = {name: look for name, look in file.arrays.items() if look.shape and not name.startswith("general/")}
    main = max(data, key=lambda name: data[name].n_values, default="")
    if f"{main.rpartition('/')[0]}/starting_time" not in file.arrays or data[main].shape[0] < MIN_SERIES:
        return []
    n_rows, *axes = data[main].shape
    window: Any = min(MAX_STEPS, n_rows // (2 * MIN_ROWS)) if len(axes) < 2 else [0, 2]
    why = f"{main!r} is a time series of NWB: rows are steps in time, and a sample is a window of them. The last tenth "
    why += "is held out for validation."
    settings = {"x_key": main, "window": window, "split": {"val_fraction": 0.1, "by": "time"}}
    return [Guess(settings=settings, why=why)]


def _ragged_column(file: FileLooks, reader: Reader) -> list[Guess]:
    """A ragged column of a table, such as the spike times of units: ``*_index`` has the end of each row."""
    arrays, coordinates = file.arrays, file.coordinates
    ragged = {name: f"{name}_index" for name in arrays if f"{name}_index" in coordinates and name not in coordinates}
    main = max(ragged, key=lambda name: arrays[name].n_values, default=None)
    if main is None or arrays[main].dtype[:4] == "text":
        return []
    table = main.rpartition("/")[0]
    outside = [look for name, look in arrays.items() if name.rpartition("/")[0] != table and name not in coordinates]
    ends = reader.values(ragged[main])
    if ends is None or any(look.n_values > arrays[main].n_values for look in outside):
        return []  # rows of larger arrays are samples
    if len(ends) < 2 or (ends[1:] < ends[:-1]).any() or ends[-1] != arrays[main].shape[0]:
        return []
    settings: Settings = {"x_key": main, "sample": "segment", "segments": {"ends": ragged[main]}, "collate_fn": "pad"}
    numbers = [name for name, look in arrays.items() if look.shape == (len(ends),) and look.dtype[:4] != "text"]
    columns = [name for name in numbers if name.rpartition("/")[0] == table and name not in coordinates]
    targets = [name for name in columns if words_in(name) & TARGETS]
    why = f"{ragged[main]!r} has the ends of {len(ends):,} ragged rows of {main!r}: a row of {table!r} is a sample."
    if len(targets) == 1:
        settings["y_key"] = targets[0]
        why += f" {targets[0]!r}, a target by its name, has one value for each."
    if others := [name for name in columns if name not in targets]:
        why += f" Other columns: {listing(others, 4)}."
    return [Guess(settings=settings | ({"split": 0.1} if len(ends) >= MIN_ROWS else {}), why=why)]


def _pandas(files: Sequence[FileLooks], reader: Reader) -> list[Guess]:
    """``DataFrame.to_hdf(format="fixed")``: blocks of columns of one dtype, with the columns' names beside each."""
    arrays = files[0].arrays
    blocks: dict[str, tuple[Look, list[str]]] = {}
    for name, look in arrays.items():
        items = name.removesuffix("_values") + "_items"
        if re.search(r"(^|/)block\d+_values$", name) and items in files[0].coordinates and len(look.shape) == 2:
            values = reader.values(items)
            texts = [] if values is None else [v.decode() if isinstance(v, bytes) else str(v) for v in values]
            blocks[name] = look, texts
    if not blocks or len({name.rpartition("/")[0] for name in blocks}) > 1:
        return []
    numbers = {name: block for name, block in blocks.items() if name not in files[0].coordinates}  # no dates or times
    if not numbers:
        return []
    main = max(numbers, key=lambda name: numbers[name][0].shape[1])
    targets = [
        (name, at) for name, (_, items) in numbers.items() for at, item in enumerate(items) if words_in(item) & TARGETS
    ]
    settings: Settings = {"x_key": main}
    why = f"pandas stored the columns {listing(blocks[main][1], 6)} in {main!r}."
    if len(targets) == 1:
        ((name, at),) = targets
        column = blocks[name][1][at]
        select: dict[str, Any] = {name: {1: at}}
        if name != main:
            settings["y_key"] = name
            settings["select"] = select
            why += f" {name!r} has {column!r}, a target by its name, in column {at}, which select reads."
        else:
            why += f" {column!r}, a target by its name, is its column {at}: separate it in a transform."
    if blocks[main][0].shape[0] >= MIN_ROWS:
        settings["split"] = 0.1
    if others := [item for name, (_, items) in blocks.items() if name not in settings.values() for item in items]:
        why += f" Not used: the columns {listing(others, 6)}."
    return [Guess(settings=settings, why=why)]


RULES: dict[str, Callable[[Sequence[FileLooks], Reader], list[Guess]]] = {
    "AnnData": _anndata,
    "BIOM": _biom,
    "H5MD": _h5md,
    "NWB": _nwb,
    "cooler": _cooler,
    "loom": _loom,
    "PyTables": _pandas,
}
"""The rules by program, as named by ``software_of``."""

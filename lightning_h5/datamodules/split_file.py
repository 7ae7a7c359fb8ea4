"""Which rows or groups are in which split, as a file that people can read, keep, and write themselves."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5FileError, H5ValueError, listing
from ..hdf5 import expand_user
from ..types import IntArray, PathLike
from .arguments import Split

__all__ = ["read_splits", "write_splits"]

FORMAT = "lightning_h5 splits"
NAMES: tuple[Split, ...] = ("train", "val", "test")


def write_splits(
    path: PathLike,
    splits: Mapping[Split, IntArray],
    group_key: str | None,
    groups: npt.NDArray[Any] | None,
    settings: Mapping[str, Any],
) -> None:
    """Writes who is in which split, where no such file is there yet; whole or not at all.

    Args:
        path: the file.
        splits: for each split its rows, which are all rows together.
        group_key: the array with each row's group, or None.
        groups: each row's group, shape ``(n_rows,)``; None writes numbers of rows.
        settings: what the cut followed from.

    Raises:
        H5FileError: it cannot be written.
    """
    n_rows = sum(map(len, splits.values()))
    if groups is None:
        written: dict[Split, list[Any]] = {name: _ranges(rows) for name, rows in splits.items()}
    else:
        written = {name: np.unique(groups[rows]).tolist() for name, rows in splits.items()}
    text = {
        "format": FORMAT,
        "version": 1,
        "group_key": group_key,
        "n_rows": n_rows,
        "settings": dict(settings),
        "splits": written,
    }
    target = Path(expand_user(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(text, file, indent=1, ensure_ascii=False)
            with suppress(FileExistsError):  # another rank was faster, and wrote the same
                os.link(made, target)
        finally:
            os.unlink(made)
    except OSError as error:
        raise H5FileError(f"split.file={str(target)!r} cannot be written: {error.strerror}.") from error


def read_splits(
    path: PathLike,
    n_rows: int,
    group_key: str | None,
    groups: npt.NDArray[Any] | None,
    settings: Mapping[str, Any],
) -> dict[Split, IntArray] | None:
    """The rows of each split, as a file has it; None where there is no such file.

    Args:
        path: the file.
        n_rows: rows that there are.
        group_key: the array with each row's group, or None.
        groups: each row's group, or None where rows are told apart by their numbers.
        settings: what is asked for now; the file may say that it was made with others.

    Raises:
        H5ValueError: the file is no such file, was made with other settings, or does not say of every row where it is.
    """
    path = expand_user(path)
    name = f"split.file={path!r}"
    try:
        text = json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise H5ValueError(f"{name} cannot be read as JSON: {error}. Write it again, or name another file.") from error
    splits = text.get("splits") if isinstance(text, dict) and text.get("format") == FORMAT else None
    if (
        not isinstance(splits, dict)
        or set(splits) - set(NAMES)
        or not all(isinstance(v, list) for v in splits.values())
    ):
        raise H5ValueError(
            f"{name} says nothing of splits. It takes {{'format': {FORMAT!r}, 'splits': {{'train': [...], 'val': "
            "[...], 'test': [...]}}, with groups, or ranges [start, stop] of rows."
        )
    if text.get("group_key") != group_key:
        raise H5ValueError(
            f"{name} is of group_key={text.get('group_key')!r}, and group_key={group_key!r} was given. Pass the same."
        )
    made = text.get("settings") or {}
    if other := [key for key in settings if key in made and made[key] != settings[key]]:
        were = ", ".join(f"{key}={made[key]!r}" for key in other)
        now = ", ".join(f"{key}={settings[key]!r}" for key in other)
        raise H5ValueError(f"{name} was made with {were}, and {now} was given. Name another file, or pass the same.")
    if groups is None:
        return _rows_of_ranges(splits, n_rows, name)
    return _rows_of_groups(splits, groups, name)


def _rows_of_groups(splits: Mapping[str, list[Any]], groups: npt.NDArray[Any], name: str) -> dict[Split, IntArray]:
    found, codes = np.unique(groups, return_inverse=True)
    at = {value: code for code, value in enumerate(found.tolist())}
    split_of = np.full(len(found), -1, dtype=np.int64)
    for number, split in enumerate(NAMES):
        here = [at[group] for group in splits.get(split, []) if group in at]
        if twice := [found[code] for code in here if split_of[code] not in (-1, number)]:
            raise H5ValueError(f"{name} has {listing(map(str, twice))} in several splits. Leave each in one.")
        split_of[here] = number
    if (split_of < 0).any():
        unknown = found[split_of < 0]
        raise H5ValueError(
            f"{name} says nothing of {len(unknown)} of {len(found)} groups: {listing(map(str, unknown[:6]))}. "
            "Add them to a split, or name another file, which is then made."
        )
    return {split: np.flatnonzero(split_of[codes] == number) for number, split in enumerate(NAMES)}


def _rows_of_ranges(splits: Mapping[str, list[Any]], n_rows: int, name: str) -> dict[Split, IntArray]:
    rows: dict[Split, IntArray] = {}
    for split in NAMES:
        try:
            ranges = [np.arange(start, stop) for start, stop in splits.get(split, [])]
        except (TypeError, ValueError) as error:
            raise H5ValueError(f"{name}: {split!r} is no list of ranges [start, stop].") from error
        rows[split] = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *ranges]))
    every = np.sort(np.concatenate(list(rows.values())))
    if not np.array_equal(every, np.arange(n_rows)):
        raise H5ValueError(
            f"{name} has {len(every)} rows, of which {len(np.unique(every))} differ, and the files have {n_rows}. "
            "Each has to be in one split; name another file, which is then made."
        )
    return rows


def _ranges(rows: IntArray) -> list[list[int]]:
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    starts, stops = rows[np.append(0, cuts)], rows[np.append(cuts - 1, -1)] + 1
    return [[int(start), int(stop)] for start, stop in zip(starts, stops, strict=True)]

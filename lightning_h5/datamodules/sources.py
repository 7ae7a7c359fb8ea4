"""Where a split's rows come from: files of its own, its group inside the training files, or rows cut off them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ..datasets import Catalog
from ..errors import H5FileError, H5ValueError
from ..hdf5 import OpenOptions, expand_paths, fill_split
from ..options import FileOptions, SplitOptions
from ..order import group_split, k_fold
from ..types import IntArray, Paths
from .arguments import Split
from .split_file import read_splits, write_splits

__all__ = ["Source", "cut_rows", "source_of"]


@dataclass(frozen=True)
class Source:
    """Where a split's rows come from.

    Attributes:
        files: the files, expanded.
        group: what ``{split}`` stands for in the keys.
        is_cut: whether the split has a part of the files' rows (see ``cut_rows``).
    """

    files: tuple[str, ...]
    group: Split
    is_cut: bool = False


def source_of(
    split: Split,
    paths: Mapping[Split, Paths | None],
    options: SplitOptions,
    keys: list[str],
    catalog: Catalog,
    opened: FileOptions,
) -> Source | None:
    """Decides where a split's rows come from; None where there are none for it.

    Args:
        split: the split.
        paths: what the user gave for each split.
        options: how the training files are cut.
        keys: the arrays, ``{split}`` and all.
        catalog: of the files.
        opened: how files are opened.
    """
    own, training = paths[split], paths["train"]
    if own is not None:
        return Source(expand_paths(own, f"{split}_path"), split, split == "train" and options.is_given)
    if training is None or split == "train":
        return None
    files = expand_paths(training, "train_path")
    if options.may_fill(split):
        return Source(files, "train", is_cut=True)
    filled = [str(fill_split(key, split)) for key in keys]
    if filled != keys and catalog.has(files[0], filled, OpenOptions(files=opened)):
        return Source(files, split)
    return None


def cut_rows(
    n_rows: int,
    options: SplitOptions,
    *,
    paths: Mapping[Split, Paths | None],
    groups: npt.NDArray[Any] | None,
    labels: npt.NDArray[Any] | None,
) -> dict[Split, IntArray]:
    """Cuts the rows of the training files into splits; the same in every process. Or takes what a file says.

    Args:
        n_rows: rows of the training files.
        options: shares and folds.
        paths: what the user gave for each split.
        groups: each row's group, if any.
        labels: each row's class, if shares of classes are to be alike.

    Returns:
        For each split its rows in ascending order.
    """
    path, settings = options.file, options.recipe()
    if path is not None and (kept := read_splits(path, n_rows, options.group_key, groups, settings)) is not None:
        for split, rows in kept.items():
            if split != "train" and len(rows) and paths[split] is not None:
                raise H5ValueError(
                    f"split.file={str(path)!r} gives {len(rows)} rows to {split!r}, which has files of its own: they "
                    "would be in no split. Leave these files out, or move the rows to another split."
                )
        return kept
    if not options.has_fractions:
        raise H5FileError(
            f"split.file={str(path)!r} does not exist, and nothing says how to make it. Pass val_fraction, "
            "test_fraction or num_folds and fold, or the path of an existing file."
        )
    splits = _cut(n_rows if groups is None else groups, labels, options)
    if path is not None:
        write_splits(path, splits, options.group_key, groups, settings)
    return splits


def _cut(n_or_groups: Any, labels: Any, options: SplitOptions) -> dict[Split, IntArray]:
    fractions = [1 - options.val_fraction - options.test_fraction, options.val_fraction, options.test_fraction]
    train, val, test = group_split(n_or_groups, fractions, options.seed, labels=labels)
    if options.num_folds is not None and options.fold is not None:
        within = len(train) if isinstance(n_or_groups, int) else n_or_groups[train]
        of_them = None if labels is None else labels[train]
        kept, held_out = k_fold(within, options.num_folds, options.fold, options.seed, labels=of_them)
        train, val = train[kept], train[held_out]
    return {"train": train, "val": val, "test": test}

"""Where a split's rows come from: files of its own, its group inside the training files, or rows cut off them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..datasets import H5LazyDataset
from ..errors import H5KeyError, H5ValueError
from ..files import expand_paths, fill_split, find_array, keys_in, open_h5
from ..sampling import group_split, k_fold
from ..types import IntArray, Keys, Paths
from .options import Split, SplitOptions

__all__ = ["Source", "cut_rows", "has_arrays", "source_of"]


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
    *,
    allow_external: bool = False,
) -> Source | None:
    """Decides where a split's rows come from; None where there are none for it.

    Args:
        split: the split.
        paths: what the user gave for each split.
        options: how the training files are cut.
        keys: the arrays, ``{split}`` and all.
        allow_external: follow links out of the files.
    """
    own, training = paths[split], paths["train"]
    if own is not None:
        return Source(expand_paths(own, f"{split}_path"), split, split == "train" and options.cuts_any)
    if training is None or split == "train":
        return None
    files = expand_paths(training, "train_path")
    if options.cuts(split):
        return Source(files, "train", is_cut=True)
    filled = [str(fill_split(key, split)) for key in keys]
    if filled != keys and has_arrays(files[0], filled, allow_external=allow_external):
        return Source(files, split)
    return None


def has_arrays(path: str, keys: list[str], *, allow_external: bool) -> bool:
    """Whether a file has all of these arrays."""
    with open_h5(path) as file:
        try:
            for key in keys:
                find_array(file, key, allow_external=allow_external)
        except H5KeyError:
            return False
    return True


def cut_rows(
    files: tuple[str, ...],
    x_key: Keys,
    options: SplitOptions,
    *,
    group_key: str | None,
    allow_external: bool,
) -> dict[str, IntArray]:
    """Cuts the rows of the training files into splits; the same in every process.

    Args:
        files: the training files.
        x_key: the input, which says how many rows there are.
        options: shares and folds.
        group_key: the array with each row's group, if any.
        allow_external: follow links out of the files.

    Returns:
        For each split its rows in ascending order.
    """
    first = {"x": keys_in(x_key)[0]}
    n_or_groups: Any = len(H5LazyDataset(files, first, allow_external=allow_external))
    if group_key is not None:
        n_or_groups = _groups(files, group_key, n_or_groups, allow_external)
    fractions = [1 - options.val_fraction - options.test_fraction, options.val_fraction, options.test_fraction]
    train, val, test = group_split(n_or_groups, fractions, options.split_seed)
    if options.num_folds is not None and options.fold is not None:
        within = len(train) if isinstance(n_or_groups, int) else n_or_groups[train]
        kept, held_out = k_fold(within, options.num_folds, options.fold, options.split_seed)
        train, val = train[kept], train[held_out]
    return {"train": train, "val": val, "test": test}


def _groups(files: tuple[str, ...], key: str, n_rows: int, allow_external: bool) -> Any:
    """Each row's group. Asked for as one of several inputs, which may hold text."""
    column = H5LazyDataset(files, {"group": key}, allow_external=allow_external)
    if len(column) != n_rows:
        raise H5ValueError(
            f"group_key={key!r} has {len(column)} rows and the data has {n_rows}. Name an array with one value a row."
        )
    values = np.asarray(column.read_batch(np.arange(n_rows))["group"])
    column.close()
    return values

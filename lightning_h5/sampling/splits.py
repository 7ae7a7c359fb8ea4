"""Cutting rows, or whole groups of rows, into splits that never share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..types import IntArray
from .permutation import stream

__all__ = ["group_split", "k_fold"]

SPLIT, FOLD = 1, 2  # purposes of the random streams


def group_split(groups: int | npt.ArrayLike, fractions: Sequence[float], split_seed: int = 0) -> list[IntArray]:
    """Cuts rows into splits of about these fractions; rows of one group stay together.

    Args:
        groups: each row's group (any values), shape ``(n_rows,)``; or a number of rows, each its own group.
        fractions: share of the rows for each split; they add up to 1.
        split_seed: another seed draws another cut.

    Returns:
        For each split the indices of its rows in ascending order. Splits are disjoint and cover all rows. With
        rows of their own the sizes are the fractions rounded; with groups they come as near as whole groups allow.

    Raises:
        H5ValueError: fractions that do not add up, or group values that are missing (NaN or empty).
    """
    shares = np.asarray(fractions, dtype=np.float64)
    if len(shares) == 0 or (shares < 0).any() or not np.isclose(shares.sum(), 1.0):
        raise H5ValueError(
            f"fractions={list(fractions)} add up to {shares.sum():g}. Pass shares from 0 to 1 that add up to 1."
        )
    codes, sizes = _codes(groups)
    # Groups in a random order; each goes where it keeps all splits closest to their share so far.
    order = np.argsort(np.asarray(stream(split_seed, 0, SPLIT).random_raw(len(sizes))), kind="stable")
    bounds = np.cumsum(shares) * sizes.sum()
    if len(sizes) == len(codes):
        places = np.rint(bounds).astype(np.int64)
        split_of_group = np.empty(len(sizes), dtype=np.int64)
        split_of_group[order] = np.searchsorted(places, np.arange(len(sizes)), side="right")
    else:
        split_of_group = _fill(order, sizes, shares * sizes.sum())
    split_of_row = split_of_group[codes]
    return [np.flatnonzero(split_of_row == split) for split in range(len(shares))]


def k_fold(
    n_or_groups: int | npt.ArrayLike, num_folds: int, fold: int, split_seed: int = 0
) -> tuple[IntArray, IntArray]:
    """One fold of a k-fold cut; rows of one group stay together.

    Args:
        n_or_groups: a number of rows, or each row's group, shape ``(n_rows,)``.
        num_folds: number of folds, at least 2.
        fold: the fold that is held out, from 0.
        split_seed: the same for all folds of one study.

    Returns:
        Indices of the rows to train on, and of the rows held out, in ascending order.

    Raises:
        H5ValueError: more folds than groups, or a fold that does not exist.
    """
    codes, sizes = _codes(n_or_groups)
    if not 2 <= num_folds <= len(sizes) or not 0 <= fold < num_folds:
        what = "rows" if len(sizes) == len(codes) else "groups"
        raise H5ValueError(
            f"num_folds={num_folds}, fold={fold} were asked for over {len(sizes)} {what}. "
            f"Pass num_folds from 2 to {len(sizes)} and fold from 0 to num_folds - 1."
        )
    order = np.argsort(np.asarray(stream(split_seed, 0, FOLD).random_raw(len(sizes))), kind="stable")
    if len(sizes) == len(codes):
        fold_of_group = np.empty(len(sizes), dtype=np.int64)
        fold_of_group[order] = np.arange(len(sizes)) % num_folds
    else:
        fold_of_group = _fill(order, sizes, np.full(num_folds, sizes.sum() / num_folds))
    held_out = fold_of_group[codes] == fold
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _codes(groups: int | npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Each row's group as a number from 0, and the rows of each group."""
    if isinstance(groups, int | np.integer):
        return np.arange(groups, dtype=np.int64), np.ones(int(groups), dtype=np.int64)
    values: npt.NDArray[Any] = np.asarray(groups)
    if values.ndim != 1:
        raise H5ValueError(
            f"groups have shape {values.shape}; one value a row is needed. Pass a one-dimensional array."
        )
    if values.dtype.kind == "O":
        values = values.astype(str)
    missing = np.isnan(values) if values.dtype.kind in "fc" else values == "" if values.dtype.kind == "U" else None
    if missing is not None and missing.any():
        raise H5ValueError(
            f"the group is missing (NaN or empty) for {int(missing.sum())} of {len(values)} rows, the first of them "
            f"row {int(np.argmax(missing))}. Give each row a group, or leave these rows out."
        )
    names, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), np.bincount(codes, minlength=len(names)).astype(np.int64)


def _fill(order: IntArray, sizes: IntArray, wanted: npt.NDArray[np.float64]) -> IntArray:
    """Puts each group, large ones first, into the split that is furthest from full; random among equal sizes."""
    ranked = order[np.argsort(-sizes[order], kind="stable")]
    left = np.where(wanted > 0, wanted, -np.inf)  # a split of share zero gets nothing
    split_of_group = np.empty(len(sizes), dtype=np.int64)
    for group in ranked.tolist():
        split = int(np.argmax(left))
        split_of_group[group] = split
        left[split] -= sizes[group]
    return split_of_group

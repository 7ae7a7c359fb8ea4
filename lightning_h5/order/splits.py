"""Splits and folds of rows, of whole groups of rows, or of each segment in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import H5ValueError
from ..types import IntArray
from .permutation import stream

__all__ = ["group_split", "k_fold", "time_split"]

SPLIT, FOLD = 1, 2  # purposes of the random streams


def group_split(
    groups: int | npt.ArrayLike,
    fractions: Sequence[float],
    split_seed: int = 0,
    *,
    labels: npt.ArrayLike | None = None,
) -> list[IntArray]:
    """Split rows by fractions; rows of one group stay together.

    Args:
        groups: each row's group (any values), shape ``(n_rows,)``; or a number of rows, each its own group.
        fractions: share of the rows for each split; they add up to 1.
        split_seed: seed of the split.
        labels: each row's class, shape ``(n_rows,)``: each class is split by the fractions. None ignores classes.

    Returns:
        For each split the indices of its rows in ascending order. Splits are disjoint and cover all rows. Without
        groups, the sizes are the rounded fractions (for each class, if there are labels). With groups, the sizes differ
        from the fractions by at most the largest group, if each group has one class.

    Raises:
        H5ValueError: the fractions do not add up to 1, or values are missing (NaN or empty).
    """
    shares = np.asarray(fractions, dtype=np.float64)
    if len(shares) == 0 or (shares < 0).any() or not np.isclose(shares.sum(), 1.0):
        raise H5ValueError(
            f"fractions={list(fractions)} add up to {shares.sum():g}. Pass shares from 0 to 1 that add up to 1."
        )
    codes, sizes = _codes(groups)
    kinds, n_of_kind = _kinds(labels, codes)
    # Groups in a random order; each is assigned to the split that keeps all splits closest to their share so far.
    order = np.argsort(np.asarray(stream(split_seed, 0, SPLIT).random_raw(len(sizes))), kind="stable")
    if len(sizes) == len(codes):
        sorted_groups, kind_of_place = _sort_by_kind(order, _kinds_of_groups(kinds, codes), len(n_of_kind))
        rank = np.arange(len(codes)) - np.repeat(np.cumsum(n_of_kind) - n_of_kind, n_of_kind)
        split_of_place = np.zeros(len(codes), dtype=np.int64)
        for share in np.cumsum(shares).tolist():
            split_of_place += rank >= np.rint(share * n_of_kind)[kind_of_place]
        split_of_group = np.empty(len(sizes), dtype=np.int64)
        split_of_group[sorted_groups] = split_of_place
    else:
        split_of_group = _fill_splits(order, _count_kinds(codes, kinds, len(sizes), len(n_of_kind)), shares)
    split_of_row = split_of_group[codes]
    return [np.flatnonzero(split_of_row == split) for split in range(len(shares))]


def k_fold(
    n_or_groups: int | npt.ArrayLike,
    num_folds: int,
    fold: int,
    split_seed: int = 0,
    *,
    labels: npt.ArrayLike | None = None,
) -> tuple[IntArray, IntArray]:
    """Return one fold of a k-fold split; rows of one group stay together.

    Args:
        n_or_groups: a number of rows, or each row's group, shape ``(n_rows,)``.
        num_folds: number of folds, at least 2.
        fold: the held-out fold, from 0.
        split_seed: seed of the folds, the same for all folds of one study.
        labels: each row's class, shape ``(n_rows,)``: classes are spread evenly over the folds. None ignores classes.

    Returns:
        Indices of the training rows, and of the held-out rows, in ascending order.

    Raises:
        H5ValueError: there are more folds than groups, or the fold does not exist.
    """
    codes, sizes = _codes(n_or_groups)
    if not 2 <= num_folds <= len(sizes) or not 0 <= fold < num_folds:
        unit = "row" if isinstance(n_or_groups, int | np.integer) else "group"
        count = f"{len(sizes)} {unit}{'' if len(sizes) == 1 else 's'}"
        remedy = (
            f"Pass num_folds from 2 to {len(sizes)} and fold from 0 to num_folds - 1."
            if len(sizes) > 1
            else f"Each fold needs at least one {unit}: pass a number of folds and data with as many {unit}s."
        )
        raise H5ValueError(f"num_folds={num_folds} and fold={fold} were given for {count}. {remedy}")
    kinds, n_of_kind = _kinds(labels, codes)
    order = np.argsort(np.asarray(stream(split_seed, 0, FOLD).random_raw(len(sizes))), kind="stable")
    if len(sizes) == len(codes):
        fold_of_group = np.empty(len(sizes), dtype=np.int64)
        sorted_groups, _ = _sort_by_kind(order, _kinds_of_groups(kinds, codes), len(n_of_kind))
        fold_of_group[sorted_groups] = np.arange(len(sizes)) % num_folds
    else:
        counts = _count_kinds(codes, kinds, len(sizes), len(n_of_kind))
        fold_of_group = _fill_splits(order, counts, np.full(num_folds, 1 / num_folds))
    is_held_out = fold_of_group[codes] == fold
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def time_split(
    lengths: IntArray, val_fraction: float, test_fraction: float, *, gap: int = 0, beat: int = 1
) -> dict[str, tuple[IntArray, IntArray]]:
    """Divide each segment in time: training first, then validation, then test.

    Args:
        lengths: steps of each segment, shape ``(n_segments,)``.
        val_fraction: share of the steps outside of gaps for validation; no validation split if 0.
        test_fraction: the same for testing.
        gap: number of steps between two parts, in no split.
        beat: validation and test begin at a multiple of this number of steps.

    Returns:
        For each split the first step of each segment's part, and the step after its last. Parts may be empty.
    """
    shares = {"val": val_fraction, "test": test_fraction}
    cuts = [name for name, share in shares.items() if share]
    room = np.maximum(lengths - gap * len(cuts), 0)
    sizes = {name: np.round(room * shares[name]).astype(np.int64) for name in cuts}
    end = np.maximum(room - sum(sizes.values()), 0)
    parts = {"train": (np.zeros(len(lengths), dtype=np.int64), end)}
    for name in cuts:
        low = np.minimum(-(-(end + gap) // beat) * beat, lengths)
        end = np.minimum(low + sizes[name], lengths)
        parts[name] = low, end
    return parts


def _codes(groups: int | npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Return each row's group as a number from 0, and the number of rows of each group."""
    if isinstance(groups, int | np.integer):
        return np.arange(groups, dtype=np.int64), np.ones(int(groups), dtype=np.int64)
    return _numbered_values(groups, "group")


def _numbered_values(values: npt.ArrayLike, name: str) -> tuple[IntArray, IntArray]:
    """Return each value's number among the sorted distinct values, and the number of rows of each."""
    column: npt.NDArray[Any] = np.asarray(values)
    if column.ndim != 1:
        raise H5ValueError(
            f"{name}s have shape {column.shape}; one value per row is needed. Pass a one-dimensional array."
        )
    if column.dtype.kind in "OU":  # sorting the distinct names alone takes a quarter of the time
        texts = column.tolist() if column.dtype.kind == "U" else column.astype(str).tolist()
        numbers = {text: number for number, text in enumerate(sorted(set(texts)))}
        codes = np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))
        _check_present(codes == numbers.get("", -1), name)
        return codes, np.bincount(codes, minlength=len(numbers))
    kind = column.dtype.kind
    if kind in "fc":
        _check_present(np.isnan(column), name)
    if kind in "biu" and len(column) and int(column.max()) - int(column.min()) < len(column):
        # Counting integers from a small range takes a tenth of the time of sorting them.
        integers = column if kind == "u" else column.astype(np.int64)
        offsets = (integers - integers.min()).astype(np.int64)
        counts = np.bincount(offsets)
        return (np.cumsum(counts > 0) - 1)[offsets], counts[counts > 0]
    names, codes = np.unique(column, return_inverse=True)
    return codes.astype(np.int64), np.bincount(codes, minlength=len(names)).astype(np.int64)


def _check_present(is_missing: npt.NDArray[np.bool_], name: str) -> None:
    if is_missing.any():
        raise H5ValueError(
            f"the {name} is missing (NaN or empty) for {int(is_missing.sum())} of {len(is_missing)} rows, the first of "
            f"them row {int(np.argmax(is_missing))}. Give each row a {name}, or leave these rows out."
        )


def _kinds(labels: npt.ArrayLike | None, codes: IntArray) -> tuple[IntArray, IntArray]:
    """Return each row's class as a number from 0, and the number of rows of each class; one class without labels."""
    if labels is None:
        return np.zeros(len(codes), dtype=np.int64), np.array([len(codes)], dtype=np.int64)
    kinds, n_of_kind = _numbered_values(labels, "label")
    if len(kinds) != len(codes):
        raise H5ValueError(f"there are {len(kinds)} labels for {len(codes)} rows. Pass one for each row.")
    return kinds, n_of_kind


def _kinds_of_groups(kinds: IntArray, codes: IntArray) -> IntArray:
    """Return the class of each group of one row."""
    group_kinds = np.empty_like(kinds)
    group_kinds[codes] = kinds
    return group_kinds


def _sort_by_kind(order: IntArray, kinds: IntArray, n_kinds: int) -> tuple[IntArray, IntArray]:
    """Sort rows by class, and rows of one class as in ``order``; return the rows and the class of each."""
    # NumPy sorts integers of 16 bits by counting, ten times as fast as wider ones.
    keys = kinds.astype(np.min_scalar_type(max(0, n_kinds - 1)))[order]
    places = np.argsort(keys, kind="stable")
    return order[places], keys[places]


class _Counts(NamedTuple):
    """The number of rows of each group and class, without zeros."""

    kinds: IntArray
    """Classes, ascending within a group, one group after the other."""
    n_rows: IntArray
    """Number of rows of the group with the class."""
    starts: IntArray
    """First entry of each group, and the end."""
    n_of_kind: IntArray
    """Number of rows of each class, over all groups."""


def _count_kinds(codes: IntArray, kinds: IntArray, n_groups: int, n_kinds: int) -> _Counts:
    pairs, n_rows = np.unique(codes * n_kinds + kinds, return_counts=True)
    starts = np.searchsorted(pairs, np.arange(n_groups + 1) * n_kinds)
    return _Counts(pairs % n_kinds, n_rows.astype(np.int64), starts, np.bincount(kinds, minlength=n_kinds))


def _fill_splits(order: IntArray, counts: _Counts, shares: npt.NDArray[np.float64]) -> IntArray:
    """Assign each group to the split that is furthest behind its share of all groups so far.

    Large groups are assigned first, so that small groups even out the differences. Groups of similar size are in random
    order, and each split gets its share of them: a split of only small groups would be another population.
    """
    n_kinds = len(counts.n_of_kind)
    sizes = np.add.reduceat(counts.n_rows, counts.starts[:-1])
    splits = np.flatnonzero(shares)  # a split with share 0 has no groups
    share = shares[splits]
    n_alike = int(np.ceil(2 / share.min()))  # groups treated as about equally large
    by_size = order[np.argsort(-sizes[order], kind="stable")]
    ranked = by_size[np.lexsort((np.argsort(order)[by_size], np.arange(len(sizes)) // n_alike))].tolist()
    place = np.empty(len(sizes), dtype=np.int64)
    deficits = np.zeros((len(splits), n_kinds))  # rows of each class still due to each split
    if n_kinds == 1:  # without labels, a quarter of the time
        owed = deficits[:, 0]
        for group in ranked:
            owed += share * sizes[group]
            place[group] = split = np.argmax(owed)
            owed[split] -= sizes[group]
        return splits[place]
    # Minimize the sum of squares of the deficits, relative to the size of each class.
    weights = counts.n_rows / counts.n_of_kind[counts.kinds].astype(np.float64) ** 2
    column = share[:, None]
    starts = counts.starts.tolist()
    for group in ranked:
        entries = slice(starts[group], starts[group + 1])
        group_kinds, n_rows = counts.kinds[entries], counts.n_rows[entries]
        amounts = deficits[:, group_kinds] + column * n_rows
        owed = amounts @ weights[entries]
        deficits[:, group_kinds] = amounts
        ties = np.flatnonzero(owed >= owed.max() - 1e-9 * np.abs(owed).max())
        split = ties[0] if len(ties) == 1 else ties[np.argmax(deficits[ties].sum(axis=1))]
        place[group] = split
        deficits[split, group_kinds] -= n_rows
    return splits[place]

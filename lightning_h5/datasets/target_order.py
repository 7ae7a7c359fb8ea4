"""Whether shards that ranks keep have different targets: neighboring rows of a sorted file, or every n-th row.

A few thousand targets, drawn from all shards, are enough to see it. They are in memory; only a rank that loads its
shard without the others reads a few targets of theirs.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from ..order import RankShard, permutation
from ..types import IntArray
from .sample_layout import Column

__all__ = [
    "MAX_SAMPLES",
    "are_in_order",
    "differ_clearly",
    "sampled_places",
    "sampled_values",
    "warn_of_different_targets",
]

TargetValue: TypeAlias = int | float | str

MAX_SAMPLES = 2_048  # of all ranks together: each rank is sent those of all others
MIN_SAMPLES = 32  # fewer may be in order by chance
MAX_ROW_BYTES = 4_096  # a class or its one-hot code; more is a picture
ROWS_A_VALUE = 4  # at least, on average: values that are seen less often are numbers or names, not classes
SURE = 10  # standard deviations: differences between ranks that chance does not make
CLEAR = 0.05  # mean square contingency: 1 for two ranks with a class each; 0.05 if 9 % and 0 % of their rows have it
SAMPLED = 16  # purpose of the random stream


def sampled_places(n_rows: int, world_size: int) -> IntArray:
    """Places in a shard whose targets are looked at, ascending; drawn, so that no period of the targets hides them."""
    n_samples = min(n_rows, -(-MAX_SAMPLES // world_size))
    return np.sort(permutation(n_rows, 0, 0, SAMPLED)(0, n_samples)) if n_samples else np.empty(0, np.int64)


def sampled_values(targets: Column) -> list[TargetValue] | None:
    """A plain value for each target: a number or text as it is, a vector as its digest; None for what is no label."""
    if not isinstance(targets, torch.Tensor):
        return [each if isinstance(each, str) else repr(each) for each in targets]
    if not len(targets):
        return []
    rows = targets.reshape(len(targets), -1).cpu() if targets.numel() else targets
    if rows.numel() == len(rows):
        numbers: list[Any] = rows[:, 0].tolist()
        return None if isinstance(numbers[0], complex) else numbers
    if not rows.numel() or rows[0].nbytes > MAX_ROW_BYTES:
        return None
    octets = rows.contiguous().view(torch.uint8).numpy()
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in octets]


def are_in_order(values: Sequence[TargetValue]) -> bool:
    """Whether targets are sorted, or each value comes in one run.

    Args:
        values: of sampled rows, in the order of the file.
    """
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    if len(values) < MIN_SAMPLES or len(codes) == 1:
        return False
    found = np.array([codes[value] for value in values])
    n_runs = 1 + np.count_nonzero(np.diff(found))
    if n_runs == len(codes) <= len(values) // 2:
        return True
    if isinstance(values[0], str):
        return False
    steps = np.diff(np.array(values, dtype=np.float64))
    return bool((steps >= 0).all() or (steps <= 0).all())


def _are_few(values: Sequence[TargetValue]) -> bool:
    """Whether targets are values that repeat, as classes do."""
    return len({_comparable(value) for value in values}) * ROWS_A_VALUE <= len(values)


def differ_clearly(samples: Sequence[Sequence[TargetValue]]) -> bool:
    """Whether shards have clearly different shares of a few values, by a chi-squared test of homogeneity.

    Args:
        samples: values of sampled rows, for each shard.
    """
    values = [_comparable(value) for sample in samples for value in sample]
    if len(values) < MIN_SAMPLES or not _are_few(values):
        return False
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    counts = np.zeros((len(samples), len(codes)))
    for shard, sample in enumerate(samples):
        np.add.at(counts[shard], [codes[_comparable(value)] for value in sample], 1)
    counts = counts[counts.any(axis=1)]
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / len(values)
    by_chance = (len(counts) - 1) * (len(codes) - 1)  # what the sum is on average if all shards are alike
    excess = ((counts - expected) ** 2 / expected).sum() - by_chance
    return bool(excess > SURE * np.sqrt(2 * by_chance) and excess > CLEAR * len(values))


def _comparable(value: TargetValue) -> TargetValue:
    return value if value == value else "nan"  # NaN is equal to nothing


def warn_of_different_targets(
    shard: RankShard, keys: Sequence[str], ranks: Mapping[int, Any], of_others: Callable[[int], Sequence[TargetValue]]
) -> None:
    """Warn of targets that differ between ranks; the first of the ranks that are loaded together does.

    Args:
        shard: of this rank.
        keys: the targets' arrays.
        ranks: for each rank that is loaded together the sampled values of each target; None for what is no label.
        of_others: returns values of a target, by its place, in rows of the ranks that are missing there.
    """
    if shard.rank != min(ranks):
        return
    for target, (key, *samples) in enumerate(zip(keys, *(ranks[rank] for rank in sorted(ranks)), strict=True)):
        if None in samples:
            continue
        together = list(chain.from_iterable(samples))
        if shard.mode == "contiguous" and are_in_order(together):
            differ = True
        elif len(ranks) == shard.world_size:
            differ = shard.mode == "interleave" and differ_clearly(samples)
        else:  # parts of a file may differ in much; a single value is what a sorted one has here
            can_tell = _are_few(together) if shard.mode == "interleave" else len(set(together)) == 1
            differ = can_tell and differ_clearly([together, of_others(target)])
        if differ:
            _warn(shard, key)


def _warn(shard: RankShard, key: str) -> None:
    n = shard.world_size
    if shard.mode == "contiguous":
        why = f"the rows are sorted by the target {key!r}, and mode='contiguous' gives each of the {n} ranks "
        why, advice = f"{why}neighboring rows", "mode='interleave'"
    else:
        why = f"the values of the target {key!r} repeat with the number of ranks, and mode='interleave' gives each "
        why, advice = f"{why}of the {n} ranks one of every {n} rows", "reshard_every_n_epochs=1"
    warnings.warn(
        f"{why}: each trains on other targets than the others, in every epoch. Pass {advice}, or shuffle the rows "
        "once (lightning-h5 repack --shuffle-rows).",
        stacklevel=4,
    )

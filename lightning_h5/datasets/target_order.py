"""Check whether the ranks' shards have different targets, as shards of a sorted file do.

A sample of a few thousand targets, drawn from all shards in memory, is enough.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from ..order import RankShard, permutation
from ..readers.buffers import Column
from ..types import IntArray

__all__ = ["TargetComparison", "are_in_order", "differ_clearly", "sampled_places", "sampled_values"]


TargetValue: TypeAlias = int | float | str

MAX_SAMPLES = 2_048  # over all ranks: each rank receives all samples
MIN_SAMPLES = 32  # fewer samples may be sorted by chance
MAX_ROW_BYTES = 4_096  # a class or its one-hot code; larger targets are images
GATHERED_BYTES = 64 << 20  # maximum bytes of samples, including inputs
ROWS_A_VALUE = 4  # minimum average: less frequent values are numbers or names, not classes
SURE = 10  # standard deviations by which ranks must differ
CLEAR = 0.05  # mean square contingency: 1 for two ranks with a class each; 0.05 if 9 % and 0 % of their rows have it
SAMPLED = 16  # purpose of the random stream


def sampled_places(n_rows: int, world_size: int) -> IntArray:
    """Return places in a shard to sample targets at, ascending; at random, so that no period hides them."""
    n_samples = min(n_rows, -(-MAX_SAMPLES // world_size))
    return np.sort(permutation(n_rows, 0, 0, SAMPLED)(0, n_samples)) if n_samples else np.empty(0, np.int64)


def sampled_values(targets: Column) -> list[TargetValue] | None:
    """Return each target as a plain value: a number, text, or a digest of a vector; None if targets are not labels."""
    if not isinstance(targets, torch.Tensor):
        return [target if isinstance(target, str) else repr(target) for target in targets]
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
    """Return whether targets are sorted, or equal values are consecutive.

    Args:
        values: targets of sampled rows, in the order of the file.
    """
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    if len(values) < MIN_SAMPLES or len(codes) == 1:
        return False
    codes_in_order = np.array([codes[value] for value in values])
    n_runs = 1 + np.count_nonzero(np.diff(codes_in_order))
    if n_runs == len(codes) <= len(values) // 2:
        return True
    if isinstance(values[0], str):
        return False
    steps = np.diff(np.array(values, dtype=np.float64))
    return bool((steps >= 0).all() or (steps <= 0).all())


def differ_clearly(samples: Sequence[Sequence[TargetValue]]) -> bool:
    """Return whether shards have clearly different shares of a few values, by a chi-squared test of homogeneity.

    Args:
        samples: targets of sampled rows, for each shard.
    """
    values = [_comparable(value) for sample in samples for value in sample]
    if len(values) < MIN_SAMPLES or len(set(values)) * ROWS_A_VALUE > len(values):
        return False
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    counts = np.zeros((len(samples), len(codes)))
    for shard, sample in enumerate(samples):
        np.add.at(counts[shard], [codes[_comparable(value)] for value in sample], 1)
    counts = counts[counts.any(axis=1)]
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / len(values)
    by_chance = (len(counts) - 1) * (len(codes) - 1)  # expected sum if all shards are alike
    excess = ((counts - expected) ** 2 / expected).sum() - by_chance
    return bool(excess > SURE * np.sqrt(2 * by_chance) and excess > CLEAR * len(values))


def _comparable(value: TargetValue) -> TargetValue:
    return value if value == value else "nan"  # NaN != NaN


@dataclass(frozen=True, eq=False)
class TargetComparison:
    """Compares a sample of the targets of all ranks that load their shards together.

    Attributes:
        shard: the rows of this rank, in memory.
        keys: arrays of the targets.
        read: returns the columns of the targets at some places in the shard.
        row_bytes: bytes of a sample, which are read for its targets.
        is_of_training: whether this rank trains on its shard.
    """

    shard: RankShard
    keys: Sequence[str]
    read: Callable[[IntArray], Sequence[Column]]
    row_bytes: int
    is_of_training: bool

    @property
    def _keeps_part(self) -> bool:
        """Whether this rank trains on the same rows in every epoch, and not on all of them."""
        return self.is_of_training and self.shard.world_size > 1 and not self.shard.reshard_every

    def answer(self) -> list[Any] | None:
        """Return this rank and a sample of each target, for JSON; None if the rank's part of the rows changes."""
        if not self._keeps_part:
            return None
        places = sampled_places(self.shard.n_held, self.shard.world_size)
        values: list[list[TargetValue] | None] = [[] for _ in self.keys]
        n_together = max(1, GATHERED_BYTES // max(1, self.row_bytes))
        for start in range(0, len(places) if self.keys else 0, n_together):
            for number, column in enumerate(self.read(places[start : start + n_together])):
                earlier, new = values[number], sampled_values(column)
                values[number] = None if earlier is None or new is None else earlier + new
        return [self.shard.rank, values]

    def compare(self, answers: Sequence[Any]) -> None:
        """Warn if targets differ between ranks. Only the first of the ranks that load together warns.

        Args:
            answers: answers of all ranks that load together.
        """
        shard, ranks = self.shard, dict(answers) if self._keeps_part else {}
        if shard.rank != min(ranks, default=None):
            return
        for key, values in zip(self.keys, zip(*(ranks[rank] for rank in sorted(ranks)), strict=True), strict=True):
            if None in values:
                continue
            together = list(chain.from_iterable(values))
            # A rank that loads alone does not know the targets of the others, but sees whether its own are sorted.
            is_sorted = shard.mode == "contiguous" and are_in_order(together)
            if is_sorted or (shard.mode == "interleave" and len(ranks) == shard.world_size and differ_clearly(values)):
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
        f"{why}: in every epoch, each rank trains on different targets. Pass {advice}, or shuffle the rows once "
        "(lightning-h5 repack --shuffle-rows).",
        stacklevel=4,
    )

"""Options that travel together, checked once, when a data module is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import H5ValueError
from .checks import check_batch_size

__all__ = ["SPLITS", "LoaderOptions", "Split", "SplitOptions"]

Split = Literal["train", "val", "test", "predict"]
SPLITS: tuple[Split, ...] = ("train", "val", "test", "predict")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How batches are made and brought here; see the data modules' arguments of the same names."""

    eval_batch_size: int | None
    shuffle: bool | Literal["global", "window"]
    drop_last: bool
    seed: int | None
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool | Literal["auto"]
    persistent_workers: bool
    multiprocessing_context: str | None
    timeout: float
    worker_init_fn: Callable[[int], Any] | None
    collate_fn: Callable[[Any], Any] | None
    world_size: int | None
    rank: int | None

    def __post_init__(self) -> None:
        check_batch_size(self.eval_batch_size, "eval_batch_size")
        if self.shuffle not in (True, False, "global", "window"):
            raise H5ValueError(f"shuffle={self.shuffle!r} was given. Pass True, False or 'global'.")
        if self.num_workers < 0:
            raise H5ValueError(f"num_workers={self.num_workers} was given. Pass 0 (read in this process) or more.")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise H5ValueError(f"prefetch_factor={self.prefetch_factor} was given. Pass at least 1, or None.")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise H5ValueError(f"seed={self.seed!r} was given. Pass a whole number from 0 on, or None.")


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How one set of files is cut into splits; see the data modules' arguments of the same names."""

    val_fraction: float
    test_fraction: float
    group_key: str | None
    num_folds: int | None
    fold: int | None
    split_seed: int

    def __post_init__(self) -> None:
        val, test = self.val_fraction, self.test_fraction
        if not (0 <= val < 1 and 0 <= test < 1 and val + test < 1):
            raise H5ValueError(
                f"val_fraction={val} and test_fraction={test} leave {1 - val - test:g} for training. "
                "Pass shares from 0 to 1 that add up to less than 1."
            )
        if (self.num_folds is None) != (self.fold is None):
            raise H5ValueError(f"num_folds={self.num_folds} and fold={self.fold} were given. Pass both, or neither.")
        if self.num_folds is not None and val:
            raise H5ValueError(
                f"num_folds={self.num_folds} and val_fraction={val} were given; both say which rows validate. Pass one."
            )
        if self.group_key is not None and not self.cuts_any:
            raise H5ValueError(
                f"group_key={self.group_key!r} was given, but nothing is cut. Pass val_fraction, test_fraction or "
                "num_folds and fold, or leave group_key out."
            )

    @property
    def cuts_any(self) -> bool:
        """Whether rows are cut off the training files at all."""
        return bool(self.val_fraction or self.test_fraction or self.num_folds)

    def cuts(self, split: Split) -> bool:
        """Whether the training files give rows to a split."""
        if split == "val":
            return bool(self.val_fraction) or self.num_folds is not None
        return split == "test" and bool(self.test_fraction)

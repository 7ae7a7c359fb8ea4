"""Options that travel together, checked once, when a data module is made."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import H5ValueError
from ..hdf5 import Trust
from ..sizes import parse_bytes
from ..types import DTypeLike, Keys, PathLike
from .checks import maybe_whole, share, whole

__all__ = ["SPLITS", "LoaderOptions", "SampleOptions", "Split", "SplitOptions", "check_callable"]

Split = Literal["train", "val", "test", "predict"]
SPLITS: tuple[Split, ...] = ("train", "val", "test", "predict")


TIMEOUT = 600.0
"""Seconds without a batch after which a worker hangs: more than any that works takes, less than a night."""


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
    setup_timeout: float
    on_resume_mismatch: Literal["raise", "restart_epoch"]
    on_error: Literal["raise"]
    shuffle_bytes: int
    streams: int | None
    cache_bytes: int | None
    worker_init_fn: Callable[[int], Any] | None
    collate_fn: Callable[[Any], Any] | None
    world_size: int | None
    rank: int | None

    @classmethod
    def of(
        cls,
        *,
        eval_batch_size: int | None,
        shuffle: bool | Literal["global", "window"],
        drop_last: bool | None,
        seed: int | None,
        num_workers: int,
        prefetch_factor: int | None,
        pin_memory: bool | Literal["auto"],
        persistent_workers: bool | None,
        multiprocessing_context: str | None,
        timeout: float | None,
        setup_timeout: float,
        on_resume_mismatch: Literal["raise", "restart_epoch"],
        on_error: Literal["raise"],
        shuffle_bytes: int | str,
        streams: int | None,
        cache_bytes: int | str,
        worker_init_fn: Callable[[int], Any] | None,
        collate_fn: Callable[[Any], Any] | None,
        world_size: int | None,
        rank: int | None,
    ) -> LoaderOptions:
        """The options as a user gave them, checked.

        Raises:
            H5ValueError: one makes no sense.
        """
        return cls(
            eval_batch_size=maybe_whole(eval_batch_size, "eval_batch_size", least=1),
            shuffle=shuffle,
            drop_last=bool(drop_last),
            seed=maybe_whole(seed, "seed", least=0),
            num_workers=whole(num_workers, "num_workers", least=0),
            prefetch_factor=maybe_whole(prefetch_factor, "prefetch_factor", least=1),
            pin_memory=pin_memory,
            persistent_workers=persistent_workers is not False,
            multiprocessing_context=multiprocessing_context,
            timeout=TIMEOUT if timeout is None else timeout,
            setup_timeout=setup_timeout,
            on_resume_mismatch=on_resume_mismatch,
            on_error=on_error,
            shuffle_bytes=parse_bytes(shuffle_bytes, "shuffle_bytes"),
            streams=maybe_whole(streams, "streams", least=1),
            cache_bytes=None if cache_bytes == "auto" else parse_bytes(cache_bytes, "cache_bytes"),
            worker_init_fn=worker_init_fn,
            collate_fn=collate_fn,
            world_size=maybe_whole(world_size, "world_size", least=1),
            rank=maybe_whole(rank, "rank", least=0),
        )

    def __post_init__(self) -> None:
        if self.shuffle not in (True, False, "global", "window"):
            raise H5ValueError(f"shuffle={self.shuffle!r} was given. Pass True, False, 'global' or 'window'.")
        if self.pin_memory not in (True, False, "auto"):
            raise H5ValueError(f"pin_memory={self.pin_memory!r} was given. Pass True, False or 'auto'.")
        methods = multiprocessing.get_all_start_methods()
        if self.multiprocessing_context not in (None, *methods):
            raise H5ValueError(
                f"multiprocessing_context={self.multiprocessing_context!r} was given. "
                f"Pass {', '.join(methods)}, or None."
            )
        if self.timeout < 0:
            raise H5ValueError(f"timeout={self.timeout!r} was given. Pass seconds, or 0 to wait for ever.")
        if self.on_resume_mismatch not in ("raise", "restart_epoch"):
            raise H5ValueError(
                f"on_resume_mismatch={self.on_resume_mismatch!r} was given. Pass 'raise' or 'restart_epoch'."
            )
        if self.on_error != "raise":
            raise H5ValueError(
                f"on_error={self.on_error!r} was given; rows are never left out in silence. Pass 'raise', and leave "
                "out what cannot be read by a filter (`where`) or by a `split_file` that does not name it."
            )
        if self.setup_timeout <= 0:
            raise H5ValueError(f"setup_timeout={self.setup_timeout!r} was given. Pass seconds, more than 0.")
        for name in ("collate_fn", "worker_init_fn"):
            check_callable(getattr(self, name), name)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What a sample is made of; see the data modules' arguments of the same names."""

    x_key: Keys | None
    y_key: Keys | None
    x_dtype: DTypeLike
    y_dtype: DTypeLike
    transform: Callable[..., Any] | None
    target_transform: Callable[..., Any] | None
    eval_transform: Callable[..., Any] | None
    batch_transform: Callable[..., Any] | None
    normalize: PathLike | None
    with_index: bool
    sample: Literal["row"] | None
    trust: Trust
    swmr: bool


def check_callable(value: object, name: str) -> None:
    """Refuses what is neither None nor to be called.

    Raises:
        H5ValueError: it is neither.
    """
    if value is not None and not callable(value):
        raise H5ValueError(f"{name}={value!r} was given, which cannot be called. Pass a function, or None.")


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How one set of files is cut into splits; see the data modules' arguments of the same names."""

    val_fraction: float
    test_fraction: float
    group_key: str | None
    num_folds: int | None
    fold: int | None
    split_seed: int
    stratify_key: str | None = None
    split_file: PathLike | None = None

    @classmethod
    def of(
        cls,
        val_fraction: float,
        test_fraction: float,
        group_key: str | None,
        num_folds: int | None,
        fold: int | None,
        split_seed: int,
        stratify_key: str | None,
        split_file: PathLike | None,
    ) -> SplitOptions:
        """The options as a user gave them, checked.

        Raises:
            H5ValueError: one makes no sense.
        """
        return cls(
            val_fraction=share(val_fraction, "val_fraction"),
            test_fraction=share(test_fraction, "test_fraction"),
            group_key=group_key,
            num_folds=maybe_whole(num_folds, "num_folds", least=2),
            fold=maybe_whole(fold, "fold", least=0),
            split_seed=whole(split_seed, "split_seed", least=0),
            stratify_key=stratify_key,
            split_file=split_file,
        )

    def __post_init__(self) -> None:
        val, test = self.val_fraction, self.test_fraction
        if val + test >= 1:
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
        for name, is_used in (("group_key", self.cuts_any), ("stratify_key", self.says_what_to_cut)):
            if getattr(self, name) is not None and not is_used:
                raise H5ValueError(
                    f"{name}={getattr(self, name)!r} was given, but nothing is cut. Pass val_fraction, test_fraction "
                    f"or num_folds and fold, or leave {name} out."
                )

    @property
    def says_what_to_cut(self) -> bool:
        """Whether shares or folds are named."""
        return bool(self.val_fraction or self.test_fraction or self.num_folds)

    @property
    def cuts_any(self) -> bool:
        """Whether rows are cut off the training files at all."""
        return self.says_what_to_cut or self.split_file is not None

    def cuts(self, split: Split) -> bool:
        """Whether the training files give rows to a split, as far as shares and folds say."""
        if split == "val":
            return bool(self.val_fraction) or self.num_folds is not None
        return split == "test" and bool(self.test_fraction)

    def may_cut(self, split: Split) -> bool:
        """The same, or a file may say so."""
        return self.cuts(split) or (self.split_file is not None and split in ("val", "test"))

    @property
    def of_a_cut(self) -> dict[str, Any]:
        """What a cut follows from, where it follows from anything."""
        names = ("val_fraction", "test_fraction", "num_folds", "fold", "split_seed", "stratify_key")
        return {name: getattr(self, name) for name in names} if self.says_what_to_cut else {}

"""Option objects of data modules and datasets: each setting is declared, checked and documented here, once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np

from .errors import H5ValueError, listing, near
from .sizes import parse_bytes, whole
from .types import PathLike

__all__ = [
    "MAX_INTEGRITY",
    "DistributedOptions",
    "FileOptions",
    "MemoryOptions",
    "MixtureOptions",
    "Options",
    "RowCacheOptions",
    "SegmentOptions",
    "ShuffleOptions",
    "SplitOptions",
    "WeightOptions",
    "WorkerOptions",
    "check_callable",
    "check_choice",
    "check_fraction",
    "check_whole",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the option classes: makes one from what an argument was given."""

    @classmethod
    def parse(cls, value: Any, argument: str) -> Self:
        """Return the options that an argument stands for.

        Args:
            value: the object itself, a mapping of its fields, the class's shorthand, or None for the defaults.
            argument: name of the argument, for errors.

        Raises:
            H5ValueError: a field is unknown, or the value is none of these.
        """
        if isinstance(value, cls):
            return value
        given = {} if value is None else value
        if not isinstance(given, Mapping) or not cls._is_mapping_of_fields(given):
            given = cls._from_shorthand(value)
        names = [field.name for field in fields(cls)]
        if given is None:
            raise H5ValueError(
                f"{argument}={value!r} was given. Pass {cls.__name__}({', '.join(f'{name}=...' for name in names)}), "
                "or a mapping with these keys."
            )
        for name in given:
            if name not in names:
                hint = near(str(name), names)
                raise H5ValueError(f"{argument} has no field {name!r}.{hint} Its fields are {listing(names)}.")
        return cls(**given)

    @classmethod
    def _is_mapping_of_fields(cls, value: Mapping[Any, Any]) -> bool:
        """Whether a mapping names fields, and is not a shorthand."""
        return True

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        """The fields that a shorthand stands for; None if it is none."""
        return None


def check_choice(value: object, name: str, allowed: Sequence[object]) -> None:
    """Raise an ``H5ValueError`` if a value is not one of those allowed."""
    if isinstance(value, bool) or value not in allowed:
        raise H5ValueError(f"{name}={value!r} was given. Pass {listing(allowed)}.")


def check_callable(value: object, name: str) -> None:
    """Raise an ``H5ValueError`` if a value is neither None nor callable."""
    if value is not None and not callable(value):
        raise H5ValueError(f"{name}={value!r} was given, which cannot be called. Pass a function, or None.")


def check_whole(value: Any, name: str, least: int, *, allow_none: bool = True) -> None:
    """Raise an ``H5ValueError`` if a value is not a whole number of at least ``least``, nor None if that is allowed."""
    if value is not None or not allow_none:
        whole(value, name, least=least)


def check_fraction(value: object, name: str) -> None:
    """Raise an ``H5ValueError`` if a value is not a number from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise H5ValueError(f"{name}={value!r} was given. Pass a fraction of the rows, from 0 to below 1.")


@dataclass(frozen=True, kw_only=True)
class SplitOptions(Options):
    """How one set of files is split into training, validation and test rows.

    Shorthand: a float, ``val_fraction``.

    Args:
        val_fraction: fraction of the training files' rows to validate on, from 0 to below 1.
        test_fraction: fraction of the training files' rows to test on, from 0 to below 1.
        group_key: array with each row's group, such as a patient or a recording. Groups are never divided.
        stratify_key: array with each row's class. All splits and folds get about the same share of each class.
        num_folds: number of folds for cross-validation over the training rows.
        fold: the fold to validate on, from 0.
        seed: decides which rows go where. Separate from the training seed, so that another training seed moves no row
            between training and test.
        file: JSON file with the assignment of rows to splits. Read if it exists, written otherwise. Raises if it was
            made with other fractions or folds, or lacks a group.
    """

    val_fraction: float = 0.0
    test_fraction: float = 0.0
    group_key: str | None = None
    stratify_key: str | None = None
    num_folds: int | None = None
    fold: int | None = None
    seed: int = 0
    file: PathLike | None = None

    def __post_init__(self) -> None:
        val, test = self.val_fraction, self.test_fraction
        check_fraction(val, "val_fraction")
        check_fraction(test, "test_fraction")
        check_whole(self.num_folds, "num_folds", 2)
        check_whole(self.fold, "fold", 0)
        check_whole(self.seed, "split.seed", 0)
        if val + test >= 1:
            raise H5ValueError(
                f"val_fraction={val} and test_fraction={test} leave {1 - val - test:g} for training. "
                "Pass fractions from 0 to 1 that add up to less than 1."
            )
        if (self.num_folds is None) != (self.fold is None):
            raise H5ValueError(f"num_folds={self.num_folds} and fold={self.fold} were given. Pass both, or neither.")
        if self.num_folds is not None and val:
            raise H5ValueError(
                f"num_folds={self.num_folds} and val_fraction={val} were given; both choose the validation rows. "
                "Pass one of them."
            )
        for name, is_used in (("group_key", self.is_given), ("stratify_key", self.has_fractions)):
            if getattr(self, name) is not None and not is_used:
                raise H5ValueError(
                    f"{name}={getattr(self, name)!r} was given, but nothing is split. Pass val_fraction, "
                    f"test_fraction or num_folds and fold, or leave {name} out."
                )

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return {"val_fraction": value} if is_number else None

    @property
    def has_fractions(self) -> bool:
        """Whether fractions or folds are given."""
        return bool(self.val_fraction or self.test_fraction or self.num_folds)

    @property
    def is_given(self) -> bool:
        """Whether the training files are split at all."""
        return self.has_fractions or self.file is not None

    def fills(self, split: str) -> bool:
        """Whether fractions or folds give rows of the training files to a split."""
        if split == "val":
            return bool(self.val_fraction) or self.num_folds is not None
        return split == "test" and bool(self.test_fraction)

    def may_fill(self, split: str) -> bool:
        """Whether fractions, folds or the split file may give rows to a split."""
        return self.fills(split) or (self.file is not None and split in ("val", "test"))

    def recipe(self) -> dict[str, Any]:
        """What a split follows from, as it is written to the split file; empty without fractions and folds."""
        names = ("val_fraction", "test_fraction", "num_folds", "fold", "seed", "stratify_key")
        return {name: getattr(self, name) for name in names} if self.has_fractions else {}


@dataclass(frozen=True, kw_only=True)
class WeightOptions(Options):
    """How often each training row is drawn; an epoch has as many rows as there are. Evaluation has each row once.

    Shorthand: the name of an array, ``weight_key``.

    Args:
        weight_key: array with each row's weight, 0 or more.
        balance_key: array with each row's class. All classes are drawn equally often, or by ``class_weights``.
        class_weights: weight of each class of ``balance_key``; names all of them.
    """

    weight_key: str | None = None
    balance_key: str | None = None
    class_weights: dict[Any, float] | None = None

    def __post_init__(self) -> None:
        if self.weight_key is not None and self.balance_key is not None:
            raise H5ValueError(
                f"weight_key={self.weight_key!r} and balance_key={self.balance_key!r} were given; both decide how "
                "often rows are drawn. Pass one of them."
            )
        if self.class_weights is None:
            return
        if self.balance_key is None:
            raise H5ValueError("class_weights was given without balance_key. Pass the array with the classes as well.")
        given: Any = self.class_weights  # a configuration file may hold anything
        if not isinstance(given, Mapping):
            raise H5ValueError(f"class_weights={given!r} is not a mapping from classes to weights. Pass one.")
        for name, weight in given.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not 0 <= weight < np.inf:
                raise H5ValueError(f"the weight of class {name!r} is {weight!r}. Pass a number of 0 or more.")

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"weight_key": value} if isinstance(value, str) else None

    @property
    def is_given(self) -> bool:
        """Whether rows are weighted at all."""
        return self.weight_key is not None or self.balance_key is not None

    @property
    def keys(self) -> list[str]:
        """The arrays that weights follow from."""
        return [key for key in (self.weight_key, self.balance_key) if key is not None]


@dataclass(frozen=True, kw_only=True)
class SegmentOptions(Options):
    """Which rows belong together, as one sample each (``sample="segment"``).

    Args:
        key: array with each row's group, such as a patient or a recording. A sample has all rows of a group that pass
            the filters; ``batch_size`` counts groups. A batch pads them with zeros to its longest, as
            ``(batch, steps, ...)``, with ``"mask"`` (True at rows) and ``"lengths"``.
        sort_key: array that the rows of a segment are sorted by. None keeps the storage order.
        bucket: make training batches of segments of similar length, in random order, with equal steps on all ranks.
    """

    key: str | None = None
    sort_key: str | None = None
    bucket: bool = False

    def __post_init__(self) -> None:
        if self.key is None and (self.sort_key is not None or self.bucket):
            raise H5ValueError("segments was given without key. Pass the array with each row's group as key.")


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(Options):
    """Which sources ``CombinedHDF5DataModule`` mixes, and how.

    Shorthand: the sources, unless they are a mapping with a key ``"sources"``.

    Args:
        sources: mapping from each source's name to its files, or to a mapping with ``paths`` and with filters and
            fields of its own (``load_fields``, ``field_map``, ``where``, ``label``, ``valid_mask``), which replace the
            data module's. Samples have the name, as ``"source"``.
        strategy: "concat" joins all rows. "weighted" draws sources by ``weights``. "round_robin" takes them in turn.
            "alternating" follows ``pattern``. "sequential" takes one whole source after the other. A source that is
            used up starts again, in a new order; the next epoch continues where this one left it.
        weights: of the sources, in their order or by name, 0 or more. None takes their sizes.
        epoch_length: "sum" (as many rows as all sources have), "max" (until each was seen whole), "min" (until the
            first is used up, or a batch less if shares are rounded: no row twice), or a number of steps.
        mix: "batches" makes each batch of one source (not for "concat"). "rows" takes turns by rows.
        pattern: names of sources in their turn, for "alternating": ``["a", "a", "b"]``.
    """

    sources: Any = None
    strategy: Literal["concat", "weighted", "round_robin", "alternating", "sequential"] = "concat"
    weights: list[float] | dict[str, float] | None = None
    epoch_length: int | Literal["sum", "max", "min"] = "sum"
    mix: Literal["batches", "rows"] = "batches"
    pattern: list[str] | None = None

    def __post_init__(self) -> None:
        check_choice(
            self.strategy, "mixture.strategy", ("concat", "weighted", "round_robin", "alternating", "sequential")
        )
        check_choice(self.mix, "mixture.mix", ("batches", "rows"))
        for name, strategy in (("weights", "weighted"), ("pattern", "alternating")):
            if getattr(self, name) is not None and self.strategy != strategy:
                raise H5ValueError(
                    f"{name}={getattr(self, name)!r} was given with strategy={self.strategy!r}, which does not use it. "
                    f"Pass strategy={strategy!r}, or leave {name} out."
                )
        if isinstance(self.epoch_length, str):
            if self.epoch_length not in ("sum", "max", "min"):
                raise H5ValueError(
                    f"epoch_length={self.epoch_length!r} was given. Pass 'sum', 'max', 'min' or a number of steps."
                )
        else:
            whole(self.epoch_length, "epoch_length", least=1)

    @classmethod
    def _is_mapping_of_fields(cls, value: Mapping[Any, Any]) -> bool:
        return "sources" in value or set(value) <= {field.name for field in fields(cls)}

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return {"sources": value} if isinstance(value, Mapping) or is_list else None


@dataclass(frozen=True, kw_only=True)
class RowCacheOptions(Options):
    """How many recently used rows each process keeps.

    Shorthand: an int, ``size``.

    Args:
        size: number of rows; 0 keeps none.
        max_bytes: memory that they may take on a rank; worker processes share it. "300 MiB" are a thousand rows of
            300 KB.
    """

    size: int = 1000
    max_bytes: int | str = "300 MiB"

    def __post_init__(self) -> None:
        check_whole(self.size, "row_cache.size (cache_size of a dataset)", 0, allow_none=False)
        parse_bytes(self.max_bytes, "row_cache.max_bytes")

    @property
    def n_bytes(self) -> int:
        """``max_bytes`` as a number of bytes."""
        return parse_bytes(self.max_bytes, "row_cache.max_bytes")

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"size": value} if isinstance(value, int) and not isinstance(value, bool) else None


MAX_INTEGRITY = 4


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions(Options):
    """How training rows are shuffled.

    Shorthand: ``True`` (``mode="auto"``), ``False`` (``mode="none"``), ``"global"`` or ``"window"``.

    Args:
        mode: "global" permutes all rows. "window" shuffles blocks (rows that share a chunk) a window at a time, so that
            each chunk is decoded once an epoch. "auto" takes "global" if random access is as cheap as sequential
            access, or all decoded rows fit ``buffer``, and "window" otherwise. "none" keeps the storage order.
        buffer: decoded bytes that "window" mixes at a time on a rank, over all its workers, such as "512 MiB". It
            decides the order: the more blocks it holds, the better batches are mixed.
        streams: independent streams of blocks that "window" deals to ranks and workers. None makes one for each, so
            that no two of them decode the same chunk. A number gives the same order for any number of ranks and
            workers; ``buffer`` is then shared by all streams.
    """

    mode: Literal["auto", "global", "window", "none"] = "auto"
    buffer: int | str = "512 MiB"
    streams: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.mode, "shuffle.mode", ("auto", "global", "window", "none"))
        parse_bytes(self.buffer, "shuffle.buffer")
        check_whole(self.streams, "shuffle.streams", 1)

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        if isinstance(value, bool):
            return {"mode": "auto" if value else "none"}
        return {"mode": value} if isinstance(value, str) else None

    @property
    def buffer_bytes(self) -> int:
        """``buffer`` as a number of bytes."""
        return parse_bytes(self.buffer, "shuffle.buffer")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """How worker processes are run (with ``num_workers`` above 0), and how far batches are read ahead.

    Args:
        prefetch_factor: batches read ahead, for each worker or in this process. None means 2 for each worker; without
            workers it means 4, or twice as many as are read together, up to 16 that take 3 MiB (8 MiB in the order
            "window").
        persistent: keep workers between epochs.
        start_method: "fork", "forkserver" or "spawn". None takes Python's default.
        timeout: seconds without a batch after which a worker counts as hanging and is killed. The default is more than
            any working worker takes; 0 waits forever.
        init_fn: function that runs in each worker, after its random generators are seeded.
    """

    prefetch_factor: int | None = None
    persistent: bool = True
    start_method: Literal["fork", "forkserver", "spawn"] | None = None
    timeout: float = 600.0
    init_fn: Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        check_whole(self.prefetch_factor, "prefetch_factor", 1)
        check_choice(self.start_method, "start_method", (None, *multiprocessing.get_all_start_methods()))
        if not self.timeout >= 0:
            raise H5ValueError(f"timeout={self.timeout!r} was given. Pass seconds, or 0 to wait forever.")
        check_callable(self.init_fn, "init_fn")


@dataclass(frozen=True, kw_only=True)
class FileOptions(Options):
    """How files are opened, and which files are accepted.

    Args:
        mmap: map contiguous arrays into memory: two to three times the rows per second. Only for files that no program
            truncates while they are read, since that kills the process (SIGBUS).
        cache_bytes: memory for decoded rows on a rank, shared by its workers. It decides speed alone. "auto" is what
            decoding each chunk once an epoch needs in a data module, and 64 MiB in a dataset of its own.
        swmr: the files have a live writer in single-writer/multiple-reader mode. Rows that exist in ``setup`` are read.
        allow_external: follow links, external storage and virtual arrays into other files. Off by default: a file can
            name any other file you can read.
        trusted: accept chunks over 1 GiB, and arrays that declare over 4 GiB and over 1,000 times their stored size.
            Off by default: a tiny file can declare petabytes.
        min_integrity: lowest integrity level to accept, 0 to 4: how surely damage to an array is noticed.
        verify: "digest" compares rows with the digests next to the files, which ``lightning-h5 check --write-digests``
            writes. None relies on the files' own checksums.
    """

    mmap: bool = False
    cache_bytes: int | str = "auto"
    swmr: bool = False
    allow_external: bool = False
    trusted: bool = False
    min_integrity: int = 0
    verify: Literal["digest"] | None = None

    def __post_init__(self) -> None:
        if self.cache_bytes != "auto":
            parse_bytes(self.cache_bytes, "cache_bytes")
        check_choice(self.min_integrity, "min_integrity", range(MAX_INTEGRITY + 1))
        if self.verify not in (None, "digest"):
            raise H5ValueError(
                f"verify={self.verify!r} was given. Pass 'digest', which compares rows with the digests that "
                "`lightning-h5 check --write-digests` wrote, or None."
            )

    @property
    def cache_size(self) -> int | None:
        """``cache_bytes`` as a number of bytes; None for "auto"."""
        return None if self.cache_bytes == "auto" else parse_bytes(self.cache_bytes, "cache_bytes")


@dataclass(frozen=True, kw_only=True)
class DistributedOptions(Options):
    """How ranks work together, and what a resume requires.

    Args:
        rank: this replica, if neither the trainer nor ``torch.distributed`` knows it.
        world_size: number of replicas; pass both or neither.
        setup_timeout: seconds that ranks wait in ``setup`` for the slowest one before all of them stop: a rank that
            hangs costs minutes of a cluster, and not the process group's half hour.
        on_resume_mismatch: what to do if a checkpoint's position does not fit (other files, another seed, no position).
            "raise" refuses, with the saved and the present values. "restart_epoch" warns, keeps weights and counters,
            and starts the interrupted epoch again: some of its rows are repeated.
    """

    rank: int | None = None
    world_size: int | None = None
    setup_timeout: float = 120.0
    on_resume_mismatch: Literal["raise", "restart_epoch"] = "raise"

    def __post_init__(self) -> None:
        check_whole(self.world_size, "world_size", 1)
        check_whole(self.rank, "rank", 0)
        if not self.setup_timeout > 0:
            raise H5ValueError(f"setup_timeout={self.setup_timeout!r} was given. Pass seconds, more than 0.")
        check_choice(self.on_resume_mismatch, "on_resume_mismatch", ("raise", "restart_epoch"))


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """How ``RankCachedH5DataModule`` holds each rank's rows in memory.

    Shorthand: the mode.

    Args:
        mode: "interleave" gives each rank every ``world_size``-th row, so that each has all classes of a sorted file;
            ranks of a machine hold the rows together, and each decodes a part. "contiguous" gives each rank
            neighboring rows, and warns if they are sorted by their targets; each machine then decodes its own chunks
            alone.
        share: hold rows once for all ranks of a machine that need the same ones, as tensor-parallel peers do.
        device: "cpu", or "cuda" to hold the rows in the rank's GPU: batches never cross the bus.
        pin: lock the rows' pages for copies to a GPU. No effect without CUDA, or on memory that ranks share. Batches
            are page-locked by ``pin_memory`` in any case.
        reshard_every_n_epochs: draw the ranks' rows again every so many epochs, so that rows meet others than those of
            their first shard. Each time takes as long as loading. 0 keeps them.
    """

    mode: Literal["contiguous", "interleave"] = "interleave"
    share: bool = False
    device: str = "cpu"
    pin: bool = True
    reshard_every_n_epochs: int = 0

    def __post_init__(self) -> None:
        check_choice(self.mode, "memory.mode", ("contiguous", "interleave"))
        check_whole(self.reshard_every_n_epochs, "reshard_every_n_epochs", 0)

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"mode": value} if isinstance(value, str) else None

"""Options on how rows are read: order, workers, files, ranks, memory."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ..errors import H5ValueError
from ..sizes import parse_bytes
from ..types import PathLike
from .base import Options, check_callable, check_choice, check_whole
from .keywords import checks_keywords

__all__ = [
    "MAX_INTEGRITY",
    "BadRowOptions",
    "DistributedOptions",
    "FileOptions",
    "MemoryOptions",
    "ShuffleOptions",
    "StagingOptions",
    "WorkerOptions",
]

MAX_INTEGRITY = 4


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class ShuffleOptions(Options):
    """How training rows are shuffled.

    Shorthand: ``True`` (``mode="auto"``), ``False`` (``mode="none"``), ``"global"`` or ``"chunks"``.

    Args:
        mode: "global" permutes all rows. "chunks" permutes blocks (rows that share a chunk) and mixes the rows of as
            many blocks as fit ``buffer``, so that each chunk is decoded once per epoch; arrays without chunks are
            divided into blocks of a megabyte. "auto" chooses "global" if random access is as cheap as sequential access
            (arrays without chunks that fit in the page cache), or if all decoded rows fit ``buffer``, and "chunks"
            otherwise. "none" keeps the storage order.
        buffer: decoded bytes that "chunks" mixes at a time on a rank, over all its workers, such as "512 MiB". It
            affects the order: the more blocks it holds, the better batches are mixed.
        streams: number of independent streams of blocks that "chunks" divides among ranks and workers. None creates
            one per rank and worker, so that no two of them decode the same chunk. A number keeps the order the same for
            any number of ranks and workers; all streams then share ``buffer``. With ``scope="node"``, the streams are
            divided among the nodes.
        scope: "global" mixes the rows of all ranks. "node" assigns blocks to nodes once per run, and shuffles within
            each node, so that a node reads the same rows in every epoch: from its page cache or local cache, if they
            fit. Rows of two nodes never share a batch. The Trainer sets the number of nodes, or else the launcher's
            variables (such as ``LOCAL_WORLD_SIZE``); the default is 1. Not for mixtures, weights, ``segments.bucket``
            and rows in memory.
    """

    shorthand = "True, False, 'global', 'chunks'"

    mode: Literal["auto", "global", "chunks", "none"] = "auto"
    buffer: int | str = "512 MiB"
    streams: int | None = None
    scope: Literal["global", "node"] = "global"

    def __post_init__(self) -> None:
        mode: Any = self.mode  # a configuration file may hold anything
        if mode == "window":
            raise H5ValueError(
                "shuffle='window' was given. Pass shuffle='chunks', which mixes the rows of several chunks at a time. "
                "The argument window sets the steps of a sample."
            )
        check_choice(self.mode, "shuffle.mode", ("auto", "global", "chunks", "none"))
        check_choice(self.scope, "shuffle.scope", ("global", "node"))
        if self.scope == "node" and self.mode == "none":
            raise H5ValueError(
                "shuffle.scope='node' was given with shuffle.mode='none', which shuffles nothing. Pass mode='auto', "
                "'global' or 'chunks', or leave scope out."
            )
        parse_bytes(self.buffer, "shuffle.buffer")
        check_whole(self.streams, "shuffle.streams", 1)

    def check_scope(self, owner: str, reason: str) -> None:
        """Raise an ``H5ValueError`` for ``scope="node"``.

        Args:
            owner: the object or option that does not support it.
            reason: how the owner shuffles instead.
        """
        if self.scope == "node":
            raise H5ValueError(
                f"shuffle.scope='node' was given with {owner}, {reason}. Leave one of them out; scope='node' is for "
                "LazyH5DataModule, CombinedHDF5DataModule and loaders of their datasets, with each row once per epoch."
            )

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        if isinstance(value, bool):
            return {"mode": "auto" if value else "none"}
        return {"mode": value} if isinstance(value, str) else None

    @property
    def buffer_bytes(self) -> int:
        """``buffer`` as a number of bytes."""
        return parse_bytes(self.buffer, "shuffle.buffer")


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """How worker processes run (with ``num_workers`` above 0).

    Args:
        persistent: keep workers between epochs.
        start_method: "fork", "forkserver" or "spawn". None uses Python's default.
        timeout: seconds without a batch after which a worker counts as hanging and is killed. The default is longer
            than a working worker needs; 0 waits forever.
        init_fn: function that runs in each worker, after its random generators are seeded.
    """

    persistent: bool = True
    start_method: Literal["fork", "forkserver", "spawn"] | None = None
    timeout: float = 600.0
    init_fn: Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        check_choice(self.start_method, "start_method", (None, *multiprocessing.get_all_start_methods()))
        if not self.timeout >= 0:
            raise H5ValueError(f"timeout={self.timeout!r} was given. Pass seconds, or 0 to wait forever.")
        check_callable(self.init_fn, "init_fn")

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        if isinstance(value, int):
            raise H5ValueError(
                f"workers={value!r} was given, but workers sets how worker processes run, not their number. Pass "
                f"num_workers={int(value)}."
            )
        return None


STAGES = ("train", "val", "test", "predict")


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class BadRowOptions(Options):
    """Skip samples with rows that cannot be decoded, and samples for which a transform raises.

    Shorthand: ``"skip"`` (the defaults). The argument ``on_bad_row`` also accepts ``"raise"``, which skips none.

    Args:
        limit: number of distinct samples to skip, over all ranks and since the start of the run. One more stops the
            run.
        stages: the stages that skip samples: "train", "val", "test", "predict", one or several. The default is
            training alone: a metric over a part of the samples is not comparable.
    """

    shorthand = "'raise', 'skip'"

    limit: int = 100
    stages: Sequence[Literal["train", "val", "test", "predict"]] = ("train",)

    def __post_init__(self) -> None:
        check_whole(self.limit, "on_bad_row.limit", 1, allow_none=False)
        stages: Any = self.stages  # a configuration file may hold anything
        stages = (stages,) if isinstance(stages, str) or not isinstance(stages, Sequence) else tuple(stages)
        for stage in stages:
            check_choice(stage, "on_bad_row.stages", STAGES)
        object.__setattr__(self, "stages", stages)

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {} if value == "skip" else None

    @classmethod
    def of(cls, value: Any, argument: str = "on_bad_row") -> BadRowOptions | None:
        """Return the options of ``on_bad_row``; None for "raise".

        Raises:
            H5ValueError: see ``parse``.
        """
        return None if isinstance(value, str) and value == "raise" else cls.parse(value, argument)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class StagingOptions(Options):
    """A local disk that caches bytes of files on slow storage, or of objects in a store, after the first read.

    Shorthand: the folder.

    Args:
        dir: a folder on the local disk, such as "$TMPDIR". It is created if it is missing. "~" and environment
            variables are expanded on each machine. All ranks and workers, and later jobs of the same user, share it.
        max_bytes: maximum disk space for the whole folder, such as "200 GB". None uses nine tenths of the free space.
        decoded: also cache decoded chunks, including those of files on the same disk: later epochs, workers, ranks and
            jobs read them at the speed of the disk or of the page cache. The cache needs up to the decoded size of the
            arrays; if only a part fits, the rest is decoded again in each epoch. Chunks are compared with their
            checksums, and decoded again if they are damaged. "auto" caches the arrays that the disk (or the page
            cache, if they fit) reads at least 1.5 times as fast as they are decoded, and logs both rates.
        storage_options: credentials and settings of an object store, as obstore or fsspec accept them. They are never
            recorded, neither in checkpoints nor in logs.
    """

    shorthand = "the path of a folder"

    dir: PathLike
    max_bytes: int | str | None = None
    decoded: bool | Literal["auto"] = False
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False, metadata={"secret": True})

    def __post_init__(self) -> None:
        folder: Any = self.dir  # a configuration file may hold anything
        if not (isinstance(folder, str | os.PathLike) and os.fspath(folder)):
            raise H5ValueError(f"staging.dir={folder!r} was given. Pass the path of a folder, such as '$TMPDIR'.")
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes, "staging.max_bytes")
        decoded: Any = self.decoded
        if not isinstance(decoded, bool) and decoded != "auto":
            raise H5ValueError(f"staging.decoded={decoded!r} was given. Pass True, False or 'auto'.")
        options: Any = self.storage_options
        if options is not None and not isinstance(options, Mapping):
            raise H5ValueError("staging.storage_options is not a mapping. Pass a mapping of settings, or None.")

    @classmethod
    def _from_shorthand(cls, value: Any) -> Mapping[str, Any] | None:
        return {"dir": value} if isinstance(value, str | os.PathLike) else None

    @property
    def folder(self) -> str:
        """``dir`` on this machine.

        Raises:
            H5ValueError: it names an environment variable that is not set.
        """
        folder = os.path.expandvars(os.path.expanduser(os.fsdecode(self.dir)))
        if missing := re.findall(r"\$\w+|\$\{\w+\}", folder):
            raise H5ValueError(
                f"staging.dir={self.dir!r} names the environment variable {missing[0].strip('${}')}, which is not set "
                "on this machine. Set it in the job script, or pass the path of a folder on a local disk."
            )
        return os.path.abspath(folder)

    @property
    def limit(self) -> int | None:
        """``max_bytes`` as a number of bytes; None for a share of the free space."""
        return None if self.max_bytes is None else parse_bytes(self.max_bytes, "staging.max_bytes")


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class FileOptions(Options):
    """How files are opened, and which files are accepted.

    Args:
        mmap: map contiguous arrays into memory: two to three times the rows per second. Only for files that no program
            truncates while they are read: a truncated mapping kills the process (SIGBUS).
        cache_bytes: memory for decoded rows on a rank, shared by its workers. It affects only the speed. "auto" is
            enough to decode each chunk once per epoch in a data module, and 64 MiB in a dataset without one.
        swmr: open files of a live writer in single-writer/multiple-reader mode. The dataset has the rows that exist in
            ``setup``.
        allow_external: follow links, external storage and virtual arrays into other files. Off by default: a file can
            name any other file you can read.
        trusted: accept chunks over 1 GiB, rows of over 65,536 chunks and more than the file has bytes, arrays that
            declare over 4 GiB and over 1,000 times their stored size, and arrays with several compressors that only
            the HDF5 library can read. Off by default: a tiny file can declare petabytes.
        min_integrity: lowest integrity level to accept, from 0 (damage goes unnoticed) to 4 (all damage is detected).
        decode_on: "cpu", or "cuda" to decode chunks of gzip, LZ4, Zstandard and bitshuffle on the rank's GPU, to the
            same values in the same order. ``cache_bytes`` is then memory of the GPU. Other arrays are decoded on the
            CPU. Only for ``LazyH5DataModule`` and ``H5LazyDataset``, without workers.
        verify: "digest" compares rows with the digests next to the files, which ``lightning-h5 check --write-digests``
            writes. None relies on the files' own checksums.
        catalog_dir: folder that caches the contents of files with more than 2,000 arrays in segments (groups or
            arrays), so that the next ``setup`` need not list them. An entry is valid until its file changes. "auto" is
            ``lightning_h5`` in the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``); None turns this off.
        staging: folder on a local disk that caches files on slow storage, or ``StagingOptions``. Data modules have an
            argument of this name instead.
    """

    mmap: bool = False
    cache_bytes: int | str = "auto"
    swmr: bool = False
    allow_external: bool = False
    trusted: bool = False
    min_integrity: int = 0
    decode_on: Literal["cpu", "cuda"] = "cpu"
    verify: Literal["digest"] | None = None
    catalog_dir: str | None = "auto"
    staging: StagingOptions | PathLike | None = None

    def __post_init__(self) -> None:
        if isinstance(self.staging, Mapping):  # options are compared, and used as keys
            raise H5ValueError("staging is a mapping. Pass FileOptions a folder, StagingOptions(...), or None.")
        if self.staging is not None:
            StagingOptions.parse(self.staging, "files.staging")
        if self.cache_bytes != "auto":
            parse_bytes(self.cache_bytes, "cache_bytes")
        if self.catalog_dir == "":
            raise H5ValueError("catalog_dir='' was given. Pass the path of a folder, 'auto' or None.")
        check_choice(self.min_integrity, "min_integrity", range(MAX_INTEGRITY + 1))
        check_choice(self.decode_on, "files.decode_on", ("cpu", "cuda"))
        if self.verify not in (None, "digest"):
            raise H5ValueError(
                f"verify={self.verify!r} was given. Pass 'digest', which compares rows with the digests that "
                "`lightning-h5 check --write-digests` wrote, or None."
            )

    @classmethod
    def parse(cls, value: Any, argument: str) -> Self:
        """See ``Options.parse``."""
        if isinstance(value, Mapping) and isinstance(value.get("staging"), Mapping):
            value = {**value, "staging": StagingOptions.parse(value["staging"], f"{argument}.staging")}
        return super().parse(value, argument)

    @property
    def staged(self) -> StagingOptions | None:
        """``staging`` as an object; None if nothing is staged."""
        return None if self.staging is None else StagingOptions.parse(self.staging, "files.staging")

    @property
    def cache_size(self) -> int | None:
        """``cache_bytes`` as a number of bytes; None for "auto"."""
        return None if self.cache_bytes == "auto" else parse_bytes(self.cache_bytes, "cache_bytes")


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class DistributedOptions(Options):
    """How ranks work together, and what a resume requires.

    Args:
        rank: this replica, if neither the trainer nor ``torch.distributed`` knows it.
        world_size: number of replicas; pass both or neither.
        setup_timeout: seconds that ranks wait in ``setup`` for the slowest one before all of them stop, so that a
            hanging rank costs minutes of a cluster instead of the process group's half hour.
        on_resume_mismatch: reaction to a checkpoint whose position does not fit (other files, another seed, no
            position). "raise" raises an error with the saved and the present values. "restart_epoch" warns, keeps
            weights and counters, and starts the interrupted epoch again: some of its rows are repeated.
    """

    rank: int | None = None
    world_size: int | None = None
    setup_timeout: float = 120.0
    on_resume_mismatch: Literal["raise", "restart_epoch"] = "raise"

    def __post_init__(self) -> None:
        check_whole(self.world_size, "world_size", 1)
        check_whole(self.rank, "rank", 0)
        timeout: Any = self.setup_timeout  # a configuration file may hold anything
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise H5ValueError(f"setup_timeout={self.setup_timeout!r} was given. Pass seconds, more than 0.")
        check_choice(self.on_resume_mismatch, "on_resume_mismatch", ("raise", "restart_epoch"))


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """How ``RankCachedH5DataModule`` holds each rank's rows in memory.

    Shorthand: the mode.

    Args:
        mode: "interleave" assigns every ``world_size``-th row to each rank, so that each rank has all classes of a
            sorted file; the ranks of a machine share the work of decoding. "contiguous" assigns neighboring rows to
            each rank, and warns if they are sorted by their targets; each machine then decodes only its own chunks.
        share: hold rows once for all ranks of a machine that need the same rows, as tensor-parallel peers do.
        device: "cpu", or "cuda" to hold the rows in the rank's GPU: batches never cross the bus.
        pin: lock the rows' pages for copies to a GPU. No effect without CUDA, or on memory that ranks share.
            ``pin_memory`` locks the pages of batches in any case.
        reshard_every_n_epochs: assign rows to ranks again after this number of epochs, so that rows of different shards
            share batches. Each time takes as long as loading. 0 keeps the first assignment.
    """

    shorthand = "'interleave', 'contiguous'"

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

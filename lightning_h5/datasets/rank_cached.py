"""``RankMemCachedH5Dataset``: a rank's shard, loaded once, served from memory."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import get_worker_info

from ..cores import is_forked
from ..errors import H5Error, H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions, close_when_collected, expand_paths, kind_of, process_pool
from ..options import FileOptions
from ..order import BlockTable, RankShard, Rows, ShardMode, as_array, resolve_replica, union
from ..readers import BulkTask, check_bounds, do_tasks
from ..sizes import parse_bytes
from ..types import DTypeLike, IntArray, Keys, Paths
from .base import RawBatch, ReadCost, RowDataset
from .buffers import BufferPool
from .catalog import describe_files, digest_of_rows
from .fields import Fields, checked_rows
from .held_rows import ColumnShape, HeldRows
from .normalize import Normalize, normalization_of
from .sample_layout import Transform, summary_of_fields, summary_of_files, summary_of_rows
from .shard_loading import NodeGroup, load_shards
from .target_order import MAX_SAMPLES, sampled_places, sampled_values, warn_of_different_targets

__all__ = ["RankMemCachedH5Dataset"]

BLOCKS_A_RANK = 16  # at least, that shards are drawn of
SAMPLES_OF_OTHERS = 128  # targets that a rank reads which loads without the others; some are its own

_log = logging.getLogger(__name__)


class RankMemCachedH5Dataset(RowDataset):
    """One rank's shard of the rows of HDF5 files, held in memory.

    Each rank loads its rows once, at the speed of the decoder on all cores, and reads no file after that. Works with
    or without a process group, on one GPU or none. ``len`` and indices are of the shard. Use it with
    ``EpochShuffleSampler``, or ``RankCachedH5DataModule`` under a Lightning Trainer, which also makes all ranks take
    equally many steps.

    Args:
        path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these (see
            ``H5LazyDataset``).
        x_key: the input array, a list of arrays, or a mapping, likewise.
        y_key: the target, likewise. None gives inputs alone.
        mode: "contiguous" gives each rank neighboring rows, so that it decodes its own chunks alone; it warns if the
            rows are sorted by their targets. "interleave" gives it every ``world_size``-th row, so that each rank has
            all classes of a sorted file; the ranks of a machine then hold the rows together and decode each chunk once
            (if they cannot, each rank decodes all of them once).
        x_dtype: dtype that the input is held in: a name, a NumPy or torch dtype, or a mapping from fields to one. The
            default is "float32", as models want; None keeps the file's, which takes a quarter for pictures of uint8.
            Packed integers are an error unless their stored dtype is named (see ``H5LazyDataset``).
        y_dtype: dtype of the target. None keeps the file's.
        transform: runs on each sample's input, a copy of its row.
        target_transform: runs on each sample's target.
        pin_host_memory: lock the shard's pages for copies to a GPU, in place. No effect without CUDA, and on memory
            that several ranks hold together.
        share_memory: hold rows once for all processes of this machine that need them: workers under any start method,
            and ranks that hold the same rows (tensor-parallel peers). The memory has no name and ends with its last
            process. Workers that are forked share it anyway.
        rdcc_nbytes: bytes of HDF5's chunk cache, or text such as "16 MiB", for arrays that only the HDF5 library can
            read. None leaves HDF5's.
        rdcc_nslots: slots of that cache, likewise.
        rdcc_w0: how eagerly it drops chunks that were read whole, likewise.
        swmr: the file has a live writer in single-writer/multiple-reader mode.
        log_fn: gets a line on what was loaded; None logs it.
        rank: this replica; with ``world_size`` it takes the place of the process group's, and ranks then load without
            each other.
        world_size: number of replicas.
        indices: rows to shard, in this order (shape ``(n,)``), or a mask over all rows. None shards all.
        reshard_every_n_epochs: of shards that a data module draws anew; 0 keeps them.
        seed: decides those.
        batch_transform: runs once on each batch that ``read_batch`` collates.
        normalize: a JSON file with mean and standard deviation of fields, of all their values or of each channel (see
            the how-to page on studies): these fields come as ``(x - mean) / std``, in float32 where they are stored as
            integers. Statistics of other fields, shapes or numbers of channels are refused.
        with_index: add each row's number among all rows that are sharded: last in a tuple, ``"index"`` in a dict.
        sample: "row" says that an index along axis 0 is a sample, for files that look like an image or volume each
            (see ``H5LazyDataset``).
        files: how files are opened, and which are accepted: ``FileOptions``, or a mapping of its fields (``mmap``,
            ``cache_bytes``, ``swmr``, ``allow_external``, ``trusted``, ``min_integrity``, ``verify``).
        cache_device: "cpu", or a GPU such as "cuda" or "cuda:1" to hold the shard there: batches never cross the bus.
        preload: load now. False loads when the first row is asked for.
        dtype_x: another spelling of ``x_dtype``.
        dtype_y: another spelling of ``y_dtype``.

    Attributes:
        shard: which rows this rank holds, and trains on.
        rows_on_each_rank: rows that every rank has at least; ``EpochShuffleSampler(num_samples=...)`` takes it.
        draw: how often the shards were drawn anew.
        for_training: warn if ranks hold rows with different targets for good.
        for_workers: hold rows so that workers which are started afresh can be given them, as ``share_memory`` does too.

    Raises:
        H5FileError: a file is missing, damaged, or needs a filter that is not installed.
        H5KeyError: an array is not in the file.
        H5ValueError: arrays do not belong together, or the shard does not fit into the memory that is left; the text
            has the sum.
        H5CorruptError: bytes do not decode.

    Cost:
        Loading takes what decoding takes; memory is the shard and at most 256 MiB while it is loaded (more where a
        single chunk is). A batch is one copy a field. Where ranks hold rows together (see ``mode`` and
        ``share_memory``), all must make the dataset.

    Example:
        >>> dataset = RankMemCachedH5Dataset("digits.h5", "train/images", "train/labels")
        >>> sampler = EpochShuffleSampler(len(dataset), seed=42)
        >>> loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    """

    takes_packed = False  # packed integers as they are stored, whether or not their dtype is named

    def __init__(
        self,
        path: Paths,
        x_key: Keys,
        y_key: Keys | None = None,
        *,
        mode: ShardMode = "contiguous",
        x_dtype: DTypeLike = "float32",
        y_dtype: DTypeLike = None,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        pin_host_memory: bool = True,
        share_memory: bool = False,
        rdcc_nbytes: int | str | None = None,
        rdcc_nslots: int | None = None,
        rdcc_w0: float | None = None,
        swmr: bool = False,
        log_fn: Callable[[str], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        indices: Sequence[int] | npt.NDArray[Any] | None = None,
        reshard_every_n_epochs: int = 0,
        seed: int = 0,
        batch_transform: Transform | None = None,
        normalize: Normalize | None = None,
        with_index: bool = False,
        sample: Literal["row"] | None = None,
        files: FileOptions | Mapping[str, Any] | None = None,
        cache_device: str | torch.device = "cpu",
        preload: bool = True,
        dtype_x: DTypeLike = ...,
        dtype_y: DTypeLike = ...,
    ) -> None:
        if mode not in get_args(ShardMode):
            raise H5ValueError(f"mode={mode!r} was given. Pass 'contiguous' or 'interleave'.")
        self._device = _checked_device(cache_device, share_memory=share_memory)
        self._fields = Fields.of(
            x_key,
            y_key,
            x_dtype=x_dtype if dtype_x is ... else dtype_x,
            y_dtype=y_dtype if dtype_y is ... else dtype_y,
            transform=transform,
            target_transform=target_transform,
            with_index=with_index,
        )
        opened = FileOptions.parse(files, "files")
        opened = replace(opened, swmr=True) if swmr else opened
        self._options = OpenOptions(
            rdcc_nbytes=None if rdcc_nbytes is None else parse_bytes(rdcc_nbytes, "rdcc_nbytes"),
            rdcc_nslots=rdcc_nslots,
            rdcc_w0=rdcc_w0,
            trust=opened,
        )
        asked = [replace(one, takes_packed=self.takes_packed) for one in self._fields.asked]
        self.table = describe_files(expand_paths(path), asked, OpenOptions(trust=opened), sample=sample)
        normalization, self._fields = normalization_of(normalize, self._fields, self.table, options=self._options)
        self.indices = checked_rows(indices, self.table.n_rows)
        self._stands_alone = rank is not None
        replica = resolve_replica(rank, world_size)
        self.shard = RankShard(
            _drawn(self.table.blocks(self.indices, [False] * len(self._fields.keys)), replica.world_size),
            replica.world_size,
            replica.rank,
            mode,
            reshard_every_n_epochs,
            seed,
        )
        self.draw, self.for_workers, self.for_training = 0, False, True
        self._pins, self._shares_memory, self._log_fn = pin_host_memory, share_memory, log_fn
        super().__init__(self._fields.structure, batch_transform)
        self._normalization = normalization  # of rows as they are loaded: batches are copies of them
        if preload:
            self.load()

    def _reset(self) -> None:
        super()._reset()
        close_when_collected(self, self.table.paths)  # left open where loading was broken off
        self._buffers = BufferPool()
        self._held: HeldRows | None = None
        self._filling: HeldRows | None = None
        self._has_all = False  # whether all ranks of the job hold their rows here, together
        self._has_others = False  # whether other ranks' rows are in this memory, too

    # Loading -------------------------------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether the rows are in memory."""
        return self._held is not None

    def load(self) -> None:
        """Loads the shard, where it is not loaded yet.

        Raises:
            H5Error: there is no room, or rows cannot be read.
        """
        if self.is_loaded:
            return
        in_worker = get_worker_info() is not None
        if in_worker:
            warnings.warn(
                "a worker process loads its rank's shard once more, since it was started afresh. Pass "
                "share_memory=True, and load before workers start: all of them then read the one copy.",
                stacklevel=2,
            )
        in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        is_alone = self._stands_alone or not in_group or not self.shares or in_worker
        load_shards({"": self}, is_alone=is_alone, shows_bar=not in_worker)

    def reshard(self, draw: int) -> bool:
        """Takes on the shard of another draw, and gives back the one that is held, where it is another.

        Args:
            draw: how often the shards were drawn anew (see ``RankShard``).

        Returns:
            Whether the rows of it are in memory; they are where all rows of this machine's ranks were.
        """
        if draw == self.draw:
            return self.is_loaded
        self.draw = draw
        if self._held is not None:
            if self._has_all and self._held.has_no_text:
                self._held.regroup(*self._mine())
            else:
                self.close()
        return self.is_loaded

    def can_reuse(self, other: RankMemCachedH5Dataset) -> bool:
        """Whether this one holds, in memory, what another one would load."""
        return (
            self.is_loaded
            and self.shard.is_like(other.shard)
            and (self._fields, self._device, self.batch_transform)
            == (other._fields, other._device, other.batch_transform)
            and (self._shares_memory, self.for_workers) == (other._shares_memory, other.for_workers)
            and self.terms()["normalization"] == other.terms()["normalization"]
            and self.table.guards == other.table.guards
            and self.identity() == other.identity()
        )

    @property
    def rank(self) -> int:
        """This replica."""
        return self.shard.rank

    @property
    def is_rank_given(self) -> bool:
        """Whether the replica is the one given, not the process group's."""
        return self._stands_alone

    @property
    def shares(self) -> bool:
        """Whether processes of a machine hold their rows together."""
        mixes = self.shard.mode == "interleave" and self.shard.world_size > 1
        return self._device.type == "cpu" and (self._shares_memory or mixes)

    def terms(self) -> dict[str, Any]:
        """What must be equal on all processes that hold rows together, and is compared before they load."""
        shard = self.shard
        return {
            "rows": shard.n_rows,
            "ranks": shard.world_size,
            "mode": shard.mode,
            "share_memory": self._shares_memory,
            "dtypes": [str(shape and shape.dtype) for shape in self._shapes],
            "drawn anew": (self.draw, shard.reshard_every, shard.seed),
            "content": self.identity() if self.shares else None,
            "normalization": self._normalization and self._normalization.digest,
        }

    def bytes_needed(self, ranks: Sequence[int]) -> int:
        """Bytes of this machine's memory that the rows of these ranks take, held together; without text.

        Args:
            ranks: replicas, each once.
        """
        n_rows = sum(len(self.shard.rows(0, rank)) for rank in ranks)  # as many however they are drawn
        return 0 if self._device.type != "cpu" else n_rows * self.cost.row_bytes

    def make_room(self, group: NodeGroup, descriptor: int | None = None) -> int | None:
        """Take memory for a group's rows, or that behind a descriptor; returns its descriptor if it is shared."""
        wanted = union([self.shard.rows(self.draw, rank) for rank in group.ranks])
        # Each rank would lock all ranks' pages, though its batches are copied into page-locked memory anyway.
        self._has_all, self._has_others = group.is_everyone, len(group.ranks) > 1
        self._filling = HeldRows(
            wanted if self.indices is None else np.unique(self.indices[as_array(wanted)]),
            *self._mine(),
            self._shapes,
            device=self._device,
            shared=group.size > 1 or self._shares_memory or self.for_workers,
            descriptor=descriptor,
        )
        return self._filling.descriptor

    def _mine(self) -> tuple[Rows, Rows]:
        """This rank's rows of the files, in its order, and their numbers among all that are sharded."""
        numbers = self.shard.rows(self.draw)
        return numbers if self.indices is None else self.indices[as_array(numbers)], numbers

    def tasks(self, group: NodeGroup) -> list[BulkTask]:
        """What this process has to load of a group's rows."""
        assert self._filling is not None, "there is no room yet"
        self._began = time.perf_counter()
        return self._filling.tasks(self.table, self._options, group, self.counters)

    def finish_loading(self, name: str) -> None:
        """This process's part is loaded; ``name`` is what the rows are called in messages."""
        for guard in self.table.guards:
            guard.check()
        self._close_files()  # nothing reads them any more
        self._held, self._filling = self._filling, None
        assert self._held is not None, "nothing was loaded"
        locks = self._pins and self._device.type == "cpu" and not self._has_others and torch.cuda.is_available()
        if locks and (why := self._held.pin()):
            warnings.warn(f"the shard's pages are not locked: {why}. Copies to the GPU go on as before.", stacklevel=2)
        shard, took = self.shard, time.perf_counter() - self._began
        self._log(
            f"{name + ': ' if name else ''}rank {shard.rank} of {shard.world_size} holds {len(self):,} of "
            f"{shard.n_rows:,} rows{_which(shard, self.draw)}, {self._held.n_bytes / 2**20:,.1f} MiB, "
            f"loaded in {took:.1f} s"
        )

    @property
    def _may_differ(self) -> bool:
        """Whether this rank trains on the same rows in every epoch, and not on all of them."""
        shard = self.shard
        return self.for_training and shard.world_size > 1 and not shard.reshard_every

    @property
    def _n_inputs(self) -> int:
        return len(self._fields.structure.x.fields.keys)

    def sample(self) -> list[Any] | None:
        """This rank and a few values of each target, once the rows are complete on all ranks, as JSON has it."""
        if not self._may_differ:
            return None
        columns = self._copy(sampled_places(len(self), self.shard.world_size)).columns[self._n_inputs :]
        return [self.shard.rank, [sampled_values(column) for column in columns]]

    def compare(self, told: Sequence[Any]) -> None:
        """Warn of targets that differ between ranks, by what ``sample`` returned on all that load together."""
        if not self._may_differ:
            return
        keys = self._fields.keys[self._n_inputs :]
        warn_of_different_targets(self.shard, keys, dict(told), self._targets_of_others)

    def _targets_of_others(self, target: int) -> Sequence[Any]:
        """A few values of a target in other ranks' rows, read from the files; none if they cannot be read."""
        field, shard, mine = self._n_inputs + target, self.shard, self.shard.rows(self.draw)
        drawn = sampled_places(shard.n_rows, MAX_SAMPLES // SAMPLES_OF_OTHERS)
        numbers = np.array([row for row in drawn.tolist() if row not in mine], dtype=np.int64)
        rows = numbers if self.indices is None else np.unique(self.indices[numbers])
        table = replace(self.table, layouts=tuple((arrays[field],) for arrays in self.table.layouts))
        held = HeldRows(rows, rows, rows, [self._shapes[field]], device=torch.device("cpu"), shared=False)
        try:
            do_tasks(held.tasks(table, self._options, NodeGroup((shard.rank,)), self.counters), 1, lambda _: None)
            (column,) = held.take(np.arange(len(rows)), BufferPool())
            return sampled_values(column) or []
        except H5Error:  # of rows that this rank does not train on
            return []
        finally:
            held.close()
            self._close_files()

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's rows; workers have the same memory, and say 0."""
        return 0 if self._held is None or get_worker_info() is not None else self._held.n_bytes

    def close(self) -> None:
        """Gives the memory back; rows that are asked for later are loaded anew."""
        for held in (self._held, self._filling):
            if held is not None:
                held.close()
        self._held = self._filling = None
        self._close_files()  # where loading was broken off

    def _close_files(self) -> None:
        for path in self.table.paths:
            process_pool().close(path)

    @cached_property
    def _shapes(self) -> list[ColumnShape | None]:
        """What each field takes in memory; None for text."""
        affines = {} if self._normalization is None else self._normalization.affines
        return [
            ColumnShape.of(array, dtype, affines.get(field)) if kind_of(array.dtype) == "number" else None
            for field, (array, dtype) in enumerate(zip(self.table.layouts[0], self._fields.dtypes, strict=True))
        ]

    # Rows ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.shard.n_held

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.shard.n_rows

    @property
    def rows_on_each_rank(self) -> int:
        """Rows that every rank has at least."""
        return self.shard.n_trained

    @property
    def rows(self) -> IntArray:
        """The rows that this rank holds, by their numbers among all that are sharded; shape ``(len(self),)``."""
        return as_array(self.shard.rows(self.draw))

    def begin(self, rows: IntArray, epoch: int | None = None) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``: there is nothing to wait for."""
        if self._held is None:
            self.load()
        return partial(self._copy, rows)

    def gather(self, rows: IntArray, epoch: int | None = None) -> RawBatch:
        """See ``RowDataset.gather``."""
        if self._held is None:
            self.load()
        return self._copy(rows, all_cores=not is_forked())

    @property
    def is_in_memory(self) -> bool:
        """See ``RowDataset.is_in_memory``."""
        return True

    def _copy(self, rows: IntArray, *, all_cores: bool = False) -> RawBatch:
        held = self._held
        if held is None:
            raise H5Error("the shard was given back while rows of it were read. Ask for them again.")
        if len(rows):
            check_bounds(rows, len(self), "this rank's shard")
        columns = held.take(rows, self._buffers, pinned=self.reads_pinned, all_cores=all_cores)
        return RawBatch(held.numbers(rows), columns)

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``; text is not counted."""
        return ReadCost(sum(shape.row_bytes for shape in self._shapes if shape is not None))

    def summary(self) -> list[str]:
        """See ``RowDataset.summary``."""
        shard, held = self.shard, self._held
        stored = self.table.layouts[0]
        kinds = [
            (array.dtype, array.row_shape) if shape is None else (shape.dtype, shape.row_shape)
            for array, shape in zip(stored, self._shapes, strict=True)
        ]
        return [
            summary_of_files(self.table.paths),
            f"rank {shard.rank} of {shard.world_size} holds {summary_of_rows(len(self), shard.n_rows)}",
            "not loaded" if held is None else f"{held.n_bytes / 2**20:,.1f} MiB",
            *summary_of_fields(self.structure, kinds),
        ]

    def places_of(self, numbers: IntArray) -> list[tuple[str, int]]:
        """See ``RowDataset.places_of``."""
        return self.table.places_of(numbers if self.indices is None else self.indices[numbers])

    def layouts(self) -> Iterator[ArrayLayout]:
        """The arrays that rows are read from, of all files."""
        return chain.from_iterable(self.table.layouts)

    def identity(self) -> str:
        """A digest of the rows of all ranks: what the files hold, and which of their rows are sharded, in order."""
        return digest_of_rows(self.table, self.indices)

    def blocks(self) -> BlockTable:
        """One block: all rows are at hand."""
        return BlockTable.of_sizes([len(self)])

    def __getstate__(self) -> dict[str, Any]:
        held = self._held if self._held is not None and self._held.is_on_its_way else None
        return super().__getstate__() | {"_buffers": None, "_filling": None, "_held": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._held = state["_held"]

    def _log(self, text: str) -> None:
        if self._log_fn is not None:
            self._log_fn(text)
        else:
            _log.info(text)


def _which(shard: RankShard, draw: int) -> str:
    """Which of all rows a rank holds, for messages."""
    if shard.world_size == 1:
        return ""
    if draw:
        return " (drawn at random)"
    return f" (one of every {shard.world_size})" if shard.mode == "interleave" else " (neighboring rows)"


def _drawn(blocks: BlockTable, world_size: int) -> BlockTable:
    """Blocks that shards are drawn of: those of the files, cut finer where there are so few that shards stay alike."""
    sizes = np.diff(blocks.starts)
    most = max(1, blocks.n_rows // (BLOCKS_A_RANK * world_size))
    if len(sizes) >= BLOCKS_A_RANK * world_size or not len(sizes):
        return blocks
    return BlockTable.of_sizes([n for size in sizes.tolist() for n in [most] * (size // most) + [size % most]])


def _checked_device(given: str | torch.device, *, share_memory: bool) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise H5ValueError(f"cache_device={given!r} was given. Pass 'cpu', 'cuda' or 'cuda:1'.") from error
    if device.type != "cpu" and share_memory:
        raise H5ValueError(
            f"share_memory=True and cache_device={given!r} were given: a GPU's memory is not shared. Pass one."
        )
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type != "cpu" and (there is None or there.type != device.type):
        raise H5ValueError(
            f"cache_device={given!r} was given, and there is no such device here"
            f"{'' if there is None else f', but {there.type!r}'}. Pass 'cpu', or what is there."
        )
    return device

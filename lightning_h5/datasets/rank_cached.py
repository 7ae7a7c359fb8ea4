"""``RankMemCachedH5Dataset``: a rank's shard, loaded once, served from memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import get_worker_info

from ..cores import is_forked
from ..counters import Counters
from ..errors import H5Error, H5ValueError
from ..hdf5 import OpenOptions, process_pool
from ..options import FileOptions, PatchOptions, SegmentOptions, TableOptions, WindowOptions
from ..order import BlockTable, RankShard, Rows, RowWeights, ShardMode, as_array, resolve_replica
from ..readers import TaskQueue, check_bounds
from ..sizes import parse_bytes
from ..types import DTypeLike, IntArray, Keys, PathLike, Paths
from .base import RawBatch, ReadCost
from .catalog import Catalog
from .fields import Decode, Fields, without_lacking
from .held_rows import HeldRows, checked_device
from .held_samples import HeldSamples
from .normalize import Normalize
from .sample_layout import Collate, Transform
from .segment_choice import SegmentChoice
from .segment_fields import SampleKind, SampleOptions, Select
from .segment_tables import table_of_samples
from .shard_loading import load_shards
from .table_blocks import blocks_of
from .table_dataset import TableDataset, rows_of_all

__all__ = ["RankMemCachedH5Dataset"]

BLOCKS_A_RANK = 16  # minimum number of blocks per rank for random shards

_log = logging.getLogger(__name__)


class RankMemCachedH5Dataset(TableDataset):
    """One rank's shard of the rows of HDF5 files, held in memory.

    Each rank loads its rows once, at the speed of the decoder on all cores, and reads no file after that. Works with
    or without a process group, on one GPU or none. ``len`` and indices are of the shard. Use it with
    ``EpochShuffleSampler``, or ``RankCachedH5DataModule`` under a Lightning Trainer, which also makes all ranks take
    the same number of steps.

    Args:
        path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these (see
            ``H5LazyDataset``).
        x_key: the input array, a list of arrays, or a mapping (see ``H5LazyDataset``).
        y_key: the target, in the same forms. None yields inputs alone.
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
        rdcc_nslots: slots of that cache.
        rdcc_w0: how eagerly it drops chunks that were read completely, 0 to 1.
        swmr: the file has a live writer in single-writer/multiple-reader mode.
        log_fn: called with a line about the loaded shard; None logs the line.
        rank: this replica; with ``world_size`` it takes the place of the process group's, and ranks then load without
            each other.
        world_size: number of replicas.
        indices: rows to shard, in this order (shape ``(n,)``), or a mask over all rows. None shards all.
        reshard_every_n_epochs: epochs after which a data module redraws the shards; 0 keeps them.
        seed: decides those.
        batch_transform: runs once on each batch that ``read_batch`` collates.
        normalize: a JSON file with mean and standard deviation of fields, of all their values or of each channel (see
            the how-to page on studies): these fields come as ``(x - mean) / std``, in float32 where they are stored as
            integers. Statistics of other fields, shapes or numbers of channels are refused.
        with_index: add each row's number among all rows that are sharded: last in a tuple, ``"index"`` in a dict.
        sample: what a sample is: "row", "window" or "segment" (see ``H5LazyDataset``, as for the following six).
        segments: which steps belong together.
        window: which steps of a segment make a sample.
        patch: which part of a volume makes a sample. Cells of volumes are held as they are stored, whatever ``x_dtype``
            is, and in this machine's memory.
        table: values of samples, in a CSV, TSV or Parquet file. Its columns are fields ``table/<column>``. A path, or
            ``TableOptions`` (``path``, ``on``, ``missing``), or a mapping of its fields.
        decode: what decodes fields (see ``H5LazyDataset``).
        select: the part of a field to read.
        collate_fn: how samples of several shapes become a batch.
        choice: which of the segments are kept, as data modules split them; None for all.
        files: how files are opened, and which are accepted: ``FileOptions``, or a mapping of its fields (``mmap``,
            ``cache_bytes``, ``swmr``, ``allow_external``, ``trusted``, ``min_integrity``, ``verify``, ``catalog_dir``).
        cache_device: "cpu", or a GPU such as "cuda" or "cuda:1" to hold the shard there: batches never cross the bus.
        preload: load now. False loads on the first access to a row.
        dtype_x: another spelling of ``x_dtype``.
        dtype_y: another spelling of ``y_dtype``.
        catalog: contents of the files, if already known; None opens them.

    Attributes:
        shard: which rows this rank holds, and trains on.
        rows_on_each_rank: minimum number of rows over all ranks, for ``EpochShuffleSampler(num_samples=...)``.
        draw: how often the shards were drawn.
        device: the device that holds the rows.
        shares_memory: see ``share_memory``.
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

    weights: RowWeights | None = None  # how often training takes the rows of all ranks, if not once
    takes_packed = False  # whether packed integers are accepted as stored, even without a dtype

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
        sample: SampleKind | None = None,
        segments: str | SegmentOptions | Mapping[str, Any] | None = None,
        window: int | Sequence[int] | WindowOptions | Mapping[str, Any] | None = None,
        patch: PatchOptions | Mapping[str, Any] | None = None,
        table: TableOptions | PathLike | Mapping[str, Any] | None = None,
        decode: Decode | None = None,
        select: Select | None = None,
        collate_fn: Collate | None = None,
        choice: SegmentChoice | None = None,
        files: FileOptions | Mapping[str, Any] | None = None,
        cache_device: str | torch.device = "cpu",
        preload: bool = True,
        dtype_x: DTypeLike = ...,
        dtype_y: DTypeLike = ...,
        catalog: Catalog | None = None,
    ) -> None:
        if mode not in get_args(ShardMode):
            raise H5ValueError(f"mode={mode!r} was given. Pass 'contiguous' or 'interleave'.")
        self.device = checked_device(cache_device, share_memory=share_memory)
        samples = SampleOptions.parse(sample, segments, window, select, seed, patch)
        if patch is not None and self.device.type != "cpu":
            raise H5ValueError(
                f"patch and cache_device={cache_device!r} were given; patches are cut on the CPU. Pass 'cpu' (of a "
                "data module, memory.device)."
            )
        fields = Fields.of(
            x_key,
            y_key,
            x_dtype=x_dtype if dtype_x is ... else dtype_x,
            y_dtype=y_dtype if dtype_y is ... else dtype_y,
            transform=transform,
            target_transform=target_transform,
            with_index=with_index,
            as_one=samples.has_mask,
            decode=decode,
        )
        opened = FileOptions.parse(files, "files")
        opened = replace(opened, swmr=True) if swmr else opened
        options = OpenOptions(
            rdcc_nbytes=None if rdcc_nbytes is None else parse_bytes(rdcc_nbytes, "rdcc_nbytes"),
            rdcc_nslots=rdcc_nslots,
            rdcc_w0=rdcc_w0,
            files=opened,
        )
        plain = OpenOptions(files=opened)
        catalog = catalog or Catalog(staging=opened.staged)
        catalog.joins.use(table)
        made, fields = table_of_samples(
            catalog,
            path,
            fields,
            plain,
            samples,
            takes_packed=self.takes_packed,
            normalize=normalize,
            collate=collate_fn,
            choice=choice,
        )
        if fields.matrices and self.device.type != "cpu":
            raise H5ValueError(
                f"a sparse matrix and cache_device={cache_device!r} were given; its rows are put together on the CPU. "
                "Pass 'cpu' (of a data module, memory.device)."
            )
        self.samples = HeldSamples(made, fields, options)
        self._own: tuple[int, IntArray] | None = None
        kept = without_lacking(made, indices)
        super().__init__(made, fields, batch_transform=batch_transform, indices=kept, options=options)
        self._stands_alone = rank is not None
        replica = resolve_replica(rank, world_size)
        self.shard = RankShard(
            _drawn(blocks_of(self.table, self.indices, of_all_fields=True), replica.world_size),
            replica.world_size,
            replica.rank,
            mode,
            reshard_every_n_epochs,
            seed,
        )
        self.draw, self.for_workers, self.for_training = 0, False, True
        self.pins_memory, self.shares_memory, self._log_fn = pin_host_memory, share_memory, log_fn
        if preload:
            self.load()

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        self.samples.join(counters, work)
        self._held: HeldRows | None = None
        self._has_all = False  # whether it has the rows of all ranks

    # Loading -------------------------------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether the rows are in memory."""
        return self._held is not None

    def load(self) -> None:
        """Load the shard, unless it is loaded.

        Raises:
            H5Error: there is not enough memory, or rows cannot be read.
        """
        if self.is_loaded:
            return
        in_worker = get_worker_info() is not None
        if in_worker:
            warnings.warn(
                "a worker process loads its rank's shard again, since it does not inherit memory. Pass "
                "share_memory=True and load before workers start: they then all read the same copy.",
                stacklevel=2,
            )
        in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        is_alone = self._stands_alone or not in_group or not self.shares or in_worker
        load_shards({"": self}, is_alone=is_alone, shows_bar=not in_worker)

    def draw_by(self, weights: RowWeights) -> None:
        """Let training take rows as often as weights ask; each rank draws among those that it holds.

        A row that comes again has a number larger by ``len(self)``, each time.

        Args:
            weights: of the rows of all ranks.

        Raises:
            H5ValueError: all weights of a rank's rows are 0; on all ranks.
        """
        self.weights, self.sample_layout = weights, replace(self.sample_layout, n_rows=self.n_rows)
        self._check_weights()

    def _check_weights(self) -> None:
        """Raise ``H5ValueError`` if a rank holds no row that has a weight, as all ranks find."""
        if self.weights is None:
            return
        for rank in range(self.shard.world_size):
            if not self.weights.weights[as_array(self.shard.rows(self.draw, rank))].any():
                raise H5ValueError(
                    f"rows weighted {self.weights.text}: all rows that rank {rank} of {self.shard.world_size} holds "
                    "have the weight 0. Pass memory='interleave', or train on fewer ranks."
                )

    def reshard(self, draw: int) -> bool:
        """Take the shard of another draw, and give up the one that is held, if it is another.

        Args:
            draw: how often the shards were drawn (see ``RankShard``).

        Returns:
            Whether its rows are in memory; they are if all rows of this machine's ranks were.
        """
        if draw == self.draw:
            return self.is_loaded
        self.draw = draw
        self._check_weights()
        if self._held is not None:
            if self._has_all and not self._held.has_text:
                self._held.regroup(*self.mine())
            else:
                self.close()
        return self.is_loaded

    def can_reuse(self, other: RankMemCachedH5Dataset) -> bool:
        """Return whether this one holds, in memory, what another one would load."""
        return (
            self.is_loaded
            and self.shard.is_like(other.shard)
            and (self.fields, self.device, self.batch_transform) == (other.fields, other.device, other.batch_transform)
            and (self.shares_memory, self.for_workers) == (other.shares_memory, other.for_workers)
            and self.table.guards == other.table.guards
            and self.identity() == other.identity()
            and (self.weights and self.weights.recipe) == (other.weights and other.weights.recipe)
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
        return self.device.type == "cpu" and (self.shares_memory or mixes)

    def mine(self) -> tuple[Rows, Rows]:
        """Return this rank's rows of the files, in its order, and their numbers among all that are sharded."""
        numbers = self.shard.rows(self.draw)
        if self.has_all_rows:
            return numbers, numbers
        if self.table.sampling is None:
            return self.located(as_array(numbers)), numbers
        if self.samples.has_cells:
            return range(0), numbers  # cells are found by their numbers among those that are held
        return self._rows_of_rank(), numbers

    def _rows_of_rank(self) -> IntArray:
        """Return the rows that this rank's samples have, ascending."""
        if self._own is None or self._own[0] != self.draw:
            self._own = self.draw, self.rows_needed(as_array(self.shard.rows(self.draw)))[0]
        return self._own[1]

    def rows_needed(self, samples: IntArray) -> list[IntArray]:
        """Return the rows of the files that samples have, ascending; of each field that is held if they are cells."""
        return self.samples.rows_needed(self.located(samples))

    def n_held_bytes(self, rank: int) -> int:
        """Return the bytes of the rows of the files that a rank holds; about as many however shards are drawn."""
        samples = self.shard.rows(0, rank)
        if self.table.sampling is None:
            return len(samples) * sum(plan.row_bytes for plan in self.samples.plans)
        return self.samples.n_bytes(self.located(as_array(samples)))

    def use(self, held: HeldRows, *, has_all: bool) -> None:
        """Serve rows from memory that was filled; ``has_all`` is whether it has the rows of all ranks."""
        self._held, self._has_all = held, has_all
        self.check_unchanged()
        self.close_files()  # no longer needed

    def check_unchanged(self) -> None:
        """Raise ``H5DataChangedError`` if a file is no longer as it was when the dataset was made."""
        for guard in self.table.guards:
            guard.check()

    def log(self, text: str) -> None:
        """Log a line about the loaded shard, or pass it to ``log_fn``."""
        (self._log_fn or _log.info)(text)

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's rows; 0 in workers, which have the same memory."""
        return 0 if self._held is None or get_worker_info() is not None else self._held.n_bytes

    def close(self) -> None:
        """Release the memory; later reads load the rows again."""
        if self._held is not None:
            self._held.close()
        self._held = None
        self.close_files()  # still open if loading failed

    def close_files(self) -> None:
        """Close this process's handles of the files."""
        for path in self.table.paths:
            process_pool().close(path)

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

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``: loads the shard if it is not loaded."""
        if self._held is None:
            self.load()
        all_cores = at_once and not is_forked()
        if self.weights is not None:
            times, held = np.divmod(rows, len(self))
            return partial(self._copy_again, times, held, epoch, all_cores=all_cores)
        return partial(self._copy, rows, epoch, all_cores=all_cores)

    def _of_rank(self, rows: IntArray) -> HeldRows:
        """Return the memory that these rows of this rank are in."""
        if self._held is None:
            raise H5Error("the shard was released while its rows were being read. Read them again.")
        if len(rows):
            check_bounds(rows, len(self), "this rank's shard")
        return self._held

    def _copy_again(self, times: IntArray, rows: IntArray, epoch: int | None, *, all_cores: bool) -> RawBatch:
        """Return rows with numbers that say how often each was drawn before, so that transforms draw differently."""
        raw = self._copy(rows, epoch, all_cores=all_cores)
        return raw._replace(rows=raw.rows + times * self.n_rows)

    def _copy(self, rows: IntArray, epoch: int | None, *, all_cores: bool) -> RawBatch:
        held = self._of_rank(rows)
        if self.table.sampling is not None:
            return self._copy_samples(held, rows, epoch, all_cores=all_cores)
        columns = held.take(rows, self._buffers, all_cores=all_cores)
        return RawBatch(held.numbers(rows), columns)

    def _copy_samples(self, held: HeldRows, rows: IntArray, epoch: int | None, *, all_cores: bool) -> RawBatch:
        """Return samples of several rows: those in memory, and the fields that are not held by rows."""
        numbers = held.numbers(rows)
        asked = self.table.rows_of(self.located(numbers), epoch)
        of_rank = np.empty(0, np.int64) if self.samples.has_cells else self._rows_of_rank()
        columns = self.samples.columns(held, numbers, asked, of_rank, self._buffers, all_cores=all_cores)
        return RawBatch(numbers, (*self.in_samples(asked, columns), *self.further_columns(asked)))

    def files_of(self, rows: IntArray) -> list[str]:
        """See ``RowDataset.files_of``: none, since all rows are in memory."""
        return []

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``; text is not counted."""
        sizes = [plan.row_bytes for plan in self.plans]
        sampling = self.table.sampling
        row_bytes = sum(sizes) if sampling is None else sampling.mean_bytes(sizes) + self.dense_bytes
        return ReadCost(row_bytes, is_in_memory=True)

    def blocks(self) -> BlockTable:
        """See ``RowDataset.blocks``: one block, since all rows are in memory."""
        return BlockTable.of_sizes([len(self)])

    def _summary_of_rows(self) -> list[str]:
        shard, held = self.shard, self._held
        return [
            f"rank {shard.rank} of {shard.world_size} holds {rows_of_all(len(self), shard.n_rows)}",
            "not loaded" if held is None else f"{held.n_bytes / 2**20:,.1f} MiB",
        ]

    def __getstate__(self) -> dict[str, Any]:
        sent = self._held if self._held is not None and self._held.can_be_sent else None
        return super().__getstate__() | {"_held": sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._held = state["_held"]


def _drawn(blocks: BlockTable, world_size: int) -> BlockTable:
    """Return the blocks that shards are drawn of: those of the files, cut finer if they are few."""
    sizes = np.diff(blocks.starts)
    most = max(1, blocks.n_rows // (BLOCKS_A_RANK * world_size))
    if len(sizes) >= BLOCKS_A_RANK * world_size or not len(sizes):
        return blocks
    return BlockTable.of_sizes([n for size in sizes.tolist() for n in [most] * (size // most) + [size % most]])

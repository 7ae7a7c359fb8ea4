"""``RankMemCachedH5Dataset``: its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import numpy.typing as npt
import torch
import torch.distributed

from ..catalog import Catalog
from ..errors import H5ValueError
from ..hdf5 import OpenOptions, with_constants
from ..options import (
    BadRowOptions,
    FileOptions,
    MemoryOptions,
    PatchOptions,
    SegmentOptions,
    TableOptions,
    WindowOptions,
)
from ..options.keywords import checks_keywords
from ..order import Replica, ShardMode, resolve_replica
from ..samples import MakesIndexer, SampleKind, SampleOptions, SegmentChoice, Select
from ..sizes import parse_bytes
from ..types import DTypeLike, Keys, PathLike, Paths
from .collate import Collate
from .fields import Decode, Fields
from .file_samples import FileSamples, open_samples
from .held_dataset import HeldDataset
from .held_rows import checked_device
from .normalize import Normalize
from .sample_layout import Transform

__all__ = ["RankMemCachedH5Dataset"]


@checks_keywords
class RankMemCachedH5Dataset(HeldDataset):
    """One rank's shard of the rows of HDF5 files, held in memory.

    Each rank loads its rows once, at the speed of the decoder on all cores, and reads no file after that. Works with
    or without a process group, on one GPU or none. ``len`` and indices are of the shard. Use it with
    ``EpochShuffleSampler``, or ``RankCachedH5DataModule`` under a Lightning Trainer, which also makes all ranks take
    the same number of steps. A ``DistributedSampler`` would shard the rank's rows again, and is refused; Lightning
    passes one to a ``DataLoader`` without ``EpochShuffleSampler``.

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
        rank: this replica; ranks for which it is passed load without each other. None takes the rank of the process
            group, else the environment's (``RANK`` and ``WORLD_SIZE``, as ``torchrun`` sets them), else 0 of 1, when
            the length or rows are first needed. ``rank=0, world_size=1`` holds all rows in each process.
        world_size: number of replicas. Pass both or neither.
        indices: rows to shard, in this order (shape ``(n,)``), or a mask over all rows. None shards all.
        reshard_every_n_epochs: epochs after which a data module redraws the shards; 0 keeps them.
        seed: decides those.
        batch_transform: runs once on each batch that ``read_batch`` collates.
        normalize: mean and standard deviation of fields, of all their values or of each channel: a JSON file, or a
            mapping ``{"x": {"mean": 0.5, "std": 0.2}}``. These fields are ``(x - mean) / std``, in float32 if they are
            stored as integers. Statistics of other fields, shapes or numbers of channels are refused.
        with_index: add each row's number among all rows that are sharded: last in a tuple, ``"index"`` in a dict.
        sample: what a sample is: "row", "window" or "segment" (see ``H5LazyDataset``, as for the following six).
        segments: which steps belong together.
        window: which steps of a segment make a sample.
        patch: which part of a volume makes a sample. Cells of volumes are held as they are stored, whatever ``x_dtype``
            is, and in this machine's memory.
        table: values of samples, in a CSV, TSV or Parquet file. Its columns are fields ``table/<column>``. A path, or
            ``TableOptions`` (``path``, ``on``, ``missing``), or a mapping of its fields.
        decode: decoders of fields (see ``H5LazyDataset``).
        select: the part of a field to read.
        collate_fn: how samples of several shapes become a batch.
        choice: which of the segments are kept, as data modules split them; None for all.
        on_bad_row: "raise", or "skip" to leave out samples with rows that could not be decoded when the shard was
            loaded, and samples whose transform raises (see ``H5LazyDataset``).
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
            has the sum. Later: rows are requested by another rank than the shard's, because the process group came
            after the dataset; or a sampler would shard the rank's rows again.
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
        sample: SampleKind | MakesIndexer | None = None,
        segments: str | SegmentOptions | Mapping[str, Any] | None = None,
        window: int | Sequence[int] | WindowOptions | Mapping[str, Any] | None = None,
        patch: PatchOptions | Mapping[str, Any] | None = None,
        table: TableOptions | PathLike | Mapping[str, Any] | None = None,
        decode: Decode | None = None,
        select: Select | None = None,
        collate_fn: Collate | None = None,
        choice: SegmentChoice | None = None,
        on_bad_row: BadRowOptions | Literal["raise", "skip"] | Mapping[str, Any] = "raise",
        files: FileOptions | Mapping[str, Any] | None = None,
        cache_device: str | torch.device = "cpu",
        preload: bool = True,
        dtype_x: DTypeLike = ...,
        dtype_y: DTypeLike = ...,
        catalog: Catalog | None = None,
    ) -> None:
        if mode not in get_args(ShardMode):
            raise H5ValueError(f"mode={mode!r} was given. Pass 'contiguous' or 'interleave'.")
        device = checked_device(cache_device, share_memory=share_memory)
        samples = SampleOptions.parse(sample, segments, window, select, seed, patch, makes_batches=False)
        fields = Fields.of(
            with_constants(x_key, y_key, samples.segments.constants),
            y_key,
            x_dtype=x_dtype if dtype_x is ... else dtype_x,
            y_dtype=y_dtype if dtype_y is ... else dtype_y,
            transform=transform,
            target_transform=target_transform,
            with_index=with_index,
            as_one=samples.has_mask,
            decode=decode,
        )
        opened, bad_rows = FileOptions.parse(files, "files"), BadRowOptions.of(on_bad_row)
        opened = replace(opened, swmr=True) if swmr else opened
        catalog = catalog or Catalog(staging=opened.staged)
        catalog.joins.use(table)
        opened_samples = open_samples(
            path,
            fields,
            samples,
            opened,
            catalog,
            takes_packed=self.takes_packed,
            normalize=normalize,
            collate=collate_fn,
            choice=choice,
            indices=indices,
            batch_transform=batch_transform,
        )
        self._use(
            opened_samples,
            OpenOptions(
                rdcc_nbytes=None if rdcc_nbytes is None else parse_bytes(rdcc_nbytes, "rdcc_nbytes"),
                rdcc_nslots=rdcc_nslots,
                rdcc_w0=rdcc_w0,
                files=opened,
            ),
            replica=None if rank is None and world_size is None else resolve_replica(rank, world_size),
            mode=mode,
            reshard_every=reshard_every_n_epochs,
            seed=seed,
            device=device,
            pins_memory=pin_host_memory,
            shares_memory=share_memory,
            log_fn=log_fn,
        )
        self.skip_bad_rows(bad_rows)
        if preload:
            self.load()

    @classmethod
    def of(
        cls,
        samples: FileSamples,
        options: MemoryOptions,
        *,
        replica: Replica | None,
        seed: int,
        device: str | torch.device,
        log_fn: Callable[[str], Any] | None,
    ) -> Self:
        """Return a dataset of samples that are known already, as a data module has them; nothing is loaded yet.

        Args:
            samples: the samples.
            options: how they are held in memory.
            replica: this rank; None asks for it when it is first needed.
            seed: decides shards that are drawn again.
            device: what holds the rows.
            log_fn: called with a line about the loaded shard.
        """
        dataset = cls.__new__(cls)
        dataset._use(
            samples,
            OpenOptions(files=samples.files),
            replica=replica,
            mode=options.mode,
            reshard_every=options.reshard_every_n_epochs,
            seed=seed,
            device=checked_device(device, share_memory=options.share),
            pins_memory=options.pin,
            shares_memory=options.share,
            log_fn=log_fn,
        )
        return dataset

    def _use(self, samples: FileSamples, options: OpenOptions, *, device: torch.device, **memory: Any) -> None:
        if device.type != "cpu" and samples.table.fields_cut:
            raise H5ValueError(
                f"patch and cache_device={str(device)!r} were given; patches are cut on the CPU. Pass 'cpu' (of a "
                "data module, memory.device)."
            )
        if device.type != "cpu" and samples.fields.matrices:
            raise H5ValueError(
                f"a sparse matrix and cache_device={str(device)!r} were given; its rows are put together on the CPU. "
                "Pass 'cpu' (of a data module, memory.device)."
            )
        super().__init__(
            samples.table,
            samples.fields,
            batch_transform=samples.batch_transform,
            indices=samples.indices,
            options=options,
            device=device,
            **memory,
        )

"""``RankCachedH5DataModule``: each rank's shard in memory, in a data module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from .._lightning import rank_zero_info
from ..datasets import RankMemCachedH5Dataset, RowDataset, load_shards
from ..errors import H5ValueError
from ..hdf5 import name_objects
from ..loading.choose_order import Order
from ..options import (
    DistributedOptions,
    FileOptions,
    MemoryOptions,
    PatchOptions,
    SegmentOptions,
    ShuffleOptions,
    SplitOptions,
    StagingOptions,
    TableOptions,
    WeightOptions,
    WindowOptions,
    WorkerOptions,
)
from ..order import PlanSampler, ShardRows, ShardSampler, resolve_replica
from ..samples import MakesIndexer
from ..types import DTypeLike, Identity, Keys, PathLike, Paths
from .arguments import Split
from .keyed import KeyedH5DataModule
from .resume import is_running

__all__ = ["RankCachedH5DataModule"]


class RankCachedH5DataModule(KeyedH5DataModule):
    """Trains from rows that each rank holds in memory: loaded once, in ``setup``, and served at the speed of memory.

    Takes the configuration of ``LazyH5DataModule``. Use it where the rows fit into the memory of the machines, each
    rank's part next to the others'. This is checked before anything is loaded.

    A rank trains on the rows of its own shard, in an order of its own each epoch. Ranks take equally many steps, and
    each row comes once: the last two rounds are cut into slightly smaller batches. Evaluation takes every row exactly
    once. An interrupted run resumes exactly on the same number of ranks; with another number ranks hold other rows, and
    the epoch starts over, with a warning.

    What was loaded stays for the next ``fit``, ``validate``, ``test`` or ``predict`` of a Trainer, as long as there is
    room for what that one needs. ``teardown()``, called by you, gives it back.

    An argument that takes an option object also takes a mapping with its fields, which is its form in YAML.

    Args:
        train_path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these. Several files
            are one dataset, in sorted order for a glob or a directory.
        val_path: files to validate on.
        test_path: files to test on.
        predict_path: files to predict on; they need not have a target.
        x_key: the input array, a list of arrays (x is a tuple), or a mapping from names to arrays (x is a dict).
            ``{split}`` in it stands for train, val, test or predict. A name may end in a member of a table. In a
            mapping, a list of arrays of one shape is one field, with the arrays on a new last axis. If None, inferred
            when exactly one array qualifies; otherwise an error lists the arrays.
        y_key: the target, in the same forms. None yields inputs alone.
        x_dtype: dtype of the input by name, such as "float16", or a mapping from fields to names. None keeps the
            file's. Packed integers (``scale_factor``, ``_FillValue`` and the like) of other files than netCDF are an
            error unless ``decode`` or their stored dtype, such as "int16", is named. Rows are held in this dtype: a
            small one saves memory, cast on the GPU.
        y_dtype: dtype of the target, in the same forms.
        transform: runs on each sample's input, a tensor of a row's shape. What it draws from the global generators of
            Python, NumPy and torch depends on the seed, the epoch and the batch, not on the rank or worker. If it has a
            parameter ``rng`` (NumPy) or ``generator`` (torch), it gets one that depends on (seed, epoch, row) only.
            Generators that it owns, such as MONAI's and Albumentations', are seeded in the same way.
        target_transform: runs on each sample's target.
        eval_transform: replaces ``transform`` for validation, test and prediction. None runs ``transform`` there too.
        batch_transform: runs once on each collated batch; may ask for ``rng`` or ``generator`` too.
        collate_fn: a function that makes a batch of a list of samples; "pad" (zeros up to the longest, and
            ``"length"``), "list" (a list for each field) or "stack". None stacks, without making samples first.
        normalize: mean and standard deviation of fields, of all their values or of each channel: a JSON file that
            ``lightning-h5 stats`` has written, or a mapping from fields to numbers or lists,
            ``{"x": {"mean": [0.5, 0.4], "std": [0.2, 0.3], "channel_axis": 0}}``. These fields become
            ``(x - mean) / std``, before any transform. Raises if the statistics are of other fields, shapes or numbers
            of channels.
        batch_size: rows of a training batch on one rank.
        eval_batch_size: rows of a batch in the other stages. None takes ``batch_size``.
        shuffle: how training rows are shuffled each epoch: True, False, "global", "chunks" or ``ShuffleOptions``.
            In memory all orders cost the same, so all but False permute each rank's rows.
        drop_last: drop the ragged end of a training epoch. False drops nothing: the last two rounds are cut into
            slightly smaller batches, so that all ranks take the same number of steps.
        seed: seed of the training order. None takes Lightning's ``seed_everything``, or 0.
        with_index: add each sample's index in its split to the batch: last in a tuple, ``"index"`` in a dict; with
            segments, windows or patches also its ``"segment"`` (name of the group, array or file) and ``"step"`` (of a
            patch where it starts, along each axis that is cut).
        num_workers: worker processes. 0 reads ahead and decodes in threads on all cores, without copies between
            processes: the fastest unless a ``transform`` is slow.
        prefetch_factor: batches that each worker reads ahead; None means 2, as in torch. Without workers, batches that
            this process reads ahead; None means 4, or twice as many as are read together, if that is more.
        pin_memory: put batches into page-locked memory. "auto" does so if they go to a GPU.
        split: how the training files are split: a float (``val_fraction``), the fractions of all splits (``[train,
            val]`` or ``[train, val, test]``, which sum to 1) or ``SplitOptions`` (``val_fraction``, ``test_fraction``,
            ``group_key``, ``group_pattern``, ``stratify_key``, ``num_folds``, ``fold``, ``seed``, ``file``, ``key``,
            ``by``, ``gap``).
        weights: how often each training row is drawn: the name of an array (``weight_key``) or ``WeightOptions``
            (``weight_key``, ``balance_key``, ``class_weights``). Each rank draws among the rows that it holds, so ranks
            with other shares of a class draw its rows more or less often.
        sample: what a sample is: "row" (one step), "window" or "segment" (all steps of a segment). None follows from
            ``window`` and ``segments``, and is required with ``patch``. "row" also accepts files that look like one
            image or volume each, for which None raises.
        segments: which steps belong together: a pattern of groups such as ``"data/*"``, or ``SegmentOptions``
            (``groups``, ``key``, ``sort_key``, ``lengths``, ``offsets``, ``ends``, ``spans``, ``join``, ``axis``,
            ``step_axis``, ``steps_per``, ``constants``, ``missing``, ``max_length``, ``bucket``, ``keep_together``).
            None makes each file one.
        window: which steps of a segment make a sample: a length, ``[start, stop]`` relative to each step, a mapping
            from fields to these, or ``WindowOptions`` (``length``, ``steps``, ``stride``, ``pad``, ``mask``,
            ``random``).
        patch: which part of a volume makes a sample, each segment being one: ``PatchOptions`` (``shape``, ``stride``,
            ``random``, ``border``), or a mapping of its fields.
        table: values of samples, in a CSV, TSV or Parquet file. Its columns are fields ``table/<column>``. A path, or
            ``TableOptions`` (``path``, ``on``, ``missing``).
        decode: what decodes fields, by name or pattern: "image" (JPEG and PNG to ``uint8`` of the shape ``(C, H, W)``),
            "cf" (scale, offset and fill value, to floats with NaN, as by default in netCDF files), "real" (complex
            numbers as pairs of floats on a new last axis), "bits:527" (so many packed bits of a row, as ``uint8``
            each), "dense" or "csr" (rows of a sparse matrix), or a function of what is stored of a row.
        select: the part of a field to read, by its axes as stored: ``{"fields": {1: [0, 3], 2: {"stop": 720}}}``.
        workers: how worker processes are run: ``WorkerOptions`` (``persistent``, ``start_method``, ``timeout``,
            ``init_fn``).
        files: how files are opened, and which are accepted: ``FileOptions`` (``mmap``, ``cache_bytes``, ``swmr``,
            ``allow_external``, ``trusted``, ``min_integrity``, ``verify``, ``catalog_dir``).
        staging: folder on a local disk, such as "$TMPDIR", that keeps what was read of files on slow storage, or
            ``StagingOptions`` (``dir``, ``max_bytes``, ``storage_options``). It has an effect only if shards are drawn
            again (``memory.reshard_every_n_epochs``): otherwise each row is read once.
        distributed: how ranks work together: ``DistributedOptions`` (``rank``, ``world_size``, ``setup_timeout``,
            ``on_resume_mismatch``).
        memory: how rows are held: a mode ("interleave" or "contiguous") or ``MemoryOptions`` (``mode``, ``share``,
            ``device``, ``pin``, ``reshard_every_n_epochs``).

    Raises:
        H5ValueError: arguments are invalid or contradict each other. Files are checked in ``setup``.

    Example:
        >>> datamodule = RankCachedH5DataModule("digits.h5", x_key="images", y_key="labels", split=0.1)
        >>> trainer.fit(model, datamodule=datamodule)
    """

    def __init__(
        self,
        train_path: Paths | None = None,
        val_path: Paths | None = None,
        test_path: Paths | None = None,
        predict_path: Paths | None = None,
        *,
        x_key: Keys | None = None,
        y_key: Keys | None = None,
        x_dtype: DTypeLike = None,
        y_dtype: DTypeLike = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[Any], Any] | Literal["stack", "pad", "list"] | None = None,
        normalize: dict[str, Any] | PathLike | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        shuffle: ShuffleOptions | Literal["global", "chunks"] | bool | dict[str, Any] = True,
        drop_last: bool = False,
        seed: int | None = None,
        with_index: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        split: SplitOptions | float | list[float] | dict[str, Any] | None = None,
        weights: WeightOptions | str | dict[str, Any] | None = None,
        sample: Literal["row", "window", "segment"] | MakesIndexer | None = None,
        segments: SegmentOptions | str | dict[str, Any] | None = None,
        window: WindowOptions | int | list[int] | dict[str, Any] | None = None,
        patch: PatchOptions | dict[str, Any] | None = None,
        table: TableOptions | dict[Any, Any] | PathLike | None = None,
        decode: dict[str, Any] | None = None,
        select: dict[str, dict[int, Any]] | None = None,
        workers: WorkerOptions | dict[str, Any] | None = None,
        files: FileOptions | dict[str, Any] | None = None,
        staging: StagingOptions | PathLike | dict[str, Any] | None = None,
        distributed: DistributedOptions | dict[str, Any] | None = None,
        memory: MemoryOptions | Literal["contiguous", "interleave"] | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    def _use_arguments(self, given: Mapping[str, Any]) -> None:
        super()._use_arguments(given)
        self._memory = MemoryOptions.parse(given["memory"], "memory")
        self._options.shuffle.check_scope("RankCachedH5DataModule", "whose ranks hold their rows in memory already")
        reads_once = not self._memory.reshard_every_n_epochs and not name_objects(*self._paths.values())
        if self._options.files.staging is not None and reads_once:
            self._options = replace(self._options, files=replace(self._options.files, staging=None))
            self._log_once("staging has no effect: each row is read once, into memory")
        if self._memory.device != "cpu" and self._options.num_workers:
            raise H5ValueError(
                f"memory.device={self._memory.device!r} and num_workers={self._options.num_workers} were given, but "
                "worker processes cannot read a GPU's memory. Pass num_workers=0; batches are made on the GPU."
            )

    # Datasets ------------------------------------------------------------------------------------------------

    def build_dataset(self, split: Split) -> RankMemCachedH5Dataset | None:
        """Return the dataset of a split, not loaded yet; or None without data for it."""
        samples, trains = self.open_split(split), split == "train"
        if samples is None:
            return None
        memory = self._memory if trains else replace(self._memory, mode="contiguous", reshard_every_n_epochs=0)
        dataset = RankMemCachedH5Dataset.of(
            samples,
            memory,  # evaluation cuts its rows
            replica=None if self.world_size is None else resolve_replica(self.rank, self.world_size),
            seed=self.seed or 0,
            device=self._device(),
            log_fn=rank_zero_info,
        )
        if not trains and (ends := self.shard_ends(dataset)) is not None:
            dataset.shard = replace(dataset.shard, ends=ends)
        context = multiprocessing.get_context(self._options.workers.start_method)
        dataset.for_training = trains
        if trains and self._weights.is_given:
            dataset.draw_by(self.weights_of_rows(dataset))
        dataset.for_workers = bool(self._options.num_workers) and context.get_start_method() != "fork"
        return dataset

    def _device(self) -> torch.device | str:
        """Where shards are held; a GPU without a number is the rank's own."""
        root = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        return root if root is not None and root.type == self._memory.device else self._memory.device

    def can_reuse(self, old: RowDataset, new: RowDataset) -> bool:
        """Whether a dataset of an earlier ``setup`` holds in memory what a new one would load."""
        return cast("RankMemCachedH5Dataset", old).can_reuse(cast("RankMemCachedH5Dataset", new))

    def load(self, splits: Sequence[Split]) -> None:
        """Load the shards of some splits, except for those already loaded.

        Raises:
            H5Error: memory is too small, or rows cannot be read; on all ranks.
        """
        held = {split: cast("RankMemCachedH5Dataset", dataset) for split, dataset in self._datasets.items()}
        # Another Trainer may validate during a fit, which still reads.
        needed = {*splits, *(("train", "val") if self.is_in_a_fit else ())}
        wanted = [split for split in splits if getattr(self.trainer, f"limit_{split}_batches", 1) != 0]
        self._load(
            {split: held[split] for split in wanted if not held[split].is_loaded},
            spare=[dataset for split, dataset in held.items() if split not in needed],
        )

    def _load(
        self, datasets: Mapping[Split, RankMemCachedH5Dataset], spare: Sequence[RankMemCachedH5Dataset] = ()
    ) -> None:
        profiler, patience = getattr(self.trainer, "profiler", None), self._options.distributed.setup_timeout
        named = cast("dict[str, RankMemCachedH5Dataset]", datasets)
        with nullcontext() if profiler is None else profiler.profile(f"[{type(self).__name__}]load"):
            load_shards(named, is_alone=self._is_alone(), patience=patience, spare=spare)

    def release(self, dataset: RowDataset, stage: str | None) -> None:
        """Keep loaded shards at the end of a Trainer's run for the next one, otherwise release them."""
        if stage is None or not is_running(self.trainer):
            dataset.close()

    def _identity(self) -> Identity:
        """See ``KeepsPosition._identity``: also of the rows in memory."""
        dataset = cast("RankMemCachedH5Dataset | None", self._datasets.get("train"))
        return {**super()._identity(), **({} if dataset is None else dataset.held_identity)}

    def start_epoch(self, sampler: PlanSampler) -> int | None:
        """See ``BaseH5DataModule.start_epoch``; redraws the shards if they are due."""
        kept = super().start_epoch(sampler)
        dataset = cast("RankMemCachedH5Dataset | None", self._datasets.get("train"))
        epoch = sampler.epoch if kept is None else kept
        draw = 0 if dataset is None or self.is_overfitting else dataset.shard.draw(epoch)
        if dataset is not None and dataset.draw != draw:
            for loader in list(self._loaders["train"]):
                loader.close()  # persistent workers hold the old shard
            if not dataset.reshard(draw):
                self._load({"train": dataset})
        return kept

    # Order ---------------------------------------------------------------------------------------------------

    def mixed_rows(self, n_rows: int, noun: str) -> str:
        """See ``BaseH5DataModule.mixed_rows``."""
        world_size = self.world_size or 1
        if world_size == 1:
            return super().mixed_rows(n_rows, noun)
        which = f"one of every {world_size}" if self._memory.mode == "interleave" else f"neighboring {noun}"
        if every := self._memory.reshard_every_n_epochs:
            which = f"redrawn {'each epoch' if every == 1 else f'every {every} epochs'}"
        return f"the {noun} that each rank holds, {n_rows // world_size:,} of {n_rows:,} ({which})"

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """The order in which rows are read: in memory all orders cost the same."""
        held = cast("RankMemCachedH5Dataset", dataset)
        recipe = None if held.weights is None else ShardRows(held.shard, held.weights)
        if shuffles and self._options.shuffle.mode != "none":
            return Order("global", 1, 0, "each rank's rows are in its memory", 0, recipe=recipe)
        return Order("none", 1, 0, "as shuffle=False asks", 0, recipe=recipe)

    def sampler_of(self, dataset: RowDataset, order: Order, *, training: bool) -> PlanSampler:
        """The sampler of a loader: of this rank's rows alone."""
        held = cast("RankMemCachedH5Dataset", dataset)
        return ShardSampler(
            held.shard,
            self._parameters(order),
            weights=held.weights if training else None,
            **self._sampler_arguments(training=training),
            repeats=self.is_overfitting,
            is_given=self.trainer is not None or self._options.distributed.rank is not None,
        )

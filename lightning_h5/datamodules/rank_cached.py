"""``RankCachedH5DataModule``: each rank's shard in memory, in a data module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from .._lightning import rank_zero_info
from ..datasets import FileSamples, RankMemCachedH5Dataset, RowDataset, load_shards
from ..errors import H5ValueError
from ..hdf5 import name_objects
from ..loading.choose_order import Order
from ..options import (
    BadRowOptions,
    DistributedOptions,
    FileOptions,
    MemoryOptions,
    MixtureOptions,
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
from ..options.keywords import checks_keywords
from ..order import (
    EpochRecipe,
    OrderParameters,
    PlanSampler,
    RankShard,
    Replica,
    RowWeights,
    ShardRows,
    ShardSampler,
    resolve_replica,
)
from ..samples import MakesIndexer
from ..types import DTypeLike, Identity, Keys, PathLike, Paths
from .arguments import Split
from .from_files import FilesH5DataModule
from .lazy import LazyH5DataModule
from .resume import is_running
from .shared_docs import with_arguments_of
from .training_rows import token_recipe

__all__ = ["RankCachedH5DataModule"]


@checks_keywords
@with_arguments_of(LazyH5DataModule)
class RankCachedH5DataModule(FilesH5DataModule):
    """Train from rows in memory: each rank loads its shard once, in ``setup``.

    Use it if the rows fit into the memory of the machines. This is checked before loading starts.

    Each rank trains on the rows of its own shard, in a new order each epoch. All ranks run the same number of steps,
    and each row is used once per epoch: the last two batches of each rank are slightly smaller. Evaluation uses every
    row exactly once. An interrupted run resumes exactly on the same number of ranks. With another number, the shards
    differ, and the epoch starts over with a warning.

    Loaded shards stay in memory for the next ``fit``, ``validate``, ``test`` or ``predict`` of a Trainer, as long as
    memory allows. Call ``teardown()`` to release them.

    An argument that accepts an option object also accepts a mapping with its fields, as in YAML.

    Accepts all arguments of ``LazyH5DataModule`` except ``mixture``, and yields the same kinds of batches.

    Args:
        shuffle: how training rows are shuffled each epoch: True, False, "global", "chunks" or ``ShuffleOptions``.
            In memory, all orders cost the same: any value except False permutes each rank's rows.
        weights: how often each training row is drawn: the name of an array (``weight_key``) or ``WeightOptions``
            (``weight_key``, ``balance_key``, ``class_weights``). Each rank draws from its own shard, so the probability
            of a row depends on the share of its class in the shard.
        mixture: not supported, since each rank draws from its own shard; raises an error.
        staging: folder on a local disk, such as "$TMPDIR", that caches files on slow storage, or ``StagingOptions``
            (``dir``, ``max_bytes``, ``storage_options``). It has an effect only with ``memory.reshard_every_n_epochs``:
            otherwise each row is read once.
        memory: how rows are held: a mode ("interleave" or "contiguous") or ``MemoryOptions`` (``mode``, ``share``,
            ``device``, ``pin``, ``reshard_every_n_epochs``). Rows are held in ``x_dtype``: a small dtype saves memory.

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
        fields: list[str] | dict[str, Any] | None = None,
        x_dtype: DTypeLike = "auto",
        y_dtype: DTypeLike = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        device_transform: Callable[..., Any] | dict[str, Callable[..., Any]] | None = None,
        collate_fn: Callable[[Any], Any] | Literal["stack", "pad", "list", "pack"] | None = None,
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
        prefetch_to_device: int = 0,
        split: SplitOptions | float | list[float] | dict[str, Any] | None = None,
        weights: WeightOptions | str | dict[str, Any] | None = None,
        sample: Literal["row", "window", "segment"] | MakesIndexer | None = None,
        segments: SegmentOptions | str | dict[str, Any] | None = None,
        window: WindowOptions | int | list[int] | dict[str, Any] | None = None,
        patch: PatchOptions | dict[str, Any] | None = None,
        table: TableOptions | dict[Any, Any] | PathLike | None = None,
        decode: dict[str, Any] | None = None,
        select: dict[str, dict[int, Any]] | None = None,
        where: Any = None,
        label: int | None = None,
        valid_mask: str | None = None,
        mixture: MixtureOptions | dict[str, Any] | None = None,
        on_bad_file: Literal["raise", "skip"] = "raise",
        on_bad_row: BadRowOptions | Literal["raise", "skip"] | dict[str, Any] = "raise",
        workers: WorkerOptions | dict[str, Any] | None = None,
        files: FileOptions | dict[str, Any] | None = None,
        staging: StagingOptions | PathLike | dict[str, Any] | None = None,
        distributed: DistributedOptions | dict[str, Any] | None = None,
        memory: MemoryOptions | Literal["contiguous", "interleave"] | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    cannot_mix = (
        "whose ranks draw only rows of their own shards, so that shares of sources would not hold over all ranks. Pass "
        "it to LazyH5DataModule, or pass the files as one dataset: train_path accepts a list."
    )

    def _use_arguments(self, arguments: Mapping[str, Any]) -> None:
        super()._use_arguments(arguments)
        self._memory = MemoryOptions.parse(arguments["memory"], "memory")
        self._options.shuffle.check_scope("RankCachedH5DataModule", "whose ranks hold their rows in memory already")
        reads_once = not self._memory.reshard_every_n_epochs and not name_objects(*self._paths.values())
        if self._options.files.staging is not None and reads_once:
            self._options = replace(self._options, files=replace(self._options.files, staging=None))
            self._log_once("staging has no effect: each row is read once, into memory")
        if self._kind.segments.bucket:
            raise H5ValueError(
                "segments.bucket requires batches of similar length over all ranks, but each rank holds its own "
                "segments in memory. Pass segments.max_tokens, the maximum number of steps per batch, instead."
            )
        if self._kind.segments.max_tokens is not None and self._memory.reshard_every_n_epochs:
            raise H5ValueError(
                "segments.max_tokens cannot be combined with memory.reshard_every_n_epochs: new shards would change "
                "the number of batches. Remove one of them."
            )
        if self._memory.device != "cpu" and self._options.num_workers:
            raise H5ValueError(
                f"memory.device={self._memory.device!r} cannot be combined with "
                f"num_workers={self._options.num_workers}: worker processes cannot read a GPU's memory. Pass "
                "num_workers=0; batches are built on the GPU."
            )
        if self._memory.device != "cpu" and self._options.prefetch_to_device:
            raise H5ValueError(
                f"memory.device={self._memory.device!r} cannot be combined with "
                f"prefetch_to_device={self._options.prefetch_to_device}: batches are built on the GPU, so nothing is "
                "copied there. Remove prefetch_to_device."
            )

    # Datasets ------------------------------------------------------------------------------------------------

    def dataset_of(self, samples: FileSamples, split: Split, *, n_sources: int = 1) -> RankMemCachedH5Dataset:
        """See ``FilesH5DataModule.dataset_of``; nothing is loaded yet."""
        trains = split == "train"
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
        dataset.for_workers = bool(self._options.num_workers) and context.get_start_method() != "fork"
        return dataset

    def weigh(self, dataset: RowDataset, weights: RowWeights) -> RowDataset:
        """See ``FilesH5DataModule.weigh``: each rank draws among the rows that it holds."""
        cast("RankMemCachedH5Dataset", dataset).draw_by(weights)
        return dataset

    def _device(self) -> torch.device | str:
        """The device that holds the shards; a GPU without a number is the rank's own."""
        root = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        return root if root is not None and root.type == self._memory.device else self._memory.device

    def can_reuse(self, old: RowDataset, new: RowDataset) -> bool:
        """Whether a dataset of an earlier ``setup`` holds the rows that a new one would load."""
        return cast("RankMemCachedH5Dataset", old).can_reuse(cast("RankMemCachedH5Dataset", new))

    def load(self, splits: Sequence[Split]) -> None:
        """Load the shards of some splits, except for those already loaded.

        Raises:
            H5Error: memory is too small, or rows cannot be read; on all ranks.
        """
        datasets = {split: cast("RankMemCachedH5Dataset", dataset) for split, dataset in self._datasets.items()}
        # Another Trainer may validate during a fit, which still reads.
        in_use = {*splits, *(("train", "val") if self.is_in_a_fit else ())}
        limits = {split: getattr(self.trainer, f"limit_{split}_batches", 1) for split in splits}
        self._load(
            {split: datasets[split] for split, limit in limits.items() if limit != 0 and not datasets[split].is_loaded},
            spare=[dataset for split, dataset in datasets.items() if split not in in_use],
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
        trainer_epoch = super().start_epoch(sampler)
        dataset = cast("RankMemCachedH5Dataset | None", self._datasets.get("train"))
        epoch = sampler.epoch if trainer_epoch is None else trainer_epoch
        draw = 0 if dataset is None or self.is_overfitting else dataset.shard.draw(epoch)
        if dataset is not None and dataset.draw != draw:
            for loader in list(self._loaders["train"]):
                loader.close()  # persistent workers hold the old shard
            if not dataset.reshard(draw):
                self._load({"train": dataset})
        return trainer_epoch

    def next_epoch(self, sampler: PlanSampler, epoch: int) -> int | None:
        """See ``KeepsPosition.next_epoch``; None if the shards are redrawn before it."""
        next_epoch, dataset = super().next_epoch(sampler, epoch), self._datasets.get("train")
        if next_epoch is None or dataset is None or self.is_overfitting:
            return next_epoch
        shard = cast("RankMemCachedH5Dataset", dataset).shard
        return next_epoch if shard.draw(next_epoch) == shard.draw(epoch) else None

    # Order ---------------------------------------------------------------------------------------------------

    def mixed_rows(self, n_rows: int, noun: str) -> str:
        """See ``BaseH5DataModule.mixed_rows``."""
        world_size = self.world_size or 1
        if world_size == 1:
            return super().mixed_rows(n_rows, noun)
        detail = f"one of every {world_size}" if self._memory.mode == "interleave" else f"neighboring {noun}"
        if every := self._memory.reshard_every_n_epochs:
            detail = f"redrawn {'each epoch' if every == 1 else f'every {every} epochs'}"
        return f"the {noun} that each rank holds, {n_rows // world_size:,} of {n_rows:,} ({detail})"

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """Return the order of rows; in memory, all orders cost the same."""
        held = cast("RankMemCachedH5Dataset", dataset)
        recipe = self._token_recipe(held, held.shard)
        if recipe is None and held.weights is not None:
            recipe = ShardRows(held.shard, held.weights)
        order = Order("none", 1, 0, "as requested by shuffle=False", 0, recipe=recipe)
        if shuffles and self._options.shuffle.mode != "none":
            order = Order("global", 1, 0, "each rank's rows are in its memory", 0, recipe=recipe)
        return order

    def recipes_of_ranks(
        self, dataset: RowDataset, order: OrderParameters, world_size: int
    ) -> Callable[[int], EpochRecipe]:
        """See ``NamesRows.recipes_of_ranks``: each rank visits the rows of its own shard."""
        held = cast("RankMemCachedH5Dataset", dataset)

        def recipe_of(rank: int) -> EpochRecipe:
            shard = held.shard_of(Replica(rank, world_size))
            return self._token_recipe(held, shard) or ShardRows(shard, held.weights)

        return recipe_of

    def _token_recipe(self, dataset: RankMemCachedH5Dataset, shard: RankShard) -> EpochRecipe | None:
        packs = self._options.collate == "pack"
        return token_recipe(dataset, self._kind.segments, packs=packs, shard=shard)

    def sampler_of(self, dataset: RowDataset, order: Order, *, training: bool) -> PlanSampler:
        """Return the sampler of a loader, over this rank's rows."""
        held = cast("RankMemCachedH5Dataset", dataset)
        return ShardSampler(
            held.shard,
            self._parameters(order),
            recipe=order.recipe,
            weights=held.weights if training else None,
            **self._sampler_arguments(training=training),
            repeats=self.is_overfitting,
            is_given=self.trainer is not None or self._options.distributed.rank is not None,
        )

"""``RankCachedH5DataModule``: each rank's shard in memory, in a data module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch

from .._lightning import rank_zero_info
from ..datasets import RankMemCachedH5Dataset, RowDataset, load_shards
from ..errors import H5ValueError
from ..hdf5 import Trust
from ..loading.choose_order import Order
from ..order import PlanSampler, ShardMode, ShardSampler, TrainBatches
from ..types import DTypeLike, Keys, PathLike, Paths
from .base import is_running
from .checks import whole
from .keyed import KeyedH5DataModule
from .options import LoaderOptions, SampleOptions, Split, SplitOptions
from .settings import constructor_settings

__all__ = ["RankCachedH5DataModule"]


class _Shard(RankMemCachedH5Dataset):
    """A split's shard; errors name the arguments of the data module."""

    dtype_names = ("x_dtype", "y_dtype")
    public_name = RankMemCachedH5Dataset.__name__


class RankCachedH5DataModule(KeyedH5DataModule):
    """Trains from rows that each rank holds in memory: loaded once, in ``setup``, and served at the speed of memory.

    Takes the configuration of ``LazyH5DataModule``. Use it where the rows fit into the memory of the machines, each
    rank's part beside the others'. Whether they do is found out before anything is loaded.

    A rank trains on the rows of its own shard, in an order of its own each epoch. Ranks take equally many steps: where
    the rows do not divide by the ranks, fewer rows than ranks sit out an epoch, others the next. Evaluation takes every
    row exactly once. A run that broke off goes on exactly with the same number of ranks; with another number ranks hold
    other rows, and the epoch starts over, with a warning.

    What was loaded stays for the next ``fit``, ``validate``, ``test`` or ``predict`` of a Trainer, as long as there is
    room for what that one needs. ``teardown()``, called by you, gives it back.

    Args:
        train_path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these.
        val_path: files to validate on, likewise.
        test_path: files to test on, likewise.
        predict_path: files to predict on, likewise; they need not have a target.
        x_key: the input array, a list of arrays (x is a tuple), or a mapping from names to arrays (x is a dict).
            ``{split}`` in it stands for train, val, test or predict. None takes what the file leaves no doubt about.
        y_key: the target, likewise. None gives inputs alone.
        x_dtype: dtype that the input is held in, by name, or a mapping from fields to names. None keeps the file's,
            which is often the smallest; cast on the GPU.
        y_dtype: dtype of the target, likewise.
        val_fraction: share of the training files' rows to validate on, 0 to 1.
        test_fraction: share of the training files' rows to test on, 0 to 1.
        group_key: an array with each row's group (a patient, a recording): groups are never cut apart.
        num_folds: cut the training rows into this many folds; one of them validates.
        fold: the fold that validates, from 0.
        split_seed: decides which rows go where, apart from ``seed``.
        stratify_key: an array with each row's class: all splits and folds get about the same share of each class.
        split_file: a JSON file that says which rows, or groups, are in which split. It is taken as it is where it is
            there, and written else; one that was made with other shares or folds, or says nothing of a group, is an
            error.
        normalize: a JSON file with mean and standard deviation of fields, of all their values or of each channel: these
            fields come as ``(x - mean) / std``, before any transform. Statistics of other fields, shapes or numbers of
            channels are refused. None leaves values as they are.
        transform: runs on each sample's input, a copy of its row; may ask for ``rng`` or ``generator``.
        target_transform: runs on each sample's target.
        eval_transform: takes the place of ``transform`` outside of training. None means that ``transform`` runs there.
        batch_transform: runs once on each collated batch; may ask for ``rng`` or ``generator`` likewise.
        collate_fn: makes a batch of a list of samples. None stacks, without making samples first.
        batch_size: rows of a training batch on one rank.
        eval_batch_size: rows of a batch in the other stages. None means ``batch_size``.
        shuffle: True, or "global", draws a new order of each rank's rows each epoch; "window" does the same here, since
            rows in memory cost nothing. False keeps the storage order.
        drop_last: drop the ragged end of a training epoch. None means False.
        seed: seed of the training order. None takes Lightning's ``seed_everything``, else 0.
        with_index: add each row's index in its split to the batch: last in a tuple, ``"index"`` in a dict.
        sample: "row" says that an index along axis 0 is a sample, for files that look like an image or volume each
            (see ``LazyH5DataModule``).
        num_workers: worker processes. 0 copies batches ahead in a thread: the fastest unless a ``transform`` is slow.
            Workers read the one copy of the rows, however they are started.
        prefetch_factor: batches made ahead (see ``LazyH5DataModule``).
        pin_memory: put batches into page-locked memory. "auto" does so where they go to a GPU.
        persistent_workers: keep workers between epochs. None means yes.
        multiprocessing_context: how workers start: fork, forkserver or spawn. None is Python's default.
        timeout: seconds to wait for a worker's batch before it is taken to hang; None means 600, 0 waits for ever.
        setup_timeout: seconds that ranks wait for one that makes no progress, before all of them stop.
        worker_init_fn: runs in each worker, after its random streams are seeded.
        shuffle_bytes: without effect; here so that a configuration of ``LazyH5DataModule`` can be taken as it is.
        streams: without effect, likewise.
        cache_bytes: without effect, likewise: the shard is held whole.
        on_resume_mismatch: what to do where a checkpoint's position does not fit: "raise", or "restart_epoch".
        mmap: without effect, likewise.
        world_size: number of replicas, where neither trainer nor ``torch.distributed`` says it right.
        rank: this replica, likewise.
        allow_external: follow links, storage and virtual arrays into other files.
        allow_sparse: take arrays that declare more than 4 GiB and more than 1,000 times what is stored. False, since a
            few bytes of a file can ask for petabytes.
        allow_large_chunks: take chunks of more than 1 GiB, decoded. False, likewise.
        min_integrity: the lowest integrity level that passes, 0 to 4: how surely damage shows (see the how-to page on
            reliability). 0 takes all files.
        verify: "digest" compares rows with the digests beside the files, which ``lightning-h5 check --write-digests``
            writes: as they are read, or all of them once at first. None relies on the files' own checksums.
        swmr: the files have a live writer in single-writer/multiple-reader mode. They are read up to the rows that were
            there in ``setup``.
        on_error: what to do where rows cannot be read. "raise" ends the run with an error, and is all there is: rows
            that are left out in silence change what is learned.
        mode: "interleave" gives each rank every ``world_size``-th row to train on, so that each has all classes of a
            sorted file; ranks of a machine hold the rows together, and each decodes a part. "contiguous" gives it
            neighboring rows, which warns if they are sorted by their targets: each of several machines then decodes its
            own chunks alone.
        pin_host_memory: lock the shard's pages for copies to a GPU, in place; no effect without CUDA, and on memory
            that several ranks hold together. Batches are page-locked by ``pin_memory`` in any case.
        share_memory: hold rows once for all ranks of a machine that need the same ones, as tensor-parallel peers do.
        cache_device: "cpu", or "cuda" to hold the shard in the rank's GPU: batches never cross the bus.
        reshard_every_n_epochs: draw the shards anew over all ranks every so many epochs, so that rows meet others in a
            batch than those of their first shard; each time takes as long as loading. 0 keeps them.

    Raises:
        H5ValueError: arguments that contradict each other or make no sense. Files are looked at in ``setup``.

    Example:
        >>> datamodule = RankCachedH5DataModule("digits.h5", x_key="images", y_key="labels", val_fraction=0.1)
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
        val_fraction: float = 0.0,
        test_fraction: float = 0.0,
        group_key: str | None = None,
        num_folds: int | None = None,
        fold: int | None = None,
        split_seed: int = 0,
        stratify_key: str | None = None,
        split_file: PathLike | None = None,
        normalize: PathLike | None = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        shuffle: bool | Literal["global", "window"] = True,
        drop_last: bool | None = None,
        seed: int | None = None,
        with_index: bool = False,
        sample: Literal["row"] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        persistent_workers: bool | None = None,
        multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None,
        timeout: float | None = None,
        setup_timeout: float = 120.0,
        worker_init_fn: Callable[[int], Any] | None = None,
        shuffle_bytes: int | str = "512 MiB",
        streams: int | None = None,
        cache_bytes: int | str = "auto",
        on_resume_mismatch: Literal["raise", "restart_epoch"] = "raise",
        mmap: bool = False,
        world_size: int | None = None,
        rank: int | None = None,
        allow_external: bool = False,
        allow_sparse: bool = False,
        allow_large_chunks: bool = False,
        min_integrity: int = 0,
        verify: Literal["digest"] | None = None,
        swmr: bool = False,
        on_error: Literal["raise"] = "raise",
        mode: Literal["contiguous", "interleave"] = "interleave",
        pin_host_memory: bool = True,
        share_memory: bool = False,
        cache_device: str = "cpu",
        reshard_every_n_epochs: int = 0,
    ) -> None:
        super().__init__(
            constructor_settings(self),
            {"train": train_path, "val": val_path, "test": test_path, "predict": predict_path},
            SampleOptions(
                x_key=x_key,
                y_key=y_key,
                x_dtype=x_dtype,
                y_dtype=y_dtype,
                transform=transform,
                target_transform=target_transform,
                eval_transform=eval_transform,
                batch_transform=batch_transform,
                normalize=normalize,
                with_index=with_index,
                sample=sample,
                trust=Trust.of(
                    allow_external=allow_external,
                    allow_sparse=allow_sparse,
                    allow_large_chunks=allow_large_chunks,
                    min_integrity=min_integrity,
                    verify=verify,
                ),
                swmr=swmr,
            ),
            SplitOptions.of(
                val_fraction, test_fraction, group_key, num_folds, fold, split_seed, stratify_key, split_file
            ),
            batch_size,
            LoaderOptions.of(
                eval_batch_size=eval_batch_size,
                shuffle=shuffle,
                drop_last=drop_last,
                seed=seed,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                pin_memory=pin_memory,
                persistent_workers=persistent_workers,
                multiprocessing_context=multiprocessing_context,
                timeout=timeout,
                setup_timeout=setup_timeout,
                on_resume_mismatch=on_resume_mismatch,
                on_error=on_error,
                shuffle_bytes=shuffle_bytes,
                streams=streams,
                cache_bytes=cache_bytes,
                worker_init_fn=worker_init_fn,
                collate_fn=collate_fn,
                world_size=world_size,
                rank=rank,
            ),
        )
        if mode not in ("contiguous", "interleave"):
            raise H5ValueError(f"mode={mode!r} was given. Pass 'contiguous' or 'interleave'.")
        if cache_device != "cpu" and self._options.num_workers:
            raise H5ValueError(
                f"cache_device={cache_device!r} and num_workers={num_workers} were given: worker processes do not read "
                "a GPU's memory. Pass num_workers=0; batches are made on the GPU."
            )
        self._mode: ShardMode = mode
        self._pin_host_memory, self._share_memory = pin_host_memory, share_memory
        self._cache_device = cache_device
        self._reshard_every = whole(reshard_every_n_epochs, "reshard_every_n_epochs", least=0)

    # Datasets ------------------------------------------------------------------------------------------------

    def build_dataset(self, split: Split) -> RankMemCachedH5Dataset | None:
        """The dataset of a split, not loaded yet; or None where there is no data for it."""
        rows, samples, trains = self.rows_of(split), self._samples, split == "train"
        if rows is None:
            return None
        dataset = _Shard(
            rows.files,
            rows.x_key,
            rows.y_key,
            mode=self._mode if trains else "contiguous",  # as evaluation cuts its rows
            dtype_x=samples.x_dtype,
            dtype_y=rows.y_dtype,
            transform=rows.transform,
            target_transform=rows.target_transform,
            pin_host_memory=self._pin_host_memory,
            share_memory=self._share_memory,
            log_fn=rank_zero_info,
            rank=self.rank,
            world_size=self.world_size,
            indices=rows.indices,
            reshard_every_n_epochs=self._reshard_every if trains else 0,
            seed=self.seed or 0,
            batch_transform=samples.batch_transform,
            normalize=rows.normalize,
            with_index=samples.with_index,
            sample=samples.sample,
            swmr=samples.swmr,
            **samples.trust.arguments(),
            cache_device=self._device(),
            preload=False,
            catalog=self._catalog,
        )
        context = multiprocessing.get_context(self._options.multiprocessing_context)
        dataset.for_training = trains
        dataset.for_workers = bool(self._options.num_workers) and context.get_start_method() != "fork"
        return dataset

    def _device(self) -> torch.device | str:
        """Where shards are held; a GPU without a number is the rank's own."""
        root = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        return root if root is not None and root.type == self._cache_device else self._cache_device

    def can_reuse(self, old: RowDataset, new: RowDataset) -> bool:
        """Whether a dataset of an earlier ``setup`` holds in memory what a new one would load."""
        both = cast("RankMemCachedH5Dataset", old), cast("RankMemCachedH5Dataset", new)
        return both[0].can_reuse(both[1])

    def load(self, splits: Sequence[Split]) -> None:
        """Loads the shards of some splits; those that are loaded stay as they are.

        Raises:
            H5Error: there is no room, or rows cannot be read; on all ranks.
        """
        held = {split: cast("RankMemCachedH5Dataset", dataset) for split, dataset in self._datasets.items()}
        # Another Trainer may validate in the middle of a fit, which goes on reading.
        needed = {*splits, *(("train", "val") if self.is_in_a_fit else ())}
        self._load(
            {
                split: held[split]
                for split in splits
                if not held[split].is_loaded and getattr(self.trainer, f"limit_{split}_batches", 1) != 0
            },
            spare=[dataset for split, dataset in held.items() if split not in needed],
        )

    def _load(
        self, datasets: dict[Split, RankMemCachedH5Dataset], spare: Sequence[RankMemCachedH5Dataset] = ()
    ) -> None:
        profiler = getattr(self.trainer, "profiler", None)
        with nullcontext() if profiler is None else profiler.profile(f"[{type(self).__name__}]load"):
            load_shards(
                cast("dict[str, RankMemCachedH5Dataset]", datasets),
                is_alone=self._is_alone(),
                patience=self._options.setup_timeout,
                spare=spare,
            )

    def release(self, dataset: RowDataset, stage: str | None) -> None:
        """Keeps what is loaded at the end of a Trainer's run, for the next one; else gives it back."""
        if stage is None or not is_running(self.trainer):
            dataset.close()

    def start_epoch(self, sampler: PlanSampler) -> int | None:
        """See ``BaseH5DataModule.start_epoch``; draws the shards anew where it is time to."""
        kept = super().start_epoch(sampler)
        dataset = cast("RankMemCachedH5Dataset | None", self._datasets.get("train"))
        epoch = sampler.epoch if kept is None else kept
        draw = 0 if dataset is None or self.is_overfitting else dataset.shard.draw(epoch)
        if dataset is not None and dataset.draw != draw:
            for loader in list(self._loaders["train"]):
                loader.close()  # persistent workers have the old shard
            if not dataset.reshard(draw):
                self._load({"train": dataset})
        return kept

    # Order ---------------------------------------------------------------------------------------------------

    def mixed_rows(self, n_rows: int) -> str:
        """See ``BaseH5DataModule.mixed_rows``."""
        world_size = self.world_size or 1
        if world_size == 1:
            return super().mixed_rows(n_rows)
        if self._reshard_every:
            which = f"redrawn {'each epoch' if self._reshard_every == 1 else f'every {self._reshard_every} epochs'}"
        else:
            which = f"one of every {world_size}" if self._mode == "interleave" else "neighboring rows"
        return f"the rows that each rank holds, {n_rows // world_size:,} of {n_rows:,} ({which})"

    def training_cut(self, n_rows: int) -> TrainBatches:
        """How each rank's part of an epoch is cut into batches."""
        return TrainBatches(n_rows // (self.world_size or 1), self.batch_size, 1, self._options.drop_last)

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """The order in which rows are asked for: in memory all orders cost the same."""
        if shuffles and self._options.shuffle is not False:
            return Order("global", 1, 0, "each rank's rows are in its memory", 0)
        return Order("none", 1, 0, "as shuffle=False asks", 0)

    def sampler_of(self, dataset: RowDataset, order: Order, *, training: bool) -> PlanSampler:
        """The sampler of a loader: of this rank's rows alone."""
        options = self._options
        return ShardSampler(
            cast("RankMemCachedH5Dataset", dataset).shard,
            self._parameters(order),
            batch_size=self.batch_size if training else options.eval_batch_size or self.batch_size,
            drop_last=training and options.drop_last,
            evaluation=not training,
            samples=options.collate_fn is not None,
            epoch_source=self if training else None,
            rotates=not self.is_overfitting,
            is_given=self.trainer is not None or self._options.rank is not None,
        )

    def _check_rows(self, split: Split, n_rows: int) -> None:
        super()._check_rows(split, n_rows)
        world_size = self.world_size or 1
        if split == "train" and (n_left_out := n_rows % world_size):
            self._say(
                f"{n_left_out} of {n_rows:,} rows, other ones each epoch, sit out so that all {world_size} ranks take "
                "equally many steps"
            )

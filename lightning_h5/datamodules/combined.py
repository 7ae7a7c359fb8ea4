"""``CombinedHDF5DataModule``: trains from many files of the same structure, filtered, with samples as dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

from ..datasets import (
    CombinedHDF5Dataset,
    MixtureDataset,
    NoRowPassesError,
    RowDataset,
    SequenceDataset,
    mixture_dataset,
    weighted_dataset,
)
from ..errors import H5ValueError
from ..hdf5 import Trust
from ..loading.choose_order import Order, choose_mixed_order
from ..order import EpochLength, Mixture, Strategy, check_mixture
from ..types import DTypeLike, IntArray, PathLike, Paths
from .base import BaseH5DataModule
from .mixtures import MixtureOptions, SourceOptions
from .options import LoaderOptions, Split, SplitOptions, check_callable
from .sequences import SequenceOptions
from .settings import constructor_settings
from .source_files import SourceFiles, SplitDataset
from .weighting import WeightOptions, weights_of

__all__ = ["CombinedHDF5DataModule"]

_UNMIXED = ("concat", "sum", "batches")


class CombinedHDF5DataModule(BaseH5DataModule):
    """Trains from one or thousands of files of the same structure: filtered rows, samples as dicts of fields, a cache.

    Shards by rank, shuffles, resumes and evaluates as ``LazyH5DataModule`` does. Filters hold for all splits. Fractions
    and folds are of all rows, before any filter: another filter moves no row between training and test.

    Args:
        train_paths: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these.
        val_paths: files to validate on, likewise.
        test_paths: files to test on, likewise.
        predict_paths: files to predict on, likewise.
        load_fields: arrays to load; their names are the sample's keys. None loads all that share axis 0.
        allowed_guids: keep rows whose ``guid`` is one of these.
        cs_label: keep rows whose flag ``cs_label`` is set (True), or is not (False).
        bg_label: likewise of ``bg_label``.
        epoch_min: smallest value of ``epoch`` to keep.
        epoch_max: largest value of ``epoch`` to keep.
        label: keep rows that have this class at any step of ``target`` (see ``CombinedHDF5Dataset``).
        cache_size: rows that were used last and are kept, in each process; 0 keeps none.
        dtype: of floating fields with an axis beside the rows, the target excepted. None leaves all as stored. A
            mapping from fields to dtypes names those of some, and leaves the others as stored; the stored dtype by name
            takes packed integers as they are.
        where: conditions on any one-dimensional arrays, by name: a value, a list of values, or a range
            ``{"min": 3, "max": 5}``; from Python also functions (see ``CombinedHDF5Dataset``).
        field_map: names of ours for arrays that are called otherwise.
        valid_mask: array that is not 0 at steps that count for ``label``.
        cache_index: keep which rows pass on disk, for the next time: True, or a folder.
        on_bad_file: "error", or "skip" to leave out files that are missing or broken; each is logged, and ranks that
            do not leave out the same stop.
        max_cache_bytes: bytes that the rows of ``cache_size`` may take; worker processes share it.
        sources: instead of ``train_paths``, several sets of files to mix: a mapping from each source's name to its
            files, or to a mapping with ``paths`` and filters and fields of its own (``where``, ``label``,
            ``field_map``, ... as here, instead of the data module's). A sample has the name, as ``"source"``.
        sampling_strategy: how sources are mixed. "concat": all rows as one. "weighted": by ``weights``.
            "round_robin": one after the other, again and again. "alternating": by ``pattern``. "sequential": one source
            whole, then the next. A source that is used up starts again, in a new order; the next epoch goes on where
            this one left it.
        weights: of the sources, in their order or by name; 0 or more. None goes by their size.
        pattern: names of sources in their turn, for "alternating": ``["a", "a", "b"]``.
        epoch_length: "sum" (as much as all sources have), "max" (until each was seen whole), "min" (until the first
            one is used up, or a batch before that where shares are rounded: no row twice), or a number of steps.
        mix: "batches": each batch is of one source (not for "concat"). "rows": sources take turns by rows, so that a
            batch has some of each.
        val_fraction: share of the training files' rows to validate on, 0 to 1.
        test_fraction: share of the training files' rows to test on, 0 to 1.
        group_key: an array with each row's group (a patient, a recording): groups are never cut apart.
        num_folds: cut the training rows into this many folds; one of them validates.
        fold: the fold that validates, from 0.
        split_seed: decides which rows go where. Apart from ``seed``, so that a new training seed moves no row
            between training and test.
        stratify_key: an array with each row's class: all splits and folds get about the same share of each class.
        split_file: a JSON file that says which rows, or groups, are in which split. It is taken as it is where it is
            there, and written else; one that was made with other shares or folds, or says nothing of a group, is an
            error.
        sequence_key: an array with each row's group (a patient, a recording): a sample is then a whole group, all its
            rows that pass the filters, and ``batch_size`` counts groups. A batch has them padded with zeros to the
            longest, as ``(batch, steps, ...)``, with ``"mask"`` (True at rows) and ``"lengths"``.
        sequence_order: an array that each sequence is sorted by. None keeps the order of storage.
        bucket_by_length: have training batches of sequences of about the same length, in a random order: little of
            them is padding, ranks take equally many steps, and the longest ones come in smaller batches.
        weight_key: an array with each row's weight, 0 or more: training rows come that often, relative to each other,
            in epochs of as many rows as there are. Evaluation has each row once.
        balance_key: an array with each row's class: all classes come equally often in training, or by
            ``class_weights``.
        class_weights: how often each class of ``balance_key`` comes, relative to the others; names all of them.
        normalize: a JSON file with mean and standard deviation of fields, of all their values or of each channel: these
            fields come as ``(x - mean) / std``, before any transform. Statistics of other fields, shapes or numbers of
            channels are refused. None leaves values as they are.
        transform: runs on each sample, a dict. See ``LazyH5DataModule`` for what it may draw.
        eval_transform: takes the place of ``transform`` for validation, test and prediction. None means that
            ``transform`` runs there too.
        batch_transform: runs once on each collated batch.
        collate_fn: makes a batch of a list of samples. None stacks, without making samples first.
        batch_size: rows of a training batch on one rank.
        eval_batch_size: rows of a batch in the other stages. None means ``batch_size``.
        shuffle: True mixes the training rows anew each epoch: "global" (one permutation of all rows) if random
            access is as cheap as sequential access, or all decoded rows fit ``shuffle_bytes``; else "window" (blocks
            of rows that share a chunk, mixed a window at a time, each decoded once). It says which, and why. Either
            can be asked for by name. False keeps the storage order.
        drop_last: drop the ragged end of a training epoch. None means False: nothing is dropped and all ranks
            take equally many steps, since the last two rounds are cut into slightly smaller batches.
        seed: seed of the training order. None takes Lightning's ``seed_everything``, else 0.
        with_index: add each row's index in its split to the batch: as ``"index"``.
        sample: "row" says that an index along axis 0 is a sample, for files that look like an image or volume each
            (see ``LazyH5DataModule``).
        num_workers: worker processes. 0 reads ahead and decodes in threads on all cores, without copies between
            processes: the fastest unless a ``transform`` is slow.
        prefetch_factor: batches read ahead, for each worker or in this process. None means 2 a worker; in this
            process 4, or twice as many as are read together: up to 16 that take 3 MiB (8 MiB in the order ``window``).
        pin_memory: put batches into page-locked memory. "auto" does so where they go to a GPU.
        persistent_workers: keep workers between epochs. None means yes.
        multiprocessing_context: how workers start: fork, forkserver or spawn. None is Python's default.
        timeout: seconds to wait for a worker's batch before it is taken to hang; None means 600, 0 waits for ever.
        setup_timeout: seconds that ranks in ``setup`` wait for the slowest one before all of them stop. 120, since
            a rank that hangs should cost minutes of a cluster and not the process group's half hour.
        worker_init_fn: runs in each worker, after its random streams are seeded.
        shuffle_bytes: decoded bytes that are mixed at a time on a rank, shared by its workers, such as "512 MiB". It
            decides the order, and is the same on all ranks; the more blocks it holds, the better a batch is mixed.
        streams: streams of blocks that "window" deals to ranks and workers. None is one for each of them, so that none
            decodes what another does. A number fixes the order for any number of ranks and workers;
            ``shuffle_bytes`` is then what all lanes mix together.
        cache_bytes: memory for decoded rows on a rank, shared by its workers; it decides speed alone. "auto" is what
            ``shuffle_bytes`` and reading ahead need for decoding each chunk once an epoch.
        on_resume_mismatch: what to do where a checkpoint's position does not fit: other files, another seed, no
            position at all. "raise" refuses, with the saved and the present values. "restart_epoch" warns, takes up
            weights and counters, and begins the epoch that was broken off anew: some of its rows come again.
        mmap: map contiguous arrays into memory: two to three times the rows a second, for files that you vouch
            nobody truncates while they are read (that ends the process with SIGBUS).
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

    Raises:
        H5ValueError: arguments that contradict each other or make no sense. Files are looked at in ``setup``.

    Example:
        >>> datamodule = CombinedHDF5DataModule("recordings/*.h5", label=2, val_fraction=0.1, group_key="guid")
        >>> trainer.fit(model, datamodule=datamodule)
    """

    def __init__(
        self,
        train_paths: Paths | None = None,
        val_paths: Paths | None = None,
        test_paths: Paths | None = None,
        predict_paths: Paths | None = None,
        *,
        load_fields: list[str] | None = None,
        allowed_guids: list[str] | None = None,
        cs_label: bool | None = None,
        bg_label: bool | None = None,
        epoch_min: float | None = None,
        epoch_max: float | None = None,
        label: int | None = None,
        cache_size: int = 1000,
        dtype: DTypeLike = "float32",
        where: Any = None,
        field_map: dict[str, Any] | None = None,
        valid_mask: str | None = None,
        cache_index: bool | PathLike = False,
        on_bad_file: Literal["error", "skip"] = "error",
        max_cache_bytes: int | str = "300 MiB",
        sources: Any = None,
        sampling_strategy: Strategy = "concat",
        weights: list[float] | dict[str, float] | None = None,
        pattern: list[str] | None = None,
        epoch_length: EpochLength = "sum",
        mix: Literal["batches", "rows"] = "batches",
        val_fraction: float = 0.0,
        test_fraction: float = 0.0,
        group_key: str | None = None,
        num_folds: int | None = None,
        fold: int | None = None,
        split_seed: int = 0,
        stratify_key: str | None = None,
        split_file: PathLike | None = None,
        sequence_key: str | None = None,
        sequence_order: str | None = None,
        bucket_by_length: bool = True,
        weight_key: str | None = None,
        balance_key: str | None = None,
        class_weights: dict[Any, float] | None = None,
        normalize: PathLike | None = None,
        transform: Callable[..., Any] | None = None,
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
    ) -> None:
        super().__init__(
            constructor_settings(self),
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
        self._paths: dict[Split, Paths | None] = {
            "train": train_paths,
            "val": val_paths,
            "test": test_paths,
            "predict": predict_paths,
        }
        self._split = SplitOptions.of(
            val_fraction, test_fraction, group_key, num_folds, fold, split_seed, stratify_key, split_file
        )
        self._transforms = transform, eval_transform
        trust = Trust.of(
            allow_external=allow_external,
            allow_sparse=allow_sparse,
            allow_large_chunks=allow_large_chunks,
            min_integrity=min_integrity,
            verify=verify,
        )
        arguments: dict[str, Any] = {
            "load_fields": load_fields,
            "allowed_guids": allowed_guids,
            "cs_label": cs_label,
            "bg_label": bg_label,
            "epoch_min": epoch_min,
            "epoch_max": epoch_max,
            "label": label,
            "cache_size": cache_size,
            "dtype": dtype,
            "sample": sample,
            "where": where,
            "field_map": field_map,
            "valid_mask": valid_mask,
            "cache_index": cache_index,
            "on_bad_file": on_bad_file,
            "max_cache_bytes": max_cache_bytes,
            "normalize": normalize,
            "swmr": swmr,
            "mmap": mmap,
            **trust.arguments(),
        }
        self._files = SourceFiles(arguments)
        self._of_samples: dict[str, Any] = {"batch_transform": batch_transform, "with_index": with_index}
        self._mixture: MixtureOptions | None = None
        self._sources: tuple[SourceOptions, ...] = ()
        mixing: dict[str, Any] = {
            "sampling_strategy": sampling_strategy,
            "weights": weights,
            "pattern": pattern,
            "epoch_length": epoch_length,
            "mix": mix,
        }
        if sources is not None:
            if train_paths is not None:
                raise H5ValueError("train_paths and sources were given; both say what to train on. Pass one.")
            self._mixture = MixtureOptions.of(sources, **mixing)
            self._sources = self._mixture.sources
        elif train_paths is not None:
            if epoch_length != "sum":
                self._mixture = MixtureOptions.of({"train": {"paths": train_paths}}, **mixing)
            elif said := {
                name: value for name, value in mixing.items() if not (value is None or str(value) in _UNMIXED)
            }:
                raise H5ValueError(
                    f"{said} was given, and there is nothing to mix. Pass sources instead of train_paths."
                )
            self._sources = (SourceOptions("train", train_paths, {}, "train_paths"),)
        self._names_sources = sources is not None
        self._weighting = WeightOptions(weight_key=weight_key, balance_key=balance_key, class_weights=class_weights)
        if self._weighting.is_given and (
            self._mixture is not None and (sampling_strategy, epoch_length) != ("concat", "sum")
        ):
            raise H5ValueError(
                f"rows are weighted, and sources mixed by {sampling_strategy!r} with epoch_length={epoch_length!r}: "
                "both say how often rows come. Weight rows of sampling_strategy='concat' with epoch_length='sum'."
            )
        self._sequences = SequenceOptions(sequence_key, sequence_order, bucket_by_length)
        self._sequences.check(self._split, mixes=self._mixture is not None, weighs=self._weighting.is_given)
        self._cut: dict[Split, list[IntArray]] | None = None
        for function, name in ((transform, "transform"), (eval_transform, "eval_transform")):
            check_callable(function, name)
        check_callable(batch_transform, "batch_transform")
        for split in ("val", "test"):
            if self._paths[split] is not None and self._split.cuts(split):
                raise H5ValueError(
                    f"{split}_paths was given, and rows are to be cut off the training files for {split!r} too. "
                    f"Pass {split}_paths, or {split}_fraction (or folds), not both."
                )

    def setup(self, stage: str | None = None) -> None:
        """See ``BaseH5DataModule.setup``."""
        self._cut = None  # the files may be others by now
        try:
            super().setup(stage)
        finally:
            self._files.catalog = self._catalog  # an empty one again

    def expected_arrays(self) -> tuple[list[str], list[str]]:
        """See ``BaseH5DataModule.expected_arrays``."""
        names = [self._split.group_key, self._split.stratify_key, *self._weighting.columns]
        names += [self._sequences.key, self._sequences.sorted_by]
        return self._files.expected_arrays(self._sources, [name for name in names if name is not None])

    def build_dataset(self, split: Split) -> CombinedHDF5Dataset | MixtureDataset | SequenceDataset | None:
        """The dataset of a split, or None where there is no data for it."""
        self._files.catalog = self._catalog
        trains = split == "train"
        is_cut = not trains and self._paths[split] is None and self._split.may_cut(split)
        sources = self._sources if trains or is_cut else self._own_files(split)
        if not sources:
            return None
        rows: Sequence[IntArray | None] = [None] * len(sources)
        if is_cut or (trains and self._split.cuts_any):
            rows = chosen = self._rows()[split]
            if not any(map(len, chosen)):
                if not trains and not self._split.cuts(split):
                    return None  # a file that says nothing of this split
                raise H5ValueError(f"the split {split!r} has no rows. {self.why_no_rows(split)}")
        transform = self._transforms[0 if trains or self._transforms[1] is None else 1]
        of_samples = {"transform": transform, **self._of_samples}
        if self._mixture is None or not (trains or is_cut):
            try:
                dataset = self._files.open(sources[0], rows[0], **of_samples)
            except H5ValueError as error:
                raise H5ValueError(f"the data of {split!r}: {error}") from error
            column = partial(self._files.column, {sources[0]: dataset})
            if self._sequences.key is not None:
                return self._sequences.dataset(dataset, column)
            return weighted_dataset(dataset, self._weighting.weights(column)) if self._weighs(split) else dataset
        opened = self._open(split, sources, rows)
        self._files.refuse_images(opened)
        named = {source.name: each for source, each in opened.items()}
        mixes = not trains or not self._mixture.in_batches
        mixture = mixture_dataset(named, mixes=mixes, is_named=self._names_sources, **of_samples)
        if not self._weighs(split):
            return mixture
        return weighted_dataset(mixture, self._weighting.weights(partial(self._files.column, opened)))

    def _open(
        self, split: Split, sources: Sequence[SourceOptions], rows: Sequence[IntArray | None]
    ) -> dict[SourceOptions, SplitDataset]:
        """The sources that have rows in a split."""
        opened: dict[SourceOptions, SplitDataset] = {}
        lacking: list[H5ValueError] = []
        for source, chosen in zip(sources, rows, strict=True):
            try:
                opened[source] = self._files.open(source, chosen, n_sources=len(sources))
            except H5ValueError as error:
                told = H5ValueError(f"the source {source.name!r} of {split!r}: {error}")
                # Who names a source trains on it. But of a small one there may be nothing to evaluate on.
                if split == "train" or not isinstance(error, NoRowPassesError):
                    raise told from error
                lacking.append(told)
        if not opened:
            raise lacking[0]
        return opened

    def _own_files(self, split: Split) -> tuple[SourceOptions, ...]:
        paths = self._paths[split]
        return () if paths is None else (SourceOptions(split, paths, {}, f"{split}_paths"),)

    def _rows(self) -> Mapping[Split, list[IntArray]]:
        """For each split the rows of each source, counted in its files."""
        if self._cut is None:
            self._cut = self._files.cut(self._sources, self._split, self._paths)
        return self._cut

    def _weighs(self, split: Split) -> bool:
        return split == "train" and self._weighting.is_given

    def names_data(self, split: Split) -> bool:
        """See ``BaseH5DataModule.names_data``."""
        if split == "train":
            return bool(self._sources)
        return self._paths[split] is not None or (bool(self._sources) and self._split.may_cut(split))

    def missing_data_hint(self, split: Split) -> str:
        """A sentence on what to pass so that a split has data."""
        cut = {"val": ", or val_fraction (or num_folds and fold)", "test": ", or test_fraction"}.get(split, "")
        return f"Pass {split}_paths{' or sources' if split == 'train' else ''}{cut}."

    def why_no_rows(self, split: Split) -> str:
        """A sentence on why a split that has data has no rows."""
        if split != "train" and self._paths[split] is None:
            return f"Its share of the training files' rows is empty. Raise the share, or pass {split}_paths."
        return f"Its files, {self._paths[split] or self._paths['train']!r}, hold no rows. Pass files that have some."

    # Order ---------------------------------------------------------------------------------------------------

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """See ``BaseH5DataModule.order_of``; of a mixture that of each source."""
        options = self._options
        if isinstance(dataset, SequenceDataset):
            return self._sequences.order(super().order_of(dataset, shuffles=shuffles), dataset)
        if (mixture := self._mixture_of(dataset)) is None:
            return super().order_of(dataset, shuffles=shuffles)
        return choose_mixed_order(
            mixture,
            [dataset] if mixture.strategy == "concat" else cast("MixtureDataset", dataset).sources,
            options.shuffle if shuffles else False,
            shuffle_bytes=options.shuffle_bytes,
            streams=options.streams,
            world_size=self.world_size or 1,
            num_workers=options.num_workers,
        )

    def read_with(self, dataset: RowDataset, order: Order, cache_bytes: int, *, training: bool) -> None:
        """See ``BaseH5DataModule.read_with``; each source as its order needs."""
        if len(order.sources) < 2:
            super().read_with(dataset, order.sources[0] if order.sources else order, cache_bytes, training=training)
            return
        total = max(1, sum(each.cache_bytes for each in order.sources))
        for source, each in zip(cast("MixtureDataset", dataset).sources, order.sources, strict=True):
            super().read_with(source, each, cache_bytes * each.cache_bytes // total, training=training)

    def _mixture_of(self, dataset: RowDataset) -> Mixture | None:
        """How the sources of what is trained on are mixed; None of all else."""
        if self._mixture is None or dataset is not self._datasets.get("train") or weights_of(dataset) is not None:
            return None
        return self._mixture.mixture([len(source) for source in cast("MixtureDataset", dataset).sources])

    def _check_rows(self, split: Split, n_rows: int) -> None:
        dataset = self._datasets[split]
        if (mixture := self._mixture_of(dataset)) is None:
            super()._check_rows(split, n_rows)
            return
        check_mixture(mixture, self.batch_size, self._options.drop_last)
        if not len(self.sampler_of(dataset, self._order(dataset, training=True), training=True)):
            raise H5ValueError(
                f"an epoch of {mixture.text} with epoch_length={mixture.epoch_length!r} has no step for "
                f"{self.world_size} ranks of batch_size {self.batch_size}. Make batch_size smaller, or use fewer "
                "devices."
            )

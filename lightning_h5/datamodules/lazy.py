"""``LazyH5DataModule``: trains from HDF5 files as they are, reading rows on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy.typing as npt

from ..datasets import H5LazyDataset, MixtureDataset, weighted_dataset
from ..hdf5 import Trust
from ..types import DTypeLike, Keys, PathLike, Paths
from .keyed import KeyedH5DataModule
from .options import LoaderOptions, SampleOptions, Split, SplitOptions
from .settings import constructor_settings
from .weighting import WeightOptions

__all__ = ["LazyH5DataModule"]


class LazyH5DataModule(KeyedH5DataModule):
    """Trains from HDF5 files as they are, reading rows on demand.

    Shards by rank without any Trainer flag, shuffles anew each epoch, resumes exactly where a run broke off,
    and evaluates every row exactly once. Use it where the data do not fit into memory, or need not.

    Splits come from files of their own (``val_path``), from groups inside one file (``{split}`` in the keys), or
    from the training files (``val_fraction``, ``test_fraction``, or ``num_folds`` and ``fold``).

    Args:
        train_path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these. Several
            files are one dataset, in sorted order for a glob or a directory.
        val_path: files to validate on, likewise.
        test_path: files to test on, likewise.
        predict_path: files to predict on, likewise; they need not have a target.
        x_key: the input array, a list of arrays (x is a tuple), or a mapping from names to arrays (x is a
            dict). ``{split}`` in it stands for train, val, test or predict. A name may end in a member of a
            table. None takes what the file leaves no doubt about.
        y_key: the target, likewise. None gives inputs alone.
        x_dtype: dtype of the input by name, such as "float16", or a mapping from fields to names. None keeps
            the file's. Packed integers (``scale_factor``, ``_FillValue`` and the like) are an error unless their stored
            dtype is named, such as "int16".
        y_dtype: dtype of the target, likewise.
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
        weight_key: an array with each row's weight, 0 or more: training rows come that often, relative to each other,
            in epochs of as many rows as there are. Evaluation has each row once.
        balance_key: an array with each row's class: all classes come equally often in training, or by
            ``class_weights``.
        class_weights: how often each class of ``balance_key`` comes, relative to the others; names all of them.
        normalize: a JSON file with mean and standard deviation of fields, of all their values or of each channel: these
            fields come as ``(x - mean) / std``, before any transform. Statistics of other fields, shapes or numbers of
            channels are refused. None leaves values as they are.
        transform: runs on each sample's input, a tensor of a row's shape. What it draws from the global streams
            of Python, NumPy and torch follows the seed, the epoch and the batch, not the rank or worker. Where it has a
            parameter ``rng`` (NumPy) or ``generator`` (torch), it gets one that draws the same for (seed, epoch, row).
        target_transform: runs on each sample's target.
        eval_transform: takes the place of ``transform`` for validation, test and prediction. None means that
            ``transform`` runs there too.
        batch_transform: runs once on each collated batch; may ask for ``rng`` or ``generator`` likewise, the batch's.
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
        with_index: add each row's index in its split to the batch: last in a tuple, ``"index"`` in a dict.
        sample: "row" says that an index along axis 0 is a sample. None means so too, and raises for several files that
            all have two or more arrays of one image-like shape, and none of another: each file may be one image or
            volume, and its rows lines of pixels.
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
        >>> datamodule = LazyH5DataModule("digits.h5", x_key="images", y_key="labels", val_fraction=0.1)
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
        weight_key: str | None = None,
        balance_key: str | None = None,
        class_weights: dict[Any, float] | None = None,
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
        self._mmap = mmap
        self._weighting = WeightOptions(weight_key=weight_key, balance_key=balance_key, class_weights=class_weights)

    def expected_arrays(self) -> tuple[list[str], list[str]]:
        """See ``BaseH5DataModule.expected_arrays``."""
        fields, columns = super().expected_arrays()
        return fields, [*columns, *(key.replace("{split}", "train") for key in self._weighting.columns)]

    def build_dataset(self, split: Split) -> H5LazyDataset | MixtureDataset | None:
        """The dataset of a split, or None where there is no data for it."""
        rows, samples = self.rows_of(split), self._samples
        if rows is None:
            return None
        dataset = H5LazyDataset(
            rows.files,
            rows.x_key,
            rows.y_key,
            samples.x_dtype,
            rows.y_dtype,
            rows.transform,
            rows.target_transform,
            indices=rows.indices,
            batch_transform=samples.batch_transform,
            normalize=rows.normalize,
            with_index=samples.with_index,
            sample=samples.sample,
            swmr=samples.swmr,
            **samples.trust.arguments(),
            mmap=self._mmap,
            catalog=self._catalog,
        )
        if split != "train" or not self._weighting.is_given:
            return dataset

        def column(key: str, argument: str) -> npt.NDArray[Any]:
            found = self._column(rows.files, key, dataset.table.n_rows, argument)
            return found if rows.indices is None else found[rows.indices]

        return weighted_dataset(dataset, self._weighting.weights(column))

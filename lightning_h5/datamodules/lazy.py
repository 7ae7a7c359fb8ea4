"""``LazyH5DataModule``: trains from HDF5 files as they are, reading rows on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .._lightning import rank_zero_info
from ..datasets import H5LazyDataset
from ..errors import H5ValueError
from ..files import field_names, fill_split, guess_keys, keys_in, torch_dtype
from ..sizes import parse_bytes
from ..types import DTypeLike, IntArray, Keys, Paths
from .base import BaseH5DataModule
from .checks import maybe_whole, share, whole
from .options import LoaderOptions, Split, SplitOptions, check_callable
from .sources import Source, cut_rows, has_arrays, source_of

__all__ = ["LazyH5DataModule"]


class LazyH5DataModule(BaseH5DataModule):
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
            the file's.
        y_dtype: dtype of the target, likewise.
        val_fraction: share of the training files' rows to validate on, 0 to 1.
        test_fraction: share of the training files' rows to test on, 0 to 1.
        group_key: an array with each row's group (a patient, a recording): groups are never cut apart.
        num_folds: cut the training rows into this many folds; one of them validates.
        fold: the fold that validates, from 0.
        split_seed: decides which rows go where. Apart from ``seed``, so that a new training seed moves no row
            between training and test.
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
        shuffle: True mixes the training rows anew each epoch: "global" (one permutation of all rows) where single
            rows cost no more than neighbours, or all decoded rows fit ``shuffle_bytes``; else "window" (blocks of
            rows that share a chunk, mixed a window at a time, each decoded once). It says which, and why. Either can
            be asked for by name. False keeps the storage order.
        drop_last: drop the ragged end of a training epoch. None means False: nothing is dropped and all ranks
            take equally many steps, since the last two rounds are cut into slightly smaller batches.
        seed: seed of the training order. None takes Lightning's ``seed_everything``, else 0.
        with_index: add each row's index in its split to the batch: last in a tuple, ``"index"`` in a dict.
        num_workers: worker processes. 0 reads ahead and decodes in threads on all cores, without copies between
            processes: the fastest unless a ``transform`` is slow.
        prefetch_factor: batches read ahead, for each worker or in this process. None means 2 a worker; in this
            process 4, or twice as many as are read together: up to 16 that take 3 MiB (8 MiB in the order ``window``).
        pin_memory: put batches into page-locked memory. "auto" does so where they go to a GPU.
        persistent_workers: keep workers between epochs. None means yes.
        multiprocessing_context: how workers start: fork, forkserver or spawn. None is Python's default.
        timeout: seconds to wait for a worker's batch; None waits for ever.
        setup_timeout: seconds that ranks in ``setup`` wait for the slowest one before all of them stop. 120, since
            a rank that hangs should cost minutes of a cluster and not the process group's half hour.
        worker_init_fn: runs in each worker, after its random streams are seeded.
        shuffle_bytes: decoded bytes that are mixed at a time on a rank, shared by its workers, such as "512 MiB". It
            decides the order, and is the same on all ranks; the more blocks it holds, the better a batch is mixed.
        lanes: streams of blocks that "window" deals to ranks and workers. None is one for each of them, so that none
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
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        shuffle: bool | Literal["global", "window"] = True,
        drop_last: bool | None = None,
        seed: int | None = None,
        with_index: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        persistent_workers: bool | None = None,
        multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None,
        timeout: float | None = None,
        setup_timeout: float = 120.0,
        worker_init_fn: Callable[[int], Any] | None = None,
        shuffle_bytes: int | str = "512 MiB",
        lanes: int | None = None,
        cache_bytes: int | str = "auto",
        on_resume_mismatch: Literal["raise", "restart_epoch"] = "raise",
        mmap: bool = False,
        world_size: int | None = None,
        rank: int | None = None,
        allow_external: bool = False,
    ) -> None:
        options = LoaderOptions(
            eval_batch_size=maybe_whole(eval_batch_size, "eval_batch_size", least=1),
            shuffle=shuffle,
            drop_last=bool(drop_last),
            seed=maybe_whole(seed, "seed", least=0),
            num_workers=whole(num_workers, "num_workers", least=0),
            prefetch_factor=maybe_whole(prefetch_factor, "prefetch_factor", least=1),
            pin_memory=pin_memory,
            persistent_workers=persistent_workers is not False,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout or 0,
            setup_timeout=setup_timeout,
            on_resume_mismatch=on_resume_mismatch,
            shuffle_bytes=parse_bytes(shuffle_bytes, "shuffle_bytes"),
            lanes=maybe_whole(lanes, "lanes", least=1),
            cache_bytes=None if cache_bytes == "auto" else parse_bytes(cache_bytes, "cache_bytes"),
            worker_init_fn=worker_init_fn,
            collate_fn=collate_fn,
            world_size=maybe_whole(world_size, "world_size", least=1),
            rank=maybe_whole(rank, "rank", least=0),
        )
        super().__init__(batch_size, options)
        self._split = SplitOptions(
            val_fraction=share(val_fraction, "val_fraction"),
            test_fraction=share(test_fraction, "test_fraction"),
            group_key=group_key,
            num_folds=maybe_whole(num_folds, "num_folds", least=2),
            fold=maybe_whole(fold, "fold", least=0),
            split_seed=whole(split_seed, "split_seed", least=0),
        )
        self._paths: dict[Split, Paths | None] = {
            "train": train_path,
            "val": val_path,
            "test": test_path,
            "predict": predict_path,
        }
        self.x_key, self.y_key = x_key, y_key
        self._x_dtype, self._y_dtype = x_dtype, y_dtype
        self._transform, self._target_transform = transform, target_transform
        self._eval_transform, self._batch_transform = eval_transform, batch_transform
        self._with_index, self._mmap = with_index, mmap
        self._allow_external = allow_external
        self._cut: dict[str, IntArray] | None = None
        self._check_arguments()

    def setup(self, stage: str | None = None) -> None:
        """See ``BaseH5DataModule.setup``."""
        self._cut = None  # the files may be others by now
        super().setup(stage)

    def build_dataset(self, split: Split) -> H5LazyDataset | None:
        """The dataset of a split, or None where there is no data for it."""
        keys = keys_in(self.x_key, self.y_key)
        source = source_of(split, self._paths, self._split, keys, allow_external=self._allow_external)
        if source is None:
            return None
        x_key, y_key = self._keys(source, split)
        indices = None
        if source.is_cut:
            if self._cut is None:
                self._cut = cut_rows(source.files, x_key, self._split, allow_external=self._allow_external)
            indices = self._cut[split]
        return H5LazyDataset(
            source.files,
            x_key,
            y_key,
            self._x_dtype,
            self._y_dtype if y_key is not None else None,
            self._transform if split == "train" or self._eval_transform is None else self._eval_transform,
            self._target_transform if y_key is not None else None,
            indices=indices,
            batch_transform=self._batch_transform,
            with_index=self._with_index,
            allow_external=self._allow_external,
            mmap=self._mmap,
        )

    def why_no_data(self, split: Split) -> str:
        """A sentence on what to pass so that a split has data."""
        cut = {"val": "val_fraction (or num_folds and fold), ", "test": "test_fraction, "}.get(split, "")
        return f"Pass {split}_path, {cut}or train_path and keys with {{split}} in them."

    def why_no_rows(self, split: Split) -> str:
        """A sentence on why a split that has data has no rows."""
        if self._paths[split] is None and self._cut is not None:
            n_rows = sum(len(rows) for rows in self._cut.values())
            shares = f"val_fraction={self._split.val_fraction} and test_fraction={self._split.test_fraction}"
            return f"{shares} of {n_rows} rows leave none for it. A row takes a share of {1 / max(1, n_rows):.2g}."
        return "Its files are there and hold no rows. Pass files that have some."

    def _check_arguments(self) -> None:
        for name in ("transform", "target_transform", "eval_transform", "batch_transform"):
            check_callable(getattr(self, f"_{name}"), name)
        for keys, name in ((self.x_key, "x_key"), (self.y_key, "y_key")):
            if keys is not None:
                field_names(keys, name)
        if self.x_key is None and self.y_key is not None:
            raise H5ValueError(f"y_key={self.y_key!r} was given without x_key. Pass both.")
        for dtype, name in ((self._x_dtype, "x_dtype"), (self._y_dtype, "y_dtype")):
            for one in dtype.values() if isinstance(dtype, dict) else [dtype]:
                torch_dtype(one, name)
        if self._target_transform is not None and self.y_key is None and self.x_key is not None:
            raise H5ValueError("target_transform was given without y_key. Pass y_key, or leave target_transform out.")
        for split in ("val", "test"):
            if self._paths[split] is not None and self._split.cuts(split):
                raise H5ValueError(
                    f"{split}_path was given, and rows are to be cut off the training files for {split!r} too. "
                    f"Pass {split}_path, or {split}_fraction (or folds), not both."
                )

    def _keys(self, source: Source, split: Split) -> tuple[Keys, Keys | None]:
        """The arrays of a split; guessed from its first file where none are named."""
        if self.x_key is None:
            self.x_key, self.y_key = guess_keys(source.files[0])
            rank_zero_info(
                f"x_key={self.x_key!r}, y_key={self.y_key!r}: {source.files[0]!r} leaves no doubt about them"
            )
        x_key = fill_split(self.x_key, source.group)
        y_key = None if self.y_key is None else fill_split(self.y_key, source.group)
        if split == "predict" and not has_arrays(source.files[0], keys_in(y_key), allow_external=self._allow_external):
            rank_zero_info(f"predicting without a target: {y_key!r} is not in {source.files[0]!r}")
            y_key = None
        return x_key, y_key

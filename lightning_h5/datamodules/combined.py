"""``CombinedHDF5DataModule``: trains from many files of the same structure, filtered, with samples as dicts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ..datasets import CombinedHDF5Dataset, expand_those_there
from ..errors import H5FileError, H5ValueError
from ..files import expand_paths
from ..types import DTypeLike, IntArray, PathLike, Paths
from .base import BaseH5DataModule
from .options import LoaderOptions, Split, SplitOptions, check_callable
from .sources import cut_rows

__all__ = ["CombinedHDF5DataModule"]

_log = logging.getLogger(__name__)


class SplitDataset(CombinedHDF5Dataset):
    """The dataset of a split; the data module sees to it that all ranks have the same rows."""

    agrees_by_itself = False


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
        dtype: of floating fields with an axis beside the rows, the target excepted. None leaves all as stored.
        where: conditions on any one-dimensional arrays, by name: a value, a list of values, or a range
            ``{"min": 3, "max": 5}``; from Python also functions (see ``CombinedHDF5Dataset``).
        field_map: names of ours for arrays that are called otherwise.
        valid_mask: array that is not 0 at steps that count for ``label``.
        cache_index: keep which rows pass on disk, for the next time: True, or a folder.
        on_bad_file: "error", or "skip" to leave out files that are missing or broken; each is logged, and ranks that
            do not leave out the same stop.
        max_cache_bytes: bytes that the rows of ``cache_size`` may take; worker processes share it.
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
        transform: runs on each sample, a dict. See ``LazyH5DataModule`` for what it may draw.
        eval_transform: takes the place of ``transform`` for validation, test and prediction. None means that
            ``transform`` runs there too.
        batch_transform: runs once on each collated batch.
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
        with_index: add each row's index in its split to the batch: as ``"index"``.
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
        val_fraction: float = 0.0,
        test_fraction: float = 0.0,
        group_key: str | None = None,
        num_folds: int | None = None,
        fold: int | None = None,
        split_seed: int = 0,
        stratify_key: str | None = None,
        split_file: PathLike | None = None,
        transform: Callable[[Any], Any] | None = None,
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
        super().__init__(
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
                shuffle_bytes=shuffle_bytes,
                lanes=lanes,
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
        self._arguments: dict[str, Any] = {
            "load_fields": load_fields,
            "allowed_guids": allowed_guids,
            "cs_label": cs_label,
            "bg_label": bg_label,
            "epoch_min": epoch_min,
            "epoch_max": epoch_max,
            "label": label,
            "cache_size": cache_size,
            "dtype": dtype,
            "where": where,
            "field_map": field_map,
            "valid_mask": valid_mask,
            "cache_index": cache_index,
            "on_bad_file": on_bad_file,
            "max_cache_bytes": max_cache_bytes,
            "batch_transform": batch_transform,
            "with_index": with_index,
            "allow_external": allow_external,
            "mmap": mmap,
        }
        self._cut: dict[Split, IntArray] | None = None
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
        super().setup(stage)

    def build_dataset(self, split: Split) -> CombinedHDF5Dataset | None:
        """The dataset of a split, or None where there is no data for it."""
        is_cut = self._paths[split] is None and self._split.may_cut(split)
        source: Split = "train" if is_cut else split
        if self._paths[source] is None:
            return None
        files = self._files(source)
        indices = None
        if is_cut or (split == "train" and self._split.cuts_any):
            indices = self._rows(files)[split]
            if not len(indices) and split != "train" and not self._split.cuts(split):
                return None  # a file that says nothing of this split
            if not len(indices):
                raise H5ValueError(f"the split {split!r} has no rows. {self.why_no_rows(split)}")
        transform, eval_transform = self._transforms
        trains = split == "train" or eval_transform is None
        try:
            return SplitDataset(
                files, **self._arguments, indices=indices, transform=transform if trains else eval_transform
            )
        except H5ValueError as error:
            raise H5ValueError(f"the data of {split!r}: {error}") from error

    def why_no_data(self, split: Split) -> str:
        """A sentence on what to pass so that a split has data."""
        cut = {"val": ", or val_fraction (or num_folds and fold)", "test": ", or test_fraction"}.get(split, "")
        return f"Pass {split}_paths{cut}."

    def why_no_rows(self, split: Split) -> str:
        """A sentence on why a split that has data has no rows."""
        return f"Its share of the training files' rows is empty. Raise the share, or pass {split}_paths."

    def _files(self, split: Split) -> Sequence[PathLike]:
        paths = self._paths[split]
        assert paths is not None, "asked for a split that has files"
        if self._arguments["on_bad_file"] != "skip":
            return expand_paths(paths, f"{split}_paths")
        return expand_those_there(paths, _note, f"{split}_paths")

    def _rows(self, files: Sequence[PathLike]) -> Mapping[Split, IntArray]:
        if self._cut is None:
            every = SplitDataset(
                files,
                load_fields=self._arguments["load_fields"],
                field_map=self._arguments["field_map"],
                allow_external=self._arguments["allow_external"],
                on_bad_file=self._arguments["on_bad_file"],
            )
            self._cut = cut_rows(
                every.table.paths,
                [layout.key for layout in every.table.layouts[0]],
                self._split,
                paths=self._paths,
                group_key=self._array(self._split.group_key),
                stratify_key=self._array(self._split.stratify_key),
                allow_external=self._arguments["allow_external"],
            )
        return self._cut

    def _array(self, name: str | None) -> str | None:
        """What an array of ours is called in the files."""
        given = (self._arguments["field_map"] or {}).get(name, name)
        return given.get("key", name) if isinstance(given, Mapping) else given


def _note(path: str, error: H5FileError) -> None:
    _log.warning("left out %s: %s", path, error)

"""Loaders for whoever has no data module: training loops of one's own, and plain scripts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..datasets import CombinedHDF5Dataset, FieldMap, RankMemCachedH5Dataset, RowDataset, Transform, h5_worker_init_fn
from ..datasets.filters import Where
from ..errors import H5ValueError, listing
from ..sampling import OrderParameters, PlanSampler, ShardSampler, resolve_replica
from ..sizes import parse_bytes
from ..types import DTypeLike, PathLike, Paths
from .collate import SampleCollate
from .cores import get_optimal_num_workers
from .loader import H5DataLoader
from .order import Order, choose_order

__all__ = ["create_multi_dataloaders", "create_optimized_dataloader"]


def create_optimized_dataloader(
    dataset: Dataset[Any] | None = None,
    batch_size: int = 32,
    is_training: bool = True,
    num_workers: int | Literal["auto"] = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    seed: int = 42,
    *,
    hdf5_files: Paths | None = None,
    load_fields: Sequence[str] | None = None,
    allowed_guids: Sequence[str] | None = None,
    cs_label: bool | None = None,
    bg_label: bool | None = None,
    epoch_min: float | None = None,
    epoch_max: float | None = None,
    label: int | None = None,
    cache_size: int = 1000,
    dtype: DTypeLike = "float32",
    where: Where | None = None,
    field_map: FieldMap | None = None,
    valid_mask: str | None = None,
    cache_index: bool | PathLike = False,
    on_bad_file: Literal["error", "skip"] = "error",
    max_cache_bytes: int | str = "300 MiB",
    indices: Sequence[int] | npt.NDArray[Any] | None = None,
    transform: Transform | None = None,
    batch_transform: Transform | None = None,
    cache_bytes: int | str = "auto",
    with_index: bool = False,
    swmr: bool = False,
    allow_external: bool = False,
    allow_sparse: bool = False,
    allow_large_chunks: bool = False,
    min_integrity: int = 0,
    verify: Literal["digest"] | None = None,
    mmap: bool = False,
    drop_last: bool = False,
    shuffle_bytes: int | str = "512 MiB",
    collate_fn: Callable[[Any], Any] | None = None,
    prefetch_factor: int | None = None,
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None,
) -> DataLoader[Any]:
    """A loader with this package's order, sharding and reading ahead, for a training loop of one's own.

    Call ``loader.sampler.set_epoch(epoch)`` before each epoch. ``loader.state_dict()`` is the position in it.

    Args:
        dataset: what to read; or pass ``hdf5_files``.
        batch_size: rows of a batch on one rank.
        is_training: shuffle, and have all ranks take equally many steps. Else contiguous shards, each row once.
        num_workers: worker processes. "auto" is none for the datasets of this package, which read in threads; for
            others as many as ``get_optimal_num_workers`` says.
        world_size: number of ranks; None takes what ``torch.distributed`` or the environment says.
        rank: this rank, likewise.
        seed: of the order.
        hdf5_files: files to read as a ``CombinedHDF5Dataset``, made with the arguments that follow.
        drop_last: drop the ragged end of a training epoch. False, since all ranks take equally many steps without.
        shuffle_bytes: decoded bytes that are mixed at a time where single rows are dear (see ``LazyH5DataModule``).
        collate_fn: makes a batch of a list of samples. None stacks.
        prefetch_factor: batches read ahead (see ``H5DataLoader``).
        multiprocessing_context: how workers start. None is Python's default.
        load_fields: arrays to load, in the order of the sample; their names are the sample's keys. None loads all that
            share axis 0.
        allowed_guids: keep rows whose ``guid`` is one of these.
        cs_label: keep rows whose flag ``cs_label`` is set (True), or is not (False).
        bg_label: likewise of ``bg_label``.
        epoch_min: smallest value of ``epoch`` to keep.
        epoch_max: largest value of ``epoch`` to keep.
        label: keep rows that have this class at any step of ``target``: class ids ``(N,)`` and ``(N, T)``, or one-hot
            ``(N, T, C)`` and ``(N, C, T)``, told apart by shape and values. Steps that were padded with 0 are of class
            0: name a ``valid_mask`` to look for that one.
        cache_size: rows that were used last and are kept, in each process; 0 keeps none.
        dtype: of floating fields with an axis beside the rows, the target excepted. Ids, labels, flags and columns stay
            as stored, since 16 bits would change them. None leaves all as stored.
        where: conditions on any one-dimensional arrays, by name: a value, a list of values, a range
            ``{"min": 3, "max": 5}`` (bounds included, either may be left out), or a function from the column to a mask.
            Or one function from the columns of a file, by name, to a mask.
        field_map: names of ours for arrays that are called otherwise: ``{"guid": "meta/patient"}``. What the axes of a
            target are can be said here too: ``{"target": {"key": "y", "layout": "NCT"}}``.
        valid_mask: array that is not 0 at steps that count for ``label``, one value a step or one a row.
        cache_index: keep which rows pass on disk, for the next time: True, or a folder. It is made anew where a file
            or a filter changed.
        on_bad_file: "error", or "skip" to leave out files that are missing or broken; each is logged.
        max_cache_bytes: bytes that these rows may take, or text such as "1 GiB"; worker processes share it. "300 MiB"
            are a thousand rows of 300 KB.
        indices: rows to choose among, counted over all files (shape ``(n,)``, or a mask). None are all.
        transform: runs on each sample, a dict (see ``H5LazyDataset``).
        batch_transform: runs once on each batch that ``read_batch`` collates.
        cache_bytes: see ``H5LazyDataset``. "auto" is what ``shuffle_bytes`` and reading ahead need for decoding each
            chunk once an epoch, also where a dataset was given.
        with_index: add each row's index in this dataset, as ``"index"``.
        swmr: the files have a live writer in single-writer/multiple-reader mode.
        allow_external: follow links, storage and virtual arrays into other files.
        allow_sparse: take arrays that declare more than 4 GiB and more than 1,000 times what is stored. False, since a
            few bytes of a file can ask for petabytes.
        allow_large_chunks: take chunks of more than 1 GiB, decoded. False, likewise.
        min_integrity: the lowest integrity level that passes, 0 to 4: how surely damage shows (see the how-to page on
            reliability). 0 takes all files.
        verify: "digest" compares rows with the digests beside the files, which ``lightning-h5 check --write-digests``
            writes: as they are read, or all of them once at first. None relies on the files' own checksums.
        mmap: map contiguous arrays into memory (see ``H5LazyDataset``).

    Raises:
        H5ValueError: both a dataset and files were given, or neither, or arguments that belong to the other.
        H5Error: the files are not as they should be.
    """
    given = {
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
        "indices": indices,
        "transform": transform,
        "batch_transform": batch_transform,
        "cache_bytes": cache_bytes,
        "with_index": with_index,
        "swmr": swmr,
        "allow_external": allow_external,
        "allow_sparse": allow_sparse,
        "allow_large_chunks": allow_large_chunks,
        "min_integrity": min_integrity,
        "verify": verify,
        "mmap": mmap,
    }
    if (dataset is None) == (hdf5_files is None):
        raise H5ValueError("create_optimized_dataloader takes a dataset or hdf5_files. Pass one of the two.")
    if hdf5_files is not None:
        dataset = CombinedHDF5Dataset(hdf5_files, **given, pin_memory=True)
    else:
        _refuse(given)
    assert dataset is not None, "one of the two is there"
    replica = resolve_replica(rank, world_size)
    pins = torch.cuda.is_available() and getattr(dataset, "pin_memory", True)
    if not isinstance(dataset, RowDataset):
        n_workers = get_optimal_num_workers() if num_workers == "auto" else num_workers
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset,
            replica.world_size,
            replica.rank,
            shuffle=is_training,
            seed=seed,
            drop_last=is_training and drop_last,
        )
        return DataLoader(  # somebody else's dataset, as the best practice has it
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=n_workers,
            pin_memory=pins,
            drop_last=is_training and drop_last,
            collate_fn=collate_fn,
            worker_init_fn=h5_worker_init_fn,
            persistent_workers=n_workers > 0,
            prefetch_factor=(prefetch_factor or 2) if n_workers else None,
            multiprocessing_context=multiprocessing_context if n_workers else None,
        )
    n_workers = 0 if num_workers == "auto" else num_workers
    order = choose_order(
        dataset,
        is_training,
        shuffle_bytes=parse_bytes(shuffle_bytes, "shuffle_bytes"),
        lanes=None,
        world_size=replica.world_size,
        num_workers=n_workers,
    )
    dataset.read_with(
        order.cache_bytes if dataset.asked_cache_bytes is None else dataset.asked_cache_bytes,
        keeps=None if is_training else False,
        in_runs=order.mode == "window",
    )
    return H5DataLoader(
        dataset,
        sampler=_sampler(dataset, order, batch_size, is_training, drop_last, seed, (rank, world_size), collate_fn),
        num_workers=n_workers,
        collate_fn=collate_fn and SampleCollate(collate_fn, dataset.batch_transform),
        pin_memory=pins,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        multiprocessing_context=multiprocessing_context,
    )


def create_multi_dataloaders(
    datasets: Mapping[str, Any],
    batch_sizes: int | Mapping[str, int] | Sequence[int] | None = None,
    num_workers: int = 0,
    *,
    is_training: bool = True,
    seed: int = 42,
) -> tuple[list[DataLoader[Any]], list[str]]:
    """Loaders for several datasets, which share one budget of worker processes.

    Args:
        datasets: each by name; or by name a dataset and its batch size.
        batch_sizes: of each, by name or in order, or one for all.
        num_workers: worker processes of all loaders together; who gets none reads in this process.
        is_training: see ``create_optimized_dataloader``.
        seed: of the orders; each dataset has an order of its own.

    Returns:
        The loaders, and their names, in the order given.

    Raises:
        H5ValueError: there is not one batch size for each.
    """
    names = list(datasets)
    pairs = [each if isinstance(each, tuple) else (each, None) for each in datasets.values()]
    if batch_sizes is None:
        sizes = [size for _, size in pairs]
    elif isinstance(batch_sizes, int):
        sizes = [batch_sizes] * len(names)
    else:
        sizes = list(map(batch_sizes.get, names)) if isinstance(batch_sizes, Mapping) else list(batch_sizes)
    if len(sizes) != len(names) or not all(isinstance(size, int) for size in sizes):
        raise H5ValueError(f"batch_sizes={batch_sizes!r} was given for {listing(names)}. Pass one for each of them.")
    each, rest = divmod(num_workers, max(1, len(names)))
    loaders = [
        create_optimized_dataloader(dataset, int(size or 0), is_training, each + (at < rest), seed=seed + at)
        for at, ((dataset, _), size) in enumerate(zip(pairs, sizes, strict=True))
    ]
    return loaders, names


def _sampler(
    dataset: RowDataset,
    order: Order,
    batch_size: int,
    is_training: bool,
    drop_last: bool,
    seed: int,
    given: tuple[int | None, int | None],
    collate_fn: Callable[[Any], Any] | None,
) -> PlanSampler:
    parameters = OrderParameters(
        mode=order.mode, seed=seed, batch_size=batch_size, lanes=order.lanes, window=order.window
    )
    if isinstance(dataset, RankMemCachedH5Dataset):
        return ShardSampler(
            dataset.shard,
            parameters,
            batch_size=batch_size,
            drop_last=is_training and drop_last,
            evaluation=not is_training,
            samples=collate_fn is not None,
        )
    return PlanSampler(
        dataset.blocks(),
        parameters,
        batch_size=batch_size,
        drop_last=is_training and drop_last,
        evaluation=not is_training,
        rank=given[0],
        world_size=given[1],
        samples=collate_fn is not None,
    )


def _refuse(given: Mapping[str, Any]) -> None:
    takes = inspect.signature(CombinedHDF5Dataset).parameters
    other = [name for name, value in given.items() if value is not takes[name].default and value != takes[name].default]
    if other:
        raise H5ValueError(f"a dataset and {listing(other)} were given; these make a dataset of hdf5_files. Pass one.")

"""Loaders for training loops without a data module, and for plain scripts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ..cores import cores_of_a_rank
from ..datasets import CombinedHDF5Dataset, FieldMap, RankMemCachedH5Dataset, RowDataset, Transform, h5_worker_init_fn
from ..datasets.row_filters import Where
from ..errors import H5ValueError, listing
from ..order import OrderParameters, PlanSampler, Replica, ShardSampler, launched_replica, resolve_replica
from ..sizes import parse_bytes, whole
from ..types import DTypeLike, PathLike, Paths
from .choose_order import Order, choose_order
from .collate import SampleCollate
from .loader import H5DataLoader

__all__ = ["create_multi_dataloaders", "create_optimized_dataloader", "get_optimal_num_workers"]

MAX_WORKERS = 16  # more wait for storage, or for each other


def create_optimized_dataloader(
    dataset: Dataset[Any] | Paths | None = None,
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
    pin_memory: bool = True,
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
    sample: Literal["row"] | None = None,
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
    """Return a loader with this package's order, sharding and prefetching, for your own training loop.

    Call ``loader.sampler.set_epoch(epoch)`` before each epoch. ``loader.state_dict()`` is the position in it.

    Args:
        dataset: a map-style dataset; a list of samples (dicts, tuples, lists or tensors); or files (a path, a glob, a
            directory, or a list of these), which are read as a ``CombinedHDF5Dataset`` that the arguments after
            ``hdf5_files`` describe.
        batch_size: rows of a batch on one rank.
        is_training: shuffle, and have all ranks take equally many steps. Else contiguous shards, each row once.
        num_workers: worker processes. "auto" is none for the datasets of this package, which read in threads; for
            others as many as ``get_optimal_num_workers`` says.
        world_size: number of ranks. If None, that of ``torch.distributed`` if it is initialized, else that of the
            environment (``RANK`` and ``WORLD_SIZE``, as ``torchrun`` sets them), else 1.
        rank: this rank, from the same source. Pass both or neither; ``world_size=1`` needs no rank.
        seed: of the order.
        hdf5_files: the files by name instead of as ``dataset``.
        drop_last: drop the ragged end of a training epoch. False, since all ranks take equally many steps without.
        shuffle_bytes: decoded bytes that are mixed at a time where single rows are dear (see ``LazyH5DataModule``).
        collate_fn: makes a batch of a list of samples. None stacks.
        prefetch_factor: batches read ahead (see ``H5DataLoader``).
        multiprocessing_context: how workers start. None is Python's default.
        load_fields: arrays to load, in the order of the sample; their names are the sample's keys. None loads all that
            share axis 0 (see ``CombinedHDF5Dataset``).
        allowed_guids: keep rows whose ``guid`` is one of these.
        cs_label: keep rows whose flag ``cs_label`` is set (True), or is not (False).
        bg_label: likewise of ``bg_label``.
        epoch_min: smallest value of ``epoch`` to keep.
        epoch_max: largest value of ``epoch`` to keep.
        label: keep rows that have this class at any step of ``target``: class ids ``(N,)`` and ``(N, T)``, or one-hot
            ``(N, T, C)`` and ``(N, C, T)``, told apart by shape and values. Steps that were padded with 0 are of class
            0: name a ``valid_mask`` to look for that one.
        cache_size: rows that were used last and are kept, in each process; 0 keeps none.
        pin_memory: copy batches into page-locked memory if CUDA is available, and the dataset's own ``pin_memory``, if
            it has one, is not False.
        dtype: of floating fields with an axis beside the rows, the target excepted. Ids, labels, flags and columns stay
            as stored, since 16 bits would change them. None leaves all as stored. A mapping from fields to dtypes names
            those of some, and leaves the others as stored; the stored dtype by name takes packed integers as they are.
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
        sample: "row" says that an index along axis 0 is a sample, for files that look like an image or volume each
            (see ``H5LazyDataset``).
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
        H5ValueError: ``batch_size`` is less than 1; both ``dataset`` and ``hdf5_files`` were given, or neither, or
            something that is neither a dataset nor paths; arguments for files were given with a dataset; or the rank
            is not the one whose shard the dataset holds.
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
        "sample": sample,
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
    batch_size = whole(batch_size, "batch_size", least=1)
    if dataset is None or _are_paths(dataset):
        files = cast("Paths", hdf5_files if dataset is None else dataset)
        dataset = CombinedHDF5Dataset(files, **given, pin_memory=pin_memory)
    else:
        dataset = _checked_dataset(dataset)
        _refuse(given)
    replica = _replica(rank, world_size)
    there = replica or resolve_replica()
    if isinstance(dataset, RankMemCachedH5Dataset):
        _check_shard(dataset, there, is_given=rank is not None or world_size is not None)
    pins = torch.cuda.is_available() and pin_memory and getattr(dataset, "pin_memory", True)
    if not isinstance(dataset, RowDataset):
        n_workers = get_optimal_num_workers() if num_workers == "auto" else num_workers
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset,
            there.world_size,
            there.rank,
            shuffle=is_training,
            seed=seed,
            drop_last=is_training and drop_last,
        )
        return _WholeEpochLoader(  # somebody else's dataset, as the best practice has it
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=n_workers,
            pin_memory=pins,
            drop_last=is_training and drop_last,
            collate_fn=collate_fn and SampleCollate(collate_fn, None),
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
        streams=None,
        world_size=there.world_size,
        num_workers=n_workers,
    )
    dataset.read_with(
        order.cache_bytes if dataset.asked_cache_bytes is None else dataset.asked_cache_bytes,
        retain=None if is_training else False,
        in_runs=order.mode == "window",
    )
    return H5DataLoader(
        dataset,
        sampler=_sampler(dataset, order, batch_size, is_training, drop_last, seed, replica, collate_fn),
        num_workers=n_workers,
        collate_fn=collate_fn and SampleCollate(collate_fn, dataset.batch_transform),
        pin_memory=pins,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        multiprocessing_context=multiprocessing_context,
    )


class _WholeEpochLoader(DataLoader[Any]):
    """A loader of torch's that raises RuntimeError if its dataset raises StopIteration, which would end the epoch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own private class here
        return _all_of(super().__iter__(), len(self))


def _all_of(batches: Iterator[Any], n_batches: int) -> Iterator[Any]:
    for step in range(n_batches):
        try:
            batch = next(batches)
        except StopIteration as error:
            raise RuntimeError(
                f"the epoch has {n_batches} batches, and none came after {step} of them: making the next one raised "
                "StopIteration. Have the dataset, or the collate_fn (see above), raise another error."
            ) from error
        yield batch
    yield from batches  # none: the end is asked for, as torch's workers need


def create_multi_dataloaders(
    datasets_dict: Mapping[str, Any],
    batch_sizes: int | Mapping[str, int] | Sequence[int] | None = None,
    num_workers: int | Literal["auto"] = "auto",
    *,
    is_training: bool = True,
    seed: int = 42,
) -> tuple[list[DataLoader[Any]], list[str]]:
    """Loaders for several datasets, which share one budget of worker processes.

    Args:
        datasets_dict: datasets, or files, by name; or pairs of one of these and its batch size.
        batch_sizes: batch size of each, by name or in order, or one for all. Not needed if ``datasets_dict`` has them.
        num_workers: worker processes of all loaders together; loaders that get none read in this process. "auto" shares
            out what ``create_optimized_dataloader`` would take for one: none for the datasets of this package.
        is_training: see ``create_optimized_dataloader``.
        seed: of the orders; each dataset has an order of its own.

    Returns:
        The loaders, and their names, in the order given.

    Raises:
        H5ValueError: there is not one batch size for each, or there are two that differ.
    """
    names = list(datasets_dict)
    pairs = [_with_batch_size(each) for each in datasets_dict.values()]
    own = [size for _, size in pairs]
    if batch_sizes is None:
        sizes = own
    elif isinstance(batch_sizes, int):
        sizes = [batch_sizes] * len(names)
    else:
        sizes = list(map(batch_sizes.get, names)) if isinstance(batch_sizes, Mapping) else list(batch_sizes)
    if len(sizes) != len(names) or not all(isinstance(size, int) for size in sizes):
        raise H5ValueError(f"batch_sizes={batch_sizes!r} was given for {listing(names)}. Pass one for each of them.")
    for name, of_pair, size in zip(names, own, sizes, strict=True):
        if of_pair not in (None, size):
            raise H5ValueError(
                f"batch_sizes={batch_sizes!r} was given, and {name!r} has the batch size {of_pair!r}. Pass one of them."
            )
    each, rest = divmod(get_optimal_num_workers() if num_workers == "auto" else num_workers, max(1, len(names)))
    loaders = [
        create_optimized_dataloader(
            dataset,
            cast("int", size),
            is_training,
            0 if num_workers == "auto" and _is_read_in_threads(dataset) else each + (at < rest),
            seed=seed + at,
        )
        for at, ((dataset, _), size) in enumerate(zip(pairs, sizes, strict=True))
    ]
    return loaders, names


def _with_batch_size(given: Any) -> tuple[Any, int | None]:
    """A dataset or files, and the batch size that came with them, if any: a tuple of paths comes with none."""
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | None)
    return given if is_pair else (given, None)


def _is_read_in_threads(given: Any) -> bool:
    return isinstance(given, RowDataset) or _are_paths(given)


def _are_paths(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return all(isinstance(each, str | os.PathLike) for each in given)
    return isinstance(given, str | os.PathLike)


def _checked_dataset(given: Any) -> Dataset[Any]:
    """Refuses what is not a map-style dataset; one need not inherit from torch's class."""
    inside = ""
    if isinstance(given, Dataset):
        is_dataset = not isinstance(given, IterableDataset)
    elif isinstance(given, list):
        # An array is more often all values of a field than one sample, and text a misplaced path.
        is_dataset = all(isinstance(each, _SAMPLES) and not _are_paths(each) for each in given)
        inside = f" with {listing(sorted({type(each).__name__ for each in given}))} in it"
    else:
        # Arrays, h5py's objects and Python's collections can be indexed too; their elements are not samples.
        is_collection = isinstance(given, Sequence | Mapping) or type(given).__module__.startswith(_COLLECTIONS)
        is_dataset = hasattr(given, "__getitem__") and hasattr(given, "__len__") and not is_collection
    if not is_dataset:
        raise H5ValueError(
            f"dataset has the type {type(given).__name__!r}{inside}. Pass a path, a glob, a directory or a list of "
            "these; a map-style dataset: H5LazyDataset, CombinedHDF5Dataset, RankMemCachedH5Dataset or a torch Dataset "
            "with __getitem__ and __len__ (TensorDataset for tensors); or a list of samples (dicts, tuples, lists or "
            "tensors)."
        )
    return cast("Dataset[Any]", given)


_SAMPLES = (Mapping, tuple, list, torch.Tensor)
_COLLECTIONS = ("builtins", "numpy", "torch", "h5py", "pandas")


def _replica(rank: int | None, world_size: int | None) -> Replica | None:
    """The replica given, or that of the environment; None leaves it to ``torch.distributed`` when iteration starts."""
    if rank is not None or world_size is not None:
        return resolve_replica(0 if rank is None and world_size == 1 else rank, world_size)
    return launched_replica()


def _check_shard(dataset: RankMemCachedH5Dataset, asked: Replica, *, is_given: bool) -> None:
    held = Replica(dataset.shard.rank, dataset.shard.world_size)
    if asked != held and (is_given or not dataset.is_rank_given):
        raise H5ValueError(
            f"a loader for rank {asked.rank} of {asked.world_size} was asked for, and the dataset holds the rows of "
            f"rank {held.rank} of {held.world_size}. Pass the same rank and world_size to both."
        )


def _sampler(
    dataset: RowDataset,
    order: Order,
    batch_size: int,
    is_training: bool,
    drop_last: bool,
    seed: int,
    replica: Replica | None,
    collate_fn: Callable[[Any], Any] | None,
) -> PlanSampler:
    parameters = OrderParameters(
        mode=order.mode, seed=seed, batch_size=batch_size, streams=order.streams, window=order.window
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
        rank=None if replica is None else replica.rank,
        world_size=None if replica is None else replica.world_size,
        samples=collate_fn is not None,
    )


def _refuse(given: Mapping[str, Any]) -> None:
    takes = inspect.signature(CombinedHDF5Dataset).parameters
    other = [name for name, value in given.items() if value is not takes[name].default and value != takes[name].default]
    if other:
        raise H5ValueError(f"a dataset and {listing(other)} were given; these make a dataset of hdf5_files. Pass one.")


def get_optimal_num_workers(device_type: str | torch.device = "cuda", *, root: str | os.PathLike[str] = "/") -> int:
    """Return the number of worker processes to use on this machine for a dataset that needs any.

    The loaders of this package decode in threads, and are fastest with none, unless a transform is slow.

    Args:
        device_type: where the model trains: "cpu", "cuda", another type of device, or a device. On "cpu" the answer
            is 0, since the model takes all cores.
        root: where the system's files are; for tests.

    Returns:
        The cores that this process may run on (affinity, and the control group's quota), shared with the other ranks of
        the machine, less one for the training loop; 0 to 16.

    Raises:
        H5ValueError: torch has no such type of device.
    """
    try:
        kind = torch.device(device_type).type
    except (RuntimeError, TypeError) as error:
        raise H5ValueError(f"device_type={device_type!r} was given. Pass 'cpu', 'cuda' or 'mps'.") from error
    return 0 if kind == "cpu" else max(0, min(MAX_WORKERS, cores_of_a_rank(root) - 1))

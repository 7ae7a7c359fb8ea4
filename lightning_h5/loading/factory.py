"""Loaders for training loops without a data module, and for plain scripts."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ..catalog import FieldMap
from ..cores import cores_of_a_rank
from ..datasets import CombinedHDF5Dataset, RankMemCachedH5Dataset, RowDataset, h5_worker_init_fn
from ..errors import H5ValueError, listing
from ..memory import page_cache_memory
from ..options import BadRowOptions, FileOptions, RowCacheOptions, ShuffleOptions, WorkerOptions
from ..options.base import check_whole
from ..order import (
    OrderParameters,
    PlanSampler,
    Replica,
    ShardSampler,
    check_nodes,
    launched_nodes,
    launched_replica,
    present_replica,
    resolve_replica,
)
from ..samples import Where
from ..sizes import whole
from ..types import DTypeLike, Paths
from .choose_order import choose_order
from .loader import H5DataLoader, SampleCollate
from .multi import MultiDataLoaderConfig, SamplingStrategy

__all__ = [
    "create_multi_dataloaders",
    "create_optimized_dataloader",
    "ensure_deterministic_dataloader",
    "get_optimal_num_workers",
    "set_reproducible_training",
]

MAX_WORKERS = 16  # more would wait for storage or for each other

_SAMPLES = (Mapping, tuple, list, torch.Tensor)
_COLLECTIONS = ("builtins", "numpy", "torch", "h5py", "pandas")


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
    cache_size: int | RowCacheOptions | Mapping[str, Any] = 1000,
    pin_memory: bool = True,
    dtype: DTypeLike = "float32",
    where: Where | None = None,
    field_map: FieldMap | None = None,
    on_bad_file: Literal["raise", "skip"] = "raise",
    on_bad_row: BadRowOptions | Literal["raise", "skip"] | Mapping[str, Any] = "raise",
    files: FileOptions | Mapping[str, Any] | None = None,
    drop_last: bool = False,
    shuffle: bool | str | ShuffleOptions | Mapping[str, Any] = True,
    collate_fn: Callable[[Any], Any] | None = None,
    prefetch_factor: int | None = None,
    workers: WorkerOptions | Mapping[str, Any] | None = None,
) -> DataLoader[Any]:
    """Return a loader with this package's order, sharding and prefetching, for your own training loop.

    Call ``loader.sampler.set_epoch(epoch)`` before each epoch. ``loader.state_dict()`` is the position in it.

    Args:
        dataset: a map-style dataset; a list of samples (dicts, tuples, lists or tensors); or files (a path, a glob, a
            directory, or a list of paths, globs and directories), which are read as a ``CombinedHDF5Dataset``. Create
            the dataset yourself for options that are not listed here.
        batch_size: rows of a batch on one rank.
        is_training: shuffle, with the same number of steps on all ranks. If False, contiguous shards, each row once.
        num_workers: number of worker processes. "auto" is 0 for the datasets of this package, which read in threads,
            and the result of ``get_optimal_num_workers`` for others.
        world_size: number of ranks. None uses ``torch.distributed`` if it is initialized, else the environment
            (``RANK`` and ``WORLD_SIZE``, as ``torchrun`` sets them), else 1.
        rank: this rank, from the same source. Pass both or neither; not needed for a ``world_size`` of 1 or 0 (no GPU).
        seed: seed of the order.
        hdf5_files: the files; replaces ``dataset``.
        load_fields: see ``CombinedHDF5Dataset``, like the arguments up to ``on_bad_row``.
        allowed_guids: keep rows with one of these values of ``guid``.
        cs_label: keep rows with the flag ``cs_label`` set (True), or not set (False).
        bg_label: keep rows with the flag ``bg_label`` set (True), or not set (False).
        epoch_min: smallest value of ``epoch`` to keep.
        epoch_max: largest value of ``epoch`` to keep.
        label: keep rows with this class at any step of ``target``.
        cache_size: number of recently used rows that each process caches; 0 turns the cache off. ``RowCacheOptions``
            limits the bytes as well.
        pin_memory: copy batches into page-locked memory if CUDA is available, unless the dataset has an attribute
            ``pin_memory`` that is False.
        dtype: dtype of floating fields with more than one axis, except for the target. None keeps all stored dtypes.
        where: conditions on one-dimensional arrays, by name.
        field_map: mapping from field names to arrays with another name: ``{"guid": "meta/patient"}``.
        on_bad_file: "raise", or "skip" to leave out files that are missing or broken; each is logged.
        on_bad_row: "raise", or "skip" to leave out samples that cannot be decoded or transformed.
        files: how files are opened, and which are accepted: ``FileOptions``, or a mapping of its fields. A
            ``cache_bytes`` of "auto" is enough to decode each chunk once per epoch.
        drop_last: drop the last rows of a training epoch if they do not fill a batch on every rank. All ranks run the
            same number of steps either way.
        shuffle: how training rows are shuffled: ``ShuffleOptions``, or a shorthand (see ``LazyH5DataModule``).
        collate_fn: a function from a list of samples to a batch. None stacks.
        prefetch_factor: number of batches that each worker, or this process without workers, reads ahead (see
            ``LazyH5DataModule``).
        workers: how worker processes run: ``WorkerOptions``, or a mapping of its fields.

    Raises:
        H5ValueError: ``batch_size`` is less than 1; ``dataset`` and ``hdf5_files`` are both set or both missing;
            ``dataset`` is neither a dataset nor paths; arguments for files are combined with a dataset; or the rank
            differs from the rank of the dataset's shard.
        H5Error: a file is missing or invalid.
    """
    if (dataset is None) == (hdf5_files is None):
        raise H5ValueError("create_optimized_dataloader needs a dataset or hdf5_files. Pass one of them.")
    batch_size = whole(batch_size, "batch_size", least=1)
    check_whole(prefetch_factor, "prefetch_factor", 1)
    file_arguments = {
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
        "on_bad_file": on_bad_file,
        "on_bad_row": on_bad_row,
        "files": files,
    }
    shuffle, workers = ShuffleOptions.parse(shuffle, "shuffle"), WorkerOptions.parse(workers, "workers")
    if dataset is None or _are_paths(dataset):
        paths = cast("Paths", hdf5_files if dataset is None else dataset)
        dataset = CombinedHDF5Dataset(paths, **file_arguments, pin_memory=pin_memory)
    else:
        dataset = _checked_dataset(dataset)
        defaults = inspect.signature(CombinedHDF5Dataset).parameters
        if extra_names := [name for name, value in file_arguments.items() if value != defaults[name].default]:
            raise H5ValueError(
                f"a dataset and {listing(extra_names)} were given; these apply to hdf5_files only. Pass one or the "
                "other."
            )
    replica = _replica(rank, world_size)
    own_replica = replica or present_replica()
    pins = torch.cuda.is_available() and pin_memory and getattr(dataset, "pin_memory", True)
    drop_last = drop_last and is_training
    if not isinstance(dataset, RowDataset):
        shuffle.check_scope(f"a {type(dataset).__name__}", "whose rows torch shuffles one by one")
        n_workers = get_optimal_num_workers() if num_workers == "auto" else num_workers
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, own_replica.world_size, own_replica.rank, shuffle=is_training, seed=seed, drop_last=drop_last
        )
        return _WholeEpochLoader(  # another library's dataset: torch's loader with common settings
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=n_workers,
            pin_memory=pins,
            drop_last=drop_last,
            collate_fn=collate_fn and SampleCollate(collate_fn, None),
            worker_init_fn=h5_worker_init_fn,
            persistent_workers=n_workers > 0,
            prefetch_factor=(prefetch_factor or 2) if n_workers else None,
            multiprocessing_context=workers.start_method if n_workers else None,
        )
    n_workers = 0 if num_workers == "auto" else num_workers
    if isinstance(dataset, RankMemCachedH5Dataset):
        shuffle.check_scope("a RankMemCachedH5Dataset", "whose ranks hold their rows in memory already")
    nodes = launched_nodes(own_replica.world_size) if is_training and shuffle.scope == "node" else 0
    check_nodes(max(1, nodes), own_replica.world_size)
    # Ranks that cannot communicate must choose the same order.
    memory = page_cache_memory() if own_replica.world_size == 1 else None
    order = choose_order(
        dataset,
        shuffle if is_training else ShuffleOptions(mode="none"),
        world_size=own_replica.world_size,
        num_workers=n_workers,
        nodes=nodes,
        memory=memory,
    )
    parameters = OrderParameters(
        mode=order.mode,
        seed=seed,
        batch_size=batch_size,
        streams=order.streams,
        window=order.window,
        nodes=order.nodes,
        world_size=own_replica.world_size if order.nodes else 0,
    )
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "drop_last": drop_last,
        "evaluation": not is_training,
        "samples": collate_fn is not None,
    }
    if isinstance(dataset, RankMemCachedH5Dataset):
        _check_shard(dataset, own_replica, is_given=rank is not None or world_size is not None)
        plan: PlanSampler = ShardSampler(dataset.shard, parameters, **options)
    else:
        rank, world_size = (None, None) if replica is None else replica
        chooses = shuffle.mode == "auto"
        plan = PlanSampler(dataset.blocks(), parameters, rank=rank, world_size=world_size, chooses=chooses, **options)
    cache_bytes = order.cache_bytes if dataset.asked_cache_bytes is None else dataset.asked_cache_bytes
    retain = order.retain(cache_bytes) if is_training else False
    in_runs = order.mode == "chunks"
    dataset.read_with(cache_bytes, retain=retain, in_runs=in_runs, gives_back=order.exceeds_memory)
    return H5DataLoader(
        dataset,
        sampler=plan,
        num_workers=n_workers,
        collate_fn=collate_fn and SampleCollate(collate_fn, dataset.batch_transform),
        pin_memory=pins,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        multiprocessing_context=workers.start_method,
    )


class _WholeEpochLoader(DataLoader[Any]):
    """A torch loader that raises RuntimeError if its dataset raises StopIteration, which would end the epoch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own private class here
        return _all_batches(super().__iter__(), len(self))


def _all_batches(batches: Iterator[Any], n_batches: int) -> Iterator[Any]:
    for step in range(n_batches):
        try:
            batch = next(batches)
        except StopIteration as error:
            raise RuntimeError(
                f"the epoch has {n_batches} batches, but ended after {step}: making the next one raised StopIteration. "
                "Raise another error in the dataset or the collate_fn (see above)."
            ) from error
        yield batch
    yield from batches  # empty by now: torch's workers end when it is exhausted


def create_multi_dataloaders(
    datasets_dict: Mapping[str, Any],
    batch_sizes: int | Mapping[str, int] | Sequence[int] | None = None,
    num_workers: int | Literal["auto"] = "auto",
    *,
    is_training: bool = True,
    seed: int = 42,
) -> tuple[list[DataLoader[Any]], MultiDataLoaderConfig]:
    """Return loaders for several datasets, which share one budget of worker processes.

    Args:
        datasets_dict: datasets, or files, by name; or pairs of a dataset and its batch size.
        batch_sizes: batch sizes by name or in order, or one for all loaders. Not needed if ``datasets_dict`` has them.
        num_workers: number of worker processes of all loaders together; loaders without workers read in this process.
            "auto" divides the number that ``create_optimized_dataloader`` would use for one loader: 0 for the datasets
            of this package.
        is_training: see ``create_optimized_dataloader``.
        seed: seed of the orders; each dataset has its own order.

    Returns:
        The loaders in the order of ``datasets_dict``, and a configuration with their names and equal weights. Pass both
        to ``MultiDataLoader``, or replace the configuration to mix the loaders in another way.

    Raises:
        H5ValueError: a loader has no batch size, or two different ones.
    """
    names = list(datasets_dict)
    pairs = [_with_batch_size(entry) for entry in datasets_dict.values()]
    own_sizes = [size for _, size in pairs]
    if batch_sizes is None:
        sizes = own_sizes
    elif isinstance(batch_sizes, int):
        sizes = [batch_sizes] * len(names)
    else:
        sizes = list(map(batch_sizes.get, names)) if isinstance(batch_sizes, Mapping) else list(batch_sizes)
    if len(sizes) != len(names) or not all(isinstance(size, int) for size in sizes):
        raise H5ValueError(f"batch_sizes={batch_sizes!r} was given for {listing(names)}. Pass one for each of them.")
    for name, own_size, size in zip(names, own_sizes, sizes, strict=True):
        if own_size not in (None, size):
            raise H5ValueError(
                f"batch_sizes={batch_sizes!r} was given, and {name!r} has the batch size {own_size!r}. Pass one of "
                "them."
            )
    n_each, n_extra = divmod(get_optimal_num_workers() if num_workers == "auto" else num_workers, max(1, len(names)))
    loaders = []
    for at, ((dataset, _), size) in enumerate(zip(pairs, sizes, strict=True)):
        needs_none = num_workers == "auto" and (isinstance(dataset, RowDataset) or _are_paths(dataset))
        n_workers = 0 if needs_none else n_each + (at < n_extra)
        loaders.append(create_optimized_dataloader(dataset, cast("int", size), is_training, n_workers, seed=seed + at))
    config = MultiDataLoaderConfig(
        sampling_strategy=SamplingStrategy.WEIGHTED, dataloader_weights=[1.0] * len(names), dataloader_names=names
    )
    return loaders, config


def _with_batch_size(entry: Any) -> tuple[Any, int | None]:
    """Split an entry into a dataset or files, and its batch size if any. A tuple of paths has no batch size."""
    is_pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], int | None)
    return entry if is_pair else (entry, None)


def _are_paths(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(path, str | os.PathLike) for path in value)
    return isinstance(value, str | os.PathLike)


def _checked_dataset(value: Any) -> Dataset[Any]:
    """Raise if this is not a map-style dataset, which need not inherit from torch's class."""
    contents = ""
    if isinstance(value, Dataset):
        is_dataset = not isinstance(value, IterableDataset)
    elif isinstance(value, list):
        # An array is more likely a whole field than one sample, and text a misplaced path.
        is_dataset = all(isinstance(sample, _SAMPLES) and not _are_paths(sample) for sample in value)
        contents = f" with {listing(sorted({type(sample).__name__ for sample in value}))} in it"
    else:
        # Arrays, h5py's objects and Python's collections can be indexed too; their elements are not samples.
        is_collection = isinstance(value, Sequence | Mapping) or type(value).__module__.startswith(_COLLECTIONS)
        is_dataset = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not is_collection
    if not is_dataset:
        raise H5ValueError(
            f"dataset has the type {type(value).__name__!r}{contents}. Pass a path, a glob, a directory or a list of "
            "paths; a map-style dataset: H5LazyDataset, CombinedHDF5Dataset, RankMemCachedH5Dataset or a torch Dataset "
            "with __getitem__ and __len__ (TensorDataset for tensors); or a list of samples (dicts, tuples, lists or "
            "tensors)."
        )
    return cast("Dataset[Any]", value)


def _replica(rank: int | None, world_size: int | None) -> Replica | None:
    """Return the replica from the arguments or from the environment; None leaves it to ``torch.distributed`` later."""
    if rank is not None or world_size is not None:
        return resolve_replica(rank, world_size)
    return launched_replica()


def _check_shard(dataset: RankMemCachedH5Dataset, replica: Replica, *, is_given: bool) -> None:
    owner = Replica(dataset.shard.rank, dataset.shard.world_size)
    if replica != owner and (is_given or not dataset.is_rank_given):
        raise H5ValueError(
            f"a loader for rank {replica.rank} of {replica.world_size} was requested, but the dataset holds the rows "
            f"of rank {owner.rank} of {owner.world_size}. Pass the same rank and world_size to both."
        )


def get_optimal_num_workers(device_type: str | torch.device = "cuda") -> int:
    """Return the number of worker processes for a dataset that needs workers, on this machine.

    The loaders of this package decode in threads, and are fastest without workers, unless a transform is slow.

    Args:
        device_type: device of the training: "cpu", "cuda", another type of device, or a device. For "cpu" the result
            is 0, since the model uses all cores.

    Returns:
        The number of cores that this process may use (affinity, and the control group's quota), divided among the
        ranks of the machine, less one for the training loop; 0 to 16.

    Raises:
        H5ValueError: torch has no such type of device.
    """
    try:
        kind = torch.device(device_type).type
    except (RuntimeError, TypeError) as error:
        raise H5ValueError(f"device_type={device_type!r} was given. Pass 'cpu', 'cuda' or 'mps'.") from error
    return 0 if kind == "cpu" else max(0, min(MAX_WORKERS, cores_of_a_rank() - 1))


def set_reproducible_training(seed: int = 42) -> tuple[Callable[[int], object], torch.Generator]:
    """Seed Python, NumPy and torch on all devices, and make cuDNN choose the same algorithms in every run.

    Args:
        seed: seed of all generators.

    Returns:
        A ``worker_init_fn`` and a ``generator``, for a plain ``DataLoader``.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # users' transforms draw from the global stream
    torch.manual_seed(seed)  # seeds all devices
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    return h5_worker_init_fn, torch.Generator().manual_seed(seed)


def ensure_deterministic_dataloader(dataset: Dataset[Any], batch_size: int, seed: int = 42) -> DataLoader[Any]:
    """Return a training loader with the same batches in every run; makes torch use deterministic algorithms only.

    Args:
        dataset: the dataset to read.
        batch_size: rows of a batch.
        seed: see ``set_reproducible_training``.
    """
    set_reproducible_training(seed)
    torch.use_deterministic_algorithms(True)
    return create_optimized_dataloader(dataset, batch_size, num_workers=0, seed=seed, drop_last=True)

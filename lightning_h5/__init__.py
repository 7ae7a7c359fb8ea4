"""Train PyTorch models with Lightning directly from HDF5 files.

Names are imported when they are first used, so that a worker process that needs a dataset does not pay for
Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .callbacks import H5StatsMonitor, SaveOnPreemption, SetEpochCallback
    from .datamodules import (
        CombinedHDF5DataModule,
        LazyH5DataModule,
        RankCachedH5DataModule,
        calculate_optimal_batch_size,
    )
    from .datasets import CombinedHDF5Dataset, ConcatDataset, H5LazyDataset, RankMemCachedH5Dataset, h5_worker_init_fn
    from .errors import (
        H5CorruptError,
        H5DataChangedError,
        H5Error,
        H5FileError,
        H5KeyError,
        H5MemoryError,
        H5ResumeError,
        H5ValueError,
        H5WorkerError,
    )
    from .loading import (
        LoaderBatch,
        MultiDataLoader,
        MultiDataLoaderConfig,
        SamplingStrategy,
        create_multi_dataloaders,
        create_optimized_dataloader,
        diagnose_dataloader_speed,
        ensure_deterministic_dataloader,
        get_optimal_num_workers,
        set_reproducible_training,
    )
    from .metrics import (
        CacheHitRate,
        CacheMib,
        DecodedMibPerSecond,
        LoaderMetrics,
        ReadMibPerSecond,
        SamplesPerSecond,
        WaitFraction,
        WaitMs,
    )
    from .options import (
        BadRowOptions,
        DistributedOptions,
        FileOptions,
        MemoryOptions,
        MixtureOptions,
        PatchOptions,
        RowCacheOptions,
        SegmentOptions,
        ShuffleOptions,
        SplitOptions,
        StagingOptions,
        TableOptions,
        WeightOptions,
        WindowOptions,
        WorkerOptions,
    )
    from .order import EpochShuffleSampler, balanced_contiguous_shard, group_split, interleaved_indices, k_fold
    from .tools.bench import bench_file
    from .tools.check import check_files
    from .tools.index_file import write_index
    from .tools.inspect import inspect_file, inspect_folder
    from .tools.repack import repack_file
    from .tools.stats import compute_stats

_HOMES = {
    "callbacks": ("H5StatsMonitor", "SaveOnPreemption", "SetEpochCallback"),
    "datamodules": (
        "CombinedHDF5DataModule",
        "LazyH5DataModule",
        "RankCachedH5DataModule",
        "calculate_optimal_batch_size",
    ),
    "datasets": (
        "CombinedHDF5Dataset",
        "ConcatDataset",
        "H5LazyDataset",
        "RankMemCachedH5Dataset",
        "h5_worker_init_fn",
    ),
    "errors": (
        "H5CorruptError",
        "H5DataChangedError",
        "H5Error",
        "H5FileError",
        "H5KeyError",
        "H5MemoryError",
        "H5ResumeError",
        "H5ValueError",
        "H5WorkerError",
    ),
    "loading": (
        "LoaderBatch",
        "MultiDataLoader",
        "MultiDataLoaderConfig",
        "SamplingStrategy",
        "create_multi_dataloaders",
        "create_optimized_dataloader",
        "diagnose_dataloader_speed",
        "ensure_deterministic_dataloader",
        "get_optimal_num_workers",
        "set_reproducible_training",
    ),
    "metrics": (
        "CacheHitRate",
        "CacheMib",
        "DecodedMibPerSecond",
        "LoaderMetrics",
        "ReadMibPerSecond",
        "SamplesPerSecond",
        "WaitFraction",
        "WaitMs",
    ),
    "options": (
        "BadRowOptions",
        "DistributedOptions",
        "FileOptions",
        "MemoryOptions",
        "MixtureOptions",
        "PatchOptions",
        "RowCacheOptions",
        "SegmentOptions",
        "ShuffleOptions",
        "SplitOptions",
        "StagingOptions",
        "TableOptions",
        "WeightOptions",
        "WindowOptions",
        "WorkerOptions",
    ),
    "order": ("EpochShuffleSampler", "balanced_contiguous_shard", "group_split", "interleaved_indices", "k_fold"),
    "tools.bench": ("bench_file",),
    "tools.check": ("check_files",),
    "tools.inspect": ("inspect_file", "inspect_folder"),
    "tools.index_file": ("write_index",),
    "tools.repack": ("repack_file",),
    "tools.stats": ("compute_stats",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BadRowOptions",
    "CacheHitRate",
    "CacheMib",
    "CombinedHDF5DataModule",
    "CombinedHDF5Dataset",
    "ConcatDataset",
    "DecodedMibPerSecond",
    "DistributedOptions",
    "EpochShuffleSampler",
    "FileOptions",
    "H5CorruptError",
    "H5DataChangedError",
    "H5Error",
    "H5FileError",
    "H5KeyError",
    "H5LazyDataset",
    "H5MemoryError",
    "H5ResumeError",
    "H5StatsMonitor",
    "H5ValueError",
    "H5WorkerError",
    "LazyH5DataModule",
    "LoaderBatch",
    "LoaderMetrics",
    "MemoryOptions",
    "MixtureOptions",
    "MultiDataLoader",
    "MultiDataLoaderConfig",
    "PatchOptions",
    "RankCachedH5DataModule",
    "RankMemCachedH5Dataset",
    "ReadMibPerSecond",
    "RowCacheOptions",
    "SamplesPerSecond",
    "SamplingStrategy",
    "SaveOnPreemption",
    "SegmentOptions",
    "SetEpochCallback",
    "ShuffleOptions",
    "SplitOptions",
    "StagingOptions",
    "TableOptions",
    "WaitFraction",
    "WaitMs",
    "WeightOptions",
    "WindowOptions",
    "WorkerOptions",
    "__version__",
    "balanced_contiguous_shard",
    "bench_file",
    "calculate_optimal_batch_size",
    "check_files",
    "compute_stats",
    "create_multi_dataloaders",
    "create_optimized_dataloader",
    "diagnose_dataloader_speed",
    "ensure_deterministic_dataloader",
    "get_optimal_num_workers",
    "group_split",
    "h5_worker_init_fn",
    "inspect_file",
    "inspect_folder",
    "interleaved_indices",
    "k_fold",
    "repack_file",
    "set_reproducible_training",
    "write_index",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)

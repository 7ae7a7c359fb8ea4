"""Option objects of data modules and datasets: each setting is declared, checked and documented here, once."""

from .running import DistributedOptions, FileOptions, MemoryOptions, ShuffleOptions, WorkerOptions
from .samples import MixtureOptions, RowCacheOptions, SegmentOptions, SplitOptions, WeightOptions

__all__ = [
    "DistributedOptions",
    "FileOptions",
    "MemoryOptions",
    "MixtureOptions",
    "RowCacheOptions",
    "SegmentOptions",
    "ShuffleOptions",
    "SplitOptions",
    "WeightOptions",
    "WorkerOptions",
]

"""Option objects of data modules and datasets: each setting is declared, checked and documented here, once."""

from .running import (
    BadRowOptions,
    DistributedOptions,
    FileOptions,
    MemoryOptions,
    ShuffleOptions,
    StagingOptions,
    WorkerOptions,
)
from .samples import MixtureOptions, RowCacheOptions, SplitOptions, TableOptions, WeightOptions
from .segments import PatchOptions, SegmentOptions, StepRange, WindowOptions, value_of_field

__all__ = [
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
    "StepRange",
    "TableOptions",
    "WeightOptions",
    "WindowOptions",
    "WorkerOptions",
    "value_of_field",
]

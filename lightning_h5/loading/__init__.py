"""The DataLoader: reading ahead, tokens, worker start, position. Knows torch, not Lightning."""

from .choose_order import FEW_BLOCKS, blocks_mixed, bytes_to_mix
from .diagnosis import LoaderReport, diagnose_dataloader_speed, what_limits
from .factory import (
    create_multi_dataloaders,
    create_optimized_dataloader,
    ensure_deterministic_dataloader,
    get_optimal_num_workers,
    set_reproducible_training,
)
from .held_batches import HoldLimits
from .loader import H5DataLoader, Iteration, SampleCollate
from .multi import LoaderBatch, MultiDataLoader, MultiDataLoaderConfig, SamplingStrategy

__all__ = [
    "FEW_BLOCKS",
    "H5DataLoader",
    "HoldLimits",
    "Iteration",
    "LoaderBatch",
    "LoaderReport",
    "MultiDataLoader",
    "MultiDataLoaderConfig",
    "SampleCollate",
    "SamplingStrategy",
    "blocks_mixed",
    "bytes_to_mix",
    "create_multi_dataloaders",
    "create_optimized_dataloader",
    "diagnose_dataloader_speed",
    "ensure_deterministic_dataloader",
    "get_optimal_num_workers",
    "set_reproducible_training",
    "what_limits",
]

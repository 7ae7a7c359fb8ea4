"""The DataLoader: reading ahead, tokens, worker start, position. Knows torch, not Lightning."""

from .collate import SampleCollate
from .cores import get_optimal_num_workers
from .diagnosis import (
    LoaderReport,
    diagnose_dataloader_speed,
    ensure_deterministic_dataloader,
    set_reproducible_training,
)
from .factory import create_multi_dataloaders, create_optimized_dataloader
from .loader import H5DataLoader
from .order import FEW_BLOCKS, blocks_mixed
from .state import OtherShardsError, Position, extend, is_position, position_from, position_state, steps_left

__all__ = [
    "FEW_BLOCKS",
    "H5DataLoader",
    "LoaderReport",
    "OtherShardsError",
    "Position",
    "SampleCollate",
    "blocks_mixed",
    "create_multi_dataloaders",
    "create_optimized_dataloader",
    "diagnose_dataloader_speed",
    "ensure_deterministic_dataloader",
    "extend",
    "get_optimal_num_workers",
    "is_position",
    "position_from",
    "position_state",
    "set_reproducible_training",
    "steps_left",
]

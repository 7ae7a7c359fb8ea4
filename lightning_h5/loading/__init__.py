"""The DataLoader: reading ahead, tokens, worker start, position. Knows torch, not Lightning."""

from .collate import SampleCollate
from .loader import H5DataLoader
from .state import OtherShardsError, Position, extend, is_position, position_from, position_state, steps_left

__all__ = [
    "H5DataLoader",
    "OtherShardsError",
    "Position",
    "SampleCollate",
    "extend",
    "is_position",
    "position_from",
    "position_state",
    "steps_left",
]

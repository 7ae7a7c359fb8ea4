"""The data modules: life cycle only."""

from .combined import CombinedHDF5DataModule
from .lazy import LazyH5DataModule
from .rank_cached import RankCachedH5DataModule
from .tuning import calculate_optimal_batch_size

__all__ = ["CombinedHDF5DataModule", "LazyH5DataModule", "RankCachedH5DataModule", "calculate_optimal_batch_size"]

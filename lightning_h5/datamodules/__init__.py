"""The data modules: life cycle only."""

from .combined import CombinedHDF5DataModule
from .lazy import LazyH5DataModule
from .rank_cached import RankCachedH5DataModule

__all__ = ["CombinedHDF5DataModule", "LazyH5DataModule", "RankCachedH5DataModule"]

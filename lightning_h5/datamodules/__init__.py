"""The data modules: life cycle only."""

from .lazy import LazyH5DataModule
from .rank_cached import RankCachedH5DataModule

__all__ = ["LazyH5DataModule", "RankCachedH5DataModule"]

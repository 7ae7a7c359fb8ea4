"""The data modules: life cycle only."""

from .lazy import LazyH5DataModule

__all__ = ["LazyH5DataModule"]

"""Filters of chunks, undone without the HDF5 library."""

from . import compiled, decoders  # noqa: F401  # they register what they can undo
from .pipeline import ChunkLoop, Pipeline, why_not_decodable

__all__ = ["ChunkLoop", "Pipeline", "why_not_decodable"]

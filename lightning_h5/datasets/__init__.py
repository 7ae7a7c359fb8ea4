"""Torch datasets over HDF5 files. Importing them does not import Lightning."""

from .base import RawBatch, RowDataset
from .lazy import H5LazyDataset
from .workers import h5_worker_init_fn, seed_worker

__all__ = ["H5LazyDataset", "RawBatch", "RowDataset", "h5_worker_init_fn", "seed_worker"]

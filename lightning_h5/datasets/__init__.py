"""Torch datasets over HDF5 files. Importing them does not import Lightning."""

from .base import RawBatch, RowDataset
from .catalog import FileCatalog
from .column_values import column_of, count_rows
from .combined import CombinedHDF5Dataset
from .compatibility import different_packing, refuse_images, shape_of_images
from .discovery import expand_those_there
from .fields import FieldMap
from .lazy import H5LazyDataset, LazyFileDataset
from .mixture import SOURCE, MixtureDataset, mixture_dataset, rows_of, weighted_dataset
from .normalize import FieldStats, read_stats, write_stats
from .rank_cached import RankMemCachedH5Dataset
from .sample_layout import Transform
from .selection import NoRowPassesError
from .sequence_dataset import SequenceDataset, Sequences
from .shard_loading import load_shards, room
from .user_functions import (
    Samples,
    WorkerFailure,
    asked_for,
    fresh_draws,
    generators,
    note_rows,
    own_streams,
)
from .visits import current_visits, visiting
from .worker_buffers import (
    WorkerMemory,
    h5_worker_init_fn,
    naming_shared_memory,
    open_worker_buffers,
    start_worker,
    starting_workers,
    worker_memory,
)

__all__ = [
    "SOURCE",
    "CombinedHDF5Dataset",
    "FieldMap",
    "FieldStats",
    "FileCatalog",
    "H5LazyDataset",
    "LazyFileDataset",
    "MixtureDataset",
    "NoRowPassesError",
    "RankMemCachedH5Dataset",
    "RawBatch",
    "RowDataset",
    "Samples",
    "SequenceDataset",
    "Sequences",
    "Transform",
    "WorkerFailure",
    "WorkerMemory",
    "asked_for",
    "column_of",
    "count_rows",
    "current_visits",
    "different_packing",
    "expand_those_there",
    "fresh_draws",
    "generators",
    "h5_worker_init_fn",
    "load_shards",
    "mixture_dataset",
    "naming_shared_memory",
    "note_rows",
    "open_worker_buffers",
    "own_streams",
    "read_stats",
    "refuse_images",
    "room",
    "rows_of",
    "shape_of_images",
    "start_worker",
    "starting_workers",
    "visiting",
    "weighted_dataset",
    "worker_memory",
    "write_stats",
]

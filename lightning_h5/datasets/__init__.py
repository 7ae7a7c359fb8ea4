"""Torch datasets over HDF5 files. Importing them does not import Lightning."""

from .base import RawBatch, RowDataset
from .combined import CombinedHDF5Dataset
from .digests import digests_of, integrity_of, sharing_digests
from .discovery import expand_those_there
from .field_map import FieldMap
from .lazy import H5LazyDataset
from .live import agreeing_on_rows
from .mixture import SOURCE, MixtureDataset, mixture_dataset, rows_of, weighted_dataset
from .outbox import WorkerMemory, open_outbox, starting_workers, this_outbox, worker_memory
from .preload import load_shards
from .randomness import asked_for, fresh_draws, generators, own_streams
from .rank_cached import RankMemCachedH5Dataset
from .room import room
from .selection import NoRowPassesError
from .sequences import SequenceDataset, Sequences
from .stats_file import FieldStats, read_stats, write_stats
from .structure import Transform
from .table import FileTable
from .workers import h5_worker_init_fn, start_worker

__all__ = [
    "SOURCE",
    "CombinedHDF5Dataset",
    "FieldMap",
    "FieldStats",
    "FileTable",
    "H5LazyDataset",
    "MixtureDataset",
    "NoRowPassesError",
    "RankMemCachedH5Dataset",
    "RawBatch",
    "RowDataset",
    "SequenceDataset",
    "Sequences",
    "Transform",
    "WorkerMemory",
    "agreeing_on_rows",
    "asked_for",
    "digests_of",
    "expand_those_there",
    "fresh_draws",
    "generators",
    "h5_worker_init_fn",
    "integrity_of",
    "load_shards",
    "mixture_dataset",
    "open_outbox",
    "own_streams",
    "read_stats",
    "room",
    "rows_of",
    "sharing_digests",
    "start_worker",
    "starting_workers",
    "this_outbox",
    "weighted_dataset",
    "worker_memory",
    "write_stats",
]

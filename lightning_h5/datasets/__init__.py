"""Torch datasets over HDF5 files. Importing them does not import Lightning."""

from .bad_rows import RaiseBadRows, SkipBadRows
from .bad_sample_ledger import BadSample, BadSampleLedger
from .base import RowDataset
from .combined import CombinedHDF5Dataset
from .concat import ConcatDataset
from .fields import Fields
from .file_samples import FileSamples, open_samples
from .lazy import H5LazyDataset, LazyFileDataset
from .mixture import SOURCE, MixtureDataset, mixture_dataset, rows_of, weighted_dataset
from .normalize import FieldStats, read_stats, write_stats
from .origins import Origin, origins_of, read_again
from .rank_cached import RankMemCachedH5Dataset
from .raw_batch import RawBatch
from .sample_layout import Transform
from .shard_loading import load_shards
from .table_dataset import TableDataset, check_shapes, checked_step_counts
from .user_functions import AskedFor, Samples, WorkerFailure, asked_for, fresh_draws, generators, note_rows, own_streams
from .worker_start import h5_worker_init_fn, start_worker

__all__ = [
    "SOURCE",
    "AskedFor",
    "BadSample",
    "BadSampleLedger",
    "CombinedHDF5Dataset",
    "ConcatDataset",
    "FieldStats",
    "Fields",
    "FileSamples",
    "H5LazyDataset",
    "LazyFileDataset",
    "MixtureDataset",
    "Origin",
    "RaiseBadRows",
    "RankMemCachedH5Dataset",
    "RawBatch",
    "RowDataset",
    "Samples",
    "SkipBadRows",
    "TableDataset",
    "Transform",
    "WorkerFailure",
    "asked_for",
    "check_shapes",
    "checked_step_counts",
    "fresh_draws",
    "generators",
    "h5_worker_init_fn",
    "load_shards",
    "mixture_dataset",
    "note_rows",
    "open_samples",
    "origins_of",
    "own_streams",
    "read_again",
    "read_stats",
    "rows_of",
    "start_worker",
    "weighted_dataset",
    "write_stats",
]

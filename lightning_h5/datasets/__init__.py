"""Torch datasets over HDF5 files. Importing them does not import Lightning."""

from .base import RawBatch, RowDataset
from .catalog import Catalog
from .column_values import Categories
from .columns import column_of, count_rows, rows_without_line
from .combined import CombinedHDF5Dataset
from .compatibility import are_packed_alike, different_packing, refuse_images, shape_of_images
from .concat import ConcatDataset
from .discovery import FieldMap, bad_files, checked_names, expand_those_there, names_to_load, skip_into
from .fields import Fields
from .file_samples import FileSamples, open_samples, sample_kind
from .indexer import MakesIndexer
from .lazy import H5LazyDataset, LazyFileDataset
from .mixture import SOURCE, MixtureDataset, mixture_dataset, rows_of, weighted_dataset
from .normalize import FieldStats, read_stats, write_stats
from .rank_cached import RankMemCachedH5Dataset
from .row_filters import TARGET, Filters, NoRowPassesError, criteria_of
from .row_table import RowTable
from .sample_layout import Transform
from .segment_choice import SegmentChoice, SegmentSubset, groups_by_pattern, segments_by_time, segments_in_lists
from .segment_fields import SampleOptions
from .shard_loading import load_shards
from .table_dataset import TableDataset, check_shapes
from .user_functions import (
    AskedFor,
    Samples,
    WorkerFailure,
    asked_for,
    fresh_draws,
    generators,
    note_rows,
    own_streams,
)
from .windows import WholeSegments
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
    "TARGET",
    "AskedFor",
    "Catalog",
    "Categories",
    "CombinedHDF5Dataset",
    "ConcatDataset",
    "FieldMap",
    "FieldStats",
    "Fields",
    "FileSamples",
    "Filters",
    "H5LazyDataset",
    "LazyFileDataset",
    "MakesIndexer",
    "MixtureDataset",
    "NoRowPassesError",
    "RankMemCachedH5Dataset",
    "RawBatch",
    "RowDataset",
    "RowTable",
    "SampleOptions",
    "Samples",
    "SegmentChoice",
    "SegmentSubset",
    "TableDataset",
    "Transform",
    "WholeSegments",
    "WorkerFailure",
    "WorkerMemory",
    "are_packed_alike",
    "asked_for",
    "bad_files",
    "check_shapes",
    "checked_names",
    "column_of",
    "count_rows",
    "criteria_of",
    "different_packing",
    "expand_those_there",
    "fresh_draws",
    "generators",
    "groups_by_pattern",
    "h5_worker_init_fn",
    "load_shards",
    "mixture_dataset",
    "names_to_load",
    "naming_shared_memory",
    "note_rows",
    "open_samples",
    "open_worker_buffers",
    "own_streams",
    "read_stats",
    "refuse_images",
    "rows_of",
    "rows_without_line",
    "sample_kind",
    "segments_by_time",
    "segments_in_lists",
    "shape_of_images",
    "skip_into",
    "start_worker",
    "starting_workers",
    "weighted_dataset",
    "worker_memory",
    "write_stats",
]

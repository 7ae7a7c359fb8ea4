"""Rows in, ndarray out."""

from .base import InMemoryReader, check_bounds, checked_places, row_slices, take_rows
from .block_map import BlockMap, Boxes, RowGrid
from .block_memory import BlockMemory
from .block_sources import BlockSource, Change, FieldLayouts, PreparedSource, ReaderSource
from .bulk import ArrayTarget, BulkTarget, BulkTask, bulk_tasks, do_tasks, first_places, run_with_progress
from .chunk_loader import ChunkLoader
from .chunked import BegunRead, ChunkedReader, CopyRows
from .contiguous import ContiguousReader, MappedReader
from .decoded import EncodedReader, images_alike
from .digest_reader import digest_tasks, empty_digests, verify_tasks
from .filters import compiled, decoders  # noqa: F401  # they register what they decode
from .h5py_reader import H5pyReader, check_readable_text
from .many_reads import MIN_COMPILED, compile_reads
from .select import fallback_reason, is_pooled, open_chunked, open_reader, open_source
from .storage_rates import storage_rates
from .thread_pool import TaskQueue, usable_cores

__all__ = [
    "MIN_COMPILED",
    "ArrayTarget",
    "BegunRead",
    "BlockMap",
    "BlockMemory",
    "BlockSource",
    "Boxes",
    "BulkTarget",
    "BulkTask",
    "Change",
    "ChunkLoader",
    "ChunkedReader",
    "ContiguousReader",
    "CopyRows",
    "EncodedReader",
    "FieldLayouts",
    "H5pyReader",
    "InMemoryReader",
    "MappedReader",
    "PreparedSource",
    "ReaderSource",
    "RowGrid",
    "TaskQueue",
    "bulk_tasks",
    "check_bounds",
    "check_readable_text",
    "checked_places",
    "compile_reads",
    "digest_tasks",
    "do_tasks",
    "empty_digests",
    "fallback_reason",
    "first_places",
    "images_alike",
    "is_pooled",
    "open_chunked",
    "open_reader",
    "open_source",
    "row_slices",
    "run_with_progress",
    "storage_rates",
    "take_rows",
    "usable_cores",
    "verify_tasks",
]

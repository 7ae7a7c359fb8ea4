"""Rows in, ndarray out."""

from .base import blocks, check_bounds, take_rows
from .bulk import ArrayTarget, BulkTarget, BulkTask, bulk_tasks, do_tasks, first_places, run_with_progress
from .chunk_cache import InMemoryReader, SlotMemory
from .chunk_loader import Change, ChunkLoader, PreparedSource, ReaderSource, SlabSource
from .chunked import BegunRead, ChunkedReader
from .contiguous import ContiguousReader, MappedReader
from .digesting import digest_tasks, empty_digests, verify_tasks
from .h5py_reader import H5pyReader
from .heaps import HeapGuard, heap_guard
from .select import fallback_reason, is_pooled, open_chunked, open_reader, open_source
from .thread_pool import TaskQueue, usable_cores

__all__ = [
    "ArrayTarget",
    "BegunRead",
    "BulkTarget",
    "BulkTask",
    "Change",
    "ChunkLoader",
    "ChunkedReader",
    "ContiguousReader",
    "H5pyReader",
    "HeapGuard",
    "InMemoryReader",
    "MappedReader",
    "PreparedSource",
    "ReaderSource",
    "SlabSource",
    "SlotMemory",
    "TaskQueue",
    "blocks",
    "bulk_tasks",
    "check_bounds",
    "digest_tasks",
    "do_tasks",
    "empty_digests",
    "fallback_reason",
    "first_places",
    "heap_guard",
    "is_pooled",
    "open_chunked",
    "open_reader",
    "open_source",
    "run_with_progress",
    "take_rows",
    "usable_cores",
    "verify_tasks",
]

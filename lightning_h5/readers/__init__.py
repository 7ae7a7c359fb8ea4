"""Rows in, ndarray out."""

from .base import BegunRead, InMemoryReader, check_bounds, checked_places, row_slices, take_rows
from .block_map import BlockMap, Boxes, RowGrid
from .block_memory import BlockMemory
from .block_sources import TASK_BYTES, BlockSource, Change, CopyChange, FieldLayouts, PreparedSource, ReaderSource
from .bulk import ArrayTarget, BulkTarget, BulkTask, bulk_tasks, do_tasks, first_places, run_with_progress
from .chunk_cache import MOST_TOGETHER, ROOM_AHEAD
from .chunk_loader import ChunkLoader
from .chunked import ChunkedReader
from .codecs import (
    ClassNumbers,
    Conventions,
    Decode,
    DecodeRequest,
    MatrixRows,
    MoveLast,
    Recode,
    Stack,
    Unpack,
    Widen,
    codecs_of,
    unpacked,
)
from .contiguous import ContiguousReader, MappedReader
from .copies import CopyRows
from .decoded import EncodedReader, images_alike
from .digest_reader import digest_tasks, empty_digests, verify_tasks
from .filters import compiled, decoders  # noqa: F401  # they register what they decode
from .h5py_reader import H5pyReader, check_readable_text
from .kept_chunks import keeps_decoded
from .many_arrays import HeldArrays, ManyArrays
from .many_reads import MIN_COMPILED, compile_reads
from .row_codecs import Function, Image, Ragged, RowCodec, bytes_of
from .salvage import salvaged
from .select import fallback_reason, is_pooled, open_chunked, open_reader, open_source
from .storage_rates import storage_rates
from .thread_pool import LARGE_TEAM, TaskQueue, team_size, usable_cores

__all__ = [
    "LARGE_TEAM",
    "MIN_COMPILED",
    "MOST_TOGETHER",
    "ROOM_AHEAD",
    "TASK_BYTES",
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
    "ClassNumbers",
    "ContiguousReader",
    "Conventions",
    "CopyChange",
    "CopyRows",
    "Decode",
    "DecodeRequest",
    "EncodedReader",
    "FieldLayouts",
    "Function",
    "H5pyReader",
    "HeldArrays",
    "Image",
    "InMemoryReader",
    "ManyArrays",
    "MappedReader",
    "MatrixRows",
    "MoveLast",
    "PreparedSource",
    "Ragged",
    "ReaderSource",
    "Recode",
    "RowCodec",
    "RowGrid",
    "Stack",
    "TaskQueue",
    "Unpack",
    "Widen",
    "bulk_tasks",
    "bytes_of",
    "check_bounds",
    "check_readable_text",
    "checked_places",
    "codecs_of",
    "compile_reads",
    "digest_tasks",
    "do_tasks",
    "empty_digests",
    "fallback_reason",
    "first_places",
    "images_alike",
    "is_pooled",
    "keeps_decoded",
    "open_chunked",
    "open_reader",
    "open_source",
    "row_slices",
    "run_with_progress",
    "salvaged",
    "storage_rates",
    "take_rows",
    "team_size",
    "unpacked",
    "usable_cores",
    "verify_tasks",
]

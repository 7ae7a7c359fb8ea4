"""Paths, open files, and what an array looks like on disk. With ``readers``, the only part that imports h5py."""

from .alike import AlikeArrays
from .checks import INTEGRITY, overlaps, refuse_overlaps
from .chunk_index import ChunkTable
from .contents import Entry, entries_of, list_arrays, resolve_path
from .describe import describe_array
from .digests import ArrayDigests, digest_of, digests_path, read_digests, with_digests, write_digests
from .dtypes import kind_of, native, numpy_dtype, torch_dtype
from .external_files import guards_of_others
from .h5py_errors import FAULTS, translate_h5py_errors
from .handles import MAX_H5, HandlePool, OpenOptions, close_when_collected, drop_inherited, process_pool
from .identity import ChangeGuard, file_identity, is_on_disk, looks_of
from .keys import (
    GROUP_WORDS,
    FieldNames,
    field_names,
    fill_split,
    guess_keys,
    guess_keys_in,
    keys_in,
    names_rows,
    words_in,
)
from .layout import ArrayLayout, Filter, filters_of, layout_of
from .links import shape_of, unmapped_rows
from .open import ArrayHandle, create_h5, find_array, open_h5, skipped_bytes
from .packing import Packing
from .paths import expand_paths, expand_user, file_number

__all__ = [
    "FAULTS",
    "GROUP_WORDS",
    "INTEGRITY",
    "MAX_H5",
    "AlikeArrays",
    "ArrayDigests",
    "ArrayHandle",
    "ArrayLayout",
    "ChangeGuard",
    "ChunkTable",
    "Entry",
    "FieldNames",
    "Filter",
    "HandlePool",
    "OpenOptions",
    "Packing",
    "close_when_collected",
    "create_h5",
    "describe_array",
    "digest_of",
    "digests_path",
    "drop_inherited",
    "entries_of",
    "expand_paths",
    "expand_user",
    "field_names",
    "file_identity",
    "file_number",
    "fill_split",
    "filters_of",
    "find_array",
    "guards_of_others",
    "guess_keys",
    "guess_keys_in",
    "is_on_disk",
    "keys_in",
    "kind_of",
    "layout_of",
    "list_arrays",
    "looks_of",
    "names_rows",
    "native",
    "numpy_dtype",
    "open_h5",
    "overlaps",
    "process_pool",
    "read_digests",
    "refuse_overlaps",
    "resolve_path",
    "shape_of",
    "skipped_bytes",
    "torch_dtype",
    "translate_h5py_errors",
    "unmapped_rows",
    "with_digests",
    "words_in",
    "write_digests",
]

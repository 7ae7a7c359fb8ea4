"""Paths, open files, and what an array looks like on disk. With ``readers``, the only part that imports h5py."""

from .chunks import ChunkTable
from .damage import FAULTS, blamed_on
from .digests import ArrayDigests, digest_of, digests_path, no_digests, read_digests, with_digests, write_digests
from .door import ArrayHandle, create_h5, find_array, open_h5, skipped_bytes
from .dtypes import kind_of, native, numpy_dtype, torch_dtype
from .foreign import shape_of
from .handles import MOST_H5, HandlePool, OpenOptions, drop_inherited, looks_of, process_pool
from .identity import ChangeGuard, file_identity
from .integrity import INTEGRITY
from .keys import FieldNames, field_names, fill_split, guess_keys, keys_in
from .layout import ArrayLayout, Filter, filters_of, layout_of
from .lookup import look_up
from .others import guards_of_others
from .overlaps import refuse_overlaps
from .paths import expand_paths
from .tree import Entry, entries_of, list_arrays
from .trust import CAUTIOUS, Trust, Verify

__all__ = [
    "CAUTIOUS",
    "FAULTS",
    "INTEGRITY",
    "MOST_H5",
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
    "Trust",
    "Verify",
    "blamed_on",
    "create_h5",
    "digest_of",
    "digests_path",
    "drop_inherited",
    "entries_of",
    "expand_paths",
    "field_names",
    "file_identity",
    "fill_split",
    "filters_of",
    "find_array",
    "guards_of_others",
    "guess_keys",
    "keys_in",
    "kind_of",
    "layout_of",
    "list_arrays",
    "look_up",
    "looks_of",
    "native",
    "no_digests",
    "numpy_dtype",
    "open_h5",
    "process_pool",
    "read_digests",
    "refuse_overlaps",
    "shape_of",
    "skipped_bytes",
    "torch_dtype",
    "with_digests",
    "write_digests",
]

"""Paths, open files, and what an array looks like on disk. With ``readers``, the only part that imports h5py."""

from .chunks import ChunkTable
from .door import create_h5, find_array, list_arrays, numpy_dtype, open_h5
from .dtypes import kind_of, torch_dtype
from .handles import MOST_H5, HandlePool, OpenOptions, drop_inherited, process_pool
from .identity import ChangeGuard, file_identity
from .integrity import INTEGRITY
from .keys import FieldNames, field_names, fill_split, guess_keys, keys_in
from .layout import ArrayLayout, Filter, filters_of, layout_of
from .paths import expand_paths
from .tree import FAULTS, Entry, entries_of

__all__ = [
    "FAULTS",
    "INTEGRITY",
    "MOST_H5",
    "ArrayLayout",
    "ChangeGuard",
    "ChunkTable",
    "Entry",
    "FieldNames",
    "Filter",
    "HandlePool",
    "OpenOptions",
    "create_h5",
    "drop_inherited",
    "entries_of",
    "expand_paths",
    "field_names",
    "file_identity",
    "fill_split",
    "filters_of",
    "find_array",
    "guess_keys",
    "keys_in",
    "kind_of",
    "layout_of",
    "list_arrays",
    "numpy_dtype",
    "open_h5",
    "process_pool",
    "torch_dtype",
]

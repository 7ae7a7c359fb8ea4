"""Paths, open files, and what an array looks like on disk. With ``readers``, the only part that imports h5py."""

from . import forks as forks
from .alike import AlikeArrays
from .array_view import ArrayView
from .checks import INTEGRITY, check_decoding_memory, check_no_overlap, is_out_of_proportion, overlaps
from .chunk_index import ChunkTable
from .codecs import Codec, Conventions, MatrixRows, Recode, Stack, Unpack, Widen, codec_of
from .contents import (
    OLD_CATEGORIES,
    Entry,
    Target,
    entries_of,
    identity_of_object,
    list_arrays,
    list_data,
    resolve_path,
    shape_of,
    target_of,
)
from .describe import attribute_layout, column_layout, describe_array, layout_of, scalar_layout
from .digests import ArrayDigests, digest_of, digests_path, read_digests, with_digests, write_digests
from .dtypes import kind_of, native, numpy_dtype, torch_dtype
from .encoded import Function, Image, Ragged, RowCodec, bytes_of, is_bytes, is_list
from .handles import MAX_H5, HandlePool, close_when_collected, drop_inherited, process_pool
from .identity import ChangeGuard, file_identity, identity_text, is_on_disk, meaning_of, pread_of, stat_of
from .keys import (
    GROUP_WORDS,
    FieldNames,
    field_names,
    fill_split,
    guess_keys,
    guess_keys_in,
    in_other_file,
    is_attribute_key,
    keys_in,
    names_rows,
    own_keys_in,
    stacked_members,
    with_constants,
    without_slashes,
    words_in,
)
from .layout import ArrayLayout, Decoding, Filter, filters_of, path_of
from .layout_table import ArrayColumns, LayoutTable
from .links import ArrayHandle, ScalarError, external_guards, find_array, unmapped_rows
from .metadata_index import MetadataIndex
from .open import FAULTS, create_h5, open_h5, open_recorded, translate_h5py_errors
from .open_files import OpenOptions
from .packing import Packing
from .paths import expand_paths, expand_user, file_number, name_objects
from .patterns import matching_objects
from .references import MAX_TEXT, holds_regions, is_matlab_text, is_references, referenced_arrays, value_of_cell
from .remote_file import opened, sampled_identity, size_of
from .sparse import SparseGroup, sparse_group
from .structures import DIMENSION_SCALE, SPARSE_PARTS, matrices_among

__all__ = [
    "DIMENSION_SCALE",
    "FAULTS",
    "GROUP_WORDS",
    "INTEGRITY",
    "MAX_H5",
    "MAX_TEXT",
    "OLD_CATEGORIES",
    "SPARSE_PARTS",
    "AlikeArrays",
    "ArrayColumns",
    "ArrayDigests",
    "ArrayHandle",
    "ArrayLayout",
    "ArrayView",
    "ChangeGuard",
    "ChunkTable",
    "Codec",
    "Conventions",
    "Decoding",
    "Entry",
    "FieldNames",
    "Filter",
    "Function",
    "HandlePool",
    "Image",
    "LayoutTable",
    "MatrixRows",
    "MetadataIndex",
    "OpenOptions",
    "Packing",
    "Ragged",
    "Recode",
    "RowCodec",
    "ScalarError",
    "SparseGroup",
    "Stack",
    "Target",
    "Unpack",
    "Widen",
    "attribute_layout",
    "bytes_of",
    "check_decoding_memory",
    "check_no_overlap",
    "close_when_collected",
    "codec_of",
    "column_layout",
    "create_h5",
    "describe_array",
    "digest_of",
    "digests_path",
    "drop_inherited",
    "entries_of",
    "expand_paths",
    "expand_user",
    "external_guards",
    "field_names",
    "file_identity",
    "file_number",
    "fill_split",
    "filters_of",
    "find_array",
    "guess_keys",
    "guess_keys_in",
    "holds_regions",
    "identity_of_object",
    "identity_text",
    "in_other_file",
    "is_attribute_key",
    "is_bytes",
    "is_list",
    "is_matlab_text",
    "is_on_disk",
    "is_out_of_proportion",
    "is_references",
    "keys_in",
    "kind_of",
    "layout_of",
    "list_arrays",
    "list_data",
    "matching_objects",
    "matrices_among",
    "meaning_of",
    "name_objects",
    "names_rows",
    "native",
    "numpy_dtype",
    "open_h5",
    "open_recorded",
    "opened",
    "overlaps",
    "own_keys_in",
    "path_of",
    "pread_of",
    "process_pool",
    "read_digests",
    "referenced_arrays",
    "resolve_path",
    "sampled_identity",
    "scalar_layout",
    "shape_of",
    "size_of",
    "sparse_group",
    "stacked_members",
    "stat_of",
    "target_of",
    "torch_dtype",
    "translate_h5py_errors",
    "unmapped_rows",
    "value_of_cell",
    "with_constants",
    "with_digests",
    "without_slashes",
    "words_in",
    "write_digests",
]

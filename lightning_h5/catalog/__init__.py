"""The contents of files: arrays, layouts, identity, side tables. Samples are unknown here."""

from .agreement import Agreement, differences
from .catalog import Catalog
from .column_values import Categories, check_same, classes_of, decoded, pairs_of, texts_of, values_of
from .compatibility import (
    WITHOUT_THEM,
    ArrayRequest,
    Compatibility,
    Skip,
    Span,
    check_same_numbers,
    each_readable,
    has_lists,
    is_encoded,
    joined_arrays,
    refuse_images,
    refuse_other_files,
    shape_of_images,
    with_stacks,
)
from .content_digest import whole_digest
from .discovery import (
    SKIP_THEM,
    TARGET,
    FieldMap,
    bad_files,
    checked_names,
    expand_those_there,
    files_to_read,
    hashable,
    keys_of,
    names_to_load,
    paths_of,
    skip_into,
)
from .file_contents import collector_paused
from .file_counts import boundaries_in, ends_of
from .joined_columns import arrays_of_others, describe_with_columns, with_columns, with_others
from .kept_parts import PackedText, PartsOfFile
from .part_layouts import ListedParts, PartLayouts, StoredParts, places_of
from .part_names import PartNames, filled
from .reference_values import values_of_cells
from .segment_parts import parts_in
from .side_table import OR_DROP, PREFIX, SideTable, is_of_table

__all__ = [
    "OR_DROP",
    "PREFIX",
    "SKIP_THEM",
    "TARGET",
    "WITHOUT_THEM",
    "Agreement",
    "ArrayRequest",
    "Catalog",
    "Categories",
    "Compatibility",
    "FieldMap",
    "ListedParts",
    "PackedText",
    "PartLayouts",
    "PartNames",
    "PartsOfFile",
    "SideTable",
    "Skip",
    "Span",
    "StoredParts",
    "arrays_of_others",
    "bad_files",
    "boundaries_in",
    "check_same",
    "check_same_numbers",
    "checked_names",
    "classes_of",
    "collector_paused",
    "decoded",
    "describe_with_columns",
    "differences",
    "each_readable",
    "ends_of",
    "expand_those_there",
    "files_to_read",
    "filled",
    "has_lists",
    "hashable",
    "is_encoded",
    "is_of_table",
    "joined_arrays",
    "keys_of",
    "names_to_load",
    "pairs_of",
    "parts_in",
    "paths_of",
    "places_of",
    "refuse_images",
    "refuse_other_files",
    "shape_of_images",
    "skip_into",
    "texts_of",
    "values_of",
    "values_of_cells",
    "whole_digest",
    "with_columns",
    "with_others",
    "with_stacks",
]

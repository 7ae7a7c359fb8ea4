"""The rows of each sample, for all kinds of samples."""

from .columns import column_of, count_rows, row_tasks, rows_without_line, text_tasks
from .indexer import HeldSamples, rows_of_all
from .kinds import KindOfSamples, open_table, sample_kind
from .labels import LabelCriterion
from .patch_grids import PatchRows
from .read_costs import ReadCost, RowUnits, blocks_of, chunk_cache, cost_of_files, reads_of_blocks
from .row_filters import Filters, NoRowPassesError, Where, criteria_of
from .row_table import HELD_BYTES, RowTable
from .row_tables import table_of_rows
from .sample_rows import BatchRows, FieldRows, Places
from .segment_choice import (
    SegmentChoice,
    SegmentSubset,
    groups_by_pattern,
    segments_by_time,
    segments_in_lists,
    with_label,
)
from .segment_fields import MakesIndexer, SampleKind, SampleOptions, Select, selected
from .selection import Selection
from .sparse_rows import CsrRows, SparseField, SparseRows
from .sparse_tables import with_matrices
from .windows import WholeSegments

__all__ = [
    "HELD_BYTES",
    "BatchRows",
    "CsrRows",
    "FieldRows",
    "Filters",
    "HeldSamples",
    "KindOfSamples",
    "LabelCriterion",
    "MakesIndexer",
    "NoRowPassesError",
    "PatchRows",
    "Places",
    "ReadCost",
    "RowTable",
    "RowUnits",
    "SampleKind",
    "SampleOptions",
    "SegmentChoice",
    "SegmentSubset",
    "Select",
    "Selection",
    "SparseField",
    "SparseRows",
    "Where",
    "WholeSegments",
    "blocks_of",
    "chunk_cache",
    "column_of",
    "cost_of_files",
    "count_rows",
    "criteria_of",
    "groups_by_pattern",
    "open_table",
    "reads_of_blocks",
    "row_tasks",
    "rows_of_all",
    "rows_without_line",
    "sample_kind",
    "segments_by_time",
    "segments_in_lists",
    "selected",
    "table_of_rows",
    "text_tasks",
    "with_label",
    "with_matrices",
]

"""The places of samples in segments, and the rows that they have of each field."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..types import IntArray
from .patch_grids import PatchRows
from .segments import BoolArray

__all__ = ["BatchRows", "FieldRows", "Places"]


class Places(NamedTuple):
    """Where samples are: a segment and a step in it for each.

    Attributes:
        segments: number of each sample's segment.
        steps: step that each sample is around, from the start of its segment; of patches where each starts along the
            axes that are cut, shape ``(n, n_axes)``.
    """

    segments: IntArray
    steps: IntArray


class FieldRows(NamedTuple):
    """The rows of one field that some samples have.

    Attributes:
        rows: sample by sample.
        lengths: rows of each sample; None if each has equally many.
        is_valid: mask of rows that are steps of the segment, not padding; None if all are.
        patches: the parts of the cells that samples have, if rows are cells.
        runs: sizes of runs of consecutive rows in a segment, or one number if all have one size; None if unknown.
    """

    rows: IntArray
    lengths: IntArray | None = None
    is_valid: BoolArray | None = None
    patches: PatchRows | None = None
    runs: IntArray | int | None = None

    def lengths_of(self, n_samples: int) -> IntArray:
        """Return the number of rows of each of the ``n_samples`` samples."""
        return np.full(n_samples, len(self.rows) // max(1, n_samples)) if self.lengths is None else self.lengths


class BatchRows(NamedTuple):
    """The rows that some samples have.

    Attributes:
        fields: the rows of each field.
        places: where the samples are; None if samples are rows, and so known by their numbers.
    """

    fields: tuple[FieldRows, ...]
    places: Places | None = None

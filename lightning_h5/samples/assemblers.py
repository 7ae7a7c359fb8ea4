"""Assemblers: join the rows of a field to a batch with one entry per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..lazy_torch import torch
from ..readers.buffers import BufferPool, Column, batch_bytes, copied_alone, stacked
from .sample_rows import FieldRows

__all__ = ["Assembler", "PatchAssembler", "SegmentAssembler", "WindowAssembler"]


class Assembler:
    """Returns rows unchanged: each sample has one row of the field, or one value."""

    def column(self, rows: FieldRows, column: Column, buffers: BufferPool) -> Column:
        """Return a column with an entry for each sample.

        Args:
            rows: the rows of the samples.
            column: the values of these rows; a list with the rows of each sample, if rows have several shapes.
            buffers: allocates memory.

        Returns:
            A tensor if all samples have one shape; else a list with one entry per sample.
        """
        return column

    def mask(self, rows: FieldRows, n_samples: int) -> torch.Tensor:
        """Return a mask of the steps that are not padding, one entry per sample."""
        return _step_mask(rows, (n_samples,))


@dataclass(frozen=True)
class WindowAssembler(Assembler):
    """Joins steps to windows.

    Attributes:
        n_steps: steps of a window; None for one step, without an axis of its own.
        clears: steps beyond the ends of a segment are set to zero.
        is_ragged: rows have several shapes.
        place: axis of the steps in a sample.
    """

    n_steps: int | None
    clears: bool
    is_ragged: bool
    place: int

    def column(self, rows: FieldRows, column: Column, buffers: BufferPool) -> Column:
        """See ``Assembler.column``."""
        is_valid = rows.is_valid if self.clears else None
        if self.is_ragged:
            samples = zip(column, [None] * len(column) if is_valid is None else list(is_valid), strict=True)
            return [self._ragged(steps, valid, buffers) for steps, valid in samples]
        if not isinstance(column, torch.Tensor):  # text
            if is_valid is not None:
                column = [
                    value if valid else torch.zeros_like(value) if isinstance(value, torch.Tensor) else ""
                    for value, valid in zip(column, is_valid.ravel().tolist(), strict=True)
                ]
            if self.n_steps is None:
                return column
            return [_stacked(column[at : at + self.n_steps]) for at in range(0, len(column), self.n_steps)]
        if is_valid is not None and not is_valid.all():
            _clear(column, ~is_valid.reshape(-1))
        if self.n_steps is None:
            return column
        return _moved(column.view(-1, self.n_steps, *column.shape[1:]), 1, 1 + self.place, buffers)

    def _ragged(self, steps: torch.Tensor, valid: npt.NDArray[np.bool_] | None, buffers: BufferPool) -> Any:
        """Return a sample whose rows differ in shape from other samples."""
        if valid is not None and not valid.all():
            _clear(steps, ~valid)
        return steps[0] if self.n_steps is None else _moved(steps, 0, self.place, buffers)

    def mask(self, rows: FieldRows, n_samples: int) -> torch.Tensor:
        """See ``Assembler.mask``."""
        return _step_mask(rows, (n_samples,) if self.n_steps is None else (n_samples, self.n_steps))


@dataclass(frozen=True)
class SegmentAssembler(Assembler):
    """Joins steps to whole segments, which may differ in length.

    Attributes:
        is_ragged: rows have several shapes.
        place: axis of the steps in a sample.
    """

    is_ragged: bool
    place: int

    def column(self, rows: FieldRows, column: Column, buffers: BufferPool) -> Column:
        """See ``Assembler.column``."""
        assert rows.lengths is not None, "segments have a length each"
        lengths = np.unique(rows.lengths).tolist()
        if isinstance(column, torch.Tensor) and not lengths:
            return _moved(column[None][:0], 1, 1 + self.place, buffers)
        if isinstance(column, torch.Tensor) and len(lengths) == 1 and lengths[0]:  # not to be stacked again
            return _moved(column.view(-1, lengths[0], *column.shape[1:]), 1, 1 + self.place, buffers)
        ends = np.concatenate([[0], np.cumsum(rows.lengths)]).tolist()
        samples = column if self.is_ragged else [_stacked(column[low:high]) for low, high in pairwise(ends)]
        return [_moved(sample, 0, self.place, buffers) for sample in samples]


@dataclass(frozen=True)
class PatchAssembler(Assembler):
    """Sets patches to zero beyond the edges of their volumes."""

    def column(self, rows: FieldRows, column: Column, buffers: BufferPool) -> Column:
        """See ``Assembler.column``."""
        assert rows.patches is not None, "samples are patches"
        assert isinstance(column, torch.Tensor), "volumes have numbers"
        return rows.patches.finished(column)


def _step_mask(rows: FieldRows, shape: Sequence[int]) -> torch.Tensor:
    if rows.is_valid is None:
        return torch.ones(tuple(shape), dtype=torch.bool)
    return torch.from_numpy(rows.is_valid.reshape(shape))


def _stacked(steps: Column) -> Column:
    """Return steps that were decoded one by one as a tensor, if they have one shape."""
    if isinstance(steps, list) and steps and all(isinstance(step, torch.Tensor) for step in steps):
        return stacked(steps) if len({step.shape for step in steps}) == 1 else steps
    return steps


def _clear(steps: torch.Tensor, is_padding: npt.NDArray[np.bool_]) -> None:
    """Set some steps to zero."""
    if steps.device.type == "cpu":
        batch_bytes(steps)[is_padding] = 0
    else:
        steps.view(len(steps), -1).view(torch.uint8)[torch.from_numpy(is_padding)] = 0


def _moved(steps: Column, axis: int, place: int, buffers: BufferPool) -> Column:
    """Return rows with the axis of steps at its place among the others."""
    if place == axis or not isinstance(steps, torch.Tensor):
        return steps
    moved = steps.movedim(axis, place)
    if moved.device.type != "cpu":
        return moved.contiguous()
    return copied_alone(buffers.tensor(tuple(moved.shape), moved.dtype), moved)

"""From the rows that samples have to columns with one entry a sample: windows, segments, patches, masks and places."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..types import IntArray
from .buffers import BufferPool, Column
from .collate import stacked
from .segments import FieldRows
from .windows import WholeSegments, Windows

if TYPE_CHECKING:
    from .row_table import BatchRows, RowTable

__all__ = ["column_of_samples", "mask_of_samples", "places_columns"]


def column_of_samples(table: RowTable, field: int, found: FieldRows, column: Column, buffers: BufferPool) -> Column:
    """Return a field's column with an entry for each sample.

    Args:
        table: the files.
        field: number of the field.
        found: the rows that the samples have.
        column: these rows, one after the other; of a field with rows of several shapes those of each sample; patches.
        buffers: gives memory.

    Returns:
        A tensor if all samples have one shape; else a list with an entry for each.
    """
    if not table.has_steps[field]:
        return column
    if found.patches is not None:
        assert isinstance(column, torch.Tensor), "volumes have numbers"
        return found.patches.finished(column)
    sampling, place = table.sampling, table.step_places[field]
    if isinstance(sampling, WholeSegments):
        if not sampling.has_all_steps(field) or sampling.are_sparse:
            return column
        assert found.lengths is not None, "segments have a length each"
        if not len(found.lengths) and isinstance(column, torch.Tensor):
            return _moved(column[None][:0], 1, 1 + place, buffers)
        ends = np.concatenate([[0], np.cumsum(found.lengths)]).tolist()
        each = column if table.is_ragged[field] else [_stacked(column[low:high]) for low, high in pairwise(ends)]
        return [_moved(one, 0, place, buffers) for one in each]
    assert isinstance(sampling, Windows), "samples are windows"
    one = sampling.ranges[field]
    assert one is not None, "the field has steps"
    n_steps = len(one.offsets)
    if table.is_ragged[field]:
        return [
            _moved(_filled(steps, valid, sampling), 0, place, buffers)
            if not one.is_single
            else _filled(steps, valid, sampling)[0]
            for steps, valid in zip(column, _valid_of(found, len(column)), strict=True)
        ]
    if not isinstance(column, torch.Tensor):  # text
        if found.is_valid is not None and sampling.pad == "zeros":
            column = [
                value if valid else torch.zeros_like(value) if isinstance(value, torch.Tensor) else ""
                for value, valid in zip(column, found.is_valid.ravel().tolist(), strict=True)
            ]
        if one.is_single:
            return column
        return [_stacked(column[at : at + n_steps]) for at in range(0, len(column), n_steps)]
    if found.is_valid is not None and sampling.pad == "zeros" and not found.is_valid.all():
        column[torch.from_numpy(~found.is_valid.reshape(-1))] = 0
    if one.is_single:
        return column
    return _moved(column.view(-1, n_steps, *column.shape[1:]), 1, 1 + place, buffers)


def _stacked(steps: Column) -> Any:
    """Return steps that were decoded one by one as a tensor, if they have one shape."""
    if isinstance(steps, list) and steps and all(isinstance(one, torch.Tensor) for one in steps):
        return stacked(steps) if len({one.shape for one in steps}) == 1 else steps
    return steps


def _valid_of(found: FieldRows, n: int) -> Sequence[np.ndarray | None]:
    return [None] * n if found.is_valid is None else list(found.is_valid)


def _filled(steps: torch.Tensor, valid: np.ndarray | None, sampling: Windows) -> torch.Tensor:
    if valid is not None and sampling.pad == "zeros" and not valid.all():
        steps[torch.from_numpy(~valid)] = 0
    return steps


def _moved(steps: Column, axis: int, place: int, buffers: BufferPool) -> Column:
    """Return rows with the axis of steps at its place among the others."""
    if place == axis or not isinstance(steps, torch.Tensor):
        return steps
    moved = steps.movedim(axis, place)
    return buffers.tensor(tuple(moved.shape), moved.dtype).copy_(moved)


def mask_of_samples(found: FieldRows, n_samples: int, windows: Windows, field: int) -> torch.Tensor:
    """Return which steps of a field are no padding, with an entry for each sample."""
    one = windows.ranges[field]
    assert one is not None, "the field has steps"
    shape = (n_samples,) if one.is_single else (n_samples, len(one.offsets))
    if found.is_valid is None:
        return torch.ones(shape, dtype=torch.bool)
    return torch.from_numpy(found.is_valid.reshape(shape))


def places_columns(table: RowTable, asked: BatchRows) -> tuple[list[str], torch.Tensor]:
    """Return each sample's segment, by name, and its step, or the start of its patch along each axis that is cut."""
    assert asked.places is not None, "samples are rows"
    assert table.sampling is not None, "samples are rows"
    segments = table.sampling.segments
    steps: IntArray = asked.places.steps
    if segments.cut is not None:
        steps = steps + segments.cut[asked.places.segments]
    numbers, which = np.unique(segments.numbers_of(asked.places.segments), return_inverse=True)
    names = [table.segment_name(number) for number in numbers.tolist()]
    return [names[at] for at in which.tolist()], torch.from_numpy(steps.copy())

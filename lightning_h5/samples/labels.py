"""Which rows have a class among the steps of their target: class ids, or one-hot vectors along either axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5ValueError
from ..hdf5 import ArrayLayout, OpenOptions, kind_of
from ..readers import ArrayTarget, BlockSource, BulkTask, bulk_tasks
from ..types import IntArray
from .columns import Run, source_of
from .row_filters import Mask
from .row_table import RowTable

__all__ = ["LabelCriterion", "search_label"]

PIECE_BYTES = 4 << 20  # bytes of a target per task: long enough to pay for switching threads

TargetLayout = Literal["N", "NT", "NC", "NTC", "NCT"]
"""Axes of a target: N rows, T steps, C classes. Without C its values are class ids, with C they are one-hot."""


@dataclass(frozen=True)
class LabelCriterion:
    """A class that a row's target must have at a step that counts.

    Attributes:
        label: the class.
        target: the target's field in the table.
        valid: the field of the mask of steps that count, or None.
        layout: what the target's axes are, if the user gave it.
    """

    label: int
    target: int
    valid: int | None = None
    layout: str | None = None


def search_label(
    table: RowTable, wanted: LabelCriterion, rows: IntArray, options: OpenOptions, counters: Counters, run: Run
) -> Mask:
    """Return which of some rows have a label.

    Args:
        table: the files.
        wanted: the label.
        rows: the rows, in ascending order.
        options: how files are opened if the HDF5 library reads.
        counters: counts what is read.
        run: runs the tasks.

    Raises:
        H5ValueError: the target cannot have labels, or what its axes mean is in doubt.
    """
    fields = [wanted.target] if wanted.valid is None else [wanted.target, wanted.valid]
    target, *masks = (table.layouts[0][field] for field in fields)
    name = f"{target.key!r} in {target.path!r}"
    for layout in (target, *masks):
        if kind_of(layout.dtype) != "number":
            raise H5ValueError(
                f"label={wanted.label} was given, but {layout.key!r} in {layout.path!r} holds {layout.dtype}. Labels "
                "are numbers; filter text with `where`."
            )
    n_steps = masks[0].row_shape[0] if masks and len(masks[0].row_shape) == 1 else None
    possible = _layouts_possible(target.row_shape, wanted.layout, n_steps, name)
    search = _TargetSearch(wanted.label, len(rows), possible, name)
    tasks: list[BulkTask] = []
    files, local = table.locate(rows)
    for file in np.unique(files).tolist():
        first, last = np.searchsorted(files, [file, file + 1]).tolist()
        arrays = [table.layouts[file][field] for field in fields]
        tasks += _label_tasks(arrays, local[first:last], first, search, options, counters)
    run(tasks, "looking for the label")
    return search.mask()


def _label_tasks(
    arrays: Sequence[ArrayLayout],
    rows: IntArray,
    first: int,
    search: _TargetSearch,
    options: OpenOptions,
    counters: Counters,
) -> Iterator[BulkTask]:
    """Yield tasks that look at rows of one file, cut between chunks of the target."""
    sources = [source_of(array, options, counters) for array in arrays]
    n_together, row_bytes = sources[0].rows_per_block, arrays[0].row_bytes
    step = n_together * max(1, PIECE_BYTES // max(1, n_together * row_bytes))
    cuts = np.flatnonzero(np.diff(rows // step)) + 1
    for low, high in pairwise([0, *cuts.tolist(), len(rows)]):
        look = partial(_look_for_label, sources, arrays, rows[low:high], first + low, search)
        yield BulkTask((high - low) * row_bytes, step * row_bytes, look)


def _look_for_label(
    sources: Sequence[BlockSource],
    arrays: Sequence[ArrayLayout],
    rows: IntArray,
    place: int,
    search: _TargetSearch,
) -> None:
    read = []
    for source, array in zip(sources, arrays, strict=True):
        memory = np.empty((len(rows), *array.row_shape), dtype=array.dtype)
        for task in bulk_tasks(source, array, rows, ArrayTarget(memory), 0):
            task.run()
        read.append(memory)
    search.look(place, *read)


def _layouts_possible(
    row_shape: tuple[int, ...], given: str | None, n_steps: int | None, name: str
) -> list[TargetLayout]:
    """Return what the axes of a target may mean, by their lengths.

    Two axes are rows and steps: class ids. Three are one-hot along either axis, which follows from their values.

    Args:
        row_shape: of the target.
        given: the user's layout, or None.
        n_steps: steps of a mask of each row, if there is one.
        name: of the array, for messages.

    Raises:
        H5ValueError: the shape has no such meaning.
    """
    of_shape: dict[int, list[TargetLayout]] = {0: ["N"], 1: ["NT", "NC"], 2: ["NTC", "NCT"]}
    possible = of_shape.get(len(row_shape), [])
    if given is not None:
        if given not in possible:
            raise H5ValueError(
                f"the target {name} was declared to have the axes {given!r}, but its rows have the shape {row_shape}. "
                f"Pass one of {', '.join(map(repr, get_args(TargetLayout)))} that has {len(row_shape) + 1} axes."
            )
        return [one for one in possible if one == given]
    if not possible:
        raise H5ValueError(
            f"the target {name} has rows of shape {row_shape}; a label is searched in rows of up to two axes, steps "
            "and classes. Pass a function as `where`, or rows you chose as `indices`."
        )
    if len(row_shape) == 1:
        return ["NT"]
    if n_steps is not None and row_shape[0] != row_shape[1]:
        possible = [one for one in possible if row_shape[0 if one == "NTC" else 1] == n_steps] or possible
    return possible


class _TargetSearch:
    """Looks for a class in targets, a piece at a time, under all meanings that are left; safe to use from threads.

    Args:
        label: the class.
        n_rows: rows to search.
        possible: what the target's axes may mean.
        name: of the array, for messages.
    """

    def __init__(self, label: int, n_rows: int, possible: list[TargetLayout], name: str) -> None:
        self._label, self._name = label, name
        self._found: dict[TargetLayout, Mask] = {one: np.zeros(n_rows, dtype=np.bool_) for one in possible}
        self._why_not: dict[TargetLayout, str] = {}

    def look(self, start: int, target: npt.NDArray[Any], valid: npt.NDArray[Any] | None = None) -> None:
        """Search rows.

        Args:
            start: place of the first of them.
            target: shape ``(n, *row_shape)``.
            valid: shape ``(n, n_steps)`` or ``(n,)``; steps at which it is zero do not count.
        """
        for layout, found in self._found.items():
            if layout in self._why_not:
                continue
            steps = self._steps(layout, target)
            if steps is None:
                continue
            if valid is not None:
                steps = steps & self._valid(layout, steps, valid)
            found[start : start + len(target)] = steps.any(axis=1) if steps.ndim > 1 else steps

    def _steps(self, layout: TargetLayout, target: npt.NDArray[Any]) -> Mask | None:
        """Return at which steps the class is; None if the values do not have this meaning."""
        if "C" not in layout:
            return np.asarray(target == self._label, dtype=np.bool_)
        axis = layout.index("C")
        if not 0 <= self._label < target.shape[axis]:
            self._why_not[layout] = f"it would have {target.shape[axis]} classes, from 0"
            return None
        is_one = target == 1
        if not (is_one | (target == 0)).all():
            self._why_not[layout] = "it has values other than 0 and 1"
            return None
        if (is_one.sum(axis=axis) > 1).any():
            self._why_not[layout] = "steps would have several classes"
            return None
        return np.asarray(np.take(is_one, self._label, axis=axis), dtype=np.bool_)

    def _valid(self, layout: TargetLayout, steps: Mask, valid: npt.NDArray[Any]) -> Mask:
        counts = np.asarray(valid != 0, dtype=np.bool_)
        if counts.ndim < steps.ndim:
            counts = counts.reshape(len(counts), *[1] * (steps.ndim - 1))
        elif counts.shape != steps.shape:
            raise H5ValueError(
                f"valid_mask has rows of shape {valid.shape[1:]}, and the target {self._name} has rows of "
                f"{steps.shape[1] if steps.ndim > 1 else 'no'} steps (its axes are {layout}). Name an array with one "
                "value per step, or one per row."
            )
        return counts

    def mask(self) -> Mask:
        """Return which rows have the class at a step that counts.

        Raises:
            H5ValueError: the values have none of the meanings, or several that differ.
        """
        left = [layout for layout in self._found if layout not in self._why_not]
        if not left:
            why = "; ".join(f"as {layout!r} {reason}" for layout, reason in self._why_not.items())
            raise H5ValueError(
                f"label={self._label} was given, but the target {self._name} cannot be searched: {why}. Declare "
                "its axes with field_map={'target': {'key': ..., 'layout': 'NTC'}}, or pass a function as `where`."
            )
        first = self._found[left[0]]
        if any((self._found[other] != first).any() for other in left[1:]):
            raise H5ValueError(
                f"label={self._label} was given, but the target {self._name} could be one-hot along either axis. "
                "Pass field_map={'target': {'key': ..., 'layout': 'NTC'}} (rows, steps, classes) or 'NCT'."
            )
        return first

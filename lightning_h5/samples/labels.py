"""Search for rows with a class at some step of their target. Targets are class ids, or one-hot along either axis."""

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
from .row_filters import Mask, values_text
from .row_table import RowTable

__all__ = ["LabelCriterion", "classes_of", "search_label"]

PIECE_BYTES = 4 << 20  # bytes of a target per task: long enough to pay for switching threads

TargetLayout = Literal["N", "NT", "NC", "NTC", "NCT"]
"""Axes of a target: N rows, T steps, C classes. Without C its values are class ids, with C they are one-hot."""


@dataclass(frozen=True)
class LabelCriterion:
    """A class that a row's target must have at a valid step.

    Attributes:
        label: the class.
        target: number of the target's field in the table.
        valid: number of the field with the mask of valid steps; None if all steps are valid.
        layout: the axes of the target, if the user declared them.
    """

    label: int
    target: int
    valid: int | None = None
    layout: str | None = None


def search_label(
    table: RowTable, criterion: LabelCriterion, rows: IntArray, options: OpenOptions, counters: Counters, run: Run
) -> Mask:
    """Return a mask of the rows that have a label.

    Args:
        table: the files.
        criterion: the label.
        rows: the rows, in ascending order.
        options: how files are opened if the HDF5 library reads.
        counters: count the reads.
        run: runs the tasks.

    Raises:
        H5ValueError: the target cannot have labels, or the meaning of its axes is ambiguous.
    """
    fields = [criterion.target] if criterion.valid is None else [criterion.target, criterion.valid]
    target, *masks = (table.layouts[0][field] for field in fields)
    name = f"{target.key!r} in {target.path!r}"
    for layout in (target, *masks):
        if kind_of(layout.dtype) != "number":
            raise H5ValueError(
                f"label={criterion.label} was given, but {layout.key!r} in {layout.path!r} holds "
                f"{kind_of(layout.dtype)}. Labels are numbers; filter text with where={{{layout.key!r}: ...}}."
            )
    n_steps = masks[0].row_shape[0] if masks and len(masks[0].row_shape) == 1 else None
    possible = _layouts_possible(target.row_shape, criterion.layout, n_steps, name)
    search = _TargetSearch(criterion.label, len(rows), possible, name)
    tasks: list[BulkTask] = []
    files, local = table.locate(rows)
    for file in np.unique(files).tolist():
        first, last = np.searchsorted(files, [file, file + 1]).tolist()
        arrays = [table.layouts[file][field] for field in fields]
        tasks += _label_tasks(arrays, local[first:last], first, search, options, counters)
    run(tasks, "looking for the label")
    return search.mask()


def classes_of(
    table: RowTable, criterion: LabelCriterion, rows: IntArray, options: OpenOptions, counters: Counters, run: Run
) -> str:
    """Return the classes of some rows as text, for a message (see ``search_label``)."""
    target = table.layouts[0][criterion.target]
    classes = _Classes(target.row_shape)
    files, local = table.locate(rows)
    tasks: list[BulkTask] = []
    for file in np.unique(files).tolist():
        first, last = np.searchsorted(files, [file, file + 1]).tolist()
        arrays = [table.layouts[file][criterion.target]]
        tasks += _label_tasks(arrays, local[first:last], first, classes, options, counters)
    run(tasks, "looking for classes")
    return classes.text()


class _Classes:
    """Collects the classes of targets; the same calls as ``_TargetSearch``.

    Args:
        row_shape: of the target.
    """

    def __init__(self, row_shape: tuple[int, ...]) -> None:
        self._row_shape, self._values = row_shape, [np.empty(0)]

    def look(self, start: int, target: npt.NDArray[Any], valid: npt.NDArray[Any] | None = None) -> None:
        """Note the classes of rows."""
        self._values.append(np.unique(target))

    def text(self) -> str:
        """Return the classes as text."""
        if len(self._row_shape) > 1:
            return f"one-hot in rows of shape {self._row_shape}"
        values = np.unique(np.concatenate(self._values))
        return values_text(values.astype(np.int64) if (values == np.round(values)).all() else values)


def _label_tasks(
    arrays: Sequence[ArrayLayout],
    rows: IntArray,
    first: int,
    search: _TargetSearch | _Classes,
    options: OpenOptions,
    counters: Counters,
) -> Iterator[BulkTask]:
    """Yield tasks that search rows of one file, cut between chunks of the target."""
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
    search: _TargetSearch | _Classes,
) -> None:
    values = []
    for source, array in zip(sources, arrays, strict=True):
        memory = np.empty((len(rows), *array.row_shape), dtype=array.dtype)
        for task in bulk_tasks(source, array, rows, ArrayTarget(memory), 0):
            task.run()
        values.append(memory)
    search.look(place, *values)


def _layouts_possible(
    row_shape: tuple[int, ...], declared: str | None, n_steps: int | None, name: str
) -> list[TargetLayout]:
    """Return the possible meanings of the axes of a target, by their lengths.

    Two axes are rows and steps: class ids. Three axes are one-hot along one of the last two; the values tell which one.

    Args:
        row_shape: of the target.
        declared: the user's layout, or None.
        n_steps: length of a row of the mask of valid steps, if there is one.
        name: of the array, for messages.

    Raises:
        H5ValueError: the shape does not fit the user's layout, or any layout.
    """
    of_shape: dict[int, list[TargetLayout]] = {0: ["N"], 1: ["NT", "NC"], 2: ["NTC", "NCT"]}
    possible = of_shape.get(len(row_shape), [])
    if declared is not None:
        if declared not in possible:
            raise H5ValueError(
                f"the target {name} was declared to have the axes {declared!r}, but its rows have the shape "
                f"{row_shape}. Pass one of {', '.join(map(repr, get_args(TargetLayout)))} that has "
                f"{len(row_shape) + 1} axes."
            )
        return [layout for layout in possible if layout == declared]
    if not possible:
        raise H5ValueError(
            f"the target {name} has rows of shape {row_shape}; a label is searched in rows of up to two axes, steps "
            "and classes. Pass a function as `where`, or rows you chose as `indices`."
        )
    if len(row_shape) == 1:
        return ["NT"]
    if n_steps is not None and row_shape[0] != row_shape[1]:
        with_steps = [layout for layout in possible if row_shape[0 if layout == "NTC" else 1] == n_steps]
        possible = with_steps or possible
    return possible


class _TargetSearch:
    """Searches targets for a class, a piece at a time, for each possible layout. Threads may call ``look`` at once.

    Args:
        label: the class.
        n_rows: number of rows to search.
        possible: the possible layouts of the target.
        name: of the array, for messages.
    """

    def __init__(self, label: int, n_rows: int, possible: list[TargetLayout], name: str) -> None:
        self._label, self._name = label, name
        self._masks: dict[TargetLayout, Mask] = {layout: np.zeros(n_rows, dtype=np.bool_) for layout in possible}
        self._refusals: dict[TargetLayout, str] = {}  # reasons against a layout

    def look(self, start: int, target: npt.NDArray[Any], valid: npt.NDArray[Any] | None = None) -> None:
        """Search rows.

        Args:
            start: position of the first row.
            target: shape ``(n, *row_shape)``.
            valid: shape ``(n, n_steps)`` or ``(n,)``; zero for steps that are not valid.
        """
        for layout, mask in self._masks.items():
            if layout in self._refusals:
                continue
            steps = self._steps(layout, target)
            if steps is None:
                continue
            if valid is not None:
                steps = steps & self._valid(layout, steps, valid)
            mask[start : start + len(target)] = steps.any(axis=1) if steps.ndim > 1 else steps

    def _steps(self, layout: TargetLayout, target: npt.NDArray[Any]) -> Mask | None:
        """Return a mask of steps with the class; None if the values do not fit the layout."""
        if "C" not in layout:
            return np.asarray(target == self._label, dtype=np.bool_)
        axis = layout.index("C")
        if not 0 <= self._label < target.shape[axis]:
            self._refusals[layout] = f"it would have {target.shape[axis]} classes, from 0"
            return None
        is_one = target == 1
        if not (is_one | (target == 0)).all():
            self._refusals[layout] = "it has values other than 0 and 1"
            return None
        if (is_one.sum(axis=axis) > 1).any():
            self._refusals[layout] = "steps would have several classes"
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
        """Return a mask of the rows with the class at a valid step.

        Raises:
            H5ValueError: the values fit none of the layouts, or several with different results.
        """
        possible = [layout for layout in self._masks if layout not in self._refusals]
        if not possible:
            reasons = "; ".join(f"as {layout!r} {reason}" for layout, reason in self._refusals.items())
            raise H5ValueError(
                f"label={self._label} was given, but the target {self._name} cannot be searched: {reasons}. Declare "
                "its axes with field_map={'target': {'key': ..., 'layout': 'NTC'}}, which a data module takes as "
                "fields, or pass a function as `where`."
            )
        first = self._masks[possible[0]]
        if any((self._masks[layout] != first).any() for layout in possible[1:]):
            raise H5ValueError(
                f"label={self._label} was given, but the target {self._name} could be one-hot along either axis. "
                "Pass field_map={'target': {'key': ..., 'layout': 'NTC'}} (rows, steps, classes) or 'NCT', which a "
                "data module takes as fields."
            )
        return first

"""Rows that pass a user's criteria: columns are read once, whole, and targets a piece at a time, on all cores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..errors import H5ValueError, listing
from ..hdf5 import ArrayLayout, OpenOptions, kind_of
from ..readers import ArrayTarget, BulkTask, bulk_tasks, do_tasks, open_source, run_with_progress, usable_cores
from ..types import IntArray
from .catalog import RUN_BYTES, FileCatalog
from .column_values import Do, column_tasks, decoded, read_columns
from .labels import TargetSearch, layouts_possible
from .row_filters import Criterion
from .visits import current_visits

__all__ = ["LabelCriterion", "NoRowPassesError", "Selection", "select_rows"]

PIECE_BYTES = 4 << 20  # of a target, of a task: long enough to pay for a thread's turn


class NoRowPassesError(H5ValueError):
    """No row passes the filters."""


@dataclass(frozen=True)
class LabelCriterion:
    """A class that a row's target must have at a step that counts.

    Attributes:
        label: the class.
        target: field of the table with the target.
        valid: field of the table with the mask of steps that count, or None.
        layout: what the target's axes are, where the user said so.
    """

    label: int
    target: int
    valid: int | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Selection:
    """What is asked of rows.

    Attributes:
        criteria: conditions on columns.
        label: the class to look for, or None.
        fields: for the name of each column its field in the table, as far as it has one.
        keys: for names that arrays have in files under another name, that one.
    """

    criteria: Sequence[Criterion]
    label: LabelCriterion | None
    fields: Mapping[str, int]
    keys: Mapping[str, str]


def select_rows(
    table: FileCatalog,
    selection: Selection,
    rows: IntArray | None,
    options: OpenOptions,
    counters: Counters,
    progress: Callable[[], None],
    shows_progress: bool = True,
) -> IntArray:
    """Rows that pass, in ascending order.

    Args:
        table: the files, with an array for each field that the selection names.
        selection: what is asked: something.
        rows: rows to choose among, in any order; None for all. Those that pass keep their order.
        options: how files are opened where the HDF5 library reads.
        counters: where bytes are counted.
        progress: is called as it goes on.
        shows_progress: whether the user sees how far it is.

    Raises:
        H5KeyError: an array is not there.
        H5ValueError: no row passes; the text says how many each condition keeps.
        H5FileError: a file cannot be read.
    """
    mask = np.ones(table.n_rows, dtype=np.bool_)
    kept: dict[str, int] = {}
    seen: set[Any] = set()
    do = partial(run_with_progress, shows_bar=shows_progress, report=lambda _: progress())
    _check_columns(table, selection)
    names = list(dict.fromkeys(one.column for one in selection.criteria if one.column is not None))
    fields = [selection.fields[name] for name in names]
    read = read_columns(table, fields, options, counters, do)
    for file, start in enumerate(table.starts[:-1].tolist()):
        stop = int(table.starts[file + 1])
        layouts = table.layouts[file]
        here = {
            name: decoded(layouts[field], column) for name, field, column in zip(names, fields, read[file], strict=True)
        }
        columns = _FileColumns(table, file, here, selection, options, counters)
        for criterion in selection.criteria:
            passes = criterion.mask(columns, stop - start)
            kept[criterion.text] = kept.get(criterion.text, 0) + int(passes.sum())
            mask[start:stop] &= passes
            if criterion.expected and criterion.column is not None:
                seen |= criterion.expected.intersection(columns[criterion.column][passes])
    if selection.label is not None and mask.any():
        found = np.flatnonzero(mask)
        has_label = _search_label(table, selection.label, found, options, counters, do)
        kept[f"label={selection.label.label}"] = int(has_label.sum())
        mask[found[~has_label]] = False
    chosen = np.flatnonzero(mask) if rows is None else rows[mask[rows]]
    if not len(chosen):
        each = "; ".join(f"{text} keeps {n:,}" for text, n in kept.items())
        of = "" if rows is None else f" among the {len(rows):,} that `indices` names"
        raise NoRowPassesError(f"no row of {table.n_rows:,} passes all filters{of}: {each}. Loosen one of them.")
    expected = frozenset[str]().union(*(one.expected for one in selection.criteria))
    if absent := sorted(expected - seen):  # a typing error would make the data smaller in silence
        warnings.warn(f"filters name {listing(absent)}, which no row has.", stacklevel=4)
    return chosen


class _FileColumns(Mapping[str, npt.NDArray[Any]]):
    """The columns of a file; those that a function asks for are read when it does."""

    def __init__(
        self,
        table: FileCatalog,
        file: int,
        read: dict[str, npt.NDArray[Any]],
        selection: Selection,
        options: OpenOptions,
        counters: Counters,
    ) -> None:
        self._table, self._file, self._read, self._selection = table, file, read, selection
        self._options, self._counters = options, counters

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._read:
            layout = self._layout(name)
            n_rows = int(np.diff(self._table.starts)[self._file])
            if layout.row_shape or layout.n_rows != n_rows:
                raise _no_column(layout, n_rows)
            tasks, column = column_tasks(layout, self._options, self._counters)
            do_tasks(tasks, usable_cores(), lambda _: None)
            self._read[name] = decoded(layout, column)
        return self._read[name]

    def _layout(self, name: str) -> ArrayLayout:
        if name in self._selection.fields:
            return self._table.layouts[self._file][self._selection.fields[name]]
        key = self._selection.keys.get(name, name)
        layout = current_visits().describe_beside(self._table.layouts[self._file][0], key, self._options)
        return layout.guarded(self._table.guards[self._file])

    def __iter__(self) -> Iterator[str]:
        layouts = self._table.layouts[self._file]
        return (name for name, field in self._selection.fields.items() if not layouts[field].row_shape)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and len(self[name]) >= 0
        except (KeyError, H5ValueError):  # of no such array, or of one with other axes
            return False

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _no_column(layout: ArrayLayout, n_rows: int) -> H5ValueError:
    return H5ValueError(
        f"a filter looks at {layout.key!r} in {layout.path!r}, which has the shape "
        f"{(layout.n_rows, *layout.row_shape)}; rows are told apart by one value each. "
        f"Name an array of shape ({n_rows},)."
    )


def _check_columns(table: FileCatalog, selection: Selection) -> None:
    for criterion in selection.criteria:
        if criterion.column is not None:
            layout = table.layouts[0][selection.fields[criterion.column]]
            if layout.row_shape:
                raise _no_column(layout, layout.n_rows)


def _search_label(
    table: FileCatalog,
    wanted: LabelCriterion,
    rows: IntArray,
    options: OpenOptions,
    counters: Counters,
    do: Do,
) -> npt.NDArray[np.bool_]:
    """Which of some rows have the label, of rows in ascending order."""
    target = table.layouts[0][wanted.target]
    where = f"{target.key!r} in {target.path!r}"
    valid = None if wanted.valid is None else table.layouts[0][wanted.valid]
    for layout in (target, valid):
        if layout is not None and kind_of(layout.dtype) != "number":
            raise H5ValueError(
                f"label={wanted.label} was asked for, and {layout.key!r} in {layout.path!r} holds {layout.dtype}. "
                "A class is looked for among numbers; filter text with `where`."
            )
    n_steps = valid.row_shape[0] if valid is not None and len(valid.row_shape) == 1 else None
    possible = layouts_possible(target.row_shape, wanted.layout, n_steps, where)
    search = TargetSearch(wanted.label, len(rows), possible, where)
    tasks: list[BulkTask] = []
    files, local = table.locate(rows)
    for file in np.unique(files).tolist():
        first, last = np.searchsorted(files, [file, file + 1]).tolist()
        fields = [wanted.target] if wanted.valid is None else [wanted.target, wanted.valid]
        arrays = [table.layouts[file][field] for field in fields]
        tasks += _label_tasks(arrays, local[first:last], first, search, options, counters)
    do(tasks, "looking for the label")
    return search.mask()


def _label_tasks(
    arrays: Sequence[ArrayLayout],
    rows: IntArray,
    first: int,
    search: TargetSearch,
    options: OpenOptions,
    counters: Counters,
) -> Iterator[BulkTask]:
    """Tasks that look at rows of one file, cut where chunks of the target are."""
    target = arrays[0]
    runs = [max(1, RUN_BYTES // max(1, array.row_bytes)) for array in arrays]
    sources = [open_source(array, options, run, counters) for array, run in zip(arrays, runs, strict=True)]
    block = sources[0].rows_per_block
    step = block * max(1, PIECE_BYTES // max(1, block * target.row_bytes))
    cuts = np.flatnonzero(np.diff(rows // step)) + 1
    bounds = [0, *cuts.tolist(), len(rows)]
    for low, high in pairwise(bounds):
        piece = rows[low:high]

        def look(piece: IntArray = piece, place: int = first + low) -> None:
            read = []
            for source, array in zip(sources, arrays, strict=True):
                memory = np.empty((len(piece), *array.row_shape), dtype=array.dtype)
                for task in bulk_tasks(source, array, piece, ArrayTarget(memory), 0):
                    task.run()
                read.append(memory)
            search.look(place, *read)

        yield BulkTask(len(piece) * target.row_bytes, step * target.row_bytes, look)

"""Rows that pass a user's criteria. They are searched on all cores, once on each machine."""

from __future__ import annotations

import base64
import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..catalog import Catalog, decoded
from ..counters import Counters
from ..distributed import OncePerNode, own_store
from ..errors import H5ValueError, listing
from ..hdf5 import ArrayLayout, OpenOptions
from ..order import resolve_replica
from ..readers import do_tasks, run_with_progress, usable_cores
from ..types import IntArray
from .columns import column_tasks, read_columns
from .labels import LabelCriterion, classes_of, search_label
from .row_filters import Criterion, Mask, NoRowPassesError, values_text
from .row_table import RowTable

__all__ = ["Selection"]

MAX_ROWS = 10_000
"""Number of rows whose values are listed in a message if none passes."""

MAX_SENT = 4 << 20
"""Largest number of letters to send through the ranks' store; torch's store refuses values of more than 8 MiB."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows of files that pass criteria.

    Attributes:
        catalog: of the files.
        table: the files, with an array for each field that the criteria name.
        options: how files are opened if the HDF5 library reads.
        criteria: conditions on columns.
        label: the class to search for, or None.
        fields: number of the field in the table, by the column's name, for columns in the table.
        keys: arrays by the names of columns, if the files have other names for them.
        among: rows to choose from, in any order; None for all. Rows that pass keep their order.
    """

    catalog: Catalog
    table: RowTable
    options: OpenOptions
    criteria: Sequence[Criterion]
    label: LabelCriterion | None
    fields: Mapping[str, int]
    keys: Mapping[str, str]
    among: IntArray | None

    @property
    def passes_all(self) -> bool:
        """Whether there are no criteria."""
        return not self.criteria and self.label is None

    def digest(self) -> str | None:
        """Return a digest of the state of the files, and of all criteria.

        None if one is a function: whether it is the same in another process is unknown.
        """
        if any(criterion.key is None for criterion in self.criteria):
            return None
        arrays = [array.key for array in self.table.layouts[0]]
        guards = [file for guard in self.table.guards for file in (guard, *guard.others)]
        files = [[guard.n_bytes, guard.mtime_ns] for guard in guards]
        conditions = [[condition.key, arrays[self.fields[condition.column or ""]]] for condition in self.criteria]
        label: list[Any] = []
        if self.label is not None:
            valid = None if self.label.valid is None else arrays[self.label.valid]
            label = [self.label.label, arrays[self.label.target], valid, self.label.layout]
        digest = hashlib.sha256(json.dumps([self.table.identity, files, conditions, label]).encode())
        if self.among is not None:
            digest.update(b"among" + self.among.tobytes())
        return digest.hexdigest()[:32]

    def rows(self, counters: Counters) -> IntArray | None:
        """Return the rows that pass, in the order of ``among`` or else ascending; None if all rows are used.

        One process of each machine searches for all of them, if it is certain that all have the same criteria.

        Args:
            counters: count the reads.

        Raises:
            H5Error: see ``find``.
        """
        if self.passes_all:
            return self.among
        # The digest requires opening each file.
        name = self.digest() if own_store() is not None else None
        if name is None:  # each rank calls its own function, and the ranks compare the results
            passes = self.find(counters, lambda: None, shows_progress=resolve_replica().rank == 0)
        else:
            passes = self._find_once(name, counters)
        return np.flatnonzero(passes) if self.among is None else self.among[passes]

    def _find_once(self, name: str, counters: Counters) -> Mask:
        question = OncePerNode(f"rows that pass/{name}")
        n_rows = self.table.n_rows if self.among is None else len(self.among)
        if not question.is_first and (message := question.value()) is not None:
            packed = np.frombuffer(zlib.decompress(base64.b64decode(message)), np.uint8)
            return np.unpackbits(packed, count=n_rows).view(np.bool_)
        message = None
        try:
            shows_progress = question.has_others or (question.is_first and resolve_replica().rank == 0)
            passes = self.find(counters, question.progress, shows_progress=shows_progress)
            if question.has_others:
                message = base64.b64encode(zlib.compress(np.packbits(passes).tobytes(), 1)).decode()
        finally:
            if question.has_others:
                question.publish(message if message is None or len(message) <= MAX_SENT else None)
        return passes

    def find(self, counters: Counters, progress: Callable[[], None], *, shows_progress: bool = True) -> Mask:
        """Return a mask of the rows that pass, of ``among`` or of all.

        Args:
            counters: count the reads.
            progress: called from time to time during the search.
            shows_progress: whether to show a progress bar.

        Raises:
            H5KeyError: an array is missing.
            H5ValueError: no row passes; the message says how many rows each condition keeps.
            H5FileError: a file cannot be read.
        """
        table = self.table
        run = partial(run_with_progress, shows_bar=shows_progress, report=lambda _: progress())
        names = list(dict.fromkeys(criterion.column for criterion in self.criteria if criterion.column is not None))
        for layout in (table.layouts[0][self.fields[name]] for name in names):
            if layout.row_shape:
                raise _no_column(layout, layout.n_rows)
        fields = [self.fields[name] for name in names]
        by_file = read_columns(self.catalog, table, fields, self.options, counters, run)
        mask = np.ones(table.n_rows, dtype=np.bool_)
        counts: dict[str, int] = {}
        present: set[Any] = set()  # of the values that criteria expect
        values_of = dict[str, npt.NDArray[Any]]()  # the first values of columns, of criteria that no row has passed
        for file, values in enumerate(by_file):
            columns = _FileColumns(self, file, dict(zip(names, values, strict=True)), counters)
            for criterion in self.criteria:
                is_kept = criterion.mask(columns, columns.n_rows)
                counts[criterion.text] = counts.get(criterion.text, 0) + int(is_kept.sum())
                if criterion.column is not None and not counts[criterion.text]:
                    values_of.setdefault(criterion.text, columns[criterion.column][:MAX_ROWS])
                mask[table.starts[file] : table.starts[file + 1]] &= is_kept
                if criterion.expected and criterion.column is not None:
                    present |= criterion.expected.intersection(columns[criterion.column][is_kept])
        if self.label is not None and mask.any():
            rows = np.flatnonzero(mask)
            has_label = search_label(table, self.label, rows, self.options, counters, run)
            counts[f"label={self.label.label}"] = int(has_label.sum())
            mask[rows[~has_label]] = False
        among_mask = mask if self.among is None else mask[self.among]
        if not among_mask.any():
            existing = {
                text: f" (the {'' if len(values) == table.n_rows else 'first '}values are {values_text(values)})"
                for text, values in values_of.items()
                if not counts[text]
            }
            if self.label is not None and not counts.get(text := f"label={self.label.label}", 1):
                rows = np.arange(min(table.n_rows, MAX_ROWS))
                classes = classes_of(table, self.label, rows, self.options, counters, run)
                of_rows = "" if len(rows) == table.n_rows else f" of the first {len(rows):,} rows"
                existing[text] = f" (the classes{of_rows} are {classes})"
            effects = "; ".join(f"{text} keeps {n:,}{existing.get(text, '')}" for text, n in counts.items())
            of = "" if self.among is None else f" among the {len(self.among):,} that `indices` names"
            raise NoRowPassesError(f"no row of {table.n_rows:,} passes all filters{of}: {effects}. Loosen one of them.")
        expected = frozenset[str]().union(*(criterion.expected for criterion in self.criteria))
        if absent := sorted(expected - present):  # a typo would silently drop rows
            warnings.warn(f"filters name {listing(absent)}, which no row has.", stacklevel=4)
        return among_mask


class _FileColumns(Mapping[str, npt.NDArray[Any]]):
    """The columns of a file. Columns that a function looks up are read then.

    Args:
        selection: the criteria.
        file: number of the file.
        columns: columns that were read before, as stored.
        counters: count the reads.
    """

    def __init__(
        self, selection: Selection, file: int, columns: Mapping[str, npt.NDArray[Any]], counters: Counters
    ) -> None:
        self._selection, self._counters = selection, counters
        self._layouts, self._guard = selection.table.layouts[file], selection.table.guards[file]
        self._columns = {
            name: decoded(self._layouts[selection.fields[name]], column, selection.options)
            for name, column in columns.items()
        }
        self.n_rows = int(np.diff(selection.table.starts)[file])

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._columns:
            layout = self._layout(name)
            if layout.row_shape or layout.n_rows != self.n_rows:
                raise _no_column(layout, self.n_rows)
            tasks, column = column_tasks(layout, self._selection.options, self._counters)
            do_tasks(tasks, usable_cores(), lambda _: None)
            self._columns[name] = decoded(layout, column, self._selection.options)
        return self._columns[name]

    def _layout(self, name: str) -> ArrayLayout:
        selection, first = self._selection, self._layouts[0]
        if name in selection.fields:
            layout: ArrayLayout = self._layouts[selection.fields[name]]
            return layout
        # Described together with an earlier array, so that both have the same number of rows in a growing file.
        keys = [selection.keys.get(name, name), *([first.key] if selection.options.swmr else [])]
        return selection.catalog.describe(first.path, keys, selection.options)[1][0].guarded(self._guard)

    def __iter__(self) -> Iterator[str]:
        return (name for name, field in self._selection.fields.items() if not self._layouts[field].row_shape)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and len(self[name]) >= 0
        except (KeyError, H5ValueError):  # the array is missing, or has other axes
            return False

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _no_column(layout: ArrayLayout, n_rows: int) -> H5ValueError:
    return H5ValueError(
        f"a filter looks at {layout.key!r} in {layout.path!r}, which has the shape "
        f"{(layout.n_rows, *layout.row_shape)}; a filter needs one value per row. "
        f"Name an array of shape ({n_rows},)."
    )

"""Rows that pass a user's criteria: found on all cores, once on each machine."""

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
from .labels import LabelCriterion, search_label
from .row_filters import Criterion, Mask, NoRowPassesError
from .row_table import RowTable

__all__ = ["Selection"]

MAX_SENT = 4 << 20
"""Letters that go through the ranks' store at most; torch's refuses values of more than 8 MiB."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows of files that pass criteria.

    Attributes:
        catalog: of the files.
        table: the files, with an array for each field that the criteria name.
        options: how files are opened if the HDF5 library reads.
        criteria: conditions on columns.
        label: the class to look for, or None.
        fields: the field in the table of each column's name, as far as it has one.
        keys: the arrays that names stand for, if these are called otherwise in the files.
        among: rows to choose among, in any order; None for all. Those that pass keep their order.
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
        """Whether nothing is asked of rows."""
        return not self.criteria and self.label is None

    def digest(self) -> str | None:
        """Return a digest of the files as they are, and of all that is asked of them.

        None if a function decides: whether it is the same in another process is unknown.
        """
        if any(one.key is None for one in self.criteria):
            return None
        arrays = [array.key for array in self.table.layouts[0]]
        files = [[one.n_bytes, one.mtime_ns] for guard in self.table.guards for one in (guard, *guard.others)]
        asked = [[one.key, arrays[self.fields[one.column or ""]]] for one in self.criteria]
        label: list[Any] = []
        if (wanted := self.label) is not None:
            valid = None if wanted.valid is None else arrays[wanted.valid]
            label = [wanted.label, arrays[wanted.target], valid, wanted.layout]
        digest = hashlib.sha256(json.dumps([self.table.identity, files, asked, label]).encode())
        if self.among is not None:
            digest.update(b"among" + self.among.tobytes())
        return digest.hexdigest()[:32]

    def rows(self, counters: Counters) -> IntArray | None:
        """Return the rows that pass, ascending unless ``among`` has another order; None if nothing is asked of rows.

        One process of each machine finds them for all, as far as they know that all of them ask for the same.

        Args:
            counters: counts what is read.

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
            passes = self._found_once(name, counters)
        return np.flatnonzero(passes) if self.among is None else self.among[passes]

    def _found_once(self, name: str, counters: Counters) -> Mask:
        question = OncePerNode(f"rows that pass/{name}")
        n_rows = self.table.n_rows if self.among is None else len(self.among)
        if not question.is_first and (sent := question.value()) is not None:
            packed = np.frombuffer(zlib.decompress(base64.b64decode(sent)), np.uint8)
            return np.unpackbits(packed, count=n_rows).view(np.bool_)
        sent = None
        try:
            shows_progress = question.has_others or (question.is_first and resolve_replica().rank == 0)
            passes = self.find(counters, question.progress, shows_progress=shows_progress)
            if question.has_others:
                sent = base64.b64encode(zlib.compress(np.packbits(passes).tobytes(), 1)).decode()
        finally:
            if question.has_others:
                question.publish(sent if sent is None or len(sent) <= MAX_SENT else None)
        return passes

    def find(self, counters: Counters, progress: Callable[[], None], *, shows_progress: bool = True) -> Mask:
        """Return which rows pass, of ``among`` or of all.

        Args:
            counters: counts what is read.
            progress: is called as it goes on.
            shows_progress: whether the user sees how far it is.

        Raises:
            H5KeyError: an array is missing.
            H5ValueError: no row passes; the text has how many each condition keeps.
            H5FileError: a file cannot be read.
        """
        table = self.table
        run = partial(run_with_progress, shows_bar=shows_progress, report=lambda _: progress())
        names = list(dict.fromkeys(one.column for one in self.criteria if one.column is not None))
        for layout in (table.layouts[0][self.fields[name]] for name in names):
            if layout.row_shape:
                raise _no_column(layout, layout.n_rows)
        read = read_columns(self.catalog, table, [self.fields[name] for name in names], self.options, counters, run)
        mask = np.ones(table.n_rows, dtype=np.bool_)
        kept: dict[str, int] = {}
        seen: set[Any] = set()
        for file, values in enumerate(read):
            columns = _FileColumns(self, file, dict(zip(names, values, strict=True)), counters)
            for criterion in self.criteria:
                is_kept = criterion.mask(columns, columns.n_rows)
                kept[criterion.text] = kept.get(criterion.text, 0) + int(is_kept.sum())
                mask[table.starts[file] : table.starts[file + 1]] &= is_kept
                if criterion.expected and criterion.column is not None:
                    seen |= criterion.expected.intersection(columns[criterion.column][is_kept])
        if self.label is not None and mask.any():
            found = np.flatnonzero(mask)
            has_label = search_label(table, self.label, found, self.options, counters, run)
            kept[f"label={self.label.label}"] = int(has_label.sum())
            mask[found[~has_label]] = False
        chosen = mask if self.among is None else mask[self.among]
        if not chosen.any():
            each = "; ".join(f"{text} keeps {n:,}" for text, n in kept.items())
            of = "" if self.among is None else f" among the {len(self.among):,} that `indices` names"
            raise NoRowPassesError(f"no row of {table.n_rows:,} passes all filters{of}: {each}. Loosen one of them.")
        expected = frozenset[str]().union(*(one.expected for one in self.criteria))
        if absent := sorted(expected - seen):  # a typo would silently drop rows
            warnings.warn(f"filters name {listing(absent)}, which no row has.", stacklevel=4)
        return chosen


class _FileColumns(Mapping[str, npt.NDArray[Any]]):
    """The columns of a file; those that a function asks for are read when it does.

    Args:
        selection: what is asked of rows.
        file: number of the file.
        read: columns that were read already, as stored.
        counters: counts what is read.
    """

    def __init__(
        self, selection: Selection, file: int, read: Mapping[str, npt.NDArray[Any]], counters: Counters
    ) -> None:
        self._selection, self._counters = selection, counters
        self._layouts, self._guard = selection.table.layouts[file], selection.table.guards[file]
        self._read = {
            name: decoded(self._layouts[selection.fields[name]], column, selection.options)
            for name, column in read.items()
        }
        self.n_rows = int(np.diff(selection.table.starts)[file])

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._read:
            layout = self._layout(name)
            if layout.row_shape or layout.n_rows != self.n_rows:
                raise _no_column(layout, self.n_rows)
            tasks, column = column_tasks(layout, self._selection.options, self._counters)
            do_tasks(tasks, usable_cores(), lambda _: None)
            self._read[name] = decoded(layout, column, self._selection.options)
        return self._read[name]

    def _layout(self, name: str) -> ArrayLayout:
        selection, first = self._selection, self._layouts[0]
        if name in selection.fields:
            known: ArrayLayout = self._layouts[selection.fields[name]]
            return known
        # Together with an array described before, so that both have the same number of rows in a growing file.
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

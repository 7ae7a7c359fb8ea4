"""Rows that pass a user's criteria: found on all cores, once on each machine, and kept on disk for the next time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..counters import Counters
from ..distributed import OncePerNode
from ..errors import H5Error, H5ValueError, listing
from ..hdf5 import ArrayLayout, OpenOptions, expand_user
from ..order import resolve_replica
from ..readers import do_tasks, run_with_progress, usable_cores
from ..types import IntArray, PathLike
from .catalog import Catalog
from .columns import column_tasks, decoded, read_columns
from .labels import LabelCriterion, search_label
from .row_filters import Criterion
from .row_table import RowTable
from .shard_memory import ShardMemory

__all__ = ["NoRowPassesError", "RowIndexStore", "Selection", "SharedIndex"]

NAME = "h5_index"  # of the shared memory
VERSION = 1  # of what a selection means; another number makes all that was kept on disk void

_log = logging.getLogger(__name__)


class NoRowPassesError(H5ValueError):
    """No row passes the filters."""


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
        digest = hashlib.sha256(json.dumps([VERSION, self.table.identity, files, asked, label]).encode())
        if self.among is not None:
            digest.update(b"among" + self.among.tobytes())
        return digest.hexdigest()[:32]

    def find(self, counters: Counters, progress: Callable[[], None], *, shows_progress: bool = True) -> IntArray:
        """Return the rows that pass, in ascending order.

        Args:
            counters: counts what is read.
            progress: is called as it goes on.
            shows_progress: whether the user sees how far it is.

        Raises:
            H5KeyError: an array is missing.
            H5ValueError: no row passes; the text says how many each condition keeps.
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
                passes = criterion.mask(columns, columns.n_rows)
                kept[criterion.text] = kept.get(criterion.text, 0) + int(passes.sum())
                mask[table.starts[file] : table.starts[file + 1]] &= passes
                if criterion.expected and criterion.column is not None:
                    seen |= criterion.expected.intersection(columns[criterion.column][passes])
        if self.label is not None and mask.any():
            found = np.flatnonzero(mask)
            has_label = search_label(table, self.label, found, self.options, counters, run)
            kept[f"label={self.label.label}"] = int(has_label.sum())
            mask[found[~has_label]] = False
        chosen = np.flatnonzero(mask) if self.among is None else self.among[mask[self.among]]
        if not len(chosen):
            each = "; ".join(f"{text} keeps {n:,}" for text, n in kept.items())
            of = "" if self.among is None else f" among the {len(self.among):,} that `indices` names"
            raise NoRowPassesError(f"no row of {table.n_rows:,} passes all filters{of}: {each}. Loosen one of them.")
        expected = frozenset[str]().union(*(one.expected for one in self.criteria))
        if absent := sorted(expected - seen):  # a typing error would make the data smaller in silence
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
        self._read = {name: decoded(self._layouts[selection.fields[name]], column) for name, column in read.items()}
        self.n_rows = int(np.diff(selection.table.starts)[file])

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._read:
            layout = self._layout(name)
            if layout.row_shape or layout.n_rows != self.n_rows:
                raise _no_column(layout, self.n_rows)
            tasks, column = column_tasks(layout, self._selection.options, self._counters)
            do_tasks(tasks, usable_cores(), lambda _: None)
            self._read[name] = decoded(layout, column)
        return self._read[name]

    def _layout(self, name: str) -> ArrayLayout:
        selection, first = self._selection, self._layouts[0]
        if name in selection.fields:
            return self._layouts[selection.fields[name]]
        # With an array that was described before: of a file that grows both have as many rows as that one had.
        keys = [selection.keys.get(name, name), *([first.key] if selection.options.swmr else [])]
        return selection.catalog.describe(first.path, keys, selection.options)[1][0].guarded(self._guard)

    def __iter__(self) -> Iterator[str]:
        return (name for name, field in self._selection.fields.items() if not self._layouts[field].row_shape)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and len(self[name]) >= 0
        except (KeyError, H5ValueError):  # no such array, or one with other axes
            return False

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _no_column(layout: ArrayLayout, n_rows: int) -> H5ValueError:
    return H5ValueError(
        f"a filter looks at {layout.key!r} in {layout.path!r}, which has the shape "
        f"{(layout.n_rows, *layout.row_shape)}; rows are told apart by one value each. "
        f"Name an array of shape ({n_rows},)."
    )


# Rows that were found before ----------------------------------------------------------------------------------------


class RowIndexStore:
    """A folder with one index a file. A file that is missing or damaged counts as not kept.

    Args:
        folder: where; True is ``lightning_h5`` in the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``).
    """

    def __init__(self, folder: PathLike | Literal[True]) -> None:
        if folder is True:
            folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lightning_h5")
        self._folder = Path(expand_user(folder))

    def load(self, name: str, n_rows: int) -> IntArray | None:
        """Return the rows kept by a name; None if there are none."""
        path = self._path(name)
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as kept:
                rows: IntArray = kept["rows"]
                if str(kept["digest"]) != _digest_of(rows) or rows.dtype != np.int64 or rows.ndim != 1:
                    raise ValueError("its digest differs")
                if len(rows) and not (rows.min() >= 0 and rows.max() < n_rows):
                    raise ValueError("it has other rows")
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with it, the rows can be found again
            _log.warning("%s is not a whole index (%s); it is made again", path, error)
            return None
        return rows

    def keep(self, name: str, rows: IntArray) -> None:
        """Keep rows, whole or not at all. If that fails, training goes on without."""
        partial_file = self._folder / f"index-{name}.{os.getpid()}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(partial_file, "wb") as file:
                np.savez(file, rows=rows, digest=np.array(_digest_of(rows)))
            partial_file.replace(self._path(name))
        except OSError as error:
            _log.warning("the index of rows is not kept in %s: %s", self._folder, error)
        finally:
            with suppress(OSError):
                partial_file.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"index-{name}.npz"


class SharedIndex:
    """Rows that one process of this machine found and shared with the others; each finds them itself if that fails.

    Args:
        name: identifies the rows; the same in all processes that ask for the same.
        find: finds them; calls its first argument as it goes on. The second is whether this process shows progress:
            one on each machine does, or rank 0 if each rank works for itself.

    Attributes:
        rows: the rows; not to be written to.

    Raises:
        H5Error: what ``find`` raised, in each process.
    """

    rows: IntArray

    def __init__(self, name: str, find: Callable[[Callable[[], None], bool], IntArray]) -> None:
        question = OncePerNode(f"rows that pass/{name}")
        self._memory: ShardMemory | None = None  # its descriptor stays open for processes that come later
        if not question.is_first and self._take(question.first, question.value()):
            return
        shared = None
        try:
            shows_progress = question.has_others or (question.is_first and resolve_replica().rank == 0)
            self.rows = find(question.progress, shows_progress)
            if question.has_others:
                shared = self._share()
        finally:
            if question.has_others:
                question.publish(shared)

    def _share(self) -> list[Any] | None:
        """Move the rows to shared memory; return where they are."""
        digest = _digest_of(self.rows)
        try:
            memory = ShardMemory([(len(self.rows), self.rows.itemsize)], shared=True, name=NAME)
            memory.write(0, 0, self.rows)
        except H5Error:
            return None
        self._use(memory)
        return [memory.descriptor, len(self.rows), digest]

    def _take(self, first: list[str], shared: list[Any] | None) -> bool:
        """Take the rows that another process shared; return whether that worked."""
        if shared is None:
            return False
        descriptor, n_rows, digest = shared
        with suppress(OSError, H5Error):  # another user's process, or one that has ended
            self._use(ShardMemory.of_process(int(first[2]), descriptor, [(n_rows, np.dtype(np.int64).itemsize)], NAME))
            if _digest_of(self.rows) == digest:
                return True
        self._memory = None  # the descriptor is of other memory by now
        return False

    def _use(self, memory: ShardMemory) -> None:
        self._memory = memory
        self.rows = memory.columns[0].reshape(-1).view(np.int64)
        self.rows.flags.writeable = False


def _digest_of(rows: IntArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()

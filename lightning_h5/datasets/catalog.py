"""The catalog of file contents. Each file is opened once, and everything needed is read then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..distributed import first_value
from ..errors import H5Error, H5FileError, H5KeyError, H5ValueError
from ..hdf5 import (
    AlikeArrays,
    ArrayLayout,
    ChangeGuard,
    GroupError,
    OpenOptions,
    column_layout,
    expand_paths,
    is_references,
)
from ..options import FileOptions, StagingOptions
from ..order import resolve_replica
from ..progress_bar import with_bar
from ..types import Paths
from .cells import values_of_cells
from .column_values import Categories, check_same, column_of_codes
from .compatibility import WITHOUT_THEM, Asked, Compatibility, Skip, each_readable, refuse_images, with_stacks
from .file_contents import FileContents, collector_paused, opened
from .joins import Joins, with_others
from .part_layouts import ListedParts
from .row_table import RowTable
from .rows import Rows

__all__ = ["Catalog"]

PATIENCE = 10.0  # seconds for rows to appear that another rank, or an earlier read, has seen
PAUSE = 0.05

_T = TypeVar("_T")


class Catalog:
    """The requested contents of files. Splits, columns, filters and datasets are views of it.

    A file is opened when it is first asked for, and again only for arrays that were not announced. What was found is
    kept as long as the catalog: ``setup`` makes one and drops it.

    Args:
        fields: arrays that will be asked for, if a file has them.
        columns: arrays with values that will be asked for, too.
        of_all_ranks: all ranks make this catalog, and find the same number of rows if a file grows.
        categories: of arrays, by what is known of them.
        first_files: returns the files with the first categories, such as those of training; none for those of the
            first table.
        matched: see ``Joins``.
        staging: how objects of stores are read.
    """

    def __init__(
        self,
        fields: Iterable[str] = (),
        columns: Iterable[str] = (),
        *,
        of_all_ranks: bool = False,
        categories: Categories | None = None,
        first_files: Callable[[], Sequence[str]] = tuple,
        matched: dict[Any, Any] | None = None,
        staging: StagingOptions | None = None,
    ) -> None:
        self.staging = staging
        self.categories, self._first_files = categories or Categories(), first_files
        self.joins = Joins(matched)
        self._columns = tuple(dict.fromkeys(columns))
        self._expected = tuple(dict.fromkeys([*fields, *self._columns]))
        self._of_all_ranks = of_all_ranks
        self._alike = AlikeArrays()
        self._files: dict[tuple[str, FileOptions], FileContents | H5FileError] = {}
        self._n_rows: dict[tuple[str, str], int] = {}
        self._tables: dict[Any, RowTable] = {}
        self._made: dict[Any, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def files(self, paths: Paths, name: str = "path") -> tuple[str, ...]:
        """Return the files that a path argument names: see ``expand_paths``. Looks for the same ones once."""
        given = repr(paths)
        if given not in self._paths:
            found = expand_paths(paths, name, self.staging)
            self._paths[given] = self._paths[repr(found)] = found
        return self._paths[given]

    def table(
        self,
        paths: Sequence[str],
        asked: Sequence[Asked],
        options: OpenOptions,
        *,
        sample: str | None = None,
        skip: Skip | None = None,
        advice: str = WITHOUT_THEM,
        n_files: int | None = None,
    ) -> RowTable:
        """Return arrays of files, checked to belong together. Reads metadata only.

        Args:
            paths: the files.
            asked: the arrays, in the order of the fields.
            options: how files are opened.
            sample: "row" if the user declared that rows are samples, so that no other meaning is considered.
            skip: called with files that are missing or broken, which are left out; None raises their errors.
            advice: what to do to train without broken files, for their errors.
            n_files: number of files given, if some were already skipped.

        Raises:
            H5FileError: a file is missing or broken, or all of them are.
            H5KeyError: an array is missing.
            H5ValueError: an array cannot become a tensor, or holds packed integers; arrays of a file differ in their
                rows, files differ, or each of them may be one image or volume.
        """
        if sample not in (None, "row"):
            raise H5ValueError(f"sample={sample!r} was given. Pass 'row' (an index along axis 0 is a sample), or None.")
        which = (tuple(paths), tuple(asked), options, sample, n_files, skip, self.joins.sources(asked))
        if which not in self._tables:
            try:
                self._tables[which] = self._table_or_stacks(paths, asked, options, sample, skip, advice, n_files)
            except H5Error as error:  # the message is complete; frames and causes inside this package add nothing
                raise error.with_traceback(None) from None
        return self._tables[which]

    def _table_or_stacks(self, paths: Sequence[str], asked: Sequence[Asked], *rest: Any) -> RowTable:
        """Return what ``_table`` does; a list of names that is not of members of a table is one of arrays."""
        try:
            return self._table(paths, asked, *rest)
        except GroupError as error:
            if (stacks := with_stacks(asked, error)) is None:
                raise
        return self._table_or_stacks(paths, stacks, *rest)

    def _table(
        self,
        paths: Sequence[str],
        asked: Sequence[Asked],
        options: OpenOptions,
        sample: str | None,
        skip: Skip | None,
        advice: str,
        n_files: int | None,
    ) -> RowTable:
        joins, numbered = self.joins, list(enumerate(asked))
        others = {at: joins.of_others(self, one, paths, options) for at, one in numbered if one.paths is not None}
        columns = {at for at, one in numbered if joins.is_column(one.key) and at not in others}
        own = [one for at, one in numbered if at not in columns and at not in others]
        keys, compatibility = [key for one in own for key in one.keys], Compatibility(asked)
        join = self.joins.join_keys(columns)
        shows_progress = len(paths) >= 50 and resolve_replica().rank == 0  # all ranks read them
        bar = with_bar(paths, "looking at files", unit="file", shows_progress=shows_progress, delay=2)
        used, guards, layouts, lacks = [], [], [], list[npt.NDArray[np.bool_]]()
        with collector_paused():
            for path, (guard, described) in each_readable(
                paths, lambda path: self.describe(path, [*keys, *join], options), skip, advice, bar
            ):
                described = tuple(self._with_values(array, options) for array in described)
                each = iter(described)
                found = tuple(one.decoded(one.joined(list(islice(each, len(one.keys))))) for one in own)
                if columns:
                    joined = described[len(keys) :]
                    first = sum(map(len, lacks))
                    here = [one for at, one in enumerate(asked) if at not in others]
                    found, is_lacking = self.joins.with_columns(self, here, path, guard, found, options, joined, first)
                    lacks.append(is_lacking)
                if others:
                    guard, found = with_others(guard, found, {at: of[path] for at, of in others.items()})
                compatibility.check(found)
                used.append(path)
                guards.append(guard)
                layouts.append(found)
        layouts = self._recoded(used, layouts, options)
        n_rows = [arrays[0].n_rows for arrays in layouts]
        self.joins.rows_of.update(zip(used, n_rows, strict=True))
        if sample is None and len(columns) < len(asked) and not any(one.taken for one in asked):
            refuse_images(layouts[0], n_rows, n_files or len(paths))
        if columns:
            self.joins.check_place(sum(n_rows), paths)
        all_lacks = np.concatenate(lacks) if lacks and any(map(np.any, lacks)) else None
        starts = np.concatenate([[0], np.cumsum(n_rows)])
        rows = Rows.of(starts, len(asked))
        return RowTable(tuple(used), ListedParts(layouts), tuple(guards), starts, rows, lacks=all_lacks)

    def _with_values(self, array: ArrayLayout, options: OpenOptions) -> ArrayLayout:
        """Return an array of references as a column of the values in its cells; other arrays as they are."""
        if not is_references(array) or array.value is not None or options.swmr:
            return array
        values = values_of_cells(self, array.path, array.key, options)
        return column_layout(values, array.path, array.key, array.guard)

    def _recoded(
        self, paths: Sequence[str], layouts: Sequence[tuple[ArrayLayout, ...]], options: OpenOptions
    ) -> list[tuple[ArrayLayout, ...]]:
        """Return the arrays of files with codes of categories that mean the same in all files."""
        for array in layouts[0] if len(layouts) > 1 else ():
            if (column := column_of_codes(array.key)) is not None:
                files = [self._files[_which(path, options)] for path in paths]
                names = [file.arrays.get(f"{column}/categories") for file in files if isinstance(file, FileContents)]
                check_same(column, names, options)
        return self.recoded(layouts, options)

    def recoded(
        self, layouts: Sequence[tuple[ArrayLayout, ...]], options: OpenOptions
    ) -> list[tuple[ArrayLayout, ...]]:
        """Return the arrays of files, with codes of categories that mean the same in all."""

        def first(key: str) -> list[ArrayLayout]:
            return [self.describe(path, [key], options)[1][0] for path in self._first_files()]

        return self.categories.recoded(layouts, options, first)

    def once(self, which: Any, make: Callable[[], _T]) -> _T:
        """Return what is made once: all splits of the same files share it.

        Args:
            which: all that it follows from.
            make: makes it.
        """
        if which not in self._made:
            self._made[which] = make()
        found: _T = self._made[which]
        return found

    def search(
        self, path: str, options: OpenOptions, name: str, search: Callable[[Any], tuple[_T, Iterable[str]]]
    ) -> _T:
        """Return what a search in an open file finds.

        Args:
            path: the file.
            options: how it is opened.
            name: of the search.
            search: looks at the open file; also returns arrays that will be asked for because of what it found.

        Raises:
            H5Error: the search failed, or the file cannot be opened.
        """
        file = self._files.get(_which(path, options))
        if not isinstance(file, FileContents) or name not in file.found:
            file = self._open(path, (), options, {name: search})
        found: _T = file.found[name]
        return found

    def look(
        self, path: str, options: OpenOptions, name: Any, search: Callable[[Any, ChangeGuard, AlikeArrays], _T]
    ) -> tuple[ChangeGuard, _T]:
        """Return the guard of a file, and what a search in the open file finds.

        Args:
            path: the file.
            options: how it is opened.
            name: of the search.
            search: gets the open file, its guard, and what describes arrays.

        Raises:
            H5Error: the search failed, or the file cannot be opened.
        """
        file = self._files.get(_which(path, options))
        if not isinstance(file, FileContents) or name not in file.found:
            file = self._open(path, (), options, {name: search}, own=True)
        found: _T = file.found[name]
        return file.guard, found

    @property
    def templates(self) -> list[ArrayLayout]:
        """The arrays that others are described like (see ``AlikeArrays``)."""
        return self._alike.templates

    def has_described(self, path: str, keys: Sequence[str], options: OpenOptions) -> bool:
        """Return whether these are known to be arrays of a file, without opening it."""
        file = self._files.get(_which(path, options))
        return isinstance(file, FileContents) and all(isinstance(file.arrays.get(key), ArrayLayout) for key in keys)

    def has(self, path: str, keys: Sequence[str], options: OpenOptions) -> bool:
        """Return whether a file has all of these arrays."""
        own = [key for key in keys if not self.joins.is_column(key)]
        try:
            self._describe(path, own, options)
        except H5KeyError:
            return False
        return True

    def values(self, path: str, key: str, options: OpenOptions) -> npt.NDArray[Any] | None:
        """Return the values of a column as they are stored; None if they were not read when the file was opened."""
        file = self._files.get(_which(path, options))
        values = file.values.get(key) if isinstance(file, FileContents) else None
        return None if values is None else values.copy()

    def describe(
        self, path: str, keys: Sequence[str], options: OpenOptions
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        """Return the guard of a file and its arrays.

        Arrays of a file that grows have one number of rows, on all ranks: that of the shortest, as it was seen first,
        since the writer appends to one after the other.

        Args:
            path: the file.
            keys: of the arrays.
            options: how the file is opened.

        Raises:
            H5Error: the file cannot be opened, or an array is missing or refused.
        """
        guard, found = self._describe(path, keys, options)
        if not options.swmr:
            return guard, found
        shortest = min(layout.n_rows for layout in found)
        names = [(path, layout.key) for layout in found]
        if not (seen := [self._n_rows[name] for name in names if name in self._n_rows]):
            seen = [first_value(f"rows of {names}", shortest) if self._of_all_ranks else shortest]
        n_rows = min(seen)
        self._n_rows.update(dict.fromkeys(names, n_rows))
        end = time.monotonic() + PATIENCE
        while min(layout.n_rows for layout in found) < n_rows:
            if time.monotonic() >= end:
                return guard, found
            time.sleep(PAUSE)
            found = self._describe(path, keys, options, is_new=True)[1]
        return guard, tuple(replace(layout, n_rows=n_rows) for layout in found)

    # One file ---------------------------------------------------------------------------------------------------

    def _describe(
        self, path: str, keys: Sequence[str], options: OpenOptions, *, is_new: bool = False
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        file = self._files.get(_which(path, options))
        if isinstance(file, H5FileError):
            raise file
        if is_new or file is None or any(key not in file.arrays for key in keys):
            file = self._open(path, keys, options, {})
        arrays = []
        for key in keys:
            array = file.arrays[key]
            if isinstance(array, H5Error):
                raise array
            arrays.append(array)
        if not any(file.others.values()):
            return file.guard, tuple(arrays)
        others = {other.path: other for key in keys for other in file.others.get(key, ())}
        guard = replace(file.guard, others=tuple(others.values()))
        return guard, tuple(array.guarded(guard) for array in arrays)

    def _open(
        self,
        path: str,
        keys: Sequence[str],
        options: OpenOptions,
        searches: dict[Any, Callable[..., Any]],
        *,
        own: bool = False,
    ) -> FileContents:
        which = _which(path, options)
        old = self._files.get(which)
        try:
            file = self._look(path, keys, options, searches, own=own)
        except H5FileError as error:
            self._files[which] = error
            raise
        if isinstance(old, FileContents):
            file.found = old.found | file.found
            if old.guard == file.guard:
                file.arrays, file.others = old.arrays | file.arrays, old.others | file.others
        self._files[which] = file
        return file

    def _look(
        self,
        path: str,
        keys: Sequence[str],
        options: OpenOptions,
        searches: dict[Any, Callable[..., Any]],
        *,
        own: bool,
    ) -> FileContents:
        with opened(path, options) as (h5, guard):
            file = FileContents(guard)
            for name, search in searches.items():
                if own:
                    file.found[name] = search(h5, guard, self._alike)
                    continue
                file.found[name], more = search(h5)
                self._expected = tuple(dict.fromkeys([*self._expected, *more]))
            wanted = [*keys, *self._expected]
            wanted += [f"{name}/categories" for name in map(column_of_codes, wanted) if name is not None]
            for key in dict.fromkeys(wanted):
                file.describe(h5, path, key, options, self._alike, is_asked=key in keys)
            for key in self._columns if not options.swmr else ():
                file.read_if_short(h5, key)
        return file


def _which(path: str, options: OpenOptions) -> tuple[str, FileOptions]:
    return path, options.files

"""The catalog of file contents. Each file is opened once, and everything needed is read then."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy.typing as npt

from ..distributed import first_value
from ..errors import H5Error, H5FileError, H5KeyError, H5ValueError
from ..hdf5 import (
    AlikeArrays,
    Annotations,
    ArrayLayout,
    ChangeGuard,
    OpenFile,
    OpenOptions,
    column_layout,
    expand_paths,
    names_at,
)
from ..options import FileOptions, StagingOptions
from ..readers import ClassNumbers
from ..types import IntArray, Paths
from .agreement import Agreement
from .column_values import Categories, check_same, column_of_codes, texts_of
from .compatibility import ArrayRequest
from .file_contents import FileContents, open_guarded
from .joins import Joins

__all__ = ["Catalog"]

PATIENCE = 10.0  # seconds for rows to appear that another rank, or an earlier read, has seen
PAUSE = 0.05

_T = TypeVar("_T")

FirstTexts: TypeAlias = Callable[[Sequence[str], str], list[npt.NDArray[Any]]]
"""Returns the text of an array in some files: takes the files and the key."""


class Catalog:
    """The requested contents of files. Splits, columns, filters and datasets are views of it.

    A file is opened on the first request for it, and again only for arrays that were not announced. Contents are cached
    as long as the catalog exists: ``setup`` creates a catalog and drops it.

    Args:
        fields: arrays that will be requested, if a file has them.
        columns: arrays that will be requested together with their values.
        of_all_ranks: all ranks create this catalog, and agree on one number of rows if a file grows.
        categories: names of categories that already have codes.
        first_files: returns the files with the first categories, such as the files of training; no files for the
            files of the first table.
        matched: see ``Joins``.
        staging: how objects of stores are read.
        agreement: what the numbers of arrays mean in the first file.
        described: descriptions of the files' arrays that were made before.
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
        agreement: Agreement | None = None,
        described: AlikeArrays | None = None,
    ) -> None:
        self.staging = staging
        self.categories, self._first_files = categories or Categories(), first_files
        self.agreement = agreement or Agreement()
        self.joins = Joins(matched)
        self._columns = tuple(dict.fromkeys(columns))
        self._expected = tuple(dict.fromkeys([*fields, *self._columns]))
        self._of_all_ranks = of_all_ranks
        self._alike = described or AlikeArrays()
        self._files: dict[tuple[str, FileOptions], FileContents | H5FileError] = {}
        self._n_rows: dict[tuple[str, str], int] = {}
        self._shared: dict[Any, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def files(self, paths: Paths, name: str = "path") -> tuple[str, ...]:
        """Return the files that a path argument names (see ``expand_paths``). The same argument is expanded once."""
        argument = repr(paths)
        if argument not in self._paths:
            files = expand_paths(paths, name, self.staging)
            self._paths[argument] = self._paths[repr(files)] = files
        return self._paths[argument]

    def recoded(
        self, layouts: Sequence[tuple[ArrayLayout, ...]], options: OpenOptions
    ) -> list[tuple[ArrayLayout, ...]]:
        """Return the arrays of files. Codes of categories mean the same in all files."""

        def first(key: str) -> list[ArrayLayout]:
            return [self.describe(path, [key], options)[1][0] for path in self._first_files()]

        return self.categories.recoded(layouts, options, first)

    def class_numbers(
        self, request: ArrayRequest, arrays: Sequence[ArrayLayout], options: OpenOptions, first: FirstTexts
    ) -> list[IntArray]:
        """Return the text of arrays, or the names of enums, as class numbers, which mean the same in all files.

        Args:
            request: the array of a field.
            arrays: of each file or part.
            options: how files are opened.
            first: returns the text of the files that define the first classes, such as the training files.

        Raises:
            H5ValueError: an array has no text, or the files with the first classes do not name it.
        """
        for array in arrays:
            ClassNumbers().check(array)
        own_key = request.key
        key = request.codec.key if isinstance(request.codec, ClassNumbers) and request.codec.key else own_key
        files = self._first_files()

        def first_texts() -> list[npt.NDArray[Any]]:
            if self.joins.is_column(own_key):
                return [self.joins.texts_of_training(own_key)]
            if request.paths is None:
                is_first = key == own_key and {array.path for array in arrays} <= {*files}
                return [] if is_first or not files else first(files, key)
            if files and self.joins.split != "train":
                raise H5ValueError(
                    f"{own_key!r} is decoded as a category, and the training files define its classes. Call "
                    "setup('fit') first."
                )
            return []

        return self.categories.numbered(key, [texts_of(array, options) for array in arrays], first_texts)

    def with_class_numbers(
        self, requests: Sequence[ArrayRequest], layouts: Sequence[tuple[ArrayLayout, ...]], options: OpenOptions
    ) -> list[tuple[ArrayLayout, ...]]:
        """Return arrays of files, with class numbers in place of text that is decoded as a category.

        Args:
            requests: the arrays.
            layouts: of each file.
            options: how files are opened.
        """

        def first(files: Sequence[str], key: str) -> list[npt.NDArray[Any]]:
            return [texts_of(self.describe(path, [key], options)[1][0], options) for path in files]

        by_field = [list(arrays) for arrays in zip(*layouts, strict=True)]
        for request, arrays in zip(requests, by_field, strict=True):
            if isinstance(request.codec, ClassNumbers) and any(array.categories is None for array in arrays):
                numbers = self.class_numbers(request, arrays, options, first)
                arrays[:] = [
                    column_layout(column, array.path, array.key, array.guard)
                    for column, array in zip(numbers, arrays, strict=True)
                ]
        return list(zip(*by_field, strict=True))

    def check_categories(self, paths: Sequence[str], keys: Iterable[str], options: OpenOptions) -> None:
        """Check that codes mean the same in all files, as far as their categories are known.

        Args:
            paths: the files.
            keys: their arrays, some of them codes of categories.
            options: how files are opened.

        Raises:
            H5ValueError: files have other categories.
        """
        for key in keys:
            if (column := column_of_codes(key)) is not None:
                files = [self._files[_file_key(path, options)] for path in paths]
                names = [file.arrays.get(f"{column}/categories") for file in files if isinstance(file, FileContents)]
                advice = f"Name {column!r} instead of '{column}/codes': its codes become the same in all files."
                check_same(column, names, options, advice)

    def check_agreement(
        self,
        path: str,
        request: ArrayRequest,
        options: OpenOptions,
        *,
        rows: Collection[int] = (0,),
        selection: Mapping[int, Any] | None = None,
        found: Mapping[str, Annotations | None] | None = None,
        is_of_others: bool = False,
    ) -> None:
        """Check that the numbers of a field mean the same in a file as in the first one (see ``Agreement``).

        Args:
            path: the file, with arrays that were described.
            request: the array.
            options: how the file is opened.
            rows: the axes that number rows.
            selection: the selected part of other axes; None for that of the request.
            found: what the file says about the arrays of the request; None if they were described here.
            is_of_others: whether the file is another one, with values for the rows of the data's.

        Raises:
            H5ValueError: they mean something else.
        """
        if request.only_counted or request.is_decoded_by_user:
            return
        if found is None:
            file = self._files.get(_file_key(path, options))
            found = file.annotations if isinstance(file, FileContents) else {}

        def names_in_file(of: str, source: str) -> npt.NDArray[Any]:
            return self.search(of, options, ("names", source), lambda file: (names_at(file, source), ()))

        for key in request.keys:
            if (annotations := found.get(key)) is not None:
                parts = dict(request.selection) if selection is None else selection
                name = f"{key} of other files" if is_of_others else key
                self.agreement.check(name, path, annotations, rows, parts, names_in_file)

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return an object that is created once, and shared by all splits of the same files.

        Args:
            key: everything that the object depends on.
            make: creates it.
        """
        if key not in self._shared:
            self._shared[key] = make()
        shared: _T = self._shared[key]
        return shared

    def search(
        self, path: str, options: OpenOptions, name: Any, search: Callable[[Any], tuple[_T, Iterable[str]]]
    ) -> _T:
        """Return the result of a search in an open file.

        Args:
            path: the file.
            options: how it is opened.
            name: of the search.
            search: looks at the open file; returns its result, and arrays that will be requested because of it.

        Raises:
            H5Error: the search failed, or the file cannot be opened.
        """
        file = self._files.get(_file_key(path, options))
        if not isinstance(file, FileContents) or name not in file.results:
            file = self._open(path, (), options, {name: search})
        result: _T = file.results[name]
        return result

    def look(
        self, path: str, options: OpenOptions, name: Any, search: Callable[[OpenFile, ChangeGuard, AlikeArrays], _T]
    ) -> tuple[ChangeGuard, _T]:
        """Return the guard of a file, and the result of a search in the open file.

        Args:
            path: the file.
            options: how it is opened.
            name: of the search.
            search: gets the open file, its guard, and an object that describes arrays.

        Raises:
            H5Error: the search failed, or the file cannot be opened.
        """
        file = self._files.get(_file_key(path, options))
        if not isinstance(file, FileContents) or name not in file.results:
            file = self._open(path, (), options, {name: search}, with_guard=True)
        result: _T = file.results[name]
        return file.guard, result

    @property
    def templates(self) -> list[ArrayLayout]:
        """The arrays that serve as templates for alike arrays (see ``AlikeArrays``)."""
        return self._alike.templates

    def has_described(self, path: str, keys: Sequence[str], options: OpenOptions) -> bool:
        """Return whether a file is known to have all of these arrays, without opening it."""
        file = self._files.get(_file_key(path, options))
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
        """Return the stored values of a column; None if they were not read when the file was opened."""
        file = self._files.get(_file_key(path, options))
        values = file.values.get(key) if isinstance(file, FileContents) else None
        return None if values is None else values.copy()

    def describe(
        self, path: str, keys: Sequence[str], options: OpenOptions
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        """Return the guard of a file and its arrays.

        Arrays of a file that grows have one number of rows, on all ranks: the length of the shortest array at the first
        look, since the writer appends to one array after the other.

        Args:
            path: the file.
            keys: of the arrays.
            options: how the file is opened.

        Raises:
            H5Error: the file cannot be opened, or an array is missing or refused.
        """
        guard, layouts = self._describe(path, keys, options)
        if not options.swmr:
            return guard, layouts
        shortest = min(layout.n_rows for layout in layouts)
        names = [(path, layout.key) for layout in layouts]
        if not (lengths := [self._n_rows[name] for name in names if name in self._n_rows]):
            lengths = [first_value(f"rows of {names}", shortest) if self._of_all_ranks else shortest]
        n_rows = min(lengths)
        self._n_rows.update(dict.fromkeys(names, n_rows))
        end = time.monotonic() + PATIENCE
        while min(layout.n_rows for layout in layouts) < n_rows:
            if time.monotonic() >= end:
                return guard, layouts
            time.sleep(PAUSE)
            layouts = self._describe(path, keys, options, is_new=True)[1]
        return guard, tuple(replace(layout, n_rows=n_rows) for layout in layouts)

    # One file ---------------------------------------------------------------------------------------------------

    def _describe(
        self, path: str, keys: Sequence[str], options: OpenOptions, *, is_new: bool = False
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        file = self._files.get(_file_key(path, options))
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
        others = {guard.path: guard for key in keys for guard in file.others.get(key, ())}
        guard = replace(file.guard, others=tuple(others.values()))
        return guard, tuple(array.guarded(guard) for array in arrays)

    def _open(
        self,
        path: str,
        keys: Sequence[str],
        options: OpenOptions,
        searches: dict[Any, Callable[..., Any]],
        *,
        with_guard: bool = False,
    ) -> FileContents:
        file_key = _file_key(path, options)
        old = self._files.get(file_key)
        try:
            file = self._look(path, keys, options, searches, with_guard=with_guard)
        except H5FileError as error:
            self._files[file_key] = error
            raise
        if isinstance(old, FileContents):
            file.results = old.results | file.results
            if old.guard == file.guard:
                file.arrays, file.others = old.arrays | file.arrays, old.others | file.others
                file.annotations = old.annotations | file.annotations
        self._files[file_key] = file
        return file

    def _look(
        self,
        path: str,
        keys: Sequence[str],
        options: OpenOptions,
        searches: dict[Any, Callable[..., Any]],
        *,
        with_guard: bool,
    ) -> FileContents:
        with open_guarded(path, options) as (opened, guard):
            file = FileContents(guard)
            for name, search in searches.items():
                if with_guard:
                    file.results[name] = search(opened, guard, self._alike)
                    continue
                file.results[name], announced = search(opened.h5)
                self._expected = tuple(dict.fromkeys([*self._expected, *announced]))
            arrays = [*keys, *self._expected]
            arrays += [f"{name}/categories" for name in map(column_of_codes, arrays) if name is not None]
            for key in dict.fromkeys(arrays):
                file.describe(opened, path, key, options, self._alike, is_required=key in keys)
            for key in self._columns if not options.swmr else ():
                file.read_if_short(opened, key)
        return file


def _file_key(path: str, options: OpenOptions) -> tuple[str, FileOptions]:
    return path, options.files

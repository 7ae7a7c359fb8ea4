"""Looks at files: each is opened once, and all that anybody will ask of it is found out then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..distributed import first_told
from ..errors import H5DataChangedError, H5Error, H5FileError, H5KeyError
from ..hdf5 import (
    AlikeArrays,
    ArrayLayout,
    ChangeGuard,
    OpenOptions,
    Trust,
    external_guards,
    is_on_disk,
    open_h5,
    stat_of,
)

__all__ = ["Visits", "current_visits", "visiting"]

COLUMN_BYTES = 1 << 20
"""Columns of at most this size in a file are read when it is visited; longer ones by all cores, once it is closed."""

PATIENCE = 10.0  # seconds for rows to appear that another look, or another rank, has seen
PAUSE = 0.05

_T = TypeVar("_T")


@dataclass
class _Visit:
    """What one file had in it.

    Attributes:
        guard: how it looked.
        arrays: descriptions of arrays, or why there are none.
        others: guards of other files that arrays have rows in, by array.
        values: of columns.
        found: what searches found, by name.
    """

    guard: ChangeGuard
    arrays: dict[str, ArrayLayout | H5Error] = field(default_factory=dict)
    others: dict[str, tuple[ChangeGuard, ...]] = field(default_factory=dict)
    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)


class Visits:
    """Opens files to look at them, each once, and keeps what was found.

    Args:
        fields: arrays that will be asked for, if a file has them.
        columns: arrays of which the values will be asked for, too.
    """

    def __init__(self, fields: Iterable[str] = (), columns: Iterable[str] = ()) -> None:
        self._columns = tuple(dict.fromkeys(columns))
        self._expected = tuple(dict.fromkeys([*fields, *self._columns]))
        self._alike = AlikeArrays()
        self._visits: dict[tuple[str, bool, Trust], _Visit | H5FileError] = {}
        self._n_rows: dict[tuple[str, str], int] = {}
        self._made: dict[Any, Any] = {}

    def once(self, which: Any, work: Callable[[], _T]) -> _T:
        """Return the result of work that is done once for all that ask for it.

        Args:
            which: what is worked out.
            work: works it out.
        """
        if which not in self._made:
            self._made[which] = work()
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
        visit = self._visits.get(_which(path, options))
        if not isinstance(visit, _Visit) or name not in visit.found:
            visit = self._open(path, (), options, {name: search})
        found: _T = visit.found[name]
        return found

    def describe(
        self, path: str, keys: Sequence[str], options: OpenOptions
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        """Return the guard of a file and its arrays.

        Args:
            path: the file.
            keys: of the arrays.
            options: how the file is opened.

        Raises:
            H5Error: the file cannot be opened, or an array is missing or refused.
        """
        if not options.swmr:
            return self._describe(path, keys, options)
        guard, found = self._describe(path, keys, options)
        return guard, self._agreed(path, found, lambda: self._describe(path, keys, options, is_new=True)[1])

    def describe_beside(self, other: ArrayLayout, key: str, options: OpenOptions) -> ArrayLayout:
        """Return an array of a file, with as many rows as one that was described before if the file grows.

        Args:
            other: the array that was described before.
            key: of the array.
            options: how the file is opened.

        Raises:
            H5Error: see ``describe``.
        """
        _, found = self._describe(other.path, [key], options)
        if options.swmr:
            found = as_long_as(other.n_rows, found, lambda: self._describe(other.path, [key], options, is_new=True)[1])
        return found[0]

    def has(self, path: str, keys: Sequence[str], options: OpenOptions) -> bool:
        """Return whether a file has all of these arrays."""
        try:
            self._describe(path, keys, options)
        except H5KeyError:
            return False
        return True

    def values(self, path: str, key: str, options: OpenOptions) -> npt.NDArray[Any] | None:
        """Return the values of a column as they are stored; None if they were not read when the file was visited."""
        visit = self._visits.get(_which(path, options))
        values = visit.values.get(key) if isinstance(visit, _Visit) else None
        return None if values is None else values.copy()

    # Files with a live writer: one number of rows for arrays that belong together, on all ranks ----------------

    def _agreed(
        self, path: str, found: tuple[ArrayLayout, ...], look: Callable[[], tuple[ArrayLayout, ...]]
    ) -> tuple[ArrayLayout, ...]:
        """Arrays as long as the shortest of them, since the writer appends to one after the other."""
        shortest = min(layout.n_rows for layout in found)
        keys = [(path, layout.key) for layout in found]
        if not (seen := [self._n_rows[key] for key in keys if key in self._n_rows]):
            seen = [first_told(f"rows of {keys}", shortest) if _current.get() is self else shortest]
        self._n_rows.update(dict.fromkeys(keys, min(seen)))
        return as_long_as(min(seen), found, look)

    # One file ---------------------------------------------------------------------------------------------------

    def _describe(
        self, path: str, keys: Sequence[str], options: OpenOptions, *, is_new: bool = False
    ) -> tuple[ChangeGuard, tuple[ArrayLayout, ...]]:
        visit = self._visits.get(_which(path, options))
        if isinstance(visit, H5FileError):
            raise visit
        if is_new or visit is None or any(key not in visit.arrays for key in keys):
            visit = self._open(path, keys, options, {})
        arrays = []
        for key in keys:
            array = visit.arrays[key]
            if isinstance(array, H5Error):
                raise array
            arrays.append(array)
        if not any(visit.others.values()):
            return visit.guard, tuple(arrays)
        others = {other.path: other for key in keys for other in visit.others.get(key, ())}
        guard = replace(visit.guard, others=tuple(others.values()))
        return guard, tuple(array.guarded(guard) for array in arrays)

    def _open(
        self, path: str, keys: Sequence[str], options: OpenOptions, searches: dict[str, Callable[[Any], Any]]
    ) -> _Visit:
        try:
            visit = self._look(path, keys, options, searches)
        except H5FileError as error:
            self._visits[_which(path, options)] = error
            raise
        old = self._visits.get(_which(path, options))
        if isinstance(old, _Visit):
            visit.found = old.found | visit.found
            if old.guard == visit.guard:
                visit.arrays, visit.others = old.arrays | visit.arrays, old.others | visit.others
        self._visits[_which(path, options)] = visit
        return visit

    def _look(
        self, path: str, keys: Sequence[str], options: OpenOptions, searches: dict[str, Callable[[Any], Any]]
    ) -> _Visit:
        """A file's guard and its arrays, of one and the same file: another may take its place meanwhile."""
        guard: ChangeGuard | None = None
        with suppress(OSError):  # said with more words when it is opened
            guard = ChangeGuard.of(path, grows=options.swmr, strict=options.trust.verify is not None)
        with open_h5(path, swmr=options.swmr) as file:
            if guard is None:
                raise H5DataChangedError(f"{path!r} was made while it was looked at. Start again once it is written.")
            visit = _Visit(guard)
            try:
                for name, search in searches.items():
                    visit.found[name], more = search(file)
                    self._expected = tuple(dict.fromkeys([*self._expected, *more]))
                for key in dict.fromkeys([*keys, *self._expected]):
                    if (array := self._array(visit, file, path, key, options, is_asked=key in keys)) is not None:
                        visit.arrays[key] = array
                for key in self._columns if not options.swmr else ():
                    if (values := _short_column(file, visit.arrays.get(key))) is not None:
                        visit.values[key] = values
            finally:
                guard.compare(stat_of(file))  # what went wrong meanwhile went wrong because of that
                guard.check()
        return visit

    def _array(
        self, visit: _Visit, file: Any, path: str, key: str, options: OpenOptions, *, is_asked: bool
    ) -> ArrayLayout | H5Error | None:
        trust, guard = options.trust, visit.guard
        try:
            found = self._alike.describe(file, path, key, trust, guard, if_exists=not is_asked)
            if trust.external and found is not None:
                strict = trust.verify is not None
                visit.others[key] = external_guards(file, [key], trust, grows=options.swmr, strict=strict)
        except H5Error as error:
            return error.with_traceback(None)
        return found


def as_long_as(
    n_rows: int, found: tuple[ArrayLayout, ...], look: Callable[[], tuple[ArrayLayout, ...]]
) -> tuple[ArrayLayout, ...]:
    """Arrays that grow, as long as was seen elsewhere.

    Args:
        n_rows: how long that is.
        found: the arrays as they were seen last.
        look: looks at them again. If they are shorter that is repeated, for ten seconds.

    Returns:
        The arrays with so many rows; as they were seen last, if one has less to the end.
    """
    end = time.monotonic() + PATIENCE
    while min(layout.n_rows for layout in found) < n_rows:
        if time.monotonic() >= end:
            return found
        time.sleep(PAUSE)
        found = look()
    return tuple(replace(layout, n_rows=n_rows) for layout in found)


_current: ContextVar[Visits | None] = ContextVar("_current", default=None)


@contextmanager
def visiting(fields: Iterable[str] = (), columns: Iterable[str] = ()) -> Iterator[Visits]:
    """Inside, each file is opened once to look at it, and all ranks find the same number of rows if it grows.

    Args:
        fields: see ``Visits``.
        columns: see ``Visits``.
    """
    visits = Visits(fields, columns)
    token = _current.set(visits)
    try:
        yield visits
    finally:
        _current.reset(token)


def current_visits() -> Visits:
    """Return the visits that go on; new ones if there are none."""
    return _current.get() or Visits()


def _which(path: str, options: OpenOptions) -> tuple[str, bool, Trust]:
    return path, options.swmr, options.trust


def _short_column(file: Any, layout: ArrayLayout | H5Error | None) -> npt.NDArray[Any] | None:
    """The values of a column that lies in the open file as it is read; None for others, and for long ones."""
    if not isinstance(layout, ArrayLayout) or layout.offset is None or layout.row_shape or layout.members:
        return None
    if layout.n_bytes > COLUMN_BYTES or layout.digests is not None or not is_on_disk(file):
        return None
    content = os.pread(file.id.get_vfd_handle(), layout.n_bytes, layout.offset)
    return np.frombuffer(content, layout.stored).astype(layout.dtype) if len(content) == layout.n_bytes else None

"""Which files are there, and the fields of those whose user names none: all arrays that have the same rows."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import H5FileError, H5KeyError, H5ValueError, listing
from ..files import OpenOptions, blamed_on, expand_paths, kind_of, list_arrays, numpy_dtype, open_h5, shape_of
from ..types import Paths

__all__ = ["expand_those_there", "fields_of_files"]

_log = logging.getLogger(__name__)


def fields_of_files(
    paths: Sequence[str], options: OpenOptions, pass_over: Callable[[str, H5FileError], None] | None
) -> list[str]:
    """Arrays of numbers and text that share axis 0, by name; the same in all files.

    Where a file has arrays of different lengths, those are meant that are most. Reads metadata only.

    Args:
        paths: the files.
        options: how they are opened.
        pass_over: is told of files that are missing or broken, which are left out; None raises their errors.

    Raises:
        H5FileError: a file is missing or broken, or all of them are.
        H5KeyError: a file leaves a doubt about which arrays are meant, or has none.
        H5ValueError: files have different arrays.
    """
    expected: tuple[str, list[str]] | None = None
    for path in paths:
        try:
            found = _fields_of(path, options)
        except H5FileError as error:
            if pass_over is None:
                raise
            pass_over(path, error)
            continue
        if expected is None:
            expected = path, found
        elif set(found) != set(expected[1]):
            here, there = sorted(set(found) - set(expected[1])), sorted(set(expected[1]) - set(found))
            raise H5ValueError(
                f"{expected[0]!r} and {path!r} have different fields: {listing(there)} only in the first, "
                f"{listing(here)} only in the second. Name those to load (load_fields), or leave one of the files out."
            )
    if expected is None:
        raise H5FileError(f"none of {listing(paths)} can be read. Look at the errors that were logged for each.")
    return expected[1]


def _fields_of(path: str, options: OpenOptions) -> list[str]:
    by_rows: dict[int, list[str]] = defaultdict(list)
    left_out = []
    with open_h5(path, swmr=options.swmr) as file, blamed_on(path, "what is"):
        for name in list_arrays(file):
            array = file[name]
            dtype, shape = numpy_dtype(array), shape_of(array)
            if dtype is not None and shape and kind_of(dtype) in ("number", "text"):
                by_rows[shape[0]].append(name)
            else:
                left_out.append(name)
    most = max(map(len, by_rows.values()), default=0)
    longest = [n_rows for n_rows, names in by_rows.items() if len(names) == most]
    if len(longest) != 1:
        each = "; ".join(f"{n_rows} rows: {listing(names)}" for n_rows, names in by_rows.items())
        raise H5KeyError(
            f"load_fields was not given, and {path!r} leaves a doubt about what a row is: it has "
            f"{each or 'no arrays of numbers or text'}. Name the arrays to load, as load_fields."
        )
    left_out += [name for n_rows, names in by_rows.items() if n_rows != longest[0] for name in names]
    if left_out:
        _log.warning("%s: %s are no fields of its %s rows and are left out", path, listing(left_out), longest[0])
    return by_rows[longest[0]]


def expand_those_there(paths: Paths, pass_over: Callable[[str, H5FileError], None], name: str = "paths") -> list[str]:
    """The files that a path argument names, without those that are missing or cannot be opened.

    Args:
        paths: see ``expand_paths``.
        pass_over: is told of each that is left out.
        name: the argument's name, for errors.

    Raises:
        H5FileError: none of them is there.
    """
    given: list[Any] = list(paths) if isinstance(paths, list | tuple) else [paths]
    there = []
    for path in given:
        try:
            for file in expand_paths(path, name):
                try:
                    with open_h5(file):
                        there.append(file)
                except H5FileError as error:
                    pass_over(file, error)
        except H5FileError as error:
            pass_over(str(path), error)
    if not there:
        raise H5FileError(
            f"{name}={listing(map(str, given))}: none of them can be read. Look at what was logged for each."
        )
    return list(expand_paths(there, name))

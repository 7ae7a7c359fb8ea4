"""Find an array in an open file, and all of its sources: other arrays, other files, and rows without a source."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, starmap
from typing import Any

import h5py
import numpy as np

from ..errors import H5FileError, H5KeyError, H5ValueError, listing
from ..options import FileOptions
from .change_guard import ChangeGuard
from .checks import check_decoding_memory, check_in_file, check_library, check_sizes, check_source
from .contents import GroupError, frame_categories, has_arrays, list_arrays, list_data, old_categories, resolve_path
from .dtypes import numpy_dtype, unknown_dtype
from .layout import filters_of
from .open import check_regular, is_in_other_file, open_h5, translate_h5py_errors
from .structures import NO_COORDINATE, SPARSE_PARTS, is_empty_matlab, is_placeholder
from .suggestions import segments_hint

__all__ = ["ArrayHandle", "ScalarError", "external_guards", "find_array", "unmapped_rows"]

_DEFAULTS = FileOptions()


class ScalarError(H5ValueError):
    """An array is a scalar, without rows."""


MAX_LEVELS = 16
"""Maximum levels of nested virtual arrays."""

MAX_RUNS = 1 << 24
"""Maximum runs of rows to count: each needs some 50 bytes of memory, and a few bytes of a file can declare billions."""


@dataclass(frozen=True)
class ArrayHandle:
    """An open array.

    Attributes:
        array: h5py's dataset.
        members: path of the member in a row that the key ends in, outermost first.
        is_external: whether the array is in a file other than the opened one.
        file: the opened file; None for the array's own.
        other_files: paths of other files with rows of the array, if they are allowed.
        categories: the array of categories for a categorical column; None otherwise.
    """

    array: Any
    members: tuple[str, ...] = ()
    is_external: bool = False
    file: Any = None
    other_files: tuple[str, ...] = ()
    categories: ArrayHandle | None = None


class _Sources:
    """Finds and checks all sources of an array: a missing one would read as fill values, without an error.

    Args:
        key: the array, for messages.
        files: whether other files are accepted, and which sizes.

    Attributes:
        paths: other files with rows of the array.
        n_bytes: bytes that its sources store, each counted once.
    """

    def __init__(self, key: str, files: FileOptions) -> None:
        self.paths: dict[str, None] = {}
        self.n_bytes = 0
        self._key, self._files = key, files
        self._above: list[tuple[str, str]] = []  # virtual arrays that lead to the present one
        self._seen: set[tuple[str, str]] = set()

    def add(self, file: Any, array: Any) -> None:
        """Add an array and all its sources.

        Args:
            file: the open file.
            array: h5py's dataset.

        Raises:
            H5Error: a source is missing or not allowed, or is the array itself.
        """
        home = array.file
        if is_in_other_file(file, array):
            self._add_file(home.filename)
        identity = (home.filename, array.name)
        if identity in self._above or len(self._above) > MAX_LEVELS:
            raise H5ValueError(
                f"{self._key!r} in {file.filename!r} is a virtual array that contains itself, or is nested more than "
                f"{MAX_LEVELS} levels deep. Name another array, or write its rows to an ordinary array."
            )
        if identity in self._seen:
            return
        self._seen.add(identity)
        for path in _storage_of(array):
            if os.path.exists(path):
                check_regular(path)
            self._add_file(path)
        if not array.is_virtual:
            n_file = h5py.h5i.get_file_id(array.id).get_filesize()
            self.n_bytes += int(
                array.id.get_storage_size() if array.external else min(array.id.get_storage_size(), n_file)
            )
            return
        self._above.append(identity)
        for name, source in dict.fromkeys(
            (mapping.file_name, mapping.dset_name) for mapping in array.virtual_sources()
        ):
            self._add_source(home, name, source)
        self._above.pop()

    def _add_source(self, file: Any, name: str, source: str) -> None:
        # A relative name can lead to a subfolder, and so to another file.
        is_own = name == "." or (os.path.isabs(name) and name == file.filename)
        check_source(file, self._key, name, source, is_own=is_own, allow_external=self._files.allow_external)
        if is_own:
            self._add_arrays(file, file, source)
            return
        for number, file_name in enumerate(_names_of_pattern(name)):
            path = _find_file(file, file_name)
            if path is None and "%" in name:  # the end of a pattern
                return
            if path is None:
                raise H5FileError(
                    f"{self._key!r} in {file.filename!r} is a virtual array over {name!r}, which does not exist; its "
                    "rows would read as fill values. Put the file back."
                )
            self._add_file(path)
            with open_h5(path) as source_file:
                self._add_arrays(file, source_file, _numbered_name(source, number) if "%b" in name else source)

    def _add_arrays(self, file: Any, source_file: Any, source: str) -> None:
        """Add the arrays of a file that match a name or a pattern of names."""
        for name in _names_of_pattern(source):
            if "%" in source and name not in source_file:  # the end of a pattern
                return
            subject = f"{self._key!r} in {file.filename!r} is a virtual array over {name!r} in {source_file.filename!r}"
            try:
                array, members = resolve_path(source_file, name, allow_external=self._files.allow_external)
            except H5KeyError as error:
                raise H5KeyError(
                    f"{subject}, which does not exist; its rows would read as fill values. Put it back, or name "
                    "another array."
                ) from error
            if members or not isinstance(array, h5py.Dataset):
                raise H5KeyError(
                    f"{subject}, which HDF5 does not find as an array; its rows would read as fill values. Name the "
                    "array itself."
                )
            if not self._files.allow_external:
                check_in_file(source_file, array, name)
            self.add(source_file, array)
            if not array.is_virtual:
                check_library(array, source_file.filename, name, f"{self._key!r} is a virtual array over it")
                check_sizes(source_file, array, name, self._files)
                chunk_bytes = math.prod(array.chunks or ()) * array.id.get_type().get_size()
                check_decoding_memory(filters_of(array), chunk_bytes, source_file.filename, name, self._files)

    def _add_file(self, path: str) -> None:
        self.paths[os.path.abspath(path)] = None


_CATEGORICAL = ("codes", "categories")
"""Arrays of the group that is a categorical column."""


def find_array(file: Any, key: str, files: FileOptions = _DEFAULTS) -> ArrayHandle:
    """Find an array by its path inside the file, which may end in a member of a compound array.

    Args:
        file: an open file.
        key: such as ``"train/images"``, or ``"obs/labels"`` for the member ``labels`` of the array ``obs``.
        files: whether other files and large sizes are accepted. A refused file is not opened, not even to refuse it.

    Raises:
        H5KeyError: the array does not exist; the message has near matches and a list of arrays.
        H5ValueError: it is a group, a scalar, or empty, or lies in another file.
    """
    with translate_h5py_errors(file.filename, repr(key)):
        array, members = resolve_path(file, key, allow_external=files.allow_external)
        if isinstance(array, h5py.Group) and has_arrays(array, *_CATEGORICAL):
            codes, categories = (find_array(file, f"{key}/{name}", files) for name in _CATEGORICAL)
            return replace(codes, categories=categories)
        _check_is_array(file, array, key)
        if not members and h5py.h5a.get_num_attrs(array.id) and is_placeholder(array.id):
            return find_array(file, _variable_of(file, key, allow_external=files.allow_external), files)
        # Before reading the shape: HDF5 may open all files of a virtual array to find it.
        if not files.allow_external:
            check_in_file(file, array, key)
        sources = _Sources(key, files)
        if array.is_virtual or files.allow_external:
            sources.add(file, array)
        _check_has_rows(file, array, key)
        check_sizes(file, array, key, files, sources.n_bytes if array.is_virtual else None)
        handle = ArrayHandle(array, members, is_in_other_file(file, array), file, tuple(sources.paths))
        name = None
        if not members and array.dtype.kind in "iu":
            name = old_categories(file, key, array, allow_external=files.allow_external)
        elif len(members) == 1 and not handle.is_external:
            name = frame_categories(file, array.name, members[0])
        return handle if name is None else replace(handle, categories=find_array(file, name, files))


def _check_is_array(file: Any, array: Any, key: str) -> None:
    path = file.filename
    if isinstance(array, h5py.Group) and any(has_arrays(array, *parts) for parts in SPARSE_PARTS):
        raise H5ValueError(
            f"{key!r} in {path!r} is a sparse matrix. Its rows can be inputs or targets, but not windows, segments or "
            "columns. Remove the arguments for these, or name another array."
        )
    if isinstance(array, h5py.Group):
        names = [f"{key.strip('/')}/{name}" for name in list_arrays(array)]
        error = GroupError(
            f"{key!r} in {path!r} is a group, not an array; the arrays below it are {listing(names)}. "
            f"Name one of them{f', such as {names[0]!r}' if names else ''}.{segments_hint(names)}"
        )
        error.key = key
        raise error
    if not isinstance(array, h5py.Dataset):
        raise H5ValueError(
            f"{key!r} in {path!r} is a named datatype, not an array; the file has {listing(list_arrays(file))}. "
            "Name one of these."
        )


def _variable_of(file: Any, key: str, *, allow_external: bool) -> str:
    """Return the array of a netCDF variable that is named like a dimension, and is no coordinate of it.

    Raises:
        H5ValueError: there is only the dimension.
    """
    group_name, _, name = key.strip("/").rpartition("/")
    group = resolve_path(file, group_name, allow_external=allow_external)[0] if group_name else file
    if NO_COORDINATE + name not in group:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} is a dimension of netCDF without values: it only has a length. Name another "
            f"array; the file has {listing(list_data(file)[0])}."
        )
    return f"{group_name}/{NO_COORDINATE}{name}".strip("/")


def _check_has_rows(file: Any, array: Any, key: str) -> None:
    if array.shape is None:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has no shape (an empty dataspace); a row is one index along axis 0. Name an "
            f"array with an axis; the file has {listing(list_arrays(file))}."
        )
    if h5py.h5a.get_num_attrs(array.id) and is_empty_matlab(array.id):
        raise H5ValueError(
            f"{key!r} in {file.filename!r} is an empty array of MATLAB ([]), which has no rows: the file stores its "
            f"sizes in place of values. Name another array; the file has {listing(list_data(file)[0])}."
        )
    if not array.shape:
        raise ScalarError(
            f"{key!r} in {file.filename!r} is a scalar (shape ()); a row is one index along axis 0. Name an array with "
            "an axis, or pass segments, whose samples can have a scalar."
        )
    if numpy_dtype(array) is None:
        raise H5ValueError(f"{key!r} in {file.filename!r} has {unknown_dtype(array)}")


def external_guards(
    file: Any, keys: Iterable[str], files: FileOptions, *, grows: bool = False, strict: bool = False
) -> tuple[ChangeGuard, ...]:
    """Return change guards of the other files that arrays of an open file have rows in, in order of discovery.

    Args:
        file: the open file.
        keys: its arrays.
        files: whether other files are accepted; if not, the result is empty.
        grows: see ``ChangeGuard.of``.
        strict: see ``ChangeGuard.of``.

    Raises:
        H5Error: an array is missing or refused (see ``find_array``).
        H5FileError: another file does not exist.
    """
    paths_of_arrays = [find_array(file, key, files).other_files for key in keys] if files.allow_external else []
    guards = []
    for path in dict.fromkeys(path for paths in paths_of_arrays for path in paths):
        try:
            guards.append(ChangeGuard.of(path, grows=grows, strict=strict))
        except OSError as error:
            raise H5FileError(
                f"{file.filename!r} has rows in {path!r}, which cannot be accessed: {error.strerror}. Put it back."
            ) from error
    return tuple(guards)


def _names_of_pattern(pattern: str) -> Iterator[str]:
    """Yield the names that match a pattern: without end if it contains a number."""
    return (_numbered_name(pattern, number) for number in (count() if "%b" in pattern else (0,)))


def _numbered_name(pattern: str, number: int) -> str:
    return "%".join(part.replace("%b", str(number)) for part in pattern.split("%%"))


def _find_file(file: Any, name: str) -> str | None:
    """Return the path of a linked file, as HDF5 searches for it; None if it does not exist."""
    folder = os.path.dirname(os.path.abspath(file.filename))
    paths = (os.path.join(at, name) for at in (folder, os.getcwd()))
    return next((path for path in paths if os.path.exists(path)), None)


def _storage_of(array: Any) -> list[str]:
    """Return the paths of other files with the bytes of an array."""
    if array.is_virtual or not array.external:
        return []
    folder = os.path.dirname(os.path.abspath(array.file.filename))
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", folder)
    return [os.path.join(prefix, name) for name, _, _ in array.external]


def unmapped_rows(array: Any) -> int | None:
    """Count the rows of an open virtual array with elements that no source provides. Opens no source.

    If a mapping contains an element twice, another element of the same row may be missed.

    Args:
        array: h5py's dataset, with at least one row.

    Returns:
        The number of rows; None if the mapping is too large to be counted.
    """
    shape = array.shape
    places, changes, n_runs = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], 0
    for source in array.virtual_sources():
        for firsts, n_rows, n_elements in _selected_runs(source.vspace, shape):
            n_runs += len(firsts)
            if n_runs > MAX_RUNS:
                return None
            begins = np.arange(firsts.start, firsts.stop, firsts.step, dtype=np.int64)
            places += [begins, np.minimum(begins + n_rows, shape[0])]
            changes += [np.full(len(begins), n_elements), np.full(len(begins), -n_elements)]
    # The number of mapped elements per row changes only at the start or end of a run.
    at = np.concatenate(places)
    order = np.argsort(at)
    n_mapped = np.cumsum(np.concatenate(changes)[order])
    return int(np.diff(at[order], append=shape[0])[n_mapped < math.prod(shape[1:])].sum())


def _selected_runs(space: Any, shape: Sequence[int]) -> Iterator[tuple[range, int, int]]:
    """Yield the first rows of runs in a selection, the rows of each run, and the selected elements of each row."""
    kind = space.get_select_type()
    if kind == h5py.h5s.SEL_ALL:
        yield range(1), shape[0], math.prod(shape[1:])
    elif kind == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
        (firsts, n_rows), *other_axes = starmap(_axis_blocks, zip(*space.get_regular_hyperslab(), shape, strict=True))
        yield firsts, n_rows, math.prod(starmap(_n_selected, zip(other_axes, shape[1:], strict=True)))
    elif kind == h5py.h5s.SEL_HYPERSLABS:
        for first, last in space.get_select_hyper_blocklist().tolist():
            n_elements = math.prod(b + 1 - a for a, b in zip(first[1:], last[1:], strict=True))
            yield range(first[0], first[0] + 1), last[0] + 1 - first[0], n_elements


def _axis_blocks(start: int, stride: int, count: int, block: int, size: int) -> tuple[range, int]:
    """Return the starts of blocks along an axis, and their length, cut at the axis's size: some have no end."""
    start, stride, count, block, size = map(int, (start, stride, count, block, size))
    n = min(count, max(0, -(-(size - start) // stride)))
    if stride == block:  # without gaps
        return range(start, start + min(n, 1)), min(n * block, size)
    return range(start, start + n * stride, stride), min(block, size)


def _n_selected(blocks: tuple[range, int], size: int) -> int:
    """Return the number of elements of the blocks that are inside the axis."""
    firsts, block = blocks
    return len(firsts) * block - max(0, firsts[-1] + block - size) if firsts else 0

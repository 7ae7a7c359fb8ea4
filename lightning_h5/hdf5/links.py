"""What an array is made of: other files that it names, and rows of virtual arrays that are made of nothing.

Nothing here opens another file.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, starmap
from typing import Any

import h5py
import numpy as np

from ..errors import H5FileError, H5ValueError, listing
from .headers import place_of

__all__ = [
    "foreign_sources",
    "is_foreign",
    "names_of",
    "own_sources",
    "refuse_foreign",
    "shape_of",
    "sources_of",
    "storage_of",
    "unmapped_rows",
]

MAX_RUNS = 1 << 24
"""Runs of rows that are looked at: each takes some 50 bytes of memory, and a few bytes of a file can name billions."""


def is_foreign(file: Any, array: Any) -> bool:
    """Whether an array was found in another file than the one that was opened."""
    return bool(place_of(array)[0] != place_of(file)[0])


def refuse_foreign(file: Any, array: Any, key: str) -> None:
    """Refuses an array that lies in another file, or keeps its bytes there.

    Raises:
        H5ValueError: it does.
    """
    if array.external:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} keeps its bytes in other files: "
            f"{listing(name for name, _, _ in array.external)}. Pass files=FileOptions(allow_external=True) if you "
            "trust the file."
        )
    # A second, independent look: whatever way led here, the object must lie in the file that was opened.
    if is_foreign(file, array):
        raise H5ValueError(
            f"{key!r} in {file.filename!r} lies in another file, {array.file.filename!r}. Pass that file itself, "
            "or files=FileOptions(allow_external=True) if you trust it."
        )


def own_sources(file: Any, array: Any, key: str, *, allow_external: bool) -> Counter[str]:
    """The arrays of the same file that a virtual array is made of, and how many pieces it has of each.

    Args:
        file: the open file.
        array: a virtual array.
        key: what it was asked for as.
        allow_external: let it be made of arrays of other files, which have to be there.

    Raises:
        H5ValueError: it leaves the file.
        H5FileError: another file is not there; a missing source would read as fill values, without an error.
    """
    inside: Counter[str] = Counter()
    for (name, source), times in _sources(array).items():
        # A "%" stands for numbers, or for itself: HDF5 then opens what is called otherwise than it says here.
        if _is_own(file, name) and "%" not in name + source:
            inside[source] += times
        elif not allow_external:
            where = "a pattern of names," if _is_own(file, name) else f"other files, among them {name!r}:"
            raise H5ValueError(
                f"{key!r} in {file.filename!r} is a virtual array over {where} {source!r}. Pass these files "
                "themselves as a list, or files=FileOptions(allow_external=True) if you trust them."
            )
        elif not _is_own(file, name) and "%" not in name and _found(file, name) is None:
            raise H5FileError(
                f"{key!r} in {file.filename!r} is a virtual array over {name!r}, which does not exist; its rows would "
                "read as fill values. Put the file back."
            )
    return inside


def foreign_sources(file: Any, array: Any) -> list[tuple[str, str]]:
    """The files that a virtual array is made of beside its own, as paths, and the arrays in them; without patterns."""
    found = []
    for name, source in _sources(array):
        if not _is_own(file, name) and "%" not in name + source and (path := _found(file, name)) is not None:
            found.append((path, source))
    return found


def sources_of(file: Any, array: Any) -> Iterator[tuple[str | None, str]]:
    """What a virtual array is made of: paths of files, None for its own, and arrays in them (see ``names_of``).

    Of a pattern of files, those that are there now.
    """
    for name, source in _sources(array):
        if _is_own(file, name):
            yield None, source
            continue
        for number, one in enumerate(names_of(name)):
            if (path := _found(file, one)) is None:
                break
            yield path, _numbered(source, number) if "%b" in name else source


def names_of(pattern: str) -> Iterator[str]:
    """The names that a pattern stands for: without end where it has a number in it."""
    return (_numbered(pattern, number) for number in (count() if "%b" in pattern else (0,)))


def storage_of(array: Any) -> list[str]:
    """Paths of the files that an array keeps its bytes in."""
    folder = os.path.dirname(os.path.abspath(array.file.filename))
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", folder)
    return [os.path.join(prefix, name) for name, _, _ in array.external or ()]


def shape_of(array: Any) -> tuple[int, ...] | None:
    """An array's shape, without a look at other files; None for an empty dataspace.

    HDF5 finds the length of a virtual array that may grow by opening all files that it is made of, and nothing says
    surely whether one may. Here a virtual array has the shape that was written down when it was made.
    """
    if array.is_virtual and (sources := array.virtual_sources()):
        extent: tuple[int, ...] = sources[0].vspace.get_simple_extent_dims()
        return extent
    shape: tuple[int, ...] | None = array.shape
    return shape


def _is_own(file: Any, name: str) -> bool:
    """Whether a source's file is the array's own. Of a relative name that is not sure: it may lie in a folder below."""
    return name == "." or (os.path.isabs(name) and name == file.filename)


def _found(file: Any, name: str) -> str | None:
    """The path of a file that another names; None where there is none."""
    folder = os.path.dirname(os.path.abspath(file.filename))
    places = (os.path.join(at, name) for at in (folder, os.getcwd()))  # where HDF5 looks, in its order
    return next((path for path in places if os.path.exists(path)), None)


def _numbered(pattern: str, number: int) -> str:
    """A name that a pattern stands for."""
    return "%".join(part.replace("%b", str(number)) for part in pattern.split("%%"))


def _sources(array: Any) -> Counter[tuple[str, str]]:
    """File and array of each source, and how many pieces are made of it."""
    return Counter((source.file_name, source.dset_name) for source in array.virtual_sources())


def unmapped_rows(array: Any) -> int | None:
    """Rows of an open virtual array of which some element, or all, is made of nothing. Opens no source.

    Where a mapping names an element twice, another one of the same row may be missed.

    Args:
        array: h5py's dataset, with a row or more.

    Returns:
        How many; None where they are too many to be counted.
    """
    shape = array.shape
    places, changes, n_runs = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], 0
    for source in array.virtual_sources():
        for firsts, n_rows, n_elements in _runs(source.vspace, shape):
            n_runs += len(firsts)
            if n_runs > MAX_RUNS:
                return None
            begins = np.arange(firsts.start, firsts.stop, firsts.step, dtype=np.int64)
            places += [begins, np.minimum(begins + n_rows, shape[0])]
            changes += [np.full(len(begins), n_elements), np.full(len(begins), -n_elements)]
    # From one row to the next, what is mapped changes only where a run begins or ends.
    at = np.concatenate(places)
    order = np.argsort(at)
    mapped = np.cumsum(np.concatenate(changes)[order])
    return int(np.diff(at[order], append=shape[0])[mapped < math.prod(shape[1:])].sum())


def _runs(space: Any, shape: Sequence[int]) -> Iterator[tuple[range, int, int]]:
    """Where runs of rows begin that a selection is in, how many rows each has, and its elements in each of them."""
    kind = space.get_select_type()
    if kind == h5py.h5s.SEL_ALL:
        yield range(1), shape[0], math.prod(shape[1:])
    elif kind == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
        (firsts, n_rows), *others = starmap(_blocks, zip(*space.get_regular_hyperslab(), shape, strict=True))
        yield firsts, n_rows, math.prod(starmap(_length, zip(others, shape[1:], strict=True)))
    elif kind == h5py.h5s.SEL_HYPERSLABS:
        for first, last in space.get_select_hyper_blocklist().tolist():
            n_elements = math.prod(b + 1 - a for a, b in zip(first[1:], last[1:], strict=True))
            yield range(first[0], first[0] + 1), last[0] + 1 - first[0], n_elements


def _blocks(start: int, stride: int, count: int, block: int, size: int) -> tuple[range, int]:
    """Where blocks along an axis begin, and their length. Of an array that may grow they have no end by themselves."""
    start, stride, count, block, size = map(int, (start, stride, count, block, size))
    n = min(count, max(0, -(-(size - start) // stride)))
    if stride == block:  # one after the other
        return range(start, start + min(n, 1)), min(n * block, size)
    return range(start, start + n * stride, stride), min(block, size)


def _length(blocks: tuple[range, int], size: int) -> int:
    """Elements of such blocks that lie on the axis."""
    firsts, block = blocks
    return len(firsts) * block - max(0, firsts[-1] + block - size) if firsts else 0

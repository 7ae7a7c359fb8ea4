"""What repacking a file did, as data: each array before and after."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h5py

from ...files import shape_of
from .compression import steps_of
from .raw_array import chunks_of
from .tree_copy import TreeCopy

__all__ = ["RepackReport", "RepackedArray", "StoredAs", "repacked_arrays"]


@dataclass(frozen=True, kw_only=True)
class StoredAs:
    """How an array lies in a file.

    Attributes:
        chunks: shape of a chunk; None where it has none.
        filters: names of its filters, in the order of writing.
        n_bytes: that it takes in the file.
        row_cost: bytes that are decoded for one row alone: all of the chunks that it takes part in.
    """

    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    n_bytes: int
    row_cost: int


@dataclass(frozen=True, kw_only=True)
class RepackedArray:
    """What became of an array.

    Attributes:
        name: one of its names in the file.
        shape: of the array; None where it has none.
        dtype: of an element, in words.
        n_bytes: of all rows, decoded.
        is_rewritten: whether its rows were laid out anew; otherwise it is stored as before.
        is_shuffled: whether its rows were permuted.
        before: how it lay in the source.
        after: how it lies in the copy.
        note: why it is not as asked, if so.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    n_bytes: int
    is_rewritten: bool
    is_shuffled: bool
    before: StoredAs
    after: StoredAs
    note: str


@dataclass(frozen=True, kw_only=True)
class RepackReport:
    """What ``repack_file`` did.

    Attributes:
        source: the file that was copied.
        target: the copy.
        arrays: all arrays, in the order of the file.
        n_bytes_before: size of the source.
        n_bytes_after: size of the copy.
        ratio: the latter by the former.
        n_bytes_decoded: bytes of all rows that were written anew, decoded.
        seconds: that the copy took, without the verification.
        mib_per_second: decoded MiB a second.
        verify_seconds: that the verification took; None where there was none.
    """

    source: str
    target: str
    arrays: tuple[RepackedArray, ...]
    n_bytes_before: int
    n_bytes_after: int
    ratio: float
    n_bytes_decoded: int
    seconds: float
    mib_per_second: float
    verify_seconds: float | None


def repacked_arrays(file: Any, copy: Any, tree: TreeCopy) -> Iterator[RepackedArray]:
    """What became of each array.

    Args:
        file: the open source.
        copy: the open copy.
        tree: what is a copy of what.
    """
    for address, plan in tree.plans.items():
        place = tree.places[address]
        one, other = h5py.h5o.open(file.id, place), h5py.h5o.open(copy.id, place)
        yield RepackedArray(
            name=plan.name,
            shape=shape_of(h5py.Dataset(one)),
            dtype=_words(one),
            n_bytes=plan.n_bytes,
            is_rewritten=plan.way in ("rows", "boxes"),
            is_shuffled=plan.is_shuffled,
            before=_stored_as(one),
            after=_stored_as(other),
            note=plan.note,
        )


def _words(array: Any) -> str:
    try:
        return str(array.dtype)
    except TypeError:
        return "a type that NumPy does not have"


def _stored_as(array: Any) -> StoredAs:
    plist, shape, itemsize = array.get_create_plist(), shape_of(h5py.Dataset(array)) or (), array.get_type().get_size()
    chunks = chunks_of(array)
    filters = steps_of(plist)[0]
    row_cost = math.prod(shape[1:]) * itemsize if shape else 0
    if chunks is not None and (filters or chunks[1:] != shape[1:]):
        across = (-(-size // step) for size, step in zip(shape[1:], chunks[1:], strict=True))
        row_cost = math.prod(across) * math.prod(chunks) * itemsize
    names = tuple("gzip" if found.id == 1 else found.label.split(";")[0] for found in filters)
    return StoredAs(chunks=chunks, filters=names, n_bytes=array.get_storage_size(), row_cost=row_cost)

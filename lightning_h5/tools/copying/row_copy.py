"""The rows of one array into its copy, in order or permuted, in bounded memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import h5py
import numpy as np

from ...types import IntArray
from .buckets import RowBuckets
from .plan import ArrayPlan, box_of
from .raw_array import Bytes, RawArray, read_region, write_region, written_anywhere
from .raw_rows import read_pieces
from .references import References
from .row_targets import RowTarget
from .stored_types import has_class

__all__ = ["RowCopy", "boxes", "ordered_pieces", "value_boxes"]

BOX_BYTES = 32 << 20  # of a row that is too large for memory; each box decodes whole chunks of the source
MOST_PLACES = 1 << 18  # of rows that are permuted, at a time: each takes some words, which is more than a label does
VALUE_BYTES = 4 << 20  # of an array that is copied value by value, at a time
MOST_VALUES = 1 << 16  # of references, text and lists, each of which becomes a Python object

Corner: TypeAlias = tuple[int, ...]
Order = Callable[[int, int], IntArray]
"""Where the rows ``[start, stop)`` of the source go."""


@dataclass(frozen=True, kw_only=True)
class RowCopy:
    """Copies the rows of arrays.

    Attributes:
        path: the source.
        order: where rows go that are permuted; None where none are.
        references: of the two files.
        pool: threads that decode and encode.
        folder: for temporary files.
        done: called with the decoded bytes of rows that were written.
    """

    path: str
    order: Order | None
    references: References
    pool: Executor
    folder: str
    done: Callable[[int], None]

    def copy(self, plan: ArrayPlan, original: Any, copied: Any) -> None:
        """Copies one array.

        Args:
            plan: what becomes of it.
            original: the low-level dataset.
            copied: that of the copy, of which no row is written yet.
        """
        if plan.way == "values":
            self._copy_values(plan, original, copied)
            return
        source, target = RawArray.of(original, self.path, plan.name), RawArray.of(copied, "", plan.name)
        if not written_anywhere(original):
            return
        if plan.way == "boxes":
            for corner, shape, content in boxes(source, plan, self.order):
                write_region(target, corner, shape, content)
                self.done(content.nbytes)
            return
        rows = RowTarget(target, self.pool, self.done)
        pieces = ordered_pieces(
            source, plan, self.order, pool=self.pool, folder=self.folder, multiple=rows.rows_per_chunk
        )
        with closing(pieces):
            for first, piece in pieces:
                rows.put(first, piece)
        rows.finish()

    def _copy_values(self, plan: ArrayPlan, original: Any, copied: Any) -> None:
        """Through the HDF5 library, which gives text and lists as pointers, and takes these again."""
        space, stored = original.get_space(), original.get_type()
        if space.get_simple_extent_type() == h5py.h5s.NULL or not space.get_simple_extent_npoints():
            return
        if not written_anywhere(original) or copied.get_create_plist().get_layout() == h5py.h5d.VIRTUAL:
            return  # through a virtual array values would go to its sources, which have their own
        has_references = has_class(stored, h5py.h5t.REFERENCE)
        if space.get_simple_extent_type() == h5py.h5s.SCALAR:
            values, memory_type = self._values(original, None, has_references)
            copied.write(h5py.h5s.ALL, h5py.h5s.ALL, values, memory_type)
            return
        n_values = MOST_VALUES if has_references else MOST_PLACES
        for corner, box in value_boxes(original.shape, stored.get_size(), n_values):
            values, memory_type = self._values(original, (corner, box), has_references)
            if not plan.is_shuffled or self.order is None:
                runs = iter([(corner[0], values)])
            else:
                runs = _by_row(values, self.order(corner[0], corner[0] + box[0]))
            for first, part in runs:
                space = copied.get_space()
                space.select_hyperslab((first, *corner[1:]), part.shape)
                copied.write(h5py.h5s.create_simple(part.shape), space, part, memory_type)
            self.done(math.prod(box) * stored.get_size())

    def _values(self, original: Any, where: tuple[Corner, Corner] | None, has_references: bool) -> tuple[Any, Any]:
        """Values of a box, or of a scalar, and the type that they have in memory."""
        shape: tuple[int, ...] = () if where is None else where[1]
        memory, space = h5py.h5s.ALL, h5py.h5s.ALL
        if where is not None:
            memory, space = h5py.h5s.create_simple(shape), original.get_space()
            space.select_hyperslab(*where)
        if not has_references:
            stored = original.get_type()
            raw = np.empty(shape, dtype=f"V{stored.get_size()}")
            original.read(memory, space, raw, stored)
            return raw, stored
        memory_type = h5py.h5t.py_create(original.dtype)
        values = np.zeros(shape, dtype=original.dtype)
        original.read(memory, space, values, memory_type)
        return self.references.translated(values), memory_type


def value_boxes(shape: Corner, itemsize: int, n_values: int) -> Iterator[tuple[Corner, Corner]]:
    """Some rows at a time of an array that is copied value by value, or a part of one where rows are large.

    Args:
        shape: of the array, with at least one axis and one element.
        itemsize: bytes of an element.
        n_values: the most elements.

    Yields:
        The corner of a box, and its shape.
    """
    row_values = math.prod(shape[1:])
    most = max(1, min(n_values, VALUE_BYTES // itemsize))
    box = (most // row_values, *shape[1:]) if most >= row_values else box_of(shape, 1, most)
    for corner in itertools.product(*(range(0, size, step) for size, step in zip(shape, box, strict=True))):
        yield corner, tuple(min(step, size - at) for at, step, size in zip(corner, box, shape, strict=True))


def _by_row(values: Any, places: IntArray) -> Iterator[tuple[int, Any]]:
    for at, place in enumerate(places.tolist()):
        yield place, values[at : at + 1]


def ordered_pieces(
    source: RawArray,
    plan: ArrayPlan,
    order: Order | None,
    *,
    pool: Executor,
    folder: str,
    multiple: int,
    with_unwritten: bool = False,
) -> Generator[tuple[int, Bytes]]:
    """The rows that a copy has, in their order there, as ``(first row, rows)``; memory is used again.

    Rows that are permuted are read once, in the order of the source, and go to the copy by way of buckets: a temporary
    file of the decoded rows' size is written and read once, where they take more than 32 MiB.

    Args:
        source: the array.
        plan: what becomes of it.
        order: where rows go that are permuted.
        pool: threads that decode.
        folder: for temporary files.
        multiple: permuted rows come in multiples of this.
        with_unwritten: give also rows in order that were never written; permuted ones are given anyway.
    """
    if order is None or not plan.is_shuffled:
        yield from read_pieces(source, pool, folder, with_unwritten=with_unwritten)
        return
    with RowBuckets(source.n_rows, source.row_bytes, multiple=multiple, folder=folder) as buckets:
        for first, rows in read_pieces(source, pool, folder, with_unwritten=True):
            for at in range(0, len(rows), MOST_PLACES):
                some = rows[at : at + MOST_PLACES]
                buckets.put(some, order(first + at, first + at + len(some)))
        yield from buckets


def boxes(
    source: RawArray, plan: ArrayPlan, order: Order | None
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Bytes]]:
    """Rows too large for memory, in boxes of whole chunks of the copy: corner in the copy, shape, content.

    Args:
        source: the array.
        plan: what becomes of it.
        order: where rows go that are permuted.
    """
    steps = box_of(source.shape, source.itemsize, BOX_BYTES, plan.chunks)
    content = np.empty(math.prod(steps) * source.itemsize, dtype=np.uint8)
    for row in range(source.n_rows):
        place = row if order is None or not plan.is_shuffled else int(order(row, row + 1)[0])
        grid = [range(0, size, step) for size, step in zip(source.shape[1:], steps[1:], strict=True)]
        for corner in itertools.product(*grid):
            inner = tuple(
                min(step, size - at) for at, step, size in zip(corner, steps[1:], source.shape[1:], strict=True)
            )
            shape = (1, *inner)
            read_region(source, (row, *corner), shape, content)
            yield (place, *corner), shape, content[: math.prod(shape) * source.itemsize]

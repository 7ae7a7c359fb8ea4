"""A copy compared with its source: links, types, attributes, and every row, read through the HDF5 library."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import h5py
import numpy as np

from ..errors import H5CorruptError
from ..hdf5.checks import may_run_code
from .compression import Bytes
from .file_copy import (
    ArrayPlan,
    FileCopy,
    address_of,
    attributes_of,
    has_class,
    is_variable,
    links_in,
    object_pieces,
    read_attribute,
    was_written,
)
from .row_io import (
    PIECE_BYTES,
    Box,
    boxes_of,
    chunks_of,
    pipeline_of,
    read_box,
    read_rows,
    row_bytes_of,
    rows_box,
    shuffle_pieces,
)


class CopyVerifier:
    """Compares a copy with its source.

    Neither our encoders nor what we make of a chunk index judge themselves: the HDF5 library reads both files, except
    for Blosc2 in the source, whose chunks the library finds and this package decodes (see ``hdf5.checks``).

    Args:
        made: what made the copy.
        copy: the copy, open for reading.
        pool: threads that read ahead.
        folder: for temporary files.
        done: called with the decoded bytes of rows that were compared.
    """

    def __init__(self, made: FileCopy, copy: Any, pool: Executor, folder: str, done: Callable[[int], object]) -> None:
        self._made, self._source, self._copy = made, made.source, copy
        self._pool, self._folder, self._done = pool, folder, done

    def verify(self) -> None:
        """Compare everything.

        Raises:
            H5CorruptError: something differs.
        """
        self._check_attributes(self._source["/"].id, self._copy["/"].id, "/")
        addresses = {address_of(self._source["/"].id): address_of(self._copy["/"].id)}
        for link, other in zip_longest(links_in(self._source), links_in(self._copy)):
            self._ensure(link and other and link.path == other.path, (link or other).shown, "links")
            self._ensure(link.info.type == other.info.type and link.value == other.value, link.shown, "links")
            if link.item is None:
                continue
            self._ensure(addresses.setdefault(link.address, other.address) == other.address, link.shown, "links")
            if not link.is_first:
                continue
            self._ensure(other.is_first and type(link.item) is type(other.item), link.shown, "kinds")
            self._check_attributes(link.item, other.item, link.shown)
            if isinstance(link.item, h5py.h5d.DatasetID):
                self._check_array(self._made.plans[link.address], link.item, other.item)
            elif isinstance(link.item, h5py.h5t.TypeID):
                self._ensure(link.item == other.item, link.shown, "types")

    def _ensure(self, is_same: Any, name: str, what: str) -> None:
        if not is_same:
            raise H5CorruptError(
                f"the copy of {name!r} in {self._source.filename!r} differs from it in its {what}. The copy is "
                "discarded: check the disk and the memory of this machine, or try another compression."
            )

    def _check_attributes(self, original: Any, copied: Any, name: str) -> None:
        for one, two in zip_longest(attributes_of(original), attributes_of(copied)):
            self._ensure(one and two and one.name == two.name, name, "attributes")
            what = f"attribute {one.name.decode(errors='replace')!r}"
            self._ensure(one.get_type() == two.get_type() and one.shape == two.shape, name, what)
            if one.get_space().get_simple_extent_type() != h5py.h5s.NULL:
                is_objects = _is_objects(one.get_type())
                values = (read_attribute(each, as_objects=is_objects)[0] for each in (one, two))
                self._ensure(self._equal(*values), name, what)

    def _check_array(self, plan: ArrayPlan, original: Any, copied: Any) -> None:
        self._ensure(original.get_type() == copied.get_type(), plan.name, "dtype")
        if plan.is_elsewhere:
            self._ensure(_sources_of(original) == _sources_of(copied), plan.name, "sources")
            return
        spaces = original.get_space(), copied.get_space()
        self._ensure(_extent_of(spaces[0]) == _extent_of(spaces[1]), plan.name, "shape")
        self._ensure(_fill_of(original) == _fill_of(copied), plan.name, "fill value")
        if not spaces[0].get_simple_extent_npoints() or not (was_written(original) or was_written(copied)):
            return
        order, stored = self._made.order if plan.is_shuffled else None, original.get_type()
        if not original.shape or _is_objects(stored):
            found = h5py.Dataset(copied)
            for part, values in object_pieces(h5py.Dataset(original), plan.name):
                if order is None:
                    is_same = self._equal(np.asarray(values), np.asarray(found[part]))
                else:
                    places = order(part.start, part.start + len(values)).tolist()
                    is_same = all(self._equal(row, found[at]) for at, row in zip(places, values, strict=True))
                self._ensure(is_same, plan.name, "values")
            self._done(plan.n_bytes)
            return
        pipeline = pipeline_of(original, self._source.filename, plan.name) if may_run_code(original) else None
        if order is None and pipeline is None:
            for box in boxes_of(original.shape, stored.get_size(), PIECE_BYTES, (chunks_of(original) or (1,))[0]):
                self._check_rows(plan.name, copied, box, read_box(original, plan.name, box))
            return
        pieces = read_rows(original, plan.name, pipeline, pool=self._pool, folder=self._folder)
        if order is not None:
            pieces = shuffle_pieces(pieces, order, original.shape[0], row_bytes_of(original), self._folder)
        for first, rows in pieces:
            self._check_rows(plan.name, copied, rows_box(original.shape, first, len(rows)), rows)

    def _check_rows(self, name: str, copied: Any, box: Box, expected: Bytes) -> None:
        is_same = np.array_equal(read_box(copied, name, box), expected.reshape(-1))
        self._ensure(is_same, name, f"rows {box[0][0]} to {box[0][0] + box[1][0] - 1}")
        self._done(expected.nbytes)

    def _equal(self, original: Any, copied: Any) -> bool:
        """Return whether values are the same, to the bit; references, if they point at copies of the same."""
        if isinstance(original, np.ndarray) and isinstance(copied, np.ndarray):
            if original.shape != copied.shape or original.dtype != copied.dtype:
                return False
            if not original.dtype.hasobject:
                return original.tobytes() == copied.tobytes()
            if original.dtype.names is not None:
                return all(self._equal(original[name], copied[name]) for name in original.dtype.names)
            return all(self._equal(*each) for each in zip(original.reshape(-1), copied.reshape(-1), strict=True))
        if not isinstance(original, h5py.h5r.Reference):
            return bool(original == copied)
        place = self._made.place_of(original)
        if place is None or not copied:
            return place is None and not copied
        expected = address_of(h5py.h5o.open(self._copy.id, place))
        return address_of(h5py.h5r.dereference(copied, self._copy.id)) == expected


def _is_objects(stored: Any) -> bool:
    return is_variable(stored) or has_class(stored, h5py.h5t.REFERENCE)


def _extent_of(space: Any) -> Any:
    kind = space.get_simple_extent_type()
    is_simple = kind == h5py.h5s.SIMPLE
    return kind, [space.get_simple_extent_dims(limits) for limits in (False, True)] if is_simple else []


def _fill_of(array: Any) -> Any:
    plist = array.get_create_plist()
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return plist.fill_value_defined()
    with suppress(TypeError, ValueError, RuntimeError):  # a number format that NumPy does not have
        return np.asarray(h5py.Dataset(array).fillvalue).tobytes()
    return None


def _sources_of(array: Any) -> Any:
    """Return what an array declares of the places of its values: parts of other arrays or files, and the fill value."""
    plist = array.get_create_plist()
    external = [plist.get_external(at) for at in range(plist.get_external_count())]
    mappings = h5py.Dataset(array).virtual_sources() if plist.get_layout() == h5py.h5d.VIRTUAL else []
    return external, _fill_of(array), [(m[1], m[2], m[0].encode(), m[3].encode()) for m in mappings]

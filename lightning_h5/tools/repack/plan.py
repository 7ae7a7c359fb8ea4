"""The options of a copy, and the plan for each array, made before the first byte is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import h5py

from ...errors import H5ValueError, listing
from ...hdf5 import ArrayHandle, filters_of, layout_of, numpy_dtype, shape_of
from ...hdf5.checks import check_library, check_sizes, ensure_filters, may_run_code
from ...hdf5.chunk_index import moves_axis
from ...hdf5.contents import resolve_path
from ...hdf5.structures import INDEX_PREFIX, is_in_index
from ...options import FileOptions
from ...readers import check_readable_text
from .compression import LOSSLESS, FilterStep, check_compression, filter_steps, fitting_steps, stored_steps
from .objects import address_of, has_class, is_variable, links_in
from .row_io import chunks_of, raw_layout

CHUNK_BYTES = 512 << 10
"""The decoded bytes of a chunk, or down to half of it.

Reading a random row decodes a whole chunk, so chunks should be small; but looking up a chunk takes time, and small
chunks compress less. The number of rows is a power of two, so that chunks of different fields begin at the same rows.
"""

STORE_CHUNK_BYTES = 4 << 20
"""The same for files in object stores, where the latency of a request equals the transfer of a MiB."""

MAX_CHUNK_BYTES = 32 << 20
"""The largest decoded chunk: each thread holds one chunk, and each random row decodes one."""


@dataclass(frozen=True, kw_only=True)
class RepackOptions:
    """The options; see ``repack_file``.

    Raises:
        H5ValueError: options contradict each other, or a compression is not installed.
    """

    rows_per_chunk: int | Literal["auto"] | None = None
    compression: str = "keep"
    level: int | None = None
    shuffle_filter: bool = False
    checksum: bool = False
    shuffle_rows: int | None = None
    shuffle_keys: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    verify: bool = False
    for_object_store: bool = False
    files: FileOptions

    def __post_init__(self) -> None:
        if isinstance(self.rows_per_chunk, int) and self.rows_per_chunk < 1:
            raise H5ValueError(
                f"rows_per_chunk={self.rows_per_chunk} was given, but a chunk has at least one row. Pass 1 or more, or "
                "'auto'."
            )
        if self.shuffle_keys is not None and self.shuffle_rows is None:
            raise H5ValueError("shuffle_keys was given without shuffle_rows. Pass a seed as shuffle_rows, too.")
        check_compression(self.compression, self.level, self.shuffle_filter)


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """How an array is copied.

    Attributes:
        name: one of its names in the file.
        way: "as it is": copied by the HDF5 library as stored; "elsewhere": copied as a link to values in other files or
            arrays, which are never read; "values": values rewritten in the same layout; "rows": rows rewritten in other
            chunks, or without chunks.
        chunks: shape of a chunk in the copy; None without chunks. Only for "rows".
        steps: filters of the copy. Only for "rows".
        is_shuffled: whether its rows are permuted.
        n_bytes: decoded bytes of all rows.
        note: the reason if an option is not applied to the array.
    """

    name: str
    way: Literal["as it is", "elsewhere", "values", "rows"] = "as it is"
    chunks: tuple[int, ...] | None = None
    steps: tuple[FilterStep, ...] = ()
    is_shuffled: bool = False
    n_bytes: int = 0
    note: str = ""


class _Array(NamedTuple):
    """An array of the file: its name, shape, bytes of a row, and whether a row is a single value (a label, an id)."""

    name: str
    id: Any
    shape: tuple[int, ...]
    row_bytes: int
    is_column: bool


def plan_arrays(file: Any, options: RepackOptions) -> dict[int, ArrayPlan]:
    """Return the plan for each array of an open file, by its address there.

    Raises:
        H5KeyError: an array in the options does not exist.
        H5ValueError: an option cannot be applied to the arrays, or an array to read declares far more than it stores.
    """
    arrays = {}
    for link in links_in(file):
        if link.is_first and isinstance(link.item, h5py.h5d.DatasetID):
            # Not h5py's shape, for which the HDF5 library opens the sources of a virtual array.
            shape, stored = shape_of(link.item) or (), link.item.get_type()
            is_column = len(shape) == 1 and stored.get_class() not in (h5py.h5t.COMPOUND, h5py.h5t.ARRAY)
            row_bytes = math.prod(shape[1:]) * stored.get_size() if shape else 0
            arrays[link.address] = _Array(link.shown, link.item, shape, row_bytes, is_column)
    key_addresses = arrays.keys() if options.keys is None else _named_addresses(file, options.keys, "keys")
    shuffled_addresses = _permuted_arrays(file, arrays, options)
    _check_indexes(arrays, shuffled_addresses)
    has_rows = any(not array.is_column and array.row_bytes and all(array.shape) for array in arrays.values())
    plans = {}
    for address, array in arrays.items():
        layout_options = options if address in key_addresses else None
        plan = plans[address] = _plan(array, layout_options, options, address in shuffled_addresses, has_rows)
        if plan.note and options.keys is not None and layout_options:
            cure = "Repack the other files by themselves, and leave" if "other files" in plan.note else "Leave"
            raise H5ValueError(f"{array.name!r} is in keys, but {plan.note}. {cure} it out of keys.")
        if plan.way != "elsewhere":
            _check_plan(file, array.id, plan, options)
    return plans


def _check_indexes(arrays: Mapping[int, _Array], shuffled_addresses: Collection[int]) -> None:
    """Raise an ``H5ValueError`` for shuffling a table with an index of PyTables, which stores row numbers."""
    names = [array.name for array in arrays.values()]
    for address in shuffled_addresses:
        group, slash, name = arrays[address].name.rpartition("/")
        if any(other.startswith(f"{group}{slash}{INDEX_PREFIX}{name}/") for other in names):
            raise H5ValueError(
                f"{arrays[address].name!r} cannot be shuffled: its index of PyTables would refer to other rows. Remove "
                "the index (table.cols.COLUMN.remove_index() in PyTables), and create it again in the copy."
            )


def _check_plan(file: Any, array: Any, plan: ArrayPlan, options: RepackOptions) -> None:
    """Raise an error if an array cannot be read as planned."""
    dataset = h5py.Dataset(array)
    if (plan.way != "as it is" or options.verify) and array.shape:
        check_sizes(file, dataset, plan.name, options.files)
        ensure_filters(filters_of(dataset), file.filename, plan.name)
        if may_run_code(array) and (plan.way != "rows" or raw_layout(array, file.filename, plan.name) is None):
            why = "not all of its chunks can be decoded one by one to be copied or compared"
            check_library(dataset, file.filename, plan.name, why)
    # Before the HDF5 library reads text and lists, which can hang on a damaged heap.
    if array.shape and is_variable(array.get_type()) and numpy_dtype(dataset) is not None:
        check_readable_text(layout_of(ArrayHandle(dataset), file.filename, plan.name))


def _named_addresses(file: Any, keys: Sequence[str], argument: str) -> set[int]:
    """Return the addresses of named arrays, without opening other files."""
    addresses = set()
    for key in keys:
        try:
            array, members = resolve_path(file, key, allow_external=False)
        except H5ValueError as error:
            raise H5ValueError(
                f"{argument} names {key!r}, which is a link from {file.filename!r} to another file; repack opens no "
                f"other file. Repack that file by itself, or leave it out of {argument}."
            ) from error
        if members or not isinstance(array, h5py.Dataset):
            raise H5ValueError(
                f"{argument} names {key!r}, which is not an array by itself. Name an array or a whole table."
            )
        addresses.add(address_of(array.id))
    return addresses


def _permuted_arrays(file: Any, arrays: Mapping[int, _Array], options: RepackOptions) -> set[int]:
    """Return the addresses of arrays to permute: all arrays with rows, or the named ones, with equal row counts."""
    if options.shuffle_rows is None:
        return set()
    if options.shuffle_keys is None:
        chosen = {address for address, array in arrays.items() if array.shape}
    else:
        chosen = _named_addresses(file, options.shuffle_keys, "shuffle_keys")
    counts = {arrays[address].name: (arrays[address].shape or (0,))[0] for address in chosen}
    if len(set(counts.values())) > 1:
        usual_count = Counter(counts.values()).most_common(1)[0][0]
        example = [name for name, n in counts.items() if n == usual_count][:4]
        raise H5ValueError(
            f"shuffle_rows was given for arrays of {file.filename!r} with different numbers of rows: {listing(counts)} "
            f"with {', '.join(f'{n:,}' for n in list(counts.values())[:12])} rows. Name the arrays that belong "
            f"together, such as shuffle_keys={example!r}."
        )
    return chosen


def _plan(
    array: _Array, layout_options: RepackOptions | None, options: RepackOptions, is_shuffled: bool, has_rows: bool
) -> ArrayPlan:
    """Return the plan for an array.

    Args:
        array: the array.
        layout_options: the options for its layout; None if ``keys`` leaves it out.
        options: the options of the copy.
        is_shuffled: whether its rows are permuted.
        has_rows: whether the file has arrays other than columns.
    """
    stored, plist, shape = array.id.get_type(), array.id.get_create_plist(), array.shape
    n_bytes = array.row_bytes * shape[0] if shape else 0
    plan = ArrayPlan(name=array.name, is_shuffled=is_shuffled, n_bytes=n_bytes)
    layout = plist.get_layout()
    if layout == h5py.h5d.VIRTUAL or plist.get_external_count():
        return _plan_elsewhere(plan, h5py.Dataset(array.id), options)
    if is_in_index(array.name):
        return replace(plan, note="belongs to an index of PyTables and is copied unchanged")
    has_references = has_class(stored, h5py.h5t.REFERENCE)
    is_moved = layout == h5py.h5d.CHUNKED and moves_axis(array.id)
    # HDF5's own copy loses references, and can crash if it reports wrong coordinates of chunks.
    as_stored = replace(plan, way="values" if has_references or is_moved else "as it is")
    loses = any(step.id not in LOSSLESS for step in stored_steps(plist))
    why = ""
    if has_references:
        why = "holds references"
    elif is_variable(stored):
        if is_shuffled:
            return replace(plan, way="values")
        why = "is variable-length, which HDF5 cannot compress,"
    elif array.row_bytes > MAX_CHUNK_BYTES:
        why = f"has rows of more than {MAX_CHUNK_BYTES >> 20} MiB"
    elif loses and (layout_options is None or layout_options.compression == "keep"):
        why = "has a filter that may lose digits if it is applied again"
    if why and is_shuffled:
        cure = "Name a compression" if loses else "Leave it out"
        raise H5ValueError(f"{plan.name!r} cannot be shuffled: it {why.rstrip(',')}. {cure}.")
    if why and is_moved and loses:
        raise H5ValueError(f"{plan.name!r} {why}, and grows along another axis. Name a compression, or use `h5repack`.")
    if why:
        return replace(as_stored, note=f"{why} and is copied unchanged")
    if n_bytes and (is_shuffled or (layout_options and layout != h5py.h5d.COMPACT)):
        return _plan_rows(array, layout_options, plan, as_stored, has_rows)
    return as_stored


def _plan_elsewhere(plan: ArrayPlan, array: Any, options: RepackOptions) -> ArrayPlan:
    """Plan for an array with values in other files, or that is virtual."""
    sources = array.virtual_sources() if array.is_virtual else []
    is_own = any(source.file_name in (".", array.file.filename) for source in sources)
    if plan.is_shuffled:
        raise H5ValueError(
            f"{plan.name!r} cannot be shuffled: it {'is virtual' if is_own else 'is in other files'}. Repack the other "
            "files by themselves, and leave it out."
        )
    if is_own and options.shuffle_rows is not None:
        raise H5ValueError(
            f"{plan.name!r} is virtual and shows rows of this file, which shuffling would move. Write its values to an "
            "ordinary array first, or repack without shuffle_rows."
        )
    note = "is virtual and remains so" if is_own else "is in other files and remains a link"
    return replace(plan, way="elsewhere", note=note)


def _plan_rows(
    array: _Array, layout_options: RepackOptions | None, plan: ArrayPlan, as_stored: ArrayPlan, has_rows: bool
) -> ArrayPlan:
    """Plan for rewritten rows, in chunks unless no option needs them."""
    shape, row_bytes, old_chunks = array.shape, array.row_bytes, chunks_of(array.id)
    stored = steps = stored_steps(array.id.get_create_plist())
    rows_per_chunk = None if layout_options is None else layout_options.rows_per_chunk
    if layout_options is not None:
        itemsize = array.id.get_type().get_size()
        steps = filter_steps(
            layout_options.compression,
            layout_options.level,
            layout_options.shuffle_filter,
            layout_options.checksum,
            itemsize,
            stored,
        )
    is_left = (
        isinstance(rows_per_chunk, int)
        and layout_options is not None
        and layout_options.keys is None
        and array.is_column
        and has_rows
    )
    rows_before = old_chunks[0] if old_chunks and old_chunks[0] * row_bytes <= MAX_CHUNK_BYTES else None
    if is_left:
        note = (
            f"is not written in chunks of {rows_per_chunk} rows, which are for arrays with larger rows; name it in "
            "keys to do so"
        )
        plan, as_stored = replace(plan, note=note), replace(as_stored, note=note)
        if steps == stored and not plan.is_shuffled:
            return as_stored
        rows_per_chunk = rows_before
    maxshape = array.id.get_space().get_simple_extent_dims(True)
    stays_chunked = old_chunks is not None and (layout_options is None or layout_options.compression == "keep")
    if not (steps or rows_per_chunk or stays_chunked or maxshape != shape):
        return replace(plan, way="rows")
    chunk_bytes = STORE_CHUNK_BYTES if layout_options is not None and layout_options.for_object_store else CHUNK_BYTES
    rows = (
        rows_per_chunk if isinstance(rows_per_chunk, int) else 1 << (max(1, chunk_bytes // row_bytes).bit_length() - 1)
    )
    if rows * row_bytes > MAX_CHUNK_BYTES:
        raise H5ValueError(
            f"rows_per_chunk={rows} makes chunks of {rows * row_bytes / 2**20:,.0f} MiB of {plan.name!r}, and reading "
            f"a random row decodes a whole chunk. Pass {MAX_CHUNK_BYTES // row_bytes} or fewer "
            f"({MAX_CHUNK_BYTES >> 20} MiB at most), or name the arrays to rewrite in keys."
        )
    can_grow = maxshape[0] == h5py.h5s.UNLIMITED or maxshape[0] > shape[0]
    if not (isinstance(rows_per_chunk, int) and can_grow):
        rows = min(rows, shape[0])
    if maxshape[0] != h5py.h5s.UNLIMITED:
        rows = min(rows, maxshape[0])
    chunks = (rows, *shape[1:])
    return replace(plan, way="rows", chunks=chunks, steps=fitting_steps(steps, chunks))

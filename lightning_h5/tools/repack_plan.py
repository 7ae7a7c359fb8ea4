"""What is asked of a copy, and what becomes of each array: decided before the first byte is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import h5py

from ..errors import H5ValueError, listing
from ..hdf5 import ArrayHandle, Trust, filters_of, layout_of, numpy_dtype, shape_of
from ..hdf5.checks import check_sizes, ensure_filters
from ..hdf5.chunk_index import moves_axis
from ..hdf5.contents import resolve_path
from ..readers import check_text
from .compression import FilterStep, check_compression, filter_steps, kept_steps, loses_digits
from .copying import ArrayPlan, address_of, has_class, is_variable, links_in
from .copying_rows import chunks_of

__all__ = ["CHUNK_BYTES", "MAX_CHUNK_BYTES", "RepackOptions", "plan_arrays"]

CHUNK_BYTES = 512 << 10
"""A chunk's decoded bytes are this, or down to half of it.

A random row costs a chunk, so chunks should be small; but each costs some time to look up, and compressors find less in
fewer bytes. The rows are a power of two, so that chunks of one field begin where those of another do.
"""

MIN_CHUNK_BYTES = 4 << 10
"""Arrays with small rows are not cut into chunks of ``rows_per_chunk`` rows with fewer decoded bytes than a page."""

MUCH_LARGER = 16
"""Rows are small if the largest rows of the file have more than so many times their bytes."""

MAX_CHUNK_BYTES = 32 << 20
"""What a chunk may have decoded: each thread holds one, and each random row costs one."""


@dataclass(frozen=True, kw_only=True)
class RepackOptions:
    """What is asked; see ``repack_file``. ``is_chunked``: chunks are asked for, of so many rows or as many as suit.

    Raises:
        H5ValueError: it makes no sense, or a compression is not installed.
    """

    rows_per_chunk: int | None = None
    is_chunked: bool = False
    compression: str = "keep"
    level: int | None = None
    shuffle_filter: bool = False
    checksum: bool = False
    shuffle_rows: int | None = None
    shuffle_keys: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    verify: bool = False
    trust: Trust

    def __post_init__(self) -> None:
        if self.rows_per_chunk is not None and self.rows_per_chunk < 1:
            raise H5ValueError(
                f"rows_per_chunk={self.rows_per_chunk} was asked, and a chunk has at least one row. Pass 1 or more, or "
                "'auto'."
            )
        if self.shuffle_keys is not None and self.shuffle_rows is None:
            raise H5ValueError("shuffle_keys was given without shuffle_rows. Pass a seed as shuffle_rows, too.")
        check_compression(self.compression, self.level, self.shuffle_filter)


@dataclass(frozen=True)
class _Array:
    """An array of the file: its name, shape, bytes of a row, and whether a row is a single value (a label, an id)."""

    name: str
    shape: tuple[int, ...]
    row_bytes: int
    is_column: bool


def _arrays_in(file: Any) -> Mapping[int, _Array]:
    arrays = {}
    for link in links_in(file):
        if link.is_first and isinstance(link.item, h5py.h5d.DatasetID):
            shape, stored = shape_of(h5py.Dataset(link.item)) or (), link.item.get_type()
            is_column = len(shape) == 1 and stored.get_class() not in (h5py.h5t.COMPOUND, h5py.h5t.ARRAY)
            row_bytes = math.prod(shape[1:]) * stored.get_size() if shape else 0
            arrays[link.address] = _Array(link.shown, shape, row_bytes, is_column)
    return arrays


def plan_arrays(file: Any, options: RepackOptions) -> dict[int, ArrayPlan]:
    """Return the plan for each array of an open file, by its address there.

    Raises:
        H5KeyError: an array that was named does not exist.
        H5ValueError: what is asked cannot be done with these arrays, or one that would be read declares far more than
            is stored.
    """
    arrays, plans = _arrays_in(file), {}
    named = arrays.keys() if options.keys is None else _named(file, options.keys, "keys")
    shuffled = _shuffled(file, arrays, options)
    largest = max((each.row_bytes for each in arrays.values() if not each.is_column and all(each.shape)), default=0)
    for address, name, item in [(link.address, link.shown, link.item) for link in links_in(file) if link.is_first]:
        if address not in arrays:
            continue
        is_asked = address in named
        plan = _plan(arrays[address], item, options if is_asked else None, options, address in shuffled, largest)
        if plan.note and options.keys is not None and is_asked:
            cure = "Repack the other files by themselves, and leave" if "other files" in plan.note else "Leave"
            raise H5ValueError(f"{name!r} was named in keys and {plan.note}. {cure} it out of keys.")
        if not plan.is_elsewhere:
            _check(file, item, plan, options)
        plans[address] = plan
    return plans


def _check(file: Any, array: Any, plan: ArrayPlan, options: RepackOptions) -> None:
    """Refuse an array that cannot be read as it is planned."""
    dataset = h5py.Dataset(array)
    if (plan.way != "as it is" or options.verify) and array.shape:
        check_sizes(file, dataset, plan.name, options.trust)
        ensure_filters(filters_of(dataset), file.filename, plan.name)
    if array.shape and is_variable(array.get_type()) and numpy_dtype(dataset) is not None:
        check_text(layout_of(ArrayHandle(dataset), file.filename, plan.name))


def _named(file: Any, keys: Sequence[str], argument: str) -> set[int]:
    """Return the addresses of arrays that were named. Opens no other file."""
    found = set()
    for key in keys:
        try:
            array, members = resolve_path(file, key, allow_external=False)
        except H5ValueError as error:
            raise H5ValueError(
                f"{argument} names {key!r}, which a link leads to out of {file.filename!r}; no other file is opened. "
                f"Repack that file by itself, or leave it out of {argument}."
            ) from error
        if members or not isinstance(array, h5py.Dataset):
            raise H5ValueError(
                f"{argument} names {key!r}, which is no array by itself. Name an array or a whole table."
            )
        found.add(address_of(array.id))
    return found


def _shuffled(file: Any, arrays: Mapping[int, _Array], options: RepackOptions) -> set[int]:
    """Return arrays whose rows are permuted: never only some of those that belong together, unless they are named."""
    if options.shuffle_rows is None:
        return set()
    if options.shuffle_keys is None:
        chosen = {address for address, array in arrays.items() if array.shape}
    else:
        chosen = _named(file, options.shuffle_keys, "shuffle_keys")
    counts = {arrays[address].name: (arrays[address].shape or (0,))[0] for address in chosen}
    if len(set(counts.values())) > 1:
        most = Counter(counts.values()).most_common(1)[0][0]
        example = [name for name, n in counts.items() if n == most][:4]
        raise H5ValueError(
            f"shuffle_rows was asked for arrays of {file.filename!r} with different numbers of rows: {listing(counts)} "
            f"with {', '.join(f'{n:,}' for n in list(counts.values())[:12])} rows. Say which belong together, such as "
            f"shuffle_keys={example!r}."
        )
    return chosen


def _plan(
    about: _Array, array: Any, asked: RepackOptions | None, options: RepackOptions, is_shuffled: bool, largest: int
) -> ArrayPlan:
    stored, plist, shape = array.get_type(), array.get_create_plist(), about.shape
    plan = ArrayPlan(name=about.name, is_shuffled=is_shuffled, n_bytes=about.row_bytes * shape[0] if shape else 0)
    layout = plist.get_layout()
    if layout == h5py.h5d.VIRTUAL or plist.get_external_count():
        return _elsewhere(plan, h5py.Dataset(array), options)
    has_references = has_class(stored, h5py.h5t.REFERENCE)
    is_moved = layout == h5py.h5d.CHUNKED and moves_axis(array)
    # HDF5's own copy forgets references, and may end the process if it reports wrong coordinates of chunks.
    as_stored = replace(plan, way="values" if has_references or is_moved else "as it is")
    kept = kept_steps(plist) if layout == h5py.h5d.CHUNKED else ()
    why = ""
    if has_references:
        why = "holds references"
    elif is_variable(stored):
        if is_shuffled:
            return replace(plan, way="values")
        return replace(as_stored, note="has text or lists of any length, which no filter reaches")
    elif about.row_bytes > MAX_CHUNK_BYTES:
        why = f"has rows of more than {MAX_CHUNK_BYTES >> 20} MiB"
    elif (asked is None or asked.compression == "keep") and loses_digits(kept):
        why = "has a filter that may lose digits if it is applied again"
    if why and is_shuffled:
        cure = "Name a compression" if loses_digits(kept) else "Leave it out"
        raise H5ValueError(f"{plan.name!r} is to be shuffled and {why}. {cure}.")
    if is_moved and loses_digits(kept) and why:
        raise H5ValueError(f"{plan.name!r} {why}, and grows along another axis. Name a compression, or use `h5repack`.")
    if why:
        return replace(as_stored, note=f"{why} and stays as it is")
    is_small = not plan.n_bytes or layout == h5py.h5d.COMPACT
    if not plan.n_bytes or not (is_shuffled or (asked and not is_small)):
        return as_stored
    return _laid_out(array, about, asked, kept, plan, as_stored, largest)


def _elsewhere(plan: ArrayPlan, array: Any, options: RepackOptions) -> ArrayPlan:
    """Plan for an array whose values lie in other files, or that is virtual: it stays a link, and is never read."""
    own = (
        [source for source in array.virtual_sources() if source.file_name in (".", array.file.filename)]
        if array.is_virtual
        else []
    )
    if plan.is_shuffled:
        raise H5ValueError(
            f"{plan.name!r} is to be shuffled and {'is virtual' if own else 'lies in other files'}. Repack these by "
            "themselves, and leave it out here."
        )
    if own and options.shuffle_rows is not None:
        raise H5ValueError(
            f"{plan.name!r} is virtual and shows rows of this file, which may not be moved below it. Write its values "
            "to an ordinary array first, or repack without shuffle_rows."
        )
    return replace(
        plan, is_elsewhere=True, note="is virtual and stays so" if own else "lies in other files and stays a link"
    )


def _laid_out(
    array: Any,
    about: _Array,
    asked: RepackOptions | None,
    kept: tuple[FilterStep, ...],
    plan: ArrayPlan,
    as_stored: ArrayPlan,
    largest: int,
) -> ArrayPlan:
    """Plan for rows that are laid out again, in chunks unless nothing asks for any."""
    shape, row_bytes, old_chunks = about.shape, about.row_bytes, chunks_of(array)
    wanted = asked.rows_per_chunk if asked else None
    is_chunked = asked is not None and asked.is_chunked
    is_small = wanted is not None and wanted * row_bytes < MIN_CHUNK_BYTES and row_bytes * MUCH_LARGER < largest
    is_left = (
        wanted is not None
        and asked is not None
        and asked.keys is None
        and (is_small or bool(largest and about.is_column))
    )
    if is_left:
        plan = replace(
            plan,
            note=f"does not get chunks of {wanted} rows, which are meant for arrays with larger rows; name it "
            "in keys to get them",
        )
        wanted, is_chunked = None, False
    steps = (
        kept
        if asked is None
        else filter_steps(
            asked.compression,
            level=asked.level,
            shuffle_filter=asked.shuffle_filter,
            checksum=asked.checksum,
            itemsize=array.get_type().get_size(),
            kept=kept,
        )
    )
    if is_left and steps == kept and not plan.is_shuffled:
        return replace(as_stored, note=plan.note)
    maxshape = array.get_space().get_simple_extent_dims(True)
    stays_chunked = old_chunks is not None and (is_left or asked is None or asked.compression == "keep")
    if not (steps or is_chunked or stays_chunked or maxshape != shape):
        return replace(plan, way="rows")
    rows = wanted or 1 << (max(1, CHUNK_BYTES // row_bytes).bit_length() - 1)
    if is_left and old_chunks is not None and old_chunks[0] * row_bytes <= MAX_CHUNK_BYTES:
        return replace(plan, way="rows", chunks=(old_chunks[0], *shape[1:]), steps=steps)
    if rows * row_bytes > MAX_CHUNK_BYTES:
        raise H5ValueError(
            f"rows_per_chunk={rows} makes chunks of {rows * row_bytes / 2**20:,.0f} MiB of {plan.name!r}, and a "
            f"random row costs a whole chunk. Pass {MAX_CHUNK_BYTES // row_bytes} or fewer "
            f"({MAX_CHUNK_BYTES >> 20} MiB at most), or name the arrays that are meant with keys."
        )
    can_grow = maxshape[0] == h5py.h5s.UNLIMITED or maxshape[0] > shape[0]
    rows = rows if wanted and can_grow else min(rows, shape[0])
    rows = rows if maxshape[0] == h5py.h5s.UNLIMITED else min(rows, maxshape[0])
    return replace(plan, way="rows", chunks=(rows, *shape[1:]), steps=steps)

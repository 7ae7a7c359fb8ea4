"""What becomes of each array of a file that is written anew: decided before the first byte is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import h5py
import numpy as np

from ...errors import H5ValueError, listing
from ...files import ArrayHandle, OpenOptions, layout_of, numpy_dtype, shape_of
from ...files.claims import check_sizes
from ...files.plugins import may_run_code, refuse_library
from ...readers import heap_guard
from .compression import FilterStep, filter_steps, kept_steps, loses_digits
from .naming import named_arrays
from .options import RepackOptions
from .raw_array import RawArray, raw_layout
from .stored_types import ensure_readable, has_class, is_variable
from .virtual_arrays import Trace, is_virtual, refuse_mixed, trace_virtual
from .walk import all_arrays

__all__ = [
    "CHUNK_BYTES",
    "MOST_CHUNK_BYTES",
    "ArrayPlan",
    "box_of",
    "plan_arrays",
]

CHUNK_BYTES = 512 << 10
"""A chunk's decoded bytes are this, or down to half of it.

A random row costs a chunk, so chunks should be small; but each costs some time to look up, and compressors find less in
fewer bytes. The rows are a power of two, so that chunks of one field begin where those of another do.
"""

MOST_CHUNK_BYTES = 32 << 20
"""What a chunk may have decoded: each thread that decodes holds one, and each random row costs one."""

MOST_ROWS = 1 << 20  # whose text is looked at together

NO_REFERENCES = "its copy would point nowhere. Delete it, or write it again with an older kind of reference."

Way = Literal["as it is", "values", "rows", "boxes"]


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """What becomes of an array.

    Attributes:
        name: one of its names in the file.
        way: copied as it is stored, chunks and all; or value by value, laid out as it was; or row by row, laid out
            anew; or, where a row is too large for that, box by box.
        chunks: of the copy; None where it has none. Meaningless where the layout stays.
        steps: filters of the copy; likewise.
        is_shuffled: whether its rows are permuted.
        n_bytes: of all rows, decoded.
        row_bytes: of a row, decoded.
        note: why it is not as asked, if so.
        is_unread: its values are not looked at: they are in other files, or it is virtual and stays so.
        leaves: some of its values are in other files.
        was_virtual: it is a virtual array and becomes an ordinary one.
    """

    name: str
    way: Way
    chunks: tuple[int, ...] | None = None
    steps: tuple[FilterStep, ...] = ()
    is_shuffled: bool = False
    n_bytes: int = 0
    row_bytes: int = 0
    note: str = ""
    is_unread: bool = False
    leaves: bool = False
    was_virtual: bool = False


def plan_arrays(file: Any, options: RepackOptions) -> dict[int, ArrayPlan]:
    """The plan for each array of an open file, by its address there.

    Raises:
        H5KeyError: an array that was named is not there.
        H5ValueError: what is asked cannot be done with these arrays, or one that would be read claims far more than is
            stored.
    """
    wanted = None if options.keys is None else named_arrays(file, options.keys, "keys", options.trust)
    virtual = {address: array for address, _, array in all_arrays(file) if is_virtual(array)}
    traces, shuffled = trace_virtual(file, virtual, set()), set[int]()
    if options.shuffle_rows is not None:
        shuffled = _shuffled(file, options, traces)
        traces = trace_virtual(file, virtual, shuffled)
    plans = {}
    for address, name, array in all_arrays(file):
        asked = wanted is None or address in wanted
        plan = _plan(name, array, options, asked, address in shuffled, traces.get(address))
        if array.get_type().get_size() > MOST_CHUNK_BYTES and plan.way in ("rows", "boxes"):
            plan = _left_whole(plan)
        if not plan.is_unread and (plan.way != "as it is" or options.is_verified) and array.shape:
            check_sizes(file, h5py.Dataset(array), name, options.trust)
        if plan.note and wanted is not None and asked:
            cure = "Repack the other files by themselves, and leave" if plan.leaves else "Leave"
            raise H5ValueError(f"{name!r} was named in keys and {plan.note}. {cure} it out of keys.")
        if not plan.is_unread and may_run_code(array):
            _ensure_read_by_us(array, plan, file.filename, is_verified=options.is_verified)
        if not plan.is_unread and array.shape and is_variable(array.get_type()):
            _check_heaps(array, file.filename, name)
        plans[address] = plan
    return plans


def _ensure_read_by_us(array: Any, plan: ArrayPlan, path: str, *, is_verified: bool) -> None:
    """Refuses an array whose chunks the HDF5 library would decode, which may run code that they name."""
    if plan.way == "as it is" and not is_verified:
        return
    if plan.way != "rows" or raw_layout(RawArray.of(array, path, plan.name)) is None:
        refuse_library(h5py.Dataset(array), path, plan.name, "it is copied, or compared, value by value")


def _check_heaps(array: Any, path: str, name: str) -> None:
    """Looks at all text and lists of an array before the HDF5 library does, which may never come back."""
    dataset = h5py.Dataset(array)
    if numpy_dtype(dataset) is None:  # refused when it is copied
        return
    layout = layout_of(ArrayHandle(dataset), path, name)
    if (guard := heap_guard(layout, OpenOptions())) is not None:
        for start in range(0, layout.n_rows, MOST_ROWS):
            guard.check(np.arange(start, min(start + MOST_ROWS, layout.n_rows)))


def _shuffled(file: Any, options: RepackOptions, traces: Mapping[int, Trace]) -> set[int]:
    """Arrays whose rows are permuted: never some of those that belong together without a word of the user."""
    names, n_rows = {}, {}
    for address, name, array in all_arrays(file):
        if shape := _shape(array, traces.get(address), options):
            names[address], n_rows[address] = name, shape[0]
    if options.shuffle_keys is not None:
        chosen = named_arrays(file, options.shuffle_keys, "shuffle_keys", options.trust)
        counts = {names[address]: n_rows[address] for address in chosen}
        if len(set(counts.values())) > 1:
            raise H5ValueError(
                f"shuffle_keys names arrays with different numbers of rows: {_counted(counts)}. Rows stay together "
                "only where there are equally many; name arrays of one kind."
            )
        return chosen
    if len(set(n_rows.values())) > 1:
        counts = {names[address]: n for address, n in n_rows.items()}
        most = Counter(n_rows.values()).most_common(1)[0][0]
        example = [name for name, n in counts.items() if n == most]
        raise H5ValueError(
            f"shuffle_rows was asked of {file.filename!r}, whose arrays have different numbers of rows: "
            f"{_counted(counts)}. Say which belong together, such as shuffle_keys={example[:4]!r}."
        )
    return set(n_rows)


def _counted(counts: Mapping[str, int]) -> str:
    return listing(counts) + " with " + ", ".join(f"{n:,}" for n in list(counts.values())[:12]) + " rows"


def _is_read(trace: Trace, options: RepackOptions) -> bool:
    return options.shuffle_rows is not None and not trace.fault


def _shape(array: Any, trace: Trace | None, options: RepackOptions) -> tuple[int, ...] | None:
    """Of a virtual array that stays so, as it was made: asked for its extent, HDF5 may open what it is made of."""
    if trace is not None and not _is_read(trace, options):
        return shape_of(h5py.Dataset(array))
    shape: tuple[int, ...] | None = array.shape
    return shape


def _plan(
    name: str, array: Any, options: RepackOptions, asked: bool, is_shuffled: bool, trace: Trace | None
) -> ArrayPlan:
    stored, plist = array.get_type(), array.get_create_plist()
    shape = _shape(array, trace, options)
    n_rows = shape[0] if shape else 0
    row_bytes = math.prod(shape[1:]) * stored.get_size() if shape else 0
    n_bytes = n_rows * row_bytes
    layout = plist.get_layout()
    has_references = has_class(stored, h5py.h5t.REFERENCE)
    kept = kept_steps(plist) if layout == h5py.h5d.CHUNKED else ()
    base = ArrayPlan(name=name, way="as it is", n_bytes=n_bytes, row_bytes=row_bytes, is_shuffled=is_shuffled)
    if plist.get_external_count() or (trace is not None and not (_is_read(trace, options) and n_bytes)):
        return _unread(base, trace)
    # Rows of a virtual array may be permuted where they come from. Written through it, they would go there, too.
    base = replace(base, was_virtual=trace is not None)
    if has_references or is_variable(stored):
        return _plan_of_values(array, base)
    if not n_bytes or layout == h5py.h5d.COMPACT:
        return replace(base, way="values" if is_shuffled and n_bytes else _as_stored(stored))
    if not (asked or is_shuffled or base.was_virtual):
        return replace(base, way=_as_stored(stored))
    compression = options.compression if asked else "keep"
    if compression == "keep" and loses_digits(kept):
        if is_shuffled:
            raise H5ValueError(f"{name!r} has a filter that may lose digits when written anew. Name a compression.")
        return replace(base, note="has a filter that may lose digits when written anew")
    return _laid_out(array, options if asked else RepackOptions(), kept, base)


def _unread(base: ArrayPlan, trace: Trace | None) -> ArrayPlan:
    """What lies in other files, or is virtual and stays so."""
    leaves = trace is None or trace.leaves
    if trace is not None and base.is_shuffled and trace.fault and not leaves:
        raise H5ValueError(f"{base.name!r} is to be shuffled, is virtual and {trace.fault}. Leave it out.")
    if base.is_shuffled and leaves and (trace is None or not trace.moves):
        raise H5ValueError(f"{base.name!r} is to be shuffled and lies in other files. Repack these, or leave it out.")
    if trace is not None:
        refuse_mixed(base.name, trace)
    note = "lies in other files and stays a link" if leaves else "is virtual and stays so"
    return replace(base, is_unread=True, leaves=leaves, note=note)


def _left_whole(plan: ArrayPlan) -> ArrayPlan:
    """An element is not cut, and several are held at a time where rows are laid out anew."""
    if plan.is_shuffled or plan.was_virtual:
        raise H5ValueError(
            f"{plan.name!r} is to be shuffled and has elements of more than {MOST_CHUNK_BYTES >> 20} MiB. Leave it out."
        )
    return replace(plan, way="as it is", note=f"has elements of more than {MOST_CHUNK_BYTES >> 20} MiB")


def _as_stored(stored: Any) -> Way:
    """How an array of a type is copied that stays as it is: HDF5's own copies forget names of types, and references."""
    return "values" if has_class(stored, h5py.h5t.REFERENCE) or stored.committed() else "as it is"


def _plan_of_values(array: Any, base: ArrayPlan) -> ArrayPlan:
    """References, text and lists of any length, which no filter reaches."""
    stored = array.get_type()
    has_references = has_class(stored, h5py.h5t.REFERENCE)
    if has_references:
        ensure_readable(array, base.name, NO_REFERENCES)
    if base.was_virtual:
        return replace(base, way="values", chunks=_chunks_that_grow(array, base.row_bytes))
    if base.is_shuffled or has_references:
        return replace(base, way="values")
    return replace(base, way=_as_stored(stored), note="has text or lists of any length, which no filter reaches")


def _laid_out(array: Any, options: RepackOptions, kept: tuple[FilterStep, ...], base: ArrayPlan) -> ArrayPlan:
    """Rows that are written anew, in chunks unless nothing asks for any."""
    shape, itemsize = array.shape, array.get_type().get_size()
    steps = filter_steps(
        options.compression,
        level=options.level,
        shuffle_filter=options.shuffle_filter,
        checksum=options.checksum,
        itemsize=itemsize,
        kept=kept,
    )
    maxshape = array.get_space().get_simple_extent_dims(True)
    was_chunked = array.get_create_plist().get_layout() == h5py.h5d.CHUNKED
    stays_chunked = options.compression == "keep" and was_chunked
    is_boxed = base.row_bytes > MOST_CHUNK_BYTES
    if not (steps or options.is_chunked or stays_chunked or maxshape != shape):
        return replace(base, way="boxes" if is_boxed else "rows")
    rows = options.rows_per_chunk or _rows_for(base.row_bytes)
    if options.rows_per_chunk and rows * base.row_bytes > MOST_CHUNK_BYTES:
        fits = MOST_CHUNK_BYTES // base.row_bytes
        raise H5ValueError(
            f"rows_per_chunk={rows} makes chunks of {rows * base.row_bytes / 2**20:,.0f} MiB of {base.name!r}, "
            f"and a random row costs a whole chunk. Pass {f'{fits} or fewer' if fits else 'auto'} "
            f"({MOST_CHUNK_BYTES >> 20} MiB at most), or name the arrays that are meant with keys."
        )
    can_grow = maxshape[0] == h5py.h5s.UNLIMITED or maxshape[0] > shape[0]
    rows = rows if options.rows_per_chunk and can_grow else min(rows, shape[0])
    rows = rows if maxshape[0] == h5py.h5s.UNLIMITED else min(rows, maxshape[0])
    if is_boxed:
        return replace(base, way="boxes", chunks=box_of(shape, itemsize, CHUNK_BYTES), steps=steps)
    return replace(base, way="rows", chunks=(rows, *shape[1:]), steps=steps)


def _rows_for(row_bytes: int) -> int:
    most = max(1, CHUNK_BYTES // row_bytes)
    return 1 << (most.bit_length() - 1)


def box_of(
    shape: tuple[int, ...], itemsize: int, n_bytes: int, chunks: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """The shape of a part of one row; the first axes are cut first, so that its pieces are long.

    Args:
        shape: of the array.
        itemsize: bytes of an element.
        n_bytes: bytes of the part, at most, unless an element has more, or a chunk.
        chunks: parts of one row that it is to be made of.
    """
    if chunks is not None:
        box = list(chunks)
        for axis in range(len(box) - 1, 0, -1):
            times = max(1, n_bytes // (math.prod(box) * itemsize))
            box[axis] = min(shape[axis], box[axis] * times)
        return tuple(box)
    box = [1, *shape[1:]]
    for axis in range(1, len(box)):
        rest = math.prod(box[axis + 1 :]) * itemsize
        box[axis] = max(1, min(box[axis], n_bytes // max(1, rest)))
    return tuple(box)


def _chunks_that_grow(array: Any, row_bytes: int) -> tuple[int, ...] | None:
    """Chunks for an array that has none and needs them, because it can be made longer."""
    if array.get_space().get_simple_extent_dims(True) == array.shape:
        return None
    if row_bytes > MOST_CHUNK_BYTES:
        return box_of(array.shape, array.get_type().get_size(), CHUNK_BYTES)
    return (min(_rows_for(row_bytes), array.shape[0]), *array.shape[1:])

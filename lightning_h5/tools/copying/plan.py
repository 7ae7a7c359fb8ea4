"""What becomes of each array of a file that is written anew: decided before the first byte is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import h5py

from ...errors import H5ValueError, listing
from ...files import find_array
from .compression import FilterStep, check_compression, filter_steps, kept_steps, loses_digits

__all__ = [
    "CHUNK_BYTES",
    "MOST_CHUNK_BYTES",
    "ArrayPlan",
    "RepackOptions",
    "all_arrays",
    "box_of",
    "has_class",
    "is_variable",
    "plan_arrays",
]

CHUNK_BYTES = 512 << 10
"""A chunk's decoded bytes are this, or down to half of it.

A random row costs a chunk, so chunks should be small; but each costs some time to look up, and compressors find less in
fewer bytes. The rows are a power of two, so that chunks of one field begin where those of another do.
"""

MOST_CHUNK_BYTES = 32 << 20
"""What a chunk may have decoded: each thread that decodes holds one, and each random row costs one."""

Way = Literal["as it is", "values", "rows", "boxes"]


@dataclass(frozen=True, kw_only=True)
class RepackOptions:
    """What is asked; see ``repack_file``. ``is_chunked`` asks for chunks, of so many rows or as many as suit.

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
    shuffle_keys: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rows_per_chunk is not None and self.rows_per_chunk < 1:
            raise H5ValueError(
                f"rows_per_chunk={self.rows_per_chunk} was asked, and a chunk has at least one row. Pass 1 or more, or "
                "'auto'."
            )
        if self.shuffle_keys is not None and self.shuffle_rows is None:
            raise H5ValueError("shuffle_keys was given without shuffle_rows. Pass a seed as shuffle_rows, too.")
        check_compression(self.compression, self.level, self.shuffle_filter)


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
        lies_elsewhere: its rows are in other files, and are not looked at.
    """

    name: str
    way: Way
    chunks: tuple[int, ...] | None = None
    steps: tuple[FilterStep, ...] = ()
    is_shuffled: bool = False
    n_bytes: int = 0
    row_bytes: int = 0
    note: str = ""
    lies_elsewhere: bool = False


def all_arrays(file: Any) -> Iterator[tuple[int, str, Any]]:
    """All arrays of an open file, each once, as ``(address, name, low-level dataset)``; no link is followed."""
    root = file["/"].id
    seen, todo = {h5py.h5o.get_info(root).addr}, [b"/"]
    while todo:
        above = todo.pop()
        group, below = h5py.h5o.open(root, above), []
        for name in links_of(group):
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                continue
            item = h5py.h5o.open(group, name)
            if (address := h5py.h5o.get_info(item).addr) in seen:
                continue
            seen.add(address)
            if isinstance(item, h5py.h5d.DatasetID):
                yield address, (above + name).decode(errors="surrogateescape").lstrip("/"), item
            elif isinstance(item, h5py.h5g.GroupID):
                below.append(above + name + b"/")
        todo += reversed(below)


def links_of(group: Any) -> list[bytes]:
    """Names in a group, in the order of their creation where the file keeps it."""
    by_creation = group.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
    kind = h5py.h5.INDEX_CRT_ORDER if by_creation else h5py.h5.INDEX_NAME
    names: list[bytes] = []
    group.links.iterate(names.append, idx_type=kind, order=h5py.h5.ITER_INC)
    return names


def plan_arrays(file: Any, options: RepackOptions) -> dict[int, ArrayPlan]:
    """The plan for each array of an open file, by its address there.

    Raises:
        H5KeyError: an array that was named is not there.
        H5ValueError: what is asked cannot be done with these arrays.
    """
    wanted = None if options.keys is None else _named(file, options.keys, "keys")
    shuffled = _shuffled(file, options) if options.shuffle_rows is not None else set()
    plans = {}
    for address, name, array in all_arrays(file):
        asked = wanted is None or address in wanted
        plan = _plan(name, array, options, asked, address in shuffled)
        if plan.note and wanted is not None and asked:
            raise H5ValueError(f"{name!r} was named in keys and {plan.note}. Leave it out of keys.")
        plans[address] = plan
    return plans


def _named(file: Any, keys: Sequence[str], argument: str) -> set[int]:
    found = set()
    for key in keys:
        handle = find_array(file, key)
        if handle.members:
            raise H5ValueError(
                f"{argument} names {key!r}, a member of the table {handle.array.name!r}; tables are written as a "
                "whole. Name the table."
            )
        found.add(h5py.h5o.get_info(handle.array.id).addr)
    return found


def _shuffled(file: Any, options: RepackOptions) -> set[int]:
    """Arrays whose rows are permuted: never some of those that belong together without a word of the user."""
    names, n_rows = {}, {}
    for address, name, array in all_arrays(file):
        if array.shape:
            names[address], n_rows[address] = name, array.shape[0]
    if options.shuffle_keys is not None:
        chosen = _named(file, options.shuffle_keys, "shuffle_keys")
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


def _plan(name: str, array: Any, options: RepackOptions, asked: bool, is_shuffled: bool) -> ArrayPlan:
    stored, plist, shape = array.get_type(), array.get_create_plist(), array.shape
    n_rows = shape[0] if shape else 0
    row_bytes = math.prod(shape[1:]) * stored.get_size() if shape else 0
    n_bytes = n_rows * row_bytes
    layout = plist.get_layout()
    has_references = has_class(stored, h5py.h5t.REFERENCE)
    as_values = has_references or (is_shuffled and (is_variable(stored) or layout == h5py.h5d.COMPACT))
    kept = kept_steps(plist) if layout == h5py.h5d.CHUNKED else ()
    base = ArrayPlan(name=name, way="as it is", n_bytes=n_bytes, row_bytes=row_bytes, is_shuffled=is_shuffled)
    if plist.get_external_count() or (layout == h5py.h5d.VIRTUAL and not _is_own(array, plist)):
        if is_shuffled:
            raise H5ValueError(f"{name!r} is to be shuffled and lies in other files. Repack these, or leave it out.")
        return replace(base, lies_elsewhere=True, note="lies in other files and stays a link")
    if as_values or stored.committed():
        is_plain = not as_values and n_bytes and asked and layout != h5py.h5d.COMPACT
        if not is_plain:
            return replace(base, way="values")
    if is_variable(stored):
        return replace(base, note="has text or lists of any length, which no filter reaches")
    if not n_bytes or layout == h5py.h5d.COMPACT:
        return base
    if layout == h5py.h5d.VIRTUAL and options.shuffle_rows is None:
        return replace(base, note="is virtual and stays so")
    if not (asked or is_shuffled or layout == h5py.h5d.VIRTUAL):
        return base
    compression = options.compression if asked else "keep"
    if compression == "keep" and loses_digits(kept):
        if is_shuffled:
            raise H5ValueError(f"{name!r} has a filter that may lose digits when written anew. Name a compression.")
        return replace(base, note="has a filter that may lose digits when written anew")
    return _laid_out(array, options if asked else RepackOptions(), kept, base)


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


def box_of(shape: tuple[int, ...], itemsize: int, n_bytes: int) -> tuple[int, ...]:
    """The shape of a part of one row; the first axes are cut first, so that its pieces are long.

    Args:
        shape: of the array.
        itemsize: bytes of an element.
        n_bytes: bytes of the part, at most, unless an element has more.
    """
    box = [1, *shape[1:]]
    for axis in range(1, len(box)):
        rest = math.prod(box[axis + 1 :]) * itemsize
        box[axis] = max(1, min(box[axis], n_bytes // max(1, rest)))
    return tuple(box)


def _is_own(array: Any, plist: Any) -> bool:
    """Whether a virtual array's rows all lie in its own file."""
    return all(plist.get_virtual_filename(at) == "." for at in range(plist.get_virtual_count()))


def is_variable(stored: Any) -> bool:
    """Whether elements of a type have no fixed size: text or lists that lie elsewhere in the file."""
    return has_class(stored, h5py.h5t.VLEN) or has_class(stored, h5py.h5t.STRING, only_variable=True)


def has_class(stored: Any, wanted: int, *, only_variable: bool = False) -> bool:
    """Whether a type, or one inside it, is of a class of HDF5's.

    Args:
        stored: h5py's low-level type.
        wanted: the class, such as ``h5py.h5t.REFERENCE``.
        only_variable: of strings, those of no fixed size.
    """
    kind = stored.get_class()
    if kind == wanted:
        return not only_variable or bool(stored.is_variable_str())
    if kind == h5py.h5t.COMPOUND:
        members = (stored.get_member_type(at) for at in range(stored.get_nmembers()))
        return any(has_class(member, wanted, only_variable=only_variable) for member in members)
    if kind in (h5py.h5t.ARRAY, h5py.h5t.VLEN):
        return has_class(stored.get_super(), wanted, only_variable=only_variable)
    return False

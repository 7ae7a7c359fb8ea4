"""Checks of one file, from its metadata. Each is a generator of problems; add one to ``FILE_CHECKS`` and it is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np

from ...errors import H5CorruptError, H5FileError, H5KeyError, H5ValueError, listing
from ...files import ArrayLayout, kind_of
from ...readers import why_plain
from .looking import FileFacts
from .problems import Problem, error, is_of_memory, warning

__all__ = ["FILE_CHECKS", "FileCheck"]

FileCheck = Callable[[FileFacts], Iterator[Problem]]

MANY_CHUNKS = 16  # that one row takes part in: reading a row is as many reads, and as many decodings
LARGE_BLOCK = 16 << 20  # decoded bytes of the chunks that a row shares
SLOW_BYTES = 16 << 20  # arrays below are read once and held


def _unreadable(facts: FileFacts) -> Iterator[Problem]:
    """What is listed and cannot be opened, and groups that cannot be listed."""
    for entry in facts.entries:
        if entry.kind == "unreadable":
            yield error(facts.path, entry.name, "damaged", f"it is listed and cannot be opened: {entry.target}")
    for name, why in facts.unlisted.items():
        yield error(facts.path, name, "damaged", f"what is in this group cannot be listed: {why}")


def _refused(facts: FileFacts) -> Iterator[Problem]:
    """Arrays that cannot be looked at."""
    for key, why in facts.refused.items():
        if key in facts.others:
            yield _elsewhere(facts, key)
        elif is_of_memory(why):
            yield error(
                facts.path, key, "memory", f"there is no memory to look at it: {f'{why}' or type(why).__name__}"
            )
        elif isinstance(why, H5CorruptError):
            yield error(facts.path, key, "chunk index", why)
        elif isinstance(why, H5KeyError):
            yield error(facts.path, key, "missing", why)
        elif isinstance(why, H5FileError):
            yield error(facts.path, key, "filter", why)
        elif isinstance(why, H5ValueError):
            yield warning(facts.path, key, "not read", why)
        else:
            yield error(facts.path, key, "damaged", f"it cannot be looked at: {type(why).__name__}: {why}")


def _elsewhere(facts: FileFacts, key: str) -> Problem:
    """Of an array whose rows lie in other files."""
    others = facts.others[key]
    gone = [name for name in others if "%b" not in name and not _is_there(facts, name)]
    if gone:
        text = f"its rows lie in {listing(gone)}, not there: HDF5 itself would read them as fill values"
        return warning(facts.path, key, "link", text)
    where = listing(others) if others else "the file that a link leads to"
    text = f"its rows lie in {where}, and were not read. Check that by itself; to train from it through this file takes"
    return warning(facts.path, key, "not read", f"{text} allow_external=True")


def _is_there(facts: FileFacts, name: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for folder in facts.folders)


def _links(facts: FileFacts) -> Iterator[Problem]:
    """Links that lead nowhere, or out of the file."""
    targets = {entry.name: entry.target for entry in facts.entries}
    for name in facts.dead:
        yield warning(facts.path, name, "link", f"this soft link leads to {targets[name]!r}, which is not there")
    for entry in facts.entries:
        if entry.kind == "external link" and entry.target is not None:
            file, _, inside = entry.target.rpartition(":")
            is_there = _is_there(facts, file)
            tail = "it was not followed; check that file itself" if is_there else "which is not there"
            yield warning(facts.path, entry.name, "link", f"this link leads to {inside!r} in the file {file!r}: {tail}")


def _places(facts: FileFacts) -> Iterator[Problem]:
    """Bytes that lie behind the end of the file, or that two chunks both have."""
    starts, stops, owners, chunks = [], [], [], []
    keys = list(facts.layouts)
    for number, layout in enumerate(facts.layouts.values()):
        if layout.table is not None:
            at = np.flatnonzero(layout.table.offsets >= 0)
            begins, sizes = layout.table.offsets[at], layout.table.sizes[at]
        elif layout.offset is not None:
            at, begins = np.zeros(1, dtype=np.int64), np.array([layout.offset])
            sizes = np.array([min(layout.n_rows * layout.stored_row_bytes, 2**62)])
        else:
            continue
        # Not by their sum, which may be too large for an integer.
        beyond = np.flatnonzero((sizes > facts.n_bytes) | (begins > facts.n_bytes - sizes))
        if len(beyond):
            yield error(facts.path, layout.key, "place", _beyond(facts, layout, at[beyond], begins[beyond[0]]))
        fits = np.setdiff1d(np.arange(len(at)), beyond)
        starts.append(begins[fits])
        stops.append(begins[fits] + sizes[fits])
        owners.append(np.full(len(fits), number))
        chunks.append(at[fits])
    if starts:
        found = _overlap(*(np.concatenate(each) for each in (starts, stops, owners, chunks)))
        for (number, chunk), (other, other_chunk), n in found:
            a, b = facts.layouts[keys[number]], facts.layouts[keys[other]]
            more = f", and {n - 1} more" if n > 1 else ""
            text = f"{_piece(a, chunk)} lies on bytes of {_piece(b, other_chunk)} of {b.key!r}{more}"
            yield error(facts.path, a.key, "place", f"{text}. The file is damaged; copy it again.")


def _beyond(facts: FileFacts, layout: ArrayLayout, chunks: np.ndarray, at: int) -> str:
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    return (
        f"{_piece(layout, int(chunks[0]))}{more} should begin at byte {int(at):,}, and end behind byte "
        f"{facts.n_bytes:,}, which is the end of the file. It was truncated or damaged; copy it again."
    )


def _piece(layout: ArrayLayout, chunk: int) -> str:
    """What to call a chunk, or the rows of an array that has none."""
    if layout.table is None:
        return "the rows"
    first = chunk // layout.table.per_row * layout.rows_per_chunk
    return f"chunk {chunk} (rows {first} to {min(first + layout.rows_per_chunk, layout.n_rows) - 1})"


def _overlap(
    starts: np.ndarray, stops: np.ndarray, owners: np.ndarray, chunks: np.ndarray
) -> Iterator[tuple[tuple[int, int], tuple[int, int], int]]:
    """Pieces that begin before one that began earlier has ended: the first of each array, and how many."""
    order = np.lexsort((stops, starts))
    order = order[stops[order] > starts[order]]
    if len(order) < 2:
        return
    reached = np.maximum.accumulate(stops[order])[:-1]
    late = np.flatnonzero(starts[order][1:] < reached) + 1
    for owner in np.unique(owners[order[late]]).tolist():
        mine = late[owners[order[late]] == owner]
        first = int(order[mine[0]])
        before = order[: mine[0]]
        other = int(before[np.argmax(stops[before])])
        yield (owner, int(chunks[first])), (int(owners[other]), int(chunks[other])), len(mine)


def _unwritten(facts: FileFacts) -> Iterator[Problem]:
    """Rows that were never written, and read as the fill value."""
    for layout in facts.layouts.values():
        n_rows, what = 0, ""
        if layout.table is not None and (missing := np.flatnonzero(layout.table.offsets < 0)).size:
            firsts = np.unique(missing // layout.table.per_row) * layout.rows_per_chunk
            n_rows = int(np.minimum(firsts + layout.rows_per_chunk, layout.n_rows).sum() - firsts.sum())
            what = f"{len(missing):,} of {len(layout.table.offsets):,} chunks were never written"
        elif layout.storage == "contiguous" and layout.offset is None and not layout.n_stored_bytes:
            n_rows, what = layout.n_rows, "none of it was ever written"
        if n_rows:
            part = "parts of " if layout.table is not None and layout.table.per_row > 1 else ""
            text = f"{what}: {part}{n_rows:,} of {layout.n_rows:,} rows read as the fill value{_fill(layout)}"
            yield warning(facts.path, layout.key, "unwritten", text)


def _unmapped(facts: FileFacts) -> Iterator[Problem]:
    """Rows of virtual arrays that are made of nothing, and read as the fill value."""
    for key, n_rows in facts.unmapped.items():
        layout = facts.layouts[key]
        if n_rows is None:
            text = "it is virtual, in too many pieces to tell whether some rows are made of nothing"
            yield warning(facts.path, key, "unwritten", text)
        elif n_rows:
            part = ", in part at least" if layout.axes else ""
            text = f"it is virtual, and {n_rows:,} of {layout.n_rows:,} rows are made of nothing{part}: they read as "
            yield warning(facts.path, key, "unwritten", f"{text}the fill value{_fill(layout)}")


def _fill(layout: ArrayLayout) -> str:
    if kind_of(layout.stored) != "number" or len(layout.fill) != layout.stored.itemsize or layout.stored.shape:
        return ""
    return f" {np.frombuffer(layout.fill, layout.stored)[0]}"


def _no_fields(facts: FileFacts) -> Iterator[Problem]:
    """Arrays that no batch can hold."""
    for layout in facts.layouts.values():
        if kind_of(layout.dtype) == "object":
            text = f"its dtype {layout.stored} is none that a tensor can have: it cannot be a field"
            yield warning(facts.path, layout.key, "no field", text)


def _slow(facts: FileFacts) -> Iterator[Problem]:
    """Layouts that make training slow."""
    for layout in facts.layouts.values():
        if kind_of(layout.dtype) != "number" or layout.n_bytes <= SLOW_BYTES or layout.is_placed:
            continue
        across = layout.table.per_row if layout.table is not None else 1
        span = layout.chunk_span_bytes
        if across > MANY_CHUNKS:
            text = f"a row takes part in {across:,} chunks, {span / 2**20:,.1f} MiB decoded"
        elif layout.rows_per_chunk > 1 and span > LARGE_BLOCK:
            text = f"{layout.rows_per_chunk:,} rows share chunks of {span / 2**20:,.1f} MiB decoded, in all"
        elif (why := why_plain(layout)) is not None:
            text = f"only the HDF5 library can read it, one thread at a time: {why}"
        else:
            continue
        yield warning(facts.path, layout.key, "slow", f"{text}. `lightning-h5 repack` makes a copy that is fast.")


FILE_CHECKS: tuple[FileCheck, ...] = (_unreadable, _refused, _links, _places, _unwritten, _unmapped, _no_fields, _slow)
"""What is run over each file, in this order."""

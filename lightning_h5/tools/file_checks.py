"""Checks of one file, from its metadata: facts about the file, and small generators of problems in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import H5CorruptError, H5FileError, H5KeyError, H5ValueError, listing
from ..hdf5 import (
    ArrayLayout,
    ChangeGuard,
    Entry,
    entries_of,
    file_identity,
    find_array,
    kind_of,
    layout_of,
    open_h5,
    overlaps,
    resolve_path,
    unmapped_rows,
)
from ..readers import fallback_reason

MANY_CHUNKS = 16  # of one row: reading a row is as many reads, and as many decodings
LARGE_BLOCK = 16 << 20  # decoded bytes of the chunks that a row shares
SLOW_BYTES = 16 << 20  # arrays below are read once and held


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with a file, or may be.

    Attributes:
        file: the file.
        array: the array, or another name in the file; None if it is the file as a whole.
        kind: what it is about, in a word or two, the same for all problems alike.
        text: what is wrong, in a sentence or two.
        severity: an error keeps rows from being read as they were written; a warning is worth knowing.
    """

    file: str
    array: str | None
    kind: str
    text: str
    severity: Literal["error", "warning"] = "error"


def error(file: str, array: str | None, kind: str, text: object) -> Problem:
    """Return a problem that keeps rows from being read as they were written."""
    return Problem(file=file, array=array, kind=kind, text=f"{text}")


def warning(file: str, array: str | None, kind: str, text: object) -> Problem:
    """Return a problem that is worth knowing."""
    return Problem(file=file, array=array, kind=kind, text=f"{text}", severity="warning")


def is_of_memory(why: BaseException | None) -> bool:
    """Return whether an error came from a lack of memory, which can happen with an intact file."""
    while why is not None:
        if isinstance(why, MemoryError):
            return True
        why = why.__cause__
    return False


@dataclass(eq=False, kw_only=True)
class FileFacts:
    """What the metadata of one file contain.

    Attributes:
        path: the file.
        n_bytes: of the file.
        folders: in which HDF5 looks for other files that it names: its own, and the working directory.
        guard: how it looked when it was opened.
        entries: all names in it; if keys are asked for, these alone.
        layouts: by key, the arrays that can be read.
        refused: by key, why an array cannot be; in the order of the file, like all others here.
        unmapped: by key of a virtual array, how many of its rows are made of nothing, or None if that is unknown.
        elsewhere: by key, other files that an array that cannot be read has its rows in; empty behind a link to one.
        dead: soft links that lead nowhere.
        identity: of what it holds (see ``file_identity``); None if nothing can be read.
    """

    path: str
    n_bytes: int
    folders: tuple[str, str]
    guard: ChangeGuard
    entries: tuple[Entry, ...] = ()
    layouts: dict[str, ArrayLayout] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)
    unmapped: dict[str, int | None] = field(default_factory=dict)
    elsewhere: dict[str, list[str]] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    identity: str | None = None

    def exists(self, name: str) -> bool:
        """Return whether another file that this one names exists."""
        return any(os.path.exists(os.path.join(folder, name)) for folder in self.folders)


def look_at(path: str, keys: Sequence[str] | None, folder: str) -> FileFacts:
    """Collect the facts about a file. Reads no rows; faults inside the file are facts, too.

    Args:
        path: the file.
        keys: arrays to look at; None takes all that have rows.
        folder: the working directory of the process that will read the file.

    Raises:
        H5FileError: it cannot be opened.
    """
    with open_h5(path) as file:
        facts = FileFacts(
            path=path,
            n_bytes=os.path.getsize(path),
            folders=(os.path.dirname(os.path.abspath(path)), folder),
            guard=ChangeGuard.of_open(file, path),
        )
        try:
            facts.entries = tuple(entry for entry in entries_of(file) if keys is None or entry.name in keys)
        except Exception as why:  # of any kind: a damaged file makes h5py raise anything
            facts.entries = (Entry(name="/", kind="unreadable", target=f"{why}"),)
        for link in (entry.name for entry in facts.entries if entry.kind == "soft link"):
            try:
                find_array(file, link)
            except H5KeyError:
                facts.dead.append(link)
            except Exception:  # what it leads to is reported under its own name
                pass
        for name in keys if keys is not None else [e.name for e in facts.entries if e.kind == "array" and e.shape]:
            try:
                handle = find_array(file, name)
                facts.layouts[name] = layout = layout_of(handle, path, name)
                if layout.storage == "virtual" and layout.n_rows:
                    facts.unmapped[name] = unmapped_rows(handle.array)
            except Exception as why:
                facts.refused[name] = why
                with suppress(Exception):
                    if (others := _other_files(file, name)) is not None:
                        facts.elsewhere[name] = others
        if facts.layouts:
            facts.identity = file_identity(path, facts.layouts.values())
    return facts


def _other_files(file: Any, key: str) -> list[str] | None:
    """Return other files that an array has its rows in; None if it has them in this one. Opens none of them."""
    try:
        array, _ = resolve_path(file, key, allow_external=False)
    except H5ValueError:  # a link leads out of the file
        return []
    names = [name for name, _, _ in array.external or ()]
    if array.is_virtual:
        names += [source.file_name for source in array.virtual_sources()]
    return [name for name in dict.fromkeys(names) if name not in (".", file.filename)] or None


def _unreadable(facts: FileFacts) -> Iterator[Problem]:
    """Find names that cannot be opened."""
    for entry in facts.entries:
        if entry.kind == "unreadable":
            yield error(facts.path, entry.name, "damaged", f"it is listed and cannot be opened: {entry.target}")


def _refused(facts: FileFacts) -> Iterator[Problem]:
    """Find arrays that cannot be described."""
    kinds = {H5CorruptError: "chunk index", H5KeyError: "missing", H5FileError: "filter"}
    for key, why in facts.refused.items():
        kind = next((kind for of, kind in kinds.items() if isinstance(why, of)), "damaged")
        if key in facts.elsewhere:
            yield _in_other_files(facts, key)
        elif is_of_memory(why):
            text = f"no memory is left to look at it: {f'{why}' or type(why).__name__}"
            yield error(facts.path, key, "memory", text)
        elif kind == "damaged" and isinstance(why, H5ValueError):
            yield warning(facts.path, key, "not read", why)
        else:
            yield error(facts.path, key, kind, why if kind != "damaged" else f"{type(why).__name__}: {why}")


def _in_other_files(facts: FileFacts, key: str) -> Problem:
    others = facts.elsewhere[key]
    if missing := [name for name in others if "%b" not in name and not facts.exists(name)]:
        text = f"its rows lie in {listing(missing)}, which is missing: HDF5 itself would read them as fill values"
        return warning(facts.path, key, "link", text)
    where = listing(others) if others else "the file that a link leads to"
    text = f"its rows lie in {where}, and were not read. Check that by itself; to train from it through this file takes"
    return warning(facts.path, key, "not read", f"{text} files=FileOptions(allow_external=True)")


def _links(facts: FileFacts) -> Iterator[Problem]:
    """Find links that lead nowhere, or out of the file."""
    for entry in facts.entries:
        target = entry.target or ""
        if entry.name in facts.dead:
            yield warning(facts.path, entry.name, "link", f"this soft link leads to {target!r}, which does not exist")
        elif entry.kind == "external link":
            file, _, inside = target.rpartition(":")
            tail = "it was not followed; check that file itself" if facts.exists(file) else "which does not exist"
            yield warning(facts.path, entry.name, "link", f"this link leads to {inside!r} in the file {file!r}: {tail}")


def _behind_the_end(facts: FileFacts) -> Iterator[Problem]:
    """Find chunks and rows that lie behind the end of the file."""
    for layout in facts.layouts.values():
        places = layout.pieces()
        # Not by their sum, which may be too large for an integer.
        beyond = places[(places[:, 1] > facts.n_bytes) | (places[:, 0] > facts.n_bytes - places[:, 1])]
        if len(beyond):
            more = f" and {len(beyond) - 1:,} more" if len(beyond) > 1 else ""
            what = "the rows" if layout.table is None else f"{_chunk(layout, beyond)}{more}"
            yield error(
                facts.path,
                layout.key,
                "place",
                f"{what} should begin at byte {int(beyond[0, 0]):,}, and end behind byte {facts.n_bytes:,}, which is "
                "the end of the file. It was truncated or damaged; copy it again.",
            )


def _chunk(layout: ArrayLayout, places: np.ndarray) -> str:
    assert layout.table is not None, "an array in chunks"
    chunk = int(np.flatnonzero(layout.table.offsets == places[0, 0])[0])
    first = chunk // layout.table.per_row * layout.rows_per_chunk
    return f"chunk {chunk} (rows {first} to {min(first + layout.rows_per_chunk, layout.n_rows) - 1})"


def _overlaps(facts: FileFacts) -> Iterator[Problem]:
    """Find bytes that two chunks, or two arrays, both have."""
    seen = set()
    for layout, other, text in overlaps(list(facts.layouts.values())):
        if (layout.name, other.name) not in seen:
            seen.add((layout.name, other.name))
            yield error(facts.path, layout.key, "place", text)


def _unwritten(facts: FileFacts) -> Iterator[Problem]:
    """Find rows that were never written, and read as the fill value."""
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
    """Find rows of virtual arrays that are made of nothing, and read as the fill value."""
    for key, n_rows in facts.unmapped.items():
        layout = facts.layouts[key]
        if n_rows is None:
            text = "it is virtual, in too many pieces to find out whether some rows are made of nothing"
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
    """Find arrays that no batch can hold."""
    for layout in facts.layouts.values():
        if kind_of(layout.dtype) == "object":
            text = f"its dtype {layout.stored} is none that a tensor can have: it cannot be a field"
            yield warning(facts.path, layout.key, "no field", text)


def _slow(facts: FileFacts) -> Iterator[Problem]:
    """Find layouts that make training slow."""
    for layout in facts.layouts.values():
        if kind_of(layout.dtype) != "number" or layout.n_bytes <= SLOW_BYTES or layout.is_contiguous:
            continue
        across = layout.table.per_row if layout.table is not None else 1
        span = layout.chunk_span_bytes
        if across > MANY_CHUNKS:
            text = f"a row takes part in {across:,} chunks, {span / 2**20:,.1f} MiB decoded"
        elif layout.rows_per_chunk > 1 and span > LARGE_BLOCK:
            text = f"{layout.rows_per_chunk:,} rows share chunks of {span / 2**20:,.1f} MiB decoded, in all"
        elif (why := fallback_reason(layout)) is not None:
            text = f"only the HDF5 library can read it, one thread at a time: {why}"
        else:
            continue
        yield warning(facts.path, layout.key, "slow", f"{text}. `lightning-h5 repack` makes a copy that is fast.")


FILE_CHECKS: tuple[Callable[[FileFacts], Iterator[Problem]], ...] = (
    _unreadable,
    _refused,
    _links,
    _behind_the_end,
    _overlaps,
    _unwritten,
    _unmapped,
    _no_fields,
    _slow,
)
"""The checks of each file, in this order."""

"""A look at one file: everything that its metadata say, with what could not be looked at and why. Reads no rows."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...errors import H5CorruptError, H5KeyError, H5ValueError
from ...files import (
    ArrayHandle,
    ArrayLayout,
    ChangeGuard,
    Entry,
    entries_of,
    file_identity,
    find_array,
    layout_of,
    open_h5,
    process_pool,
)
from ...files.mapping import unmapped_rows
from ...files.walk import walk

__all__ = ["FileFacts", "look_at", "working_folder"]

MOST_CHUNKS = 1 << 26
"""A table of more chunks than this, 1.3 GB of it, is taken for a damaged shape."""


@dataclass(eq=False, kw_only=True)
class FileFacts:
    """What is known of one file.

    Attributes:
        path: the file.
        n_bytes: of the file.
        folders: where HDF5 looks for other files that it names: beside it, and in the working directory.
        guard: how it looked when it was opened.
        entries: all names in it; where keys are asked for, these alone.
        layouts: by key, the arrays that can be read.
        refused: by key, why an array cannot be; in the order of the file, like all others here.
        unmapped: by key of a virtual array, how many of its rows are made of nothing, or None where nobody knows.
        others: by key, other files that an array that cannot be read has its rows in; empty behind a link to one.
        unlisted: by name, why a group's content cannot be listed.
        dead: soft links that lead nowhere.
        identity: of what it holds (see ``file_identity``); None where nothing can be read.
    """

    path: str
    n_bytes: int
    folders: tuple[str, str]
    guard: ChangeGuard
    entries: tuple[Entry, ...] = ()
    layouts: dict[str, ArrayLayout] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)
    unmapped: dict[str, int | None] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)
    unlisted: dict[str, Exception] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    identity: str | None = None

    def order(self) -> list[str]:
        """Names in the file's order."""
        return [*(entry.name for entry in self.entries), *self.layouts, *self.refused]


def look_at(path: str, keys: Sequence[str] | None = None, *, folder: str | None = None) -> FileFacts:
    """Looks at a file. What is wrong inside of it is in what comes out, and not raised.

    Args:
        path: the file.
        keys: arrays to look at; None takes all that have rows.
        folder: the working directory of who will read the file; None takes that of this process.

    Raises:
        H5FileError: it cannot be opened.
    """
    process_pool().close_replaced(path)
    file = open_h5(path)
    try:
        facts = FileFacts(
            path=path,
            n_bytes=os.path.getsize(path),
            folders=(os.path.dirname(os.path.abspath(path)), working_folder() if folder is None else folder),
            guard=ChangeGuard.of(path),
        )
        try:
            _list(file, facts, keys)
        except Exception as error:  # of any kind: a damaged file makes h5py raise whatever comes
            facts.unlisted["/"] = error
        names = keys if keys is not None else [e.name for e in facts.entries if e.kind == "array" and e.shape]
        for name in names:
            try:
                handle = find_array(file, name)
                facts.layouts[name] = layout = _layout(handle, path, name)
                if layout.storage == "virtual" and layout.n_rows:
                    facts.unmapped[name] = unmapped_rows(handle.array)
            except Exception as error:
                facts.refused[name] = error
                with suppress(Exception):
                    if (others := _others(file, name)) is not None:
                        facts.others[name] = others
        if facts.layouts:
            facts.identity = file_identity(path, facts.layouts.values())
    finally:
        with suppress(RuntimeError, OSError):  # a damaged file may complain only now; it is closed all the same
            file.close()
    return facts


def working_folder() -> str:
    """The working directory; nothing where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _list(file: Any, facts: FileFacts, keys: Sequence[str] | None) -> None:
    entries = tuple(entries_of(file))
    facts.entries = entries if keys is None else tuple(entry for entry in entries if entry.name in keys)
    for entry in facts.entries:
        if entry.kind == "soft link":
            try:
                find_array(file, entry.name)
            except H5KeyError:
                facts.dead.append(entry.name)
            except Exception:
                pass


def _layout(handle: ArrayHandle, path: str, key: str) -> ArrayLayout:
    array = handle.array
    if array.chunks:
        n_chunks = math.prod(-(-size // step) for size, step in zip(array.shape, array.chunks, strict=True))
        if n_chunks > MOST_CHUNKS:
            raise H5CorruptError(
                f"{key!r} in {path!r} has the shape {array.shape} in chunks of {array.chunks}: {n_chunks:,} chunks, in "
                f"a file of {os.path.getsize(path):,} bytes. The file is damaged; copy it again."
            )
    return layout_of(handle, path, key)


def _others(file: Any, key: str) -> list[str] | None:
    """Other files that an array has its rows in; None where it has them in this one. None of them is opened."""
    try:
        array, _ = walk(file, key, allow_external=False)
    except H5ValueError:  # a link leads out of the file
        return []
    names = [name for name, _, _ in array.external or ()]
    if array.is_virtual:
        names += [source.file_name for source in array.virtual_sources()]
    return [name for name in dict.fromkeys(names) if name not in (".", file.filename)] or None

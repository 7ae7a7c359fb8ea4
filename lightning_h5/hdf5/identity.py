"""The identity of a file: whether two files contain the same data.

It is equal on all ranks and on resume, also for copies on each node's own disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..staging import ObjectStatus
from .chunk_index import ChunkTable
from .layout import ArrayLayout
from .remote_file import sample_content

__all__ = ["file_identity", "identity_text", "meaning_of"]


def file_identity(
    path: str,
    layouts: Iterable[ArrayLayout],
    *,
    grows: bool = False,
    others: Iterable[str] = (),
    schemas: Iterable[bytes] | None = None,
    status: ObjectStatus | None = None,
) -> str:
    """Return a digest of a file: its size, schema and chunk tables of the arrays used, and samples of its content.

    Reads at most 64 KiB of each file. Equal for byte-wise copies.

    Args:
        path: the file.
        layouts: the arrays that are used.
        grows: the file has a live writer: use only schema and rows.
        others: other files that rows of this one come from.
        schemas: results of ``identity_text`` for the arrays, if they are known without descriptions; ``layouts`` then
            has only arrays with a value or packing.
        status: state of the file, if it is an object of a store; None asks the store.
    """
    digest, layouts = hashlib.sha256(), list(layouts)
    for a in layouts:
        digest.update(meaning_of(a).encode())
    if grows:
        for a in layouts:
            digest.update(repr((a.key, a.name, a.members, a.n_rows, a.row_shape, a.stored.str, a.dtype.str)).encode())
        return digest.hexdigest()[:32]
    if schemas is None:
        schemas = (
            identity_text(a, a.key, a.name, a.n_rows, a.offset, a.n_stored_bytes, a.table)
            for layout in layouts
            for a in layout.stored_arrays
        )
    for schema in schemas:
        digest.update(schema)
    sample_content(digest, path, status)
    for other in others:
        sample_content(digest, other)
    return digest.hexdigest()[:32]


def meaning_of(array: ArrayLayout) -> str:
    """Return the part of a file's identity that covers how an array's bytes become values.

    It has values of attributes, and attributes by which numbers are decoded. Empty if values are numbers as stored.
    """
    text = "" if array.value is None else repr((array.key, array.value.tolist()))
    for member in array.stacked:
        text += repr((member.key, member.members, member.row_shape, member.dtype.str)) + meaning_of(member)
    if array.packing is not None:
        text += array.packing.identity
    if array.decoding is not None:
        text += array.decoding.codec.identity
    return text


def identity_text(
    alike: ArrayLayout,
    key: str,
    name: str,
    n_rows: int,
    offset: int | None,
    n_stored_bytes: int,
    table: ChunkTable | None,
) -> bytes:
    """Return the part of a file's identity that describes one array.

    Args:
        alike: an array that differs only in the following arguments.
        key: see ``ArrayLayout``, as all that follow.
        name: see above.
        n_rows: see above.
        offset: see above.
        n_stored_bytes: see above.
        table: see above.
    """
    head, tail = alike.identity_parts
    text = f"(({key!r}, {name!r}, {head}, {n_rows}, {tail}, {offset}, {n_stored_bytes})".encode()
    return text if table is None else text + table.offsets.tobytes() + table.sizes.tobytes() + table.masks.tobytes()

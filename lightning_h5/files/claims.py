"""Sizes that a file claims, beside what it stores: a few bytes of a file can ask for petabytes of memory."""

from __future__ import annotations

import math
from typing import Any

from ..errors import H5ValueError
from .trust import Trust

__all__ = ["check_sizes", "size_text"]

MOST_CHUNK_BYTES = 1 << 30
MOST_BYTES = 4 << 30
MOST_TIMES = 1000
"""What compressors make of zeros; an array of more than that is not written, or is a trap."""


def check_sizes(file: Any, array: Any, key: str, trust: Trust) -> None:
    """Refuses arrays that claim far more than is there.

    Args:
        file: the open file.
        array: h5py's dataset, whose rows lie in this file.
        key: what it was asked for as.
        trust: what passes all the same.

    Raises:
        H5ValueError: a chunk is too large to be decoded in company, or next to nothing of the array is stored.
    """
    itemsize = array.id.get_type().get_size()
    chunk_bytes = math.prod(array.chunks) * itemsize if array.chunks else 0
    if chunk_bytes > MOST_CHUNK_BYTES and not trust.large_chunks:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has chunks of {size_text(chunk_bytes)} (shape {array.chunks}); a row takes "
            f"the decoding of a whole one, and more than {size_text(MOST_CHUNK_BYTES)} is refused. Make a copy with "
            "smaller ones by `lightning-h5 repack --allow-large-chunks`, or pass allow_large_chunks=True if you trust "
            "the file."
        )
    claimed = math.prod(array.shape) * itemsize
    if claimed <= MOST_BYTES or trust.sparse or array.external:
        return
    stored = _stored_bytes(file, array)
    if stored is not None and claimed > MOST_TIMES * stored:
        raise H5ValueError(
            f"{key!r} in {file.filename!r} has the shape {array.shape}, which is {size_text(claimed)}, and "
            f"{size_text(stored)} of it are stored: most of its rows were never written, or the file is made to "
            "exhaust memory. Check it with `lightning-h5 inspect`, and pass allow_sparse=True if it is meant to be so."
        )


def _stored_bytes(file: Any, array: Any) -> int | None:
    """Bytes that an array takes in its file, which has no more than it has; None where they lie in other files.

    Of a virtual array those of all that it is made of, each once, however many levels down.
    """
    found, todo, seen = 0, [array], set()
    while todo:
        array = todo.pop()
        if not array.is_virtual:
            found += int(min(array.id.get_storage_size(), file.id.get_filesize()))
            continue
        for source in array.virtual_sources():
            if source.file_name not in (".", file.filename):
                return None  # it was allowed to leave the file
            if source.dset_name not in seen:
                seen.add(source.dset_name)
                todo.append(file[source.dset_name])
    return found


def size_text(n_bytes: int) -> str:
    """A number of bytes for a message."""
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB")):
        if n_bytes >> power:
            return f"{n_bytes / 2**power:,.2f} {unit}"
    return f"{n_bytes:,} bytes"

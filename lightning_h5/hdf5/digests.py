"""Digests next to a file, which rows are compared with when they are read.

``lightning-h5 check --write-digests`` writes a file with a digest of every chunk (or run of rows) next to the HDF5
file. ``verify="digest"`` compares them when rows are read. Rows are compared as they are stored if they lie in one
piece, and as they are read otherwise. The array's schema (shape, dtype, filters ...) is kept, too: it gives bytes their
meaning.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import H5FileError, H5ValueError, shown
from ..regular_files import open_regular

__all__ = ["DIGEST_BYTES", "WRITE", "ArrayDigests", "digest_of", "digests_path", "read_digests", "write_digests"]

DIGEST_BYTES = 16
"""Bytes of a SHA-256 that are kept: enough that different pieces never have the same by chance."""

VERSION = 1
WRITE = "`lightning-h5 check --write-digests`"
"""The command that writes digests, for messages."""


@dataclass(frozen=True, eq=False)
class ArrayDigests:
    """The digests of one array.

    Attributes:
        kind: the kind of piece: a chunk as stored, or a run of rows.
        rows_per_piece: rows of a run, or of a chunk.
        pieces: one digest each, shape ``(n_pieces, 16)``, uint8; zeros for a chunk that was never written.
        schema: description of the array, in words.
    """

    kind: Literal["chunks", "rows"]
    rows_per_piece: int
    pieces: npt.NDArray[np.uint8]
    schema: str


def digest_of(data: Any, mask: int = 0) -> bytes:
    """Return the digest of a piece.

    Args:
        data: its bytes.
        mask: the filter mask of a chunk.
    """
    digest = hashlib.sha256(mask.to_bytes(4, "little"))
    digest.update(data)
    return digest.digest()[:DIGEST_BYTES]


def digests_path(path: str) -> str:
    """Return the path of a file's digests: next to it, or next to the target of a link if only that has some."""
    link_digests, target_digests = f"{path}.digests.json", f"{os.path.realpath(path)}.digests.json"
    return target_digests if not os.path.lexists(link_digests) and os.path.lexists(target_digests) else link_digests


def write_digests(path: str, arrays: Mapping[str, ArrayDigests]) -> None:
    """Write the digests of a file next to it, completely or not at all; older ones are replaced.

    Args:
        path: the file.
        arrays: digests by the array's name in it.

    Raises:
        H5FileError: they cannot be written.
    """
    records = {
        name: {
            "schema": digests.schema,
            "pieces": digests.kind,
            "rows_per_piece": digests.rows_per_piece,
            "digests": base64.b64encode(digests.pieces.tobytes()).decode(),
        }
        for name, digests in arrays.items()
    }
    text = json.dumps({"version": VERSION, "digest": "sha256, first 16 bytes", "arrays": records}, indent=1)
    target = f"{path}.digests.json"
    partial = f"{target}.{secrets.token_hex(4)}.partial"
    try:
        try:
            with open(partial, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            with suppress(OSError):
                os.unlink(partial)
    except OSError as error:
        raise H5FileError(
            f"the digests of {path!r} cannot be written to {target!r}: {error.strerror}. Check that its folder is "
            "writable, and that the disk is not full."
        ) from error


def read_digests(path: str) -> Mapping[str, ArrayDigests]:
    """Return the digests of a file, by the array's name.

    Raises:
        H5FileError: there are none.
        H5ValueError: the file of digests is damaged.
    """
    source = digests_path(path)
    try:
        status = os.stat(source)
        return _parse(path, source, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except OSError as error:
        source = " or ".join(repr(f"{name}.digests.json") for name in dict.fromkeys((path, os.path.realpath(path))))
        raise H5FileError(
            f"verify='digest' was requested, but the digests of {path!r} cannot be read from {source}: "
            f"{error.strerror}. Write digests while the file is known to be intact: {WRITE}."
        ) from error


@lru_cache(maxsize=2)  # the arrays of a file are described one by one
def _parse(path: str, source: str, *_stat: int) -> Mapping[str, ArrayDigests]:
    with open_regular(source) as file:
        text = file.read()
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']!r} is not known")
        return {str(name): _parse_array(record) for name, record in content["arrays"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise H5ValueError(
            f"{source!r} is not a file of digests ({type(error).__name__}: {shown(str(error))}). Write the digests of "
            f"{path!r} again while this file is known to be intact: {WRITE}."
        ) from error


def _parse_array(record: Any) -> ArrayDigests:
    kind, rows = record["pieces"], record["rows_per_piece"]
    if kind not in ("chunks", "rows") or type(rows) is not int or rows < 1:
        raise ValueError(f"pieces {kind!r} of {rows!r} rows are not known")
    pieces = np.frombuffer(base64.b64decode(record["digests"], validate=True), dtype=np.uint8)
    return ArrayDigests(kind, rows, pieces.reshape(-1, DIGEST_BYTES), str(record["schema"]))

"""Digests that lie beside a file: one of each piece of each array, which rows are compared with as they are read.

A piece is a chunk as stored, or a run of rows as stored, or a run of rows as they read if only the HDF5 library finds
their bytes. What an array is (shape, dtype, filters ...) is kept as well: a digest of bytes says nothing about what
they mean.
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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5FileError, H5ValueError, shown

if TYPE_CHECKING:
    from .layout import ArrayLayout

__all__ = ["ArrayDigests", "PieceKind", "digest_of", "digests_path", "read_digests", "with_digests", "write_digests"]

DIGEST_BYTES = 16
"""Of a SHA-256: enough that no two pieces that differ will ever have the same by chance."""

VERSION = 1
WRITE = "`lightning-h5 check --write-digests`"

PieceKind = Literal["chunks", "rows", "values"]
"""Chunks as stored, runs of rows as stored, or runs of rows as they read."""


@dataclass(frozen=True, eq=False)
class ArrayDigests:
    """The digests of one array.

    Attributes:
        kind: what the pieces are.
        rows_per_piece: rows of a piece; those that a chunk takes part in, for chunks.
        pieces: one digest each, shape ``(n_pieces, 16)``, uint8; zeros for a chunk that was never written.
        schema: what the array is, in words.
    """

    kind: PieceKind
    rows_per_piece: int
    pieces: npt.NDArray[np.uint8]
    schema: str

    @classmethod
    def empty(cls, layout: ArrayLayout, kind: PieceKind, rows_per_piece: int) -> ArrayDigests:
        """Return digests of an array that are still to be filled in."""
        pieces = np.zeros((_n_pieces(layout, kind, rows_per_piece), DIGEST_BYTES), dtype=np.uint8)
        return cls(kind, rows_per_piece, pieces, _schema(layout))

    def check(self, piece: int, data: Any, layout: ArrayLayout, *, mask: int = 0) -> None:
        """Compare a piece with its digest.

        Args:
            piece: its number.
            data: its bytes.
            layout: the array, for the error.
            mask: filters that were not applied to it, of a chunk.

        Raises:
            H5CorruptError: it is another one.
        """
        if digest_of(data, mask) != self.pieces[piece].tobytes():
            raise H5CorruptError(_differs(self, piece, layout))


def digest_of(data: Any, mask: int = 0) -> bytes:
    """Return the digest of a piece.

    Args:
        data: its bytes.
        mask: filters that were not applied to it, of a chunk.
    """
    found = hashlib.sha256(mask.to_bytes(4, "little"))
    found.update(data)
    return found.digest()[:DIGEST_BYTES]


def digests_path(path: str) -> str:
    """Return where the digests of a file lie: beside it, or beside what it is a link to if only that has some."""
    beside, target = f"{path}.digests.json", f"{os.path.realpath(path)}.digests.json"
    return target if not os.path.lexists(beside) and os.path.lexists(target) else beside


def write_digests(path: str, arrays: Mapping[str, ArrayDigests]) -> None:
    """Write the digests of a file beside it, whole or not at all; older ones are replaced.

    Args:
        path: the file.
        arrays: digests by the array's name in it.

    Raises:
        H5FileError: they cannot be written.
    """
    plain = {
        name: {
            "schema": found.schema,
            "pieces": found.kind,
            "rows_per_piece": found.rows_per_piece,
            "digests": base64.b64encode(found.pieces.tobytes()).decode(),
        }
        for name, found in arrays.items()
    }
    text = json.dumps({"version": VERSION, "digest": "sha256, first 16 bytes", "arrays": plain}, indent=1)
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
            f"the digests of {path!r} cannot be written to {target!r}: {error.strerror}. Check that its folder may be "
            "written to, and that there is room."
        ) from error


def read_digests(path: str) -> Mapping[str, ArrayDigests]:
    """Return the digests of a file, by the array's name.

    Raises:
        H5FileError: there are none.
        H5ValueError: they are not as they were written.
    """
    source = digests_path(path)
    try:
        found = os.stat(source)
        return _read(path, source, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    except OSError as error:
        source = " or ".join(repr(f"{name}.digests.json") for name in dict.fromkeys((path, os.path.realpath(path))))
        raise H5FileError(
            f"verify='digest' was asked, and the digests of {path!r} cannot be read from {source}: {error.strerror}. "
            f"Write them while the file is known to be whole: {WRITE}."
        ) from error


@lru_cache(maxsize=2)  # the arrays of a file are described one by one
def _read(path: str, source: str, *looks: int) -> Mapping[str, ArrayDigests]:
    with open(source, "rb") as file:
        text = file.read()
    try:
        found = json.loads(text)
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']!r} is not known")
        return {str(name): _parsed(one) for name, one in found["arrays"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise H5ValueError(
            f"{source!r} is not what {WRITE} writes ({type(error).__name__}: {shown(str(error))}). Write the digests "
            f"of {path!r} again, while it is known to be whole."
        ) from error


def _parsed(found: Any) -> ArrayDigests:
    kind, rows = found["pieces"], found["rows_per_piece"]
    if kind not in get_args(PieceKind) or type(rows) is not int or rows < 1:
        raise ValueError(f"pieces {kind!r} of {rows!r} rows are not known")
    pieces = np.frombuffer(base64.b64decode(found["digests"], validate=True), dtype=np.uint8)
    return ArrayDigests(kind, rows, pieces.reshape(-1, DIGEST_BYTES), str(found["schema"]))


def with_digests(layout: ArrayLayout, arrays: Mapping[str, ArrayDigests]) -> ArrayLayout:
    """Return an array with its digests; what can be compared at once is.

    Raises:
        H5ValueError: there are none of this array.
        H5CorruptError: it is another array than the one that they were made of.
    """
    found = arrays.get(layout.name)
    if found is None:
        raise H5ValueError(
            f"verify='digest' was asked, and {digests_path(layout.path)!r} has no digests of {layout.key!r} in "
            f"{layout.path!r}. Write them again: {WRITE}."
        )
    schema, n_pieces = _schema(layout), _n_pieces(layout, found.kind, found.rows_per_piece)
    if (found.schema, len(found.pieces)) != (schema, n_pieces):
        raise H5CorruptError(
            f"{layout.key!r} in {layout.path!r} is not what its digests were made of: then {shown(found.schema)} in "
            f"{len(found.pieces):,} {found.kind}, now {shown(schema)} in {n_pieces:,}. Copy the file again, or, if it "
            f"was changed on purpose, write new digests: {WRITE}."
        )
    if layout.table is not None and found.kind == "chunks":
        other = np.flatnonzero(found.pieces.any(axis=1) != (layout.table.offsets >= 0))
        if len(other):
            raise H5CorruptError(_differs(found, int(other[0]), layout))
    return replace(layout, digests=found, integrity=4)


def _n_pieces(layout: ArrayLayout, kind: PieceKind, rows_per_piece: int) -> int:
    if kind == "chunks":
        return 0 if layout.table is None else len(layout.table.offsets)
    return -1 if kind == "rows" and layout.offset is None else -(-layout.n_rows // rows_per_piece)


def _schema(layout: ArrayLayout) -> str:
    """What an array is, in words: equal texts mean that equal bytes are equal values."""
    filters = ", ".join(f"{step.id}{list(step.options)}" for step in layout.filters)
    how = f"{layout.storage} in chunks of {layout.chunks}" if layout.chunks else layout.storage
    shape = (layout.n_rows, *layout.axes)
    return f"shape {shape}, {layout.stored!r}, {how}, filters [{filters}], fill {layout.fill.hex()}"


def _differs(found: ArrayDigests, piece: int, layout: ArrayLayout) -> str:
    per_row = layout.table.per_row if layout.table is not None and found.kind == "chunks" else 1
    first = piece // per_row * found.rows_per_piece
    last = min(first + found.rows_per_piece, layout.n_rows) - 1
    what = f"chunk {piece} (rows {first} to {last})" if found.kind == "chunks" else f"rows {first} to {last}"
    return (
        f"{what} of {layout.key!r} in {layout.path!r} differ from the digest that was written of them: they were "
        f"damaged, or changed since. Copy the file again, or, if it was changed on purpose, write new digests: {WRITE}."
    )

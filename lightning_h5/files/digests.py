"""Digests that lie beside a file: for each array, one of each piece of it, so that a piece can vouch for itself.

A piece is a chunk as stored, or a run of rows as stored, or, where only the HDF5 library finds the bytes, a run of rows
as they read. What an array is (shape, dtype, filters ...) is kept as well: a digest of bytes says nothing about what
they are taken for.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5FileError, H5ValueError, shown
from .layout import ArrayLayout

__all__ = [
    "DIGEST_BYTES",
    "ArrayDigests",
    "PieceKind",
    "digest_of",
    "digests_path",
    "no_digests",
    "read_digests",
    "with_digests",
    "write_digests",
]

DIGEST_BYTES = 16
"""Of a SHA-256: enough that no two pieces that differ will ever have the same by chance."""

PIECE_BYTES = 1 << 18
"""A run of rows is about as long: digests then take less than a ten-thousandth of the data."""

LEAST_BYTES, MOST_TIMES, MOST_BYTES = 16 << 20, 64, 1 << 31
"""Of a file of digests, those of 80 million pieces; and beside the size of the file that they are of."""

VERSION = 1

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

    @property
    def sum(self) -> str:
        """A digest of them all."""
        return digest_of(self.schema.encode() + self.pieces.tobytes()).hex()

    def check(self, piece: int, data: Any, layout: ArrayLayout, *, mask: int = 0) -> None:
        """Compares a piece with its digest.

        Args:
            piece: its number.
            data: its bytes.
            layout: the array, for the error.
            mask: filters that it passed over, of a chunk.

        Raises:
            H5CorruptError: it is another one.
        """
        if digest_of(data, mask) != self.pieces[piece].tobytes():
            raise H5CorruptError(_other_piece(self, piece, layout))


def no_digests(layout: ArrayLayout) -> ArrayDigests:
    """Digests of an array, all still to be filled in."""
    kind: PieceKind = "chunks" if layout.table is not None else "rows" if layout.offset is not None else "values"
    rows = layout.rows_per_chunk if kind == "chunks" else max(1, PIECE_BYTES // max(1, layout.stored_row_bytes))
    n = len(layout.table.offsets) if layout.table is not None else -(-layout.n_rows // rows)
    return ArrayDigests(kind, rows, np.zeros((n, DIGEST_BYTES), dtype=np.uint8), _schema(layout))


def digest_of(data: Any, mask: int = 0) -> bytes:
    """The digest of a piece.

    Args:
        data: its bytes.
        mask: filters that it passed over, of a chunk.
    """
    found = hashlib.sha256(mask.to_bytes(4, "little"))
    found.update(data)
    return found.digest()[:DIGEST_BYTES]


def digests_path(path: str) -> str:
    """Where the digests of a file lie."""
    return f"{path}.digests.json"


def write_digests(path: str, arrays: Mapping[str, ArrayDigests]) -> None:
    """Writes the digests of a file beside it, whole or not at all; older ones are replaced.

    Args:
        path: the file.
        arrays: digests by the array's name in it.

    Raises:
        H5FileError: they cannot be written.
    """
    told = {
        name: {
            "schema": found.schema,
            "pieces": found.kind,
            "rows_per_piece": found.rows_per_piece,
            "digests": base64.b64encode(found.pieces.tobytes()).decode(),
        }
        for name, found in arrays.items()
    }
    text = json.dumps({"version": VERSION, "digest": "sha256, first 16 bytes", "arrays": told}, indent=1)
    target = digests_path(path)
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


def read_digests(path: str) -> dict[str, ArrayDigests]:
    """The digests that lie beside a file, by the array's name.

    Raises:
        H5FileError: there are none.
        H5ValueError: they are not as they were written.
    """
    source = digests_path(path)
    try:
        found = os.stat(source)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        most = min(MOST_BYTES, LEAST_BYTES + MOST_TIMES * os.stat(path).st_size)
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, and those of this file have {most:,} at most")
        with open(source, "rb") as file:
            text = file.read(found.st_size)
    except OSError as error:
        raise H5FileError(
            f"verify='digest' was asked, and the digests of {path!r} cannot be read from {source!r}: {error.strerror}. "
            "Write them while the file is known to be whole: `lightning-h5 check --write-digests`."
        ) from error
    try:
        told = json.loads(text)
        if told["version"] != VERSION:
            raise ValueError(f"version {told['version']!r} is not known")
        return {str(name): _parsed(one) for name, one in told["arrays"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise H5ValueError(
            f"{source!r} is not what `lightning-h5 check --write-digests` writes ({type(error).__name__}: "
            f"{shown(str(error))}). "
            f"Write the digests of {path!r} again, while it is known to be whole."
        ) from error


def with_digests(layout: ArrayLayout, arrays: Mapping[str, ArrayDigests]) -> ArrayLayout:
    """An array with its digests; what can be compared at once is.

    Raises:
        H5ValueError: there are none of this array.
        H5CorruptError: it is another array than the one that they were made of.
    """
    found = arrays.get(layout.name)
    if found is None:
        raise H5ValueError(
            f"verify='digest' was asked, and {digests_path(layout.path)!r} has no digests of {layout.key!r} in "
            f"{layout.path!r}. Write them again: `lightning-h5 check --write-digests`."
        )
    wanted = no_digests(layout)
    if (found.schema, found.kind, found.rows_per_piece) != (wanted.schema, wanted.kind, wanted.rows_per_piece) or len(
        found.pieces
    ) != len(wanted.pieces):
        raise H5CorruptError(
            f"{layout.key!r} in {layout.path!r} is not what its digests were made of: then {_words(found)}, now "
            f"{_words(wanted)}. Copy the file again, or, if it was changed on purpose, write new digests: "
            "`lightning-h5 check --write-digests`."
        )
    if layout.table is not None:
        other = np.flatnonzero(found.pieces.any(axis=1) != (layout.table.offsets >= 0))
        if len(other):
            raise H5CorruptError(_other_piece(found, int(other[0]), layout))
    return replace(layout, digests=found, integrity=4)


def _words(digests: ArrayDigests) -> str:
    n_pieces = len(digests.pieces)
    return f"{shown(digests.schema)}, as {n_pieces:,} pieces ({digests.kind}, {digests.rows_per_piece:,} rows each)"


def _parsed(told: Any) -> ArrayDigests:
    if told["pieces"] not in get_args(PieceKind) or type(told["rows_per_piece"]) is not int:
        raise ValueError(f"pieces {told['pieces']!r} of {told['rows_per_piece']!r} rows are not known")
    pieces = np.frombuffer(base64.b64decode(told["digests"], validate=True), dtype=np.uint8)
    return ArrayDigests(told["pieces"], told["rows_per_piece"], pieces.reshape(-1, DIGEST_BYTES), str(told["schema"]))


def _schema(layout: ArrayLayout) -> str:
    """What an array is, in words: equal texts mean that equal bytes are equal values."""
    filters = ", ".join(f"{step.id}{list(step.options)}" for step in layout.filters)
    how = f"{layout.storage} in chunks of {layout.chunks}" if layout.chunks else layout.storage
    shape = (layout.n_rows, *layout.axes)
    return f"shape {shape}, {layout.stored!r}, {how}, filters [{filters}], fill {layout.fill.hex()}"


def _other_piece(found: ArrayDigests, piece: int, layout: ArrayLayout) -> str:
    first = piece // (layout.table.per_row if layout.table is not None else 1) * found.rows_per_piece
    last = min(first + found.rows_per_piece, layout.n_rows) - 1
    what = f"chunk {piece} (rows {first} to {last})" if found.kind == "chunks" else f"rows {first} to {last}"
    return (
        f"{what} of {layout.key!r} in {layout.path!r} differ from the digest that was written of them: they were "
        "damaged, or changed since. Copy the file again, or, if it was changed on purpose, write new digests: "
        "`lightning-h5 check --write-digests`."
    )

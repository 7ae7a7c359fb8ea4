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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import H5CorruptError, H5FileError, H5ValueError, shown
from ..regular_files import open_regular

if TYPE_CHECKING:
    from .layout import ArrayLayout

__all__ = ["ArrayDigests", "digest_of", "digests_path", "read_digests", "with_digests", "write_digests"]

DIGEST_BYTES = 16
"""Bytes of a SHA-256 that are kept: enough that different pieces never have the same by chance."""

VERSION = 1
WRITE = "`lightning-h5 check --write-digests`"


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

    @classmethod
    def empty(cls, layout: ArrayLayout, rows_per_run: int) -> ArrayDigests:
        """Return digests of an array that are still to be filled in: of its chunks, or of runs of rows."""
        kind: Literal["chunks", "rows"] = "rows" if layout.table is None else "chunks"
        rows = rows_per_run if layout.table is None else layout.rows_per_chunk
        return cls(kind, rows, np.zeros((_n_pieces(layout, kind, rows), DIGEST_BYTES), np.uint8), _schema(layout))

    def check(self, piece: int, data: Any, layout: ArrayLayout, *, mask: int = 0) -> None:
        """Compare a piece with its digest.

        Args:
            piece: its number.
            data: its bytes.
            layout: the array, for the error.
            mask: the filter mask of a chunk.

        Raises:
            H5CorruptError: it differs.
        """
        if digest_of(data, mask) != self.pieces[piece].tobytes():
            raise H5CorruptError(self._differs(piece, layout))

    def check_layout(self, layout: ArrayLayout) -> None:
        """Compare an array's schema, and which of its chunks were written.

        Raises:
            H5CorruptError: it differs.
        """
        schema, n_pieces = _schema(layout), _n_pieces(layout, self.kind, self.rows_per_piece)
        if (self.schema, len(self.pieces)) != (schema, n_pieces):
            raise H5CorruptError(
                f"{layout.key!r} in {layout.path!r} does not match its digests, which were made of "
                f"{shown(self.schema)} in {len(self.pieces):,} {self.kind}, now {shown(schema)} in {n_pieces:,}. Copy "
                f"the file again, or, if it was changed on purpose, write new digests: {WRITE}."
            )
        if layout.table is not None and self.kind == "chunks":
            mismatches = np.flatnonzero(self.pieces.any(axis=1) != (layout.table.offsets >= 0))
            if len(mismatches):
                raise H5CorruptError(self._differs(int(mismatches[0]), layout))

    def _differs(self, piece: int, layout: ArrayLayout) -> str:
        per_row = layout.table.per_row if layout.table is not None and self.kind == "chunks" else 1
        first_row = piece // per_row * self.rows_per_piece
        last_row = min(first_row + self.rows_per_piece, layout.n_rows) - 1
        subject = (
            f"chunk {piece} (rows {first_row} to {last_row})"
            if self.kind == "chunks"
            else f"rows {first_row} to {last_row}"
        )
        return (
            f"{subject} of {layout.key!r} in {layout.path!r} differ from their digest: they were damaged, or changed "
            f"after it was written. Copy the file again, or, if it was changed on purpose, write new digests: {WRITE}."
        )


def digest_of(data: Any, mask: int = 0) -> bytes:
    """Return the digest of a piece.

    Args:
        data: its bytes.
        mask: the filter mask of a chunk.
    """
    digest = hashlib.sha256(mask.to_bytes(4, "little"))
    digest.update(data)
    return digest.digest()[:DIGEST_BYTES]


def with_digests(layout: ArrayLayout, arrays: Mapping[str, ArrayDigests]) -> ArrayLayout:
    """Return an array with its digests.

    Raises:
        H5ValueError: there are none of this array.
        H5CorruptError: it is not the array that they were made of.
    """
    digests = arrays.get(layout.name)
    if digests is None:
        raise H5ValueError(
            f"verify='digest' was requested, but {digests_path(layout.path)!r} has no digests of {layout.key!r} in "
            f"{layout.path!r}. Write them again: {WRITE}."
        )
    digests.check_layout(layout)
    return layout.with_changes(digests=digests, integrity=4)


def _n_pieces(layout: ArrayLayout, kind: str, rows_per_piece: int) -> int:
    if kind == "chunks":
        return 0 if layout.table is None else len(layout.table.offsets)
    return -(-layout.n_rows // rows_per_piece)


def _schema(layout: ArrayLayout) -> str:
    """Describe an array in words: equal texts mean that equal bytes are equal values."""
    filters = ", ".join(f"{step.id}{list(step.options)}" for step in layout.filters)
    storage = f"{layout.storage} in chunks of {layout.chunks}" if layout.chunks else layout.storage
    shape = (layout.n_rows, *layout.axes)
    return f"shape {shape}, {layout.stored!r}, {storage}, filters [{filters}], fill {layout.fill.hex()}"


# The file ---------------------------------------------------------------------------------------------------------


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
            f"{error.strerror}. Write them while the file is known to be whole: {WRITE}."
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
            f"{source!r} is not what {WRITE} writes ({type(error).__name__}: {shown(str(error))}). Write the digests "
            f"of {path!r} again, while it is known to be whole."
        ) from error


def _parse_array(record: Any) -> ArrayDigests:
    kind, rows = record["pieces"], record["rows_per_piece"]
    if kind not in ("chunks", "rows") or type(rows) is not int or rows < 1:
        raise ValueError(f"pieces {kind!r} of {rows!r} rows are not known")
    pieces = np.frombuffer(base64.b64decode(record["digests"], validate=True), dtype=np.uint8)
    return ArrayDigests(kind, rows, pieces.reshape(-1, DIGEST_BYTES), str(record["schema"]))

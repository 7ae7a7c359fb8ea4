"""Compare arrays, and pieces of their bytes, with the digests that were made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import H5CorruptError, H5ValueError, shown
from .digests import DIGEST_BYTES, WRITE, ArrayDigests, digest_of, digests_path
from .layout import ArrayLayout

__all__ = ["blank_digests", "check_piece", "with_digests"]


def blank_digests(layout: ArrayLayout, rows_per_run: int) -> ArrayDigests:
    """Return digests of an array that are still to be filled in: of its chunks, or of runs of rows."""
    if layout.table is not None:
        pieces = np.zeros((len(layout.table.offsets), DIGEST_BYTES), np.uint8)
        return ArrayDigests("chunks", layout.rows_per_chunk, pieces, _schema(layout))
    pieces = np.zeros((-(-layout.n_rows // rows_per_run), DIGEST_BYTES), np.uint8)
    return ArrayDigests("rows", rows_per_run, pieces, _schema(layout))


def check_piece(digests: ArrayDigests, piece: int, data: Any, layout: ArrayLayout, *, mask: int = 0) -> None:
    """Compare a piece with its digest.

    Args:
        digests: the digests of the array.
        piece: its number.
        data: its bytes.
        layout: the array, for the error.
        mask: the filter mask of a chunk.

    Raises:
        H5CorruptError: it differs.
    """
    if digest_of(data, mask) != digests.pieces[piece].tobytes():
        raise _different_piece(digests, piece, layout)


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
    _check_array(digests, layout)
    return layout.with_changes(digests=digests, integrity=4)


def _check_array(digests: ArrayDigests, layout: ArrayLayout) -> None:
    """Compare an array's schema, and which of its chunks were written."""
    schema, n_pieces = _schema(layout), _n_pieces(layout, digests)
    if (digests.schema, len(digests.pieces)) != (schema, n_pieces):
        raise H5CorruptError(
            f"{layout.key!r} in {layout.path!r} does not match its digests, which were made of "
            f"{shown(digests.schema)} in {len(digests.pieces):,} {digests.kind}, now {shown(schema)} in {n_pieces:,}. "
            f"Copy the file again, or, if it was changed on purpose, write new digests: {WRITE}."
        )
    if layout.table is not None and digests.kind == "chunks":
        mismatches = np.flatnonzero(digests.pieces.any(axis=1) != (layout.table.offsets >= 0))
        if len(mismatches):
            raise _different_piece(digests, int(mismatches[0]), layout)


def _different_piece(digests: ArrayDigests, piece: int, layout: ArrayLayout) -> H5CorruptError:
    per_row = layout.table.per_row if layout.table is not None and digests.kind == "chunks" else 1
    first_row = piece // per_row * digests.rows_per_piece
    last_row = min(first_row + digests.rows_per_piece, layout.n_rows) - 1
    rows = f"rows {first_row} to {last_row}"
    subject = f"chunk {piece} ({rows})" if digests.kind == "chunks" else rows
    return H5CorruptError(
        f"{subject} of {layout.key!r} in {layout.path!r} differ from their digest: they were damaged, or changed "
        f"after it was written. Copy the file again, or, if it was changed on purpose, write new digests: {WRITE}."
    )


def _n_pieces(layout: ArrayLayout, digests: ArrayDigests) -> int:
    if digests.kind == "chunks":
        return 0 if layout.table is None else len(layout.table.offsets)
    return -(-layout.n_rows // digests.rows_per_piece)


def _schema(layout: ArrayLayout) -> str:
    """Describe an array in words: equal texts mean that equal bytes are equal values."""
    filters = ", ".join(f"{step.id}{list(step.options)}" for step in layout.filters)
    storage = f"{layout.storage} in chunks of {layout.chunks}" if layout.chunks else layout.storage
    shape = (layout.n_rows, *layout.axes)
    return f"shape {shape}, {layout.stored!r}, {storage}, filters [{filters}], fill {layout.fill.hex()}"

"""The compressed pieces of stored chunks: what a batched codec decodes independently."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...types import IntArray
from ..filters.native import HEADER, LONGEST_BLOCK

__all__ = [
    "ZLIB_HEADER",
    "Compression",
    "Parsed",
    "StoredPieces",
    "aligned",
    "aligned_starts",
    "block_pieces",
    "zlib_pieces",
    "zstd_pieces",
]

Compression: TypeAlias = Literal["deflate", "lz4", "zstd"]

Octets: TypeAlias = npt.NDArray[np.uint8]

ZLIB_HEADER, ZLIB_TRAILER = 2, 4  # bytes before and after the deflate stream
ZSTD_HEADER, ZSTD_MAGIC = 5, 0x28B52FFD  # least bytes of a frame's header, and its first four


class StoredPieces(NamedTuple):
    """Compressed pieces of chunks.

    Attributes:
        chunks: the chunk of each piece, shape ``(n_pieces,)``.
        starts: where it is stored.
        sizes: its stored bytes.
        firsts: where it belongs in its chunk, or in the memory of all chunks.
        lengths: its decoded bytes.
        is_stored: whether it is stored without compression.
    """

    chunks: IntArray
    starts: IntArray
    sizes: IntArray
    firsts: IntArray
    lengths: IntArray
    is_stored: npt.NDArray[np.bool_]

    def select(self, which: npt.NDArray[np.bool_]) -> StoredPieces:
        """Return some of the pieces."""
        values: list[npt.NDArray[Any]] = [values[which] for values in self]
        return StoredPieces(*values)


class Parsed(NamedTuple):
    """What was found in stored chunks.

    Attributes:
        pieces: the pieces of the chunks whose format is right.
        is_wrong: which chunks have another format, shape ``(n_chunks,)``.
        adler: Adler-32 of each decoded chunk; None if it is not stored.
        blocks: decoded bytes of a block of each chunk; None if chunks have no blocks.
    """

    pieces: StoredPieces
    is_wrong: npt.NDArray[np.bool_]
    adler: IntArray | None = None
    blocks: IntArray | None = None


def frame_pieces(data: Octets, starts: IntArray, stops: IntArray, n_bytes: int) -> StoredPieces:
    """Return each chunk as one piece.

    Args:
        data: the stored bytes.
        starts: start of each chunk in ``data``, shape ``(n_chunks,)``.
        stops: its end.
        n_bytes: decoded bytes of a chunk.
    """
    n = len(starts)
    return StoredPieces(
        np.arange(n), starts, stops - starts, np.zeros(n, np.int64), np.full(n, n_bytes), np.zeros(n, np.bool_)
    )


def zstd_pieces(data: Octets, starts: IntArray, stops: IntArray, n_bytes: int) -> Parsed:
    """Return each frame of Zstandard (RFC 8878) as one piece; see ``frame_pieces``.

    Frames with a checksum count as wrong, since a batched codec need not verify it.
    """
    is_wrong = stops - starts <= ZSTD_HEADER
    firsts = np.where(is_wrong, 0, starts)
    is_wrong |= (_big_endian(data, firsts, 4) != ZSTD_MAGIC) | (data[np.minimum(firsts + 4, len(data) - 1)] & 4 != 0)
    return Parsed(frame_pieces(data, starts, stops, n_bytes).select(~is_wrong), is_wrong)


def zlib_pieces(data: Octets, starts: IntArray, stops: IntArray, n_bytes: int) -> Parsed:
    """Return the deflate stream of each zlib stream (RFC 1950), and its Adler-32; see ``frame_pieces``."""
    is_wrong = stops - starts <= ZLIB_HEADER + ZLIB_TRAILER
    firsts = np.where(is_wrong, 0, starts)
    method, flags = data[firsts].astype(np.int64), data[firsts + 1].astype(np.int64)
    # Deflate with a window of at most 32 KiB, a check of the header, and no preset dictionary.
    is_wrong |= (method & 15 != 8) | (method >> 4 > 7) | ((method << 8 | flags) % 31 != 0) | (flags & 32 != 0)
    pieces = frame_pieces(data, starts + ZLIB_HEADER, stops - ZLIB_TRAILER, n_bytes)
    adler = _big_endian(data, np.where(is_wrong, 0, stops - ZLIB_TRAILER), ZLIB_TRAILER)
    return Parsed(pieces.select(~is_wrong), is_wrong, adler)


def block_pieces(data: Octets, starts: IntArray, stops: IntArray, n_bytes: int, multiple: int = 1) -> Parsed:
    """Return the blocks of chunks in the format of the filters LZ4 and bitshuffle; see ``frame_pieces``.

    After a header, each block is stored with its size. What is left of a multiple is at the end, as it is.

    Args:
        data: the stored bytes.
        starts: start of each chunk in ``data``, shape ``(n_chunks,)``.
        stops: its end.
        n_bytes: decoded bytes of a chunk.
        multiple: number of bytes of which each block has a multiple.
    """
    n = len(starts)
    is_wrong = stops - starts < HEADER
    heads = np.where(is_wrong, 0, starts)
    declared, block = _big_endian(data, heads, 8), _big_endian(data, heads + 8, 4)
    is_wrong |= (declared != n_bytes) | (block < 1) | (block % multiple != 0) | (block > LONGEST_BLOCK)
    whole = n_bytes // multiple * multiple
    at = starts + HEADER
    parts: list[StoredPieces] = []
    chunks = np.flatnonzero(~is_wrong)
    first = np.zeros(n, np.int64)
    while len(chunks := chunks[first[chunks] < whole]):
        is_short = at[chunks] + 4 > stops[chunks]
        sizes = _big_endian(data, np.where(is_short, 0, at[chunks]), 4)
        is_short |= (sizes < 1) | (sizes > stops[chunks] - at[chunks] - 4)
        is_wrong[chunks[is_short]] = True
        chunks, sizes = chunks[~is_short], sizes[~is_short]
        lengths = np.minimum(block[chunks], whole - first[chunks])
        is_stored = (sizes == lengths) & (multiple == 1)  # LZ4 stores blocks that do not shrink as they are
        parts.append(StoredPieces(chunks, at[chunks] + 4, sizes, first[chunks], lengths, is_stored))
        at[chunks] += 4 + sizes
        first[chunks] += lengths
    if whole < n_bytes:
        is_wrong |= n_bytes - whole > stops - at
        chunks, rest = np.flatnonzero(~is_wrong), n_bytes - whole
        full = np.full(len(chunks), rest)
        parts.append(
            StoredPieces(chunks, at[chunks], full, np.full(len(chunks), whole), full, np.ones(len(chunks), np.bool_))
        )
    none = np.empty(0, np.int64)
    parts.append(StoredPieces(none, none, none, none, none, np.empty(0, np.bool_)))
    pieces = StoredPieces(*(np.concatenate(values) for values in zip(*parts, strict=True)))
    return Parsed(pieces.select(~is_wrong[pieces.chunks]), is_wrong, blocks=block)


def _big_endian(data: Octets, places: IntArray, n_bytes: int) -> IntArray:
    """Return a number at each place; numbers of 8 bytes may wrap around."""
    numbers = np.zeros(len(places), np.int64)
    last = len(data) - 1
    for byte in range(n_bytes):
        numbers = numbers << 8 | data[np.minimum(places + byte, last)]
    return numbers


def aligned(data: Octets, pieces: StoredPieces, out: Octets, alignment: int) -> StoredPieces:
    """Copy pieces to the positions of ``aligned_starts``; return them with these positions.

    Args:
        data: the stored bytes.
        pieces: the pieces.
        out: memory for the copies.
        alignment: see ``aligned_starts``.
    """
    starts = aligned_starts(pieces.sizes, alignment)
    each = zip(pieces.starts.tolist(), pieces.sizes.tolist(), starts.tolist(), strict=True)
    for start, size, to in each:
        out[to : to + size] = data[start : start + size]
    return pieces._replace(starts=starts)


def aligned_starts(sizes: IntArray, alignment: int) -> IntArray:
    """Return positions for pieces, one after the other, that are multiples of a number."""
    padded = -(-sizes // alignment) * alignment
    starts: IntArray = np.cumsum(padded) - padded
    return starts

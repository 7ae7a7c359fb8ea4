"""Check a Blosc2 frame before its library reads it: a frame may name code to load, and declare any size.

The library looks for a codec that it does not have by running Python, which imports a module by name from whatever
folder the process is in. And it takes memory for the size that a frame declares, before a byte is decoded.
"""

from __future__ import annotations

import importlib
import struct
from typing import Any

import numpy as np

__all__ = ["check_frame", "check_memory"]

MAGIC = b"b2frame\x00"
FRAME = struct.Struct(">xx8sxixQxBBBBxqxqxixixi")  # see FRAME_BYTES
FRAME_BYTES = 87  # up to the frame's metadata beyond sizes, filters and codec
FILTERS, CODEC = slice(71, 77), 77  # offsets in the frame header
CHUNK = struct.Struct("<BBBBiii6sB8xB")
LEAST = 32  # bytes of a chunk: its header
IS_EXTENDED, IS_COPY, IS_LAZY = 0b101, 0b10, 0b1000
NEWEST = 5  # chunk version; later ones have pieces of different sizes, which arrays never have

FORMATS = {0, 1, 3, 4}  # blosclz; lz4 and lz4hc; zlib; zstd: numbers in chunks
CODECS = {0, 1, 2, 4, 5}  # the same: numbers in frames
N_FILTERS = 5  # none, shuffle, bitshuffle, delta, trunc_prec

MAX_AXES = 8  # axes of an array in a frame, whose blocks pad its chunks to less than twice the length of each axis


def check_frame(frame: bytes, n_bytes: int) -> int:
    """Makes sure that a frame names nothing but built-in codecs and filters, wherever it may name one.

    Args:
        frame: a chunk of an array, as stored.
        n_bytes: what it is to decode to.

    Returns:
        Bytes that it declares to decode to; more than ``n_bytes`` if its own chunks hang over the array's edge.

    Raises:
        ValueError: it does, or its sizes do not fit each other.
    """
    if len(frame) < FRAME_BYTES + LEAST:
        raise ValueError(f"it has {len(frame):,} bytes, too few for a Blosc2 frame")
    magic, header, length, _, kind, codec, _, total, stored, _, _, chunk = FRAME.unpack_from(frame)
    if magic != MAGIC or kind != 0 or length > len(frame):
        raise ValueError("it is not a contiguous Blosc2 frame")
    _built_in(frame[FILTERS], codec & 15 in CODECS and frame[CODEC] in CODECS)
    if not 0 < chunk <= total <= n_bytes << MAX_AXES:
        raise ValueError(f"it declares to decode to {total:,} bytes in pieces of {chunk:,}, not to {n_bytes:,}")
    n_chunks = -(-total // chunk)
    if not (header >= FRAME_BYTES and 0 <= stored <= len(frame) - header - LEAST) or n_chunks > n_bytes:
        raise ValueError(f"it declares that {stored:,} bytes of its {len(frame):,} are {n_chunks:,} pieces")
    for offset in _offsets(frame[header + stored :], n_chunks):
        if offset >= 0:  # otherwise it encodes a constant: zeros, NaN
            _check_chunk(memoryview(frame)[header : header + stored], offset, chunk)
    return int(total)


def check_memory(array: Any, n_bytes: int) -> None:
    """Makes sure that an array in a frame has the size that it should, and takes not much more to decode.

    Args:
        array: as `blosc2` opened it, still undecoded.
        n_bytes: what it is to decode to.

    Raises:
        ValueError: it does.
    """
    n_decoded, n_padded = array.schunk.typesize, array.schunk.typesize
    for size, step, block in zip(array.shape, array.chunks, array.blocks, strict=True):
        n_decoded, n_padded = n_decoded * size, n_padded * -(-step // max(1, block)) * block
    if n_decoded != n_bytes or n_padded > n_bytes << MAX_AXES:
        raise ValueError(f"it decodes to {n_decoded:,} bytes in pieces of {n_padded:,}, not to {n_bytes:,}")


def _offsets(index: bytes, n_chunks: int) -> list[int]:
    """Where the chunks of a frame begin: numbers that are a chunk themselves."""
    flags, n_bytes, stored = _check_chunk(memoryview(index), 0, n_chunks * 8)
    if n_bytes != n_chunks * 8:
        raise ValueError(f"it has {n_bytes:,} bytes of places for {n_chunks:,} pieces")
    if flags & IS_COPY and stored == LEAST + n_chunks * 8:
        return list(np.frombuffer(index, "<i8", n_chunks, LEAST).tolist())
    offsets = np.zeros(n_chunks, dtype="<i8")
    importlib.import_module("blosc2").decompress2(index[:stored], dst=offsets)
    return list(np.unique(offsets).tolist())


def _check_chunk(data: memoryview, at: int, max_bytes: int) -> tuple[int, int, int]:
    """Flags, decoded and stored bytes of a chunk that is sound, judged by its header."""
    if not 0 <= at <= len(data) - LEAST:
        raise ValueError(f"a piece of it should be at its byte {at:,}, and it has {len(data):,}")
    version, _, flags, _, n_bytes, block, stored, filters, codec, further_flags = CHUNK.unpack_from(data, at)
    is_known = version <= NEWEST and flags & IS_EXTENDED == IS_EXTENDED and not further_flags & IS_LAZY
    if not is_known or not LEAST <= stored <= len(data) - at or not 0 < block <= n_bytes <= max_bytes:
        raise ValueError(f"what it declares of its piece at byte {at:,} cannot be")
    _built_in(filters, flags >> 5 in FORMATS and codec in CODECS)
    return flags, n_bytes, stored


def _built_in(filters: bytes, is_codec: bool) -> None:
    if not is_codec or max(filters) >= N_FILTERS:
        raise ValueError("it names a codec or filter that Blosc2 would load as a plugin, and so run code")

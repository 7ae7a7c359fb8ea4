"""Encoders of single filters without the HDF5 library, whose lock would let one core work at a time.

The counterpart of the readers' decoders, from the same libraries. libdeflate at level 4 encodes about three times as
fast as zlib (91 and 32 MiB/s of noisy pictures in one thread, two cores, 2026-11-22).
"""

from __future__ import annotations

import ctypes
import importlib
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...files import Filter
from ...readers.base import address
from ...readers.checksum import fletcher32

__all__ = ["Bytes", "ChunkEncoder", "chunk_encoder"]

GZIP, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000
BLOSC, LZ4, BITSHUFFLE, ZSTD = 32001, 32004, 32008, 32015
BLOSC_CODECS = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
BITSHUFFLE_BLOCK_BYTES = 8192

Bytes: TypeAlias = npt.NDArray[np.uint8]
Encoder: TypeAlias = Callable[[Bytes], Bytes | None]
"""What bytes are stored as; None where that is no smaller, and HDF5 would pass over the filter."""


class ChunkEncoder:
    """Applies the filters of one array to chunks; may be used by many threads.

    Args:
        steps: an encoder for each filter, in the order of writing.
    """

    def __init__(self, steps: Sequence[Encoder]) -> None:
        self._steps = tuple(steps)

    def encode(self, chunk: Bytes) -> tuple[int, Bytes]:
        """The chunk as it is stored, and its filter mask: bit ``i`` says that filter ``i`` was passed over.

        Args:
            chunk: all bytes of a chunk, what hangs over the array's edge included.
        """
        mask, data = 0, chunk
        for at, step in enumerate(self._steps):
            encoded = step(data)
            if encoded is None:
                mask |= 1 << at
            else:
                data = encoded
        return mask, data


def chunk_encoder(filters: Sequence[Filter], are_optional: Sequence[bool], itemsize: int) -> ChunkEncoder | None:
    """An encoder for an array's filters; None where the HDF5 library has to encode.

    Args:
        filters: as the array has them once it is made, with options that the library filled in.
        are_optional: for each, whether a chunk may pass it over; compressors need to, or the library encodes.
        itemsize: bytes of an element.
    """
    steps = []
    for found, is_optional in zip(filters, are_optional, strict=True):
        step = _encoder_of(found, itemsize)
        if step is None or not (is_optional or found.id in (SHUFFLE, FLETCHER32)):
            return None
        steps.append(step)
    return ChunkEncoder(steps)


@cache
def _encoder_of(step: Filter, itemsize: int) -> Encoder | None:
    for maker in _MAKERS.get(step.id, ()):
        with suppress(ImportError, AttributeError, OSError, LookupError, ValueError):
            return maker(step, itemsize)
    return None


def _smaller(encoded: Any, data: Bytes) -> Bytes | None:
    return np.frombuffer(encoded, dtype=np.uint8) if len(encoded) < len(data) else None


# gzip is never passed over, as HDF5 does not either: its checksum is what vouches for the chunk.


def _with_libdeflate(step: Filter, itemsize: int) -> Encoder:
    # The C functions inside of `deflate`, as for decoding: they write into memory that is given.
    library = ctypes.CDLL(importlib.import_module("deflate")._deflate.__file__)
    make, function = library.libdeflate_alloc_compressor, library.libdeflate_zlib_compress
    bound = library.libdeflate_zlib_compress_bound
    bound.argtypes, bound.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_size_t
    make.argtypes, make.restype = [ctypes.c_int], ctypes.c_void_p
    piece = (ctypes.c_void_p, ctypes.c_size_t)
    function.argtypes, function.restype = [ctypes.c_void_p, *piece, *piece], ctypes.c_size_t
    (level,) = step.options
    idle: deque[int] = deque()  # compressors, up to some MB each; as many as threads ever encode at a time

    def encode(data: Bytes) -> Bytes:
        try:
            own = idle.pop()
        except IndexError:
            own = make(level)
        if not own:
            raise MemoryError("there is no memory for a compressor")
        out = np.empty(bound(own, len(data)), dtype=np.uint8)
        n_bytes = function(own, address(data), len(data), address(out), len(out))
        idle.append(own)
        return out[:n_bytes]

    return encode


def _with_deflate(step: Filter, itemsize: int) -> Encoder:
    function, (level,) = importlib.import_module("deflate").zlib_compress, step.options
    return lambda data: np.frombuffer(function(data, level), dtype=np.uint8)


def _with_zlib(step: Filter, itemsize: int) -> Encoder:
    (level,) = step.options
    return lambda data: np.frombuffer(zlib.compress(data.data, level), dtype=np.uint8)


def _with_liblzf(step: Filter, itemsize: int) -> Encoder:
    # h5py brings LZF along, as a C function that its shared library shows.
    function = ctypes.CDLL(importlib.import_module("h5py.h5z").__file__ or "").lzf_compress
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    function.restype = ctypes.c_uint

    def encode(data: Bytes) -> Bytes | None:
        out = np.empty(len(data), dtype=np.uint8)
        n_bytes = function(address(data), len(data), address(out), len(out) - 1)
        return out[:n_bytes] if n_bytes else None

    return encode


def _with_zstd(step: Filter, itemsize: int) -> Encoder:
    function = importlib.import_module("imagecodecs").zstd_encode
    level = step.options[0] if step.options else 3
    return lambda data: _smaller(function(data, level=level), data)


def _with_lz4(step: Filter, itemsize: int) -> Encoder:
    function = importlib.import_module("imagecodecs").lz4h5_encode
    block = step.options[0] if step.options else 0
    return lambda data: _smaller(function(data, blocksize=min(block or len(data), len(data))), data)


def _with_blosc(step: Filter, itemsize: int) -> Encoder:
    function = importlib.import_module("imagecodecs").blosc_encode
    _, _, size, _, level, shuffle, codec = step.options
    name = BLOSC_CODECS[codec]
    return lambda data: _smaller(
        function(data, level=level, compressor=name, shuffle=shuffle, typesize=size, numthreads=1), data
    )


def _with_bitshuffle(step: Filter, itemsize: int) -> Encoder:
    imagecodecs = importlib.import_module("imagecodecs")
    size, block = step.options[2], step.options[3]
    if step.options[4] != 2:  # LZ4; what has another compressor is left to the HDF5 library
        raise LookupError(step.options)
    block = block or max(128, BITSHUFFLE_BLOCK_BYTES // size // 8 * 8)
    imagecodecs.bitshuffle_encode(bytes(8 * size), itemsize=size)  # older versions refuse numbers above 8 bytes

    def encode(data: Bytes) -> Bytes | None:
        n = len(data) // size  # elements; blocks have multiples of eight of them, and what is left stays as it is
        parts = [len(data).to_bytes(8, "big"), (block * size).to_bytes(4, "big")]
        at = 0
        while n - at >= 8:
            some = min(block, (n - at) // 8 * 8)
            bits = imagecodecs.bitshuffle_encode(data[at * size : (at + some) * size].tobytes(), itemsize=size)
            packed = imagecodecs.lz4_encode(bits)
            parts += [len(packed).to_bytes(4, "big"), packed]
            at += some
        return _smaller(b"".join([*parts, data[at * size :].tobytes()]), data)

    return encode


def _shuffled_by(function: Callable[[Bytes, Bytes, int], None] | None) -> Callable[[Filter, int], Encoder]:
    def make(step: Filter, itemsize: int) -> Encoder:
        size = step.options[0] if step.options else itemsize

        def encode(data: Bytes) -> Bytes:
            if size < 2:
                return data
            out = np.empty_like(data)
            n = len(data) // size
            if function is not None and size in (2, 4, 8):
                function(data[: n * size], out[: n * size], size)
            else:
                out[: n * size].reshape(size, n)[...] = data[: n * size].reshape(n, size).T
            out[n * size :] = data[n * size :]
            return out

        return encode

    return make


def _with_zlib_into(step: Filter, itemsize: int) -> Encoder:
    return _shuffled_by(importlib.import_module("zlib_into").shuffle)(step, itemsize)


def _with_checksum(step: Filter, itemsize: int) -> Encoder:
    def encode(data: Bytes) -> Bytes:
        checksum = np.frombuffer(fletcher32(data).to_bytes(4, "little"), dtype=np.uint8)
        return np.concatenate([data, checksum])

    return encode


_MAKERS: dict[int, Sequence[Callable[[Filter, int], Encoder]]] = {
    GZIP: (_with_libdeflate, _with_deflate, _with_zlib),
    SHUFFLE: (_with_zlib_into, _shuffled_by(None)),
    FLETCHER32: (_with_checksum,),
    LZF: (_with_liblzf,),
    BLOSC: (_with_blosc,),
    LZ4: (_with_lz4,),
    BITSHUFFLE: (_with_bitshuffle,),
    ZSTD: (_with_zstd,),
}
"""For each filter the ways to encode it, the fastest first."""

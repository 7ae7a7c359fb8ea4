"""Decoders of single filters without the HDF5 library, from whatever libraries are installed.

Which there are is found out when they are first needed. `deflate` and `zlib-into` come with this package, LZF with
h5py; `imagecodecs` and `blosc2` know the others and are faster for LZF. Measured on two cores, MiB/s of one thread (two
threads do twice that): gzip of noisy images with zlib 250, isal 340, libdeflate (`deflate`, `imagecodecs`) 450; of
shuffled signals 620, 1,040 and 1,530; undoing the shuffle with NumPy 3,300, with `zlib-into` 38,000.
"""

from __future__ import annotations

import ctypes
import importlib
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..files import Filter
from .base import address
from .frames import check_frame, check_memory
from .lzf import lzf_loop

__all__ = [
    "FLETCHER32",
    "SHUFFLE",
    "Bytes",
    "Decoder",
    "NativeDecoder",
    "decoder_of",
    "ensure_same_size",
    "is_known",
    "shuffled",
]

GZIP, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000
BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 32001, 32004, 32008, 32015, 32026

Bytes: TypeAlias = npt.NDArray[np.uint8]
Decoder: TypeAlias = Callable[[Bytes, Bytes], None]
"""Decodes the first into the second, all of it; raises an error of any kind where that cannot be."""

DecodeOne: TypeAlias = Callable[[int, Bytes, int, Bytes], bool]

_Call: TypeAlias = tuple[int, int, int, int]


class NativeDecoder:
    """A decoder that is a C function of addresses.

    Many chunks are decoded in a row with as little Python between two as can be. Where chunks are small, threads would
    wait for each other there: an epoch of 20,000 chunks of 12 KiB took 1.2 times as long.

    Args:
        each: see ``each``.
        one: see the attribute.
        lend: see the attribute.

    Attributes:
        one: makes a function that decodes one chunk, in the part of Python that Numba compiles; is given what compiles
            the functions that it calls. The function takes what ``lend`` gives, the stored bytes, how many they are,
            and the memory that they fill; it gives whether they do.
        lend: what one thread at a time needs for ``one``, for as long as a context lasts.
    """

    def __init__(
        self,
        each: Callable[[Iterable[_Call]], tuple[int, str] | None],
        one: Callable[[Callable[..., Any]], DecodeOne],
        lend: Callable[[], AbstractContextManager[int]],
    ) -> None:
        self._each, self.one, self.lend = each, one, lend

    def __call__(self, data: Bytes, out: Bytes) -> None:
        """Decodes one chunk."""
        failed = self._each([(address(data), len(data), address(out), len(out))])
        if failed is not None:
            raise ValueError(failed[1])

    def each(self, calls: Iterable[_Call]) -> tuple[int, str] | None:
        """Decodes chunks one after the other.

        Args:
            calls: for each chunk address and size of its stored bytes, and of the memory that it fills.

        Returns:
            Number of the first that does not decode, and why; None where all do.
        """
        return self._each(calls)


def is_known(number: int) -> bool:
    """Whether there is a decoder for a filter, if its library is installed."""
    return number in _MAKERS


@cache
def decoder_of(step: Filter, itemsize: int) -> Decoder | None:
    """A filter's decoder, or None where no library for it is installed, or none knows these options."""
    for maker in _MAKERS[step.id]:
        with suppress(ImportError, AttributeError, OSError, LookupError, ValueError):
            return maker(step, itemsize)
    return None


def _with_imagecodecs(name: str) -> Callable[[Filter, int], Decoder]:
    def make(step: Filter, itemsize: int) -> Decoder:
        function = getattr(importlib.import_module("imagecodecs"), f"{name}_decode")

        def decode(data: Bytes, out: Bytes) -> None:
            _all_of(len(np.atleast_1d(function(data, out=out))), out)

        return decode

    return make


def _with_libdeflate(step: Filter, itemsize: int) -> Decoder:
    # The C functions inside of `deflate`, where its shared library shows them: they decode into memory that is given,
    # and let go of the interpreter's lock once a chunk, not twice.
    return _libdeflate(importlib.import_module("deflate")._deflate.__file__)


@cache  # whatever the options: what is compiled for a decoder is compiled once
def _libdeflate(path: str) -> NativeDecoder:
    library = ctypes.CDLL(path)
    make, function = library.libdeflate_alloc_decompressor, library.libdeflate_zlib_decompress
    make.argtypes, make.restype = [], ctypes.c_void_p
    piece = (ctypes.c_void_p, ctypes.c_size_t)
    function.argtypes = [ctypes.c_void_p, *piece, *piece, ctypes.c_void_p]
    idle: deque[int] = deque()  # decompressors, 11 KB each; as many as threads ever decode at a time

    @contextmanager
    def lend() -> Iterator[int]:
        try:
            own = idle.pop()
        except IndexError:
            own = make()
        if not own:
            raise MemoryError("there is no memory for a decompressor")
        try:
            yield own
        finally:
            idle.append(own)

    def each(calls: Iterable[_Call]) -> tuple[int, str] | None:
        with lend() as own:
            for at, (data, n_data, out, n_out) in enumerate(calls):
                if failed := function(own, data, n_data, out, n_out, None):
                    return at, _LIBDEFLATE_SAYS.get(failed, f"libdeflate gives up with number {failed}")
        return None

    def decode(own: int, data: Bytes, n_data: int, out: Bytes) -> bool:
        return bool(function(own, data.ctypes.data, n_data, out.ctypes.data, out.size, 0) == 0)

    return NativeDecoder(each, lambda compiled: decode, lend)


_LIBDEFLATE_SAYS = {
    1: "it is no zlib stream, or its checksum is wrong",
    2: "it decodes to fewer bytes than a chunk has",
    3: "it decodes to more bytes than a chunk has",
}


def _with_deflate(step: Filter, itemsize: int) -> Decoder:
    function = importlib.import_module("deflate").zlib_decompress

    def decode(data: Bytes, out: Bytes) -> None:
        _fill(out, function(data, len(out)))

    return decode


def _with_zlib(step: Filter, itemsize: int) -> Decoder:
    def decode(data: Bytes, out: Bytes) -> None:
        stream = zlib.decompressobj()
        decoded = stream.decompress(data.data, len(out) + 1)  # no more, whatever it would become
        if not stream.eof and len(decoded) <= len(out):
            raise ValueError("it is no whole zlib stream")
        _fill(out, decoded)

    return decode


def _with_liblzf(package: str, module: str) -> Callable[[Filter, int], Decoder]:
    # Both h5py and imagecodecs bring LZF along, as a C function that their shared libraries show.
    def make(step: Filter, itemsize: int) -> Decoder:
        importlib.import_module(package)
        return _liblzf(importlib.import_module(f"{package}.{module}").__file__ or "")

    return make


@cache
def _liblzf(path: str) -> NativeDecoder:
    function = ctypes.CDLL(path).lzf_decompress
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    function.restype = ctypes.c_uint

    def each(calls: Iterable[_Call]) -> tuple[int, str] | None:
        for at, call in enumerate(calls):
            if (n_bytes := function(*call)) != call[3]:
                return at, f"it decodes to {n_bytes:,} bytes, not {call[3]:,}"
        return None

    return NativeDecoder(each, _compiled_lzf, lambda: nullcontext(0))


def _compiled_lzf(compiled: Callable[..., Any]) -> DecodeOne:
    loop = compiled(lzf_loop(compiled))

    def decode(nothing: int, data: Bytes, n_data: int, out: Bytes) -> bool:
        return bool(loop(data, n_data, out))

    return decode


def _with_blosc(step: Filter, itemsize: int) -> Decoder:
    inner = _with_imagecodecs("blosc")(step, itemsize)

    def decode(data: Bytes, out: Bytes) -> None:
        # The library believes what the header says of its own length, and would read on behind the data.
        sizes = np.frombuffer(data[4:16].tobytes(), dtype="<u4")
        if len(sizes) != 3 or sizes[0] != len(out) or sizes[2] > len(data):
            raise ValueError(f"it has {len(data):,} bytes, and its header says otherwise")
        inner(data, out)

    return decode


def _with_blosc2(step: Filter, itemsize: int) -> Decoder:
    blosc2 = importlib.import_module("blosc2")

    def decode(data: Bytes, out: Bytes) -> None:
        frame = data.tobytes()  # which the array looks into: it must outlive it
        n_bytes = check_frame(frame, len(out))
        try:
            array = blosc2.ndarray_from_cframe(frame)
        except RuntimeError:  # arrays of one axis are stored without their shape
            _all_of(n_bytes, out)
            _fill(out, blosc2.schunk_from_cframe(frame)[:])
        else:
            check_memory(array, len(out))
            _fill(out, np.ascontiguousarray(array[...]).reshape(-1).view(np.uint8))

    return decode


def _with_lz4(step: Filter, itemsize: int) -> Decoder:
    """HDF5's filter of that name: a length, the size of a block, and the blocks, each with its own size."""
    function = importlib.import_module("imagecodecs").lz4_decode
    return lambda data, out: _blocks(data, out, int.from_bytes(data[8:12].tobytes(), "big"), function)


def _with_bitshuffle(step: Filter, itemsize: int) -> Decoder:
    imagecodecs = importlib.import_module("imagecodecs")
    # Options: version, version, bytes of a number, numbers of a block or 0, and what compresses the blocks.
    size, block = step.options[2], step.options[3]
    compressor = step.options[4] if len(step.options) > 4 else 0
    unpack = {0: None, 2: imagecodecs.lz4_decode, 3: imagecodecs.zstd_decode}[compressor]
    imagecodecs.bitshuffle_decode(bytes(8 * size), itemsize=size)  # older versions refuse numbers above 8 bytes

    def decode(data: Bytes, out: Bytes) -> None:
        n = block
        if unpack is not None:
            bits = np.empty_like(out)
            n_bytes = int.from_bytes(data[8:12].tobytes(), "big")
            _blocks(data, bits, n_bytes, unpack, multiple=8 * size)
            data, n = bits, n_bytes // size
        # Of an ndarray it would take the size of a number from the dtype.
        done = imagecodecs.bitshuffle_decode(data.tobytes(), itemsize=size, blocksize=n, out=out)
        _all_of(len(np.atleast_1d(done)), out)

    return decode


def _with_zlib_into(step: Filter, itemsize: int) -> Decoder:
    function = importlib.import_module("zlib_into").unshuffle
    size = shuffled(step, itemsize)
    if size not in (2, 4, 8):
        return _with_numpy(step, itemsize)

    def decode(data: Bytes, out: Bytes) -> None:
        ensure_same_size(data, out)
        whole = len(out) // size * size
        function(data[:whole], out[:whole], size)
        out[whole:] = data[whole:]

    return decode


def _with_numpy(step: Filter, itemsize: int) -> Decoder:
    size = shuffled(step, itemsize)

    def decode(data: Bytes, out: Bytes) -> None:
        ensure_same_size(data, out)
        n = len(out) // size
        for place in range(size):  # a plane at a time is faster than a transposed copy
            out[place : n * size : size] = data[place * n : (place + 1) * n]
        out[n * size :] = data[n * size :]

    return decode


_MAKERS: dict[int, Sequence[Callable[[Filter, int], Decoder]]] = {
    GZIP: (_with_libdeflate, _with_deflate, _with_imagecodecs("deflate"), _with_zlib),
    SHUFFLE: (_with_zlib_into, _with_numpy),
    LZF: (_with_liblzf("imagecodecs", "_lzf"), _with_imagecodecs("lzf"), _with_liblzf("h5py", "h5z")),
    BLOSC: (_with_blosc,),
    LZ4: (_with_lz4,),
    BITSHUFFLE: (_with_bitshuffle,),
    ZSTD: (_with_imagecodecs("zstd"),),
    BLOSC2: (_with_blosc2,),
}
"""For each filter the ways to decode it, the fastest first."""


def shuffled(step: Filter, itemsize: int) -> int:
    """Bytes of the numbers that the filter ``shuffle`` was told of."""
    return step.options[0] if step.options else itemsize


def _blocks(data: Bytes, out: Bytes, block: int, function: Any, multiple: int = 1) -> None:
    """Blocks behind a header of 12 bytes, each behind its size; what is no multiple at the end is as it was."""
    if block < 1:
        raise ValueError(f"it says that its blocks have {block} bytes")
    at, start = 12, 0
    whole = len(out) // multiple * multiple
    while start < whole:
        stop = min(start + block, whole)
        size = int.from_bytes(data[at : at + 4].tobytes(), "big")
        packed = data[at + 4 : at + 4 + size]
        if size == stop - start and multiple == 1:  # LZ4 stores what it cannot make smaller
            out[start:stop] = packed
        else:
            _all_of(len(function(packed, out=out[start:stop])), out[start:stop])
        at, start = at + 4 + size, stop
    out[whole:] = data[at : at + len(out) - whole]


def _fill(out: Bytes, decoded: Any) -> None:
    _all_of(len(decoded), out)
    out[...] = np.frombuffer(decoded, dtype=np.uint8)


def _all_of(n_bytes: int, out: Bytes) -> None:
    if n_bytes != len(out):
        raise ValueError(f"it decodes to {n_bytes:,} bytes, not {len(out):,}")


def ensure_same_size(data: Bytes, out: Bytes) -> None:
    """Refuses data that does not fill the memory to the byte."""
    if len(data) != len(out):
        raise ValueError(f"it has {len(data):,} bytes, not {len(out):,}")

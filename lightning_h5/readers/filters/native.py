"""Decoders that are C functions, in shared libraries of other packages.

They decode from address to address: many chunks in a row with little Python in between, and in the loops of
`compiled.py` with none. gzip is decoded by libdeflate in `deflate`, LZF by the library in imagecodecs or h5py, and
Zstandard, LZ4 and bitshuffle by those in `hdf5plugin`, which is not imported for it: that would load all its filters.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ...hdf5 import Filter
from .pipeline import NativeDecoder, register

__all__ = [
    "BITSHUFFLE",
    "GZIP",
    "HEADER",
    "LONGEST_BLOCK",
    "LZ4",
    "LZF",
    "ZSTD",
    "bitshuffle_options",
    "blocks",
    "lzf_function",
]

GZIP, LZF, LZ4, BITSHUFFLE, ZSTD = 1, 32000, 32004, 32008, 32015
LONGEST_BLOCK = 1 << 30  # bytes: LZ4 has sizes of 32 bits
HEADER = 12  # bytes before the blocks of LZ4 and bitshuffle: the decoded bytes, and those of a block

_Call = tuple[int, int, int, int]
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def _function(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any) -> tuple[Callable[..., Any], int]:
    """Return a C function, and its address."""
    function = library[name]  # another object at each access
    function.argtypes, function.restype = arguments, result
    return function, ctypes.cast(function, _POINTER).value or 0


def _allocated(make: Callable[[], int | None]) -> Callable[[], int]:
    def new_state() -> int:
        if not (state := make()):
            raise MemoryError("a decompressor cannot be allocated")
        return int(state)

    return new_state


@register(GZIP)
def _with_libdeflate(step: Filter, itemsize: int) -> NativeDecoder:
    return _libdeflate(importlib.import_module("deflate")._deflate.__file__)


@cache  # one decoder for all options, so that its loops are compiled once
def _libdeflate(path: str) -> NativeDecoder:
    library = ctypes.CDLL(path)
    arguments = [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER]
    function, place = _function(library, "libdeflate_zlib_decompress", arguments, _INT)
    make, _ = _function(library, "libdeflate_alloc_decompressor", [], _POINTER)

    def decode_each(own: int, calls: Iterable[_Call]) -> tuple[int, str] | None:
        for at, (data, n_data, out, n_out) in enumerate(calls):
            if failed := function(own, data, n_data, out, n_out, None):
                return at, _LIBDEFLATE_SAYS.get(failed, f"libdeflate gives up with number {failed}")
        return None

    return NativeDecoder("libdeflate", decode_each, (place,), new_state=_allocated(make))


_LIBDEFLATE_SAYS = {
    1: "it is not a zlib stream, or its checksum is wrong",
    2: "it decodes to fewer bytes than a chunk has",
    3: "it decodes to more bytes than a chunk has",
}


def _with_liblzf(package: str, module: str) -> Callable[[Filter, int], NativeDecoder]:
    # The shared libraries of h5py and imagecodecs both export the C function of LZF.
    def make(step: Filter, itemsize: int) -> NativeDecoder:
        importlib.import_module(package)
        return _liblzf(importlib.import_module(f"{package}.{module}").__file__ or "")

    return make


@cache
def lzf_function(path: str | None = None) -> Callable[..., int]:
    """Return LZF's C function, of stored and decoded addresses and sizes. It returns the decoded bytes, 0 if it fails.

    Args:
        path: the shared library that has it; None for h5py's.
    """
    path = importlib.import_module("h5py.h5z").__file__ if path is None else path
    arguments = [_POINTER, ctypes.c_uint, _POINTER, ctypes.c_uint]
    return _function(ctypes.CDLL(path), "lzf_decompress", arguments, ctypes.c_uint)[0]


@cache
def _liblzf(path: str) -> NativeDecoder:
    function = lzf_function(path)

    def decode_each(nothing: int, calls: Iterable[_Call]) -> tuple[int, str] | None:
        for at, call in enumerate(calls):
            if (n_bytes := function(*call)) != call[3]:
                return at, _other_size(n_bytes, call[3])
        return None

    return NativeDecoder("liblzf", decode_each)


register(LZF)(_with_liblzf("imagecodecs", "_lzf"))
register(LZF)(_with_liblzf("h5py", "h5z"))


@cache
def _plugin(name: str) -> ctypes.CDLL:
    """Return one of the shared libraries in `hdf5plugin`."""
    spec = importlib.util.find_spec("hdf5plugin")
    if spec is None or spec.origin is None:
        raise ImportError("hdf5plugin is not installed")
    (path,) = Path(spec.origin).parent.glob(f"plugins/libh5{name}.*")
    return ctypes.CDLL(str(path))


def _zstd_functions(library: ctypes.CDLL) -> tuple[Callable[..., int], int, Callable[[], int]]:
    """Return Zstandard's function, its address, and what allocates its state."""
    function, place = _function(library, "ZSTD_decompressDCtx", [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE], _SIZE)
    make, _ = _function(library, "ZSTD_createDCtx", [], _POINTER)
    return function, place, _allocated(make)


@register(ZSTD)
def _with_zstd(step: Filter, itemsize: int) -> NativeDecoder:
    return _zstd()


@cache
def _zstd() -> NativeDecoder:
    function, place, new_state = _zstd_functions(_plugin("zstd"))

    def decode_each(own: int, calls: Iterable[_Call]) -> tuple[int, str] | None:
        for at, (data, n_data, out, n_out) in enumerate(calls):
            if (n_bytes := function(own, out, n_out, data, n_data)) != n_out:
                return at, _other_size(n_bytes, n_out)
        return None

    return NativeDecoder("zstd", decode_each, (place,), new_state=new_state)


@register(LZ4)
def _native_lz4(step: Filter, itemsize: int) -> NativeDecoder:
    return _lz4()


@cache
def _lz4() -> NativeDecoder:
    unpack, place = _function(_plugin("lz4"), "LZ4_decompress_safe", [_POINTER, _POINTER, _INT, _INT], _INT)

    def decode(nothing: int, data: int, n_data: int, out: int, n_out: int) -> None:
        for stored, n_stored, start, length in _blocks_at(data, n_data, n_out, multiple=1):
            if n_stored == length:  # LZ4 stores blocks that do not shrink as they are
                ctypes.memmove(out + start, stored, length)
            elif (n_bytes := unpack(stored, out + start, n_stored, length)) != length:
                raise ValueError(_other_size(n_bytes, length))

    return NativeDecoder("lz4", _in_turn(decode), (place,))


def bitshuffle_options(step: Filter) -> tuple[int, int, int]:
    """Return the bytes of a number, the numbers of a block or 0, and what compresses the blocks.

    Raises:
        IndexError: options are missing.
    """
    # Two numbers of a version come first.
    return step.options[2], step.options[3], step.options[4] if len(step.options) > 4 else 0


@register(BITSHUFFLE)
def _native_bitshuffle(step: Filter, itemsize: int) -> NativeDecoder:
    size, _, compressor = bitshuffle_options(step)
    if size < 1 or compressor not in (2, 3):
        raise ValueError(f"bitshuffle with the compressor {compressor} of numbers of {size} bytes")
    return _bitshuffle(size, is_zstd=compressor == 3)


@cache
def _bitshuffle(size: int, *, is_zstd: bool) -> NativeDecoder:
    library = _plugin("bshuf")
    sort, of_sort = _function(library, "bshuf_bitunshuffle", [_POINTER, _POINTER, _SIZE, _SIZE, _SIZE], ctypes.c_int64)
    zstd, of_zstd, new_state = _zstd_functions(library)
    lz4, of_lz4 = _function(library, "LZ4_decompress_safe", [_POINTER, _POINTER, _INT, _INT], _INT)

    def decode(own: int, data: int, n_data: int, out: int, n_out: int) -> None:
        for stored, n_stored, start, length in _blocks_at(data, n_data, n_out, multiple=8 * size):
            if n_stored == length < 8 * size:  # the remainder
                ctypes.memmove(out + start, stored, length)
                continue
            bits = ctypes.create_string_buffer(length)
            n = zstd(own, bits, length, stored, n_stored) if is_zstd else lz4(stored, bits, n_stored, length)
            if n != length:
                raise ValueError(_other_size(n, length))
            if sort(bits, out + start, length // size, size, length // size) != length:
                raise MemoryError("bitshuffle cannot allocate memory")

    functions = (of_zstd if is_zstd else of_lz4, of_sort)
    return NativeDecoder("bitshuffle", _in_turn(decode), functions, (size, int(is_zstd)), new_state if is_zstd else int)


def _in_turn(decode: Callable[..., None]) -> Callable[[int, Iterable[_Call]], tuple[int, str] | None]:
    def decode_each(own: int, calls: Iterable[_Call]) -> tuple[int, str] | None:
        for at, call in enumerate(calls):
            try:
                decode(own, *call)
            except ValueError as error:
                return at, str(error)
        return None

    return decode_each


def blocks(
    read: Callable[[int, int], bytes], n_data: int, n_out: int, multiple: int = 1
) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each block of a chunk where it is stored, its bytes, where it begins decoded, and its decoded bytes.

    After a header, each block is stored with its size. What is left of a multiple is at the end as it is.

    Args:
        read: returns bytes of the stored chunk, from a position on.
        n_data: bytes of the stored chunk.
        n_out: bytes of the decoded chunk.
        multiple: bytes that each block has a multiple of.

    Raises:
        ValueError: header or sizes do not fit the chunk.
    """

    def number(at: int, n_bytes: int) -> int:
        if at + n_bytes > n_data:
            raise ValueError(f"it ends after {n_data:,} bytes, within a block")
        return int.from_bytes(read(at, n_bytes), "big")

    declared, block = number(0, 8), number(8, 4)
    if declared != n_out:
        raise ValueError(_other_size(declared, n_out))
    if block < 1 or block % multiple or block > LONGEST_BLOCK:
        raise ValueError(f"its header declares blocks of {block:,} bytes")
    at, whole = HEADER, n_out // multiple * multiple
    for start in range(0, whole, block):
        size = number(at, 4)
        if size > n_data - at - 4:
            raise ValueError(f"it ends after {n_data:,} bytes, within a block")
        yield at + 4, size, start, min(block, whole - start)
        at += 4 + size
    if n_out - whole > n_data - at:
        raise ValueError(f"it ends after {n_data:,} bytes, within a block")
    if whole < n_out:
        yield at, n_out - whole, whole, n_out - whole


def _blocks_at(data: int, n_data: int, n_out: int, multiple: int) -> Iterator[_Call]:
    """Yield the same for a chunk at an address: the first number is an address, too."""
    read = lambda at, n_bytes: ctypes.string_at(data + at, n_bytes)  # noqa: E731
    for at, size, start, length in blocks(read, n_data, n_out, multiple):
        yield data + at, size, start, length


def _other_size(n_bytes: int, expected: int) -> str:
    if 0 <= n_bytes <= 1 << 40:  # above, it is the number of an error
        return f"it decodes to {n_bytes:,} bytes, not {expected:,}"
    return f"it does not decode to {expected:,} bytes"

"""The limit for chunked arrays: each chunk read once, in the file's order, and decoded by as many threads as we use."""

from __future__ import annotations

import ctypes
import math
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt
import torch
from common import Epoch
from rows import Data
from torch import Tensor

N_THREADS = 2

Octets: TypeAlias = npt.NDArray[np.uint8]
Decode: TypeAlias = Callable[[bytes], Octets]
"""What a chunk decodes to, in memory that may be used again by the next call."""


class Chunk(NamedTuple):
    """Where a chunk lies, which of its filters were left out, and its first element."""

    offset: int
    n_bytes: int
    filter_mask: int
    corner: tuple[int, ...]


def bare_decode(data: Data, stack: ExitStack) -> Epoch:
    """Decodes all chunks into the same memory again and again; nobody gathers rows.

    The first epoch, which is the one that is checked, keeps what was decoded.
    """
    shape, dtype = data.chunks or (), data.x.dtype
    n_bytes = math.prod(shape) * dtype.itemsize
    with h5py.File(data.path, "r") as file:
        chunks = chunks_of(file["x"])
        decoders = [decoder_of(file["x"], n_bytes) for _ in range(N_THREADS)]
    fd = os.open(data.path, os.O_RDONLY)
    stack.callback(os.close, fd)
    pool = stack.enter_context(ThreadPoolExecutor(N_THREADS))

    def work(thread: int, keep: npt.NDArray[Any] | None) -> None:
        decode, plain = decoders[thread], np.empty(n_bytes, np.uint8)
        for offset, size, mask, corner in chunks[thread::N_THREADS]:
            if decode is None or mask:  # HDF5 skips a filter for chunks that it does not shrink
                os.preadv(fd, [plain], offset)
                decoded = plain
            else:
                decoded = decode(os.pread(fd, size, offset))
            if keep is not None:
                place(decoded.view(dtype).reshape(shape), corner, keep)

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        keep = np.empty_like(data.x) if number == 0 else None
        for _ in pool.map(work, range(N_THREADS), [keep] * N_THREADS):
            pass
        yield keep, torch.from_numpy(np.arange(len(data.x)) if keep is None else data.labels)

    return epoch


def place(chunk: npt.NDArray[Any], corner: tuple[int, ...], whole: npt.NDArray[Any]) -> None:
    """Puts a chunk where it belongs; those at the edges stand over."""
    part = whole[tuple(slice(start, start + n) for start, n in zip(corner, chunk.shape, strict=True))]
    part[...] = chunk[tuple(map(slice, part.shape))]


def chunks_of(array: Any) -> list[Chunk]:
    """All chunks in the order of the file."""
    chunks: list[Chunk] = []
    array.id.chunk_iter(lambda at: chunks.append(Chunk(at.byte_offset, at.size, at.filter_mask, at.chunk_offset)))
    return sorted(chunks)


def decoder_of(array: Any, n_bytes: int) -> Decode | None:
    """What undoes an array's filters, by the fastest that is installed; None where it has none.

    Raises:
        ValueError: nobody here can undo them.
    """
    plist = array.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    makers = {h5py.h5z.FILTER_DEFLATE: inflate, h5py.h5z.FILTER_LZF: unlzf}
    if not filters:
        return None
    if filters[-1] not in makers or filters[:-1] not in ([], [h5py.h5z.FILTER_SHUFFLE]):
        raise ValueError(f"no decoder here for the filters {filters}")
    decode = makers[filters[-1]](n_bytes)
    return decode if len(filters) == 1 else then_unshuffle(decode, n_bytes, array.dtype.itemsize)


def inflate(n_bytes: int) -> Decode:
    """Of gzip. Two cores, chunks of 384 KiB: libdeflate 830 MiB/s, imagecodecs' 810, zlib 420."""
    try:
        from deflate import zlib_decompress
    except ImportError:
        try:
            from imagecodecs import deflate_decode
        except ImportError:
            return lambda raw: np.frombuffer(zlib.decompress(raw, bufsize=n_bytes), np.uint8)
        into = np.empty(n_bytes, np.uint8)
        return lambda raw: deflate_decode(raw, out=into)
    return lambda raw: np.frombuffer(zlib_decompress(raw, n_bytes), np.uint8)


def unlzf(n_bytes: int) -> Decode:
    """Of LZF. Two cores, chunks of 384 KiB: imagecodecs 920 MiB/s, the function inside h5py 520."""
    into = np.empty(n_bytes, np.uint8)
    try:
        from imagecodecs import lzf_decode
    except ImportError:
        lzf = ctypes.CDLL(h5py.h5z.__file__).lzf_decompress
        lzf.argtypes, lzf.restype = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint], ctypes.c_uint

        def decode(raw: bytes) -> Octets:
            lzf(raw, len(raw), into.ctypes.data, n_bytes)
            return into

        return decode
    return lambda raw: lzf_decode(raw, out=into)


def then_unshuffle(decode: Decode, n_bytes: int, itemsize: int) -> Decode:
    """Sorts the bytes of numbers together again. Two cores, gzip and this: zlib_into 2,200 MiB/s, NumPy 1,060."""
    into = np.empty(n_bytes, np.uint8)
    try:
        from zlib_into import unshuffle
    except ImportError:

        def with_numpy(raw: bytes) -> Octets:
            into.reshape(-1, itemsize)[...] = decode(raw).reshape(itemsize, -1).T
            return into

        return with_numpy

    def with_zlib_into(raw: bytes) -> Octets:
        unshuffle(decode(raw), into, itemsize)
        return into

    return with_zlib_into

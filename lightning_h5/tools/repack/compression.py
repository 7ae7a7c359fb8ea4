"""Compressions by name, the HDF5 filters they stand for, and encoders that run outside the HDF5 library's lock."""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from ...errors import H5ValueError, near
from ...readers.filters.decoders import fletcher32

GZIP, SHUFFLE, FLETCHER32, SZIP, NBIT, LZF = 1, 2, 3, 4, 5, 32000
BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 32001, 32004, 32008, 32015, 32026
LOSSLESS = {GZIP, SHUFFLE, FLETCHER32, SZIP, NBIT, LZF, 307, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2}
SHUFFLING = {SHUFFLE, BLOSC, BLOSC2, BITSHUFFLE}

Bytes: TypeAlias = npt.NDArray[np.uint8]
Encoder: TypeAlias = Callable[[Bytes], Bytes]


class _Compression(NamedTuple):
    """A supported compression.

    Attributes:
        id: the number of its filter.
        levels: its levels, if it has any.
        level: the default.
        plugin: class of hdf5plugin; empty if HDF5 or h5py include the filter.
        codec: the compressor that the class gets.
    """

    id: int
    levels: range = range(0)
    level: int = 0
    plugin: str = ""
    codec: str = ""


# Levels are the libraries' own defaults, except Blosc's: 5 takes little longer than 1 to encode, and as long to decode.
_KNOWN = {
    "gzip": _Compression(GZIP, range(1, 10), 4),
    "lzf": _Compression(LZF),
    "zstd": _Compression(ZSTD, range(1, 23), 3, "Zstd"),
    "lz4": _Compression(LZ4, plugin="LZ4"),
    "blosc": _Compression(BLOSC, range(10), 5, "Blosc", "lz4"),
    "blosc-zstd": _Compression(BLOSC, range(10), 5, "Blosc", "zstd"),
    "blosc2": _Compression(BLOSC2, range(10), 5, "Blosc2", "lz4"),
    "bitshuffle": _Compression(BITSHUFFLE, plugin="Bitshuffle", codec="lz4"),
}
COMPRESSIONS = ("keep", "none", *_KNOWN)
"""Names of compressions; ``keep`` keeps the filters of an array."""


class FilterStep(NamedTuple):
    """A filter in the form that HDF5 accepts: number, flags, and options before HDF5 adds its own."""

    id: int
    flags: int
    options: tuple[int, ...]


def check_compression(name: str, level: int | None, shuffle_filter: bool) -> None:
    """Check that a compression is known and installed, and supports the level.

    Raises:
        H5ValueError: it is unknown or not installed, or does not support the level.
    """
    if name not in COMPRESSIONS:
        raise H5ValueError(
            f"compression={name!r} is not known; the compressions are {', '.join(COMPRESSIONS)}."
            f"{near(name, COMPRESSIONS)} Pass one of them."
        )
    compression = _KNOWN.get(name)
    levels = compression.levels if compression else range(0)
    if level is not None and level not in levels:
        has = f"{levels[0]} to {levels[-1]}" if levels else "no levels"
        raise H5ValueError(f"level={level} was given with compression={name!r}, which has {has}. Leave it out.")
    if shuffle_filter and (name == "none" or (compression is not None and compression.id in SHUFFLING)):
        why = "stores bytes as they are" if name == "none" else "shuffles by itself"
        raise H5ValueError(f"shuffle_filter was given with compression={name!r}, which {why}. Leave it out.")
    if compression is not None and not _is_installed(compression):
        installed = ", ".join(["none", *(known_name for known_name, known in _KNOWN.items() if _is_installed(known))])
        raise H5ValueError(
            f"compression={name!r} is not installed; {installed} are. Run `pip install 'lightning-h5[filters]'`, or "
            "pass one of them."
        )


def _is_installed(compression: _Compression) -> bool:
    if compression.plugin:
        with suppress(ImportError):
            importlib.import_module("hdf5plugin")  # registers its filters when imported
    with suppress(RuntimeError, ValueError, OSError):
        return bool(h5py.h5z.get_filter_info(compression.id) & h5py.h5z.FILTER_CONFIG_ENCODE_ENABLED)
    return False


def filter_steps(
    name: str, level: int | None, shuffle_filter: bool, checksum: bool, itemsize: int, stored: tuple[FilterStep, ...]
) -> tuple[FilterStep, ...]:
    """Return the filters of an array that is rewritten.

    Args:
        name: a compression that passed ``check_compression``.
        level: compression level; None for the default.
        shuffle_filter: shuffle bytes before compressing, if an element has several.
        checksum: store a checksum with each chunk (HDF5's fletcher32).
        itemsize: bytes of an element.
        stored: the filters of the array, for ``keep``.
    """
    steps = list(stored) if name == "keep" else []
    if compression := _KNOWN.get(name):
        level = compression.level if level is None else level
        options: tuple[int, ...] = (level,) if compression.levels else ()
        if compression.plugin:
            arguments: dict[str, Any] = {"cname": compression.codec} if compression.codec else {}
            arguments |= {"clevel": level} if compression.levels else {}
            filter_options = getattr(importlib.import_module("hdf5plugin"), compression.plugin)(**arguments)
            options = tuple(dict(filter_options)["compression_opts"])
        steps = [FilterStep(compression.id, h5py.h5z.FLAG_OPTIONAL, options)]
    numbers = {step.id for step in steps}
    if shuffle_filter and itemsize > 1 and numbers - {FLETCHER32} and not numbers & SHUFFLING:
        steps.insert(0, FilterStep(SHUFFLE, h5py.h5z.FLAG_OPTIONAL, ()))
    if checksum and FLETCHER32 not in numbers:
        steps.append(FilterStep(FLETCHER32, h5py.h5z.FLAG_MANDATORY, ()))
    return tuple(steps)


def stored_steps(plist: Any) -> tuple[FilterStep, ...]:
    """Return an array's filters in the form that creates the same filters again.

    Some filters prepend properties of the array to their options, or overwrite options, and would do so twice.

    Args:
        plist: the array's creation property list.
    """
    cuts = {SHUFFLE: slice(0), FLETCHER32: slice(0), NBIT: slice(0), LZF: slice(0), SZIP: slice(2)}
    cuts[BITSHUFFLE] = slice(3, None)
    filters = [plist.get_filter(at)[:3] for at in range(plist.get_nfilters())]
    return tuple(
        FilterStep(number, flags, tuple(options[cuts.get(number, slice(None))])) for number, flags, options in filters
    )


def fitting_steps(steps: tuple[FilterStep, ...], chunks: tuple[int, ...]) -> tuple[FilterStep, ...]:
    """Return filters with options that suit the size of a chunk: szip compresses blocks of 2 to 32 elements.

    Args:
        steps: the filters.
        chunks: shape of a chunk. szip does not compress chunks of a single element.
    """
    largest = math.prod(chunks) // 2 * 2
    fitting = []
    for step in steps:
        if step.id == SZIP and step.options[1] > largest:
            if not largest:
                continue
            step = step._replace(options=(step.options[0], largest))
        fitting.append(step)
    return tuple(fitting)


def encoder_of(plist: Any, itemsize: int) -> Encoder | None:
    """Return a function that applies an array's filters to a chunk, for use in threads; None if only HDF5 can.

    Made for gzip and Zstandard, which are slow to encode. The HDF5 library writes the others at 300 MiB/s and more.

    Args:
        plist: the creation property list of the array, with the options that the library filled in.
        itemsize: bytes of an element.
    """
    steps: list[Encoder] = []
    for at in range(plist.get_nfilters()):
        number, _, options, _ = plist.get_filter(at)
        if number == SHUFFLE:
            steps.append(lambda data: np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1))
        elif number == GZIP:
            steps.append(partial(_deflated, level=options[0]))
        elif number == ZSTD and (encode := _zstd_encode()) is not None:
            steps.append(partial(encode, level=options[0] if options else 3))
        elif number == FLETCHER32:
            steps.append(lambda data: np.append(data, np.array([fletcher32(data)], dtype="<u4").view(np.uint8)))
        else:
            return None
    if not steps:
        return None

    def encode_chunk(data: Bytes) -> Bytes:
        for step in steps:
            data = np.frombuffer(step(data), dtype=np.uint8)
        return data

    return encode_chunk


def _deflated(data: Bytes, *, level: int) -> Any:
    # libdeflate encodes about three times as fast as zlib (91 and 32 MiB/s in one thread, noisy pictures, 2026-11-22).
    with suppress(ImportError):
        return importlib.import_module("deflate").zlib_compress(data, level)
    return zlib.compress(data.data, level)


def _zstd_encode() -> Any:
    with suppress(ImportError, AttributeError):
        return importlib.import_module("imagecodecs").zstd_encode
    return None

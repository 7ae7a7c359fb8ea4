"""Compressions by name: which filters of HDF5 they are, and which of them this installation has."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h5py

from ...errors import H5ValueError, near
from ...files import Filter

__all__ = [
    "COMPRESSIONS",
    "FLETCHER32",
    "SHUFFLE",
    "FilterStep",
    "check_compression",
    "filter_steps",
    "kept_steps",
    "loses_digits",
    "steps_of",
]

GZIP, SHUFFLE, FLETCHER32, SZIP, NBIT, LZF = 1, 2, 3, 4, 5, 32000
BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 32001, 32004, 32008, 32015, 32026
LOSSLESS = {GZIP, SHUFFLE, FLETCHER32, SZIP, NBIT, LZF, 307, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2}
PLUGIN = "Run `pip install 'lightning-h5[filters]'`"


@dataclass(frozen=True, kw_only=True)
class _Compression:
    """A compression that can be asked for.

    Attributes:
        id: number of its filter.
        levels: the least and the greatest level; None where it has none.
        level: the one that is taken where none is asked.
        plugin: hdf5plugin's class, and what it is made with; None where HDF5 or h5py bring the filter.
        level_name: what that class calls the level.
        shuffles: it shuffles bytes or bits by itself.
    """

    id: int
    levels: tuple[int, int] | None = None
    level: int = 0
    plugin: tuple[str, dict[str, Any]] | None = None
    level_name: str = "clevel"
    shuffles: bool = False


# Levels are the libraries' own defaults, except Blosc's: 5 takes little longer than 1 to encode, and as long to decode.
_KNOWN = {
    "gzip": _Compression(id=GZIP, levels=(1, 9), level=4),
    "lzf": _Compression(id=LZF),
    "zstd": _Compression(id=ZSTD, levels=(1, 22), level=3, plugin=("Zstd", {})),
    "lz4": _Compression(id=LZ4, plugin=("LZ4", {})),
    "blosc": _Compression(id=BLOSC, levels=(0, 9), level=5, plugin=("Blosc", {"cname": "lz4"}), shuffles=True),
    "blosc-zstd": _Compression(id=BLOSC, levels=(0, 9), level=5, plugin=("Blosc", {"cname": "zstd"}), shuffles=True),
    "blosc2": _Compression(id=BLOSC2, levels=(0, 9), level=5, plugin=("Blosc2", {"cname": "lz4"}), shuffles=True),
    "bitshuffle": _Compression(id=BITSHUFFLE, plugin=("Bitshuffle", {"cname": "lz4"}), shuffles=True),
}
COMPRESSIONS = ("keep", "none", *_KNOWN)
"""Names of compressions; ``keep`` leaves the filters that an array has."""


@dataclass(frozen=True)
class FilterStep:
    """A filter as it is given to HDF5 for a new array: its number, flags, and options before HDF5 adds its own."""

    id: int
    flags: int
    options: tuple[int, ...]


def check_compression(name: str, level: int | None, shuffle_filter: bool) -> None:
    """Makes sure that a compression is known and installed, and takes what is asked of it.

    Raises:
        H5ValueError: it is not, or does not.
    """
    if name not in COMPRESSIONS:
        raise H5ValueError(
            f"compression={name!r} is not known; there are {', '.join(COMPRESSIONS)}.{near(name, COMPRESSIONS)} "
            "Pass one of these."
        )
    known = _KNOWN.get(name)
    if level is not None and (known is None or known.levels is None):
        raise H5ValueError(f"level={level} was asked of compression={name!r}, which has no levels. Leave it out.")
    if level is not None and known is not None and known.levels is not None:
        least, most = known.levels
        if not least <= level <= most:
            raise H5ValueError(f"level={level} was asked of compression={name!r}, which has {least} to {most}.")
    if shuffle_filter and (name == "none" or (known is not None and known.shuffles)):
        why = "stores bytes as they are" if name == "none" else "shuffles by itself"
        raise H5ValueError(f"shuffle_filter was asked with compression={name!r}, which {why}. Leave it out.")
    if known is not None and not _is_installed(known):
        there = ", ".join(["none", *(other for other, each in _KNOWN.items() if _is_installed(each))])
        raise H5ValueError(f"compression={name!r} is not installed; there are {there}. {PLUGIN}, or pass one of these.")


def _is_installed(known: _Compression) -> bool:
    if known.plugin is not None:
        with suppress(ImportError):
            importlib.import_module("hdf5plugin")  # registers its filters when imported
    return _can_encode(known.id)


def _can_encode(number: int) -> bool:
    try:
        return bool(h5py.h5z.get_filter_info(number) & h5py.h5z.FILTER_CONFIG_ENCODE_ENABLED)
    except (RuntimeError, ValueError, OSError):
        return False


def filter_steps(
    name: str, *, level: int | None, shuffle_filter: bool, checksum: bool, itemsize: int, kept: tuple[FilterStep, ...]
) -> tuple[FilterStep, ...]:
    """The filters of an array that is written anew.

    Args:
        name: a compression that ``check_compression`` has found to be there.
        level: of it; None takes its default.
        shuffle_filter: shuffle bytes before, where an element has several.
        checksum: store a checksum with each chunk (Fletcher's, as HDF5 has it).
        itemsize: bytes of an element.
        kept: what the array has, for ``keep``.
    """
    steps = list(kept) if name == "keep" else []
    if name in _KNOWN:
        steps = [_step_of(_KNOWN[name], level)]
    have = {step.id for step in steps}
    if shuffle_filter and itemsize > 1 and have - {FLETCHER32} and not have & {SHUFFLE, BLOSC, BLOSC2, BITSHUFFLE}:
        steps.insert(0, FilterStep(SHUFFLE, h5py.h5z.FLAG_OPTIONAL, ()))
    if checksum and FLETCHER32 not in have:
        steps.append(FilterStep(FLETCHER32, h5py.h5z.FLAG_MANDATORY, ()))
    return tuple(steps)


def _step_of(known: _Compression, level: int | None) -> FilterStep:
    level = known.level if level is None else level
    options: tuple[int, ...] = ()
    if known.plugin is not None:
        name, arguments = known.plugin
        more = {} if known.levels is None else {known.level_name: level}
        made = dict(getattr(importlib.import_module("hdf5plugin"), name)(**arguments, **more))
        options = tuple(made["compression_opts"])
    elif known.levels is not None:
        options = (level,)
    return FilterStep(known.id, h5py.h5z.FLAG_OPTIONAL, options)


def kept_steps(plist: Any) -> tuple[FilterStep, ...]:
    """The filters of an array, as they have to be asked for to get the same once more.

    Some filters put what they find out of the array before or over their options, and would do so twice.

    Args:
        plist: the array's creation property list.
    """
    cuts = {SHUFFLE: slice(0), FLETCHER32: slice(0), NBIT: slice(0), LZF: slice(0), SZIP: slice(2)}
    cuts[BITSHUFFLE] = slice(3, None)
    found = [plist.get_filter(at)[:3] for at in range(plist.get_nfilters())]
    return tuple(FilterStep(number, flags, tuple(more[cuts.get(number, slice(None))])) for number, flags, more in found)


def steps_of(plist: Any) -> tuple[tuple[Filter, ...], tuple[bool, ...]]:
    """The filters of an array as they are, and which of them a chunk may pass over.

    Args:
        plist: the array's creation property list.
    """
    found = [plist.get_filter(at) for at in range(plist.get_nfilters())]
    filters = tuple(Filter(number, name.decode(errors="replace"), tuple(more)) for number, _, more, name in found)
    return filters, tuple(bool(flags & h5py.h5z.FLAG_OPTIONAL) for _, flags, _, _ in found)


def loses_digits(steps: tuple[FilterStep, ...]) -> bool:
    """Whether writing rows anew through these filters may change them (scale-offset, ZFP, unknown ones)."""
    return any(step.id not in LOSSLESS for step in steps)

"""Undo an array's filters without the HDF5 library, in any number of threads.

Decoders are registered for HDF5's number of a filter, compiled loops for whole pipelines.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ...hdf5 import ArrayLayout, Filter
from ...types import IntArray
from ..base import address

__all__ = [
    "FLETCHER32",
    "SHUFFLE",
    "BoundedDecoder",
    "Bytes",
    "Checksum",
    "ChunkLoop",
    "Decoder",
    "NativeDecoder",
    "Pipeline",
    "decoder_of",
    "ensure_same_size",
    "register",
    "register_bounded",
    "register_loop",
    "why_not_decodable",
]

SHUFFLE, FLETCHER32 = 2, 3

SLACK = 64 << 10  # bytes by which data that does not compress may grow, besides an eighth

Bytes: TypeAlias = npt.NDArray[np.uint8]
Decoder: TypeAlias = Callable[[Bytes, Bytes], None]
"""Decodes the first array into the second, all of it; raises any exception if that fails."""

BoundedDecoder: TypeAlias = Callable[[Bytes, int], Bytes]
"""Decodes an array to at most a number of bytes; raises any exception if that fails, or if there are more."""

_Call: TypeAlias = tuple[int, int, int, int]


class Checksum(NamedTuple):
    """A filter that only adds a checksum at the end.

    Attributes:
        n_bytes: of the checksum.
        strip: returns the data without it; raises ``ValueError`` if it is wrong.
    """

    n_bytes: int
    strip: Callable[[Bytes], Bytes]


class NativeDecoder:
    """A decoder that is a C function of addresses.

    Many chunks are decoded in a row with minimal Python in between, where threads would wait for each other: without
    that, an epoch of 20,000 chunks of 12 KiB took 1.2 times as long.

    Args:
        name: name of the format, by which compiled loops know what to call.
        decode_each: decodes with a state; see the method.
        functions: addresses in this process of the C functions that compiled loops call.
        options: what compiled loops need to know of the format.
        new_state: creates a state, which only one thread at a time can use.

    Attributes:
        idle: states that no thread uses, as many as threads ever decode at a time.
    """

    def __init__(
        self,
        name: str,
        decode_each: Callable[[int, Iterable[_Call]], tuple[int, str] | None],
        functions: tuple[int, ...] = (),
        options: tuple[int, ...] = (),
        new_state: Callable[[], int] = int,
    ) -> None:
        self.name, self.functions, self.options, self.new_state = name, functions, options, new_state
        self._decode_each = decode_each
        self.idle: deque[int] = deque()

    def __call__(self, data: Bytes, out: Bytes) -> None:
        """Decode one chunk."""
        failed = self.decode_each([(address(data), len(data), address(out), len(out))])
        if failed is not None:
            raise ValueError(failed[1])

    def decode_each(self, calls: Iterable[_Call]) -> tuple[int, str] | None:
        """Decode chunks one after the other.

        Args:
            calls: for each chunk address and size of its stored bytes, and of the memory for the result.

        Returns:
            Number of the first chunk that does not decode, and the reason; None if all do.
        """
        try:
            state = self.idle.pop()
        except IndexError:
            state = self.new_state()
        try:
            return self._decode_each(state, calls)
        finally:
            self.idle.append(state)


class ChunksRead(NamedTuple):
    """How stored chunks were read.

    Attributes:
        seconds: seconds that reading took.
        are_cached: whether the page cache had the ends of the first and the last chunk before; False if unknown.
    """

    seconds: float
    are_cached: bool


class ChunkLoop(Protocol):
    """Reads and decodes chunks, one after the other, in one call of compiled code."""

    def __call__(
        self, fd: int, offsets: IntArray, sizes: IntArray, n_bytes: int, out: Bytes, firsts: IntArray
    ) -> ChunksRead | None:
        """Read and decode chunks.

        Args:
            fd: the file.
            offsets: position of each chunk in the file, shape ``(n_chunks,)``.
            sizes: its stored bytes.
            n_bytes: decoded bytes of each chunk.
            out: memory to decode into.
            firsts: start of each chunk in ``out``.

        Returns:
            How they were read. None if a chunk is missing, or does not decode: the memory is undefined then.
        """
        ...


Maker: TypeAlias = Callable[[Filter, int], Any]
"""Makes a ``Decoder`` or ``Checksum`` from a filter and the bytes of a number. Raises ``ImportError`` or such if its
library is missing, ``ValueError`` or ``LookupError`` if it does not support the options."""

_M = TypeVar("_M", bound=Maker)

LoopMaker: TypeAlias = Callable[[Sequence[Filter], Sequence["Decoder | Checksum"], int], ChunkLoop | None]

_makers: dict[int, list[Maker]] = defaultdict(list)
_bounded_makers: dict[int, list[Maker]] = defaultdict(list)
_loop_makers: list[LoopMaker] = []


def register(number: int) -> Callable[[_M], _M]:
    """Register a decoder of a filter; decoders that are registered first are tried first.

    Args:
        number: HDF5's number of the filter.
    """
    return _added_to(_makers[number])


def register_bounded(number: int) -> Callable[[_M], _M]:
    """Register a maker of a ``BoundedDecoder``, for data of unknown size (see ``register``)."""
    return _added_to(_bounded_makers[number])


def _added_to(makers: list[Maker]) -> Callable[[_M], _M]:
    def add(maker: _M) -> _M:
        makers.append(maker)
        return maker

    return add


def register_loop(maker: LoopMaker) -> LoopMaker:
    """Register a maker of loops: from filters, their decoders (the last filter first), and the bytes of a number."""
    _loop_makers.append(maker)
    return maker


@cache
def decoder_of(step: Filter, itemsize: int) -> Decoder | Checksum | None:
    """Return the decoder of a filter; None if no library for it is installed, or none supports the options."""
    decoder: Decoder | Checksum | None = _first_made(_makers[step.id], step, itemsize)
    return decoder


@cache
def bounded_decoder_of(step: Filter, itemsize: int) -> BoundedDecoder | None:
    """Return the decoder of a filter for data of unknown size; None as in ``decoder_of``."""
    decoder: BoundedDecoder | None = _first_made(_bounded_makers[step.id], step, itemsize)
    return decoder


def _first_made(makers: list[Maker], step: Filter, itemsize: int) -> Any:
    for maker in makers:
        with suppress(ImportError, AttributeError, OSError, LookupError, ValueError):
            return maker(step, itemsize)
    return None


def ensure_same_size(data: Bytes, out: Bytes) -> None:
    """Check that data fills memory exactly."""
    if len(data) != len(out):
        raise ValueError(f"it has {len(data):,} bytes, not {len(out):,}")


class Pipeline:
    """Undoes the filters of one array's chunks. Can be used by many threads.

    Args:
        layout: an array for which ``why_not_decodable`` finds no reason.

    """

    def __init__(self, layout: ArrayLayout) -> None:
        decoders = _decoders_of(layout)
        self._steps = [decoder for decoder in decoders if decoder is not None]
        if len(self._steps) < len(decoders):
            raise ValueError(f"{layout.key!r} cannot be decoded here: {why_not_decodable(layout)}")
        self._all = self._applied(0)
        first = self._all[0] if len(self._all) == 1 else None
        self._native = first if isinstance(first, NativeDecoder) else None
        self._filters, self._itemsize = layout.filters, layout.stored.itemsize

    def compile(self) -> ChunkLoop | None:
        """Return a loop that reads and decodes chunks to which all filters were applied; None if there is none.

        The first call compiles it: call it before processes fork, and not while threads read.
        """
        if any(isinstance(step, _OfUnknownSize) for step in self._all):
            return None
        loops = (make(self._filters, self._all, self._itemsize) for make in _loop_makers)
        return next((loop for loop in loops if loop is not None), None)

    def decode_each(
        self,
        data: Bytes,
        starts: IntArray,
        stops: IntArray,
        masks: npt.NDArray[np.uint32],
        out: Bytes,
        firsts: IntArray,
        n_bytes: int,
    ) -> tuple[int, str | Exception] | None:
        """Decode chunks one after the other.

        Args:
            data: their stored bytes.
            starts: start of each chunk in ``data``, shape ``(n_chunks,)``.
            stops: its end.
            masks: see ``decode``.
            out: memory to decode into.
            firsts: start of each chunk in ``out``.
            n_bytes: decoded bytes of each chunk.

        Returns:
            Number of the first chunk that does not decode, and the reason; None if all do.
        """
        if self._native is not None and not masks.any():
            sources, targets, sizes = address(data) + starts, address(out) + firsts, stops - starts
            pieces = sources.tolist(), sizes.tolist(), targets.tolist(), repeat(n_bytes, len(firsts))
            return self._native.decode_each(list(zip(*pieces, strict=True)))
        places = zip(starts.tolist(), stops.tolist(), masks.tolist(), firsts.tolist(), strict=True)
        for at, (start, stop, mask, first) in enumerate(places):
            try:
                self.decode(data[start:stop], mask, out[first : first + n_bytes])
            except MemoryError:
                raise
            except Exception as error:
                return at, error
        return None

    def decode(self, data: Bytes, mask: int, out: Bytes) -> None:
        """Decode a chunk.

        Args:
            data: its stored bytes.
            mask: bit ``i`` is set if filter ``i`` was not applied.
            out: memory for exactly the decoded bytes.

        Raises:
            Exception: the chunk does not decode; of any type, since decoders raise their own errors.
        """
        steps = self._applied(mask) if mask else self._all
        checksums = sum(step.n_bytes for step in steps if isinstance(step, Checksum))
        for n_left, step in zip(reversed(range(len(steps))), steps, strict=True):
            if isinstance(step, Checksum):
                data, checksums = step.strip(data), checksums - step.n_bytes
            elif isinstance(step, _OfUnknownSize):
                data = step(data)
            elif not n_left:
                step(data, out)
                return
            else:
                # The remaining filters change no size, except for checksums.
                decoded = np.empty(out.nbytes + checksums, dtype=np.uint8)
                step(data, decoded)
                data = decoded
        ensure_same_size(data, out)
        out[...] = data

    def _applied(self, mask: int) -> list[Any]:
        """Return the decoders of the filters that were applied, the last one first."""
        return [step for at, step in enumerate(self._steps) if not mask >> at & 1][::-1]


def _compressors(filters: Sequence[Filter]) -> list[int]:
    return [number for number, step in enumerate(filters) if step.id not in (FLETCHER32, SHUFFLE)]


def _compressed_before(filters: Sequence[Filter]) -> list[int]:
    """Return the numbers of filters, other than checksums, that were applied to compressed data."""
    first = min(_compressors(filters), default=len(filters))
    return [number for number, step in enumerate(filters) if number > first and step.id != FLETCHER32]


class _OfUnknownSize:
    """Undoes a filter of data whose size is unknown, since it was compressed before.

    Args:
        decode: decodes it.
        n_bytes: of the chunk. A compressor hardly enlarges it; more is a chunk that was made to exhaust memory.
    """

    def __init__(self, decode: BoundedDecoder, n_bytes: int) -> None:
        self._decode, self._max_bytes = decode, n_bytes + n_bytes // 8 + SLACK

    def __call__(self, data: Bytes) -> Bytes:
        """Return the decoded bytes."""
        return self._decode(data, self._max_bytes)


def _decoders_of(layout: ArrayLayout) -> list[Decoder | Checksum | _OfUnknownSize | None]:
    """Return the decoder of each filter of a chunked array; None as in ``decoder_of``."""
    itemsize, compressed = layout.stored.itemsize, _compressed_before(layout.filters)
    decoders: list[Decoder | Checksum | _OfUnknownSize | None] = []
    for number, step in enumerate(layout.filters):
        if number not in compressed:
            decoders.append(decoder_of(step, itemsize))
        else:
            decode = bounded_decoder_of(step, itemsize)
            decoders.append(None if decode is None else _OfUnknownSize(decode, layout.chunk_bytes))
    return decoders


def why_not_decodable(layout: ArrayLayout) -> str | None:
    """Return why the HDF5 library has to decode an array, in a few words; None if it has not.

    Args:
        layout: a chunked array with a chunk table.
    """
    for step, decoder in zip(layout.filters, _decoders_of(layout), strict=True):
        if not _makers[step.id]:
            return f"there is no decoder for its filter {step.label!r} but the HDF5 library's"
        if decoder is None:
            return (
                f"no decoder that is installed takes its filter {step.label!r} with its options; "
                "`pip install --upgrade 'lightning-h5[filters]'` brings more"
            )
    return None

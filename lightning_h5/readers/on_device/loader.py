"""Loads blocks of chunks to a cache on a device: chunks are read to host memory, and decoded there in launches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...counters import Counters
from ...errors import H5Error, H5MemoryError
from ...hdf5 import ArrayLayout, Filter
from ...sizes import bytes_text
from ...types import IntArray
from ..block_memory import BlockMemory
from ..block_sources import BlockSource, LaterSource
from ..chunk_cache import ChunkCache
from ..chunk_loader import ChunkLoader
from ..filters.decoders import FLETCHER32_BYTES, shuffled, strip_fletcher32
from ..filters.native import BITSHUFFLE, GZIP, LZ4, ZSTD, bitshuffle_options
from ..filters.pipeline import FLETCHER32, SHUFFLE
from ..raw_io import read_stored
from .device import BatchCodec, DecodingDevice
from .pieces import (
    ZLIB_HEADER,
    Compression,
    Parsed,
    aligned,
    aligned_starts,
    block_pieces,
    frame_pieces,
    zlib_pieces,
)
from .undo import adler32, unshuffled, without_bitshuffle

__all__ = ["DeviceLoader", "Steps", "steps_of", "why_not_on_device"]

LAUNCH_BYTES = 64 << 20
"""Decoded bytes of a launch: hundreds of chunks, each of which a device decodes with a few of its cores. A launch takes
two to three times as much memory on the device, beside the cache."""

MAX_ITEMSIZE = 8
"""Torch has no larger numbers."""


class Steps(NamedTuple):
    """What undoes the filters of an array on a device.

    Attributes:
        compression: the compression.
        filter: the number of the filter that compresses.
        has_checksum: whether a Fletcher-32 of the compressed bytes is stored after them.
        shuffle: bytes of a number if bytes were shuffled before compression; 0 if not.
        bitshuffle: the same if bits were shuffled.
    """

    compression: Compression
    filter: int
    has_checksum: bool = False
    shuffle: int = 0
    bitshuffle: int = 0

    @property
    def multiple(self) -> int:
        """Number of bytes of which blocks have a multiple."""
        return 8 * self.bitshuffle if self.bitshuffle else 1


def steps_of(filters: Sequence[Filter], itemsize: int) -> Steps | None:
    """Return what undoes filters on a device; None if they are not undone there.

    Args:
        filters: the filters, in the order of writing.
        itemsize: bytes of a number.
    """
    rest = list(filters)
    has_checksum = bool(rest) and rest[-1].id == FLETCHER32
    if has_checksum:
        rest.pop()
    shuffle = shuffled(rest.pop(0), itemsize) if rest and rest[0].id == SHUFFLE else 0
    if len(rest) != 1 or shuffle < 0:
        return None
    (step,) = rest
    compressions: dict[int, Compression] = {GZIP: "deflate", LZ4: "lz4", ZSTD: "zstd"}
    if step.id in compressions:
        return Steps(compressions[step.id], step.id, has_checksum, shuffle if shuffle > 1 else 0)
    if step.id == BITSHUFFLE and not shuffle:
        try:
            size, _, compressor = bitshuffle_options(step)
        except IndexError:
            return None
        if size >= 1 and compressor in (2, 3):
            return Steps("lz4" if compressor == 2 else "zstd", step.id, has_checksum, bitshuffle=size)
    return None


def why_not_on_device(layout: ArrayLayout, device: DecodingDevice) -> str | None:
    """Return why chunks of an array are decoded on the CPU, in a few words; None if a device decodes them."""
    if layout.decoding is not None or layout.stacked or layout.view is not None or layout.members:
        return "its values are not the rows of one array as stored"
    if layout.table is None or layout.chunks is None or layout.plain_reason is not None:
        return "it has no chunks that are read by position"
    is_plain = layout.stored.base.isnative and layout.stored.base == layout.dtype and bool(layout.row_bytes)
    if not is_plain or layout.dtype.kind not in "biuf" or layout.dtype.itemsize > MAX_ITEMSIZE:
        return f"its numbers are {layout.stored}"
    if layout.digests is not None:
        return "its stored bytes are compared with digests"
    steps = steps_of(layout.filters, layout.stored.itemsize)
    if steps is None:
        names = ", ".join(step.label for step in layout.filters) or "none"
        return f"a device does not undo its filters ({names})"
    if device.codec(steps.compression) is None:
        return f"this device has no decoder of {steps.compression}"
    return None


class _Request(NamedTuple):
    """A block to load to a slot of the cache."""

    source: BlockSource
    block: int
    slot: int


class DeviceLoader:
    """Loads blocks of the arrays of a field: all that wait are decoded together, whichever thread comes first.

    Chunks that were not written, or without all filters, and chunks that the device cannot decode, are decoded on the
    CPU and copied. That also raises the errors of damaged chunks.

    Args:
        device: the device.
        layout: an array of the field; all others have the same rows.
        counters: counts bytes read and decoded.
    """

    def __init__(self, device: DecodingDevice, layout: ArrayLayout, counters: Counters) -> None:
        self._device, self._counters = device, counters
        self._row_shape, self._row_bytes, self._dtype = layout.row_shape, layout.row_bytes, layout.dtype
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Lock()
        self._codecs: dict[Compression, BatchCodec | None] = {}

    def add(self, source: BlockSource, blocks: IntArray, slots: IntArray) -> None:
        """Add blocks of an array that ``run`` has to load to slots."""
        with self._lock:
            self._waiting.extend(
                _Request(source, block, slot) for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True)
            )

    def run(self, cache: ChunkCache) -> None:
        """Load all blocks that wait and that no other thread has taken, in launches."""
        n = max(1, LAUNCH_BYTES // max(1, cache.slot_rows * self._row_bytes))
        while True:
            with self._lock:
                requests = [self._waiting.popleft() for _ in range(min(n, len(self._waiting)))]
            if not requests:
                return
            self._load(cache, requests)

    def _load(self, cache: ChunkCache, requests: Sequence[_Request]) -> None:
        left = {request.slot: request for request in requests}
        try:
            whole = self._decoded(cache, requests)
            for request in whole:
                del left[request.slot]
            cache.finish_task(np.array([request.slot for request in whole], np.int64))
            for request in list(left.values()):
                error = self._load_on_host(cache, request)
                del left[request.slot]
                cache.finish_task(np.array([request.slot]), error)
        except BaseException as error:
            if left:
                cache.finish_task(np.array([*left]), self._explained(error))
            if not isinstance(error, Exception):
                raise

    def clear(self) -> None:
        """Forget blocks that wait, when no read waits for them any more."""
        with self._lock:
            self._waiting.clear()

    def _decoded(self, cache: ChunkCache, requests: Sequence[_Request]) -> list[_Request]:
        """Decode blocks on the device; return the blocks that are whole in their slots."""
        began = perf_counter()
        by_source: dict[int, list[_Request]] = {}
        for request in requests:
            by_source.setdefault(id(request.source), []).append(request)
        launches = [
            launch
            for of_source in by_source.values()
            if (launch := self._begin(cache, of_source[0].source, of_source)) is not None
        ]
        whole = [request for launch in launches for request in launch.end()]
        self._counters.add(decode_seconds=perf_counter() - began)
        return whole

    def _begin(self, cache: ChunkCache, source: Any, requests: Sequence[_Request]) -> _Launch | None:
        """Read the chunks of some blocks of an array, and begin to decode them; None if that is left to the CPU."""
        try:
            loader = source.opened() if isinstance(source, LaterSource) else source
            if not isinstance(loader, ChunkLoader):
                return None
            steps = steps_of(loader.layout.filters, loader.layout.stored.itemsize)
            if steps is None or (codec := self._codec(steps.compression)) is None:
                return None
            launch = _Launch(self._device, loader, steps, codec, cache, requests, self._counters)
            return launch if launch.begin() else None
        except (H5Error, OSError, ValueError, KeyError):  # the CPU's way raises it for each block
            return None

    def _codec(self, compression: Compression) -> BatchCodec | None:
        if compression not in self._codecs:
            self._codecs[compression] = self._device.codec(compression)
        return self._codecs[compression]

    def _load_on_host(self, cache: ChunkCache, request: _Request) -> Exception | None:
        """Load a block on the CPU, and copy it; return the error if it cannot be loaded."""
        source = request.source
        memory = np.empty((cache.slot_rows, *self._row_shape), self._dtype)
        try:
            source.load(
                [request.block], range(source.n_parts), BlockMemory(memory, np.zeros(1, np.int64), cache.slot_rows)
            )
        except Exception as error:
            return error
        rows = torch.from_numpy(memory.reshape(cache.slot_rows, -1).view(np.uint8))
        first = request.slot * cache.slot_rows
        with self._device.stream():
            cache.rows.view(torch.uint8)[first : first + cache.slot_rows] = rows.to(self._device.device)
            self._device.wait()
        return None

    def _explained(self, error: BaseException) -> Exception:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return H5MemoryError(
                f"{self._device.device} has not enough memory left to decode there ({bytes_text(LAUNCH_BYTES)} at a "
                "time, and two to three times as much beside them). Pass a smaller files.cache_bytes or batch_size, or "
                "remove files.decode_on."
            )
        if isinstance(error, H5Error | OSError):
            return error
        return H5Error(f"decoding on {self._device.device} failed ({type(error).__name__}: {error}). Read again.")


class _Launch:
    """Chunks of one array that are decoded together.

    Args:
        device: the device.
        loader: reads the chunks.
        steps: what undoes their filters.
        codec: undoes the compression.
        cache: the cache of the blocks.
        requests: blocks of the array.
        counters: counts bytes read and decoded.
    """

    def __init__(
        self,
        device: DecodingDevice,
        loader: ChunkLoader,
        steps: Steps,
        codec: BatchCodec,
        cache: ChunkCache,
        requests: Sequence[_Request],
        counters: Counters,
    ) -> None:
        self._device, self._loader, self._steps, self._codec = device, loader, steps, codec
        self._cache, self._requests, self._counters = cache, requests, counters
        self._blocks = np.array([request.block for request in requests])
        self._slots = np.array([request.slot for request in requests])
        n_parts, table = loader.n_parts, loader.table
        chunks = (self._blocks[:, np.newaxis] * n_parts + np.arange(n_parts)).reshape(-1)
        is_plain = (table.offsets[chunks] >= 0) & (table.masks[chunks] == 0)
        is_whole = is_plain.reshape(-1, n_parts).all(axis=1)  # blocks whose chunks are all decoded here
        self._which = np.flatnonzero(is_whole)
        self._chunks = chunks.reshape(-1, n_parts)[is_whole].reshape(-1)
        self._failed: torch.Tensor
        self._is_wrong = np.zeros(len(self._chunks), np.bool_)

    def begin(self) -> bool:
        """Read the chunks and begin to decode them; return False if none is decoded on the device."""
        if not len(self._chunks):
            return False
        layout, n_bytes = self._loader.layout, self._loader.layout.chunk_bytes
        data, starts, stops = self._read(layout)
        stops = self._without_checksums(data.numpy(), starts, stops)
        parsed = self._parsed(data.numpy(), starts, stops, n_bytes)
        pieces, self._is_wrong = parsed.pieces, parsed.is_wrong
        if (pieces.starts % self._codec.alignment).any():
            room = aligned_starts(pieces.sizes, self._codec.alignment)
            copy = self._device.host_memory(int((room + pieces.sizes).max(initial=0)))
            pieces, data = aligned(data.numpy(), pieces, copy.numpy(), self._codec.alignment), copy
        with self._device.stream():
            self._decode(data, parsed._replace(pieces=pieces), n_bytes)
        return True

    def end(self) -> list[_Request]:
        """Wait for the launch; return the blocks that are whole in their slots."""
        with self._device.stream():
            failed = self._is_wrong | self._failed.cpu().numpy()
        is_whole = ~failed.reshape(-1, self._loader.n_parts).any(axis=1)
        return [self._requests[at] for at in self._which[is_whole].tolist()]

    def _read(self, layout: ArrayLayout) -> tuple[torch.Tensor, IntArray, IntArray]:
        """Return the stored bytes of the chunks, in memory of the host, and where each begins and ends.

        Deflate streams begin where the codec wants them, so that they need not be copied.
        """
        table, alignment = self._loader.table, self._codec.alignment
        offsets, sizes = table.offsets[self._chunks], table.sizes[self._chunks]
        before = ZLIB_HEADER if self._steps.filter == GZIP else 0
        starts = aligned_starts(sizes + alignment, alignment) + (alignment - before) % alignment
        stops = starts + sizes
        data = self._device.host_memory(int(stops[-1]))
        began = perf_counter()
        read_stored(
            layout,
            data.numpy(),
            starts,
            stops,
            offsets,
            lambda i, at: self._loader.name(self._chunks[i]),
            self._counters,
        )
        self._counters.add(
            bytes_read=int(sizes.sum()),
            bytes_decoded=len(self._chunks) * layout.chunk_bytes,
            chunks_decoded=len(self._chunks),
            read_seconds=perf_counter() - began,
        )
        return data, starts, stops

    def _without_checksums(self, data: npt.NDArray[np.uint8], starts: IntArray, stops: IntArray) -> IntArray:
        """Compare Fletcher-32 checksums; return the ends of the compressed bytes, which a wrong chunk has none of."""
        if not self._steps.has_checksum:
            return stops
        ends = stops - FLETCHER32_BYTES
        for at, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            try:
                strip_fletcher32(data[start:stop])
            except ValueError:
                ends[at] = start
        return np.maximum(ends, starts)

    def _parsed(self, data: npt.NDArray[np.uint8], starts: IntArray, stops: IntArray, n_bytes: int) -> Parsed:
        if self._steps.filter == GZIP:
            return zlib_pieces(data, starts, stops, n_bytes)
        if self._steps.filter == ZSTD:
            return frame_pieces(data, starts, stops, n_bytes)
        return block_pieces(data, starts, stops, n_bytes, self._steps.multiple)

    def _decode(self, data: torch.Tensor, parsed: Parsed, n_bytes: int) -> None:
        """Decode pieces, and copy the rows of chunks to their slots; nothing is waited for."""
        device, n_chunks, alignment = self._device.device, len(self._chunks), self._codec.alignment
        stride = -(-n_bytes // alignment) * alignment
        stored = data.to(device, non_blocking=True)
        out = torch.empty(n_chunks * stride, dtype=torch.uint8, device=device)
        pieces = parsed.pieces._replace(firsts=parsed.pieces.firsts + parsed.pieces.chunks * stride)
        failed = torch.zeros(n_chunks, dtype=torch.int32, device=device)
        compressed = pieces.select(~pieces.is_stored)
        if len(compressed.chunks):
            wrong = self._codec.decode(stored, compressed, out)
            failed.index_add_(0, self._to_device(compressed.chunks), wrong.to(torch.int32))
        plain = pieces.select(pieces.is_stored)
        each = zip(plain.starts.tolist(), plain.firsts.tolist(), plain.lengths.tolist(), strict=True)
        for start, first, length in each:
            out[first : first + length] = stored[start : start + length]
        decoded = out.view(n_chunks, stride)[:, :n_bytes]
        if parsed.adler is not None:
            failed += adler32(decoded) != self._to_device(parsed.adler)
        if self._steps.shuffle:
            decoded = unshuffled(decoded, self._steps.shuffle)
        elif self._steps.bitshuffle:
            decoded = without_bitshuffle(decoded, self._steps.bitshuffle, parsed.block)
        self._place(decoded)
        self._failed = failed > 0

    def _place(self, decoded: torch.Tensor) -> None:
        """Copy the rows of chunks to the slots of their blocks."""
        loader, layout, n_parts = self._loader, self._loader.layout, self._loader.n_parts
        slots = self._slots[self._which]
        memory = self._cache.rows.view(torch.uint8).view(len(self._cache), -1)
        if n_parts == 1 and loader.chunks[1:] == layout.axes:
            memory[:, : decoded.shape[1]].index_copy_(0, self._to_device(slots), decoded)
            return
        shape = (len(self._cache), self._cache.slot_rows, *layout.axes, layout.stored.itemsize)
        rows, parts = memory.view(shape), decoded.reshape(-1, n_parts, *loader.chunks, layout.stored.itemsize)
        regions = [loader.region(part) for part in range(n_parts)]
        for block, slot in enumerate(slots.tolist()):
            for part, region in enumerate(regions):
                inside = tuple(slice(0, s.stop - s.start) for s in region)
                rows[slot][(slice(0, loader.chunks[0]), *region)] = parts[block, part][(slice(None), *inside)]

    def _to_device(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self._device.device)

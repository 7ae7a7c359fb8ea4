"""Loads blocks of chunks to a cache on a device: chunks are read to host memory, and decoded there in launches."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...counters import Counters
from ...errors import H5Error, H5MemoryError
from ...hdf5 import ArrayLayout, Filter
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
    zlib_pieces,
    zstd_pieces,
)
from .undo import adler32, unshuffled, without_bitshuffle

__all__ = ["DeviceLoader", "Steps", "steps_of", "why_not_on_device"]

LAUNCH_BYTES, MAX_LAUNCHES = 64 << 20, 2
"""Decoded bytes of a launch: hundreds of chunks, each of which a device decodes with a few of its cores. Launches of a
process at a time: one is read while another one is decoded. They take memory of the device beside the cache."""

_launching = threading.BoundedSemaphore(MAX_LAUNCHES)

_log = logging.getLogger(__name__)

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
    """A block to load to a slot of a cache."""

    cache: ChunkCache
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
        self._block_bytes = layout.chunk_bytes * (1 if layout.table is None else layout.table.per_row)
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Lock()
        self._codecs: dict[Compression, BatchCodec | None] = {}
        self._has_warned = False

    def add(self, cache: ChunkCache, source: BlockSource, blocks: IntArray, slots: IntArray) -> None:
        """Add blocks of an array that ``run`` has to load to slots of a cache."""
        with self._lock:
            self._waiting.extend(
                _Request(cache, source, *place) for place in zip(blocks.tolist(), slots.tolist(), strict=True)
            )

    def run(self) -> None:
        """Load all blocks that wait and that no other thread has taken, in launches."""
        try:
            with _launching:
                while requests := self._next_requests():
                    self._load(requests[0].cache, requests)
        except BaseException as interrupt:  # no other task would load the rest
            for request in self.clear():
                request.cache.finish_task(np.array([request.slot]), self._explained(interrupt))
            raise

    def clear(self) -> list[_Request]:
        """Forget blocks that wait, and return them."""
        with self._lock:
            requests = list(self._waiting)
            self._waiting.clear()
        return requests

    def _next_requests(self) -> list[_Request]:
        """Take blocks of one cache, as many as one launch decodes."""
        requests: list[_Request] = []
        n_bytes = 0
        with self._lock:
            while self._waiting and n_bytes < LAUNCH_BYTES:
                request = self._waiting[0]
                if requests and request.cache is not requests[0].cache:
                    break
                requests.append(self._waiting.popleft())
                n_bytes += max(1, request.cache.slot_rows * self._row_bytes, self._block_bytes)
        return requests

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
            with suppress(Exception), self._device.work():  # launches that still write to these slots
                pass
            if left:
                cache.finish_task(np.array([*left]), self._explained(error))
            if not isinstance(error, Exception):
                raise

    def _decoded(self, cache: ChunkCache, requests: Sequence[_Request]) -> list[_Request]:
        """Decode blocks on the device; return the blocks that are whole in their slots."""
        began = perf_counter()
        by_source: dict[int, list[_Request]] = {}
        for request in requests:
            by_source.setdefault(id(request.source), []).append(request)
        alike: dict[Any, list[_Share]] = {}
        for of_source in by_source.values():
            if (share := self._share(of_source)) is not None:
                alike.setdefault(share.kind, []).append(share)
        launches = []
        for shares in alike.values():
            codec = self._codec(shares[0].steps.compression)
            if codec is None:
                continue
            launch = _Launch(self._device, codec, cache, shares, self._counters)
            try:
                launch.begin()
            except H5Error as error:  # of the codec
                self._warn(error)
            else:
                launches.append(launch)
        whole = [request for launch in launches for request in launch.end()]
        self._counters.add(decode_seconds=perf_counter() - began)
        return whole

    def _share(self, requests: Sequence[_Request]) -> _Share | None:
        """Return the blocks of an array that are decoded on the device; None if all of them are left to the CPU."""
        source = requests[0].source
        try:
            loader = source.opened() if isinstance(source, LaterSource) else source
        except (OSError, ValueError, KeyError):  # loading the blocks raises it
            return None
        if not isinstance(loader, ChunkLoader):
            return None
        steps = steps_of(loader.layout.filters, loader.layout.stored.itemsize)
        return None if steps is None else _Share.of(loader, steps, requests)

    def _warn(self, error: H5Error) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("chunks are decoded on the CPU: %s", error)

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
        with self._device.work():
            cache.rows.view(torch.uint8)[first : first + cache.slot_rows] = rows.to(self._device.device)
        return None

    def _explained(self, error: BaseException) -> Exception:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return H5MemoryError(
                f"{self._device.device} has not enough memory left to decode chunks. Pass a smaller files.cache_bytes "
                "or batch_size, or remove files.decode_on."
            )
        if isinstance(error, H5Error | OSError):
            return error
        return H5Error(f"decoding on {self._device.device} failed ({type(error).__name__}: {error}). Read again.")


class _Share(NamedTuple):
    """The part that one array has in a launch.

    Attributes:
        loader: describes the array and its chunks.
        steps: what undoes their filters.
        requests: the blocks, all of whose chunks were written with all filters.
        chunks: the chunks of these blocks.
    """

    loader: ChunkLoader
    steps: Steps
    requests: list[_Request]
    chunks: IntArray

    @classmethod
    def of(cls, loader: ChunkLoader, steps: Steps, requests: Sequence[_Request]) -> _Share | None:
        """Return the share of an array; None if none of the blocks can be decoded on a device."""
        n_parts, table = loader.n_parts, loader.table
        blocks = np.array([request.block for request in requests])
        chunks = blocks[:, np.newaxis] * n_parts + np.arange(n_parts)
        is_whole = ((table.offsets[chunks] >= 0) & (table.masks[chunks] == 0)).all(axis=1)
        if not is_whole.any():
            return None
        which = np.flatnonzero(is_whole).tolist()
        return cls(loader, steps, [requests[at] for at in which], chunks[is_whole].reshape(-1))

    @property
    def kind(self) -> Any:
        """What arrays have in common whose chunks are decoded together."""
        return self.steps, self.loader.chunks, self.loader.layout.axes


class _Launch:
    """Chunks of arrays of one kind that are decoded together.

    Args:
        device: the device.
        codec: undoes the compression.
        cache: the cache of the blocks.
        shares: the arrays and their blocks.
        counters: counts bytes read and decoded.
    """

    def __init__(
        self,
        device: DecodingDevice,
        codec: BatchCodec,
        cache: ChunkCache,
        shares: Sequence[_Share],
        counters: Counters,
    ) -> None:
        self._device, self._codec, self._cache, self._shares, self._counters = device, codec, cache, shares, counters
        self._loader, self._steps = shares[0].loader, shares[0].steps
        self._requests = [request for share in shares for request in share.requests]
        self._n_chunks = sum(len(share.chunks) for share in shares)
        self._is_wrong: npt.NDArray[np.bool_]
        self._failed: torch.Tensor

    def begin(self) -> None:
        """Read the chunks, and begin to decode them."""
        n_bytes = self._loader.layout.chunk_bytes
        data, starts, stops = self._read()
        stops = self._without_checksums(data.numpy(), starts, stops)
        parsed = self._parsed(data.numpy(), starts, stops, n_bytes)
        self._is_wrong, pieces = parsed.is_wrong, parsed.pieces
        if (pieces.starts % self._codec.alignment).any():
            room = aligned_starts(pieces.sizes, self._codec.alignment)
            copy = self._device.host_memory(int((room + pieces.sizes).max(initial=0)))
            pieces, data = aligned(data.numpy(), pieces, copy.numpy(), self._codec.alignment), copy
        with self._device.stream():
            self._decode(data, parsed._replace(pieces=pieces), n_bytes)

    def end(self) -> list[_Request]:
        """Wait for the launch; return the blocks that are whole in their slots."""
        with self._device.stream():
            failed = self._is_wrong | self._failed.cpu().numpy()
        is_whole = ~failed.reshape(-1, self._loader.n_parts).any(axis=1)
        return [self._requests[at] for at in np.flatnonzero(is_whole).tolist()]

    def _read(self) -> tuple[torch.Tensor, IntArray, IntArray]:
        """Return stored bytes in memory of the host, and where each chunk begins and ends; empty if it was not read.

        Deflate streams begin where the codec wants them, so that they need not be copied.
        """
        alignment, sizes = self._codec.alignment, np.concatenate([s.loader.table.sizes[s.chunks] for s in self._shares])
        before = ZLIB_HEADER if self._steps.filter == GZIP else 0
        starts = aligned_starts(sizes + alignment, alignment) + (alignment - before) % alignment
        stops = starts + sizes
        data, first = self._device.host_memory(int(stops[-1])), 0
        for share in self._shares:
            of_share = slice(first, first := first + len(share.chunks))
            try:
                self._read_share(share, data.numpy(), starts[of_share], stops[of_share])
            except (H5Error, OSError):  # the CPU's way raises it for each block
                stops[of_share] = starts[of_share]
        return data, starts, stops

    def _read_share(self, share: _Share, data: npt.NDArray[np.uint8], starts: IntArray, stops: IntArray) -> None:
        loader, began = share.loader, perf_counter()
        offsets = loader.table.offsets[share.chunks]
        name = lambda i, at: loader.name(int(share.chunks[i]))  # noqa: E731
        read_stored(loader.layout, data, starts, stops, offsets, name, self._counters)
        self._counters.add(
            bytes_read=int((stops - starts).sum()),
            bytes_decoded=len(share.chunks) * loader.layout.chunk_bytes,
            chunks_decoded=len(share.chunks),
            read_seconds=perf_counter() - began,
        )

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
            return zstd_pieces(data, starts, stops, n_bytes)
        return block_pieces(data, starts, stops, n_bytes, self._steps.multiple)

    def _decode(self, data: torch.Tensor, parsed: Parsed, n_bytes: int) -> None:
        """Decode pieces, and copy the rows of chunks to their slots; nothing is waited for."""
        device, n_chunks, alignment = self._device.device, self._n_chunks, self._codec.alignment
        stride = -(-n_bytes // alignment) * alignment
        pieces = parsed.pieces._replace(firsts=parsed.pieces.firsts + parsed.pieces.chunks * stride)
        compressed, plain = pieces.select(~pieces.is_stored), pieces.select(pieces.is_stored)
        chunks, slots = self._to_device(compressed.chunks), self._to_device([r.slot for r in self._requests])
        adler = None if parsed.adler is None else self._to_device(parsed.adler)
        blocks = {} if parsed.blocks is None else self._chunks_by_block(parsed.blocks[~parsed.is_wrong], parsed)
        stored = data.to(device, non_blocking=True)
        out = torch.empty(n_chunks * stride, dtype=torch.uint8, device=device)
        failed = torch.zeros(n_chunks, dtype=torch.int32, device=device)
        if len(compressed.chunks):
            failed.index_add_(0, chunks, self._codec.decode(stored, compressed, out).to(torch.int32))
        each = zip(plain.starts.tolist(), plain.firsts.tolist(), plain.lengths.tolist(), strict=True)
        for start, first, length in each:
            out[first : first + length] = stored[start : start + length]
        decoded = out.view(n_chunks, stride)[:, :n_bytes]
        if adler is not None:
            failed += adler32(decoded) != adler
        if self._steps.shuffle:
            decoded = unshuffled(decoded, self._steps.shuffle)
        for block, which in blocks.items():
            decoded[which] = without_bitshuffle(decoded[which], self._steps.bitshuffle, block)
        self._place(decoded, slots)
        self._failed = failed > 0

    def _chunks_by_block(self, blocks: IntArray, parsed: Parsed) -> dict[int, torch.Tensor]:
        """Return the chunks whose bits were shuffled in blocks of each size: one size, unless files differ."""
        if not self._steps.bitshuffle:
            return {}
        chunks = np.flatnonzero(~parsed.is_wrong)
        return {block: self._to_device(chunks[blocks == block]) for block in np.unique(blocks).tolist()}

    def _place(self, decoded: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the rows of chunks to the slots of their blocks."""
        loader, layout, n_parts = self._loader, self._loader.layout, self._loader.n_parts
        memory = self._cache.rows.view(torch.uint8).view(len(self._cache), -1)
        if n_parts == 1 and loader.chunks[1:] == layout.axes:
            memory[:, : decoded.shape[1]].index_copy_(0, slots, decoded)
            return
        shape = (len(self._cache), self._cache.slot_rows, *layout.axes, layout.stored.itemsize)
        rows, parts = memory.view(shape), decoded.reshape(-1, n_parts, *loader.chunks, layout.stored.itemsize)
        regions = [loader.region(part) for part in range(n_parts)]
        for block, request in enumerate(self._requests):
            for part, region in enumerate(regions):
                inside = tuple(slice(0, s.stop - s.start) for s in region)
                rows[request.slot][(slice(0, loader.chunks[0]), *region)] = parts[block, part][(slice(None), *inside)]

    def _to_device(self, numbers: npt.ArrayLike) -> torch.Tensor:
        """Return numbers on the device, without waiting for work there."""
        values = np.asarray(numbers, np.int64)
        memory = self._device.host_memory(values.nbytes).view(torch.int64)
        memory.numpy()[...] = values
        return memory.to(self._device.device, non_blocking=True)

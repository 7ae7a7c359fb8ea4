"""Reads rows of a field whose chunks are decoded on a device: batches are copied there, out of a cache there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...counters import Counters
from ...errors import H5MemoryError
from ...hdf5 import ArrayLayout, OpenOptions
from ...sizes import bytes_text
from ...types import IntArray
from ..block_sources import BlockSources, FieldLayouts
from ..chunk_cache import ChunkCache
from ..chunked import ChunkedReader, CountReads
from ..copies import CopyRows
from ..select import open_source
from ..thread_pool import TaskQueue
from .device import DecodingDevice
from .loader import DeviceLoader

__all__ = ["ChangeTensor", "DeviceReader", "open_on_device"]

ChangeTensor: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Returns changed copies of rows."""


class DeviceReader(ChunkedReader):
    """One field of all files of a dataset, decoded on a device.

    Args:
        device: the device.
        layouts: see ``ChunkedReader``.
        sources: see ``ChunkedReader``.
        n_bytes: memory of the device for decoded blocks.
        work: shares loading among threads.
        counters: counts blocks used and loaded.
        rows: see ``ChunkedReader``.
        retain: see ``ChunkedReader``.
        reads: see ``ChunkedReader``.
    """

    def __init__(
        self,
        device: DecodingDevice,
        layouts: FieldLayouts,
        sources: BlockSources,
        *,
        n_bytes: int,
        work: TaskQueue,
        counters: Counters,
        rows: IntArray | None = None,
        retain: bool | None = None,
        reads: CountReads | None = None,
    ) -> None:
        super().__init__(
            layouts, sources, n_bytes=n_bytes, work=work, counters=counters, rows=rows, retain=retain, reads=reads
        )
        self.device = device
        self._kept = None  # rows on a local disk are not read by position
        self._loader = DeviceLoader(device, layouts.examples[0], counters)

    def read(self, rows: IntArray, out: npt.NDArray[Any] | None = None, epoch: int | None = None) -> npt.NDArray[Any]:
        """Return rows in this machine's memory (see ``ChunkedReader.read``)."""
        rows = np.asarray(rows, dtype=np.int64)
        memory = self.memory((len(rows), *self.row_shape), torch_dtype_like(self.dtype))
        self.begin(self.map.boxes(rows), self.copy_to(memory), epoch).finish()
        with self.device.work():
            read: npt.NDArray[Any] = memory.cpu().numpy()
        if out is None:
            return read
        with np.errstate(all="ignore"):
            out[...] = read
        return out

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device for a batch.

        Raises:
            H5MemoryError: the device has not enough.
        """
        with self.device.work():  # torch may be set to fill new memory
            return self._allocated(tuple(shape), dtype, "a batch")

    def copy_to(self, out: torch.Tensor, change: ChangeTensor | None = None) -> CopyRows:
        """Return what copies rows to memory of the device, and changes them."""
        return _CopyOnDevice(self.device, out, self.row_shape, self.dtype, change)

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded rows in this machine's memory: none."""
        return 0

    def forget_tasks(self) -> None:
        """Forget blocks that wait to be loaded, when no read waits for them any more."""
        self._loader.clear()

    def _new_cache(self, n_slots: int) -> ChunkCache:
        row_bytes = math.prod(self.row_shape) * self.dtype.itemsize
        word = _word_of(row_bytes)
        with self.device.work():  # torch may be set to fill new memory
            rows = self._allocated((n_slots * self.rows_per_block, row_bytes // word.itemsize), word, "decoded chunks")
        return ChunkCache(self.map.n_blocks, n_slots, self.rows_per_block, self.row_shape, self.dtype, rows)

    def _allocated(self, shape: tuple[int, ...], dtype: torch.dtype, purpose: str) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.device.device)
        except torch.OutOfMemoryError as error:
            n_bytes = bytes_text(math.prod(shape) * dtype.itemsize)
            raise H5MemoryError(
                f"{self.device.device} has no {n_bytes} left for {purpose}. Pass a smaller files.cache_bytes or "
                "batch_size, or remove files.decode_on."
            ) from error

    def _tasks_of(self, blocks: IntArray) -> IntArray:
        return np.ones(len(blocks), np.int64)

    def _make_tasks(self, cache: ChunkCache, blocks: IntArray, slots: IntArray) -> list[partial[None]]:
        files = self._file_of(blocks)
        for file in np.unique(files).tolist():
            is_in_file = files == file
            self._loader.add(
                cache, self._sources[file], blocks[is_in_file] - self.map.first_block[file], slots[is_in_file]
            )
        return [partial(self._loader.run)]


class _CopyOnDevice:
    """Copies rows to memory of a device, and changes them; see ``CopyRows``.

    It waits for the copies, since the slots that they are from may be used again afterwards.
    """

    def __init__(
        self,
        device: DecodingDevice,
        out: torch.Tensor,
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        change: ChangeTensor | None,
    ) -> None:
        self._device, self._out, self._row_shape, self._change = device, out, row_shape, change
        self._stored = torch_dtype_like(dtype)
        self._word = _word_of(math.prod(row_shape) * dtype.itemsize)

    def __call__(self, rows: Any, places: IntArray, out_places: IntArray | None) -> None:
        """Copy rows: words on the device, or an array of this machine."""
        with self._device.work():
            if isinstance(rows, np.ndarray):
                octets = torch.from_numpy(np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8))
                rows = octets.to(self._device.device).view(self._word)
            taken = rows.index_select(0, self._index(places)).view(self._stored).view(-1, *self._row_shape)
            changed = taken if self._change is None else self._change(taken)
            if out_places is None:
                self._out.copy_(changed)
            else:
                changed = changed.to(self._out.dtype).contiguous()
                octets = self._out.view(len(self._out), -1).view(torch.uint8)
                octets.index_copy_(0, self._index(out_places), changed.view(len(changed), -1).view(torch.uint8))

    def _index(self, places: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(places, np.int64)).to(self._device.device)


def torch_dtype_like(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's dtype of the same numbers."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _word_of(n_bytes: int) -> torch.dtype:
    """Return the longest integers that rows are made of: torch copies those of any bits, and not all dtypes."""
    words = (torch.int64, torch.int32, torch.int16)
    return next((word for word in words if n_bytes % word.itemsize == 0), torch.uint8)


def open_on_device(
    device: DecodingDevice,
    layouts: Sequence[ArrayLayout],
    options: OpenOptions,
    *,
    n_bytes: int,
    work: TaskQueue,
    counters: Counters,
    rows: IntArray | None = None,
    retain: bool | None = None,
    reads: CountReads | None = None,
) -> DeviceReader:
    """Return the reader of one field of all files, on a device (see ``open_chunked``). Opens nothing yet.

    Args:
        device: the device.
        layouts: arrays for which ``why_not_on_device`` finds no reason.
        options: how files are opened if the HDF5 library reads.
        n_bytes: memory of the device for decoded blocks.
        work: shares loading among threads.
        counters: counts bytes and blocks.
        rows: see ``DeviceReader``.
        retain: see ``DeviceReader``.
        reads: see ``DeviceReader``.
    """
    arrays = FieldLayouts.of(layouts)
    sources = BlockSources(arrays, lambda number, layout: open_source(layout, options, 1, counters))
    return DeviceReader(
        device, arrays, sources, n_bytes=n_bytes, work=work, counters=counters, rows=rows, retain=retain, reads=reads
    )

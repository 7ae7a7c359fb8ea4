"""Readers that decode into a pool, of any size, for the tests of this folder."""

import importlib.util
import math
from unittest import mock

import lightning_h5.readers.select
from lightning_h5 import FileOptions
from lightning_h5.counters import Counters
from lightning_h5.hdf5 import OpenOptions, find_array, kind_of, layout_of, open_h5
from lightning_h5.readers import TaskQueue, block_sources, chunk_loader, open_chunked
from lightning_h5.readers.on_device import open_on_device, why_not_on_device

OPTIONS = OpenOptions(files=FileOptions(trusted=True))  # the library decodes any filters
RUN = 3  # rows per block in arrays without chunks
EVERYTHING = 1 << 20  # blocks
IS_COMPILED = importlib.util.find_spec("numba") is not None


def look(path, key="x"):
    with open_h5(path) as file:
        return layout_of(find_array(file, key), path, key)


def can_be_pooled(layout):
    return kind_of(layout.dtype) == "number" and layout.row_bytes > 0


def rows_per_block(layouts):
    return max(a.chunks[0] if a.chunks and not a.is_contiguous else RUN for a in layouts)


def block_bytes(layouts):
    """Memory that a block takes: as much as the largest of all files."""
    return rows_per_block(layouts) * math.prod(layouts[0].row_shape) * layouts[0].dtype.itemsize


def open_pool(*layouts, n_blocks=EVERYTHING, work=None, counters=None, rows=None, retain=None, is_large=False):
    """A reader for one field of some files, with room for ``n_blocks`` blocks.

    Of arrays that are large, chunks are read and decoded by compiled code, where Numba is installed.
    """
    least = 0 if is_large else 1 << 60
    with mock.patch.object(lightning_h5.readers.select, "MIN_COMPILED", least):
        return open_chunked(
            layouts,
            OPTIONS,
            rows_per_run=[RUN] * len(layouts),
            n_bytes=n_blocks * block_bytes(layouts),
            work=work or TaskQueue(),
            counters=counters or Counters(),
            rows=rows,
            retain=False if is_large else retain,
        )


def open_pool_on_device(device, *layouts, n_blocks=EVERYTHING, counters=None, work=None, retain=None):
    """A reader for one field of some files that are decoded on a device; None if that leaves them to the CPU."""
    if any(why_not_on_device(layout, device) is not None for layout in layouts):
        return None
    return open_on_device(
        device,
        layouts,
        OPTIONS,
        n_bytes=n_blocks * block_bytes(layouts),
        work=work or TaskQueue(),
        counters=counters or Counters(),
        retain=retain,
    )


TASK_BYTES = chunk_loader.TASK_BYTES


def load_at_a_time(monkeypatch, n_bytes):
    """Has so much decoded in one go: a chunk a task, some of them, or all of a small file (512 KiB by default)."""
    for module in (block_sources, chunk_loader):
        monkeypatch.setattr(module, "TASK_BYTES", n_bytes)
    monkeypatch.setattr(chunk_loader, "MAX_LINE_BYTES", 4 * n_bytes)


def n_decoded(counters):
    return int(counters.total()["chunks_decoded"])

"""insitubatch, a loader for Zarr: over the HDF5 file itself, and over a Zarr copy.

VirtualiZarr describes the chunks of an HDF5 file as those of a Zarr store, so that insitubatch reads the file in
place. Rows are mixed over blocks of chunks that have 64 MiB decoded, as here; its default are 16 chunks. Labels are in
memory, by the row numbers that come with each batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import insitubatch
import torch
import zarr
from common import BATCH_SIZE, Epoch
from obspec_utils.registry import ObjectStoreRegistry
from obstore.store import LocalStore
from rows import Data
from torch import Tensor
from virtualizarr.parsers import HDFParser

IS_ROW_BY_ROW = False
BUFFER = 64 * 2**20  # bytes of decoded rows that are mixed
BLOCK = 16  # chunks: its default


def virtual_store(path: Path) -> Any:
    """Return an HDF5 file as a Zarr store."""
    return HDFParser()(url=f"file://{path}", registry=ObjectStoreRegistry({"file://": LocalStore()}))


def as_stored(data: Data, stack: ExitStack, n_rows: int | None) -> dict[str, Epoch]:
    """Epochs over the HDF5 file; none if it is contiguous: insitubatch reads such an array as one chunk."""
    return {} if data.chunks is None else epochs(data, virtual_store(data.path))


def open_epochs(data: Data, folder: Path, stack: ExitStack) -> dict[str, Epoch]:
    """Epochs over a Zarr copy without compression, 32 rows per chunk."""
    chunks = (32, *data.x.shape[1:])
    zarr.create_array(str(folder / "rows.zarr"), name="x", data=data.x, chunks=chunks, compressors=None)
    return epochs(data, insitubatch.obstore_store(f"file://{folder}/rows.zarr"))


def windows(path: str, name: str, length: int, batch_size: int) -> Epoch:
    """Epochs of windows along the first axis of an array, one step apart, each with its first step's row."""
    store = virtual_store(Path(path))
    first = insitubatch.open_geometries(store, variables=[name])[name]
    steps = {f"step {number}": first.shift(number) for number in range(length)}
    manifest = insitubatch.split_by_chunk(first, fractions=(1.0, 0.0, 0.0))
    dataset = insitubatch.InSituDataset(store, manifest, geometries=steps, batch_size=batch_size)

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        dataset.set_epoch(number)
        for batch in dataset.train:
            yield torch.from_numpy(batch.stack([*steps])), torch.from_numpy(batch.sample_indices)

    return epoch


def epochs(data: Data, store: Any) -> dict[str, Epoch]:
    """Epochs over a store, by the chunks that are mixed."""
    geometries = insitubatch.open_geometries(store, variables=["x"])
    n_rows, rows_per_chunk = geometries["x"].n_samples, geometries["x"].sample_chunk_size
    alike = BUFFER // (data.x[0].nbytes * rows_per_chunk)
    blocks = sorted({min(n, -(-n_rows // rows_per_chunk)) for n in (BLOCK, max(1, alike))})
    return {f"insitubatch, mixing {n} chunks": loader(data, store, geometries, n) for n in blocks}


def loader(data: Data, store: Any, geometries: Any, n_chunks: int) -> Epoch:
    """Shuffled batches; the dataset stays."""
    manifest = insitubatch.split_by_chunk(geometries["x"], fractions=(1.0, 0.0, 0.0))
    dataset = insitubatch.InSituDataset(
        store, manifest, geometries=geometries, batch_size=BATCH_SIZE, block_chunks=n_chunks
    )
    labels = torch.from_numpy(data.labels)

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        dataset.set_epoch(number)
        for batch in dataset.train:
            yield torch.from_numpy(batch.arrays["x"]), labels[torch.from_numpy(batch.sample_indices)]

    return epoch

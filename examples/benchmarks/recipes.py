"""Ways to make shuffled batches: what people write themselves, ours, and the limits. Peers have a folder of theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from common import BATCH_SIZE, Epoch
from rows import Data
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule


class PlainDataset(Dataset[tuple[Tensor, Tensor]]):
    """What people write themselves: one ``array[i]`` a sample, the file opened by each worker on first use.

    It is the better kind: arrays are looked up once, and labels are kept in memory.
    """

    def __init__(self, data: Data) -> None:
        self.path, self.n_rows = data.path, len(data.x)
        self._file: h5py.File | None = None

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._file is None:
            self._file = h5py.File(self.path, "r")
            self._x = self._file["x"]
            self._labels = torch.from_numpy(self._file["labels"][:])
        return torch.from_numpy(self._x[index]), self._labels[index]


def plain(data: Data, n_workers: int, n_rows: int | None = None) -> Epoch:
    """The plain recipe. Its workers stay between epochs, so that their start is not timed.

    Args:
        data: what to read.
        n_workers: processes.
        n_rows: rows of an epoch, drawn from all of them; None are all.
    """
    dataset = PlainDataset(data)
    sampler = RandomSampler(dataset, num_samples=n_rows)
    loader = DataLoader(
        dataset, batch_size=BATCH_SIZE, sampler=sampler, num_workers=n_workers, persistent_workers=n_workers > 0
    )
    return lambda number: iter(loader)


def whole_batches(data: Data, n_rows: int | None, stack: ExitStack) -> Epoch:
    """The better advice: one ``array[sorted rows]`` a batch, and labels in memory.

    The batch stays sorted: an order within a batch would cost a copy, and training does not see it.
    """
    file = stack.enter_context(h5py.File(data.path, "r"))
    array, labels = file["x"], file["labels"][:]

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        order = np.random.default_rng(number).permutation(len(labels))[:n_rows]
        for start in range(0, len(order), BATCH_SIZE):
            rows = np.sort(order[start : start + BATCH_SIZE])
            yield torch.from_numpy(array[rows]), torch.from_numpy(labels[rows])

    return epoch


def affordable_rows(epoch: Epoch, n_rows: int, seconds: float) -> int | None:
    """Rows that come in so many seconds, in whole batches: at least two of them. None where all do."""
    n_read, began = 0, perf_counter()
    for _, labels in epoch(0):
        n_read += len(labels)
        if perf_counter() - began > seconds:
            break
    n_read = max(2 * BATCH_SIZE, n_read)
    return n_read if n_read < n_rows else None


def tensors(data: Data, n_workers: int) -> Epoch:
    """What people write whose rows fit into memory: torch's own dataset of tensors, shuffled."""
    loader = DataLoader(
        TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.labels)),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=n_workers,
        persistent_workers=n_workers > 0,
    )
    return lambda number: iter(loader)


class Ours:
    """The data module's training loader, whole: sampler, order, read-ahead, labels.

    Args:
        data: what to read.
        options: more arguments of the data module.
    """

    kind: type[LazyH5DataModule | RankCachedH5DataModule] = LazyH5DataModule

    def __init__(self, data: Data, **options: Any) -> None:
        self._data, self._options = data, options
        self._module: LazyH5DataModule | RankCachedH5DataModule | None = None

    def open(self) -> None:
        """Makes a data module, in the place of one that is there."""
        self.close()
        self._module = self.kind(
            self._data.path,
            x_key="x",
            y_key="labels",
            **{"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": 0, **self._options},
        )
        self._module.setup("fit")
        self._loader = self._module.train_dataloader()

    def epoch(self, number: int) -> Iterator[tuple[Any, Tensor]]:
        """The epoch of a number."""
        if self._module is None:
            self.open()
        self._loader.sampler.set_epoch(number)
        return iter(self._loader)

    def close(self) -> None:
        """Ends reading ahead and closes the files."""
        if self._module is not None:
            self._module.teardown("fit")
            self._module = None
            del self._loader


class Cached(Ours):
    """The same of the data module that holds all rows in memory."""

    kind = RankCachedH5DataModule


def shuffled_batches(data: Data) -> list[tuple[npt.NDArray[np.int64], Tensor]]:
    """Rows and labels of each batch, in an order drawn beforehand: the limits pay for reading alone."""
    order = np.random.default_rng(1).permutation(len(data.x))
    batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
    return [(rows, torch.from_numpy(data.labels[rows])) for rows in batches]


def bare_preadv(data: Data, stack: ExitStack, *, fresh: bool) -> Epoch:
    """One ``os.preadv`` a row in one thread, into new memory for each batch or into the same again."""
    with h5py.File(data.path, "r") as file:
        first = file["x"].id.get_offset()
    fd = os.open(data.path, os.O_RDONLY)
    stack.callback(os.close, fd)
    n_bytes = data.x[0].nbytes
    batches = [((first + rows * n_bytes).tolist(), labels) for rows, labels in shuffled_batches(data)]

    def memory() -> tuple[npt.NDArray[Any], list[memoryview]]:
        buffer = np.empty((BATCH_SIZE, *data.x.shape[1:]), data.x.dtype)
        view = buffer.data.cast("B")
        return buffer, [view[start : start + n_bytes] for start in range(0, len(view), n_bytes)]

    def epoch(number: int) -> Iterator[tuple[Any, Tensor]]:
        buffer, views = memory()
        for offsets, labels in batches:
            if fresh:
                buffer, views = memory()
            for view, offset in zip(views, offsets, strict=False):  # the last batch may be smaller
                os.preadv(fd, [view], offset)
            yield buffer[: len(offsets)], labels

    return epoch


def in_memory(data: Data) -> Epoch:
    """``index_select`` from the whole array in memory, into new memory for each batch."""
    x = torch.from_numpy(data.x)
    batches = [(torch.from_numpy(rows), labels) for rows, labels in shuffled_batches(data)]
    return lambda number: ((torch.index_select(x, 0, rows), labels) for rows, labels in batches)

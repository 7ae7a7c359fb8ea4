"""SPDL with h5py: the rows of a batch are read in the threads, or in the processes, of one of its pipelines.

A pipeline is built for each epoch, as its documentation does; the processes stay.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from common import BATCH_SIZE, Epoch
from recipes import PlainDataset
from rows import Data
from spdl.pipeline import PipelineBuilder
from torch.utils.data import Dataset, default_collate

N = 2  # threads, or processes
IS_ROW_BY_ROW = True
_dataset: Any = None  # of a process of the pool


def as_stored(data: Data, stack: ExitStack, n_rows: int | None) -> dict[str, Epoch]:
    """Epochs over the HDF5 file; n_rows: drawn from all of them for an epoch, None for all."""
    pool = processes(PlainDataset(data), stack)
    return {
        "SPDL with h5py, 2 processes": lambda number: epoch(PlainDataset(data), BATCH_SIZE, pool, n_rows),
        "SPDL with h5py, 2 threads": lambda number: epoch(PlainDataset(data), BATCH_SIZE, None, n_rows),
    }


def processes(dataset: Dataset[Any], stack: ExitStack) -> Executor:
    """Return processes that have the dataset, which is not open."""
    pool = ProcessPoolExecutor(N, multiprocessing.get_context("spawn"), initializer=_keep, initargs=(dataset,))
    return stack.enter_context(pool)


def epoch(dataset: Any, batch_size: int, executor: Executor | None, n_rows: int | None = None) -> Iterator[Any]:
    """Yield shuffled batches; without an executor, threads read them."""
    order = torch.randperm(len(dataset))[:n_rows].tolist()
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if executor is None:
        dataset[0]  # opens the file before two threads do
    read = partial(_collate, dataset) if executor is None else _read
    builder = PipelineBuilder().add_source(batches).pipe(read, concurrency=N, executor=executor).add_sink(2 * N)
    pipeline = builder.build(num_threads=N)
    with pipeline.auto_stop():
        yield from pipeline


def _keep(dataset: Any) -> None:
    global _dataset
    _dataset = dataset


def _read(rows: list[int]) -> Any:
    return _collate(_dataset, rows)


def _collate(dataset: Any, rows: list[int]) -> Any:
    return default_collate([dataset[row] for row in rows])

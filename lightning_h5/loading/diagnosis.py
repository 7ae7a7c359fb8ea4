"""What limits a loader, and loaders that give the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sized
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..datasets import h5_worker_init_fn
from ..errors import H5ValueError
from .factory import create_optimized_dataloader
from .loader import H5DataLoader

__all__ = [
    "LoaderReport",
    "diagnose_dataloader_speed",
    "ensure_deterministic_dataloader",
    "set_reproducible_training",
]


@dataclass(frozen=True)
class LoaderReport:
    """How fast batches come when nothing else is done.

    Attributes:
        n_batches: batches that were timed.
        n_rows: rows of these, as far as batches say.
        seconds: that they took.
        reading: seconds of reading and decoding alone, in this thread; None where the loader cannot tell.
        finishing: seconds of transforms and collating alone, likewise.
        advice: what limits, and what to try.
    """

    n_batches: int
    n_rows: int
    seconds: float
    reading: float | None
    finishing: float | None
    advice: str

    def __str__(self) -> str:
        each = self.seconds / max(1, self.n_batches)
        rate = f", {self.n_rows / self.seconds:,.0f} rows/s" if self.seconds else ""
        parts = ""
        if self.reading is not None and self.finishing is not None:
            per = 1000 / max(1, self.n_batches)
            parts = f"; alone, reading takes {self.reading * per:.2f} and transforms {self.finishing * per:.2f} ms"
        return f"{each * 1000:.2f} ms a batch{rate}{parts}. {self.advice}"


def diagnose_dataloader_speed(dataloader: DataLoader[Any], n_batches: int = 50, n_warm: int = 3) -> LoaderReport:
    """Times a loader whose workers have started and whose first batches are out, and says what limits it.

    Args:
        dataloader: any loader.
        n_batches: batches to time, as far as there are so many.
        n_warm: batches before these.

    Returns:
        Figures and advice; ``print`` it.

    Raises:
        H5ValueError: the loader has too few batches.
    """
    batches = iter(dataloader)
    for _ in islice(batches, n_warm):
        pass
    n_timed, n_rows, began = 0, 0, perf_counter()
    for batch in islice(batches, n_batches):
        n_timed, n_rows = n_timed + 1, n_rows + _rows_of(batch)
    seconds = perf_counter() - began
    del batches
    if not n_timed:
        raise H5ValueError(f"the loader has no batch after the first {n_warm}. Diagnose it on more rows.")
    if not isinstance(dataloader, H5DataLoader):
        return LoaderReport(n_timed, n_rows, seconds, None, None, _advice_for_others(dataloader, seconds / n_timed))
    dataloader.close()
    reading, finishing = _halves(dataloader, n_warm + n_timed, n_timed)
    return LoaderReport(n_timed, n_rows, seconds, reading, finishing, _advice(dataloader, reading, finishing))


def _halves(loader: H5DataLoader, n_done: int, n_batches: int) -> tuple[float, float]:
    """Seconds of reading so many batches in this thread, and of finishing them.

    They are those after the ones that were given out, as far as there are so many: these may be in memory now.
    """
    tokens = list(islice(loader.sampler.tokens(loader.sampler.epoch), n_done + n_batches))
    warm, *timed = [tokens[0], *tokens[-n_batches:]]
    loader.dataset.gather(warm.rows)  # files open
    reading = finishing = 0.0
    for token in timed:
        start = perf_counter()
        raw = loader.dataset.gather(token.rows)
        read = perf_counter()
        loader.collate_fn(loader.dataset.finish(raw, samples=token.samples, draws=token.draws))
        reading, finishing = reading + read - start, finishing + perf_counter() - read
    return reading, finishing


def _advice(loader: H5DataLoader, reading: float, finishing: float) -> str:
    if finishing > reading:
        if loader.num_workers == 0:
            return "Transforms limit it: move them into batch_transform or onto the GPU, or take num_workers > 0."
        return "Transforms limit it: move them into batch_transform or onto the GPU, or take more workers."
    if loader.dataset.cost.is_in_memory:
        return "All rows are in memory: copying them limits it."
    if loader.dataset.cost.rows_per_chunk:
        workers = "" if loader.num_workers == 0 else ", num_workers=0 (threads decode on all cores, without copies)"
        return (
            "Reading and decoding limit it: try shuffle=True (rows of a chunk come together), a larger cache_bytes"
            f"{workers}, or RankCachedH5DataModule where the rows fit into memory."
        )
    return "Reading limits it: storage, or mmap=True for contiguous arrays that nobody truncates."


def _advice_for_others(loader: DataLoader[Any], each: float) -> str:
    if loader.num_workers == 0:
        return "It reads in the training process: take num_workers > 0, or a dataset of this package."
    return f"With {loader.num_workers} workers a batch comes every {each * 1000:.1f} ms; profile the dataset itself."


def _rows_of(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, dict):
        return _rows_of(next(iter(batch.values()), None))
    if isinstance(batch, tuple | list) and batch and not isinstance(batch[0], str):
        return _rows_of(batch[0])
    return len(batch) if isinstance(batch, Sized) else 0


def set_reproducible_training(seed: int = 42) -> tuple[Callable[[int], object], torch.Generator]:
    """Seeds Python, NumPy and torch on all devices, and has cuDNN choose the same algorithms in every run.

    Args:
        seed: of all of them.

    Returns:
        A ``worker_init_fn`` and a ``generator``, for a plain ``DataLoader``.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # users' transforms draw from the global stream
    torch.manual_seed(seed)  # of all devices
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    return h5_worker_init_fn, torch.Generator().manual_seed(seed)


def ensure_deterministic_dataloader(dataset: Dataset[Any], batch_size: int, seed: int = 42) -> DataLoader[Any]:
    """A training loader that gives the same batches in every run; torch may then use deterministic algorithms alone.

    Args:
        dataset: what to read.
        batch_size: rows of a batch.
        seed: see ``set_reproducible_training``.
    """
    set_reproducible_training(seed)
    torch.use_deterministic_algorithms(True)
    return create_optimized_dataloader(dataset, batch_size, num_workers=0, seed=seed, drop_last=True)

"""What each worker process does before its first batch: it drops inherited handles and seeds its random streams."""

from __future__ import annotations

import gc
import os
import random

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..hdf5 import drop_inherited

__all__ = ["h5_worker_init_fn", "start_worker"]


def h5_worker_init_fn(worker_id: int) -> None:
    """Prepare a ``DataLoader`` worker: drop inherited file handles, and seed its own random streams.

    Pass it as ``DataLoader(worker_init_fn=h5_worker_init_fn)``. Handles are also guarded by process id, so
    omitting it is harmless for files. Seeds differ between workers, epochs and, if the environment has
    the rank (``RANK`` or ``LOCAL_RANK``), ranks: Lightning does not seed workers that have a function.

    Args:
        worker_id: the worker's number.
    """
    start_worker(int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))


def start_worker(rank: int) -> None:
    """Drop what belongs to the process that started this one, and seed Python, NumPy and torch.

    Args:
        rank: this process's rank; torch's seed for a worker is the same on every rank after ``seed_everything``.
    """
    drop_inherited()
    if get_worker_info() is not None:
        # Garbage collection writes to every object it visits, so forked workers would copy the pages of everything that
        # torch and Lightning import: 40 to 95 MiB per worker.
        gc.freeze()
    words = np.random.SeedSequence([torch.initial_seed() % 2**64, rank]).generate_state(4, np.uint64)
    torch.manual_seed(int(words[0]) % 2**63)
    np.random.seed(words[1:3].view(np.uint32))  # noqa: NPY002  # users' transforms draw from the global stream
    random.seed(int(words[3]))

"""What a DataLoader worker does first."""

from __future__ import annotations

import gc
import os
import random

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..files import drop_inherited

__all__ = ["h5_worker_init_fn", "start_worker"]


def h5_worker_init_fn(worker_id: int) -> None:
    """Prepares a ``DataLoader`` worker: no inherited file handles, and random streams of its own.

    Pass it as ``DataLoader(worker_init_fn=h5_worker_init_fn)``. Handles are also guarded by process id, so
    forgetting it is harmless for files. Seeds differ between workers, epochs and, where the environment tells
    the rank (``RANK`` or ``LOCAL_RANK``), ranks: with a function of one's own Lightning does not seed workers.

    Args:
        worker_id: the worker's number.
    """
    start_worker(int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))


def start_worker(rank: int) -> None:
    """Drops what belongs to the process that started this one, leaves its memory shared, and seeds.

    Args:
        rank: see ``seed_worker``.
    """
    drop_inherited()
    if get_worker_info() is not None:
        # A collection writes to each object that it looks at, and the system then copies its page: of what torch and
        # Lightning import, 40 to 95 MiB for each forked worker.
        gc.freeze()
    seed_worker(rank)


def seed_worker(rank: int) -> None:
    """Seeds Python, NumPy and torch in a worker from torch's own seed for it, mixed with the rank.

    Args:
        rank: this process's rank; torch's seed for a worker is the same on every rank after ``seed_everything``.
    """
    words = np.random.SeedSequence([torch.initial_seed() % 2**64, rank]).generate_state(4, np.uint64)
    torch.manual_seed(int(words[0]) % 2**63)
    np.random.seed(words[1:3].view(np.uint32))  # noqa: NPY002  # users' transforms draw from the global stream
    random.seed(int(words[3]))

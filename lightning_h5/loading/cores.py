"""How many worker processes pay on this machine, for this rank."""

from __future__ import annotations

import os

from ..cores import cores_of_a_rank

__all__ = ["get_optimal_num_workers"]

MOST_WORKERS = 16  # more wait for storage, or for each other


def get_optimal_num_workers(root: str | os.PathLike[str] = "/") -> int:
    """Worker processes that pay on this machine, where a dataset needs any.

    The loaders of this package decode in threads, and are fastest with none, unless a transform is slow.

    Args:
        root: where the system's files are; for tests.

    Returns:
        The cores that this process may run on (affinity, and the control group's quota), shared with the other ranks of
        the machine, less one for the training loop; 0 to 16.
    """
    return max(0, min(MOST_WORKERS, cores_of_a_rank(root) - 1))

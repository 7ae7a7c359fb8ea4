"""How many processes may work at a time on this machine, for this rank."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["get_optimal_num_workers"]

MOST_WORKERS = 16  # more wait for storage, or for each other


def get_optimal_num_workers(root: str | os.PathLike[str] = "/") -> int:
    """Worker processes that pay on this machine, where a dataset needs any.

    The loaders of this package decode in threads, and are fastest with none, unless a transform is slow.

    Args:
        root: where the system's files are; for tests.

    Returns:
        The cores that this process may run on (affinity, and the control group's quota), shared with the other ranks of
        the machine (``LOCAL_WORLD_SIZE``), less one for the training loop; 0 to 16.
    """
    n_cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    n_cores = min([n_cores, *_quotas(Path(root))])
    ours = math.ceil(n_cores) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(0, min(MOST_WORKERS, ours - 1))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that control groups grant, version 2 and 1, as seen from inside a container."""
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" is no number: no quota
    with suppress(OSError, ValueError):
        group = root / "sys/fs/cgroup/cpu"
        quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            yield int(quota) / int(period)

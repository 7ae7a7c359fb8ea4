"""Cores that this process may use: those it may run on, as far as control groups let it, shared with other ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["cores_of_a_rank", "is_forked", "local_ranks", "share_cores"]

_told = 1
_is_forked = False


def is_forked() -> bool:
    """Whether this process was forked by another that had this package; torch's threads may hang in it."""
    return _is_forked


def _note_fork() -> None:
    global _is_forked  # of the process
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def share_cores(n_ranks: int) -> None:
    """Says how many ranks of a run are on this machine, where ``LOCAL_WORLD_SIZE`` does not: torchrun alone sets it.

    Args:
        n_ranks: so many.
    """
    global _told  # of the process, as the environment's variable is
    _told = max(1, n_ranks)


def local_ranks() -> int:
    """Ranks of a run that are on this machine."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said) if said.isdigit() else _told)


def cores_of_a_rank(root: str | os.PathLike[str] = "/") -> int:
    """Cores that this process may run on (affinity, and the control group's quota), shared with the machine's ranks.

    Args:
        root: where the system's files are; for tests.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharers = 1 if _is_bound(n_cores) else local_ranks()
    return math.ceil(min(n_cores, _quota(os.fspath(root)))) // sharers


def _is_bound(n_cores: int) -> bool:
    """Whether SLURM gave this rank cores of its own: fewer than the job has on this machine."""
    of_job = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return "LOCAL_WORLD_SIZE" not in os.environ and of_job.isdigit() and n_cores < int(of_job)


@cache
def _quota(root: str) -> float:
    """Cores that control groups grant; infinity where they set no limit."""
    return min(_quotas(Path(root)), default=math.inf)


def _quotas(root: Path) -> Iterator[float]:
    """Those of version 2 and 1, as seen from inside a container."""
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" is no number: no quota
    with suppress(OSError, ValueError):
        group = root / "sys/fs/cgroup/cpu"
        quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            yield int(quota) / int(period)

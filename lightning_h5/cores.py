"""Cores that this process may use: by affinity and control group, shared with other ranks of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["cores_of_a_rank", "is_forked", "launched_local_ranks", "local_ranks", "share_cores"]

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables of torchrun and Ray, of Open MPI and of MPICH. SLURM's hold in a shell in which no task was started."""

_shared_ranks = 1
_is_forked = False


def is_forked() -> bool:
    """Return whether this process was forked after this package was imported; torch's threads can hang in it."""
    return _is_forked


def _note_fork() -> None:
    global _is_forked  # state of the process
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def share_cores(n_ranks: int) -> None:
    """Set how many ranks of a run are on this machine, for launchers that do not say so in the environment.

    Args:
        n_ranks: the number.
    """
    global _shared_ranks  # state of the process, like the environment variable
    _shared_ranks = max(1, n_ranks)


def launched_local_ranks() -> int | None:
    """Return the number of ranks on this machine that the launcher names in the environment; None if it names none."""
    values = (os.environ.get(name, "") for name in _LOCAL_RANKS)
    return next((max(1, int(number)) for number in values if number.isdigit()), None)


def local_ranks() -> int:
    """Return the number of ranks of a run on this machine."""
    return launched_local_ranks() or _shared_ranks


def cores_of_a_rank(root: str | os.PathLike[str] = "/") -> int:
    """Return the cores of this process (affinity, and the control group's quota), shared with the machine's ranks.

    Args:
        root: root of the system's files, for tests.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharers = 1 if _is_bound(n_cores) else local_ranks()
    return math.ceil(min(n_cores, _quota(os.fspath(root)))) // sharers


def _is_bound(n_cores: int) -> bool:
    """Return whether SLURM bound this rank to its own cores: fewer than the job has on this machine."""
    job_cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return "LOCAL_WORLD_SIZE" not in os.environ and job_cores.isdigit() and n_cores < int(job_cores)


@cache
def _quota(root: str) -> float:
    """Return the cores that control groups grant; infinity without a limit."""
    return min(_quotas(Path(root)), default=math.inf)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of control groups of version 2 and 1, as seen inside a container."""
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" means no quota
    with suppress(OSError, ValueError):
        group = root / "sys/fs/cgroup/cpu"
        quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            yield int(quota) / int(period)

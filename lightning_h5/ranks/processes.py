"""Processes of this machine: telling them apart, whether they live, ending one that hangs where no Python runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["are_near", "end_process", "is_alive", "this_process"]


def this_process() -> list[str]:
    """What tells this process from all others, on any machine; empty where the system does not say (not Linux)."""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [machine, str(Path("/proc/self/ns/pid").readlink()), str(os.getpid()), _stat(os.getpid())[1]]
    return []


def are_near(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two processes are of one machine, and see each other by their numbers.

    Args:
        one: what ``this_process`` gave there.
        other: likewise.
    """
    return bool(one) and list(one[:2]) == list(other[:2])


def end_process(process: Sequence[str]) -> None:
    """Kills a process, where it is one of this machine and of the same namespace, and still the same.

    Args:
        process: what ``this_process`` gave there.
    """
    if are_near(process, this_process()) and is_alive(process):
        with suppress(OSError):
            os.kill(int(process[2]), signal.SIGKILL)


def is_alive(process: Sequence[str]) -> bool:
    """Whether a process of this machine and namespace goes on.

    Args:
        process: what ``this_process`` gave there.
    """
    try:
        state, start = _stat(int(process[2]))
    except OSError:
        return False
    return start == process[3] and state != "Z"  # a zombie has ended, and its parent has not looked yet


def _stat(pid: int) -> tuple[str, str]:
    """A process's state, and when it began, in ticks since the machine did: numbers of processes are used again."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]

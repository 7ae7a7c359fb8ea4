"""Processes of one machine: which one this is, whether another still runs, and its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["are_near", "end_process", "is_alive", "this_process"]


def this_process() -> list[str]:
    """Return what identifies this process among all machines; empty if the system does not report it (not Linux)."""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [machine, str(Path("/proc/self/ns/pid").readlink()), str(os.getpid()), _stat(os.getpid())[1]]
    return []


def are_near(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two processes are of one machine, and see each other by their process ids.

    Args:
        one: what ``this_process`` returned in one process.
        other: what it returned in the other.
    """
    return bool(one) and list(one[:2]) == list(other[:2])


def end_process(process: Sequence[str]) -> None:
    """Kill a process, if it is one of this machine and of the same namespace, and still the same.

    Args:
        process: what ``this_process`` returned there.
    """
    if are_near(process, this_process()) and is_alive(process):
        with suppress(OSError):
            os.kill(int(process[2]), signal.SIGKILL)


def is_alive(process: Sequence[str]) -> bool:
    """Return whether a process of this machine and namespace is running.

    Args:
        process: what ``this_process`` returned there.
    """
    try:
        state, start = _stat(int(process[2]))
    except OSError:
        return False
    return start == process[3] and state != "Z"  # a zombie has ended, but was not waited for


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state, and when it began, in ticks since boot: process ids are used again."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]

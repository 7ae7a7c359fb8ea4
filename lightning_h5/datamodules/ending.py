"""Ending a process of this machine that hangs where no Python runs, inside a library or the kernel."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["end_process", "this_process"]


def this_process() -> list[str]:
    """What tells this process from all others, on any machine; empty where the system does not say (not Linux)."""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [machine, str(Path("/proc/self/ns/pid").readlink()), str(os.getpid()), _start(os.getpid())]
    return []


def end_process(process: Sequence[str]) -> None:
    """Kills a process, where it is one of this machine and of the same namespace, and still the same.

    Args:
        process: what ``this_process`` gave there.
    """
    mine = this_process()
    if not process or not mine or list(process[:2]) != mine[:2]:
        return
    with suppress(OSError):
        if _start(int(process[2])) == process[3]:
            os.kill(int(process[2]), signal.SIGKILL)


def _start(pid: int) -> str:
    """When a process began, in ticks since the machine did: numbers of processes are used again."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]

"""Processes of one machine: which one this is, whether another still runs; values that one computes for all."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..lazy_torch import torch
from .process_group import key_of, own_store, wait_until

__all__ = ["OncePerNode", "are_near", "end_process", "first_value", "is_alive", "this_process"]


def this_process() -> list[str]:
    """Return the identity of this process among all machines; empty if the system does not report it (not Linux)."""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [machine, str(Path("/proc/self/ns/pid").readlink()), str(os.getpid()), _stat(os.getpid())[1]]
    return []


def are_near(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two processes run on one machine, in the same namespace of process ids.

    Args:
        first: the result of ``this_process`` in one process.
        second: its result in the other.
    """
    return bool(first) and list(first[:2]) == list(second[:2])


def end_process(process: Sequence[str]) -> None:
    """Kill a process if it runs on this machine in the same namespace, and its id was not reused.

    Args:
        process: the result of ``this_process`` in that process.
    """
    if are_near(process, this_process()) and is_alive(process):
        with suppress(OSError):
            os.kill(int(process[2]), signal.SIGKILL)


def is_alive(process: Sequence[str]) -> bool:
    """Return whether a process of this machine and namespace is running.

    Args:
        process: the result of ``this_process`` in that process.
    """
    try:
        state, start = _stat(int(process[2]))
    except OSError:
        return False
    return start == process[3] and state != "Z"  # a zombie has ended, but was not waited for


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state and start time in ticks since boot, which tells reused process ids apart."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


NODE_PATIENCE = 120.0  # seconds without progress, after which each process of a node computes the value itself
NODE_PROGRESS = 1.0  # seconds between reports of progress


def first_value(name: str, value: int) -> int:
    """Return the value of the first rank that calls this; ``value`` if there is only one rank.

    Args:
        name: name of the value. The second call with a name is about another value.
        value: the value of this rank.
    """
    if (store := own_store()) is None:
        return value
    try:
        return int(store.compare_set(key_of(store, f"first/{name}"), "", str(value)))
    except torch.distributed.DistError:  # reported when all ranks agree
        return value


class OncePerNode:
    """A value that one process of each node computes; any process may request it, and no process has to.

    The value passes through the key-value store by which ranks found each other. Without a store, or if the system does
    not identify processes, each process computes the value itself.

    Args:
        name: name of the value. The second object with a name is about another value.

    Attributes:
        is_first: whether this process computes the value.
        has_others: whether other processes may wait for it.
        first: the process that computes it (see ``this_process``).
    """

    def __init__(self, name: str) -> None:
        self.first = me = this_process()
        self._store: Any = own_store() if me else None
        self._reported = time.monotonic()
        if self._store is not None:
            self._key = f"{key_of(self._store, name)}/{me[0]}/{me[1]}"
            try:
                self.first = json.loads(self._store.compare_set(f"{self._key}/first", "", json.dumps(me)))
            except torch.distributed.DistError:  # reported when all ranks agree
                self._store = None
        self.is_first = self.first == me
        self.has_others = self.is_first and self._store is not None

    def progress(self) -> None:
        """Report that the value is being computed: the time that others wait for it begins again."""
        if self.has_others and time.monotonic() > self._reported + NODE_PROGRESS:
            self._reported = time.monotonic()
            with suppress(torch.distributed.DistError):  # no other process is left
                self._store.add(f"{self._key}/progress", 1)

    def publish(self, value: Any) -> None:
        """Share the value; None makes the others compute it themselves.

        Args:
            value: a JSON value.
        """
        with suppress(torch.distributed.DistError):  # no other process is left
            self._store.set(f"{self._key}/answer", json.dumps(value))

    def value(self) -> Any:
        """Return the value; None if the first process could not compute it, ended, or makes no progress for long."""
        answer = f"{self._key}/answer"
        try:
            wait_until(
                lambda: self._store.check([answer]) or not is_alive(self.first),
                NODE_PATIENCE,
                lambda: int(self._store.add(f"{self._key}/progress", 0)),
            )
            return json.loads(self._store.get(answer)) if self._store.check([answer]) else None
        except torch.distributed.DistError:
            return None

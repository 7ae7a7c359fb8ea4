"""Values that one rank of all, or one process of each node, computes for the others."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import torch.distributed

from .process_group import key_of, own_store, wait_until
from .processes import is_alive, this_process

__all__ = ["OncePerNode", "first_value"]

NODE_PATIENCE = 120.0  # seconds without progress, after which each process of a node computes the value itself
NODE_PROGRESS = 1.0  # seconds between reports of progress


def first_value(name: str, value: int) -> int:
    """Return the value of the first rank that calls this; its own if there is one rank.

    Args:
        name: of the value. The second call with a name is about another value.
        value: this rank's.
    """
    if (store := own_store()) is None:
        return value
    try:
        return int(store.compare_set(key_of(store, f"first/{name}"), "", str(value)))
    except torch.distributed.DistError:  # reported when all ranks agree
        return value


class OncePerNode:
    """A value that one process of each node computes; any process may ask for it, none has to.

    It goes through the key-value store by which ranks found each other. If there is none, or the system does not report
    which processes are of one machine, each process computes the value itself.

    Args:
        name: of the value. The second object with a name is about another value.

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
            value: as JSON has it.
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

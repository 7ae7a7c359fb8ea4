"""Compute a value once per node and share it with the other local processes."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import suppress
from itertools import count
from typing import Any

import torch.distributed

from .agreement import is_alive, own_store, pauses, this_process

__all__ = ["OncePerNode", "first_value"]

PATIENCE = 120.0  # seconds without progress; then each process computes the value itself
PROGRESS = 1.0  # seconds between reports of progress

_numbers: defaultdict[str, count[int]] = defaultdict(count)  # how often this process asked for each


def first_value(name: str, value: int) -> int:
    """Return the value of the first rank that calls this; its own if there is one rank.

    Args:
        name: of the value. The second call with a name is about another value.
        value: this rank's.
    """
    if (store := own_store()) is None:
        return value
    try:
        return int(store.compare_set(f"lightning_h5/first/{name}/{next(_numbers[name])}", "", str(value)))
    except torch.distributed.DistError:  # reported when all ranks agree
        return value


class OncePerNode:
    """A value that one process of each node computes; any process may ask for it, none has to.

    It goes through the key-value store by which ranks found each other. If there is none, or the system does not say
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
            self._key = f"lightning_h5/{name}/{next(_numbers[name])}/{me[0]}/{me[1]}"
            try:
                self.first = json.loads(self._store.compare_set(f"{self._key}/first", "", json.dumps(me)))
            except torch.distributed.DistError:  # reported when all ranks agree
                self._store = None
        self.is_first = self.first == me
        self.has_others = self.is_first and self._store is not None

    def progress(self) -> None:
        """Report that the value is being computed: the time that others wait for it begins again."""
        if self.has_others and time.monotonic() > self._reported + PROGRESS:
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
        end, seen, pause = time.monotonic() + PATIENCE, 0, pauses()
        try:
            while not (is_there := self._store.check([f"{self._key}/answer"])) and time.monotonic() < end:
                if not is_alive(self.first):
                    break
                if (progress := self._store.add(f"{self._key}/progress", 0)) != seen:
                    end, seen = time.monotonic() + PATIENCE, progress
                time.sleep(next(pause))
            return json.loads(self._store.get(f"{self._key}/answer")) if is_there else None
        except torch.distributed.DistError:
            return None

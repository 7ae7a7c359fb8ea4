"""What is worked out once on each machine: the first process that asks does it, and tells the others."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import suppress
from itertools import count
from typing import Any

import torch.distributed

from .agreement import is_alive, own_store, pauses, this_process

__all__ = ["Question", "first_told"]

PATIENCE = 120.0  # seconds without progress; who has waited so long does it alone
PROGRESS = 1.0  # seconds between saying so

_numbers: defaultdict[str, count[int]] = defaultdict(count)  # how often this process asked each


def first_told(text: str, found: int) -> int:
    """What the first of all ranks found; where there is one alone, that is this one.

    Args:
        text: what was looked for. Asked for the second time it is another question.
        found: what this rank found.
    """
    if (store := own_store()) is None:
        return found
    try:
        return int(store.compare_set(f"lightning_h5/first/{text}/{next(_numbers[text])}", "", str(found)))
    except torch.distributed.DistError:  # said by who needs it
        return found


class Question:
    """A question that processes of a machine may all ask; nobody has to.

    It goes through the key-value store by which ranks found each other. Where there is none, or the system does not say
    which processes are of one machine, each is the first and only one.

    Args:
        text: what is asked; who asks the same gets the same answer. Asked for the second time it is another question.

    Attributes:
        is_first: whether this process has to answer.
        has_others: whether others may wait for its answer.
        first: the process that has to (see ``this_process``).
    """

    def __init__(self, text: str) -> None:
        self.first = me = this_process()
        self._store: Any = own_store() if me else None
        self._said = time.monotonic()
        if self._store is not None:
            self._key = f"lightning_h5/{text}/{next(_numbers[text])}/{me[0]}/{me[1]}"
            try:
                self.first = json.loads(self._store.compare_set(f"{self._key}/first", "", json.dumps(me)))
            except torch.distributed.DistError:  # said by who needs it
                self._store = None
        self.is_first = self.first == me
        self.has_others = self.is_first and self._store is not None

    def progress(self) -> None:
        """Says that the answer is being worked out: those who wait have patience anew."""
        if self.has_others and time.monotonic() > self._said + PROGRESS:
            self._said = time.monotonic()
            with suppress(torch.distributed.DistError):  # nobody is left to hear it
                self._store.add(f"{self._key}/progress", 1)

    def tell(self, answer: Any) -> None:
        """Tells the others; None has each of them work it out.

        Args:
            answer: as JSON has it.
        """
        with suppress(torch.distributed.DistError):  # nobody is left to hear it
            self._store.set(f"{self._key}/answer", json.dumps(answer))

    def answer(self) -> Any:
        """What the first one told; None where it could not, has ended, or makes no progress for too long."""
        end, seen, pause = time.monotonic() + PATIENCE, 0, pauses()
        try:
            while not (is_told := self._store.check([f"{self._key}/answer"])) and time.monotonic() < end:
                if not is_alive(self.first):
                    break
                if (progress := self._store.add(f"{self._key}/progress", 0)) != seen:
                    end, seen = time.monotonic() + PATIENCE, progress
                time.sleep(next(pause))
            return json.loads(self._store.get(f"{self._key}/answer")) if is_told else None
        except torch.distributed.DistError:
            return None

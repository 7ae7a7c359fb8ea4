"""Pages of text that ranks post in the store of their process group, and read without waiting for each other."""

from __future__ import annotations

import os
from contextlib import suppress

from ..lazy_torch import torch
from .process_group import key_of, own_store

__all__ = ["Bulletin"]


class Bulletin:
    """Pages of text of each rank, and a number that all of them add to.

    All ranks make it at the same point, after an ``exchange``. A single rank, and a child that a rank forked, has no
    others. If the store has ended with the process that holds it, the pages that were read last are returned.

    Args:
        name: a name, the same on all ranks.

    Attributes:
        rank: the rank of this process, from 0.
    """

    def __init__(self, name: str) -> None:
        self.rank, self._world_size, self._pid = 0, 1, os.getpid()
        self._store = own_store()
        self._total = 0
        self._pages: dict[tuple[int, int], str] = {}  # of other ranks, by rank and number, as they were read last
        if self._store is not None:
            self.rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self._name = key_of(self._store, name)

    @property
    def _is_shared(self) -> bool:
        return self._store is not None and self._pid == os.getpid()

    def post(self, text: str, page: int = 0) -> None:
        """Replace a page of this rank; pages are posted in the order of their numbers, the first time."""
        if self._is_shared:
            with suppress(torch.distributed.DistError):
                self._store.set(f"{self._name}/{self.rank}/{page}", text)

    def add(self, number: int) -> int:
        """Add to the number; return the sum over all ranks."""
        self._total += number
        if self._is_shared:
            with suppress(torch.distributed.DistError):
                return int(self._store.add(f"{self._name}/total", number))
        return self._total

    def others(self) -> list[str]:
        """Return the pages that other ranks have posted so far."""
        if not self._is_shared:
            return []
        with suppress(torch.distributed.DistError):
            for rank in range(self._world_size):
                page = 0
                while rank != self.rank and self._store.check([key := f"{self._name}/{rank}/{page}"]):
                    self._pages[rank, page] = self._store.get(key).decode()
                    page += 1
        return [*self._pages.values()]

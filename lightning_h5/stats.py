"""Counters of what the loaders do: added where it happens, in any thread or worker, summed where it is shown."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch.utils.data import get_worker_info

__all__ = ["COUNTED", "Counters"]

COUNTED = (
    "rows",
    "batches",
    "bytes_read",
    "bytes_decoded",
    "chunks_decoded",
    "slabs_used",
    "slabs_loaded",
    "cache_hits",
    "cache_misses",
    "wait_seconds",
)
"""Rows and batches handed out; bytes taken from files, bytes of these once decoded, and the chunks that were; slabs
that batches were gathered from, and those that had to be loaded for it; rows that were found among those used last, and
those that were not; the seconds that ``next()`` took in the main
process."""


class Counters:
    """A block of numbers in shared memory, with a row for the main process and one for each worker.

    Every process writes to its own row alone, so that nothing is lost and no lock is shared between
    processes; inside a process a lock keeps threads apart.

    Args:
        more: names of what is counted besides.
    """

    def __init__(self, more: tuple[str, ...] = ()) -> None:
        self.names = (*COUNTED, *more)
        self._places = {name: at for at, name in enumerate(self.names)}
        self._block = torch.zeros((1, len(self.names)), dtype=torch.float64)
        self._lock = threading.Lock()
        self._own: memoryview[float] | None = None
        self._pid = os.getpid()

    def share(self, n_workers: int) -> None:
        """Makes room for workers that are about to start; what was counted is kept."""
        with self._lock:
            if len(self._block) <= n_workers:
                block = torch.zeros((n_workers + 1, len(self.names)), dtype=torch.float64)
                block[: len(self._block)] = self._block
                self._block = block.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                self._own = None

    def add(self, **amounts: float) -> None:
        """Adds to counters by name, about a microsecond."""
        with self._lock_of_here():
            own = self._own_row()
            for name, amount in amounts.items():
                own[self._places[name]] += amount

    def add_batch(self, rows: int, waited: float) -> None:
        """Counts a batch that was handed out; half of what ``add`` would cost.

        Args:
            rows: of the batch.
            waited: seconds that it took to get it.
        """
        with self._lock_of_here():
            own = self._own_row()
            own[self._places["rows"]] += rows
            own[self._places["batches"]] += 1
            own[self._places["wait_seconds"]] += waited

    def _lock_of_here(self) -> threading.Lock:
        if self._pid != os.getpid():  # a forked worker inherits our row, and a lock that a thread of ours may hold
            self._lock, self._own, self._pid = threading.Lock(), None, os.getpid()
        return self._lock

    def _own_row(self) -> memoryview[float]:
        if self._own is None:
            worker = get_worker_info()
            row = 0 if worker is None else worker.id + 1
            # A worker that nobody made room for counts for itself alone.
            own: Any = self._block[min(row, len(self._block) - 1)].numpy()
            self._own = memoryview(own)  # NumPy takes four times as long to add a single number
        return self._own

    def total(self) -> dict[str, float]:
        """Sums over this process and its workers, since the start."""
        return dict(zip(self.names, self._block.sum(dim=0).tolist(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # Torch moves what goes to another process to shared memory; done here, nobody writes to where it was.
        with self._lock:
            self._block.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            self._own = None
        return {"_block": self._block, "names": self.names, "_places": self._places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._block, self.names, self._places = state["_block"], state["names"], state["_places"]
        self._lock = threading.Lock()
        self._own = None
        self._pid = os.getpid()

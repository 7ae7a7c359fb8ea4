"""Counters of loaders: increased in any thread or worker, and summed when they are read."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["COUNTED", "FORKED_WORKERS", "Counters", "RequestTimes", "WaitTimes", "worker_count", "worker_number"]

COUNTED = (
    "rows",
    "batches",
    "bytes_read",
    "cached_bytes",
    "fetched_bytes",
    "bytes_decoded",
    "chunks_decoded",
    "blocks_used",
    "blocks_loaded",
    "cache_hits",
    "cache_misses",
    "wait_seconds",
    "start_seconds",
    "read_seconds",
    "decode_seconds",
    "library_seconds",
    "finish_seconds",
    "origin_requests",
    "origin_bytes",
    "origin_seconds",
    "mirror_bytes",
    "decoded_mirror_bytes",
    "missed_bytes",
    "direct_rows",
    "direct_batches",
    "left_out",
    "kept_bytes",
)
"""Rows and batches delivered by loaders of this package; bytes read from files, the part of these bytes in the page
cache (estimated from a sample), bytes requested of the system ahead, decoded bytes, and decoded chunks; blocks that
batches were copied from, and blocks that had to be loaded; hits and misses of the cache of rows.

Seconds: the time of ``next()`` in the main process, and its part in the first batch of each epoch; and, summed over all
threads and workers, the time of reading files, decoding, the HDF5 library, and transforms with collating.

For staged files: requests to their origin, fetched bytes, and the seconds that readers waited for the origin, which are
a part of ``read_seconds``; bytes that readers got from a mirror, and bytes that the mirror did not have.
``decoded_mirror_bytes`` were read from mirrors of decoded chunks, instead of being decoded.

``direct_rows`` and ``direct_batches`` were read by indexing a dataset, as torch's own ``DataLoader`` does.

``left_out`` counts samples that were left out of batches, since they could not be read or transformed.

``kept_bytes`` is not summed over time: bytes of rows that workers keep in memory now."""


ROWS_AT, BATCHES_AT, WAIT_AT = (COUNTED.index(name) for name in ("rows", "batches", "wait_seconds"))
"""Places of the counters of a delivered batch."""

FORKED_WORKERS = 16
"""Workers of torch's own loaders that a dataset can count: their number is unknown before they are forked."""

MAX_DELIVERED = 256  # batches that are counted together

MAX_STEPS = 1 << 32  # per epoch; a float64 holds two million such epochs exactly


def worker_number() -> int | None:
    """Return the number of this DataLoader worker, or None in other processes. Does not import torch."""
    info = _worker_info()
    return None if info is None else int(info.id)


def worker_count() -> int | None:
    """Return the number of workers of this DataLoader worker's loader, or None in other processes."""
    info = _worker_info()
    return None if info is None else int(info.num_workers)


def _worker_info() -> Any:
    data: Any = sys.modules.get("torch.utils.data")
    return None if data is None else data.get_worker_info()


_n_forks = 0


def _note_fork() -> None:
    global _n_forks  # state of the process: asking the system for its number would take longer than counting
    _n_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class RequestTimes:
    """Classes of the time that a request took, for a histogram of constant size.

    They are a quarter of an octave wide: quantiles are accurate to 19 %. Times below ``MIN_SECONDS`` are in the first.
    """

    MIN_SECONDS = 1e-4
    PER_OCTAVE = 4
    N_CLASSES = 80  # up to a minute and a half

    @classmethod
    def class_of(cls, seconds: float) -> int:
        """Return the class that a time belongs to."""
        at = 0 if seconds < cls.MIN_SECONDS else int(cls.PER_OCTAVE * math.log2(seconds / cls.MIN_SECONDS)) + 1
        return min(at, cls.N_CLASSES - 1)

    @classmethod
    def quantile(cls, counts: Sequence[float], share: float) -> float:
        """Return the seconds that this share of times did not exceed; 0 without any.

        Args:
            counts: times of each class, from any number of histograms.
            share: 0 to 1.
        """
        target, sum_ = share * sum(counts), 0.0
        for at, count in enumerate(counts):
            sum_ += count
            if count and sum_ >= target:
                return cls.MIN_SECONDS * 2 ** (at / cls.PER_OCTAVE)
        return 0.0


class WaitTimes(RequestTimes):
    """A histogram of the time that each batch was waited for. For one thread.

    Classes are a tenth of an octave wide: quantiles are accurate to 7 %, at a microsecond a batch and a constant size.

    Attributes:
        last: seconds of the last batch.
        counts: batches of each class.
    """

    MIN_SECONDS = 1e-5
    PER_OCTAVE = 10
    N_CLASSES = 320  # up to 12 hours

    def __init__(self) -> None:
        self.last = 0.0
        self.counts = [0] * self.N_CLASSES

    def add(self, seconds: float) -> None:
        """Count a batch."""
        self.last = seconds
        self.counts[0 if seconds < self.MIN_SECONDS else self.class_of(seconds)] += 1


class Counters:
    """Numbers in shared memory, with a row for the main process and one for each worker.

    Every process writes only to its own row, so that no lock is shared between processes; a lock inside each process
    protects it from threads.

    Args:
        more: names of additional counters.
        n_workers: workers that may be forked before ``share`` is called. Further workers share a row, in which a worker
            may overwrite counts of another worker.
    """

    def __init__(self, more: tuple[str, ...] = (), n_workers: int = 0) -> None:
        self.names = (*COUNTED, *more)
        self._places = {name: at for at, name in enumerate(self.names)}
        # After the names come the times of requests by class; the last column is the batch in progress.
        shape = n_workers + 1, len(self.names) + RequestTimes.N_CLASSES + 1
        memory = mmap(-1, 8 * shape[0] * shape[1]) if n_workers else bytearray(8 * shape[1])
        self._block: npt.NDArray[np.float64] = np.frombuffer(memory).reshape(shape)
        self._shared: torch.Tensor | None = None  # the same memory, if shared with other processes
        self._lock = threading.Lock()
        self._own: memoryview[float] | None = None
        self._delivered: deque[tuple[int, float]] = deque()  # rows and seconds of batches that are not summed yet
        self._n_forks = _n_forks

    def share(self, n_workers: int) -> None:
        """Add rows for workers that are about to start; counts are kept."""
        with self._lock:
            if len(self._block) <= n_workers:
                self._share(n_workers + 1)
            self._block[1:, self._places["kept_bytes"]] = 0  # new workers keep no rows yet
            self._block[1:, -1] = 0

    def add(self, **amounts: float) -> None:
        """Add to counters by name; takes about a microsecond."""
        with self._process_lock():
            row = self._own_row()
            for name, amount in amounts.items():
                row[self._places[name]] += amount

    def add_batch(self, rows: int, waited: float) -> None:
        """Count a delivered batch, in a fifth of the time of ``add``: they are summed when someone looks.

        Args:
            rows: rows of the batch.
            waited: seconds of waiting for it.
        """
        if self._n_forks != _n_forks:
            self._process_lock()
        self._delivered.append((rows, waited))
        if len(self._delivered) >= MAX_DELIVERED:
            self._sum_delivered()

    def _sum_delivered(self) -> None:
        """Add batches that were delivered since the last look."""
        with self._process_lock():
            row = self._own_row()
            while self._delivered:
                rows, waited = self._delivered.popleft()
                row[ROWS_AT] += rows
                row[BATCHES_AT] += 1
                row[WAIT_AT] += waited

    def add_request(self, n_bytes: int, seconds: float) -> None:
        """Count a request to the origin of a file that is staged.

        Args:
            n_bytes: bytes that it fetched.
            seconds: that it took.
        """
        with self._process_lock():
            row = self._own_row()
            row[self._places["origin_requests"]] += 1
            row[self._places["origin_bytes"]] += n_bytes
            row[len(self.names) + RequestTimes.class_of(seconds)] += 1

    def set_kept(self, n_bytes: int) -> None:
        """Set the bytes of rows that this worker keeps now."""
        with self._process_lock():
            self._own_row()[self._places["kept_bytes"]] = n_bytes

    def begin(self, epoch: int, step: int) -> None:
        """Note which batch this worker is about to read, for the error if it crashes."""
        with self._process_lock():
            self._own_row()[-1] = epoch * MAX_STEPS + step + 1

    def begun_by(self, worker: int) -> tuple[int, int] | None:
        """Return epoch and step of the last batch that a worker began; None before the first.

        Args:
            worker: its number.
        """
        at = int(self._block[worker + 1, -1])
        return divmod(at - 1, MAX_STEPS) if at else None

    def _process_lock(self) -> threading.Lock:
        if self._n_forks != _n_forks:  # a forked worker inherits the row, and possibly a locked lock
            self._lock, self._own, self._n_forks = threading.Lock(), None, _n_forks
            self._delivered.clear()  # by the parent
        return self._lock

    def _own_row(self) -> memoryview[float]:
        if self._own is None:
            worker = worker_number()
            number = 0 if worker is None else worker + 1
            # Workers beyond the last row share it.
            values: Any = self._block[min(number, len(self._block) - 1)]
            self._own = memoryview(values)  # NumPy takes four times as long to add a single number
        return self._own

    def own(self, *names: str) -> tuple[float, ...]:
        """Return counters of this process, by name."""
        self._sum_delivered()
        with self._process_lock():
            row = self._own_row()
            return tuple(row[self._places[name]] for name in names)

    def total(self) -> dict[str, float]:
        """Return the sums over this process and its workers, since the start."""
        self._sum_delivered()
        return dict(zip(self.names, self._block[:, : len(self.names)].sum(axis=0).tolist(), strict=True))

    def request_times(self) -> npt.NDArray[np.float64]:
        """Return the number of requests in each class of ``RequestTimes``, summed as ``total`` does."""
        times: npt.NDArray[np.float64] = self._block[:, len(self.names) : -1].sum(axis=0)
        return times

    def _share(self, n_rows: int) -> None:
        """Move the numbers to shared memory of a number of rows. The lock is held."""
        import torch

        block: Any = torch.zeros((n_rows, self._block.shape[1]), dtype=torch.float64)
        block[: len(self._block)] = torch.from_numpy(self._block)
        self._shared = block.share_memory_()
        self._block, self._own = self._shared.numpy(), None

    def __getstate__(self) -> dict[str, Any]:
        self._sum_delivered()
        # Torch would move the tensor to shared memory itself, while other threads still write to the old memory.
        with self._lock:
            if self._shared is None:
                self._share(len(self._block))
        return {"_shared": self._shared, "names": self.names, "_places": self._places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensor: torch.Tensor = state["_shared"].share_memory_()  # a copy by plain pickle has its own memory
        self._shared, self._block = tensor, tensor.numpy()
        self.names, self._places = state["names"], state["_places"]
        self._lock = threading.Lock()
        self._own = None
        self._delivered = deque()
        self._n_forks = _n_forks

"""How long reads wait for a disk or a server: while they wait, more threads than there are cores can read."""

from __future__ import annotations

from math import ceil
from time import perf_counter

from ..counters import Counters

__all__ = ["ReadPace"]

COPY_BYTES = 2e9  # per second: a slow machine copies that from its page cache
CALL_SECONDS = 3e-6  # of each read besides
LEAST_SECONDS = 5e-3  # of work that show a pace
INTERVAL = 20e-3  # seconds between two looks
SLOW = 1.25  # threads per core from which on reads are slow
MOST = 64.0  # threads per core that a look finds, at most
KEPT = 0.9  # share of these at the next look, at least: slow reads end in bursts, and between them all looks fast
MORE = 2  # threads for each that would keep a core busy if all reads took equally long, and none waited for another

_COUNTED = ("bytes_read", "cached_bytes", "chunks_decoded", "read_seconds", "decode_seconds", "fetched_bytes")


class ReadPace:
    """The pace of reads by this process, which changes when files leave the page cache, or enter it."""

    def __init__(self) -> None:
        self._threads_per_core: float | None = None  # that keep it busy; 1 if reads only copy, None before the first
        self._last: tuple[float, ...] = (0.0,) * len(_COUNTED)
        self._fetches = False  # whether bytes were requested ahead, so that reads look as if they only copied
        self._next_look = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether reads wait for more than copying."""
        return self._fetches or (self._threads_per_core or 1.0) > SLOW

    @property
    def may_be_slow(self) -> bool:
        """Whether reads wait, or nothing was read yet."""
        return self._threads_per_core is None or self.is_slow

    def threads(self, n_cores: int, max_threads: int) -> int:
        """Return how many threads should read.

        Args:
            n_cores: cores for them.
            max_threads: maximum, unless there are more cores.
        """
        if not self.is_slow:
            return n_cores
        n_busy = n_cores * (self._threads_per_core or 1.0)
        return max(n_cores, min(max_threads, ceil(MORE * n_busy)))

    def look(self, counters: Counters) -> None:
        """Adjust the pace from time to time, by the reads since the last call.

        Args:
            counters: of all reads.
        """
        now = perf_counter()
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL
        totals = counters.own(*_COUNTED)
        n_bytes, n_cached, n_calls, reading, decoding, n_fetched = (
            new - old for new, old in zip(totals, self._last, strict=True)
        )
        if reading + decoding < LEAST_SECONDS:
            return
        self._last = totals
        # Reads from the page cache wait only for a core, and more threads would wait longer.
        waiting = reading * max(0.0, 1 - n_cached / max(1.0, n_bytes))
        copying = min(waiting, (n_bytes - n_cached) / COPY_BYTES + n_calls * CALL_SECONDS)
        busy = reading - waiting + copying + max(0.0, decoding)
        threads_per_core = min(MOST, (reading + max(0.0, decoding)) / max(busy, 1e-9))
        self._threads_per_core = max(threads_per_core, KEPT * (self._threads_per_core or 0.0))
        self._fetches = n_fetched > 0

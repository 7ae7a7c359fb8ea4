"""Sources of mirrors that count what is read of them, and can fail."""

import os
import threading
import time

import numpy as np
from guards import HANG

from lightning_h5.staging import Mirror, MirrorFolder

GRANULE = 16 << 10


class CountingOrigin:
    """Bytes in memory. ``delay`` is what a request takes; ``fail`` is called with its range before it is answered.

    The first requests are answered once ``n_together`` are in flight.
    """

    longest = 64
    tries_again = False

    def __init__(self, content, delay=0.0, fail=None, n_together=0):
        self.content, self.delay, self.fail = memoryview(content), delay, fail
        self.version = "1"
        self.requests = []
        self.most_at_once = self._at_once = 0
        self._lock, self._n_together, self._are_together = threading.Lock(), n_together, threading.Event()

    def head(self):
        return len(self.content), self.version

    def read(self, start, stop):
        with self._lock:
            self.requests.append((start, stop))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            if self._at_once >= self._n_together:
                self._are_together.set()
        try:
            assert self._are_together.wait(HANG), f"no {self._n_together} requests were in flight"
            time.sleep(self.delay)
            if self.fail is not None:
                self.fail(start, stop)
            return memoryview(bytes(self.content[start:stop]))
        finally:
            with self._lock:
                self._at_once -= 1

    def close(self):
        pass

    @property
    def n_bytes(self):
        return sum(stop - start for start, stop in self.requests)


def content_of(n_bytes, seed=0):
    return np.random.default_rng(seed).integers(1, 256, n_bytes, dtype=np.uint8).tobytes()  # a hole reads as zeros


def open_folder(path, limit=None):
    os.makedirs(path, exist_ok=True)
    return MirrorFolder(str(path), limit)


def read(mirror, pieces, around=None):
    """Read pieces as readers do: from the mirror, and what it lacks, or lost meanwhile, from the source."""
    offsets, sizes = (np.array(each, dtype=np.int64) for each in zip(*pieces, strict=True))
    staged = mirror.stage(offsets, sizes, around)
    here = staged.is_there.tolist()
    found = [os.pread(mirror.fd, n, at) if is_there else None for (at, n), is_there in zip(pieces, here, strict=True)]
    kept = mirror.is_unchanged(staged)
    for number in np.flatnonzero(~kept).tolist():
        memory = bytearray(pieces[number][1])
        n = mirror.read_origin(memoryview(memory), [(0, len(memory), pieces[number][0])])
        found[number] = bytes(memory[:n])
    return found, kept


def expected(content, pieces):
    return [bytes(content[at : at + n]) for at, n in pieces]


def open_mirror(path, content, limit=None, key="key", **options):
    origin = CountingOrigin(content, **options)
    return Mirror(origin, open_folder(path, limit), key), origin

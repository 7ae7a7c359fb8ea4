"""Forks of this process wait until no other thread imports a module or calls the HDF5 library.

A forked child inherits all locks, but of the threads only the one that forked. A lock that another thread held stays
locked for good. Readers import decoders when they first need them, and Python has a lock for each module that is being
imported: a worker that was forked meanwhile, and needs the same decoder, would wait for that lock forever.
"""

from __future__ import annotations

import _imp
import importlib
import os
import threading
from time import monotonic, sleep

import h5py._objects

phil = h5py._objects.phil

PATIENCE = 5.0
"""Seconds that a fork waits for imports: a program may run as long as the import of its own module."""

PAUSE = 0.001  # seconds between looks for imports

_importlib = importlib.import_module("importlib._bootstrap")


def _another_thread_imports() -> bool:
    """Return whether another thread imports a module; the caller holds the import lock."""
    own = threading.get_ident()
    locks = [reference() for reference in list(getattr(_importlib, "_module_locks", {}).values())]
    return any(lock is not None and getattr(lock, "owner", own) != own for lock in locks)


def _before_fork() -> None:
    """Take the lock of h5py and that of imports, in the order in which threads take them, when no import is halfway."""
    end = monotonic() + PATIENCE
    while True:
        phil.acquire()
        _imp.acquire_lock()
        if not _another_thread_imports() or monotonic() > end:
            return
        _after_fork()  # an import may need either lock
        sleep(PAUSE)


def _after_fork() -> None:
    _imp.release_lock()
    phil.release()


# h5py's own hooks are registered earlier, so they run after this one, when the lock is held already.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

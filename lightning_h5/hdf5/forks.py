"""Forks of this process wait until no other thread imports a module, compiles a loop or calls the HDF5 library.

A forked child inherits all locks, but of the threads only the one that forked. A lock that another thread held stays
locked for good. Readers import decoders when they first need them, and Python has a lock for each module that is being
imported: a worker that was forked meanwhile, and needs the same decoder, would wait for that lock forever. Numba has
a lock for all that it compiles.
"""

from __future__ import annotations

import _imp
import importlib
import os
import sys
import threading
from time import monotonic, sleep
from typing import Any

import h5py._objects

phil = h5py._objects.phil

PATIENCE = 5.0
"""Seconds that a fork waits for imports and compilations: a program may run as long as the import of its own module."""

PAUSE = 0.001  # seconds between looks for them

_importlib = importlib.import_module("importlib._bootstrap")


def _another_thread_imports() -> bool:
    """Return whether another thread imports a module; the caller holds the import lock."""
    own = threading.get_ident()
    locks = [reference() for reference in list(getattr(_importlib, "_module_locks", {}).values())]
    return any(lock is not None and getattr(lock, "owner", own) != own for lock in locks)


_compiler_locks: list[Any] = []  # Numba's lock, while a fork holds it


def _take_compiler_lock() -> bool:
    """Take Numba's lock; return False if another thread has it."""
    lock = getattr(getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None), "_lock", None)
    if lock is None:  # Numba was not imported, or has another lock by now
        return True
    if not lock.acquire(blocking=False):
        return False
    _compiler_locks.append(lock)
    return True


def _before_fork() -> None:
    """Take the locks of h5py, of imports and of Numba, when no import and no compilation is halfway."""
    end = monotonic() + PATIENCE
    while True:
        phil.acquire()
        _imp.acquire_lock()
        if (_take_compiler_lock() and not _another_thread_imports()) or monotonic() > end:
            return
        _after_fork()  # an import or a compilation may need any of them
        sleep(PAUSE)


def _after_fork() -> None:
    if _compiler_locks:
        _compiler_locks.pop().release()
    _imp.release_lock()
    phil.release()


# h5py's own hooks are registered earlier, so they run after this one, when the lock is held already.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

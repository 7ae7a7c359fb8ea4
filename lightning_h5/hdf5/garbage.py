"""Collections of garbage that never wait for the HDF5 library.

An object of h5py's takes h5py's lock when it is deleted, in whatever thread the collector finds it. While the library
reads an object of a store, one thread holds that lock and waits for others, which fetch the bytes. If one of these ran
the collector then, both would wait forever. So a collection takes the lock before it starts. Where another thread has
the lock, or the library itself called Python, the collection finds nothing, and a later one does its work. Objects that
a program froze (``gc.freeze``) are collected with the others after that.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .forks import phil

__all__ = ["guard_collections", "inside_library"]

_inside = -1  # the thread in which the library called Python; at most one, as it holds the lock
_has_lock = False  # whether the present collection holds the lock; collections run one at a time


def _around_collection(phase: str, info: dict[str, Any]) -> None:
    """Take the lock before a collection and release it after, or keep all objects from the collection."""
    global _has_lock  # state of the process, like the collector's own
    if phase == "start":
        _has_lock = threading.get_ident() != _inside and phil.acquire(blocking=False)
        if not _has_lock:
            gc.freeze()
    elif _has_lock:
        phil.release()
    else:
        gc.unfreeze()


def guard_collections() -> None:
    """Have each collection in this process from now on take the library's lock, or find nothing."""
    if _around_collection not in gc.callbacks:
        gc.callbacks.append(_around_collection)


@contextmanager
def inside_library() -> Iterator[None]:
    """Run a block that the library called, in a thread that holds its lock: nothing is collected in this thread."""
    global _inside  # state of the process
    _inside = threading.get_ident()
    try:
        yield
    finally:
        _inside = -1

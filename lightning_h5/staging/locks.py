"""Locks on ranges of a file, between processes; the kernel releases the locks of a process that dies.

These are Linux's locks of open file descriptions. Unlike the older kind of POSIX, they exclude each other also if one
process opens a file twice, and closing another descriptor of the file does not drop them.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable

try:
    import fcntl

    SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)
except ImportError:
    SET_LOCK = None

__all__ = ["has_range_locks", "lock_within", "try_lock", "unlock"]

FIRST_PAUSE, LONGEST_PAUSE = 0.0001, 0.005  # seconds between two tries


def has_range_locks() -> bool:
    """Return whether the system has such locks."""
    return SET_LOCK is not None


def try_lock(fd: int, start: int = 0, n: int = 0, *, shared: bool = False) -> bool:
    """Lock a range of a file unless another open file description has a part of it locked.

    Args:
        fd: the file, open for writing; for a shared lock reading is enough.
        start: first byte of the range, which may lie beyond the file's end.
        n: bytes of the range; 0 is all that follows.
        shared: allow other shared locks.

    Returns:
        Whether it was locked.

    Raises:
        OSError: the file system has no locks.
    """
    assert SET_LOCK is not None, "a system with locks"
    try:
        fcntl.fcntl(fd, SET_LOCK, _flock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, n))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_within(
    fd: int, seconds: float, start: int = 0, n: int = 0, is_needless: Callable[[], bool] | None = None
) -> bool:
    """Lock a range; wait for processes that have it locked, but not longer: they may have been stopped.

    Args:
        fd: see ``try_lock``.
        seconds: time to wait.
        start: see ``try_lock``.
        n: see ``try_lock``.
        is_needless: returns whether to give up; called after each try.

    Raises:
        OSError: see ``try_lock``.
    """
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while not try_lock(fd, start, n):
        if time.monotonic() >= end or (is_needless is not None and is_needless()):
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def unlock(fd: int, start: int = 0, n: int = 0) -> None:
    """Release a lock of ``try_lock``."""
    assert SET_LOCK is not None, "a system with locks"
    fcntl.fcntl(fd, SET_LOCK, _flock(fcntl.F_UNLCK, start, n))


def _flock(kind: int, start: int, n: int) -> bytes:
    """Return a ``struct flock``: kind, origin of ``start``, range, and a process id that has to be 0."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, n, 0)

"""Where the bytes of a mirror come from, and the threads that read there: many requests at a time, as each waits.

An origin is a file of a slow file system, or an object of a store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..threads import HelperThreads, Task
from .network import IN_FLIGHT, ask_store
from .object_status import ObjectStatus

__all__ = ["IN_FLIGHT", "ObjectOrigin", "Origin", "PosixOrigin", "fetch_later", "fetch_now"]


class Origin(Protocol):
    """One version of a file or an object, open for reading. Threads may read at the same time.

    Attributes:
        longest: granules that are read together at most.
        tries_again: whether a failed read was tried again before it raised, so that the next one would fail, too.
    """

    longest: int
    tries_again: bool

    def head(self) -> tuple[int, str]:
        """Return its present size, and a text that is another one once its content was changed.

        Raises:
            OSError: it is not reachable.
        """
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of bytes; fewer at its end.

        Raises:
            OSError: it is not reachable.
        """
        ...

    def close(self) -> None:
        """Close it."""
        ...


class PosixOrigin:
    """A file that is read by position.

    Args:
        fd: its descriptor, which this object closes.
    """

    longest = 64  # a MiB
    tries_again = False

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def head(self) -> tuple[int, str]:
        """See ``Origin.head``."""
        status = os.fstat(self.fd)
        return status.st_size, str(status.st_mtime_ns)

    def read(self, start: int, stop: int) -> memoryview:
        """See ``Origin.read``."""
        memory, n_read = memoryview(bytearray(stop - start)), 0
        while n_read < len(memory):  # the kernel may return less
            n = os.preadv(self.fd, [memory[n_read:]], start + n_read)
            if n == 0:
                break
            n_read += n
        return memory[:n_read]

    def close(self) -> None:
        """See ``Origin.close``."""
        with suppress(OSError):  # a file system that is gone can raise, but the descriptor is closed
            os.close(self.fd)


class ObjectOrigin:
    """A state of an object of a store, read through the process that talks to stores (see ``network``).

    Args:
        url: the object's URL.
        status: the state.
        options: credentials and settings of the store.
    """

    longest = 256  # 4 MiB: the cost of a request does not depend on its size
    tries_again = True

    def __init__(self, url: str, status: ObjectStatus, options: Mapping[str, Any] | None) -> None:
        self._asked = url, status, options

    def head(self) -> tuple[int, str]:
        """See ``Origin.head``. Sends no request: each read is of this state."""
        status = self._asked[1]
        return status.st_size, f"{status.etag} {status.st_mtime_ns}"

    def read(self, start: int, stop: int) -> memoryview:
        """See ``Origin.read``."""
        url, status, options = self._asked
        stop = min(stop, status.st_size)
        data: memoryview = ask_store("read", url, start, stop, status, options) if stop > start else memoryview(b"")
        return data

    def close(self) -> None:
        """See ``Origin.close``."""


_threads = HelperThreads("lightning_h5-fetch", IN_FLIGHT, idle_seconds=5.0)


def fetch_later(tasks: Sequence[Task]) -> None:
    """Run tasks in other threads, and do not wait for them; in this one if the system allows no other."""
    for task in tasks:
        if not _threads.put(task):
            task()


def _last_task() -> None:
    """Be the last task."""


def fetch_now(tasks: Sequence[Task]) -> None:
    """Run tasks, the last one in this thread unless that is the main one, which Ctrl-C interrupts; and wait for all."""
    if not tasks:
        return
    if threading.current_thread() is threading.main_thread():
        tasks = [*tasks, _last_task]
    tasks_done, is_done = threading.Semaphore(0), len(tasks) - 1

    def counted(task: Task) -> Task:
        def run() -> None:
            try:
                task()
            finally:
                tasks_done.release()

        return run

    fetch_later([counted(task) for task in tasks[:-1]])
    tasks[-1]()
    for _ in range(is_done):
        tasks_done.acquire()

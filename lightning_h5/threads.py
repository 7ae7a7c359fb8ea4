"""Threads that end before Python does.

A daemon thread that still runs while the interpreter is finalized is killed as soon as it asks for the interpreter's
lock. Before Python 3.14 this unwinds the thread's stack, and compiled code in it (torch, Numba, object stores) aborts
the process. So all threads of this package are ended, and waited for, before that.
"""

from __future__ import annotations

import atexit
import resource
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from .errors import H5Error

__all__ = ["EndingThread", "naming_task_limits", "start_helpers", "task_limits"]

END_SECONDS = 5.0
"""How long Python's exit waits for all threads: one may wait for a server or a file system that does not answer."""


class EndingThread(threading.Thread):
    """A daemon thread that is ended when Python exits, however it comes to that.

    Args:
        target: what it runs.
        args: arguments of the target.
        name: for stacks and debuggers.
        end: makes the target return soon; called in another thread, also if the target has returned. It waits for
            nothing.
    """

    def __init__(
        self, target: Callable[..., Any], args: tuple[Any, ...] = (), *, name: str, end: Callable[[], object]
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self.end = end

    def start(self) -> None:
        """Start the thread.

        Raises:
            H5Error: the limit of threads and processes is reached.
        """
        # Exit functions run in reverse order. Registered now, this one precedes those of all modules that threads use.
        if not _exits:
            _exits.append(atexit.register(_end_all))
        with naming_task_limits(self.name):
            super().start()


@contextmanager
def naming_task_limits(name: str) -> Iterator[None]:
    """Raise an ``H5Error`` with the limits if a thread cannot be started inside the block.

    Args:
        name: of the thread.
    """
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise H5Error(
            f"the thread {name!r} cannot be started: the limit of threads and processes is reached ({task_limits()}). "
            "Use fewer workers, or raise the limit."
        ) from error


def start_helpers(threads: Iterable[EndingThread]) -> list[EndingThread]:
    """Start threads that others can do without; return those that the system allows."""
    started = []
    with suppress(H5Error):
        for thread in threads:
            thread.start()
            started.append(thread)
    return started


def task_limits(root: str = "/") -> str:
    """Return the limits of threads and processes, which Linux counts together, as text for a message.

    Args:
        root: root of the system's files, for tests.
    """
    of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [f"`ulimit -u` is {of_user:,}" if of_user >= 0 else "`ulimit -u` is unlimited"]
    return " and ".join([*limits, *(f"pids.max of the container is {limit:,}" for limit in _container_limits(root))])


def _container_limits(root: str) -> Iterator[int]:
    """Yield the lowest limit of the control groups of this process."""
    groups, found = ["sys/fs/cgroup/pids", "sys/fs/cgroup"], []
    with suppress(OSError, ValueError):
        own = Path(root, "proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
        groups += [f"sys/fs/cgroup/{group}" for group in (own, *map(str, Path(own).parents))]
    for group in groups:
        with suppress(OSError, ValueError):
            found.append(int(Path(root, group, "pids.max").read_text()))  # "max" is no limit
    if found:
        yield min(found)


_exits: list[Any] = []


def _end_all() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, EndingThread)]
    for thread in threads:
        thread.end()
    deadline = monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))

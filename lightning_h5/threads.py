"""Threads that end before Python does.

A daemon thread that still runs while the interpreter is finalized is killed as soon as it asks for the interpreter's
lock. Before Python 3.14 this unwinds the thread's stack, and compiled code in it (torch, Numba, object stores) aborts
the process. So all threads of this package are ended, and waited for, before that.
"""

from __future__ import annotations

import atexit
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from .errors import H5Error

__all__ = ["EndingThread", "HelperThreads", "Task", "naming_task_limits", "start_helpers", "task_limits"]

Task: TypeAlias = Callable[[], None]
"""Raises nothing: errors are passed to the thread that waits for the result."""

END_SECONDS = 5.0
"""How long Python's exit waits for all threads: one may wait for a server or a file system that does not answer."""


class EndingThread(threading.Thread):
    """A daemon thread that is ended when Python exits, for any reason.

    Args:
        target: the function that it runs.
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
    """Start optional threads; return the threads that the system allows."""
    helpers = []
    with suppress(H5Error):
        for thread in threads:
            thread.start()
            helpers.append(thread)
    return helpers


_all_helpers: weakref.WeakSet[HelperThreads] = weakref.WeakSet()


def _start_helpers_afresh() -> None:
    for helpers in list(_all_helpers):
        helpers.start_process()


# Not when a child first needs them: two of its threads could do so at the same time, and lose tasks of each other.
os.register_at_fork(after_in_child=_start_helpers_afresh)


class HelperThreads:
    """Threads that start when there are tasks, one per task up to a limit, and end after being idle for a while.

    An idle thread waits for a condition. ``SimpleQueue.get`` is not used. With a timeout, it waits forever in a thread
    that was woken for a task, if another thread took the task and the first one resumes only after its timeout.

    Args:
        name: of each thread, for stacks and debuggers.
        most: threads at a time.
        idle_seconds: after which a thread without a task ends.

    Attributes:
        n_unfinished: tasks that run, or that no thread has begun.
    """

    def __init__(self, name: str, most: int, idle_seconds: float) -> None:
        self.name, self.most, self.idle_seconds = name, most, idle_seconds
        self.start_process()
        _all_helpers.add(self)

    def start_process(self) -> None:
        """Start afresh, in a new process: threads do not survive a fork."""
        self._todo: deque[Task] = deque()
        self._n_threads = self.n_unfinished = 0
        self._is_over = False
        lock = threading.Lock()
        self._has_task, self._has_ended = threading.Condition(lock), threading.Condition(lock)

    def put(self, task: Task) -> bool:
        """Have a thread run a task.

        Args:
            task: the function to run.

        Returns:
            False if the system allows no thread at all: the task will not be run.
        """
        with self._has_task:
            self._todo.append(task)
            self.n_unfinished += 1
            if self._n_threads >= min(self.most, self.n_unfinished):
                self._has_task.notify()
                return True
            self._n_threads += 1
        if start_helpers([EndingThread(self._run, name=self.name, end=self._stop)]):
            return True
        with self._has_task:
            self._n_threads -= 1
            if self._n_threads or task not in self._todo:
                return True
            self._todo.remove(task)
            self.n_unfinished -= 1
        return False

    def end(self) -> None:
        """End all threads, and wait for the tasks that they run; no thread begins another one."""
        self._stop()
        with self._has_ended:
            while self._n_threads:
                self._has_ended.wait()
            self._is_over = False

    def _stop(self) -> None:
        with self._has_task:
            self._is_over = True
            self.n_unfinished -= len(self._todo)
            self._todo.clear()
            self._has_task.notify_all()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # a thread that waits must not keep a task's memory alive
            with self._has_task:
                self.n_unfinished -= 1

    def _next(self) -> Task | None:
        """Return a task; None if there was none for a while."""
        with self._has_task:
            while not self._todo:
                if self._is_over or not (self._has_task.wait(self.idle_seconds) or self._todo):
                    self._n_threads -= 1
                    self._has_ended.notify_all()
                    return None
            return self._todo.popleft()


def task_limits(root: str = "/") -> str:
    """Return the limits of threads and processes, which Linux counts together, as text for a message.

    Args:
        root: root of the system's files, for tests.
    """
    user_limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [f"`ulimit -u` is {user_limit:,}" if user_limit >= 0 else "`ulimit -u` is unlimited"]
    return " and ".join([*limits, *(f"pids.max of the container is {limit:,}" for limit in _container_limits(root))])


def _container_limits(root: str) -> Iterator[int]:
    """Yield the lowest limit of the control groups of this process."""
    groups, limits = ["sys/fs/cgroup/pids", "sys/fs/cgroup"], []
    with suppress(OSError, ValueError):
        own_group = Path(root, "proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
        groups += [f"sys/fs/cgroup/{group}" for group in (own_group, *map(str, Path(own_group).parents))]
    for group in groups:
        with suppress(OSError, ValueError):
            limits.append(int(Path(root, group, "pids.max").read_text()))  # "max" is no limit
    if limits:
        yield min(limits)


_exits: list[Any] = []


def _end_all() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, EndingThread)]
    for thread in threads:
        thread.end()
    deadline = monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))

"""A queue of tasks, run by a team of threads and by threads that wait for results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

# NumPy's `unique` imports it on the first call. A process forked while another thread runs that import would wait for
# the import lock forever.
import numpy.ma  # noqa: F401

from ..cores import cores_of_a_rank
from ..counters import worker_count, worker_number
from ..threads import EndingThread, start_helpers
from .pace import ReadPace

__all__ = ["TaskQueue", "usable_cores"]

MAX_THREADS = 16  # more would decode faster than any GPU needs, and wait for the GIL
MAX_WAITING = 64  # threads of a rank while reads wait for a server
IDLE_SECONDS = 0.2  # until such a thread without a task ends

Task: TypeAlias = Callable[[], None]
"""Raises nothing: errors are passed to the reader of the result."""


class TaskQueue:
    """A first-in-first-out queue of tasks. Belongs to one process: threads do not survive a fork.

    Attributes:
        pace: of the reads of the tasks.
    """

    def __init__(self) -> None:
        self.pace = ReadPace()
        self._todo: SimpleQueue[Task | None] = SimpleQueue()
        self._team = 0
        self._waiting: list[EndingThread] = []
        self._over = threading.Event()

    def put(self, task: Task) -> None:
        """Add a task."""
        self._todo.put(task)

    def help(self) -> bool:
        """Run one task; return False if there is none."""
        task, n_ends = None, 0
        with suppress(Empty):
            while (task := self._todo.get_nowait()) is None:
                n_ends += 1  # end marks for the threads of the team; tasks may follow
        for _ in range(n_ends):
            self._todo.put(None)
        if task is not None:
            task()
        return task is not None

    def start_team(self, n_threads: int) -> list[EndingThread]:
        """Start threads that run tasks until ``end_team``; fewer, or none, if the system allows no more."""
        # The threads must not reference this object's owner, or it would never be collected.
        team = [
            EndingThread(_do_tasks, (self._todo,), name="lightning_h5-decode", end=partial(self._todo.put, None))
            for _ in range(n_threads)
        ]
        team = start_helpers(team)
        self._team += len(team)
        return team

    def end_team(self, n_threads: int) -> None:
        """End this number of threads after the tasks that are queued now."""
        self._team -= n_threads
        for _ in range(n_threads):
            self._todo.put(None)

    def clear(self) -> None:
        """Remove all tasks, when no read waits for them any more."""
        n_ends = 0  # end marks that threads of an ended team have not received yet
        with suppress(Empty):
            while True:
                n_ends += self._todo.get_nowait() is None
        for _ in range(n_ends):
            self._todo.put(None)

    @contextmanager
    def helpers(self) -> Iterator[None]:
        """Run threads during one read, as far as there are tasks for them, and the team has fewer than are useful."""
        if self.pace.is_slow:
            self._start_waiting()
            yield
            return
        n_threads = 0 if self._team else min(self._todo.qsize(), usable_cores()) - 1
        if n_threads <= 0:
            yield
            return
        over = threading.Event()
        team = start_helpers(
            EndingThread(self._help_until, (over,), name="lightning_h5-help", end=over.set) for _ in range(n_threads)
        )
        try:
            yield
        finally:
            for thread in team:
                thread.join()

    def _start_waiting(self) -> None:
        """Start threads that run tasks while reads wait: more than there are cores. They stay until tasks run out."""
        self._waiting = [thread for thread in self._waiting if thread.is_alive()]
        most = MAX_WAITING // (worker_count() or 1)
        wanted = min(self._todo.qsize(), self.pace.threads(usable_cores(), most) - 1 - self._team - len(self._waiting))
        if wanted > 0:
            over = self._over = threading.Event() if self._over.is_set() else self._over
            self._waiting += start_helpers(
                EndingThread(
                    _do_tasks_until, (self._todo, over), name="lightning_h5-wait", end=partial(_end, self._todo, over)
                )
                for _ in range(wanted)
            )

    def end_waiting(self) -> None:
        """End these threads; wait for the tasks that they run."""
        self._over.set()
        for thread in self._waiting:
            while thread.is_alive():
                self.put(_wake)  # another thread may have taken the last one
                thread.join(IDLE_SECONDS)
        self._waiting = []

    def _help_until(self, over: threading.Event) -> None:
        while not over.is_set() and self.help():
            pass


def _do_tasks(todo: SimpleQueue[Task | None]) -> None:
    while (task := todo.get()) is not None:
        task()
        del task  # a waiting thread must not keep a task's memory alive


def _end(todo: SimpleQueue[Task | None], over: threading.Event) -> None:
    """End a thread of ``_do_tasks_until``."""
    over.set()
    # A thread that is woken for a task which another one takes, and resumes after its time is over, waits without end:
    # Python's timed `get` then waits for a negative time.
    todo.put(_wake)


def _wake() -> None:
    """Wake a thread."""


def _do_tasks_until(todo: SimpleQueue[Task | None], over: threading.Event) -> None:
    while not over.is_set():
        try:
            task = todo.get(timeout=IDLE_SECONDS)
        except Empty:
            return
        if task is None:  # the mark for a thread of the team
            todo.put(None)
            return
        task()
        del task


def usable_cores() -> int:
    """Cores that this process may decode on: its own, shared with other ranks of the machine; 1 in a worker process."""
    if worker_number() is not None:
        return 1
    return max(1, min(MAX_THREADS, cores_of_a_rank()))
